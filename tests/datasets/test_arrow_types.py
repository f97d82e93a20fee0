"""What Arrow's types are to a column."""

import pyarrow as pa
import pytest

from persia_torchrec.data import DenseColumn, IdColumn, LabelColumn
from persia_torchrec.datasets.arrow_types import (
    family_of,
    kind_of,
    misfit,
    plain,
    texts_of,
    trimmed_bytes,
)


@pytest.mark.parametrize(
    ("kind", "name", "family"),
    [
        (pa.int8(), "integer", "number"),
        (pa.bool_(), "boolean", "number"),
        (pa.large_string(), "text", "text"),
        (pa.binary(), "bytes", "text"),
        (pa.dictionary(pa.int8(), pa.string()), "text", "text"),
        (pa.null(), "null", None),
        (pa.list_(pa.float32()), "list", "list of number"),
        (pa.list_(pa.null()), "list", None),
        (pa.timestamp("s"), "time", "time"),
    ],
)
def test_a_type_has_its_kind_and_files_share_its_family(kind, name, family):
    assert (kind_of(kind), family_of(kind)) == (name, family)


@pytest.mark.parametrize(
    ("column", "kind", "must"),
    [
        (IdColumn("a", is_text=False), pa.int64(), ""),
        (IdColumn("a", is_text=False), pa.float64(), "an integer; with fill="),
        (IdColumn("a", is_text=True), pa.int64(), "text, or have is_text=False"),
        (IdColumn("a", separator=",", is_text=False), pa.list_(pa.int64()), ""),
        (LabelColumn("a", positive="y"), pa.int64(), "text, as it has a positive"),
        (LabelColumn("a"), pa.timestamp("s"), "a number; function="),
        (DenseColumn("a"), pa.list_(pa.int64()), "a list of a fixed size"),
        (DenseColumn("a", size=2), pa.list_(pa.int64()), ""),
    ],
)
def test_a_column_of_another_type_is_told_what_it_must_be(column, kind, must):
    found = misfit(column, kind)
    assert found.startswith(must)
    assert bool(found) == bool(must)


def test_arrays_of_any_kind_become_plain_ones():
    chunked = pa.chunked_array([[1], [2, 3]])
    assert plain(chunked).to_pylist() == [1, 2, 3]
    assert plain(pa.chunked_array([], pa.int64())).to_pylist() == []
    assert plain(pa.nulls(2)).type == pa.string()
    numbers = pa.array([5, 7, 5]).dictionary_encode()
    assert plain(numbers).to_pylist() == [5, 7, 5]
    views = pa.array([[1], None, [2, 3]], pa.list_view(pa.int64()))
    assert plain(views).to_pylist() == [[1], None, [2, 3]]
    damaged = pa.DictionaryArray.from_arrays(
        pa.array([0, 9], pa.int8()), pa.array(["a"]), safe=False
    )
    with pytest.raises(pa.ArrowInvalid, match="indices from 0 to 9 of a dictionary"):
        plain(damaged)


def test_spaces_at_the_ends_of_text_are_no_part_of_it():
    texts = pa.array([" a b ", None]).dictionary_encode()
    assert texts_of(texts).to_pylist() == ["a b", None]
    raw = pa.array([b" \xff ", None])
    assert trimmed_bytes(raw).to_pylist() == [b"\xff", None]
