"""The optimizers of both halves, by one name and one formula; and parts of a batch."""

from collections.abc import Iterable
from functools import partial
from math import cos, pi, sqrt
from typing import Any

import dense_optimizers
import torch
from options import Options
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import persia_torchrec as persia


def dense_optimizer(options: Options, parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of the dense model; ``row_optimizer`` has its formula."""
    lr = options.learning_rate
    make = {
        "adam": partial(torch.optim.Adam, fused=True),
        "adamasync": dense_optimizers.AdamAsync,
        "adagraddecay": partial(
            dense_optimizers.AdagradDecay, initial_accumulator_value=0.1
        ),
        "adagrad": partial(torch.optim.Adagrad, initial_accumulator_value=0.1),
        "gradientdescent": torch.optim.SGD,
    }
    return make[options.optimizer](list(parameters), lr=lr)


def row_optimizer(options: Options) -> Any:
    """Return what the servers apply to the rows of a batch."""
    make = {
        "adam": persia.Adam,
        "adamasync": persia.AdamAsync,
        "adagraddecay": partial(persia.AdagradDecay, initial_accumulator_value=0.1),
        "adagrad": partial(persia.Adagrad, initial_accumulator_value=0.1),
        "gradientdescent": persia.SGD,
    }
    return make[options.optimizer](lr=options.learning_rate)


def make_schedules(
    options: Options, optimizers: list[torch.optim.Optimizer], num_steps: int
) -> dict[str, LRScheduler]:
    """Return what changes the rate of each optimizer, if anything does, by name."""
    if options.schedule is None:
        return {}

    def share(step: int) -> float:
        return (1 + cos(pi * min(step / num_steps, 1))) / 2

    return {
        f"schedule of {half}": LambdaLR(optimizer, share)
        for half, optimizer in zip(("layers", "rows"), optimizers, strict=True)
    }


class RowAdam(torch.optim.SparseAdam):
    """torch's Adam for the rows of a batch alone: of plain TorchRec's tables.

    ``SparseAdam`` adds ``eps`` to the root of the uncorrected mean of squares, ``Adam``
    to that of the corrected one. Scaled by the correction it is the same.
    """

    def __init__(self, parameters: Any, lr: float, eps: float = 1e-8) -> None:
        super().__init__(parameters, lr=lr, eps=eps)
        self._eps, self._num_steps = eps, 0

    def step(self, closure: None = None) -> None:
        """Step all tables; each has rows in every batch."""
        self._num_steps += 1
        for group in self.param_groups:
            _, beta2 = group["betas"]
            group["eps"] = self._eps * sqrt(1 - beta2**self._num_steps)
        super().step(closure)


class Steps:
    """Several optimizers as one, which step when all parts of a batch are there.

    Args:
        optimizers: stepped together.
        num_parts: backward passes of a step, whose gradients add up.
        schedules: of their learning rates, stepped after them.
    """

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        num_parts: int,
        schedules: Iterable[LRScheduler] = (),
    ) -> None:
        self.optimizers, self._num_parts = optimizers, num_parts
        self._schedules = list(schedules)
        self._num = 0

    def zero_grad(self) -> None:
        """Begin with no gradients, unless parts of this batch have some."""
        if self._num == 0:
            for optimizer in self.optimizers:
                optimizer.zero_grad()

    def step(self) -> None:
        """Count a part; step at the last one."""
        self._num = (self._num + 1) % self._num_parts
        if self._num == 0:
            for stepped in (*self.optimizers, *self._schedules):
                stepped.step()
