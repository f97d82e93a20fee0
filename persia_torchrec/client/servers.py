"""All servers of a job: the way to them, and which start of each is meant."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Self

from persia_torchrec.client.answers import Hello
from persia_torchrec.wire.messages import (
    Frame,
    Frames,
    Header,
    Kind,
    decode_json,
    encode_json,
)
from persia_torchrec.wire.transport import Connections

Reply = Future[tuple[Header, Frames]]


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
    def connect(cls, addresses: Sequence[str], timeout_s: float) -> Self:
        """Connect, and ask each server which shard it is.

        Raises:
            ConfigError: an address cannot be read, or the servers are not the shards
                of one job in their order.
            RequestTimeoutError: a server does not answer.
            WireError: what answers is no embedding server of this version.
        """
        connections = Connections("embedding server", addresses)
        try:
            replies = [
                connections.submit(
                    server,
                    Header(Kind.HELLO),
                    [encode_json(None)],
                    timeout_s=timeout_s,
                    what="connecting",
                )
                for server in range(len(connections))
            ]
            hellos = [
                Hello.read(
                    reply.result(timeout_s + 5)[1],
                    *(shard, len(connections), connections.names[shard]),
                )
                for shard, reply in enumerate(replies)
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
