"""What a number is worth nothing without: machine, versions, which cores were used."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

_PACKAGES = ("numpy", "numba", "pyzmq", "torch", "persia-torchrec")
_CPUINFO = Path("/proc/cpuinfo")


def describe_machine() -> dict[str, str | int | float]:
    """Return the processor, how many cores this process may use, system and load."""
    return {
        "cpu": _cpu_model(),
        "cores": len(cores()) or os.cpu_count() or 1,
        "kernel": f"{platform.system()} {platform.release()}",
        "load_1min_at_start": round(os.getloadavg()[0], 2),
    }


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


def _cpu_model() -> str:
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
