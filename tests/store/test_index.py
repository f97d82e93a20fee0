import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from persia_torchrec.embedding.optim import SGD
from persia_torchrec.jit.kernel import NO_LOG
from persia_torchrec.store.index import (
    BOUNDARY,
    ENTRIES,
    LIMIT,
    NEW,
    NOT_FOUND,
    OLD,
    Index,
    add_entry,
    find_slot,
    grow_a_little,
    hash_id,
    index_at,
    likely_slot,
    remove_entry,
)
from persia_torchrec.store.loops import find_slots
from persia_torchrec.store.memory import (
    MISSING,
    OWNER_SHIFT,
    STORE,
    Arenas,
    PrivateMemory,
    StoreAt,
    build_layout,
    rows_at,
)
from persia_torchrec.table import TableSpec
from tests.support.consistency import check_index
from tests.support.strategies import ids_of_one_hash

LAST_HASH = 2**32 - 1
NUM_LINES = 32
"""Lines of an empty index."""
ENTRIES_A_LINE = 8
ROOM_A_LINE = 0.56 * ENTRIES_A_LINE
ROOM_A_LINE_AT_THE_LIMIT = 0.58 * ENTRIES_A_LINE
ROOM_A_LINE_WHILE_MOVING = (0.56 + 1 / 16) * ENTRIES_A_LINE
CHUNK = 32
"""Ids that the store adds after one call of ``grow_a_little``."""

TABLE = TableSpec(name="item", dim=1, optimizer=SGD(0.1))


class Rows:
    """An index, and rows of two owners with nothing but headers: id i is at slot i."""

    def __init__(
        self, ids: list[int], owners: list[int] | None = None, capacity: int = 2000
    ) -> None:
        self.ids = np.array(ids, dtype=np.uint64)
        owners = [1] * len(ids) if owners is None else owners
        self.owners = np.array(owners, dtype=np.uint64)
        self.layouts = {
            owner: build_layout(TABLE, owner - 1, has_metadata=False)
            for owner in sorted({1, *owners})
        }
        self.arenas = Arenas(len(ids), PrivateMemory())
        self.arenas.add(3)
        self.arenas.words[0][:, 0] = self.ids
        self.arenas.words[0][:, 1] = self.owners << OWNER_SHIFT
        self.directory = self.arenas.directory
        self.hashes = [
            np.uint64(hash_id(id_, owner))
            for id_, owner in zip(self.ids, self.owners, strict=True)
        ]
        self.index = Index(capacity, PrivateMemory())
        self.addresses = np.zeros(6, dtype=np.uint64)

    @property
    def store(self) -> StoreAt:
        nothing = np.zeros((1, 15), dtype=np.uint64)
        tally = np.zeros(1, dtype=np.int64)
        arrays = (self.index.lines, self.index.cursor, self.directory, nothing, tally)
        return StoreAt(*arrays, NO_LOG)

    @property
    def cursor(self) -> list[int]:
        return self.index.cursor.tolist()

    @property
    def is_growing(self) -> bool:
        return self.cursor[BOUNDARY] != 0

    def grow(self, num_new: int) -> None:
        grow_a_little(self.store, num_new)

    def add(self, slots: list[int]) -> None:
        """Add slots as the store does, a chunk at a time."""
        for start in range(0, len(slots), CHUNK):
            chunk = slots[start : start + CHUNK]
            self.grow(len(chunk))
            at = index_at(self.store)
            for slot in chunk:
                entry = int(self.hashes[slot]) << 32 | slot + 1
                add_entry(at, np.uint64(entry))
            self.index.cursor[ENTRIES] += np.uint64(len(chunk))

    def remove(self, slots: list[int]) -> None:
        at = index_at(self.store)
        for slot in slots:
            remove_entry(at, self.hashes[slot], np.uint64(slot))
            self.index.cursor[ENTRIES] -= np.uint64(1)

    def find(self, slot: int, *, owner: int | None = None, hash_=None) -> int | None:
        """Look for the id of a slot, by itself."""
        owner = int(self.owners[slot]) if owner is None else owner
        rows = rows_at(self.store, self.layouts[owner])
        at = index_at(self.store)
        hash_ = self.hashes[slot] if hash_ is None else hash_
        found = find_slot(at, rows, self.ids[slot], hash_)
        return None if found == NOT_FOUND else int(found)

    def found(self, slots: np.ndarray | None = None) -> set[int]:
        """Return which of the ids are found; each is at its slot or nowhere."""
        slots = np.arange(len(self.ids)) if slots is None else slots
        at_their_slots = set()
        for owner, layout in self.layouts.items():
            wanted = slots[self.owners[slots] == owner]
            self.addresses[:] = [*(array.ctypes.data for array in self.store[:5]), 1]
            layout[STORE] = self.addresses.ctypes.data
            found = find_slots(layout, self.ids[wanted])
            is_there = found != MISSING
            assert np.array_equal(found[is_there], wanted[is_there])
            at_their_slots |= set(wanted[is_there].tolist())
        return at_their_slots

    def check(self) -> None:
        """Every entry can be reached, and there is room enough to find it soon."""
        check_index(self.index)
        old, new, boundary, num_entries, limit, _ = self.cursor
        assert old <= new <= limit
        assert old == new or boundary != 0
        most = ROOM_A_LINE_WHILE_MOVING * old + CHUNK
        is_last = new == limit
        assert num_entries <= (ROOM_A_LINE_AT_THE_LIMIT * limit if is_last else most)

    def slots_by_line(self, start: int, num: int) -> list[set[int]]:
        """Return which slots some lines hold."""
        lines = self.index.lines[start : start + num].tolist()
        return [{entry % 2**32 - 1 for entry in line if entry} for line in lines]


def crowd() -> Rows:
    """Return ids many of which share a hash, or stand where slabs and lines end.

    With 32 lines and slabs of 8, a slab begins at each quarter of the hashes. The home
    of many is the line before or behind such an edge, and they fill some lines more.
    """
    edges = [quarter * 2**30 + by for quarter in (1, 2, 3) for by in (-1, 0, 1)]
    hashes = [0, 1, 2, LAST_HASH - 2, LAST_HASH - 1, LAST_HASH, *edges]
    ids, owners = [], []
    for owner in (1, 2):
        for hash_ in hashes:
            ids += ids_of_one_hash(hash_, owner, 8)
        ids += [0, 2**64 - 1, *range(1, 100)]
        owners += [owner] * (len(ids) - len(owners))
    places = np.random.default_rng(0).permutation(len(ids))
    return Rows([ids[i] for i in places], [owners[i] for i in places])


CROWD = crowd()
NUM_IDS = len(CROWD.ids)
CLUSTERS = [
    [slot for slot in range(NUM_IDS) if abs(int(CROWD.hashes[slot]) - edge) < 3]
    for edge in (0, 2**30, 2**31, 3 * 2**30, LAST_HASH)
]
starts = st.integers(0, NUM_IDS - 1)


class IndexMachine(RuleBasedStateMachine):
    """Any order of changes agrees with a set, whether the index grows or not."""

    @initialize(start=starts, num=st.integers(120, 150))
    def begin(self, start, num):
        self.rows = CROWD
        self.rows.index = Index(2000, PrivateMemory())
        self.present = set()
        self.add(start, num)

    def some(self, start, num):
        return [(start + i) % NUM_IDS for i in range(num)]

    @rule(start=starts, num=st.sampled_from([1, 1, 2, 3, 8, 40]))
    def add(self, start, num):
        slots = [slot for slot in self.some(start, num) if slot not in self.present]
        self.rows.add(slots)
        self.present |= set(slots)

    @rule(start=starts, num=st.sampled_from([1, 1, 2, 5, 40]))
    def remove(self, start, num):
        slots = [slot for slot in self.some(start, num) if slot in self.present]
        self.rows.remove(slots)
        self.present -= set(slots)

    @rule(
        cluster=st.sampled_from(CLUSTERS),
        start=starts,
        num=st.sampled_from([1, 3, 9, 48]),
        is_added=st.booleans(),
    )
    def change_lines_that_are_full(self, cluster, start, num, *, is_added):
        slots = {cluster[(start + i) % len(cluster)] for i in range(num)}
        if is_added:
            self.rows.add(sorted(slots - self.present))
            self.present |= slots
        else:
            self.rows.remove(sorted(slots & self.present))
            self.present -= slots

    @precondition(lambda self: self.rows.is_growing)
    @rule(start=starts, num=st.sampled_from([1, 5, 40]), is_added=st.booleans())
    def change_while_it_grows(self, start, num, is_added):
        (self.add if is_added else self.remove)(start, num)

    @rule(num_new=st.integers(0, 6))
    def grow(self, num_new):
        self.rows.grow(num_new)

    @rule()
    def clear(self):
        self.rows.index = Index(2000, PrivateMemory())
        self.present = set()

    @invariant()
    def same_ids(self):
        self.rows.check()
        assert self.rows.cursor[ENTRIES] == len(self.present)
        assert self.rows.found() == self.present


TestIndex = pytest.mark.slow(IndexMachine.TestCase)


@pytest.mark.slow
def test_every_id_is_found_and_can_leave_at_every_stage_of_a_stretch():
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 2**64, 50_000, dtype=np.uint64)
    rows = Rows(ids.tolist(), capacity=len(ids))
    present: set[int] = set()
    num_stretches = num_stages = 0
    for start in range(0, len(ids), CHUNK):
        was_growing = rows.is_growing
        slots = list(range(start, min(start + CHUNK, len(ids))))
        rows.add(slots)
        present |= set(slots)
        num_stretches += rows.is_growing and not was_growing
        num_stages += rows.is_growing
        if start % (40 * CHUNK) == 0:
            leaving = [slot for slot in slots if slot % 5 == 0]
            rows.remove(leaving)
            present -= set(leaving)
            rows.check()
            assert rows.found() == present
        else:
            some = rng.integers(0, len(ids), 200)
            assert rows.found(some) == present & set(some.tolist())
    rows.check()
    assert rows.found() == present
    assert num_stretches > 12
    assert num_stages > 300


def test_an_index_grows_a_few_lines_at_a_time():
    ids = np.random.default_rng(2).integers(0, 2**64, 10_000, dtype=np.uint64)
    rows = Rows(ids.tolist(), capacity=len(ids))
    rows.add(list(range(6000)))
    while rows.is_growing:
        rows.grow(0)
    old = rows.cursor[OLD]
    rows.add(list(range(6000, int(ROOM_A_LINE * old) + 1)))
    assert rows.is_growing
    boundaries = [rows.cursor[BOUNDARY]]
    while rows.is_growing:
        rows.grow(0)
        boundaries.append(rows.cursor[BOUNDARY])
        rows.check()
    moved = -np.diff(boundaries) * old / 2**32
    assert len(moved) > 10
    assert (moved > 0).all()
    np.testing.assert_allclose(moved[:-1], 8, atol=1e-4)
    assert moved[-1] < 8.1
    assert rows.cursor[OLD] == rows.cursor[NEW] >= 1.25 * old


def test_an_index_grows_by_what_a_large_request_needs_and_no_further_than_its_limit():
    rows = Rows(list(range(1000)), capacity=1000)
    rows.grow(500)
    assert 0 <= rows.cursor[NEW] - 500 / ROOM_A_LINE <= 2
    assert not rows.is_growing
    for start in range(0, 1000, 100):
        rows.add(list(range(start, start + 100)))
        rows.check()
    while rows.is_growing:
        rows.grow(0)
    assert rows.cursor[OLD] == rows.cursor[NEW] == rows.cursor[LIMIT]
    assert 0 <= rows.cursor[LIMIT] - 1000 / ROOM_A_LINE_AT_THE_LIMIT <= 1
    rows.grow(100)
    assert not rows.is_growing
    assert len(rows.found()) == 1000


def test_an_index_with_room_does_not_grow():
    rows = Rows(list(range(153)))
    rows.add(list(range(100)))
    rows.grow(43)  # 0.56 of 256 places
    assert rows.cursor[:BOUNDARY] == [NUM_LINES, NUM_LINES]
    rows.grow(44)
    assert rows.cursor[NEW] > NUM_LINES
    assert rows.index.size_bytes == 64 * rows.cursor[NEW]
    assert rows.index.lines.ctypes.data % 64 == 0


@pytest.mark.parametrize("hash_", [0, 12345, LAST_HASH])
def test_many_ids_of_the_same_hash_are_distinguished(hash_):
    rows = Rows(ids_of_one_hash(hash_, 1, 500))
    assert set(rows.hashes) == {hash_}
    rows.add(list(range(500)))
    rows.check()
    assert np.count_nonzero(rows.index.lines.any(axis=1)) == 63
    assert [rows.find(slot) for slot in range(500)] == list(range(500))
    rows.remove(list(range(0, 500, 2)))
    rows.check()
    assert [rows.find(slot) for slot in range(0, 500, 2)] == [None] * 250
    assert rows.found() == set(range(1, 500, 2))
    assert np.count_nonzero(rows.index.lines.any(axis=1)) == 32


def test_entries_behind_the_last_line_are_found_moved_and_taken_out():
    rows = Rows(ids_of_one_hash(LAST_HASH, 1, 140) + list(range(30)))
    last = list(range(140))
    rows.add(last)
    assert not rows.is_growing
    assert np.count_nonzero(rows.index.lines[NUM_LINES:]) == 132
    rows.check()
    others = list(range(140, 145))
    for slot in others:
        rows.add([slot])
        rows.check()
    assert rows.is_growing
    assert rows.cursor[NEW] > NUM_LINES
    rows.remove(last[::3])
    rows.check()
    while rows.is_growing:
        rows.grow(0)
        rows.check()
    assert rows.found() == set(last) - set(last[::3]) | set(others)
    rows.remove(sorted(rows.found()))
    assert not rows.index.lines.any()


def in_lines(homes: list[int]) -> Rows:
    """Return ids, of which these are the homes, all of them in the index."""
    ids: list[int] = []
    for number, home in enumerate(homes):
        ids.append(ids_of_one_hash(home * 2**27, 1, number + 1)[number])
    rows = Rows(ids)
    rows.add(list(range(len(ids))))
    rows.check()
    return rows


def test_a_gap_is_filled_from_lines_behind_which_leave_gaps_in_their_turn():
    rows = in_lines([*[8] * 8, *[9] * 8, 8, 9, *[10] * 7])
    lines = [set(range(8)), set(range(8, 16)), set(range(16, 24)), {24}]
    assert rows.slots_by_line(8, 4) == lines
    rows.remove([5])  # 16 comes from two lines behind, and 24 into its place
    lines = [{*range(8), 16} - {5}, lines[1], {*range(17, 25)}, set()]
    assert rows.slots_by_line(8, 4) == lines
    rows.remove([8])  # 17 comes back; nothing has gone past that line
    lines = [lines[0], {*range(9, 16), 17}, set(range(18, 25)), set()]
    assert rows.slots_by_line(8, 4) == lines
    rows.remove([0])  # all others are where they began
    lines[0] -= {0}
    assert rows.slots_by_line(8, 4) == lines
    assert rows.found() == set(range(25)) - {5, 8, 0}


def test_a_gap_is_filled_from_behind_a_line_in_which_all_are_at_home():
    rows = in_lines([*[8] * 8, *[9] * 8, *[10] * 8, 8])
    assert rows.slots_by_line(8, 4)[3] == {24}
    rows.remove([3])
    assert rows.slots_by_line(8, 4) == [
        {*range(8), 24} - {3},
        set(range(8, 16)),
        set(range(16, 24)),
        set(),
    ]
    rows.check()


def test_a_gap_is_filled_from_no_further_than_the_first_line_that_was_not_full():
    rows = in_lines([*[8] * 9, *[9] * 6, *[10] * 8])
    rows.remove([0])
    first, second, third = rows.slots_by_line(8, 3)
    assert (first, second) == (set(range(1, 9)), set(range(9, 15)))
    assert third == set(range(15, 23))
    rows.check()


def test_ids_at_the_edges_are_ids_like_others():
    rows = Rows([0, 2**64 - 1, 0, 2**64 - 1], [1, 1, 2, 2])
    rows.add([0, 1, 3])
    assert [rows.find(slot) for slot in range(4)] == [0, 1, None, 3]
    rows.remove([0, 3])
    assert [rows.find(slot) for slot in range(4)] == [None, 1, None, None]


def test_an_id_of_another_table_is_another_id():
    rows = Rows([5, 5], [1, 2])
    rows.add([0])
    assert rows.hashes[0] != rows.hashes[1]
    for hash_ in rows.hashes:
        assert rows.find(1, owner=2, hash_=hash_) is None
    assert rows.find(0, owner=2, hash_=rows.hashes[0]) is None
    rows.add([1])
    assert [rows.find(0), rows.find(1)] == [0, 1]


def test_an_id_of_hash_0_is_found_behind_an_empty_place_of_its_line():
    rows = Rows(ids_of_one_hash(0, 1, 3))
    rows.add([0, 1, 2])
    rows.remove([0])
    assert rows.found() == {1, 2}


def test_what_seems_to_be_the_slot_is_that_of_the_first_entry_of_the_hash():
    rows = Rows([*ids_of_one_hash(7, 1, 3), *ids_of_one_hash(8, 1, 1)])
    rows.add([3, 2, 0])
    at = index_at(rows.store)
    assert likely_slot(at, np.uint64(7)) == 2
    assert likely_slot(at, np.uint64(8)) == 3
    assert likely_slot(at, np.uint64(9)) == NOT_FOUND


def test_what_seems_to_be_the_slot_may_stand_behind_lines_of_others():
    rows = Rows([*ids_of_one_hash(6, 1, 16), *ids_of_one_hash(7, 1, 2)])
    rows.add(list(range(18)))
    at = index_at(rows.store)
    assert likely_slot(at, np.uint64(6)) == 0
    assert likely_slot(at, np.uint64(7)) == 16
    rows.remove([16])
    assert likely_slot(at, np.uint64(7)) == 17
    rows.remove([17])
    assert likely_slot(at, np.uint64(7)) == NOT_FOUND
