"""The servers of a job: their connections, and which start of each is meant."""

import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any, Self

from persia_torchrec import timeouts
from persia_torchrec.client.codec import ServerHello, body_of
from persia_torchrec.decoding import parse_json
from persia_torchrec.errors import ConfigError, NotReadyError, RemoteError, WireError
from persia_torchrec.wire.greeting import NO_JOB, Greeting
from persia_torchrec.wire.messages import Frame, Header, Kind, decode_json, encode_json
from persia_torchrec.wire.transport import Connections
from persia_torchrec.wire.transport import Reply as Reply

_RETRY_S = 0.2


class Servers:
    """Sends requests to all servers, by shard. Any thread may call any method."""

    def __init__(
        self, connections: Connections, hellos: Sequence[ServerHello], timeout_s: float
    ) -> None:
        self.connections = connections
        self.incarnations = [hello.incarnation for hello in hellos]
        self.max_request_ids = [hello.max_request_ids for hello in hellos]
        self.timeout_s = timeout_s
        self.names = connections.names

    @classmethod
    def connect(
        cls, addresses: Sequence[str], timeout_s: float, greeting: Greeting = NO_JOB
    ) -> Self:
        """Connect, and ask each server which shard it is; see ``EmbeddingClient``.

        The time in which a server compiles its loops does not count.
        """
        if isinstance(addresses, str):
            raise ConfigError(
                "addresses must be a list, with the address of each server. "
                f"Received: the str {addresses!r}; is [{addresses!r}] meant?"
            )
        connections = Connections("embedding server", addresses, greeting=greeting)
        give_up_s = time.monotonic() + timeouts.COMPILING_S

        def ask(server: int) -> Reply:
            return connections.submit(
                server,
                Header(Kind.HELLO),
                [encode_json(None)],
                timeout_s=timeout_s,
                what="connecting",
            )

        hellos = []
        try:
            replies = [ask(server) for server in range(len(connections))]
            for server, reply in enumerate(replies):
                while (frames := _frames_if_ready(reply, give_up_s)) is None:
                    reply = ask(server)  # of the same server
                name = connections.names[server]
                hellos.append(_read_hello(frames, server, len(connections), name))
        except BaseException:
            connections.close()
            raise
        return cls(connections, hellos, timeout_s)

    def __len__(self) -> int:
        return len(self.incarnations)

    def send(
        self,
        header: Header,
        bodies: Iterable[Sequence[Frame]],
        what: str,
        timeout_s: float | None = None,
        *,
        first: int = 0,
    ) -> list[Reply]:
        """Send servers a message each, from number ``first`` on.

        ``bodies`` are the frames after the header, whose incarnation is set here, for
        each server in turn; ``what`` is the request in words, for errors.
        """
        return [
            self.connections.submit(
                server,
                header._replace(incarnation=self.incarnations[server]),
                frames,
                timeout_s=timeout_s or self.timeout_s,
                what=what,
            )
            for server, frames in zip(range(first, len(self)), bodies, strict=False)
        ]

    def ask(
        self,
        kind: Kind,
        value: object,
        what: str,
        *,
        answer: Any = Any,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Send every server the same JSON value; return the ``answer`` of each."""
        bodies = itertools.repeat([encode_json(value)])
        replies = self.send(Header(kind), bodies, what, timeout_s)
        return [decode_json(reply.frames(), answer) for reply in replies]

    def close(self) -> None:
        """Close the connections. May be called twice."""
        self.connections.close()


def _frames_if_ready(reply: Reply, give_up_s: float) -> list[Frame] | None:
    """Return the frames of a reply; None if the server compiles its loops still."""
    try:
        return reply.frames()
    except RemoteError as exc:
        if exc.kind != NotReadyError.__name__ or time.monotonic() > give_up_s:
            raise
    time.sleep(_RETRY_S)
    return None


def _read_hello(
    frames: list[Frame], shard: int, num_shards: int, name: str
) -> ServerHello:
    """Read the answer of a server that must be a certain shard."""
    source = f"The answer of {name}"
    hello: ServerHello = parse_json(body_of(frames), ServerHello, source, _not_a_server)
    if (hello.shard, hello.num_shards) != (shard, num_shards):
        raise ConfigError(
            f"{name} must be shard {shard} of {num_shards}. Received: it is shard "
            f"{hello.shard} of {hello.num_shards}. Give all addresses, in the order of "
            "their shards."
        )
    return hello


def _not_a_server(why: str) -> WireError:
    return WireError(f"{why} This is not an embedding server of this version.")
