"""Initializers: the first weights of a row, drawn from its id alone.

The generator is PERSIA's: xoshiro256++ (Blackman and Vigna, "Scrambled Linear
Pseudorandom Number Generators", ACM TOMS 2021), its 256 bits of state filled by eight
steps of the generator PCG32 from the id, mixed with the table's seed; so the first
weights of ids that differ in bit 61 alone are slightly correlated (0.04). The kernels
use sums, products, quotients, square roots and frexp, in the order in which they are
written: unlike a C library's logarithm, these give the same bits everywhere.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from persia_torchrec.embedding import setting
from persia_torchrec.jit.kernel import Pointer

State = tuple[np.uint64, np.uint64, np.uint64, np.uint64]
"""Of the random number generator."""

_PCG_MUL = 6364136223846793005
_PCG_INC = 11634580027462260723
_32_BITS = np.uint64(2**32 - 1)
_S12, _S17, _S18, _S19, _S23, _S27, _S32, _S41, _S45, _S56, _S59 = (
    np.uint64(bits) for bits in (12, 17, 18, 19, 23, 27, 32, 41, 45, 56, 59)
)
_UNIT = np.float32(2.0**-23)
_UNIT_52 = 2.0**-52

# By what 1, 2, ... 8 steps of PCG's generator multiply, and what they add. With them,
# the steps of a row's seed need not wait for one another.
_MULS = tuple(np.uint64(_PCG_MUL**n % 2**64) for n in range(1, 9))
_INCS = tuple(
    np.uint64(_PCG_INC * sum(_PCG_MUL**k for k in range(n)) % 2**64)
    for n in range(1, 9)
)


def _draw_uniform(p: Pointer, seed: np.uint64, w: Pointer, dim: int) -> None:
    lower = p[0]
    width = p[1] - lower
    state = _seed_state(seed)
    for d in range(dim):
        word, state = _next_word(state)
        w[d] = np.float32(np.int64(word >> _S41)) * _UNIT * width + lower


def _draw_normal(p: Pointer, seed: np.uint64, w: Pointer, dim: int) -> None:
    """Draw within a bound, by the quantile of a probability of 52 bits in (0, 1).

    This is distributed as draws that are repeated until one is within the bound.
    """
    mean, std = np.float64(p[0]), np.float64(p[1])
    half, bound = np.float64(p[2]), np.float64(p[3])
    state = _seed_state(seed)
    for d in range(dim):
        word, state = _next_word(state)
        u = (np.float64(word >> _S12) + 0.5) * _UNIT_52
        w[d] = np.float32(mean + std * truncated_normal_quantile(u, half, bound))


def _draw_constant(p: Pointer, seed: np.uint64, w: Pointer, dim: int) -> None:
    value = p[0]
    for d in range(dim):
        w[d] = value


def _draw_quantile(p: Pointer, seed: np.uint64, w: Pointer, dim: int) -> None:
    """Draw from the numbers of :meth:`Quantiles.fill_numbers`, by ``p[1]``.

    Of equal probability: 0, between two values; 1, a value. Of those that stand behind
    the values: 2, between two; 3, a value.
    """
    num, how = np.int64(p[0]), np.int64(p[1])
    is_discrete, has_counts = how % 2 == 1, how >= 2
    state = _seed_state(seed)
    for d in range(dim):
        word, state = _next_word(state)
        u = np.float32(np.int64(word >> _S41)) * _UNIT
        if has_counts:
            w[d] = _counted_quantile(p, word, num, is_discrete)
        elif is_discrete:
            w[d] = p[2 + np.int64(u * np.float32(num))]
        else:
            place = u * np.float32(num - 1)
            at = np.int64(place)
            below = p[2 + at]
            w[d] = below + (place - np.float32(at)) * (p[3 + at] - below)


def _counted_quantile(
    p: Pointer, word: np.uint64, num: np.int64, is_discrete: bool
) -> np.float32:
    """Return the quantile of a random word, by sums of counts behind the values.

    They are whole numbers up to 2**24, which float32 has. What follows them tells for
    each value of the first 8 bits between which sums it is: often of one interval.
    """
    num_counts = num if is_discrete else num - 1
    first = 2 + num
    guide = first + num_counts + np.int64(word >> _S56)
    low, high = np.int64(p[guide]), np.int64(p[guide + 1])
    total = np.float64(p[first + num_counts - 1])
    place = (np.float64(word >> _S12) + 0.5) * _UNIT_52 * total
    while low < high:
        middle = (low + high) // 2
        if place < np.float64(p[first + middle]):
            high = middle
        else:
            low = middle + 1
    if is_discrete:
        return np.float32(p[2 + low])
    begin = np.float64(p[first + low - 1]) if low > 0 else 0.0
    fraction = (place - begin) / (np.float64(p[first + low]) - begin)
    below, above = np.float64(p[2 + low]), np.float64(p[3 + low])
    return np.float32(below + fraction * (above - below))


def _next_word(state: State) -> tuple[np.uint64, State]:
    """Return 64 random bits, and the generator's next state."""
    s0, s1, s2, s3 = state
    total = s0 + s3
    word = ((total << _S23) | (total >> _S41)) + s0
    shifted = s1 << _S17
    s2 ^= s0
    s3 ^= s1
    s1 ^= s2
    s0 ^= s3
    s2 ^= shifted
    s3 = (s3 << _S45) | (s3 >> _S19)
    return word, (s0, s1, s2, s3)


def _seed_state(seed: np.uint64) -> State:
    """Return the generator's first state: eight outputs of PCG32, two per word."""
    return (
        _pcg_output(seed, 0) | (_pcg_output(seed, 1) << _S32),
        _pcg_output(seed, 2) | (_pcg_output(seed, 3) << _S32),
        _pcg_output(seed, 4) | (_pcg_output(seed, 5) << _S32),
        _pcg_output(seed, 6) | (_pcg_output(seed, 7) << _S32),
    )


def _pcg_output(seed: np.uint64, step: int) -> np.uint64:
    """Return an output of PCG32, computed by jumping its stream ahead."""
    state = seed * _MULS[step] + _INCS[step]
    bits = (((state >> _S18) ^ state) >> _S27) & _32_BITS
    # Rotate 32 bits to the right.
    return ((bits | (bits << _S32)) >> (state >> _S59)) & _32_BITS


# ln 2 in two parts, of which the first has 32 bits: its product with an exponent is
# exact.
_LN2_HIGH = 2977044471 / 2**32
_LN2_LOW = 1.9082149292705877e-10
_ROOT_HALF = math.sqrt(0.5)

_ODD_RECIPROCALS = tuple(1.0 / n for n in range(23, 0, -2))

# Numerators and denominators of the normal quantile, highest power first: PPND16 of
# Algorithm AS 241 (Wichura, "The Percentage Points of the Normal Distribution", Applied
# Statistics 1988).
# fmt: off
_CENTRE = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853,
     45921.953931549871457, 13731.693765509461125, 1971.5909503065514427,
     133.14166789178437745, 3.387132872796366608),
    (5226.495278852545925, 28729.085735721942674, 39307.89580009271061,
     21213.794301586595867, 5394.1960214247511077, 687.1870074920579083,
     42.313330701600911252, 1.0),
)
_SIDE = (
    (7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177,
     1.27045825245236838258, 3.64784832476320460504, 5.7694972214606914055,
     4.6303378461565452959, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966,
     0.14810397642748007459, 0.68976733498510000455, 1.6763848301838038494,
     2.05319162663775882187, 1.0),
)
_TAIL = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 0.0012426609473880784386,
     0.026532189526576123093, 0.29656057182850489123, 1.7848265399172913358,
     5.4637849111641143699, 6.6579046435011037772),
    (2.04426310338993978564e-15, 1.4215117583164458887e-7, 1.8463183175100546818e-5,
     7.868691311456132591e-4, 0.0148753612908506148525, 0.13692988092273580531,
     0.59983220655588793769, 1.0),
)
# fmt: on


def logarithm(x: float) -> float:
    """Return the natural logarithm of a number ``> 0``.

    ``x = m * 2**e`` with m within a factor sqrt(2) of 1, and
    ``ln m = 2 (s + s**3 / 3 + s**5 / 5 + ...)`` with ``s = (m - 1) / (m + 1)``.
    """
    m, e = math.frexp(x)
    if m < _ROOT_HALF:
        m *= 2.0
        e -= 1
    s = (m - 1.0) / (m + 1.0)
    series = 2.0 * s * _polynomial(_ODD_RECIPROCALS, s * s)
    return e * _LN2_HIGH + (series + e * _LN2_LOW)


def normal_quantile(p: float) -> float:
    """Return the z below which the standard normal distribution has probability p."""
    q = p - 0.5
    if abs(q) <= 0.425:
        return q * _ratio(_CENTRE, 0.180625 - q * q)
    r = math.sqrt(-logarithm(p if q < 0.0 else 1.0 - p))
    z = _ratio(_SIDE, r - 1.6) if r <= 5.0 else _ratio(_TAIL, r - 5.0)
    return -z if q < 0.0 else z


def truncated_normal_quantile(u: float, half: float, bound: float) -> float:
    """Return the quantile of ``u`` in (0, 1) without the tails beyond ``bound``."""
    z = normal_quantile(0.5 + half * (2.0 * u - 1.0))
    return min(max(z, -bound), bound)


def half_probability(bound: float) -> float:
    """Return the probability of the standard normal in [0, bound], by bisection."""
    low, high = 0.0, 0.5
    for _ in range(52):
        middle = 0.5 * (low + high)
        if normal_quantile(0.5 - middle) > -bound:
            low = middle
        else:
            high = middle
    return high


def _ratio(polynomials: tuple[tuple[float, ...], tuple[float, ...]], x: float) -> float:
    return _polynomial(polynomials[0], x) / _polynomial(polynomials[1], x)


def _polynomial(coefficients: tuple[float, ...], x: float) -> float:
    """Return the polynomial whose coefficients are given, highest power first."""
    value = 0.0
    for coefficient in coefficients:
        value = value * x + coefficient
    return value


@dataclass(frozen=True)
class Uniform(setting.Initializer):
    """Draw each weight uniformly from ``[lower, upper)``, as PERSIA does.

    If both bounds are equal, they are every weight. ::

        w = u * (upper - lower) + lower          u in [0, 1), 23 bits; all in float32
    """

    kind: ClassVar[str] = "uniform"
    kernel = staticmethod(_draw_uniform)

    lower: setting.Finite = -0.01
    upper: setting.Finite = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("lower", self.lower <= self.upper, f"<= upper ({self.upper})")

    def fill_numbers(self, dim: int) -> tuple[float, ...]:
        """Return lower, upper."""
        return self.lower, self.upper


@dataclass(frozen=True)
class InverseSqrtDim(setting.Initializer):
    """Draw each weight uniformly from ``[-1 / sqrt(dim), 1 / sqrt(dim))``.

    The weights of a row of any dim then have the same sum of squares: 1/3 on average.
    """

    kind: ClassVar[str] = "inverse_sqrt_dim"
    kernel = staticmethod(_draw_uniform)

    def fill_numbers(self, dim: int) -> tuple[float, ...]:
        """Return lower, upper."""
        return -1 / math.sqrt(dim), 1 / math.sqrt(dim)


@dataclass(frozen=True)
class Normal(setting.Initializer):
    """Draw each weight from the normal distribution of deviation ``std``, ``>= 0``."""

    kind: ClassVar[str] = "normal"
    kernel = staticmethod(_draw_normal)

    mean: setting.Finite = 0.0
    std: setting.NonNegative = 0.01

    def fill_numbers(self, dim: int) -> tuple[float, ...]:
        """Return mean, std; half of all probability, within no bound."""
        return self.mean, self.std, 0.5, math.inf


@dataclass(frozen=True)
class TruncatedNormal(setting.Initializer):
    """Draw each weight from the normal distribution without its tails.

    The density is the normal one within ``mean +- bound * std`` and 0 outside: what
    drawing again until a weight falls inside gives, as TensorFlow's
    ``truncated_normal`` and ``torch.nn.init.trunc_normal_`` do. ``std`` (``>= 0``) is
    that of the normal distribution before its tails are cut ``bound`` (``> 0``)
    standard deviations from ``mean``; the weights' own is smaller (0.88 of it at
    ``bound=2``).
    """

    kind: ClassVar[str] = "truncated_normal"
    kernel = staticmethod(_draw_normal)

    mean: setting.Finite = 0.0
    std: setting.NonNegative = 0.01
    bound: setting.Positive = 2.0

    def fill_numbers(self, dim: int) -> tuple[float, ...]:
        """Return mean, std, the probability of one side, bound."""
        return self.mean, self.std, half_probability(self.bound), self.bound


@dataclass(frozen=True)
class Constant(setting.Initializer):
    """Make each weight the same number."""

    kind: ClassVar[str] = "constant"
    kernel = staticmethod(_draw_constant)

    value: setting.Finite

    def fill_numbers(self, dim: int) -> tuple[float, ...]:
        """Return the value."""
        return (self.value,)


@dataclass(frozen=True)
class Quantiles(setting.Initializer):
    """Draw each weight from the distribution of a sample, by its quantiles.

    Args:
        values: 2 to 65,536 in ascending order.
        is_discrete: whether a weight is one of them; else it lies uniformly between two
            neighbours.
        counts: how often each value, or an interval between two, is drawn, of all that
            the counts sum up to, at most 2**24: a probability. By default all are
            equally probable.
    """

    kind: ClassVar[str] = "quantiles"
    kernel = staticmethod(_draw_quantile)

    values: tuple[float, ...]
    is_discrete: setting.Flag = False
    counts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))
        object.__setattr__(self, "counts", tuple(self.counts))
        super().__post_init__()
        must = "2 to 65,536 finite numbers in ascending order"
        values = np.array(self.values, dtype=np.float64)
        holds = 2 <= len(values) <= 2**16 and bool(np.isfinite(values).all())
        holds = holds and bool((np.diff(values) >= 0).all())
        self._require("values", holds, must)
        num = len(values) if self.is_discrete else len(values) - 1
        are_whole = all(type(count) is int and count > 0 for count in self.counts)
        holds = are_whole and len(self.counts) == num and sum(self.counts) <= 2**24
        must = f"none, or {num} whole numbers > 0 whose sum is at most 2**24"
        self._require("counts", holds or not self.counts, must)

    def __repr__(self) -> str:
        return (
            f"Quantiles({len(self.values)} of a sample in [{self.values[0]:g}, "
            f"{self.values[-1]:g}])"
        )

    def to_json(self) -> dict[str, object]:
        """Describe it; earlier versions do not know counts."""
        described = super().to_json()
        if not self.counts:
            del described["counts"]
        return described

    def fill_numbers(self, dim: int) -> tuple[float, ...]:
        """Return how many values there are, how they are drawn, and they.

        With counts, their sums follow, and the guide of :func:`_counted_quantile`.
        """
        num = len(self.values)
        if not self.counts:
            return (num, float(self.is_discrete), *self.values)
        sums = np.cumsum(self.counts)
        cells = np.arange(257) * (float(sums[-1]) / 256)
        guide = np.searchsorted(sums, cells, side="right").clip(0, len(sums) - 1)
        how = 3.0 if self.is_discrete else 2.0
        return (num, how, *self.values, *sums.tolist(), *guide.tolist())


INITIALIZERS: setting.Registry[setting.Initializer] = setting.Registry(
    setting.Initializer,
    Uniform,
    InverseSqrtDim,
    Normal,
    TruncatedNormal,
    Constant,
    Quantiles,
)
"""Every initializer that servers can apply."""
