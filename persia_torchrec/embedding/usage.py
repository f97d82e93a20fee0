"""Dynamic dimension and expiry of rows, by their use.

A dynamic dim gives frequent ids more weights. An expiry removes rows although the
server is not full.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Doubles
from persia_torchrec.embedding.setting import (
    NonNegative,
    Registry,
    Rule,
    Setting,
    integer_in,
)

KEPT = 0.9
"""What is kept of an accumulated frequency when a period ends."""
NUM_PERIODS = 200
"""Periods after which the thresholds stay."""
NUM_STATISTICS = 4
"""Words of 4 bytes that a row keeps: ``acc`` as float64, ``cur``, and their t."""
LEAST = 1e-6
"""What an accumulated frequency must be, that an id is ranked."""
_SHARE = 0.25


@dataclass(frozen=True)
class DynamicDim(Setting):
    """Give an id the first of ``blocks`` parts of its weights; more to a frequent one.

    The blocks are of equal width; with one, all ids have all weights. Weights beyond
    those of an id read 0, get no gradient, and take no memory. A gradient reaches the
    blocks that the lookup of its batch has read, though the id may have more by then;
    after a restart of the server in between, all that the id has. A written row gets
    weights, and state, in the blocks that it has; a new one has one. The state of an
    optimizer is that of all weights, and one number a row is one a block here: rowwise
    optimizers step each block by its own mean. Those that read the norm of a row (LAMB,
    LARS, ``max_norm``) are a ConfigError.

    A ``period`` is so many updates of the table; in its course an id is seen ``cur``
    times, repeats in a batch included. When t periods have ended::

        at the end:   acc = 0.9 acc + 0.1 cur,  cur = 0
        frequency:    f = max(acc / (1 - 0.9^t), (0.9 acc + 0.1 cur) / (1 - 0.9^(t+1)))
        blocks:       max(1, number of thresholds <= f), before the batch is counted

    The thresholds are 1, 2, ... at first. At the end of each of the first 200 periods,
    of R ids with ``acc >= 1e-6``, threshold k of n becomes the frequency that
    ``r_k = int(R (p^(n+1-k) - 1) / (p^(n+1) - 1))`` ids exceed or reach before it, in
    the order of ``acc``. p > 1 is such that a quarter of all weights would be used::

        sum over i = 1 .. n of (p^i - p^(i-1)) / (p^(n+1) - 1) * (n+1-i) / n = 0.25

    Each server counts, and ranks, the ids that it holds. The rule is that of DeepRec's
    example of dynamic dimensions; there an id may have no block.
    """

    kind: ClassVar[str] = "dynamic"

    blocks: Annotated[int, integer_in(1, 64)] = 1
    period: Annotated[int, integer_in(1, 2**48)] = 5000

    @property
    def is_on(self) -> bool:
        """Whether rows differ in their number of weights."""
        return self.blocks > 1

    def growth(self) -> float:
        """Return p."""
        n, low, high = self.blocks, 1.001, 1000.0
        for _ in range(100):
            p = (low + high) / 2
            used = sum((p**i - p ** (i - 1)) * (n + 1 - i) / n for i in range(1, n + 1))
            low, high = (p, high) if used / (p ** (n + 1) - 1) > _SHARE else (low, p)
        return low

    def first_thresholds(self) -> Doubles:
        """Return the thresholds of the first period; float64 ``(n,)``."""
        return np.arange(1, self.blocks + 1, dtype=np.float64)

    def ranks(self, num: int) -> npt.NDArray[np.int64]:
        """Return how many of ``num`` ids come before each threshold, ``(n,)``."""
        n, p = self.blocks, self.growth()
        shares = (p ** (n + 1 - np.arange(1, n + 1)) - 1) / (p ** (n + 1) - 1)
        ranks: npt.NDArray[np.int64] = (num * shares).astype(np.int64)
        return ranks

    def thresholds(self, acc_R: Doubles, t: int) -> Doubles:
        """Return the thresholds when t periods have ended, of the ``acc`` at ranks."""
        thresholds: Doubles = acc_R / (1 - KEPT**t)
        return thresholds

    def count_blocks(
        self, acc_N: Doubles, cur_N: Doubles, t: int, thresholds: Doubles
    ) -> npt.NDArray[np.int64]:
        """Return how many blocks ids have, ``(N,)``."""
        f_N = (KEPT * acc_N + (1 - KEPT) * cur_N) / (1 - KEPT ** (t + 1))
        if t:
            f_N = np.maximum(f_N, acc_N / (1 - KEPT**t))
        num_N: npt.NDArray[np.int64] = (thresholds <= f_N[:, None]).sum(axis=1)
        return np.maximum(num_N, 1)


DYNAMICS: Registry[DynamicDim] = Registry(DynamicDim, DynamicDim)
"""The one kind of dynamic dim."""


MOST_STEPS = 2**31 - 1
"""What an age in steps is at most: rows have their steps modulo 2**32."""
Steps = Annotated[
    int,
    Rule(
        f"an integer in [0, {MOST_STEPS}], as rows keep 32 bits of a step; "
        "seconds_to_live has no such limit",
        lambda value: type(value) is int and 0 <= value <= MOST_STEPS,
    ),
]


@dataclass(frozen=True)
class Expiry(Setting):
    """Say when a row of a table leaves, with its optimizer state; 0 switches off.

    ``updated`` is the step or the time of the row's last update, or of its creation if
    it was never updated; ``created`` is that of its creation; ``now`` is the table's
    step, which is its number of update requests on the server, or the time. All
    settings are ``>= 0``. A row leaves when one of the conditions that are switched on
    holds::

        steps_to_live:    now - updated > steps_to_live               in steps
        seconds_to_live:  now - updated > seconds_to_live             in seconds
        min_l2_norm:      sqrt(sum(w**2)) < min_l2_norm
                          and now - created >= spared_steps           in steps

    Time is that in which servers run. It stands still between a dump and its load, and
    between two runs on a memory file. A jump of the machine's clock changes nothing.

    A row has 32 bits of its steps, and ages are compared modulo 2**32: a table's step
    may pass that. A row whose step is more than ``2**31 - 1`` behind that of the table
    counts as new until the step is 2**32 ahead; sweeps find it long before. So a row
    older than that, whose norm becomes small later, may stay for 2**31 more steps.

    Lookups keep no row alive. Optimizer state does not count towards the norm.
    ``spared_steps`` needs ``min_l2_norm``.

    A ``min_l2_norm`` above the norm of the initial weights needs ``spared_steps``
    enough for a row to grow. DeepRec has the first and the third condition, both only
    while a full checkpoint is written. In its first a row never updated counts as just
    updated; its third compares half the squared norm, and spares no row.
    """

    kind: ClassVar[str] = "expiry"
    former: ClassVar[Mapping[str, object]] = {"clock": "running"}

    steps_to_live: Steps = 0
    seconds_to_live: NonNegative = 0.0
    min_l2_norm: NonNegative = 0.0
    spared_steps: Steps = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(
            "spared_steps",
            self.min_l2_norm > 0 or self.spared_steps == 0,
            "0 without min_l2_norm, from which it spares young rows",
        )

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> "Expiry":
        """Build it; earlier versions allowed more steps than an age can have."""
        steps = {
            name: min(value, MOST_STEPS)
            for name, value in arguments.items()
            if name in ("steps_to_live", "spared_steps") and type(value) is int
        }
        return super().from_arguments({**arguments, **steps})

    @property
    def is_on(self) -> bool:
        """Whether any row can expire."""
        return any((self.steps_to_live, self.seconds_to_live, self.min_l2_norm))

    @property
    def limits(self) -> tuple[float, float, float, float]:
        """The numbers of the conditions, in their order."""
        limits = self.steps_to_live, self.seconds_to_live, self.min_l2_norm
        return *limits, self.spared_steps

    @property
    def is_by_running_time(self) -> bool:
        """Whether rows expire by the time in which servers run."""
        return self.seconds_to_live > 0


EXPIRIES: Registry[Expiry] = Registry(Expiry, Expiry)
"""The one kind of expiry."""
