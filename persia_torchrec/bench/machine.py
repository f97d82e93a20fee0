"""What a number is worth nothing without: machine, versions, which cores were used."""

import ctypes
import gc
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from persia_torchrec.errors import ConfigError

_PACKAGES = (
    *("numpy", "numba", "pyzmq", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"),
    "persia-torchrec",
)
_CPUINFO = Path("/proc/cpuinfo")
_STAT = Path("/proc/stat")
_PROC_SELF = Path("/proc/self")


def describe_machine() -> dict[str, str | int]:
    """Return the processor, how many cores this process may use, and the system."""
    return {
        "cpu": _cpu_model(),
        "cores": len(cores()) or os.cpu_count() or 1,
        "memory_gb": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 10**9,
        "kernel": f"{platform.system()} {platform.release()}",
    }


def require_proc(figure: str) -> None:
    """Refuse a figure that needs what only Linux tells of a process.

    Raises:
        ConfigError: there is no ``/proc``.
    """
    if not (_PROC_SELF / "statm").exists():
        raise ConfigError(
            f"The figure {figure!r} needs /proc/self/statm, which Linux has. "
            f"Received: {platform.system()}. Choose others with --figures."
        )


def resident_bytes(pid: int | None = None) -> int:
    """Return the resident memory of a process, by default of this one."""
    process = _PROC_SELF if pid is None else Path(f"/proc/{pid}")
    pages = int((process / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def settle_memory() -> None:
    """Give memory that this process has freed back to the operating system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def peak_bytes() -> int:
    """Return the largest resident memory that this process has had."""
    for line in (_PROC_SELF / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    return resident_bytes()


def forget_peak() -> None:
    """Make :func:`peak_bytes` begin anew with the present resident memory."""
    (_PROC_SELF / "clear_refs").write_text("5")


def cpu_seconds(pid: int) -> float | None:
    """Return the processor time of all threads of a process.

    None where the system does not tell it by the nanosecond.
    """
    times = Path(f"/proc/{pid}/task").glob("*/schedstat")
    nanoseconds = [int(time_.read_text().split()[0]) for time_ in times]
    return sum(nanoseconds) / 1e9 if nanoseconds else None


class OtherWork:
    """What others had the processor do meanwhile: a measurement wants it near zero."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._seconds_at_start = _seconds_of_others()

    def cores_used(self) -> float | None:
        """Return how many cores others used since the start, on average.

        Counted are all processes but this one and the children it has waited for, and
        other virtual machines. None where the system does not tell.
        """
        now = _seconds_of_others()
        if now is None or self._seconds_at_start is None:
            return None
        elapsed = time.monotonic() - self._start
        return max(now - self._seconds_at_start, 0.0) / max(elapsed, 0.01)


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter, if installed."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def cores() -> list[int]:
    """Return the cores that this thread may use; empty where that cannot be asked."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0))


@contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Keep this thread, and all threads and processes it starts, on one core.

    Args:
        core: its number; None changes nothing.
    """
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _seconds_of_others() -> float | None:
    if not _STAT.exists():
        return None
    # cpu user nice system idle iowait irq softirq steal ...; the network of this
    # process is in softirq, so that it counts for nobody.
    fields = [int(field) for field in _STAT.read_text().split("\n")[0].split()[1:9]]
    busy = sum(fields[:3]) + fields[7]
    return busy / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def _cpu_model() -> str:
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
