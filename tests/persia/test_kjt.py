import numpy as np
import pytest
import torch
from hypothesis import given
from torchrec import KeyedJaggedTensor

from persia_torchrec.device.batches import TorchRecBatch
from persia_torchrec.errors import BatchError
from persia_torchrec.persia.batch import (
    DTYPES,
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia_torchrec.persia.kjt import from_torchrec, to_torchrec
from tests.support.strategies import batches


def kjt(**more):
    return KeyedJaggedTensor(
        keys=["ad", "user"],
        values=torch.tensor([7, -1, 3]),
        lengths=torch.tensor([2, 0, 1, 0], dtype=torch.int32),
        **more,
    )


def with_ids_by_length(batch):
    """Return the batch with the class of each feature as its lengths say."""
    features = [
        IDTypeFeatureWithSingleID(f.name, f.ids)
        if (f.lengths == 1).all()
        else IDTypeFeature.from_flat(f.name, f.ids, f.lengths)
        for f in batch.id_type_features
    ]
    again = PersiaBatch(
        features,
        batch.non_id_type_features,
        batch.labels,
        requires_grad=batch.requires_grad,
        meta=batch.meta,
    )
    again.batch_id = batch.batch_id
    return again


@given(batches())
def test_every_batch_comes_back_to_the_last_byte(batch):
    again = from_torchrec(to_torchrec(batch))
    assert again.to_bytes() == with_ids_by_length(batch).to_bytes()


@given(batches())
def test_tensors_have_the_shapes_types_and_memory_of_the_arrays(batch):
    tensors = to_torchrec(batch)
    assert tensors.id_features.stride() == batch.batch_size
    assert tensors.id_features.keys() == [f.name for f in batch.id_type_features]
    arrays = [part.data for part in (*batch.non_id_type_features, *batch.labels)]
    made = (*tensors.dense_features, *tensors.labels)
    for tensor, array in zip(made, arrays, strict=True):
        assert tuple(tensor.shape) == array.shape
        assert str(tensor.dtype).removeprefix("torch.") == array.dtype.name
        assert tensor.data_ptr() == array.ctypes.data or array.size == 0


def test_a_users_tensors_become_a_batch_that_can_be_sent():
    dense = torch.rand(2, 3, requires_grad=True)
    label = torch.tensor([[True], [False]])
    batch = from_torchrec(
        TorchRecBatch(id_features=kjt(), dense_features=(dense,), labels=(label,))
    )
    ad, user = batch.id_type_features
    assert [ids.tolist() for ids in ad.data] == [[7, 2**64 - 1], []]
    assert [ids.tolist() for ids in user.data] == [[3], []]
    assert np.array_equal(batch.non_id_type_features[0].data, dense.detach().numpy())
    assert batch.non_id_type_features[0].name == NonIDTypeFeature.DEFAULT_NAME
    assert batch.labels[0].data.dtype == np.bool_
    assert batch.requires_grad
    assert PersiaBatch.from_bytes(batch.to_bytes()).to_bytes() == batch.to_bytes()


def test_a_batch_moves_to_a_device_as_a_whole():
    tensors = TorchRecBatch(
        id_features=kjt(),
        dense_features=(torch.zeros(2, 1),),
        labels=(torch.zeros(2, 1),),
        meta=b"kept",
        fraction=0.25,
    )
    moved = tensors.to(torch.device("meta"))
    assert moved.id_features.values().is_meta
    assert moved.dense_features[0].is_meta
    assert moved.labels[0].is_meta
    assert (moved.meta, moved.fraction) == (b"kept", 0.25)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_batch_comes_back_from_a_gpu():
    features = [IDTypeFeature("ad", [np.array([2**64 - 1], np.uint64)])]
    dense = [NonIDTypeFeature(np.ones((1, 2), dtype)) for dtype in DTYPES]
    batch = PersiaBatch(features, dense, requires_grad=False)
    on_gpu = to_torchrec(batch).to(torch.device("cuda"), non_blocking=True)
    on_gpu.record_stream(torch.cuda.current_stream())
    again = from_torchrec(on_gpu)
    assert again.to_bytes() == with_ids_by_length(batch).to_bytes()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"id_features": kjt(weights=torch.ones(3))}, "no weights. Received: a Keyed"),
        ({"labels": ()}, "requires_grad=True must have labels"),
        (
            {"dense_features": (torch.zeros(3),)},
            "must have its 2 samples. Received: 3 in non-id type feature",
        ),
        (
            {"dense_features": (torch.zeros(2, dtype=torch.bfloat16),)},
            "A non-id type feature cannot be of bfloat16",
        ),
        (
            {"labels": (torch.zeros(2, dtype=torch.float16),)},
            "must have one of the dtypes .*Received: float16",
        ),
        ({"label_names": ("a", "b")}, "Received: 2 names for 1"),
        ({"fraction": 0.25}, "a step of its own. Received: .* the fraction 0.25"),
        ({"dense_features": (torch.tensor(3.0),)}, "samples along its first dimension"),
    ],
)
def test_tensors_that_make_no_batch_are_rejected(parts, message):
    whole = {"id_features": kjt(), "labels": (torch.zeros(2),), **parts}
    with pytest.raises(BatchError, match=message):
        from_torchrec(TorchRecBatch(**whole))


def test_names_are_kept_in_order():
    batch = PersiaBatch(
        [IDTypeFeatureWithSingleID("ad", np.zeros(1, np.uint64))],
        [NonIDTypeFeature(np.zeros(1), name) for name in ("b", "a")],
        [Label(np.zeros(1), "z")],
    )
    again = from_torchrec(to_torchrec(batch))
    assert [part.name for part in again.non_id_type_features] == ["b", "a"]
    assert [part.name for part in again.labels] == ["z"]
