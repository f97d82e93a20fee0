"""Files that pandas, Polars, DuckDB and fastparquet have written read the same.

``written/`` has the same four rows by each of them, in the types that it writes: ids
with a gap (pandas: float64), text, categories, lists, lists of a fixed size, times,
decimals, booleans. fastparquet writes no lists, and has False for the boolean's gap.
"""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from persia_torchrec.data import ArrowDataset, DenseColumn, IdColumn, ParquetDataset

WRITTEN = Path(__file__).with_name("written")
COLUMNS = (
    IdColumn("id", is_text=False, fill=9),
    IdColumn("text"),
    IdColumn("many", is_text=False),
    IdColumn("words"),
    DenseColumn("number", fill=-1),
    IdColumn("hour", column="at", is_text=False, unit="h", fill=()),
    DenseColumn("price", fill=0),
    IdColumn("flag", is_text=False, fill=0),
    IdColumn("category"),
    IdColumn("fixed", is_text=False),
)


def hashes(*texts):
    each = [xxhash.xxh3_64_intdigest(text.encode()) for text in texts]
    return [n - 2**64 if n >= 2**63 else n for n in each]


EXPECTED = {
    "id": ([1, 2**40, 9, 3], [1, 1, 1, 1]),
    "text": (hashes("a", " ", " ", "b"), [1, 1, 1, 1]),
    "many": ([1, 2, 3], [2, 0, 0, 1]),
    "words": (hashes("x", "y", " ", " ", " ", "z"), [2, 1, 1, 2]),
    "hour": ([438300, -1, 438312], [1, 0, 1, 1]),
    "category": (hashes("a", " ", " ", "b"), [1, 1, 1, 1]),
    "flag": ([1, 0, 0, 1], [1, 1, 1, 1]),
    "fixed": ([1, 2, 3, 4, 5, 6, 7, 8], [2, 2, 2, 2]),
}
NUMBERS = {"number": [0.5, -1, 1.5, -2], "price": [1.5, 0, 2, -1.25]}


@pytest.mark.parametrize("path", sorted(WRITTEN.iterdir()), ids=lambda path: path.name)
def test_other_writers_rows_are_the_same(path):
    if path.suffix == ".arrow":
        kind, names = ArrowDataset, set(pa.ipc.open_file(path).schema.names)
    else:
        kind, names = ParquetDataset, set(pq.read_schema(path).names)
    columns = [c for c in COLUMNS if (c.column or c.name) in names]
    assert len(columns) >= 6
    [batch] = kind(path, 8, columns)
    found = batch.id_features.to_dict()
    assert {
        name: (feature.values().tolist(), feature.lengths().tolist())
        for name, feature in found.items()
    } == {name: EXPECTED[name] for name in found}
    dense = zip(batch.dense_names, batch.dense_features, strict=True)
    for name, numbers in dense:
        assert numbers.flatten().tolist() == NUMBERS[name]
