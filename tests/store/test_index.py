import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.store.index import (
    NOT_FOUND,
    add_entry,
    empty_index,
    find_slot,
    hash_of,
    remove_entry,
    with_room_for,
)
from persia_torchrec.store.memory import reserve
from persia_torchrec.store.rows import OWNER_SHIFT
from tests.strategies import ids_of_one_hash

LAST_HASH = 2**32 - 1
OWNER = np.uint64(1)

# A few hashes at both ends, so that runs of entries meet and go round the end.
hashes = st.sampled_from([0, 1, 2**31, LAST_HASH - 1, LAST_HASH])


class Index:
    """The index of one arena, with the headers of its rows."""

    def __init__(self, ids: list[int], num_buckets: int) -> None:
        self.ids = np.array(ids, dtype=np.uint64)
        self.headers = np.zeros((len(ids), 2), dtype=np.uint64)
        self.headers[:, 0] = self.ids
        self.headers[:, 1] = OWNER << OWNER_SHIFT
        self.buckets = np.zeros(num_buckets, dtype=np.uint64)

    def hash(self, slot: int) -> np.uint64:
        return np.uint64(hash_of(self.ids[slot], OWNER))

    def add(self, slot: int) -> None:
        add_entry(self.buckets, self.hash(slot), np.uint64(slot))

    def remove(self, slot: int) -> None:
        remove_entry(self.buckets, self.hash(slot), np.uint64(slot))

    def find(self, slot: int) -> int | None:
        base, stride = np.uint64(self.headers.ctypes.data), np.uint64(16)
        id_, hash_ = self.ids[slot], self.hash(slot)
        found = find_slot(self.buckets, base, stride, id_, OWNER, hash_)
        return None if found == NOT_FOUND else int(found)


@given(
    st.lists(hashes, min_size=6, max_size=6),
    st.lists(st.integers(0, 5), max_size=30),
    st.sampled_from([7, 8, 11]),
)
def test_what_is_in_the_index_is_found_and_what_was_removed_is_not(
    hashes, toggled, num_buckets
):
    ids = [ids_of_one_hash(hash_, 1, 6)[slot] for slot, hash_ in enumerate(hashes)]
    index = Index(ids, num_buckets)
    present: set[int] = set()
    for slot in toggled:
        (index.remove if slot in present else index.add)(slot)
        present ^= {slot}
        for slot_ in range(len(ids)):
            assert index.find(slot_) == (slot_ if slot_ in present else None)
        assert np.count_nonzero(index.buckets) == len(present)


@pytest.mark.parametrize("hash_", [0, 12345, LAST_HASH])
def test_many_ids_of_the_same_hash_are_told_apart(hash_):
    ids = ids_of_one_hash(hash_, 1, 500)
    index = Index(ids, 1024)
    assert {int(index.hash(slot)) for slot in range(len(ids))} == {hash_}
    for slot in range(len(ids)):
        index.add(slot)
    assert [index.find(slot) for slot in range(len(ids))] == list(range(500))
    for slot in range(0, len(ids), 2):
        index.remove(slot)
    assert [index.find(slot) for slot in range(0, len(ids), 2)] == [None] * 250
    assert [index.find(slot) for slot in range(1, len(ids), 2)] == list(
        range(1, len(ids), 2)
    )


def test_an_id_of_another_table_is_another_id():
    ids = [5, 5]
    index = Index(ids, 8)
    index.headers[1, 1] = np.uint64(2) << OWNER_SHIFT
    index.add(0)
    hash_ = np.uint64(hash_of(index.ids[1], np.uint64(2)))
    assert hash_ != index.hash(0)
    base = np.uint64(index.headers.ctypes.data)
    for hash_to_try in (hash_, index.hash(0)):
        found = find_slot(
            *(index.buckets, base, np.uint64(16)),
            *(index.ids[1], np.uint64(2), hash_to_try),
        )
        assert found == NOT_FOUND


def test_an_index_that_grows_keeps_every_entry_and_stays_within_its_load():
    ids = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)
    index = Index(ids.tolist(), 1)
    index.buckets = empty_index()
    num_copies = 0
    for slot in range(len(ids)):
        buckets = with_room_for(index.buckets, slot + 1)
        num_copies += buckets is not index.buckets
        index.buckets = buckets
        index.add(slot)
    assert slot < 0.7 * len(index.buckets) < 1.5 * slot
    assert num_copies < 12
    assert [index.find(slot) for slot in range(len(ids))] == list(range(len(ids)))


def test_an_index_with_room_is_not_copied():
    buckets = reserve(1000)
    assert with_room_for(buckets, 700) is buckets
    assert with_room_for(buckets, 701) is not buckets
