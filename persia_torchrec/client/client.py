"""A client of all embedding servers: one request becomes one a server.

The ids of a request come grouped by shard (see ``routing/shard.py``); each server is
sent its part of every table in one message, and the answers are put together in the
order of the grouped ids. Every server gets a message, also when none of the ids are
its own: so every server counts the same batches.

Dimension key:
    U: unique ids of one table
    D: its embedding dim
"""

import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from persia_torchrec.client.shares import encode_share, scatter_share
from persia_torchrec.errors import BatchError, ConfigError, WireError
from persia_torchrec.routing.hashing import Ids
from persia_torchrec.routing.shard import ShardedIds, split_by_shard
from persia_torchrec.table import TableSpec
from persia_torchrec.wire.messages import (
    TRAINING,
    Frame,
    Frames,
    Header,
    Kind,
    Precision,
    array_of,
    decode_json,
    encode_json,
)
from persia_torchrec.wire.precision import (
    Floats,
    decode_floats,
)
from persia_torchrec.wire.transport import Connections

Reply = Future[tuple[Header, Frames]]

_ADD_TABLES_TIMEOUT_S = 120.0
"""A server compiles its loops when they are first needed, once for a machine."""


@dataclass(frozen=True, slots=True)
class BatchNumber:
    """Which batch a request belongs to: a stream, and a number within it."""

    stream: int
    batch: int

    @staticmethod
    def new_stream() -> int:
        """Return a number for a stream of batches that no other process will choose."""
        return secrets.randbits(63)


class EmbeddingClient:
    """Pull rows from the servers and push gradients to them.

    Any thread may call any method. Use :meth:`connect`.

    Args:
        connections: to the servers, in the order of their shards.
        incarnations: which start of each server is meant.
        timeout_s: seconds that any request may take.
    """

    def __init__(
        self, connections: Connections, incarnations: Sequence[int], timeout_s: float
    ) -> None:
        self._connections = connections
        self._incarnations = incarnations
        self._timeout_s = timeout_s
        self._tables: dict[str, TableSpec] = {}
        self._numbers: list[dict[str, int]] = [{} for _ in incarnations]

    @classmethod
    def connect(
        cls, addresses: Sequence[str], *, timeout_s: float = 30.0
    ) -> "EmbeddingClient":
        """Connect to all servers of a job.

        Args:
            addresses: one a server, as ``"tcp://127.0.0.1:7000"``, in the order of
                their shards.
            timeout_s: seconds that any request may take, this one included.

        Raises:
            ConfigError: an address cannot be read, or the servers are not the shards
                of one job in their order.
            RequestTimeoutError: a server does not answer.
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
            incarnations = [
                _check_hello(reply.result(timeout_s + 5)[1], shard, connections)
                for shard, reply in enumerate(replies)
            ]
        except BaseException:
            connections.close()
            raise
        return cls(connections, incarnations, timeout_s)

    @property
    def num_servers(self) -> int:
        """How many servers there are."""
        return len(self._connections)

    @property
    def timeout_s(self) -> float:
        """Seconds that any request may take."""
        return self._timeout_s

    def add_tables(self, specs: Sequence[TableSpec]) -> None:
        """Make tables known to every server, or change the settings of known ones.

        Raises:
            RemoteError: a server has a table of this name with another dim or another
                layout of optimizer state; the message names both.
            RequestTimeoutError: a server does not answer.
        """
        names = ", ".join(spec.name for spec in specs)
        body = [encode_json([spec.to_json() for spec in specs])]
        answers = self._ask_all(
            Kind.ADD_TABLES, body, f"adding tables {names}", _ADD_TABLES_TIMEOUT_S
        )
        for numbers, answer in zip(self._numbers, answers, strict=True):
            assert isinstance(answer, list)
            numbers.update(zip((spec.name for spec in specs), answer, strict=True))
        self._tables.update((spec.name, spec) for spec in specs)

    def split(self, ids_U: Ids) -> ShardedIds:
        """Group unique ids by the server that holds them."""
        return split_by_shard(ids_U, self.num_servers)

    def pull(
        self,
        tables: Sequence[tuple[str, ShardedIds]],
        *,
        batch: BatchNumber | None = None,
        precision: Precision = Precision.FP32,
    ) -> list[Floats]:
        """Fetch the weights of ids.

        Args:
            tables: names of tables with their ids, grouped by :meth:`split`.
            batch: for training: missing rows are made and all are counted as used.
                None looks only: a missing row reads zeros and nothing changes.
            precision: how the rows travel.

        Returns:
            float32 ``(U, D)`` a table, in the order of its grouped ids.

        Raises:
            ConfigError: a table has not been added.
            ServerError: a server failed, refused, or did not answer in time; the
                message names server and tables.
        """
        header = Header(Kind.LOOKUP, precision=precision)
        if batch is not None:
            header = _numbered(header, batch, flags=TRAINING)
        replies = self._fan_out("lookup", header, tables)
        dims = [self.table(name).dim for name, _ in tables]
        rows = [
            np.empty((len(ids.ids), dim), dtype=np.float32)
            for (_, ids), dim in zip(tables, dims, strict=True)
        ]
        for server, reply in enumerate(replies):
            _, frames = self._wait(reply)
            shares = [ids.of_shard(server) for _, ids in tables]
            num = sum(len(s) * dim for s, dim in zip(shares, dims, strict=True))
            flat = decode_floats(frames[1], num, precision)
            scatter_share(flat, rows, [ids for _, ids in tables], server)
        return rows

    def push(
        self,
        tables: Sequence[tuple[str, ShardedIds]],
        grads: Sequence[Floats],
        batch: BatchNumber,
        *,
        precision: Precision = Precision.FP32,
    ) -> list[Reply]:
        """Send gradients; the servers apply the tables' optimizers.

        Args:
            tables: as in :meth:`pull`; empty gives up the batch without an update.
            grads: float32 ``(U, D)`` a table, in the order of its grouped ids.
            batch: the batch whose rows these were.
            precision: how the gradients travel.

        Returns:
            One reply a server, which comes when the update is applied; hand them to
            :meth:`missed`.

        Raises:
            BatchError: the shape of a gradient is not that of the rows.
            RequestTimeoutError: too many requests are pending.
        """
        for (name, ids), grads_UD in zip(tables, grads, strict=True):
            expected = (len(ids.ids), self.table(name).dim)
            if grads_UD.shape != expected:
                raise BatchError(
                    f"Table {name!r}: gradients must have the shape {expected}. "
                    f"Received: {grads_UD.shape}."
                )
        header = _numbered(Header(Kind.UPDATE, precision=precision), batch)
        return self._fan_out("update", header, tables, grads)

    def missed(self, replies: Sequence[Reply]) -> int:
        """Wait for the replies to a push; return how many ids had no row any more.

        Raises:
            ServerError: a server failed, refused, or did not answer in time.
        """
        return sum(int(str(decode_json(self._wait(r)[1]))) for r in replies)

    def write(self, table: str, ids: Ids, weights: Floats) -> None:
        """Set the weights of ids, making the rows that are missing.

        Args:
            table: name of the table.
            ids: uint64 ``(U,)``, without repeats.
            weights: float32 ``(U, D)``.

        Raises:
            BatchError: the shapes do not fit.
            ServerError: a server failed, refused, or did not answer in time.
        """
        expected = (len(ids), self.table(table).dim)
        if weights.shape != expected:
            raise BatchError(
                f"Table {table!r}: weights must have the shape {expected}. "
                f"Received: {weights.shape}."
            )
        split = self.split(ids)
        grouped = np.empty_like(weights, dtype=np.float32)
        grouped[split.place] = weights
        header = Header(Kind.WRITE)
        for reply in self._fan_out("write", header, [(table, split)], [grouped]):
            self._wait(reply)

    def read(self, table: str, ids: Ids) -> Floats:
        """Return weights and optimizer state of ids; changes nothing.

        Args:
            table: name of the table.
            ids: uint64 ``(U,)``.

        Returns:
            float32 ``(U, D + S)``; zeros for an id that has no row.

        Raises:
            ServerError: a server failed, refused, or did not answer in time.
        """
        split = self.split(ids)
        spec = self.table(table)
        replies = self._fan_out("read", Header(Kind.READ), [(table, split)])
        grouped = np.empty(
            (len(ids), spec.dim + spec.num_state_floats), dtype=np.float32
        )
        for server, reply in enumerate(replies):
            _, frames = self._wait(reply)
            flat = array_of(frames[1], np.float32).view(np.float32)
            scatter_share(flat, [grouped], [split], server)
        return grouped[split.place]

    def counters(self) -> list[dict[str, int]]:
        """Return each server's counters: rows, hits, misses, evictions and others."""
        answers = self._ask_all(Kind.COUNTERS, [encode_json(None)], "counters")
        return [answer for answer in answers if isinstance(answer, dict)]

    def num_rows(self) -> list[int]:
        """Return how many rows each server holds."""
        return [counters["rows"] for counters in self.counters()]

    def clear(self) -> None:
        """Drop all rows of all tables on all servers; the tables stay known."""
        self._ask_all(Kind.CLEAR, [encode_json(None)], "clear")

    def shut_down_servers(self) -> None:
        """Make every server process end."""
        self._ask_all(Kind.SHUTDOWN, [encode_json(None)], "shutdown")

    def close(self) -> None:
        """Close the connections; the servers live on. May be called twice."""
        self._connections.close()

    def table(self, name: str) -> TableSpec:
        """Return a table that was added.

        Raises:
            ConfigError: it was not.
        """
        if name not in self._tables:
            raise ConfigError(
                f"Table {name!r} is unknown to this client. Known: "
                f"{sorted(self._tables)}. Call add_tables first."
            )
        return self._tables[name]

    def _fan_out(
        self,
        verb: str,
        header: Header,
        tables: Sequence[tuple[str, ShardedIds]],
        rows: Sequence[Floats] | None = None,
    ) -> list[Reply]:
        """Send every server its share of the tables, and of their rows if given."""
        names = ", ".join(repr(self.table(name).name) for name, _ in tables)
        return [
            self._connections.submit(
                server,
                replace(header, incarnation=incarnation),
                encode_share(
                    server,
                    [(self._numbers[server][name], ids) for name, ids in tables],
                    rows,
                    header.precision,
                ),
                timeout_s=self._timeout_s,
                what=f"{verb} of table {names}",
            )
            for server, incarnation in enumerate(self._incarnations)
        ]

    def _ask_all(
        self,
        kind: Kind,
        body: Sequence[Frame],
        what: str,
        timeout_s: float | None = None,
    ) -> list[object]:
        timeout_s = timeout_s or self._timeout_s
        replies = [
            self._connections.submit(
                server,
                Header(kind, incarnation=incarnation),
                body,
                timeout_s=timeout_s,
                what=what,
            )
            for server, incarnation in enumerate(self._incarnations)
        ]
        return [decode_json(reply.result(timeout_s + 5)[1]) for reply in replies]

    def _wait(self, reply: Reply) -> tuple[Header, Frames]:
        # The I/O thread fails the reply at its deadline; the margin is for its death.
        return reply.result(self._timeout_s + 5)


def _numbered(header: Header, batch: BatchNumber, flags: int = 0) -> Header:
    return replace(header, stream=batch.stream, batch=batch.batch, flags=flags)


def _check_hello(frames: Frames, shard: int, connections: Connections) -> int:
    """Return the incarnation of a server that is the shard it should be."""
    hello = decode_json(frames)
    if not isinstance(hello, dict) or "incarnation" not in hello:
        raise WireError(f"{connections.names[shard]} is no embedding server.")
    if (hello["shard"], hello["num_shards"]) != (shard, len(connections)):
        raise ConfigError(
            f"{connections.names[shard]} must be shard {shard} of {len(connections)}. "
            f"Received: it is shard {hello['shard']} of {hello['num_shards']}. "
            "Give all addresses, in the order of their shards."
        )
    return int(hello["incarnation"])
