"""Arrow's arrays as ids and numbers.

    any type --plain--> text, integers, floats, times, lists --> ids and offsets
                                                             --> float32

What has no null, no fill and no bound is taken as it lies in Arrow's memory.

Dimension key:
    N: rows of a block
    L: ids of a column in these rows
"""

from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Bools, Floats
from persia_torchrec.datasets.arrow_types import (
    is_list,
    kind_of,
    lists_of_ids,
    plain,
    texts_of,
    trimmed_bytes,
)
from persia_torchrec.datasets.column_loops import to_float32
from persia_torchrec.datasets.columns import (
    EMPTY,
    MAX_OTHERS,
    Columns,
    DenseColumn,
    Fail,
    IdColumn,
    Ids,
    LabelColumn,
    Rows,
    require,
    source_of,
    to_offsets,
)
from persia_torchrec.datasets.hashing import hash_of, hashes_of
from persia_torchrec.errors import DataError

UInt64s = npt.NDArray[np.uint64]
Count = Callable[[IdColumn, UInt64s], None]

_MAX_EXACT = 2.0**53  # up to which float64 has all integers
_MAX_FLOAT = float(np.finfo(np.float32).max)


def decode(table: Any, columns: Columns, fail: Fail, *, counts: bool = True) -> Rows:
    """Return the columns' sources, of an Arrow table or by name, as ids and numbers."""
    arrays = {name: plain(table[name]) for name in columns.sources}
    ids: list[Ids] = []
    numbers: dict[str, Floats] = {}
    missing: dict[str, int] = {}
    others: dict[str, dict[str, int]] = {}
    for id_column in columns.ids:
        of_column, count = decode_ids(
            arrays[source_of(id_column)],
            id_column,
            fail,
            columns.count_beyond if counts else None,
        )
        ids.append(of_column)
        missing[id_column.name] = count
    columns_of_numbers: list[LabelColumn | DenseColumn]
    columns_of_numbers = [*columns.labels, *columns.dense]
    for column in columns_of_numbers:
        array = arrays[source_of(column)]
        if isinstance(column, LabelColumn) and column.positive is not None:
            found, count = _is_positive(array, column)
            if len(found) and not found.any():
                others[column.name] = _counts(array)
        else:
            found, count = decode_numbers(array, column, fail)
        numbers[column.name] = found
        missing[column.name] = count
    labels = [numbers[column.name] for column in columns.labels]
    dense = [numbers[column.name] for column in columns.dense]
    counted = {name: count for name, count in missing.items() if count}
    return Rows(table.num_rows, ids, labels, dense, counted, others)


# Ids


class _Tokens(NamedTuple):
    """Values of rows, where each row begins (None: one a row), and weights of values.

    ``is_null`` says of each row whether it is a null, if any is.
    """

    values: Any
    offsets: npt.NDArray[Any] | None = None
    weights: Any = None
    is_null: Bools | None = None


def decode_ids(
    array: Any, spec: IdColumn, fail: Fail, count: Count | None = None
) -> tuple[Ids, int]:
    """Return a column's ids, and how many values are missing.

    ``count`` is told the ids before buckets cut them.
    """
    arrow = require("pyarrow")
    if spec.is_plain and (ids := _as_it_lies(array)) is not None:
        return ids, 0
    try:
        tokens = tokens_of(array, spec, fail)
    except arrow.ArrowException as exc:
        raise fail(*_first_bad(array), f"an array of {array.type}") from exc
    values = tokens.values
    if spec.is_text:
        ids_L = hashes_of(values)
        is_missing = ids_L == np.uint64(hash_of(EMPTY))
    else:
        ids_L, is_missing = integers_of(values, spec, tokens.offsets, fail)
    weights = None
    if spec.is_weighted:
        weights = _weights(tokens, len(ids_L), spec, fail)
    ids, missing = _fill(ids_L, is_missing, weights, tokens, spec)
    if spec.max_length is not None and ids.offsets is not None:
        ids = _shorten(ids, spec.max_length, is_head=spec.keep == "head")
    if spec.num_buckets is not None:
        wide = ids.values.view(np.uint64)
        if count is not None:
            count(spec, wide)
        buckets = wide % np.uint64(spec.num_buckets)
        ids = ids._replace(values=buckets.view(np.int64))
    return ids, missing


def _as_it_lies(array: Any) -> Ids | None:
    """Return lists of ids without a copy; None: they have nulls, or another type."""
    kind = array.type
    if kind.id not in lists_of_ids() or array.null_count or not len(array):
        return None
    values, arrow = array.values, require("pyarrow")
    if values.type not in (arrow.int64(), arrow.uint64()) or values.null_count:
        return None
    dtype: type[np.int64 | np.int32] = np.int32
    if kind.id == arrow.lib.Type_LARGE_LIST:
        dtype = np.int64
    offsets: Any = np.frombuffer(array.buffers()[1], dtype)
    offsets = offsets[array.offset : array.offset + len(array) + 1]
    data = values.buffers()[1]
    if data is None:
        return None
    of_rows = slice(values.offset + offsets[0], values.offset + offsets[-1])
    return Ids(np.frombuffer(data, np.int64)[of_rows], offsets)


def _first_bad(array: Any) -> tuple[int, str]:
    """Return the first row that is no text in UTF-8, and what must hold."""
    arrow = require("pyarrow")
    for row in range(len(array)):
        try:
            array[row : row + 1].cast(arrow.binary()).cast(arrow.string())
        except arrow.ArrowException:
            return row, "text must be in UTF-8."
    return 0, "values must be readable."


def tokens_of(array: Any, spec: IdColumn, fail: Fail) -> _Tokens:
    """Return all tokens of lists, maps, or text with a separator."""
    arrow, compute = require("pyarrow"), require("pyarrow.compute")
    if not is_list(array.type) and not arrow.types.is_map(array.type):
        if spec.separator is None:
            return _with_weights(_Tokens(array), spec, fail)
        texts = texts_of(array)
        texts = compute.if_else(
            compute.equal(texts, ""), arrow.scalar(None, texts.type), texts
        )
        array = compute.split_pattern(texts, spec.separator)
    values, offsets, is_null = _flat(array)
    while is_list(values.type) or arrow.types.is_map(values.type):
        values, inner, _ = _flat(plain(values))
        offsets = inner[offsets]
    if arrow.types.is_struct(values.type):
        pairs = values.flatten()
        return _Tokens(plain(pairs[0]), offsets, plain(pairs[1]), is_null)
    return _with_weights(_Tokens(plain(values), offsets, None, is_null), spec, fail)


def _flat(array: Any) -> tuple[Any, npt.NDArray[Any], Bools | None]:
    """Return elements of lists, where each list begins, and which lists are null."""
    arrow, compute = require("pyarrow"), require("pyarrow.compute")
    kind = array.type
    if arrow.types.is_map(kind):
        pair = arrow.struct([("id", kind.key_type), ("weight", kind.item_type)])
        array = array.cast(arrow.list_(pair))
        kind = array.type
    if not array.null_count and not arrow.types.is_fixed_size_list(kind):
        is_large = arrow.types.is_large_list(kind)
        dtype = np.int64 if is_large else np.int32
        buffer = array.buffers()[1]
        if buffer is None or not len(array):
            return array.flatten(), np.zeros(len(array) + 1, np.int64), None
        offsets = np.frombuffer(buffer, dtype)[array.offset :][: len(array) + 1]
        first = int(offsets[0])
        offsets = offsets - first if first else offsets
        return array.values.slice(first, int(offsets[-1])), offsets, None
    is_null = compute.is_null(array).to_numpy(zero_copy_only=False)
    sizes = compute.list_value_length(array).fill_null(0)
    sizes_N = sizes.to_numpy(zero_copy_only=False)
    return array.flatten(), to_offsets(sizes_N), is_null if is_null.any() else None


def _with_weights(tokens: _Tokens, spec: IdColumn, fail: Fail) -> _Tokens:
    """Divide tokens ``id:weight``, if ids are weighted."""
    if not spec.is_weighted:
        return tokens
    compute = require("pyarrow.compute")
    texts = texts_of(tokens.values)
    is_empty = compute.fill_null(compute.equal(texts, ""), fill_value=True)
    pairs = compute.extract_regex(
        compute.if_else(is_empty, ":1", texts), r"^(?P<id>.*):(?P<weight>[^:]*)$"
    )
    if pairs.null_count:
        bad = int(
            np.flatnonzero(compute.is_null(pairs).to_numpy(zero_copy_only=False))[0]
        )
        must = f"{spec.name} must have tokens id:weight."
        raise fail(_row_of(bad, tokens.offsets), must, texts[bad].as_py())
    ids, weights = pairs.flatten()
    return tokens._replace(values=ids, weights=weights)


def _row_of(index: int, offsets: npt.NDArray[Any] | None) -> int:
    """Return the row of a value."""
    if offsets is None:
        return index
    return int(np.searchsorted(offsets, index, side="right")) - 1


def _weights(tokens: _Tokens, num_ids: int, spec: IdColumn, fail: Fail) -> Floats:
    if tokens.weights is None:
        return np.ones(num_ids, np.float32)
    column = DenseColumn(f"weights of {spec.name}")

    def fail_of_row(index: int, must: str, received: object) -> DataError:
        return fail(_row_of(index, tokens.offsets), must, received)

    return decode_numbers(tokens.weights, column, fail_of_row)[0]


def integers_of(
    values: Any, spec: IdColumn, offsets: npt.NDArray[Any] | None, fail: Fail
) -> tuple[UInt64s, Bools | None]:
    """Return integers, and which are missing, if any is."""
    arrow, compute = require("pyarrow"), require("pyarrow.compute")
    must = f"{spec.name} must be an integer of 64 bits."
    kind = kind_of(values.type)
    if kind in ("text", "bytes"):
        values = texts_of(values)
        is_empty = compute.equal(values, "")
        values = compute.if_else(is_empty, arrow.scalar(None, values.type), values)
        if spec.unit is not None:
            values, kind = _times(values, spec, offsets, fail), "time"
    elif kind == "float":
        values = compute.if_else(
            compute.is_nan(values), arrow.scalar(None, values.type), values
        )
    is_missing, filled = None, values
    if values.null_count:
        is_missing = compute.is_null(values).to_numpy(zero_copy_only=False)
        if spec.fill is None:
            bad = int(np.flatnonzero(is_missing)[0])
            must = f"{must} Set fill=... for missing values."
            raise fail(_row_of(bad, offsets), must, values[bad].as_py())
        filled = compute.fill_null(values, _zero_of(values.type))
    if kind == "time":
        times = filled.to_numpy(zero_copy_only=False)
        numbers = times.astype(f"datetime64[{spec.unit}]").view(np.uint64)
        return numbers, is_missing

    def bad_row(i: int) -> DataError:
        return fail(_row_of(i, offsets), must, values[i].as_py())

    if kind == "float":
        return _whole(filled, bad_row), is_missing
    return _cast_integers(filled, bad_row), is_missing


def _zero_of(kind: Any) -> Any:
    """Return 0 as a value of a type, which stands for a null that is filled."""
    arrow = require("pyarrow")
    match kind_of(kind):
        case "decimal" | "time" as name:  # which no cast makes of an integer
            return arrow.array([Decimal(0) if name == "decimal" else 0], kind)[0]
        case "text" | "bytes":
            return arrow.scalar("0").cast(kind)
    return arrow.scalar(0).cast(kind)


def _times(
    texts: Any, spec: IdColumn, offsets: npt.NDArray[Any] | None, fail: Fail
) -> Any:
    """Return text as times, as ``2026-01-31`` or ``2026-01-31 12:00:00``."""
    arrow = require("pyarrow")
    try:
        return texts.cast(arrow.timestamp("us"))
    except arrow.ArrowException:
        for i in range(len(texts)):
            try:
                texts[i : i + 1].cast(arrow.timestamp("us"))
            except arrow.ArrowException as exc:
                must = f"{spec.name} must be a time in ISO 8601."
                raise fail(_row_of(i, offsets), must, texts[i].as_py()) from exc
        raise


def _whole(values: Any, bad: Callable[[int], DataError]) -> UInt64s:
    floats = values.cast(require("pyarrow").float64()).to_numpy(zero_copy_only=False)
    is_whole = (np.abs(floats) <= _MAX_EXACT) & (np.floor(floats) == floats)
    if not is_whole.all():
        raise bad(int(np.flatnonzero(~is_whole)[0]))
    whole: UInt64s = floats.astype(np.int64).view(np.uint64)
    return whole


def _cast_integers(values: Any, bad: Callable[[int], DataError]) -> UInt64s:
    """Cast to integers of 64 bits, signed or, where that fits, unsigned."""
    arrow = require("pyarrow")
    is_unsigned = arrow.types.is_uint64(values.type)
    for kind in [arrow.int64(), arrow.uint64()][:: -1 if is_unsigned else 1]:
        try:
            numbers = values if values.type == kind else values.cast(kind)
        except arrow.ArrowException:
            continue
        found: UInt64s = numbers.to_numpy(zero_copy_only=False).view(np.uint64)
        return found
    each = []
    for i, value in enumerate(values.to_pylist()):
        try:
            number = int(value)
        except (ValueError, TypeError) as exc:
            raise bad(i) from exc
        if number != value and not isinstance(value, str):
            raise bad(i)
        if not -(2**63) <= number < 2**64:
            raise bad(i)
        each.append(number % 2**64)
    return np.array(each, np.uint64)


def _fill(
    ids_L: UInt64s,
    is_missing: Bools | None,
    weights: Floats | None,
    tokens: _Tokens,
    spec: IdColumn,
) -> tuple[Ids, int]:
    """Give missing values what they are filled with; count them."""
    values, offsets, fill = ids_L.view(np.int64), tokens.offsets, spec.fill
    num_missing = 0 if is_missing is None else int(np.count_nonzero(is_missing))
    filling: int | None = None
    if isinstance(fill, int):
        filling = _as_id(fill % 2**64)
    elif fill != () and spec.is_text:
        text = EMPTY if fill is None else str(fill).strip(" ").encode()
        filling = _as_id(hash_of(text))
    if num_missing and is_missing is not None:
        if filling is not None:
            if fill is not None:  # else they have the hash of EMPTY
                values = np.where(is_missing, filling, values)
        else:
            bounds = np.arange(len(values) + 1) if offsets is None else offsets
            num_kept = np.concatenate([[0], np.cumsum(~is_missing)])
            values, offsets = values[~is_missing], num_kept[bounds]
            weights = None if weights is None else weights[~is_missing]
    if tokens.offsets is None or offsets is None:
        return Ids(values, offsets, weights), num_missing
    is_bare = np.diff(tokens.offsets) == 0  # a row without values
    if not spec.is_text:
        is_null = tokens.is_null
        is_bare = np.zeros(len(is_bare), bool) if is_null is None else is_bare & is_null
    if (num_bare := int(np.count_nonzero(is_bare))) and filling is not None:
        at = offsets[:-1][is_bare]
        values = np.insert(values, at, filling)
        weights = None if weights is None else np.insert(weights, at, 1)
        offsets = to_offsets(np.diff(offsets) + is_bare)
    return Ids(values, offsets, weights), num_missing + num_bare


def _as_id(number: int) -> int:
    """Return the same 64 bits as a number of int64."""
    return number - 2**64 if number >= 2**63 else number


def _shorten(ids: Ids, most: int, *, is_head: bool) -> Ids:
    """Return the first, or last, ids of each row."""
    assert ids.offsets is not None
    lengths = np.diff(ids.offsets)
    if not (lengths > most).any():
        return ids
    kept = np.minimum(lengths, most)
    starts = ids.offsets[:-1] if is_head else ids.offsets[1:] - kept
    offsets = to_offsets(kept)
    index = np.repeat(starts - offsets[:-1], kept) + np.arange(offsets[-1])
    weights = None if ids.weights is None else ids.weights[index]
    return Ids(ids.values[index], offsets, weights)


# Numbers


def _is_positive(array: Any, spec: LabelColumn) -> tuple[Floats, int]:
    compute = require("pyarrow.compute")
    texts = trimmed_bytes(array)
    assert spec.positive is not None
    is_positive = compute.equal(texts, spec.positive.strip(" ").encode())
    is_missing = compute.fill_null(compute.equal(texts, b""), fill_value=True)
    found = is_positive.fill_null(fill_value=False).to_numpy(zero_copy_only=False)
    labels: Floats = found.astype(np.float32)
    missing = is_missing.to_numpy(zero_copy_only=False)
    if spec.fill is not None:
        labels[missing] = spec.fill
    return labels, int(np.count_nonzero(missing))


def _counts(array: Any) -> dict[str, int]:
    """Count the values of text, the most frequent ones."""
    counts = require("pyarrow.compute").value_counts(trimmed_bytes(array)).to_pylist()
    counts.sort(key=lambda count: -count["counts"])
    return {
        (count["values"] or b"").decode(errors="replace"): count["counts"]
        for count in counts[:MAX_OTHERS]
    }


def decode_numbers(
    array: Any, spec: LabelColumn | DenseColumn, fail: Fail
) -> tuple[Floats, int]:
    """Return float32 ``(N,)``, or ``(N, size)`` of lists, and how many are missing."""
    array = plain(array)
    if is_list(array.type):
        return _decode_vectors(array, spec, fail)
    function = spec.function if isinstance(spec, DenseColumn) else None
    if function is None and (quick := _in_one_pass(array, spec.fill)) is not None:
        return quick
    must = f"{spec.name} must be a number."
    if kind_of(array.type) == "time":
        times = array.to_numpy(zero_copy_only=False)
        if times.dtype.kind != "M":  # date32 has objects
            times = array.cast(require("pyarrow").timestamp("us")).to_numpy(
                zero_copy_only=False
            )
        return _finish(
            times, np.isnat(times), spec, lambda i: fail(i, must, array[i].as_py())
        )

    def bad(i: int) -> DataError:
        return fail(i, must, array[i].as_py())

    numbers, is_null = _floats(array, bad)
    is_plain = function is None and is_null is None
    if is_plain and numbers.dtype == np.float32 and np.isfinite(numbers).all():
        return numbers, 0
    is_missing: Bools = np.isnan(numbers)
    if is_null is not None:
        is_missing[is_null] = True
    return _finish(numbers, is_missing, spec, bad)


def _in_one_pass(array: Any, fill: float | None) -> tuple[Floats, int] | None:
    """Convert an array of plain numbers; None: it is of another type, or one is bad."""
    arrow = require("pyarrow")
    kind, num_nulls = array.type, array.null_count
    if kind not in (arrow.float64(), arrow.float32(), arrow.int64()):
        return None
    validity, data = array.buffers()
    values = np.frombuffer(data or b"", kind.to_pandas_dtype())[array.offset :][
        : len(array)
    ]
    if kind == arrow.float32() and not num_nulls and np.isfinite(values).all():
        return values, 0
    bits = np.frombuffer(validity if num_nulls else b"", np.uint8)
    found = np.empty(len(array), np.float32)
    fill = np.nan if fill is None else float(fill)
    missing, bad = to_float32(values, bits, array.offset, fill, found)
    return None if bad else (found, missing)


def _floats(
    array: Any, bad: Callable[[int], DataError]
) -> tuple[npt.NDArray[Any], Bools | None]:
    """Return float32 or float64, and which are null or empty, if any is."""
    arrow, compute = require("pyarrow"), require("pyarrow.compute")
    kind = kind_of(array.type)
    if kind in ("text", "bytes"):
        array = texts_of(array)
        is_empty = compute.equal(array, "")
        array = compute.if_else(is_empty, arrow.scalar(None, array.type), array)
    is_missing = None
    if array.null_count:
        is_missing = compute.is_null(array).to_numpy(zero_copy_only=False)
        array = compute.fill_null(array, _zero_of(array.type))
    if kind == "boolean":
        array = array.cast(arrow.uint8())
    if array.type != arrow.float32():
        try:
            array = compute.cast(array, arrow.float64(), safe=kind != "integer")
        except arrow.ArrowException as exc:
            for i in range(len(array)):
                try:
                    array[i : i + 1].cast(arrow.float64())
                except arrow.ArrowException:
                    raise bad(i) from exc
            raise
    return array.to_numpy(zero_copy_only=False), is_missing


def _finish(
    numbers: npt.NDArray[Any],
    is_missing: Bools,
    spec: LabelColumn | DenseColumn,
    bad: Callable[[int], DataError],
) -> tuple[Floats, int]:
    """Apply function and fill; numbers must be those of float32."""
    of_row: Bools = np.asarray(is_missing.reshape(len(numbers), -1).any(axis=1))
    num_missing = int(np.count_nonzero(of_row))
    if num_missing and spec.fill is None:
        error = bad(int(np.flatnonzero(of_row)[0]))
        raise DataError(f"{error} Set fill=... for missing values.")
    function = spec.function if isinstance(spec, DenseColumn) else None
    if function is not None:
        shape = numbers.shape
        numbers = np.asarray(function(numbers))
        if len(numbers) != shape[0] or numbers.ndim not in (1, 2):
            raise DataError(
                f"function of {spec.name} must return numbers (N,) or (N, any). "
                f"Received: {numbers.shape} for {shape}."
            )
        is_missing = of_row
    if num_missing:
        numbers = np.array(numbers, np.float64)
        numbers[is_missing] = spec.fill
    with np.errstate(over="ignore", invalid="ignore"):
        is_good = np.abs(numbers) <= _MAX_FLOAT
    if not is_good.all():
        row = int(np.flatnonzero(~is_good.reshape(len(numbers), -1).all(axis=1))[0])
        raise DataError(f"{bad(row)} It must be finite, and within float32.")
    return np.ascontiguousarray(numbers, np.float32), num_missing


def _decode_vectors(
    array: Any, spec: LabelColumn | DenseColumn, fail: Fail
) -> tuple[Floats, int]:
    values, offsets, is_null = _flat(array)
    size = spec.size if isinstance(spec, DenseColumn) else None
    size = array.type.list_size if size is None else size
    lengths = np.diff(offsets)
    is_null = np.zeros(len(lengths), bool) if is_null is None else is_null
    must = f"{spec.name} must have {size} numbers in each row."

    def bad(row: int) -> DataError:
        return fail(row, must, array[row].as_py())

    if (wrong := (lengths != size) & ~is_null).any():
        raise bad(int(np.flatnonzero(wrong)[0]))
    given, is_empty = _floats(plain(values), lambda i: bad(_row_of(i, offsets)))
    numbers = np.zeros((len(lengths), size), np.float64)
    missing = np.repeat(is_null[:, None], size, axis=1)
    numbers[~is_null] = given.reshape(-1, size)
    missing[np.isnan(numbers)] = True
    if is_empty is not None:
        missing[~is_null] |= is_empty.reshape(-1, size)
    return _finish(numbers, missing, spec, bad)
