"""Files of JSON objects, one a line."""

import json

import pytest

from persia_torchrec.data import DenseColumn, IdColumn, JsonDataset, LabelColumn
from persia_torchrec.errors import DataError

COLUMNS = IdColumn("user.name"), LabelColumn("label"), DenseColumn("age", fill=-1.0)


def write(path, *lines):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return JsonDataset(path, 8, COLUMNS)


def test_fields_are_found_by_name_and_those_that_lack_are_missing(tmp_path):
    (batch,) = write(
        tmp_path / "a.json",
        {"label": 1, "user": {"name": "2020-01-01"}, "more": [1]},
        {"user": {"name": "b"}, "label": 0, "age": 7},
    )
    assert batch.labels[0].tolist() == [1, 0]
    assert batch.dense_features[0].tolist() == [[-1], [7]]
    assert batch.id_features.lengths().tolist() == [1, 1]


def test_text_that_looks_like_a_time_stays_text(tmp_path):
    of_time = write(
        tmp_path / "a.json", {"user": {"name": "2020-01-01"}, "label": 0, "age": 1}
    )
    mixed = write(
        tmp_path / "b.json",
        {"user": {"name": "2020-01-01"}, "label": 0, "age": 1},
        {"user": {"name": "x"}, "label": 0, "age": 1},
    )
    (one,), (two,) = of_time, mixed
    assert one.id_features.values()[0] == two.id_features.values()[0]


@pytest.mark.parametrize("text", ['{"user"', "[1, 2]\n", "7\n"])
def test_a_line_that_is_no_object_is_an_error_of_the_file(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"a\.json"):
        list(JsonDataset(path, 8, COLUMNS))
