"""One member of a job, as its keys in the address book say, and the job's timings."""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from persia_torchrec import env, timeouts
from persia_torchrec.errors import ConfigError, FrameError, JobMismatchError
from persia_torchrec.job import failures
from persia_torchrec.job.process_identity import ProcessIdentity
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.parsing.decoding import parse_json

Ending = Literal["left", "killed", "lost"]

_POLL_S = 0.05
_TIMINGS = "timings"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTimings:
    """Heartbeat intervals and timeouts of a job, set by the coordinator for all."""

    heartbeat_s: float = 1.0
    """Seconds between two heartbeats of a member."""

    silent_s: float = 20.0
    """A member, or the coordinator, without heartbeats for longer counts as dead."""

    grace_s: float = field(default_factory=lambda: 5.0 if env.is_local_job() else 20.0)
    """Seconds that trainers have to save when the job is told to end: by SIGTERM, as at
    a cancellation or a preemption, Ctrl-C, SIGUSR1 or SIGUSR2 [20; 5 for a job on one
    machine, as torchx kills such a job 10 s after SIGTERM]"""

    leave_s: float = 3.0
    """What an interrupted main thread has to end by itself."""

    finish_s: float = 20.0
    """What a member has to leave after the job is finished."""

    recovery_timeout_s: float = timeouts.RECOVERY_S
    """How long the job waits for a member with a supervisor, or the coordinator, that
    was killed, is lost or silent. Then it fails."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ConfigError(f"{name} must be > 0. Received: {value}.")
        if self.silent_s < 2 * self.heartbeat_s:
            raise ConfigError(
                "silent_s must be at least two heartbeats. "
                f"Received: {self.silent_s} with heartbeat_s={self.heartbeat_s}."
            )

    def publish(self, book: AddressBook) -> None:
        """Make these the timings of the job; the coordinator calls it first."""
        book.tell(_TIMINGS, json.dumps(asdict(self)))

    @classmethod
    def read(cls, book: AddressBook) -> "JobTimings":
        """Return the timings of the job, once the coordinator has published them."""
        (text,) = book.ask([_TIMINGS])
        timings: JobTimings = parse_json(text, cls, "note 'timings'", FrameError)
        return timings


class MemberRecord:
    """The keys of one member in the address book. Any thread may call any method."""

    def __init__(self, book: AddressBook, role: str, index: int) -> None:
        self._book = book
        self.who = f"{role} {index}"
        self._key = f"{role}/{index}"
        self._own = ""

    def register(self, silent_s: float) -> bool:
        """Become the member, unless a living process is that one: JobMismatchError.

        Returns whether another process was it before.
        """
        process = ProcessIdentity.of_this_process()
        own = msgspec.json.encode(process).decode()
        key = f"member/{self._key}"
        holder = self._book.peek(key)
        while (
            holder is None
            or process.succeeds(_parse(holder))
            or self._await_end(_parse(holder), silent_s)
        ):
            if self._book.claim(key, own, holder or "") == own:
                self._own = own
                if self.is_done():  # one that is started again is not
                    self._book.put(f"done/{self._key}", "")
                log = failures.find_own_log() or env.slurm_log(self.who.split()[0])
                place = f"{socket.gethostname()} {log}"
                self._book.put(f"log/{self._key}", place)
                self.beat()
                return holder is not None
            holder = self._book.peek(key)  # another was faster
        raise JobMismatchError(
            f"No other process must be {self.who} in job "
            f"{self._book.greeting.job_id!r}, at port {self._book.port}. Received: "
            f"process {_parse(holder).pid} is, in a job that is "
            f"{self._book.state()[0]}. Start each process of a job once. "
            f"{self._book.another_port()}"
        )

    def beat(self) -> None:
        """Send a heartbeat."""
        self._book.increase(f"beats/{self._key}")

    def report_progress(self, progress: int) -> None:
        """Report a number that grows with trained batches."""
        self._book.put(f"progress/{self._key}", str(progress))

    def report_failure(self, cause: str) -> bool:
        """Report why this process ends; return whether it is another cause than before.

        Its supervisor starts it again.
        """
        key = f"failed/{self._key}"
        previous = self._book.peek(key) or ""
        self._book.put(key, f"{os.getpid()} {cause}")
        return previous.partition(" ")[2] != cause

    def report_raise(self, place: str, progress: int) -> bool:
        """Report where a script has raised; return whether it did so before a restart.

        It did if as much was trained then. All trainers are of one script.
        """
        role = self.who.split()[0]
        key = f"raised/{role if role == 'trainer' else self._key}"
        start = env.num_group_restarts()
        then, trained, where = (self._book.peek(key) or "-1 -1 ").split(" ", 2)
        if (where, int(trained)) == (place, progress):
            return int(then) < start
        self._book.put(key, f"{start} {progress} {place}")
        return False

    def report_done(self) -> None:
        """Report the work as done; the job is finished when all trainers do."""
        self._book.put(f"done/{self._key}", "1")

    def report_ended(self) -> None:
        """Report that nothing is left to save here, in a job that is told to end."""
        self._book.put(f"ended/{self._key}", "1")

    def has_ended(self) -> bool:
        """Return whether nothing is left to save there, in a job told to end."""
        return self._book.peek(f"ended/{self._key}") == "1"

    def leave(self) -> None:
        """Report that this member is about to end as it should."""
        self._book.put(f"left/{self._key}", self._own)

    def tell_agent(self, pid: int) -> None:
        """Make known which torchrun process has started this one, and waits for it."""
        agent = msgspec.json.encode(ProcessIdentity.of(pid)).decode()
        self._book.put(f"agent/{self._key}", agent)

    def has_lost_agent(self) -> bool:
        """Return whether the torchrun that has started the member has ended."""
        agent = self._read("agent")
        return agent is not None and agent.has_ended()

    def process(self) -> ProcessIdentity | None:
        """Return the process that has registered last, or None."""
        return self._read("member")

    def successor(self) -> ProcessIdentity | None:
        """Return the process that has registered in the place of this one, or None."""
        held = self._book.peek(f"member/{self._key}")
        return None if held in (None, self._own) else _parse(held)

    def num_beats(self) -> int:
        """Return the number of heartbeats, over all restarts of the member."""
        return int(self._book.peek(f"beats/{self._key}") or 0)

    def progress(self) -> int:
        """Return the progress that the member has reported last, or 0."""
        return int(self._book.peek(f"progress/{self._key}") or 0)

    def count_restart(self, progress: int) -> int:
        """Note that the member started again; return how often without progress.

        ``progress`` is that of the whole job.
        """
        num, previous = self.restarts()
        num = 1 if progress > previous else num + 1
        self._book.put(f"restarts/{self._key}", f"{num} {progress}")
        return num

    def restarts(self) -> tuple[int, int]:
        """Return what was noted last, and the progress then; or 0 and -1."""
        noted = self._book.peek(f"restarts/{self._key}") or "0 -1"
        num, _, progress = noted.partition(" ")
        return int(num), int(progress)

    def cause(self, process: ProcessIdentity) -> str | None:
        """Return why that process has failed, or None: it has not reported it."""
        failed = self._book.peek(f"failed/{self._key}") or ""
        pid, _, cause = failed.partition(" ")
        return cause if pid == str(process.pid) else None

    def is_done(self) -> bool:
        """Return whether the member's work is done."""
        return self._book.peek(f"done/{self._key}") == "1"

    def ending(self, process: ProcessIdentity) -> Ending | None:
        """Return how that process has ended, or None; "lost" is its connection."""
        # In this order: a member deregisters before it ends.
        has_ended, is_lost = process.has_ended(), self._read("lost") == process
        if self._read("left") == process:
            return "left"
        return "killed" if has_ended else "lost" if is_lost else None

    def find_log(self) -> str:
        """Say where the log of the member is; empty: it is not known."""
        place = self._book.peek(f"log/{self._key}")
        if place is None:  # it has not joined; torchx has a folder for each
            own = Path(failures.find_own_log())
            path = own.parents[2] / self._key / own.name if own.name else own
            return f"its log: {path}" if path.is_file() else ""
        host, _, log = place.partition(" ")
        if log and host == socket.gethostname():
            return f"its log: {log}"
        return f"its log: {log} on host {host}" if log else f"its log is on host {host}"

    def is_gone(self, process: ProcessIdentity) -> bool:
        """Return whether that process and its agent, or its connection, are no more."""
        is_running = process.is_running()
        for agent in (self._read("agent"), process.supervisor):
            if agent is not None and agent.is_running():
                return False
        # None: of another host, where the connection ends with the process.
        return self._read("lost") == process if is_running is None else not is_running

    def _read(self, kind: str) -> ProcessIdentity | None:
        text = self._book.peek(f"{kind}/{self._key}")
        return None if text is None else _parse(text)

    def _await_end(self, process: ProcessIdentity, silent_s: float) -> bool:
        """Wait until a member beats, or has ended; return whether it has ended."""
        num_beats = self.num_beats()
        deadline = time.monotonic() + silent_s
        while time.monotonic() < deadline:
            if self._book.state()[0] == "finished":
                return False  # a finished job needs no replacement
            if self.ending(process) is not None:
                return True
            if self.num_beats() != num_beats:
                return False
            time.sleep(_POLL_S)
        return True


def _parse(text: str) -> ProcessIdentity:
    process: ProcessIdentity = parse_json(
        text, ProcessIdentity, "a member's key", FrameError
    )
    return process
