"""A trainer with servers that write increments, and all that it has learnt."""

import dataclasses

import numpy as np
import torch
import torch.distributed as dist

from persia_torchrec import (
    Adagrad,
    AdmitBloom,
    AdmitFrequency,
    DynamicDim,
    TableSettings,
    load_checkpoint,
    remote_sharders,
    save_checkpoint,
    save_delta,
)
from persia_torchrec.embedding.optim import Adam
from persia_torchrec.sharding.planned import dense_parameters
from persia_torchrec.store.memory import MISSING
from tests.support.consistency import ids_oldest_first
from tests.support.models import Tower, tables_of
from tests.support.processes import wait_until
from tests.support.remote_job import kjt_of, shard
from tests.support.servers import ids_of

NUM_IDS, DIM, NEVER_S = 60, 4, 1000.0
SETTINGS = {
    "plain": TableSettings(optimizer=Adam(0.1)),
    "counted": TableSettings(admission=AdmitFrequency(3), keeps_metadata=True),
    "filtered": TableSettings(admission=AdmitBloom(2, 1000)),
    "adaptive": TableSettings(
        optimizer=Adam(0.1), admission=AdmitFrequency(3), shared_rows=7
    ),
    "dynamic": TableSettings(
        optimizer=Adam(0.1), dynamic=DynamicDim(2, period=3), keeps_metadata=True
    ),
}


class Trainer:
    """A model on servers, and what a user does with it."""

    def __init__(self, client, folder, tables, num_ids=NUM_IDS):
        self.run, self.client, self._tables = str(folder / "run"), client, tables
        self.sharders = remote_sharders(client, Adagrad(0.1), tables=tables)
        torch.manual_seed(3)
        model = Tower(tables_of(tables, num_ids, DIM, feature="f"))
        self.model = shard(model, *self.sharders)
        over = self.model.module.over.parameters()
        self.optimizer = torch.optim.Adam(over, lr=0.05)
        self.state = {"model": self.model, "optimizer": self.optimizer, "step": 0}

    def batch(self):
        rng = np.random.default_rng([self.state["step"], dist.get_rank()])
        return kjt_of({"f": rng.integers(0, NUM_IDS, (6, 2)).tolist()})

    def train(self, num):
        losses = []
        for _ in range(num):
            loss = self.model(self.batch()).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.state["step"] += 1
            losses.append(loss.item())
        return losses

    def save(self, **settings):
        both = self.client, self.sharders
        return save_checkpoint(self.run, self.state, *both, **settings)

    def save_delta(self, **settings):
        both = self.client, self.sharders
        return save_delta(self.run, self.state, *both, **settings)

    def load(self, path=None):
        return load_checkpoint(path or self.run, self.state, self.client)

    def dense(self):
        """Return the weights, and the state of their optimizer, as bytes."""
        arrays = dense_parameters(self.model.module)
        for state in self.optimizer.state_dict()["state"].values():
            arrays += state.values()
        return b"".join(array.detach().numpy().tobytes() for array in arrays)

    def sweep(self):
        """Wait until the servers have dropped all rows that have expired."""
        self.sharders.flush()
        dist.barrier()
        ids = ids_of(*range(NUM_IDS))
        for name, settings in self._tables.items():
            if settings.expiry is not None:
                oldest = self.client.step(name) - settings.expiry.steps_to_live

                def is_over(name=name, oldest=oldest):
                    found = self.client.metadata(name, ids)
                    return (found.last_step[found.frequency > 0] >= oldest).all()

                wait_until(is_over, "expired rows leave")

    def close(self):
        self.sharders.close()


class Job(Trainer):
    """A trainer with servers of its own, which write increments."""

    def __init__(
        self,
        servers,
        folder,
        num_servers,
        *,
        names=SETTINGS,
        num_ids=NUM_IDS,
        tables=SETTINGS,
        **settings,
    ):
        settings = {"increments_interval_s": NEVER_S, **settings}
        settings.setdefault("increments_dir", str(folder / "increments"))
        self.servers = servers.start(num_servers, **settings)
        client = servers.client(self.servers)
        super().__init__(client, folder, {n: tables[n] for n in names}, num_ids)
        if settings["increments_dir"] is not None:
            wait_until(
                lambda: all(
                    server.server.shard.checkpoints._increments.is_writing
                    for server in self.servers
                ),
                "all servers write a log",
            )

    @property
    def stores(self):
        return [server.server.shard.store for server in self.servers]

    def snapshot(self, *, with_time=True):
        """Return all that the job has learnt, and perhaps at which second."""
        self.sharders.flush()
        rows, waiting, steps = [], [], set()
        for store in self.stores:
            for number, state in enumerate(store.states):
                name = state.spec.name
                steps.add((name, state.num_updates))
                rows += [
                    (name, *row) for row in rows_of(store, number, with_time=with_time)
                ]
                if state.spec.admission.has_ids_as_keys:
                    keys, values, _ = state.sightings()
                    pairs = zip(keys.tolist(), values.tolist(), strict=True)
                    waiting += [(name, *pair) for pair in pairs]
        learnt = self.dense(), self.state["step"]
        return sorted(rows), sorted(waiting), sorted(steps), *learnt

    def order(self):
        """Return what depends on the number of servers."""
        found = []
        for store in self.stores:
            found.append(ids_oldest_first(store))
            for state in store.states:
                found += [state.thresholds.tolist(), state.used_words().tolist()]
                if state.spec.admission.has_ids_as_keys:
                    keys, _, uses = state.sightings()
                    found[-1] = sorted(zip(uses.tolist(), keys.tolist(), strict=True))
        return found


def rows_of(store, table, *, with_time):
    """Return each row of a table: its id, all of its floats, and its metadata."""
    ids = ids_of(*range(NUM_IDS))
    state, slots = store.states[table], store.find(table, ids)
    ids, slots = ids[slots != MISSING], slots[slots != MISSING]
    columns = [[row.tobytes() for row in state.read_slots(slots)]]
    if state.has_metadata:
        metadata = dataclasses.astuple(store.metadata(table, ids))
        columns += [column.tolist() for column in metadata[: 3 + with_time]]
    return zip(ids.tolist(), *columns, strict=True)
