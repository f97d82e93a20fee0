"""One member of a job in the address book: register, heartbeat, leave.

    member/<role>/<index>       identity of its process, as JSON
    beats/<role>/<index>        number of heartbeats
    compiling                   number of heartbeats of processes that compile
    done/<role>/<index>         "1": the work of this member is done
    left/<role>/<index>         identity of the process that has left
    lost/<role>/<index>         identity of the process whose connection is lost

Clocks of two hosts are never compared: the number of heartbeats must grow, and the
reader measures on its own clock for how long it did not.
"""

import time

import msgspec

from persia_torchrec.decoding import parse_json
from persia_torchrec.errors import FrameError, JobMismatchError
from persia_torchrec.wire.address_book import COMPILING, AddressBook
from persia_torchrec.wire.processes import ProcessIdentity

_POLL_S = 0.05


class MemberRecord:
    """The keys of one member in the address book. Any thread may call any method."""

    def __init__(self, book: AddressBook, role: str, index: int) -> None:
        self._book = book
        self.who = f"{role} {index}"
        self._key = f"{role}/{index}"
        self._own = ""

    def register(self, silent_s: float) -> None:
        """Become the member, after the previous one has ended if there was one.

        Args:
            silent_s: how long a member may miss heartbeats before it counts as dead.

        Raises:
            JobMismatchError: a living process is that member.
        """
        own = msgspec.json.encode(ProcessIdentity.of_this_process()).decode()
        holder = self._book.peek(f"member/{self._key}")
        while holder is None or self._has_ended(holder, silent_s):
            if self._book.claim(f"member/{self._key}", own, holder or "") == own:
                self._own = own
                self.beat()
                return
            holder = self._book.peek(f"member/{self._key}")  # another was faster
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

    def beat_compiling(self) -> None:
        """Report that this process compiles its loops; waits are extended meanwhile."""
        self._book.increase(COMPILING)

    def report_done(self) -> None:
        """Report that the work of this member is done."""
        self._book.put(f"done/{self._key}", "1")

    def leave(self) -> None:
        """Report that this member is about to end as it should."""
        self._book.put(f"left/{self._key}", self._own)

    def process(self) -> ProcessIdentity | None:
        """Return the process that has registered last, or None."""
        text = self._book.peek(f"member/{self._key}")
        return None if text is None else _parse(text)

    def num_beats(self) -> int:
        """Return the number of heartbeats, over all restarts of the member."""
        return int(self._book.peek(f"beats/{self._key}") or 0)

    def is_done(self) -> bool:
        """Return whether the member's work is done."""
        return self._book.peek(f"done/{self._key}") is not None

    def has_left(self, process: ProcessIdentity) -> bool:
        """Return whether that process has left."""
        return self._is(f"left/{self._key}", process)

    def is_lost(self, process: ProcessIdentity) -> bool:
        """Return whether the connection of that process is lost."""
        return self._is(f"lost/{self._key}", process)

    def _is(self, key: str, process: ProcessIdentity) -> bool:
        text = self._book.peek(key)
        return text is not None and _parse(text) == process

    def _has_ended(self, holder: str, silent_s: float) -> bool:
        """Wait until a member beats, or has ended; return whether it has ended."""
        process = _parse(holder)
        num_beats = self.num_beats()
        deadline = time.monotonic() + silent_s
        while time.monotonic() < deadline:
            if self._book.state()[0] == "finished":
                return False  # a finished job needs no replacement
            if process.has_ended() or self.has_left(process) or self.is_lost(process):
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
