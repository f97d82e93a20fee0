"""A server's socket, and how a message goes through any ZeroMQ socket.

``Listener`` is one socket that many clients connect to, owned by one thread; the
clients' end is ``Connections``, in ``transport.py``.
"""

from collections.abc import Sequence

import zmq

from persia_torchrec.errors import JobMismatchError, WireError
from persia_torchrec.wire.greeting import NO_JOB, Greeting
from persia_torchrec.wire.messages import (
    Frame,
    Frames,
    Header,
    Kind,
    error_frames,
)
from persia_torchrec.wire.wakeup import Wakeup

MAX_MESSAGE_BYTES = 2**31
"""A larger frame of a message is not accepted; its sender is disconnected."""

SILENT_S = 6
"""A connection is lost when the other machine acknowledges nothing for as long."""

_MIN_ZERO_COPY_BYTES = 65536
_MAX_KNOWN_PEERS = 4096


def end_when_silent(socket: "zmq.Socket[bytes]") -> None:
    """Have connections end when the other machine, or the way to it, is gone.

    The kernels of both sides see to it: an idle connection is probed, what is sent must
    be acknowledged. So it does not matter what the process on the other side does:
    compile, hold the interpreter's lock, send a frame for a minute. One that is stopped
    (SIGSTOP) is taken for lost only when its buffers are full as well.

    Args:
        socket: not bound and not connected yet.
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, SILENT_S // 2)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, SILENT_S - SILENT_S // 2)
    socket.setsockopt(zmq.TCP_MAXRT, 1000 * SILENT_S)  # TCP_USER_TIMEOUT


class Listener:
    """A server's socket. Owned by one thread.

    Args:
        host: address to listen on, as ``"127.0.0.1"``.
        port: port to listen on; 0 takes a free one.
        wakeup: ends a wait early.
        greeting: of the job whose processes are served.

    Attributes:
        bytes_received: bytes of all frames so far, without what ZeroMQ adds.
        bytes_sent: the same of those sent.

    Raises:
        WireError: the address cannot be listened on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        wakeup: Wakeup | None = None,
        greeting: Greeting = NO_JOB,
    ) -> None:
        self._greeting = greeting
        self._known: set[bytes] = set()  # names of peers that were let in
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        # Who connects again has its name still, and may come before its loss is seen.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        end_when_silent(self._socket)
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as exc:
            self._socket.close()
            raise WireError(f"Cannot listen on {host}:{port}: {exc}.") from exc
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.bytes_received = 0
        self.bytes_sent = 0
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if wakeup is not None:
            self._poller.register(wakeup.fd, zmq.POLLIN)

    def wait(self, timeout_ms: int) -> bool:
        """Wait for a message; return whether one is there.

        Args:
            timeout_ms: how long; 0 does not wait.
        """
        return self._socket in dict(self._poller.poll(timeout_ms))

    def take(self) -> tuple[bytes, Frames] | None:
        """Take the message that :meth:`wait` found.

        Returns:
            Who sent it, and its frames; or None when it was refused, because the
            sender belongs to another job, which it is told.
        """
        name, *frames = receive_frames(self._socket)
        self.bytes_received += sum(map(len, frames))
        peer = bytes(name)
        if peer in self._known or self._admit(peer, frames):
            return peer, frames
        return None

    def receive(self, timeout_ms: int) -> tuple[bytes, Frames] | None:
        """Wait for a message.

        Args:
            timeout_ms: how long; 0 does not wait.

        Returns:
            Who sent it, and its frames; or None when none came in time, or it was
            refused.
        """
        return self.take() if self.wait(timeout_ms) else None

    def _admit(self, peer: bytes, frames: Frames) -> bool:
        """Let a peer in that has not sent anything before, or refuse its message."""
        try:
            self._greeting.admit(peer, self.address)
        except (WireError, JobMismatchError) as exc:
            self.send_error(peer, _request_of(frames), exc)
            return False
        if len(self._known) >= _MAX_KNOWN_PEERS:
            self._known.clear()
        self._known.add(peer)
        return True

    def send(self, peer: bytes, header: Header, frames: Sequence[Frame] = ()) -> None:
        """Send a message to a peer; it is dropped if the peer is gone."""
        message: list[Frame] = [header.encode(), *(frames or [b""])]
        self.bytes_sent += sum(map(len, message))
        self._socket.send(peer, zmq.SNDMORE)
        send_frames(self._socket, message)

    def is_connected(self, peer: bytes) -> bool:
        """Return whether a peer's connection is there; messages of it may wait if not.

        It is sent a reply to no request, which it drops.
        """
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.send(peer, zmq.SNDMORE | zmq.NOBLOCK)
            send_frames(self._socket, [Header(Kind.REPLY).encode(), b""])
        except zmq.Again:  # what was sent before waits to be read
            return True
        except zmq.ZMQError as exc:
            if exc.errno != zmq.EHOSTUNREACH:
                raise
            return False
        finally:
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 0)
        return True

    def send_error(self, peer: bytes, request: int, error: BaseException) -> None:
        """Answer a request with an error."""
        self.send(peer, Header(Kind.ERROR, request), error_frames(error))

    def close(self) -> None:
        """Close the socket; replies under way are sent for up to a second."""
        self._socket.close()


def _request_of(frames: Frames) -> int:
    """Return the number of a request, or 0 if it is no message of ours."""
    try:
        return Header.decode(frames[0]).request
    except WireError:
        return 0


def require_sendable(frames: Sequence[Frame], what: str) -> None:
    """Refuse a message that no receiver would accept.

    Args:
        frames: of the message.
        what: it in words, for the error.

    Raises:
        WireError: a frame is larger than ``MAX_MESSAGE_BYTES``.
    """
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
