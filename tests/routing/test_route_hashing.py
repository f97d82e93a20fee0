import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.routing.route import add_prefix, farmhash64, hash_stack
from tests.support import reference
from tests.support.strategies import id_arrays


@pytest.mark.parametrize(
    ("id_", "buckets"),
    [
        (12, [2, 18]),
        (23, [5, 10]),
        (34, [0, 11]),
        (56, [6, 17]),
        (78, [7, 12]),
        (90, [8, 16]),
    ],
)
def test_hashes_equal_those_of_persias_hash_stack(id_, buckets):
    assert hash_stack(np.array([id_], dtype=np.uint64), 2, 10).tolist() == buckets


@given(id_arrays(), st.integers(1, 5), st.integers(1, 2**40))
def test_the_buckets_of_each_round_are_apart(ids_L, rounds, size):
    before = ids_L.copy()
    buckets = hash_stack(ids_L, rounds, size).reshape(-1, rounds)
    assert buckets.tolist() == [
        reference.hash_stack(id_, rounds, size) for id_ in ids_L.tolist()
    ]
    assert (buckets // np.uint64(size) == np.arange(rounds, dtype=np.uint64)).all()
    assert np.array_equal(ids_L, before)


@given(id_arrays())
def test_an_id_is_hashed_as_its_eight_bytes_are_by_farmhash(ids_L):
    assert farmhash64(ids_L).tolist() == [
        reference.farmhash64(id_) for id_ in ids_L.tolist()
    ]


def test_prefixed_ids_are_persias():
    ids = np.array([16000000000000000], dtype=np.uint64)
    assert add_prefix(ids, 450359962737049600, 12).tolist() == [452849163854938115]


@given(id_arrays(), st.integers(1, 63), st.data())
def test_a_prefix_takes_the_top_bits_and_the_id_the_rest(ids_L, prefix_bits, data):
    group = data.draw(st.integers(0, 2**prefix_bits - 2))
    prefixed_L = add_prefix(ids_L, (group + 1) << (64 - prefix_bits), prefix_bits)
    bits_left = 64 - prefix_bits
    assert [id_ >> bits_left for id_ in prefixed_L.tolist()] == [group + 1] * len(ids_L)
    assert [id_ % 2**bits_left for id_ in prefixed_L.tolist()] == [
        id_ % (2**bits_left - 1) for id_ in ids_L.tolist()
    ]


def test_ids_are_not_changed_by_their_prefix():
    ids = np.array([2**64 - 1, 5], dtype=np.uint64)
    add_prefix(ids, 1 << 56, 8)
    assert ids.tolist() == [2**64 - 1, 5]
