"""A client of all embedding servers: one request becomes one a server.

The ids of a request come grouped by shard (see ``routing/shard.py``); each server is
sent its part of every table in one message, and the answers are put together in the
order of the grouped ids. Every server gets a message, also when none of the ids are
its own: so every server counts the same batches.

Dimension key:
    U: unique ids of one table
    D: its embedding dim
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from persia_torchrec.client.answers import body_of
from persia_torchrec.client.batch_number import BatchNumber as BatchNumber
from persia_torchrec.client.checkpoints import Checkpoints
from persia_torchrec.client.known_tables import KnownTables
from persia_torchrec.client.outcome import PushOutcome
from persia_torchrec.client.row_block import BLOCK_ROWS, RowBlock
from persia_torchrec.client.servers import Reply as Reply
from persia_torchrec.client.servers import Servers
from persia_torchrec.client.shares import check_counts, gather_rows, require_shape
from persia_torchrec.client.staleness import staleness_histogram
from persia_torchrec.client.table_requests import TableRequests
from persia_torchrec.client.transfer import export_blocks, table_step, write_blocks
from persia_torchrec.routing.dedup import Counts
from persia_torchrec.routing.hashing import Ids
from persia_torchrec.routing.shard import ShardedIds, split_by_shard
from persia_torchrec.store.metadata import Metadata as Metadata
from persia_torchrec.table import TableSpec
from persia_torchrec.wire.greeting import NO_JOB, Greeting
from persia_torchrec.wire.messages import (
    COUNTS,
    MAX_MEMBER_CHARS,
    SHARE,
    TRAINING,
    Frames,
    Header,
    Kind,
    Precision,
    Share,
    decode_json,
    encode_json,
)
from persia_torchrec.wire.precision import Floats

_ADD_TABLES_TIMEOUT_S = 120.0
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
        self._tables = KnownTables(len(servers))
        self._requests = TableRequests(servers, self._tables)

    @classmethod
    def connect(
        cls,
        addresses: Sequence[str],
        *,
        timeout_s: float = 30.0,
        greeting: Greeting = NO_JOB,
    ) -> "EmbeddingClient":
        """Connect to all servers of a job.

        Args:
            addresses: one a server, as ``"tcp://127.0.0.1:7000"``, in the order of
                their shards.
            timeout_s: seconds that any request may take, this one included.
            greeting: of this process; the servers must belong to the same job, or to
                none. Without one, those of any job answer.

        Raises:
            ConfigError: an address cannot be read, or the servers are not the shards
                of one job in their order.
            RequestTimeoutError: a server does not answer.
            WireError: what answers is no embedding server of this version.
        """
        return cls(Servers.connect(addresses, timeout_s, greeting))

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
        names = ", ".join(spec.name for spec in specs)
        answers = self._servers.ask(
            Kind.ADD_TABLES,
            [spec.to_json() for spec in specs],
            f"adding tables {names}",
            _ADD_TABLES_TIMEOUT_S,
        )
        self._tables.add(specs, answers)

    def learn_tables(self) -> list[TableSpec]:
        """Get to know the servers' tables, and change none: ``KnownTables.learn``."""
        return self._tables.learn(self._servers)

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
        names = self._tables.names() if tables is None else list(tables)
        known = [self.table(name) for name in names]
        specs = [replace(s, optimizer=s.optimizer.with_lr(lr)) for s in known]
        if specs:
            self.add_tables(specs)

    def wants_counts(self, table: str) -> bool:
        """Return whether training pulls of a table should come with counts.

        Raises:
            ConfigError: it has not been added.
        """
        return self._tables.wants_counts(table)

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
        replies = self._requests.send(header, tables, counts=counts)
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
        return self._requests.send(header, tables, grads, share=batch.share)

    def join(
        self, share: Share, who: str, ended: str = "", timeout_s: float | None = None
    ) -> str:
        """Introduce a trainer of a group, or say that it has ended.

        From then on a joint step that waits for this trainer when it has ended, or has
        lost its connection, is refused with an error that names it.

        Args:
            share: the first that it will give.
            who: process and host.
            ended: why no share will come.
            timeout_s: seconds that it may take, if not as many as any other request.

        Returns:
            Which other trainers of the group are gone, and why; empty if none is.

        Raises:
            ServerError: a server failed, refused, or did not answer in time.
        """
        value = {"who": who[:MAX_MEMBER_CHARS], "ended": ended[:MAX_MEMBER_CHARS]}
        frames: Frames = [encode_json(value), share.encode()]
        replies = self._servers.send(
            Header(Kind.JOIN), lambda _: frames, "joining the trainers", timeout_s
        )
        answers = [decode_json(self._servers.wait(r, timeout_s)) for r in replies]
        return next((answer for answer in answers if isinstance(answer, str)), "")

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
        """Return the missed ids of :meth:`outcome`: those that had no row any more."""
        return self.outcome(replies).num_missed

    def outcome(self, replies: Sequence[Reply]) -> PushOutcome:
        """Wait for the replies to a push; return what was not applied, of all servers.

        Raises:
            ServerError: a server failed, refused, or did not answer in time.
        """
        answers = [decode_json(self._servers.wait(reply)) for reply in replies]
        return PushOutcome.total(map(PushOutcome.from_json, answers))

    def write(
        self, table: str, ids: Ids, weights: Floats, state: Floats | None = None
    ) -> None:
        """Set the rows of ids, making those that are missing.

        Args:
            table: name of the table.
            ids: uint64 ``(U,)``, without repeats.
            weights: float32 ``(U, D)``.
            state: float32 ``(U, S)``, as :meth:`read` returns it behind the weights.
                None leaves the state of a row, and a new row gets the initial one.

        Raises:
            BatchError: the shapes do not fit.
            ServerError: a server failed, refused, or did not answer in time.
        """
        self.fill(table, [RowBlock(ids, weights, state)])

    def fill(self, table: str, blocks: Iterable[RowBlock]) -> int:
        """Write the rows of a whole table, block by block; see :func:`blocks_of`.

        Rows are made admitted or not; where there are more than fit, the last stay.

        Args:
            table: name of the table.
            blocks: what to write; asked for as the servers get on.

        Returns:
            How many rows were written.

        Raises:
            BatchError: the shapes do not fit.
            ServerError: a server failed, refused, or did not answer in time.
        """
        send = partial(self._requests.write, table)
        return write_blocks(self._servers, blocks, send)

    def export(self, table: str, *, block_rows: int = BLOCK_ROWS) -> Iterator[RowBlock]:
        """Return all rows of a table, of all servers, block by block.

        Training may go on meanwhile. A row that is there all the time is returned
        exactly once, as it is when its block is read; one that is made or evicted
        meanwhile may be returned or not, and twice if it leaves and comes back.

        Args:
            table: name of the table.
            block_rows: rows a block at most. One block a server is in memory.

        Returns:
            Blocks with optimizer state, in no order of the ids.

        Raises:
            BatchError: ``block_rows`` is below 1.
            ServerError: a server failed or did not answer in time; when it happens.
        """
        spec, numbers = self.table(table), self._tables.numbers_of(table)
        return export_blocks(self._servers, spec, numbers, block_rows)

    def step(self, table: str, step: int | None = None) -> int:
        """Return how many updates a table has had: the ``t`` of Adam and its kin.

        Args:
            table: name of the table.
            step: go on counting from here, as a warm start does. Updates on their way
                count before it.

        Raises:
            ServerError: a server failed, refused, or did not answer in time.
        """
        numbers = self._tables.numbers_of(table)
        return table_step(self._servers, table, numbers, step)

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
        return self._requests.read(Header(Kind.READ), table, ids, np.float32)

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
        header = Header(Kind.METADATA)
        columns = self._requests.read(header, table, ids, np.uint32)
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
        return self._tables.spec(name)
