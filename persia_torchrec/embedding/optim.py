"""The optimizers that an embedding server can apply; Adam's kin: ``optim_adam.py``.

Names, arguments and defaults of ``SGD``, ``Adagrad`` and ``Adam`` are PERSIA's; the
formulas are those of fbgemm's fused optimizers and of ``torch.optim``, so that a table
moved onto a server trains as before. Where another's formula differs, the docstring
says how. Of the others, all arguments but ``lr`` are given by name.

In the formulas ``w`` is a row's weights, D of them, ``g`` its gradient summed over the
batch, ``wd`` is ``weight_decay``. A row that is not in the batch keeps its weights and
its state.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar

import numpy as np

from persia_torchrec.arrays import Floats
from persia_torchrec.embedding import setting
from persia_torchrec.embedding.optim_adam import (
    LAMB,
    Adam,
    AdamAsync,
    AdamW,
    RowwiseAdam,
    RowwiseLAMB,
)
from persia_torchrec.embedding.setting import (
    MODERATE_DECAY,
    MODERATE_EPS,
    MODERATE_LR,
    Kernel,
    Optimizer,
    Registry,
    Rule,
)
from persia_torchrec.errors import ConfigError
from persia_torchrec.jit.kernel import (
    ONE,
    ZERO,
    Pointer,
    divide,
    length_of,
    sum_of_squares,
)

__all__ = [
    "FTRL",
    "LAMB",
    "LARS",
    "OPTIMIZERS",
    "SGD",
    "Adagrad",
    "AdagradDecay",
    "Adam",
    "AdamAsync",
    "AdamW",
    "Optimizer",
    "RowwiseAdam",
    "RowwiseLAMB",
]


_HALF = np.float32(0.5)
_ADAGRAD_TWIN = {"lr": 0.01, "initial_accumulator_value": 0.0, "eps": 1e-8}


def _step_sgd(p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int) -> None:
    lr, momentum, weight_decay = p[0], p[1], p[2]
    if momentum == ZERO:
        for d in range(dim):
            w[d] -= lr * (g[d] + weight_decay * w[d])
    else:
        for d in range(dim):
            s[d] = momentum * s[d] + (g[d] + weight_decay * w[d])
            w[d] -= lr * s[d]


@dataclass(frozen=True)
class SGD(Optimizer):
    """Step against the gradient.

    As ``torch.optim.SGD``::

        g = g + wd * w
        b = momentum * b + g          (only with momentum; b starts at 0)
        w = w - lr * b

    State: none, or D floats (``b``) when ``momentum`` is not 0. ``lr`` and
    ``weight_decay``, an L2 penalty, are ``>= 0``, ``momentum`` is in ``[0, 1)``. PERSIA
    accepts ``momentum`` and ignores it; here it works. fbgemm's ``EXACT_SGD`` has
    neither momentum nor weight decay.
    """

    kind: ClassVar[str] = "sgd"
    kernel = staticmethod(_step_sgd)
    fbgemm_name = "sgd"
    torch_twins: ClassVar = {
        "torch.optim.SGD": {"lr": 0.01},
        "torchrec.optim.SGD": {"lr": 0.01},
    }

    momentum: setting.BelowOne = 0.0
    weight_decay: setting.NonNegative = 0.0

    def initial_state(self, dim: int) -> Floats:
        """Return ``b`` with momentum, else nothing."""
        return np.zeros(dim if self.momentum else 0, dtype=np.float32)

    def step_numbers(self, dim: int, step: int) -> tuple[float, ...]:
        """Return lr, momentum, weight decay."""
        return self.lr, self.momentum, self.weight_decay

    @property
    def stays_finite(self) -> bool:
        """Whether each step leaves a row finite while all numbers are moderate."""
        decays = (
            self.weight_decay <= MODERATE_DECAY and self.lr * self.weight_decay <= 1
        )
        return self.lr <= MODERATE_LR and decays

    def fbgemm_cpu_arguments(self) -> tuple[float, ...] | str:
        """Return nothing, or why fbgemm cannot step these rows."""
        if self.momentum:
            return "its sgd has no momentum"
        return "its sgd has no weight decay on CPU" if self.weight_decay else ()


def _step_adagrad(p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int) -> None:
    lr, weight_decay, kept, eps = p[0], p[1], p[2], p[3]
    for d in range(dim):
        grad = g[d] + weight_decay * w[d]
        s[d] = kept * s[d] + grad * grad
        w[d] -= lr * grad / (np.sqrt(s[d]) + eps)


def _step_row_adagrad(p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int) -> None:
    lr, weight_decay, kept, eps, fraction = p[0], p[1], p[2], p[3], p[4]
    total = ZERO
    for d in range(dim):
        grad = g[d] + weight_decay * w[d]
        total += grad * grad
    s[0] = kept * s[0] + fraction * total
    rate = divide(lr, np.sqrt(s[0]) + eps)
    for d in range(dim):
        w[d] -= rate * (g[d] + weight_decay * w[d])


def _step_row_adagrad_bounded(
    p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int
) -> None:
    """Step a row with L2 or decoupled decay, and bound its length."""
    lr, weight_decay, kept, eps, fraction = p[0], p[1], p[2], p[3], p[4]
    decoupled, max_norm = p[5], p[6]
    total = ZERO
    for d in range(dim):
        grad = g[d] + weight_decay * w[d]
        total += grad * grad
    s[0] = kept * s[0] + fraction * total
    rate = divide(lr, np.sqrt(s[0]) + eps)
    for d in range(dim):
        w[d] -= rate * (g[d] + weight_decay * w[d]) + lr * decoupled * w[d]
    if max_norm > ZERO:
        length = np.sqrt(sum_of_squares(w, dim))
        if length > max_norm:
            scale = divide(max_norm, length)
            for d in range(dim):
                w[d] *= scale


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Scale each step by the root of all squared gradients so far.

    As fbgemm's ``EXACT_ADAGRAD``, and ``EXACT_ROWWISE_ADAGRAD`` when
    ``vectorwise_shared``::

        g = g + wd * w
        a = g_square_momentum * a + g * g          (per element: D floats of state)
        a = g_square_momentum * a + mean(g * g)    (vectorwise_shared: one float)
        w = w - lr * g / (sqrt(a) + eps)

    The accumulator ``a`` starts at ``initial_accumulator_value``. ``g_square_momentum``
    is in ``(0, 1]``: 1 is Adagrad, less forgets old gradients. ``weight_decay`` is an
    L2 penalty; it, ``lr``, ``eps`` and the start are ``>= 0``.

    With ``vectorwise_shared`` two more arguments, by name. ``decoupled_weight_decay``
    takes ``lr * wd * w`` from the weights instead, past the accumulator. ``max_norm``,
    ``>= 0``, is the largest Euclidean norm of a row after a step, up to one rounding of
    each weight: a longer row is scaled down to it; 0 sets no bound.

    PERSIA steps with the accumulator without this gradient, puts ``eps`` under the root
    and ignores ``weight_decay``. Of fbgemm only the GPU kernel of the rowwise one has
    these decays (``weight_decay_mode`` L2 and DECOUPLE) and this ``max_norm``: its CPU
    kernel ignores them, and ``EXACT_ADAGRAD`` has none.

    Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and
    Stochastic Optimization", JMLR 2011.
    """

    kind: ClassVar[str] = "adagrad"
    torch_twins: ClassVar = {
        "torch.optim.Adagrad": _ADAGRAD_TWIN,
        "torchrec.optim.Adagrad": _ADAGRAD_TWIN,
        "torchrec.optim.RowWiseAdagrad": {
            **_ADAGRAD_TWIN,
            "weight_decay": 0.0,
            "decoupled_weight_decay": False,
            "max_norm": 0.0,
            "vectorwise_shared": True,
        },
    }

    lr: setting.NonNegative = 1e-2
    initial_accumulator_value: setting.NonNegative = 1e-2
    weight_decay: setting.NonNegative = 0.0
    g_square_momentum: Annotated[
        float, Rule("in (0, 1]", lambda value: 0 < value <= 1)
    ] = 1.0
    eps: setting.NonNegative = 1e-10
    vectorwise_shared: setting.Flag = False
    _: KW_ONLY
    decoupled_weight_decay: setting.Flag = False
    max_norm: setting.NonNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._is_bounded and not self.vectorwise_shared:
            raise ConfigError(
                "Adagrad: decoupled_weight_decay and max_norm need vectorwise_shared="
                f"True. Received: {self.describe()}."
            )

    def to_json(self) -> dict[str, object]:
        """Describe it; arguments that earlier versions lack only where they are set."""
        values = super().to_json()
        later = ("decoupled_weight_decay", "max_norm")
        return {k: v for k, v in values.items() if v or k not in later}

    @property
    def _is_bounded(self) -> bool:
        return bool(self.decoupled_weight_decay or self.max_norm)

    @property
    def kernel(self) -> Kernel:
        """The kernel for one accumulator per row, or per weight."""
        if self._is_bounded:
            return _step_row_adagrad_bounded
        return _step_row_adagrad if self.vectorwise_shared else _step_adagrad

    def initial_state(self, dim: int) -> Floats:
        """Return the accumulators at their start, one when ``vectorwise_shared``."""
        num = 1 if self.vectorwise_shared else dim
        return np.full(num, self.initial_accumulator_value, dtype=np.float32)

    def step_numbers(self, dim: int, step: int) -> tuple[float, ...]:
        """Return lr, L2, what is kept of the state, eps, 1 / D; decay, norm's bound."""
        decays = self.weight_decay, 0.0
        numbers = self.g_square_momentum, self.eps, 1 / dim
        if not self._is_bounded:
            return self.lr, decays[0], *numbers
        penalty, decoupled = decays[:: -1 if self.decoupled_weight_decay else 1]
        return self.lr, penalty, *numbers, decoupled, self.max_norm

    @property
    def stays_finite(self) -> bool:
        """Whether each step leaves a row finite while all numbers are moderate."""
        is_moderate = self.lr <= MODERATE_LR and self.weight_decay <= 1
        if self.decoupled_weight_decay:
            is_moderate &= self.lr * self.weight_decay <= 1
        return is_moderate and self.eps >= MODERATE_EPS

    @property
    def reads_norms(self) -> bool:
        """Whether a step bounds the norm of the weights."""
        return self.max_norm > 0

    @property
    def fbgemm_name(self) -> str:
        """The name in fbgemm with one accumulator per row, or per weight."""
        return "rowwise_adagrad" if self.vectorwise_shared else "adagrad"

    def fbgemm_cpu_arguments(self) -> tuple[float, ...] | str:
        """Return eps, or why fbgemm cannot step these rows."""
        if self.g_square_momentum != 1:
            return f"its {self.fbgemm_name} has no g_square_momentum"
        if self.weight_decay:
            return f"its {self.fbgemm_name} has no weight decay on CPU"
        if self.max_norm:
            return f"its {self.fbgemm_name} has no max_norm on CPU"
        return (self.eps,)


def _step_decaying(p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int) -> None:
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
class AdagradDecay(Optimizer):
    """Adagrad that forgets: now and then the accumulator shrinks, down to its start.

    DeepRec's ``AdagradDecayOptimizer``. A period is ``decay_step`` (``>= 1``) steps;
    ``t`` counts the update requests of the table on its server, from 1, and ``k`` is
    how many periods have begun since the row was last updated::

        a = max(decay_rate**k * a, initial_accumulator_value) + g * g
        w = w - lr * g / sqrt(a)

    The accumulator ``a`` starts at ``initial_accumulator_value``, ``> 0``; ``lr`` is
    ``>= 0``, ``decay_rate`` in ``(0, 1)``. State: D + 1 floats, ``a`` and then the
    period of the row's last update, ``t // decay_step``; from 2**24 on a float32 has
    every second one, later every fourth, and the row decays by as many at once. A row
    decays when it is next updated, with the result of decaying it at each boundary.
    DeepRec, where the arguments are called ``accumulator_decay_step`` and
    ``accumulator_decay_rate``, decays once at most in an update, so that a row which
    slept for several periods catches up over as many updates. fbgemm and torch have no
    such optimizer.
    """

    kind: ClassVar[str] = "adagrad_decay"
    kernel = staticmethod(_step_decaying)

    lr: setting.NonNegative = 1e-2
    _: KW_ONLY
    initial_accumulator_value: setting.Positive = 0.1
    decay_step: Annotated[int, setting.integer_in(1, 2**48)] = 100_000
    decay_rate: setting.InsideOne = 0.9

    def initial_state(self, dim: int) -> Floats:
        """Return accumulators at their start, in period 0."""
        initial = [self.initial_accumulator_value] * dim
        return np.array([*initial, 0], dtype=np.float32)

    @property
    def stays_finite(self) -> bool:
        """Whether each step leaves a row finite while all numbers are moderate."""
        begin = self.initial_accumulator_value
        return self.lr <= MODERATE_LR and begin >= MODERATE_EPS

    def step_numbers(self, dim: int, step: int) -> tuple[float, ...]:
        """Return lr, initial accumulator, decay rate, the current period."""
        period = step // self.decay_step
        return self.lr, self.initial_accumulator_value, self.decay_rate, period


def _step_lars(p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int) -> None:
    lr, momentum, weight_decay, eta = p[0], p[1], p[2], p[3]
    length = length_of(w, dim)
    denominator = length_of(g, dim) + weight_decay * length
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
class LARS(Optimizer):
    """SGD whose step is in proportion to the length of the row.

    As fbgemm's ``LARS_SGD``, where a row is what the paper calls a layer::

        ratio = eta * |w| / (|g| + wd * |w|)
        b = momentum * b + lr * ratio * (g + wd * w)
        w = w - b

    ``|x|`` is the Euclidean norm of a row. State: D floats (``b``, which starts at 0),
    or none when ``momentum`` is 0. ``eta``, the trust coefficient, is ``> 0``, the
    others are as SGD's; but the momentum carries the learning rate of its own step.
    Where ``w`` is all zero, or the denominator is 0, ``ratio`` is 1; fbgemm's ratio is
    0 or NaN there, so that a zero row stays zero.

    You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", 2017.
    """

    kind: ClassVar[str] = "lars"
    kernel = staticmethod(_step_lars)
    reads_norms: ClassVar[bool] = True
    fbgemm_name = "lars_sgd"
    torch_twins: ClassVar = {
        "torchrec.optim.LarsSGD": {
            "lr": 0.01,
            "eta": 0.001,
            "momentum": 0.9,
            "weight_decay": 0.0,
        }
    }

    lr: setting.NonNegative = 1e-2
    _: KW_ONLY
    eta: setting.Positive = 1e-3
    momentum: setting.BelowOne = 0.9
    weight_decay: setting.NonNegative = 0.0

    def initial_state(self, dim: int) -> Floats:
        """Return ``b`` with momentum, else nothing."""
        return np.zeros(dim if self.momentum else 0, dtype=np.float32)

    def step_numbers(self, dim: int, step: int) -> tuple[float, ...]:
        """Return lr, momentum, weight decay, eta."""
        return self.lr, self.momentum, self.weight_decay, self.eta


def _step_ftrl(p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int) -> None:
    """Step a row; ``n`` is ``s[:dim]``, ``z`` is ``s[dim:]``."""
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


@dataclass(frozen=True)
class FTRL(Optimizer):
    """Follow the regularized leader: with ``l1``, weights that matter little are 0.

    FTRL-Proximal, as TensorFlow's ``Ftrl``. With ``p = -lr_power``::

        n' = n + g * g
        z = z + g - (n'**p - n**p) / lr * w
        w = 0                                                   (where |z| <= l1)
        w = (sign(z) * l1 - z) / ((beta + n'**p) / lr + 2 * l2) (elsewhere)
        n = n'

    ``lr`` is ``> 0``; ``lr_power``, ``<= 0``, says how the step shrinks with ``n``:
    -0.5 is the paper's, 0 keeps the learning rate. ``l1`` and ``l2`` are penalties on
    the absolute and the squared weights, ``beta`` makes the first steps shorter; they
    and ``initial_accumulator_value`` are ``>= 0``.

    State: 2 D floats, ``n`` and then ``z``; ``n`` starts at
    ``initial_accumulator_value`` and ``z`` at 0, as in TensorFlow. So the first step of
    a row keeps only the fraction ``1 - (n / n')**p`` of its initial weights, and of
    those that were written or loaded without state, as from a checkpoint of another
    optimizer: a small gradient makes them nearly 0, one of 0 makes them 0. With
    ``initial_accumulator_value=0`` they stay where the gradient is not 0. After it,
    without ``l1``, ``l2`` and ``beta``, a row trains as with Adagrad. The paper writes
    ``l2`` where TensorFlow writes ``2 * l2``. DeepRec's embedding variables compare the
    norm of the row's ``z`` with ``l1`` and so zero whole rows. A gradient that is NaN
    makes its weight NaN; TensorFlow makes it 0. fbgemm and torch have no FTRL.

    McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013.
    """

    kind: ClassVar[str] = "ftrl"
    kernel = staticmethod(_step_ftrl)

    lr: setting.Positive = 1e-3
    _: KW_ONLY
    lr_power: setting.NonPositive = -0.5
    l1: setting.NonNegative = 0.0
    l2: setting.NonNegative = 0.0
    initial_accumulator_value: setting.NonNegative = 0.1
    beta: setting.NonNegative = 0.0

    def initial_state(self, dim: int) -> Floats:
        """Return ``n`` at its start and ``z`` at 0."""
        initial = np.array([self.initial_accumulator_value, 0], dtype=np.float32)
        return np.repeat(initial, dim)

    def step_numbers(self, dim: int, step: int) -> tuple[float, ...]:
        """Return 1 / lr, -lr_power, l1, beta / lr + 2 * l2."""
        curvature = self.beta / self.lr + 2 * self.l2
        return 1 / self.lr, -self.lr_power, self.l1, curvature


OPTIMIZERS: Registry[Optimizer] = Registry(
    Optimizer,
    SGD,
    Adagrad,
    AdagradDecay,
    LARS,
    FTRL,
    Adam,
    AdamW,
    RowwiseAdam,
    AdamAsync,
    LAMB,
    RowwiseLAMB,
)
"""Every optimizer that servers can apply."""
