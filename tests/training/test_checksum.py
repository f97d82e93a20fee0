"""Checksums of batches: what makes one another, and what does not."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torchrec import KeyedJaggedTensor

from persia_torchrec.training.checksum import checksum_of

ONES = torch.ones(4)


@dataclass
class Batch:
    dense: torch.Tensor
    name: str = "a"


def ids(*values, lengths=(1, 2)):
    return KeyedJaggedTensor(
        ["item"], torch.tensor(values), lengths=torch.tensor(lengths)
    )


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (ONES, ONES.clone(), 2 * ONES),
        (ONES, torch.ones(4, requires_grad=True), torch.ones(2, 2)),
        (ONES, ONES.clone(), torch.ones(4, dtype=torch.float64)),
        ({"x": ONES, "n": 3}, [ONES, "text"], {"x": -ONES}),
        (Batch(ONES), Batch(ONES, "b"), Batch(ONES + 1)),
        (ids(1, 2, 3), ids(1, 2, 3), ids(1, 2, 3, lengths=(2, 1))),
        (np.arange(3), torch.arange(3), np.arange(3) + 1),
        (ONES.bfloat16(), ONES.bfloat16(), -ONES.bfloat16()),
    ],
)
def test_batches_of_the_same_values_have_one_checksum(one, same, other):
    assert checksum_of(one) == checksum_of(same)
    assert checksum_of(one) != checksum_of(other)


@pytest.mark.parametrize("batch", [None, "text", 7, [], torch.ones(3).to_sparse()])
def test_a_batch_without_a_tensor_on_the_host_has_none(batch):
    assert checksum_of(batch) is None


def test_lengths_that_are_made_of_offsets_count_as_those():
    of_offsets = KeyedJaggedTensor(
        ["item"], torch.tensor([1, 2, 3]), offsets=torch.tensor([0, 1, 3])
    )
    assert checksum_of(of_offsets) == checksum_of(ids(1, 2, 3))


def test_of_a_large_tensor_its_shape_and_some_values_count():
    large = torch.zeros(100_000)
    changed = large.clone()
    changed[0] = 1
    assert checksum_of(large) != checksum_of(changed)
    assert checksum_of(large) != checksum_of(torch.zeros(100_001))
