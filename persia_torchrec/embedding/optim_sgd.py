"""The optimizers that step along the gradient itself: SGD, Adagrad, LARS, FTRL.

``embedding/optim.py`` says what the letters in the formulas mean, and is where users
import these from. After each class stand the kernels that step a row.
"""

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from persia_torchrec.embedding.kernel import (
    ONE,
    ZERO,
    Pointer,
    divide,
    sum_of_squares,
)
from persia_torchrec.embedding.setting import Kernel, Optimizer

_HALF = np.float32(0.5)

_ACCUMULATED = {
    "lr": 0.01,
    "initial_accumulator_value": 0.0,
    "weight_decay": 0.0,
    "eps": 1e-8,
}


@dataclass(frozen=True)
class SGD(Optimizer):
    """Step against the gradient, as ``torch.optim.SGD`` does.

    ::

        g = g + wd * w
        b = momentum * b + g          (only with momentum; b starts at 0)
        w = w - lr * b

    State: none, or D floats (``b``) when ``momentum`` is not 0. PERSIA accepts
    ``momentum`` and ignores it; here it works. fbgemm's ``EXACT_SGD`` has neither
    momentum nor weight decay.

    Args:
        lr: learning rate, ``>= 0``.
        momentum: in ``[0, 1)``.
        weight_decay: L2 penalty, ``>= 0``.
    """

    kind: ClassVar[str] = "sgd"
    fbgemm: ClassVar[str] = "sgd"
    torch_twins: ClassVar = {
        twin: {"lr": 0.01, "momentum": 0.0, "weight_decay": 0.0}
        for twin in ("torch.optim.SGD", "torchrec.optim.SGD")
    }

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        self._require_non_negative("lr", "weight_decay")
        self._require("momentum", 0 <= self.momentum < 1, "in [0, 1)")

    def num_state_floats(self, dim: int) -> int:
        """Return ``dim`` with momentum, else 0."""
        return dim if self.momentum else 0

    def kernel(self) -> Kernel:
        """Return :func:`step_sgd`."""
        return step_sgd

    def step_numbers(self, dim: int, step: int) -> tuple[float, ...]:
        """Return lr, momentum, weight decay."""
        return self.lr, self.momentum, self.weight_decay

    def fbgemm_cpu_arguments(self) -> tuple[float, ...] | str:
        """Return nothing, or why fbgemm cannot step these rows."""
        if self.momentum:
            return "its sgd has no momentum"
        return "its sgd has no weight decay on CPU" if self.weight_decay else ()


def step_sgd(p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int) -> None:
    """Apply ``SGD`` to one row."""
    lr, momentum, weight_decay = p[0], p[1], p[2]
    if momentum == ZERO:
        for d in range(dim):
            w[d] -= lr * (g[d] + weight_decay * w[d])
    else:
        for d in range(dim):
            s[d] = momentum * s[d] + (g[d] + weight_decay * w[d])
            w[d] -= lr * s[d]


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Scale each step by the root of all squared gradients so far.

    As fbgemm's ``EXACT_ADAGRAD``, and ``EXACT_ROWWISE_ADAGRAD`` when
    ``vectorwise_shared``::

        g = g + wd * w
        a = g_square_momentum * a + g * g          (per element: D floats of state)
        a = g_square_momentum * a + mean(g * g)    (vectorwise_shared: one float)
        w = w - lr * g / (sqrt(a) + eps)

    The accumulator ``a`` starts at ``initial_accumulator_value``. PERSIA steps with the
    accumulator without this gradient, puts ``eps`` under the root and ignores
    ``weight_decay``. Of fbgemm only the GPU kernel of the rowwise one has this weight
    decay: its CPU kernel ignores ``weight_decay``, and ``EXACT_ADAGRAD`` has none.

    Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and
    Stochastic Optimization", JMLR 2011.

    Args:
        lr: learning rate, ``>= 0``.
        initial_accumulator_value: where the accumulator starts, ``>= 0``.
        weight_decay: L2 penalty, ``>= 0``.
        g_square_momentum: what is kept of the accumulator at each step, in
            ``(0, 1]``; 1 is Adagrad, less forgets old gradients.
        eps: keeps the quotient finite, ``>= 0``.
        vectorwise_shared: one accumulator per row instead of one per weight.
    """

    kind: ClassVar[str] = "adagrad"
    fbgemm: ClassVar[str] = "adagrad"
    torch_twins: ClassVar = {
        "torch.optim.Adagrad": _ACCUMULATED,
        "torchrec.optim.Adagrad": _ACCUMULATED,
        "torchrec.optim.RowWiseAdagrad": {**_ACCUMULATED, "vectorwise_shared": True},
    }

    lr: float = 1e-2
    initial_accumulator_value: float = 1e-2
    weight_decay: float = 0.0
    g_square_momentum: float = 1.0
    eps: float = 1e-10
    vectorwise_shared: bool = False

    def __post_init__(self) -> None:
        self._require_non_negative(
            "lr", "initial_accumulator_value", "weight_decay", "eps"
        )
        self._require("g_square_momentum", 0 < self.g_square_momentum <= 1, "in (0, 1]")

    def num_state_floats(self, dim: int) -> int:
        """Return 1 when ``vectorwise_shared``, else ``dim``."""
        return 1 if self.vectorwise_shared else dim

    def initial_state(self, dim: int) -> npt.NDArray[np.float32]:
        """Return ``initial_accumulator_value`` everywhere; float32 ``(S,)``."""
        num = self.num_state_floats(dim)
        return np.full(num, self.initial_accumulator_value, dtype=np.float32)

    def kernel(self) -> Kernel:
        """Return the kernel for one accumulator per row, or per weight."""
        return step_rowwise_adagrad if self.vectorwise_shared else step_adagrad

    def step_numbers(self, dim: int, step: int) -> tuple[float, ...]:
        """Return lr, weight decay, what is kept of the state, eps, 1 / D."""
        return self.lr, self.weight_decay, self.g_square_momentum, self.eps, 1 / dim

    def fbgemm_name(self) -> str:
        """Return fbgemm's name with one accumulator per row, or per weight."""
        return "rowwise_adagrad" if self.vectorwise_shared else "adagrad"

    def fbgemm_cpu_arguments(self) -> tuple[float, ...] | str:
        """Return eps, or why fbgemm cannot step these rows."""
        if self.g_square_momentum != 1:
            return f"its {self.fbgemm_name()} has no g_square_momentum"
        if self.weight_decay:
            return f"its {self.fbgemm_name()} has no weight decay on CPU"
        return (self.eps,)


def step_adagrad(p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int) -> None:
    """Apply ``Adagrad`` to one row."""
    lr, weight_decay, kept, eps = p[0], p[1], p[2], p[3]
    for d in range(dim):
        grad = g[d] + weight_decay * w[d]
        s[d] = kept * s[d] + grad * grad
        w[d] -= lr * grad / (np.sqrt(s[d]) + eps)


def step_rowwise_adagrad(
    p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int
) -> None:
    """Apply ``Adagrad`` with one accumulator to one row."""
    lr, weight_decay, kept, eps, fraction = p[0], p[1], p[2], p[3], p[4]
    total = ZERO
    for d in range(dim):
        grad = g[d] + weight_decay * w[d]
        total += grad * grad
    s[0] = kept * s[0] + fraction * total
    rate = divide(lr, np.sqrt(s[0]) + eps)
    for d in range(dim):
        w[d] -= rate * (g[d] + weight_decay * w[d])


@dataclass(frozen=True)
class AdagradDecay(Optimizer):
    """Adagrad that forgets: now and then the accumulator shrinks, down to its start.

    DeepRec's ``AdagradDecayOptimizer``. A period is ``decay_step`` steps; ``t`` counts
    the update requests of the table on its server, from 1, and ``k`` is how many
    periods have begun since the row was last updated::

        a = max(decay_rate**k * a, initial_accumulator_value) + g * g
        w = w - lr * g / sqrt(a)

    The accumulator ``a`` starts at ``initial_accumulator_value``. State: D + 1 floats,
    ``a`` and then the period of the row's last update, ``t // decay_step``. A row
    decays when it is next updated, with the result of decaying it at each boundary.
    DeepRec decays once at most in an update, so that a row which slept for several
    periods catches up over as many updates; and it keeps the period for every weight.
    There the arguments are called ``accumulator_decay_step`` and
    ``accumulator_decay_rate``. fbgemm and torch have no such optimizer.

    Args:
        lr: learning rate, ``>= 0``.
        initial_accumulator_value: where the accumulator starts and what it never falls
            below, ``> 0``.
        decay_step: steps per period, an integer ``>= 1``.
        decay_rate: what is kept of the accumulator from one period to the next, in
            ``(0, 1)``.
    """

    kind: ClassVar[str] = "adagrad_decay"

    lr: float = 1e-2
    _: KW_ONLY
    initial_accumulator_value: float = 0.1
    decay_step: int = 100_000
    decay_rate: float = 0.9

    def __post_init__(self) -> None:
        self._require_non_negative("lr")
        self._require_positive("initial_accumulator_value")
        is_count = type(self.decay_step) is int and self.decay_step >= 1
        self._require("decay_step", is_count, "an integer >= 1")
        self._require("decay_rate", 0 < self.decay_rate < 1, "in (0, 1)")

    def num_state_floats(self, dim: int) -> int:
        """Return ``dim + 1``."""
        return dim + 1

    def initial_state(self, dim: int) -> npt.NDArray[np.float32]:
        """Return accumulators at their start, in period 0; float32 ``(dim + 1,)``."""
        state_S = super().initial_state(dim)
        state_S[:dim] = self.initial_accumulator_value
        return state_S

    def kernel(self) -> Kernel:
        """Return :func:`step_adagrad_decay`."""
        return step_adagrad_decay

    def step_numbers(self, dim: int, step: int) -> tuple[float, ...]:
        """Return lr, initial accumulator, decay rate, the current period."""
        period = step // self.decay_step
        return self.lr, self.initial_accumulator_value, self.decay_rate, period


def step_adagrad_decay(
    p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int
) -> None:
    """Apply ``AdagradDecay`` to one row."""
    lr, initial, decay_rate, period = p[0], p[1], p[2], p[3]
    factor = ONE
    if period > s[dim]:
        factor = decay_rate ** (period - s[dim])
        s[dim] = period
    for d in range(dim):
        kept = factor * s[d]
        kept = initial if kept < initial else kept
        s[d] = kept + g[d] * g[d]
        w[d] -= lr * g[d] / np.sqrt(s[d])


@dataclass(frozen=True)
class LARS(Optimizer):
    """SGD whose step is in proportion to the length of the row.

    As fbgemm's ``LARS_SGD``, where a row is what the paper calls a layer::

        ratio = eta * |w| / (|g| + wd * |w|)
        b = momentum * b + lr * ratio * (g + wd * w)
        w = w - b

    ``|x|`` is the Euclidean norm of a row. State: D floats (``b``, which starts at 0),
    or none when ``momentum`` is 0. Where ``w`` is all zero, or the denominator is 0,
    ``ratio`` is 1; fbgemm's ratio is 0 or NaN there, so that a zero row stays zero.
    Unlike SGD's, the momentum carries the learning rate of its own step.

    You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", 2017.

    Args:
        lr: learning rate, ``>= 0``.
        eta: trust coefficient, ``> 0``.
        momentum: in ``[0, 1)``.
        weight_decay: L2 penalty, ``>= 0``.
    """

    kind: ClassVar[str] = "lars"
    fbgemm: ClassVar[str] = "lars_sgd"
    torch_twins: ClassVar = {
        "torchrec.optim.LarsSGD": {
            "lr": 0.01,
            "eta": 0.001,
            "momentum": 0.9,
            "weight_decay": 0.0,
        }
    }

    lr: float = 1e-2
    _: KW_ONLY
    eta: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        self._require_non_negative("lr", "weight_decay")
        self._require_positive("eta")
        self._require("momentum", 0 <= self.momentum < 1, "in [0, 1)")

    def num_state_floats(self, dim: int) -> int:
        """Return ``dim`` with momentum, else 0."""
        return dim if self.momentum else 0

    def kernel(self) -> Kernel:
        """Return :func:`step_lars`."""
        return step_lars

    def step_numbers(self, dim: int, step: int) -> tuple[float, ...]:
        """Return lr, momentum, weight decay, eta."""
        return self.lr, self.momentum, self.weight_decay, self.eta


def step_lars(p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int) -> None:
    """Apply ``LARS`` to one row."""
    lr, momentum, weight_decay, eta = p[0], p[1], p[2], p[3]
    length = np.sqrt(sum_of_squares(w, dim))
    denominator = np.sqrt(sum_of_squares(g, dim)) + weight_decay * length
    rate = lr
    if length > ZERO and denominator > ZERO:
        rate = lr * eta * length / denominator
    if momentum == ZERO:
        for d in range(dim):
            w[d] -= rate * (g[d] + weight_decay * w[d])
    else:
        for d in range(dim):
            s[d] = momentum * s[d] + rate * (g[d] + weight_decay * w[d])
            w[d] -= s[d]


@dataclass(frozen=True)
class FTRL(Optimizer):
    """Follow the regularized leader: with ``l1``, weights that matter little are 0.

    FTRL-Proximal, as TensorFlow's ``Ftrl``. With ``p = -lr_power``::

        n' = n + g * g
        z = z + g - (n'**p - n**p) / lr * w
        w = 0                                                   (where |z| <= l1)
        w = (sign(z) * l1 - z) / ((beta + n'**p) / lr + 2 * l2) (elsewhere)
        n = n'

    State: 2 D floats, ``n`` and then ``z``; ``n`` starts at
    ``initial_accumulator_value`` and ``z`` at 0, as in TensorFlow. So the first step of
    a row keeps only the fraction ``1 - (n / n')**p`` of its initial weights; after it,
    without ``l1``, ``l2`` and ``beta``, a row trains as with Adagrad. The paper writes
    ``l2`` where TensorFlow writes ``2 * l2``. DeepRec does as TensorFlow, save that its
    embedding variables compare the norm of the row's ``z`` with ``l1`` and so zero
    whole rows; here each weight is compared by itself. A gradient that is NaN makes its
    weight NaN; TensorFlow makes it 0. fbgemm and torch have no FTRL.

    McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013.

    Args:
        lr: learning rate, ``> 0``.
        lr_power: how the step shrinks with ``n``, ``<= 0``; -0.5 is the paper's, 0
            keeps the learning rate.
        l1: penalty on the absolute weights, ``>= 0``.
        l2: penalty on the squared weights, ``>= 0``.
        initial_accumulator_value: where ``n`` starts, ``>= 0``.
        beta: makes the first steps shorter, ``>= 0``.
    """

    kind: ClassVar[str] = "ftrl"

    lr: float = 1e-3
    _: KW_ONLY
    lr_power: float = -0.5
    l1: float = 0.0
    l2: float = 0.0
    initial_accumulator_value: float = 0.1
    beta: float = 0.0

    def __post_init__(self) -> None:
        self._require_positive("lr")
        power_fits = math.isfinite(self.lr_power) and self.lr_power <= 0
        self._require("lr_power", power_fits, "finite and <= 0")
        self._require_non_negative("l1", "l2", "initial_accumulator_value", "beta")

    def num_state_floats(self, dim: int) -> int:
        """Return ``2 * dim``."""
        return 2 * dim

    def initial_state(self, dim: int) -> npt.NDArray[np.float32]:
        """Return ``n`` at its start and ``z`` at 0; float32 ``(2 * dim,)``."""
        state_S = super().initial_state(dim)
        state_S[:dim] = self.initial_accumulator_value
        return state_S

    def kernel(self) -> Kernel:
        """Return :func:`step_ftrl`."""
        return step_ftrl

    def step_numbers(self, dim: int, step: int) -> tuple[float, ...]:
        """Return 1 / lr, -lr_power, l1, beta / lr + 2 * l2."""
        curvature = self.beta / self.lr + 2 * self.l2
        return 1 / self.lr, -self.lr_power, self.l1, curvature


def step_ftrl(p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int) -> None:
    """Apply ``FTRL`` to one row; ``n`` is ``s[:dim]``, ``z`` is ``s[dim:]``."""
    per_lr, power, l1, curvature = p[0], p[1], p[2], p[3]
    if power == _HALF:  # a loop of its own, since a root is a vector instruction
        for d in range(dim):
            squares = s[d] + g[d] * g[d]
            root = np.sqrt(squares)
            s[dim + d] += g[d] - per_lr * (root - np.sqrt(s[d])) * w[d]
            s[d] = squares
            w[d] = _ftrl_weight(s[dim + d], l1, per_lr * root + curvature)
    else:
        for d in range(dim):
            squares = s[d] + g[d] * g[d]
            root = squares**power
            s[dim + d] += g[d] - per_lr * (root - s[d] ** power) * w[d]
            s[d] = squares
            w[d] = _ftrl_weight(s[dim + d], l1, per_lr * root + curvature)


def _ftrl_weight(z: np.float32, l1: np.float32, curvature: np.float32) -> np.float32:
    """Return the ``w`` of least ``z * w + l1 * abs(w) + curvature / 2 * w * w``."""
    clamped = l1 if z > l1 else z
    clamped = -l1 if clamped < -l1 else clamped
    # Where z is clamped to itself the weight is 0, also if the curvature is.
    return (clamped - z) / curvature if clamped != z else ZERO
