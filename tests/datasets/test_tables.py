"""Files whose rows are read in groups: Parquet, Arrow and NumPy."""

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from persia_torchrec.data import (
    ArrowDataset,
    DenseColumn,
    IdColumn,
    LabelColumn,
    ParquetDataset,
)
from persia_torchrec.errors import DataError

COLUMNS = IdColumn("user.id", is_text=False), LabelColumn("label")
TABLE = pa.table({"user": [{"id": n} for n in range(10)], "label": [0.5] * 10})


def write(folder, kind):
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(TABLE, path, row_group_size=4)
    else:
        feather.write_feather(TABLE, path, chunksize=4, compression="uncompressed")
    return (ParquetDataset if kind == "parquet" else ArrowDataset), path


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_file_has_the_rows_of_its_groups_by_name_of_a_field(tmp_path, kind):
    make, path = write(tmp_path, kind)
    (file,) = make(path, 3, COLUMNS)._files
    assert [file.rows_of(group) for group in range(file.num_groups)] == [4, 4, 2]
    assert (file.num_rows_up_to(7), file.num_rows_up_to(99)) == (7, 10)
    assert file.rows_hint(2) == 2
    (rows,) = file.blocks([1])
    assert rows.ids[0].values.tolist() == [4, 5, 6, 7]
    assert rows.labels[0].tolist() == [0.5] * 4
    tables = [*file.raw_tables()]
    assert sum(table.num_rows for table in tables) == 10
    assert tables[0].column_names == ["user", "label"]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_columns_that_lack_or_have_another_type_are_named(tmp_path, kind):
    make, path = write(tmp_path, kind)
    wrong = (*COLUMNS, DenseColumn("user"), DenseColumn("age"))
    with pytest.raises(DataError, match=r"age.*user must be a number.*It has \['user"):
        make(path, 3, wrong)


def test_a_hive_partition_is_a_column_of_its_files(tmp_path):
    for day in ("1", "2"):
        (tmp_path / f"day={day}").mkdir()
        write(tmp_path / f"day={day}", "parquet")
    dataset = ParquetDataset(tmp_path, 20, (*COLUMNS, IdColumn("day", is_text=False)))
    (batch,) = dataset
    days = batch.id_features.to_dict()["day"].values().numpy()
    np.testing.assert_array_equal(days, [1] * 10 + [2] * 10)
