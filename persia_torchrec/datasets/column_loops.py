"""Loops over the values of a column.

Dimension key:
    N: rows of a column
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from persia_torchrec.jit.compiled import compiled
from persia_torchrec.jit.intrinsics import (
    copy_bytes,
    load_u32,
    load_u64,
    prefetch,
    store_u32,
    store_u64,
)

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

_THREE, _SEVEN = np.uint64(3), np.uint64(7)

SLACK = 6
"""Elements that :func:`copy_rows` may write beyond the end of the last row."""

_SLACK, _PAGE, _AHEAD = np.int64(SLACK), np.uint64(4096), 8
_ONE, _FOUR, _EIGHT = np.uint64(1), np.uint64(4), np.uint64(8)


@compiled
def find_rows(
    table: UInt64s, blocks: Int32s, rows: Int32s, starts: UInt64s, offsets: Int64s
) -> None:
    """Find the values of rows of several blocks, of several values each.

    Args:
        table: of each block the address of its first row's offset, the bytes of an
            offset (0: each row has one value), the address of the value with offset 0,
            and the bytes of a value, uint64 ``(blocks, 4)``.
        blocks: the block of each row that is wanted, int32 ``(N,)``.
        rows: which of its rows, int32 ``(N,)``.
        starts: written: addresses of their values, uint64 ``(N,)``.
        offsets: written: where each begins among the values of all of them, and the
            end, int64 ``(N + 1,)``.
    """
    total = np.int64(0)
    offsets[0] = 0
    for i in range(len(rows)):
        block, row = blocks[i], np.uint64(rows[i])
        at, width = table[block, 0], table[block, 1]
        if width == _FOUR:
            start = load_u32(at + row * _FOUR)
            stop = load_u32(at + (row + _ONE) * _FOUR)
        elif width == _EIGHT:
            start = load_u64(at + row * _EIGHT)
            stop = load_u64(at + (row + _ONE) * _EIGHT)
        else:
            start, stop = row, row + _ONE
        starts[i] = table[block, 2] + start * table[block, 3]
        total += np.int64(stop - start)
        offsets[i + 1] = total


@compiled
def copy_rows(starts: UInt64s, offsets: Int64s, num_bytes: int, taken: int) -> None:
    """Copy the values of rows from anywhere, one row's after the other's.

    Up to ``SLACK`` values are copied without a loop, whose end a processor cannot
    predict: those after a row are written over by the next one. They are read from the
    page of the row's first one, so that they are there.

    Args:
        starts: addresses, uint64 ``(N,)``.
        offsets: where each begins among the values, and the end, int64 ``(N + 1,)``.
        num_bytes: of a value, 4 or 8.
        taken: address of the copies, with space for ``SLACK`` more of them.
    """
    width, first = np.uint64(num_bytes), offsets[0]
    most = _PAGE - width * np.uint64(SLACK)
    for i in range(len(starts)):
        if i + _AHEAD < len(starts):
            prefetch(starts[i + _AHEAD])
        source = starts[i]
        target = np.uint64(taken) + np.uint64(offsets[i] - first) * width
        size = offsets[i + 1] - offsets[i]
        if size > _SLACK or source % _PAGE > most:
            copy_bytes(target, source, np.uint64(size) * width)
        elif width == _EIGHT:
            for j in range(SLACK):
                step = np.uint64(j) * _EIGHT
                store_u64(target + step, load_u64(source + step))
        else:
            for j in range(SLACK):
                step = np.uint64(j) * _FOUR
                store_u32(target + step, load_u32(source + step))


@compiled
def to_float32(
    values: npt.NDArray[Any],
    bits: npt.NDArray[np.uint8],
    first_bit: int,
    fill: float,
    found: npt.NDArray[np.float32],
) -> tuple[int, int]:
    """Convert numbers; one that is null or NaN is missing.

    Args:
        values: numbers ``(N,)``, not to be written to.
        bits: one for each value, 0: it is null; likewise. Empty: none is.
        first_bit: that of the first value.
        fill: what stands for a missing one.
        found: written: float32 ``(N,)``.

    Returns:
        How many are missing, and how many are not finite in float32.
    """
    num_missing, num_bad, has_nulls = 0, 0, len(bits) > 0
    for i in range(len(values)):
        at = np.uint64(first_bit + i)
        is_null = has_nulls and not (bits[at >> _THREE] >> (at & _SEVEN)) & 1
        value = np.float64(values[i])
        if is_null or np.isnan(value):
            num_missing += 1
            value = np.float64(fill)
        number = np.float32(value)
        num_bad += not np.isfinite(number)
        found[i] = number
    return num_missing, num_bad
