"""Inspect files before training, and print the code that reads them."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from persia_torchrec.datasets.arrow_types import (
    family_of,
    is_list,
    kind_of,
    misfit,
    plain,
    texts_of,
)
from persia_torchrec.datasets.columns import (
    AnyColumn,
    Columns,
    DenseColumn,
    IdColumn,
    LabelColumn,
    require,
)
from persia_torchrec.datasets.files import CsvFile, CsvFormat
from persia_torchrec.datasets.hashing import hash_texts
from persia_torchrec.datasets.json_files import JsonFile
from persia_torchrec.datasets.sources import Source, find_sources
from persia_torchrec.datasets.tables import NpyFile, ParquetFile, TableFile
from persia_torchrec.errors import DataError

_NUM_ROWS = 1_000_000
_SKETCH = 1024
_NUM_SHOWN = 5
_MAX_COUNTED = 100_000  # different values
_LABELS = ("label", "click", "clicked", "target", "y")


@dataclass
class _Seen:
    """What was seen of a column: a sketch of its values, and the most frequent ones.

    The sketch is the smallest hashes: of n different values, the k-th smallest of 64
    bits is near k / n of 2**64.
    """

    kind: Any = None
    num_values: int = 0
    num_missing: int = 0
    longest: int = 0
    is_number: bool = True
    is_whole: bool = True
    smallest: Any = field(default_factory=lambda: np.empty(0, np.uint64))
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, array: Any) -> None:
        compute = require("pyarrow.compute")
        array = plain(array)
        kind = array.type
        if self.kind is None or family_of(self.kind) is None:
            self.kind = kind
        while is_list(kind):
            sizes = compute.list_value_length(array).fill_null(0)
            self.longest = max(self.longest, compute.max(sizes).as_py() or 0)
            array = plain(compute.list_flatten(array))
            kind = array.type
        if kind_of(kind) in ("map", "struct", "other"):
            self.num_values += len(array)
            return
        if kind_of(kind) == "float":  # NaN is a missing value
            array = compute.if_else(compute.is_nan(array), None, array)
        is_text = kind_of(kind) in ("text", "bytes")
        try:
            texts = texts_of(
                array if is_text else array.cast(require("pyarrow").string())
            )
        except require("pyarrow").ArrowException:
            self.num_values += len(array)
            return
        is_missing = compute.fill_null(compute.equal(texts, ""), fill_value=True)
        present = texts.filter(compute.invert(is_missing))
        self.num_values += len(texts)
        self.num_missing += len(texts) - len(present)
        self._add_present(present)

    def _add_present(self, texts: Any) -> None:
        compute = require("pyarrow.compute")
        hashes = np.unique(
            np.concatenate([self.smallest, np.unique(hash_texts(texts))])
        )
        self.smallest = hashes[:_SKETCH]
        if len(self.counts) < _MAX_COUNTED:
            for count in compute.value_counts(texts).to_pylist():
                self.counts[count["values"]] += count["counts"]
        if self.is_number:
            sample = texts.slice(0, _SKETCH).to_pylist()
            self.is_number = all(map(_is_float, sample))
            self.is_whole &= self.is_number and all(
                float(t).is_integer() for t in sample
            )

    @property
    def num_distinct(self) -> int:
        """About how many different values there are."""
        if len(self.smallest) < _SKETCH:
            return len(self.smallest)
        return round((_SKETCH - 1) * 2.0**64 / float(self.smallest[-1]))


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def look(files: str | Sequence[str], num_rows: int = _NUM_ROWS) -> str:
    """Describe files, and return the lines of Python that read them.

    Args:
        files: paths, folders, globs or URLs, of one format.
        num_rows: how many rows are looked at, about.

    Returns:
        Rows, and per column its type, kind, missing and different values, the most
        frequent ones; then Python, which runs as it stands.

    Raises:
        DataError: a file cannot be read, or is of no known format.
    """
    sources = find_sources(files)
    found = [source for source in sources if source.size]
    if not found:
        raise DataError(f"{sources[0].url} must have rows. Received: an empty file.")
    name, options = _format_of(found[0])
    seen: dict[str, _Seen] = {}
    rows = 0
    for source, table in _tables(found, name, options):
        for column, values in _leaves(source, table):
            seen.setdefault(column, _Seen()).add(values)
        rows += table.num_rows
        if rows >= num_rows:
            break
    columns = _columns(seen)
    size = sum(source.size for source in sources)
    lines = [
        f"{len(sources)} files, {size} bytes, {name}; {rows} rows were looked at"
        f"{_of_all(found, name)}",
        "",
    ]
    lines += _table(seen)
    given = [files] if isinstance(files, str) else list(files)
    if not any(isinstance(column, IdColumn) for column in columns):
        return "\n".join([*lines, "", "No column can be ids, which a dataset needs."])
    return "\n".join([*lines, "", *_python(given, name, options, columns)])


def _format_of(source: Source) -> tuple[str, CsvFormat]:
    """Return the dataset that reads a file, and of a CSV file how."""
    with source.open() as file:
        start = file.read(6)
    if start.startswith(b"PAR1"):
        return "ParquetDataset", CsvFormat()
    if start == b"\x93NUMPY":
        return "NpyDataset", CsvFormat()
    if start == b"ARROW1" or start.startswith(b"\xff\xff\xff\xff"):
        return "ArrowDataset", CsvFormat()
    head = _Head(source).head_lines
    if head and all(line.lstrip().startswith(b"{") for line in head):
        return "JsonDataset", CsvFormat()
    return "CsvDataset", _csv_format(head)


class _Head(CsvFile):
    """The first lines of a text file, before anything is known of them."""

    def __init__(self, source: Source) -> None:
        TableFile.__init__(self, source, Columns([IdColumn("any")]))
        self._options = CsvFormat()
        data, is_whole = self._head()
        lines = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r", b"").split(b"\n")
        self.head_lines = [
            line for line in (lines if is_whole else lines[:-1]) if line
        ][:100]


class _AnyJson(JsonFile):
    """A file of JSON objects of which nothing is known."""

    def require_columns(self, *args: object, **kwargs: object) -> None:
        """Take any."""


class _AnyParquet(ParquetFile):
    """A Parquet file of whose columns nothing is known."""

    def require_columns(self, *args: object, **kwargs: object) -> None:
        """Take any."""


class _AnyNpy(NpyFile):
    """The arrays of a day, of whose columns nothing is known."""

    def require_columns(self, *args: object, **kwargs: object) -> None:
        """Take any."""

    def tables(self) -> Iterator[Any]:
        """Yield all rows, a group at a time."""
        arrays = self._arrays()
        for start, stop in pairwise(self.starts):
            yield require("pyarrow").table(
                {n: np.ascontiguousarray(a[start:stop]) for n, a in arrays.items()}
            )


def _csv_format(lines: Sequence[bytes]) -> CsvFormat:
    text = b"\n".join(lines)
    encoding = "utf-8"
    try:
        text.decode()
    except UnicodeError:
        encoding = "latin-1"
    delimiters = ["::", "\t", ";", "|", ","]
    counts = {d: [line.count(d.encode()) for line in lines] for d in delimiters}
    delimiter = max(
        delimiters,
        key=lambda d: (
            min(counts[d], default=0) > 0,
            len(set(counts[d])) == 1,
            max(counts[d]),
        ),
    )
    quotes = b'"' in text
    fields = [
        [f.strip(' "') for f in line.decode(encoding).split(delimiter)]
        for line in lines
    ]
    first, rest = fields[0], fields[1:]
    has_names = (
        bool(rest) and len(set(first)) == len(first) and not any(map(_is_float, first))
    )
    has_names &= all(first) and any(map(_is_float, rest[0])) if rest else False
    return CsvFormat(
        header=has_names or False, delimiter=delimiter, quotes=quotes, encoding=encoding
    )


def _of_all(sources: Sequence[Source], name: str) -> str:
    """Say how many rows there are, where footers do."""
    if name != "ParquetDataset":
        return ""
    columns, num_rows = Columns([IdColumn("any")]), 0
    for source in sources:
        num_rows += sum(_AnyParquet(source, columns).group_rows)
    return f", of {num_rows}"


def _leaves(source: Source, table: Any) -> Iterator[tuple[str, Any]]:
    """Yield columns with their names; fields of structs, and hive partitions, too."""
    arrow, compute = require("pyarrow"), require("pyarrow.compute")
    waiting = list(zip(table.schema.names, table.columns, strict=True))
    while waiting:
        name, values = waiting.pop(0)
        kind = values.type
        if not arrow.types.is_struct(kind):
            yield name, values
            continue
        fields = [kind.field(i).name for i in range(kind.num_fields)]
        waiting[:0] = [(f"{name}.{f}", compute.struct_field(values, f)) for f in fields]
    for name, value in source.partitions:
        if name not in table.schema.names:
            scalar = arrow.scalar(value, arrow.string())
            yield name, arrow.repeat(scalar, table.num_rows)


def _tables(
    sources: Sequence[Source], name: str, options: CsvFormat
) -> Iterator[tuple[Source, Any]]:
    """Yield the rows of files as Arrow tables of all columns."""
    for source in sources:
        for table in _tables_of(source, name, options):
            yield source, table


def _tables_of(source: Source, name: str, options: CsvFormat) -> Iterator[Any]:
    match name:
        case "ParquetDataset":
            with source.open() as file:
                yield from (require("pyarrow.parquet").ParquetFile(file).iter_batches())
        case "ArrowDataset":
            with source.open() as file:
                is_file = file.read(6) == b"ARROW1"
                file.seek(0)
                ipc = require("pyarrow.ipc")
                opened = ipc.open_file(file) if is_file else ipc.open_stream(file)
                if is_file:
                    yield from map(opened.get_batch, range(opened.num_record_batches))
                else:
                    yield from opened
        case "NpyDataset":
            yield from _AnyNpy(source, Columns([IdColumn("any")])).tables()
        case _:
            yield from _text_tables(source, name, options)


def _text_tables(source: Source, name: str, options: CsvFormat) -> Iterator[Any]:
    if name == "JsonDataset":
        yield from _AnyJson(source, Columns([IdColumn("any")]), options).raw_tables()
        return
    head = _Head(source).head_lines
    fields = head[0].decode(options.encoding).split(options.delimiter)
    names = [f.strip(' "') for f in fields] if options.header else []
    names = names or [f"column{i}" for i in range(len(fields))]
    columns = Columns([IdColumn(name) for name in names])
    yield from CsvFile(source, columns, options).raw_tables()


def _columns(seen: dict[str, _Seen]) -> list[AnyColumn]:
    """Guess what each column is for."""
    columns: list[AnyColumn] = []
    label = next((n for n in _LABELS for name in seen if name.lower() == n), None)
    names = {name.lower(): name for name in seen}
    label = names.get(label) if label else None
    for name, of_name in seen.items():
        kind = kind_of(of_name.kind)
        has_gaps = bool(of_name.num_missing)
        if name == label and of_name.is_number and kind != "list":
            columns.append(LabelColumn(name, fill=0.0 if has_gaps else None))
        else:
            columns.append(_column(name, of_name, kind, has_gaps=has_gaps))
    if not any(isinstance(column, IdColumn) for column in columns):
        for at, (name, of_name) in enumerate(seen.items()):
            ids = [IdColumn(name), IdColumn(name, is_text=False)]
            fit = [column for column in ids if not misfit(column, of_name.kind)]
            if fit and name != label:
                columns[at] = fit[0]
                break
    return columns


def _column(name: str, seen: _Seen, kind: str, *, has_gaps: bool) -> AnyColumn:
    inner = seen.kind
    while is_list(inner):
        inner = inner.value_type
    element = kind_of(inner)
    if element == "map" or (element == "struct" and inner.num_fields == 2):
        weighted = _weighted(name, inner)
        return weighted if not misfit(weighted, seen.kind) else name
    if element in ("struct", "other"):
        return name
    if element == "float" and hasattr(seen.kind, "list_size"):
        return DenseColumn(name, fill=0.0 if has_gaps else None)
    if element == "time":
        return IdColumn(name, is_text=False, unit="D", fill=0 if has_gaps else None)
    if element in ("float", "decimal"):
        return (
            name
            if kind == "list"
            else DenseColumn(name, fill=0.0 if has_gaps else None)
        )
    if element in ("integer", "boolean"):
        fill: Any = () if kind == "list" else 0
        return IdColumn(name, is_text=False, fill=fill if has_gaps else None)
    if seen.is_number and not seen.is_whole and kind == "text":
        return DenseColumn(name, fill=0.0 if has_gaps else None)
    return IdColumn(name)


def _weighted(name: str, pair: Any) -> IdColumn:
    """Return a column of a map, or of a list of pairs."""
    is_map = kind_of(pair) == "map"
    ids = pair.key_type if is_map else pair.field(0).type
    is_text = kind_of(ids) in ("text", "bytes")
    return IdColumn(name, is_text=is_text, is_weighted=True)


def _table(seen: dict[str, _Seen]) -> list[str]:
    header = ["column", "type", "missing", "distinct", "most frequent values"]
    rows = [header]
    for name, of_name in seen.items():
        top = ", ".join(
            f"{value[:20]!r} x {count}"
            for value, count in of_name.counts.most_common(_NUM_SHOWN)
        )
        kind = f"{of_name.kind}" + (
            f", up to {of_name.longest}" if of_name.longest else ""
        )
        share = of_name.num_missing / max(of_name.num_values, 1)
        about = "about " if len(of_name.smallest) == _SKETCH else ""
        distinct = f"{about}{of_name.num_distinct}"
        rows.append([name, kind, f"{of_name.num_missing} ({share:.1%})", distinct, top])
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return [
        "  ".join(
            [*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]
        )
        for row in rows
    ]


def _python(
    files: Sequence[str], name: str, options: CsvFormat, columns: Sequence[AnyColumn]
) -> list[str]:
    used = sorted(
        {type(c).__name__ for c in columns if not isinstance(c, str)} | {name}
    )
    lines = [
        "from persia_torchrec.data import (",
        *(f"    {u}," for u in used),
        ")",
        "",
    ]
    lines += ["columns = [", *(f"    {_shown(column)}," for column in columns), "]"]
    given = json.dumps(files[0]) if len(files) == 1 else json.dumps(list(files))
    more = ""
    if name == "CsvDataset":
        plain_format = CsvFormat()
        for option in ("header", "delimiter", "quotes", "encoding"):
            value = getattr(options, option)
            if value != getattr(plain_format, option):
                more += f", {option}={value!r}"
    lines.append(f"dataset = {name}({given}, 4096, columns{more})")
    return [*lines, "for batch in dataset:", "    batch.id_features, batch.labels"]


def _shown(column: AnyColumn) -> str:
    if isinstance(column, str):
        return repr(column)
    shown = [repr(column.name)]
    for name in ("is_text", "is_weighted", "fill", "unit"):
        default = {"is_text": True, "is_weighted": False}.get(name)
        if (value := getattr(column, name, default)) != default:
            shown.append(f"{name}={value!r}")
    return f"{type(column).__name__}({', '.join(shown)})"
