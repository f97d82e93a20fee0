"""The roll of a job: which processes are part of it, and whether they still live.

A member signs the roll, beats while it lives, and leaves. The coordinator reads the
roll. Nobody compares clocks of two machines: a beat is a number that must grow, and
the reader measures on its own clock for how long it did not. A process that shares
the reader's process table is looked up there, too, which shows a sudden death at once.

What lies in the address book:

    member/<role>/<index>       the signature: process and table of processes, as JSON
    beats/<role>/<index>        how often the member has said that it lives
    done/<role>/<index>         "1": the work of this member is done
    left/<role>/<index>         the signature of the member that has left
"""

import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from persia_torchrec.wire.discovery import AddressBook, JobState


@dataclass(frozen=True, slots=True)
class Signature:
    """One process that has signed the roll; a restarted one signs anew."""

    text: str
    """As it lies in the address book, unique to the process."""

    pid: int
    """Its number in its own table of processes."""

    process_table: str
    """Which table that is; empty when the system does not tell."""

    def process_is_gone(self) -> bool:
        """Return whether the process is known to have ended."""
        if not self.process_table or self.process_table != _process_table():
            return False
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        # "pid (name) state ...", where the name may hold anything.
        return stat.rpartition(")")[2].split()[0] in "ZX"


class Roll:
    """The lines of one member of the job.

    Thread-safe as far as the address book is.
    """

    def __init__(self, book: AddressBook, role: str, index: int) -> None:
        self._book = book
        self._line = f"{role}/{index}"
        self._own_signature = ""

    def sign(self) -> None:
        """Become a member."""
        self._own_signature = json.dumps(
            {
                "pid": os.getpid(),
                "process_table": _process_table(),
                "nonce": uuid.uuid4().hex,
            }
        )
        self._book.increase(f"beats/{self._line}")
        self._book.put(f"member/{self._line}", self._own_signature)

    def beat(self) -> None:
        """Say that this member lives."""
        self._book.increase(f"beats/{self._line}")

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
        return Signature(text, int(values["pid"]), str(values["process_table"]))

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


def _process_table() -> str:
    """Name this machine's boot and the process namespace in it; empty off Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
