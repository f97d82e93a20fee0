"""Many kills of embedding servers in the middle of training."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from persia_torchrec import (
    AdmitFrequency,
    DynamicDim,
    RemoteEmbeddingBagCollectionSharder,
    TableSettings,
    load_checkpoint,
    save_checkpoint,
    save_delta,
)
from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.errors import CheckpointError
from persia_torchrec.server.cluster import EmbeddingCluster
from persia_torchrec.table import TableSpec
from tests.support.reference import ReferenceStore
from tests.support.remote_job import shard
from tests.support.restarted_servers import train_through_kills
from tests.support.servers import DEADLINE_S, ids_of
from tests.support.two_trainers import NUM_IDS, TABLES, Model, batches, loss_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

NUM_SERVERS = 2
CAPACITY = 100  # rows of a server: fewer than are admitted
MANY = 2000  # ids
NUM_UNDISTURBED = 100  # steps before the first kill, and after the last
NEAR = {"rtol": 1e-4, "atol": 1e-4}
RARE = TableSpec(
    name="rare",
    dim=4,
    optimizer=Adagrad(0.1),
    admission=AdmitFrequency(3),
    keeps_metadata=True,
    seed=5,
)
KINDS = {
    "plain": TableSettings(),
    "adaptive": TableSettings(
        admission=AdmitFrequency(300), shared_rows=7, keeps_metadata=True
    ),
    "dynamic": TableSettings(dynamic=DynamicDim(2, period=7), keeps_metadata=True),
}


def test_no_update_is_lost_or_applied_twice_in_many_kills(servers, kills):
    train_through_kills(servers, num_kills=kills(40))


class Killing(threading.Thread):
    """Kills one server after the other, when the one before answers again."""

    def __init__(self, cluster, draw, num):
        super().__init__(name="kills", daemon=True)
        self._cluster, self._draw, self._num = cluster, draw, num
        self._client = connect(cluster)
        self.num_killed = 0

    def run(self):
        with closing(self._client):
            while self.num_killed < self._num:
                threading.Event().wait(self._draw.uniform(0.0, 0.3))
                self._draw.choice(self._cluster.processes).kill()
                self.num_killed += 1
                self._client.counters()  # when all answer


def connect(cluster):
    given = {"timeout_s": DEADLINE_S, "recovery_s": cluster.recovery_s}
    return EmbeddingClient.connect(cluster.addresses, **given)


@contextmanager
def killed_cluster(draw, num_kills, **settings) -> Iterator[tuple]:
    """Give a client of servers, and steps until all kills are over, and some more."""
    settings = {"num_servers": NUM_SERVERS, "restarts": True, **settings}
    with EmbeddingCluster.local(**settings) as cluster, closing(connect(cluster)) as c:
        killing = Killing(cluster, draw, num_kills)

        def steps():
            yield from range(NUM_UNDISTURBED)
            killing.start()
            while killing.is_alive():
                yield
            yield from range(NUM_UNDISTURBED)

        yield c, steps()
        assert killing.num_killed == num_kills


def draw_ids(number):
    """Return ids of a batch, popular ones more often, and how often each occurs."""
    draw = np.random.default_rng(number)
    ids = (MANY ** draw.random(60)).astype(np.uint64)
    return np.unique(ids, return_counts=True)


@pytest.mark.parametrize("shared_rows", [0, 17])
def test_rows_that_are_admitted_and_evicted_equal_those_of_the_reference(
    draw, kills, shared_rows
):
    spec = replace(RARE, shared_rows=shared_rows)
    references = [ReferenceStore(CAPACITY, "lfu") for _ in range(NUM_SERVERS)]
    for reference in references:
        reference.tables = [spec]
    cluster = killed_cluster(draw, kills(100), capacity=CAPACITY, eviction="lfu")
    with cluster as (client, steps):
        client.add_tables([spec])
        for number, _ in enumerate(steps, start=1):
            drawn, counts = draw_ids(number)
            split, batch = client.split(drawn, "rare"), BatchNumber(7, number)
            counts = counts.astype(np.uint32)[np.searchsorted(drawn, split.ids)]
            tables = [("rare", split)]
            [rows] = client.pull(tables, batch=batch, counts=[counts])
            grads = np.random.default_rng(-number % 2**32).normal(size=rows.shape)
            grads = grads.astype(np.float32)
            client.outcome(client.push(tables, [grads], batch))
            pieces = itertools.pairwise(split.offsets)
            for reference, (begin, end) in zip(references, pieces, strict=True):
                own = split.ids[begin:end].tolist()
                given = {"training": True, "counts": counts[begin:end].tolist()}
                before = [(0, id_) in reference.rows for id_ in own]
                expected = reference.lookup(0, own, **given)
                # A lookup that is answered again lacks the trained rows that left.
                after = [(0, id_) in reference.rows for id_ in own]
                stays = np.array(after) | ~np.array(before)
                received = rows[begin:end][stays]
                np.testing.assert_allclose(received, expected[stays], **NEAR)
                reference.update(0, own, grads[begin:end])
        ids = ids_of(*range(MANY + 1))
        found, frequencies = client.read("rare", ids), client.metadata("rare", ids)
        split = client.split(ids, "rare")
        names = "inserted", "rejected", "evictions", "rows"
        counters = client.counters()
    for number, reference in enumerate(references):
        own = split.ids[split.offsets[number] : split.offsets[number + 1]].astype(int)
        expected = reference.read(0, own.tolist())
        np.testing.assert_allclose(found[own], expected, **NEAR)
        rows = [reference.rows.get((0, id_)) for id_ in own.tolist()]
        seen = [0 if row is None else row.frequency for row in rows]
        assert frequencies.frequency[own].tolist() == seen
        told = {name: counters[number][name] for name in names}
        assert told == {name: reference.counters()[name] for name in names}
        assert reference.counts["evictions"] > CAPACITY


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("kind", [*KINDS])
def test_a_model_learns_bit_by_bit_what_it_does_undisturbed(
    draw, kills, staleness, kind
):
    with ExitStack() as stack:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        stack.callback(dist.destroy_process_group)
        cluster = killed_cluster(draw, kills(20))
        client, steps = stack.enter_context(cluster)
        *learnt, num_steps = learn(client, staleness, kind, steps)
        undisturbed = EmbeddingCluster.local(NUM_SERVERS, restarts=True)
        client = stack.enter_context(closing(connect(stack.enter_context(undisturbed))))
        *expected, _ = learn(client, staleness, kind, range(num_steps))
    assert learnt == expected


def learn(client, staleness, kind, steps, after_step=lambda *_: None):
    """Train a model; return its weights and rows, and the number of steps.

    After each step it calls a function with what a checkpoint is saved of.
    """
    torch.manual_seed(0)
    given = {table.name: KINDS[kind] for table in TABLES}
    sharder = RemoteEmbeddingBagCollectionSharder(
        client, Adagrad(0.1), staleness, tables=given
    )
    with closing(sharder):
        model = shard(Model(), sharder)
        dense = [weight for name, weight in model.named_parameters() if "over" in name]
        optimizer, number = torch.optim.Adam(dense, lr=0.01), 0
        for number, _ in enumerate(steps, start=1):
            [batch] = batches(0, 1, seed=number)
            optimizer.zero_grad()
            loss_of(model, [batch]).backward()
            optimizer.step()
            after_step({"model": model, "number": number}, client, sharder)
        sharder.flush()
        weights = [weight.detach().numpy().tobytes() for weight in dense]
        return *weights, *rows_on(client), number


def rows_on(client):
    """Return rows, what ids read, and metadata but for the time, as bytes."""
    ids, found = ids_of(*range(NUM_IDS)), []
    for table in TABLES:
        split = client.split(ids, table.name)
        [read] = client.pull([(table.name, split)])
        found += [client.read(table.name, ids), read[split.inverse]]
        if client.table(table.name).keeps_metadata:
            found += astuple(client.metadata(table.name, ids))[:-1]
    return [array.tobytes() for array in found]


@pytest.mark.parametrize("kind", [*KINDS])
def test_checkpoints_between_kills_have_all_updates(
    draw, kills, kind, tmp_path, record_property
):
    run, saved = str(tmp_path / "run"), {}

    def save(state, client, sharder):
        if state["number"] % 20:
            return
        for how in save_delta, save_checkpoint:
            with suppress(CheckpointError):  # of a server that was killed
                path = how(run, state, client, sharder).path
                saved[path] = state["number"], rows_on(client)
                return

    logs = {"increments_dir": str(tmp_path / "increments")}
    with ExitStack() as stack:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        stack.callback(dist.destroy_process_group)
        cluster = killed_cluster(draw, kills(20), increments_interval_s=1e3, **logs)
        with cluster as (client, steps):
            learn(client, 1, kind, steps, save)
        fresh = stack.enter_context(EmbeddingCluster.local(3))
        client = stack.enter_context(closing(connect(fresh)))
        chosen = [*saved][:: max(len(saved) // 8, 1)]
        for path in [*chosen, [*saved][-1]]:
            state = {"number": 0}
            load_checkpoint(path, state, client)
            client.learn_tables()
            assert (state["number"], rows_on(client)) == saved[path]
    num_deltas = sum("delta" in path for path in saved)
    assert num_deltas > len(saved) // 2
    record_property("measured", f"{num_deltas} deltas, {len(saved)} saves")
