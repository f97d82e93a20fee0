import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec import KeyedJaggedTensor

from persia_torchrec.data.kjt import to_jagged_ids, to_keyed_jagged_tensor
from persia_torchrec.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID
from persia_torchrec.errors import BatchError

bags = st.lists(st.integers(0, 2**64 - 1), max_size=4)


@st.composite
def batches(draw):
    """Features of one batch: name -> one bag a sample."""
    num_samples = draw(st.integers(1, 5))
    feature = st.lists(bags, min_size=num_samples, max_size=num_samples)
    return draw(st.dictionaries(st.text(min_size=1, max_size=3), feature, min_size=1))


def kjt(values, lengths, keys=("ad", "user"), **more):
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.tensor(values, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        **more,
    )


@given(batches(), st.randoms())
def test_persias_features_come_back_from_a_keyed_jagged_tensor(batch, random):
    features = [
        IDTypeFeature(name, [np.array(bag, dtype=np.uint64) for bag in feature])
        for name, feature in batch.items()
    ]
    keys = random.sample(list(batch), random.randint(0, len(batch)))
    jagged = to_jagged_ids(to_keyed_jagged_tensor(features), keys)
    assert list(jagged) == keys
    for key, (ids_L, lengths_B) in jagged.items():
        assert ids_L.dtype == np.uint64
        assert lengths_B.dtype == np.int32
        assert lengths_B.tolist() == [len(bag) for bag in batch[key]]
        assert ids_L.tolist() == [id_ for bag in batch[key] for id_ in bag]


def test_an_id_keeps_its_64_bits():
    ids = np.array([0, 1, 2**63 - 1, 2**63, 2**64 - 1], dtype=np.uint64)
    joined = to_keyed_jagged_tensor([IDTypeFeatureWithSingleID("ad", ids)])
    assert joined.values().tolist() == [0, 1, 2**63 - 1, -(2**63), -1]
    assert np.array_equal(to_jagged_ids(joined, ["ad"])["ad"][0], ids)


def test_features_with_one_id_and_with_many_stand_in_one_tensor():
    joined = to_keyed_jagged_tensor(
        [
            IDTypeFeatureWithSingleID("user", np.array([5, 6], dtype=np.uint64)),
            IDTypeFeature(
                "ad", [np.array(bag, dtype=np.uint64) for bag in ([7, 7], [])]
            ),
        ]
    )
    assert joined.keys() == ["user", "ad"]
    assert joined.values().tolist() == [5, 6, 7, 7]
    assert joined.lengths().tolist() == [1, 1, 2, 0]


def test_features_that_nobody_asks_for_are_left_out():
    jagged = to_jagged_ids(kjt([1, 2, 3], [1, 0, 0, 2]), ["user"])
    assert list(jagged) == ["user"]
    assert jagged["user"][0].tolist() == [2, 3]


def test_features_without_ids_are_empty_bags():
    jagged = to_jagged_ids(kjt([], [0, 0, 0, 0]), ["user", "ad"])
    assert [(ids.tolist(), n.tolist()) for ids, n in jagged.values()] == [
        ([], [0, 0]),
        ([], [0, 0]),
    ]


def test_a_batch_may_have_no_samples():
    jagged = to_jagged_ids(kjt([], []), ["ad"])
    assert [len(part) for part in jagged["ad"]] == [0, 0]


def test_offsets_do_as_well_as_lengths():
    batch = KeyedJaggedTensor(
        keys=["ad", "user"],
        values=torch.tensor([1, 2, 3]),
        offsets=torch.tensor([0, 1, 1, 1, 3]),
    )
    ids, lengths = to_jagged_ids(batch, ["user"])["user"]
    assert (ids.tolist(), lengths.tolist()) == ([2, 3], [0, 2])


def test_lengths_may_be_int64():
    batch = KeyedJaggedTensor(["ad"], torch.tensor([1]), lengths=torch.tensor([1, 0]))
    assert to_jagged_ids(batch, ["ad"])["ad"][1].dtype == np.int32


def test_weights_of_ids_are_not_read():
    weighted = kjt([1, 2], [1, 0, 0, 1], weights=torch.tensor([9.0, 9.0]))
    assert to_jagged_ids(weighted, ["ad"])["ad"][0].tolist() == [1]


def test_a_missing_feature_is_named():
    with pytest.raises(
        BatchError, match=r"feature 'place'\. Received: \['ad', 'user'\]"
    ):
        to_jagged_ids(kjt([], []), ["ad", "place"])


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.uint64])
def test_ids_that_are_not_int64_are_refused(dtype):
    batch = KeyedJaggedTensor(
        ["ad"], torch.zeros(2, dtype=dtype), lengths=torch.tensor([1, 1])
    )
    with pytest.raises(BatchError, match=rf"must be int64.*Received: {dtype}"):
        to_jagged_ids(batch, ["ad"])


def test_features_of_different_numbers_of_samples_are_refused():
    batch = KeyedJaggedTensor(
        keys=["ad", "user"],
        values=torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[1], [2]],
    )
    message = r"same number of samples\. Received: \{'ad': 1, 'user': 2\}"
    with pytest.raises(BatchError, match=message):
        to_jagged_ids(batch, ["ad"])


@pytest.mark.parametrize("num_ids", [3, 5])
def test_lengths_must_sum_up_to_the_number_of_ids(num_ids):
    batch = kjt([0] * num_ids, [1, 1, 1, 1])
    message = rf"lengths must sum up to the number of ids, {num_ids}\. Received: .* 4"
    with pytest.raises(BatchError, match=message):
        to_jagged_ids(batch, ["ad"])


def test_what_happens_to_the_lengths_afterwards_does_not_matter():
    batch = kjt([1, 2], [2, 0], keys=["ad"])
    _, lengths = to_jagged_ids(batch, ["ad"])["ad"]
    batch.lengths().fill_(7)
    assert lengths.tolist() == [2, 0]
