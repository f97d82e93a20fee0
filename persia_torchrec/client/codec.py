"""Requests to embedding servers as frames, and their replies, read and checked.

Dimension key:
    U: unique ids of one table
    N: rows of one reply
    W: floats per row: weights, or weights and optimizer state
"""

import itertools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from persia_torchrec.decoding import parse_json
from persia_torchrec.errors import BatchError, FrameError, WireError
from persia_torchrec.routing.shard import Counts, ShardedIds
from persia_torchrec.table import TableSpec
from persia_torchrec.wire.messages import (
    Frame,
    Frames,
    Header,
    Precision,
    Share,
    TableIds,
    bytes_of,
    encode_segments,
)
from persia_torchrec.wire.precision import Floats, decode_floats, encode_floats, size_of
from persia_torchrec.wire.transport import MAX_MESSAGE_BYTES

_NO_ROWS = np.empty(0, dtype=np.float32)
_NO_COUNTS = np.empty(0, dtype=np.uint32)


@dataclass(frozen=True, slots=True)
class BatchNumber:
    """A stream, a number within it, and the share of a joint step, if it is one."""

    stream: int
    batch: int
    share: Share | None = None

    @staticmethod
    def new_stream() -> int:
        """Return a number for a stream of batches that no other process chooses."""
        return secrets.randbits(63)


@dataclass(frozen=True, slots=True)
class KnownTable:
    """A table that all servers have, with its number on each of them."""

    spec: TableSpec
    numbers: tuple[int, ...]
    wants_counts: bool


class TableRequest(NamedTuple):
    """A request for ids of tables, for all servers.

    Attributes:
        tables: that the request names.
        ids: of each table, grouped by server.
        widths: W of each table, in the request or in its reply.
        rows: float32 ``(U, W)`` per table, in the order of its ids, if rows are sent.
        counts: uint32 ``(U,)`` per table; None counts 1 each. Not sent if left out.
        share: of a joint step, if the request is one.
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
        frames = encode_segments(
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
            frames.append(bytes_of(np.concatenate([_NO_COUNTS, *counts])))
        if self.share is not None:
            frames.append(self.share.encode())
        return frames

    def require_room(
        self, what: str, precision: Precision, max_request_ids: Sequence[int]
    ) -> None:
        """Refuse a request that a server would refuse, before any server gets its part.

        It names the request ``what``; each server accepts its own number of ids.
        """
        row_bytes = [width * size_of(precision) for width in self.widths]
        for server, max_ids in enumerate(max_request_ids):
            parts = [int(np.diff(ids.offsets)[server]) for ids in self.ids]
            num_bytes = sum(map(int.__mul__, parts, row_bytes))
            if sum(parts) > max_ids or num_bytes > MAX_MESSAGE_BYTES:
                raise BatchError(
                    f"{what}: one server's part must have at most {max_ids} ids and "
                    f"{MAX_MESSAGE_BYTES} bytes of rows. Received: {sum(parts)} ids, "
                    f"{num_bytes} bytes for server {server}. Use smaller batches."
                )

    def merge(self, replies: Sequence[Frames], precision: Precision) -> list[Floats]:
        """Merge the rows of all servers: float32 ``(U, W)`` per table, read-only.

        They are views of the reply if there is one.
        """
        shapes = [
            (len(split.ids), width)
            for split, width in zip(self.ids, self.widths, strict=True)
        ]
        if len(replies) == 1:
            num = sum([num * width for num, width in shapes])
            flat = decode_floats(body_of(replies[0]), num, precision)
            if not flat.flags.aligned:  # a small frame may begin anywhere in memory
                flat = flat.copy()
            stops = itertools.accumulate([num * width for num, width in shapes])
            rows = [
                flat[stop - num * width : stop].reshape(num, width)
                for stop, (num, width) in zip(stops, shapes, strict=True)
            ]
        else:
            rows = [np.empty(shape, dtype=np.float32) for shape in shapes]
            for server, reply in enumerate(replies):
                self._scatter(body_of(reply), server, rows, precision)
        for rows_UW in rows:
            rows_UW.flags.writeable = False
        return rows

    def _scatter(
        self, frame: Frame, server: int, rows: Sequence[Floats], precision: Precision
    ) -> None:
        """Copy one server's reply into each table's rows."""
        parts = [
            rows_UW[slice(*split.offsets[server : server + 2])]
            for rows_UW, split in zip(rows, self.ids, strict=True)
        ]
        flat = decode_floats(frame, sum(part.size for part in parts), precision)
        start = 0
        for part in parts:
            part[:] = flat[start : start + part.size].reshape(part.shape)
            start += part.size


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


def body_of(frames: Frames) -> Frame:
    """Return the one frame after a reply's header."""
    if len(frames) != 2:
        raise FrameError(f"The reply must have 2 frames. Received: {len(frames)}.")
    return frames[1]


class ServerHello(msgspec.Struct):
    """What a server says of itself when a client connects."""

    shard: int
    num_shards: int
    incarnation: int
    max_request_ids: int


class AddedTable(msgspec.Struct):
    """What a server says of a table that it has."""

    number: int
    wants_counts: bool
    spec: dict[str, Any]


class TableList(msgspec.Struct):
    """The part of the reply to HELLO that lists the tables."""

    tables: list[AddedTable]


def know_tables(
    specs: Sequence[TableSpec], answers: Sequence[Sequence[AddedTable]]
) -> dict[str, KnownTable]:
    """Return tables that all servers have, by name; each answers in their order."""
    for answer in answers:
        if len(answer) != len(specs):
            raise WireError(
                f"The reply to ADD_TABLES must tell of {len(specs)} tables. "
                f"Received: {len(answer)}."
            )
    return {
        spec.name: KnownTable(
            spec,
            tuple(answer[t].number for answer in answers),
            any(answer[t].wants_counts for answer in answers),
        )
        for t, spec in enumerate(specs)
    }


class PushOutcome(NamedTuple):
    """What became of the gradients of a push.

    Attributes:
        num_missed: ids that had no row: it had been evicted, or never admitted.
        num_refused: rows whose gradient was not finite: NaN or infinite.
        num_unadmitted: of the missed, those that were never admitted.
        num_gradients: ids that had a gradient, applied or not.
    """

    num_missed: int = 0
    num_refused: int = 0
    num_unadmitted: int = 0
    num_gradients: int = 0

    @property
    def num_evicted(self) -> int:
        """Ids whose row left between its lookup and its gradient."""
        return self.num_missed - self.num_unadmitted

    def to_json(self) -> dict[str, int]:
        """Describe the outcome as it stands in a reply."""
        return dict(zip(_Outcome.__struct_fields__, self, strict=True))

    @classmethod
    def read(cls, replies: Iterable[Frames]) -> "PushOutcome":
        """Read the replies to a push; return the outcome on all servers."""
        outcomes = [
            parse_json(body_of(frames), _Outcome, "The reply to an update", FrameError)
            for frames in replies
        ]
        rows = [(0, 0, 0, 0), *map(msgspec.structs.astuple, outcomes)]
        return cls(*map(sum, zip(*rows, strict=True)))


class _Outcome(msgspec.Struct):
    """The JSON of a reply to UPDATE, in the order of ``PushOutcome``."""

    missed: int
    refused: int
    unadmitted: int
    gradients: int


def stamp(header: Header, batch: BatchNumber, flags: int = 0) -> Header:
    """Return a header of a request that belongs to a batch."""
    return header._replace(stream=batch.stream, batch=batch.batch, flags=flags)


def staleness_histogram(
    counters: Iterable[Mapping[str, int]],
) -> npt.NDArray[np.int64]:
    """Add up ``staleness_0``, ``staleness_1``, ... of each server's counters."""
    prefix, total = "staleness_", {0: 0}
    for of_server in counters:
        for name, num in of_server.items():
            if name.startswith(prefix):
                staleness = int(name.removeprefix(prefix))
                total[staleness] = total.get(staleness, 0) + num
    histogram = np.zeros(max(total) + 1, dtype=np.int64)
    histogram[list(total)] = list(total.values())
    return histogram
