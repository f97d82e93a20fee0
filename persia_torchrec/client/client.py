"""A client of all embedding servers: one request becomes one a server.

The ids of a request come grouped by shard (see ``routing/shard.py``); each server is
sent its part of every table in one message, and the answers are put together in the
order of the grouped ids. Every server gets a message, also when none of the ids are
its own: so every server counts the same batches.

Dimension key:
    U: unique ids of one table
    D: its embedding dim
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from persia_torchrec.client.answers import added_tables, body_of
from persia_torchrec.client.batch_number import BatchNumber as BatchNumber
from persia_torchrec.client.checkpoints import Checkpoints
from persia_torchrec.client.outcome import PushOutcome
from persia_torchrec.client.servers import Reply as Reply
from persia_torchrec.client.servers import Servers
from persia_torchrec.client.shares import (
    check_counts,
    columns_a_row,
    encode_counts,
    encode_share,
    gather_rows,
    require_room,
    require_shape,
    scatter_share,
)
from persia_torchrec.client.staleness import staleness_histogram
from persia_torchrec.errors import ConfigError, FrameError
from persia_torchrec.routing.dedup import Counts
from persia_torchrec.routing.hashing import Ids
from persia_torchrec.routing.shard import ShardedIds, split_by_shard
from persia_torchrec.store.metadata import Metadata as Metadata
from persia_torchrec.table import TableSpec
from persia_torchrec.wire.messages import (
    COUNTS,
    SHARE,
    TRAINING,
    Frames,
    Header,
    Kind,
    Precision,
    Scalar,
    Share,
    array_of,
    decode_json,
)
from persia_torchrec.wire.precision import Floats, size_of

_ADDING_S = 120.0
"""A server compiles its loops when they are first needed, once for a machine."""


class EmbeddingClient:
    """Pull rows from the servers and push gradients to them.

    Any thread may call any method. Use :meth:`connect`.

    Args:
        servers: where the rows are.

    Attributes:
        checkpoints: dumps and loads of what all servers hold.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self.checkpoints = Checkpoints(servers)
        self._tables: dict[str, TableSpec] = {}
        self._wants_counts: dict[str, bool] = {}
        self._numbers: list[dict[str, int]] = [{} for _ in range(len(servers))]

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
            WireError: what answers is no embedding server of this version.
        """
        return cls(Servers.connect(addresses, timeout_s))

    @property
    def num_servers(self) -> int:
        """How many servers there are."""
        return len(self._servers)

    @property
    def timeout_s(self) -> float:
        """Seconds that any request may take."""
        return self._servers.timeout_s

    def add_tables(self, specs: Sequence[TableSpec]) -> None:
        """Make tables known to every server, or change the settings of known ones.

        A server does all of it or nothing. What was pushed before is applied with the
        settings of before, what is pushed afterwards with the new ones.

        Raises:
            RemoteError: a server has a table of this name with another dim or another
                layout of optimizer state; the message names both.
            RequestTimeoutError: a server does not answer.
        """
        what = f"adding tables {', '.join(spec.name for spec in specs)}"
        tables = [spec.to_json() for spec in specs]
        answers = self._servers.ask(Kind.ADD_TABLES, tables, what, _ADDING_S)
        wants_counts = dict.fromkeys((spec.name for spec in specs), False)
        for numbers, answer in zip(self._numbers, answers, strict=True):
            for spec, table in zip(
                specs, added_tables(answer, len(specs)), strict=True
            ):
                numbers[spec.name] = int(table["number"])
                wants_counts[spec.name] |= bool(table["wants_counts"])
        self._wants_counts.update(wants_counts)
        self._tables.update((spec.name, spec) for spec in specs)

    def set_learning_rate(self, lr: float, tables: Iterable[str] | None = None) -> None:
        """Change the learning rate of tables on every server, as a schedule does.

        What was pushed before is applied with the rate of before, what is pushed
        afterwards with the new one. (So it is for this client; another trainer's
        pushes get the new rate as soon as it is set.)

        Args:
            lr: the new rate.
            tables: names of tables; all that were added by default.

        Raises:
            ConfigError: a table has not been added, or its optimizer refuses the rate.
            ServerError: a server failed, refused, or did not answer in time.
        """
        names = list(self._tables) if tables is None else list(tables)
        known = [self.table(name) for name in names]
        specs = [replace(s, optimizer=s.optimizer.with_lr(lr)) for s in known]
        if specs:
            self.add_tables(specs)

    def wants_counts(self, table: str) -> bool:
        """Return whether training pulls of a table should come with counts.

        Raises:
            ConfigError: it has not been added.
        """
        return self._wants_counts[self.table(table).name]

    def split(self, ids_U: Ids) -> ShardedIds:
        """Group unique ids by the server that holds them."""
        return split_by_shard(ids_U, self.num_servers)

    def pull(
        self,
        tables: Sequence[tuple[str, ShardedIds]],
        *,
        batch: BatchNumber | None = None,
        precision: Precision = Precision.FP32,
        counts: Sequence[Counts | None] | None = None,
    ) -> list[Floats]:
        """Fetch the weights of ids.

        Args:
            tables: names of tables with their ids, grouped by :meth:`split`.
            batch: for training: missing rows are made and all are counted as used.
                None looks only: a missing row reads zeros and nothing changes.
            precision: how the rows travel.
            counts: uint32 ``(U,)`` a table, in the order of its grouped ids: how often
                each occurs in the batch. Sent if one of the tables wants them (see
                :meth:`wants_counts`) and the batch is for training. None, for all
                tables or for one, counts every id once.

        Returns:
            float32 ``(U, D)`` a table, in the order of its grouped ids. They cannot be
            written to: they may be views of the message that was received.

        Raises:
            BatchError: a server's share is too large, or counts do not fit the ids.
            ConfigError: a table has not been added.
            ServerError: a server failed, refused, or did not answer in time; the
                message names server and tables.
        """
        header = Header(Kind.LOOKUP, precision=precision)
        if batch is not None:
            header = batch.stamp(header, flags=TRAINING)
            if counts is not None and any(
                self.wants_counts(name) for name, _ in tables
            ):
                check_counts(tables, counts)
                header = header._replace(flags=TRAINING | COUNTS)
        dims = [self.table(name).dim for name, _ in tables]
        replies = self._fan_out("lookup", header, tables, counts=counts)
        answers = [body_of(self._servers.wait(reply)) for reply in replies]
        return gather_rows(answers, [split for _, split in tables], dims, precision)

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
            batch: the batch whose rows these were. If it is a share of a joint step,
                the servers apply it with the shares of the other trainers.
            precision: how the gradients travel.

        Returns:
            One reply a server, which comes when the update is applied; hand them to
            :meth:`outcome` or :meth:`missed`.

        Raises:
            BatchError: the shape of a gradient is not that of the rows, or a server's
                share is too large.
            RequestTimeoutError: too many requests are pending.
        """
        for (name, ids), grads_UD in zip(tables, grads, strict=True):
            require_shape(self.table(name), "gradients", grads_UD, len(ids.ids))
        flags = SHARE if batch.share else 0
        header = batch.stamp(Header(Kind.UPDATE, precision=precision), flags)
        return self._fan_out("update", header, tables, grads, share=batch.share)

    def leave(self, share: Share) -> None:
        """Give no share of a joint step, nor of later ones; the others go on without.

        Args:
            share: the first that will not come.

        Raises:
            ServerError: a server failed, refused, or did not answer in time.
        """
        frames: Frames = [share.encode()]
        for reply in self._servers.send(Header(Kind.LEAVE), lambda _: frames, "leave"):
            self._servers.wait(reply)

    def missed(self, replies: Sequence[Reply]) -> int:
        """Wait for the replies to a push; return how many ids had no row any more.

        Raises:
            ServerError: a server failed, refused, or did not answer in time.
        """
        return self.outcome(replies).num_missed

    def outcome(self, replies: Sequence[Reply]) -> PushOutcome:
        """Wait for the replies to a push; return what was not applied, of all servers.

        Raises:
            ServerError: a server failed, refused, or did not answer in time.
        """
        answers = [decode_json(self._servers.wait(reply)) for reply in replies]
        return PushOutcome.total(map(PushOutcome.from_json, answers))

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
        require_shape(self.table(table), "weights", weights, len(ids))
        split = self.split(ids)
        grouped = np.empty_like(weights, dtype=np.float32)
        grouped[split.place] = weights
        header = Header(Kind.WRITE)
        for reply in self._fan_out("write", header, [(table, split)], [grouped]):
            self._servers.wait(reply)

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
        return self._read_columns(Header(Kind.READ), table, ids, np.float32)

    def metadata(self, table: str, ids: Ids) -> Metadata:
        """Return how often ids were seen, and when last updated; changes nothing.

        Args:
            table: name of a table that keeps metadata, by its settings or because the
                servers evict the least frequently used.
            ids: uint64 ``(U,)``.

        Returns:
            uint32 ``(U,)`` a field, in the order of ``ids``; 0 for an id without a row.

        Raises:
            RemoteError: the table keeps no metadata.
            ServerError: a server failed, refused, or did not answer in time.
        """
        columns = self._read_columns(Header(Kind.METADATA), table, ids, np.uint32)
        return Metadata(*np.ascontiguousarray(columns.T))

    def counters(self) -> list[dict[str, int]]:
        """Return each server's counters: rows, hits, misses, evictions and others."""
        answers = self._servers.ask(Kind.COUNTERS, None, "counters")
        return [answer for answer in answers if isinstance(answer, dict)]

    def staleness(self) -> npt.NDArray[np.int64]:
        """Return how stale rows were: element k counts gradients of staleness k.

        The staleness of a row is the number of updates, of any trainer, that it had
        between its pull and its gradient. Of one id in 16 (see ``server/METRICS.md``).
        """
        return staleness_histogram(self.counters())

    def num_rows(self) -> list[int]:
        """Return how many rows each server holds."""
        return [counters["rows"] for counters in self.counters()]

    def clear(self) -> None:
        """Drop all rows of all tables on all servers; the tables stay known."""
        self._servers.ask(Kind.CLEAR, None, "clear")

    def shut_down_servers(self) -> None:
        """Make every server process end."""
        self._servers.ask(Kind.SHUTDOWN, None, "shutdown")

    def close(self) -> None:
        """Close the connections; the servers live on. May be called twice."""
        self._servers.close()

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

    def _read_columns(
        self, header: Header, table: str, ids: Ids, dtype: type[Scalar]
    ) -> npt.NDArray[Scalar]:
        split = self.split(ids)
        verb = header.kind.name.lower()
        replies = self._fan_out(verb, header, [(table, split)])
        width = columns_a_row(header.kind, self.table(table))
        grouped = np.empty((len(ids), width), dtype)
        for server, reply in enumerate(replies):
            flat = array_of(body_of(self._servers.wait(reply)), dtype)
            num = len(split.of_shard(server)) * width
            if len(flat) != num:
                raise FrameError(f"{num} numbers were asked. Received: {len(flat)}.")
            scatter_share(flat, [grouped], [split], server)
        return grouped[split.place]

    def _fan_out(
        self,
        verb: str,
        header: Header,
        tables: Sequence[tuple[str, ShardedIds]],
        rows: Sequence[Floats] | None = None,
        *,
        counts: Sequence[Counts | None] | None = None,
        share: Share | None = None,
    ) -> list[Reply]:
        """Send every server its part of the tables, and of rows or counts if given."""
        specs = [self.table(name) for name, _ in tables]
        what = f"{verb} of table {', '.join(repr(spec.name) for spec in specs)}"
        ids = [split for _, split in tables]
        widths = [columns_a_row(header.kind, spec) for spec in specs]
        size = size_of(header.precision)
        sizes = [w * size for w in widths]
        require_room(what, ids, sizes, self._servers.max_request_ids)

        def frames_of(server: int) -> Frames:
            numbers = self._numbers[server]
            part = [(numbers[name], split) for name, split in tables]
            frames = encode_share(server, part, rows, header.precision)
            if header.flags & COUNTS and counts is not None:
                frames.append(encode_counts(server, ids, counts))
            if share is not None:
                frames.append(share.encode())
            return frames

        # A joint step waits for the other trainers as well.
        timeout_s = self.timeout_s + (share.timeout_ms / 1000 if share else 0)
        return self._servers.send(header, frames_of, what, timeout_s)
