"""Inspect files before training, and print the code that reads them.

    files -> those of the format of most bytes -> opened and read by the dataset's code
          -> per column the first of its candidates that decodes all values -> Python

A candidate is a column as a dataset has it. The dataset's own code decodes each value
by each candidate, and counts what is missing; one that fails is dropped. Files that the
dataset would reject are named and left out.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
from persia_torchrec.datasets.arrow_values import decode
from persia_torchrec.datasets.columns import (
    AnyColumn,
    Column,
    Columns,
    DenseColumn,
    Fail,
    IdColumn,
    LabelColumn,
    require,
    row_error,
)
from persia_torchrec.datasets.files import CsvFile, CsvFormat
from persia_torchrec.datasets.hashing import hash_texts
from persia_torchrec.datasets.json_files import JsonFile
from persia_torchrec.datasets.reading import open_all, say_empty, unreadable
from persia_torchrec.datasets.sources import Source, find_sources
from persia_torchrec.datasets.tables import ArrowFile, NpyFile, ParquetFile, TableFile
from persia_torchrec.errors import DataError

_NUM_ROWS = 1_000_000
_SKETCH = 1024
_NUM_SHOWN = 5
_MAX_COUNTED = 100_000  # different values
_LABELS = ("label", "click", "clicked", "target", "y")
_YES = ("yes", "y", "true", "t")
_NO = ("no", "n", "false", "f")
_CODE = "^-?0[0-9]"  # text as 007, which is no number: it would lose its zeros
_NUM_HEADS = 100  # files, of which one tells the names of columns
_NPY_BESIDE = ("_sparse.npy", "_labels.npy")  # which belong to a _dense.npy

_FILES: dict[str, Callable[..., TableFile]] = {
    "ParquetDataset": ParquetFile,
    "ArrowDataset": ArrowFile,
    "NpyDataset": NpyFile,
    "JsonDataset": JsonFile,
    "CsvDataset": CsvFile,
}


@dataclass
class _Seen:
    """What was seen of a column: a sketch of its values, and the most frequent ones.

    The sketch is the smallest hashes: of n different values, the k-th smallest of 64
    bits is near k / n of 2**64.

    ``missing`` has the candidates that have decoded all values, the best one first, and
    how many values each found missing; ``fault`` is what the last one that failed said.
    """

    name: str
    kind: Any = None
    num_values: int = 0
    longest: int = 0
    smallest: Any = field(default_factory=lambda: np.empty(0, np.uint64))
    counts: Counter[str] = field(default_factory=Counter)
    missing: dict[Column, int] = field(default_factory=dict)
    num_null: int = 0
    fault: str = ""
    _before: list[Any] = field(default_factory=list)  # arrays of no type

    def add(self, array: Any, fail: Fail) -> None:
        """Add values of a table of a file."""
        array = plain(array)
        if self.kind is None or family_of(self.kind) is None:
            self.kind = array.type
            self.missing = dict.fromkeys(_candidates(self.name, self.kind), 0)
            for before in self._before:
                self._decode(before, fail)
            if family_of(self.kind) is None:
                self._before.append(array)
        self._count(array)
        self._decode(array, fail)

    def _decode(self, array: Any, fail: Fail) -> None:
        arrow = require("pyarrow")
        table = arrow.table({self.name: array})
        for column in list(self.missing):
            try:
                if must := misfit(column, array.type):
                    raise DataError(f"{self.name} must be {must}.")
                columns = Columns([column], needs_ids=False)
                found = decode(table, columns, fail, counts=False).missing
                self.missing[column] += found.get(self.name, 0)
            except (DataError, UnicodeError, arrow.ArrowException) as exc:
                del self.missing[column]
                self.fault = str(exc)

    def _count(self, array: Any) -> None:
        compute = require("pyarrow.compute")
        kind = array.type
        self.num_null += array.null_count
        while is_list(kind):
            sizes = compute.list_value_length(array).fill_null(0)
            self.longest = max(self.longest, compute.max(sizes).as_py() or 0)
            self.num_values += compute.sum(compute.equal(sizes, 0)).as_py() or 0
            array = plain(compute.list_flatten(array))
            kind = array.type
        self.num_values += len(array)
        if kind_of(kind) in ("map", "struct", "other"):
            return
        if kind_of(kind) == "float":  # NaN is a missing value
            array = compute.if_else(compute.is_nan(array), None, array)
        is_text = kind_of(kind) in ("text", "bytes")
        try:
            texts = texts_of(
                array if is_text else array.cast(require("pyarrow").string())
            )
        except require("pyarrow").ArrowException:
            return
        is_missing = compute.fill_null(compute.equal(texts, ""), fill_value=True)
        present = texts.filter(compute.invert(is_missing))
        self._add_present(present)
        is_code = compute.any(compute.match_substring_regex(present, _CODE))
        if is_text and is_code.as_py():
            for number in (_integers(self.name), _numbers(self.name)):
                self.missing.pop(number, None)

    def _add_present(self, texts: Any) -> None:
        compute = require("pyarrow.compute")
        hashes = np.unique(
            np.concatenate([self.smallest, np.unique(hash_texts(texts))])
        )
        self.smallest = hashes[:_SKETCH]
        if len(self.counts) < _MAX_COUNTED:
            for count in compute.value_counts(texts).to_pylist():
                self.counts[count["values"]] += count["counts"]

    @property
    def num_distinct(self) -> int:
        """About how many different values there are."""
        if len(self.smallest) < _SKETCH:
            return len(self.smallest)
        return round((_SKETCH - 1) * 2.0**64 / float(self.smallest[-1]))

    @property
    def column(self) -> Column | None:
        """The candidate that it is read as; None: there is none."""
        fit = list(self.missing)
        if not len(self.smallest):  # no value tells: the most general one
            fit.reverse()
        return next(iter(fit), None)

    @property
    def num_missing(self) -> int:
        """Values that are missing, as the dataset counts them."""
        return self.num_null if self.column is None else self.missing[self.column]

    def label(self) -> LabelColumn | None:
        """Return the label that it can be: of numbers, or of yes and no as text."""
        for number in (_numbers(self.name), _integers(self.name)):
            if number in self.missing:
                return _label(self.name, has_gaps=bool(self.missing[number]))
        yes = self.yes()
        return None if yes is None else LabelColumn(self.name, positive=yes)

    def yes(self) -> str | None:
        """Return the value that is yes, if all are yes or no."""
        found = {value.casefold(): value for value in self.counts}
        yes = [value for value in found if value in _YES]
        is_pair = len(self.counts) == self.num_distinct == 2 and len(yes) == 1
        return found[yes[0]] if is_pair and any(n in found for n in _NO) else None


_AllSeen = dict[str, _Seen]


def _integers(name: str) -> IdColumn:
    return IdColumn(name, is_text=False, fill=0)


def _numbers(name: str) -> DenseColumn:
    return DenseColumn(name, fill=0.0)


def _label(name: str, *, has_gaps: bool) -> LabelColumn:
    return LabelColumn(name, fill=0.0 if has_gaps else None)


def _candidates(name: str, kind: Any) -> list[Column]:
    """Return the columns that an Arrow type can be read as, the best one first."""
    inner, is_many = kind, is_list(kind)
    while is_list(inner):
        inner = inner.value_type
    element = kind_of(inner)
    fill: Any = () if is_many else 0
    times = IdColumn(name, is_text=False, unit="D", fill=fill)
    match element:
        case "map" | "struct":
            is_pair = element == "map" or inner.num_fields == 2
            return [_weighted(name, inner)] if is_pair else []
        case "integer" | "boolean":
            return [replace(_integers(name), fill=fill)]
        case "time":
            return [times]
        case "float" | "decimal":
            is_vector = element == "float" and hasattr(kind, "list_size")
            return [_numbers(name)] if is_vector or not is_many else []
        case "text" | "bytes" | "null":
            if is_many:
                return [IdColumn(name)]
            return [_integers(name), times, _numbers(name), IdColumn(name)]
    return []


def _weighted(name: str, pair: Any) -> IdColumn:
    """Return a column of a map, or of a list of pairs."""
    is_map = kind_of(pair) == "map"
    ids = pair.key_type if is_map else pair.field(0).type
    if kind_of(ids) in ("text", "bytes"):
        return IdColumn(name, is_weighted=True)
    return IdColumn(name, is_text=False, is_weighted=True, fill=())


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
    found = _Found(find_sources(files))
    seen, rows = found.look(num_rows)
    columns = _columns(seen)
    lines = [
        f"{len(found.sources)} files, {sum(s.size for s in found.sources)} bytes, "
        f"{found.name}; {rows} rows were looked at{found.of_all()}",
        *found.notes(),
        "",
        *_table(seen),
        "",
    ]
    if not any(isinstance(column, IdColumn) for column in columns):
        return "\n".join([*lines, "No column can be ids, which a dataset needs."])
    is_whole = len(found.files) == len(found.sources)
    paths = [files] if isinstance(files, str) else list(files)
    given = paths if is_whole else [file.source.url for file in found.files]
    return "\n".join([*lines, *_python(given, found, columns, seen)])


class _Found:
    """The files of a data set that its own code can read, and what others lack.

    Attributes:
        sources: all that were found.
        name: of the dataset.
        options: how the lines of a CSV file are read.
        files: those that the dataset can read; some may have no rows.
        faults: what is wrong with the others.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources, self.faults = sources, list[DataError]()
        self.name, of_format = self._sorted()
        self.options, self._names = CsvFormat(), list[str]()
        if self.name == "CsvDataset":
            columns = self._fields(of_format)
        else:
            columns = self._schema(of_format)
        opened = partial(self._open, columns)
        self.files = open_all(opened, of_format, columns, self.faults)
        self._require_rows()

    def _sorted(self) -> tuple[str, list[Source]]:
        """Return the format of most bytes and its files, and those of no bytes."""
        formats: dict[str, list[Source]] = {}
        for source in self.sources:
            if not source.size or source.url.endswith(_NPY_BESIDE):
                continue
            try:
                formats.setdefault(_format_of(source), []).append(source)
            except DataError as exc:
                self.faults.append(exc)
        if not formats:
            url = self.sources[0].url
            empty = DataError(f"{url} must have rows. Received: an empty file.")
            raise next(iter(self.faults), empty)
        name = max(formats, key=lambda n: sum(source.size for source in formats[n]))
        self.faults += [
            DataError(f"{source.url} must be of a {name}. Received: of a {other}.")
            for other, of_other in formats.items()
            for source in of_other
            if other != name
        ]
        return name, [s for s in self.sources if not s.size or s in formats[name]]

    def _open(self, columns: Columns, source: Source) -> TableFile:
        return _FILES[self.name](source, columns, self.options)

    def _fields(self, sources: Sequence[Source]) -> Columns:
        """Return the fields of CSV files, of the first one with two lines."""
        heads = [_Head(source) for source in sources if source.size][:_NUM_HEADS]
        head = next((head for head in heads if len(head.head_lines) > 1), heads[0])
        self.options = _csv_format(head.head_lines)
        fields = head.fields(self.options)
        if not self.options.header:
            fields = [f"column{i}" for i in range(len(fields))]
        self._names = fields
        return Columns([IdColumn(name) for name in fields], needs_ids=False)

    def _schema(self, sources: Sequence[Source]) -> Columns:
        """Return columns that fit the types of the first file with rows.

        None of JSON, whose lines may lack any.
        """
        none = Columns([], needs_ids=False)
        if self.name == "JsonDataset":
            return none
        columns: list[Column] = []
        for file in open_all(partial(self._open, none), sources, none, []):
            try:
                table = next(iter(file.raw_tables()), None)
            except DataError:
                continue
            for name, values in () if table is None else _leaves(file.source, table):
                self._names.append(name)
                if family_of(values.type) is not None:
                    columns += _candidates(name, values.type)[-1:]
            if self._names:
                break
        return Columns(columns, needs_ids=False)

    def _require_rows(self) -> None:
        if all(file.is_empty for file in self.files):
            raise self.faults[0] if self.faults else self.files[0].no_rows()

    def look(self, num_rows: int) -> tuple[_AllSeen, int]:
        """Return what is seen of about so many rows, and how many they were.

        A file that cannot be read is left out, and the others are read again.
        """
        while (found := self._look_at_files(num_rows)) is None:
            self._require_rows()
        return found

    def _look_at_files(self, num_rows: int) -> tuple[_AllSeen, int] | None:
        seen: _AllSeen = {}
        rows = 0
        for file in self.files:
            first = rows
            try:
                for table in file.raw_tables():
                    self._add(seen, rows, file, rows - first, table)
                    rows += table.num_rows
                    if rows >= num_rows:
                        return seen, rows
            except (UnicodeError, require("pyarrow").ArrowException) as exc:
                self._leave_out(file, unreadable(file.source, exc))
                return None
            except DataError as exc:
                self._leave_out(file, exc)
                return None
        return seen, rows

    def _leave_out(self, file: TableFile, fault: DataError) -> None:
        self.faults.append(fault)
        self.files.remove(file)

    def _add(
        self, seen: _AllSeen, rows: int, file: TableFile, first: int, table: Any
    ) -> None:
        """Add a table after some rows; a column that it lacks is null, as of JSON."""

        def fail(row: int, must: str, received: object) -> DataError:
            at = f"{file.source.url}, row {first + row + 1}"
            return row_error(at, must, received)

        nulls, missing = require("pyarrow").nulls, set(seen)
        for name, values in _leaves(file.source, table):
            if self._names and name not in self._names:
                continue
            if name not in seen:
                seen[name] = _Seen(name)
                if rows:
                    seen[name].add(nulls(rows), fail)
            seen[name].add(values, fail)
            missing.discard(name)
        for name in missing:
            seen[name].add(nulls(table.num_rows), fail)

    def of_all(self) -> str:
        """Say how many rows there are, where footers do."""
        files = [file for file in self.files if isinstance(file, ParquetFile)]
        return f", of {sum(sum(file.group_rows) for file in files)}" if files else ""

    def notes(self) -> Iterator[str]:
        """Yield lines on the files that are not read."""
        if empty := [file for file in self.files if file.is_empty]:
            yield say_empty(empty, len(self.sources))
        if self.faults:
            yield f"{len(self.faults)} of {len(self.sources)} files are left out:"
        for fault in self.faults:
            yield f"  {' '.join(str(fault).split())}"


def _format_of(source: Source) -> str:
    """Return the dataset that reads a file."""
    with source.open() as file:
        start = file.read(6)
    if start.startswith(b"PAR1"):
        return "ParquetDataset"
    if start == b"\x93NUMPY":
        return "NpyDataset"
    if start == b"ARROW1" or start.startswith(b"\xff\xff\xff\xff"):
        return "ArrowDataset"
    head = _Head(source).head_lines
    is_json = head and all(line.lstrip().startswith(b"{") for line in head)
    return "JsonDataset" if is_json else "CsvDataset"


class _Head(CsvFile):
    """The first lines of a text file, before anything is known of them."""

    def __init__(self, source: Source) -> None:
        TableFile.__init__(self, source, Columns([], needs_ids=False))
        self._options, self._head_lines = CsvFormat(), 0
        data, is_whole = self._head()
        lines = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r", b"").split(b"\n")
        self.head_lines = [
            line for line in (lines if is_whole else lines[:-1]) if line
        ][:100]

    def fields(self, options: CsvFormat) -> list[str]:
        """Return the fields of the first line."""
        self._options = options
        return self._fields(self.head_lines[0] if self.head_lines else b"")


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
        len(rest) > 0
        and len(set(first)) == len(first)
        and not any(map(_is_float, first))
    )
    is_known = any(name.lower() in _LABELS[:-1] for name in first)
    has_names &= all(first) and (is_known or any(map(_is_float, rest[0])))
    return CsvFormat(
        header=has_names, delimiter=delimiter, quotes=quotes, encoding=encoding
    )


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


def _columns(seen: _AllSeen) -> list[AnyColumn]:
    """Choose what each column is for."""
    label = _label_of(seen)
    columns: list[AnyColumn] = []
    for name, of_name in seen.items():
        column = of_name.column
        if label is not None and label.name == name:
            columns.append(label)
        elif column is None:
            columns.append(name)
        else:
            has_gaps = bool(of_name.num_missing)
            columns.append(column if has_gaps else replace(column, fill=None))
    if not any(isinstance(column, IdColumn) for column in columns):
        for at, (name, of_name) in enumerate(seen.items()):
            if IdColumn(name) in of_name.missing and columns[at] != label:
                columns[at] = IdColumn(name)
                break
    return columns


def _label_of(seen: _AllSeen) -> LabelColumn | None:
    """Return the label: a column of such a name, or the only one of yes and no."""
    named = [n for label in _LABELS for n in seen if n.lower() == label]
    pairs = [name for name, of_name in seen.items() if of_name.yes()]
    for name in [*named, *(pairs if len(pairs) == 1 else [])]:
        if label := seen[name].label():
            return label
    return None


def _table(seen: _AllSeen) -> list[str]:
    header = ["column", "type", "missing", "distinct", "most frequent values"]
    rows = [header]
    for name, of_name in seen.items():
        top = ", ".join(
            f"{value[:20]!r} x {count}"
            for value, count in of_name.counts.most_common(_NUM_SHOWN)
        )
        kind = f"{getattr(of_name.kind, 'value_type', of_name.kind)}"
        if is_list(of_name.kind):
            longest = f", up to {of_name.longest}" if of_name.longest else ""
            kind = f"{of_name.kind}{longest}"
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
    files: Sequence[str], found: _Found, columns: Sequence[AnyColumn], seen: _AllSeen
) -> list[str]:
    name, options = found.name, found.options
    used = sorted(
        {type(c).__name__ for c in columns if not isinstance(c, str)} | {name}
    )
    lines = [
        "from persia_torchrec.data import (",
        *(f"    {u}," for u in used),
        ")",
        "",
    ]
    shown = [f"    {_shown(column)}," for column in columns]
    for at, (column, of_one) in enumerate(zip(columns, seen.values(), strict=True)):
        if isinstance(column, str) and of_one.fault:
            shown[at] += f"  # not read: {' '.join(of_one.fault.split())}"
    lines += ["columns = [", *shown, "]"]
    indent = 4 if len(files) > _NUM_SHOWN else None
    given = json.dumps(files[0] if len(files) == 1 else list(files), indent=indent)
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
    for name in ("positive", "is_text", "is_weighted", "fill", "unit"):
        default = {"is_text": True, "is_weighted": False}.get(name)
        if (value := getattr(column, name, default)) != default:
            shown.append(f"{name}={value!r}")
    return f"{type(column).__name__}({', '.join(shown)})"
