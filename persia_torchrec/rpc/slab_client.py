"""A client's end of memory that it shares with a server; see ``slab.py``.

    caller  --send----------------->  slab  --a byte, if it sleeps-->  server
    caller or I/O thread  <--take---  slab  <--a futex, or a byte---  server

One caller that waits leads: it takes the replies of all, and sleeps until the next one.
Others wait until it has handed theirs over, or until it leaves and one of them leads.
The I/O thread takes what no caller waits for.
"""

import contextlib
import fcntl
import os
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from persia_torchrec import timeouts
from persia_torchrec.errors import FrameError
from persia_torchrec.rpc import slab as layout
from persia_torchrec.rpc.messages import Frames, SentFrame
from persia_torchrec.rpc.reply import Reply
from persia_torchrec.rpc.slab import FreeList, RequestSlot, Slab

REPLY_BYTES = 16384
"""Room for a reply of unknown size; one that is larger comes over TCP."""

_LEAST_FRAME = 4096  # bytes of frames that are not copied out of the slab


class SharedMemoryTransport:
    """The client's end of one slab. Any thread may call any method.

    Attributes:
        socket: a Unix socket that is closed when the server is gone.
        num_requests: how many requests went through it.
        num_bells: how often the server slept, and was woken for one.
        num_sleeps: how often a caller slept until a reply came.
        first_over_tcp: how many messages had gone over TCP when it was obtained.
    """

    def __init__(self, shared: Slab, connection: socket.socket) -> None:
        self.slab, self.socket = shared, connection
        self.fd = connection.fileno()
        self._words = shared.words
        self._lock = threading.Lock()  # of who sends
        self._rooms = FreeList(layout.FIRST, shared.size_bytes)  # guarded by _lock
        self._freed: deque[tuple[int, int]] = deque()  # any thread appends
        self._open: dict[int, tuple[tuple[int, int], tuple[int, int], RequestSlot]] = {}
        self._views: dict[int, weakref.ref[Any]] = {}  # of replies, by their begin
        self._taking = threading.Lock()
        self._num_taken = 0  # guarded by _taking
        self._leading = threading.Lock()  # of who takes replies for all, and sleeps
        self._waiting = threading.Lock()
        self._sleeps = self._listens = False  # guarded by _waiting
        self._followers: list[Reply] = []  # guarded by _waiting
        self.is_closed, self.num_requests, self.first_over_tcp = False, 0, 0
        self.num_bells = self.num_sleeps = self._rung = 0
        # Of the connection: hand replies over; wake the I/O thread.
        self.deliver: Callable[[], None] = lambda: None
        self.wake: Callable[[], None] = lambda: None

    def send(
        self, number: int, reply: Reply, reply_bytes: int, num_over_tcp: int
    ) -> bool:
        """Send the request of a reply; return False if it must be sent over TCP.

        So many messages over TCP come before it. A request that ends while it is
        written is not sent.
        """
        with self._lock:
            frames = reply.message
            if self.is_closed or not self._reserve(
                number, frames, reply_bytes, num_over_tcp
            ):
                return False
            place = self._open[number][2]
        try:
            self.slab.touch(max(place.begin + place.size, place.reply + place.room))
            self.slab.write(place.begin, frames)
        except BaseException:  # of a device that a late frame is on
            self.settle(number)
            raise
        with self._lock:
            if self.is_closed or reply.has_ended():
                self.settle(number)
                return True
            reply.source = self
            self.num_requests += 1
            self._ring(self.slab.post_request(place))
        return True

    def _reserve(
        self,
        number: int,
        frames: Sequence[SentFrame],
        reply_bytes: int,
        num_over_tcp: int,
    ) -> bool:
        """Find a place for a request and its reply; the lock is held."""
        while self._freed:
            self._rooms.give(self._freed.popleft())
        if len(frames) > layout.MAX_FRAMES or len(self._open) >= layout.RING:
            return False
        size = layout.size_of_message(list(map(len, frames)))
        if (asked := self._rooms.take(size)) is None:
            return False
        told = self._rooms.take(layout.BODY + max(reply_bytes, REPLY_BYTES))
        if told is None:
            self._rooms.give(asked)
            return False
        place = RequestSlot(asked[0], size, *told, num_over_tcp - self.first_over_tcp)
        self._open[number] = asked, told, place
        return True

    def announce(self) -> None:
        """Wake the server for a request that is posted soon, unless it is awake."""
        self._ring(self._words[layout.SLEEPS])

    def _ring(self, sleep: int) -> None:
        """Send a byte, the first for this sleep of the server."""
        if sleep in (0, self._rung):
            return
        self._rung = sleep
        self.num_bells += 1
        with contextlib.suppress(OSError):  # its end is seen by who reads
            self.socket.send(b"\0", socket.MSG_DONTWAIT)

    def settle(self, number: int) -> None:
        """Give up the place of a request that is not answered here."""
        if (opened := self._open.pop(number, None)) is not None:
            self._freed.extend(opened[:2])

    def has_replies(self) -> bool:
        """Return whether replies are there that were not taken."""
        return self._words[layout.REPLIES] != self._num_taken

    def take(self) -> list[tuple[int, Frames]]:
        """Return the replies that are there, by the number of their request."""
        found = []
        with self._taking:
            posted = self._words[layout.REPLIES]
            while self._num_taken < posted:
                number = self.slab.reply(self._num_taken)
                self._num_taken += 1
                opened = self._open.pop(number, None)
                if opened is not None:
                    asked, told, place = opened
                    self._freed.append(asked)
                    with contextlib.suppress(FrameError):  # it is as if lost
                        found.append((number, self._frames(told, place)))
        return found

    def _frames(self, told: tuple[int, int], place: RequestSlot) -> Frames:
        """Return the frames of a reply; large ones keep their memory in the slab."""
        pieces = self.slab.frames(place.reply, place.room)
        view, base = memoryview(self.slab.memory), place.reply
        if all(size < _LEAST_FRAME for _, size in pieces):
            frames: Frames = [bytes(view[at : at + size]) for at, size in pieces]
            self._freed.append(told)
            return frames
        # Of its own, so that its end is that of all views of the reply.
        whole = np.frombuffer(self.slab.memory, np.uint8, place.room, base)
        freed, views = self._freed, self._views

        def give(_: "weakref.ref[Any]") -> None:
            views.pop(base, None)
            freed.append(told)

        views[base] = weakref.ref(whole, give)
        view = whole.data
        frames = [view[at - base : at - base + size] for at, size in pieces]
        frames[0] = bytes(frames[0])
        return frames

    def wait(self, reply: Reply, stop_s: float) -> None:
        """Wait for a reply, until a time: take what comes, or wait for who takes it.

        It may return before, if another thread ends the request.
        """
        try:
            while not (reply.has_ended() or self.is_closed):
                if self._leading.acquire(blocking=False):
                    try:
                        self._lead(reply, stop_s)
                    finally:
                        self._leading.release()
                    return
                with self._waiting:
                    self._followers.append(reply)
                if self._leading.locked():  # by one that nudges a follower afterwards
                    reply.park(stop_s - time.monotonic())
                with self._waiting:
                    self._followers.remove(reply)
                if time.monotonic() >= stop_s:
                    return
        finally:
            self._nudge()

    def look(self) -> None:
        """Hand over the replies that are there, unless another thread does so."""
        if self.has_replies() and self._leading.acquire(blocking=False):
            try:
                self.deliver()
            finally:
                self._leading.release()
                self._nudge()

    def _nudge(self) -> None:
        """Have another caller take replies, if one waits: this one may have led."""
        if self._followers:
            with self._waiting:
                waiting = (f for f in self._followers if not f.has_ended())
                follower = next(waiting, None)
            if follower is not None:
                follower.nudge()

    def _lead(self, reply: Reply, stop_s: float) -> None:
        """Take replies, for all callers, until one has come or is another thread's."""
        words, spin_s = self._words, 0.0
        while reply.source is self and not reply.has_ended():
            seen, now_s = words[layout.REPLIES], time.monotonic()
            if seen != self._num_taken and not self.is_closed:
                self.deliver()
                spin_s = 0.0
            elif not spin_s:
                spin_s = now_s + layout.SPIN_US * 1e-6
            elif now_s >= spin_s:
                if self.is_closed or now_s >= stop_s:
                    return
                self._say_who_waits(callers=True)
                self.num_sleeps += 1
                self.slab.wait_for_reply(seen, stop_s - now_s)
                self._say_who_waits(callers=False)

    def listen(self, listens: bool) -> None:
        """Say whether the I/O thread wants a byte for each reply."""
        self._say_who_waits(listens=listens)
        layout.fence()
        if listens and self.has_replies():
            self.wake()

    def _say_who_waits(
        self, *, callers: bool | None = None, listens: bool | None = None
    ) -> None:
        with self._waiting:
            self._sleeps = self._sleeps if callers is None else callers
            self._listens = self._listens if listens is None else listens
            waits = layout.CALLERS * self._sleeps | layout.IO_THREAD * self._listens
            self._words[layout.WAITS] = waits

    def is_lost(self) -> bool:
        """Read the bytes that the server has sent; return whether it is gone."""
        try:
            return not self.socket.recv(4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Leave the slab; replies stay while they are used. May be called twice."""
        with self._lock:
            self.is_closed = True
        # They refer to this: its memory is free at once, not at a garbage collection.
        self.deliver = self.wake = lambda: None
        self.slab.wake_callers()
        self.socket.close()


class Invitation(msgspec.Struct):
    """Where a server hands its memory over, or why it does not."""

    socket: str = ""
    rejected: str = ""


class HandedOver(msgspec.Struct):
    """What the server says of a proof that was read in its memory."""

    bytes: int = 0
    rejected: str = ""


def obtain(ask: Callable[[dict[str, object], Any], Any]) -> SharedMemoryTransport:
    """Get memory that a server shares, see ``slab_server.py``.

    ``ask`` sends it a SLAB over TCP, and returns what it answers, of a type.

    Raises:
        PersiaError, OSError: why there is none.
    """
    if why := layout.why_not():
        raise FrameError(why)
    proof = secrets.token_bytes(layout.PROOF_BYTES)
    invitation: Invitation = ask({"proof": proof.hex()}, Invitation)
    if invitation.rejected:
        raise FrameError(invitation.rejected)
    shared, connection, drawn = _fetch(invitation.socket, proof)
    try:
        told: HandedOver = ask({"drawn": drawn.hex()}, HandedOver)
        if told.rejected:
            raise FrameError(told.rejected)
    except BaseException:
        connection.close()
        raise
    return SharedMemoryTransport(shared, connection)


def _fetch(name: str, proof: bytes) -> tuple[Slab, socket.socket, bytes]:
    """Get the memory of a server of this host; return its proof, too.

    Raises:
        OSError, FrameError: why there is none.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeouts.SHARED_MEMORY_S)
        try:
            connection.connect("\0" + name)
        except ConnectionRefusedError as exc:
            raise FrameError("it is on another host, or in another container") from exc
        with contextlib.suppress(BrokenPipeError):  # it says why
            connection.sendall(proof)
        told, fds, _, _ = socket.recv_fds(connection, 512, 1)
        try:
            if not fds:
                raise FrameError(told[1:].decode(errors="replace") or "it hung up")
            seals = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK:
                raise FrameError("the size of its memory is not sealed")
            shared = Slab(fds[0])
        finally:
            for fd in fds:
                os.close(fd)
        connection.setblocking(False)
        return shared, connection, bytes(shared.memory[: layout.PROOF_BYTES])
    except BaseException:
        connection.close()
        raise
