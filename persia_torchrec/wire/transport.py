"""Frames from one process to another: ZeroMQ sockets behind two classes.

``Listener`` is the server's end: one socket that many clients connect to, owned by one
thread. ``Connections`` is the client's end: one socket a server and one thread that
owns them all, so that any thread may send requests and wait for replies.

    caller  --submit-->  queue  --I/O thread-->  socket  --network-->  Listener
    caller  <--future---  pending by request number  <-----------------

Messages to one server arrive in the order of ``submit``. A request ends in a reply, in
an error of the server, at its deadline, or as soon as the connection is lost.
"""

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import zmq
import zmq.utils.monitor

from persia_torchrec.errors import (
    ConfigError,
    RemoteError,
    RequestTimeoutError,
    ServerError,
    WireError,
)
from persia_torchrec.wire.messages import (
    Frame,
    Frames,
    Header,
    Kind,
    decode_json,
    error_frames,
)
from persia_torchrec.wire.wakeup import Wakeup

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 2**31
"""A larger message is not accepted; its sender is disconnected."""

_IDLE_POLL_MS = 200
_MIN_ZERO_COPY_BYTES = 65536


class Listener:
    """A server's socket. Owned by one thread.

    Args:
        host: address to listen on, as ``"127.0.0.1"``.
        port: port to listen on; 0 takes a free one.
        wakeup: ends a wait in :meth:`receive` early.

    Raises:
        WireError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, wakeup: Wakeup | None = None) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as exc:
            self._socket.close()
            raise WireError(f"Cannot listen on {host}:{port}: {exc}.") from exc
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if wakeup is not None:
            self._poller.register(wakeup.socket, zmq.POLLIN)

    def receive(self, timeout_ms: int) -> tuple[bytes, Frames] | None:
        """Wait for a message.

        Args:
            timeout_ms: how long; 0 does not wait.

        Returns:
            Who sent it, and its frames; or None when none came in time.
        """
        if self._socket not in dict(self._poller.poll(timeout_ms)):
            return None
        peer, *frames = self._socket.recv_multipart(copy=False)
        return bytes(peer.buffer), [frame.buffer for frame in frames]

    def send(self, peer: bytes, header: Header, frames: Sequence[Frame] = ()) -> None:
        """Send a message to a peer; it is dropped if the peer is gone."""
        self._socket.send_multipart([peer, header.encode()], zmq.SNDMORE)
        _send(self._socket, frames or [b""])

    def send_error(self, peer: bytes, request: int, error: BaseException) -> None:
        """Answer a request with an error."""
        self.send(peer, Header(Kind.ERROR, request), error_frames(error))

    def close(self) -> None:
        """Close the socket; replies under way are sent for up to a second."""
        self._socket.close()


@dataclass(slots=True)
class _Pending:
    server: int
    what: str
    future: "Future[tuple[Header, Frames]]"
    timeout_s: float


class Connections:
    """Connections to several servers. Any thread may call any method.

    Args:
        role: what the servers are called in errors, as ``"embedding server"``.
        addresses: one a server, as ``"tcp://127.0.0.1:7000"``.
        max_pending: requests that may wait for replies; one more makes its caller wait.

    Raises:
        ConfigError: no address, or one that cannot be read.
    """

    def __init__(
        self, role: str, addresses: Sequence[str], *, max_pending: int = 256
    ) -> None:
        if not addresses:
            raise ConfigError(f"At least one address of an {role} is needed.")
        self.names = [f"{role} {i} at {a}" for i, a in enumerate(addresses)]
        self._slots = threading.BoundedSemaphore(max_pending)
        self._lock = threading.Lock()
        self._outgoing: deque[tuple[int, list[Frame]]] = deque()  # guarded by _lock
        self._pending: dict[int, _Pending] = {}  # guarded by _lock
        self._deadlines: list[tuple[float, int]] = []  # guarded by _lock
        self._closed = False  # guarded by _lock
        self._numbers = itertools.count(1)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._sockets = _connect_all(context, addresses)
        self._monitors = [
            socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            for socket in self._sockets
        ]
        self._wakeup = Wakeup()
        self._thread = threading.Thread(
            target=self._run, name=f"{role} connections", daemon=True
        )
        self._thread.start()

    def __len__(self) -> int:
        return len(self._sockets)

    def submit(
        self,
        server: int,
        header: Header,
        frames: Sequence[Frame],
        *,
        timeout_s: float,
        what: str,
    ) -> "Future[tuple[Header, Frames]]":
        """Send a request.

        Args:
            server: number of the server.
            header: of the message; its request number is set here.
            frames: the others; their memory must not change until the reply.
            timeout_s: seconds until the request counts as failed.
            what: the request in words, for errors: ``"lookup of table 'ads'"``.

        Returns:
            The reply. Fails with RemoteError, RequestTimeoutError or ServerError.

        Raises:
            RequestTimeoutError: too many requests are pending for ``timeout_s``.
            ServerError: the connections are closed.
        """
        if not self._slots.acquire(timeout=timeout_s):
            raise RequestTimeoutError(
                f"{what}: too many requests were pending for {timeout_s:g} s.",
                server=self.names[server],
            )
        future: Future[tuple[Header, Frames]] = Future()
        number = next(self._numbers)
        deadline = time.monotonic() + timeout_s
        message: list[Frame] = [replace(header, request=number).encode(), *frames]
        with self._lock:
            if self._closed:
                self._slots.release()
                raise ServerError(
                    f"{what}: the connections are closed.", server=self.names[server]
                )
            self._pending[number] = _Pending(server, what, future, timeout_s)
            heapq.heappush(self._deadlines, (deadline, number))
            self._outgoing.append((server, message))
        self._wakeup.wake()
        return future

    def close(self) -> None:
        """Close all connections; pending requests fail. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._wakeup.wake()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in [self._wakeup.socket, *self._sockets, *self._monitors]:
            poller.register(socket, zmq.POLLIN)
        try:
            while not self._is_closed():
                ready = dict(poller.poll(self._poll_ms()))
                if self._wakeup.socket in ready:
                    self._send_outgoing()
                for server, socket in enumerate(self._sockets):
                    if socket in ready:
                        self._receive(server, socket)
                for server, monitor in enumerate(self._monitors):
                    if monitor in ready:
                        self._notice_disconnect(server, monitor)
                self._expire()
        except Exception as exc:  # handed to whoever waits
            logger.exception("the I/O thread of %s died", self.names)
            self._fail_all(f"the I/O thread died ({exc!r}).")
        finally:
            self._fail_all("the connections were closed.")
            for server, socket in enumerate(self._sockets):
                socket.disable_monitor()
                self._monitors[server].close()
                socket.close(linger=0)
            self._wakeup.close()

    def _is_closed(self) -> bool:
        with self._lock:
            return self._closed

    def _poll_ms(self) -> int:
        with self._lock:
            if not self._deadlines:
                return _IDLE_POLL_MS
            left_s = self._deadlines[0][0] - time.monotonic()
        return min(max(int(left_s * 1000) + 1, 0), _IDLE_POLL_MS)

    def _send_outgoing(self) -> None:
        self._wakeup.drain()
        while True:
            with self._lock:
                if not self._outgoing:
                    return
                server, frames = self._outgoing.popleft()
            _send(self._sockets[server], frames)

    def _receive(self, server: int, socket: "zmq.Socket[bytes]") -> None:
        while socket.poll(0):
            frames = [frame.buffer for frame in socket.recv_multipart(copy=False)]
            header = Header.decode(frames[0])
            pending = self._take(header.request)
            if pending is None:
                continue  # Its deadline has passed.
            if header.kind is Kind.ERROR:
                pending.future.set_exception(self._remote_error(server, frames))
            else:
                pending.future.set_result((header, list(frames)))

    def _remote_error(self, server: int, frames: Sequence[Frame]) -> RemoteError:
        body = decode_json(frames)
        assert isinstance(body, dict)
        return RemoteError(
            str(body["message"]), server=self.names[server], kind=str(body["kind"])
        )

    def _take(self, number: int) -> _Pending | None:
        with self._lock:
            pending = self._pending.pop(number, None)
        if pending is not None:
            self._slots.release()
        return pending

    def _expire(self) -> None:
        now = time.monotonic()
        while True:
            with self._lock:
                if not self._deadlines or self._deadlines[0][0] > now:
                    return
                _, number = heapq.heappop(self._deadlines)
            pending = self._take(number)
            if pending is not None:
                self._fail_timeout(pending)

    def _fail_timeout(self, pending: _Pending) -> None:
        pending.future.set_exception(
            RequestTimeoutError(
                f"{pending.what}: no reply within {pending.timeout_s:g} s. "
                "Is it running, and is the address right?",
                server=self.names[pending.server],
            )
        )

    def _notice_disconnect(self, server: int, monitor: "zmq.Socket[bytes]") -> None:
        zmq.utils.monitor.recv_monitor_message(monitor)
        with self._lock:
            lost = [n for n, p in self._pending.items() if p.server == server]
        self._fail(lost, "the connection was lost. Did the process end?")

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            self._closed = True
            numbers = list(self._pending)
        self._fail(numbers, reason)

    def _fail(self, numbers: Sequence[int], reason: str) -> None:
        for number in numbers:
            pending = self._take(number)
            if pending is not None:
                name = self.names[pending.server]
                error = ServerError(f"{pending.what}: {reason}", server=name)
                pending.future.set_exception(error)


def _connect_all(
    context: "zmq.Context[zmq.Socket[bytes]]", addresses: Sequence[str]
) -> "list[zmq.Socket[bytes]]":
    sockets: list[zmq.Socket[bytes]] = []
    try:
        sockets.extend(_connect(context, address) for address in addresses)
    except ConfigError:
        for socket in sockets:
            socket.close(linger=0)
        raise
    return sockets


def _connect(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str
) -> "zmq.Socket[bytes]":
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, 0)  # max_pending is the bound
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    try:
        socket.connect(address)
    except zmq.ZMQError as exc:
        socket.close()
        raise ConfigError(
            "An address must look like 'tcp://host:port'. "
            f"Received: {address!r} ({exc})."
        ) from exc
    return socket


def _send(socket: "zmq.Socket[bytes]", frames: Sequence[Frame]) -> None:
    for i, frame in enumerate(frames):
        more = zmq.SNDMORE if i + 1 < len(frames) else 0
        socket.send(frame, more, copy=len(frame) < _MIN_ZERO_COPY_BYTES)
