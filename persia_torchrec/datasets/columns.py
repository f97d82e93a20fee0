"""Columns of files: features, labels, and conversion to ids and numbers.

    text        xxh3_64 of its bytes: the id, in the same 64 bits as int64
    empty, null the token " ", which is text as any other, unless ``fill`` says another
    integer     the id, as it is
    number      float32, of labels and dense features

Spaces at the ends of a text, a token or an element of a list are no part of it, in
files of any format. A column with a ``separator`` has several tokens in a row: text
that is split there, or a list.

A missing value is a null, an empty field of a text file, or a NaN where a number is
wanted. Without ``fill`` it is an error, but for the ids of text, and for a list of
integers that is null, which has no ids.

pyarrow and xxhash are the extra ``data``.

Dimension key:
    N: rows of a block
    L: ids of a column in these rows
"""

import logging
import sys
import threading
from collections import ChainMap, Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec.datasets.loops import SLACK, take_ragged
from persia_torchrec.errors import ConfigError, DataError
from persia_torchrec.parsing.decoding import require_at_least_1

logger = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

EMPTY = b" "
"""The token of an empty field, and of a null."""

MAX_OTHERS = 1000
"""Values of a label that are counted."""

UNITS = ("D", "h", "m", "s", "ms", "us", "ns")
"""Days, hours, minutes, seconds and parts of them, as NumPy names them."""


def require(library: str) -> Any:
    """Import a library of the extra ``data``, or say how to install it."""
    if (imported := sys.modules.get(library)) is not None:
        return imported
    try:
        return import_module(library)
    except ImportError as exc:
        raise ConfigError(
            f"CSV and Parquet datasets need {library.partition('.')[0]}. Received: "
            f"{exc}. Run `pip install persia_torchrec[data]`."
        ) from exc


@dataclass(frozen=True, slots=True)
class IdColumn:
    """A column whose values are the ids of a feature.

    A map, or a list of pairs, has ids and their weights, with ``is_weighted``. A list
    of lists is the list of all their elements.

    Raises:
        ConfigError: ``num_buckets`` or ``max_length`` is below 1, ``separator`` not one
            character, ``fill`` of another kind than the values, or ``unit`` unknown.
    """

    name: str
    """Of the feature."""
    num_buckets: int | None = None
    """The id is taken modulo this, as an unsigned number. None: all 64 bits. Integers
    that are not below it are counted, and a warning names the first."""
    separator: str | None = None
    """Splits text into tokens. None: each row has one, but for lists."""
    is_text: bool = True
    """Whether values are text, which is hashed; else they are integers, also as text
    or, with ``unit``, points in time."""
    column: str | None = None
    """Of the file, a field of a struct by a dotted path. None: as ``name``."""
    fill: int | str | tuple[()] | None = None
    """A missing value is as this one: an integer, a text, or ``()``, which is no id.
    None: it is the token ``" "`` of text, and an error else."""
    max_length: int | None = None
    """Ids of a row, at most. None: all."""
    keep: Literal["head", "tail"] = "tail"
    """Which of more than ``max_length`` ids are kept: the first or the last ones."""
    is_weighted: bool = False
    """Whether ids have weights: of a map, of pairs, or of tokens ``id:weight``."""
    unit: str | None = None
    """Of a time: its id is the number of whole ``D``, ``h``, ``m``, ``s``, ``ms``,
    ``us`` or ``ns`` since 1970. None: the column has no times."""

    def __post_init__(self) -> None:
        require_at_least_1(num_buckets=self.num_buckets, max_length=self.max_length)
        if self.separator is not None and len(self.separator) != 1:
            raise ConfigError(
                f"Column {self.name!r}: separator must be one character. Received: "
                f"{self.separator!r}."
            )
        kind = str if self.is_text else int
        if self.fill not in (None, ()) and type(self.fill) is not kind:
            raise ConfigError(
                f"Column {self.name!r}: fill must be of the kind of its values, "
                f"{kind.__name__}, or () for no id. Received: {self.fill!r}."
            )
        if self.unit not in (None, *UNITS) or (self.unit and self.is_text):
            raise ConfigError(
                f"Column {self.name!r}: unit must be one of {UNITS}, with "
                f"is_text=False. Received: {self.unit!r}, {self.is_text}."
            )
        if self.keep not in ("head", "tail"):
            raise ConfigError(
                f"Column {self.name!r}: keep must be 'head' or 'tail'. Received: "
                f"{self.keep!r}."
            )


@dataclass(frozen=True, slots=True)
class LabelColumn:
    """A column that the model learns to predict."""

    name: str
    positive: str | None = None
    """The label is 1 where the column has this text, else 0. None: it is a number."""
    column: str | None = None
    """Of the file. None: as ``name``."""
    fill: float | None = None
    """The label where the value is missing. None: that is an error, or with
    ``positive`` 0."""


@dataclass(frozen=True, slots=True)
class DenseColumn:
    """A column of numbers, or of vectors: lists of numbers; a dense feature."""

    name: str
    column: str | None = None
    """Of the file. None: as ``name``."""
    fill: float | None = None
    """The number where the value is missing. None: that is an error."""
    size: int | None = None
    """Numbers of each list. None: a number a row, or lists of a size that is part of
    their type."""
    function: Callable[[npt.NDArray[Any]], npt.NDArray[Any]] | None = None
    """Given values, float64 or datetime64 ``(N,)``, float64 ``(N, size)`` of lists,
    returns the numbers of the feature, ``(N,)`` or ``(N, any)``."""

    def __post_init__(self) -> None:
        require_at_least_1(size=self.size)


Column = IdColumn | LabelColumn | DenseColumn
AnyColumn = Column | str
"""A plain name is a column that is not read."""


def source_of(column: Column) -> str:
    """Return the column of the file that a column is read from."""
    return column.name if column.column is None else column.column


class Columns:
    """The columns of a file, sorted by what they are for.

    Args:
        columns: of a text file without a header all, in the order of a line; those with
            ``column``, which are read from another one's field, have no field.

    ``num_beyond`` counts the integers that are not below their ``num_buckets``, by
    column; several threads decode. guarded by _lock

    Raises:
        ConfigError: two have the same name, or none is an ``IdColumn``.
    """

    def __init__(self, columns: Sequence[AnyColumn]) -> None:
        self.num_beyond = Counter[str]()
        self._lock = threading.Lock()
        self.columns = list(columns)
        names = [c if isinstance(c, str) else c.name for c in columns]
        self.ids = [c for c in columns if isinstance(c, IdColumn)]
        self.labels = [c for c in columns if isinstance(c, LabelColumn)]
        self.dense = [c for c in columns if isinstance(c, DenseColumn)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or not self.ids:
            raise ConfigError(
                "columns must have different names, and at least one IdColumn; with "
                "column=... a second one is read from the same column. Received: "
                f"{'twice ' + str(twice) if twice else 'none'}."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs."""
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what another process had."""
        vars(self).update(state)
        self._lock = threading.Lock()

    def some(self, number: int, count: int) -> "Columns":
        """Return every ``count``-th column of the file, from one on, for a reader."""
        part = object.__new__(Columns)
        part.num_beyond, part._lock = self.num_beyond, self._lock
        wanted = set(self.sources[number::count])
        part.ids = [c for c in self.ids if source_of(c) in wanted]
        part.labels = [c for c in self.labels if source_of(c) in wanted]
        part.dense = [c for c in self.dense if source_of(c) in wanted]
        part.columns = [*part.ids, *part.labels, *part.dense]
        return part

    def count_beyond(self, spec: IdColumn, ids_L: npt.NDArray[np.uint64]) -> None:
        """Count ids that the buckets of a column of integers cut; warn of the first."""
        if spec.is_text or spec.num_buckets is None:
            return
        is_beyond_L = ids_L >= np.uint64(spec.num_buckets)
        if not is_beyond_L.any():
            return
        with self._lock:
            is_first = spec.name not in self.num_beyond
            self.num_beyond[spec.name] += int(is_beyond_L.sum())
        if is_first:
            logger.warning(
                "column %s has values outside of its %d buckets, for example %d: they "
                "are taken modulo %d",
                *(spec.name, spec.num_buckets),
                *(ids_L[is_beyond_L.argmax()], spec.num_buckets),
            )

    @property
    def fields(self) -> list[str]:
        """Names of a line's fields, of a file without a header."""
        return [
            c if isinstance(c, str) else c.name
            for c in self.columns
            if isinstance(c, str) or c.column is None
        ]

    @property
    def read(self) -> list[Column]:
        """Those that are read: ids, labels, dense features."""
        return [*self.ids, *self.labels, *self.dense]

    @property
    def sources(self) -> list[str]:
        """The columns of the file that are read, each once."""
        return list(dict.fromkeys(map(source_of, self.read)))

    def of_source(self, source: str) -> list[Column]:
        """Return the columns that are read from one of the file."""
        return [column for column in self.read if source_of(column) == source]


class Ids(NamedTuple):
    """The ids of some rows, int64 ``(L,)``, one row's after the other's.

    Row i has those from ``offsets[i]`` to ``offsets[i + 1]``, both less ``offsets[0]``,
    int32 or int64 ``(N + 1,)``; None: one id a row. ``weights`` are float32 ``(L,)``,
    if there are any.
    """

    values: Int64s
    offsets: Int64s | Int32s | None = None
    weights: Floats | None = None

    def part(self, start: int, stop: int) -> "Ids":
        """Return consecutive rows."""
        if self.offsets is None:
            weights = None if self.weights is None else self.weights[start:stop]
            return Ids(self.values[start:stop], None, weights)
        offsets, first = self.offsets[start : stop + 1], int(self.offsets[0])
        of_rows = slice(int(offsets[0]) - first, int(offsets[-1]) - first)
        weights = None if self.weights is None else self.weights[of_rows]
        return Ids(self.values[of_rows], offsets, weights)

    def lengths(self) -> Int32s:
        """Return how many ids each row has, int32 ``(N,)``."""
        if self.offsets is None:
            return np.ones(len(self.values), np.int32)
        lengths = np.empty(len(self.offsets) - 1, np.int32)
        starts, ends = self.offsets[:-1], self.offsets[1:]
        return np.subtract(ends, starts, out=lengths, casting="same_kind")

    def take(self, order: Int64s) -> "Ids":
        """Return rows in another order, or some of them."""
        if self.offsets is None:
            weights = None if self.weights is None else self.weights[order]
            return Ids(self.values[order], None, weights)
        starts = self.offsets[order]
        offsets = to_offsets(self.offsets[order + 1] - starts)
        starts -= self.offsets[0]
        values, weights = _take(self.values, starts, offsets), self.weights
        if weights is not None:
            words = weights.astype(np.float64).view(np.int64)
            words = _take(words, starts, offsets)
            weights = words.view(np.float64).astype(np.float32)
        return Ids(values, offsets, weights)


def _take(values: Int64s, starts: Int64s | Int32s, offsets: Int64s) -> Int64s:
    taken = np.empty(int(offsets[-1]) + SLACK, np.int64)
    given = values.view(), starts.view(), offsets.view()
    for array in given:
        array.flags.writeable = False  # one kind of arguments: one compilation
    take_ragged(given[0], given[1], given[2], taken)
    return taken[:-SLACK]


class Rows(NamedTuple):
    """Rows of a file: ids of each ``IdColumn``, and numbers of the others.

    Numbers are float32 ``(N,)``, or ``(N, size)``. ``missing`` counts the missing
    values of columns that have any, by name. ``others`` has, for each label that is 0
    in all rows although it has a ``positive``, its values and how often each occurs.
    """

    num_rows: int
    ids: list[Ids]
    labels: list[Floats]
    dense: list[Floats]
    missing: dict[str, int]
    others: dict[str, dict[str, int]]

    def part(self, start: int, stop: int) -> "Rows":
        """Return consecutive rows; values that are missing are counted in no part."""
        return Rows(
            stop - start,
            [ids.part(start, stop) for ids in self.ids],
            [numbers[start:stop] for numbers in self.labels],
            [numbers[start:stop] for numbers in self.dense],
            {},
            {},
        )

    def take(self, order: Int64s) -> "Rows":
        """Return rows in another order, or some of them."""
        return Rows(
            len(order),
            [ids.take(order) for ids in self.ids],
            [numbers[order] for numbers in self.labels],
            [numbers[order] for numbers in self.dense],
            {},
            {},
        )


def join_rows(blocks: Sequence[Rows], order: Int64s | None = None) -> Rows:
    """Return the rows of blocks, one after the other, or in an order, or some of them.

    A column at a time, so that what is put in another order is in the cache.
    """
    if len(blocks) == 1:
        return blocks[0] if order is None else blocks[0].take(order)

    def join_ids(parts: tuple[Ids, ...]) -> Ids:
        values = np.concatenate([part.values for part in parts])
        offsets, weights = None, None
        if any(part.offsets is not None for part in parts):
            offsets = to_offsets(np.concatenate([part.lengths() for part in parts]))
        if parts[0].weights is not None:
            weights = np.concatenate(
                [p.weights for p in parts if p.weights is not None]
            )
        joined = Ids(values, offsets, weights)
        return joined if order is None else joined.take(order)

    def join(parts: tuple[Floats, ...]) -> Floats:
        joined = np.concatenate(parts)
        return joined if order is None else joined[order]

    num_rows = sum(block.num_rows for block in blocks)
    return Rows(
        num_rows if order is None else len(order),
        [join_ids(parts) for parts in zip(*(b.ids for b in blocks), strict=True)],
        [join(parts) for parts in zip(*(b.labels for b in blocks), strict=True)],
        [join(parts) for parts in zip(*(b.dense for b in blocks), strict=True)],
        _sum_counts([block.missing for block in blocks]),
        dict(ChainMap(*(block.others for block in blocks))),
    )


def _sum_counts(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    return dict(sum(map(Counter, counts), Counter[str]()))


def to_offsets(lengths: npt.NDArray[Any]) -> Int64s:
    """Return where each of some rows begins, and the end: int64 ``(N + 1,)``."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


Fail = Callable[[int, str, object], DataError]
"""Given a row of a table, what must hold and what is there, returns what to raise."""


def row_error(at: str, must: str, received: object) -> DataError:
    """Return what to raise about a row of a file; ``at`` says which."""
    return DataError(f"{at}: {must} Received: {received!r:.100}.")


def merge_rows(columns: Columns, parts: Sequence[tuple[Columns, Rows]]) -> Rows:
    """Return the same rows of which each part has some columns."""
    ids: dict[str, Ids] = {}
    numbers: dict[str, Floats] = {}
    missing: dict[str, int] = {}
    others: dict[str, dict[str, int]] = {}
    for part, rows in parts:
        ids |= zip((c.name for c in part.ids), rows.ids, strict=True)
        numbers |= zip((c.name for c in part.labels), rows.labels, strict=True)
        numbers |= zip((c.name for c in part.dense), rows.dense, strict=True)
        missing |= rows.missing
        others |= rows.others
    return Rows(
        parts[0][1].num_rows,
        [ids[c.name] for c in columns.ids],
        [numbers[c.name] for c in columns.labels],
        [numbers[c.name] for c in columns.dense],
        missing,
        others,
    )


def note_others(others: dict[str, Counter[str]], rows: Rows) -> None:
    """Count values of labels without a positive; forget labels that have one."""
    for name in list(others):
        if name not in rows.others:
            del others[name]
        elif len(others[name]) < MAX_OTHERS:
            others[name].update(rows.others[name])


def is_number(use: Column) -> bool:
    """Return whether a column wants one number of a field."""
    match use:
        case IdColumn(separator=None, is_text=False, unit=None, is_weighted=False):
            return True
        case LabelColumn(positive=None):
            return True
        case DenseColumn(size=None):
            return True
    return False
