"""A look at files before training, and published sets' formats, read as they are."""

import gzip
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from persia_torchrec.command import main
from persia_torchrec.data import CsvDataset, DenseColumn, IdColumn, LabelColumn
from persia_torchrec.datasets.look import look
from persia_torchrec.errors import DataError

NUM_ROWS = 40
rng = np.random.default_rng(0)


def lines(*columns, sep=",", header=""):
    rows = zip(*([str(v) for v in column] for column in columns), strict=True)
    text = "".join(sep.join(row) + "\n" for row in rows)
    return (f"{header}\n{text}" if header else text).encode()


def numbers(most=99, num=NUM_ROWS):
    return rng.integers(1, most, num).tolist()


def criteo_day():
    hexadecimal = [[f"{n:08x}" for n in numbers(2**32)] for _ in range(26)]
    counts = [[n if n % 5 else "" for n in numbers()] for _ in range(13)]
    return gzip.compress(lines(numbers(2), *counts, *hexadecimal, sep="\t"))


def avazu():
    names = "id,click,hour,C1,banner_pos,site_id,device_ip"
    sites = [f"{n:08x}" for n in numbers(2**32)]
    columns = numbers(2**62), numbers(2), [14102100] * NUM_ROWS, numbers(), numbers()
    return lines(*columns, sites, sites, header=names)


def mind():
    history = ["N1 N22 N3", "", *["N7"] * (NUM_ROWS - 2)]
    times = ["11/11/2019 9:05:58 AM"] * NUM_ROWS
    return lines(
        numbers(), numbers(), times, history, ["N1-1 N2-0"] * NUM_ROWS, sep="\t"
    )


def amazon():
    row = {"reviewerID": "A2", "asin": "B0", "helpful": [2, 3], "overall": 5.0}
    row |= {"reviewText": 'He said "no",\nand', "unixReviewTime": 1252800000}
    return "".join(
        json.dumps(row | {"asin": f"B{n}"}) + "\n" for n in numbers()
    ).encode()


def kuairec():
    names = (
        "user_id,video_id,play_duration,video_duration,time,date,timestamp,watch_ratio"
    )
    times = ["2020-07-05 00:08:23.438"] * NUM_ROWS
    ratios = [n / 7 for n in numbers()]
    whole = [numbers() for _ in range(4)]
    return lines(
        *whole, times, numbers(), [1593878903.4] * NUM_ROWS, ratios, header=names
    )


SETS = {
    "criteo_day_0.gz": criteo_day,
    "movielens_1m.dat": lambda: lines(*(numbers() for _ in range(4)), sep="::"),
    "movielens_25m.csv": lambda: lines(
        *(numbers() for _ in range(4)), header="userId,movieId,rating,timestamp"
    ),
    "avazu.csv": avazu,
    "taobao.csv": lambda: lines(
        numbers(), numbers(), numbers(), ["pv"] * NUM_ROWS, numbers()
    ),
    "kuairec.csv": kuairec,
    "mind.tsv": mind,
    "amazon.json": amazon,
}


@pytest.mark.parametrize("name", [*SETS, "criteo.parquet"])
def test_the_lines_that_read_published_sets_run_as_they_stand(tmp_path, capsys, name):
    path = tmp_path / name
    if name == "criteo.parquet":
        cats = {f"cat_{n}": numbers() for n in range(26)}
        table = {
            "label": numbers(2),
            **{f"int_{n}": numbers() for n in range(13)},
            **cats,
        }
        table["int_0"][3] = None
        pq.write_table(pa.table(table), path)
    else:
        path.write_bytes(SETS[name]())
    printed = CliRunner().invoke(main, ["data", str(path)]).output
    found = {}
    exec(printed[printed.index("from persia_torchrec") :], found)
    assert sum(batch.id_features.stride() for batch in found["dataset"]) == NUM_ROWS
    assert f"; {NUM_ROWS} rows were looked at" in printed


def test_a_look_counts(tmp_path):
    values = [*["a"] * 6, *["b"] * 3, None]
    many = [[n, n + 1] for n in range(10)]
    table = pa.table({"label": [1.0] * 10, "user": values, "many": many})
    pq.write_table(table, tmp_path / "rows.parquet")
    text = look(str(tmp_path / "rows.parquet"))
    [user] = [line for line in text.splitlines() if line.startswith("user ")]
    assert " ".join(user.split()) == "user string 1 (10.0%) 2 'a' x 6, 'b' x 3"
    assert "list<element: int64>, up to 2" in text
    assert "LabelColumn('label')" in text
    (tmp_path / "big").write_bytes(lines(range(50_000), [1] * 50_000))
    [number] = [
        line for line in look(str(tmp_path / "big")).splitlines() if "column0  " in line
    ]
    assert 46_000 < int(number.split("about ")[1].split()[0]) < 54_000


KINDS = {
    "map": pa.array([[("a", 1.0)], []], pa.map_(pa.string(), pa.float32())),
    "pairs": pa.array([[{"k": 1, "w": 0.5}], []]),
    "at": pa.array([{"day": 1, "in": {"x": "a"}}, {"day": 2, "in": None}]),
    "gaps": pa.array([1.5, float("nan")]),
    "price": pa.array([150, None], pa.int64()).cast(pa.decimal128(21, 2)),
    "time": pa.array([1, None], pa.timestamp("us")),
    "image": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)),
    "lists": pa.array([[[1, 2], [3]], []]),
    "took": pa.array([1, 2], pa.duration("s")),
    "it's": pa.array(["a", None]).dictionary_encode(),
}


def test_the_lines_that_read_columns_of_every_type_run_as_they_stand(tmp_path):
    (tmp_path / "dt=2026-01-31").mkdir()
    pq.write_table(pa.table(KINDS), tmp_path / "dt=2026-01-31" / "a.parquet")
    text = look(str(tmp_path), 1)
    assert "; 2 rows were looked at, of 2" in text
    found = {}
    exec(text[text.index("from persia_torchrec") :], found)
    [batch] = found["dataset"]
    features, dense = batch.id_features, batch.dense_names
    assert [*features.keys(), *dense] == [
        *("map", "pairs", "at.day", "at.in.x", "time", "lists", "it's", "dt"),
        *("gaps", "price", "image"),
    ]
    assert features["pairs"].weights().tolist() == [0.5]
    path = tmp_path / "no_ids"
    pq.write_table(pa.table({"gaps": KINDS["gaps"]}), path)
    assert look(str(path)).endswith("No column can be ids, which a dataset needs.")


def run(text):
    """Run the lines that a look ends with; return the dataset and its batches."""
    found = {}
    exec(text[text.index("from persia_torchrec") :], found)
    return found["dataset"], list(found["dataset"])


def damaged(path, table):
    """Write a Parquet file whose last rows cannot be read."""
    pq.write_table(table, path, row_group_size=10)
    data = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(3).column(0).data_page_offset
    data[start : start + 40] = b"\xff" * 40
    path.write_bytes(data)


def test_files_that_the_dataset_rejects_are_named_and_left_out(tmp_path):
    table = pa.table({"user": numbers(2**40), "click": numbers(2)})
    for name in ("part-1", "part-3"):
        pq.write_table(table, tmp_path / f"{name}.parquet")
    damaged(tmp_path / "part-2.parquet", table)
    (tmp_path / "part-4.parquet").write_bytes(b"PAR1 is cut off")
    other = table.rename_columns(["User", "click"])
    pq.write_table(other, tmp_path / "part-5.parquet")
    pq.write_table(table.slice(0, 0), tmp_path / "part-6.parquet")
    (tmp_path / "part-7.parquet").touch()
    (tmp_path / "README").write_bytes(b"1,2\n\xba\n")
    text = look(str(tmp_path))
    _, batches = run(text)
    assert sum(batch.id_features.stride() for batch in batches) == 2 * NUM_ROWS
    assert f"; {2 * NUM_ROWS} rows were looked at, of {2 * NUM_ROWS}\n" in text
    for found in (
        r"2 of 8 files have no rows: .*part-6.parquet .*part-7.parquet \(0 bytes\)\n",
        "4 of 8 files are left out:\n",
        "/README must be of a ParquetDataset. Received: of a CsvDataset.\n",
        "part-2.parquet, row groups 0 to 3 must be readable. Received: .*[^.].\n",
        "part-4.parquet must be a Parquet file. Received: ",
        r"part-5.parquet .*lacks \['user'\], from which \['User'\] differ by case only",
    ):
        assert re.search(found, text), found


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path):
    damaged(tmp_path / "only.parquet", pa.table({"user": numbers()}))
    told = CliRunner().invoke(main, ["data", str(tmp_path)])
    assert told.exit_code == 1
    assert "only.parquet, row groups 0 to 3 must be readable" in told.output


def test_missing_values_are_those_that_the_dataset_counts(tmp_path):
    path = tmp_path / "gaps.parquet"
    texts, numbers = pa.list_(pa.string()), pa.list_(pa.int64())
    columns = {
        "tags": pa.array([None, [], ["a", None, " "], ["b"]], texts),
        "seen": pa.array([None, [], [5, None], [6]], numbers),
        "pair": pa.array([None, [], [(1, 1.0)], []], pa.map_(pa.int64(), pa.float32())),
        "user": ["a", None, " ", "b"],
        "price": [0.5, None, float("nan"), 1.0],
        "late": pa.nulls(4),
        "click": ["no", "yes", None, "no"],
    }
    pq.write_table(pa.table(columns), path)
    text = look(str(path))
    dataset, _ = run(text)
    shown = {
        name: int(re.search(rf"^{name} .*? (\d+) \(", text, re.M)[1])
        for name in columns
    }
    assert shown == {name: dataset.missing.get(name, 0) for name in columns}
    counts = {
        "tags": 4,
        "seen": 2,
        "pair": 1,
        "user": 2,
        "price": 2,
        "late": 4,
        "click": 1,
    }
    assert dataset.missing == counts
    path = tmp_path / "lines.json"
    path.write_text('{"a": 1}\n{"a": 2, "b": 3}\n{"a": 4}\n')
    assert run(look(str(path)))[0].missing == {"b": 2}


def test_a_column_has_the_same_ids_in_csv_and_parquet(tmp_path):
    table = {
        "whole": [3, -4, None],
        "hash": pa.array([1, 2**63, 7], pa.uint64()),
        "code": ["007", "08", "9"],
        "mixed": ["1", "b", "3"],
        "day": pa.array([0, 86_400, 3 * 86_400], pa.timestamp("s")),
        "ratio": [0.5, 1.0, 2.0],
        "click": ["no", "yes", "no"],
    }
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    days = "1970-01-01", "1970-01-02 00:00:00", "1970-01-04"
    values = table | {"whole": [3, -4, ""], "day": days, "hash": [1, 2**63, 7]}
    (tmp_path / "rows.csv").write_bytes(lines(*values.values(), header=",".join(table)))
    (dataset, [one]), (_, [two]) = (
        run(look(str(tmp_path / f"rows.{kind}"))) for kind in ("csv", "parquet")
    )
    assert dataset.feature_names == ["whole", "hash", "code", "mixed", "day"]
    assert one.id_features.to_dict().keys() == two.id_features.to_dict().keys()
    assert one.id_features.values().tolist() == two.id_features.values().tolist()
    assert one.dense_features[0].tolist() == two.dense_features[0].tolist()
    assert one.labels[0].tolist() == two.labels[0].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("column", "label"),
    [
        ({"click": ["Yes", "No", ""]}, "LabelColumn('click', positive='Yes')"),
        ({"bought": ["y", "n", "n"]}, "LabelColumn('bought', positive='y')"),
        ({"bought": [True, False, None]}, "LabelColumn('bought', fill=0.0)"),
        ({"Target": [1, 0, 1]}, "LabelColumn('Target')"),
        ({"kind": ["a", "b", "a"]}, "IdColumn('kind')"),
        ({"click": ["a", "b", "c"]}, "IdColumn('click')"),
        ({"on": ["y", "n", "n"], "off": ["y", "n", "y"]}, "IdColumn('on')"),
    ],
)
def test_a_column_of_yes_and_no_is_the_label(tmp_path, column, label):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"user": [1, 2, 3], **column}), path)
    text = look(str(path))
    assert f"    {label},\n" in text
    run(text)


def test_a_look_at_the_arrays_of_criteo(tmp_path):
    for name, shape, dtype in (("dense", 13, "f4"), ("sparse", 26, "i4")):
        np.save(tmp_path / f"day_{name}.npy", np.ones((5, shape), dtype))
    np.save(tmp_path / "day_labels.npy", np.ones((5, 1), "i4"))
    text, found = look(str(tmp_path / "day_dense.npy")), {}
    exec(text[text.index("from persia_torchrec") :], found)
    [batch] = found["dataset"]
    assert len(batch.dense_names) == 13
    assert batch.labels[0].tolist() == [1] * 5


def test_a_look_at_no_file_ends_with_what_is_wrong(tmp_path):
    told = CliRunner().invoke(main, ["data", str(tmp_path / "none")])
    assert told.exit_code == 1
    assert "none must be a file" in told.output
    (tmp_path / "empty").touch()
    with pytest.raises(
        DataError, match=r"empty must have rows. Received: an empty file"
    ):
        look(str(tmp_path / "empty"))


def test_published_sets_are_read_by_custom_columns(tmp_path):
    path = tmp_path / "mind.tsv"
    path.write_bytes(mind())
    columns = (
        IdColumn("impression", is_text=False),
        IdColumn("user", is_text=False),
        "time",
        IdColumn("history", separator=" ", fill=(), max_length=2),
        IdColumn("shown", separator=" "),
    )
    [batch] = CsvDataset(path, NUM_ROWS, columns, delimiter="\t")
    assert batch.id_features["history"].lengths().tolist()[:3] == [2, 0, 1]
    path = tmp_path / "criteo.gz"
    path.write_bytes(criteo_day())
    columns = (
        LabelColumn("label"),
        *(DenseColumn(f"int_{n}", fill=0, function=np.log1p) for n in range(13)),
        *(IdColumn(f"cat_{n}") for n in range(26)),
    )
    dataset = CsvDataset(path, NUM_ROWS, columns, delimiter="\t")
    [batch] = dataset
    assert len(batch.dense_features) == 13
    assert sum(dataset.missing.values()) > 0
