"""Requests from any thread of a process to several servers.

``Connections`` is the client's end of what ``Listener`` is the server's: one socket a
server and one thread that owns them all, so that any thread may send requests and wait
for replies.

    caller  --submit-->  queue  --I/O thread-->  socket  --network-->  Listener
    caller  <--future---  pending by request number  <-----------------

Messages to one server arrive in the order of ``submit``. A request ends in a reply, in
an error of the server, at its deadline, or as soon as the connection is lost. While it
is lost, requests fail at once; ZeroMQ goes on trying to connect, and as soon as it
does, they are sent again. (A server that was never reached may still be starting:
requests to it wait for their deadline.)
"""

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import zmq
import zmq.utils.monitor

from persia_torchrec.errors import (
    ConfigError,
    FrameError,
    RemoteError,
    RequestTimeoutError,
    ServerError,
    WireError,
)
from persia_torchrec.wire.greeting import NO_JOB, Greeting
from persia_torchrec.wire.listener import (
    MAX_MESSAGE_BYTES,
    end_when_silent,
    receive_frames,
    require_sendable,
    send_frames,
)
from persia_torchrec.wire.messages import (
    Frame,
    Frames,
    Header,
    Kind,
    decode_json,
)
from persia_torchrec.wire.wakeup import Wakeup

logger = logging.getLogger(__name__)

_IDLE_POLL_MS = 200
_STILL_LOST = "the connection was lost, and is not there yet. Did the process end?"
_CHANGES = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED


_GRACE_S = 5.0
"""The I/O thread fails a reply at its deadline; a wait longer than that means that the
thread is dead."""


class Reply(Future[tuple[Header, Frames]]):
    """A reply to come; it cannot be cancelled.

    Fails with RemoteError, RequestTimeoutError, ServerError (the connection is lost) or
    WireError (the server answers what is no message of ours).

    Args:
        timeout_s: seconds after which the request fails.
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self.timeout_s = timeout_s
        self.set_running_or_notify_cancel()  # from here on, cancel() does nothing

    def frames(self) -> Frames:
        """Wait for the reply; return its frames.

        Raises:
            PersiaError: as the class says.
        """
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
        addresses: one a server, as ``"tcp://127.0.0.1:7000"``.
        max_pending: requests that may wait for replies; one more makes its caller wait.
        greeting: of this process; the servers must belong to the same job, or to none.

    Raises:
        ConfigError: no address, or one that cannot be read.
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
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._sockets = _connect_all(context, addresses, greeting)
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
            WireError: a frame is larger than a server accepts.
        """
        require_sendable(frames, what)
        if not self._slots.acquire(timeout=timeout_s):
            raise RequestTimeoutError(
                f"{what}: too many requests were pending for {timeout_s:g} s.",
                server=self.names[server],
            )
        reply = Reply(timeout_s)
        number = next(self._numbers)
        deadline = time.monotonic() + timeout_s
        message: list[Frame] = [header.encode(request=number), *frames]
        with self._lock:
            if self._closed:
                self._slots.release()
                raise ServerError(
                    f"{what}: the connections are closed.", server=self.names[server]
                )
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

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup.fd, zmq.POLLIN)
        for socket in [*self._sockets, *self._monitors]:
            poller.register(socket, zmq.POLLIN)
        try:
            while not self._is_closed():
                ready = dict(poller.poll(self._poll_ms()))
                if self._wakeup.fd in ready:
                    self._send_outgoing()
                for server, socket in enumerate(self._sockets):
                    if socket in ready:
                        self._receive(server, socket)
                for server, monitor in enumerate(self._monitors):
                    if monitor in ready:
                        self._notice_change(server, monitor)
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
            send_frames(self._sockets[server], frames)

    def _receive(self, server: int, socket: "zmq.Socket[bytes]") -> None:
        frames = receive_frames(socket)
        try:
            self._settle(server, Header.decode(frames[0]), frames)
        except WireError as exc:
            self._distrust(server, exc)

    def _settle(self, server: int, header: Header, frames: Frames) -> None:
        """Give a reply to whoever waits for it."""
        error = None
        if header.kind is Kind.ERROR:
            error = self._remote_error(server, frames)
        pending = self._take(header.request, server)
        if pending is None:
            return  # Its deadline has passed.
        if error is not None:
            pending.reply.set_exception(error)
        else:
            pending.reply.set_result((header, frames))

    def _remote_error(self, server: int, frames: Frames) -> RemoteError:
        body = decode_json(frames)
        if not isinstance(body, dict) or not {"kind", "message"} <= body.keys():
            raise FrameError(
                f"An ERROR must name kind and message. Received: {body!r:.100}."
            )
        return RemoteError(
            str(body["message"]), server=self.names[server], kind=str(body["kind"])
        )

    def _distrust(self, server: int, exc: WireError) -> None:
        """Fail the requests to a server that answered none of them in our words."""
        logger.warning("%s sent no message of ours: %s", self.names[server], exc)
        for number in self._pending_of(server):
            pending = self._take(number)
            if pending is not None:
                error = WireError(
                    f"{self.names[server]}: {pending.what}: the reply must be a "
                    f"message of this protocol. {exc} Is this the right address?"
                )
                pending.reply.set_exception(error)

    def _take(self, number: int, server: int | None = None) -> _Pending | None:
        """Return a request that is over now; None if it was, or is not the server's."""
        with self._lock:
            pending = self._pending.get(number)
            if pending is None or server not in (None, pending.server):
                return None
            del self._pending[number]
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
        pending.reply.set_exception(
            RequestTimeoutError(
                f"{pending.what}: no reply within {pending.reply.timeout_s:g} s. "
                "Is it running, and is the address right?",
                server=self.names[pending.server],
            )
        )

    def _notice_change(self, server: int, monitor: "zmq.Socket[bytes]") -> None:
        """Learn that the connection to a server was lost, or that it is there."""
        while self._sockets[server].poll(0):  # what came before the change
            self._receive(server, self._sockets[server])
        event = zmq.utils.monitor.recv_monitor_message(monitor)["event"]
        is_lost = event == zmq.EVENT_DISCONNECTED
        with self._lock:
            (self._lost.add if is_lost else self._lost.discard)(server)
        if is_lost:
            self._fail(
                self._pending_of(server),
                "the connection was lost. Did the process end?",
            )

    def _pending_of(self, server: int) -> list[int]:
        with self._lock:
            return [n for n, p in self._pending.items() if p.server == server]

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
                pending.reply.set_exception(error)


def _connect_all(
    context: "zmq.Context[zmq.Socket[bytes]]",
    addresses: Sequence[str],
    greeting: Greeting,
) -> "list[zmq.Socket[bytes]]":
    sockets: list[zmq.Socket[bytes]] = []
    try:
        sockets.extend(_connect(context, address, greeting) for address in addresses)
    except ConfigError:
        for socket in sockets:
            socket.close(linger=0)
        raise
    return sockets


def _connect(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, greeting: Greeting
) -> "zmq.Socket[bytes]":
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, 0)  # max_pending is the bound
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.ROUTING_ID, greeting.encode())
    end_when_silent(socket)
    try:
        socket.connect(address)
    except zmq.ZMQError as exc:
        socket.close()
        raise ConfigError(
            "An address must look like 'tcp://host:port'. "
            f"Received: {address!r} ({exc})."
        ) from exc
    return socket
