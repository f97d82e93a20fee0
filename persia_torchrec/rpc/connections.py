"""The connections of a client to other processes of a job, on ZeroMQ.

``Connections`` are sockets, one per server; a thread of their own owns them, so that
any thread may send requests and wait for replies:

    caller  --submit-->  queue  --I/O thread-->  socket  --network-->  Listener
    caller  <--future---  pending by request number  <-----------------

Messages to one server arrive in the order of ``submit``. A request ends in a reply, in
an error, at its deadline, or as soon as the connection is lost; until it is back,
requests fail at once. What has failed is not sent later. Requests to a server that was
never reached wait: it may start yet.

Where servers are started again, with ``recovery_s``, a request outlives its connection:

    lost --> away: a new socket --connected--> HELLO --same incarnation--> all requests
                       ^      without a reply are sent again in their order, then others
                       '--- NotReadyError: it is asked again

The server recognises what it had applied before; see ``server/dedup.py``.
"""

import contextlib
import heapq
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from socket import AF_INET6, AddressFamily

import zmq

from persia_torchrec import env, timeouts
from persia_torchrec.errors import (
    ConfigError,
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
from persia_torchrec.rpc.auth import NO_JOB, Greeting
from persia_torchrec.rpc.carriers import Carriers
from persia_torchrec.rpc.channel import (
    Away,
    OwnProcess,
    Reply,
    Told,
    Wakeup,
    read_reply,
    receive_frames,
    require_sendable,
    send_frames,
)
from persia_torchrec.rpc.messages import (
    Frames,
    Header,
    Kind,
    SentFrame,
    decode_json,
    encode_json,
)
from persia_torchrec.rpc.silences import Silences
from persia_torchrec.rpc.slab_client import SlabChannel
from persia_torchrec.rpc.sockets import Sockets

logger = logging.getLogger(__name__)

_IDLE_POLL_MS = 200
_MAX_PENDING = 256  # requests that wait for replies; the caller of one more waits
_RETRY_S = 0.1  # until a server that is not ready is asked again
_REJECTED_S = 1.0  # until one that rejects a token which it had accepted is
_STILL_LOST = "the connection was lost, and is not there yet. Did the process end?"
_ROWS_GONE = (
    "the server was started again, and its rows are gone. Fill or export the table "
    "once more, or load a checkpoint."
)


class Connections(OwnProcess):
    """Connections to several servers. Any thread may call any method.

    ``role`` is what the servers are called in errors, as ``"embedding server"``. They
    must belong to the job of the greeting, or to none. A server that was lost may be
    away for ``recovery_s`` seconds, and must come back as the start that
    ``incarnations`` says, where 0 is any. If it does not, ``when_restarted`` is called
    in the I/O thread, which must not wait. Each connection proves the job's token to
    the one that it means: of this role, with its position as its number, or what the
    greeting names. With ``encrypts`` it is encrypted then, see ``auth.py``.
    """

    def __init__(
        self,
        role: str,
        addresses: Sequence[str],
        *,
        greeting: Greeting = NO_JOB,
        recovery_s: float = 0.0,
        when_restarted: Callable[[int], None] = lambda _: None,
        encrypts: bool = False,
    ) -> None:
        if not addresses:
            raise ConfigError(f"At least one address of an {role} is needed.")
        if not hosts.has_descriptors():
            raise ServerError(hosts.no_descriptors(), server="")
        self.names = [f"{role} {i} at {a}" for i, a in enumerate(addresses)]
        self.incarnations, self._addresses = [0] * len(addresses), list(addresses)
        self._routing_ids = [greeting.encode() for _ in addresses]
        self._proofs = [
            auth.Proof(
                greeting.of(greeting.who or f"{role} {number}"), encrypts=encrypts
            )
            for number in range(len(addresses))
        ]
        self._recovery_s, self._when_restarted = recovery_s, when_restarted
        self._slots = threading.BoundedSemaphore(_MAX_PENDING)
        self._lock, self.is_closed = threading.Lock(), False
        self._outgoing: list[tuple[int, list[SentFrame]]] = []  # guarded by _lock
        # By request number, in the order of submit(); guarded by _lock
        self._pending: dict[int, Reply] = {}
        # Deadline and request number, the earliest first.
        self._deadlines: list[tuple[float, int]] = []  # guarded by _lock
        # Called in the I/O thread when a server is back; it must not wait.
        self.when_back: Callable[[int], None] = lambda _: None
        # Why requests to a server fail at once. guarded by _lock
        self._lost: dict[int, tuple[str, type[ServerError]]] = {}
        self._away: dict[int, Away] = {}  # the I/O thread changes it, under _lock
        self._numbers, self._wakeup = itertools.count(1), Wakeup()
        self.carriers = Carriers(
            len(addresses), self._lock, self._pending, self._wakeup.wake, self._finish
        )
        # From its start on, the I/O thread owns these.
        self._silences = Silences(self.names)
        self._sockets = Sockets()
        self._sockets.handle(self._wakeup.fd, self._send_outgoing)
        self._families = [self._find_host(server) for server in range(len(addresses))]
        self._open_all()
        self._thread = threading.Thread(
            target=self._run, name=f"{role} connections", daemon=True
        )
        self._thread.start()

    def __len__(self) -> int:
        return len(self.names)

    def submit(
        self,
        server: int,
        header: Header,
        frames: Sequence[SentFrame],
        *,
        timeout_s: float,
        what: str,
        reply_bytes: int = 0,
    ) -> Reply:
        """Send a request to one server; its number is set here.

        The memory of ``frames`` must not change until the reply. ``what`` is the
        request in words, for errors: ``"lookup of table 'ads'"``. A reply of more than
        ``reply_bytes``, or 16 KiB, comes over TCP.
        """
        if self._pid != os.getpid():
            self.require_own_process()
        require_sendable(frames, what)
        name, wait_s = self.names[server], timeout_s + self._recovery_s
        if not self._slots.acquire(timeout=wait_s):
            raise RequestTimeoutError(
                f"{what}: too many requests were pending for {wait_s:g} s.",
                server=name,
            )
        reply = Reply(timeout_s, server, what, recovery_s=self._recovery_s)
        reply.incarnation = header.incarnation
        number = next(self._numbers)
        message: list[SentFrame] = [header.encode(request=number), *frames]
        reply.message = message
        carrier: SlabChannel | None = None
        with self._lock:
            if self.is_closed:
                self._slots.release()
                raise ServerError(f"{what}: the connections are closed.", server=name)
            self._pending[number] = reply
            lost = self._lost.get(server)
            if lost is None and server not in self._away:
                reply.deadline_s = time.monotonic() + timeout_s
                heapq.heappush(self._deadlines, (reply.deadline_s, number))
                carrier = self.carriers.reserve(server, number, message, reply_bytes)
                if carrier is None:
                    self._outgoing.append((server, message))
        if carrier is not None:
            self.carriers.post(carrier, number, reply)
        elif lost is None:
            self._wakeup.wake()
        else:
            self._fail(lost[0], [number], lost[1])
        return reply

    def use(self, server: int, carrier: SlabChannel) -> bool:
        """Send requests to a server through memory; return whether it is there."""
        with self._lock:
            if self.is_closed or server in self._lost or server in self._away:
                return False
            self.carriers.use(server, carrier)
        self._wakeup.wake()
        return True

    def _finish(self, server: int, number: int, frames: Frames) -> bool:
        """Hand a reply to its caller, in any thread; False: the I/O thread shall."""
        known = self._silences.servers[server]
        if server in self._away or known.is_silent:
            return False
        known.heard_s = time.monotonic()
        if (reply := self._take(number, server)) is not None:
            reply.set_result((Header.decode(frames[0]), frames))
        return True

    def close(self) -> None:
        """Close all connections; pending requests fail. May be called twice."""
        self.abandon()
        self._thread.join(timeout=5)

    def abandon(self) -> None:
        """Have all closed, without a wait: finalizers call it, in any thread."""
        if self._pid == os.getpid():  # else the pipe is that of the parent
            self.is_closed = True
            self._wakeup.wake()

    def lost(self, server: int) -> type[ServerError] | None:
        """Return with what requests to a server fail at once; None: they do not."""
        with self._lock:
            return self._lost[server][1] if server in self._lost else None

    def renew(self, server: int, incarnation: int) -> None:
        """Send requests to a start of a server that is back."""
        with self._lock:
            self.incarnations[server] = incarnation
            self._lost.pop(server, None)

    def address(self, server: int) -> str:
        """Return where a server is, or was when it was last there."""
        return self._addresses[server]

    def disconnected(self) -> list[int]:
        """Return the servers that were lost and are not back."""
        with self._lock:
            return list(self._away)

    def move(self, server: int, address: str) -> None:
        """Look for a server that is away at another address from now on."""
        with self._lock:
            if server in self._away and address != self._addresses[server]:
                self._away[server].address = address

    # The I/O thread

    def _run(self) -> None:
        reason = "the connections were closed."
        try:
            while (timeout_ms := self._look_around()) is not None:
                # A signal may interrupt wake() before it writes: look after each wait.
                self._sockets.poll(timeout_ms, self._wakeup.fd)
        except Exception as exc:  # handed to all callers that wait
            logger.exception("the I/O thread of %s died", self.names)
            reason = f"the I/O thread died ({exc!r})."
        finally:
            with self._lock:
                self.is_closed = True
            self._fail(reason, self._pending_of(range(len(self))))
            self._close_sockets()

    def _open_all(self) -> None:
        for server, address in enumerate(self._addresses):
            try:
                self._open(server)
            except zmq.ZMQError as exc:
                self._close_sockets()
                if exc.errno in hosts.NO_DESCRIPTORS:
                    raise ServerError(hosts.no_descriptors(), server="") from exc
                raise ConfigError(
                    "An address must look like 'tcp://host:port'. "
                    f"Received: {address!r} ({exc})."
                ) from exc

    def _open(self, server: int) -> None:
        """Connect to a server; what comes over the socket is handled in its order."""
        options: auth.Options = {
            zmq.ROUTING_ID: self._routing_ids[server],
            zmq.IPV6: self._families[server] is AF_INET6,
            **self._proofs[server].options(),
        }
        self._sockets.open(
            server,
            self._addresses[server],
            options,
            partial(self._receive, server),
            partial(self._notice_change, server),
        )

    def _find_host(self, server: int) -> AddressFamily:
        """Return how a server is reached; one with an unknown name is lost until then.

        With ``recovery_s`` its name may become known as it starts.
        """
        host = env.host_of(self._addresses[server])
        try:
            return hosts.family_of(host)
        except (OSError, UnicodeError) as exc:
            why = f"the host {host!r} is unknown here ({exc}). Is the address right?"
            if self._recovery_s:
                logger.warning("%s: %s", self.names[server], why)
            else:
                self._lost[server] = why, ServerError
        return AF_INET6  # by which ZeroMQ finds addresses of both kinds

    def _close_socket(self, server: int) -> None:
        self._sockets.close(server)
        if (fd := self.carriers.drop(server)) is not None:
            self._sockets.forget(fd)

    def _close_sockets(self) -> None:
        for server in self._sockets.servers():
            self._close_socket(server)
        self._wakeup.close()

    def _look_around(self) -> int | None:
        """Do what is due; return how many ms to wait, None once closed."""
        for server, fd, carrier in self.carriers.to_watch():
            self._sockets.handle(fd, partial(self._hear, server, carrier))
        for server, frames in self.carriers.arrivals():
            self._accept(server, frames)
        self._name_the_silent()
        wait_ms = self._greet_those_away() if self._away else _IDLE_POLL_MS
        while True:
            with self._lock:
                if self.is_closed:
                    return None
                if not self._deadlines:
                    return wait_ms
                deadline_s, number = self._deadlines[0]
                reply = self._pending.get(number)
                is_due = reply is not None and reply.deadline_s == deadline_s
                left_s = deadline_s - time.monotonic()
                if is_due and left_s > 0:
                    return min(int(left_s * 1000) + 1, wait_ms)
                heapq.heappop(self._deadlines)
            if is_due and reply is not None:
                why = self._silences.ask_why(reply.server)
                late = f"no reply within {reply.timeout_s:g} s. {why}"
                self._fail(late, [number], RequestTimeoutError)

    def _name_the_silent(self) -> None:
        """Log, now and then, for whom requests wait; ping servers to learn it."""
        now_s = time.monotonic()
        if now_s < self._silences.look_s:
            return
        oldest = dict[int, Reply]()
        with self._lock:
            for reply in self._pending.values():
                oldest.setdefault(reply.server, reply)
        for server in self._silences.look(now_s, oldest):
            if server in self._away:
                continue
            number = next(self._numbers)
            self._silences.servers[server].ping = number
            ping: list[SentFrame] = [Header(Kind.PING).encode(request=number), b"null"]
            with self._lock:
                self.carriers.sent_over_tcp(server, ping)
            self._send(server, ping)

    def _hear(self, server: int, carrier: SlabChannel) -> None:
        if not self.carriers.hear(carrier) and self.carriers[server] is carrier:
            self._lose_connection(server)

    def _send_outgoing(self) -> None:
        self._wakeup.drain()
        with self._lock:
            outgoing, self._outgoing = self._outgoing, []
        for server, frames in outgoing:
            if server not in self._away:  # else it is sent when the server is back
                self._send(server, frames)

    def _send(self, server: int, frames: Sequence[SentFrame]) -> None:
        """Send a message, unless ZeroMQ has given the socket up."""
        with contextlib.suppress(zmq.Again):
            send_frames(self._sockets[server], frames)

    def _send_all(self, server: int) -> int:
        """Send all requests to a server over a new socket; return their number."""
        with self._lock:
            self._outgoing = [one for one in self._outgoing if one[0] != server]
            pending = self._pending.values()
            messages = [reply.message for reply in pending if reply.server == server]
            for message in messages:
                self.carriers.sent_over_tcp(server, message)
        for message in messages:
            self._send(server, message)
        return len(messages)

    def _receive(self, server: int) -> None:
        """Hand a reply to the caller that waits for it."""
        frames = receive_frames(self._sockets[server])
        self.carriers.answered_over_tcp(server, frames)
        self._accept(server, frames)

    def _accept(self, server: int, frames: Frames) -> None:
        name = self.names[server]
        try:
            header, error = read_reply(frames, name)
        except WireError as exc:
            logger.warning("invalid message from %s: %s", name, exc)
            why = f"the reply must be a message of this protocol. {exc} Is this the "
            self._fail(f"{why}right address?", self._pending_of([server]), WireError)
            return
        if self._recovery_s and self._concerns_recovery(server, header, frames, error):
            return
        known = self._silences.servers[server]
        known.answered_s = time.monotonic()
        if known.is_silent:
            self._silences.end(server)
        if header.request == known.ping != 0:
            with contextlib.suppress(WireError):
                self._silences.answered(server, decode_json(frames, str))
            return
        reply = self._take(header.request, server)
        if reply is None:
            return  # its deadline has passed
        known.heard_s = known.answered_s
        if error and self._recovery_s and error.kind == RestartedError.__name__:
            if reply.incarnation == self.incarnations[server]:  # none that was renewed
                self._lose_rows(server)
            reply.set_exception(
                RestartedError(f"{reply.what}: {_ROWS_GONE}", server=name)
            )
        elif error is not None:
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
            reply.message = []
        self._slots.release()
        return reply

    def _notice_change(self, server: int) -> None:
        """Note that the connection to a server was lost, or was established."""
        while self._sockets[server].poll(0):  # what came before the change
            self._receive(server)
        event, value = self._sockets.change(server)
        is_lost = event == zmq.EVENT_DISCONNECTED
        if event == zmq.EVENT_CONNECTED:
            self._silences.servers[server].is_connected = True
            return
        _, why = self._lost.get(server, ("", None))
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._proofs[server].num_refused = 0
        if event & auth.REJECTIONS:
            self._notice_rejection(server, event, value)
        elif why is TokenError or (is_lost and self._proofs[server].num_refused):
            return  # ZeroMQ connects again by itself, or never
        elif server in self._away:  # here it does, too
            away = self._away[server]
            away.hello, away.hello_s = -1, math.inf if is_lost else 0.0
        elif is_lost and why is not ServerError:
            self._lose_connection(server)
        elif why is ServerError and not is_lost:
            self.renew(server, self.incarnations[server])
            self.when_back(server)

    def _lose_connection(self, server: int) -> None:
        """Wait for a server whose connection was lost, or fail the requests to it."""
        self.carriers.deliver_rest(server)
        for one, frames in self.carriers.arrivals():
            self._accept(one, frames)
        if self._recovery_s:
            self._begin_recovery(server)
        else:
            lost = "the connection was lost. Did the process end?"
            self._lose(server, lost, _STILL_LOST)
        # Another socket: this one would send what waits in it, out of order, or
        # although its caller was told that it failed.
        self._close_socket(server)
        self._open(server)

    def _notice_rejection(self, server: int, event: int, value: int) -> None:
        """Prove the token once more, or give up a server that does not accept it.

        One that had accepted it may have a clock that jumped: it is given time.
        """
        reason = self._proofs[server].reject(event, value)
        if reason and event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and server in self._away:
            away = self._away[server]
            if not away.rejects:
                logger.warning("%s: %s Trying again", self.names[server], reason)
            away.rejects = f" {reason}"
            away.again_s = time.monotonic() + _REJECTED_S
        elif reason:
            self._lose(server, reason, reason, TokenError)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            # ZeroMQ has given the socket up. Nothing was sent over it.
            self._close_socket(server)
            self._open(server)
            if server not in self._away:
                self._send_all(server)

    def _lose(
        self,
        server: int,
        why: str,
        why_later: str,
        kind: type[ServerError] = ServerError,
    ) -> None:
        """Fail the requests to a server, and later ones until it is back."""
        with self._lock:
            self._away.pop(server, None)
            self._lost[server] = why_later, kind
            self._outgoing = [one for one in self._outgoing if one[0] != server]
        self._fail(why, self._pending_of([server]), kind)

    def _lose_rows(self, server: int) -> None:
        """Fail the requests to a server that was started again without its rows."""
        self._lose(server, _ROWS_GONE, _ROWS_GONE, RestartedError)
        self._when_restarted(server)

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

    # Recovery, in the I/O thread

    def _begin_recovery(self, server: int, hello_s: float = math.inf) -> None:
        """Keep the requests to a server until it is back; their time stands still."""
        now_s = time.monotonic()
        with self._lock:
            self._away[server] = Away(now_s, hello_s=hello_s)
            for reply in self._pending.values():
                if reply.server == server:
                    left_s = reply.deadline_s - now_s
                    reply.left_s = max(
                        left_s, min(reply.timeout_s, timeouts.RESEND_LEFT_S)
                    )
                    reply.deadline_s = math.inf

    def _greet_those_away(self) -> int:
        """Ask servers which start they are; give up some; return ms until the next."""
        now_s = time.monotonic()
        next_s = now_s + _IDLE_POLL_MS / 1000
        for server, away in list(self._away.items()):
            if away.address not in ("", self._addresses[server]):
                self._addresses[server] = away.address
                logger.warning(
                    "%s moved; reconnecting to %s", self.names[server], away.address
                )
                self._families[server] = self._find_host(server)
                away.hello, away.hello_s = -1, math.inf
                self._close_socket(server)
                self._open(server)
            if now_s - away.since_s > self._recovery_s:
                gone = (
                    f"the server was away for {self._recovery_s:g} s, and is not back"
                )
                why = away.rejects or " See its log."
                self._lose(server, f"{gone}.{why}", f"{gone} yet.")
            elif away.again_s <= now_s:
                away.again_s = math.inf
                self._close_socket(server)
                self._open(server)
            elif away.hello_s <= now_s:
                away.hello, away.hello_s = next(self._numbers), math.inf
                hello = Header(Kind.HELLO).encode(request=away.hello)
                self._send(server, [hello, encode_json(None)])
            next_s = min(next_s, away.hello_s, away.again_s)
        return max(int(1000 * (next_s - now_s)), 0) + 1

    def _concerns_recovery(
        self, server: int, header: Header, frames: Frames, error: RemoteError | None
    ) -> bool:
        """Deal with what a server says of itself; return whether it was that."""
        away, again_s = self._away.get(server), time.monotonic() + _RETRY_S
        is_hello = away is not None and header.request == away.hello
        if error is not None and error.kind == NotReadyError.__name__:
            if away is None:
                self._begin_recovery(server, again_s)
            elif is_hello:
                away.hello, away.hello_s = -1, again_s
            return True
        if is_hello:
            self._end_recovery(server, frames, error)
        return is_hello

    def _end_recovery(
        self, server: int, frames: Frames, error: RemoteError | None
    ) -> None:
        """Send the requests of a server again, if it is the one that they are for."""
        try:
            if error is not None:
                raise error
            told = Told.read(frames)
        except PersiaError as exc:
            self._lose(server, str(exc), str(exc))
            return
        if self.incarnations[server] not in (0, told.incarnation):
            self._lose_rows(server)
            return
        now_s = time.monotonic()
        with self._lock:
            away_s = now_s - self._away.pop(server).since_s
            for number, reply in self._pending.items():
                if reply.server == server:
                    reply.deadline_s = now_s + reply.left_s
                    heapq.heappush(self._deadlines, (reply.deadline_s, number))
        num_sent = self._send_all(server)
        logger.warning(
            "%s reconnected after %.1f s; requests resent: %d",
            self.names[server],
            away_s,
            num_sent,
        )
        self.when_back(server)
