"""The roll of a job: which processes are part of it, and whether they still live.

A member signs the roll, beats while it lives, and leaves. The coordinator reads the
roll. The place of a member that lives is taken: who comes to it is refused.

Nobody compares clocks of two machines: a beat is a number that must grow, and
the reader measures on its own clock for how long it did not. A process that shares
the reader's process table is looked up there, too, which shows a sudden death at once.

What lies in the address book:

    member/<role>/<index>       the signature: process and table of processes, as JSON
    beats/<role>/<index>        how often the member has said that it lives
    compiling                   how often any has said that it compiles its loops
    done/<role>/<index>         "1": the work of this member is done
    left/<role>/<index>         the signature of the member that has left
"""

import json
import os
import signal
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from persia_torchrec.errors import JobMismatchError
from persia_torchrec.wire.discovery import COMPILING, AddressBook, JobState

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Signature:
    """One process that has signed the roll; a restarted one signs anew."""

    text: str
    """As it lies in the address book, unique to the process."""

    pid: int
    """Its number in its own table of processes."""

    process_table: str
    """Which table that is; empty when the system does not tell."""

    start: str
    """When it began, as the table tells: its number may be given to another later."""

    def process_is_gone(self) -> bool:
        """Return whether the process is known to have ended."""
        return self._is_in_own_table() and not self._is_running()

    def kill(self) -> bool:
        """End the process by SIGKILL, if it is for sure the one that has signed.

        Returns:
            Whether the signal was sent. One that is stopped ends by it as well.
        """
        if not self._is_in_own_table():
            return False
        try:
            process = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            # What is looked at now is what is held: the number cannot change hands.
            if not self._is_running():
                return False
            signal.pidfd_send_signal(process, signal.SIGKILL)
        except OSError:
            return False
        finally:
            os.close(process)
        return True

    def _is_in_own_table(self) -> bool:
        return bool(self.process_table) and self.process_table == _process_table()

    def _is_running(self) -> bool:
        state, start = _state_of(self.pid)
        return state not in "ZX" and start == self.start


class Roll:
    """The lines of one member of the job.

    Thread-safe as far as the address book is.
    """

    def __init__(self, book: AddressBook, role: str, index: int) -> None:
        self._book = book
        self._who = f"{role} {index}"
        self._line = f"{role}/{index}"
        self._own_signature = ""

    def sign(self, silent_s: float) -> None:
        """Become a member, in the place of one that has ended if there was one.

        Args:
            silent_s: how long a member may be silent before it is taken for dead.

        Raises:
            JobMismatchError: a member that lives has the place.
        """
        own = json.dumps(
            {
                "pid": os.getpid(),
                "process_table": _process_table(),
                "start": _state_of(os.getpid())[1],
                "nonce": uuid.uuid4().hex,
            }
        )
        holder = self.signature()
        while holder is None or self._has_ended(holder, silent_s):
            expected = "" if holder is None else holder.text
            if self._book.swap(f"member/{self._line}", expected, own) == own:
                self._own_signature = own
                self.beat()
                return
            holder = self.signature()  # another was quicker
        job = self._book.greeting.job_id
        raise JobMismatchError(
            f"The place of {self._who} in job {job!r}, at port {self._book.port}, must "
            f"be free. Received: process {holder.pid} has it in a job that is "
            f"{self.job_state()[0]}. Start each process of a job once. "
            f"{self._book.another_port()}"
        )

    def beat(self) -> None:
        """Say that this member lives."""
        self._book.increase(f"beats/{self._line}")

    def compile(self) -> None:
        """Say that this member compiles its loops; nobody's wait counts meanwhile."""
        self._book.increase(COMPILING)

    def done(self) -> None:
        """Say that the work of this member is done."""
        self._book.put(f"done/{self._line}", "1")

    def leave(self) -> None:
        """Say that this member is about to end, as it should."""
        self._book.put(f"left/{self._line}", self._own_signature)

    def signature(self) -> Signature | None:
        """Return who has signed last, or None."""
        text = self._book.peek(f"member/{self._line}")
        if text is None:
            return None
        values = json.loads(text)
        return Signature(
            text,
            int(values["pid"]),
            str(values["process_table"]),
            str(values["start"]),
        )

    def num_beats(self) -> int:
        """Return how often the member has beaten, over all its restarts."""
        return int(self._book.peek(f"beats/{self._line}") or 0)

    def is_done(self) -> bool:
        """Return whether the member's work is done."""
        return self._book.peek(f"done/{self._line}") is not None

    def job_state(self) -> tuple[JobState, str]:
        """Return the state of the job, and the reason if it failed."""
        return self._book.state()

    def has_left(self, signature: Signature) -> bool:
        """Return whether the process of that signature has left."""
        return self._book.peek(f"left/{self._line}") == signature.text

    def is_lost(self, signature: Signature) -> bool:
        """Return whether the connection of that process is lost."""
        return self._book.peek(f"lost/{self._line}") == signature.text

    def _has_ended(self, holder: Signature, silent_s: float) -> bool:
        """Wait until a member beats, or has ended; return whether it has ended."""
        num_beats = self.num_beats()
        deadline = time.monotonic() + silent_s
        while time.monotonic() < deadline:
            if self.job_state()[0] == "finished":
                return False  # nobody has to be replaced any more
            if holder.process_is_gone() or self.has_left(holder):
                return True
            if self.is_lost(holder):
                return True
            if self.num_beats() != num_beats:
                return False
            time.sleep(_POLL_S)
        return True


def _state_of(pid: int) -> tuple[str, str]:
    """Return the state of a process, "X" if there is none, and when it began."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X", ""
    # "pid (name) state ...", where the name may hold anything.
    words = stat.rpartition(")")[2].split()
    return words[0], words[19]


def _process_table() -> str:
    """Name this machine's boot and the process namespace in it; empty off Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
