"""Shard files of random rows: their tables, their bytes, and what is read of them."""

import io
import json

import numpy as np

from persia_torchrec.checkpoint.catalog import SavedTable
from persia_torchrec.checkpoint.row_file import (
    RowFileReader,
    RowFileWriter,
    ShardHead,
    shape_of,
)
from persia_torchrec.embedding.optim import SGD, Adagrad, Adam
from persia_torchrec.table import TableSpec

SPECS = [
    TableSpec(name="a", dim=1, optimizer=SGD(0.5)),
    TableSpec(name="b", dim=3, optimizer=Adam(0.1), keeps_metadata=True),
    TableSpec(name="c", dim=5, optimizer=Adagrad(0.1), weight_dtype="bf16"),
]
TABLES = tuple(
    SavedTable(json.loads(json.dumps(spec.to_json())), 7, spec.has_metadata)
    for spec in SPECS
)
HEAD = ShardHead(shard=1, num_shards=3, tables=TABLES)


def rows_of(table, num_rows, seed=0):
    """Return columns of random bytes."""
    rng = np.random.default_rng(seed + 100 * table)
    shape = shape_of(TABLES[table])
    return shape.view(rng.bytes(num_rows * shape.row_bytes))


def written(blocks):
    """Return the bytes of a file, and what its writer returned."""
    file = io.BytesIO()
    writer = RowFileWriter(file, HEAD)
    for seed, (table, num_rows) in enumerate(blocks):
        writer.write(table, rows_of(table, num_rows, seed))
    said = writer.end()
    return file.getvalue(), said


def reader_of(data):
    return RowFileReader(io.BytesIO(data), "some/file", ShardHead)


def read(data):
    return list(reader_of(data).blocks())
