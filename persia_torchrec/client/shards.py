"""The embedding servers of a job, by shard: numbered requests, and what restarts."""

import contextlib
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from persia_torchrec import timeouts
from persia_torchrec.client.codec import (
    BatchNumber,
    ServerHello,
    require_one_checkpoint,
)
from persia_torchrec.env import Transport
from persia_torchrec.errors import (
    ConfigError,
    JobError,
    NotReadyError,
    PersiaError,
    RemoteError,
    RestartedError,
)
from persia_torchrec.job.member import JobMember
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.rpc.connections import Connections
from persia_torchrec.rpc.greeting import Greeting
from persia_torchrec.rpc.messages import NO_GENERATION, Header, Kind, encode_json
from persia_torchrec.rpc.peers import Peers
from persia_torchrec.rpc.reply import Reply

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_S = 0.2
_LOOK_S = 1.0
_HELLO = Header(Kind.HELLO), [encode_json(None)], "connecting"
_CHANGES = {
    *(Kind.ADD_TABLES, Kind.CLEAR, Kind.WRITE, Kind.STEP, Kind.JOIN, Kind.LEAVE),
    *(Kind.CHECKPOINT, Kind.OWN),
}


class Servers(Peers):
    """All embedding servers of a job, by shard.

    At first it asks each server which shard it is; see ``EmbeddingClient.connect``. The
    time in which a server compiles its loops does not count. What changes the servers
    is numbered in a stream of ``generation``, unless it is of a batch.

    One that is away is looked for where the address book of the job says, in a thread.
    Where a server comes back without the rows that it had, ``renewal`` is called, in a
    thread of its own, and by :meth:`repeat`.
    """

    hint = "This is not an embedding server of this version."

    def __init__(
        self,
        addresses: Sequence[str],
        timeout_s: float,
        greeting: Greeting,
        recovery_s: float = 0.0,
        generation: int = NO_GENERATION,
        transport: Transport | None = None,
    ) -> None:
        self._greeting = greeting
        self.job_id = greeting.job_id
        self._closing = threading.Event()
        self._stream = BatchNumber.new_stream(generation)
        self._numbers = itertools.count(1)
        self._renewal: Callable[[], Callable[[int], None] | None] = lambda: None
        if isinstance(addresses, str):
            raise ConfigError(
                "addresses must be a list, with the address of each server. "
                f"Received: the str {addresses!r}; is [{addresses!r}] meant?"
            )
        super().__init__(
            "embedding server", addresses, timeout_s, greeting, recovery_s, transport
        )
        give_up_s = time.monotonic() + timeouts.COMPILING_S
        try:
            hellos = [
                self._read_hello(server, reply, give_up_s)
                for server, reply in enumerate(self.send_all(*_HELLO))
            ]
            require_one_checkpoint(hellos, self.names)
        except BaseException:
            self.close()
            raise
        for connection, hello in zip(self.connections, hellos, strict=True):
            connection.incarnation = hello.incarnation
        self.share_memory()
        self.max_request_ids = [hello.max_request_ids for hello in hellos]
        self.serves = hellos[0].serves
        self.generation = max(hello.generation for hello in hellos)
        member = JobMember.current
        if recovery_s and member is not None and member.greeting == greeting:
            given = self.connections, self._closing, member.book
            threading.Thread(
                target=_follow, args=given, name="moves", daemon=True
            ).start()

    def set_renewal(self, renewal: Callable[[int], None]) -> None:
        """Have a method called when a server comes back without its rows.

        Its object is not kept: clients that are dropped end without a collection.
        """
        self._renewal = weakref.WeakMethod(renewal)

    def renewal(self, server: int) -> None:
        """Prepare a server that came back without its rows."""
        if (renew := self._renewal()) is not None:
            renew(server)

    def begin_generation(self, generation: int) -> None:
        """Have all servers reject what older trainers still send; wait for them."""
        if not 0 <= generation < NO_GENERATION:
            raise ConfigError(
                f"The trainers of servers must be started at most {NO_GENERATION - 1} "
                f"times again. Received: start {generation}. Start the servers again, "
                "without their memory, and load a checkpoint."
            )
        self._stream = BatchNumber.new_stream(generation)
        self.require_current(self._stream)
        self.generation = generation

    def require_current(self, stream: int) -> None:
        """Have a stream of an older generation than the servers' rejected."""
        header, body, what = _HELLO
        header = header._replace(stream=stream, batch=next(self._numbers))

        def ask() -> None:
            for reply in self.send_all(header, body, what):
                reply.frames()

        self.repeat(ask)

    def numbered(self, header: Header) -> Header:
        """Return the header of a message, with a number if that changes the server."""
        if header.kind not in _CHANGES:
            return header
        return header._replace(stream=self._stream, batch=next(self._numbers))

    def repeat(self, request: Callable[[], T]) -> T:
        """Make a request that may be repeated; again if a server has lost its rows."""
        lost: int | None = None
        while True:
            try:
                if lost is not None:
                    self.renewal(lost)
                return request()
            except RestartedError as exc:
                lost = self.names.index(exc.server)

    def require_same(self, starts: Sequence[int]) -> None:
        """Raise RestartedError if a server has lost its rows since an incarnation."""
        for name, start, now in zip(self.names, starts, self.incarnations, strict=True):
            if start != now:
                why = "it restarted without the rows that it was sent."
                raise RestartedError(why, server=name)

    def when_restarted(self, peer: int) -> None:
        """Renew a server also if no request comes, as of a trainer that has left."""

        def renew() -> None:
            try:
                self.repeat(partial(self.renewal, peer))
            except PersiaError as exc:
                logger.warning("reconnecting to %s failed: %s", self.names[peer], exc)

        threading.Thread(target=renew, name="renewal", daemon=True).start()

    def renew(self, server: int, prepare: Callable[[Peers, ServerHello], None]) -> None:
        """Continue with a server that came back without the rows that it had.

        Requests to it fail until it is prepared, over a connection of its own.
        """
        fresh = Peers(
            "embedding server",
            [self.connections[server].address],
            self.timeout_s,
            self._greeting,
            self.recovery_s,
            first=server,
        )
        with contextlib.closing(fresh):
            header, body, what = _HELLO
            number = next(self._numbers)
            own = header._replace(stream=self._stream, batch=number)  # or rejected
            reply = fresh.send(0, own, body, what)
            hello: ServerHello = self.read(server, reply, ServerHello)
            prepare(fresh, hello)
        self.max_request_ids[server] = hello.max_request_ids
        connection = self.connections[server]
        connection.renew(hello.incarnation)
        connection.when_back()

    def close(self) -> None:
        """Close the connections. May be called twice."""
        self._closing.set()
        super().close()

    def _read_hello(self, server: int, reply: Reply, give_up_s: float) -> ServerHello:
        """Wait for a server, which compiles its loops at first; check its shard."""
        hello: ServerHello | None = None
        while hello is None:
            try:
                hello = self.read(server, reply, ServerHello)
            except RemoteError as exc:
                if exc.kind != NotReadyError.__name__ or time.monotonic() > give_up_s:
                    raise
                time.sleep(_RETRY_S)
                reply = self.send(server, *_HELLO)
        if (hello.shard, hello.num_shards) != (server, len(self)):
            raise ConfigError(
                f"{self.names[server]} must be shard {server} of {len(self)}. "
                f"Received: it is shard {hello.shard} of {hello.num_shards}. Give all "
                "addresses, in the order of their shards."
            )
        return hello


def _follow(
    connections: Connections, closing: threading.Event, book: AddressBook
) -> None:
    """Look in the job for servers that are away: another host may have one now."""
    while not (closing.wait(_LOOK_S) or connections.is_closed):
        away = [n for n, connection in enumerate(connections) if connection.is_away]
        for server in away:
            with contextlib.suppress(JobError):  # the coordinator is away, too
                if address := book.address("server", server):
                    connections[server].move(address)
