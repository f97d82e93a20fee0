import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.lookup.bags import POOLINGS
from persia_torchrec.lookup.pooling import FeatureBags, weighted_gradients
from tests.support import reference

POOLING = st.sampled_from(POOLINGS)


@st.composite
def bags(draw):
    """Rows, weights, which row each id is, and ids a bag."""
    num_rows, dim = draw(st.integers(1, 5)), draw(st.sampled_from([1, 3, 8, 17]))
    lengths = draw(st.lists(st.integers(0, 4), max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = rng.standard_normal((num_rows, dim)).astype(np.float32)
    weights = rng.standard_normal(sum(lengths)).astype(np.float32)
    inverse = rng.integers(0, num_rows, sum(lengths), dtype=np.int32)
    return rows, weights, inverse, np.array(lengths, dtype=np.int32)


@given(bags(), POOLING)
def test_the_gradients_are_those_of_the_formula(bags, pooling):
    rows, weights, inverse, lengths = bags
    rng = np.random.default_rng(len(inverse))
    grads = rng.standard_normal((len(lengths), rows.shape[1])).astype(np.float32)
    feature = FeatureBags(rows, inverse, lengths, pooling)
    of_rows, of_weights = weighted_gradients(grads, feature, weights)
    expected_of_rows, expected_of_weights = np.zeros(rows.shape), np.zeros(len(inverse))
    bag_of = np.repeat(np.arange(len(lengths)), lengths)
    for j, (row, b) in enumerate(zip(inverse, bag_of, strict=True)):
        grad = reference.scale(lengths[b], pooling) * grads[b].astype(np.float64)
        expected_of_rows[row] += weights[j] * grad
        expected_of_weights[j] = rows[row] @ grad
    np.testing.assert_allclose(of_rows, expected_of_rows, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(of_weights, expected_of_weights, rtol=1e-4, atol=1e-5)
