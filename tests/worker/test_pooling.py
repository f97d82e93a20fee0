import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.worker.bags import POOLINGS
from persia_torchrec.worker.pooling import add_gradients, pool
from tests import reference

POOLING = st.sampled_from(POOLINGS)


@st.composite
def bags(draw):
    """Rows, which of them each id is, ids a bag, and the columns to pool into."""
    num_rows, dim = draw(st.integers(1, 5)), draw(st.sampled_from([1, 3, 8, 17]))
    lengths = draw(st.lists(st.integers(0, 4), max_size=6))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((num_rows, dim)).astype(np.float32)
    inverse = rng.integers(0, num_rows, sum(lengths), dtype=np.int32)
    first = draw(st.integers(0, 3))
    return rows, inverse, np.array(lengths, dtype=np.int32), slice(first, first + dim)


@given(bags(), POOLING)
def test_bags_are_pooled_as_the_reference_says(bags, pooling):
    rows, inverse, lengths, columns = bags
    out = np.full((len(lengths), columns.stop + 2), 7, dtype=np.float32)
    pool(rows, inverse, lengths, pooling, out, columns)
    expected = reference.pool(rows[inverse], lengths, pooling)
    np.testing.assert_allclose(out[:, columns], expected, rtol=1e-5, atol=1e-6)
    assert (out[:, : columns.start] == 7).all()
    assert (out[:, columns.stop :] == 7).all()


@given(bags(), POOLING)
def test_gradients_are_summed_over_every_occurrence_of_a_row(bags, pooling):
    rows, inverse, lengths, columns = bags
    rng = np.random.default_rng(len(inverse))
    grads = rng.standard_normal((len(lengths), columns.stop + 1)).astype(np.float32)
    out = np.ones_like(rows)
    add_gradients(grads, columns, inverse, lengths, pooling, out)
    expected = np.ones(rows.shape)
    bag_of = np.repeat(np.arange(len(lengths)), lengths)
    for row, b in zip(inverse, bag_of, strict=True):
        expected[row] += reference.scale(lengths[b], pooling) * grads[b, columns]
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("pooling", "pooled"),
    [
        ("sum", [[4, 8], [0, 0], [1, 2]]),
        ("mean", [[1, 2], [0, 0], [1, 2]]),
        ("sqrt", [[2, 4], [0, 0], [1, 2]]),
    ],
)
def test_an_id_counts_as_often_as_it_comes_and_an_empty_bag_gives_zeros(
    pooling, pooled
):
    rows = np.array([[1, 2]], dtype=np.float32)
    inverse = np.zeros(5, dtype=np.int32)
    lengths = np.array([4, 0, 1], dtype=np.int32)
    out = np.full((3, 2), np.nan, dtype=np.float32)
    pool(rows, inverse, lengths, pooling, out, slice(0, 2))
    assert out.tolist() == pooled
