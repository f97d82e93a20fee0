"""Sockets of ZeroMQ with the limits that all connections of a job have, and messages.

A socket belongs to one thread. What others want of that thread, they tell it through a
``Wakeup``, which it polls beside its sockets.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Mapping, Sequence

import zmq

from persia_torchrec.errors import ConfigError, WireError
from persia_torchrec.wire.messages import Frame, Frames

MAX_MESSAGE_BYTES = 2**31  # of a frame; the sender of a larger one is disconnected
SILENT_S = 6  # how long a host acknowledges nothing when a connection to it is lost

_MIN_ZERO_COPY_BYTES = 65536

# The kernels end connections to a host that is gone, whatever its process does.
_LIMITS: Mapping[zmq.SocketOption, int | bytes] = {
    zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: SILENT_S // 2,
    zmq.TCP_KEEPALIVE_INTVL: 1,
    zmq.TCP_KEEPALIVE_CNT: SILENT_S - SILENT_S // 2,
    zmq.TCP_MAXRT: 1000 * SILENT_S,  # TCP_USER_TIMEOUT
}

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


class Wakeup:
    """A pipe whose ``fd`` one thread polls, drains and closes; any may wake it."""

    def __init__(self) -> None:
        self.fd, self._writer = os.pipe()
        os.set_blocking(self.fd, False)
        self._lock = threading.Lock()
        self._is_awake = False  # guarded by _lock
        self._is_closed = False  # guarded by _lock

    def wake(self) -> None:
        """Wake the thread, unless that was done already or it has closed the pipe."""
        with self._lock:
            if not self._is_awake and not self._is_closed:
                self._is_awake = True
                os.write(self._writer, b"\0")

    def drain(self) -> None:
        """Allow the next wake-up; call it before looking for work."""
        with self._lock:
            if self._is_awake and not self._is_closed:
                self._is_awake = False
                with contextlib.suppress(BlockingIOError):
                    os.read(self.fd, 1)

    def close(self) -> None:
        """Close both ends. May be called twice."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._writer)
                os.close(self.fd)


def require_sendable(frames: Sequence[Frame], what: str) -> None:
    """Raise WireError for a message that no receiver would accept."""
    largest = max(map(len, frames), default=0)
    if largest > MAX_MESSAGE_BYTES:
        raise WireError(
            f"{what}: a frame must have at most {MAX_MESSAGE_BYTES} bytes. Received: "
            f"{largest} bytes. Use smaller batches."
        )


def send_frames(socket: "zmq.Socket[bytes]", frames: Sequence[Frame]) -> None:
    """Send a message; large frames are not copied, and must not change until then."""
    for i, frame in enumerate(frames):
        more = zmq.SNDMORE if i + 1 < len(frames) else 0
        socket.send(frame, more, copy=len(frame) < _MIN_ZERO_COPY_BYTES)


def receive_frames(socket: "zmq.Socket[bytes]") -> Frames:
    """Return the frames of a message that is there, without a copy."""
    frames: Frames = []
    while True:
        frame = socket.recv(copy=False)
        frames.append(frame.buffer)
        if not frame.more:
            return frames


def duplicate(fd: int) -> int:
    """Return another descriptor of a socket that listens, which ZeroMQ closes."""
    try:
        os.set_blocking(fd, False)
        return os.dup(fd)
    except OSError as exc:
        raise ConfigError(
            "PERSIA_LISTEN_FD must be the descriptor of a socket that this process "
            f"inherited. Received: {fd} ({exc})."
        ) from exc


def keep_freed_memory() -> bool:
    """Reuse the memory of messages of up to 32 MiB; return whether glibc can.

    Otherwise the operating system clears every page of the next large message: a
    quarter of the time of a thread that receives gradients.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    reused = mallopt(_M_MMAP_THRESHOLD, 2**25)  # glibc accepts no more
    return bool(reused and mallopt(_M_TRIM_THRESHOLD, 2**28))


def open_socket(
    kind: int, options: Mapping[zmq.SocketOption, int | bytes]
) -> "zmq.Socket[bytes]":
    """Return a socket with the limits of all connections, and other options."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    for option, value in {**_LIMITS, **options}.items():
        socket.setsockopt(option, value)
    return socket
