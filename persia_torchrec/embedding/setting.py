"""The settings of a table: checked values that travel as JSON.

An optimizer, an initializer, an admission or an expiry is a frozen dataclass of plain
numbers; as JSON it is an object of its fields and a ``kind``, which names its class in
one :class:`Registry` per base. A field's annotation says what its value must be.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from importlib import import_module
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    NamedTuple,
    Self,
    TypeVar,
    get_type_hints,
)

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Words
from persia_torchrec.errors import ConfigError

logger = logging.getLogger(__name__)

_FLOAT32_RANGE = 2.0**127

MODERATE_LR, MODERATE_EPS, MODERATE_DECAY = 1e3, 1e-12, 1e3
"""The largest learning rate, the least that is added to a divisor, and the largest
weight decay of an optimizer that says that rows stay finite: a step of a gradient of
1e10 is 1e25 at most, and the square of the decay of a weight of 1e15 1e36."""


Kernel = Callable[..., Any]
"""A plain function that the store compiles; see ``kernel.py``."""


@dataclass(frozen=True)
class Rule:
    """What the value of a field must be, in words and as a test; in its annotation."""

    must: str
    holds: Callable[[Any], bool] = field(repr=False)


def integer_in(lowest: int, highest: int) -> Rule:
    """Return the rule of an integer between bounds, which are allowed."""
    return Rule(
        f"an integer in [{lowest}, {highest}]",
        lambda value: type(value) is int and lowest <= value <= highest,
    )


def _is_finite(value: object) -> bool:
    """Return whether a value is a number that float32 holds as a finite one."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= _FLOAT32_RANGE


Finite = Annotated[float, Rule("a finite number", _is_finite)]
NonNegative = Annotated[
    float, Rule("finite and >= 0", lambda value: _is_finite(value) and value >= 0)
]
NonPositive = Annotated[
    float, Rule("finite and <= 0", lambda value: _is_finite(value) and value <= 0)
]
Positive = Annotated[
    float, Rule("finite and > 0", lambda value: _is_finite(value) and value > 0)
]
Fraction = Annotated[float, Rule("in [0, 1]", lambda value: 0 <= value <= 1)]
BelowOne = Annotated[float, Rule("in [0, 1)", lambda value: 0 <= value < 1)]
InsideOne = Annotated[float, Rule("in (0, 1)", lambda value: 0 < value < 1)]
NonEmpty = Annotated[
    str, Rule("a string that is not empty", lambda value: value and type(value) is str)
]
Flag = Annotated[bool, Rule("True or False", lambda value: isinstance(value, bool))]


@cache
def rules_of(cls: type) -> list[tuple[str, Any]]:
    """Return the rules of a setting's fields, each a :class:`Rule` or a registry."""
    hints = get_type_hints(cls, include_extras=True)
    return [
        (field.name, rule)
        for field in fields(cls)
        for rule in getattr(hints[field.name], "__metadata__", ())
    ]


def non_defaults(setting: Any) -> dict[str, object]:
    """Return the fields of a dataclass that differ from their default, by name."""
    values = {}
    for one in fields(setting):
        default, make = one.default, one.default_factory
        value = getattr(setting, one.name)
        if value != (default if make is MISSING else make()):
            values[one.name] = value
    return values


def without_former(
    title: str, arguments: Mapping[str, Any], former: Mapping[str, object]
) -> dict[str, Any]:
    """Return arguments without the fields that only earlier versions had.

    ``former`` has their names, and the value that all have now; another value that a
    file has is a warning, once in a process.
    """
    for name, value in former.items():
        if name in arguments and arguments[name] != value:
            _warn_of_former(title, name, f"{arguments[name]!r:.100}", repr(value))
    return {name: value for name, value in arguments.items() if name not in former}


@cache
def _warn_of_former(title: str, name: str, received: str, now: str) -> None:
    logger.warning(
        "%s: %s must be %s, as this version has no other. Received: %s, of an earlier "
        "version, which is ignored.",
        title,
        name,
        now,
        received,
    )


@dataclass(frozen=True)
class Setting:
    """Base of the settings; a field that breaks its :class:`Rule` is a ConfigError.

    Lists, which JSON has, become tuples, and NumPy's numbers those of Python.
    """

    kind: ClassVar[str]
    """Names the class in JSON."""

    former: ClassVar[Mapping[str, object]] = {}
    """Fields of earlier versions, which files may have, and the value of all now."""

    def __post_init__(self) -> None:
        cls: Any = type(self)
        for name, rule in rules_of(cls):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
            elif isinstance(value, np.generic):
                value = value.item()
                object.__setattr__(self, name, value)
            try:
                holds = rule.holds(value)
            except TypeError:
                holds = False
            self._require(name, holds, rule.must)

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Self:
        """Build the setting from what :meth:`to_json` had, without the ``kind``."""
        return cls(**without_former(cls.__name__, arguments, cls.former))

    def to_json(self) -> dict[str, object]:
        """Describe the setting in plain JSON values: its fields, and its ``kind``."""
        return {"kind": self.kind, **asdict(self)}

    def describe(self, *always: str) -> str:
        """Return it as it would be written, without fields that have their default."""
        values = {name: getattr(self, name) for name in always} | non_defaults(self)
        given = (f"{name}={value!r}" for name, value in values.items())
        return f"{type(self).__name__}({', '.join(given)})"

    def _require(self, name: str, holds: bool, must: str) -> None:
        if not holds:
            raise ConfigError(
                f"{self._title()}: {name} must be {must}. "
                f"Received: {getattr(self, name)!r:.500}."
            )

    def _title(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class Optimizer(Setting, ABC):
    """Describe how a gradient moves a row.

    A subclass sets ``kind`` and ``kernel`` and defines ``step_numbers``, and
    ``initial_state`` if rows have any; ``optim.py`` has the simplest. ``lr`` is the
    learning rate.
    """

    torch_twins: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    """Classes of torch and TorchRec that become this optimizer on the servers, by their
    full names; and the arguments that they take here, with fbgemm's defaults."""

    lr: NonNegative

    @property
    @abstractmethod
    def kernel(self) -> Kernel:
        """The plain function that steps one row.

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
        """Return the state of a new row of ``dim`` weights; float32, flat."""
        return np.zeros(0, dtype=np.float32)

    @property
    def stays_finite(self) -> bool:
        """Whether each step leaves a row finite while all numbers are moderate.

        That are gradients up to 1e10, weights up to 1e15, state up to 1e30, over any
        number of steps that a job makes. Rows are not looked at then; else they are,
        after each step, which takes some nanoseconds.
        """
        return False

    @property
    def reads_norms(self) -> bool:
        """Whether a step depends on the Euclidean norm of the weights, or bounds it."""
        return False

    @property
    def fbgemm_name(self) -> str:
        """The name in fbgemm with these arguments; empty if it has none."""
        return ""

    def fbgemm_cpu_arguments(self) -> tuple[float, ...] | str:
        """Return what fbgemm's CPU kernel takes after the learning rate, or why not."""
        if not self.fbgemm_name:
            return "fbgemm has no such optimizer"
        return f"fbgemm has {self.fbgemm_name} on CUDA devices only"


@dataclass(frozen=True)
class Initializer(Setting, ABC):
    """Describe what a new row starts with."""

    @property
    @abstractmethod
    def kernel(self) -> Kernel:
        """The plain function that draws the weights of one row.

        It takes ``(p, seed, w, dim)``: a pointer to the float32 numbers of the table,
        the row's id mixed with the table's seed (uint64), a pointer to the weights,
        which it writes, and their number. It is compiled as it is written, so that
        weights have the same bits on every machine.
        """

    @abstractmethod
    def fill_numbers(self, dim: int) -> tuple[float, ...]:
        """Return ``p``, what the kernel needs, for rows of ``dim`` weights."""


class Sightings(NamedTuple):
    """What an admission remembers: uint64 ``(N,)`` each; what a key is, it says.

    ``uses`` says when an id was seen last, as that of a row does: the tick of the
    request, times ``2**24``, plus the id's position in it.
    """

    keys: Words
    values: Words
    uses: Words


NO_SIGHTINGS = Sightings(*np.empty((3, 0), dtype=np.uint64))


@dataclass(frozen=True)
class Admission(Setting, ABC):
    """Describe which ids get a row.

    ``unadmitted_value`` is each weight of an id without a row.
    """

    unadmitted_value: Finite = field(default=0.0, kw_only=True)

    @property
    def kernel(self) -> Kernel | None:
        """The plain function that decides; None to admit every id.

        It takes ``(memory, p, ids_N, counts_N, is_admitted_N)``: uint64 words that are
        zero at first and keep what it writes, the numbers of the table (uint64), and
        for each id that has no row (uint64), how often the batch holds it (int64,
        ``>= 1``); it overwrites the last (bool). Repeats are decided one after the
        other. If it counts, it overwrites ``counts_N`` with how often each id has been
        seen, this time included: an admitted row begins with that frequency. An
        admitted id starts again if it loses its row.
        """
        return None

    @property
    def recall(self) -> Kernel | None:
        """The plain function that tells which ids were admitted when last seen.

        It takes what the kernel takes, with counts of 0, and leaves the memory as it
        is. By default it is the kernel.
        """
        return self.kernel

    def kernel_numbers(self, seed: int) -> tuple[int, ...]:
        """Return ``p``, what the kernel needs, for a table of this seed.

        Three numbers follow them: that of ``keep_words``, see :meth:`num_kept_bytes`;
        the use of the first id, see :class:`Sightings`; and the number of the batch,
        with the rank of its trainer in the upper bits.
        """
        return (seed,)

    def num_memory_words(self) -> int:
        """Return how many words of memory the kernel has per table."""
        return 0

    def num_kept_bytes(self) -> int:
        """Return how many bytes the kernel keeps of its memory, at most, for each id.

        For recovery it calls ``keep_words`` of ``kernel.py`` before it changes words,
        with the number behind those of :meth:`kernel_numbers`. If it does not, return
        0: a copy of the whole memory is kept with each request, up to 1 MiB.
        """
        return 0

    # What a checkpoint keeps of the memory; nothing, unless these are overridden.

    has_ids_as_keys: ClassVar[bool] = True
    """Whether the keys of sightings are ids, each of which is of one server."""

    def counts_as(self, other: "Admission") -> bool:
        """Return whether this one can continue with the sightings of another."""
        return False

    def num_used_words(self, memory: Words) -> int:
        """Return how many words at the beginning :meth:`sightings` needs."""
        return 0

    def sightings(self, words: Words) -> Sightings:
        """Return all that the beginning of a memory remembers, in any order."""
        return NO_SIGHTINGS

    def sightings_of(self, memory: Words, ids_N: Words) -> Sightings:
        """Return what a memory remembers of different ids; value 0: nothing."""
        return NO_SIGHTINGS

    def remember(self, memory: Words, sightings: Sightings) -> None:
        """Overwrite a memory; of a key that comes twice the last value counts."""


S = TypeVar("S", bound=Setting)


class Registry(Generic[S]):
    """The classes of one base by kind; as an annotation, the rule of such a setting."""

    def __init__(self, base: Any, *classes: type[S]) -> None:
        self._base, self._noun = base, f"An {base.__name__.lower()}"
        self.classes: dict[str, type[S]] = {}
        for cls in classes:
            self.register(cls)

    @property
    def must(self) -> str:
        """What a field must be."""
        return f"one of {', '.join(sorted(c.__name__ for c in self.classes.values()))}"

    def holds(self, value: object) -> bool:
        """Return whether a value is such a setting, registered or not."""
        return isinstance(value, self._base)

    def register(self, cls: type[S]) -> type[S]:
        """Make a class known under its kind; usable as a decorator."""
        known = self.classes.setdefault(cls.kind, cls)
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
        if not isinstance(kind, str) or kind not in self.classes:
            raise ConfigError(
                f"{self._noun} must be an object whose kind is one of "
                f"{sorted(self.classes)}. Received: {description!r:.500}. Servers and "
                "workers know others from the modules of their option --import."
            )
        cls = self.classes[kind]
        try:
            return cls.from_arguments(arguments)
        except TypeError as exc:
            raise ConfigError(
                f"The arguments of {cls.__name__} must be complete and known. "
                f"Received: {description!r:.500} ({exc!s:.200})."
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
