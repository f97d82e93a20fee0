"""Rows and gradients on the wire: float32, or half of its bytes.

    FP32   as they are
    FP16   IEEE half: 11 bits of mantissa, largest 65504; larger values become that
    BF16   the upper half of a float32: 8 bits of mantissa, the same range; rounded to
           the nearest, ties to even

On the servers and in the sums everything is float32; the halves exist on the wire only.
"""

import numpy as np
import numpy.typing as npt

from persia_torchrec.errors import FrameError
from persia_torchrec.wire.messages import Frame, Precision, array_of, bytes_of

Floats = npt.NDArray[np.float32]

_LARGEST_HALF = np.float32(65504)


def size_of(precision: Precision) -> int:
    """Return the bytes a number."""
    return 4 if precision is Precision.FP32 else 2


def encode_floats(values: Floats, precision: Precision) -> memoryview:
    r"""Return numbers as a frame; float32 is not copied.

    Example:
        >>> bytes(encode_floats(np.array([1.5], dtype=np.float32), Precision.BF16))
        b'\xc0?'
    """
    if precision is Precision.FP32:
        return bytes_of(values)
    if precision is Precision.FP16:
        # NaN passes through np.clip; an infinity becomes the largest number.
        return bytes_of(
            np.clip(values, -_LARGEST_HALF, _LARGEST_HALF).astype(np.float16)
        )
    bits = np.ascontiguousarray(values).view(np.uint32)
    is_nan = np.isnan(values)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded[is_nan] = np.uint32(0x7FC00000)
    return bytes_of((rounded >> np.uint32(16)).astype(np.uint16))


def decode_floats(frame: Frame, num: int, precision: Precision) -> Floats:
    """Read ``num`` numbers from a frame; float32 is not copied.

    Raises:
        FrameError: the frame has another length.
    """
    if len(frame) != num * size_of(precision):
        raise FrameError(
            f"{num} numbers as {precision.name} take {num * size_of(precision)} bytes. "
            f"Received: {len(frame)} bytes."
        )
    if precision is Precision.FP32:
        return array_of(frame, np.float32).view(np.float32)
    if precision is Precision.FP16:
        return array_of(frame, np.float16).astype(np.float32)
    return (array_of(frame, np.uint16).astype(np.uint32) << np.uint32(16)).view(
        np.float32
    )
