import math
from statistics import NormalDist

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from persia_torchrec.embedding import initializer
from persia_torchrec.embedding.initializer import half_probability
from persia_torchrec.jit.compiled import inlined_kernel

logarithm = inlined_kernel(initializer.logarithm, is_as_written=True)
normal_quantile = inlined_kernel(initializer.normal_quantile, is_as_written=True)
truncated_normal_quantile = inlined_kernel(
    initializer.truncated_normal_quantile, is_as_written=True
)

shares = st.floats(2.0**-60, 1 - 2.0**-53)
small_shares = st.floats(1, 700).map(lambda power: math.exp(-power))


def ulps(value, expected):
    return abs(value - expected) / math.ulp(expected)


@given(st.floats(1e-300, 1e300) | st.floats(0.5, 2.0) | shares)
@example(1.0)
@example(math.nextafter(1.0, 2.0))
@example(math.nextafter(1.0, 0.0))
@example(math.sqrt(0.5))
def test_the_logarithm_is_right_to_a_few_units_in_the_last_place(x):
    assert ulps(logarithm(x), math.log(x)) <= 4


@given(shares | small_shares)
@example(0.5)
@example(0.075)  # where one formula ends and the next begins
@example(math.exp(-25.0))
@example(2.0**-53)
@example(1 - 2.0**-53)
def test_the_normal_quantile_is_right(p):
    assert normal_quantile(p) == pytest.approx(NormalDist().inv_cdf(p), rel=1e-14)


@given(shares)
def test_the_normal_quantile_is_symmetric(p):
    if 1 - (1 - p) == p:
        assert normal_quantile(p) == -normal_quantile(1 - p)


@given(st.floats(0, 9) | st.floats(0, 1e-6))
@example(40.0)
def test_the_share_within_a_bound_is_right(bound):
    expected = 0.5 * math.erf(bound / math.sqrt(2))
    assert half_probability(bound) == pytest.approx(expected, abs=5e-16)


@given(st.floats(2.0**-53, 1 - 2.0**-53), st.floats(1e-6, 9))
@example(2.0**-53, 1e-3)
@example(1 - 2.0**-53, 1e-3)
def test_a_truncated_quantile_divides_what_is_within_the_bound(u, bound):
    half_share = half_probability(bound)
    z = truncated_normal_quantile(u, half_share, bound)
    assert z == initializer.truncated_normal_quantile(u, half_share, bound)
    assert -bound <= z <= bound
    expected = half_share * (2 * u - 1)
    assert 0.5 * math.erf(z / math.sqrt(2)) == pytest.approx(expected, abs=5e-16)


@pytest.mark.parametrize("u", [2.0**-53, 0.5, 1 - 2.0**-53])
def test_a_share_that_is_rounded_up_leads_over_no_bound(u):
    for bound in (1e-3, 0.5, 2.0):
        half_share = half_probability(bound) * (1 + 1e-6)
        z = truncated_normal_quantile(u, half_share, bound)
        assert z == math.copysign(bound, u - 0.5) * (u != 0.5)


@pytest.mark.parametrize(
    ("function", "x", "bits"),
    [
        (logarithm, 0.3, "-0x1.34378fcbda721p+0"),
        (logarithm, 1e300, "0x1.5963447f87fb5p+9"),
        (normal_quantile, 0.3, "-0x1.0c7e39582c5fap-1"),
        (normal_quantile, 0.01, "-0x1.29c5c4630ff0ep+1"),
        (normal_quantile, 1e-13, "-0x1.d652ace3a0130p+2"),
    ],
)
def test_every_bit_is_the_same_on_every_machine(function, x, bits):
    assert float(function(x)).hex() == bits
