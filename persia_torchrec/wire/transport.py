"""Both ends of the connections between the processes of a job, on ZeroMQ.

``Listener`` is a server's socket: many clients connect to it, one thread owns it.
``Connections`` are a client's sockets, one per server; a thread of their own owns them,
so that any thread may send requests and wait for replies:

    caller  --submit-->  queue  --I/O thread-->  socket  --network-->  Listener
    caller  <--future---  pending by request number  <-----------------

Messages to one server arrive in the order of ``submit``. A request ends in a reply, in
an error, at its deadline, or as soon as the connection is lost; until it is back,
requests fail at once. Those to a server that was never reached wait: it may start yet.
"""

import contextlib
import ctypes
import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

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

MAX_MESSAGE_BYTES = 2**31  # of a frame; the sender of a larger one is disconnected
SILENT_S = 6  # how long a host acknowledges nothing when a connection to it is lost

_IDLE_POLL_MS = 200
_MAX_PENDING = 256  # requests that wait for replies; the caller of one more waits
_GRACE_S = 5.0  # a reply that is later than its deadline: the I/O thread is dead
_MIN_ZERO_COPY_BYTES = 65536
_MAX_KNOWN_PEERS = 4096
_STILL_LOST = "the connection was lost, and is not there yet. Did the process end?"
_CHANGES = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED

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


class Listener:
    """A server's socket, owned by one thread; any thread may ``wakeup.wake()`` it.

    It answers what is malformed or of another job. Port 0 takes a free one. ``fd`` is a
    TCP socket that listens already, and stays open: see ``ports.open_listening``.
    """

    def __init__(
        self,
        host: str,
        port: int,
        greeting: Greeting = NO_JOB,
        *,
        fd: int | None = None,
    ) -> None:
        self._greeting = greeting
        self._known: set[bytes] = set()  # routing ids of admitted peers
        # A client reconnects under its routing id, maybe before its loss is seen.
        options: dict[zmq.SocketOption, int | bytes]
        options = {zmq.LINGER: 1000, zmq.ROUTER_HANDOVER: 1}
        if fd is not None:
            os.set_blocking(fd, False)
            options[zmq.USE_FD] = os.dup(fd)  # ZeroMQ closes it
        self._socket = _open_socket(zmq.ROUTER, options)
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as exc:
            self._socket.close()
            raise WireError(f"Cannot listen on {host}:{port}: {exc}.") from exc
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.bytes_received = 0  # of all frames, without what ZeroMQ adds
        self.bytes_sent = 0
        self.wakeup = Wakeup()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self.wakeup.fd, zmq.POLLIN)

    def wait(self, timeout_ms: int) -> bool:
        """Wait for a message or a wake-up; return whether a message is there."""
        ready = dict(self._poller.poll(timeout_ms))
        # A signal may interrupt wake() before it writes: drain after each idle wait.
        if not ready or self.wakeup.fd in ready:
            self.wakeup.drain()
        return self._socket in ready

    def take(self) -> tuple[bytes, Header, Frames] | None:
        """Take a message: routing id, header, all frames; None: it was rejected."""
        name, *frames = receive_frames(self._socket)
        self.bytes_received += sum(map(len, frames))
        peer, number = bytes(name), 0
        try:
            header = Header.decode(frames[0])
            number = header.request
            if peer not in self._known:
                self._greeting.admit(peer, self.address)
                if len(self._known) >= _MAX_KNOWN_PEERS:
                    self._known.clear()
                self._known.add(peer)
        except (WireError, JobMismatchError) as exc:
            if isinstance(exc, WireError):
                logger.warning("rejected a message: %s", exc)
            self.send_error(peer, number, exc)
            return None
        return peer, header, frames

    def receive(self, timeout_ms: int) -> tuple[bytes, Header, Frames] | None:
        """Wait for a message, and :meth:`take` it; None also when none came in time."""
        return self.take() if self.wait(timeout_ms) else None

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
        """Return whether a peer is connected; messages of it may still be queued."""
        # It is sent a reply without a request, which it drops.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            reply = [peer, Header(Kind.REPLY).encode(), b""]
            self._socket.send_multipart(reply, zmq.NOBLOCK)
        except zmq.ZMQError as exc:
            return exc.errno != zmq.EHOSTUNREACH  # a full queue: it is slow, but there
        finally:
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 0)
        return True

    def close(self) -> None:
        """Close the socket; replies under way are sent for up to a second."""
        self._socket.close()
        self.wakeup.close()


class Reply(Future[tuple[Header, Frames]]):
    """A reply to come within ``timeout_s``; it cannot be cancelled."""

    def __init__(self, timeout_s: float, server: int = 0, what: str = "") -> None:
        super().__init__()
        self.timeout_s = timeout_s
        self.server = server
        self.what = what
        self.set_running_or_notify_cancel()  # from here on, cancel() does nothing

    def frames(self) -> Frames:
        """Wait for the reply; return its frames."""
        return self.result(self.timeout_s + _GRACE_S)[1]


class Connections:
    """Connections to several servers. Any thread may call any method.

    ``role`` is what the servers are called in errors, as ``"embedding server"``. They
    must belong to the job of the greeting, or to none.
    """

    def __init__(
        self, role: str, addresses: Sequence[str], *, greeting: Greeting = NO_JOB
    ) -> None:
        if not addresses:
            raise ConfigError(f"At least one address of an {role} is needed.")
        self.names = [f"{role} {i} at {a}" for i, a in enumerate(addresses)]
        self._slots = threading.BoundedSemaphore(_MAX_PENDING)
        self._lock = threading.Lock()
        self._outgoing: list[tuple[int, list[Frame]]] = []  # guarded by _lock
        self._pending: dict[int, Reply] = {}  # by request number; guarded by _lock
        # Deadline, request number and its timeout, the earliest first.
        self._deadlines: list[tuple[float, int, float]] = []  # guarded by _lock
        self._closed = False  # guarded by _lock
        self._lost: set[int] = set()  # guarded by _lock
        self._numbers = itertools.count(1)
        options = {zmq.SNDHWM: 0, zmq.RECONNECT_IVL_MAX: 1000}  # _MAX_PENDING bounds
        self._sockets = [
            _open_socket(zmq.DEALER, {**options, zmq.ROUTING_ID: greeting.encode()})
            for _ in addresses
        ]
        for socket, address in zip(self._sockets, addresses, strict=True):
            try:
                socket.connect(address)
            except zmq.ZMQError as exc:
                for opened in self._sockets:
                    opened.close(linger=0)
                raise ConfigError(
                    "An address must look like 'tcp://host:port'. "
                    f"Received: {address!r} ({exc})."
                ) from exc
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
        """Send a request to one server; its number is set here.

        The memory of ``frames`` must not change until the reply. ``what`` is the
        request in words, for errors: ``"lookup of table 'ads'"``.
        """
        require_sendable(frames, what)
        name = self.names[server]
        if not self._slots.acquire(timeout=timeout_s):
            raise RequestTimeoutError(
                f"{what}: too many requests were pending for {timeout_s:g} s.",
                server=name,
            )
        reply = Reply(timeout_s, server, what)
        number = next(self._numbers)
        deadline = time.monotonic() + timeout_s
        message: list[Frame] = [header.encode(request=number), *frames]
        with self._lock:
            if self._closed:
                self._slots.release()
                raise ServerError(f"{what}: the connections are closed.", server=name)
            self._pending[number] = reply
            is_lost = server in self._lost
            if not is_lost:
                heapq.heappush(self._deadlines, (deadline, number, timeout_s))
                self._outgoing.append((server, message))
        if is_lost:
            self._fail(_STILL_LOST, [number])
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
        handlers: dict[Any, Callable[[], None]] = {self._wakeup.fd: self._send_outgoing}
        for server, socket in enumerate(self._sockets):
            handlers[socket] = partial(self._receive, server)
        for server, monitor in enumerate(self._monitors):  # after what came before
            handlers[monitor] = partial(self._notice_change, server)
        poller = zmq.Poller()
        for source in handlers:
            poller.register(source, zmq.POLLIN)
        reason = "the connections were closed."
        try:
            while (timeout_ms := self._expire()) is not None:
                # A signal may interrupt wake() before it writes: look after each wait.
                for source, _ in poller.poll(timeout_ms) or [(self._wakeup.fd, 0)]:
                    handlers[source]()
        except Exception as exc:  # handed to all callers that wait
            logger.exception("the I/O thread of %s died", self.names)
            reason = f"the I/O thread died ({exc!r})."
        finally:
            with self._lock:
                self._closed = True
            self._fail(reason, self._pending_of(range(len(self))))
            for socket, monitor in zip(self._sockets, self._monitors, strict=True):
                socket.disable_monitor()
                monitor.close()
                socket.close(linger=0)
            self._wakeup.close()

    def _expire(self) -> int | None:
        """Fail overdue requests; return how many ms to wait, None once closed."""
        while True:
            with self._lock:
                if self._closed:
                    return None
                if not self._deadlines:
                    return _IDLE_POLL_MS
                left_s = self._deadlines[0][0] - time.monotonic()
                if left_s > 0:
                    return min(int(left_s * 1000) + 1, _IDLE_POLL_MS)
                _, number, timeout_s = heapq.heappop(self._deadlines)
            late = f"no reply within {timeout_s:g} s. Is it running, and is the address"
            self._fail(f"{late} right?", [number], RequestTimeoutError)

    def _send_outgoing(self) -> None:
        self._wakeup.drain()
        with self._lock:
            outgoing, self._outgoing = self._outgoing, []
        for server, frames in outgoing:
            send_frames(self._sockets[server], frames)

    def _receive(self, server: int) -> None:
        """Hand a reply to the caller that waits for it."""
        frames = receive_frames(self._sockets[server])
        name = self.names[server]
        error = None
        try:
            header = Header.decode(frames[0])
            if header.kind is Kind.ERROR:
                text = decode_json(frames, ErrorReply)
                error = RemoteError(text.message, server=name, kind=text.kind)
        except WireError as exc:
            logger.warning("%s sent no message of ours: %s", name, exc)
            ours = f"the reply must be a message of this protocol. {exc}"
            reason = f"{ours} Is this the right address?"
            self._fail(reason, self._pending_of([server]), WireError)
            return
        reply = self._take(header.request, server)
        if reply is None:
            return  # its deadline has passed
        if error is not None:
            reply.set_exception(error)
        else:
            reply.set_result((header, frames))

    def _take(self, number: int, server: int | None = None) -> Reply | None:
        """Remove a request; None if it has ended, or is not the server's."""
        with self._lock:
            reply = self._pending.get(number)
            if reply is None or server not in (None, reply.server):
                return None
            del self._pending[number]
        self._slots.release()
        return reply

    def _notice_change(self, server: int) -> None:
        """Note that the connection to a server was lost, or was established."""
        while self._sockets[server].poll(0):  # what came before the change
            self._receive(server)
        monitor = self._monitors[server]
        event = zmq.utils.monitor.recv_monitor_message(monitor)["event"]
        is_lost = event == zmq.EVENT_DISCONNECTED
        with self._lock:
            (self._lost.add if is_lost else self._lost.discard)(server)
        if is_lost:
            lost = "the connection was lost. Did the process end?"
            self._fail(lost, self._pending_of([server]))

    def _pending_of(self, servers: Sequence[int]) -> list[int]:
        with self._lock:
            return [n for n, reply in self._pending.items() if reply.server in servers]

    def _fail(
        self,
        reason: str,
        numbers: Sequence[int],
        kind: type[ServerError | WireError] = ServerError,
    ) -> None:
        for reply in filter(None, map(self._take, numbers)):
            name, text = self.names[reply.server], f"{reply.what}: {reason}"
            if issubclass(kind, ServerError):
                reply.set_exception(kind(text, server=name))
            else:
                reply.set_exception(kind(f"{name}: {text}"))


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


def keep_freed_memory() -> bool:
    """Reuse the memory of messages of up to 32 MiB; return whether glibc can.

    Otherwise the operating system clears every page of the next large message: a
    quarter of the time of a thread that receives gradients.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    reused = mallopt(_M_MMAP_THRESHOLD, 2**25)  # glibc accepts no more
    return bool(reused and mallopt(_M_TRIM_THRESHOLD, 2**28))


def _open_socket(
    kind: int, options: Mapping[zmq.SocketOption, int | bytes]
) -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    for option, value in {**_LIMITS, **options}.items():
        socket.setsockopt(option, value)
    return socket
