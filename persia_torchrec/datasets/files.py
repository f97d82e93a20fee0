"""CSV and Parquet files, read a group of rows at a time.

    Parquet    its row groups
    CSV        GROUP_ROWS lines; a first pass over a file finds where they begin, and
               checks the number of fields and the labels of every line. A file that
               ends in .gz is unpacked into a temporary one meanwhile

Fields of a CSV file are not quoted, spaces around one are no part of it, and empty
lines are no rows. Any thread may read; each read opens the file.
"""

import gzip
import math
import os
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from persia_torchrec.datasets.columns import (
    AnyColumn,
    Column,
    Columns,
    IdColumn,
    LabelColumn,
    Rows,
    decode,
    is_list,
    is_text,
    require,
    row_error,
    typed,
)
from persia_torchrec.errors import DataError

GROUP_ROWS = 8192
"""Rows of a CSV file that are read at once, and of a row group that is written."""

_MAX_KNOWN = 1024  # texts of a label that are remembered as numbers


def require_file(path: Path) -> None:
    """Raise DataError unless there is a file that is not empty."""
    if not path.is_file():
        raise DataError(
            f"{path} must be a file. Received: "
            f"{'a folder' if path.is_dir() else 'nothing of that name'}. Check the "
            "path; relative ones begin at the working directory."
        )
    if not path.stat().st_size:
        raise DataError(f"{path} must have rows. Received: an empty file.")


class _Group(NamedTuple):
    """Some lines: offset and size in bytes, number of the first, from 1, and rows."""

    start: int
    size: int
    line: int
    num_rows: int


class CsvFile:
    """One CSV file; the columns are all that a line has, in their order.

    Args:
        path: plain, or ``.gz``.
        columns: of a line.

    Raises:
        DataError: there is no such file, it is empty, or its first line has another
            number of fields.
    """

    def __init__(self, path: Path, columns: Columns) -> None:
        require_file(path)
        self.path = path
        self._columns = columns
        self._unpacked: int | None = None  # descriptor of the temporary file
        self._labels = {
            index: set[bytes]()
            for index, column in enumerate(columns.columns)
            if isinstance(column, LabelColumn) and column.positive is None
        }
        first = next(((n, line) for n, line in self._lines() if line.strip()), None)
        if first is None:
            raise DataError(f"{path} must have rows. Received: empty lines.")
        self._check(*first)

    @property
    def group_rows(self) -> list[int]:
        """How many rows each group has; the first use reads the whole file.

        Raises:
            DataError: a line has another number of fields, or a label that is no
                number.
        """
        return [group.num_rows for group in self._groups]

    def num_rows_up_to(self, most: int) -> int:
        """Return how many rows there are, or ``most``, without a look at all lines."""
        rows = (line for _, line in self._lines() if _is_row(line))
        return sum(1 for _ in islice(rows, most))

    def read(self, group: int) -> Rows:
        """Return the rows of a group."""
        table = self._read_text(group, [column.name for column in self._columns.read])
        return decode(table, self._columns, partial(self._fail, group))

    def read_typed(self, group: int) -> Any:
        """Return a group as an Arrow table whose types say what columns are."""
        table, columns = self._read_text(group, self._columns.names), {}
        for name, column in zip(table.column_names, self._columns.columns, strict=True):
            fail = partial(self._fail, group)
            columns[name] = typed(table[name], column, fail)
        return require("pyarrow").table(columns)

    def _read_text(self, group: int, names: Sequence[str]) -> Any:
        arrow, csv = require("pyarrow"), require("pyarrow.csv")
        data = self._bytes(group)
        try:
            table = csv.read_csv(
                arrow.BufferReader(data),
                csv.ReadOptions(
                    use_threads=False,
                    block_size=len(data) + 1,
                    column_names=self._columns.names,
                ),
                csv.ParseOptions(quote_char=False),
                csv.ConvertOptions(
                    column_types=dict.fromkeys(names, arrow.string()),
                    include_columns=names,
                ),
            )
        except arrow.ArrowInvalid as exc:
            raise DataError(
                f"{self.path} must be text in UTF-8. Received: {exc}."
            ) from exc
        if b" " not in data:
            return table
        trim = require("pyarrow.compute").ascii_trim
        arrays = [trim(column, " ") for column in table.columns]
        return arrow.table(dict(zip(table.column_names, arrays, strict=True)))

    @cached_property
    def _groups(self) -> list[_Group]:
        """Look at every line; unpack the file, if it is packed."""
        if self.path.suffix != ".gz":
            return self._scan(lambda line: None)
        with tempfile.TemporaryFile() as copy:
            groups = self._scan(copy.write)
            copy.flush()
            self._unpacked = os.dup(copy.fileno())
        weakref.finalize(self, os.close, self._unpacked)
        return groups

    def _scan(self, keep: Callable[[bytes], object]) -> list[_Group]:
        groups: list[_Group] = []
        start = offset = num_rows = first = 0
        for number, line in self._lines():
            keep(line)
            if _is_row(line):
                if num_rows == GROUP_ROWS:
                    groups.append(_Group(start, offset - start, first, num_rows))
                    num_rows = 0
                if not num_rows:
                    start, first = offset, number
                self._check(number, line)
                num_rows += 1
            offset += len(line)
        return [*groups, _Group(start, offset - start, first, num_rows)]

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        opened = gzip.open if self.path.suffix == ".gz" else open
        try:
            with opened(self.path, "rb") as lines:
                yield from enumerate(lines, 1)
        except (gzip.BadGzipFile, EOFError, zlib.error) as exc:
            raise DataError(
                f"{self.path} must be a whole file of gzip. Received: {exc}."
            ) from exc

    def _check(self, number: int, line: bytes) -> None:
        num_fields = line.count(b",") + 1
        if num_fields != len(self._columns.names):
            must = f"a line must have {len(self._columns.names)} columns."
            raise self._error(number, must, f"{num_fields} in {line!r:.100}")
        if not self._labels:
            return
        fields = line.split(b",", max(self._labels) + 1)
        for index, known in self._labels.items():
            if (field := fields[index]) in known:
                continue
            must = f"{self._columns.names[index]} must be a number."
            text = field.strip(b"\r\n")
            try:
                is_number = math.isfinite(float(text))
            except ValueError:
                is_number = False
            if not is_number:
                raise self._error(number, must, text)
            if len(known) < _MAX_KNOWN:
                known.add(field)

    def _bytes(self, group: int) -> bytes:
        start, size, *_ = self._groups[group]
        if self._unpacked is not None:
            data = os.pread(self._unpacked, size, start)
        else:
            with self.path.open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), size, start)
        if len(data) != size:
            raise DataError(
                f"{self.path} must not change while it is read. Received: "
                f"{len(data)} of {size} bytes at {start}."
            )
        return data

    def _fail(self, group: int, row: int, must: str, received: object) -> DataError:
        """Return what to raise about a row of a group, from 0, by the file's line."""
        lines = self._bytes(group).split(b"\n")
        rows = [n for n, line in enumerate(lines) if line.strip(b"\r")]
        return self._error(self._groups[group].line + rows[row], must, received)

    def _error(self, line: int, must: str, received: object) -> DataError:
        return row_error(f"{self.path}, line {line}", must, received)


class ParquetFile:
    """One Parquet file; columns are found by their names.

    Raises:
        DataError: there is no such file, it is no Parquet file, has no rows, lacks a
            column, or has one of another type.
    """

    def __init__(self, path: Path, columns: Columns) -> None:
        arrow, parquet = require("pyarrow"), require("pyarrow.parquet")
        require_file(path)
        self.path = path
        self._columns = columns
        try:
            with parquet.ParquetFile(path) as file:
                self._metadata, schema = file.metadata, file.schema_arrow
                texts = {c.name for c in columns.ids if c.is_text}
                paths = [file.schema.column(i) for i in range(len(file.schema))]
        except (arrow.ArrowException, OSError) as exc:
            raise DataError(f"{path} must be a Parquet file. Received: {exc}.") from exc
        self._texts = [
            column.path
            for column in paths
            if column.path.partition(".")[0] in texts
            and column.physical_type == "BYTE_ARRAY"
        ]
        self._require(schema)
        groups = range(self._metadata.num_row_groups)
        self.group_rows = [self._metadata.row_group(g).num_rows for g in groups]
        if not self._metadata.num_rows:
            raise DataError(f"{path} must have rows. Received: none.")

    def num_rows_up_to(self, most: int) -> int:
        """Return how many rows there are, or ``most``."""
        return int(min(most, sum(self.group_rows)))

    def read(self, group: int) -> Rows:
        """Return the rows of a group."""
        arrow, parquet = require("pyarrow"), require("pyarrow.parquet")
        names = [column.name for column in self._columns.read]
        try:
            with parquet.ParquetFile(
                self.path, metadata=self._metadata, read_dictionary=self._texts
            ) as file:
                table = file.read_row_group(group, names, use_threads=False)
        except (arrow.ArrowException, OSError) as exc:
            raise DataError(
                f"{self.path}, row group {group} must be readable. Received: {exc}."
            ) from exc
        first = 1 + sum(self.group_rows[:group])

        def fail(row: int, must: str, received: object) -> DataError:
            return row_error(f"{self.path}, row {first + row}", must, received)

        return decode(table, self._columns, fail)

    def _require(self, schema: Any) -> None:
        """Raise DataError if columns are missing, or are of another type."""
        found = {field.name: field.type for field in schema}
        read = self._columns.read
        missing = [column.name for column in read if column.name not in found]
        wrong = [
            f"{column.name} must be {must}, and is {found[column.name]}"
            for column in read
            if column.name in found and (must := _misfit(column, found[column.name]))
        ]
        if missing or wrong:
            faults = [f"it lacks {missing}"] if missing else []
            raise DataError(
                f"{self.path} must have the columns that the dataset reads. Received: "
                f"{'; '.join([*faults, *wrong])}. It has {list(found)}."
            )


def _misfit(column: Column, kind: Any) -> str:
    """Return what a column must be, or nothing if its Arrow type is that."""
    types = require("pyarrow.types")
    match column:
        case IdColumn(separator=str(), is_text=True):
            is_fit = is_text(kind) or (is_list(kind) and is_text(kind.value_type))
            return "" if is_fit else "a list of text, or text"
        case IdColumn(separator=str()):
            is_fit = is_list(kind) and types.is_integer(kind.value_type)
            return "" if is_fit else "a list of integers"
        case IdColumn(is_text=True) | LabelColumn(positive=str()):
            return "" if is_text(kind) else "text"
        case IdColumn():
            return "" if types.is_integer(kind) else "an integer"
    tests = (types.is_integer, types.is_floating, types.is_boolean)
    return "" if any(test(kind) for test in tests) else "a number"


def write_parquet(
    csv: str | os.PathLike[str],
    parquet: str | os.PathLike[str],
    columns: Sequence[AnyColumn],
) -> int:
    """Write a CSV file as a Parquet file, which reads as the same; return its rows.

    Text stays text, and tokens become lists; an empty field is a null. Columns that are
    not read become text. A row group has ``GROUP_ROWS`` rows.

    Args:
        csv: plain, or ``.gz``.
        parquet: of the file that is written; it is replaced when the new one is whole.
        columns: of a line of the CSV file.

    Raises:
        DataError: the CSV file is malformed.
    """
    target = Path(parquet)
    source = CsvFile(Path(csv), Columns(columns))
    part = target.with_name(f"{target.name}.part")
    writer = None
    try:
        for group in range(len(source.group_rows)):
            table = source.read_typed(group)
            if writer is None:
                writer = require("pyarrow.parquet").ParquetWriter(part, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
    part.replace(target)
    return sum(source.group_rows)


def _is_row(line: bytes) -> bool:
    return len(line) > 2 or bool(line.strip(b"\r\n"))


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Say in which settings a saved state differs from a dataset, files by name."""
    faults = []
    for name, value in here.items():
        if (before := saved.get(name)) == value:
            continue
        if name != "files":
            faults.append(f"{name}: {before} was saved, {value} is here")
            continue
        if missing := [file for file in before or [] if file not in value]:
            faults.append(f"files that were saved and are not here: {missing}")
        if new := [file for file in value if file not in (before or [])]:
            faults.append(f"files that are here and were not saved: {new}")
        if not (missing or new):
            faults.append("files in another order")
    return faults
