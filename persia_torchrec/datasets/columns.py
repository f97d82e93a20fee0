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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Floats
from persia_torchrec.datasets.column_loops import SLACK, copy_rows, find_rows
from persia_torchrec.errors import ConfigError, DataError
from persia_torchrec.parsing.decoding import require_at_least_1

logger = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

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

    @property
    def is_plain(self) -> bool:
        """Whether integers are the ids as they are, unless there are nulls."""
        is_cut = self.num_buckets is not None or self.max_length is not None
        return not (self.is_text or self.is_weighted or self.unit or is_cut)


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
        needs_ids: whether one must be an ``IdColumn``, as a dataset needs it.

    ``num_beyond`` counts the integers that are not below their ``num_buckets``, by
    column; several threads decode. guarded by _lock

    Raises:
        ConfigError: two have the same name, or none is an ``IdColumn``.
    """

    def __init__(self, columns: Sequence[AnyColumn], *, needs_ids: bool = True) -> None:
        self.num_beyond = Counter[str]()
        self._lock = threading.Lock()
        self.columns = list(columns)
        names = [c if isinstance(c, str) else c.name for c in columns]
        self.ids = [c for c in columns if isinstance(c, IdColumn)]
        self.labels = [c for c in columns if isinstance(c, LabelColumn)]
        self.dense = [c for c in columns if isinstance(c, DenseColumn)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or (needs_ids and not self.ids):
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
                spec.name,
                spec.num_buckets,
                ids_L[is_beyond_L.argmax()],
                spec.num_buckets,
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
        none = np.zeros(len(order), np.int32)
        rows = Order(none, order.astype(np.int32))
        return take_ids([self], rows, [0, len(order)])[0]


class Order(NamedTuple):
    """Rows of several blocks in any order: each one's block and row, int32 ``(N,)``."""

    blocks: Int32s
    rows: Int32s


def take_ids(parts: Sequence[Ids], order: Order, bounds: Sequence[int]) -> list[Ids]:
    """Return the ids of rows of several blocks in an order, in pieces.

    Args:
        parts: the ids of each block, all with weights or none.
        order: the rows.
        bounds: where each piece begins among them, and the end.
    """
    values = _take([part.values for part in parts], parts, order, bounds)
    weights: list[Any] = [(None, None)] * len(values)
    if parts[0].weights is not None:
        found = [part.weights for part in parts if part.weights is not None]
        weights = _take(found, parts, order, bounds)
    has_offsets = any(part.offsets is not None for part in parts)
    return [
        Ids(of_piece, offsets if has_offsets else None, w)
        for (of_piece, offsets), (w, _) in zip(values, weights, strict=True)
    ]


def _take(
    values: Sequence[npt.NDArray[Any]],
    parts: Sequence[Ids],
    order: Order,
    bounds: Sequence[int],
) -> list[tuple[npt.NDArray[Any], Int64s]]:
    """Return the values of rows and their offsets, in pieces."""
    table = np.zeros((len(parts), 4), np.uint64)
    width = values[0].itemsize
    for number, (of_part, part) in enumerate(zip(values, parts, strict=True)):
        at, offsets = of_part.ctypes.data, part.offsets
        if offsets is not None:
            table[number, :2] = offsets.ctypes.data, offsets.itemsize
            at -= int(offsets[0]) * width
        table[number, 2:] = at, width
    starts = np.empty(len(order.rows), np.uint64)
    offsets = np.empty(len(starts) + 1, np.int64)
    find_rows(table, order.blocks, order.rows, starts, offsets)
    taken = []
    for start, stop in pairwise(bounds):
        of_piece = offsets[start : stop + 1]
        num_values = int(of_piece[-1] - of_piece[0])
        copy = _memory(num_values + SLACK, values[0].dtype)
        copy_rows(starts[start:stop], of_piece, width, copy.ctypes.data)
        taken.append((copy[:num_values], of_piece))
    return taken


def _memory(size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return unfilled memory, of Arrow's pool: what it frees is used again."""
    num_bytes = size * np.dtype(dtype).itemsize
    return np.frombuffer(require("pyarrow").allocate_buffer(num_bytes), dtype)


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


def join_rows(blocks: Sequence[Rows]) -> Rows:
    """Return the rows of blocks, one after the other."""
    if len(blocks) == 1:
        return blocks[0]

    def join_ids(parts: tuple[Ids, ...]) -> Ids:
        values = np.concatenate([part.values for part in parts])
        offsets, weights = None, None
        if any(part.offsets is not None for part in parts):
            offsets = to_offsets(np.concatenate([part.lengths() for part in parts]))
        if parts[0].weights is not None:
            weights = np.concatenate(
                [p.weights for p in parts if p.weights is not None]
            )
        return Ids(values, offsets, weights)

    return Rows(
        sum(block.num_rows for block in blocks),
        [join_ids(parts) for parts in zip(*(b.ids for b in blocks), strict=True)],
        list(map(np.concatenate, zip(*(b.labels for b in blocks), strict=True))),
        list(map(np.concatenate, zip(*(b.dense for b in blocks), strict=True))),
        *joined_counts(blocks),
    )


def joined_counts(
    blocks: Sequence[Rows],
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Return ``missing`` and ``others`` of the rows of blocks together."""
    missing, others = Counter[str](), dict[str, dict[str, int]]()
    for block in blocks:
        missing.update(block.missing)
    for name in blocks[0].others:
        if all(name in block.others for block in blocks):
            counts = Counter[str]()
            for block in blocks:
                counts.update(block.others[name])
            others[name] = counts
    return missing, others


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
