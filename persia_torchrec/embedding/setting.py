"""The settings of a table: checked values that travel as JSON.

An optimizer, an initializer, an admission or an expiry is a frozen dataclass of plain
numbers; as JSON it is an object of its fields and a ``kind``, which names its class in
one :class:`Registry` per base. A new one of the package is a class, and its name in the
list of its registry; from outside, ``register`` adds it.

Dimension key:
    D: embedding dim
    S: optimizer-state floats per row
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from persia_torchrec.errors import ConfigError

_FLOAT32_RANGE = 2.0**127

Kernel = Callable[..., Any]
"""A plain function that the store compiles; see ``kernel.py``."""


@dataclass(frozen=True)
class Setting:
    """Base of the settings: checks, and what goes into JSON.

    A setting whose field is out of its range cannot be built: ConfigError says which.
    """

    kind: ClassVar[str]
    """Names the class in JSON."""

    def to_json(self) -> dict[str, object]:
        """Describe the setting in plain JSON values: its fields, and its ``kind``."""
        return {"kind": self.kind, **asdict(self)}

    def _require(self, name: str, holds: bool, must: str) -> None:
        if not holds:
            raise ConfigError(
                f"{type(self).__name__}: {name} must be {must}. "
                f"Received: {getattr(self, name)!r}."
            )

    def _require_finite(self, *names: str) -> None:
        for name in names:
            self._require(name, _is_finite(getattr(self, name)), "a finite number")

    def _require_non_negative(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            self._require(name, _is_finite(value) and value >= 0, "finite and >= 0")

    def _require_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            self._require(name, _is_finite(value) and value > 0, "finite and > 0")

    def _require_integer(self, name: str, lowest: int, highest: int) -> None:
        value = getattr(self, name)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        fits = is_integer and lowest <= value <= highest
        self._require(name, fits, f"an integer in [{lowest}, {highest}]")


@dataclass(frozen=True)
class Optimizer(Setting, ABC):
    """Describe how a gradient moves a row.

    A subclass sets ``kind``, checks its fields in ``__post_init__``, and defines the
    abstract methods; ``optim_sgd.py`` has the simplest.

    Args:
        lr: learning rate.
    """

    fbgemm: ClassVar[str] = ""
    """fbgemm's name of the optimizer; empty if it has none."""

    torch_twins: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    """Classes of torch and TorchRec that become this optimizer on the servers, by their
    full names; and the arguments that they take here, with fbgemm's defaults."""

    lr: float

    @abstractmethod
    def num_state_floats(self, dim: int) -> int:
        """Return how many float32 of state stand beside a row of ``dim`` weights."""

    @abstractmethod
    def kernel(self) -> Kernel:
        """Return the plain function that steps one row.

        It takes ``(p, w, s, g, dim)``: pointers to the float32 numbers of the request,
        to the row's weights and state, which it changes, and to the gradient, which do
        not overlap; and the number of weights. Updates are compiled once per function.
        """

    @abstractmethod
    def step_numbers(self, dim: int, step: int) -> tuple[float, ...]:
        """Return ``p``, what the kernel needs beside the row; computed per request.

        ``step`` is the number of this update request of the table, from 1 (Adam's
        ``t``).
        """

    def initial_state(self, dim: int) -> npt.NDArray[np.float32]:
        """Return the state of a new row of ``dim`` weights; float32 ``(S,)``."""
        return np.zeros(self.num_state_floats(dim), dtype=np.float32)

    def fbgemm_name(self) -> str:
        """Return fbgemm's name of the optimizer with these arguments, or nothing."""
        return self.fbgemm

    def fbgemm_cpu_arguments(self) -> tuple[float, ...] | str:
        """Return what fbgemm's CPU kernel takes after the learning rate.

        If there is no such kernel, return why.
        """
        if not self.fbgemm_name():
            return "fbgemm has no such optimizer"
        return f"fbgemm has {self.fbgemm_name()} on CUDA devices only"

    def with_lr(self, lr: float) -> Self:
        """Return this optimizer with another learning rate."""
        return replace(self, lr=lr)

    def _require_flags(self, *names: str) -> None:
        for name in names:
            is_flag = isinstance(getattr(self, name), bool)
            self._require(name, is_flag, "True or False")

    def _require_betas(self, betas: tuple[float, float]) -> None:
        object.__setattr__(self, "betas", tuple(betas))  # JSON brings a list
        holds = len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
        self._require("betas", holds, "two numbers in [0, 1)")


@dataclass(frozen=True)
class Initializer(Setting, ABC):
    """Describe what a new row starts with."""

    @abstractmethod
    def kernel(self) -> Kernel:
        """Return the plain function that draws the weights of one row.

        It takes ``(p, seed, w, dim)``: a pointer to the float32 numbers of the table,
        the row's id mixed with the table's seed (uint64), a pointer to the weights,
        which it writes, and their number. It is compiled as it is written, so that
        weights have the same bits on every machine.
        """

    @abstractmethod
    def fill_numbers(self, dim: int) -> tuple[float, ...]:
        """Return ``p``, what the kernel needs, for rows of ``dim`` weights."""


@dataclass(frozen=True)
class Admission(Setting, ABC):
    """Describe which ids get a row.

    ``unadmitted_value`` is each weight of an id without a row.
    """

    unadmitted_value: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        self._require_finite("unadmitted_value")

    def kernel(self) -> Kernel | None:
        """Return the plain function that decides; None to admit every id.

        It takes ``(memory, p, ids_N, counts_N, is_admitted_N)``: uint64 words that are
        zero at first and keep what it writes, the numbers of the table (uint64), and
        for each id that has no row (uint64), how often the batch holds it (int64,
        ``>= 1``); it overwrites the last (bool). Repeats are decided one after the
        other. An admitted id starts again if it loses its row.
        """
        return None

    def kernel_numbers(self, seed: int) -> tuple[int, ...]:
        """Return ``p``, what the kernel needs, for a table of this seed."""
        return (seed,)

    def num_memory_words(self) -> int:
        """Return how many words of memory the kernel has per table."""
        return 0


S = TypeVar("S", bound=Setting)


class Registry(Generic[S]):
    """The classes of one base by kind; ``noun`` is what messages call one of them."""

    def __init__(self, noun: str, *classes: type[S]) -> None:
        self._noun = noun
        self._by_kind: dict[str, type[S]] = {}
        for cls in classes:
            self.register(cls)

    @property
    def classes(self) -> list[type[S]]:
        """The classes, in the order in which they were registered."""
        return list(self._by_kind.values())

    def register(self, cls: type[S]) -> type[S]:
        """Make a class known under its kind; usable as a decorator."""
        known = self._by_kind.setdefault(cls.kind, cls)
        if known is not cls:
            raise ConfigError(
                f"Every kind must name one class. Received: {cls.__qualname__} with "
                f"{cls.kind!r}, which is {known.__qualname__}'s."
            )
        return cls

    def from_json(self, description: object) -> S:
        """Build the setting that :meth:`Setting.to_json` described."""
        arguments = dict(description) if isinstance(description, dict) else {}
        kind = arguments.pop("kind", None)
        if not isinstance(kind, str) or kind not in self._by_kind:
            raise ConfigError(
                f"{self._noun} must be an object whose kind is one of "
                f"{sorted(self._by_kind)}. Received: {description!r}. Servers and "
                "workers know others from the modules of their option --import."
            )
        cls = self._by_kind[kind]
        unknown = arguments.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise ConfigError(f"{cls.__name__} has no argument {sorted(unknown)[0]!r}.")
        try:
            return cls(**arguments)
        except TypeError as exc:
            raise ConfigError(
                f"The arguments of {cls.__name__} must be complete. "
                f"Received: {description!r} ({exc})."
            ) from exc


def import_settings(modules: Iterable[str]) -> None:
    """Import the modules that register settings from outside of this package."""
    for name in modules:
        try:
            import_module(name)
        except ModuleNotFoundError as exc:
            raise ConfigError(
                "--import must name a module that Python finds, such as one in the "
                f"working directory or on PYTHONPATH. Received: {name!r} ({exc})."
            ) from exc


def _is_finite(value: object) -> bool:
    """Return whether a value is a number that float32 holds as a finite one."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return -_FLOAT32_RANGE <= value <= _FLOAT32_RANGE
