"""Text files as people have them: names, delimiters, quotes, packed, JSON lines."""

import bz2
import gzip
import json

import pyarrow as pa
import pytest
import xxhash

from persia_torchrec.data import (
    CsvDataset,
    CsvFormat,
    DenseColumn,
    IdColumn,
    JsonDataset,
    LabelColumn,
    ParquetDataset,
    write_parquet,
)
from persia_torchrec.datasets import files
from persia_torchrec.errors import ConfigError, DataError

USER, ITEM = IdColumn("user", is_text=False), IdColumn("item", is_text=False)
ACTION = LabelColumn("action", positive="buy")
COLUMNS = USER, ITEM, ACTION
ROWS = ([1, 3], [2, 4], [1.0, 0.0])


def read(dataset):
    """Return users, items and labels."""
    users, items, labels = [], [], []
    for batch in dataset:
        users += batch.id_features["user"].values().tolist()
        items += batch.id_features["item"].values().tolist()
        labels += batch.labels[0].tolist()
    return users, items, labels


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows"


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("1,2,buy\n3,4,pv\n", {}),
        ("1,2,buy\r\n3,4,pv", {}),
        ("1, 2 , buy\n3,4,pv\n", {}),
        ("1\t2\tbuy\n3\t4\tpv\n", {"delimiter": "\t"}),
        ("1;2;buy\n3;4;pv\n", {"delimiter": ";"}),
        ("1::2::buy\n3::4::pv\n", {"delimiter": "::"}),
        ('"1","2","buy"\n3,"4",pv\n', {"quotes": True}),
        ("item,action,more,user\n2,buy,x,1\n4,pv,y,3\n", {"header": True}),
        ('"item","action","user"\n2,buy,1\n4,pv,3\n', {"header": True, "quotes": True}),
        ("# made\nby hand\n1,2,buy\n3,4,pv\n", {"skip_lines": 2}),
        ("\ufeff1,2,buy\n3,4,pv\n", {}),
        ("\ufeffuser,item,action\n1,2,buy\n3,4,pv\n", {"header": True}),
        ("\nuser,item,action\n\n1,2,buy\n\n3,4,pv\n", {"header": True}),
    ],
)
def test_lines_of_every_format_are_the_same_rows(path, text, settings):
    path.write_bytes(text.encode())
    dataset = CsvDataset(path, 8, COLUMNS, **settings)
    assert read(dataset) == ROWS
    assert dataset.num_rows == 2
    parquet = path.with_name("rows.parquet")
    assert write_parquet(path, parquet, COLUMNS, CsvFormat(**settings)) == 2
    assert read(ParquetDataset(parquet, 8, COLUMNS)) == ROWS


def test_files_without_rows_are_passed_over_and_named(tmp_path, caplog):
    (tmp_path / "a.csv").write_text("user,item,action\n1,2,buy\n3,4,pv\n")
    empty = {"b": "", "c": "\n\n", "d": "user,item,action\n", "e": "who,what\n"}
    for name, text in empty.items():
        (tmp_path / f"{name}.csv").write_text(text)
    assert read(CsvDataset(tmp_path, 8, COLUMNS, header=True)) == ROWS
    assert "4 of 5 files have no rows: " in caplog.text
    assert f"{tmp_path}/b.csv (0 bytes), {tmp_path}/c.csv (2 bytes), " in caplog.text
    with pytest.raises(DataError, match=r"b.csv must have rows. Received: an empty"):
        CsvDataset(tmp_path / "b.csv", 8, COLUMNS, header=True)


def test_names_that_differ_by_case_only_are_shown(tmp_path):
    for name, names in (("a", "user,item,action"), ("b", "User,item,ACTION")):
        (tmp_path / name).write_text(f"{names}\n1,2,buy\n")
    message = (
        r"b must have .*lacks \['user', 'action'\], from which \['User', 'ACTION'\] "
        r"differ by case only.* /a has \['user', 'item', 'action'\]"
    )
    with pytest.raises(DataError, match=message.replace(" /a", " .*/a")):
        CsvDataset(tmp_path, 8, COLUMNS, header=True)


def test_a_quoted_field_may_hold_delimiters_and_quotes(path):
    path.write_text('"a,b","say ""x"""\n')
    two = IdColumn("one"), IdColumn("two")
    [batch] = CsvDataset(path, 8, two, quotes=True)
    expected = [xxhash.xxh3_64_intdigest(t) for t in (b"a,b", b'say "x"')]
    assert [n % 2**64 for n in batch.id_features.values().tolist()] == expected


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("user,item,action\n1,2,buy\n", {}, "line 1 must be a row.*Set header=True"),
        ("Action,User,Item\nbuy,1,2\n", {}, "line 1 must be a row.*Set header=True"),
        ("who,what,how\n1,2,buy\n", {}, "line 1: user must be an .*set header=True"),
        (
            '1,2,"buy"\n',
            {},
            "line 1: a field must not begin with a quote, or set quotes",
        ),
        ("1,2,red\rshoes\n", {}, "line 1: a field must not hold a carriage return"),
        ("1,2,buy\n\ufeff3,4,pv\n", {}, "line 2: a byte order mark must be at the st"),
        ("1,2,buy\n3,4\n", {}, "line 2: a line must have 3 columns, and has 2"),
        ('1,2,"buy\n"\n', {"quotes": True}, "line 1: a quoted field must end in its"),
        ("user,item\n1,2\n", {"header": True}, r"it lacks \['action'\]"),
        (
            "user,user,item,action\n1,2,3,4\n",
            {"header": True},
            r"it has \['user'\] twice",
        ),
        ("1::2\x1f::buy\n", {"delimiter": "::"}, "line 1: .* not hold the byte 1f"),
        ("1,,buy\n", {}, "line 1: item must be an integer.*Set fill="),
        ("1,1.5,buy\n", {}, "line 1: item must be an integer of 64 bits.*1.5"),
        (f"1,{2**64},buy\n", {}, "line 1: item must be an integer of 64 bits"),
    ],
)
@pytest.mark.parametrize("is_later", [False, True])
def test_a_fault_names_its_line_before_a_row_of_its_block(
    path, monkeypatch, text, settings, message, is_later
):
    if not is_later or "header" in message or "lacks" in message or "twice" in message:
        path.write_bytes(text.encode())
        with pytest.raises(DataError, match=message):
            CsvDataset(path, 8, COLUMNS, **settings)
        return
    delimiter = settings.get("delimiter", ",")
    good = f"1{delimiter}2{delimiter}buy\n" * 50
    path.write_bytes((good + text).encode())
    monkeypatch.setattr(files, "_HEAD_BYTES", 20)
    monkeypatch.setattr(files, "GROUP_BYTES", 100)
    monkeypatch.setattr(files, "_MAX_GROUPS", 1)
    line = int(message[5]) + 50
    dataset = CsvDataset(path, 4, COLUMNS, **settings)
    labels = []
    with pytest.raises(DataError, match=message.replace(message[:6], f"line {line}")):
        labels.extend(len(batch.labels[0]) for batch in dataset)
    assert 0 < sum(labels) < 50
    if "quoted" not in message:
        assert dataset.num_rows == 50 + text.count("\n")


def test_text_of_another_encoding_is_named_and_read(path):
    path.write_bytes("caf\u00e9,1\n".encode("latin-1"))
    columns = IdColumn("title"), DenseColumn("n")
    with pytest.raises(DataError, match="line 1: text must be in utf-8, or encoding="):
        CsvDataset(path, 8, columns)
    [batch] = CsvDataset(path, 8, columns, encoding="latin-1")
    expected = xxhash.xxh3_64_intdigest("caf\u00e9".encode())
    assert batch.id_features.values().item() % 2**64 == expected


LINES = "".join(f"{n}::{n % 7}::{n % 2}\n" for n in range(900)).encode()
PACKED = {
    "plain": LINES,
    "gz": gzip.compress(LINES),
    "two.gz": gzip.compress(LINES[:50]) + gzip.compress(LINES[50:]),
    "bz2": bz2.compress(LINES),
    "zst": pa.compress(LINES, "zstd", asbytes=True),
}
NUMBERED = USER, ITEM, LabelColumn("label")


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("num_readers", [1, 3])
def test_packed_files_are_known_by_their_bytes(path, monkeypatch, name, num_readers):
    monkeypatch.setattr(files, "GROUP_BYTES", 500)
    path.write_bytes(PACKED[name])
    settings = {"delimiter": "::", "num_parallel_reads": num_readers}
    dataset = CsvDataset(path, 64, NUMBERED, **settings)
    assert read(dataset)[0] == list(range(900))
    assert dataset.num_rows == 900
    first = CsvDataset(path, 64, NUMBERED, shuffle=True, **settings)
    rows = iter(first)
    taken = read([next(rows), next(rows)])[0]
    second = CsvDataset(path, 64, NUMBERED, shuffle=True, **settings)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert sorted(taken + read(second)[0]) == list(range(900))
    if name not in ("plain", "two.gz"):
        path.write_bytes(PACKED[name][:-9])
        with pytest.raises(DataError, match="rows must be a whole file of"):
            list(CsvDataset(path, 64, NUMBERED, delimiter="::"))


def test_a_csv_file_is_not_scanned_before_its_first_batch(path, monkeypatch):
    path.write_bytes(LINES)
    monkeypatch.setattr(files, "_HEAD_BYTES", 100)
    monkeypatch.setattr(files, "GROUP_BYTES", 1000)
    num_read, count = [], files.TextFile._read_range

    def counted(file, start, stop):
        num_read.append(stop - start)
        return count(file, start, stop)

    monkeypatch.setattr(files.TextFile, "_read_range", counted)
    for part in range(2):
        num_read.clear()
        settings = {"partition_count": 2, "partition_index": part}
        rows = iter(CsvDataset(path, 8, NUMBERED, delimiter="::", **settings))
        next(rows)
        rows.close()
        assert len(num_read) <= 3  # one to see that there is a row


def test_json_lines(path):
    rows = [
        {"user": 1, "item": 2, "tags": ["a", "b"], "at": {"day": "2020-01-01"}},
        {"user": 3, "item": 4, "tags": [], "at": {"day": "2020-01-02"}, "score": 1.5},
    ]
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    columns = (
        USER,
        ITEM,
        IdColumn("tags"),
        IdColumn("day", column="at.day"),
        DenseColumn("score", fill=-1),
    )
    [batch] = JsonDataset(path, 8, columns)
    features = batch.id_features
    assert features["tags"].lengths().tolist() == [2, 1]
    days = [xxhash.xxh3_64_intdigest(row["at"]["day"].encode()) for row in rows]
    assert [n % 2**64 for n in features["day"].values().tolist()] == days
    assert batch.dense_features[0].tolist() == [[-1], [1.5]]
    path.write_text('{"user": 1, "item": 2}\n{"user": 1,\n')
    with pytest.raises(DataError, match="rows, line 2: a line must be one JSON object"):
        JsonDataset(path, 8, [USER, ITEM])
    path.write_text('{"user": 1, "item": 2}\n')
    with pytest.raises(DataError, match=r"it lacks \['itm'\].*has \['user', 'item'\]"):
        JsonDataset(path, 8, [USER, IdColumn("itm")])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"delimiter": ""}, "delimiter must be ASCII"),
        ({"delimiter": '"'}, "delimiter must be ASCII"),
        ({"skip_lines": -1}, "skip_lines at least 0"),
        ({"encoding": "klingon"}, "encoding must be a codec of Python"),
    ],
)
def test_an_invalid_format_is_an_error(path, wrong, message):
    with pytest.raises(ConfigError, match=message):
        CsvDataset(path, 8, COLUMNS, **wrong)


def test_a_failed_conversion_leaves_no_part(path):
    path.write_text("1,2,buy\n" * 5 + "1,2\n")
    with pytest.raises(DataError):
        write_parquet(path, path.with_name("out.parquet"), COLUMNS)
    assert [found.name for found in path.parent.iterdir()] == ["rows"]
