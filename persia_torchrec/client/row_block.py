"""Rows of a table outside training: what fills a table, and what an export returns.

A table may be larger than memory, so rows go in blocks, either way:

    tensor or file --blocks_of--> RowBlock, RowBlock, ... --fill--> servers
    servers --export--> RowBlock, RowBlock, ... --> another job's fill, or a tensor

Dimension key:
    N: rows of a table, or of one block
    D: embedding dim
    S: optimizer-state floats a row
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from persia_torchrec.errors import BatchError
from persia_torchrec.routing.hashing import Ids
from persia_torchrec.table import TableSpec
from persia_torchrec.wire.precision import Floats

BLOCK_ROWS = 65_536
"""Rows a block, unless the caller says otherwise."""

_BLOCK_BYTES = 2**27

IdsOfRows: TypeAlias = Ids | Callable[[Ids], Ids] | None
"""The id of each row of a table: uint64 ``(N,)``, without repeats; or a function that
is given row numbers, uint64, and returns their ids. None where a row's number is its
id, as in an ordinary table; so it is, too, where ids are hashed to ``[0, N)`` before
every lookup."""


class Rows(Protocol):
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
            (see ``embedding/optim.py``); None where there is none to tell.
    """

    ids: Ids
    weights: Floats
    state: Floats | None = None


def rows_a_block(spec: TableSpec, wanted: int = BLOCK_ROWS) -> int:
    """Return how many rows of a table are a block: as wanted, or what 128 MiB hold.

    Args:
        spec: the table.
        wanted: rows at most, ``>= 1``.
    """
    return min(wanted, _BLOCK_BYTES // (4 * (spec.dim + spec.num_state_floats)))


def blocks_of(
    weights: Rows,
    ids: IdsOfRows = None,
    state: Rows | None = None,
    *,
    block_rows: int = BLOCK_ROWS,
    first_row: int = 0,
) -> Iterator[RowBlock]:
    """Cut a whole table into blocks; a memory-mapped one is read block by block.

    Args:
        weights: float32 ``(N, D)``.
        ids: of the rows.
        state: float32 ``(N, S)``.
        block_rows: rows a block.
        first_row: number of the first row, where these are but a part of the table.

    Raises:
        BatchError: the lengths differ, or ``block_rows`` is below 1.

    Example:
        >>> table = np.zeros((5, 2), dtype=np.float32)
        >>> [block.ids.tolist() for block in blocks_of(table, block_rows=3)]
        [[0, 1, 2], [3, 4]]
    """
    lengths = {"weights": len(weights)}
    if isinstance(ids, np.ndarray):
        ids = ids[first_row : first_row + len(weights)] if first_row else ids
        lengths["ids"] = len(ids)
    if state is not None:
        lengths["state"] = len(state)
    if len(set(lengths.values())) > 1 or block_rows < 1:
        raise BatchError(
            "Ids, weights and state must have the same number of rows, and a block at "
            f"least 1. Received: {lengths}, block_rows={block_rows}."
        )
    return _cut(weights, ids, state, block_rows, first_row)


def ids_of_rows(ids: IdsOfRows, start: int, stop: int) -> Ids:
    """Return the ids of some rows of a table; uint64 ``(stop - start,)``."""
    if isinstance(ids, np.ndarray):
        return ids[start:stop]
    numbers = np.arange(start, stop, dtype=np.uint64)
    return numbers if ids is None else ids(numbers)


def _cut(
    weights: Rows, ids: IdsOfRows, state: Rows | None, block_rows: int, first_row: int
) -> Iterator[RowBlock]:
    # An array of ids begins with the first of these rows; a function counts from 0.
    offset = 0 if isinstance(ids, np.ndarray) else first_row
    for start in range(0, len(weights), block_rows):
        stop = min(start + block_rows, len(weights))
        of_rows = ids_of_rows(ids, offset + start, offset + stop)
        state_of_rows = None if state is None else state[start:stop]
        yield RowBlock(of_rows, weights[start:stop], state_of_rows)
