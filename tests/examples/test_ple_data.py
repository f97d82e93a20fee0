"""The data sets of the PLE example, on their files where there are any."""

import gzip
import os
import re
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.ple import data
from persia_torchrec.errors import DataError

FOLDER = Path(os.environ.get("PERSIA_DATA_DIR", "../shared/datasets/adult")).parent
LINES = {
    "taobao": "1,0,p,a,c,m,u,b,{},5,2,2,2,1,3,1,2,7|8|7,9,23\n",
    "census": ", ".join(
        ["38", "Private", "6", "36", "Children", "0", "No", "Never married"]
        + ["x"] * 16
        + ["1032.38", "{}"]
        + ["y"] * 15
        + ["50000+.\n"]
    ),
}


def write_lines(spec, folder, name, num_rows):
    text = "".join(LINES[spec.name].format(n) for n in range(num_rows))
    with gzip.open(folder / f"{name}.gz", "wt") as file:
        file.write(text)


def values(batches):
    every = [
        (b.id_features.values(), b.id_features.lengths(), *b.labels) for b in batches
    ]
    return [[tensor.numpy().tobytes() for tensor in batch] for batch in every]


@pytest.mark.parametrize(
    ("name", "num_features", "num_buckets"),
    [("taobao", 17, 710_310), ("census", 39, 390_000)],
)
def test_a_data_set_has_the_columns_of_its_files(name, num_features, num_buckets):
    spec = data.SPECS[name]
    assert len(spec.features) == num_features
    assert sum(spec.num_buckets.values()) == num_buckets
    assert len(spec.columns) == LINES[name].count(",") + 1


@pytest.mark.parametrize("name", data.SPECS)
def test_rows_are_split_where_there_is_one_file(name, tmp_path):
    spec = data.SPECS[name]
    write_lines(spec, tmp_path, spec.test, 30)
    split = data.open_data(spec, tmp_path, 8, shuffle=True)
    assert (split.train.num_rows, split.test.num_rows) == (21, 9)
    feature = "user_id" if name == "taobao" else "migration_msa"
    of_rows = data.CsvDataset(
        tmp_path / f"{spec.test}.gz", 30, spec.columns_read(ev=True)
    )
    [whole] = (batch.id_features[feature].values() for batch in of_rows)
    order = np.random.default_rng(2021).permutation(30)
    for part, rows in ((split.train, order[:21]), (split.test, order[21:])):
        ids = [batch.id_features[feature].values().tolist() for batch in part]
        assert sorted(chain(*ids)) == sorted(whole[rows].tolist())
        assert min(map(len, ids)) >= 2  # as batch norm needs, of the 9 to test, too
    write_lines(spec, tmp_path, spec.train, 40)
    both = data.open_data(spec, tmp_path, 8)
    assert (both.train.num_rows, both.test.num_rows) == (40, 30)
    assert {float(label) for label in next(iter(both.train)).labels[0]} == {1.0}


@pytest.mark.parametrize("parquet", [False, True])
def test_rows_to_train_on_may_come_from_a_queue(tmp_path, parquet):
    spec = data.SPECS["taobao"]
    write_lines(spec, tmp_path, spec.test, 30)
    data.main(["--to_parquet", "--data_location", str(tmp_path)])
    given = {"parquet": parquet, "shuffle": True}
    split = data.open_data(spec, tmp_path, 8, **given)
    queued = data.open_data(spec, tmp_path, 8, queue_epochs=2, **given)
    found = [
        sorted(chain(*(b.id_features["user_id"].values().tolist() for b in batches)))
        for batches in (chain(split.train, split.train), queued.train)
    ]
    assert found[0] == found[1]
    assert values(split.test) == values(queued.test)


@pytest.mark.parametrize("name", data.SPECS)
def test_a_converted_data_set_gives_the_same_batches(name, tmp_path, capsys):
    spec, source = data.SPECS[name], tmp_path
    if (FOLDER / spec.folder).is_dir():
        with gzip.open(FOLDER / spec.folder / f"{spec.test}.gz") as lines:
            (tmp_path / spec.test).write_bytes(b"".join(islice(lines, 1500)))
    else:
        write_lines(spec, tmp_path, spec.test, 50)
    arguments = ["--to_parquet", "--dataset", name, "--data_location", str(source)]
    data.main([*arguments, "--output_dir", str(tmp_path / "parquet")])
    path = tmp_path / "parquet" / f"{spec.test}.parquet"
    assert capsys.readouterr().out == f"{path}\n"
    for ev in (True, False):
        csv = data.open_data(spec, source, 512, ev=ev)
        parquet = data.open_data(spec, path.parent, 512, ev=ev, parquet=True)
        assert values(csv.test) == values(parquet.test)
        for batch in csv.test:
            for feature, ids in batch.id_features.to_dict().items():
                buckets = spec.num_buckets[feature]
                assert ev or 0 <= ids.values().min() <= ids.values().max() < buckets


def test_the_labels_equal_those_of_the_data_sets():
    if not (FOLDER / "census-income").is_dir():
        pytest.skip("The data sets are not on this machine.")
    shares = {"taobao": (533, 4), "census": (43_143, 6_186)}
    for name, counts in shares.items():
        spec = data.SPECS[name]
        read = ("pid", "age", *spec.labels)
        columns = [
            c if isinstance(c, str) or c.name in read else c.name for c in spec.columns
        ]
        path = data.find_files(spec, FOLDER).test
        batches = [batch.labels for batch in data.CsvDataset(path, 8192, columns)]
        found = [int(torch.cat(label).sum()) for label in zip(*batches, strict=True)]
        assert tuple(found) == counts


def test_a_missing_file_is_named_with_its_source(tmp_path, capsys):
    for spec in data.SPECS.values():
        with pytest.raises(DataError, match=f"Get .*{re.escape(spec.source)}"):
            data.find_files(spec, tmp_path)
        with pytest.raises(
            DataError, match=r"parquet must be in.*--to_parquet --dataset"
        ):
            data.find_files(spec, tmp_path, parquet=True)
    with pytest.raises(SystemExit):
        data.main(["--to_parquet", "--data_location", str(tmp_path)])
    assert "taobao_test_data must be in" in capsys.readouterr().err
