"""Rows cut into steps and their parts."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from persia_torchrec.datasets.columns import Rows
from persia_torchrec.datasets.steps import Settings, in_steps
from persia_torchrec.errors import ConfigError


def settings_of(**changes):
    defaults = Settings(4, 1, 0, False, 1, 0, 0, 1, 1, None, None)
    return defaults._replace(**changes)


def blocks_of(lengths):
    """Yield blocks whose label is the number of the row."""
    first = 0
    for length in lengths:
        numbers = np.arange(first, first + length, dtype=np.float32)
        yield Rows(length, [], [numbers], [], {}, {})
        first += length


def rows_of(spans):
    parts = [span.block.labels[0][span.start : span.stop].tolist() for span in spans]
    return [number for part in parts for number in part]


@given(st.lists(st.integers(0, 9)), st.integers(1, 9), st.integers(1, 3), st.booleans())
def test_steps_have_all_rows_in_order_and_parts_of_like_size(lengths, size, num, drops):
    assume(size >= num)
    wanted = settings_of(batch_size=size, micro_batches=num, drop_remainder=drops)
    left = sum(lengths) % size
    assume(drops or not sum(lengths) or sum(lengths) >= num)
    steps = [
        [rows_of(p) for p in step] for step in in_steps(blocks_of(lengths), wanted)
    ]
    assert all(len(step) == num for step in steps)
    seen = [row for step in steps for part in step for row in part]
    assert seen == [*range(sum(lengths) - (left if drops else 0))]
    for step in steps:
        sizes = [len(part) for part in step]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1


def test_a_rest_that_is_too_small_joins_the_step_before():
    steps = in_steps(blocks_of([9]), settings_of(min_batch_size=2))
    assert [len(rows_of(step[0])) for step in steps] == [4, 5]
    with pytest.raises(ConfigError, match=r"must have at least 2 rows.*Received: 1 "):
        list(in_steps(blocks_of([1]), settings_of(min_batch_size=2)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partition_index": 1}, r"partition_index must be in \[0, 1\)"),
        ({"min_batch_size": 5}, "min_batch_size must be at most"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"micro_batches": 0}, "micro_batches"),
    ],
)
def test_a_setting_that_is_out_of_its_range_is_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        settings_of(**changes).check()
