"""A server's end of memory that it shares with clients; see ``slab.py``.

How both prove that they share memory, and a user:

    client -- TCP, which has proven the token --> SLAB {"proof": A}
    server --> {"socket": name of an abstract Unix socket}
    client -- Unix socket --> A; the kernel says the user id of who connects
    server -- Unix socket --> the descriptor of memory that begins with B
    client -- TCP --> SLAB {"drawn": B}, read out of the memory
    server --> {"bytes": size}

From then on the client may send any request either way. Those of one client are read in
the order in which it sent them: each one in its slab says how many messages over TCP,
since the second SLAB, come before it. It is read behind these, and before the next one.
"""

import contextlib
import logging
import os
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from persia_torchrec import timeouts
from persia_torchrec.errors import FrameError, WireError
from persia_torchrec.rpc import slab as layout
from persia_torchrec.rpc.messages import (
    Frame,
    Frames,
    Header,
    Kind,
    decode_json,
    encode_json,
)
from persia_torchrec.rpc.slab import RequestSlot, Slab

logger = logging.getLogger(__name__)

DEFAULT_MIB = 1024
MOST_MIB = 2**20
_MOST_BYTES = 2**28  # of one client
_SHARE = 4  # of what is left, one client gets no more than this part
_MAX_GUESTS = 64  # clients that have not got their memory yet
_IN_PLACE = {
    Kind.UPDATE: range(3, 4),
    Kind.WRITE: range(3, 4),
    Kind.BACKWARD: range(2, layout.MAX_FRAMES),
    Kind.BATCH: range(2, 3),
}
"""Frames that are read where they are: numbers, of which each is only calculated with,
and batches, which are copied before they are read. Nothing keeps them longer than until
the reply."""
_LEAST_FRAME = 4096
_MOST_TO_COME = 2**20  # messages over TCP that one in a slab may wait for
_SOON_BYTES = 65536  # of rows that are gathered within some tens of microseconds
_PEER_CREDENTIALS = struct.Struct("3i")


class SlabRequest(msgspec.Struct):
    """What a client asks for in a SLAB."""

    proof: str = ""
    drawn: str = ""
    bytes: int = 0


class _Guest(NamedTuple):
    """A client that was invited: its routing id, bytes wanted, when it is too late."""

    peer: bytes
    size_bytes: int
    stop_s: float


class _Opened(NamedTuple):
    """A request that is not answered: where its reply goes, and rows are already."""

    place: RequestSlot
    rows: int  # address of frame 1 where it was written in place, or 0


class SharedClient:
    """A client and its slab; owned by the listener's thread."""

    def __init__(self, peer: bytes, shared: Slab, connection: socket.socket) -> None:
        self.peer, self.slab, self.socket = peer, shared, connection
        self.words = shared.words
        self.proof = bytes(shared.memory[: layout.PROOF_BYTES])
        self.num_taken = self.num_over_tcp = 0
        self.opened: dict[int, _Opened] = {}

    def has_message(self) -> bool:
        """Return whether a request is in the slab that is to be read now."""
        if self.words[layout.REQUESTS] == self.num_taken:
            return False
        which = self.num_taken % layout.RING
        at = layout.REQUEST_RING + which * len(RequestSlot._fields)
        num_to_come = self.words[at + layout.AFTER] - self.num_over_tcp
        return not 0 < num_to_come <= _MOST_TO_COME  # more is an error

    def take(self) -> tuple[Header, Frames]:
        """Take a request; FrameError: the client breaks the rules of its slab."""
        posted = self.slab.words[layout.REQUESTS]
        if not 0 < posted - self.num_taken <= layout.RING:
            raise FrameError(f"it has posted {posted}, of which {self.num_taken} are.")
        place = self.slab.request(self.num_taken)
        if place.after > self.num_over_tcp:
            raise FrameError(f"it has sent fewer than {place.after} messages over TCP.")
        self.num_taken += 1
        size_bytes = self.slab.size_bytes
        for begin, size in (place[:2], place[2:4]):
            if begin % 64 or not layout.FIRST <= begin <= size_bytes:
                raise FrameError(f"its slab has no message at {begin}.")
            if not layout.BODY <= size <= size_bytes - begin:
                raise FrameError(f"its slab has no {size} bytes at {begin}.")
        self.slab.touch(max(place.begin + place.size, place.reply + place.room))
        (at, size), *others = self.slab.frames(place.begin, place.size)
        view = self.slab.view
        frames: Frames = [bytes(view[at : at + min(size, layout.BODY)])]
        header = Header.decode(frames[0])
        where = _IN_PLACE.get(header.kind, ())
        for i, (at, size) in enumerate(others, 1):
            frame = view[at : at + size]
            is_read_there = i in where and size >= _LEAST_FRAME
            frames.append(frame if is_read_there else memoryview(bytearray(frame)))
        if len(self.opened) > layout.RING:
            raise FrameError(f"more than {layout.RING} requests wait for a reply.")
        self.opened[header.request] = _Opened(place, 0)
        return header, frames

    def body_in_place(self, request: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return the memory of frame 1 of a reply, in the slab if there is room."""
        found = self.opened.get(request)
        if found is None or layout.BODY + num_bytes > found.place.room:
            return np.empty(num_bytes, dtype=np.uint8)
        at = found.place.reply + layout.BODY
        self.opened[request] = found._replace(rows=self.slab.address(at))
        return self.slab.bytes[at : at + num_bytes]

    def answer(
        self, message: Sequence[Frame], found: _Opened, request: int
    ) -> int | None:
        """Write a reply; return who waits for it, or None: there is no room."""
        sizes = list(map(len, message))
        if len(message) > layout.MAX_FRAMES:
            return None
        if layout.size_of_message(sizes) > found.place.room:
            return None
        in_place = 1 if found.rows and _address(message[1]) == found.rows else None
        self.slab.write(found.place.reply, message, in_place)
        waits = self.slab.post_reply(request)
        if waits & layout.CALLERS:
            self.slab.wake_callers()
        if waits & layout.IO_THREAD:
            with contextlib.suppress(OSError):
                self.socket.send(b"\0", socket.MSG_DONTWAIT)
        return waits


class Slabs:
    """All slabs of one listener, whose thread owns them.

    ``max_bytes`` bounds them together; 0: there are none. ``changes`` are Unix sockets
    to poll from now on, or no longer.

    Attributes:
        num_bytes: of all slabs.
        num_requests: that came through them.
        num_wakeups: of this thread, by clients.
        num_woken: callers that slept when their reply came.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = self.num_requests = self.num_wakeups = self.num_woken = 0
        self._door: socket.socket | None = None
        self._name = ""
        self._guests: dict[bytes, _Guest] = {}  # by the proof that they will show
        self._entering: dict[int, tuple[socket.socket, float]] = {}
        self._tenants: dict[bytes, SharedClient] = {}
        self._admitted: list[SharedClient] = []  # of the tenants
        self._by_fd: dict[int, SharedClient] = {}
        self.changes: deque[tuple[int, bool]] = deque()
        self._turn, self._num_sleeps = 0, 1
        self._next_log_s = self._heard_s = 0.0

    def __len__(self) -> int:
        return len(self._admitted)

    def counters(self) -> dict[str, int]:
        """Return what is counted, see ``docs/metrics.md``. Any thread may ask."""
        return {
            "shared_memory_bytes": self.num_bytes,
            "shared_memory_clients": len(self),
            "shared_memory_requests": self.num_requests,
            "shared_memory_wakeups": self.num_wakeups,
            "shared_memory_woken": self.num_woken,
        }

    def fds(self) -> set[int]:
        """Return the descriptors to poll."""
        door = set() if self._door is None else {self._door.fileno()}
        return door | set(self._entering) | set(self._by_fd)

    def invite(self, peer: bytes, frames: Frames) -> bytes:
        """Answer a SLAB; return the body of the reply."""
        asked: SlabRequest = decode_json(frames, SlabRequest)
        if asked.drawn:
            return self._admit(peer, asked.drawn)
        why = layout.why_not()
        if not self._max_bytes:
            why = "the server has --shm-mib 0"
        proof = bytes.fromhex(asked.proof) if _is_hex(asked.proof) else b""
        if len(proof) != layout.PROOF_BYTES:
            raise FrameError("A SLAB has a proof of 32 bytes, in hexadecimal digits.")
        if not why:
            why = self._open_door()
        if why:
            return encode_json({"rejected": why})
        self._forget_late()
        if len(self._guests) >= _MAX_GUESTS:
            return encode_json({"rejected": "too many clients ask at once"})
        stop_s = time.monotonic() + timeouts.SHARED_MEMORY_S
        self._guests[proof] = _Guest(peer, asked.bytes, stop_s)
        return encode_json({"socket": self._name})

    def _admit(self, peer: bytes, drawn: str) -> bytes:
        tenant = self._tenants.get(peer)
        if tenant is None or tenant.proof.hex() != drawn:
            return encode_json({"rejected": "it has read another proof in the memory"})
        if tenant not in self._admitted:
            self._admitted.append(tenant)
        tenant.num_over_tcp = 0  # from here on
        return encode_json({"bytes": tenant.slab.size_bytes})

    def _open_door(self) -> str:
        """Listen on a Unix socket; return why that cannot be done, or ""."""
        if self._door is not None:
            return ""
        name = f"persia_torchrec/{secrets.token_hex(8)}"
        with contextlib.ExitStack() as opened:
            try:
                door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                opened.callback(door.close)
                door.setblocking(False)
                door.bind("\0" + name)
                door.listen(_MAX_GUESTS)
            except OSError as exc:
                return f"no Unix socket ({exc})"
            opened.pop_all()
        self._door, self._name = door, name
        self.changes.append((door.fileno(), True))
        return ""

    def look(self, fds: Iterable[int]) -> None:
        """Do what is to be done for descriptors that are ready."""
        for fd in fds:
            if self._door is not None and fd == self._door.fileno():
                self._accept(self._door)
            elif fd in self._entering:
                self._enter(fd)
            elif fd in self._by_fd:
                self._hear(self._by_fd[fd])

    def _accept(self, door: socket.socket) -> None:
        try:
            connection, _ = door.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # no descriptor is left: who waits there goes away
            self.changes.append((door.fileno(), False))
            door.close()
            self._door = None
            return
        self._forget_late()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, user, _ = _PEER_CREDENTIALS.unpack(credentials)
        if user != os.geteuid() or len(self._entering) >= _MAX_GUESTS:
            self._turn_away(connection, "it belongs to another user, or many wait")
            return
        connection.setblocking(False)
        fd = connection.fileno()
        self._entering[fd] = connection, time.monotonic() + timeouts.SHARED_MEMORY_S
        self.changes.append((fd, True))

    def _enter(self, fd: int) -> None:
        """Hand memory to a client that shows the proof which it was invited with."""
        connection, _ = self._entering.pop(fd)
        try:
            proof = connection.recv(layout.PROOF_BYTES)
        except OSError:
            proof = b""
        guest = self._guests.pop(proof, None)
        if guest is None:
            self.changes.append((fd, False))
            self._turn_away(connection, "it was not invited")
            return
        try:
            tenant = self._hand_over(guest, connection)
        except (OSError, ValueError, MemoryError) as exc:
            self.changes.append((fd, False))
            self._turn_away(connection, f"the server has no memory for it: {exc}")
            return
        if former := self._tenants.get(guest.peer):
            self._leave(former)
        self.num_bytes += tenant.slab.size_bytes
        self._tenants[guest.peer] = self._by_fd[fd] = tenant

    def _hand_over(self, guest: _Guest, connection: socket.socket) -> SharedClient:
        left = self._max_bytes - self.num_bytes
        most = min(guest.size_bytes or _MOST_BYTES, _MOST_BYTES, left // _SHARE)
        size_bytes = most // layout.LEAST_BYTES * layout.LEAST_BYTES
        if not size_bytes:
            raise MemoryError(f"{self.num_bytes} of {self._max_bytes} bytes are taken")
        memory = layout.make_memory(size_bytes)
        try:
            shared = Slab(memory)
            shared.memory[: layout.PROOF_BYTES] = secrets.token_bytes(
                layout.PROOF_BYTES
            )
            shared.words[layout.SLEEPS] = 1
            tenant = SharedClient(guest.peer, shared, connection)
            socket.send_fds(connection, [b"1"], [memory])
        finally:
            os.close(memory)
        return tenant

    def _turn_away(self, connection: socket.socket, why: str) -> None:
        with contextlib.suppress(OSError):
            connection.send(b"0" + why.encode())
        connection.close()

    def _forget_late(self) -> None:
        now_s = time.monotonic()
        for proof, guest in list(self._guests.items()):
            if guest.stop_s < now_s:
                del self._guests[proof]
        for fd, (connection, stop_s) in list(self._entering.items()):
            if stop_s < now_s:
                del self._entering[fd]
                self.changes.append((fd, False))
                connection.close()

    def _hear(self, tenant: SharedClient) -> None:
        """Read the bytes that wake this thread; a client that is gone leaves."""
        try:
            if tenant.socket.recv(4096, socket.MSG_DONTWAIT):
                self.num_wakeups += 1
                self._heard_s = time.monotonic()  # a request follows, if none is there
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._leave(tenant)

    def _leave(self, tenant: SharedClient) -> None:
        self.changes.append((tenant.socket.fileno(), False))
        del self._by_fd[tenant.socket.fileno()]
        if self._tenants.get(tenant.peer) is tenant:
            del self._tenants[tenant.peer]
        if tenant in self._admitted:
            self._admitted.remove(tenant)
        tenant.socket.close()
        # Updates that wait still read it; it is unmapped with the last of them.
        self.num_bytes -= tenant.slab.size_bytes

    def has_message(self) -> bool:
        """Return whether a request is in a slab that is to be read now."""
        return any(tenant.has_message() for tenant in self._admitted)

    def note_over_tcp(self, peer: bytes) -> None:
        """Count a message of a client that came over TCP, and is read now."""
        if (tenant := self._tenants.get(peer)) is not None:
            tenant.num_over_tcp += 1

    def has_message_of(self, peer: bytes) -> bool:
        """Return whether a request of one client is in its slab."""
        tenant = self._tenants.get(peer)
        return tenant in self._admitted and tenant.has_message()

    def is_quiet(self) -> bool:
        """Look for requests for up to 50 us; return whether there was none.

        Then the clients send a byte with the next one.
        """
        stop_s = self._heard_s + layout.SPIN_US * 1e-6
        while not self.has_message():
            if time.monotonic() >= stop_s:
                break
        else:
            return False
        self._num_sleeps += 1
        self.set_sleeps(self._num_sleeps)
        layout.fence()
        return not self.has_message()

    def set_sleeps(self, sleeps: int) -> None:
        """Say in which of its sleeps this thread is, or in none: 0."""
        for tenant in self._tenants.values():
            tenant.words[layout.SLEEPS] = sleeps

    def take(self, peer: bytes | None = None) -> tuple[bytes, Header, Frames] | None:
        """Take a request, of each client in turn or of one; None: it breaks rules."""
        tenants = self._admitted if peer is None else [self._tenants[peer]]
        self._turn += 1
        for i in range(len(tenants)):
            tenant = tenants[(self._turn + i) % len(tenants)]
            if not tenant.has_message():
                continue
            try:
                header, frames = tenant.take()
            except (WireError, MemoryError) as exc:
                if time.monotonic() >= self._next_log_s:
                    self._next_log_s = time.monotonic() + timeouts.SAY_S
                    logger.warning("a client lost its shared memory: %s", exc)
                self._leave(tenant)
                return None
            self.num_requests += 1
            self._heard_s = time.monotonic()
            return tenant.peer, header, frames
        return None

    def body_in_place(
        self, peer: bytes, request: int, num_bytes: int
    ) -> npt.NDArray[np.uint8]:
        """Return memory for frame 1 of a reply: where the client reads it, if it can.

        It may be written at once, and the reply must follow.
        """
        if (tenant := self._tenants.get(peer)) is None:
            return np.empty(num_bytes, dtype=np.uint8)
        if num_bytes < _SOON_BYTES and tenant.words[layout.WAITS] & layout.CALLERS:
            tenant.slab.wake_callers()  # which takes as long as those rows
            self.num_woken += 1
        return tenant.body_in_place(request, num_bytes)

    def send(self, peer: bytes, request: int, message: Sequence[Frame]) -> bool:
        """Answer a request through its slab; False: send the reply over TCP."""
        if (tenant := self._tenants.get(peer)) is None:
            return False
        found = tenant.opened.pop(request, None)
        waits = None if found is None else tenant.answer(message, found, request)
        if waits is None:
            return False
        self.num_woken += bool(waits & layout.CALLERS)
        self._heard_s = time.monotonic()  # the next request may follow at once
        return True

    def close(self) -> None:
        """Leave all slabs."""
        for tenant in list(self._tenants.values()):
            self._leave(tenant)
        for connection, _ in self._entering.values():
            connection.close()
        if self._door is not None:
            self._door.close()


def _address(frame: Frame) -> int:
    """Return where a frame is, as ``ctypes.data`` does, which takes longer."""
    if not len(frame):
        return 0
    address: int = np.frombuffer(frame, np.uint8).__array_interface__["data"][0]
    return address


def _is_hex(text: str) -> bool:
    try:
        bytes.fromhex(text)
    except ValueError:
        return False
    return True
