import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.store.initializer import fill_uniform
from tests import reference
from tests.strategies import ids

bounds = st.sampled_from([(-0.01, 0.01), (0.0, 1.0), (-0.3, 0.7), (2.0, 2.0)])


def draw(seed, dim, lower=-0.01, upper=0.01):
    weights = np.full(dim, np.nan, dtype=np.float32)
    fill_uniform(weights, np.uint64(seed), np.float32(lower), np.float32(upper))
    return weights


@pytest.mark.parametrize(
    ("id_", "weights"),
    [
        (
            1,
            "0.00426739 -0.00922812 -0.00636297 -0.00313312 "
            "-0.00048149 0.00916773 -0.00777778 -0.00177703",
        ),
        (
            2,
            "0.00504894 -0.00550625 0.0075211 -0.00308594 "
            "0.00175871 0.00645391 -0.00758418 -0.00909802",
        ),
    ],
)
def test_initial_weights_are_persias(id_, weights):
    assert np.round(draw(id_, 8), 8).tolist() == pytest.approx(
        [float(weight) for weight in weights.split()], abs=1e-9
    )


@given(ids, st.integers(1, 70), bounds)
def test_every_bit_of_the_weights_follows_from_the_id(id_, dim, bounds):
    # On any machine: a multiply and an add that are fused would round otherwise.
    expected = reference.uniform_weights(id_, dim, *bounds)
    assert draw(id_, dim, *bounds).tobytes() == expected.tobytes()


@given(ids, st.integers(1, 70), st.integers(1, 70))
def test_the_weights_of_a_shorter_row_begin_those_of_a_longer_one(id_, dim, longer):
    longer = max(dim, longer)
    assert draw(id_, longer)[:dim].tobytes() == draw(id_, dim).tobytes()


def test_weights_fill_their_range_evenly():
    weights = np.concatenate([draw(id_, 64, -1.0, 3.0) for id_ in range(1000)])
    assert weights.min() >= -1
    assert weights.max() < 3
    shares = np.histogram(weights, bins=8, range=(-1, 3))[0] / len(weights)
    assert np.abs(shares - 1 / 8).max() < 0.01
