"""The specification of a table, shared by client and server.

A table has no length: rows appear when their ids are looked up in training, and leave
when they expire or the server is full.
"""

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Literal, get_args

from persia_torchrec.arrays import Counts
from persia_torchrec.embedding import setting
from persia_torchrec.embedding.admission import ADMISSIONS, AdmitAll
from persia_torchrec.embedding.initializer import INITIALIZERS, Uniform
from persia_torchrec.embedding.limits import MAX_DIM
from persia_torchrec.embedding.optim import OPTIMIZERS
from persia_torchrec.embedding.setting import Admission, Initializer, Optimizer, Setting
from persia_torchrec.embedding.usage import (
    DYNAMICS,
    EXPIRIES,
    NUM_STATISTICS,
    DynamicDim,
    Expiry,
)
from persia_torchrec.errors import ConfigError

WeightDtype = Literal["fp32", "fp16", "bf16"]
"""What a server may keep weights in."""

IdsWithoutRow = Literal["zeros", "initial"]
"""What an id without a row reads in evaluation."""


_DTYPES, _READS = get_args(WeightDtype), get_args(IdsWithoutRow)
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, kw_only=True)
class TableSpec(Setting):
    """One table, as the servers know it; a field out of its range is a ConfigError."""

    former: ClassVar[Mapping[str, object]] = {"resets_non_finite": False}

    name: setting.NonEmpty
    """Unique on a server; not empty."""
    dim: Annotated[int, setting.integer_in(1, MAX_DIM)]
    """Weights per row, in ``[1, 4096]``."""
    optimizer: Annotated[Optimizer, OPTIMIZERS]
    """What a gradient does to a row."""
    initializer: Annotated[Initializer, INITIALIZERS] = field(default_factory=Uniform)
    """What the weights of a new row are."""
    seed: Annotated[int, setting.integer_in(0, 2**64 - 1)] = 0
    """Mixed into each id by exclusive or before it seeds the row's random numbers;
    uint64. 0 gives PERSIA's numbers."""
    admission: Annotated[Admission, ADMISSIONS] = field(default_factory=AdmitAll)
    """Which ids get a row."""
    expiry: Annotated[Expiry, EXPIRIES] = field(default_factory=Expiry)
    """When a row leaves although the server is not full."""
    weight_dtype: Annotated[
        WeightDtype, setting.Rule(f"one of {_DTYPES}", lambda dtype: dtype in _DTYPES)
    ] = "fp32"
    """What the weights of a row are kept in; optimizer state is float32 always."""
    keeps_metadata: setting.Flag = False
    """Whether each row carries how often it was seen, and its last step."""
    weight_bound: setting.NonNegative = 0.0
    """After an update each weight is clamped to ``[-weight_bound, weight_bound]``; in
    16 bits to the largest number within it. 0 switches the bound off."""
    is_frozen: setting.Flag = False
    """Whether the rows keep their weights and state: gradients are dropped."""
    shared_rows: Annotated[int, setting.integer_in(0, 2**32 - 2)] = 0
    """Rows for ids without one: such an id reads, and trains, row ``id % shared_rows``,
    and its own begins with the weights of that; 0: none."""

    dynamic: Annotated[DynamicDim, DYNAMICS] = field(default_factory=DynamicDim)
    """How many of its weights a row has."""
    ids_without_row: Annotated[
        IdsWithoutRow, setting.Rule(f"one of {_READS}", lambda read: read in _READS)
    ] = "zeros"
    """What an id without a row reads where nothing is trained: "initial", the weights
    that its row would begin with, or "zeros", the ``unadmitted_value`` of the
    admission. With ``shared_rows`` it reads one of those."""
    stochastic_rounding: setting.Flag = True
    """Whether updates of weights in 16 bits are rounded up or down at random, by which
    small ones are not lost; else to the nearest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % self.dynamic.blocks:
            raise ConfigError(
                f"{self._title()}: dim must be a multiple of the blocks of dynamic. "
                f"Received: dim={self.dim} and {self.dynamic.describe()}."
            )
        if self.dynamic.is_on and self.optimizer.reads_norms:
            raise ConfigError(
                f"{self._title()}: an optimizer that reads the norm of a row cannot be "
                "combined with dynamic, whose blocks are rows. Received: "
                f"{self.optimizer.describe()} and {self.dynamic.describe()}. Leave "
                "max_norm out, or take another optimizer than LAMB and LARS."
            )
        if self.shared_rows and self.dynamic.is_on:
            raise ConfigError(
                f"{self._title()}: shared_rows and dynamic cannot be combined. "
                "Received: both. Leave one out."
            )
        if self.shared_rows and self.admission.kernel is None:
            raise ConfigError(
                f"{self._title()}: shared_rows need an admission that leaves ids "
                "without a row, such as AdmitFrequency. Received: "
                f"shared_rows={self.shared_rows} and {self.admission.describe()}."
            )

    def _title(self) -> str:
        return f"Table {self.name!r}"

    @property
    def num_state_floats(self) -> int:
        """How many float32 of optimizer state belong to the weights of an id."""
        return self.dynamic.blocks * len(self.optimizer.initial_state(self.row_dim))

    @property
    def num_floats(self) -> int:
        """How many float32 an id has: its weights, and the optimizer's state."""
        return self.dim + self.num_state_floats

    @property
    def row_dim(self) -> int:
        """How many weights a row of a server keeps: those of one block."""
        return self.dim // self.dynamic.blocks

    @property
    def num_row_floats(self) -> int:
        """How many float32 a row of a server keeps beside the weights."""
        num = len(self.optimizer.initial_state(self.row_dim))
        return num + (NUM_STATISTICS if self.dynamic.is_on else 0)

    def describe_rows(self, *, with_metadata: bool = False) -> str:
        """Return what its rows look like, for errors."""
        return (
            f"dim {self.dim}, weights {self.weight_dtype}"
            f"{', metadata' if with_metadata else ''} and optimizer "
            f"{self.optimizer.kind} ({self.num_state_floats} state floats per row)"
            f"{f', {self.shared_rows} shared rows' if self.shared_rows else ''}"
            f"{f', {self.dynamic.blocks} blocks' if self.dynamic.is_on else ''}"
        )

    def parts(self) -> "list[TableSpec]":
        """Return the tables that a server keeps besides, for some rows of this one."""
        shared = self.table_of_shared_rows
        return self.tables_of_blocks() if shared is None else [shared]

    def tables_of_blocks(self) -> "list[TableSpec]":
        """Return the tables of all blocks but the first, which is in this table."""
        return [
            replace(
                self,
                name=f"{self.name}/block {number}",
                dim=self.row_dim,
                seed=(self.seed + number * _GOLDEN) % 2**64,
                admission=AdmitAll(),
                expiry=Expiry(),
                keeps_metadata=False,
                dynamic=DynamicDim(),
                ids_without_row="zeros",
            )
            for number in range(2, self.dynamic.blocks + 1)
        ]

    @property
    def table_of_shared_rows(self) -> "TableSpec | None":
        """The table that a server keeps its shared rows in; their ids are numbers."""
        if not self.shared_rows:
            return None
        return replace(
            self,
            name=f"{self.name}/shared",
            admission=AdmitAll(),
            expiry=Expiry(),
            keeps_metadata=False,
            shared_rows=0,
            ids_without_row="zeros",
        )

    def reads_initial(self, wanted: bool | None = None) -> bool:
        """Return whether ids without a row read its first weights, if not as wanted."""
        return self.ids_without_row == "initial" if wanted is None else wanted

    @property
    def has_metadata(self) -> bool:
        """Whether rows carry metadata: kept by request, or needed by the expiry."""
        return self.keeps_metadata or self.expiry.is_on

    def to_json(self) -> dict[str, object]:
        """Describe the table in plain JSON values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for later in ("stochastic_rounding", "ids_without_row"):
            # Earlier versions do not know them.
            if later not in setting.non_defaults(self):
                del values[later]
        return {
            name: value.to_json() if isinstance(value, Setting) else value
            for name, value in values.items()
        }

    @classmethod
    def from_json(cls, description: dict[str, object]) -> "TableSpec":
        """Build the table that :meth:`to_json` described."""
        arguments = setting.without_former(cls.__name__, description, cls.former)
        table: Any = cls  # hashable, unlike what mypy says
        for name, rule in setting.rules_of(table):
            if name in arguments and isinstance(rule, setting.Registry):
                arguments[name] = rule.from_json(arguments[name])
        try:
            return cls(**arguments)
        except TypeError as exc:
            what = f"{description!r:.500} ({exc!s:.200})"
            raise ConfigError(f"Not a table: {what}.") from exc


@dataclass(frozen=True, slots=True)
class Metadata:
    """Metadata of N ids; all 0 for an id that has no row.

    ``frequency`` counts how often the id was in training batches since its row was
    made, and while it waited for that, repeats included; it saturates. ``first_step``
    and ``last_step`` are the table's steps when the row was made and last updated,
    ``last_s`` the second of the latter: since 1970, but that with a ``seconds_to_live``
    by running time pauses do not count.
    """

    frequency: Counts
    first_step: Counts
    last_step: Counts
    last_s: Counts


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSettings:
    """What a user asks of one table; None leaves a setting as it otherwise is.

    The fields are those of :class:`TableSpec`, which checks them when it is made.
    """

    optimizer: Optimizer | None = None
    initializer: Initializer | None = None
    admission: Admission | None = None
    expiry: Expiry | None = None
    weight_dtype: WeightDtype | None = None
    keeps_metadata: bool | None = None
    weight_bound: float | None = None
    is_frozen: bool | None = None
    shared_rows: int | None = None
    dynamic: DynamicDim | None = None
    ids_without_row: IdsWithoutRow | None = None
    stochastic_rounding: bool | None = None
    seed: int | None = None

    def apply_to(self, spec: TableSpec) -> TableSpec:
        """Return a table with these settings; an error names the table."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return replace(spec, **{name: v for name, v in values if v is not None})


def require_known_tables(settings: Iterable[str], known: Iterable[str]) -> None:
    """Reject settings of an unknown table; the message has the nearest name."""
    names = sorted(known)
    for name in sorted(set(settings).difference(names)):
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
        raise ConfigError(
            f"tables must name tables of the model, {names}. Received: {name!r}. "
            f"Is {''.join(nearest)!r} meant?"
        )


def describe_tables(specs: Iterable[TableSpec]) -> str:
    """Return a table of tables: one line for all that differ in their names only.

    Settings that have their default are left out.
    """
    names: dict[tuple[str, ...], list[str]] = {}
    for spec in specs:
        further = {
            name: value.describe() if isinstance(value, Setting) else value
            for name, value in setting.non_defaults(spec).items()
            if name not in ("name", "dim", "optimizer", "initializer")
        }
        line = (
            str(spec.dim),
            spec.optimizer.describe("lr"),
            repr(spec.initializer),
            ", ".join(f"{name}={value}" for name, value in further.items()) or "-",
        )
        names.setdefault(line, []).append(spec.name)
    head = ("tables", "dim", "optimizer", "initializer", "further settings", "names")
    return align(
        [head, *((str(len(of)), *line, ", ".join(of)) for line, of in names.items())]
    )


def align(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells as text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    row = "  ".join(f"{{:{width}}}" for width in widths)
    return "\n".join(row.format(*line).rstrip() for line in lines)


def with_parts(specs: Iterable[TableSpec]) -> list[TableSpec]:
    """Return tables, and those of their parts as these settings want them."""
    given = list(specs)
    for name, times in Counter(spec.name for spec in given).items():
        if times > 1:
            raise ConfigError(
                "Tables added together must have different names. "
                f"Received: {name!r} {times} times."
            )
    tables = {spec.name: spec for spec in given}
    tables |= {part.name: part for spec in given for part in spec.parts()}
    return list(tables.values())


def names_of_shared(specs: Iterable[TableSpec]) -> set[str]:
    """Return the names of those tables that shared rows are kept in."""
    shared = (spec.table_of_shared_rows for spec in specs)
    return {spec.name for spec in shared if spec is not None}


TableChange = Callable[[TableSpec], TableSpec]
"""Returns a table with other settings, or as it is."""


def changed_tables(specs: Iterable[TableSpec], change: TableChange) -> list[TableSpec]:
    """Return, as they become, the tables that a change makes others."""
    pairs = [(spec, change(spec)) for spec in specs]
    return [new for spec, new in pairs if new != spec]
