"""A client of all embedding servers: one request becomes one message per server.

The ids of a request are grouped by shard; each server is sent its part of every table
in one message, and the replies are merged in the order of the grouped ids. Every server
gets one, also when none of the ids are its own: so all count the same batches.

Dimension key: U unique ids of a table, D its embedding dim, S its state floats a row.
"""

import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from persia_torchrec import env, timeouts
from persia_torchrec.arrays import Counts, Floats, Ids
from persia_torchrec.client.bulk import (
    BLOCK_ROWS,
    Blocks,
    RowBlock,
    export_blocks,
    find_ids,
    rows_to_write,
)
from persia_torchrec.client.checkpoint_client import CheckpointClient
from persia_torchrec.client.codec import (
    AddedTable,
    BatchCount,
    Caches,
    KnownTable,
    KnownTables,
    LookedUpUse,
    PushOutcome,
    RowRequest,
    ServerHello,
    ServerRows,
    TableList,
    Tables,
    added,
    check_counts,
    check_rows,
    groups_of,
    require_one_width,
    tables_of_all,
)
from persia_torchrec.client.codec import BatchNumber as BatchNumber
from persia_torchrec.client.shards import Servers
from persia_torchrec.errors import BatchError, RestartedError, WireError
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.routing import route
from persia_torchrec.routing.route import IdGroup, ShardedIds, unique_ids
from persia_torchrec.rpc import messages
from persia_torchrec.rpc.greeting import NO_JOB, Greeting
from persia_torchrec.rpc.messages import (
    Frames,
    Header,
    Kind,
    Precision,
    Share,
    decode_json,
)
from persia_torchrec.rpc.own_process import OwnProcess
from persia_torchrec.rpc.peers import Peers
from persia_torchrec.rpc.reply import Reply as Reply
from persia_torchrec.rpc.sockets import MAX_MESSAGE_BYTES
from persia_torchrec.table import Metadata as Metadata
from persia_torchrec.table import TableSpec

logger = logging.getLogger(__name__)

_MAX_GROUPS = 2  # of joint steps, of one collection, that are known
_MAX_LISTS = 64  # of tables, that are looked up once
T = TypeVar("T")
_BLOCKS_IN_FLIGHT = 2  # one that servers write while the next is cut and encoded


class _Joined(NamedTuple):
    """This trainer in a group: its process and host, and its next share if any."""

    who: str
    share: Share
    has_left: bool = False


class EmbeddingClient(OwnProcess):
    """Pull rows from the servers and push gradients to them.

    Any thread may call any method. Use :meth:`connect`. A table that has not been added
    is a ConfigError, shapes that do not fit are a BatchError, and a server that fails,
    rejects or does not answer in time is a ServerError that names it.

    Attributes:
        batches: how far those of this trainer are numbered.
        is_local: whether its rows are in this process: never.
        caches: of rows that this process trains; what reads rows of the servers
            flushes them, and what writes such empties them.
        checkpoints: dumps and loads of what all servers hold.
        lost: ``lost_updates`` and ``lost_rows`` of all servers that lost their memory,
            see ``docs/metrics.md``.
        num_servers: how many servers there are.
        recovery_s: seconds for which a server may be away, while requests wait.
        tables: those that were added, and what the servers say of them, by name.
        timeout_s: seconds that any request may take besides.
    """

    is_local: ClassVar[bool] = False

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self.batches = BatchCount()
        self.checkpoints = CheckpointClient(servers, self.batches)
        self.lost = Counter[str]()
        self.num_servers = len(servers)
        self.timeout_s, self.recovery_s = servers.timeout_s, servers.recovery_s
        self.tables = KnownTables()
        self._lists: dict[tuple[tuple[str, ...], ...], TableList] = {}
        self.caches = Caches()
        self.checkpoints.caches = self.caches
        servers.set_renewal(self._renew)
        self._changing = threading.RLock()  # so that all servers have one order
        self._renewing = threading.Lock()
        self._owned: dict[str, int] = {}  # ranks by table. guarded by _renewing
        self._joined: dict[int, _Joined] = {}  # by group. guarded by _renewing

    @classmethod
    def connect(
        cls,
        addresses: Sequence[str],
        *,
        timeout_s: float = 30.0,
        greeting: Greeting = NO_JOB,
        recovery_s: float = 0.0,
        generation: int = messages.NO_GENERATION,
        transport: env.Transport | None = None,
    ) -> "EmbeddingClient":
        """Connect to all servers of a job.

        ``addresses`` are like ``"tcp://127.0.0.1:7000"``, in the order of the shards;
        otherwise it is a ConfigError. A request may take ``timeout_s`` seconds. Servers
        are of ``greeting``'s job or of none; another version's answer is a WireError.

        Where servers are started again with their rows, one that is lost, or hangs, may
        be away for ``recovery_s`` seconds: requests wait for it, and each is applied
        once. One that comes back without its rows gets the tables again, requests are
        repeated, and updates that it had not acknowledged are lost. A client of
        trainers that recover says their ``generation``, see ``BatchNumber.new_stream``;
        to the servers, an older one than they have met is a FencedError. ``transport``
        stands for ``PERSIA_TRANSPORT``: auto, tcp or shm.
        """
        return cls(
            Servers(addresses, timeout_s, greeting, recovery_s, generation, transport)
        )

    @classmethod
    def of_job(
        cls, *, timeout_s: float = timeouts.TRAINING_REQUEST_S
    ) -> "EmbeddingClient":
        """Connect to the servers of this process's job, when all have registered.

        They may be away for as long as the job says. Without a job it is a ConfigError.
        """
        book = AddressBook.join(*env.require_job_store("EmbeddingClient.of_job()"))
        with contextlib.closing(book):
            route.warm_up()  # while servers compile their loops
            servers = book.addresses("server")
        return cls(Servers(servers, timeout_s, book.greeting, book.recovery_s))

    @property
    def incarnations(self) -> list[int]:
        """The number of each server's start with the memory that it has now."""
        return list(self._servers.incarnations)

    def repeat(self, request: Callable[[], T]) -> T:
        """Make a request that may be repeated; again if a server has lost its rows."""
        return self._servers.repeat(request)

    @property
    def generation(self) -> int:
        """The newest generation of trainers that the servers had met, or this one's."""
        return self._servers.generation

    def begin_generation(self, generation: int) -> None:
        """Belong to a generation from now on, and have older ones rejected: a fence."""
        self._servers.begin_generation(generation)
        for rank in {*self._owned.values()}:  # whose leases were of the older one
            self.own([name for name, of in self._owned.items() if of == rank], rank)

    def require_current(self, stream: int) -> None:
        """Have streams of an older generation rejected."""
        self._servers.require_current(stream)

    def add_tables(self, specs: Sequence[TableSpec]) -> None:
        """Make tables known to every server, or change the settings of known ones.

        A server does all of it or nothing. Earlier pushes are applied with the previous
        settings, later ones with the new settings. A table that a server has with
        another dim or another layout of optimizer state is rejected.
        """

        def add() -> None:
            starts = self.incarnations
            answers = self._servers.ask(
                Kind.ADD_TABLES,
                added(specs),
                f"adding tables {', '.join(spec.name for spec in specs)}",
                answer=list[AddedTable],
                timeout_s=timeouts.ADD_TABLES_S + self.recovery_s,
            )
            for answer in answers:
                if len(answer) != len(specs):
                    raise WireError(
                        f"The reply to ADD_TABLES must describe {len(specs)} tables. "
                        f"Received: {len(answer)}."
                    )
            told = zip(*answers, strict=True)
            self._know(
                starts,
                [
                    (spec, of_table, True)
                    for spec, of_table in zip(specs, told, strict=True)
                ],
            )

        with self._changing:
            self._servers.repeat(add)

    def learn_tables(self) -> list[TableSpec]:
        """Know the tables that all servers have, with the same dim; return them."""

        def learn() -> list[TableSpec]:
            starts = self.incarnations
            hellos = self._servers.ask(Kind.HELLO, None, "tables", answer=ServerHello)
            learnt = tables_of_all(hellos, self._servers.names)
            own = {name for name, table in self.tables.copy().items() if table.is_own}
            self._know(starts, [(*found, found[0].name in own) for found in learnt])
            return [spec for spec, _ in learnt]

        with self._changing:
            return self._servers.repeat(learn)

    def drop_table(self, name: str, timeout_s: float = timeouts.ADD_TABLES_S) -> None:
        """Drop a table on all servers: its rows, optimizer state, step and settings.

        The name may be added again. Each server drops all of it or nothing; a call that
        failed may be repeated. A table that no server has is a ConfigError, and so is
        one that a model of this process, or another client that is connected, has.
        """
        self.tables.require_unused(name)
        self.caches.empty()
        self.checkpoints.drop(name, timeout_s + self.recovery_s)
        self.tables.forget(name)

    def set_learning_rate(self, lr: float, tables: Iterable[str] | None = None) -> None:
        """Change the learning rate of tables, by default all, as a schedule does.

        Earlier pushes are applied with the previous rate, later ones with the new rate;
        another trainer's pushes get the new rate as soon as it is set.
        """
        with self._changing:
            specs = map(self.table, list(self.tables if tables is None else tables))
            changed = [replace(s, optimizer=replace(s.optimizer, lr=lr)) for s in specs]
            if changed:
                self.add_tables(changed)

    def table(self, name: str) -> TableSpec:
        """Return a table that was added."""
        return self.tables[name].spec

    def split(self, ids_U: Ids, table: str = "") -> ShardedIds:
        """Group unique ids by the server that holds them; name one with shared rows."""
        shared_rows = self.table(table).shared_rows if table else 0
        return unique_ids(ids_U, self.num_servers, shared_rows)

    def pull(
        self,
        tables: Tables,
        *,
        batch: BatchNumber | None = None,
        precision: Precision = Precision.FP32,
        counts: Sequence[Counts | None] | None = None,
        part: int = 0,
        with_state: bool = False,
    ) -> list[Floats]:
        """Fetch the weights of ids of several tables.

        Ids are grouped by :meth:`split`, or are those of all tables of one dim. With a
        ``batch``, for training, missing rows are made and all count as used. Without, a
        missing row reads zeros and nothing changes. ``precision`` is that of the rows
        on their way. ``counts``, uint32 ``(U,)`` per table, tell how often each id
        occurs in the batch, for tables that want them; None counts 1 each.
        Several pulls of one batch have different ``part``, 7 at most, from 0 on: a
        server that has answered one before answers it again, and changes nothing; a row
        evicted since reads its initial value.

        ``with_state`` reads weights and optimizer state of tables that have one row an
        id, those of a group of one width; else it is a ConfigError.
        Such a pull is complete: no :meth:`push` follows, rows are written back by
        :meth:`write_rows`. See :meth:`PendingRows.use` for ids without a row.

        Returns:
            float32 ``(U, D)`` per table, or ``(U, D + S)``, in the order of its grouped
            ids, as counts; read-only, as they may be views of the message.
        """
        return self.begin_pull(
            tables, batch, precision, counts, part, with_state=with_state
        ).rows()

    def begin_pull(
        self,
        tables: Tables,
        batch: BatchNumber | None,
        precision: Precision,
        counts: Sequence[Counts | None] | None,
        part: int = 0,
        *,
        with_state: bool = False,
    ) -> "PendingRows":
        """Ask for the rows of a :meth:`pull`, and return what waits for them."""
        known = self._table_list(groups := groups_of(tables))
        if batch is None or not known.wants_counts:
            counts = None
        flags = part << messages.PART_SHIFT
        if batch is not None:
            flags |= messages.TRAINING
        if counts is not None:
            flags |= messages.COUNTS
            check_counts(groups, counts)
        widths = known.dims
        if with_state:
            require_one_width(groups, known)
            widths, flags = known.widths, flags | messages.STATE
        number = (batch or BatchNumber(0, 0))[:2]
        header = Header(Kind.LOOKUP, 0, 0, *number, precision, flags)
        request = RowRequest(groups, widths, counts=counts, with_use=with_state)
        send = partial(self._send, header, request)
        return PendingRows(self._servers, request, precision, send, send())

    def push(
        self,
        tables: Tables,
        grads: Sequence[Floats] | messages.DeferredRows,
        batch: BatchNumber,
        *,
        precision: Precision = Precision.FP32,
    ) -> list[Reply]:
        """Send gradients; the servers apply the tables' optimizers.

        ``tables`` and ``batch`` are those of the :meth:`pull`; no tables give the batch
        up. ``grads`` are float32 ``(U, D)`` per table, in the order of its grouped ids;
        they must not change until the replies have come, as they may be sent again.
        A share of a joint step is applied with the shares of the other trainers.
        Returns a reply per server, when the update is applied; for :meth:`outcome`.
        """
        dims = self._table_list(groups := groups_of(tables)).dims
        check_rows(groups, dims, grads)
        flags = 0 if batch.share is None else messages.SHARE
        header = Header(Kind.UPDATE, 0, 0, *batch[:2], precision, flags)
        request = RowRequest(groups, dims, rows=grads, share=(share := batch.share))
        if share is None:
            return self._send(header, request)
        with self._renewing:  # whose share is the first that a restarted server gets
            if joined := self._joined.get(share.group):
                following = share._replace(step=share.step + 1)
                self._joined[share.group] = joined._replace(share=following)
            return self._send(header, request)

    def join(
        self, share: Share, who: str, ended: str = "", timeout_s: float | None = None
    ) -> str:
        """Introduce a trainer of a group, or say that it has ended and why.

        A joint step that waits for it when it has ended, or has lost its connection, is
        rejected with an error that names it. ``share`` is the first that it will give,
        ``who`` its process and host. Returns which others are gone, and why; a given
        ``timeout_s`` is a limit even while a server is away.
        """
        most = messages.MAX_MEMBER_CHARS
        value = {"who": who[:most], "ended": ended[:most]}
        frames = [messages.encode_json(value), share.encode()]
        what = "joining the trainers"

        def ask() -> list[str]:
            replies = self._servers.send_all(Header(Kind.JOIN), frames, what, timeout_s)
            return [decode_json(reply.frames(timeout_s), str) for reply in replies]

        if ended:  # the process does not wait for servers that are away
            return ask()[0]
        with self._renewing:
            self._note(_Joined(who, share))
        return self._servers.repeat(ask)[0]

    def leave(self, share: Share) -> None:
        """Give no share of a joint step, nor of later ones; the others proceed."""
        with self._renewing:
            if joined := self._joined.get(share.group):
                following = share._replace(group=share.group + 1, step=1)
                self._joined[share.group] = joined._replace(share=share, has_left=True)
                self._note(_Joined(joined.who, following))

        def ask() -> None:
            frames = [share.encode()]
            for reply in self._servers.send_all(Header(Kind.LEAVE), frames, "leave"):
                reply.frames()

        self._servers.repeat(ask)

    def write_rows(
        self,
        tables: Tables,
        rows: Sequence[Floats] | messages.DeferredRows,
        *,
        counts: Sequence[Counts] | None = None,
        frequencies: Sequence[Counts] | None = None,
        steps: Mapping[str, int] | None = None,
        precision: Precision = Precision.FP32,
    ) -> list[Reply]:
        """Write rows of several tables, with optimizer state, in one request a server.

        ``tables`` are as in a :meth:`pull` with state, and ``rows`` float32
        ``(U, D + S)`` per group, in the order of its ids. They must not change until
        the replies have come, as they may be sent again; each server applies them once.
        Missing rows are made, and all count as used. On a full server no row leaves
        for another one of the request; what finds no room is counted
        (``writes_without_room``).

        Where rows keep metadata, a row was then seen ``counts`` times more than it had
        been, or than ``frequencies`` if that is more, as of a row that has left since
        it was read: uint32 ``(U,)`` per group; 1 and 0 by default. ``steps`` are how
        many updates tables have had, by name: their steps are that at least, and rows
        note theirs as the last.

        Returns a reply per server; a server that lost its rows meanwhile gives a
        RestartedError.
        """
        known = self._table_list(groups := groups_of(tables))
        require_one_width(groups, known)
        check_rows(groups, known.widths, rows, "rows")
        for given in (counts, frequencies):
            check_counts(groups, given or [None] * len(groups))
        names = [name for group in groups for name in group.tables]
        found = [] if steps is None else [steps.get(name, 0) for name in names]
        request = RowRequest(
            groups,
            known.widths,
            rows,
            counts,
            frequencies=frequencies,
            steps=np.array(found, dtype=np.int64),
        )
        flags = messages.STATE | messages.COUNTS
        return self._send(Header(Kind.WRITE, precision=precision, flags=flags), request)

    def own(self, tables: Sequence[str], rank: int) -> None:
        """Have the trainer of a rank, this process, cache rows of tables from now on.

        While tables have owners, lookups for training without state, updates, and
        changes by other clients are a ConfigError that names the owners. A lease
        outlives the servers' processes. It ends others of the same rank: what they
        still write is a FencedError.
        """
        with self._renewing:
            self._owned |= dict.fromkeys(tables, rank)
        self._servers.repeat(partial(self._own, tables, rank))

    def disown(self, tables: Sequence[str]) -> None:
        """End this client's leases of tables; if it has none, those of all trainers.

        So an operator ends those of trainers that died; what others still write is a
        FencedError.
        """
        with self._renewing:
            for name in tables:
                self._owned.pop(name, None)
        self._servers.repeat(partial(self._own, tables, None))

    def _own(self, tables: Sequence[str], rank: int | None) -> None:
        starts = self.incarnations  # before their numbers
        replies = [
            self._servers.send(
                server,
                Header(Kind.OWN, incarnation=starts[server]),
                self._owner_frames(server, tables, rank),
                "owning tables",
            )
            for server in range(self.num_servers)
        ]
        for reply in replies:
            reply.frames()

    def _owner_frames(
        self, server: int, tables: Iterable[str], rank: int | None
    ) -> Frames:
        numbers = [self.tables[name].numbers[server] for name in tables]
        value = {"tables": numbers, "rank": rank, "who": added([])["who"]}
        return [messages.encode_json(value)]

    def outcome(self, replies: Sequence[Reply]) -> PushOutcome:
        """Wait for the replies to a push; return what was not applied anywhere."""
        return PushOutcome.read(replies)

    def write(
        self, table: str, ids: Ids, weights: Floats, state: Floats | None = None
    ) -> None:
        """Set the rows of unique ids, making those that are missing.

        Weights are float32 ``(U, D)``, the state ``(U, S)``, as :meth:`read` returns
        them side by side. None leaves the state of a row, and a new row gets the
        initial one.
        """
        block = RowBlock(ids, weights, state)
        self.fill(table, [block])

    def fill(self, table: str, blocks: Iterable[RowBlock]) -> int:
        """Write the rows of a whole table, block by block; return how many there were.

        Rows are made admitted or not; where there are more than fit, the last stay.
        Blocks, as of :func:`blocks_of`, are taken as the servers proceed, and once more
        if a server loses its rows; those of a generator cannot be: a RestartedError.
        """
        self.caches.empty()

        def fill() -> int:
            starts, num_rows = list(self._servers.incarnations), 0
            in_flight: deque[Reply] = deque()
            for block in blocks:
                while len(in_flight) >= _BLOCKS_IN_FLIGHT * self.num_servers:
                    in_flight.popleft().frames()
                in_flight += self._write(self.tables[table], block)
                num_rows += len(block.ids)
            for reply in in_flight:
                reply.frames()
            self._servers.require_same(starts)
            return num_rows

        return fill() if iter(blocks) is blocks else self._servers.repeat(fill)

    def _write(self, table: KnownTable, block: RowBlock) -> list[Reply]:
        rows, flags = rows_to_write(table.spec, block)
        ids = self.split(block.ids, table.spec.name)
        grouped = np.empty_like(rows)
        grouped[ids.inverse] = rows
        group = IdGroup.of(table.spec.name, ids)
        request = RowRequest([group], [rows.shape[1]], rows=[grouped])
        return self._send(Header(Kind.WRITE, flags=flags), request)

    def export(self, table: str, *, block_rows: int = BLOCK_ROWS) -> Iterable[RowBlock]:
        """Return all rows of a table with optimizer state, in no order of the ids.

        Training may proceed meanwhile. A row that is there all the time is returned
        exactly once, as it is when its block is read; one that is made or evicted
        meanwhile may be returned or not, and twice if it leaves and comes back: then
        the later one counts. So it is with all rows of a server that loses its memory
        meanwhile. One block per server, of at most ``block_rows`` rows, is in memory.
        """
        self.table(table)  # or a ConfigError
        if block_rows < 1:
            raise BatchError(
                f"A block must have at least 1 row. Received: {block_rows}."
            )

        def begin() -> Iterator[RowBlock]:
            self.caches.flush()
            spec = self.table(table)
            return export_blocks(self._servers, self.tables, spec, block_rows)

        return Blocks(begin)

    def step(self, table: str, step: int | None = None) -> int:
        """Return how many updates a table has had: the ``t`` of Adam and its kin.

        With ``step`` it continues counting from there, as a warm start does; updates on
        their way count before it.
        """
        what = f"step of table {table!r}"
        if step is None:
            self.caches.flush()
        else:
            self.caches.empty()

        def ask() -> int:
            replies, starts = [], self.incarnations  # before their numbers
            for server, number in enumerate(self.tables[table].numbers):
                frames = [messages.encode_json({"table": number, "step": step})]
                header = Header(Kind.STEP, incarnation=starts[server])
                replies.append(self._servers.send(server, header, frames, what))
            steps: list[int] = [decode_json(reply.frames(), int) for reply in replies]
            return max(steps)

        with self._changing:
            return self._servers.repeat(ask)

    def read(self, table: str, ids: Ids, *, initial: bool | None = None) -> Floats:
        """Return weights and optimizer state of ids, float32 ``(U, D + S)``.

        Without a row: zeros, or what it begins with if ``initial``, or the table, says.
        """
        spec = self.table(table)
        width, flags = spec.num_floats, messages.INITIAL * spec.reads_initial(initial)
        return self.read_numbers(Kind.READ, table, ids, width, flags)

    def count_ids(self, table: str, first: int = 0) -> tuple[int, Ids]:
        """Return how many rows a table has, and its ids from ``first`` on, uint64."""
        self.caches.flush()
        find = partial(find_ids, self._servers, self.tables, table, first)
        return self._servers.repeat(find)

    def metadata(self, table: str, ids: Ids) -> Metadata:
        """Return how often ids were seen, and when last updated; changes nothing.

        Takes uint64 ``(U,)``; gives uint32 ``(U,)`` per field, 0 for an id without a
        row. The table must keep metadata, by its settings or because the servers evict
        the least frequently used.
        """
        width = messages.METADATA_COLUMNS
        columns = self.read_numbers(Kind.METADATA, table, ids, width)
        return Metadata(*np.ascontiguousarray(columns.view(np.uint32).T))

    @property
    def serves(self) -> str:
        """The checkpoint that servers of inference serve and keep, or ""."""
        return self._servers.serves

    def counters(self, timeout_s: float | None = None) -> list[dict[str, int]]:
        """Return each server's counters: rows, hits, misses, evictions and others."""
        given: Any = {"answer": dict[str, int], "timeout_s": timeout_s}
        return self._servers.ask(Kind.COUNTERS, None, "counters", **given)

    def num_rows(self, timeout_s: float | None = None) -> list[int]:
        """Return how many rows each server holds."""
        return [counters["rows"] for counters in self.counters(timeout_s)]

    def clear(self) -> None:
        """Drop all rows of all tables on all servers; the tables stay known.

        A dump that has not ended fails.
        """
        self.caches.empty()
        self.checkpoints.clear(self.timeout_s + self.recovery_s)

    def shut_down_servers(self) -> None:
        """Make every server process end, which writes its last increments before.

        An ``EmbeddingCluster`` and the components end their servers by themselves.
        """
        self._servers.ask(Kind.SHUTDOWN, None, "shutdown")

    def close(self) -> None:
        """Close caches and connections; servers continue. May be called twice."""
        self.caches.close()
        self._servers.close()

    def _know(
        self,
        starts: Sequence[int],
        found: Iterable[tuple[TableSpec, Sequence[AddedTable], bool]],
    ) -> None:
        """Note tables that all servers have: what each tells of them, and if own.

        If a server has lost its rows since its ``starts``, its numbers are others.
        """
        with self._renewing:
            self._servers.require_same(starts)
            for spec, told, is_own in found:
                numbers = tuple(table.number for table in told)
                wants_counts = any(table.wants_counts for table in told)
                self.tables[spec.name] = KnownTable(spec, numbers, wants_counts, is_own)

    def _note(self, joined: _Joined) -> None:
        """Note a group of this trainer; the lock is held."""
        self._joined.pop(joined.share.group - _MAX_GROUPS, None)
        self._joined[joined.share.group] = joined

    def _table_list(self, groups: Sequence[IdGroup]) -> TableList:
        """Return what is known of the tables of a request; it is looked up once."""
        names = tuple([group.tables for group in groups])
        known, version = self._lists.get(names), self.tables.version
        if known is None or known.version != version:
            if len(self._lists) >= _MAX_LISTS:
                self._lists.clear()
            known = TableList.of(self.tables, names, self.num_servers)
            self._lists[names] = known
        return known

    def _send(self, header: Header, request: RowRequest) -> list[Reply]:
        """Send every server its part of a request, unless a part is too large."""
        # In this order: a server rejects the numbers of tables of another start.
        servers = self._servers
        starts = [connection.incarnation for connection in servers.connections]
        known, share = self._table_list(request.groups), request.share
        what = f"{header.kind.name.lower()} of table {known.names}"
        precision, max_ids = header.precision, servers.max_request_ids
        num_ids = sum([len(group.ids) for group in request.groups])
        num_bytes = 4 * num_ids * max(request.widths, default=0)
        if num_ids > min(max_ids) or num_bytes > MAX_MESSAGE_BYTES:
            request.require_room(what, precision, max_ids)  # one part may be less
        # A joint step waits for the other trainers as well.
        joint_s = share.timeout_ms / 1000 if share else 0.0
        timeout_s = self.timeout_s + self.recovery_s + joint_s
        return [
            servers.send(
                server,
                header._replace(incarnation=starts[server]),
                request.encode(server, known.numbers[server], precision),
                what,
                timeout_s,
                reply_bytes=request.reply_bytes(server, header),
            )
            for server in range(self.num_servers)
        ]

    def _renew(self, server: int) -> None:
        """Continue with a server that came back without the rows that it had.

        It gets the tables that were added here with their current settings, and hears
        this trainer's next share, or that it has left.
        """
        with self._renewing:
            if self._servers.connections[server].fails_with is not RestartedError:
                return  # another thread has renewed it

            def prepare(fresh: Peers, hello: ServerHello) -> None:
                known = {table.spec.get("name"): table.number for table in hello.tables}
                tables = self.tables.copy()  # other threads may add some
                specs = [
                    table.spec.to_json()
                    for name, table in tables.items()
                    if table.is_own or name not in known
                ]
                if specs:
                    [answer] = fresh.ask(
                        Kind.ADD_TABLES,
                        specs,
                        "adding tables again",
                        answer=list[AddedTable],
                        timeout_s=timeouts.ADD_TABLES_S,
                    )
                    known |= {one.spec.get("name"): one.number for one in answer}
                for name in tables:
                    numbers = list(self.tables[name].numbers)
                    numbers[server] = known[name]
                    changed = self.tables[name]._replace(numbers=tuple(numbers))
                    self.tables[name] = changed

            self._servers.renew(server, prepare)
            added_again: Frames = [messages.encode_json(self._own_tables())]
            told = [(Kind.ADD_TABLES, added_again)]
            for name, rank in self._owned.items():
                told.append((Kind.OWN, self._owner_frames(server, [name], rank)))
            for who, share, has_left in reversed(self._joined.values()):
                body = messages.encode_json({"who": who, "ended": ""})
                told.append((Kind.JOIN, [body, share.encode()]))
                told += [(Kind.LEAVE, [share.encode()])] if has_left else []
            for kind, frames in told:
                self._servers.send(server, Header(kind), frames, "joining").frames()
            self.lost.update(lost := self._find_lost(server))
        text = ", ".join(f"{name}={num}" for name, num in lost.items())
        logger.warning(
            "%s came back without the rows that it had: %s. Training continues; "
            "updates that it had not acknowledged are lost.",
            self._servers.names[server],
            text or "it restored none",
        )

    def _own_tables(self) -> dict[str, object]:
        return added(t.spec for t in self.tables.copy().values() if t.is_own)

    def _find_lost(self, server: int) -> dict[str, int]:
        reply = self._servers.send(
            server, Header(Kind.COUNTERS), [messages.encode_json(None)], "counters"
        )
        counters = self._servers.read(server, reply, dict[str, int])
        return {name: num for name, num in counters.items() if name.startswith("lost_")}

    def read_numbers(
        self, kind: Kind, table: str, ids: Ids, width: int, flags: int = 0
    ) -> Floats:
        """Return ``width`` numbers of 4 bytes per id; a float32 view ``(U, width)``."""
        self.caches.flush()
        split = self.split(ids, table)
        request = RowRequest([IdGroup.of(table, split)], [width])
        send = partial(self._send, Header(kind, flags=flags), request)
        (rows,) = PendingRows(
            self._servers, request, Precision.FP32, send, send()
        ).rows()
        return rows[split.inverse]


class PendingRows:
    """A request for rows that every server has been sent; one thread uses it.

    If a server loses its rows meanwhile, ``send`` sends it again.
    """

    def __init__(
        self,
        servers: Servers,
        request: RowRequest,
        precision: Precision,
        send: Callable[[], list[Reply]],
        replies: list[Reply],
    ) -> None:
        self._servers, self._request, self._precision = servers, request, precision
        self._send, self._replies = send, replies
        self._use: LookedUpUse | None = None

    def rows(self) -> list[Floats]:
        """Wait for the rows: float32 ``(U, W)`` per group, read-only."""
        return self._request.merge(self._frames(), self._precision)

    def pieces(self) -> list[list[Floats]]:
        """Wait for the rows where they are; see :meth:`RowRequest.pieces`."""
        return self._request.pieces(self._frames(), self._precision)

    def received(self) -> list[ServerRows]:
        """Wait for the rows of each server, as they travelled, where they are."""
        replies, precision = enumerate(self._frames()), self._precision
        return [
            self._request.read(server, reply, precision) for server, reply in replies
        ]

    @property
    def use(self) -> LookedUpUse:
        """Which ids a pull with state left without a row, and how often each was used.

        It is known when the rows are.
        """
        assert self._use is not None
        return self._use

    def _frames(self) -> list[Frames]:
        while True:
            replies, self._replies = self._replies, []
            try:
                found = [reply.frames() for reply in replies]
                if self._request.with_use:
                    self._use = self._request.read_use(found)
                return found
            except RestartedError as exc:
                lost = self._servers.names.index(exc.server)
                self._servers.repeat(partial(self._servers.renewal, lost))
                self._replies = self._send()
