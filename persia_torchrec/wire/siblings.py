"""The processes beside this one in a local job, as the table of processes has them.

torchx's local scheduler starts all roles of a job as its children, the coordinator
first. When one has ended, it lets the others run. So they look at each other: a member
does not wait for a coordinator that has ended, as when its port was taken, and the
coordinator does not wait for members that ended before they joined.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from persia_torchrec import env
from persia_torchrec.errors import JobError

_COORDINATOR = b"persia_torchrec.launch.coordinator"
_LOOK_S = 0.5
_GONE_S = 1.5
"""For so long it must be missing: a process table is not read all at once."""


class Siblings:
    """The children of this process's parent, in a job that torchx runs here as one app.

    In any other job it knows nothing. Owned by one thread.
    """

    def __init__(self) -> None:
        is_known = env.is_one_local_app() and Path("/proc/self/stat").exists()
        self._parent = os.getppid() if is_known else None
        self._next_look = 0.0
        self._pids: set[int] = set()
        self._gone_since: float | None = None

    def running(self) -> set[int] | None:
        """Return the processes that run, as of half a second ago; None: not known."""
        if self._parent is None:
            return None
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            self._pids = set(_children(self._parent))
        return self._pids

    def require_coordinator(self) -> None:
        """Raise once the coordinator is known to have ended; call it now and then.

        Raises:
            JobError: it has.
        """
        pids = self.running()
        if pids is None or any(map(_is_coordinator, pids)):
            self._gone_since = None
            return
        now = time.monotonic()
        self._gone_since = self._gone_since or now
        if now - self._gone_since > _GONE_S:
            raise JobError(
                "The job's coordinator must run until the others have left. Received: "
                f"none among the processes that process {self._parent} has started. "
                "It has ended; see its log."
            )


def _children(parent: int) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue  # it has ended meanwhile
        # "pid (name) state parent ...", where the name may hold anything.
        state, its_parent, *_ = stat.rpartition(")")[2].split()
        if int(its_parent) == parent and state not in "ZX":
            yield int(entry.name)


def _is_coordinator(pid: int) -> bool:
    try:
        return _COORDINATOR in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
