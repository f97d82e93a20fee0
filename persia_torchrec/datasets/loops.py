"""Loops over the values of a column.

Dimension key:
    N: rows of a column
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from persia_torchrec.jit.compiled import compiled

Int64s = npt.NDArray[np.int64]

_THREE, _SEVEN = np.uint64(3), np.uint64(7)

SLACK = 6
"""How many elements :func:`take_ragged` may write beyond the end of the values."""


@compiled
def take_ragged(
    values: Int64s,
    starts: npt.NDArray[Any],
    offsets: Int64s,
    taken: Int64s,
) -> None:
    """Copy rows of several values each, from anywhere.

    Up to ``SLACK`` values are copied without a loop, whose end a processor cannot
    predict: those after a row are written over by the next one.

    Args:
        values: of all rows, not to be written to.
        starts: where each row that is wanted begins; likewise.
        offsets: where it is to begin, and the end of the last one; likewise.
        taken: written: their values, and ``SLACK`` more.
    """
    last = len(values) - SLACK
    for i in range(len(starts)):
        start, at = np.uint64(starts[i]), np.uint64(offsets[i])
        size = offsets[i + 1] - offsets[i]
        if size <= SLACK and starts[i] <= last:
            for j in range(SLACK):
                taken[at + np.uint64(j)] = values[start + np.uint64(j)]
        else:
            for j in range(size):
                taken[at + np.uint64(j)] = values[start + np.uint64(j)]


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
