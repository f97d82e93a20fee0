"""Which code applies the updates of a table: the fused loop, or fbgemm's kernels.

Both compute the same. The fused loop steps rows where they are; for fbgemm they are
copied into a table without gaps and back, which its vector code has to earn. Whether it
does was measured: ``engine_measurements.json`` is what

    python -m persia_torchrec.bench engines --json engine_measurements.json

has written on the machine that it names. It holds nanoseconds per row of whole updates,
copies included, by optimizer, weight dtype and dim. ``auto`` takes the measurement
whose dim is nearest in proportion.
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

from persia_torchrec.embedding.optim import Optimizer
from persia_torchrec.errors import ConfigError
from persia_torchrec.store.fbgemm_engine import FbgemmEngine
from persia_torchrec.table import TableSpec

OptimizerEngine = Literal["auto", "fbgemm", "fused"]
"""The fused loop, fbgemm's kernels, or whichever was measured to be faster."""

MEASUREMENTS = Path(__file__).with_name("engine_measurements.json")
"""The measurements that ``auto`` takes."""

_DIM_STEP = 4
_WORTH = 0.9
"""fbgemm is chosen where it takes less than this fraction of the fused loop's time:
torch costs a server memory (230 MB with torch 2.13 and fbgemm 1.8) and a longer start.
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """Nanoseconds per row of an update by either engine."""

    optimizer: str
    weight_dtype: str
    dim: int
    fused_ns: float
    fbgemm_ns: float


class EngineChoice:
    """Decide for each table which engine applies its updates.

    Args:
        engine: ``fused``, ``fbgemm``, or ``auto``: what was measured to be faster,
            which is fused where fbgemm lacks the optimizer or is not installed.
        measured: what ``auto`` takes; None for those of this package.

    Raises:
        ConfigError: no such engine, or ``fbgemm`` and it is not installed.
    """

    def __init__(
        self, engine: OptimizerEngine, measured: tuple[Measured, ...] | None = None
    ) -> None:
        if engine not in get_args(OptimizerEngine):
            raise ConfigError(
                f"optimizer_engine must be one of {sorted(get_args(OptimizerEngine))}. "
                f"Received: {engine!r}."
            )
        self._choice = engine
        self._measured = measurements() if measured is None else measured
        self._fbgemm = FbgemmEngine() if engine == "fbgemm" else None

    def require_fitting(self, spec: TableSpec) -> None:
        """Raise ConfigError if fbgemm is asked for and cannot update this table."""
        reason = why_not_fbgemm(spec.optimizer, spec.dim)
        if self._choice == "fbgemm" and reason:
            raise ConfigError(
                "With optimizer_engine=fbgemm every table needs an optimizer and a dim "
                f"that fbgemm has on CPU. Received: table {spec.name!r}, dim "
                f"{spec.dim}, {spec.optimizer!r}: {reason}. Choose auto or fused."
            )

    def choose(self, spec: TableSpec) -> FbgemmEngine | None:
        """Return fbgemm's engine if it updates this table, None if the loop does.

        Raises:
            ConfigError: as :meth:`require_fitting`.
        """
        self.require_fitting(spec)
        if not self._is_for_fbgemm(spec):
            return None
        if self._fbgemm is None:
            self._fbgemm = FbgemmEngine()
        return self._fbgemm

    def _is_for_fbgemm(self, spec: TableSpec) -> bool:
        if self._choice != "auto":
            return self._choice == "fbgemm"
        if why_not_fbgemm(spec.optimizer, spec.dim) or find_spec("fbgemm_gpu") is None:
            return False
        name = spec.optimizer.fbgemm_name()
        found = nearest(self._measured, name, spec.weight_dtype, spec.dim)
        return found is not None and found.fbgemm_ns < _WORTH * found.fused_ns


def why_not_fbgemm(optimizer: Optimizer, dim: int) -> str:
    """Return why fbgemm's CPU kernels cannot step these rows; empty if they can.

    Example:
        >>> from persia_torchrec.embedding.optim import SGD
        >>> why_not_fbgemm(SGD(0.1), 16)
        ''
        >>> why_not_fbgemm(SGD(0.1), 6)
        'dims must be multiples of 4'
    """
    arguments = optimizer.fbgemm_cpu_arguments()
    if isinstance(arguments, str):
        return arguments
    return f"dims must be multiples of {_DIM_STEP}" if dim % _DIM_STEP else ""


def nearest(
    measured: tuple[Measured, ...], optimizer: str, weight_dtype: str, dim: int
) -> Measured | None:
    """Return the measurement whose dim is nearest in proportion, the smaller of two.

    Args:
        measured: to choose from, in any order.
        optimizer: fbgemm's name.
        weight_dtype: of the table.
        dim: of the table.

    Returns:
        None if this optimizer was not measured with this dtype.
    """
    fitting = [
        m
        for m in measured
        if (m.optimizer, m.weight_dtype) == (optimizer, weight_dtype)
    ]
    return min(
        fitting, key=lambda m: (abs(math.log2(m.dim / dim)), m.dim), default=None
    )


@cache
def measurements(file: Path = MEASUREMENTS) -> tuple[Measured, ...]:
    """Read the results of the benchmark of the engines."""
    return tuple(Measured(**line) for line in json.loads(file.read_text())["measured"])
