"""Floats in 16 bits: IEEE half (FP16), or the upper half of a float32 (BF16).

An update is often smaller than half of the last bit that is kept, and rounding to the
nearest would drop it each time. So updates use stochastic rounding, whose mean is
right (Gupta, Agrawal, Gopalakrishnan and Narayanan, "Deep Learning with Limited
Numerical Precision", ICML 2015), with random bits of the row's id and the step alone:

    P(up) = (w - below) / (above - below)

Initial weights and weights that are written round to the nearest, ties to even. A
weight beyond the largest half, 65504, becomes that; NaN stays NaN. The loops are free
of branches where they can be, so that they become vector instructions.
"""

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Exponents, Floats, Halves
from persia_torchrec.jit import intrinsics as cpu
from persia_torchrec.jit.compiled import compiled, compiled_as_written, inlined
from persia_torchrec.jit.intrinsics import Pointer

Bits = npt.NDArray[np.uint32]

FP32, FP16, BF16 = range(3)
"""How floats are stored; their numbers are those of ``TableSpec.weight_dtype``."""

LARGEST_EXPONENT = 126
"""2**126 and its inverse are float32 of full precision."""

_LARGEST_HALF = np.float32(65504)
_NORMAL_HALF = np.uint32(113 << 23)  # 2**-14, the smallest half of full precision
_SUBNORMAL = np.float32(2.0**24)
_INFINITY = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_NAN_BRAIN = np.uint32(0x7FC0)
_SIGN_16 = np.uint16(0x8000)
_NAN_16 = np.uint16(0x7E00)
_ONE_STEP = np.float32(1)
_UNIT = np.float32(2.0**-24)
_NO_BITS, _ALL_BITS = np.uint32(0), np.uint32(2**32 - 1)
_SMALLEST_HALF, _TWO = np.float32(2.0**-24), np.float32(2)
_HALF_ULP = np.uint32(2**12)  # of a half, in the bits of a float32
_HALF_BITS = np.uint32(2**13 - 1)
_KEPT_BITS = np.uint32(2**32 - 2**13)
_S8, _S15, _S16, _S23 = np.uint32(8), np.uint32(15), np.uint32(16), np.uint32(23)
_ONE = np.uint32(1)
_GOLDEN = np.uint32(0x9E3779B9)
_MIX_A = np.uint32(0x7FEB352D)
_MIX_B = np.uint32(0x846CA68B)


def largest_within(bound: np.float32, dtype: int) -> np.float32:
    """Return the largest number of ``dtype`` that is at most a bound, ``>= 0``."""
    if dtype == BF16:
        bits = np.float32(bound).view(np.uint32) & np.uint32(0xFFFF0000)
        return np.float32(bits.view(np.float32))
    if dtype == FP16:
        with np.errstate(over="ignore"):
            half = np.float16(bound)
        below = np.nextafter(half, np.float16(0))
        return np.float32(below if half > bound else half)
    return bound


@compiled
def widen(halves: Pointer, weights: Pointer, dim: np.int64, dtype: np.int64) -> None:
    """Read ``dim`` weights of ``FP16`` or ``BF16`` as float32."""
    if dtype == BF16:
        for d in range(dim):
            weights[d] = cpu.from_bits(np.uint32(np.uint32(halves[d]) << _S16))
    else:
        for d in range(dim):
            weights[d] = cpu.widen_half(halves[d])


@compiled
def round_to_nearest(
    weights: Pointer, halves: Pointer, dim: np.int64, dtype: np.int64
) -> None:
    """Write ``dim`` float32 weights as ``FP16`` or ``BF16``, rounded to the nearest."""
    for d in range(dim):
        w = weights[d]
        if dtype == BF16:
            bits = cpu.to_bits(w)
            halves[d] = _narrow_brain(bits, np.uint32(0x7FFF) + ((bits >> _S16) & _ONE))
        else:
            halves[d] = cpu.narrow_to_half(_clamp(w))


@compiled
def round_stochastically(
    weights: Pointer, halves: Pointer, dim: np.int64, dtype: np.int64, seed: np.uint64
) -> None:
    """Write ``dim`` float32 weights as ``FP16`` or ``BF16``, up or down at random.

    The same seed rounds the same weights the same way.
    """
    low_seed = np.uint32(seed ^ (seed >> np.uint64(32)))
    for d in range(dim):
        random = _mix(np.uint32(low_seed + np.uint32(d) * _GOLDEN))
        w = weights[d]
        if dtype == BF16:
            halves[d] = _narrow_brain(cpu.to_bits(w), random >> _S16)
            continue
        w = _clamp(w)
        bits = cpu.to_bits(w)
        if bits & _MAGNITUDE >= _NORMAL_HALF:
            if bits & _MAGNITUDE < _INFINITY:
                bits = np.uint32((bits + (random & _HALF_BITS)) & _KEPT_BITS)
            # Rounded up from the last half it would become an infinity.
            halves[d] = cpu.narrow_to_half(_clamp(cpu.from_bits(bits)))
        else:
            # Added to the steps, the random number would lose digits.
            steps = w * _SUBNORMAL
            below = np.floor(steps)
            if np.float32(random >> _S8) * _UNIT < steps - below:
                below += _ONE_STEP
            halves[d] = cpu.narrow_to_half(below / _SUBNORMAL)


@compiled_as_written
def to_bfloat16(bits_N: Bits) -> Halves:
    """Return float32, of these bits, as BF16, rounded to the nearest."""
    out_N = np.empty(len(bits_N), dtype=np.uint16)
    for i in range(len(bits_N)):
        bits = bits_N[i]
        out_N[i] = _narrow_brain(bits, np.uint32(0x7FFF) + ((bits >> _S16) & _ONE))
    return out_N


@compiled_as_written
def from_bfloat16(halves_N: Halves, out_N: Floats) -> None:
    """Write BF16 as float32."""
    for i in range(len(halves_N)):
        out_N[i] = cpu.from_bits(np.uint32(np.uint32(halves_N[i]) << _S16))


@compiled_as_written
def to_float16(values_ND: Floats, halves_ND: Halves, exponents_N: Exponents) -> int:
    """Write float32 as FP16, each row times 2 to the power of an exponent of its own.

    That is the largest with which no half overflows, at most 126. Infinities stay, as
    NaN does. Return how many numbers became 0 that were not.
    """
    num_zeroed = 0
    dim = np.uint64(values_ND.shape[1])
    values, halves = values_ND.reshape(-1), halves_ND.reshape(-1)
    for n in range(len(values_ND)):
        first = np.uint64(n) * dim
        largest, least = _NO_BITS, _ALL_BITS
        for d in range(dim):
            size = np.uint32(cpu.to_bits(values[first + d]) & _MAGNITUDE)
            largest, least = max(largest, size), min(least, np.uint32(size - _ONE))
        is_finite = largest < _INFINITY
        if not is_finite:
            largest = _NO_BITS
            for d in range(dim):
                size = np.uint32(cpu.to_bits(values[first + d]) & _MAGNITUDE)
                largest = max(largest, size if size < _INFINITY else _NO_BITS)
        # A float32 exponent of 127 + e becomes 127 + 15, after it is rounded to a half.
        exponent = 142 - np.int64(np.uint32(largest + _HALF_ULP) >> _S23)
        exponent = min(exponent, np.int64(LARGEST_EXPONENT))
        exponents_N[n] = exponent
        scale = _power_of_two(exponent)
        for d in range(dim):
            halves[first + d] = cpu.narrow_to_half(values[first + d] * scale)
        zeroed = cpu.to_bits(_power_of_two(-exponent) * _SMALLEST_HALF / _TWO)
        if is_finite and least >= zeroed:
            continue
        for d in range(dim):
            size = np.uint32(cpu.to_bits(values[first + d]) & _MAGNITUDE)
            num_zeroed += np.uint32(size - _ONE) < zeroed
            if size > _INFINITY:
                halves[first + d] = halves[first + d] & _SIGN_16 | _NAN_16
    return num_zeroed


@compiled_as_written
def from_float16(halves_ND: Halves, exponents_N: Exponents, out_ND: Floats) -> None:
    """Write what :func:`to_float16` wrote as float32."""
    dim = np.uint64(out_ND.shape[1])
    halves, out = halves_ND.reshape(-1), out_ND.reshape(-1)
    for n in range(len(out_ND)):
        first, scale = np.uint64(n) * dim, _power_of_two(-np.int64(exponents_N[n]))
        for d in range(dim):
            out[first + d] = cpu.widen_half(halves[first + d]) * scale


@inlined
def _power_of_two(exponent: np.int64) -> np.float32:
    """Return 2 to a power in [-126, 127]."""
    return cpu.from_bits(np.uint32(np.uint32(exponent + 127) << _S23))


@inlined
def _narrow_brain(bits: np.uint32, add: np.uint32) -> np.uint16:
    """Return the upper half of a float32, after adding what rounds it."""
    rounded = np.uint32(bits + add) >> _S16
    return np.uint16(_NAN_BRAIN if bits & _MAGNITUDE > _INFINITY else rounded)


@inlined
def _clamp(w: np.float32) -> np.float32:
    w = _LARGEST_HALF if w > _LARGEST_HALF else w
    return -_LARGEST_HALF if w < -_LARGEST_HALF else w


@inlined
def _mix(x: np.uint32) -> np.uint32:
    # numba makes the product of two uint32 a uint64; the casts keep 32 bits.
    x = np.uint32(np.uint32(x ^ (x >> _S16)) * _MIX_A)
    x = np.uint32(np.uint32(x ^ (x >> _S15)) * _MIX_B)
    return np.uint32(x ^ (x >> _S16))
