"""What a loop reads its batches from is found, however it is wrapped."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from persia_torchrec.training.reachable import reachable


class Source:
    """What is looked for."""

    def __iter__(self):
        yield from range(3)


SOURCE = Source()


class Own:
    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        yield from self.inner


class OfGlobal:
    def __iter__(self):
        yield from SOURCE


def generated(inner):
    yield from inner


WRAPPED = {
    "itself": lambda: SOURCE,
    "attribute": lambda: Own(SOURCE),
    "twice": lambda: Own(Own(SOURCE)),
    "generator": lambda: generated(SOURCE),
    "expression": lambda: (number for number in Own(SOURCE)),
    "zip": lambda: zip(Own(SOURCE), itertools.count(), strict=False),
    "map": lambda: map(lambda number, source=SOURCE: number, [1]),
    "progress": lambda: tqdm(Own(SOURCE), disable=True),
    "global": OfGlobal,
    "list": lambda: [[1], {"a": SOURCE}],
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=list(WRAPPED))
def test_what_is_read_is_found(wrap):
    assert any(one is SOURCE for one in reachable(wrap()))


def test_a_loader_and_its_data_are_found_and_no_tensor_is_looked_into():
    data = TensorDataset(torch.ones(3))
    found = [*reachable(iter([DataLoader(data)]))]
    assert any(one is data for one in found)
    assert not any(isinstance(one, torch.Tensor) for one in found)


def test_what_is_hidden_is_not_looked_into():
    own = Own(SOURCE)
    assert not any(one is SOURCE for one in reachable([own], [own]))


def test_samples_of_a_long_list_are_not_looked_at():
    samples = [Own(n) for n in range(2000)]
    assert sum(isinstance(one, Own) for one in reachable(samples)) == 0
