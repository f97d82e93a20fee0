import hashlib
import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec import Constant, InverseSqrtDim, Normal, TruncatedNormal, Uniform
from persia_torchrec.embedding.initializer import INITIALIZERS, Quantiles
from persia_torchrec.errors import ConfigError
from tests.support import reference
from tests.support.kernels import draw
from tests.support.strategies import ids

pytestmark = pytest.mark.slow

# Numbers that float32 holds exactly, so that the reference in double has the same.
uniforms = st.sampled_from(
    [Uniform(), Uniform(0.0, 1.0), Uniform(-0.3, 0.7), Uniform(2.0, 2.0)]
)
others = st.sampled_from(
    [
        InverseSqrtDim(),
        Normal(),
        Normal(0.5, 0.25),
        TruncatedNormal(),
        TruncatedNormal(-1.0, 0.5, 0.125),
        TruncatedNormal(0.0, 1.0, 40.0),
        TruncatedNormal(0.0, 1.0, 2.0**-20),
        Constant(-0.5),
        Quantiles((-1.0, 0.0, 0.0, 4.0), counts=(2**20, 5, 1)),
        Quantiles((0.0, 0.25, 0.5, 7.0), True, (3, 1, 2**23, 1)),
    ]
)


def draw_many(initializer):
    """Return 100,000 weights, sorted."""
    rows = [draw(id_, 50, initializer) for id_ in range(2000)]
    return np.sort(np.concatenate(rows).astype(np.float64))


def largest_gap(sorted_weights, share_below):
    """Return Kolmogorov and Smirnov's distance to a continuous distribution."""
    num = len(sorted_weights)
    shares = np.array([share_below(weight) for weight in sorted_weights.tolist()])
    above = np.arange(1, num + 1) / num - shares
    below = shares - np.arange(num) / num
    return max(above.max(), below.max())


# Of 100,000 draws from the right distribution, one in 20,000 times further away.
CLOSE = 2.3 / math.sqrt(100_000)


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
    assert np.round(draw(id_, 8, Uniform()), 8).tolist() == pytest.approx(
        [float(weight) for weight in weights.split()], abs=1e-9
    )


@given(ids, st.integers(1, 70), uniforms)
def test_every_bit_of_uniform_weights_follows_from_the_id(id_, dim, uniform):
    # On any machine: a multiply and an add that are fused would round otherwise.
    expected = reference.initial_weights(uniform, id_, dim)
    assert draw(id_, dim, uniform).tobytes() == expected.tobytes()


@pytest.mark.slow
@given(ids, st.integers(1, 70), others)
def test_weights_of_every_initializer_equal_those_of_the_reference(
    id_, dim, initializer
):
    expected = reference.initial_weights(initializer, id_, dim)
    np.testing.assert_allclose(draw(id_, dim, initializer), expected, 1e-5, 1e-8)


@given(ids, st.integers(1, 70), st.integers(1, 70), uniforms | others)
def test_the_weights_of_a_shorter_row_begin_those_of_a_longer_one(
    id_, dim, longer, initializer
):
    if isinstance(initializer, InverseSqrtDim):
        return  # its range depends on the dim
    longer = max(dim, longer)
    whole = draw(id_, longer, initializer)
    assert whole[:dim].tobytes() == draw(id_, dim, initializer).tobytes()


@pytest.mark.slow
@given(
    st.lists(st.floats(-2, 2, width=16), min_size=2, max_size=400),
    st.data(),
    st.booleans(),
    st.integers(0, 100),
)
def test_quantiles_are_drawn_as_often_as_their_counts_say(
    values, data, is_discrete, seed
):
    num = len(values) - (not is_discrete)
    counts = st.integers(1, 9) | st.integers(1, 2**15)
    counts = data.draw(st.lists(counts, min_size=num, max_size=num))
    drawn_by = Quantiles(tuple(sorted(values)), is_discrete, tuple(counts))
    assert INITIALIZERS.from_json(drawn_by.to_json()) == drawn_by
    expected = reference.initial_weights(drawn_by, seed, 40)
    np.testing.assert_allclose(draw(seed, 40, drawn_by), expected, 1e-6, 1e-6)


def test_values_have_the_probabilities_of_their_counts():
    weights = draw_many(Quantiles((0.0, 1.0, 2.0), True, (900_000, 90_000, 10_000)))
    found = [np.mean(weights == value) for value in (0, 1, 2)]
    assert found == pytest.approx([0.9, 0.09, 0.01], abs=0.003)


@pytest.mark.parametrize(
    ("counts", "is_discrete"),
    [((1, 2, 3), False), ((1, 2), True), ((0, 1), False), ((2**24, 1), False)],
)
def test_counts_that_fit_no_values_are_an_error(counts, is_discrete):
    with pytest.raises(ConfigError, match=r"counts must be none, or . whole numbers"):
        Quantiles((0.0, 1.0, 2.0), is_discrete, counts)


def test_weights_fill_their_range_evenly():
    weights = draw_many(Uniform(-1.0, 3.0))
    assert weights.min() >= -1
    assert weights.max() < 3
    assert largest_gap(weights, lambda w: (w + 1) / 4) < CLOSE


def test_the_range_of_weights_follows_from_the_dim():
    weights = np.concatenate([draw(id_, 16, InverseSqrtDim()) for id_ in range(5000)])
    assert weights.min() >= -0.25
    assert weights.max() < 0.25
    assert np.square(weights).mean() * 16 == pytest.approx(1 / 3, abs=0.005)


def test_normal_weights_are_distributed_so():
    weights = draw_many(Normal(0.5, 0.1))
    assert weights.mean() == pytest.approx(0.5, abs=4 * 0.1 / math.sqrt(100_000))
    assert weights.std() == pytest.approx(0.1, rel=0.01)
    assert largest_gap(weights, NormalDist(0.5, 0.1).cdf) < CLOSE
    assert 0.5 + 0.1 * 4 < weights.max() < 0.5 + 0.1 * 6


@pytest.mark.parametrize("bound", [2.0, 0.5])
def test_truncated_normal_weights_stay_within_their_bound(bound):
    weights = draw_many(TruncatedNormal(0.5, 0.25, bound))
    assert np.abs(weights - 0.5).max() <= 0.25 * bound
    normal = NormalDist(0.5, 0.25)
    low, high = normal.cdf(0.5 - 0.25 * bound), normal.cdf(0.5 + 0.25 * bound)
    assert largest_gap(weights, lambda w: (normal.cdf(w) - low) / (high - low)) < CLOSE
    # Cut off and not clamped: nothing piles up at the bound.
    assert np.count_nonzero(weights == weights.max()) < 3


def test_a_constant_is_every_weight():
    assert draw(7, 3, Constant(0.25)).tolist() == [0.25] * 3


@pytest.mark.parametrize("initializer", [Uniform(), Normal(), TruncatedNormal()])
def test_another_id_starts_with_other_weights(initializer):
    one, other = draw(1, 20, initializer), draw(2, 20, initializer)
    assert np.count_nonzero(one == other) < 10


@pytest.mark.parametrize(
    ("initializer", "digest"),
    [
        (Normal(0.5, 0.1), "ee7fbb58df22f3e9"),
        (TruncatedNormal(0.5, 0.1, 1.5), "57f1abb388c03f25"),
        (Quantiles((-1.0, -0.3, 0.1, 0.1, 2.5)), "fa1bdd903f4148b8"),
        (Quantiles((-1.0, -0.3, 0.1, 0.1, 2.5), True), "fb55151f94311207"),
    ],
)
def test_every_bit_is_the_same_on_every_machine(initializer, digest):
    rows = [draw(id_ << 40, 64, initializer).astype("<f4") for id_ in range(200)]
    found = hashlib.sha256(b"".join(row.tobytes() for row in rows)).hexdigest()
    assert found[:16] == digest


def test_quantiles_without_counts_are_described_as_earlier_versions_do():
    described = {"kind": "quantiles", "values": (0.0, 1.0), "is_discrete": True}
    assert INITIALIZERS.from_json(described).to_json() == described
