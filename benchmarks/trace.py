"""What a GPU does in a step of training: from the events of torch's profiler.

The profiler writes them in Chrome's format: an event of a kernel, a copy or a fill has
its category, when it began and how long it took, in microseconds, and a copy its bytes.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

_KERNEL, _COPY, _FILL = "kernel", "gpu_memcpy", "gpu_memset"
_WAYS = ("HtoD", "DtoH")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize")


class GpuStep(NamedTuple):
    """What a GPU did in a step, the mean of some."""

    busy: float
    """Fraction of the time in which it computed, copied or filled anything."""

    num_launches: float
    """Kernels."""

    num_to_device: float
    """Copies from the host."""

    num_to_host: float
    """Copies to the host."""

    copied_mb: float
    """Megabytes of both."""

    num_waits: float
    """Times that a thread waited for a stream or the whole device."""


def gpu_step(steps: Callable[[], int]) -> GpuStep | None:
    """Profile some steps; return what the GPU did in one, or None where there is none.

    Args:
        steps: takes steps, waits for them, and returns how many it took.
    """
    if not torch.cuda.is_available():
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        num_steps = steps()
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return mean_step(events, num_steps)


def mean_step(events: Iterable[Mapping[str, Any]], num_steps: int) -> GpuStep:
    """Return what the events of some steps say of one."""
    whole = [event for event in events if event.get("ph") == "X"]
    on_gpu = [e for e in whole if e.get("cat") in (_KERNEL, _COPY, _FILL)]
    copies = [e for e in on_gpu if e["cat"] == _COPY]
    over_pcie = [[e for e in copies if way in e["name"]] for way in _WAYS]
    num_bytes = sum(e["args"]["bytes"] for each in over_pcie for e in each)
    num_waits = sum(e["name"] in _WAITS for e in whole)
    to_device, to_host = [len(each) / num_steps for each in over_pcie]
    return GpuStep(
        busy_fraction(on_gpu),
        sum(e["cat"] == _KERNEL for e in on_gpu) / num_steps,
        to_device,
        to_host,
        num_bytes / 1e6 / num_steps,
        num_waits / num_steps,
    )


def busy_fraction(events: Iterable[Mapping[str, Any]]) -> float:
    """Return the fraction of the time from the first to the last that any lasted."""
    spans = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events)
    if not spans:
        return 0.0
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return busy / ((end - spans[0][0]) or 1.0)
