"""Rows of a table outside training: what fills a table, and what an export returns.

A table may be larger than memory, so rows go in blocks, either way:

    tensor or file --blocks_of--> RowBlock, RowBlock, ... --fill--> servers
    servers --export--> RowBlock, RowBlock, ... --> another cluster's fill, a tensor

Dimension key:
    N: rows of a table, or of one block
    D: embedding dim
    S: optimizer-state floats a row
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from persia_torchrec.errors import BatchError
from persia_torchrec.routing.hashing import Ids
from persia_torchrec.wire.precision import Floats

BLOCK_ROWS = 65_536
"""Rows a block, unless the caller says otherwise."""


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


def blocks_of(
    weights: npt.NDArray[np.float32],
    ids: Ids | Callable[[Ids], Ids] | None = None,
    state: npt.NDArray[np.float32] | None = None,
    *,
    block_rows: int = BLOCK_ROWS,
) -> Iterator[RowBlock]:
    """Cut a whole table into blocks; a memory-mapped one is read block by block.

    Args:
        weights: float32 ``(N, D)``.
        ids: uint64 ``(N,)``, the id of each row, without repeats; or a function that is
            given row numbers, uint64, and returns their ids. By default a row's id is
            its number, as in a table whose ids are ``0 .. N - 1``, and so it is where
            ids were hashed to ``[0, N)`` before the lookup.
        state: float32 ``(N, S)``.
        block_rows: rows a block.

    Raises:
        BatchError: the lengths differ, or ``block_rows`` is below 1.

    Example:
        >>> table = np.zeros((5, 2), dtype=np.float32)
        >>> [block.ids.tolist() for block in blocks_of(table, block_rows=3)]
        [[0, 1, 2], [3, 4]]
    """
    num = len(weights)
    lengths = {"weights": num}
    if isinstance(ids, np.ndarray):
        lengths["ids"] = len(ids)
    if state is not None:
        lengths["state"] = len(state)
    if len(set(lengths.values())) > 1 or block_rows < 1:
        raise BatchError(
            "Ids, weights and state must have the same number of rows, and a block at "
            f"least 1. Received: {lengths}, block_rows={block_rows}."
        )
    return _cut(weights, ids, state, block_rows)


def _cut(
    weights: Floats,
    ids: Ids | Callable[[Ids], Ids] | None,
    state: Floats | None,
    block_rows: int,
) -> Iterator[RowBlock]:
    for start in range(0, len(weights), block_rows):
        rows = slice(start, min(start + block_rows, len(weights)))
        of_rows = np.arange(rows.start, rows.stop, dtype=np.uint64)
        if isinstance(ids, np.ndarray):
            of_rows = ids[rows]
        elif ids is not None:
            of_rows = ids(of_rows)
        yield RowBlock(of_rows, weights[rows], None if state is None else state[rows])
