"""The servers of a job: their connections, and which start of each is meant."""

import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any

from persia_torchrec import timeouts
from persia_torchrec.client.codec import ServerHello, body_of
from persia_torchrec.decoding import parse_json
from persia_torchrec.errors import ConfigError, NotReadyError, RemoteError, WireError
from persia_torchrec.wire.greeting import Greeting
from persia_torchrec.wire.messages import Frame, Header, Kind, decode_json, encode_json
from persia_torchrec.wire.transport import Connections
from persia_torchrec.wire.transport import Reply as Reply

_RETRY_S = 0.2
_HELLO, _CONNECTING = Header(Kind.HELLO), "connecting"


class Servers:
    """Sends requests to all servers, by shard. Any thread may call any method.

    At first it asks each server which shard it is; see ``EmbeddingClient.connect``. The
    time in which a server compiles its loops does not count.
    """

    def __init__(
        self, addresses: Sequence[str], timeout_s: float, greeting: Greeting
    ) -> None:
        if isinstance(addresses, str):
            raise ConfigError(
                "addresses must be a list, with the address of each server. "
                f"Received: the str {addresses!r}; is [{addresses!r}] meant?"
            )
        self.timeout_s = timeout_s
        self.incarnations = [0] * len(addresses)  # any, until it is known
        self.connections = Connections("embedding server", addresses, greeting=greeting)
        self.names = self.connections.names
        give_up_s = time.monotonic() + timeouts.COMPILING_S
        try:
            bodies = itertools.repeat([encode_json(None)])
            replies = self.send(_HELLO, bodies, _CONNECTING)
            hellos = [
                self._read_hello(server, reply, give_up_s)
                for server, reply in enumerate(replies)
            ]
        except BaseException:
            self.close()
            raise
        self.incarnations = [hello.incarnation for hello in hellos]
        self.max_request_ids = [hello.max_request_ids for hello in hellos]

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

        ``bodies`` are the frames after the header, for each server in turn; ``what`` is
        the request in words, for errors.
        """
        servers = range(first, len(self.incarnations))
        return [
            self.connections.submit(
                server,
                header._replace(incarnation=self.incarnations[server]),
                frames,
                timeout_s=timeout_s or self.timeout_s,
                what=what,
            )
            for server, frames in zip(servers, bodies, strict=False)
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

    def _read_hello(self, server: int, reply: Reply, give_up_s: float) -> ServerHello:
        """Wait for a server, which compiles its loops at first; check its shard."""
        frames = None
        while frames is None:
            try:
                frames = reply.frames()
            except RemoteError as exc:
                if exc.kind != NotReadyError.__name__ or time.monotonic() > give_up_s:
                    raise
                time.sleep(_RETRY_S)
                again = [[encode_json(None)]]
                (reply,) = self.send(_HELLO, again, _CONNECTING, first=server)
        name, num_shards = self.names[server], len(self)
        hello: ServerHello = parse_json(
            body_of(frames), ServerHello, f"The answer of {name}", _not_a_server
        )
        if (hello.shard, hello.num_shards) != (server, num_shards):
            raise ConfigError(
                f"{name} must be shard {server} of {num_shards}. Received: it is shard "
                f"{hello.shard} of {hello.num_shards}. Give all addresses, in the "
                "order of their shards."
            )
        return hello


def _not_a_server(why: str) -> WireError:
    return WireError(f"{why} This is not an embedding server of this version.")
