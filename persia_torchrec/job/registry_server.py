"""The coordinator's end of the address book: requests to the state of the job.

A request is a message of kind BOOK with one JSON value, a ``Request`` of ``state.py``
with its class as ``type``; it is answered by a JSON value. All of them are idempotent,
so a client whose connection breaks sends its request again; only of heartbeats there
may be one more. The process that hosts the book calls :meth:`BookServer.answer`: it has
no connection to itself.

The connection by which a member registers, or beats, is that member's: the kernel
closes it when the process ends, and when its host stops to answer for ``SILENT_S``. A
connection that is absent for ``timeouts.CONNECTION_LOST_S`` is lost, until it is back.

A coordinator with a supervisor writes the whole state to memory that outlives it:
before it answers a request that changes it, and within a second for progress. The next
one reads it, and continues.
"""

import contextlib
import functools
import operator
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from persia_torchrec import timeouts
from persia_torchrec.errors import FrameError
from persia_torchrec.job.requests import (
    MAX_REQUEST_BYTES,
    AskStatus,
    Beat,
    Register,
    Request,
)
from persia_torchrec.job.state import ANSWERS, UNWRITTEN, JobState, Member
from persia_torchrec.job.status import Statuses
from persia_torchrec.job.survivable_memory import TwoHalves
from persia_torchrec.rpc.greeting import Greeting
from persia_torchrec.rpc.listener import ListenerLimits
from persia_torchrec.rpc.listener_thread import ListenerThread, make_reply
from persia_torchrec.rpc.messages import Frames, Header, Kind, decode_json

_REQUESTS: Any = functools.reduce(operator.or_, ANSWERS) | AskStatus
_DECODER = msgspec.json.Decoder(_REQUESTS)  # by which a heartbeat takes half the time
_LOOK_S = 0.2
_MOST_LOOKS = 32  # members whose connections are looked at then
_LATE = 1.25  # a heartbeat is, after this part of its interval


class Journal:
    """The state of a job in memory that outlives the process; without one, nothing.

    ``memory`` is the descriptor of its file. The state has one writer at a time.
    """

    def __init__(self, memory: int | None = None) -> None:
        self._halves = None if memory is None else TwoHalves(memory)

    def read(self) -> JobState | None:
        """Return the state that another process has left, or None."""
        found = b"" if self._halves is None else self._halves.read()
        if not found:
            return None
        try:
            state: JobState = msgspec.msgpack.decode(found, type=JobState)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise FrameError(
                "The memory of a coordinator must hold the state of its job. "
                f"Received: {exc}."
            ) from exc
        return state

    def write(self, job: JobState) -> None:
        """Replace what is written by a state."""
        job.is_stale = False
        if self._halves is not None:
            self._halves.write(msgspec.msgpack.encode(job))

    def close(self) -> None:
        """Close the file, which stays. May be called twice."""
        if self._halves is not None:
            self._halves.close()
            self._halves = None


class BookServer(ListenerThread):
    """The state of a job behind a lock, and the thread that answers requests to it."""

    encrypts = True
    limits = ListenerLimits(
        frame_bytes=MAX_REQUEST_BYTES + 1024
    )  # with what CURVE adds

    def __init__(
        self, host: str, port: int, greeting: Greeting, job: JobState, journal: Journal
    ) -> None:
        self.lock = threading.RLock()
        self.job = job  # guarded by lock
        self.statuses = Statuses(str(Path.cwd()))  # guarded by lock
        self._journal = journal  # guarded by lock
        back = time.monotonic() + timeouts.MEMBERS_BACK_S
        connected = (one for one in job.members.values() if one.connection)
        self._absent_since = {member.who: back for member in connected}
        self._unlooked: list[Member] = []
        self._next_look = self._next_write = 0.0
        journal.write(job)
        super().__init__("address book", host, port, greeting)

    def answer(self, request: Request, peer: bytes = b"") -> object:
        """Answer a request, of a connection or of this process; from any thread."""
        with self.lock:
            self.job.clock.advance(time.monotonic())
            if isinstance(request, AskStatus):
                return self.statuses.of(self.job)
            reply = ANSWERS[type(request)](self.job, request)  # type: ignore[operator]
            if isinstance(request, Beat | Register):
                self._hear(request, peer)
            if not isinstance(request, UNWRITTEN):
                self._journal.write(self.job)
            return reply

    def close(self) -> None:
        """Stop; requests under way are answered first. May be called twice."""
        super().close()
        with self.lock:
            self._journal.close()

    def _begin(self, peer: bytes, header: Header, frames: Frames) -> None:
        def answer(header: Header, frames: Frames) -> Frames:
            if header.kind is not Kind.BOOK:
                raise FrameError(
                    "A message to the address book must be of kind BOOK. "
                    f"Received: {header.kind.name}."
                )
            reply = self.answer(_decode(frames), peer)
            return [msgspec.json.encode(reply)]

        self._listener.send(peer, *make_reply(answer, header, frames))

    def _hear(self, request: Beat | Register, peer: bytes) -> None:
        """Note what a member says, and the connection by which that has come."""
        member = self.job.members.get(request.who)
        nonce = request.nonce if isinstance(request, Beat) else request.process.nonce
        if member and member.process and member.process.nonce == nonce:
            if isinstance(request, Beat):
                self.statuses.hear(self.job, request)
            member.connection, member.is_lost = peer, False
            self._absent_since.pop(member.who, None)

    def _work(self) -> bool:
        """Look which members are connected still; write down progress."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + _LOOK_S
        num_rejected = self._listener.count_rejected()
        with self.lock:
            self.job.clock.advance(now)
            self.statuses.num_rejected += num_rejected
            self._unlooked = self._unlooked or self._find_quiet()
            for member in self._unlooked[:_MOST_LOOKS]:
                self._look_at(member, now)
            del self._unlooked[:_MOST_LOOKS]
            if self.job.is_stale and now >= self._next_write:
                self._next_write = now + timeouts.PROGRESS_WRITE_S
                self._journal.write(self.job)
        return False

    def _find_quiet(self) -> list[Member]:
        """Return members with a connection whose heartbeat is late."""
        late_s = self.job.clock.now_s - _LATE * self.job.next_beat_s()
        every = self.job.members.values()
        return [one for one in every if one.connection and one.beat_s < late_s]

    def _look_at(self, member: Member, now: float) -> None:
        if self._listener.is_connected(member.connection):
            self._absent_since.pop(member.who, None)
            member.is_lost = False
        elif (
            now - self._absent_since.setdefault(member.who, now)
            > timeouts.CONNECTION_LOST_S
        ):
            member.is_lost = True


def _decode(frames: Frames) -> Request:
    if len(frames) == 2:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            request: Request = _DECODER.decode(frames[1])
            return request
    malformed: Request = decode_json(frames, _REQUESTS)  # which says what is wrong
    return malformed
