"""Bulk load and export of a table's rows.

A table may be larger than memory, so rows go in blocks, either way:

    tensor or file --blocks_of--> RowBlock, RowBlock, ... --fill--> servers
    servers --export--> RowBlock, RowBlock, ... --> another job's fill, or a tensor

Dimension key:
    N: rows of a table, or of one block
    D: embedding dim
    S: optimizer-state floats per row
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Protocol, TypeAlias

import msgspec
import numpy as np

from persia_torchrec.arrays import Floats, Ids
from persia_torchrec.client.codec import KnownTable
from persia_torchrec.client.shards import Servers
from persia_torchrec.errors import BatchError, FrameError, RestartedError
from persia_torchrec.rpc import messages
from persia_torchrec.rpc.float_codec import decode_floats
from persia_torchrec.rpc.messages import Header, Kind, Precision, array_of
from persia_torchrec.rpc.reply import Reply
from persia_torchrec.table import TableSpec

BLOCK_ROWS = 65_536
"""Rows per block, unless the caller says otherwise."""

_BLOCK_BYTES = 2**27

IdsOfRows: TypeAlias = Ids | Callable[[Ids], Ids] | None
"""The id of each row of a table: uint64 ``(N,)``, without repeats; or a function that
is given row numbers, uint64, and returns their ids. None where a row's number is its
id, as in an ordinary table; so it is, too, where ids are hashed to ``[0, N)`` before
every lookup."""


class SlicedRows(Protocol):
    """A matrix that is read slice by slice: an array, mapped memory, a file."""

    def __len__(self) -> int:
        """Return N."""

    def __getitem__(self, rows: slice, /) -> Floats:
        """Return some rows, float32."""


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Some rows of a table.

    Attributes:
        ids: uint64 ``(N,)``, without repeats.
        weights: float32 ``(N, D)``.
        state: float32 ``(N, S)``, optimizer state as the table's optimizer lays it out
            (see ``embedding/optim.py``); None where it is unknown.
    """

    ids: Ids
    weights: Floats
    state: Floats | None = None


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of rows, as often as they are gone through: ``begin`` cuts them again."""

    begin: Callable[[], Iterator[RowBlock]]

    def __iter__(self) -> Iterator[RowBlock]:
        return self.begin()


def rows_per_block(spec: TableSpec, wanted: int = BLOCK_ROWS) -> int:
    """Return how many rows of a table are a block: ``wanted``, or what 128 MiB hold."""
    return min(wanted, _BLOCK_BYTES // (4 * (spec.dim + spec.num_state_floats)))


def blocks_of(
    weights: SlicedRows,
    ids: IdsOfRows = None,
    state: SlicedRows | None = None,
    *,
    block_rows: int = BLOCK_ROWS,
    first_row: int = 0,
) -> Blocks:
    """Cut a whole table into blocks; a memory-mapped one is read block by block.

    ``weights`` are float32 ``(N, D)``, ``state`` float32 ``(N, S)``; ``first_row`` is
    the number of their first row, where they are but a part of the table. Lengths that
    differ, or blocks without a row, are a BatchError.

    Example:
        >>> table = np.zeros((5, 2), dtype=np.float32)
        >>> [block.ids.tolist() for block in blocks_of(table, block_rows=3)]
        [[0, 1, 2], [3, 4]]
    """
    lengths = {"weights": len(weights)}
    if isinstance(ids, np.ndarray):
        ids = ids[first_row : first_row + len(weights)] if first_row else ids
        lengths["ids"] = len(ids)
        first_row = 0  # an array begins with the first of these rows
    if state is not None:
        lengths["state"] = len(state)
    if len(set(lengths.values())) > 1 or block_rows < 1:
        raise BatchError(
            "Ids, weights and state must have the same number of rows, and a block at "
            f"least 1. Received: {lengths}, block_rows={block_rows}."
        )

    def cut() -> Iterator[RowBlock]:
        for start in range(0, len(weights), block_rows):
            rows = slice(start, min(start + block_rows, len(weights)))
            of_rows = ids_of_rows(ids, first_row + rows.start, first_row + rows.stop)
            yield RowBlock(
                of_rows, weights[rows], None if state is None else state[rows]
            )

    return Blocks(cut)


def ids_of_rows(ids: IdsOfRows, start: int, stop: int) -> Ids:
    """Return the ids of some rows of a table; uint64 ``(stop - start,)``."""
    if isinstance(ids, np.ndarray):
        return ids[start:stop]
    numbers = np.arange(start, stop, dtype=np.uint64)
    return numbers if ids is None else ids(numbers)


def rows_to_write(spec: TableSpec, block: RowBlock) -> tuple[Floats, int]:
    """Return a block as a WRITE carries it: its rows and the header's flags."""
    num, width, state = len(block.ids), spec.num_state_floats, block.state
    name = f"the state of {type(spec.optimizer).__name__}"
    arrays = [("weights", block.weights, spec.dim)]
    arrays += [] if state is None else [(name, state, width)]
    for what, array, num_columns in arrays:
        if array.shape != (num, num_columns):
            raise BatchError(
                f"Table {spec.name!r}: {what} must have the shape "
                f"{(num, num_columns)}. Received: {array.shape}."
            )
    rows = np.concatenate([array for _, array, _ in arrays], axis=1, dtype=np.float32)
    return rows, 0 if state is None else messages.STATE


def export_blocks(
    servers: Servers, tables: Mapping[str, KnownTable], spec: TableSpec, block_rows: int
) -> Iterator[RowBlock]:
    """Walk the rows of a table; each server has at most one block in flight.

    ``tables`` are those that the client knows; a server that lost its rows has others.
    """
    what = f"export of table {spec.name!r}"
    dim, width = spec.dim, spec.dim + spec.num_state_floats
    max_rows = min(rows_per_block(spec, block_rows), *servers.max_request_ids)
    starts = list(servers.incarnations)

    def ask(server: int, start: int) -> tuple[int, Reply]:
        number = tables[spec.name].numbers[server]
        value = {"table": number, "start": start, "max_rows": max_rows}
        header = Header(Kind.EXPORT, incarnation=starts[server])
        frames = [messages.encode_json(value)]
        return server, servers.send(server, header, frames, what)

    in_flight = deque(ask(server, 0) for server in range(len(servers)))
    while in_flight:
        server, reply = in_flight.popleft()
        try:
            frames = reply.frames()
        except RestartedError:
            servers.repeat(partial(servers.renewal, server))
            starts[server] = servers.incarnations[server]
            in_flight.append(ask(server, 0))
            continue
        if len(frames) != 4:
            raise FrameError(f"The reply must have 4 frames. Received: {len(frames)}.")
        next_start = messages.decode_json(frames[:2], _Next).next
        if next_start is not None:
            in_flight.append(ask(server, next_start))
        ids = array_of(frames[2], np.uint64)
        flat = decode_floats(frames[3], [(len(ids), width)], Precision.FP32)
        rows = flat.reshape(len(ids), width)
        if len(ids):
            # Copied: the message is not kept, and the arrays may be changed.
            yield RowBlock(ids.copy(), rows[:, :dim].copy(), rows[:, dim:].copy())


def find_ids(
    servers: Servers, tables: Mapping[str, KnownTable], table: str, first: int
) -> tuple[int, Ids]:
    """Return how many rows a table has, and its ids from ``first`` on; uint64 (N,)."""
    what, starts = f"ids of table {table!r}", list(servers.incarnations)

    def ask(server: int, start: int) -> tuple[int, Reply]:
        number = tables[table].numbers[server]
        value = {"table": number, "start": start, "first": first}
        header = Header(Kind.IDS, incarnation=starts[server])
        frames = [messages.encode_json(value)]
        return server, servers.send(server, header, frames, what)

    in_flight = deque(ask(server, 0) for server in range(len(servers)))
    num_rows, found = 0, [np.empty(0, dtype=np.uint64)]
    while in_flight:
        server, reply = in_flight.popleft()
        frames = reply.frames()
        if len(frames) != 3:
            raise FrameError(f"The reply must have 3 frames. Received: {len(frames)}.")
        met = messages.decode_json(frames[:2], _Met)
        if met.next is not None:
            in_flight.append(ask(server, met.next))
        num_rows += met.rows
        found.append(array_of(frames[2], np.uint64).copy())  # no message is kept
    return num_rows, np.concatenate(found)


class _Next(msgspec.Struct):
    """The JSON of a reply to EXPORT: where the next rows begin; None at the end."""

    next: int | None


class _Met(msgspec.Struct):
    """The JSON of a reply to IDS: as of EXPORT, and how many rows were met."""

    next: int | None
    rows: Annotated[int, msgspec.Meta(ge=0)]
