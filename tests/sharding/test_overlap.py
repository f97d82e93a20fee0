"""What hides the time of a pull: a pipeline, and whatever comes before its use."""

import threading
import time

import pytest
import torch
from torchrec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)

from tests.servers import DEADLINE_S
from tests.sharding.pipelined import (
    Remote,
    make_batches,
    run,
    with_a_stream,
)
from tests.sharding.remote_job import CPU

pytestmark = pytest.mark.usefixtures("one_thread")


class Slow:
    """The way to the servers, made slower by a known time a pull."""

    def __init__(self, lookup, delay_s):
        self._lookup, self._delay_s = lookup, delay_s

    def pull(self, source, number):
        time.sleep(self._delay_s)
        return self._lookup.pull(source, number)

    def __getattr__(self, name):
        return getattr(self._lookup, name)


STEP_S = 0.06


def waits_of(remote, pipeline, delay_s):
    """Return how long each step waits when each pull takes so much longer."""
    remote.use(Slow(remote.lookup, delay_s), staleness=3)
    run(pipeline(remote.model, remote.dense, CPU), make_batches(9))
    return remote.model.module.waited_s[-7:]


PREFETCH = with_a_stream(PrefetchTrainPipelineSparseDist)


# A busy machine may delay any step. The smallest wait tells all the same: where nothing
# hides, no step can wait for less than the delay.


@pytest.mark.parametrize("pipeline", [TrainPipelineSparseDist, PREFETCH])
def test_the_time_of_a_pull_hides_until_it_exceeds_the_step(job, pipeline):
    remote = Remote(job, step_s=STEP_S)
    assert min(waits_of(remote, pipeline, 0.5 * STEP_S)) < 0.25 * STEP_S
    waits = waits_of(remote, pipeline, 3 * STEP_S)
    assert min(waits) < 2.5 * STEP_S
    assert max(waits) > STEP_S


def test_without_a_pipeline_the_time_of_a_pull_shows(job):
    remote = Remote(job, step_s=STEP_S)
    assert min(waits_of(remote, TrainPipelineBase, 0.5 * STEP_S)) > 0.5 * STEP_S


class Gated:
    """The way to the servers, closed until a test opens it."""

    def __init__(self, lookup):
        self._lookup, self.may_pull = lookup, threading.Event()

    def pull(self, source, number):
        assert self.may_pull.wait(DEADLINE_S)
        return self._lookup.pull(source, number)

    def __getattr__(self, name):
        return getattr(self._lookup, name)


def test_a_call_returns_before_its_rows_are_there(job):
    remote = Remote(job)
    gate = Gated(remote.lookup)
    remote.use(gate)
    pooled = remote.module(make_batches(1)[0].first)
    gate.may_pull.set()
    assert pooled.keys() == ["ad", "user"]
    assert pooled.wait() is pooled.wait()
    pooled.values().sum().backward()
    assert job.total("open_batches") == 0


def test_an_output_has_the_gradients_of_its_call_wherever_it_is_used(job):
    remote = Remote(job)
    pooled = remote.module(make_batches(1)[0].first)
    with torch.no_grad():
        assert pooled.values().requires_grad
        looked = remote.module(make_batches(1)[0].first)
    assert not looked.values().requires_grad


def test_an_error_of_a_pull_is_raised_where_its_output_is_used(job):
    remote = Remote(job)
    gate = Gated(remote.lookup)
    remote.use(gate)
    gate.pull = lambda source, number: 1 / 0
    pooled = remote.module(make_batches(1)[0].first)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            pooled.values()
