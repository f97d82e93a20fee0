import gzip
import json
import sys
from collections import Counter
from itertools import chain, islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_torchrec.data import (
    CsvDataset,
    CsvFormat,
    DenseColumn,
    IdColumn,
    LabelColumn,
    ParquetDataset,
    WorkQueue,
    write_parquet,
)
from persia_torchrec.datasets import files, hashing, reading
from persia_torchrec.datasets.columns import Ids
from persia_torchrec.errors import ConfigError, DataError

pytestmark = pytest.mark.slow

COLUMNS = (
    LabelColumn("click"),
    IdColumn("user"),
    "unused",
    IdColumn("tags", separator="|"),
    IdColumn("few", num_buckets=3),
    IdColumn("number", is_text=False),
    DenseColumn("age"),
    LabelColumn("kind", positive="yes"),
)
TEXTS = st.text(st.sampled_from("ab\u00e9|' \""), max_size=5)
ROWS = st.tuples(
    st.sampled_from(["0", "1", "0.5"]),
    TEXTS,
    TEXTS,
    TEXTS,
    TEXTS,
    st.integers(-(2**63), 2**63 - 1).map(str),
    st.sampled_from(["1.25", "-3"]),
    st.sampled_from(["yes", "no", ""]),
)

FEW_ROWS = [
    ("1", "u", "", "a|b", "x", "7", "1.25", "yes"),
    ("0", "v", "", "a", "y", "8", "-3", "no"),
    ("0.5", "w", "", "", "z", "9", "1.25", ""),
]


def hash_of(token):
    """The reference: one token at a time, as int64."""
    number = xxhash.xxh3_64_intdigest((token or " ").encode())
    return number - 2**64 if number >= 2**63 else number


def decoded(row):
    """The reference: what a row gives, as Python's numbers."""
    click, user, _, tags, few, number, age, kind = (field.strip(" ") for field in row)
    return (
        (hash_of(user),),
        tuple(hash_of(tag.strip(" ")) for tag in tags.split("|")),
        (hash_of(few) % 2**64 % 3,),
        (int(number),),
        (float(click), float(kind == "yes")),
        (float(age),),
    )


def rows_of(batch):
    """Return a batch's rows as the reference has them."""
    bags = [feature.to_dense() for feature in batch.id_features.to_dict().values()]
    ids = [[tuple(bag.tolist()) for bag in of_feature] for of_feature in bags]
    numbers = (torch.stack(batch.labels, 1), torch.cat(batch.dense_features, 1))
    return list(zip(*ids, *(map(tuple, n.tolist()) for n in numbers), strict=True))


def all_rows(batches):
    return list(chain.from_iterable(map(rows_of, batches)))


def bytes_of(batch):
    tensors = (batch.id_features.values(), batch.id_features.lengths())
    every = (*tensors, *batch.labels, *batch.dense_features)
    return [(t.dtype, t.shape, t.numpy().tobytes()) for t in every]


def write_csv(path, rows):
    path.write_text("".join(",".join(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


@pytest.fixture
def small_groups(monkeypatch):
    monkeypatch.setattr(files, "GROUP_BYTES", 35)
    monkeypatch.setattr(reading, "SHUFFLE_ROWS", 20)


def numbered(folder, num_rows, name="numbered.csv"):
    """Rows whose number is their ID feature and their label."""
    path = folder / name
    path.write_text("".join(f"{n},{n}\n" for n in range(num_rows)))
    return path


NUMBERED = (IdColumn("id", is_text=False), LabelColumn("label"))


def labels_of(batches):
    return [int(n) for batch in batches for n in batch.labels[0]]


@settings(max_examples=15)
@given(data=st.data(), rows=st.lists(ROWS, min_size=1, max_size=40))
def test_csv_and_parquet_give_the_reference_to_the_byte(folder, data, rows):
    csv, parquet = folder / "rows.csv", folder / "rows.parquet"
    group = data.draw(st.integers(100, 500))  # a line has fewer bytes
    shuffle = data.draw(st.booleans())
    num_groups = max(write_csv(csv, rows).stat().st_size // group, 1)
    count = data.draw(st.integers(1, min(3, num_groups)))
    given_settings = {
        "batch_size": data.draw(st.integers(1, 12)),
        "columns": COLUMNS,
        "shuffle": shuffle,
        "seed": data.draw(st.integers(0, 3)),
        "partition_count": count,
        "num_parallel_reads": data.draw(st.integers(1, 3)),
        "drop_remainder": data.draw(st.booleans()),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "GROUP_BYTES", group)
        patch.setattr(reading, "SHUFFLE_ROWS", data.draw(st.integers(1, 40)))
        text = CsvFormat(quotes=False)
        assert write_parquet(csv, parquet, COLUMNS, text) == len(rows)
        given_rows = []
        for part in range(count):
            given_settings["partition_index"] = part
            of_csv = CsvDataset(csv, quotes=False, **given_settings)
            of_parquet = ParquetDataset(parquet, **given_settings)
            for _ in range(2):
                batches = list(of_csv)
                expected = [bytes_of(batch) for batch in batches]
                assert [bytes_of(batch) for batch in of_parquet] == expected
                assert len(batches) == len(of_csv)
            given_rows += all_rows(batches)
    reference = [decoded(row) for row in rows]
    if not given_settings["drop_remainder"]:
        assert Counter(given_rows) == Counter(reference)
    if not shuffle and count == 1:
        assert given_rows == reference[: len(given_rows)]


LISTS = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=12)


@given(st.data(), LISTS, st.booleans())
def test_parts_of_parts_in_any_order_have_the_ids_of_their_rows(data, rows, weighted):
    flat = np.array([i for row in rows for i in row], np.int64)
    offsets = np.cumsum([0, *map(len, rows)])
    ids = Ids(flat, offsets, flat.astype(np.float32) / 2 if weighted else None)
    for _ in range(3):
        if data.draw(st.booleans()):
            order = data.draw(st.permutations(range(len(rows))))
            ids, rows = ids.take(np.array(order, np.int64)), [rows[i] for i in order]
        start = data.draw(st.integers(0, len(rows) - 1))
        stop = data.draw(st.integers(start + 1, len(rows)))
        ids, rows = ids.part(start, stop), rows[start:stop]
    expected = [i for row in rows for i in row]
    assert ids.values.tolist() == expected
    assert ids.lengths().tolist() == list(map(len, rows))
    if weighted:
        assert ids.weights.tolist() == [i / 2 for i in expected]


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_of_several_ids_are_theirs_after_a_state_in_the_midst_of_a_block(
    tmp_path, shuffle
):
    path = tmp_path / "rows.csv"
    path.write_text("".join(f"{n},{'|'.join('ab' * (n % 4))}\n" for n in range(40)))
    columns = (LabelColumn("n"), IdColumn("tags", separator="|"))
    settings = {"batch_size": 3, "columns": columns, "shuffle": shuffle}
    first, second = CsvDataset(path, **settings), CsvDataset(path, **settings)
    batches = list(islice(first, 2))
    second.load_state_dict(first.state_dict(2))
    rest = list(second)
    expected = [bytes_of(batch) for batch in CsvDataset(path, **settings)]
    assert [bytes_of(batch) for batch in batches + rest] == expected


@settings(max_examples=20)
@given(data=st.data(), num_rows=st.integers(2, 90))
def test_a_dataset_continues_at_any_row(folder, data, num_rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "GROUP_BYTES", 35)
        patch.setattr(reading, "SHUFFLE_ROWS", 20)
        continue_at_any_row(folder, data, num_rows)


def continue_at_any_row(folder, data, num_rows):
    path = numbered(folder, num_rows)
    order = {"shuffle": data.draw(st.booleans()), "seed": 5, "min_batch_size": 2}
    sizes = st.integers(2, 30)
    whole = CsvDataset(path, data.draw(sizes), NUMBERED, **order)
    epochs = [labels_of(whole) for _ in range(3)]
    first = CsvDataset(path, data.draw(sizes), NUMBERED, **order)
    epoch = data.draw(st.integers(0, 1))
    for expected in epochs[:epoch]:
        assert labels_of(first) == expected
    taken = list(islice(iter(first), data.draw(st.integers(0, len(first)))))
    num_trained = data.draw(st.integers(0, len(taken)))
    state = json.loads(json.dumps(first.state_dict(num_trained)))
    second = CsvDataset(path, data.draw(sizes), NUMBERED, **order)
    second.load_state_dict(state)
    assert second.epoch == epoch
    assert labels_of(taken[:num_trained]) + labels_of(second) == epochs[epoch]
    assert second.epoch == epoch + 1
    assert labels_of(second) == epochs[epoch + 1]


def test_every_epoch_has_an_order_of_its_own_over_rows(tmp_path):
    dataset = CsvDataset(numbered(tmp_path, 500), 64, NUMBERED, shuffle=True, seed=1)
    orders = [labels_of(dataset) for _ in range(3)]
    assert all(sorted(order) == list(range(500)) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    again = CsvDataset(numbered(tmp_path, 500), 7, NUMBERED, shuffle=True, seed=1)
    assert labels_of(again) == orders[0]  # whatever the size of a batch
    # Over rows: neighbours of the file are not neighbours of the order.
    moved = np.abs(np.diff(orders[0]))
    assert (moved == 1).mean() < 0.05
    assert np.mean(moved) == pytest.approx(500 / 3, rel=0.2)


def test_partitions_are_disjoint_and_complete(tmp_path, small_groups):
    paths = [numbered(tmp_path, n, f"{n}.csv") for n in (30, 8, 65)]
    parts = [
        CsvDataset(paths, 8, NUMBERED, partition_count=4, partition_index=index)
        for index in range(4)
    ]
    expected = Counter(chain(range(30), range(8), range(65)))
    assert Counter(chain.from_iterable(map(labels_of, parts))) == expected
    assert sum(part.num_rows for part in parts) == 103
    with pytest.raises(ConfigError, match="at most the number of groups of rows, 15"):
        CsvDataset(paths, 8, NUMBERED, partition_count=18)


@pytest.mark.parametrize("shuffle", [False, True])
def test_only_the_wanted_rows_are_read(tmp_path, small_groups, shuffle):
    paths = [numbered(tmp_path, n, f"{n}.csv") for n in (30, 8)]
    rows = np.array([37, 2, 29, 30, 3])
    dataset = CsvDataset(paths, 2, NUMBERED, rows=rows, shuffle=shuffle)
    found = labels_of(dataset)
    assert (
        found == [2, 3, 29, 0, 7] if not shuffle else sorted(found) == [0, 2, 3, 7, 29]
    )
    for wrong in ([38], [-1], [3, 3], []):
        with pytest.raises(ConfigError, match=r"different row numbers in \[0, 38\)"):
            CsvDataset(paths, 2, NUMBERED, rows=np.array(wrong, dtype=np.int64))


@pytest.mark.parametrize(
    ("num_rows", "sizes"), [(9, [4, 5]), (8, [4, 4]), (10, [4, 4, 2]), (5, [5])]
)
def test_a_last_batch_of_one_row_joins_the_one_before(tmp_path, num_rows, sizes):
    dataset = CsvDataset(numbered(tmp_path, num_rows), 4, NUMBERED, min_batch_size=2)
    assert [len(batch.labels[0]) for batch in dataset] == sizes
    assert len(dataset) == len(sizes)
    with pytest.raises(DataError, match=r"at least 2 rows. Received: 1"):
        CsvDataset(numbered(tmp_path, 1), 4, NUMBERED, min_batch_size=2)


def in_lists(items, size):
    return [items[start : start + size] for start in range(0, len(items), size)]


def steps_of(order, batch_size, least, *, drop_remainder):
    """The reference: rows of each step, in lists."""
    steps = in_lists(order, batch_size)
    if drop_remainder:
        return [rows for rows in steps if len(rows) == batch_size]
    if len(steps) > 1 and len(steps[-1]) < least:
        steps[-2:] = [steps[-2] + steps[-1]]
    return steps


@settings(max_examples=20)
@given(data=st.data(), has_queue=st.booleans())
def test_the_parts_of_each_step_are_its_whole_batch(folder, data, has_queue):
    parts, least = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    num_rows = data.draw(st.integers(parts * least, 60))
    batch_size = data.draw(st.integers(parts * least, 30))
    own = {"shuffle": data.draw(st.booleans()), "seed": 5}
    drops = not has_queue and data.draw(st.booleans())
    cut = data.draw(st.integers(1, num_rows))
    sizes = [n for n in (cut, num_rows - cut) if n]
    paths = [numbered(folder, n, f"{i}-{n}.csv") for i, n in enumerate(sizes)]

    def dataset(size=batch_size, **more):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "GROUP_BYTES", 35)
            return CsvDataset(
                WorkQueue(paths) if has_queue else paths, size, NUMBERED, **own, **more
            )

    order = labels_of(dataset(7))
    steps = steps_of(order, batch_size, parts * least, drop_remainder=drops)
    in_parts = {"micro_batches": parts, "min_batch_size": least}
    first = dataset(**in_parts, drop_remainder=drops)
    given_batches = list(first)
    assert len(given_batches) == len(first) == len(steps) * parts
    for rows, of_step in zip(steps, in_lists(given_batches, parts), strict=True):
        assert labels_of(of_step) == rows
        sizes = [len(batch.labels[0]) for batch in of_step]
        assert least <= min(sizes) <= max(sizes) <= min(sizes) + 1
        fractions = [batch.fraction for batch in of_step]
        assert fractions == [size / len(rows) for size in sizes]
        assert sum(fractions) == pytest.approx(1, abs=1e-12)

    first = dataset(**in_parts, drop_remainder=drops)
    taken = len(list(islice(first, data.draw(st.integers(0, len(given_batches))))))
    trained = data.draw(st.integers(0, taken // parts))
    for num, num_steps in ((trained * parts, trained), (None, taken // parts)):
        second = dataset()  # a row is one of any micro_batches
        second.load_state_dict(json.loads(json.dumps(first.state_dict(num))))
        assert labels_of(second) == order[sum(map(len, steps[:num_steps])) :]
    for wrong in {taken, trained * parts + 1} - {*range(0, taken + 1, parts)}:
        with pytest.raises(
            ConfigError, match=rf"last part of a step. Received: {wrong}"
        ):
            first.state_dict(wrong)
    if has_queue:  # the rest of a loop that was left, from a whole step on
        assert labels_of(first) == order[sum(map(len, steps[: taken // parts])) :]


def test_a_state_that_leaves_too_few_rows_for_all_parts_is_an_error(tmp_path):
    path = numbered(tmp_path, 9)
    first = CsvDataset(path, 4, NUMBERED)
    batches = iter(first)
    assert labels_of([next(batches), next(batches)]) == list(range(8))
    second = CsvDataset(path, 4, NUMBERED, micro_batches=2)
    second.load_state_dict(first.state_dict())
    with pytest.raises(
        ConfigError, match=r"at least 2 rows, .*Received: 1 that are left"
    ):
        list(second)


@given(st.lists(st.binary(max_size=40), max_size=30))
def test_many_texts_have_the_hashes_of_the_library(texts):
    expected = [xxhash.xxh3_64_intdigest(text.strip(b" ") or b" ") for text in texts]
    array = pa.array([b"before", *texts, b"after"], pa.binary())[1:-1]
    assert hashing.hash_texts(array).tolist() == expected


def test_reading_ahead_is_bounded(tmp_path, small_groups, monkeypatch):
    read, is_read = [], files.CsvFile.parse

    def count(file, block, **kwargs):
        read.append(block)
        return is_read(file, block, **kwargs)

    monkeypatch.setattr(files.CsvFile, "parse", count)
    path = numbered(tmp_path, 700)
    for ahead, most in (({"num_parallel_reads": 4}, 7), ({"shuffle": True}, 12)):
        dataset = CsvDataset(path, 7, NUMBERED, **ahead)
        read.clear()
        batches = iter(dataset)
        next(batches)
        batches.close()  # waits for what is being read
        assert 1 <= len(read) <= most


def test_packed_files_read_as_plain_ones(tmp_path, small_groups):
    plain = numbered(tmp_path, 40)
    packed = tmp_path / "packed.csv.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    datasets_ = [CsvDataset(path, 9, NUMBERED) for path in (plain, packed)]
    assert labels_of(datasets_[0]) == labels_of(datasets_[1]) == list(range(40))
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"packed.csv.gz must be a whole file of gzip"):
        CsvDataset(packed, 9, NUMBERED)


def test_empty_lines_are_no_rows_and_lines_keep_their_numbers(
    tmp_path, small_groups, monkeypatch
):
    path = tmp_path / "gaps.csv"
    path.write_text("\n1,1\r\n\r\n\n" + "2,2\n\n" * 20 + "x,3")
    with pytest.raises(DataError, match=r"gaps.csv, line 45: .*a number.*'x'"):
        CsvDataset(path, 50, (LabelColumn("label"), IdColumn("id")))
    path.write_text("\n1,1\r\n\r\n\n" + "2,2\n\n" * 20 + "3,x")
    ids = LabelColumn("label"), IdColumn("id", is_text=False)
    with pytest.raises(DataError, match=r"gaps.csv, line 45: id must be an integer"):
        CsvDataset(path, 50, ids)
    monkeypatch.setattr(files, "_HEAD_BYTES", 20)
    dataset = CsvDataset(path, 50, ids)
    assert dataset.num_rows == 22
    with pytest.raises(DataError, match=r"gaps.csv, line 45: id must be an integer"):
        list(dataset)


def test_faults_of_csv_files_come_before_the_first_batch(tmp_path):
    given_columns = (LabelColumn("label"), IdColumn("id"), IdColumn("tag"))
    path = tmp_path / "rows.csv"
    good = "1,a,b\n" * 9
    for text, message in (
        (
            good + "1,a\n",
            r"rows.csv, line 10: a line must have 3 columns, and has 2.*b'1,a'",
        ),
        (good + "1,a,b,c\n", r"line 10: a line must have 3 columns, and has 4."),
        (good + "yes,a,b\n", r"rows.csv, line 10: label must be a number.*'yes'"),
        (good + "nan,a,b\n", r"rows.csv, line 10: label must be a number.*nan"),
        (good + ",a,b\n", r"rows.csv, line 10: label must be a number.*None"),
        ("label,id,tag\n" + good, r"line 1 must be a row.*Set header=True"),
        ("", r"rows.csv must have rows. Received: an empty file"),
        ("\n\n", r"rows.csv must have rows. Received: none"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            CsvDataset(path, 4, given_columns)
    with pytest.raises(DataError, match=r"none.csv must be a file.*Check the path"):
        CsvDataset(tmp_path / "none.csv", 4, given_columns)


def test_errors_within_lines_are_named(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b"1,2\n1,\xff\n")
    with pytest.raises(DataError, match=r"line 2: text must be in utf-8, or enc"):
        list(CsvDataset(path, 4, (LabelColumn("label"), IdColumn("id"))))
    path.write_text("1,2\n1,old\n")
    with pytest.raises(DataError, match=r"line 2: age must be a number.*'old'"):
        list(CsvDataset(path, 4, (IdColumn("id"), DenseColumn("age"))))
    dataset = CsvDataset(path, 4, (LabelColumn("label"), IdColumn("id")))
    path.write_text("1,2\n")
    with pytest.raises(DataError, match="must not change while it is read"):
        list(dataset)


def test_a_parquet_file_of_another_schema_names_the_columns(tmp_path):
    path = tmp_path / "rows.parquet"
    table = pa.table({"click": [["1"]], "tags": [[1.5]], "age": [2], "user": ["u"]})
    pq.write_table(table, path)
    with pytest.raises(DataError) as caught:
        ParquetDataset(path, 4, COLUMNS)
    message = str(caught.value)
    assert "it lacks ['few', 'number', 'kind']" in message
    assert "click must be a number, and is list" in message
    assert "tags must be a list of text, and is list" in message
    assert "age" not in message.partition("It has")[0]
    pq.write_table(table.slice(0, 0), path)
    with pytest.raises(DataError, match=r"must have rows. Received: none"):
        ParquetDataset(path, 4, (IdColumn("user"),))
    pq.write_table(pa.table({"click": [1, None], "user": ["u", "v"]}), path)
    with pytest.raises(DataError, match=r"row 2: click must be a number.*None"):
        list(ParquetDataset(path, 4, (LabelColumn("click"), IdColumn("user"))))
    path.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match="must be a Parquet file"):
        ParquetDataset(path, 4, (IdColumn("user"),))


def test_parquet_of_other_writers_reads_the_same(tmp_path):
    user = ["a", None, "", "b"]
    tags = [["x", "y"], [], None, ["", None]]
    expected = [hash_of(text) for text in ("a", "", "", "b")]
    expected_tags = [*map(hash_of, ("x", "y", "", "", "", ""))]
    four = (IdColumn("user"), IdColumn("tags", separator="|"))
    four += (IdColumn("wide", is_text=False), IdColumn("ids", None, "|", False))
    for text in (pa.string(), pa.large_string(), pa.binary()):
        for has_dictionary in (True, False):
            table = pa.table(
                {
                    "ids": pa.array([[1, 2], [], [3], None], pa.list_(pa.int32())),
                    "tags": pa.array(tags, pa.large_list(text)),
                    "user": pa.array(user, text),
                    "wide": pa.array([1, 2**64 - 1, 2**63, 0], pa.uint64()),
                }
            )
            path = tmp_path / "rows.parquet"
            pq.write_table(table, path, use_dictionary=has_dictionary)
            [batch] = ParquetDataset(path, 4, four)
            features = batch.id_features
            assert features["user"].values().tolist() == expected
            assert features["tags"].values().tolist() == expected_tags
            assert features["tags"].lengths().tolist() == [2, 1, 1, 2]
            assert features["wide"].values().tolist() == [1, -1, -(2**63), 0]
            assert features["ids"].values().tolist() == [1, 2, 3]
            assert features["ids"].lengths().tolist() == [2, 0, 1, 0]
    pq.write_table(pa.table({"user": pa.array(user).dictionary_encode()}), path)
    [batch] = ParquetDataset(path, 4, (IdColumn("user"),))
    assert batch.id_features["user"].values().tolist() == expected


def test_a_state_of_other_files_or_settings_names_the_difference(tmp_path):
    one, two = numbered(tmp_path, 9, "one.csv"), numbered(tmp_path, 12, "two.csv")
    state = CsvDataset([one], 4, NUMBERED, shuffle=True, seed=1).state_dict()
    same = CsvDataset(one, 3, NUMBERED, shuffle=True, seed=1)
    same.load_state_dict(state)
    other = CsvDataset(two, 4, NUMBERED, shuffle=True, seed=2)
    with pytest.raises(ConfigError) as caught:
        other.load_state_dict(state)
    message = str(caught.value)
    assert "not here: ['one.csv (36 bytes, xxh3 " in message
    assert "not saved: ['two.csv (52 bytes, xxh3 " in message
    assert "seed: 1 was saved, 2 is here" in message
    state = CsvDataset([one, two], 4, NUMBERED).state_dict()
    with pytest.raises(ConfigError, match="files in another order"):
        CsvDataset([two, one], 4, NUMBERED).load_state_dict(state)
    with pytest.raises(ConfigError, match="rows: None was saved"):
        CsvDataset([one, two], 4, NUMBERED, rows=np.arange(3)).load_state_dict(state)


def test_a_state_of_batches_that_are_long_gone_is_an_error(tmp_path):
    dataset = CsvDataset(numbered(tmp_path, 300), 1, NUMBERED)
    batches = list(dataset)
    assert dataset.state_dict(len(batches) - 256)["row"] == 44
    for num_trained in (43, 301):
        with pytest.raises(
            ConfigError, match=f"one of the last batches.*{num_trained}"
        ):
            dataset.state_dict(num_trained)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size must be >= 1"),
        ({"num_parallel_reads": 0}, "num_parallel_reads must be >= 1"),
        ({"partition_index": 1}, r"partition_index must be in \[0, 1\)"),
        ({"min_batch_size": 5}, "min_batch_size must be at most batch_size"),
        ({"micro_batches": 0}, "micro_batches must be >= 1"),
        ({"micro_batches": 3, "min_batch_size": 2}, "Received: 2, 4 / 3"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"columns": ("label",)}, "at least one IdColumn; with.*Received: none"),
        ({"columns": (IdColumn("a"), "a")}, r"different names.*twice \['a'\]"),
        ({"files": []}, "files must be at least one"),
    ],
)
def test_a_setting_that_cannot_work_is_an_error(tmp_path, wrong, message):
    right = {"files": numbered(tmp_path, 9), "batch_size": 4, "columns": NUMBERED}
    with pytest.raises(ConfigError, match=message):
        CsvDataset(**{**right, **wrong})
    with pytest.raises(ConfigError, match="separator must be one character"):
        IdColumn("a", separator="::")
    with pytest.raises(ConfigError, match="num_buckets must be >= 1"):
        IdColumn("a", num_buckets=0)


def test_integers_beyond_their_buckets_are_counted_and_the_first_is_named(
    tmp_path, caplog
):
    path = tmp_path / "rows.csv"
    path.write_text("".join(f"{price},{price}\n" for price in (3, 173, 49, -1, 50)))
    cut = IdColumn("price", num_buckets=50, is_text=False)
    dataset = CsvDataset(path, 5, (cut, IdColumn("text", num_buckets=2)))
    [batch] = dataset
    ids = [3, 173 % 50, 49, (2**64 - 1) % 50, 0]
    assert batch.id_features["price"].values().tolist() == ids
    assert dataset.num_beyond_buckets == {"price": 3}  # hashes are always cut
    list(dataset)
    [line] = [r.message for r in caplog.records if "buckets" in r.message]
    assert line == (
        "column price has values outside of its 50 buckets, for example 173: they are "
        "taken modulo 50"
    )


@pytest.mark.parametrize("library", ["pyarrow", "xxhash"])
def test_a_missing_library_is_named_with_the_extra(tmp_path, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"need {library}.*persia_torchrec\[data\]"):
        CsvDataset(numbered(tmp_path, 9), 4, NUMBERED)


@pytest.mark.parametrize(
    ("wanted", "uses_a_gpu", "is_pinned"),
    [(True, False, True), (None, True, True), (None, False, False)],
)
def test_batches_are_pinned_where_they_go_to_a_gpu(
    folder, monkeypatch, wanted, uses_a_gpu, is_pinned
):
    path = write_csv(folder / "pinned.csv", FEW_ROWS)
    plain = [bytes_of(b) for b in CsvDataset(path, 2, COLUMNS, pin_memory=False)]
    pinned, empty = [], torch.empty

    def empty_noted(*args, pin_memory=False, **kwargs):
        tensor = empty(*args, **kwargs)
        if pin_memory:
            pinned.append(tensor.data_ptr())
        return tensor

    monkeypatch.setattr(torch, "empty", empty_noted)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: uses_a_gpu)
    found = list(CsvDataset(path, 2, COLUMNS, pin_memory=wanted))
    assert [bytes_of(batch) for batch in found] == plain
    for batch in found:
        ids = batch.id_features
        tensors = ids.values(), ids.lengths(), *batch.labels, *batch.dense_features
        are_pinned = {tensor.data_ptr() in pinned for tensor in tensors}
        assert are_pinned == {is_pinned}
