"""The connection to one server: what it was sent, what carries that, and its losses.

    caller  --send-->  queue  --I/O thread-->  TCP  --network-->  Listener
    caller  --send-->  memory that is shared with a server of this host
    caller  <--Reply-- pending by request number  <---------------

A request goes through memory if it fits, and says how many messages over TCP come
before it, which it must not overtake. A lost connection ends both: what is unanswered
is sent again over TCP, or fails, and other memory is obtained later.
"""

import contextlib
import heapq
import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from socket import AF_INET6
from typing import NamedTuple

import msgspec
import zmq

from persia_torchrec import env, timeouts
from persia_torchrec.errors import (
    NotReadyError,
    PersiaError,
    RemoteError,
    RequestTimeoutError,
    RestartedError,
    ServerError,
    TokenError,
    WireError,
)
from persia_torchrec.rpc import addresses as hosts
from persia_torchrec.rpc import auth
from persia_torchrec.rpc.auth import Proof
from persia_torchrec.rpc.greeting import Greeting
from persia_torchrec.rpc.messages import (
    DeferredFrame,
    Frames,
    Header,
    Kind,
    SentFrame,
    decode_json,
    encode_json,
)
from persia_torchrec.rpc.own_process import OwnProcess
from persia_torchrec.rpc.reply import Reply, read_reply
from persia_torchrec.rpc.silences import Silence
from persia_torchrec.rpc.slab_client import SharedMemoryTransport
from persia_torchrec.rpc.sockets import (
    IoLoop,
    TcpTransport,
    receive_frames,
    require_sendable,
)

logger = logging.getLogger(__name__)

_MAX_PENDING = 256  # requests that wait for replies; the caller of one more waits
_RETRY_S = 0.1  # until a server that is not ready is asked again
_REJECTED_S = 1.0  # until one that rejects a token which it had accepted is
_SMALL_BYTES = 2**18  # that are copied within some tens of microseconds
_STILL_LOST = "the connection was lost, and is not there yet. Did the process end?"
_ROWS_GONE = (
    "the server was started again, and its rows are gone. Fill or export the table "
    "once more, or load a checkpoint."
)
_REPLY, _SLAB = (k.to_bytes(2, "little") for k in (Kind.REPLY, Kind.SLAB))
"""Kinds, in a header."""


class State(Enum):
    """Whether a server is there."""

    CONNECTING = auto()
    """It was never reached: requests wait, as it may start yet."""
    UP = auto()
    AWAY = auto()
    """It was lost, and may come back: requests wait, and are sent again."""
    LOST = auto()
    """It was lost: requests fail at once."""


class _Failure(NamedTuple):
    """Why requests fail at once."""

    why: str
    kind: type[ServerError]


@dataclass(slots=True)
class _Away:
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


class _Hello(msgspec.Struct):
    """What is read of a reply to HELLO."""

    incarnation: int = 0


class Connection(OwnProcess):
    """A server, and the requests to it; ``loop`` is its I/O thread.

    Messages arrive in the order of :meth:`send`. A server that was lost may be away for
    ``recovery_s`` seconds, and must come back as the start that ``incarnation`` says,
    where 0 is any. Any thread may call a method that does not say otherwise.

    Attributes:
        when_back: called in the I/O thread when the server is back; it must not wait.
        when_restarted: the same, when it is back without what it had.
        sharing: held by who asks the server for memory.
    """

    def __init__(
        self,
        silence: Silence,
        address: str,
        greeting: Greeting,
        loop: IoLoop,
        *,
        recovery_s: float,
        encrypts: bool,
    ) -> None:
        self.name, self.address, self.incarnation = silence.name, address, 0
        self.when_back: Callable[[], None] = lambda: None
        self.when_restarted: Callable[[], None] = lambda: None
        self.sharing = threading.Lock()
        self._routing_id, self._recovery_s = greeting.encode(), recovery_s
        self._proof = Proof(greeting, encrypts=encrypts)
        self._loop, self._silence = loop, silence
        self._slots = threading.BoundedSemaphore(_MAX_PENDING)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        # Guarded by _lock; the I/O thread changes all but what send() adds to.
        self._is_closed, self._state = False, State.CONNECTING
        self._failure: _Failure | None = None
        self._away = _Away(math.inf)  # of the last time
        self._pending: dict[int, Reply] = {}  # by number, in the order of send()
        self._deadlines: list[tuple[float, int]] = []  # and numbers, the earliest first
        self._outgoing: list[list[SentFrame]] = []
        # Messages over TCP: all, and those before the server read the latest SLAB.
        self._num_over_tcp = self._num_before = 0
        self._memory: SharedMemoryTransport | None = None
        self._watched: SharedMemoryTransport | None = None  # the I/O thread's
        self._arrived: deque[Frames] = deque()  # for the I/O thread; any appends
        self._io_thread = 0
        self._is_ipv6 = self._find_host()
        self._tcp = self._open()

    @property
    def memory(self) -> SharedMemoryTransport | None:
        """What carries requests that fit, if the server shares memory."""
        return self._memory

    @property
    def is_away(self) -> bool:
        """Whether the server was lost and may come back."""
        return self._state is State.AWAY

    @property
    def fails_with(self) -> type[ServerError] | None:
        """With what requests fail at once; None: they do not."""
        with self._lock:
            return self._failure.kind if self._failure else None

    def send(
        self,
        header: Header,
        frames: Sequence[SentFrame],
        *,
        timeout_s: float,
        what: str,
        reply_bytes: int = 0,
    ) -> Reply:
        """Send a request; its number is set here.

        The memory of ``frames`` must not change until the reply. ``what`` is the
        request in words, for errors: ``"lookup of table 'ads'"``. A reply of more than
        ``reply_bytes``, or 16 KiB, comes over TCP.
        """
        if self._pid != os.getpid():
            self.require_own_process()
        require_sendable(frames, what)
        if (memory := self._memory) is None:
            # Here, and not in the I/O thread.
            frames = [f.whole() if isinstance(f, DeferredFrame) else f for f in frames]
        elif sum(map(len, frames)) < _SMALL_BYTES:
            memory.announce()  # the server wakes while the request is prepared
        self._wait_for_slot(timeout_s + self._recovery_s, what)
        reply = Reply(timeout_s, what, recovery_s=self._recovery_s)
        reply.incarnation = header.incarnation
        number = next(self._numbers)
        reply.message = [header.encode(request=number), *frames]
        with self._lock:
            if self._is_closed:
                self._slots.release()
                raise ServerError(
                    f"{what}: the connections are closed.", server=self.name
                )
            self._pending[number] = reply
            failure, tcp, num_before = self._failure, self._tcp, self._num_over_tcp
            is_there = failure is None and not self.is_away
            if is_there:
                reply.deadline_s = time.monotonic() + timeout_s
                heapq.heappush(self._deadlines, (reply.deadline_s, number))
                if memory is None:
                    self._queue(reply.message)
        if failure is not None:
            self._fail(failure.why, [number], failure.kind)
        elif is_there and memory is not None:
            self._send_by(memory, number, reply, reply_bytes, num_before, tcp)
        else:
            self._loop.wakeup.wake()
        return reply

    def _wait_for_slot(self, wait_s: float, what: str) -> None:
        if not self._slots.acquire(timeout=wait_s):
            raise RequestTimeoutError(
                f"{what}: too many requests were pending for {wait_s:g} s.",
                server=self.name,
            )

    def _send_by(
        self,
        memory: SharedMemoryTransport,
        number: int,
        reply: Reply,
        reply_bytes: int,
        num_before: int,
        tcp: TcpTransport,
    ) -> None:
        """Send a request through memory, or over TCP if that has no room."""
        try:
            is_sent = memory.send(number, reply, reply_bytes, num_before)
        except BaseException:
            self._take(number)
            raise
        if is_sent:
            return
        with self._lock:
            # Over a later connection all that is pending was sent again.
            if number in self._pending and not self.is_away and self._tcp is tcp:
                self._queue(reply.message)
        self._loop.wakeup.wake()

    def _queue(self, message: list[SentFrame]) -> None:
        """Leave a message that the I/O thread sends over TCP; the lock is held."""
        self._outgoing.append(message)
        self._num_over_tcp += 1
        header = message[0]
        if isinstance(header, bytes) and header[6:8] == _SLAB:
            # The server counts those that come behind it.
            self._num_before = self._num_over_tcp

    def use(self, memory: SharedMemoryTransport) -> bool:
        """Send requests through memory; return whether the server is there."""
        with self._lock:
            if self._is_closed or self._failure or self.is_away:
                return False
            memory.deliver = partial(self._deliver, memory)
            memory.wake = self._loop.wakeup.wake
            memory.first_over_tcp = self._num_before
            self._memory = memory
        self._loop.wakeup.wake()
        return True

    def renew(self, incarnation: int) -> None:
        """Send requests to a start of the server that is back."""
        with self._lock:
            self.incarnation, self._failure = incarnation, None
            if self._state is State.LOST:
                self._state = State.UP

    def move(self, address: str) -> None:
        """Look for the server at another address from now on, if it is away."""
        with self._lock:
            if self.is_away and address != self.address:
                self._away.address = address

    def _deliver(self, memory: SharedMemoryTransport) -> None:
        """Hand over the replies that are in memory, in any thread.

        The I/O thread gets errors, and those whose end has callbacks.
        """
        for number, frames in memory.take():
            reply = self._pending.get(number)
            if reply is None:
                continue  # its deadline has passed
            is_plain = frames[0][6:8] == _REPLY and not reply.has_callbacks
            if not (is_plain and self._finish(number, frames)):
                reply.source = None
                self._arrived.append(frames)
                if threading.get_ident() != self._io_thread:  # else it takes them next
                    self._loop.wakeup.wake()

    def _finish(self, number: int, frames: Frames) -> bool:
        """Hand a reply to its caller, in any thread; False: the I/O thread shall."""
        if self.is_away or self._silence.is_silent:
            return False
        self._silence.heard_s = time.monotonic()
        if (reply := self._take(number)) is not None:
            reply.set_result((Header.decode(frames[0]), frames))
        return True

    def _take(self, number: int) -> Reply | None:
        """Remove a request; None if it has ended."""
        with self._lock:
            reply = self._pending.pop(number, None)
            if reply is None:
                return None
            reply.message = []
        self._slots.release()
        return reply

    def _fail(
        self,
        reason: str,
        numbers: Sequence[int],
        kind: type[ServerError | WireError] = ServerError,
    ) -> None:
        for reply in filter(None, map(self._take, numbers)):
            text = f"{reply.what}: {reason}"
            if issubclass(kind, ServerError):
                reply.set_exception(kind(text, server=self.name))
            else:
                reply.set_exception(kind(f"{self.name}: {text}"))

    # In the I/O thread

    def look(self, now_s: float) -> float:
        """Do what is due; return when the next is."""
        self._io_thread = threading.get_ident()
        if (memory := self._memory) is not None:
            if self._watched is not memory:
                self._watched = memory
                self._loop.handle(memory.fd, partial(self._hear, memory))
            memory.look()  # no caller may wait for what is there
            self._accept_arrived()
        due_s = self._greet(self._away, now_s) if self.is_away else math.inf
        if self._outgoing:
            self._flush()
        while self._deadlines:
            with self._lock:
                deadline_s, number = self._deadlines[0]
                reply = self._pending.get(number)
                is_due = reply is not None and reply.deadline_s == deadline_s
                if is_due and deadline_s > now_s:
                    return min(due_s, deadline_s)
                heapq.heappop(self._deadlines)
            if is_due and reply is not None:
                late = f"no reply within {reply.timeout_s:g} s. {self._cause()}"
                self._fail(late, [number], RequestTimeoutError)
        return due_s

    def _cause(self) -> str:
        """Return what may be the cause that a request has had no reply."""
        if not hosts.has_descriptors():
            return hosts.no_descriptors()
        if self._state is State.CONNECTING:
            return "Is it running, and is the address right?"
        return "Is it the right server, and out of descriptors? See its log."

    def oldest(self) -> Reply | None:
        """Return the request that has waited longest."""
        with self._lock:
            return next(iter(self._pending.values()), None)

    def ping(self) -> None:
        """Ask a server that lets requests wait whether it is there."""
        if not self.is_away:
            self._silence.ping = next(self._numbers)
            header = Header(Kind.PING).encode(request=self._silence.ping)
            with self._lock:
                self._queue([header, b"null"])

    def end(self, reason: str) -> None:
        """Fail all requests, and take no more."""
        with self._lock:
            self._is_closed = True
        self._fail(reason, list(self._pending))
        self._close_transports()

    def _find_host(self) -> bool:
        """Return whether IPv6 is used; one with an unknown name is lost until then.

        With ``recovery_s`` its name may become known as it starts.
        """
        host = env.host_of(self.address)
        try:
            return hosts.family_of(host) is AF_INET6
        except (OSError, UnicodeError) as exc:
            why = f"the host {host!r} is unknown here ({exc}). Is the address right?"
            if self._recovery_s:
                logger.warning("%s: %s", self.name, why)
            else:
                self._state, self._failure = State.LOST, _Failure(why, ServerError)
        return True  # by which ZeroMQ finds addresses of both kinds

    def _open(self) -> TcpTransport:
        """Connect; what comes is handled in its order."""
        options: auth.Options = {
            zmq.ROUTING_ID: self._routing_id,
            zmq.IPV6: self._is_ipv6,
            **self._proof.options(),
        }
        tcp = TcpTransport(self.address, options)
        self._loop.handle(tcp.socket, self._receive)
        self._loop.handle(tcp.monitor, self._notice_change)
        return tcp

    def _open_again(self) -> None:
        """Connect again; the previous socket would send what waits, out of order."""
        self._close_transports()
        tcp = self._open()
        with self._lock:
            self._tcp = tcp

    def _close_transports(self) -> None:
        if self._tcp.socket.closed:  # and another one could not be opened
            return
        for source in (self._tcp.socket, self._tcp.monitor):
            self._loop.forget(source)
        self._tcp.close()
        self._drop_memory()

    def _drop_memory(self) -> None:
        with self._lock:
            memory, self._memory = self._memory, None
        if self._watched is not None:
            self._loop.forget(self._watched.fd)
            self._watched = None
        if memory is not None:
            memory.close()

    def _hear(self, memory: SharedMemoryTransport) -> None:
        """Take the replies in memory that have callbacks, or note its loss."""
        if memory.is_lost():
            self._lose_connection()
            return
        memory.look()
        self._accept_arrived()
        with self._lock:
            pending = self._pending.values()
            listens = any(r.has_callbacks and r.source is memory for r in pending)
        memory.listen(listens)

    def _flush(self) -> None:
        """Send what waits."""
        with self._lock:
            outgoing, self._outgoing = self._outgoing, []
        if not self.is_away:  # else it is sent when the server is back
            for message in outgoing:
                self._tcp.send(message)

    def _send_all(self) -> int:
        """Send all requests over a new socket; return their number."""
        with self._lock:
            self._outgoing = []
            for reply in self._pending.values():
                self._queue(reply.message)
        self._flush()
        return len(self._pending)

    def _receive(self) -> None:
        """Hand a reply that came over TCP to the caller that waits for it."""
        frames = receive_frames(self._tcp.socket)
        if self._memory is not None:
            with contextlib.suppress(WireError):
                self._memory.settle(Header.decode(frames[0]).request)
        self._accept(frames)

    def _accept_arrived(self) -> None:
        while self._arrived:
            self._accept(self._arrived.popleft())

    def _accept(self, frames: Frames) -> None:
        try:
            header, error = read_reply(frames, self.name)
        except WireError as exc:
            logger.warning("invalid message from %s: %s", self.name, exc)
            why = f"the reply must be a message of this protocol. {exc} Is this the "
            self._fail(f"{why}right address?", list(self._pending), WireError)
            return
        if self._recovery_s and self._concerns_recovery(header, frames, error):
            return
        known = self._silence
        known.answered_s = time.monotonic()
        if known.is_silent:
            known.end()
        if header.request == known.ping != 0:
            with contextlib.suppress(WireError):
                known.note_answer(decode_json(frames, str))
            return
        reply = self._take(header.request)
        if reply is None:
            return  # its deadline has passed
        known.heard_s = known.answered_s
        if error and self._recovery_s and error.kind == RestartedError.__name__:
            if reply.incarnation == self.incarnation:  # none that was renewed
                self._lose_rows()
            reply.set_exception(
                RestartedError(f"{reply.what}: {_ROWS_GONE}", server=self.name)
            )
        elif error is not None:
            reply.set_exception(error)
        else:
            reply.set_result((header, frames))

    def _notice_change(self) -> None:
        """Note that the connection was lost, or was established."""
        while self._tcp.socket.poll(0):  # what came before the change
            self._receive()
        event, value = self._tcp.change()
        is_lost = event == zmq.EVENT_DISCONNECTED
        kind = self._failure.kind if self._failure else None
        if event == zmq.EVENT_CONNECTED:
            if self._state is State.CONNECTING:
                self._state = State.UP
            return
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._proof.num_refused = 0
        if event & auth.REJECTIONS:
            self._notice_rejection(event, value)
        elif kind is TokenError or (is_lost and self._proof.num_refused):
            return  # ZeroMQ connects again by itself, or never
        elif self.is_away:  # here it does, too
            self._away.hello, self._away.hello_s = -1, math.inf if is_lost else 0.0
        elif is_lost and kind is not ServerError:
            self._lose_connection()
        elif kind is ServerError and not is_lost:
            self.renew(self.incarnation)
            self.when_back()

    def _lose_connection(self) -> None:
        """Wait for the server, whose connection was lost, or fail the requests."""
        if self._memory is not None:
            self._memory.deliver()  # what it had replied
            self._accept_arrived()
        if self._recovery_s:
            self._begin_recovery()
        else:
            self._lose("the connection was lost. Did the process end?", _STILL_LOST)
        self._open_again()

    def _notice_rejection(self, event: int, value: int) -> None:
        """Prove the token once more, or give up a server that does not accept it.

        One that had accepted it may have a clock that jumped: it is given time.
        """
        away, reason = self._away, self._proof.reject(event, value)
        if reason and event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and self.is_away:
            if not away.rejects:
                logger.warning("%s: %s Trying again", self.name, reason)
            away.rejects = f" {reason}"
            away.again_s = time.monotonic() + _REJECTED_S
        elif reason:
            self._lose(reason, reason, TokenError)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            # ZeroMQ has given the socket up. Nothing was sent over it.
            self._open_again()
            if not self.is_away:
                self._send_all()

    def _lose(
        self, why: str, why_later: str, kind: type[ServerError] = ServerError
    ) -> None:
        """Fail the requests, and later ones until the server is back."""
        with self._lock:
            self._state, self._failure = State.LOST, _Failure(why_later, kind)
            self._outgoing = []
        self._fail(why, list(self._pending), kind)

    def _lose_rows(self) -> None:
        """Fail the requests to a server that was started again without its rows."""
        self._lose(_ROWS_GONE, _ROWS_GONE, RestartedError)
        self.when_restarted()

    # Recovery

    def _begin_recovery(self, hello_s: float = math.inf) -> None:
        """Keep the requests until the server is back; their time stands still."""
        now_s = time.monotonic()
        with self._lock:
            self._state, self._away = State.AWAY, _Away(now_s, hello_s=hello_s)
            for reply in self._pending.values():
                left_s = reply.deadline_s - now_s
                least_s = min(reply.timeout_s, timeouts.RESEND_LEFT_S)
                reply.left_s, reply.deadline_s = max(left_s, least_s), math.inf

    def _greet(self, away: _Away, now_s: float) -> float:
        """Ask the server which start it is, or give it up; return when the next is."""
        if away.address not in ("", self.address):
            self.address = away.address
            logger.warning("%s moved; reconnecting to %s", self.name, self.address)
            self._is_ipv6 = self._find_host()
            away.hello, away.hello_s = -1, math.inf
            self._open_again()
        if now_s - away.since_s > self._recovery_s:
            gone = f"the server was away for {self._recovery_s:g} s, and is not back"
            self._lose(f"{gone}.{away.rejects or ' See its log.'}", f"{gone} yet.")
        elif away.again_s <= now_s:
            away.again_s = math.inf
            self._open_again()
        elif away.hello_s <= now_s:
            away.hello, away.hello_s = next(self._numbers), math.inf
            hello = Header(Kind.HELLO).encode(request=away.hello)
            self._tcp.send([hello, encode_json(None)])
        return min(away.hello_s, away.again_s)

    def _concerns_recovery(
        self, header: Header, frames: Frames, error: RemoteError | None
    ) -> bool:
        """Deal with what a server says of itself; return whether it was that."""
        away, again_s = self._away, time.monotonic() + _RETRY_S
        is_hello = self.is_away and header.request == away.hello
        if error is not None and error.kind == NotReadyError.__name__:
            if not self.is_away:
                self._begin_recovery(again_s)
            elif is_hello:
                away.hello, away.hello_s = -1, again_s
            return True
        if is_hello:
            self._end_recovery(frames, error)
        return is_hello

    def _end_recovery(self, frames: Frames, error: RemoteError | None) -> None:
        """Send the requests again, if the server is the one that they are for."""
        try:
            if error is not None:
                raise error
            incarnation = decode_json(frames, _Hello).incarnation
        except PersiaError as exc:
            self._lose(str(exc), str(exc))
            return
        if self.incarnation not in (0, incarnation):
            self._lose_rows()
            return
        now_s = time.monotonic()
        with self._lock:
            self._state = State.UP
            for number, reply in self._pending.items():
                reply.deadline_s = now_s + reply.left_s
                heapq.heappush(self._deadlines, (reply.deadline_s, number))
        num_sent = self._send_all()
        logger.warning(
            "%s reconnected after %.1f s; requests resent: %d",
            self.name,
            now_s - self._away.since_s,
            num_sent,
        )
        self.when_back()
