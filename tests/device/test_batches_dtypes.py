"""Ids of a ``KeyedJaggedTensor`` in every dtype of integers."""

import numpy as np
import pytest
import torch
from torchrec import KeyedJaggedTensor

from persia_torchrec.device.batches import to_jagged_ids
from persia_torchrec.errors import BatchError

UNSIGNED = {torch.uint64: 2**64 - 1, torch.uint32: 2**32 - 1, torch.uint16: 2**16 - 1}


def ids_of(values):
    lengths = torch.tensor([len(values), 0])
    bags = to_jagged_ids(KeyedJaggedTensor(["f"], values, lengths=lengths), ["f"])
    return bags["f"].ids


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_unsigned_ids_are_widened_as_values(dtype):
    array = np.array([0, 7, UNSIGNED[dtype]], dtype=str(dtype).removeprefix("torch."))
    assert ids_of(torch.from_numpy(array)).tolist() == [0, 7, UNSIGNED[dtype]]


def test_booleans_are_ids():
    assert ids_of(torch.tensor([True, False])).tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
def test_a_batch_without_ids_may_have_any_dtype(dtype):
    assert ids_of(torch.tensor([], dtype=dtype)).tolist() == []
    with pytest.raises(BatchError, match=r"must be int64.*Use values\.long\(\)"):
        ids_of(torch.tensor([1], dtype=dtype))
