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
precision down to 2**-29 of the largest, and to steps of 2**-39 of it below. Infinities
and NaN travel as they are, and do not count as the largest.
"""

import numpy as np
import numpy.typing as npt

from persia_torchrec.errors import FrameError
from persia_torchrec.jit.compiled import read_only
from persia_torchrec.jit.float16 import (
    Halves,
    Words,
    from_bfloat16,
    from_float16,
    largest_finite,
    to_bfloat16,
    to_float16,
)
from persia_torchrec.rpc.messages import Frame, Precision, array_of, bytes_of

Floats = npt.NDArray[np.float32]

BRAIN = 2**15
"""Stands for the exponent of numbers that travel as BF16, which have none."""

_LARGEST_EXPONENT = 126  # 2**126 and its inverse are float32 of full precision


def size_of(precision: Precision) -> int:
    """Return the bytes a number takes."""
    return 4 if precision is Precision.FP32 else 2


def encode_floats(values: Floats, precision: Precision) -> memoryview:
    """Return numbers as a frame; float32 is not copied."""
    if precision is Precision.FP32:
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    bits = read_only(np.ascontiguousarray(values).reshape(-1).view(np.uint32))
    encode = _scale_halves if precision is Precision.FP16 else to_bfloat16
    return bytes_of(encode(bits))


def decode_floats(frame: Frame, num: int, precision: Precision) -> Floats:
    """Read ``num`` numbers from a frame of that length; float32 is not copied."""
    numbers_N, exponent = read_numbers(frame, num, precision)
    if precision is Precision.FP32:
        return numbers_N.view(np.float32)
    out_N = np.empty(num, dtype=np.float32)
    write_floats(numbers_N, exponent, out_N)
    return out_N


def read_numbers(
    frame: Frame, num: int, precision: Precision
) -> tuple[npt.NDArray[np.generic], int]:
    """View ``num`` numbers of a frame as they travelled, with their exponent.

    They are float32, or uint16 with the bits of halves; see :func:`write_floats`.
    """
    size_bytes = size_of(precision) * num
    if precision is Precision.FP16:
        size_bytes += 2  # the exponent
    if len(frame) != size_bytes:
        raise FrameError(
            f"{num} numbers as {precision.name} take {size_bytes} bytes. "
            f"Received: {len(frame)} bytes."
        )
    if precision is Precision.FP32:
        return np.frombuffer(frame, np.float32), 0
    halves = array_of(frame, np.uint16)
    if precision is Precision.BF16:
        return halves, BRAIN
    exponent = int(halves[:1].view(np.int16)[0])
    if abs(exponent) > _LARGEST_EXPONENT:
        raise FrameError(
            f"The exponent of FP16 must be in [-{_LARGEST_EXPONENT}, "
            f"{_LARGEST_EXPONENT}]. Received: {exponent}."
        )
    return halves[1:], exponent


def write_floats(
    numbers_N: npt.NDArray[np.generic], exponent: int, out_N: Floats
) -> None:
    """Write numbers of :func:`read_numbers`, or some of them, as float32."""
    if numbers_N.dtype == np.float32:
        np.copyto(out_N, numbers_N)
    elif exponent == BRAIN:
        from_bfloat16(read_only(numbers_N.view(np.uint16)), out_N)
    else:
        halves = read_only(numbers_N.view(np.uint16))
        from_float16(halves, np.float32(2.0**-exponent), out_N)


def warm_up() -> None:
    """Compile, or load, the loops before the first request needs them."""
    for precision in (Precision.FP16, Precision.BF16):
        frame = encode_floats(np.ones(1, dtype=np.float32), precision)
        decode_floats(frame, 1, precision)


def _scale_halves(bits_N: Words) -> Halves:
    """Return float32, of these bits, as FP16 at their best scale."""
    # An exponent of 127 + e becomes 127 + 15; of subnormal float32 it need not.
    exponent = min(142 - (int(largest_finite(bits_N)) >> 23), _LARGEST_EXPONENT)
    out_N = np.empty(1 + len(bits_N), dtype=np.uint16)
    out_N[:1].view(np.int16)[0] = exponent
    to_float16(bits_N.view(np.float32), np.float32(2.0**exponent), out_N[1:])
    return out_N
