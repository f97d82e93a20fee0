"""Requests to embedding servers as frames, and their replies, read and checked.

What a server has of a group of tables is one range of its ids, of its rows and of its
gradients. So a reply is written into the rows of a batch with one copy, and gradients
leave as a slice without any. Only a message of several groups, whose tables have
several dims, has their pieces joined first.

Dimension key:
    P: servers; T: tables
    U: unique ids of one group of tables
    W: floats per row: weights, or weights and optimizer state
"""

import itertools
import os
import platform
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import msgspec
import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Counts, Floats
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.errors import (
    BatchError,
    ConfigError,
    FrameError,
    RestartedError,
)
from persia_torchrec.parsing.decoding import parse_json
from persia_torchrec.routing.route import IdGroup, ShardedIds
from persia_torchrec.rpc import messages
from persia_torchrec.rpc.float_codec import (
    encode_floats,
    read_numbers,
    size_of,
    write_floats,
)
from persia_torchrec.rpc.messages import (
    GENERATION_SHIFT,
    DeferredRows,
    Frames,
    Header,
    Precision,
    SentFrame,
    Share,
)
from persia_torchrec.rpc.peers import body_of
from persia_torchrec.rpc.reply import Reply
from persia_torchrec.rpc.sockets import MAX_MESSAGE_BYTES
from persia_torchrec.table import TableSpec

_NO_ROWS = np.empty(0, dtype=np.float32)
_NO_COUNTS = np.empty(0, dtype=np.uint32)
_NO_POSITIONS = np.empty(0, dtype=np.int64)


class BatchNumber(NamedTuple):
    """A stream, a number within it, and the share of a joint step, if it is one."""

    stream: int
    batch: int
    share: Share | None = None

    @staticmethod
    def new_stream(generation: int = 0) -> int:
        """Return a number for a stream of batches that no other process chooses.

        Of its 63 bits the upper 16 are the ``generation`` of the trainers: how often
        their group was started. Servers reject an older one than they have seen.
        """
        return generation << GENERATION_SHIFT | secrets.randbits(GENERATION_SHIFT)


_RANK_SHIFT = 47
MOST_BATCHES = (1 << _RANK_SHIFT) - 1
"""That a trainer can number: 446 years of 10,000 a second."""


class BatchCount:
    """How far the training batches of one trainer are numbered.

    The number of a batch has the trainer's rank in its upper 16 bits, and below them
    how many training batches of its collection were begun, from 1 on: 47 bits, which
    end after 446 years of 10,000 batches a second. Servers draw by it which ids get a
    row: so the next start of a training continues with the numbers behind those of its
    checkpoint. Any thread may call any method.

    Attributes:
        first: batches of the checkpoint that was loaded last.
        trained: those of any collection, and of that checkpoint, up to the last one
            whose gradients were sent; kept in checkpoints.
    """

    def __init__(self) -> None:
        self.first = self.trained = 0

    @staticmethod
    def number(rank: int, begun: int) -> int:
        """Return the number of a batch: of a rank in ``[0, 2**16)``."""
        if begun > MOST_BATCHES:
            raise ConfigError(
                f"A trainer must begin at most {MOST_BATCHES} batches, those of its "
                f"checkpoint included. Received: {begun}. Load a checkpoint of fewer."
            )
        return rank << _RANK_SHIFT | begun

    def has_trained(self, number: int) -> None:
        """Note that the gradients of a batch are sent."""
        self.trained = max(self.trained, number & MOST_BATCHES)

    def continue_after(self, num_batches: int) -> None:
        """Number the batches from now on behind those of a checkpoint."""
        self.first = self.trained = num_batches


class NewerRows(Protocol):
    """Rows that a trainer keeps, which are newer than those of the servers."""

    def flush(self) -> None:
        """Write the rows that were trained; wait until the servers have them."""

    def empty(self) -> None:
        """Flush, and forget all rows: the servers are about to have others."""

    def snapshot(self) -> dict[str, bytes]:
        """Return files of a checkpoint, after a flush."""

    def restore(self, folder: Folder) -> None:
        """Begin with the rows that were kept in the run of a checkpoint."""

    def close(self) -> None:
        """Flush for the last time."""


class Caches(WeakSet[NewerRows]):
    """The caches of a client's rows."""

    def flush(self) -> None:
        """Flush all."""
        for cache in list(self):
            cache.flush()

    def empty(self) -> None:
        """Empty all."""
        for cache in list(self):
            cache.empty()

    def save(self, folder: Folder) -> None:
        """Flush all, and write the files of a checkpoint that are theirs."""
        self.flush()
        for cache in list(self):
            for name, data in cache.snapshot().items():
                folder.write(name, data)

    def restore(self, folder: Folder) -> None:
        """Have all begin with the rows that they had in the run of a checkpoint."""
        for cache in list(self):
            cache.restore(folder)

    def close(self) -> None:
        """Close all."""
        for cache in list(self):
            cache.close()


class KnownTable(NamedTuple):
    """A table that all servers have, with its number on each of them.

    ``is_own`` says that this client has added it, not only learned of it.
    """

    spec: TableSpec
    numbers: tuple[int, ...]
    wants_counts: bool
    is_own: bool = True


class KnownTables(dict[str, KnownTable]):
    """Tables by name; to ask for another one is a ConfigError.

    ``version`` grows with each change, after it. ``users`` are the models of this
    process that train them, as long as they live.
    """

    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.users: WeakSet[Any] = WeakSet()

    def __missing__(self, name: str) -> KnownTable:
        raise ConfigError(
            f"Table {name!r} is unknown to this client. Known: {sorted(self)}. "
            "Call add_tables first."
        )

    def __setitem__(self, name: str, table: KnownTable) -> None:
        super().__setitem__(name, table)
        self.version += 1

    def forget(self, name: str) -> None:
        """Forget a table that was dropped."""
        self.pop(name, None)
        self.version += 1

    def require_unused(self, name: str) -> None:
        """Reject dropping a table that a model of this process trains."""
        if any(name in user.specs and not user.has_ended for user in self.users):
            raise ConfigError(
                f"Table {name!r} must not be trained while it is dropped. Received: a "
                "model of this process that has it. Call close() of its sharders, and "
                "drop it then."
            )


class TableList(NamedTuple):
    """What a client knows of the tables of a request, in their order.

    Attributes:
        version: that of the known tables, or an older one.
        numbers: int64 ``(P, T)``: of each on each server.
        dims: of each group of tables; ``widths``: with optimizer state, 0 where tables
            of a group differ, or have several rows an id.
        names: in quotes, for errors.
        wants_counts: whether a table does.
    """

    version: int
    numbers: npt.NDArray[np.int64]
    dims: tuple[int, ...]
    widths: tuple[int, ...]
    names: str
    wants_counts: bool

    @classmethod
    def of(
        cls, known: KnownTables, groups: Sequence[tuple[str, ...]], num_servers: int
    ) -> "TableList":
        """Look the tables of groups up; each group has one dim."""
        version, names = known.version, list(itertools.chain(*groups))
        tables = [known[name] for name in names]
        numbers = np.array([table.numbers for table in tables], dtype=np.int64)
        return cls(
            version,
            np.ascontiguousarray(numbers.reshape(-1, num_servers).T),
            tuple([known[group[0]].spec.dim for group in groups]),
            tuple(
                [_width_of([known[name].spec for name in group]) for group in groups]
            ),
            ", ".join(map(repr, names)),
            any(table.wants_counts for table in tables),
        )


def _width_of(specs: Sequence[TableSpec]) -> int:
    """Return the floats of an id in each of some tables, or 0."""
    widths = {0 if spec.parts() else spec.num_floats for spec in specs}
    return widths.pop() if len(widths) == 1 else 0


Tables = Sequence[tuple[str, ShardedIds]] | Sequence[IdGroup]
"""Ids of a request: of each table, or of all tables of one dim together."""


def groups_of(tables: Tables) -> list[IdGroup]:
    """Return ids as groups: those of a table are one."""
    return [
        given if isinstance(given, IdGroup) else IdGroup.of(*given) for given in tables
    ]


class RowRequest(NamedTuple):
    """A request for ids of tables, for all servers.

    Per group of tables: its ids; the width W of its rows in the request or in the
    reply; if they are sent, rows, float32 ``(U, W)``, and counts, uint32 ``(U,)``, in
    the order of the ids; None counts 1 each. With ``steps``, int64 ``(T,)`` or empty,
    it is a write that says how rows were used: counts, frequencies likewise, steps.
    ``with_use`` expects a reply that says so.
    """

    groups: Sequence[IdGroup]
    widths: Sequence[int]
    rows: Sequence[Floats] | DeferredRows | None = None
    counts: Sequence[Counts | None] | None = None
    share: Share | None = None
    frequencies: Sequence[Counts | None] | None = None
    steps: npt.NDArray[np.int64] | None = None
    with_use: bool = False

    def encode(
        self, server: int, numbers_T: npt.NDArray[np.int64], precision: Precision
    ) -> list[SentFrame]:
        """Return the frames after the header of one server's message.

        The ids, rows and counts of one group are slices of what is given.
        """
        slices = [
            slice(*group.offsets[server : server + 2].tolist()) for group in self.groups
        ]
        counts_T = [group.num_ids[server] for group in self.groups]
        segments_T2 = np.empty((len(numbers_T), 2), dtype=np.int64)
        segments_T2[:, 0] = numbers_T
        if len(counts_T) == 1:
            segments_T2[:, 1] = counts_T[0]
        elif counts_T:
            np.concatenate(counts_T, out=segments_T2[:, 1])
        pairs = zip(self.groups, slices, strict=True)
        ids = [group.ids[piece] for group, piece in pairs]
        frames: list[SentFrame] = [*messages.encode_segments(segments_T2, ids)]
        if isinstance(self.rows, DeferredRows):
            frames.append(self.rows.part(slices))
        elif self.rows is not None:
            rows = zip(self.rows, slices, strict=True)
            given = [rows_UW[piece] for rows_UW, piece in rows]
            flat = [rows_NW.reshape(-1) for rows_NW in given]
            whole = flat[0] if len(flat) == 1 else _joined(flat)
            shapes = [rows_NW.shape for rows_NW in given]
            frames.append(encode_floats(whole, precision, shapes))
        if self.counts is not None:
            frames.append(_counts_of(self.counts, slices))
        if self.steps is not None:
            if self.counts is None:
                frames.append(b"")
            known = self.frequencies
            frames.append(b"" if known is None else _counts_of(known, slices))
            frames.append(messages.bytes_of(self.steps))
        if self.share is not None:
            frames.append(self.share.encode())
        return frames

    def require_room(
        self, what: str, precision: Precision, max_request_ids: Sequence[int]
    ) -> None:
        """Reject what one of the servers would, before any of them gets its part."""
        for server, max_ids in enumerate(max_request_ids):
            shapes = self._shapes(server)
            num, num_bytes = sum(n for n, _ in shapes), size_of(shapes, precision)
            if num > max_ids or num_bytes > MAX_MESSAGE_BYTES:
                raise BatchError(
                    f"{what}: one server's part must have at most {max_ids} ids and "
                    f"{MAX_MESSAGE_BYTES} bytes of rows. Received: {num} ids, "
                    f"{num_bytes} bytes for server {server}. Use smaller batches."
                )

    def reply_bytes(self, server: int, header: Header) -> int:
        """Return how many bytes of rows a server will answer, at most."""
        if self.rows is not None:
            return 0
        shapes = self._shapes(server)
        use_bytes = sum([128 + 8 * num for num, _ in shapes]) if self.with_use else 0
        return 64 + size_of(shapes, header.precision) + use_bytes

    def _shapes(self, server: int) -> list[tuple[int, int]]:
        """Return the shape of one server's rows of each group."""
        bounds = [group.offsets[server : server + 2].tolist() for group in self.groups]
        pairs = zip(bounds, self.widths, strict=True)
        return [(stop - start, width) for (start, stop), width in pairs]

    def read(self, server: int, reply: Frames, precision: Precision) -> "ServerRows":
        """Return the rows of one server, of all groups, as they travelled."""
        shapes, body = self._shapes(server), body_of(reply)
        numbers, exponents = read_numbers(body, shapes, precision)
        received, first, row = ServerRows([], [], []), 0, 0
        for (num, width), group in zip(shapes, self.groups, strict=True):
            begin, stop = int(group.offsets[server]), first + num * width
            received.slices.append(slice(begin, begin + num))
            received.pieces.append(numbers[first:stop])
            received.exponents.append(exponents[row : row + num])
            first, row = stop, row + num
        return received

    def read_use(self, replies: Sequence[Frames]) -> "LookedUpUse":
        """Take what replies to a lookup with state say besides rows."""
        use = LookedUpUse([], [])
        parts: list[list[npt.NDArray[np.int64]]] = [[] for _ in self.groups]
        known = [np.zeros(len(group.ids), np.uint32) for group in self.groups]
        for server, reply in enumerate(replies):
            if len(reply) != 4:
                raise FrameError(
                    f"The reply must have 4 frames. Received: {len(reply)}."
                )
            frequencies_N = messages.array_of(reply.pop(), np.uint32)
            unadmitted = messages.array_of(reply.pop(), np.uint32).astype(np.int64)
            first = 0
            for g, (num, _) in enumerate(self._shapes(server)):
                begin, stop = int(self.groups[g].offsets[server]), first + num
                if len(unadmitted):
                    own = unadmitted[(unadmitted >= first) & (unadmitted < stop)]
                    parts[g].append(own - first + begin)
                if len(frequencies_N):
                    known[g][begin : begin + num] = frequencies_N[first:stop]
                first = stop
            if len(frequencies_N) not in (0, first) or (unadmitted >= first).any():
                raise FrameError(
                    "The reply must name ids of the request, and have one frequency an "
                    f"id or none. Received: {len(frequencies_N)} for {first} ids."
                )
        use.unadmitted[:] = [np.concatenate([_NO_POSITIONS, *part]) for part in parts]
        use.frequencies[:] = known
        return use

    def merge(self, replies: Sequence[Frames], precision: Precision) -> list[Floats]:
        """Merge the rows of all servers: float32 ``(U, W)`` per group, read-only.

        They are views of the reply if there is one.
        """
        if len(replies) == 1 and precision is Precision.FP32:
            rows = [of_group[0] for of_group in self.pieces(replies, precision)]
        else:
            rows = [
                np.empty((len(group.ids), width), dtype=np.float32)
                for group, width in zip(self.groups, self.widths, strict=True)
            ]
            for server, reply in enumerate(replies):
                received = self.read(server, reply, precision)
                for rows_UW, piece, numbers, exponents in zip(
                    rows, *received, strict=True
                ):
                    write_floats(numbers, exponents, rows_UW[piece])
        for rows_UW in rows:
            rows_UW.flags.writeable = False
        return rows

    def pieces(
        self, replies: Sequence[Frames], precision: Precision
    ) -> list[list[Floats]]:
        """Return the rows of each group as arrays ``(N, W)``, one after the other.

        They are views of the replies where these are float32, one of each server.
        """
        if precision is not Precision.FP32:
            return [[rows_UW] for rows_UW in self.merge(replies, precision)]
        of_servers = [
            self.read(server, reply, precision).pieces
            for server, reply in enumerate(replies)
        ]
        return [
            [_as_rows(piece, width) for piece in of_group]
            for of_group, width in zip(
                zip(*of_servers, strict=True), self.widths, strict=True
            )
        ]


class ServerRows(NamedTuple):
    """Rows of a server, by group: where they belong, numbers, and an exponent per row.

    The numbers are float32; or the bits of halves, uint16, which are FP16 times 2 to
    the power of minus the exponent of their row, or BF16, which has none. They may be
    views of memory that the server writes again when they are gone.
    """

    slices: list[slice]
    pieces: list[npt.NDArray[np.generic]]
    exponents: list[npt.NDArray[np.int8]]


class LookedUpUse(NamedTuple):
    """Of each group: which ids have no row, and its frequencies.

    Positions among the ids of the group, int64 ``(K,)``; in training they are not
    admitted, and must not be written back. How often each id was used, uint32 ``(U,)``;
    0 where the table does not keep it.
    """

    unadmitted: list[npt.NDArray[np.int64]]
    frequencies: list[Counts]


def _as_rows(numbers: npt.NDArray[np.generic], width: int) -> Floats:
    """View float32 of a reply as rows; a small frame may begin anywhere in memory."""
    if not numbers.flags.aligned:
        numbers = numbers.copy()
    rows: Floats = numbers.view(np.float32).reshape(-1, width)
    return rows


def _joined(pieces: Sequence[Floats]) -> Floats:
    """Concatenate the rows of groups, of which a message has one frame."""
    return np.concatenate([_NO_ROWS, *pieces])


def _counts_of(counts: Sequence[Counts | None], slices: Sequence[slice]) -> memoryview:
    """Return what ids of groups count as a frame; None counts 1 each."""
    parts = [
        np.ones(piece.stop - piece.start, dtype=np.uint32)
        if counts_U is None
        else counts_U[piece]
        for counts_U, piece in zip(counts, slices, strict=True)
    ]
    return messages.bytes_of(np.concatenate([_NO_COUNTS, *parts]))


def check_counts(groups: Sequence[IdGroup], counts: Sequence[Counts | None]) -> None:
    """Check that counts are one per id."""
    for group, counts_U in zip(groups, counts, strict=True):
        if counts_U is None:
            continue
        if counts_U.dtype != np.uint32 or counts_U.shape != group.ids.shape:
            raise BatchError(
                f"Table {_named(group)}: counts must be uint32 of the shape "
                f"{group.ids.shape}. Received: {counts_U.dtype} {counts_U.shape}."
            )


def check_rows(
    groups: Sequence[IdGroup],
    widths: Sequence[int],
    rows: Sequence[Floats] | DeferredRows,
    what: str = "gradients",
) -> None:
    """Check that there is one gradient, or row, per id."""
    shapes = (
        rows.shapes
        if isinstance(rows, DeferredRows)
        else [rows_UW.shape for rows_UW in rows]
    )
    for group, width, shape in zip(groups, widths, shapes, strict=True):
        expected = (len(group.ids), width)
        if shape != expected:
            raise BatchError(
                f"Table {_named(group)}: {what} must have the shape "
                f"{expected}. Received: {shape}."
            )


def require_one_width(groups: Sequence[IdGroup], known: TableList) -> None:
    """Reject tables whose rows cannot be read, or written, with state together."""
    for group, width in zip(groups, known.widths, strict=True):
        if not width:
            raise ConfigError(
                "Tables of one group must have one row an id, of as many weights and "
                "state floats, so that rows travel with state. Received: tables "
                f"{_named(group)}. Tables with dynamic or shared_rows cannot; give "
                "tables of other widths in groups of their own."
            )


def _named(group: IdGroup) -> str:
    return ", ".join(map(repr, group.tables))


class AddedTable(msgspec.Struct):
    """What a server says of a table that it has."""

    number: int
    wants_counts: bool
    spec: dict[str, Any]


class ServerHello(msgspec.Struct):
    """What a server says of itself."""

    shard: int
    num_shards: int
    incarnation: int
    max_request_ids: int
    tables: list[AddedTable] = []
    generation: int = 0
    serves: str = ""


def require_one_checkpoint(hellos: Sequence[ServerHello], names: Sequence[str]) -> None:
    """Raise ConfigError if servers of inference serve several checkpoints."""
    if len({hello.serves for hello in hellos}) > 1:
        told = [
            f"{hello.serves or 'none'} by {name}"
            for hello, name in zip(hellos, names, strict=True)
        ]
        raise ConfigError(
            "All embedding servers must serve one checkpoint, or answers would join "
            f"several. Received: {', '.join(told)}. Name the checkpoint itself, and "
            "restart those that serve another."
        )


def tables_of_all(
    hellos: Sequence[ServerHello], names: Sequence[str]
) -> list[tuple[TableSpec, list[AddedTable]]]:
    """Return the tables that all servers have, and what each tells of them."""
    by_name = [{table.spec.get("name"): table for table in h.tables} for h in hellos]
    common = [n for n in by_name[0] if all(n in tables for tables in by_name)]
    found = []
    for told in ([tables[name] for tables in by_name] for name in common):
        spec, *others = [TableSpec.from_json(table.spec) for table in told]
        dims = [spec.dim, *(other.dim for other in others)]
        if len(set(dims)) > 1:
            pairs = zip(dims, names, strict=True)
            raise ConfigError(
                f"Table {spec.name!r} must have one dim on all servers. Received: "
                f"{', '.join(f'{dim} of {server}' for dim, server in pairs)}. Load "
                "the same checkpoint into all."
            )
        found.append((spec, told))
    return found


def added(specs: Iterable[TableSpec]) -> dict[str, object]:
    """Return the body of ADD_TABLES, with what errors of others call this process."""
    who = f"process {os.getpid()} on {platform.node()}"
    return {"tables": [spec.to_json() for spec in specs], "who": who}


class PushOutcome(msgspec.Struct, frozen=True):
    """What became of the gradients of a push; in JSON, the reply to UPDATE.

    Attributes:
        num_missed: ids that had no row: it had been evicted, or never admitted.
        num_refused: rows whose gradient was not finite: NaN or infinite.
        num_unadmitted: of the missed, those that were never admitted.
        num_gradients: ids that had a gradient, applied or not.
        num_lost: servers that were started again without their rows, and have not
            acknowledged the push.
    """

    num_missed: int = msgspec.field(name="missed")
    num_refused: int = msgspec.field(name="refused")
    num_unadmitted: int = msgspec.field(name="unadmitted")
    num_gradients: int = msgspec.field(name="gradients")
    num_lost: int = msgspec.field(name="lost", default=0)

    @property
    def num_evicted(self) -> int:
        """Ids whose row left between its lookup and its gradient."""
        return self.num_missed - self.num_unadmitted

    @classmethod
    def read(cls, replies: Iterable[Reply]) -> "PushOutcome":
        """Wait for the replies to a push; return the outcome on all servers."""
        source = "The reply to an update"
        outcomes = [NOTHING]
        for reply in replies:
            try:
                body = body_of(reply.frames())
            except RestartedError:
                outcomes.append(_LOST)
            else:
                outcomes.append(parse_json(body, cls, source, FrameError))
        columns = zip(*map(msgspec.structs.astuple, outcomes), strict=True)
        return cls(*map(sum, columns))


NOTHING = PushOutcome(0, 0, 0, 0)
_LOST = PushOutcome(0, 0, 0, 0, 1)
