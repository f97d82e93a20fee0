"""Processes of this host, as its kernel knows them: by number and time of start."""

import contextlib
import functools
from pathlib import Path

import psutil


@functools.cache
def process_table() -> str:
    """Name this host's boot and the process namespace in it; empty off Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def start_of(pid: int) -> str:
    """Return when a process started, in the table's own unit; "" once it has ended.

    ``create_time`` of psutil moves with the clock of the host; this stays.
    """
    try:
        # "pid (name) state ...", where the name may hold any character.
        *_, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return ""
    fields = rest.split()
    return "" if fields[0] in "ZX" else fields[19]


def has_ready_thread(pid: int) -> bool:
    """Return whether a thread of a process runs, is about to, or waits for a disk."""
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            if path.read_text().rpartition(")")[2].split()[0] in "RD":
                return True
    return False


def children_of(pid: int) -> set[int]:
    """Return the children of a process that run."""
    found = list[psutil.Process]()
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(pid).children()
    return {child.pid for child in found if start_of(child.pid)}
