"""The optimizers that an embedding server can apply.

They are descriptions, not code: frozen values that travel to the servers as plain
JSON and select one of the loops in ``store/kernels.py``. The names, the arguments and
their defaults are PERSIA's; the formulas are those of fbgemm's fused optimizers and of
``torch.optim``, so that a table moved onto a server trains as it did before. Where
PERSIA's own formula differs, the docstring says how.

In the formulas ``w`` is a row's weights, ``g`` its gradient summed over the batch,
``wd`` is ``weight_decay``. Only rows that are in a batch change; a row that is not in
the batch keeps its weights and its state.

Dimension key:
    D: embedding dim
"""

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import ClassVar

from persia_torchrec.errors import ConfigError


@dataclass(frozen=True)
class Optimizer(ABC):
    """What the optimizers have in common."""

    kind: ClassVar[str]

    @abstractmethod
    def num_state_floats(self, dim: int) -> int:
        """Return how many float32 of state stand beside a row of ``dim`` weights."""

    def initial_state(self) -> float:
        """Return the value that every state float of a new row starts with."""
        return 0.0

    def _require(self, name: str, holds: bool, must: str) -> None:
        if not holds:
            value = getattr(self, name)
            raise ConfigError(
                f"{type(self).__name__}: {name} must be {must}. Received: {value!r}."
            )

    def _require_non_negative(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            self._require(name, math.isfinite(value) and value >= 0, "finite and >= 0")


@dataclass(frozen=True)
class SGD(Optimizer):
    """Step against the gradient, as ``torch.optim.SGD`` does.

    ::

        g = g + wd * w
        b = momentum * b + g          (only with momentum; b starts at 0)
        w = w - lr * b

    State: none, or D floats (``b``) when ``momentum`` is not 0. PERSIA accepts
    ``momentum`` and ignores it; here it works.

    Args:
        lr: learning rate, ``>= 0``.
        momentum: in ``[0, 1)``.
        weight_decay: L2 penalty, ``>= 0``.

    Raises:
        ConfigError: a value is out of its range.
    """

    kind: ClassVar[str] = "sgd"

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        self._require_non_negative("lr", "weight_decay")
        self._require("momentum", 0 <= self.momentum < 1, "in [0, 1)")

    def num_state_floats(self, dim: int) -> int:
        """Return ``dim`` with momentum, else 0."""
        return dim if self.momentum else 0


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Scale each step by the root of all squared gradients so far.

    As fbgemm's ``EXACT_ADAGRAD``, and ``EXACT_ROWWISE_ADAGRAD`` when
    ``vectorwise_shared``::

        g = g + wd * w
        a = g_square_momentum * a + g * g          (per element: D floats of state)
        a = g_square_momentum * a + mean(g * g)    (vectorwise_shared: one float)
        w = w - lr * g / (sqrt(a) + eps)

    The accumulator ``a`` starts at ``initial_accumulator_value``. PERSIA steps with
    the accumulator of before this gradient, puts ``eps`` under the root and ignores
    ``weight_decay``.

    Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and
    Stochastic Optimization", JMLR 2011.

    Args:
        lr: learning rate, ``>= 0``.
        initial_accumulator_value: where the accumulator starts, ``>= 0``.
        weight_decay: L2 penalty, ``>= 0``.
        g_square_momentum: what is kept of the accumulator at each step, in
            ``(0, 1]``; 1 is Adagrad, less forgets old gradients.
        eps: keeps the quotient finite, ``>= 0``.
        vectorwise_shared: one accumulator a row instead of one a weight.

    Raises:
        ConfigError: a value is out of its range.
    """

    kind: ClassVar[str] = "adagrad"

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

    def initial_state(self) -> float:
        """Return ``initial_accumulator_value``."""
        return self.initial_accumulator_value


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
    depend on how ids are spread. PERSIA's first step uses ``beta**2``.

    Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015.

    Args:
        lr: learning rate, ``>= 0``.
        betas: ``(beta1, beta2)``, both in ``[0, 1)``.
        weight_decay: L2 penalty, ``>= 0``.
        eps: keeps the quotient finite, ``>= 0``.

    Raises:
        ConfigError: a value is out of its range.
    """

    kind: ClassVar[str] = "adam"

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        self._require_non_negative("lr", "weight_decay", "eps")
        self._require(
            "betas",
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            "two numbers in [0, 1)",
        )

    def num_state_floats(self, dim: int) -> int:
        """Return ``2 * dim``."""
        return 2 * dim


_KINDS: dict[str, type[Optimizer]] = {cls.kind: cls for cls in (SGD, Adagrad, Adam)}


def optimizer_to_json(optimizer: Optimizer) -> dict[str, object]:
    """Describe an optimizer in plain JSON values.

    Example:
        >>> optimizer_to_json(SGD(0.5))
        {'kind': 'sgd', 'lr': 0.5, 'momentum': 0.0, 'weight_decay': 0.0}
    """
    return {"kind": optimizer.kind, **asdict(optimizer)}


def optimizer_from_json(description: dict[str, object]) -> Optimizer:
    """Build the optimizer that :func:`optimizer_to_json` described.

    Raises:
        ConfigError: an unknown kind, or arguments that do not fit the kind.

    Example:
        >>> optimizer_from_json({"kind": "sgd", "lr": 0.5})
        SGD(lr=0.5, momentum=0.0, weight_decay=0.0)
    """
    arguments = dict(description)
    kind = arguments.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(
            f"An optimizer's kind must be one of {sorted(_KINDS)}. Received: {kind!r}."
        )
    cls = _KINDS[kind]
    unknown = arguments.keys() - {field.name for field in fields(cls)}
    if unknown:
        raise ConfigError(f"{cls.__name__} has no argument {sorted(unknown)[0]!r}.")
    try:
        return cls(**arguments)
    except TypeError as exc:
        raise ConfigError(
            f"The arguments of {cls.__name__} must be numbers, and complete. "
            f"Received: {description!r} ({exc})."
        ) from exc
