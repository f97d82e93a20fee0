"""A training that writes increments, and servers of inference that follow it."""

import numpy as np
import pytest

from persia_torchrec.client.client import BatchNumber
from persia_torchrec.embedding.optim import SGD, Adagrad
from persia_torchrec.errors import PersiaError
from persia_torchrec.server import follower as follower_module
from persia_torchrec.server import increments
from persia_torchrec.table import TableSpec
from tests.support.processes import wait_until
from tests.support.servers import ids_of

ITEM = TableSpec(name="item", dim=4, optimizer=Adagrad(0.1))
OTHER = TableSpec(name="other", dim=2, optimizer=SGD(0.5))

WRITING = {"increments_interval_s": 0.02}


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    """Poll often, so that tests wait for what happens and not for the next poll."""
    monkeypatch.setattr(follower_module, "POLL_S", 0.02)
    monkeypatch.setattr(follower_module, "_CHECK_S", 0.005)
    monkeypatch.setattr(increments, "_CHECK_S", 0.005)


class Training:
    """A client of servers that write increments, and the rows as they are there."""

    def __init__(self, servers, folder, num_servers=2, specs=(ITEM, OTHER), **settings):
        self.folder = folder
        self.logs = str(folder / "increments")
        self.run = str(folder / "run")
        settings = {**WRITING, "increments_dir": self.logs, **settings}
        self.running = servers.start(num_servers, **settings)
        self.client = servers.client(self.running)
        self.client.add_tables(list(specs))
        self._num_batches = 0
        self._rng = np.random.default_rng(7)

    def train(self, *ids, table="item", before_push=lambda: None):
        """Look ids up, and update them by random gradients."""
        number = BatchNumber(1, self._num_batches)
        self._num_batches += 1
        split = self.client.split(ids_of(*ids))
        [rows] = self.client.pull([(table, split)], batch=number)
        before_push()
        grads = self._rng.standard_normal(rows.shape).astype(np.float32)
        self.client.outcome(self.client.push([(table, split)], [grads], number))

    def write(self, *ids, table="item"):
        """Train ids, and wait until all that has changed is written."""
        self.train(*ids, table=table)
        self.has_written()

    def has_written(self):
        wait_until(
            lambda: self.total("increments_waiting") == 0, "all that changed is written"
        )

    def stop(self):
        for server in self.running:
            server.stop()

    def dump(self):
        return self.client.checkpoints.dump(self.run)

    def total(self, counter):
        return sum(c.get(counter, 0) for c in self.client.counters())


def follow(servers, training, num_servers=1, run=None, **settings):
    """Start servers that follow a training; return a client of them when ready."""
    running = servers.start(
        num_servers,
        checkpoint=run or training.run,
        increments_dir=training.logs,
        **settings,
    )
    client = servers.client(running)

    def is_ready():
        try:
            return client.num_rows()
        except PersiaError:
            return False

    wait_until(is_ready, "the servers are ready")
    client.learn_tables()
    return client


def weights_of(client, table, dim, num_ids=60):
    split = client.split(np.arange(num_ids, dtype=np.uint64))
    [rows] = client.pull([(table, split)])
    return rows[split.inverse]


def are_equal(follower, training, num_ids=60):
    """Whether lookups at the follower give what the training has."""
    ids = np.arange(num_ids, dtype=np.uint64)
    return all(
        weights_of(follower, spec.name, spec.dim, num_ids).tobytes()
        == training.client.read(spec.name, ids)[:, : spec.dim].tobytes()
        for spec in (ITEM, OTHER)
    ) and sum(follower.num_rows()) == sum(training.client.num_rows())


def become_equal(follower, training, num_ids=60):
    wait_until(
        lambda: are_equal(follower, training, num_ids), "the follower has caught up"
    )


def has_counted(client, counter):
    """Wait until the first server has counted one, as of "following_lost"."""
    wait_until(lambda: client.counters()[0][counter] > 0, f"{counter} is counted")
