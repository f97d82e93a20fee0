"""Arrow's types as columns know them: text, integers, floats, times, lists, maps."""

from functools import cache
from typing import Any

from persia_torchrec.datasets.columns import (
    Column,
    DenseColumn,
    IdColumn,
    LabelColumn,
    require,
)

_NUMBERS = ("integer", "float", "boolean", "decimal", "text", "bytes", "null")


_KINDS = {
    "text": "STRING LARGE_STRING STRING_VIEW",
    "bytes": "BINARY LARGE_BINARY BINARY_VIEW FIXED_SIZE_BINARY",
    "integer": "INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64",
    "float": "HALF_FLOAT FLOAT DOUBLE",
    "boolean": "BOOL",
    "decimal": "DECIMAL32 DECIMAL64 DECIMAL128 DECIMAL256",
    "time": "TIMESTAMP DATE32 DATE64",
    "null": "NA",
    "map": "MAP",
    "struct": "STRUCT",
    "list": "LIST LARGE_LIST FIXED_SIZE_LIST LIST_VIEW LARGE_LIST_VIEW",
}
"""What Arrow's types are to a column, as they are named in ``pyarrow.lib``."""


@cache
def _kinds() -> dict[int, str]:
    """Return what a type is to a column, by Arrow's number of it."""
    return {
        number: name for name, kinds in _KINDS.items() for number in _numbers(kinds)
    }


@cache
def _changed() -> frozenset[int]:
    """Return Arrow's numbers of the types that :func:`plain` makes others of."""
    names = "NA STRING_VIEW BINARY_VIEW FIXED_SIZE_BINARY DICTIONARY LIST_VIEW"
    names += " LARGE_LIST_VIEW"
    return frozenset(_numbers(names))


@cache
def lists_of_ids() -> frozenset[int]:
    """Return Arrow's numbers of the lists whose offsets and values lie in buffers."""
    return frozenset(_numbers("LIST LARGE_LIST"))


def _numbers(names: str) -> list[int]:
    """Return Arrow's numbers of types, those that this version of pyarrow has."""
    known = vars(require("pyarrow.lib"))
    numbers = [known.get(f"Type_{name}") for name in names.split()]
    return [number for number in numbers if number is not None]


def kind_of(kind: Any) -> str:
    """Return what an Arrow type is to a column: text, an integer, a list, ..."""
    if kind.id == require("pyarrow.lib").Type_DICTIONARY:
        return kind_of(kind.value_type)
    return _kinds().get(kind.id, "other")


def family_of(kind: Any) -> str | None:
    """Return what types of one column in several files share; None: any will do."""
    name = kind_of(kind)
    if name == "list":
        inner = family_of(kind.value_type)
        return None if inner is None else f"list of {inner}"
    if name in ("integer", "float", "decimal", "boolean"):
        return "number"
    return {"null": None, "bytes": "text"}.get(name, name)


def is_list(kind: Any) -> bool:
    """Return whether an Arrow type is a list of any kind."""
    return _kinds().get(kind.id) == "list"


def misfit(column: Column, kind: Any) -> str:
    """Return what a column must be, or nothing if its Arrow type is that."""
    match column:
        case IdColumn():
            return _misfit_ids(column, kind)
        case LabelColumn(positive=str()):
            is_fit = kind_of(kind) in ("text", "bytes", "null")
            return "" if is_fit else "text, as it has a positive one"
        case DenseColumn() if is_list(kind):
            if column.size is None and not hasattr(kind, "list_size"):
                return "a list of a fixed size, or have size=... of its lists"
            kind = kind.value_type
            return "" if kind_of(kind) in _NUMBERS else "a list of numbers"
        case DenseColumn(function=function) if function is not None:
            is_fit = kind_of(kind) in (*_NUMBERS, "time")
            return "" if is_fit else "a number or a time"
    if kind_of(kind) == "time":
        return "a number; function=... of a DenseColumn makes one of a time"
    return "" if kind_of(kind) in _NUMBERS else "a number"


def _misfit_ids(column: IdColumn, kind: Any) -> str:
    name = kind_of(kind)
    while name == "list":
        kind = kind.value_type
        name = kind_of(kind)
    if name == "map" or (name == "struct" and kind.num_fields == 2):
        if not column.is_weighted:
            return "ids, or have is_weighted=True for its weights"
        weights = kind.item_type if name == "map" else kind.field(1).type
        if kind_of(weights) not in _NUMBERS:
            return "pairs of an id and a number"
        name = kind_of(kind.key_type if name == "map" else kind.field(0).type)
    elif column.is_weighted and name not in ("text", "bytes", "null"):
        return "a map, a list of pairs, or tokens id:weight, as it is weighted"
    many = "a list of " if column.separator is not None else ""
    if column.is_text:
        if name in ("text", "bytes", "null"):
            return ""
        is_number = name == "integer"
        return f"{many}text{', or have is_text=False' if is_number else ''}"
    fit = ["integer", "boolean", "decimal", "text", "bytes", "null"]
    fit += ["float"] if column.fill is not None else []
    fit += ["time"] if column.unit is not None else []
    if name in fit:
        return ""
    what = "a list of integers" if many else "an integer"
    if name == "float":
        return f"{what}; with fill=... whole floats are, where NaN is a missing one"
    return f"{what}, or have unit=..." if name == "time" else what


def plain(array: Any) -> Any:
    """Return a column as one array, of few types: no views, no nulls without a type.

    Raises:
        ArrowInvalid: an index of a dictionary is beyond it, as damaged files have.
    """
    arrow = require("pyarrow")
    if isinstance(array, arrow.ChunkedArray):
        array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
        if isinstance(array, arrow.ChunkedArray):  # of no chunk
            array = arrow.concat_arrays([arrow.array([], array.type), *array.chunks])
    types = arrow.types
    if isinstance(array, arrow.ExtensionArray):
        array = array.storage
    kind = array.type
    if kind.id not in _changed():
        return array
    if types.is_null(kind):
        return arrow.nulls(len(array), arrow.string())
    if types.is_string_view(kind):
        return array.cast(arrow.large_string())
    if types.is_binary_view(kind) or types.is_fixed_size_binary(kind):
        return array.cast(arrow.binary()).cast(arrow.large_binary())
    if types.is_dictionary(kind):
        _require_indices(array)
        is_text = kind_of(kind) in ("text", "bytes")
        return array if is_text else array.dictionary_decode()
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return _without_views(array)
    return array


def _require_indices(array: Any) -> None:
    """Check indices, by which pyarrow and NumPy would read what is no value."""
    bounds = require("pyarrow.compute").min_max(array.indices)
    first, last = bounds["min"].as_py(), bounds["max"].as_py()
    if first is not None and (first < 0 or last >= len(array.dictionary)):
        raise require("pyarrow").ArrowInvalid(
            f"indices from {first} to {last} of a dictionary of {len(array.dictionary)}"
        )


def _without_views(array: Any) -> Any:
    """Return views of lists as lists; pyarrow's cast makes wrong ones after a null."""
    arrow, compute = require("pyarrow"), require("pyarrow.compute")
    sizes = compute.list_value_length(array).fill_null(0).cast(arrow.int64())
    ends = compute.cumulative_sum(sizes)
    offsets = arrow.concat_arrays([arrow.array([0], arrow.int64()), ends])
    values = compute.list_flatten(array)
    mask = array.is_null() if array.null_count else None
    return arrow.LargeListArray.from_arrays(offsets, values, mask=mask)


def texts_of(array: Any) -> Any:
    """Return text, plain or dictionary-encoded, as large_string without end spaces."""
    arrow, compute = require("pyarrow"), require("pyarrow.compute")
    if arrow.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return compute.ascii_trim(array.cast(arrow.large_string()), " ")


def trimmed_bytes(array: Any) -> Any:
    """Return text of any encoding as bytes without the spaces at their ends."""
    arrow, compute = require("pyarrow"), require("pyarrow.compute")
    if arrow.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if kind_of(array.type) == "bytes":
        texts = [text and text.strip(b" ") for text in array.to_pylist()]
        return arrow.array(texts, arrow.large_binary())
    trimmed = compute.ascii_trim(array.cast(arrow.large_string()), " ")
    return trimmed.cast(arrow.large_binary())
