"""Where a server's time goes."""

import time
from typing import Literal, get_args

Stage = Literal[
    "idle",
    "receive",
    "decode",
    "lookup",
    "inference",
    "update",
    "write",
    "encode",
    "send",
    "sweep",
    "dump",
    "other",
]

_STAGES: tuple[Stage, ...] = get_args(Stage)


class Stages:
    """Attributes all time of one thread to stages. Owned by that thread.

    What passes between two calls of :meth:`lap` belongs to the stage that the second
    one names; so the stages sum up to the thread's time since the first.
    """

    def __init__(self) -> None:
        self._ns: dict[Stage, int] = dict.fromkeys(_STAGES, 0)
        self._last_ns = time.perf_counter_ns()

    def lap(self, stage: Stage) -> None:
        """End a stage."""
        now_ns = time.perf_counter_ns()
        self._ns[stage] += now_ns - self._last_ns
        self._last_ns = now_ns

    def counters(self) -> dict[str, int]:
        """Return the microseconds of each stage so far, as ``lookup_us``."""
        return {f"{stage}_us": ns // 1000 for stage, ns in self._ns.items()}
