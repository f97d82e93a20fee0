"""Rows and gradients on the wire: float32, or half of its bytes.

    FP32   as they are
    FP16   IEEE half: 11 bits of mantissa, exponents -14 to 15; each row times a power
           of two of its own, whose exponent stands behind all rows:

               offset     size  field
               0          4     how many numbers are 0 that were not, uint32
               4          2 L   L numbers of N rows, each times 2**k, as halves
               4 + 2 L    N     exponent k of each row, int8 in [-126, 126]

    BF16   the upper half of a float32: 8 bits of mantissa, the same range; rounded to
           the nearest, ties to even

Gradients are small: the mean over a batch of thousands divides them by as much, below
what halves can hold. So the sender chooses k such that the largest magnitude of a row
is in [2**15, 2**16) as a half, and the receiver undoes it: a number is rounded as a
half of full precision down to 2**-29 of the largest of its row, and to steps of 2**-39
of it below; other rows have no part in it. Infinities and NaN travel as they are, and
do not count as the largest. A number that rounds to 2**128 becomes an infinity.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Exponents, Floats
from persia_torchrec.errors import FrameError
from persia_torchrec.jit.compiled import read_only
from persia_torchrec.jit.float16 import (
    LARGEST_EXPONENT,
    from_bfloat16,
    from_float16,
    to_bfloat16,
    to_float16,
)
from persia_torchrec.rpc.messages import Frame, Precision, array_of, bytes_of

Shape = tuple[int, ...]
"""Of rows that follow one another; the last number is their width."""

UNDERFLOWS = "wire_underflows"
"""Counts numbers of rows and gradients that are 0 on the wire and were not."""

_COUNT_BYTES = 4
_NO_EXPONENTS = np.empty(0, dtype=np.int8)


def size_of(shapes: Sequence[Shape], precision: Precision) -> int:
    """Return how many bytes rows of these shapes take."""
    num = sum(map(math.prod, shapes))
    if precision is not Precision.FP16:
        return (4 if precision is Precision.FP32 else 2) * num
    return _COUNT_BYTES + 2 * num + sum(map(_num_rows, shapes))


def encode_floats(
    values: Floats, precision: Precision, shapes: Sequence[Shape] | None = None
) -> memoryview:
    """Return numbers as a frame; float32 is not copied.

    ``shapes`` are those of rows that follow one another, by default that of ``values``.
    """
    flat = np.ascontiguousarray(values).reshape(-1)
    if precision is Precision.FP32:
        return flat.view(np.uint8).data
    if precision is Precision.BF16:
        return bytes_of(to_bfloat16(read_only(flat.view(np.uint32))))
    shapes = [values.shape] if shapes is None else shapes
    out = np.empty(size_of(shapes, precision), dtype=np.uint8)
    halves, exponents = _halves_of(out, len(flat))
    num_zeroed = 0
    for shape, numbers, rows in _parts(shapes):
        given_ND = read_only(flat[numbers].reshape(shape))
        num_zeroed += to_float16(
            given_ND, halves[numbers].reshape(shape), exponents[rows]
        )
    out[:_COUNT_BYTES].view(np.uint32)[0] = min(num_zeroed, 2**32 - 1)
    return bytes_of(out)


def decode_floats(
    frame: Frame, shapes: Sequence[Shape], precision: Precision
) -> Floats:
    """Read the numbers of rows of these shapes, flat; float32 is not copied."""
    numbers, exponents = read_numbers(frame, shapes, precision)
    if precision is Precision.FP32:
        return numbers.view(np.float32)
    out = np.empty(len(numbers), dtype=np.float32)
    for shape, piece, rows in _parts(shapes):
        write_floats(numbers[piece], exponents[rows], out[piece].reshape(shape))
    return out


def read_numbers(
    frame: Frame, shapes: Sequence[Shape], precision: Precision
) -> tuple[npt.NDArray[np.generic], Exponents]:
    """View the numbers of a frame as they travelled, flat, and the exponents of FP16.

    They are float32, or uint16 with the bits of halves; see :func:`write_floats`.
    """
    size_bytes = size_of(shapes, precision)
    if len(frame) != size_bytes:
        raise FrameError(
            f"{sum(map(math.prod, shapes))} numbers as {precision.name} take "
            f"{size_bytes} bytes. Received: {len(frame)} bytes."
        )
    if precision is Precision.FP32:
        return np.frombuffer(frame, np.float32), _NO_EXPONENTS
    if precision is Precision.BF16:
        return array_of(frame, np.uint16), _NO_EXPONENTS
    num = sum(map(math.prod, shapes))
    halves, exponents = _halves_of(np.frombuffer(frame, np.uint8), num)
    outside = exponents[
        (exponents < -LARGEST_EXPONENT) | (exponents > LARGEST_EXPONENT)
    ]
    if len(outside):
        raise FrameError(
            f"The exponent of FP16 must be in [-{LARGEST_EXPONENT}, "
            f"{LARGEST_EXPONENT}]. Received: {outside[0]}."
        )
    return halves, exponents


def write_floats(
    numbers: npt.NDArray[np.generic], exponents: Exponents, out_ND: Floats
) -> None:
    """Write numbers of :func:`read_numbers`, or those of some rows, as float32.

    Rows without exponents travelled as BF16.
    """
    if numbers.dtype == np.float32:
        np.copyto(out_ND.reshape(-1), numbers)
    elif not len(exponents):
        from_bfloat16(read_only(numbers.view(np.uint16)), out_ND.reshape(-1))
    else:
        halves_ND = read_only(numbers.view(np.uint16).reshape(out_ND.shape))
        from_float16(halves_ND, read_only(exponents), out_ND)


def num_zeroed(frame: Frame, precision: Precision) -> int:
    """Return how many numbers of a frame are 0 that were not before they travelled."""
    if precision is not Precision.FP16:
        return 0
    return int(np.frombuffer(frame, np.uint32, 1)[0])


def warm_up() -> None:
    """Compile, or load, the loops before the first request needs them."""
    for precision in (Precision.FP16, Precision.BF16):
        frame = encode_floats(np.ones((1, 1), dtype=np.float32), precision)
        decode_floats(frame, [(1, 1)], precision)


def _halves_of(
    frame: npt.NDArray[np.uint8], num: int
) -> tuple[npt.NDArray[np.uint16], Exponents]:
    stop = _COUNT_BYTES + 2 * num
    return frame[_COUNT_BYTES:stop].view(np.uint16), frame[stop:].view(np.int8)


def _num_rows(shape: Shape) -> int:
    return math.prod(shape[:-1])


def _parts(shapes: Sequence[Shape]) -> Iterator[tuple[Shape, slice, slice]]:
    """Yield the shape of each part in two dimensions, its numbers and its rows."""
    flat = [(_num_rows(shape), math.prod(shape[-1:])) for shape in shapes]
    numbers = itertools.accumulate((num * width for num, width in flat), initial=0)
    rows = itertools.accumulate((num for num, _ in flat), initial=0)
    for (num, width), first, row in zip(flat, numbers, rows, strict=False):
        yield (num, width), slice(first, first + num * width), slice(row, row + num)
