"""Loops over the values of a column, beside what NumPy makes of them."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.datasets.column_loops import (
    SLACK,
    copy_rows,
    find_rows,
    to_float32,
)

NUMBERS = st.lists(
    st.none() | st.floats(width=64) | st.sampled_from([math.nan, math.inf, 1e300])
)


@given(NUMBERS, st.integers(0, 9), st.floats(-5, 5))
def test_a_null_and_a_nan_are_missing_and_what_float32_lacks_is_counted(
    numbers, first_bit, fill
):
    values = np.array([0.0 if one is None else one for one in numbers], np.float64)
    is_there = [True] * first_bit + [one is not None for one in numbers]
    bits = np.packbits(np.array(is_there, np.bool_), bitorder="little")
    found = np.empty(len(values), np.float32)
    counts = to_float32(values, bits, first_bit, fill, found)
    is_missing = [one is None or math.isnan(one) for one in numbers]
    with np.errstate(over="ignore"):
        due = np.where(is_missing, fill, values).astype(np.float32)
    np.testing.assert_array_equal(found, due)
    assert counts == (sum(is_missing), int((~np.isfinite(due)).sum()))


@given(st.lists(st.integers(0, 3 * SLACK), min_size=1), st.data())
def test_rows_are_copied_from_their_places_one_after_the_other(lengths, data):
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    values = np.arange(offsets[-1] + SLACK, dtype=np.int64)
    order = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1))
    table = np.array([[offsets.ctypes.data, 4, values.ctypes.data, 8]], np.uint64)
    rows = np.array(order, np.int32)
    starts, ends = np.empty(len(rows), np.uint64), np.empty(len(rows) + 1, np.int64)
    find_rows(table, np.zeros_like(rows), rows, starts, ends)
    due = [n for row in order for n in range(offsets[row], offsets[row + 1])]
    copies = np.empty(ends[-1] + SLACK, np.int64)
    copy_rows(starts, ends, 8, copies.ctypes.data)
    assert copies[: ends[-1]].tolist() == due
    assert np.diff(ends).tolist() == [lengths[row] for row in order]
