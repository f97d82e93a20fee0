"""The datasets of each format of files; :class:`RowDataset` is what they share.

A CSV file is converted to a Parquet file that reads as the same.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from persia_torchrec.datasets.arrow_types import plain, texts_of
from persia_torchrec.datasets.arrow_values import decode_numbers, integers_of, tokens_of
from persia_torchrec.datasets.columns import (
    AnyColumn,
    Columns,
    DenseColumn,
    Fail,
    IdColumn,
    LabelColumn,
    require,
)
from persia_torchrec.datasets.dataset import RowDataset
from persia_torchrec.datasets.files import CsvFile, CsvFormat
from persia_torchrec.datasets.json_files import JsonFile
from persia_torchrec.datasets.sources import Files, find_sources
from persia_torchrec.datasets.steps import RowSettings
from persia_torchrec.datasets.tables import ArrowFile, NpyFile, ParquetFile
from persia_torchrec.datasets.work_queue import WorkQueue


class CsvDataset(RowDataset):
    """Batches of CSV files, plain or packed by gzip, zstd or bz2; see RowDataset.

    Without ``header``, ``columns`` are all of a line, in their order; those with
    ``column=`` are read from the field of another one, or a hive partition, and have
    none. Groups of rows are ranges of about 1 MiB; a packed file is one group. The
    first block of each file is checked when the dataset is made, the others when they
    are read.

    Args:
        files: as of ``RowDataset``.
        batch_size: rows of a step.
        columns: what is read.
        header: whether the first line has the columns' names, by which they are found.
            None: it has not, and is an error if it has exactly them.
        delimiter: between fields, any text, as ``","``, TAB, ``"::"``.
        quotes: whether fields may be quoted by ``"``, within a line. False: that is
            text. None: so too, but a field that begins with one is an error.
        skip_lines: lines at the start that are not read.
        encoding: of the text, as Python names it.
        **settings: as of ``RowDataset``.

    Raises:
        ConfigError: an argument is out of range.
        DataError: a file is missing, empty, malformed, or of other columns.
    """

    _opener = CsvFile

    def __init__(
        self,
        files: Files | WorkQueue,
        batch_size: int,
        columns: Sequence[AnyColumn],
        *,
        header: bool | None = None,
        delimiter: str = ",",
        quotes: bool | None = None,
        skip_lines: int = 0,
        encoding: str = "utf-8",
        **settings: Unpack[RowSettings],
    ) -> None:
        self._format = CsvFormat(
            header=header,
            delimiter=delimiter,
            quotes=quotes,
            skip_lines=skip_lines,
            encoding=encoding,
        )
        super().__init__(files, batch_size, columns, **settings)


class JsonDataset(RowDataset):
    """Batches of files of JSON objects, one a line; see :class:`RowDataset`.

    Files are plain or packed by gzip, zstd or bz2. Columns are found by their names,
    fields of objects by dotted paths. A column that a line lacks is a missing value.
    """

    _opener = JsonFile


class ParquetDataset(RowDataset):
    """Batches of Parquet files; see :class:`RowDataset`.

    Columns are found by their names, fields of structs by dotted paths. Text is a
    string or bytes of any kind; several tokens are a list, or text with the separator.
    Groups of rows are the row groups.
    """

    _opener = ParquetFile


class ArrowDataset(RowDataset):
    """Batches of Arrow IPC files (Feather) or streams; see :class:`ParquetDataset`.

    Groups of rows are the record batches of a file; a stream is one group.
    """

    _opener = ArrowFile


class NpyDataset(RowDataset):
    """Batches of Criteo's logs as NumPy arrays of TorchRec's scripts; see RowDataset.

    ``files`` are ``NAME_dense.npy``; ``NAME_sparse.npy`` and ``NAME_labels.npy`` are
    beside. Columns are ``label``, ``int_0`` to ``int_12`` and ``cat_0`` to ``cat_25``.
    """

    _opener = NpyFile


def write_parquet(
    csv: str | os.PathLike[str],
    parquet: str | os.PathLike[str],
    columns: Sequence[AnyColumn],
    csv_format: CsvFormat | None = None,
) -> int:
    """Write a CSV file as a Parquet file, which reads as the same; return its rows.

    Text stays text, and tokens become lists; an empty field is a null. Columns that are
    not read become text.

    Args:
        csv: plain, or packed by gzip, zstd or bz2.
        parquet: of the file that is written; it is replaced when the new one is whole.
        columns: as of ``CsvDataset``.
        csv_format: how lines are to be read.

    Raises:
        DataError: the CSV file is malformed.
    """
    target = Path(parquet)
    [found] = find_sources(csv)
    read = Columns(columns)
    source = CsvFile(found, read, csv_format)
    specs = {column.name: column for column in read.read if column.column is None}
    if source.is_empty:
        raise source.no_rows()
    part = target.with_name(f"{target.name}.part")
    writer, num_rows = None, 0
    try:
        for texts, fail in source.raw_blocks():
            arrays = {
                n: typed(texts[n], specs.get(n, n), fail) for n in texts.schema.names
            }
            table = require("pyarrow").table(arrays)
            num_rows += table.num_rows
            if writer is None:
                writer = require("pyarrow.parquet").ParquetWriter(part, table.schema)
            writer.write_table(table)
        assert writer is not None
        writer.close()
        part.replace(target)
    except BaseException:
        if writer is not None:
            with suppress(OSError):  # of a full disk, as before
                writer.close()
            with suppress(OSError):
                part.unlink()
        raise
    return num_rows


def typed(texts: Any, column: AnyColumn, fail: Fail) -> Any:
    """Return text as what a column is, in Arrow's types; an empty field as a null."""
    arrow, compute = require("pyarrow"), require("pyarrow.compute")
    texts = texts_of(plain(texts))
    is_empty = compute.equal(texts, "")
    nulls = compute.if_else(is_empty, arrow.scalar(None, texts.type), texts)
    mask = is_empty.to_numpy(zero_copy_only=False)
    match column:
        case IdColumn(is_weighted=True) | IdColumn(unit=str()):
            return nulls
        case IdColumn(separator=str(separator), is_text=True):
            return compute.split_pattern(nulls, separator)
        case IdColumn(is_text=False):
            tokens = tokens_of(texts, column, fail)
            ids_L, gaps = integers_of(tokens.values, column, tokens.offsets, fail)
            numbers = arrow.array(ids_L.view(np.int64), mask=gaps)
            if tokens.offsets is None:
                return numbers
            offsets = arrow.array(tokens.offsets.astype(np.int32))
            return arrow.ListArray.from_arrays(offsets, numbers, mask=arrow.array(mask))
        case LabelColumn(positive=None) | DenseColumn():
            filled = replace(column, column=None, fill=column.fill or 0.0)
            found, _ = decode_numbers(texts, filled, fail)
            if mask.any() and column.fill is None:
                row = int(np.flatnonzero(mask)[0])
                raise fail(row, f"{column.name} must be a number.", "")
            return arrow.array(found, mask=mask)
    return nulls
