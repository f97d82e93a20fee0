"""The optimizers that follow running means: Adam and its kin.

``embedding/optim.py`` says what the letters in the formulas mean, and is where users
import these from. All keep the mean ``m`` of the gradients, per weight, and the mean
``v`` of their squares, per weight or per row; both start at 0, which the powers of the
betas correct. The kernels that step a row stand after the classes.
"""

from dataclasses import KW_ONLY, dataclass, field
from math import sqrt
from typing import ClassVar

import numpy as np

from persia_torchrec.embedding.kernel import (
    ONE,
    ZERO,
    Pointer,
    divide,
    sum_of_squares,
)
from persia_torchrec.embedding.setting import Kernel, Optimizer
from persia_torchrec.errors import ConfigError

_MEANS = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def _bias_corrections(betas: tuple[float, float], step: int) -> tuple[float, float]:
    """Return what ``m`` and the root of ``v`` are multiplied by at a step."""
    return 1 / (1 - betas[0] ** step), 1 / sqrt(1 - betas[1] ** step)


def _means(betas: tuple[float, float], eps: float, dim: int = 1) -> tuple[float, ...]:
    """Return beta1, 1 - beta1, beta2, (1 - beta2) / dim, eps."""
    beta1, beta2 = betas
    return beta1, 1 - beta1, beta2, (1 - beta2) / dim, eps


@dataclass(frozen=True)
class Adam(Optimizer):
    """Follow running means of the gradient and of its square.

    As ``torch.optim.Adam``, with the L2 penalty added to the gradient::

        g = g + wd * w
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        w = w - lr * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)

    State: 2 D floats, ``m`` then ``v``, both starting at 0. ``t`` counts the update
    requests of the table on its server, from 1, as fbgemm's ``iter`` does: with one
    trainer it is the step. Every push goes to every server, so that ``t`` does not
    depend on how ids are spread. PERSIA's first step uses ``beta**2``. fbgemm's
    ``ADAM`` decays weights as :class:`AdamW` does.

    Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015.

    Args:
        lr: learning rate, ``>= 0``.
        betas: ``(beta1, beta2)``, both in ``[0, 1)``.
        weight_decay: L2 penalty, ``>= 0``.
        eps: keeps the quotient finite, ``>= 0``.
    """

    kind: ClassVar[str] = "adam"
    fbgemm: ClassVar[str] = "adam"

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        self._require_non_negative("lr", "weight_decay", "eps")
        self._require_betas(self.betas)

    def num_state_floats(self, dim: int) -> int:
        """Return ``2 * dim``."""
        return 2 * dim

    def kernel(self) -> Kernel:
        """Return :func:`step_adam`."""
        return step_adam

    def step_numbers(self, dim: int, step: int) -> tuple[float, ...]:
        """Return the means', rate, scale of the root, L2 penalty, kept weight."""
        scale, root_scale = _bias_corrections(self.betas, step)
        rest = (self.lr * scale, root_scale, self.weight_decay, 1.0)
        return _means(self.betas, self.eps) + rest

    def fbgemm_name(self) -> str:
        """Return nothing with weight decay, which fbgemm's applies as AdamW does."""
        return "" if self.weight_decay else self.fbgemm


@dataclass(frozen=True)
class _Moments(Optimizer):
    """Hold what those share whose weight decay stays out of the means.

    The arguments are :class:`Adam`'s, all but ``lr`` by name.
    """

    lr: float = 1e-3
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        self._require_non_negative("lr", "eps", "weight_decay")
        self._require_betas(self.betas)

    def num_state_floats(self, dim: int) -> int:
        """Return ``2 * dim``."""
        return 2 * dim


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
    fbgemm: ClassVar[str] = "adam"
    torch_twins: ClassVar = {
        "torch.optim.Adam": _MEANS,
        "torchrec.optim.Adam": _MEANS,
    }

    weight_decay: float = field(default=1e-2, kw_only=True)

    def kernel(self) -> Kernel:
        """Return :func:`step_adam`."""
        return step_adam

    def step_numbers(self, dim: int, step: int) -> tuple[float, ...]:
        """Return the means', rate, scale of the root, L2 penalty, kept weight."""
        scale, root_scale = _bias_corrections(self.betas, step)
        rest = (self.lr * scale, root_scale, 0.0, 1 - self.lr * self.weight_decay)
        return _means(self.betas, self.eps) + rest


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
    fbgemm: ClassVar[str] = "partial_rowwise_adam"
    torch_twins: ClassVar = {"torchrec.optim.PartialRowWiseAdam": _MEANS}

    def num_state_floats(self, dim: int) -> int:
        """Return ``dim + 1``."""
        return dim + 1

    def kernel(self) -> Kernel:
        """Return :func:`step_rowwise_adam`."""
        return step_rowwise_adam

    def step_numbers(self, dim: int, step: int) -> tuple[float, ...]:
        """Return the means', rate, scale of the root, kept weight."""
        scale, root_scale = _bias_corrections(self.betas, step)
        rest = (self.lr * scale, root_scale, 1 - self.lr * self.weight_decay)
        return _means(self.betas, self.eps, dim) + rest


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
    fbgemm: ClassVar[str] = "lamb"
    torch_twins: ClassVar = {"torchrec.optim.LAMB": _MEANS}

    def kernel(self) -> Kernel:
        """Return :func:`step_lamb`."""
        return step_lamb

    def step_numbers(self, dim: int, step: int) -> tuple[float, ...]:
        """Return the means', lr, weight decay, scales of ``m`` and the root."""
        rest = (self.lr, self.weight_decay, *_bias_corrections(self.betas, step))
        return _means(self.betas, self.eps) + rest


@dataclass(frozen=True)
class RowwiseLAMB(_Moments):
    """LAMB with one mean of squares for the whole row.

    As fbgemm's ``PARTIAL_ROWWISE_LAMB``: LAMB's formula and arguments, in which::

        v = beta2 * v + (1 - beta2) * mean(g * g)

    State: D + 1 floats, ``m`` then the one ``v``. A zero row is treated as LAMB's.
    """

    kind: ClassVar[str] = "rowwise_lamb"
    fbgemm: ClassVar[str] = "partial_rowwise_lamb"
    torch_twins: ClassVar = {"torchrec.optim.PartialRowWiseLAMB": _MEANS}

    def num_state_floats(self, dim: int) -> int:
        """Return ``dim + 1``."""
        return dim + 1

    def kernel(self) -> Kernel:
        """Return :func:`step_rowwise_lamb`."""
        return step_rowwise_lamb

    def step_numbers(self, dim: int, step: int) -> tuple[float, ...]:
        """Return the means', lr, weight decay, scales of ``m`` and the root."""
        rest = (self.lr, self.weight_decay, *_bias_corrections(self.betas, step))
        return _means(self.betas, self.eps, dim) + rest


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
    yet corrected, the "epsilon hat" of Adam's paper. DeepRec counts ``t`` for each
    variable instead of for the whole model; here every table counts its own in any
    case. With ``apply_sparse_rmsprop`` the means are not corrected, and ``m`` is a
    velocity that holds the step::

        v = beta2 * v + (1 - beta2) * g * g
        m = beta1 * m + lr * g / sqrt(v + eps)
        w = w - m

    That is what DeepRec's CPU and embedding-variable kernels compute: RMSProp with
    momentum ``beta1``; 0 switches the momentum off. The kernel of its plain variables
    on GPUs does not divide by the root of ``v``. DeepRec's operator for dense gradients
    knows ``use_nesterov``, but its Python class does not offer it; the two options
    exclude each other. State, ``lr``, ``betas`` and ``eps`` are Adam's. There is no
    weight decay.

    Args:
        apply_sparse_rmsprop: step as RMSProp with momentum.
        use_nesterov: look one step of the mean ahead.
    """

    kind: ClassVar[str] = "adam_async"

    lr: float = 1e-3
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    apply_sparse_rmsprop: bool = False
    use_nesterov: bool = False

    def __post_init__(self) -> None:
        self._require_non_negative("lr", "eps")
        self._require_betas(self.betas)
        self._require_flags("apply_sparse_rmsprop", "use_nesterov")
        if self.apply_sparse_rmsprop and self.use_nesterov:
            raise ConfigError(
                "AdamAsync: use_nesterov must be False with apply_sparse_rmsprop. "
                "Received: True for both. Choose one."
            )

    def num_state_floats(self, dim: int) -> int:
        """Return ``2 * dim``."""
        return 2 * dim

    def kernel(self) -> Kernel:
        """Return the kernel that the options choose."""
        if self.apply_sparse_rmsprop:
            return step_rmsprop
        return step_nesterov_adam if self.use_nesterov else step_adam

    def step_numbers(self, dim: int, step: int) -> tuple[float, ...]:
        """Return the means', rate; then 1, 0, 1: Adam's root, penalty, kept weight."""
        scale, root_scale = _bias_corrections(self.betas, step)
        is_corrected = not self.apply_sparse_rmsprop
        rate = self.lr * scale / root_scale if is_corrected else self.lr
        return (*_means(self.betas, self.eps), rate, 1.0, 0.0, 1.0)


def step_adam(p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int) -> None:
    """Apply ``Adam``, ``AdamW`` or ``AdamAsync`` to one row."""
    beta1, rest1, beta2, rest2, eps = p[0], p[1], p[2], p[3], p[4]
    rate, root_scale, weight_decay, kept = p[5], p[6], p[7], p[8]
    for d in range(dim):
        grad = g[d] + weight_decay * w[d]
        m = beta1 * s[d] + rest1 * grad
        v = beta2 * s[dim + d] + rest2 * grad * grad
        s[d], s[dim + d] = m, v
        w[d] = kept * w[d] - rate * m / (root_scale * np.sqrt(v) + eps)


def step_nesterov_adam(
    p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int
) -> None:
    """Apply ``AdamAsync`` with Nesterov's step to one row."""
    beta1, rest1, beta2, rest2, eps = p[0], p[1], p[2], p[3], p[4]
    rate = p[5]
    for d in range(dim):
        m = beta1 * s[d] + rest1 * g[d]
        v = beta2 * s[dim + d] + rest2 * g[d] * g[d]
        s[d], s[dim + d] = m, v
        ahead = beta1 * m + rest1 * g[d]
        w[d] -= rate * ahead / (np.sqrt(v) + eps)


def step_rmsprop(p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int) -> None:
    """Apply ``AdamAsync`` as RMSProp to one row."""
    beta1, beta2, rest2, eps, lr = p[0], p[2], p[3], p[4], p[5]
    for d in range(dim):
        v = beta2 * s[dim + d] + rest2 * g[d] * g[d]
        m = beta1 * s[d] + lr * g[d] / np.sqrt(v + eps)
        s[d], s[dim + d] = m, v
        w[d] -= m


def step_rowwise_adam(p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int) -> None:
    """Apply ``RowwiseAdam`` to one row."""
    beta1, rest1, beta2, rest2, eps = p[0], p[1], p[2], p[3], p[4]
    rate, root_scale, kept = p[5], p[6], p[7]
    s[dim] = beta2 * s[dim] + rest2 * sum_of_squares(g, dim)
    rate = divide(rate, root_scale * np.sqrt(s[dim]) + eps)
    for d in range(dim):
        s[d] = beta1 * s[d] + rest1 * g[d]
        w[d] = kept * w[d] - rate * s[d]


def step_lamb(p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int) -> None:
    """Apply ``LAMB`` to one row."""
    beta1, rest1, beta2, rest2, eps = p[0], p[1], p[2], p[3], p[4]
    lr, weight_decay, m_scale, root_scale = p[5], p[6], p[7], p[8]
    total = ZERO
    for d in range(dim):
        s[d] = beta1 * s[d] + rest1 * g[d]
        v = beta2 * s[dim + d] + rest2 * g[d] * g[d]
        s[dim + d] = v
        u = m_scale * s[d] / (root_scale * np.sqrt(v) + eps) + weight_decay * w[d]
        total += u * u
    rate = lr * _trust_ratio(sum_of_squares(w, dim), total)
    for d in range(dim):  # recompute u: there is no scratch buffer
        root = root_scale * np.sqrt(s[dim + d])
        u = m_scale * s[d] / (root + eps) + weight_decay * w[d]
        w[d] -= rate * u


def step_rowwise_lamb(p: Pointer, w: Pointer, s: Pointer, g: Pointer, dim: int) -> None:
    """Apply ``RowwiseLAMB`` to one row."""
    beta1, rest1, beta2, rest2, eps = p[0], p[1], p[2], p[3], p[4]
    lr, weight_decay, m_scale, root_scale = p[5], p[6], p[7], p[8]
    s[dim] = beta2 * s[dim] + rest2 * sum_of_squares(g, dim)
    m_scale = divide(m_scale, root_scale * np.sqrt(s[dim]) + eps)
    total = ZERO
    for d in range(dim):
        s[d] = beta1 * s[d] + rest1 * g[d]
        u = m_scale * s[d] + weight_decay * w[d]
        total += u * u
    rate = lr * _trust_ratio(sum_of_squares(w, dim), total)
    for d in range(dim):
        w[d] -= rate * (m_scale * s[d] + weight_decay * w[d])


def _trust_ratio(w_squares: np.float32, u_squares: np.float32) -> np.float32:
    if w_squares > ZERO and u_squares > ZERO:
        # Two roots: the quotient of the squares might be too large for a float32.
        return np.float32(np.sqrt(w_squares) / np.sqrt(u_squares))
    return ONE
