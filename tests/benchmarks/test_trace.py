"""What a trace of torch's profiler says of a step of training."""

import math

import pytest

from benchmarks.trace import GpuStep, busy_fraction, gpu_step, mean_step


def event(name, cat, ts, dur, **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "args": args}


EVENTS = [
    {"ph": "M", "name": "process_name"},
    event("gemm", "kernel", 100, 20),
    event("add", "kernel", 110, 20),  # on another stream
    event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 140, 10, bytes=3_000_000),
    event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 150, 10, bytes=1_000_000),
    event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 160, 10, bytes=9_000_000),
    event("Memset (Device)", "gpu_memset", 190, 10),
    event("## forward ##", "gpu_user_annotation", 0, 1000),
    event("cudaLaunchKernel", "cuda_runtime", 0, 5),
    event("cudaStreamSynchronize", "cuda_runtime", 0, 300),
]


def test_overlapping_spans_are_counted_once():
    spans = [event("", "", ts, dur) for ts, dur in [(0, 10), (2, 3), (8, 4), (16, 4)]]
    assert busy_fraction(spans) == (12 + 4) / 20
    assert busy_fraction([]) == 0
    assert busy_fraction([event("", "", 5, 0)]) == 0


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_step_is_the_mean_of_those_that_were_profiled(num_steps):
    step = mean_step(EVENTS, num_steps)
    assert math.isclose(step.busy, (30 + 30 + 10) / 100)
    whole = [2, 1, 1, 4.0, 1]
    assert step == GpuStep(step.busy, *(value / num_steps for value in whole))


def test_without_a_gpu_no_step_is_taken():
    assert gpu_step(lambda: pytest.fail("a step")) is None
