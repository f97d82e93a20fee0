import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from persia_torchrec.errors import BatchError
from persia_torchrec.persia.batch import (
    DTYPES,
    MAX_BATCH_SIZE,
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)

ids = hnp.arrays(np.uint64, st.integers(0, 5), elements=st.integers(0, 2**64 - 1))


def single(name="item", num_samples=2):
    return IDTypeFeatureWithSingleID(name, np.arange(num_samples, dtype=np.uint64))


def label(num_samples=2, name=None):
    return Label(np.zeros((num_samples, 1), dtype=np.float32), name)


@given(st.lists(ids, max_size=20))
def test_ids_lie_flat_sample_after_sample(samples):
    feature = IDTypeFeature("item", samples)
    assert feature.ids.dtype == np.uint64
    assert feature.lengths.dtype == np.int32
    assert feature.ids.tolist() == [id_ for sample in samples for id_ in sample]
    assert feature.lengths.tolist() == [len(sample) for sample in samples]
    assert feature.batch_size == len(samples)


def test_a_matrix_of_ids_is_one_row_a_sample():
    matrix = np.arange(6, dtype=np.uint64).reshape(2, 3)
    feature = IDTypeFeature("item", matrix)
    assert feature.ids.tolist() == list(range(6))
    assert feature.lengths.tolist() == [3, 3]


def test_samples_that_are_not_contiguous_are_copied():
    backwards = np.arange(3, dtype=np.uint64)[::-1]
    assert IDTypeFeature("item", [backwards]).ids.tolist() == [2, 1, 0]
    feature = IDTypeFeatureWithSingleID("item", backwards)
    assert feature.ids.tolist() == [2, 1, 0]
    assert feature.ids.flags.c_contiguous
    dense = NonIDTypeFeature(np.zeros((3, 2), dtype=np.float32).T)
    assert dense.data.flags.c_contiguous
    assert dense.data.shape == (2, 3)


def test_the_ids_of_a_list_are_a_copy():
    sample = np.array([1], dtype=np.uint64)
    feature = IDTypeFeature("item", [sample])
    sample[0] = 2
    assert feature.ids.tolist() == [1]


@pytest.mark.parametrize(
    ("sample", "received"),
    [
        (np.array([1, 2]), r"dtype=int64, shape=\(2,\)"),
        (np.array([1.0]), r"dtype=float64, shape=\(1,\)"),
        (np.array([1], dtype=np.uint32), r"dtype=uint32, shape=\(1,\)"),
        (np.array([1], dtype=">u8"), r"dtype=>u8, shape=\(1,\)"),
        (np.array([[1]], dtype=np.uint64), r"dtype=uint64, shape=\(1, 1\)"),
        (np.ma.array([1], mask=[1], dtype=np.uint64), r".*masked: use its filled\(\)"),
        (np.array(1, dtype=np.uint64), r"dtype=uint64, shape=\(\)"),
        ([1, 2], r"\[1, 2\] \(list\)"),
        ([np.uint64(1)], r"\[np.uint64\(1\)\] \(list\)"),
        ([], r"\[\] \(list\)"),
        (7, r"7 \(int\)"),
        (None, r"None \(NoneType\)"),
    ],
)
def test_a_sample_that_is_no_flat_uint64_array_is_rejected(sample, received):
    good = np.array([1], dtype=np.uint64)
    message = (
        "Id type feature 'item': sample 1 must be a flat uint64 array. "
        f"Received: {received}"
    )
    with pytest.raises(BatchError, match=message):
        IDTypeFeature("item", [good, sample, good])


def test_a_single_id_feature_has_one_id_a_sample():
    feature = single(num_samples=3)
    assert feature.ids.tolist() == [0, 1, 2]
    assert feature.lengths.tolist() == [1, 1, 1]
    assert feature.lengths.dtype == np.int32
    assert feature.batch_size == 3


@pytest.mark.parametrize(
    "data",
    [
        np.array([1]),
        np.zeros((2, 1), dtype=np.uint64),
        [1, 2],
        np.ma.array([1], mask=[True], dtype=np.uint64),
    ],
    ids=["signed", "matrix", "list", "masked"],
)
def test_a_single_id_feature_that_is_no_flat_uint64_array_is_rejected(data):
    with pytest.raises(BatchError, match="'item': data must be a flat uint64 array"):
        IDTypeFeatureWithSingleID("item", data)


def test_a_feature_can_be_made_from_flat_ids():
    flat = np.array([7, 3, 3], dtype=np.uint64)
    feature = IDTypeFeature.from_flat("item", flat, np.array([2, 0, 1], np.int32))
    assert feature.name == "item"
    assert np.shares_memory(feature.ids, flat)
    assert feature.batch_size == 3


FLAT = np.arange(3, dtype=np.uint64)


@pytest.mark.parametrize(
    ("flat", "lengths", "message"),
    [
        (FLAT, np.array([3]), r"flat int32 array\. Received: dtype=int64"),
        (FLAT, np.array([[3]], np.int32), r"flat int32 array\. .*shape=\(1, 1\)"),
        (FLAT, np.array([1, 1], np.int32), "Received: a sum of 2 for 3 ids"),
        (FLAT, np.array([4, -1], np.int32), "lengths must be >= 0"),
        (FLAT, np.array([2**31 - 1] * 4, np.int32), "Received: a sum of 8589934588"),
        (np.arange(3), np.array([3], np.int32), "must be a flat uint64 array"),
    ],
)
def test_flat_ids_and_lengths_that_do_not_fit_are_rejected(flat, lengths, message):
    with pytest.raises(BatchError, match=message):
        IDTypeFeature.from_flat("item", flat, lengths)


@pytest.mark.parametrize("name", ["", None, 3, ["swapped"]])
def test_a_feature_without_a_name_is_rejected(name):
    no_ids = np.empty(0, dtype=np.uint64)
    message = "Every id type feature must have a name, a string that is not empty"
    with pytest.raises(BatchError, match=message):
        IDTypeFeature(name, [no_ids])
    with pytest.raises(BatchError, match=message):
        IDTypeFeatureWithSingleID(name, no_ids)
    with pytest.raises(BatchError, match=message):
        IDTypeFeature.from_flat(name, no_ids, np.array([0], np.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_data_keep_dtype_shape_and_memory(dtype):
    data = np.ones((2, 3, 4), dtype=dtype)
    feature = NonIDTypeFeature(data, "height")
    assert feature.data.dtype == dtype
    assert feature.data.shape == (2, 3, 4)
    assert np.shares_memory(feature.data, data)
    assert (feature.name, len(feature), feature.batch_size) == ("height", 2, 2)


def test_dense_data_without_a_name_are_anonymous():
    assert label().name == "label_anonymous"
    dense = NonIDTypeFeature(np.zeros(2))
    assert dense.name == "non_id_type_feature_anonymous"


@pytest.mark.parametrize("dtype", ["float16", "uint16", "uint64", ">f4", "O", "U3"])
def test_dense_data_of_another_dtype_are_rejected(dtype):
    message = "non-id type feature 'height' must have one of the dtypes bool, int8, "
    with pytest.raises(BatchError, match=message):
        NonIDTypeFeature(np.zeros(2, dtype=dtype), "height")


@pytest.mark.parametrize(
    "data",
    [
        *(np.float32(1), np.array(1.0), [1.0, 2.0], None),
        np.ma.array([1.0, 2.0], mask=[False, True]),
    ],
)
def test_dense_data_that_are_no_array_of_samples_are_rejected(data):
    with pytest.raises(BatchError, match="label 'clicked' must be an array with the"):
        Label(data, "clicked")


def test_a_batch_takes_its_size_from_the_first_feature():
    batch = PersiaBatch([single(num_samples=3)], labels=[label(3)])
    assert batch.batch_size == 3
    assert batch.non_id_type_features == ()
    assert batch.requires_grad
    assert batch.meta is None
    assert batch.batch_id is None


def test_a_batch_has_one_to_65535_samples():
    full = PersiaBatch([single(num_samples=MAX_BATCH_SIZE)], requires_grad=False)
    assert full.batch_size == 65_535
    for num_samples in (0, MAX_BATCH_SIZE + 1):
        message = f"1 to 65535 samples. Received: {num_samples}"
        with pytest.raises(BatchError, match=message):
            PersiaBatch([single(num_samples=num_samples)], requires_grad=False)


def test_parts_without_a_name_and_of_different_kinds_are_not_mixed_up():
    batch = PersiaBatch(
        [single("clicked")],
        [dense(2), dense(2)],
        [label(), label(), label(name="clicked")],
    )
    assert len(batch.non_id_type_features) == 2
    assert len(batch.labels) == 3


def dense(num_samples, name=None):
    return NonIDTypeFeature(np.zeros(num_samples), name)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"id_type_features": []}, "must have at least one id type feature"),
        ({"labels": [label(3)]}, "2 samples. Received: 3 in label 'label_anonymous'"),
        (
            {"non_id_type_features": [dense(1, "height")]},
            "2 samples. Received: 1 in non-id type feature 'height'",
        ),
        ({"batch_size": 4}, "4 samples. Received: 2 in id type feature 'item'"),
        (
            {"id_type_features": [single(), single("user", 3)]},
            "Received: 3 in id type feature 'user'",
        ),
        (
            {"id_type_features": [single(), single()]},
            "must differ. Received: id type feature 'item' twice",
        ),
        (
            {"labels": [label(name="clicked")] * 2},
            "must differ. Received: label 'clicked' twice",
        ),
        (
            {"non_id_type_features": [dense(2, "age")] * 2},
            "must differ. Received: non-id type feature 'age' twice",
        ),
        (
            {"id_type_features": [label()]},
            "id_type_features must hold IDTypeFeature or IDTypeFeatureWithSingleID",
        ),
        (
            {"non_id_type_features": [np.zeros(2)]},
            "non_id_type_features must hold NonIDTypeFeature. Received: dtype=float64",
        ),
        ({"labels": [single()]}, "labels must hold Label"),
        ({"meta": 3}, r"meta must be bytes or text.*3 \(int\)"),
    ],
)
def test_parts_that_make_no_batch_are_rejected(parts, message):
    arguments = {"id_type_features": [single()], "requires_grad": False} | parts
    with pytest.raises(BatchError, match=message):
        PersiaBatch(**arguments)


@pytest.mark.parametrize("error", [BatchError, RuntimeError, ValueError])
def test_training_without_labels_is_rejected(error):
    with pytest.raises(error, match="requires_grad=True must have labels"):
        PersiaBatch([single()])


def test_meta_that_is_text_becomes_its_bytes():
    batch = PersiaBatch([single()], requires_grad=False, meta="d\u00e9j\u00e0")
    assert batch.meta == "d\u00e9j\u00e0".encode()
    assert PersiaBatch.from_bytes(batch.to_bytes()).meta == batch.meta


@given(st.lists(ids, max_size=20))
def test_the_ids_of_each_sample_can_be_had_as_they_were_given(samples):
    feature = IDTypeFeature("item", samples)
    assert [ids.tolist() for ids in feature.data] == [ids.tolist() for ids in samples]
    assert all(ids.base is not None for ids in feature.data)  # views


def test_the_ids_of_a_feature_with_one_a_sample_are_its_data():
    feature = single()
    assert feature.data is feature.ids


@pytest.mark.parametrize("cls", [IDTypeFeature, IDTypeFeatureWithSingleID])
def test_name_and_data_the_wrong_way_round_are_recognised(cls):
    data = np.arange(2, dtype=np.uint64)
    with pytest.raises(BatchError, match="name comes first, then the data"):
        cls(data, "item")


def test_persias_way_to_the_bytes_of_a_batch_works():
    batch = PersiaBatch([single()], labels=[label()])
    assert batch.data.to_bytes() == batch.to_bytes()
    assert PersiaBatch.from_bytes(batch.to_bytes()).to_bytes() == batch.to_bytes()


def test_names_out_of_an_array_become_plain_ones():
    (name,) = np.array(["item"])
    ids = np.arange(2, dtype=np.uint64)
    features = [
        IDTypeFeature(name, [ids]),
        IDTypeFeature.from_flat(name, ids, np.array([2], dtype=np.int32)),
        IDTypeFeatureWithSingleID(name, ids[:1]),
    ]
    for feature in features:
        labels = [Label(np.zeros(1), name)]
        batch = PersiaBatch([feature], labels=labels)
        batch = PersiaBatch.from_bytes(batch.to_bytes())
        assert batch.id_type_features[0].name == batch.labels[0].name == "item"
    with pytest.raises(BatchError, match=r"^Id type feature 'item': sample 0 must"):
        IDTypeFeature(name, [ids.astype(np.int64)])
