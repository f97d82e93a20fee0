"""The optimizers that follow running means; users import them from ``optim.py``.

All keep the mean ``m`` of the gradients, per weight, and the mean ``v`` of their
squares, per weight or per row; both start at 0, which the powers of the betas correct.
"""

from dataclasses import KW_ONLY, dataclass
from math import sqrt
from typing import Annotated, ClassVar

import numpy as np

from persia_torchrec.arrays import Floats
from persia_torchrec.embedding.setting import (
    MODERATE_DECAY,
    MODERATE_EPS,
    MODERATE_LR,
    Flag,
    Kernel,
    NonNegative,
    Optimizer,
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

Betas = Annotated[
    tuple[float, float],
    Rule(
        "two numbers in [0, 1)",
        lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
    ),
]

_TWIN = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def _step_adam(p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int) -> None:
    beta1, rest1, beta2, rest2, eps = p[0], p[1], p[2], p[3], p[4]
    rate, root_scale, weight_decay, kept = p[5], p[6], p[7], p[8]
    for d in range(dim):
        grad = g[d] + weight_decay * w[d]
        m = beta1 * s[d] + rest1 * grad
        v = beta2 * s[dim + d] + rest2 * grad * grad
        s[d], s[dim + d] = m, v
        w[d] = kept * w[d] - rate * m / (root_scale * np.sqrt(v) + eps)


def _step_nesterov(p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int) -> None:
    beta1, rest1, beta2, rest2, eps = p[0], p[1], p[2], p[3], p[4]
    rate = p[5]
    for d in range(dim):
        m = beta1 * s[d] + rest1 * g[d]
        v = beta2 * s[dim + d] + rest2 * g[d] * g[d]
        s[d], s[dim + d] = m, v
        ahead = beta1 * m + rest1 * g[d]
        w[d] -= rate * ahead / (np.sqrt(v) + eps)


def _step_rmsprop(p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int) -> None:
    beta1, beta2, rest2, eps, lr = p[0], p[2], p[3], p[4], p[5]
    for d in range(dim):
        v = beta2 * s[dim + d] + rest2 * g[d] * g[d]
        m = beta1 * s[d] + lr * g[d] / np.sqrt(v + eps)
        s[d], s[dim + d] = m, v
        w[d] -= m


def _step_row_adam(p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int) -> None:
    beta1, rest1, beta2, rest2, eps = p[0], p[1], p[2], p[3], p[4]
    rate, root_scale, kept = p[5], p[6], p[8]
    s[dim] = beta2 * s[dim] + rest2 * sum_of_squares(g, dim)
    rate = divide(rate, root_scale * np.sqrt(s[dim]) + eps)
    for d in range(dim):
        s[d] = beta1 * s[d] + rest1 * g[d]
        w[d] = kept * w[d] - rate * s[d]


def _step_lamb(p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int) -> None:
    beta1, rest1, beta2, rest2, eps = p[0], p[1], p[2], p[3], p[4]
    root_scale, weight_decay, lr, m_scale = p[6], p[7], p[9], p[10]
    total = ZERO
    for d in range(dim):
        s[d] = beta1 * s[d] + rest1 * g[d]
        v = beta2 * s[dim + d] + rest2 * g[d] * g[d]
        s[dim + d] = v
        u = m_scale * s[d] / (root_scale * np.sqrt(v) + eps) + weight_decay * w[d]
        total += u * u
    rate = lr * _trust_ratio(length_of(w, dim), np.sqrt(total))
    for d in range(dim):  # recompute u: there is no scratch buffer
        root = root_scale * np.sqrt(s[dim + d])
        u = m_scale * s[d] / (root + eps) + weight_decay * w[d]
        w[d] -= rate * u


def _step_row_lamb(p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int) -> None:
    beta1, rest1, beta2, rest2, eps = p[0], p[1], p[2], p[3], p[4]
    root_scale, weight_decay, lr, m_scale = p[6], p[7], p[9], p[10]
    s[dim] = beta2 * s[dim] + rest2 * sum_of_squares(g, dim)
    m_scale = divide(m_scale, root_scale * np.sqrt(s[dim]) + eps)
    total = ZERO
    for d in range(dim):
        s[d] = beta1 * s[d] + rest1 * g[d]
        u = m_scale * s[d] + weight_decay * w[d]
        total += u * u
    rate = lr * _trust_ratio(length_of(w, dim), np.sqrt(total))
    for d in range(dim):
        w[d] -= rate * (m_scale * s[d] + weight_decay * w[d])


def _trust_ratio(w_length: np.float32, u_length: np.float32) -> np.float32:
    return divide(w_length, u_length) if w_length > ZERO and u_length > ZERO else ONE


def _means(
    betas: Betas, eps: float, step: int, dim: int = 1
) -> tuple[tuple[float, ...], float, float]:
    """Return beta1, 1 - beta1, beta2, (1 - beta2) / dim, eps; and the corrections.

    They are what ``m`` and the root of ``v`` are multiplied by at a step.
    """
    beta1, beta2 = betas
    numbers = beta1, 1 - beta1, beta2, (1 - beta2) / dim, eps
    return numbers, 1 / (1 - beta1**step), 1 / sqrt(1 - beta2**step)


def _stays_finite(optimizer: "_Moments | AdamAsync") -> bool:
    """Return whether quotients of the means stay moderate: ``v`` is kept longer."""
    beta1, beta2 = optimizer.betas
    is_moderate = optimizer.lr <= MODERATE_LR and optimizer.eps >= MODERATE_EPS
    return is_moderate and beta1**2 <= beta2


@dataclass(frozen=True)
class _Moments(Optimizer):
    """What those share that have Adam's arguments; all but ``lr`` are given by name."""

    is_rowwise: ClassVar[bool] = False
    """Whether the row has one mean of squares, and not each weight its own."""

    adds_decay: ClassVar[bool] = False
    """Whether the decay is a term of gradient or direction; else weights shrink."""

    lr: NonNegative = 1e-3
    _: KW_ONLY
    betas: Betas = (0.9, 0.999)
    weight_decay: NonNegative = 0.0
    eps: NonNegative = 1e-8

    @property
    def stays_finite(self) -> bool:
        """Whether each step leaves a row finite while all numbers are moderate."""
        decays = (
            self.weight_decay <= MODERATE_DECAY and self.lr * self.weight_decay <= 1
        )
        return _stays_finite(self) and decays

    def initial_state(self, dim: int) -> Floats:
        """Return ``m`` and ``v``, both 0."""
        return np.zeros(dim + 1 if self.is_rowwise else 2 * dim, dtype=np.float32)

    def step_numbers(self, dim: int, step: int) -> tuple[float, ...]:
        """Return means, rate, root's scale, penalty, kept weight, lr, m's scale."""
        squares = dim if self.is_rowwise else 1
        numbers, scale, root_scale = _means(self.betas, self.eps, step, squares)
        penalty, kept = self.weight_decay, 1.0
        if not self.adds_decay:
            penalty, kept = 0.0, 1 - self.lr * self.weight_decay
        return (*numbers, self.lr * scale, root_scale, penalty, kept, self.lr, scale)


@dataclass(frozen=True)
class Adam(_Moments):
    """Follow running means of the gradient and of its square.

    As ``torch.optim.Adam``, with the L2 penalty added to the gradient::

        g = g + wd * w
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        w = w - lr * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)

    State: 2 D floats, ``m`` then ``v``, both starting at 0. ``t`` counts the update
    requests of the table on its server, from 1, as fbgemm's ``iter`` does: with one
    trainer it is the step. Every push goes to every server, so that ``t`` does not
    depend on how ids are spread. Both ``betas`` are in ``[0, 1)``, the other arguments
    ``>= 0``. PERSIA's first step uses ``beta**2``. fbgemm's ``ADAM`` decays weights as
    :class:`AdamW` does.

    Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015.
    """

    kind: ClassVar[str] = "adam"
    kernel = staticmethod(_step_adam)
    adds_decay: ClassVar[bool] = True

    betas: Betas = (0.9, 0.999)  # by position, as PERSIA has it
    weight_decay: NonNegative = 0.0
    eps: NonNegative = 1e-8

    @property
    def fbgemm_name(self) -> str:
        """Nothing with weight decay, which fbgemm's applies as AdamW does."""
        return "" if self.weight_decay else "adam"


@dataclass(frozen=True)
class AdamW(_Moments):
    """Adam whose weight decay does not pass through the means.

    As ``torch.optim.AdamW``, and as fbgemm's ``ADAM``::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        w = (1 - lr * wd) * w
            - lr * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)

    State, ``t`` and arguments are Adam's, but that ``weight_decay`` is what a weight
    loses per step, in units of ``lr``. A row decays when it is in a batch, not
    otherwise. For embedding variables, DeepRec's ``AdamWOptimizer`` scales the decay by
    Adam's corrections too.

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019.
    """

    kind: ClassVar[str] = "adamw"
    kernel = staticmethod(_step_adam)
    fbgemm_name = "adam"
    torch_twins: ClassVar = {"torch.optim.Adam": _TWIN, "torchrec.optim.Adam": _TWIN}

    _: KW_ONLY
    weight_decay: NonNegative = 1e-2


@dataclass(frozen=True)
class RowwiseAdam(_Moments):
    """Adam with one mean of squares for the whole row.

    As fbgemm's ``PARTIAL_ROWWISE_ADAM``, whose weight decay is AdamW's::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * mean(g * g)
        w = (1 - lr * wd) * w
            - lr * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)

    State: D + 1 floats, ``m`` then the one ``v``: nearly half of Adam's. ``t`` is
    Adam's, the arguments are AdamW's. torch and PERSIA have no such optimizer.
    """

    kind: ClassVar[str] = "rowwise_adam"
    kernel = staticmethod(_step_row_adam)
    fbgemm_name = "partial_rowwise_adam"
    torch_twins: ClassVar = {"torchrec.optim.PartialRowWiseAdam": _TWIN}
    is_rowwise: ClassVar[bool] = True


@dataclass(frozen=True)
class LAMB(_Moments):
    """Adam's direction, with a length in proportion to that of the row.

    As fbgemm's ``LAMB``, where a row is what the paper calls a layer::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        u = (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps) + wd * w
        w = w - lr * |w| / |u| * u

    ``|x|`` is the Euclidean norm of a row; state, ``t`` and arguments are Adam's, but
    that ``weight_decay`` is the weight of ``w`` in the direction. Where ``w`` or ``u``
    is all zero, 1 stands for ``|w| / |u|``, as in the authors' code; in fbgemm a zero
    row stays zero, or becomes NaN.

    You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76
    minutes", ICLR 2020.
    """

    kind: ClassVar[str] = "lamb"
    reads_norms: ClassVar[bool] = True
    kernel = staticmethod(_step_lamb)
    stays_finite: ClassVar[bool] = False  # a step is as long as the row
    fbgemm_name = "lamb"
    torch_twins: ClassVar = {"torchrec.optim.LAMB": _TWIN}
    adds_decay: ClassVar[bool] = True


@dataclass(frozen=True)
class RowwiseLAMB(LAMB):
    """LAMB with one mean of squares for the whole row.

    As fbgemm's ``PARTIAL_ROWWISE_LAMB``: LAMB's formula and arguments, in which::

        v = beta2 * v + (1 - beta2) * mean(g * g)

    State: D + 1 floats, ``m`` then the one ``v``. A zero row is treated as LAMB's.
    """

    kind: ClassVar[str] = "rowwise_lamb"
    kernel = staticmethod(_step_row_lamb)
    fbgemm_name = "partial_rowwise_lamb"
    torch_twins: ClassVar = {"torchrec.optim.PartialRowWiseLAMB": _TWIN}
    is_rowwise: ClassVar[bool] = True


@dataclass(frozen=True)
class AdamAsync(Optimizer):
    """Adam for tables that many trainers update without waiting for each other.

    DeepRec's ``AdamAsyncOptimizer``::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        u = m                                      (as it stands)
        u = beta1 * m + (1 - beta1) * g            (use_nesterov)
        w = w - lr * sqrt(1 - beta2**t) / (1 - beta1**t) * u / (sqrt(v) + eps)

    It differs from :class:`Adam` in where ``eps`` stands: next to the root that is not
    yet corrected, the "epsilon hat" of Adam's paper; and in that ``t`` is each table's
    own, as anywhere here. With ``apply_sparse_rmsprop`` the means are not corrected,
    and ``m`` is a velocity that holds the step: RMSProp with momentum ``beta1``::

        v = beta2 * v + (1 - beta2) * g * g
        m = beta1 * m + lr * g / sqrt(v + eps)
        w = w - m

    That is what DeepRec's CPU and embedding-variable kernels compute. The kernel of its
    plain variables on GPUs does not divide by the root of ``v``. The two options
    exclude each other; DeepRec's Python class lacks ``use_nesterov``. State, ``lr``,
    ``betas`` and ``eps`` are Adam's. There is no weight decay.
    """

    kind: ClassVar[str] = "adam_async"

    lr: NonNegative = 1e-3
    _: KW_ONLY
    betas: Betas = (0.9, 0.999)
    eps: NonNegative = 1e-8
    apply_sparse_rmsprop: Flag = False
    use_nesterov: Flag = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.apply_sparse_rmsprop and self.use_nesterov:
            raise ConfigError(
                "AdamAsync: use_nesterov must be False with apply_sparse_rmsprop. "
                "Received: True for both. Choose one."
            )

    @property
    def kernel(self) -> Kernel:
        """The kernel that the options choose."""
        if self.apply_sparse_rmsprop:
            return _step_rmsprop
        return _step_nesterov if self.use_nesterov else _step_adam

    @property
    def stays_finite(self) -> bool:
        """Whether each step leaves a row finite while all numbers are moderate."""
        return _stays_finite(self)

    def initial_state(self, dim: int) -> Floats:
        """Return ``m`` and ``v``, both 0."""
        return np.zeros(2 * dim, dtype=np.float32)

    def step_numbers(self, dim: int, step: int) -> tuple[float, ...]:
        """Return the means', rate; then 1, 0, 1: Adam's root, penalty, kept weight."""
        numbers, scale, root_scale = _means(self.betas, self.eps, step)
        is_corrected = not self.apply_sparse_rmsprop
        rate = self.lr * scale / root_scale if is_corrected else self.lr
        return (*numbers, rate, 1.0, 0.0, 1.0)
