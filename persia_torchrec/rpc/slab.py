"""Memory that a client and a server on one host share, and the messages in it.

A slab is memory without a name (``memfd_create``), which is gone with its last process.
The server makes it, and seals its size. All numbers are uint64, little-endian, each
written by one side only:

    offset  size      field
    0       32        proof, see ``slab_server.py``
    64      8         requests: how many the client has posted
    128     8         0, or which of its sleeps the server is in, for the end of which
                      it wants a byte over the Unix socket
    192     8         replies: how many the server has posted
    256     8         who waits at the client: bit 0, its I/O thread, which wants a
                      byte; bit 1, callers, which wait for "replies" (a futex)
    4096    256 * 40  a ring of requests: where the message begins, its bytes; where the
                      reply may begin, its bytes; how many messages over TCP come before
                      it, since the memory was obtained
    16384   256 * 8   a ring of replies: numbers of requests
    32768   -         messages

    message  0   -    number of frames, from 1 to 63; their sizes in bytes
             64  -    the frames, each from a multiple of 64 on; the first is at 64,
                      128 or a later multiple, behind the sizes

The client alone says what lies where. It leaves the memory of a request as it is until
the server has answered, whatever its caller does, or until the slab is given up.

Each side reads a number once, and checks that copy: the other may write at any time.
Stores must become visible in their order, which x86-64 does; between a store and a load
of another number a lock is taken, which is a fence.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import struct
import sys
import threading
from bisect import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec.errors import FrameError
from persia_torchrec.rpc.messages import DeferredFrame, SentFrame

PROOF_BYTES = 32
REQUESTS, SLEEPS, REPLIES, WAITS = 8, 16, 24, 32
"""Where the numbers are, in words of 8 bytes."""
IO_THREAD, CALLERS = 1, 2
RING = 256
MAX_FRAMES = 63
FIRST = 32768
"""Where messages begin, in bytes."""
BODY = 128
"""Where frame 1 of a message with 7 or fewer begins, after a header."""
LEAST_BYTES = 2**20
SPIN_US = 50
"""How long either side looks for the next message before it sleeps, microseconds."""

REQUEST_RING, _REPLY_RING = 512, 2048
AFTER = 4
"""Where a request says behind how many messages over TCP it is read, in words."""
_HEAD = struct.Struct("<8Q")  # of 7 frames, or the first line of a longer one
_PIECE = struct.Struct("<5Q")
_TOUCHED = 2**18  # bytes at a time
PINNED = 2**23
"""A GPU is given memory between multiples of so many bytes; no copy may cross one."""
_LARGE = 65536  # bytes, from which NumPy copies, without the interpreter's lock
_MADV_POPULATE_WRITE = 23  # of Linux; Python has no name for it
_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE, _ALL = 202, 0, 1, 2**31 - 1
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_syscall = ctypes.CDLL(None).syscall
_syscall.argtypes = [
    *(ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
]
_fence = threading.Lock()


def why_not() -> str:
    """Return why this machine cannot have slabs, or ""."""
    machine = platform.machine()
    if sys.platform == "linux" and machine in ("x86_64", "AMD64"):
        return ""
    return f"it takes Linux on x86-64; this is {sys.platform} on {machine}"


def make_memory(size_bytes: int) -> int:
    """Return the descriptor of memory without a name, whose size is sealed."""
    fd = os.memfd_create("persia_torchrec", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def fence() -> None:
    """Make what this thread has stored visible before it loads anything else."""
    with _fence:
        pass


Pin = Callable[[int, int], Callable[[], None]]
"""Pins memory, of an address and bytes, for a GPU; returns what undoes it."""
_pin: Pin | None = None


def pin_with(pin: Pin) -> None:
    """Pin the slabs of this process, those to come too, for its GPU to copy from."""
    global _pin
    _pin = pin


class _Memory(mmap.mmap):
    """Memory that no GPU reads any more when its addresses become another's."""

    def __new__(cls, fd: int, size_bytes: int) -> "_Memory":
        made = super().__new__(cls, fd, size_bytes)
        made.unpins = list[Callable[[], None]]()
        return made

    unpins: list[Callable[[], None]]

    def __del__(self) -> None:
        for unpin in getattr(self, "unpins", ()):  # none if it could not be mapped
            unpin()


class Slab:
    """The memory of a descriptor, mapped; it stays while a view of it is alive."""

    def __init__(self, fd: int) -> None:
        self.size_bytes = os.fstat(fd).st_size
        self.memory = _Memory(fd, self.size_bytes)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self.memory, np.uint8)
        self.view = memoryview(self.memory)
        self.words = self.view.cast("Q")
        self._address, self._num_touched = self.bytes.ctypes.data, 0
        self._pinning, self._num_pinned = threading.Lock(), 0

    def touch(self, stop: int) -> None:
        """Have this process's pages up to an offset: one by one they take far longer.

        A kernel without MADV_POPULATE_WRITE, before 5.14, maps them one by one.
        """
        if stop > self._num_touched:
            begin, stop = self._num_touched, -(-stop // _TOUCHED) * _TOUCHED
            self._num_touched = min(stop, self.size_bytes)
            with contextlib.suppress(OSError):
                size = self._num_touched - begin
                self.memory.madvise(_MADV_POPULATE_WRITE, begin, size)
        if _pin is not None and stop > self._num_pinned:
            self._pin(stop, _pin)

    def _pin(self, stop: int, pin: Pin) -> None:
        with self._pinning:
            while self._num_pinned < min(stop, self.size_bytes):
                address = self.address(self._num_pinned)
                size = PINNED - address % PINNED
                size = min(size, self.size_bytes - self._num_pinned)
                self.memory.unpins.append(pin(address, size))
                self._num_pinned += size

    def address(self, begin: int) -> int:
        """Return where in this process's memory an offset is."""
        return self._address + begin

    def frames(self, begin: int, room: int) -> list[tuple[int, int]]:
        """Return where the frames of a message are, and their sizes."""
        num, *sizes = _HEAD.unpack_from(self.memory, begin)
        at = 64 * (num // 8 + 1)
        if not 1 <= num <= MAX_FRAMES or at > room:
            raise FrameError(
                f"A message in {room} bytes of a slab has 1 to {MAX_FRAMES} frames. "
                f"Received: {num}."
            )
        if num > len(sizes):
            sizes = list(struct.unpack_from(f"<{num}Q", self.memory, begin + 8))
        found = []
        for size in sizes[:num]:
            if size > room - at:
                raise FrameError(
                    f"A message must fit into its {room} bytes of a slab. Received: a "
                    f"frame of {size} bytes."
                )
            found.append((begin + at, size))
            at += -(-size // 64) * 64
        return found

    def write(
        self, begin: int, frames: Sequence[SentFrame], in_place: int | None = None
    ) -> None:
        """Write a message; the frame of number ``in_place`` is there already."""
        sizes, num = list(map(len, frames)), len(frames)
        at = begin + 64 * (num // 8 + 1)
        for i, frame in enumerate(frames):
            stop = at + sizes[i]
            if i == in_place:
                pass
            elif isinstance(frame, DeferredFrame):
                frame.write(self.bytes[at:stop])
            elif sizes[i] < _LARGE:
                self.view[at:stop] = frame
            else:
                np.copyto(self.bytes[at:stop], np.frombuffer(frame, np.uint8))
            at += -(-sizes[i] // 64) * 64
        sizes += [0] * (7 - num)
        head = _HEAD if num <= 7 else struct.Struct(f"<{1 + num}Q")
        head.pack_into(self.memory, begin, num, *sizes)

    def post_request(self, place: "RequestSlot") -> int:
        """Post a request; return which of its sleeps the server is in, or 0."""
        words = self.words
        posted = words[REQUESTS]
        at = 8 * REQUEST_RING + posted % RING * _PIECE.size
        _PIECE.pack_into(self.memory, at, *place)
        words[REQUESTS] = posted + 1
        fence()
        return words[SLEEPS]

    def request(self, number: int) -> "RequestSlot":
        """Return a copy of a request of the ring."""
        at = 8 * REQUEST_RING + number % RING * _PIECE.size
        return RequestSlot(*_PIECE.unpack_from(self.memory, at))

    def post_reply(self, request: int) -> int:
        """Post that a request is answered; return who waits."""
        words = self.words
        posted = words[REPLIES]
        words[_REPLY_RING + posted % RING] = request
        words[REPLIES] = posted + 1
        fence()
        return words[WAITS]

    def reply(self, number: int) -> int:
        """Return which request a reply of the ring answers."""
        return self.words[_REPLY_RING + number % RING]

    def wait_for_reply(self, num_seen: int, timeout_s: float) -> None:
        """Wait until more replies are posted than were seen, for 0.1 s at most.

        A wait may end otherwise, as by the deadline of a request.
        """
        time_ns = min(int(timeout_s * 1e9), 10**8)
        time = struct.pack("<qq", time_ns // 10**9, time_ns % 10**9)
        where = self._address + 8 * REPLIES
        _syscall(_SYS_FUTEX, where, _FUTEX_WAIT, num_seen & 0xFFFFFFFF, time)

    def wake_callers(self) -> None:
        """Wake all that wait for a reply."""
        _syscall(_SYS_FUTEX, self._address + 8 * REPLIES, _FUTEX_WAKE, _ALL, None)


class RequestSlot(NamedTuple):
    """Where a request is in a slab, and where its reply may be; in bytes.

    ``after`` so many messages over TCP it is read.
    """

    begin: int
    size: int
    reply: int
    room: int
    after: int = 0


def size_of_message(sizes: Sequence[int]) -> int:
    """Return the bytes that a message with frames of these sizes takes."""
    return 64 * (len(sizes) // 8 + 1) + sum([-(-size // 64) * 64 for size in sizes])


class FreeList:
    """Which memory of a slab is free. The lowest is given first: it is in the caches.

    Its owner's lock guards it.
    """

    def __init__(self, first: int, stop: int) -> None:
        self._free = [(first, stop)]  # in their order, none next to another
        self.num_bytes = 0

    def take(self, size_bytes: int) -> tuple[int, int] | None:
        """Return begin and bytes of memory, at least as much; None: there is none."""
        size = -(-size_bytes // 4096) * 4096
        for i, (begin, stop) in enumerate(self._free):
            if stop - begin >= size:
                if stop - begin == size:
                    del self._free[i]
                else:
                    self._free[i] = begin + size, stop
                self.num_bytes += size
                return begin, size
        return None

    def give(self, room: tuple[int, int]) -> None:
        """Give memory back."""
        begin, size = room
        stop = begin + size
        self.num_bytes -= size
        i = bisect(self._free, (begin, stop))
        if i < len(self._free) and self._free[i][0] == stop:
            stop = self._free.pop(i)[1]
        if i and self._free[i - 1][1] == begin:
            begin = self._free.pop(i - 1)[0]
            i -= 1
        self._free.insert(i, (begin, stop))
