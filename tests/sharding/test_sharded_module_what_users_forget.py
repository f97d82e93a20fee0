"""A TorchRec loop that forgets something is told so while it runs."""

import logging
import time

import pytest
import torch
from torchrec import EmbeddingBagConfig

from persia_torchrec import SGD, RemoteEmbeddingBagCollectionSharder
from tests.support.remote_job import Bags, RemoteJob, kjt_of
from tests.support.servers import DEADLINE_S

TABLES = [EmbeddingBagConfig(10, 4, name="term", feature_names=["ad"])]


class Loop:
    """A model on the servers, and its sharder."""

    def __init__(self, job, **settings):
        self.sharder = RemoteEmbeddingBagCollectionSharder(
            job.client, SGD(1.0), **settings
        )
        self.model = job.shard(Bags(TABLES), [self.sharder])

    def forward(self, *ids):
        return self.model(kjt_of({"ad": [list(ids)]})).values().sum()

    def wait_for_dropped(self, num):
        deadline = time.monotonic() + DEADLINE_S
        while self.sharder.summary().num_dropped < num:
            assert time.monotonic() < deadline
            time.sleep(0.005)


@pytest.fixture
def logged(caplog):
    """Return logger and arguments of our records of a level so far."""
    caplog.set_level(logging.INFO, "persia_torchrec")

    def logged(level, name):
        return [
            record.args
            for record in caplog.records
            if record.levelno == level and record.name == f"persia_torchrec.{name}"
        ]

    return logged


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_loop_without_backward_is_one_warning(job, logged, staleness):
    loop = Loop(job, staleness=staleness)
    for n in range(20):
        loop.forward(n)
    loop.wait_for_dropped(20)
    assert logged(logging.WARNING, "pipeline.staleness") == [(8,)]


def use_no_grad(loop):
    with torch.no_grad():
        loop.forward(1)


def use_eval(loop):
    loop.model.eval()
    loop.forward(1)
    loop.model.train()


def overflow(loop):
    loop.sharder.use_grad_scaler(torch.amp.GradScaler("cpu"))
    (loop.forward(1) * torch.inf).backward()


def train_once(loop):
    loop.forward(1).backward()


@pytest.mark.parametrize("use", [use_no_grad, use_eval, overflow, train_once])
def test_a_correct_loop_logs_no_warning(job, logged, use):
    loop = Loop(job)
    for _ in range(20):
        use(loop)
    loop.sharder.close()
    assert loop.sharder.summary().num_dropped == 0
    assert logged(logging.WARNING, "pipeline.staleness") == []


def test_flush_logs_the_staleness(job, logged):
    loop = Loop(job, staleness=3)
    for num_steps in (5, 12):
        held = [loop.forward(1)]
        while loop.sharder.summary().num_lookups < num_steps:
            held.append(loop.forward(1))
            held.pop(0).backward()
        held.pop().backward()
        loop.sharder.flush()
        loop.sharder.flush()  # has nothing more to tell
    told = logged(logging.INFO, "sharding.table_control")
    summary = loop.sharder.summary()
    assert [args[1] for args in told] == [5, 12]
    assert told[1][2:4] == (summary.mean_staleness, 2)
    assert 10 / 12 <= summary.mean_staleness <= 2  # all but the first of each
    loop.sharder.close()
    assert logged(logging.WARNING, "sharding.table_control") == []


def test_evicted_rows_are_logged_while_training_and_at_the_end(logged):
    with RemoteJob(num_servers=1, capacity_rows=4) as job:
        loop = Loop(job)
        for n in range(40):
            loop.forward(*range(n, n + 16)).backward()
        share = (100 * 0.75, 32, 32 * 12, 32 * 16)
        told = logged(logging.WARNING, "pipeline.staleness")
        assert [args for args in told if len(args) > 1] == [share]
        for _ in range(2):
            loop.sharder.close()
        evicted = (40 * 12, 100 * 0.75, 40 * 16)
        told = logged(logging.WARNING, "sharding.table_control")
        assert [args for args in told if len(args) > 1] == [evicted]
        assert loop.sharder.summary().share_evicted == 0.75


def test_a_server_that_evicts_and_thrashes_is_named_by_both_sides(logged):
    with RemoteJob(num_servers=1, capacity_rows=600) as job:
        loop = Loop(job)

        def train(first):
            loop.forward(*range(first, first + 100)).backward()

        for first in range(0, 600, 100):
            train(first)
        loop.sharder.flush()
        assert logged(logging.WARNING, "pipeline.staleness") == []
        for _ in range(3):
            for first in range(0, 1200, 100):
                train(first)
        told = [text for (text,) in logged(logging.WARNING, "pipeline.staleness")]
        first, second = told
        assert "embedding server 0 is full, and evicts the rows used least" in first
        assert "capacity_rows=600, rows by table: term=600. If" in first
        assert "raise --capacity, add servers" in second
        assert "rows while 1" in second
        assert "most leave before they have learnt" in second
        loop.sharder.flush()
        again = [text for (text,) in logged(logging.WARNING, "sharding.table_control")]
        assert again == [second]
