"""Sockets of ZeroMQ with the limits that all connections of a job have, and messages.

A socket belongs to one thread. What others want of that thread, they tell it through a
``Wakeup``, which it polls beside its sockets. ``Listener`` is a server's socket, to
which many clients connect.
"""

import contextlib
import ctypes
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from socket import gaierror
from typing import Any, NoReturn, Protocol, Self

import msgspec
import zmq

from persia_torchrec import env, timeouts
from persia_torchrec.errors import (
    ConfigError,
    FrameError,
    JobMismatchError,
    RemoteError,
    WireError,
)
from persia_torchrec.rpc import addresses, auth
from persia_torchrec.rpc.auth import NO_JOB, Greeting
from persia_torchrec.rpc.messages import (
    ErrorReply,
    Frame,
    Frames,
    Header,
    Kind,
    LateFrame,
    SentFrame,
    decode_json,
    encode_json,
    error_frames,
)
from persia_torchrec.rpc.slab_server import Slabs

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 2**31  # of a frame; the sender of a larger one is disconnected
MAX_FRAMES = 2**14  # of a message; what comes after them is dropped

_HANDSHAKE_MS = 10_000  # after which a connection without a proof is closed
_MIN_ZERO_COPY_BYTES = 65536
_MAX_KNOWN_PEERS = 4096
_MOST_IN_ROW = 8
_LOG_S = 10.0
_LOOK_S = 1.0
_IO_THREADS = 1  # of ZeroMQ in one context; a connection passes through one of them
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

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


@dataclass(frozen=True, kw_only=True, slots=True)
class ListenerLimits:
    """What clients of a listener may use."""

    frame_bytes: int = MAX_MESSAGE_BYTES
    """Of a frame; who sends a larger one is disconnected. ZeroMQ has no other limit for
    what a connection sends before it has proven the token."""

    shm_bytes: int = 0
    """Of all memory that clients of this host share, see ``slab_server.py``."""


class Listener:
    """A server's socket, owned by one thread; any thread may ``wakeup.wake()`` it.

    Clients prove this process's token, and mean this listener, as ``greeting`` says who
    it is; without a token it must listen on the loopback. It answers what is malformed
    or of another job. Port 0 takes a free one. ``fd`` is a TCP socket that listens
    already, and stays open; without it one is opened, see
    ``addresses.open_listening``. That no connection can be accepted is logged.
    """

    def __init__(
        self,
        host: str,
        port: int,
        greeting: Greeting = NO_JOB,
        *,
        fd: int | None = None,
        encrypts: bool = False,
        limits: ListenerLimits = ListenerLimits(),
    ) -> None:
        self._greeting = greeting
        self._known: set[bytes] = set()  # routing ids of admitted peers
        # Of its own: it has one doorkeeper.
        self._context = zmq.Context(_IO_THREADS)
        self._next_log_s = self._look_s = 0.0
        # A client reconnects under its routing id, maybe before its loss is seen.
        options = {zmq.LINGER: 1000, zmq.ROUTER_HANDOVER: 1}
        options[zmq.HANDSHAKE_IVL] = _HANDSHAKE_MS
        options[zmq.MAXMSGSIZE] = limits.frame_bytes
        self._socket = open_socket(zmq.ROUTER, options, self._context)
        try:
            self.address = self._listen(host, port, fd, encrypts=encrypts)
            addresses.require_token(env.host_of(self.address), env.job_token())
        except BaseException:
            self._socket.close(linger=0)
            self._context.term()
            raise
        self.bytes_received = 0  # of all frames, without what ZeroMQ adds
        self.bytes_sent = 0
        self.wakeup = Wakeup()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self.wakeup.fd, zmq.POLLIN)
        self.slabs = Slabs(limits.shm_bytes)
        self.was_rejected = False
        # What requests of a peer wait for, besides their turn: in answers to pings.
        self.waits_for: Callable[[bytes], str] = lambda _: ""
        self._num_in_row = 0  # messages of slabs since it has looked for others
        self._is_over_tcp = False  # whether a message is there
        # A message over TCP, for which those of its client's slab come first.
        self._held: deque[tuple[bytes, Header, Frames]] = deque()

    def wait(self, timeout_ms: int) -> bool:
        """Wait for a message or a wake-up; return whether a message is there."""
        self._look_for_descriptors()
        slabs, has_slabs = self.slabs, len(self.slabs) > 0
        if self._held:
            return True
        if has_slabs:
            if self._num_in_row < _MOST_IN_ROW and slabs.has_message():
                return True
            if timeout_ms and not slabs.is_quiet():
                timeout_ms = 0
        ready = dict(self._poller.poll(timeout_ms))
        self._num_in_row = 0
        if has_slabs:
            slabs.set_sleeps(0)
        # A signal may interrupt wake() before it writes: drain after each idle wait.
        if not ready or self.wakeup.fd in ready:
            self.wakeup.drain()
        self._is_over_tcp = self._socket in ready
        if len(ready) > self._is_over_tcp:
            slabs.look(ready)
        self._watch_slabs()
        if self._is_over_tcp or slabs.has_message():
            return True
        return has_slabs and bool(ready) and not slabs.is_quiet()

    def take(self) -> tuple[bytes, Header, Frames] | None:
        """Take a message: routing id, header, all frames.

        None: it was rejected, if ``was_rejected``, or answered here.
        """
        slabs = self.slabs
        self.was_rejected = False
        if not self._is_over_tcp and not self._held and slabs.has_message():
            self._num_in_row += 1
            return self._took(slabs.take())
        message = self._held.popleft() if self._held else self._take_over_tcp()
        self._is_over_tcp = False
        if message is None:
            return None
        if slabs.has_message_of(message[0]):
            self._held.append(message)
            return self._took(slabs.take(message[0]))
        slabs.note_over_tcp(message[0])
        return message

    def _took(
        self, message: tuple[bytes, Header, Frames] | None
    ) -> tuple[bytes, Header, Frames] | None:
        self.was_rejected = message is None
        if message is not None:
            self.bytes_received += sum(map(len, message[2]))
        return message

    def _take_over_tcp(self) -> tuple[bytes, Header, Frames] | None:
        name, *frames = receive_frames(self._socket)
        self.bytes_received += sum(map(len, frames))
        peer, number = bytes(name), 0
        try:
            header = Header.decode(frames[0])
            number = header.request
            if len(frames) > MAX_FRAMES:
                raise FrameError(f"A message must have at most {MAX_FRAMES} frames.")
            if peer not in self._known:
                self._greeting.admit(peer, self.address)
                if len(self._known) >= _MAX_KNOWN_PEERS:
                    self._known.clear()
                self._known.add(peer)
        except (WireError, JobMismatchError) as exc:
            if isinstance(exc, WireError) and time.monotonic() >= self._next_log_s:
                self._next_log_s = time.monotonic() + _LOG_S
                logger.warning("rejected message (further ones not logged): %s", exc)
            self.slabs.note_over_tcp(peer)
            self.send_error(peer, number, exc)
            self.was_rejected = True
            return None
        if header.kind in (Kind.SLAB, Kind.PING):
            self.slabs.note_over_tcp(peer)
            if header.kind is Kind.PING:
                waits_for = encode_json(self.waits_for(peer))
                self.send(peer, Header(Kind.REPLY, number), [waits_for])
            else:
                self._answer_slab(peer, number, frames)
            return None
        return peer, header, frames

    def _answer_slab(self, peer: bytes, number: int, frames: Frames) -> None:
        """Answer a client that asks for shared memory."""
        try:
            body = self.slabs.invite(peer, frames)
        except WireError as exc:
            self.send_error(peer, number, exc)
            return
        self._watch_slabs()
        self.send(peer, Header(Kind.REPLY, number), [body])

    def _watch_slabs(self) -> None:
        """Poll the sockets of shared memory that have come, and no more those gone."""
        changes = self.slabs.changes
        while changes:
            fd, is_there = changes.popleft()
            if is_there:
                self._poller.register(fd, zmq.POLLIN)
            else:
                self._poller.unregister(fd)

    def receive(self, timeout_ms: int) -> tuple[bytes, Header, Frames] | None:
        """Wait for a message, and :meth:`take` it; None also when none came in time."""
        return self.take() if self.wait(timeout_ms) else None

    def send(self, peer: bytes, header: Header, frames: Sequence[Frame] = ()) -> None:
        """Send a message to a peer; it is dropped if the peer is gone."""
        message: list[Frame] = [header.encode(), *(frames or [b""])]
        self.bytes_sent += sum(map(len, message))
        if self.slabs.send(peer, header.request, message):
            return
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
        """Close the socket, when replies under way are sent, for up to a second."""
        self.slabs.close()
        self._socket.close()
        self._context.term()
        self.wakeup.close()

    def _listen(self, host: str, port: int, fd: int | None, *, encrypts: bool) -> str:
        """Begin to accept those who prove the token; return the address."""
        options = auth.listener_options(
            self._context, self._greeting, encrypts=encrypts
        )
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        where = addresses.join_address(host, port)
        try:
            # ZeroMQ knows no names, and IPv6 only by another option. It closes what it
            # is given.
            if fd is None:
                own = addresses.open_listening(host, port).detach()
            else:
                own = duplicate(fd)
            os.set_blocking(own, False)
            self._socket.setsockopt(zmq.USE_FD, own)
            self._socket.bind("tcp://127.0.0.1:*")  # that of the descriptor
        except gaierror as exc:
            unknown = f"the host {host!r} is unknown here ({exc.strerror})"
            raise WireError(f"Cannot listen on {where}: {unknown}.") from exc
        except (OSError, zmq.ZMQError) as exc:
            raise WireError(f"Cannot listen on {where}: {exc}.") from exc
        address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return address

    def _look_for_descriptors(self) -> None:
        """Log, now and then, that no client can connect: ZeroMQ says nothing."""
        now_s = time.monotonic()
        if now_s < self._look_s:
            return
        self._look_s = now_s + _LOOK_S
        if not addresses.has_descriptors():
            self._look_s = now_s + _LOG_S
            logger.warning(
                "%s cannot accept connections: %s",
                self.address,
                addresses.no_descriptors(),
            )


class OwnProcess:
    """What has threads and connections, which only the process has that made it.

    To pickle or copy it is a ConfigError.
    """

    _pid: int

    def __new__(cls, *_: object, **__: object) -> Self:
        """Note which process makes it."""
        made = super().__new__(cls)
        made._pid = os.getpid()
        return made

    def require_own_process(self) -> None:
        """Reject a call in a forked child, which would wait for threads it lacks."""
        if self._pid != os.getpid():
            raise ConfigError(
                f"Threads and connections to the servers belong to process {self._pid},"
                f" which made them. Received: a call in process {os.getpid()}, a fork "
                "of it. Call EmbeddingClient.connect, and shard the model, in each "
                "process."
            )

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "Threads and connections to the servers cannot be pickled or copied. "
            f"Received: a {type(self).__name__}, to be given to another process or "
            "copied. Hand the servers' addresses over, and call "
            "EmbeddingClient.connect there; save_checkpoint saves rows."
        )


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
        if isinstance(frame, LateFrame):
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


def read_reply(frames: Frames, name: str) -> tuple[Header, RemoteError | None]:
    """Return the header of a reply of the server ``name``, and its error if it is one.

    Raises:
        FrameError: it is no reply of this protocol.
    """
    header = Header.decode(frames[0])
    if header.kind is not Kind.ERROR:
        return header, None
    text = decode_json(frames, ErrorReply)
    return header, RemoteError(text.message, server=name, kind=text.kind)


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
    kind: int,
    options: Mapping[zmq.SocketOption, int | bytes],
    context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
) -> "zmq.Socket[bytes]":
    """Return a socket with the limits of all connections, and other options.

    Without a context it is of the process's.
    """
    if context is None:
        context = zmq.Context.instance(_IO_THREADS)
        context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)  # until it has its first socket
    opened: zmq.Socket[bytes] = context.socket(kind)
    for option, value in {**_LIMITS, **options}.items():
        opened.setsockopt(option, value)
    return opened


class Carrier(Protocol):
    """What has carried a request besides TCP, see ``SlabChannel``."""

    def wait(self, reply: "Reply", stop_s: float) -> None:
        """Wait for a reply in the caller's thread, until a time."""

    def look(self) -> None:
        """Hand over the replies that are there."""

    def listen(self, listens: bool) -> None:
        """Say whether the I/O thread wants to know of each reply."""


class Reply(Future[tuple[Header, Frames]]):
    """A reply to come within ``timeout_s``; it cannot be cancelled.

    The time in which its server is away, ``recovery_s`` at most, does not count.
    """

    def __init__(
        self,
        timeout_s: float,
        server: int = 0,
        what: str = "",
        *,
        recovery_s: float = 0.0,
    ) -> None:
        super().__init__()
        self.timeout_s = timeout_s
        self.recovery_s = recovery_s
        self.server = server
        self.what = what
        self.begun_s, self.incarnation = time.monotonic(), 0
        # Of the connections, guarded by their lock: what is sent again; what is left
        # of the timeout while the server is away; the deadline while it is not.
        self.message: list[SentFrame] = []
        self.left_s = timeout_s
        self.deadline_s = math.inf
        # What took the request, if that was not TCP; callbacks are the I/O thread's.
        self.carrier: Carrier | None = None
        self.has_callbacks = self.was_nudged = False
        self.set_running_or_notify_cancel()  # from here on, cancel() does nothing

    def frames(self, within_s: float | None = None) -> Frames:
        """Wait for the reply, ``within_s`` at most if given; return its frames."""
        most_s = self.timeout_s + self.recovery_s + timeouts.REPLY_GRACE_S
        most_s = most_s if within_s is None else within_s
        carrier = self.carrier
        if carrier is not None and not self.has_callbacks and not super().done():
            stop_s = time.monotonic() + most_s
            carrier.wait(self, stop_s)
            most_s = max(stop_s - time.monotonic(), 0.0)
        return self.result(most_s)[1]

    def done(self) -> bool:
        """Return whether the reply, or an error, is there."""
        if self.carrier is not None and not self.has_callbacks and not super().done():
            self.carrier.look()
        return super().done()

    def has_ended(self) -> bool:
        """Return whether it is done; it is not looked for."""
        return super().done()

    def park(self, most_s: float) -> None:
        """Wait until it is done, or nudged since the last wait."""
        with self._condition:
            if not self.was_nudged and not super().done():
                self._condition.wait(max(most_s, 0.0))
            self.was_nudged = False

    def nudge(self) -> None:
        """End a wait in :meth:`park`."""
        with self._condition:
            self.was_nudged = True
            self._condition.notify_all()

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Have a function called, as a rule in the I/O thread, once it is done."""
        self.has_callbacks = True
        if self.carrier is not None:
            self.carrier.listen(True)
        super().add_done_callback(fn)


@dataclass(slots=True)
class Away:
    """Since when a server is away, the HELLO it was sent, and when it gets the next.

    ``address`` is where it is now, if it has moved. A new socket is opened at
    ``again_s``, as it ``rejects`` the token that it had accepted.
    """

    since_s: float
    hello: int = -1
    hello_s: float = math.inf
    address: str = ""
    again_s: float = math.inf
    rejects: str = ""


class Told(msgspec.Struct):
    """What is read of a reply to HELLO."""

    incarnation: int = 0

    @classmethod
    def read(cls, frames: Frames) -> Self:
        """Read it; raise FrameError if that is another one's reply."""
        told: Self = decode_json(frames, cls)
        return told
