"""Files of columns, Parquet, Arrow and NumPy, read in blocks of rows.

    Parquet   groups are its row groups; a block is decoded at a time, of a row group of
              any size, or of several small ones
    Arrow     record batches of an IPC file; a stream of batches is one group
    NumPy     the three arrays of a day that TorchRec's scripts make of Criteo's logs

Any thread may read; each read opens the file.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np

from persia_torchrec.datasets.arrow_types import misfit
from persia_torchrec.datasets.arrow_values import decode
from persia_torchrec.datasets.columns import (
    Columns,
    Rows,
    require,
    row_error,
    source_of,
)
from persia_torchrec.datasets.sources import Source
from persia_torchrec.errors import DataError

BLOCK_ROWS = 16_384
"""Rows that are decoded at once, at most."""

_NPY_ROWS = 32_768  # of a group
_BUFFER_BYTES = 1 << 16  # of each column


class TableFile:
    """One file whose rows are read in groups; what all kinds share.

    Attributes:
        source: the file.
        is_empty: whether it has no rows.
        kinds: Arrow types of the columns that are read, where they are known.
    """

    splits_columns: ClassVar[bool] = True
    """Whether threads divide a block by columns; else by blocks."""

    num_groups: int
    is_empty = False

    def __init__(self, source: Source, columns: Columns) -> None:
        self.source = source
        self.kinds: dict[str, Any] = {}
        self._columns = columns

    @property
    def path(self) -> Any:
        """The path, or URL."""
        return self.source.path

    def rows_of(self, group: int) -> int:
        """Return how many rows a group has."""
        raise NotImplementedError

    def rows_hint(self, group: int) -> int | None:
        """Estimate how many rows a group has; None: it may have any number."""
        return self.rows_of(group)

    def num_rows_up_to(self, most: int) -> int:
        """Return how many rows there are, or ``most``."""
        return min(most, sum(map(self.rows_of, range(self.num_groups))))

    def blocks(
        self, groups: Sequence[int], columns: Columns | None = None
    ) -> Iterator[Rows]:
        """Yield the rows of groups, of all columns or some, in blocks."""
        raise NotImplementedError

    def raw_tables(self) -> Iterator[Any]:
        """Yield all rows as tables of Arrow, with all columns of the file."""
        raise NotImplementedError

    def no_rows(self) -> DataError:
        """Return what to raise of a file without rows that must have some."""
        what = "an empty file" if not self.source.size else "none"
        return DataError(f"{self.source.url} must have rows. Received: {what}.")

    def require_columns(
        self, found: Mapping[str, Any], names: Sequence[str], *, lacking: bool = True
    ) -> None:
        """Raise DataError if columns are missing, come twice, or have another type.

        Args:
            found: types of those that the file has; None: of a text file.
            names: of all columns that it has.
            lacking: whether all must be there.
        """
        found = {**self.partition_types(), **found}
        read = self._columns.read
        missing = [c.name for c in read if source_of(c) not in found]
        twice = [n for n in self._columns.sources if list(names).count(n) > 1]
        wrong = [
            f"{column.name} must be {must}, and is {kind}"
            for column in read
            if (kind := found.get(source_of(column))) is not None
            if (must := misfit(column, kind))
        ]
        if (missing and lacking) or wrong or twice:
            faults = [_lacks(missing, names)] if missing and lacking else []
            faults += [f"it has {twice} twice"] if twice else []
            raise DataError(
                f"{self.source.url} must have the columns that the dataset reads. "
                f"Received: {'; '.join([*faults, *wrong])}. It has {list(names)}."
            )
        self.kinds = {n: k for n, k in found.items() if n in self._columns.sources}

    def partition_types(self) -> dict[str, Any]:
        """Return the types of columns that are hive partitions."""
        wanted = set(self._columns.sources)
        text = require("pyarrow").string()
        return {name: text for name, _ in self.source.partitions if name in wanted}

    def with_partitions(self, table: Any, sources: Sequence[str]) -> Any:
        """Return a table with columns of hive partitions that it has not itself."""
        arrow = require("pyarrow")
        for name, value in self.source.partitions:
            if name in sources and name not in table.column_names:
                column = arrow.repeat(
                    arrow.scalar(value, arrow.string()), table.num_rows
                )
                table = table.append_column(name, column)
        return table

    def picked(self, table: Any, sources: Sequence[str]) -> dict[str, Any]:
        """Return columns by their names, fields of structs by dotted paths."""
        found, names = {}, table.schema.names
        numbers = {name: number for number, name in enumerate(names)}
        for name in sources:
            number = numbers.get(name)
            column = _pick(table, name) if number is None else table.column(number)
            if column is not None:
                found[name] = column
        return found


def _lacks(missing: Sequence[str], names: Sequence[str]) -> str:
    """Say which columns a file lacks, and which of its own may be meant."""
    folded = {name.casefold() for name in missing}
    alike = [name for name in names if name.casefold() in folded]
    hint = f", from which {alike} differ by case only" if alike else ""
    return f"it lacks {list(missing)}{hint}"


def _pick(table: Any, name: str) -> Any:
    if name in table.schema.names:
        return table.column(name)
    compute, types = require("pyarrow.compute"), require("pyarrow.types")
    parts = name.split(".")
    for count in range(1, len(parts)):
        column = ".".join(parts[:count])
        if column in table.schema.names:
            found = table.column(column)
            for part in parts[count:]:
                if (
                    not types.is_struct(found.type)
                    or found.type.get_field_index(part) < 0
                ):
                    return None
                found = compute.struct_field(found, part)
            return found
    return None


def type_at(schema: Any, name: str) -> Any:
    """Return the type of a column, or of a struct's field; None: there is none."""
    empty = schema.empty_table()
    if schema.names.count(name) > 1:
        return schema.field(schema.names.index(name)).type
    found = _pick(empty, name)
    return None if found is None else found.type


class GroupedFile(TableFile):
    """A file whose groups have known numbers of rows."""

    group_rows: Sequence[int]
    _held: frozenset[str]  # columns that are read and that the file has itself

    @property
    def num_groups(self) -> int:  # type: ignore[override]
        """How many groups of rows there are."""
        return len(self.group_rows)

    def rows_of(self, group: int) -> int:
        """Return how many rows a group has."""
        return self.group_rows[group]

    @cached_property
    def starts(self) -> list[int]:
        """The number of each group's first row, from 0, and the number of rows."""
        return [0, *accumulate(self.group_rows)]

    def blocks(
        self, groups: Sequence[int], columns: Columns | None = None
    ) -> Iterator[Rows]:
        """Yield the rows of groups, of all columns or some, in blocks."""
        if not len(groups):
            return
        wanted = (columns or self._columns).sources
        names = [name for name in wanted if name in self._held]
        with self.readable(groups):
            yield from self.decoded(self.batches(groups, names), groups, columns)

    def batches(
        self, groups: Sequence[int], names: Sequence[str] | None
    ) -> Iterator[Any]:
        """Yield the rows of groups as Arrow's batches; ``names`` None: all columns."""
        raise NotImplementedError

    @contextmanager
    def readable(self, groups: Sequence[int]) -> Iterator[None]:
        """Raise what libraries raise within it as DataError."""
        del groups
        yield

    def raw_tables(self) -> Iterator[Any]:
        """Yield all rows as batches of Arrow, with all columns of the file."""
        groups = range(self.num_groups)
        if groups:
            with self.readable(groups):
                yield from self.batches(groups, None)

    def fail_in(
        self, groups: Sequence[int], first: int, row: int, must: str, received: object
    ) -> DataError:
        """Return what to raise about a row of the rows of groups from one on."""
        ends = list(accumulate(self.group_rows[g] for g in groups))
        at = first + row
        number = min(bisect_right(ends, at), len(groups) - 1)
        before = ends[number - 1] if number else 0
        line = self.starts[groups[number]] + at - before + 1
        return row_error(f"{self.source.url}, row {line}", must, received)

    def require_schema(self, schema: Any) -> None:
        """Raise DataError unless a schema has the columns, of fitting types."""
        found = {n: type_at(schema, n) for n in self._columns.sources}
        known = {name: kind for name, kind in found.items() if kind is not None}
        self.require_columns(known, schema.names)
        self._held = frozenset(known)

    def decoded(
        self, batches: Iterator[Any], groups: Sequence[int], columns: Columns | None
    ) -> Iterator[Rows]:
        """Yield batches of Arrow, of the rows of groups, as rows."""
        arrow = require("pyarrow")
        columns, first = columns or self._columns, 0
        for batch in batches:
            picked = self.picked(batch, columns.sources)
            if self.source.partitions:
                table = arrow.table(picked) if picked else _bare(batch.num_rows)
                table = self.with_partitions(table, columns.sources)
                picked = {name: table[name] for name in columns.sources}
            rows = decode(
                _Picked(picked, batch.num_rows),
                columns,
                partial(self.fail_in, groups, first),
            )
            first += batch.num_rows
            yield rows


def _bare(num_rows: int) -> Any:
    arrow = require("pyarrow")
    return arrow.table({"": arrow.nulls(num_rows)})


class _Picked(dict[str, Any]):
    """Columns by name, and how many rows they have."""

    def __init__(self, columns: Mapping[str, Any], num_rows: int) -> None:
        super().__init__(columns)
        self.num_rows = num_rows


class ParquetFile(GroupedFile):
    """One Parquet file; columns are found by their names.

    Raises:
        DataError: it cannot be read, is no Parquet file, lacks a column, or has one of
            another type.
    """

    def __init__(
        self, source: Source, columns: Columns, options: object = None
    ) -> None:
        super().__init__(source, columns)
        del options  # of text files
        if not source.size:
            self.group_rows, self.is_empty = [], True
            return
        arrow, parquet = require("pyarrow"), require("pyarrow.parquet")
        try:
            with self._input() as opened, parquet.ParquetFile(opened) as file:
                self._metadata, schema = file.metadata, file.schema_arrow
                paths = [file.schema.column(i) for i in range(len(file.schema))]
        except (arrow.ArrowException, OSError, ValueError) as exc:
            raise DataError(
                f"{source.url} must be a Parquet file. Received: {exc}."
            ) from exc
        texts = {c.column or c.name for c in columns.ids if c.is_text}
        self._texts = [
            column.path
            for column in paths
            if column.physical_type == "BYTE_ARRAY"
            and not column.max_repetition_level  # pyarrow cannot join those of groups
            and any(_is_within(column.path, text) for text in texts)
        ]
        groups = range(self._metadata.num_row_groups)
        self.group_rows = [self._metadata.row_group(g).num_rows for g in groups]
        self.is_empty = not self._metadata.num_rows
        if not self.is_empty:
            self.require_schema(schema)
        if min(self.group_rows, default=0) < 0:
            raise DataError(
                f"{source.url} must be a Parquet file. Received: a row group of "
                f"{min(self.group_rows)} rows."
            )
        if sum(self.group_rows) != self._metadata.num_rows:
            raise DataError(
                f"{source.url} must have the rows of its footer, "
                f"{self._metadata.num_rows}. Received: row groups of "
                f"{sum(self.group_rows)} rows; the file is damaged."
            )

    @contextmanager
    def _input(self) -> Iterator[Any]:
        if self.source.filesystem is None:
            yield self.source.url
            return
        with self.source.open() as file:
            yield file

    @contextmanager
    def readable(self, groups: Sequence[int]) -> Iterator[None]:
        """Raise what libraries raise within it as DataError."""
        try:
            yield
        except (require("pyarrow").ArrowException, OSError, ValueError) as exc:
            if isinstance(exc, DataError):
                raise
            raise DataError(
                f"{self.source.url}, row groups {groups[0]} to {groups[-1]} must be "
                f"readable. Received: {exc}."
            ) from exc

    def batches(
        self, groups: Sequence[int], names: Sequence[str] | None
    ) -> Iterator[Any]:
        """Yield the rows of groups as Arrow's batches; ``names`` None: all columns."""
        num_left = sum(self.group_rows[group] for group in groups)
        with (
            self._input() as opened,
            require("pyarrow.parquet").ParquetFile(
                opened,
                metadata=self._metadata,
                read_dictionary=self._texts,
                buffer_size=_BUFFER_BYTES,
                pre_buffer=self.source.filesystem is not None,
                page_checksum_verification=True,
            ) as file,
        ):
            for batch in file.iter_batches(
                BLOCK_ROWS,
                row_groups=list(groups),
                columns=names or None,
                use_threads=False,
            ):
                num_left -= batch.num_rows
                yield batch
        if num_left:
            raise DataError(
                f"{self.source.url}, row groups {groups[0]} to {groups[-1]} must have "
                f"the rows of their footer. Received: {num_left} fewer."
            )


def _is_within(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


class ArrowFile(GroupedFile):
    """One Arrow IPC file, or stream, also known as Feather.

    Raises:
        DataError: it cannot be read, is none, lacks a column, or has one of another
            type.
    """

    def __init__(
        self, source: Source, columns: Columns, options: object = None
    ) -> None:
        super().__init__(source, columns)
        del options  # of text files
        self.group_rows = []
        if not source.size:
            self.is_empty = True
            return
        with self._opened() as (reader, is_file):
            if is_file:
                numbers = range(reader.num_record_batches)
                self.group_rows = [reader.get_batch(n).num_rows for n in numbers]
            else:
                self.group_rows = [sum(batch.num_rows for batch in reader)]
            self.is_empty = not sum(self.group_rows)
            if not self.is_empty:
                self.require_schema(reader.schema)

    @contextmanager
    def readable(self, groups: Sequence[int] = ()) -> Iterator[None]:
        """Raise what libraries raise within it as DataError."""
        del groups
        try:
            yield
        except (require("pyarrow").ArrowException, OSError, ValueError) as exc:
            if isinstance(exc, DataError):
                raise
            raise DataError(
                f"{self.source.url} must be a file of Arrow IPC. Received: {exc}."
            ) from exc

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, bool]]:
        arrow, ipc = require("pyarrow"), require("pyarrow.ipc")
        is_local = self.source.filesystem is None
        with self.readable(), self.source.open() as file:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            given = arrow.memory_map(self.source.url) if is_local else file
            opened = ipc.open_file(given) if is_file else ipc.open_stream(given)
            with opened as reader:
                yield reader, is_file

    def batches(
        self, groups: Sequence[int], names: Sequence[str] | None
    ) -> Iterator[Any]:
        """Yield the rows of groups as Arrow's batches, with all columns."""
        del names
        with self._opened() as (reader, is_file):
            for batch in reader if not is_file else map(reader.get_batch, groups):
                batch.validate(full=True)
                for start in range(0, batch.num_rows, BLOCK_ROWS):
                    yield batch.slice(start, BLOCK_ROWS)


_NPY_PARTS = "labels", "dense", "sparse"
_NPY_NAMES = "label", "int_", "cat_"


class NpyFile(GroupedFile):
    """The arrays of a day: ``NAME_dense.npy``, and ``_sparse`` and ``_labels`` beside.

    Columns are ``label``, ``int_0`` ... and ``cat_0`` ..., as TorchRec names them.

    Raises:
        DataError: an array is missing, or they have other numbers of rows.
    """

    def __init__(
        self, source: Source, columns: Columns, options: object = None
    ) -> None:
        super().__init__(source, columns)
        del options  # of text files
        if not source.url.endswith("_dense.npy"):
            raise DataError(
                "A file of a NpyDataset must be NAME_dense.npy, beside NAME_sparse.npy "
                f"and NAME_labels.npy. Received: {source.url}."
            )
        if source.filesystem is not None:
            raise DataError(f"{source.url} must be a local file. Received: a URL.")
        arrays = self._arrays()
        sizes = {len(array) for array in arrays.values()}
        if len(sizes) > 1:
            raise DataError(
                f"{source.url} and the arrays beside it must have the same number of "
                f"rows. Received: {sorted(sizes)}."
            )
        arrow, num_rows = require("pyarrow"), sizes.pop()
        kinds = {n: arrow.from_numpy_dtype(a.dtype) for n, a in arrays.items()}
        self.require_columns(kinds, list(kinds))
        self._held = frozenset(kinds)
        whole, rest = divmod(num_rows, _NPY_ROWS)
        self.group_rows = [_NPY_ROWS] * whole + [rest] * (rest > 0)
        self.is_empty = not num_rows

    def _arrays(self) -> dict[str, Any]:
        """Return all columns by name, mapped to memory."""
        found: dict[str, Any] = {}
        for part, name in zip(_NPY_PARTS, _NPY_NAMES, strict=True):
            path = self.source.url.removesuffix("dense.npy") + f"{part}.npy"
            try:
                array = np.load(path, mmap_mode="r")
            except (OSError, ValueError, EOFError) as exc:
                raise DataError(f"{path} must be an array. Received: {exc}.") from exc
            columns = array.reshape(len(array), -1).T if array.ndim else [array]
            if part == "labels":
                found[name] = columns[0]
            else:
                found |= {f"{name}{i}": column for i, column in enumerate(columns)}
        return found

    def batches(
        self, groups: Sequence[int], names: Sequence[str] | None
    ) -> Iterator[Any]:
        """Yield the rows of groups as Arrow's batches; ``names`` None: all columns."""
        arrays = self._arrays()
        for group in groups:
            rows = slice(self.starts[group], self.starts[group + 1])
            yield require("pyarrow").RecordBatch.from_pydict(
                {
                    name: np.ascontiguousarray(arrays[name][rows])
                    for name in (arrays if names is None else names)
                }
            )
