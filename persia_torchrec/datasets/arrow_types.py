"""Arrow's types as columns know them: text, integers, floats, times, lists, maps."""

from typing import Any

from persia_torchrec.datasets.columns import (
    Column,
    DenseColumn,
    IdColumn,
    LabelColumn,
    require,
)

_NUMBERS = ("integer", "float", "boolean", "decimal", "text", "bytes", "null")


def kind_of(kind: Any) -> str:
    """Return what an Arrow type is to a column: text, an integer, a list, ..."""
    types = require("pyarrow.types")
    if types.is_dictionary(kind):
        return kind_of(kind.value_type)
    tests: dict[str, tuple[str, ...]] = {
        "text": ("string", "large_string", "string_view"),
        "bytes": ("binary", "large_binary", "binary_view", "fixed_size_binary"),
        "integer": ("integer",),
        "float": ("floating",),
        "boolean": ("boolean",),
        "decimal": ("decimal",),
        "time": ("timestamp", "date"),
        "null": ("null",),
        "map": ("map",),
        "struct": ("struct",),
    }
    for name, of_name in tests.items():
        if any(getattr(types, f"is_{test}")(kind) for test in of_name):
            return name
    return "list" if is_list(kind) else "other"


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
    types = require("pyarrow.types")
    names = ("list", "large_list", "fixed_size_list", "list_view", "large_list_view")
    return any(getattr(types, f"is_{name}")(kind) for name in names)


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
