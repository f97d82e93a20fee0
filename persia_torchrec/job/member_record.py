"""Requests of one member to the coordinator: register, heartbeat, report, leave."""

import os
import socket
import time
from collections.abc import Mapping
from types import MappingProxyType

from persia_torchrec import env
from persia_torchrec.errors import JobMismatchError
from persia_torchrec.job import failures
from persia_torchrec.job.process_identity import ProcessIdentity
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.requests import MAX_TEXT, Beat, Raise, Register, Report, View
from persia_torchrec.job.state import Member

_POLL_S = 0.05


class MemberRecord:
    """One member, in the address book of its job. Any thread may call any method."""

    def __init__(self, book: AddressBook, role: str, index: int) -> None:
        self._book, self._place = book, (role, index)
        self.who = f"{role} {index}"
        self._own: ProcessIdentity | None = None

    def read(self) -> Member:
        """Return the member as the coordinator knows it now."""
        return self._book.member(*self._place)

    def process(self) -> ProcessIdentity | None:
        """Return the process that has registered last, or None."""
        return self.read().process

    def register(self, silent_s: float, agent: int | None = None) -> bool:
        """Become the member, unless a living process is that one: JobMismatchError.

        Returns whether another process was it before. ``agent`` is the torchrun that
        has started this process, and waits for it.
        """
        process = ProcessIdentity.of_this_process()
        log = failures.find_own_log() or env.slurm_log(self.who.split()[0])
        place = f"{socket.gethostname()} {log}"[:MAX_TEXT]
        above = None if agent is None else ProcessIdentity.of(agent)
        while True:
            holder = self.read().process
            is_free = holder is None or process.succeeds(holder)
            if not (is_free or self._await_end(silent_s)):
                break
            expected = holder.nonce if holder else ""
            request = Register(*self._place, process, expected, above, place)
            if self._book.call(request, str) == process.nonce:
                self._own = process
                return holder is not None
        assert holder is not None
        raise JobMismatchError(
            f"No other process must be {self.who} in job "
            f"{self._book.greeting.job_id!r}, at port {self._book.port}. Received: "
            f"process {holder.pid} is, in a job that is {self._book.state()[0]}. Start "
            f"each process of a job once. {self._book.another_port()}"
        )

    def beat(
        self,
        progress: int,
        notes: dict[str, str],
        figures: Mapping[str, float] = MappingProxyType({}),
        *,
        is_compiling: bool = False,
        is_paused: bool = False,
    ) -> View:
        """Send a heartbeat; return how the job is."""
        nonce = self._own.nonce if self._own else ""
        beat = Beat(
            *self._place,
            nonce,
            progress,
            is_compiling=is_compiling,
            is_paused=is_paused,
            notes=notes,
            figures={**figures},
        )
        return self._book.call(beat, View)

    def report_progress(self, progress: int) -> None:
        """Report a number that grows with trained batches."""
        self._book.call(Report(*self._place, progress=progress), bool)

    def report_failure(self, cause: str) -> bool:
        """Report why this process ends; return whether it is another cause than before.

        Its supervisor starts it again.
        """
        report = Report(*self._place, pid=os.getpid(), cause=cause[:MAX_TEXT])
        return self._book.call(report, bool)

    def report_raise(self, place: str, progress: int | None) -> bool:
        """Report where a script has raised; return whether it did so before a restart.

        It did if as much was trained then: ``progress``, or what trainers reported.
        """
        start = env.num_group_restarts()
        request = Raise(*self._place, start, place[:MAX_TEXT], progress)
        return self._book.call(request, bool)

    def report_done(self) -> None:
        """Report the work as done; the job is finished when all trainers do."""
        self._book.call(Report(*self._place, is_done=True), bool)

    def report_saved(self) -> None:
        """Report that nothing is left to save here, in a job that is told to end."""
        self._book.call(Report(*self._place, has_saved=True), bool)

    def leave(self) -> None:
        """Report that this member is about to end as it should."""
        self._book.call(Report(*self._place, left=self._own), bool)

    def _await_end(self, silent_s: float) -> bool:
        """Wait until the member beats, or has ended; return whether it has ended."""
        num_beats = self.read().num_beats
        deadline = time.monotonic() + silent_s
        while time.monotonic() < deadline:
            member = self.read()
            if self._book.state()[0] == "finished":
                return False  # a finished job needs no replacement
            if member.ending() is not None:
                return True
            if member.num_beats != num_beats:
                return False
            time.sleep(_POLL_S)
        return True
