"""What hides the time of a pull: a pipeline, and whatever comes before its use."""

import itertools
import json
import threading
import time
from statistics import median

import pytest
import torch
from torch.profiler import ProfilerActivity
from torchrec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)

from tests.support.pipelined import Counted, Remote, make_batches, run, with_a_stream
from tests.support.remote_job import CPU
from tests.support.servers import DEADLINE_S

pytestmark = pytest.mark.usefixtures("one_thread")


NUM_BATCHES = 9


def run_steps(job, pipeline, after_lookup):
    """Train with a pipeline; call in each step, with its number and the lookup."""
    remote = Remote(job)
    lookup = Counted(remote.lookup)
    remote.use(lookup, staleness=3)
    steps = itertools.count(1)

    def take_step():
        if lookup.num_pulled:  # pipelines trace the model before its first batch
            after_lookup(next(steps), lookup)

    remote.model.module.after_lookup = take_step
    run(pipeline(remote.model, remote.dense, CPU), make_batches(NUM_BATCHES))
    assert next(steps) == NUM_BATCHES + 1


@pytest.mark.parametrize(
    "pipeline",
    [TrainPipelineSparseDist, with_a_stream(PrefetchTrainPipelineSparseDist)],
)
def test_the_next_batch_is_pulled_while_a_step_computes(job, pipeline):
    def wait_for_next(step, lookup):
        lookup.wait_for(min(step + 1, NUM_BATCHES))

    run_steps(job, pipeline, wait_for_next)


def test_without_a_pipeline_nothing_is_pulled_while_a_step_computes(job):
    pulled = []
    run_steps(
        job, TrainPipelineBase, lambda step, lookup: pulled.append(lookup.num_pulled)
    )
    assert pulled == list(range(1, NUM_BATCHES + 1))


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


class Slow:
    """The way to the servers, on which pulls and pushes take some time."""

    DELAY_S = 0.03

    def __init__(self, lookup, delay_s=DELAY_S):
        self._lookup, self._delay_s = lookup, delay_s

    def pull(self, source, number):
        time.sleep(self._delay_s)
        return self._lookup.pull(source, number)

    def push(self, handle, grads):
        time.sleep(self._delay_s)
        return self._lookup.push(handle, grads)

    def __getattr__(self, name):
        return getattr(self._lookup, name)


def test_a_trace_shows_where_the_training_thread_waits(job, tmp_path):
    remote = Remote(job)
    remote.use(Slow(remote.lookup), staleness=0)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
        for batch in make_batches(2):
            loss, _ = remote.model(batch)
            loss.backward()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for name in ("persia: wait for rows", "persia: wait for push"):
        spans = [event["dur"] for event in events if event.get("name") == name]
        assert len(spans) == 2
        assert min(spans) >= 1e6 * Slow.DELAY_S / 2  # part of it is before the wait


@pytest.mark.slow
def test_a_pipeline_hides_at_least_four_fifths_of_the_delay_of_pulls(job):
    """Each pull takes 5 ms more; a step computes for longer than pull and push take."""
    delay_s, step_s, waited_s = 0.005, 0.04, {}
    for pipeline, staleness in ((TrainPipelineBase, 0), (TrainPipelineSparseDist, 8)):
        remote = Remote(job)
        remote.use(Slow(remote.lookup, delay_s), staleness=staleness)
        remote.model.module.after_lookup = lambda: time.sleep(step_s)
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
            run(pipeline(remote.model, remote.dense, CPU), make_batches(NUM_BATCHES))
        spans = [e for e in profile.events() if e.name == "persia: wait for rows"]
        assert len(spans) == NUM_BATCHES
        # The median: a busy machine delays some steps by more than all of this.
        waited_s[pipeline] = median(span.cpu_time_total for span in spans) / 1e6
    plain_s, hidden_s = waited_s[TrainPipelineBase], waited_s[TrainPipelineSparseDist]
    assert plain_s >= delay_s / 2  # part of it is before the wait
    assert hidden_s <= 0.2 * plain_s
