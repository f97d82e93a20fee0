"""When a training is saved: by the clock of rank 0, and by steps, at all trainers."""

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from persia_torchrec.sharding.backward_pass import AnswersAtEnd
from persia_torchrec.training.checkpoint import is_first

_LEAST_INTERVAL = 20  # times what the last checkpoint took: at most 5 % of the time
_MAX_STEPS = 256  # between two questions whether it is time


class CheckpointClock(AnswersAtEnd):
    """Tells all trainers at the same step that it is time for a checkpoint.

    All call :meth:`is_time` after each step. Once a trainer is at the end of its data
    there are no more checkpoints, as it trains no more: its model is an old one.

    Attributes:
        num_trained: steps of the whole training.
        is_delta: at rank 0, whether it was time for a delta only.
    """

    def __init__(
        self,
        interval_s: float,
        now: Callable[[], float] = time.monotonic,
        *,
        save_steps: int = 0,
        delta_interval_s: float = 0.0,
    ) -> None:
        super().__init__()
        self._interval_s, self._save_steps = interval_s, save_steps
        self._delta_interval_s = delta_interval_s
        self._now = now
        self.num_trained = 0
        self.is_delta = False
        self._left = 1  # steps until rank 0 is asked
        self._due_s = self._delta_due_s = math.inf
        self.restart(0.0)

    def restart(self, took_s: float, *, was_delta: bool = False) -> None:
        """Count from now on; the last checkpoint, or delta, took some seconds."""
        self._num_steps, self._began_s = 0, self._now()
        least_s = self._began_s + _LEAST_INTERVAL * took_s
        if self._delta_interval_s:
            due_s = self._began_s + self._delta_interval_s
            self._delta_due_s = max(due_s, least_s)
        if self._interval_s and not was_delta:
            self._due_s = max(self._began_s + self._interval_s, least_s)

    def is_time(self) -> bool:
        """Return whether all trainers save a checkpoint now."""
        if work := Join.notify_join_context(self):
            work.wait()
        return self._count(is_training=True)

    def main_hook(self) -> None:
        """Take part in the questions of the others."""
        self._count(is_training=False)

    def _count(self, *, is_training: bool) -> bool:
        self._num_steps += 1
        self.num_trained += is_training
        self._left -= 1
        if self._left > 0:
            return False
        answer = torch.tensor([_MAX_STEPS, is_training])
        if is_first() and is_training:
            answer[0] = self._steps_to_wait()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(answer, dist.ReduceOp.MIN, self.cpu_group())
        steps, all_train = answer.tolist()
        self._left = max(steps, 1)
        return bool(all_train) and steps == 0

    def _steps_to_wait(self) -> int:
        """Return 0 if it is time, or steps until it may be."""
        steps = self._steps_until(self._due_s)
        if self._save_steps:
            steps = min(steps, -self.num_trained % self._save_steps)
        self.is_delta = steps > 0
        return min(steps, self._steps_until(self._delta_due_s))

    def _steps_until(self, due_s: float) -> int:
        """Return 0 if it is time, or the steps that half of the rest may take."""
        now_s = self._now()
        if now_s >= due_s:
            return 0
        step_s = (now_s - self._began_s) / self._num_steps
        steps = (due_s - now_s) / max(2 * step_s, 1e-6)
        return max(int(min(steps, _MAX_STEPS)), 1)
