"""Rows in a random order: a stretch at a time, taken in pieces.

    blocks -> a stretch: as many rows as are put in order together -> pieces

A stretch is put in order when its last block is there, a column at a time, so that what
is read in a random order is in the cache, and the blocks' columns are freed one by one.
The blocks of the next stretch are read while its pieces are taken: about as many rows
are held as a stretch has, not twice as many.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from persia_torchrec.arrays import Floats
from persia_torchrec.datasets.columns import (
    Int64s,
    Order,
    Rows,
    joined_counts,
    take_ids,
    to_offsets,
)

PIECE_ROWS = 4096
"""Rows that are freed together."""

Read = tuple[Any, Rows | None]
"""A run of groups and a block of its rows; None when all were read."""


def shuffled(reads: Iterator[Read], most: int) -> Iterator[Read]:
    """Put the rows of each window in a random order; yield them in pieces.

    Args:
        reads: blocks of windows, and None after each run's.
        most: rows of a stretch. Fewer than an eighth of it, which end a window, are put
            in order with those before them.
    """
    stretches, ready = _Stretches(most), deque[Read]()
    num_ready, is_over = 0, False
    while True:
        while not is_over and (not ready or stretches.num_rows + num_ready < most):
            read = next(reads, None)
            is_over = read is None
            for item in () if read is None else stretches.add(*read):
                ready.append(item)
                num_ready += item[1].num_rows if item[1] is not None else 0
        if not ready:
            return
        run, rows = ready.popleft()
        num_ready -= rows.num_rows if rows is not None else 0
        yield run, rows
        del rows


class _Stretches:
    """The blocks of a window, until they are put in a random order together.

    Attributes:
        num_rows: that wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: list[Rows] = []
        self.num_rows = self._number = self._skip = 0  # _number of a stretch

    def add(self, run: Any, rows: Rows | None) -> list[Read]:
        """Add a block; return the pieces of stretches that are whole."""
        items: list[Read] = []
        if rows is not None:
            if not self.num_rows and not self._number:
                self._skip = run.skip
            self._blocks.append(rows)
            self.num_rows += rows.num_rows
            while self.num_rows >= self._most + max(self._most // 8, 1):
                items += self._stretch(run, self._most)
            return items
        if run.ends_window:
            if self.num_rows:
                items += self._stretch(run, self.num_rows)
            self._number = self._skip = 0
        return [*items, (run, None)]

    def _stretch(self, run: Any, count: int) -> list[Read]:
        blocks, num_left = [], count
        while num_left:
            block = self._blocks.pop(0)
            if block.num_rows > num_left:
                self._blocks.insert(0, block.part(num_left, block.num_rows))
                first = block.part(0, num_left)
                block = first._replace(missing=block.missing, others=block.others)
            blocks.append(block)
            num_left -= block.num_rows
        seed = (*(run.seed or ()), *((self._number,) if self._number else ()))
        order = np.random.default_rng(seed).permutation(count)[self._skip :]
        self._skip = max(self._skip - count, 0)
        self.num_rows, self._number = self.num_rows - count, self._number + 1
        return [(run, piece) for piece in in_order(blocks, order)]


def in_order(blocks: Sequence[Rows], order: Int64s) -> list[Rows]:
    """Return rows of blocks in an order, in pieces; the blocks lose their columns."""
    if not len(order):
        return []
    sizes = np.array([block.num_rows for block in blocks])
    numbers = np.repeat(np.arange(len(blocks), dtype=np.int32), sizes)[order]
    rows = (order - to_offsets(sizes)[numbers]).astype(np.int32)
    starts = range(0, len(order), PIECE_ROWS)
    bounds = [*starts, len(order)]
    missing, others = joined_counts(blocks)
    pieces = [Rows(min(PIECE_ROWS, len(order) - s), [], [], [], {}, {}) for s in starts]
    for _ in range(len(blocks[0].ids)):
        parts = [block.ids.pop() for block in blocks]
        taken = take_ids(parts, Order(numbers, rows), bounds)
        for piece, ids in zip(pieces, taken, strict=True):
            piece.ids.append(ids)
    for name in ("labels", "dense"):
        columns = [getattr(block, name) for block in blocks]
        targets = [getattr(piece, name) for piece in pieces]
        _put_in_order(columns, order, targets)
    for piece in pieces:
        for columns in (piece.ids, piece.labels, piece.dense):
            columns.reverse()
    return [pieces[0]._replace(missing=missing, others=others), *pieces[1:]]


def _put_in_order(
    columns: Sequence[list[Floats]], order: Int64s, pieces: Sequence[list[Floats]]
) -> None:
    for _ in range(len(columns[0])):
        numbers = np.concatenate([of_block.pop() for of_block in columns])[order]
        for number, piece in enumerate(pieces):
            start = number * PIECE_ROWS
            piece.append(numbers[start : start + PIECE_ROWS])
