"""How long do conversions take: ours, torch's and fbgemm's?"""

import time
from collections.abc import Callable
from functools import partial

import fbgemm_gpu  # noqa: F401  # makes torch.ops.fbgemm known
import numpy as np
import torch

from persia_torchrec.bench.report import Cell, Table
from persia_torchrec.wire.messages import Precision
from persia_torchrec.wire.precision import decode_floats, encode_floats

_REPEATS = 15
_SEED = 20_239
_DIM = 64

_Call = Callable[[], object]
_Conversion = tuple[str, float, _Call, _Call]


def measure_conversions(num_floats: int) -> Table:
    """Time each conversion of the same gradients to fewer bits, and back.

    Args:
        num_floats: how many numbers; rounded up to whole rows of 64.
    """
    num_rows = -(-num_floats // _DIM)
    rng = np.random.default_rng(_SEED)
    floats = rng.standard_normal((num_rows, _DIM), dtype=np.float32) * np.float32(1e-4)
    rows: list[dict[str, Cell]] = []
    for name, bits, there, back in _conversions(floats):
        cells: dict[str, Cell] = {"name": name, "bits": bits}
        cells["there"] = _ns(there) / floats.size
        cells["back"] = _ns(back) / floats.size
        rows.append(cells)
    question = (
        f"Nanoseconds a number on one core, the fastest of {_REPEATS}: {num_rows} "
        f"gradients of {_DIM} numbers at once."
    )
    columns = {"name": "conversion", "bits": "bits", "there": "to it", "back": "back"}
    return Table("conversions", question, columns, rows)


def _conversions(floats: np.ndarray) -> list[_Conversion]:
    """Return name, bits a number, and both directions of each conversion."""
    tensor = torch.from_numpy(floats)
    precisions = (Precision.FP16, Precision.BF16)
    return [
        *(_ours(floats.reshape(-1), precision) for precision in precisions),
        *(_torchs(tensor, dtype) for dtype in (torch.float16, torch.bfloat16)),
        *_fbgemms(tensor),
    ]


def _ours(flat: np.ndarray, precision: Precision) -> _Conversion:
    frame = encode_floats(flat, precision)
    return (
        f"ours, {precision.name.lower()}",
        16,
        partial(encode_floats, flat, precision),
        partial(decode_floats, frame, flat.size, precision),
    )


def _torchs(tensor: torch.Tensor, dtype: torch.dtype) -> _Conversion:
    halves = tensor.to(dtype)
    name = f"torch, {str(dtype).removeprefix('torch.')}"
    return name, 16, partial(tensor.to, dtype), partial(halves.to, torch.float32)


def _fbgemms(tensor: torch.Tensor) -> list[_Conversion]:
    ops = torch.ops.fbgemm
    brain = ops.FloatToBfloat16Quantized(tensor)
    eight = ops.FloatToFused8BitRowwiseQuantized(tensor)
    return [
        (
            "fbgemm, FloatToBfloat16Quantized",
            16,
            lambda: ops.FloatToBfloat16Quantized(tensor),
            lambda: ops.Bfloat16QuantizedToFloat(brain),
        ),
        (
            "fbgemm, FloatToFused8BitRowwiseQuantized",
            8 + 64 / _DIM,
            lambda: ops.FloatToFused8BitRowwiseQuantized(tensor),
            lambda: ops.Fused8BitRowwiseQuantizedToFloat(eight),
        ),
    ]


def _ns(call: _Call) -> float:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    torch.set_num_threads(num_threads)
    return min(seconds) * 1e9
