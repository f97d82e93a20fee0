"""Clients, sharders and models that are dropped without ``close()`` leave nothing."""

import gc
import os
import select
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.types import ShardingEnv

from persia_torchrec import SGD, EmbeddingClient, remote_sharders
from tests.support.processes import wait_until
from tests.support.remote_job import CPU, META, kjt_of

pytestmark = pytest.mark.slow

NUM = 60
CONFIG = EmbeddingBagConfig(50, 4, "table", feature_names=["x"])
ENV = ShardingEnv.from_local(world_size=1, rank=0)


def use(client, staleness=1):
    """Train one batch; what was made for it is dropped, and pushes may be in flight."""
    sharder = remote_sharders(client, SGD(0.5), staleness=staleness)[0]
    bags = EmbeddingBagCollection(tables=[CONFIG], device=META)
    model = sharder.put_on_servers(bags, ENV, CPU)
    model(kjt_of({"x": [[1], [1]]})).values().sum().backward()


def use_all(addresses):
    use(EmbeddingClient.connect(addresses))


def kept():
    gc.collect()
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


def test_repeated_construction_leaks_no_thread_and_no_file(job):
    use_all(job.servers.addresses)
    use(job.client)
    before = kept()
    most = 0
    for index in range(NUM):
        use(job.client) if index % 2 else use_all(job.servers.addresses)
        most = max(most, threading.active_count())
    # Cycles are collected now and then, as of any module of torch's.
    assert most < before[0] + NUM

    def is_all_gone():
        return all(now <= then for now, then in zip(kept(), before, strict=True))

    wait_until(is_all_gone, "threads and files are gone", details=kept)


def test_a_batch_that_is_dropped_behind_the_end_keeps_no_pipeline(job):
    sharders = remote_sharders(job.client, SGD(0.5), staleness=1)
    bags = EmbeddingBagCollection(tables=[CONFIG], device=META)
    model = sharders[0].put_on_servers(bags, ENV, CPU)
    pipeline = weakref.ref(model.pipeline)
    pooled = model(kjt_of({"x": [[1], [1]]})).values()  # gets no backward pass
    sharders.close()
    del pooled, model, sharders, bags
    gc.collect()
    assert pipeline() is None


def test_a_forked_child_drops_nothing_of_its_parent(job):
    made = [EmbeddingClient.connect(job.servers.addresses)]
    use(made[0])
    connections = made[0]._servers.connections
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            made.clear()
            gc.collect()
            connections.abandon()
            status = int(connections.is_closed)
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert made[0].num_rows() == job.client.num_rows()
    wait_until(
        lambda: not select.select([connections._loop.wakeup.fd], [], [], 0)[0],
        "nothing woke the parent for ever",
    )


def test_the_gradients_of_a_model_that_is_dropped_at_once_are_applied(job):
    def wait_for(num):
        gc.collect()

        def are_all_applied():  # a read overtakes updates that wait
            totals = [job.total(of) for of in ("requests_update", "updates_queued")]
            return totals == [num * len(job.servers.addresses), 0]

        wait_until(are_all_applied, "all gradients are applied")
        return job.read("table", [1])

    use(job.client, staleness=8)
    first = wait_for(1).copy()
    for _ in range(8):
        use(job.client, staleness=8)
    np.testing.assert_allclose(wait_for(9), first - 8 * 2 * 0.5, rtol=1e-5)
