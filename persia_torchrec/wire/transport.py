"""Both ends of the connections between the processes of a job, on ZeroMQ.

``Listener`` is a server's socket: many clients connect to it, one thread owns it.
``Connections`` are a client's sockets, one per server; a thread of their own owns them,
so that any thread may send requests and wait for replies:

    caller  --submit-->  queue  --I/O thread-->  socket  --network-->  Listener
    caller  <--future---  pending by request number  <-----------------

Messages to one server arrive in the order of ``submit``. A request ends in a reply, in
an error of the server, at its deadline, or as soon as the connection is lost. While it
is lost, requests fail at once; ZeroMQ keeps trying to connect, and once it does,
requests are sent again. A server that was never reached may still be starting: requests
to it wait for their deadline.
"""

import contextlib
import heapq
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import zmq
import zmq.utils.monitor

from persia_torchrec.errors import (
    ConfigError,
    JobMismatchError,
    RemoteError,
    RequestTimeoutError,
    ServerError,
    WireError,
)
from persia_torchrec.wire.greeting import NO_JOB, Greeting
from persia_torchrec.wire.messages import (
    ErrorReply,
    Frame,
    Frames,
    Header,
    Kind,
    decode_json,
    error_frames,
)

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 2**31
"""A larger frame of a message is rejected; its sender is disconnected."""

SILENT_S = 6
"""A connection is lost when the other host acknowledges nothing for as long."""

_IDLE_POLL_MS = 200
_GRACE_S = 5.0
"""A reply that is later than its deadline by this means that the I/O thread is dead."""

_MIN_ZERO_COPY_BYTES = 65536
_MAX_KNOWN_PEERS = 4096
_STILL_LOST = "the connection was lost, and is not there yet. Did the process end?"
_CHANGES = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED


class Wakeup:
    """A pipe that becomes readable when :meth:`wake` is called.

    One thread polls, drains and closes it; any thread may wake it.

    Attributes:
        fd: file descriptor to be polled together with sockets.
    """

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


class Listener:
    """A server's socket. Owned by one thread.

    Args:
        host: address to listen on, as ``"127.0.0.1"``.
        port: port to listen on; 0 takes a free one.
        wakeup: ends a wait early.
        greeting: of the job whose processes are served.

    Attributes:
        address: as clients connect to it, ``"tcp://127.0.0.1:7000"``.
        bytes_received: bytes of all frames so far, without what ZeroMQ adds.
        bytes_sent: bytes of all frames sent.

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
        self._known: set[bytes] = set()  # routing ids of admitted peers
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        # A client reconnects under its routing id, maybe before its loss is seen.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        _set_limits(self._socket)
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
        """Wait for a message, at most so long; return whether one is there."""
        return self._socket in dict(self._poller.poll(timeout_ms))

    def take(self) -> tuple[bytes, Frames] | None:
        """Take the message that :meth:`wait` found.

        Returns:
            Routing id of its sender, and its frames; or None when it was rejected,
            because the sender belongs to another job, which it is told.
        """
        name, *frames = receive_frames(self._socket)
        self.bytes_received += sum(map(len, frames))
        peer = bytes(name)
        if peer in self._known or self._admit(peer, frames):
            return peer, frames
        return None

    def receive(self, timeout_ms: int) -> tuple[bytes, Frames] | None:
        """Wait for a message, and :meth:`take` it; None also when none came in time."""
        return self.take() if self.wait(timeout_ms) else None

    def _admit(self, peer: bytes, frames: Frames) -> bool:
        """Admit a peer that has not sent anything before, or reject its message."""
        try:
            self._greeting.admit(peer, self.address)
        except (WireError, JobMismatchError) as exc:
            number = 0
            with contextlib.suppress(WireError):
                number = Header.decode(frames[0]).request
            self.send_error(peer, number, exc)
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

    def send_error(self, peer: bytes, request: int, error: BaseException) -> None:
        """Answer a request with an error."""
        self.send(peer, Header(Kind.ERROR, request), error_frames(error))

    def is_connected(self, peer: bytes) -> bool:
        """Return whether a peer is connected; messages of it may still be queued.

        It is sent a reply without a request, which it drops.
        """
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.send(peer, zmq.SNDMORE | zmq.NOBLOCK)
            send_frames(self._socket, [Header(Kind.REPLY).encode(), b""])
        except zmq.Again:  # its queue is full: it is slow, but there
            return True
        except zmq.ZMQError as exc:
            if exc.errno != zmq.EHOSTUNREACH:
                raise
            return False
        finally:
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 0)
        return True

    def close(self) -> None:
        """Close the socket; replies under way are sent for up to a second."""
        self._socket.close()


class Reply(Future[tuple[Header, Frames]]):
    """A reply to come; it cannot be cancelled.

    Fails with RemoteError, RequestTimeoutError, ServerError (the connection is lost) or
    WireError (the reply is not a message of this protocol).

    Args:
        timeout_s: seconds after which the request fails.
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self.timeout_s = timeout_s
        self.set_running_or_notify_cancel()  # from here on, cancel() does nothing

    def frames(self) -> Frames:
        """Wait for the reply; return its frames."""
        return self.result(self.timeout_s + _GRACE_S)[1]


@dataclass(slots=True)
class _Pending:
    server: int
    what: str
    reply: Reply


class Connections:
    """Connections to several servers. Any thread may call any method.

    Args:
        role: what the servers are called in errors, as ``"embedding server"``.
        addresses: one per server, as ``"tcp://127.0.0.1:7000"``.
        max_pending: requests that may wait for replies; the caller of one more waits.
        greeting: of this process; the servers must belong to the same job, or to none.

    Attributes:
        names: of the servers, as errors name them.

    Raises:
        ConfigError: there is no address, or one cannot be parsed.
    """

    def __init__(
        self,
        role: str,
        addresses: Sequence[str],
        *,
        max_pending: int = 256,
        greeting: Greeting = NO_JOB,
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
        self._lost: set[int] = set()  # guarded by _lock
        self._numbers = itertools.count(1)
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._sockets.extend(_connect(address, greeting) for address in addresses)
        except ConfigError:
            for socket in self._sockets:
                socket.close(linger=0)
            raise
        self._monitors = [
            socket.get_monitor_socket(_CHANGES) for socket in self._sockets
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
    ) -> Reply:
        """Send a request.

        Args:
            server: number of the server.
            header: of the message; its request number is set here.
            frames: the others; their memory must not change until the reply.
            timeout_s: seconds until the request counts as failed.
            what: the request in words, for errors: ``"lookup of table 'ads'"``.

        Raises:
            RequestTimeoutError: too many requests are pending for ``timeout_s``.
            ServerError: the connections are closed.
        """
        require_sendable(frames, what)
        name = self.names[server]
        if not self._slots.acquire(timeout=timeout_s):
            raise RequestTimeoutError(
                f"{what}: too many requests were pending for {timeout_s:g} s.",
                server=name,
            )
        reply = Reply(timeout_s)
        number = next(self._numbers)
        deadline = time.monotonic() + timeout_s
        message: list[Frame] = [header.encode(request=number), *frames]
        with self._lock:
            if self._closed:
                self._slots.release()
                raise ServerError(f"{what}: the connections are closed.", server=name)
            self._pending[number] = _Pending(server, what, reply)
            is_lost = server in self._lost
            if not is_lost:
                heapq.heappush(self._deadlines, (deadline, number))
                self._outgoing.append((server, message))
        if is_lost:
            self._fail([number], _STILL_LOST)
        else:
            self._wakeup.wake()
        return reply

    def close(self) -> None:
        """Close all connections; pending requests fail. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._wakeup.wake()
        self._thread.join(timeout=5)

    # The I/O thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup.fd, zmq.POLLIN)
        for socket in [*self._sockets, *self._monitors]:
            poller.register(socket, zmq.POLLIN)
        try:
            while (timeout_ms := self._expire()) is not None:
                ready = dict(poller.poll(timeout_ms))
                # A signal may interrupt wake() before it writes: look after each wait.
                if not ready or self._wakeup.fd in ready:
                    self._send_outgoing()
                for server, socket in enumerate(self._sockets):
                    if socket in ready:
                        self._receive(server, socket)
                for server, monitor in enumerate(self._monitors):
                    if monitor in ready:
                        self._notice_change(server, monitor)
        except Exception as exc:  # handed to all callers that wait
            logger.exception("the I/O thread of %s died", self.names)
            self._fail_all(f"the I/O thread died ({exc!r}).")
        finally:
            self._fail_all("the connections were closed.")
            for server, socket in enumerate(self._sockets):
                socket.disable_monitor()
                self._monitors[server].close()
                socket.close(linger=0)
            self._wakeup.close()

    def _expire(self) -> int | None:
        """Fail the requests whose deadline has passed.

        Returns:
            Milliseconds to wait for the next event; None once closed.
        """
        while True:
            with self._lock:
                if self._closed:
                    return None
                if not self._deadlines:
                    return _IDLE_POLL_MS
                left_s = self._deadlines[0][0] - time.monotonic()
                if left_s > 0:
                    return min(int(left_s * 1000) + 1, _IDLE_POLL_MS)
                _, number = heapq.heappop(self._deadlines)
            pending = self._take(number)
            if pending is not None:
                error = RequestTimeoutError(
                    f"{pending.what}: no reply within {pending.reply.timeout_s:g} s. "
                    "Is it running, and is the address right?",
                    server=self.names[pending.server],
                )
                pending.reply.set_exception(error)

    def _send_outgoing(self) -> None:
        self._wakeup.drain()
        while True:
            with self._lock:
                if not self._outgoing:
                    return
                server, frames = self._outgoing.popleft()
            send_frames(self._sockets[server], frames)

    def _receive(self, server: int, socket: "zmq.Socket[bytes]") -> None:
        """Hand a reply to the caller that waits for it."""
        frames = receive_frames(socket)
        try:
            header = Header.decode(frames[0])
            error = None
            if header.kind is Kind.ERROR:
                text = decode_json(frames, ErrorReply)
                error = RemoteError(
                    text.message, server=self.names[server], kind=text.kind
                )
        except WireError as exc:
            self._distrust(server, exc)
            return
        pending = self._take(header.request, server)
        if pending is None:
            return  # its deadline has passed
        if error is not None:
            pending.reply.set_exception(error)
        else:
            pending.reply.set_result((header, frames))

    def _distrust(self, server: int, exc: WireError) -> None:
        """Fail all requests to a server that does not speak this protocol."""
        logger.warning("%s sent no message of ours: %s", self.names[server], exc)
        for pending in self._take_all(self._pending_of(server)):
            error = WireError(
                f"{self.names[server]}: {pending.what}: the reply must be a "
                f"message of this protocol. {exc} Is this the right address?"
            )
            pending.reply.set_exception(error)

    def _take(self, number: int, server: int | None = None) -> _Pending | None:
        """Remove a request; None if it has ended, or is not the server's."""
        with self._lock:
            pending = self._pending.get(number)
            if pending is None or server not in (None, pending.server):
                return None
            del self._pending[number]
        self._slots.release()
        return pending

    def _take_all(self, numbers: Iterable[int]) -> Iterable[_Pending]:
        return filter(None, map(self._take, numbers))

    def _notice_change(self, server: int, monitor: "zmq.Socket[bytes]") -> None:
        """Note that the connection to a server was lost, or was established."""
        while self._sockets[server].poll(0):  # what came before the change
            self._receive(server, self._sockets[server])
        event = zmq.utils.monitor.recv_monitor_message(monitor)["event"]
        is_lost = event == zmq.EVENT_DISCONNECTED
        with self._lock:
            (self._lost.add if is_lost else self._lost.discard)(server)
        if is_lost:
            lost = "the connection was lost. Did the process end?"
            self._fail(self._pending_of(server), lost)

    def _pending_of(self, server: int) -> list[int]:
        with self._lock:
            return [n for n, p in self._pending.items() if p.server == server]

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            self._closed = True
            numbers = list(self._pending)
        self._fail(numbers, reason)

    def _fail(self, numbers: Sequence[int], reason: str) -> None:
        for pending in self._take_all(numbers):
            name = self.names[pending.server]
            error = ServerError(f"{pending.what}: {reason}", server=name)
            pending.reply.set_exception(error)


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


def _connect(address: str, greeting: Greeting) -> "zmq.Socket[bytes]":
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 0)  # max_pending is the bound
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.ROUTING_ID, greeting.encode())
    _set_limits(socket)
    try:
        socket.connect(address)
    except zmq.ZMQError as exc:
        socket.close()
        raise ConfigError(
            "An address must look like 'tcp://host:port'. "
            f"Received: {address!r} ({exc})."
        ) from exc
    return socket


def _set_limits(socket: "zmq.Socket[bytes]") -> None:
    """Bound the messages of a socket, and end connections to a host that is gone.

    The kernels of both hosts detect the loss: an idle connection is probed, and sent
    data must be acknowledged. A process that compiles, holds the interpreter's lock or
    sends a frame for a minute keeps its connections. A stopped one (SIGSTOP) loses them
    only once its buffers are full.

    Args:
        socket: not bound and not connected yet.
    """
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, SILENT_S // 2)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, SILENT_S - SILENT_S // 2)
    socket.setsockopt(zmq.TCP_MAXRT, 1000 * SILENT_S)  # TCP_USER_TIMEOUT
