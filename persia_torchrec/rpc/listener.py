"""A server's socket, to which many clients connect, and the memory it shares with some.

A ``Listener`` belongs to one thread. What others want of that thread, they tell it by
its ``wakeup``, which it polls beside the socket.
"""

import ctypes
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from socket import gaierror

import zmq

from persia_torchrec import env
from persia_torchrec.errors import ConfigError, FrameError, JobMismatchError, WireError
from persia_torchrec.rpc import addresses, auth
from persia_torchrec.rpc.greeting import NO_JOB, Greeting
from persia_torchrec.rpc.messages import (
    Frame,
    Frames,
    Header,
    Kind,
    encode_json,
    error_frames,
)
from persia_torchrec.rpc.slab_server import Slabs
from persia_torchrec.rpc.sockets import (
    IO_THREADS,
    MAX_FRAMES,
    MAX_MESSAGE_BYTES,
    Wakeup,
    open_socket,
    receive_frames,
    send_frames,
)

logger = logging.getLogger(__name__)

_HANDSHAKE_MS = 10_000  # after which a connection without a proof is closed
_MAX_KNOWN_PEERS = 4096
_MOST_IN_ROW = 8
_REJECTIONS = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_LOG_S = 10.0
_LOOK_S = 1.0

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
        self._context = zmq.Context(IO_THREADS)
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
        self._rejections: zmq.Socket[bytes] | None = None  # events of connections
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

    def count_rejected(self) -> int:
        """Return how many connections have not proven the token since the last call."""
        if self._rejections is None:
            self._rejections = self._socket.get_monitor_socket(_REJECTIONS)
        num = 0
        while self._rejections.poll(0):
            self._rejections.recv_multipart()
            num += 1
        return num

    def close(self) -> None:
        """Close the socket, when replies under way are sent, for up to a second."""
        self.slabs.close()
        if self._rejections is not None:
            self._socket.disable_monitor()
            self._rejections.close()
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
