"""Sockets of ZeroMQ, with the limits that all of a job have, and what polls them.

A socket belongs to one thread. What others want of that thread, they tell it through a
``Wakeup``, which it polls beside its sockets.
"""

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq
import zmq.utils.monitor

from persia_torchrec import timeouts
from persia_torchrec.errors import WireError
from persia_torchrec.rpc import auth
from persia_torchrec.rpc.messages import DeferredFrame, Frames, SentFrame

MAX_MESSAGE_BYTES = 2**31  # of a frame; the sender of a larger one is disconnected
MAX_FRAMES = 2**14  # of a message; what comes after them is dropped

_MIN_ZERO_COPY_BYTES = 65536
IO_THREADS = 1  # of ZeroMQ in one context; a connection passes through one of them
_MAX_SOCKETS = 2**14  # of ZeroMQ in one context, whose own limit is 1,023
# The kernels end connections to a host that is gone, whatever its process does.
_LIMITS: Mapping[zmq.SocketOption, int | bytes] = {
    zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: timeouts.HOST_SILENT_S // 2,
    zmq.TCP_KEEPALIVE_INTVL: 1,
    zmq.TCP_KEEPALIVE_CNT: timeouts.HOST_SILENT_S - timeouts.HOST_SILENT_S // 2,
    zmq.TCP_MAXRT: 1000 * timeouts.HOST_SILENT_S,  # TCP_USER_TIMEOUT
}
_MADE = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_CHANGES = zmq.EVENT_DISCONNECTED | _MADE | auth.REJECTIONS
_OPTIONS: auth.Options = {
    zmq.SNDHWM: 0,  # the number of requests without a reply is bounded
    zmq.SNDTIMEO: 0,  # of one that ZeroMQ has given up
    zmq.RECONNECT_IVL_MAX: 1000,
}
_monitor_numbers = itertools.count()


def require_sendable(frames: Sequence[SentFrame], what: str) -> None:
    """Raise WireError for a message that no receiver would accept."""
    largest = max(map(len, frames), default=0)
    if largest > MAX_MESSAGE_BYTES:
        raise WireError(
            f"{what}: a frame must have at most {MAX_MESSAGE_BYTES} bytes. Received: "
            f"{largest} bytes. Use smaller batches."
        )


def send_frames(socket: "zmq.Socket[bytes]", frames: Sequence[SentFrame]) -> None:
    """Send a message; large frames are not copied, and must not change until then."""
    for i, frame in enumerate(frames):
        more = zmq.SNDMORE if i + 1 < len(frames) else 0
        if isinstance(frame, DeferredFrame):
            frame = frame.whole()
        socket.send(frame, more, copy=len(frame) < _MIN_ZERO_COPY_BYTES)


def receive_frames(socket: "zmq.Socket[bytes]") -> Frames:
    """Return the frames of a message that is there, without a copy.

    Of one with too many, it is more than ``MAX_FRAMES`` and a routing id.
    """
    frames: Frames = []
    while True:
        frame = socket.recv(copy=False)
        if len(frames) < MAX_FRAMES + 2:
            frames.append(frame.buffer)
        if not frame.more:
            return frames


def open_socket(
    kind: int,
    options: Mapping[zmq.SocketOption, int | bytes],
    context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
) -> "zmq.Socket[bytes]":
    """Return a socket with the limits of all connections, and other options.

    Without a context it is of the process's.
    """
    if context is None:
        context = zmq.Context.instance(IO_THREADS)
        context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)  # until it has its first socket
    opened: zmq.Socket[bytes] = context.socket(kind)
    for option, value in {**_LIMITS, **options}.items():
        opened.setsockopt(option, value)
    return opened


class Wakeup:
    """A pipe whose ``fd`` one thread polls, drains and closes; any may wake it."""

    def __init__(self) -> None:
        self.fd, self._writer = os.pipe()
        os.set_blocking(self.fd, False)
        self._lock = threading.RLock()  # a finalizer may wake in the midst of it
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


class IoLoop:
    """Sources that one thread polls; any thread may ``wakeup.wake()`` it.

    A source is a socket of ZeroMQ or a descriptor. What is ready is handled in the
    order in which it was given; a source that was forgotten meanwhile is not.
    """

    def __init__(self) -> None:
        self.wakeup = Wakeup()
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Callable[[], None]] = {}
        self.handle(self.wakeup.fd, self.wakeup.drain)

    def handle(self, source: Any, handler: Callable[[], None]) -> None:
        """Have a source polled, and handled."""
        self._handlers[source] = handler
        self._poller.register(source, zmq.POLLIN)

    def forget(self, source: Any) -> None:
        """Have a source polled no more."""
        del self._handlers[source]
        self._poller.unregister(source)

    def poll(self, timeout_ms: int) -> None:
        """Handle what is ready.

        A signal may interrupt a wake-up before it is written: if nothing is ready, it
        is drained as well, and the thread looks for work after each wait.
        """
        for source, _ in self._poller.poll(timeout_ms) or [(self.wakeup.fd, 0)]:
            if handler := self._handlers.get(source):
                handler()


class TcpTransport:
    """A client's socket to one server; one thread owns it.

    ZeroMQ connects again by itself; ``monitor`` is readable where the connection has
    changed, ``socket`` where a message is there.
    """

    def __init__(self, address: str, options: auth.Options) -> None:
        self.socket = open_socket(zmq.DEALER, {**_OPTIONS, **options})
        # Not the socket's own name, which is used again.
        name = f"inproc://changes/{next(_monitor_numbers)}"
        self.monitor = self.socket.get_monitor_socket(_CHANGES, name)
        try:
            self.socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise

    def send(self, message: Sequence[SentFrame]) -> None:
        """Send a message, unless ZeroMQ has given the socket up."""
        with contextlib.suppress(zmq.Again):
            send_frames(self.socket, message)

    def change(self) -> tuple[int, int]:
        """Return an event of the connection that is there, and its value."""
        change = zmq.utils.monitor.recv_monitor_message(self.monitor)
        return change["event"], change["value"]

    def close(self) -> None:
        """Close the socket; what waits in it is not sent."""
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close(linger=0)
