"""Processes of this host, as their kernel knows them: by number and time of start.

A number alone says little: a later process may have it. Where ``/proc`` is missing, or
a process is of another host, nothing is known of its end.

A process may have a supervisor, which starts it again: ``job/supervisor.py``. It is
killed with that, so that nothing runs twice. A supervisor is several processes, which
have one name: as long as one of them runs, the process comes back.

What a process says of itself stands here, too: its title, its metrics, its status.
"""

import contextlib
import functools
import logging
import os
import re
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import psutil
from msgspec import structs

from persia_torchrec import env, processes, timeouts
from persia_torchrec.errors import JobError
from persia_torchrec.job.signals import JOINED

if TYPE_CHECKING:
    from persia_torchrec.metrics.endpoint import Endpoint

logger = logging.getLogger(__name__)

METRICS_AT = "metrics at/"  # and a member: note that says where it serves metrics
IDS_OF = "ids/"  # and a table and a feature: figure of a trainer
UPDATES_OF = "updates/"  # and a table: figure of a server

_GROUPS = Path("/sys/fs/cgroup")
_COORDINATOR = "persia_torchrec.job.coordinator"
_MAX_ABOVE = 3  # of a role's process: torchrun, inner and outer supervisor
_MAX_NAME = 15  # characters of a process's name
_LOOK_S = 0.5

Number = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]
"""Of a process, its starts and its progress, as members tell it."""


class ProcessIdentity(msgspec.Struct, frozen=True):
    """One process; a later one of the same number has another identity."""

    pid: Number
    process_table: str  # boot and process namespace of its host; empty: it has none
    start: str  # time, in the table's own unit
    nonce: str  # unique text, where the table tells nothing
    name: str = ""  # which the processes of one supervisor share
    supervisor: "ProcessIdentity | None" = None  # which starts it again

    @classmethod
    def of_this_process(cls) -> "ProcessIdentity":
        """Return a new identity of this process, with its supervisor."""
        own, supervisor = cls.of(os.getpid()), find_supervisor()
        if supervisor is None:
            return own
        return structs.replace(own, supervisor=cls.of(supervisor))

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        """Return a new identity of a process of this host."""
        name, start = "", processes.start_of(pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            name = psutil.Process(pid).name()
        return cls(pid, processes.process_table(), start, uuid.uuid4().hex, name)

    def is_same(self, other: "ProcessIdentity | None") -> bool:
        """Return whether two identities are known to be of one process."""
        if other is None or not self.process_table:
            return False
        place = (other.pid, other.process_table, other.start)
        return place == (self.pid, self.process_table, self.start)

    def succeeds(self, previous: "ProcessIdentity") -> bool:
        """Return whether one supervisor has started both."""
        mine = self.supervisor
        return mine is not None and mine.is_same(previous.supervisor)

    def has_ended(self) -> bool:
        """Return whether the process is known to have ended: one of this host."""
        return self.is_running() is False

    def kill(self) -> bool:
        """Send SIGKILL to the process if it is of this host; return whether it was."""
        return self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> bool:
        """Log and send a signal to the process if it is of this host; or return False.

        The descriptor holds the process that is checked: its number may not.
        """
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            if self.is_running():
                descriptor = os.pidfd_open(self.pid)
                stack.callback(os.close, descriptor)
                if self.is_running():
                    logger.info("sends %s to process %d", number.name, self.pid)
                    signal.pidfd_send_signal(descriptor, number)
                    return True
        return False

    def is_running(self) -> bool | None:
        """Return whether it is, or None for a process that is not of this host."""
        if not self.process_table or self.process_table != processes.process_table():
            return None
        return bool(self.start) and processes.start_of(self.pid) == self.start

    def num_runs(self) -> int | None:
        """Return how often its main thread has run; 0 if the process is gone.

        A thread that waits with a deadline runs again and again; one that is stopped,
        or waits for ever, does not. None: one of its threads is about to run, or waits
        for a disk, as on a busy machine.
        """
        if processes.has_ready_thread(self.pid):
            return None
        with contextlib.suppress(psutil.Error):
            return sum(psutil.Process(self.pid).num_ctx_switches())
        return 0

    def is_last(self) -> bool:
        """Return whether no process of its name runs on this host any more.

        That is not known of one that had ended when its name was read.
        """
        if not self.name:
            return False
        found = psutil.process_iter(["name"])
        named = [one.pid for one in found if one.info["name"] == self.name]
        return not any(map(processes.start_of, named))


def memory_bytes() -> int:
    """Return the bytes of memory that this process has (RSS)."""
    return psutil.Process().memory_info().rss


def own_figures() -> dict[str, float]:
    """Return what each process measures of itself, and when that was."""
    return {"memory_bytes": memory_bytes(), "at_s": time.monotonic()}


class OwnFigures:
    """What ``JobMember`` and ``Lifetime`` share: figures, and one endpoint, or none.

    The main thread calls the methods. A member sends the figures with each heartbeat,
    in a thread of its own.

    Attributes:
        endpoint: serves the metrics of this process; None where the environment does
            not ask for it.
        figures: may be set to what returns what this process measures, by name, with
            ``memory_bytes`` and with ``at_s``, when that was.
        progress: may be set to what returns a number that grows with trained batches.
        is_paused: returns whether no steps are to come.
        notes: by name, for who looks at the job.
    """

    endpoint: "Endpoint | None" = None
    figures: Callable[[], Mapping[str, float]] = staticmethod(own_figures)
    progress: Callable[[], int] | None = None
    is_paused: Callable[[], bool] = staticmethod(bool)
    notes: dict[str, str]

    def serve_metrics(self, role: str, index: int, job_id: str, host: str) -> str:
        """Serve metrics where the environment asks for it; return ``host:port``, or "".

        A service is not ready before :meth:`become_ready`.

        Raises:
            ConfigError: no port is free.
        """
        if env.metrics_port() is None:
            return ""
        # An HTTP server and prometheus_client, for those who want them.
        from persia_torchrec.metrics.endpoint import begin

        self.endpoint = served = begin(role, index, job_id, host)
        if role not in ("loader", "trainer"):
            served.why_not_ready = lambda: "it does not answer requests yet"
        return served.address

    def become_ready(self, why_not: Callable[[], str] = lambda: "") -> None:
        """Say from now on that this process is ready, unless ``why_not`` says why not.

        A thread of the endpoint calls it for each probe.
        """
        if self.endpoint is not None:
            self.endpoint.why_not_ready = why_not


def set_title(who: str, job_id: str) -> None:
    """Have ``ps`` name a process: its role, index and job, behind its module.

    By setproctitle, if it is installed; else by the name of the process, of 15
    characters, as ``ps -o comm`` shows it.
    """
    try:
        from setproctitle import setproctitle  # optional
    except ImportError:
        name = who.replace(" ", "-")
        room = _MAX_NAME - len(name) - 1
        own = f"{name} {job_id[-room:]}" if room > 0 else name
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(own[:_MAX_NAME])
        return
    module = getattr(sys.modules["__main__"], "__spec__", None)
    setproctitle(f"{module.name if module else sys.argv[0]}: {who} of {job_id}")


def memory_kills() -> dict[str, int]:
    """Return how many processes the kernel has ended as memory was short.

    By the file that counts them: of the group of this process, where it can be read,
    and then of its host.
    """
    found: dict[str, int] = {}
    for path in (*_group_counters(), Path("/proc/vmstat")):
        with contextlib.suppress(OSError):
            if counted := re.search(r"(?m)^oom_kill (\d+)$", path.read_text()):
                found[str(path)] = int(counted[1])
    return found


@functools.cache
def _group_counters() -> list[Path]:
    """Return the files of this process's groups, of either version, that count."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":
                found.append(_GROUPS / group.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                folder = _GROUPS / "memory" / group.lstrip("/")
                found.append(folder / "memory.oom_control")
    return found


class Siblings:
    """The children of this process's parent, known in a local job that torchx runs.

    Of a supervised process: those of the process that has started its supervisor.
    """

    def __init__(self) -> None:
        is_known = env.is_one_local_app() and Path("/proc/self/stat").exists()
        parent = env.supervisor_parent() or os.getppid()
        self._parent = parent if is_known else None
        self._next_look = 0.0
        self._pids: set[int] = set()
        self._gone_since: float | None = None

    def running(self) -> set[int] | None:
        """Return the running processes, as of half a second ago; None: not known."""
        if self._parent is None:
            return None
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            self._pids = processes.children_of(self._parent)
        return self._pids

    def require_coordinator(self) -> None:
        """Raise JobError once the coordinator is known to have ended; call it often.

        Where this process was started again, it may be no sibling any more.
        """
        pids = None if env.num_restarts() else self.running()
        if pids is None or any(map(_is_coordinator, pids)):
            self._gone_since = None
            return
        now = time.monotonic()
        self._gone_since = self._gone_since or now
        if now - self._gone_since > timeouts.SIBLING_GONE_S:
            raise JobError(
                "The job's coordinator must run until the others have left. Received: "
                f"none among the processes that process {self._parent} has started. "
                "It has ended; see its log."
            )


def find_supervisor() -> int | None:
    """Return the process that starts this one again when it is killed, or None."""
    pid = env.supervisor()
    if env.is_under_torchrun():  # which starts all of its own again
        if pid is not None and env.agent() is not None:
            return pid
        return os.getppid() if env.group_restarts_left() else None
    if pid is None:
        return None
    return pid if pid == os.getppid() else None


def report_joined() -> None:
    """Tell the supervisor, if there is one, that this process has joined its job."""
    parent = os.getppid()
    if env.supervisor() == parent:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            descriptor = os.pidfd_open(parent)
            stack.callback(os.close, descriptor)
            if os.getppid() == parent:  # else it has just ended
                signal.pidfd_send_signal(descriptor, JOINED)


def with_ancestors(pid: int) -> set[int]:
    """Return a process of this host, and those above it that belong to its role."""
    above = list[psutil.Process]()
    with contextlib.suppress(psutil.NoSuchProcess):
        above = psutil.Process(pid).parents()[:_MAX_ABOVE]
    return {pid, *(one.pid for one in above)}


def _is_coordinator(pid: int) -> bool:
    try:
        return any(_COORDINATOR in word for word in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False
