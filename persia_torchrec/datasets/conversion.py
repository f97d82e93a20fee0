"""CSV files to Parquet files, which read as the same."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from persia_torchrec.datasets.arrow_types import plain, texts_of
from persia_torchrec.datasets.columns import (
    AnyColumn,
    Columns,
    DenseColumn,
    Fail,
    IdColumn,
    LabelColumn,
    require,
)
from persia_torchrec.datasets.decoding import decode_numbers, integers_of, tokens_of
from persia_torchrec.datasets.files import CsvFile, CsvFormat
from persia_torchrec.datasets.sources import find_sources


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
    except BaseException:
        if writer is not None:
            writer.close()
            with suppress(OSError):
                part.unlink()
        raise
    assert writer is not None
    writer.close()
    part.replace(target)
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
