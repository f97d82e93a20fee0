"""Ids and numbers of values of every type, and of those that are missing."""

import logging
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.data import (
    ArrowDataset,
    CsvDataset,
    DenseColumn,
    IdColumn,
    LabelColumn,
    ParquetDataset,
)
from persia_torchrec.datasets.arrow_types import plain
from persia_torchrec.datasets.arrow_values import decode_numbers
from persia_torchrec.datasets.columns import row_error
from persia_torchrec.errors import ConfigError, DataError

NAN = float("nan")


def hash_of(text):
    number = xxhash.xxh3_64_intdigest(text.encode())
    return number - 2**64 if number >= 2**63 else number


A, B, C, EMPTY = map(hash_of, ("a", "b", "c", " "))
INTEGERS = {"is_text": False}
MAP = pa.map_(pa.string(), pa.float32())
MAP_OF_INTEGERS = pa.map_(pa.int64(), pa.float64())
PAIRS = pa.list_(pa.struct([("k", pa.int64()), ("w", pa.float32())]))


def batch_of(tmp_path, values, kind, *columns):
    numbers = list(range(len(values)))
    array = pa.array(values, kind)
    pq.write_table(pa.table({"u": array, "n": numbers}), tmp_path / "u.parquet")
    dataset = ParquetDataset(tmp_path / "u.parquet", 8, columns)
    [batch] = dataset
    return batch, dataset


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "kind", "settings", "ids", "lengths", "missing"),
    [
        (["a", "b"], pa.string_view(), {}, [A, B], [1, 1], 0),
        ([b"a", None], pa.binary_view(), {}, [A, EMPTY], [1, 1], 1),
        ([b"a", b"b"], pa.binary(1), {}, [A, B], [1, 1], 0),
        ([None, None], pa.null(), {}, [EMPTY] * 2, [1, 1], 2),
        ([" a", "b  "], pa.string(), {}, [A, B], [1, 1], 0),
        ([[" a"], ["b "]], pa.list_(pa.string()), {}, [A, B], [1, 1], 0),
        (["a | b"], pa.string(), {"separator": "|"}, [A, B], [2], 0),
        ([["a", "b"], ["c"]], pa.list_(pa.string_view()), {}, [A, B, C], [2, 1], 0),
        ([[1, 2], [3, 4]], pa.list_(pa.int64(), 2), INTEGERS, [1, 2, 3, 4], [2, 2], 0),
        ([[1, 2], None], pa.list_(pa.int64(), 2), INTEGERS, [1, 2], [2, 0], 0),
        ([[1, 2], [3]], pa.list_view(pa.int64()), INTEGERS, [1, 2, 3], [2, 1], 0),
        (
            [[1], None, [2, 3]],
            pa.list_view(pa.int64()),
            INTEGERS,
            [1, 2, 3],
            [1, 0, 2],
            0,
        ),
        (
            [[[1, 2], []], [], [[3]]],
            pa.large_list_view(pa.list_view(pa.int64())),
            INTEGERS,
            [1, 2, 3],
            [2, 0, 1],
            0,
        ),
        ([[1, 2], [3]], pa.large_list(pa.int8()), INTEGERS, [1, 2, 3], [2, 1], 0),
        ([[], []], pa.list_(pa.null()), INTEGERS, [], [0, 0], 0),
        (
            [[[1, 2], [3]], [], None, [[], [4]]],
            pa.list_(pa.list_(pa.int64())),
            INTEGERS,
            [1, 2, 3, 4],
            [3, 0, 0, 1],
            0,
        ),
        ([True, False], pa.bool_(), INTEGERS, [1, 0], [1, 1], 0),
        ([7], pa.decimal128(10, 0), INTEGERS, [7], [1], 0),
        (["5", "-6"], pa.string(), INTEGERS, [5, -6], [1, 1], 0),
        (["1|2", ""], pa.string(), INTEGERS | {"separator": "|"}, [1, 2], [2, 0], 0),
        ([{"x": 1}, {"x": 2}], None, INTEGERS | {"column": "u.x"}, [1, 2], [1, 1], 0),
        ([2**64 - 1], pa.uint64(), INTEGERS, [-1], [1], 0),
        ([str(2**64 - 1), "-1"], pa.string(), INTEGERS, [-1, -1], [1, 1], 0),
        ([3600 * 5 + 1], pa.timestamp("s"), INTEGERS | {"unit": "h"}, [5], [1], 0),
        ([-1], pa.timestamp("s"), INTEGERS | {"unit": "D"}, [-1], [1], 0),
        ([19000], pa.date32(), INTEGERS | {"unit": "D"}, [19000], [1], 0),
        (["1970-01-03"], pa.string(), INTEGERS | {"unit": "D"}, [2], [1], 0),
        (
            [3, None],
            pa.date32(),
            INTEGERS | {"unit": "D", "fill": 5},
            [3, 5],
            [1, 1],
            1,
        ),
        (
            [Decimal(1), None],
            pa.decimal128(3, 2),
            INTEGERS | {"fill": 5},
            [1, 5],
            [1, 1],
            1,
        ),
        ([1.0, NAN], pa.float64(), INTEGERS | {"fill": 9}, [1, 9], [1, 1], 1),
        ([1, None, 3], pa.int64(), INTEGERS | {"fill": ()}, [1, 3], [1, 0, 1], 1),
        ([1, None], pa.int64(), INTEGERS | {"fill": 9}, [1, 9], [1, 1], 1),
        (["a", None, ""], pa.string(), {"fill": ()}, [A], [1, 0, 0], 2),
        (["a", None, " "], pa.string(), {"fill": "b"}, [A, B, B], [1, 1, 1], 2),
        (
            [[1, None], None, []],
            pa.list_(pa.int64()),
            INTEGERS | {"fill": 7},
            [1, 7, 7],
            [2, 1, 0],
            2,
        ),
        (
            [[1, None], None, []],
            pa.list_(pa.int64()),
            INTEGERS | {"fill": ()},
            [1],
            [1, 0, 0],
            2,
        ),
        (
            [[1, 2, 3], [4], []],
            pa.list_(pa.int64()),
            INTEGERS | {"max_length": 2},
            [2, 3, 4],
            [2, 1, 0],
            0,
        ),
        (
            [[1, 2, 3], [4], []],
            pa.list_(pa.int64()),
            INTEGERS | {"max_length": 2, "keep": "head"},
            [1, 2, 4],
            [2, 1, 0],
            0,
        ),
    ],
)
def test_ids_of_every_type(tmp_path, values, kind, settings, ids, lengths, missing):
    batch, dataset = batch_of(tmp_path, values, kind, IdColumn("u", **settings))
    assert batch.id_features.values().tolist() == ids
    table = pa.table({"u": pa.array(values, kind)})
    with pa.ipc.new_file(tmp_path / "u", table.schema) as writer:
        writer.write_table(table)
    [same] = ArrowDataset(tmp_path / "u", 8, [IdColumn("u", **settings)])
    assert same.id_features.values().tolist() == ids
    assert batch.id_features.lengths().tolist() == lengths
    if missing:
        assert dataset.missing == {"u": missing}


@pytest.mark.parametrize(
    ("values", "kind", "settings", "ids", "weights"),
    [
        ([[("a", 1.5), ("b", 2)], []], MAP, {}, [A, B, EMPTY], [1.5, 2, 1]),
        ([[(1, 1.5)], [], None], MAP_OF_INTEGERS, INTEGERS, [1], [1.5]),
        ([[{"k": 5, "w": 0.5}], []], PAIRS, INTEGERS, [5], [0.5]),
        (["a:1|b:2.5", "c:3"], None, {"separator": "|"}, [A, B, C], [1, 2.5, 3]),
    ],
)
def test_ids_with_weights(tmp_path, values, kind, settings, ids, weights):
    columns = IdColumn("u", is_weighted=True, **settings), IdColumn("n", **INTEGERS)
    batch, _ = batch_of(tmp_path, values, kind, *columns)
    feature = batch.id_features["u"]
    assert feature.values().tolist() == ids
    assert feature.weights().tolist() == weights
    assert batch.id_features["n"].weights().tolist() == [1] * len(values)


def of_hour(times):
    return times.astype("datetime64[h]").astype(int) % 24


@pytest.mark.parametrize(
    ("values", "kind", "settings", "expected"),
    [
        ([[1, 2], [3, 4]], pa.list_(pa.float32()), {"size": 2}, [[1, 2], [3, 4]]),
        ([[1, 2], None], pa.list_(pa.float64(), 2), {"fill": 0}, [[1, 2], [0, 0]]),
        ([1.5, None, NAN], pa.float32(), {"fill": -1}, [[1.5], [-1], [-1]]),
        (["1.5", ""], pa.string(), {"fill": -1}, [[1.5], [-1]]),
        ([1, 2], pa.decimal128(5, 2), {}, [[1], [2]]),
        ([Decimal("1.5"), None], pa.decimal128(2, 1), {"fill": 7}, [[1.5], [7]]),
        ([2**60 + 1], pa.int64(), {}, [[float(2**60)]]),
        ([0, 3600 * 5], pa.timestamp("s"), {"function": of_hour}, [[0], [5]]),
        ([0, 1], pa.date32(), {"function": of_hour}, [[0], [0]]),
        ([0, 3], pa.int64(), {"function": np.sqrt}, [[0], [np.float32(3**0.5)]]),
        ([True, False], pa.bool_(), {}, [[1], [0]]),
    ],
)
def test_numbers_of_every_type(tmp_path, values, kind, settings, expected):
    columns = IdColumn("n", **INTEGERS), DenseColumn("u", **settings)
    batch, _ = batch_of(tmp_path, values, kind, *columns)
    assert batch.dense_features[0].tolist() == expected


@pytest.mark.parametrize(
    ("values", "kind", "column", "message"),
    [
        ([1.0, NAN], pa.float64(), IdColumn("u", **INTEGERS), "with fill=... whole"),
        (
            [1.5],
            pa.float64(),
            IdColumn("u", None, None, False, fill=0),
            "row 1: u must",
        ),
        ([1, None], pa.int64(), IdColumn("u", **INTEGERS), r"row 2: .*Set fill="),
        ([1], pa.int64(), IdColumn("u"), "text, or have is_text=False"),
        ([0], pa.date32(), IdColumn("u", **INTEGERS), "or have unit="),
        ([0], pa.date32(), DenseColumn("u"), "function=... of a DenseColumn"),
        ([1.0, None], pa.float32(), DenseColumn("u"), r"row 2: u.*Set fill="),
        ([1e39], pa.float64(), DenseColumn("u"), "row 1: u.*within float32"),
        ([1.0, 1e39], pa.float64(), LabelColumn("u"), "row 2: u.*within float32"),
        ([float("inf")], pa.float32(), DenseColumn("u", fill=0), "must be finite"),
        ([[1.0], [1.0, 2]], pa.list_(pa.float32()), DenseColumn("u"), "have size="),
        ([[1.0]], pa.list_(pa.float32()), DenseColumn("u", size=2), "must have 2 num"),
        ([b"a|\xff"], None, IdColumn("u", None, "|"), "row 1: text must be in UTF-8"),
        ([[("a", 1)]], pa.map_(pa.string(), pa.int8()), IdColumn("u"), "is_weighted"),
    ],
)
def test_a_value_that_does_not_fit_names_row_and_remedy(
    tmp_path, values, kind, column, message
):
    columns = (IdColumn("n", **INTEGERS), column)
    with pytest.raises(DataError, match=message):
        batch_of(tmp_path, values, kind, *columns)


@pytest.mark.parametrize("use_dictionary", [True, False])
def test_text_of_several_row_groups_is_one_block(tmp_path, use_dictionary):
    texts = [f"{n % 17}" for n in range(90)]
    many = [[f"{m}" for m in range(n % 4)] for n in range(90)]
    settings = {"row_group_size": 30, "use_dictionary": use_dictionary}
    pq.write_table(pa.table({"u": texts, "t": many}), tmp_path / "u", **settings)
    [batch] = ParquetDataset(tmp_path / "u", 90, [IdColumn("u"), IdColumn("t")])
    assert batch.id_features["u"].values().tolist() == list(map(hash_of, texts))
    expected = [hash_of(t) for row in many for t in row or [" "]]
    assert batch.id_features["t"].values().tolist() == expected


def test_a_page_whose_checksum_is_wrong_is_an_error(tmp_path):
    path, numbers = tmp_path / "u.parquet", list(range(7000, 7100))
    settings = {"use_dictionary": False, "compression": "none"}
    for has_checksum in (True, False):
        table = pa.table({"u": numbers})
        pq.write_table(table, path, write_page_checksum=has_checksum, **settings)
        data = bytearray(path.read_bytes())
        data[data.index((7050).to_bytes(8, "little"))] ^= 1
        path.write_bytes(data)
        dataset = ParquetDataset(path, 100, [IdColumn("u", **INTEGERS)])
        if has_checksum:
            with pytest.raises(DataError, match=r"u.parquet, row groups 0 .*CRC"):
                list(dataset)
        else:
            [batch] = dataset
            assert batch.id_features.values().tolist()[50] == 7050 ^ 1


def test_a_column_that_comes_twice_is_named_before_the_first_batch(tmp_path):
    twice = pa.table([[1], [2], [3]], ["id", "value", "value"])
    pq.write_table(twice, tmp_path / "u.parquet")
    with pytest.raises(DataError, match=r"u.parquet .*it has \['value'\] twice"):
        ParquetDataset(tmp_path / "u.parquet", 8, [IdColumn("value", **INTEGERS)])


def test_one_column_serves_several_features(tmp_path):
    (tmp_path / "a.csv").write_text("7,buy\n8,cart\n")
    columns = (
        IdColumn("price", **INTEGERS),
        LabelColumn("buy", positive="buy", column="action"),
        DenseColumn("cost", column="price"),
        LabelColumn("cart", positive="cart", column="action"),
        IdColumn("action"),
    )
    [batch] = CsvDataset(tmp_path / "a.csv", 8, columns)
    assert batch.id_features["price"].values().tolist() == [7, 8]
    assert batch.dense_features[0].tolist() == [[7], [8]]
    assert [labels.tolist() for labels in batch.labels] == [[1, 0], [0, 1]]


@pytest.mark.parametrize("kind", [CsvDataset, ParquetDataset])
def test_a_positive_that_never_occurs_is_a_warning_with_what_does(
    tmp_path, kind, caplog
):
    rows = {"u": ["a", "b", "c"], "rich": [" >50K", " <=50K", " <=50K"]}
    pq.write_table(pa.table(rows), tmp_path / "rows")
    if kind is CsvDataset:
        lines = zip(*rows.values(), strict=True)
        (tmp_path / "rows").write_text("".join(f"{u},{rich}\n" for u, rich in lines))
    for positive, expected in ((">50K", [1, 0, 0]), (">50k", [0, 0, 0])):
        columns = IdColumn("u"), LabelColumn("rich", positive=positive)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            [batch] = kind(tmp_path / "rows", 8, columns)
        assert batch.labels[0].tolist() == expected
        assert ("rich has no row with the positive" in caplog.text) == (
            not any(expected)
        )
    assert "{'<=50K': 2, '>50K': 1}" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"fill": 1}, "fill must be of the kind of its values, str"),
        (
            {"fill": "a", "is_text": False},
            "fill must be of the kind of its values, int",
        ),
        ({"unit": "week", "is_text": False}, "unit must be one of"),
        ({"unit": "D"}, "with is_text=False"),
        ({"keep": "middle"}, "keep must be 'head' or 'tail'"),
        ({"max_length": 0}, "max_length must be >= 1"),
    ],
)
def test_a_setting_of_a_column_that_cannot_work_is_an_error(wrong, message):
    with pytest.raises(ConfigError, match=message):
        IdColumn("u", **wrong)


@pytest.mark.parametrize("indices", [[0, 2], [-1, 0], [2, None]])
@pytest.mark.parametrize("kind", [pa.string(), pa.int64()])
def test_an_index_beyond_its_dictionary_is_an_error(indices, kind):
    dictionary = pa.array(["1", "2"]).cast(kind)
    array = pa.DictionaryArray.from_arrays(
        pa.array(indices, pa.int32()), dictionary, safe=False
    )
    with pytest.raises(pa.ArrowInvalid, match="of a dictionary of 2"):
        plain(array)


NUMBERS_OF = {
    pa.float64(): st.floats(),
    pa.float32(): st.floats(width=32),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
}


@pytest.mark.slow
@given(st.data(), st.sampled_from(list(NUMBERS_OF)), st.sampled_from([None, -2.5]))
def test_numbers_of_a_sliced_array_are_float32_each_or_an_error(data, kind, fill):
    values = data.draw(st.lists(st.none() | NUMBERS_OF[kind], max_size=20))
    array = pa.array([None, 1, *values, 2], kind)[2:-1]
    is_missing = [value is None or value != value for value in values]
    with np.errstate(over="ignore"):
        expected = np.float32(
            [fill if m else v for v, m in zip(values, is_missing, strict=True)]
        )
    wrong = [i for i, m in enumerate(is_missing) if m] if fill is None else []
    wrong = wrong or np.flatnonzero(~np.isfinite(expected)).tolist()

    def fail(row, must, received):
        return row_error(f"row {row}", must, received)

    if wrong:
        with pytest.raises(DataError, match=rf"^row {wrong[0]}: n must be a number"):
            decode_numbers(array, DenseColumn("n", fill=fill), fail)
        return
    found, num_missing = decode_numbers(array, DenseColumn("n", fill=fill), fail)
    assert found.dtype == np.float32
    assert found.tolist() == expected.tolist()
    assert num_missing == sum(is_missing)
