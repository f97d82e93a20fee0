"""The estimate of how many different ids there were."""

import numpy as np
import pytest

from persia_torchrec.persia.slots import DistinctIds
from tests.support.servers import ids_of
from tests.support.threads import all_at_once


def estimate_of(*arrays):
    distinct = DistinctIds()
    for ids in arrays:
        distinct.add(ids)
    return distinct.estimate()


def test_nothing_is_no_id():
    assert estimate_of() == 0
    assert estimate_of(ids_of()) == 0


def test_few_ids_learn_exactly():
    assert round(estimate_of(ids_of(5))) == 1
    assert round(estimate_of(ids_of(0, 2**64 - 1, 7, 8, 7, 0))) == 4


@pytest.mark.parametrize("num", [1000, 10_000, 20_000, 40_000, 80_000, 1_000_000])
@pytest.mark.parametrize("first", [0, 2**40])
def test_the_error_is_that_of_the_method(num, first):
    ids = np.arange(first, first + num, dtype=np.uint64)
    assert estimate_of(ids) == pytest.approx(num, rel=4 * 0.0081)


def test_the_errors_are_about_the_truth():
    rng = np.random.default_rng(1)
    errors = [
        estimate_of(rng.integers(0, 2**64, 50_000, dtype=np.uint64)) / 50_000 - 1
        for _ in range(40)
    ]
    assert abs(np.mean(errors)) < 4 * 0.0081 / 40**0.5
    assert 0.5 * 0.0081 < np.std(errors) < 1.5 * 0.0081


def test_neither_order_nor_repeats_nor_batches_matter():
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 2**64, 3000, dtype=np.uint64)
    shuffled = rng.permutation(np.concatenate([ids, ids[:500]]))
    assert estimate_of(ids) == estimate_of(*np.split(shuffled, 7))


def test_threads_lose_no_id():
    rng = np.random.default_rng(3)
    pieces = [rng.integers(0, 2**64, 20_000, dtype=np.uint64) for _ in range(4)]
    distinct = DistinctIds()
    all_at_once(lambda piece: [distinct.add(p) for p in np.split(piece, 100)], pieces)
    assert distinct.estimate() == estimate_of(*pieces)
