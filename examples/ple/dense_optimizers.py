"""Optimizers of the dense model that torch lacks, as ``torch.optim`` has them.

Each computes what the servers compute for rows with the settings of the same name.
The formulas and their sources stand there: ``embedding/optim.py`` and
``optim_adam.py`` of ``persia_torchrec``. A parameter here is a row there; ``t`` counts
the steps in which it had a gradient.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from math import sqrt
from typing import Any, TypeAlias

import torch

from persia_torchrec.embedding import optim
from persia_torchrec.errors import ConfigError

Params: TypeAlias = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


class _Dense(torch.optim.Optimizer, ABC):
    """What both share; a group begins with the settings of the optimizer of rows."""

    def __init__(self, params: Params, of_rows: optim.Optimizer) -> None:
        super().__init__(params, dataclasses.asdict(of_rows))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, self._checked(parameter.grad), group)
        return loss

    def _checked(self, grad: torch.Tensor) -> torch.Tensor:
        if grad.is_sparse:
            raise ConfigError(
                f"{type(self).__name__}: gradients must be dense. Received: a sparse "
                "one. Leave out sparse=True of the embedding, or put it on the servers."
            )
        return grad

    @abstractmethod
    def _move(
        self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]
    ) -> None:
        """Move a parameter by its gradient, and its state with it."""

    def _next_step(self, parameter: torch.Tensor) -> tuple[dict[str, Any], int]:
        """Return the state of a parameter, and its ``t``, which counts this step."""
        state: dict[str, Any] = self.state[parameter]
        # A tensor, as torch's own have it, so that checkpoints load into it; exact as
        # far as AdagradDecay counts.
        state.setdefault("step", torch.zeros((), dtype=torch.float64))
        state["step"] += 1
        return state, int(state["step"])


class AdamAsync(_Dense):
    """Adam with ``eps`` beside the uncorrected root, or RMSProp with momentum.

    The formulas are those of :class:`persia_torchrec.AdamAsync`, the settings of rows.

    Args:
        params: as of any optimizer of torch.
        lr: learning rate, ``>= 0``.
        betas: of the running means of the gradient and its square, in ``[0, 1)``.
        eps: ``>= 0``.
        apply_sparse_rmsprop: the means are not corrected, and that of the gradient is
            a velocity.
        use_nesterov: look one step ahead. The two exclude each other.

    Raises:
        ConfigError: an argument is out of its range; in ``step``, a gradient is sparse.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        apply_sparse_rmsprop: bool = False,
        use_nesterov: bool = False,
    ) -> None:
        of_rows = optim.AdamAsync(
            lr,
            betas=betas,
            eps=eps,
            apply_sparse_rmsprop=apply_sparse_rmsprop,
            use_nesterov=use_nesterov,
        )
        super().__init__(params, of_rows)

    def _move(
        self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]
    ) -> None:
        state, step = self._next_step(parameter)
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(parameter)
        m, v = state["exp_avg"], state["exp_avg_sq"]
        (beta1, beta2), lr, eps = group["betas"], float(group["lr"]), group["eps"]
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if group["apply_sparse_rmsprop"]:
            m.mul_(beta1).addcdiv_(grad, (v + eps).sqrt_(), value=lr)
            parameter.sub_(m)
            return
        m.mul_(beta1).add_(grad, alpha=1 - beta1)
        ahead = m
        if group["use_nesterov"]:
            ahead = (beta1 * m).add_(grad, alpha=1 - beta1)
        rate = lr * sqrt(1 - beta2**step) / (1 - beta1**step)
        parameter.addcdiv_(ahead, v.sqrt().add_(eps), value=-rate)


class AdagradDecay(_Dense):
    """Adagrad that forgets: now and then the accumulator shrinks, down to its start.

    The formulas are those of :class:`persia_torchrec.AdagradDecay`, the settings of
    rows.

    Args:
        params: as of any optimizer of torch.
        lr: learning rate, ``>= 0``.
        initial_accumulator_value: where accumulators start, ``> 0``.
        decay_step: steps of a period, ``>= 1``.
        decay_rate: by which an accumulator shrinks per period, in ``(0, 1)``.

    Raises:
        ConfigError: an argument is out of its range; in ``step``, a gradient is sparse.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        *,
        initial_accumulator_value: float = 0.1,
        decay_step: int = 100_000,
        decay_rate: float = 0.9,
    ) -> None:
        of_rows = optim.AdagradDecay(
            lr,
            initial_accumulator_value=initial_accumulator_value,
            decay_step=decay_step,
            decay_rate=decay_rate,
        )
        super().__init__(params, of_rows)

    def _move(
        self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]
    ) -> None:
        state, step = self._next_step(parameter)
        initial, decay_step = group["initial_accumulator_value"], group["decay_step"]
        if "sum" not in state:
            state["sum"] = torch.full_like(parameter, initial)
        a = state["sum"]
        # How many periods have begun since the previous step: 0 or 1.
        if step // decay_step > (step - 1) // decay_step:
            a.mul_(group["decay_rate"]).clamp_(min=initial)
        a.addcmul_(grad, grad)
        parameter.addcdiv_(grad, a.sqrt(), value=-float(group["lr"]))
