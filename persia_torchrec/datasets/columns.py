"""Columns of files: which are features, which are labels, and how values become ids.

    text        xxh3_64 of its bytes: the id, in the same 64 bits as int64
    empty, null the token " ", which is text as any other
    integer     the id, as it is
    number      float32, of labels and dense features

A column with a ``separator`` has several tokens in a row: text that is split there, or
a Parquet file's list. So a row without any has one, the token " ".

Text is dictionary-encoded first, so that each distinct text of a block of rows is
hashed once; a Parquet file is read dictionary-encoded.

pyarrow and xxhash are the extra ``data``.

Dimension key:
    N: rows of a block
    L: ids of a column in these rows
    U: distinct texts of a column in these rows
"""

import dataclasses
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec.datasets.hashing import MAX_SHORT, hash_short
from persia_torchrec.errors import ConfigError, DataError
from persia_torchrec.parsing.decoding import require_at_least_1

logger = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

EMPTY = b" "
"""The token of an empty field, and of a null."""


def require(library: str) -> Any:
    """Import a library of the extra ``data``, or say how to install it."""
    try:
        return import_module(library)
    except ImportError as exc:
        raise ConfigError(
            f"CSV and Parquet datasets need {library.partition('.')[0]}. Received: "
            f"{exc}. Run `pip install persia_torchrec[data]`."
        ) from exc


@dataclass(frozen=True, slots=True)
class IdColumn:
    """A column whose values are the ids of a feature of the same name.

    Raises:
        ConfigError: ``num_buckets`` is below 1, ``separator`` not one character, or
            integers have one in text.
    """

    name: str
    num_buckets: int | None = None
    """The id is taken modulo this, as an unsigned number. None: all 64 bits. Integers
    that are not below it are counted, and a warning names the first."""
    separator: str | None = None
    """Splits text into tokens. None: each row has one."""
    is_text: bool = True
    """Whether values are text, which is hashed; else they are integers."""

    def __post_init__(self) -> None:
        require_at_least_1(num_buckets=self.num_buckets)
        if self.separator is not None and len(self.separator) != 1:
            raise ConfigError(
                f"Column {self.name!r}: separator must be one character. Received: "
                f"{self.separator!r}."
            )


@dataclass(frozen=True, slots=True)
class LabelColumn:
    """A column that the model learns to predict."""

    name: str
    positive: str | None = None
    """The label is 1 where the column has this text, else 0. None: it is a number."""


@dataclass(frozen=True, slots=True)
class DenseColumn:
    """A column of numbers, a dense feature."""

    name: str


Column = IdColumn | LabelColumn | DenseColumn
AnyColumn = Column | str
"""A plain name is a column that is not read."""


class Columns:
    """The columns of a file, sorted by what they are for.

    Args:
        columns: of a CSV file all, in the order of a line.

    ``num_beyond`` counts the integers that are not below their ``num_buckets``, by
    column; several threads decode. guarded by _lock

    Raises:
        ConfigError: two have the same name, or none is an ``IdColumn``.
    """

    def __init__(self, columns: Sequence[AnyColumn]) -> None:
        self.num_beyond = Counter[str]()
        self._lock = threading.Lock()
        self.columns = list(columns)
        self.names = [c if isinstance(c, str) else c.name for c in columns]
        self.ids = [c for c in columns if isinstance(c, IdColumn)]
        self.labels = [c for c in columns if isinstance(c, LabelColumn)]
        self.dense = [c for c in columns if isinstance(c, DenseColumn)]
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice or not self.ids:
            raise ConfigError(
                "columns must have different names, and at least one IdColumn. "
                f"Received: {'twice ' + str(twice) if twice else 'none'}."
            )

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
                "column %s has values that are not below its %d buckets, as %d: they "
                "are taken modulo %d",
                *(spec.name, spec.num_buckets),
                *(ids_L[is_beyond_L.argmax()], spec.num_buckets),
            )

    @property
    def read(self) -> list[Column]:
        """Those that are read: ids, labels, dense features."""
        return [*self.ids, *self.labels, *self.dense]


class Ids(NamedTuple):
    """The ids of some rows, int64 ``(L,)``, one row's after the other's.

    Row i has those from ``offsets[i]`` to ``offsets[i + 1]``, int64 ``(N + 1,)``; None:
    one id a row.
    """

    values: Int64s
    offsets: Int64s | None = None

    def part(self, start: int, stop: int) -> tuple[Int64s, npt.NDArray[np.int32]]:
        """Return values and lengths of consecutive rows."""
        if self.offsets is None:
            return self.values[start:stop], np.ones(stop - start, np.int32)
        offsets = self.offsets[start : stop + 1]
        return self.values[offsets[0] : offsets[-1]], np.diff(offsets).astype(np.int32)

    def take(self, order: Int64s) -> "Ids":
        """Return rows in another order, or some of them."""
        if self.offsets is None:
            return Ids(self.values[order])
        lengths = np.diff(self.offsets)[order]
        offsets = _offsets(lengths)
        moved = np.repeat(self.offsets[:-1][order] - offsets[:-1], lengths)
        return Ids(self.values[moved + np.arange(len(moved))], offsets)


class Rows(NamedTuple):
    """Rows of a file: ids of each ``IdColumn``, and numbers of the others.

    Numbers are float32 ``(N,)``.
    """

    num_rows: int
    ids: list[Ids]
    labels: list[Floats]
    dense: list[Floats]

    def take(self, order: Int64s) -> "Rows":
        """Return rows in another order, or some of them."""
        return Rows(
            len(order),
            [ids.take(order) for ids in self.ids],
            [numbers[order] for numbers in self.labels],
            [numbers[order] for numbers in self.dense],
        )


def join_rows(blocks: Sequence[Rows]) -> Rows:
    """Return the rows of blocks, one after the other."""
    if len(blocks) == 1:
        return blocks[0]

    def join_ids(parts: tuple[Ids, ...]) -> Ids:
        values = np.concatenate([part.values for part in parts])
        lengths = [np.diff(p.offsets) for p in parts if p.offsets is not None]
        return Ids(values, _offsets(np.concatenate(lengths)) if lengths else None)

    return Rows(
        sum(block.num_rows for block in blocks),
        [join_ids(parts) for parts in zip(*(b.ids for b in blocks), strict=True)],
        [np.concatenate(p) for p in zip(*(b.labels for b in blocks), strict=True)],
        [np.concatenate(p) for p in zip(*(b.dense for b in blocks), strict=True)],
    )


def _offsets(lengths: Int64s) -> Int64s:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def hash_texts(texts: Any) -> npt.NDArray[np.uint64]:
    """Return the xxh3_64 of each text of an Arrow array, uint64 ``(U,)``.

    An empty one has the hash of ``EMPTY``. There are no nulls among them.
    """
    texts = texts.cast(require("pyarrow").large_binary())
    _, ends, data = texts.buffers()
    if not len(texts):
        return np.empty(0, np.uint64)
    offsets = np.frombuffer(ends, np.int64)[texts.offset :][: len(texts) + 1]
    raw = b"" if data is None else memoryview(data)[offsets[0] : offsets[-1]].tobytes()
    starts, sizes = offsets[:-1] - offsets[0], np.diff(offsets)
    hashes = hash_short(raw, starts, sizes)
    digest = require("xxhash").xxh3_64_intdigest
    hashes[sizes == 0] = digest(EMPTY)
    for i in np.flatnonzero(sizes > MAX_SHORT).tolist():
        hashes[i] = digest(raw[starts[i] : starts[i] + sizes[i]])
    return hashes


Fail = Callable[[int, str, object], DataError]
"""Given a row of a table, what must hold and what is there, returns what to raise."""

Count = Callable[[IdColumn, npt.NDArray[np.uint64]], None]


def decode(table: Any, columns: Columns, fail: Fail) -> Rows:
    """Return an Arrow table as ids and numbers."""
    return Rows(
        table.num_rows,
        [decode_ids(table[c.name], c, fail, columns.count_beyond) for c in columns.ids],
        [_decode_label(table[c.name], c, fail) for c in columns.labels],
        [_decode_numbers(table[c.name], c.name, fail) for c in columns.dense],
    )


def row_error(at: str, must: str, received: object) -> DataError:
    """Return what to raise about a row of a file; ``at`` says which."""
    return DataError(f"{at}: {must} Received: {received!r:.100}.")


def decode_ids(
    column: Any, spec: IdColumn, fail: Fail, count: Count | None = None
) -> Ids:
    """Return a column's ids, of a chunked Arrow array of text, integers or lists.

    ``count`` is told them before buckets cut them.
    """
    values, sizes, start = [np.empty(0, np.uint64)], [np.empty(0, np.int64)], 0
    for chunk in column.chunks:
        rows = np.arange(start, start + len(chunk))
        start += len(chunk)
        tokens, sizes_N = chunk, np.ones(len(chunk), np.int64)
        if spec.separator is not None:
            tokens, sizes_N = _split(chunk, spec.separator)
        if not spec.is_text:
            ids_L = _integers(tokens, spec.name, np.repeat(rows, sizes_N), fail)
        else:
            ids_L, sizes_N = _with_empty(_hashes(tokens), sizes_N)
        values.append(ids_L)
        sizes.append(sizes_N)
    ids_L = np.concatenate(values)
    if spec.num_buckets is not None:
        if count is not None:
            count(spec, ids_L)
        ids_L %= np.uint64(spec.num_buckets)
    offsets = None if spec.separator is None else _offsets(np.concatenate(sizes))
    return Ids(ids_L.view(np.int64), offsets)


def _split(chunk: Any, separator: str) -> tuple[Any, Int64s]:
    """Return all tokens of text or lists, one after the other, and how many a row."""
    arrow, compute = require("pyarrow"), require("pyarrow.compute")
    if not is_list(chunk.type):
        texts = _with_nulls(_plain(chunk).cast(arrow.large_string()))
        chunk = compute.split_pattern(texts, separator)
    sizes = compute.list_value_length(chunk).fill_null(0)
    return chunk.flatten(), sizes.to_numpy(zero_copy_only=False).astype(np.int64)


def _hashes(texts: Any) -> npt.NDArray[np.uint64]:
    """Hash each distinct text once; return a hash for each text."""
    arrow = require("pyarrow")
    if not arrow.types.is_dictionary(texts.type):
        texts = texts.dictionary_encode()
    hashes_U = hash_texts(texts.dictionary)
    indices = texts.indices
    if indices.null_count:
        none = len(hashes_U)
        hashes_U = np.append(hashes_U, hash_texts(arrow.array([b""])))
        indices = indices.cast(arrow.int64()).fill_null(none)
    hashes_L: npt.NDArray[np.uint64] = hashes_U[indices.to_numpy(zero_copy_only=False)]
    return hashes_L


def _with_empty(
    ids_L: npt.NDArray[np.uint64], sizes_N: Int64s
) -> tuple[npt.NDArray[np.uint64], Int64s]:
    """Give each row without a token the empty one."""
    if sizes_N.all():
        return ids_L, sizes_N
    filled_N = np.maximum(sizes_N, 1)
    of_empty = require("xxhash").xxh3_64_intdigest(EMPTY)
    all_L = np.full(filled_N.sum(), of_empty, np.uint64)
    all_L[np.repeat(sizes_N > 0, filled_N)] = ids_L
    return all_L, filled_N


def _integers(
    values: Any, name: str, rows: Int64s, fail: Fail
) -> npt.NDArray[np.uint64]:
    arrow = require("pyarrow")
    is_unsigned = arrow.types.is_uint64(values.type)
    kind = arrow.uint64() if is_unsigned else arrow.int64()
    must = f"{name} must be an integer of 64 bits."
    return _cast(values, kind, must, rows, fail).view(np.uint64)


def _decode_label(column: Any, spec: LabelColumn, fail: Fail) -> Floats:
    if spec.positive is None:
        return _decode_numbers(column, spec.name, fail)
    arrow, compute = require("pyarrow"), require("pyarrow.compute")
    texts = _plain(column).cast(arrow.large_binary())
    is_positive = compute.equal(texts, spec.positive.encode()).fill_null(
        fill_value=False
    )
    return np.asarray(is_positive.to_numpy().astype(np.float32))


def _decode_numbers(column: Any, name: str, fail: Fail) -> Floats:
    arrow, start = require("pyarrow"), 0
    parts = [np.empty(0, np.float32)]
    must = f"{name} must be a number."
    for chunk in column.chunks:
        rows = np.arange(start, start + len(chunk))
        start += len(chunk)
        numbers = _cast(chunk, arrow.float64(), must, rows, fail)
        if not (is_finite := np.isfinite(numbers)).all():
            bad = int(np.flatnonzero(~is_finite)[0])
            raise fail(int(rows[bad]), must, chunk[bad].as_py())
        parts.append(numbers.astype(np.float32))
    return np.concatenate(parts)


def _cast(
    values: Any, kind: Any, must: str, rows: Int64s, fail: Fail
) -> npt.NDArray[Any]:
    """Return Arrow's values as numbers of a kind; name the row of one that is none."""
    arrow = require("pyarrow")

    def cast(part: Any) -> Any:
        if part.null_count:
            raise arrow.ArrowInvalid("null")
        return part.cast(kind)

    try:
        return np.asarray(cast(values).to_numpy(zero_copy_only=False))
    except arrow.ArrowInvalid as exc:
        for i in range(len(values)):
            try:
                cast(values[i : i + 1])
            except arrow.ArrowInvalid:
                raise fail(int(rows[i]), must, values[i].as_py()) from exc
        raise


def typed(texts: Any, column: AnyColumn, fail: Fail) -> Any:
    """Return text as what a column is, in Arrow's types; an empty field as a null."""
    arrow, compute = require("pyarrow"), require("pyarrow.compute")
    match column:
        case IdColumn(separator=str(separator), is_text=True):
            return compute.split_pattern(_with_nulls(texts), separator)
        case IdColumn(separator=str()) | IdColumn(is_text=False):
            ids = decode_ids(texts, dataclasses.replace(column, num_buckets=None), fail)
            if ids.offsets is None:
                return arrow.array(ids.values)
            return arrow.ListArray.from_arrays(ids.offsets.astype(np.int32), ids.values)
        case LabelColumn(positive=None) | DenseColumn():
            return arrow.array(_decode_numbers(texts, column.name, fail))
    return _with_nulls(texts)


def _plain(texts: Any) -> Any:
    """Return text that is not dictionary-encoded."""
    if require("pyarrow.types").is_dictionary(texts.type):
        return texts.cast(texts.type.value_type)
    return texts


def _with_nulls(texts: Any) -> Any:
    compute = require("pyarrow.compute")
    empty = compute.equal(texts, "")
    return compute.if_else(empty, require("pyarrow").scalar(None, texts.type), texts)


def is_list(kind: Any) -> bool:
    """Return whether an Arrow type is a list."""
    types = require("pyarrow.types")
    return bool(types.is_list(kind) or types.is_large_list(kind))


def is_text(kind: Any) -> bool:
    """Return whether an Arrow type is text, plain or dictionary-encoded."""
    types = require("pyarrow.types")
    if types.is_dictionary(kind):
        return is_text(kind.value_type)
    tests = (types.is_string, types.is_large_string, types.is_binary)
    return any(test(kind) for test in (*tests, types.is_large_binary))
