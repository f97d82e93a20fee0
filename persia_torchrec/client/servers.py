"""All servers of a job: the way to them, and which start of each is meant."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Self

from persia_torchrec.client.answers import Hello
from persia_torchrec.errors import ConfigError, NotReadyError, RemoteError
from persia_torchrec.wire.greeting import NO_JOB, Greeting
from persia_torchrec.wire.messages import (
    Frame,
    Frames,
    Header,
    Kind,
    decode_json,
    encode_json,
)
from persia_torchrec.wire.patience import MAX_COMPILING_S
from persia_torchrec.wire.transport import Connections

Reply = Future[tuple[Header, Frames]]

_RETRY_S = 0.2


class Servers:
    """Sends requests to all servers. Any thread may call any method.

    Args:
        connections: to the servers, in the order of their shards.
        hellos: what each of them said of itself.
        timeout_s: seconds that any request may take.

    Attributes:
        max_request_ids: ids that each server accepts in a request.
        names: of the servers, for errors.
    """

    def __init__(
        self, connections: Connections, hellos: Sequence[Hello], timeout_s: float
    ) -> None:
        self._connections = connections
        self._incarnations = [hello.incarnation for hello in hellos]
        self.max_request_ids = [hello.max_request_ids for hello in hellos]
        self.timeout_s = timeout_s
        self.names = connections.names

    @classmethod
    def connect(
        cls, addresses: Sequence[str], timeout_s: float, greeting: Greeting = NO_JOB
    ) -> Self:
        """Connect, and ask each server which shard it is.

        The time in which a server compiles its loops does not count.

        Raises:
            ConfigError: an address cannot be read, or the servers are not the shards
                of one job in their order.
            RequestTimeoutError: a server does not answer.
            WireError: what answers is no embedding server of this version.
        """
        if isinstance(addresses, str):
            raise ConfigError(
                "addresses must be a list, with the address of each server. "
                f"Received: the str {addresses!r}; is [{addresses!r}] meant?"
            )
        connections = Connections("embedding server", addresses, greeting=greeting)
        give_up_s = time.monotonic() + MAX_COMPILING_S
        try:
            replies = [
                _ask_hello(connections, server, timeout_s)
                for server in range(len(connections))
            ]
            hellos = [
                _hello(connections, server, reply, timeout_s, give_up_s)
                for server, reply in enumerate(replies)
            ]
        except BaseException:
            connections.close()
            raise
        return cls(connections, hellos, timeout_s)

    def __len__(self) -> int:
        return len(self._connections)

    def send(
        self,
        header: Header,
        frames_of: Callable[[int], Sequence[Frame]],
        what: str,
        timeout_s: float | None = None,
    ) -> list[Reply]:
        """Send each server its own frames.

        Args:
            header: of the messages; the incarnation is set here.
            frames_of: given the number of a server, returns what follows the header.
            what: the request in words, for errors.
            timeout_s: seconds that it may take, if not as many as any other.
        """
        return [
            self.send_to(server, header, frames_of(server), what, timeout_s)
            for server in range(len(self))
        ]

    def send_to(
        self,
        server: int,
        header: Header,
        frames: Sequence[Frame],
        what: str,
        timeout_s: float | None = None,
    ) -> Reply:
        """Send one server a message; the arguments are those of :meth:`send`."""
        return self._connections.submit(
            server,
            header._replace(incarnation=self._incarnations[server]),
            frames,
            timeout_s=timeout_s or self.timeout_s,
            what=what,
        )

    def ask(
        self, kind: Kind, value: object, what: str, timeout_s: float | None = None
    ) -> list[object]:
        """Send every server the same JSON value; return what each answers."""
        body = [encode_json(value)]
        replies = self.send(Header(kind), lambda _: body, what, timeout_s)
        return [decode_json(self.wait(reply, timeout_s)) for reply in replies]

    def wait(self, reply: Reply, timeout_s: float | None = None) -> Frames:
        """Wait for a reply; return its frames.

        Raises:
            ServerError: the server failed, refused, or did not answer in time.
        """
        # The I/O thread fails the reply at its deadline; the margin is for its death.
        return reply.result((timeout_s or self.timeout_s) + 5)[1]

    def close(self) -> None:
        """Close the connections. May be called twice."""
        self._connections.close()


def _ask_hello(connections: Connections, server: int, timeout_s: float) -> Reply:
    return connections.submit(
        server,
        Header(Kind.HELLO),
        [encode_json(None)],
        timeout_s=timeout_s,
        what="connecting",
    )


def _hello(
    connections: Connections,
    server: int,
    reply: Reply,
    timeout_s: float,
    give_up_s: float,
) -> Hello:
    """Return what a server says of itself, once it has compiled its loops."""
    while True:
        try:
            frames = reply.result(timeout_s + 5)[1]
        except RemoteError as exc:
            if exc.kind != NotReadyError.__name__ or time.monotonic() > give_up_s:
                raise
            time.sleep(_RETRY_S)
            reply = _ask_hello(connections, server, timeout_s)
        else:
            name = connections.names[server]
            return Hello.read(frames, server, len(connections), name)
