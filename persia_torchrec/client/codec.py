"""Requests to embedding servers as frames, and their replies, read and checked.

Dimension key:
    U: unique ids of one table
    W: floats per row: weights, or weights and optimizer state
"""

import itertools
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from persia_torchrec.errors import (
    BatchError,
    ConfigError,
    FrameError,
    RestartedError,
)
from persia_torchrec.parsing.decoding import parse_json
from persia_torchrec.routing.shard import Counts, ShardedIds
from persia_torchrec.rpc import messages
from persia_torchrec.rpc.channel import MAX_MESSAGE_BYTES, Reply
from persia_torchrec.rpc.float_codec import (
    Floats,
    decode_floats,
    encode_floats,
    size_of,
)
from persia_torchrec.rpc.messages import Frames, Precision, Share, TableIds
from persia_torchrec.rpc.peers import body_of
from persia_torchrec.table import TableSpec

_NO_ROWS = np.empty(0, dtype=np.float32)
_NO_COUNTS = np.empty(0, dtype=np.uint32)


class BatchNumber(NamedTuple):
    """A stream, a number within it, and the share of a joint step, if it is one."""

    stream: int
    batch: int
    share: Share | None = None

    @staticmethod
    def new_stream(generation: int = 0) -> int:
        """Return a number for a stream of batches that no other process chooses.

        Of its 63 bits the upper 16 are the ``generation`` of the trainers: how often
        their group was started. Servers refuse an older one than they have seen.
        """
        return generation % 2**16 << 47 | secrets.randbits(47)


class KnownTable(NamedTuple):
    """A table that all servers have, with its number on each of them.

    ``is_own`` says that this client has added it, not only learned of it.
    """

    spec: TableSpec
    numbers: tuple[int, ...]
    wants_counts: bool
    is_own: bool = True


class KnownTables(dict[str, KnownTable]):
    """Tables by name; to ask for another one is a ConfigError."""

    def __missing__(self, name: str) -> KnownTable:
        raise ConfigError(
            f"Table {name!r} is unknown to this client. Known: {sorted(self)}. "
            "Call add_tables first."
        )


class TableRequest(NamedTuple):
    """A request for ids of tables, for all servers.

    Per table: its ids, grouped by server; the width W of its rows in the request or in
    the reply; if they are sent, rows, float32 ``(U, W)``, and counts, uint32 ``(U,)``,
    in the order of the ids; None counts 1 each.
    """

    tables: Sequence[KnownTable]
    ids: Sequence[ShardedIds]
    widths: Sequence[int]
    rows: Sequence[Floats] | None = None
    counts: Sequence[Counts | None] | None = None
    share: Share | None = None

    def encode(self, server: int, precision: Precision) -> Frames:
        """Return the frames after the header of one server's message."""
        slices = [slice(*ids.offsets[server : server + 2]) for ids in self.ids]
        frames = messages.encode_segments(
            [
                TableIds(table.numbers[server], ids.ids[piece])
                for table, ids, piece in zip(self.tables, self.ids, slices, strict=True)
            ]
        )
        if self.rows is not None:
            rows = zip(self.rows, slices, strict=True)
            floats = [rows_UW[piece].reshape(-1) for rows_UW, piece in rows]
            frames.append(encode_floats(_joined(floats), precision))
        if self.counts is not None:
            counts = [
                np.ones(piece.stop - piece.start, dtype=np.uint32)
                if counts_U is None
                else counts_U[piece]
                for counts_U, piece in zip(self.counts, slices, strict=True)
            ]
            frames.append(messages.bytes_of(np.concatenate([_NO_COUNTS, *counts])))
        if self.share is not None:
            frames.append(self.share.encode())
        return frames

    def require_room(
        self, what: str, precision: Precision, max_request_ids: Sequence[int]
    ) -> None:
        """Refuse what one of the servers would, before any of them gets its part."""
        row_bytes = size_of(precision) * np.array(self.widths, dtype=np.int64)
        num_ids = np.stack([np.diff(ids.offsets) for ids in self.ids], axis=1)
        totals = zip(num_ids.sum(axis=1), num_ids @ row_bytes, strict=True)
        for server, (num, num_bytes) in enumerate(totals):
            max_ids = max_request_ids[server]
            if num > max_ids or num_bytes > MAX_MESSAGE_BYTES:
                raise BatchError(
                    f"{what}: one server's part must have at most {max_ids} ids and "
                    f"{MAX_MESSAGE_BYTES} bytes of rows. Received: {num} ids, "
                    f"{num_bytes} bytes for server {server}. Use smaller batches."
                )

    def merge(self, replies: Sequence[Frames], precision: Precision) -> list[Floats]:
        """Merge the rows of all servers: float32 ``(U, W)`` per table, read-only.

        They are views of the reply if there is one.
        """
        sizes = [
            (len(ids.ids), w) for ids, w in zip(self.ids, self.widths, strict=True)
        ]
        if len(replies) == 1:
            num = sum([num * width for num, width in sizes])
            flat = decode_floats(body_of(replies[0]), num, precision)
            if not flat.flags.aligned:  # a small frame may begin anywhere in memory
                flat = flat.copy()
            rows = _cut(flat, sizes)
        else:
            rows = [np.empty(size, dtype=np.float32) for size in sizes]
            for server, reply in enumerate(replies):
                parts = [
                    rows_UW[slice(*ids.offsets[server : server + 2])]
                    for rows_UW, ids in zip(rows, self.ids, strict=True)
                ]
                num = sum([part.size for part in parts])
                flat = decode_floats(body_of(reply), num, precision)
                shapes = [part.shape for part in parts]
                for part, received in zip(parts, _cut(flat, shapes), strict=True):
                    part[:] = received
        for rows_UW in rows:
            rows_UW.flags.writeable = False
        return rows


def _cut(flat: Floats, shapes: Sequence[tuple[int, ...]]) -> list[Floats]:
    """Cut a flat array into matrices of these shapes."""
    stops = itertools.accumulate([num * width for num, width in shapes])
    return [
        flat[stop - num * width : stop].reshape(num, width)
        for stop, (num, width) in zip(stops, shapes, strict=True)
    ]


def _joined(pieces: Sequence[Floats]) -> Floats:
    """Concatenate flat arrays; a view where they follow one another in memory."""
    pieces = [piece for piece in pieces if len(piece)]
    if not pieces:
        return _NO_ROWS
    whole = pieces[0].base
    if isinstance(whole, np.ndarray) and all(piece.base is whole for piece in pieces):
        starts = [piece.ctypes.data for piece in pieces]
        stops = [
            start + piece.nbytes for start, piece in zip(starts, pieces, strict=True)
        ]
        if starts[1:] == stops[:-1] and whole.flags.c_contiguous:
            first = (starts[0] - whole.ctypes.data) // pieces[0].itemsize
            return whole.reshape(-1)[first : first + sum(map(len, pieces))]
    return np.concatenate(pieces)


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


def check_counts(
    tables: Sequence[tuple[str, ShardedIds]], counts: Sequence[Counts | None]
) -> None:
    """Check that counts are one per id."""
    for (name, split), counts_U in zip(tables, counts, strict=True):
        if counts_U is None:
            continue
        if counts_U.dtype != np.uint32 or counts_U.shape != split.ids.shape:
            raise BatchError(
                f"Table {name!r}: counts must be uint32 of the shape "
                f"{split.ids.shape}. Received: {counts_U.dtype} {counts_U.shape}."
            )


_STALENESS = "staleness_"
"""What the names of those counters begin with that make up the histogram."""


def staleness_histogram(
    counters: Iterable[Mapping[str, int]],
) -> npt.NDArray[np.int64]:
    """Return how many gradients had each staleness, from counters of all servers."""
    histogram = Counter({0: 0})
    for name, num in itertools.chain(*(of_server.items() for of_server in counters)):
        if name.startswith(_STALENESS):
            histogram[int(name.removeprefix(_STALENESS))] += num
    return np.array([histogram[k] for k in range(max(histogram) + 1)])
