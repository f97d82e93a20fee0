import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrec import KeyedJaggedTensor

from persia_torchrec.device.batches import JaggedBatch, to_jagged_ids
from persia_torchrec.errors import BatchError
from persia_torchrec.persia.batch import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    PersiaBatch,
)
from persia_torchrec.persia.kjt import to_torchrec

bags = st.lists(st.integers(0, 2**64 - 1), max_size=4)


@st.composite
def batches(draw):
    """Features of one batch: name -> one bag a sample."""
    num_samples = draw(st.integers(1, 5))
    feature = st.lists(bags, min_size=num_samples, max_size=num_samples)
    return draw(st.dictionaries(st.text(min_size=1, max_size=3), feature, min_size=1))


def joined_features(features):
    return to_torchrec(PersiaBatch(features, requires_grad=False)).id_features


def kjt(values, lengths, keys=("ad", "user"), **more):
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.tensor(values, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        **more,
    )


@pytest.mark.slow
@given(batches(), st.randoms())
def test_persias_features_come_back_from_a_keyed_jagged_tensor(batch, random):
    features = [
        IDTypeFeature(name, [np.array(bag, dtype=np.uint64) for bag in feature])
        for name, feature in batch.items()
    ]
    keys = random.sample(list(batch), random.randint(0, len(batch)))
    jagged = to_jagged_ids(joined_features(features), keys)
    assert list(jagged) == keys
    for key, (ids_L, lengths_B, _) in jagged.items():
        assert ids_L.dtype == np.uint64
        assert lengths_B.dtype == np.int32
        assert lengths_B.tolist() == [len(bag) for bag in batch[key]]
        assert ids_L.tolist() == [id_ for bag in batch[key] for id_ in bag]


def test_an_id_keeps_its_64_bits():
    ids = np.array([0, 1, 2**63 - 1, 2**63, 2**64 - 1], dtype=np.uint64)
    joined = joined_features([IDTypeFeatureWithSingleID("ad", ids)])
    assert joined.values().tolist() == [0, 1, 2**63 - 1, -(2**63), -1]
    assert np.array_equal(to_jagged_ids(joined, ["ad"])["ad"][0], ids)


def test_features_with_one_id_and_with_many_are_in_one_tensor():
    joined = joined_features(
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


def test_features_that_are_not_asked_for_are_left_out():
    jagged = to_jagged_ids(kjt([1, 2, 3], [1, 0, 0, 2]), ["user"])
    assert list(jagged) == ["user"]
    assert jagged["user"][0].tolist() == [2, 3]


def test_features_without_ids_are_empty_bags():
    jagged = to_jagged_ids(kjt([], [0, 0, 0, 0]), ["user", "ad"])
    assert [(ids.tolist(), n.tolist()) for ids, n, _ in jagged.values()] == [
        ([], [0, 0]),
        ([], [0, 0]),
    ]


def test_a_batch_may_have_no_samples():
    jagged = to_jagged_ids(kjt([], []), ["ad"])
    assert [len(part) for part in jagged["ad"][:2]] == [0, 0]


def test_offsets_do_as_well_as_lengths():
    batch = KeyedJaggedTensor(
        keys=["ad", "user"],
        values=torch.tensor([1, 2, 3]),
        offsets=torch.tensor([0, 1, 1, 1, 3]),
    )
    ids, lengths, _ = to_jagged_ids(batch, ["user"])["user"]
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
        JaggedBatch(kjt([], []), ["ad", "place"])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_narrower_ids_are_widened_as_values(dtype):
    values = torch.tensor([3, -1 if dtype.is_signed else 255], dtype=dtype)
    batch = KeyedJaggedTensor(["ad"], values, lengths=torch.tensor([1, 1]))
    jagged = JaggedBatch(batch, ["ad"])
    ids = jagged.take()["ad"].ids
    assert ids.dtype == np.uint64
    assert ids.view(np.int64).tolist() == values.tolist()
    assert torch.equal(jagged.ids("ad"), values)  # as they were given
    assert jagged.ids("ad").dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_ids_that_are_not_integers_are_rejected(dtype):
    batch = KeyedJaggedTensor(
        ["ad"], torch.zeros(2, dtype=dtype), lengths=torch.tensor([1, 1])
    )
    with pytest.raises(BatchError, match=rf"must be int64.*Received: {dtype}"):
        to_jagged_ids(batch, ["ad"])


def test_a_key_that_comes_twice_is_rejected():
    batch = kjt([1, 2, 3], [1, 1, 1], keys=["ad", "user", "ad"])
    message = r"keys must be unique.*Received: \['ad', 'user', 'ad'\]"
    for keys in (["ad"], ["user"]):
        with pytest.raises(ValueError, match=message):
            to_jagged_ids(batch, keys)


def tensor_dict(**features):
    """Build a TensorDict of ids and lengths by feature."""
    return TensorDict(
        {
            key: torch.nested.nested_tensor_from_jagged(
                torch.tensor(ids), lengths=torch.tensor(lengths)
            )
            for key, (ids, lengths) in features.items()
        }
    )


def test_a_tensor_dict_is_taken_feature_by_feature():
    batch = tensor_dict(extra=([9], [0, 1]), user=([4], [1, 0]), ad=([7, 8], [0, 2]))
    jagged = JaggedBatch(batch, ["ad", "user"])
    taken = {
        key: (of_key.ids.tolist(), of_key.lengths.tolist())
        for key, of_key in jagged.take().items()
    }
    assert taken == {"ad": ([7, 8], [0, 2]), "user": ([4], [1, 0])}
    assert jagged.ids("ad").tolist() == [7, 8]


def test_a_feature_that_a_tensor_dict_lacks_is_named():
    with pytest.raises(BatchError, match=r"feature 'user'\. Received: \['ad'\]"):
        JaggedBatch(tensor_dict(ad=([7], [1])), ["ad", "user"])


def test_features_of_different_numbers_of_samples_are_rejected():
    batch = KeyedJaggedTensor(
        keys=["ad", "user"],
        values=torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[1], [2]],
    )
    message = r"same number of samples, or inv.*Received: \{'ad': 1, 'user': 2\}"
    with pytest.raises(BatchError, match=message):
        to_jagged_ids(batch, ["ad"])


@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 1, 1, 0, 0]])
def test_there_must_be_a_length_for_each_key_and_sample(lengths):
    batch = kjt([0] * sum(lengths), lengths)
    message = rf"a length for each key and sample, .*Received: {len(lengths)} lengths"
    with pytest.raises(BatchError, match=message):
        to_jagged_ids(batch, ["ad"])


@pytest.mark.parametrize("of_meta", ["values", "lengths"])
def test_ids_of_the_meta_device_are_an_error(of_meta):
    parts = {
        name: torch.ones(
            2, dtype=torch.int64, device="meta" if of_meta == name else "cpu"
        )
        for name in ("values", "lengths")
    }
    batch = KeyedJaggedTensor(["ad", "user"], **parts, stride=1)
    with pytest.raises(BatchError, match=r"Received: a tensor on the meta device"):
        JaggedBatch(batch, ["ad"])


@pytest.mark.parametrize("num_ids", [3, 5])
def test_lengths_must_sum_up_to_the_number_of_ids(num_ids):
    batch = kjt([0] * num_ids, [1, 1, 1, 1])
    message = rf"lengths must sum up to the number of ids, {num_ids}\. Received: .* 4"
    with pytest.raises(BatchError, match=message):
        to_jagged_ids(batch, ["ad"])


def test_lengths_may_be_changed_afterwards():
    batch = kjt([1, 2], [2, 0], keys=["ad"])
    _, lengths, _ = to_jagged_ids(batch, ["ad"])["ad"]
    batch.lengths().fill_(7)
    assert lengths.tolist() == [2, 0]


VARIABLE = {
    "keys": ["ad", "user"],
    "values": torch.tensor([1, 2, 3, 4, 5]),
    "lengths": torch.tensor([2, 0, 1, 2]),
    "stride_per_key_per_rank": [[3], [1]],
}


def test_samples_that_are_kept_once_are_repeated():
    samples = torch.tensor([[2, 0, 1, 0], [0, 0, 0, 0]])
    batch = KeyedJaggedTensor(**VARIABLE, inverse_indices=(["ad", "user"], samples))
    jagged = to_jagged_ids(batch, ["user", "ad"])
    assert jagged["ad"].lengths.tolist() == [1, 2, 0, 2]
    assert jagged["ad"].ids.tolist() == [3, 1, 2, 1, 2]
    assert jagged["user"].lengths.tolist() == [2, 2, 2, 2]
    assert jagged["user"].ids.tolist() == [4, 5] * 4


def test_the_keys_of_the_repeats_may_have_another_order():
    samples = torch.tensor([[0, 0], [2, 1]])
    batch = KeyedJaggedTensor(**VARIABLE, inverse_indices=(["user", "ad"], samples))
    assert to_jagged_ids(batch, ["ad"])["ad"].ids.tolist() == [3]


@given(st.randoms(use_true_random=False), st.integers(0, 6))
def test_repeated_samples_have_the_bags_that_they_repeat(random, num_samples):
    bags = {
        key: [
            [random.randrange(99) for _ in range(random.randrange(4))]
            for _ in range(random.randint(1, 4))
        ]
        for key in ("ad", "user")
    }
    flat = [bag for key in bags.values() for bag in key]
    samples = [
        [random.randrange(len(kept)) for _ in range(num_samples)]
        for kept in bags.values()
    ]
    ids = torch.tensor([id_ for bag in flat for id_ in bag], dtype=torch.int64)
    batch = KeyedJaggedTensor(
        keys=list(bags),
        values=ids,
        weights=ids / 2,
        lengths=torch.tensor([len(bag) for bag in flat]),
        stride_per_key_per_rank=[[len(kept)] for kept in bags.values()],
        inverse_indices=(list(bags), torch.tensor(samples, dtype=torch.int64)),
    )
    jagged = to_jagged_ids(batch, bags)
    for (key, kept), of_key in zip(bags.items(), samples, strict=True):
        repeated = [kept[sample] for sample in of_key]
        expected = [id_ for bag in repeated for id_ in bag]
        assert jagged[key].lengths.tolist() == [len(bag) for bag in repeated]
        assert jagged[key].ids.tolist() == expected
        weights = JaggedBatch(batch, jagged).of_feature(key, batch.weights())
        assert weights.tolist() == [id_ / 2 for id_ in expected]


def test_repeats_of_a_sample_that_is_not_there_are_rejected():
    samples = torch.tensor([[2, 3], [0, 0]])
    batch = KeyedJaggedTensor(**VARIABLE, inverse_indices=(["ad", "user"], samples))
    message = r"'ad': inverse_indices must be in \[0, 3\)\. Received: 2 to 3\."
    with pytest.raises(BatchError, match=message):
        to_jagged_ids(batch, ["ad"])


def test_a_batch_gives_the_slice_of_each_feature():
    batch = kjt([1, 2, 3], [1, 0, 0, 2], weights=torch.tensor([7.0, 8.0, 9.0]))
    jagged = JaggedBatch(batch, ["user"])
    assert jagged.of_feature("user", jagged.weights()).tolist() == [8.0, 9.0]
    assert jagged.ids("user").tolist() == [2, 3]


def test_a_batch_without_weights_reports_what_to_do():
    with pytest.raises(BatchError, match=r"with weights, one for each id\..*weights="):
        JaggedBatch(kjt([], []), ["ad"]).weights()
