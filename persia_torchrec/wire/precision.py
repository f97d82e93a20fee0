"""Rows and gradients on the wire: float32, or half of its bytes.

    FP32   as they are
    FP16   IEEE half: 11 bits of mantissa, exponents -14 to 15; all numbers of a frame
           times one power of two, which stands before them:

               offset  size  field
               0       2     exponent k, int16
               2       2     the first number times 2**k, a half
               4       ...

    BF16   the upper half of a float32: 8 bits of mantissa, the same range; rounded to
           the nearest, ties to even

Gradients are small: the mean over a batch of thousands divides them by as much, below
what halves can hold. So the sender chooses k such that the largest magnitude lies in
[2**15, 2**16), and the receiver undoes it: a number is rounded as a half of full
precision down to 2**-29 of the largest, and to steps of 2**-39 of it below. (As the
scale of the loss under automatic mixed precision, Micikevicius et al., "Mixed Precision
Training", ICLR 2018, but of each frame, and always the best one.) Both products are
exact. Infinities and NaN travel as they are, and do not count as the largest.

On the servers and in the sums everything is float32; the halves exist on the wire only.
torch and fbgemm convert to BF16 as fast, and torch to FP16 in less than half the time,
but without a scale; and a server runs without both. ``bench precision`` compares them.
"""

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import compiled_as_written, read_only
from persia_torchrec.errors import FrameError
from persia_torchrec.wire.messages import Frame, Precision, array_of, bytes_of

Floats = npt.NDArray[np.float32]


def size_of(precision: Precision) -> int:
    """Return the bytes a number."""
    return 4 if precision is Precision.FP32 else 2


def frame_size(num: int, precision: Precision) -> int:
    """Return the bytes of a frame of ``num`` numbers."""
    exponent = 2 if precision is Precision.FP16 else 0
    return num * size_of(precision) + exponent


def encode_floats(values: Floats, precision: Precision) -> memoryview:
    r"""Return numbers as a frame; float32 is not copied.

    Example:
        >>> bytes(encode_floats(np.array([1.5], dtype=np.float32), Precision.BF16))
        b'\xc0?'
    """
    if precision is Precision.FP32:
        return bytes_of(values)
    bits = read_only(np.ascontiguousarray(values).reshape(-1).view(np.uint32))
    encode = _scaled_halves_of if precision is Precision.FP16 else _upper_halves_of
    return bytes_of(encode(bits))


def decode_floats(frame: Frame, num: int, precision: Precision) -> Floats:
    """Read ``num`` numbers from a frame; float32 is not copied.

    Raises:
        FrameError: the frame has another length.
    """
    if len(frame) != frame_size(num, precision):
        raise FrameError(
            f"{num} numbers as {precision.name} take {frame_size(num, precision)} "
            f"bytes. Received: {len(frame)} bytes."
        )
    if precision is Precision.FP32:
        return array_of(frame, np.float32).view(np.float32)
    halves = read_only(array_of(frame, np.uint16))
    if precision is Precision.BF16:
        return _shifted(halves).view(np.float32)
    exponent = int(halves[:1].view(np.int16)[0])
    if abs(exponent) > _LARGEST_EXPONENT:
        raise FrameError(
            f"The exponent of FP16 must be in [-{_LARGEST_EXPONENT}, "
            f"{_LARGEST_EXPONENT}]. Received: {exponent}."
        )
    return _floats_of(halves[1:], np.float32(2.0**-exponent)).view(np.float32)


def warm_up() -> None:
    """Compile, or load, the loops before the first request needs them."""
    for precision in (Precision.FP16, Precision.BF16):
        frame = encode_floats(np.ones(1, dtype=np.float32), precision)
        decode_floats(frame, 1, precision)


# The loops work on bits: numba has no float16. A float32 is sign (1), exponent (8, bias
# 127) and mantissa (23); a half is sign (1), exponent (5, bias 15) and mantissa (10).
# Each loop is free of branches, so that it becomes vector instructions; numba widens
# every sum to 64 bits, so each is cut to 32 again.

Words = npt.NDArray[np.uint32]
Halves = npt.NDArray[np.uint16]

_SIGN = np.uint32(0x80000000)
_INFINITY = np.uint32(0x7F800000)
_LARGEST_HALF = np.uint32(0x477FE000)
"""65504."""
_SMALLEST_NORMAL = np.uint32(0x38800000)
"""2**-14, the smallest half with a full mantissa."""
_REBIAS = np.uint32(112 << 23)
"""Difference of the biases, at the exponent's place."""
_HALF_INFINITY = np.uint32(0x7C00 << 13)
_BF16_NAN = np.uint32(0x7FC0)
_HALF_NAN = np.uint32(0x7E00)
_INFINITE_HALF = np.uint32(0x7C00)
_LARGEST_EXPONENT = 126
"""Of a power of two that is, as its inverse, a float32 of full precision."""
_ONE = np.uint32(1)
_13, _16 = np.uint32(13), np.uint32(16)


@compiled_as_written
def _upper_halves_of(bits_N: Words) -> Halves:
    out_N = np.empty(len(bits_N), dtype=np.uint16)
    for i in range(len(bits_N)):
        bits = bits_N[i]
        odd = (bits >> _16) & _ONE
        rounded = np.uint32(bits + np.uint32(0x7FFF) + odd) >> _16
        is_nan = (bits & ~_SIGN) > _INFINITY
        out_N[i] = np.uint16(_BF16_NAN if is_nan else rounded)
    return out_N


def _scaled_halves_of(bits_N: Words) -> Halves:
    # An exponent of 127 + e becomes 127 + 15; of subnormal float32 it need not.
    exponent = min(142 - (int(_largest_of(bits_N)) >> 23), _LARGEST_EXPONENT)
    out_N = np.empty(1 + len(bits_N), dtype=np.uint16)
    out_N[:1].view(np.int16)[0] = exponent
    _put_halves(bits_N, np.float32(2.0**exponent), out_N[1:])
    return out_N


@compiled_as_written
def _largest_of(bits_N: Words) -> np.uint32:
    largest = np.uint32(0)
    for i in range(len(bits_N)):
        size = np.uint32(bits_N[i] & ~_SIGN)
        largest = max(largest, size if size < _INFINITY else np.uint32(0))
    return largest


@compiled_as_written
def _put_halves(bits_N: Words, scale: np.float32, out_N: Halves) -> None:
    half = np.float32(0.5)
    for i in range(len(bits_N)):
        sign = np.uint32(bits_N[i] & _SIGN)
        product = np.float32(np.uint32(bits_N[i] ^ sign).view(np.float32) * scale)
        size = product.view(np.uint32)
        clamped = np.uint32(min(size, _LARGEST_HALF))
        odd = (clamped >> _13) & _ONE
        normal = np.uint32(clamped - _REBIAS + np.uint32(0xFFF) + odd) >> _13
        # Adding 0.5, whose last bit weighs 2**-24 as that of a small half does, leaves
        # the half in the last bits of the sum, rounded as the processor rounds.
        sum_ = np.float32(clamped.view(np.float32) + half)
        small = np.uint32(sum_.view(np.uint32) - half.view(np.uint32))
        rounded = normal if size >= _SMALLEST_NORMAL else small
        rounded = _INFINITE_HALF if size >= _INFINITY else rounded
        rounded = _HALF_NAN if size > _INFINITY else rounded
        out_N[i] = np.uint16((sign >> _16) | rounded)


@compiled_as_written
def _floats_of(halves_N: Halves, scale: np.float32) -> Words:
    smallest = np.uint32(_SMALLEST_NORMAL).view(np.float32)
    out_N = np.empty(len(halves_N), dtype=np.uint32)
    for i in range(len(halves_N)):
        half = np.uint32(halves_N[i])
        sign = np.uint32((half & np.uint32(0x8000)) << _16)
        size = np.uint32((half & np.uint32(0x7FFF)) << _13)
        normal = np.uint32(size + _REBIAS)
        # As if it had an implied leading one, which is then subtracted.
        with_one = np.uint32(size + _SMALLEST_NORMAL).view(np.float32)
        small = np.float32(with_one - smallest).view(np.uint32)
        value = normal if size >= np.uint32(1 << 23) else small
        value = size | _INFINITY if size >= _HALF_INFINITY else value
        product = np.float32(np.uint32(value).view(np.float32) * scale)
        out_N[i] = sign | product.view(np.uint32)
    return out_N


@compiled_as_written
def _shifted(halves_N: Halves) -> Words:
    out_N = np.empty(len(halves_N), dtype=np.uint32)
    for i in range(len(halves_N)):
        out_N[i] = np.uint32(halves_N[i]) << _16
    return out_N
