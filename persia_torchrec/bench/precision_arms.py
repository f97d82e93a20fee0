"""The ways of rounding that are compared: those of the wire, and others."""

from collections.abc import Callable
from dataclasses import dataclass

import fbgemm_gpu  # noqa: F401  # makes torch.ops.fbgemm known
import numpy as np
import torch

from persia_torchrec.wire.messages import Precision
from persia_torchrec.wire.precision import Floats

_LARGEST_HALF = 65504
_STEP_BITS = 16
_SEED = 20_238


def _as_they_are(rows_UD: Floats) -> Floats:
    return rows_UD


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of rounding.

    Attributes:
        name: in the table.
        precision: in which rows and gradients travel.
        round_rows: what is done to rows that were looked up.
        round_gradients: what is done to gradients before they are pushed.
        bytes_of: given D, what a row takes on the wire; None where it is measured.
        note: what is done, if the wire does not do it.
    """

    name: str
    precision: Precision
    round_rows: Callable[[Floats], Floats] = _as_they_are
    round_gradients: Callable[[Floats], Floats] = _as_they_are
    bytes_of: Callable[[int], int] | None = None
    note: str = ""


def plain_halves(rows_UD: Floats) -> Floats:
    """Round to halves without a scale; what is too large becomes the largest."""
    clipped_UD = rows_UD.clip(-_LARGEST_HALF, _LARGEST_HALF)
    return clipped_UD.astype(np.float16).astype(np.float32)


def brain_floats_at_random(rows_UD: Floats) -> Floats:
    """Round to bfloat16, up or down with the probability that keeps the mean right."""
    rng = np.random.default_rng(_SEED)
    bits_UD = np.ascontiguousarray(rows_UD).view(np.uint32)
    random_UD = rng.integers(0, 2**_STEP_BITS, rows_UD.shape, dtype=np.uint32)
    kept_UD = (bits_UD + random_UD) & np.uint32(2**32 - 2**_STEP_BITS)
    return kept_UD.view(np.float32)


def eight_bits(rows_UD: Floats) -> Floats:
    """Round as fbgemm's quantiser of rows does: 8 bits between the row's extremes."""
    rows = torch.from_numpy(np.array(rows_UD))
    bytes_ = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows)
    back = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(bytes_)
    floats: Floats = back.numpy()
    return floats


ARMS = [
    Arm("fp32", Precision.FP32),
    Arm("fp16", Precision.FP16),
    Arm("bf16", Precision.BF16),
    Arm(
        "halves without a scale",
        Precision.FP32,
        plain_halves,
        plain_halves,
        lambda dim: 2 * dim,
        "rounded here, by NumPy.",
    ),
    Arm(
        "bf16, gradients at random",
        Precision.FP32,
        _as_they_are,
        brain_floats_at_random,
        lambda dim: 2 * dim,
        "gradients rounded here, up or down at random; rows as they are.",
    ),
    Arm(
        "8 bits, rowwise",
        Precision.FP32,
        eight_bits,
        eight_bits,
        lambda dim: dim + 8,
        "rounded here, by fbgemm's FloatToFused8BitRowwiseQuantized.",
    ),
]
