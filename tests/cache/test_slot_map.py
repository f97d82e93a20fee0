"""The map against dicts and lists that do the same, in the same order."""

import numpy as np
import pytest

from persia_torchrec.cache import slot_map
from persia_torchrec.cache.slot_map import WALK, WALKED, SlotMap, Snapshot
from persia_torchrec.errors import BatchError, CheckpointError, ConfigError
from persia_torchrec.routing.route import FeatureColumns, farmhash64, route_features
from tests.cache.slot_model import SlotModel, moved

TABLES = ("a", "b", "c")


def group_of(ids_T, num_servers=1):
    """Return unique ids of tables as a route gives them, and how often each comes."""
    num = len(ids_T)
    zeros, tables = np.zeros(num, np.uint64), np.arange(num, dtype=np.uint64)
    columns = FeatureColumns(tables, tables, zeros, zeros, zeros, zeros)
    starts = np.cumsum([0, *map(len, ids_T)])
    ids = np.concatenate(ids_T).astype(np.uint64)
    of_one = np.zeros(num, np.int64)
    route = route_features(ids, starts, columns, of_one, zeros, num_servers)
    [group], [counts] = route.by_group([TABLES[:num]])
    return group, counts


class Both:
    """A map and its model, which do the same and must return the same."""

    def __init__(self, rng):
        self.rng = rng
        self.tables = TABLES[: rng.integers(1, 4)]
        given = int(rng.integers(1, 80)), self.tables, int(rng.integers(1, 4))
        self.map, self.model = SlotMap(*given), SlotModel(*given)
        self.num_ids, self.flights = int(rng.integers(2, 200)), []

    def run(self, num_steps):
        calls = [self.assign] * 6 + [self.release] * 5
        calls += [self.take_dirty, self.mark_dirty, self.redirty, self.resume]
        calls += [self.forget, self.forget_slots, self.find]
        for k in self.rng.integers(0, len(calls), num_steps):
            calls[k]()
            assert self.map.counters == self.model.counters()
            assert self.map._state[WALKED] == self.model.walked

    def ids(self, most):
        popular = self.rng.zipf(1.2, self.rng.integers(0, most + 1)) % self.num_ids
        return farmhash64(popular.astype(np.uint64))

    def assign(self):
        most = 2 * self.map.num_slots // len(self.tables) + 1
        given = [self.ids(most) for _ in self.tables]
        group, counts = group_of(given, self.map.num_servers)
        if len(group.ids) > self.map.num_slots:
            with pytest.raises(BatchError, match=f"{len(group.ids)} rows"):
                self.map.assign(group, counts)
            return
        got, expected = self.map.assign(group, counts), self.model.assign(group, counts)
        if expected is None:
            assert got is None
            return
        slots, *moves = expected
        assert got.slots.tolist() == slots
        assert [moved(got.missed), moved(got.left)] == moves
        self.flights.append(got.slots)

    def some(self):
        if not self.flights:
            return np.zeros(0, np.int32)
        return self.flights[self.rng.integers(len(self.flights))]

    def release(self):
        if self.flights:
            slots = self.flights.pop(self.rng.integers(len(self.flights)))
            trained = bool(self.rng.integers(2))
            self.map.release(slots, trained=trained)
            self.model.release(slots.tolist(), trained=trained)

    def take_dirty(self):
        most = int(self.rng.integers(0, self.map.num_slots + 1))
        assert moved(self.map.take_dirty(most)) == self.model.take_dirty(most)

    def mark_dirty(self):
        slots = self.some()
        self.map.mark_dirty(slots)
        self.model.mark_dirty(slots.tolist())

    def redirty(self):
        server = int(self.rng.integers(self.map.num_servers))
        some = [self.some()[::2], self.some()[1::4]]
        self.map.redirty(server, some)
        self.model.redirty(server, np.concatenate(some).tolist())

    def forget(self):
        table = self.tables[self.rng.integers(len(self.tables))]
        ids = np.unique(self.ids(9))
        match self.rng.integers(9):
            case 0:
                self.map.forget(), self.model.forget()
            case 1:
                self.map.forget(table), self.model.forget(table)
            case _:
                self.map.forget(table, ids), self.model.forget(table, ids.tolist())

    def forget_slots(self):
        slots = np.append(self.some()[::3], np.int32(-1))
        self.map.forget_slots(slots)
        self.model.forget_slots(slots.tolist())

    def find(self):
        assert moved(self.map.rows()) == self.model.rows()
        for t, table in enumerate(self.tables):
            ids = self.ids(9)
            expected = [self.model.slot_of.get((t, i), -1) for i in ids.tolist()]
            assert self.map.slots_of(table, ids).tolist() == expected

    def resume(self):
        kept, old = self.map.snapshot(), self.map
        self.map = SlotMap(old.num_slots, old.tables, old.num_servers)
        self.model = self.model.resumed()
        assert moved(self.map.restore(kept)) == self.model.rows()
        self.flights = []


def check_batches(seeds, num_steps):
    for seed in seeds:
        Both(np.random.default_rng(seed)).run(num_steps)


def test_all_results_are_those_of_the_model():
    check_batches(range(15), 60)


def test_all_results_are_those_of_the_model_when_lines_are_full(monkeypatch):
    monkeypatch.setattr(slot_map, "LOAD", 0.99)
    check_batches(range(100, 115), 60)


@pytest.mark.long
@pytest.mark.parametrize("load", [0.55, 0.99])
def test_all_results_are_those_of_the_model_in_a_million_steps(load, monkeypatch):
    monkeypatch.setattr(slot_map, "LOAD", load)
    check_batches(range(1000, 1500), 1000)


def test_the_hand_passes_by_few_slots_though_all_rows_were_used():
    slots = SlotMap(1000, ("a",), 1)
    group, counts = group_of([np.arange(1000)])
    for _ in range(5):
        slots.release(slots.assign(group, counts).slots, trained=False)
    others, counts = group_of([np.arange(2000, 2010)])
    assert len(slots.assign(others, counts).missed.slots) == 10
    assert slots._state[WALKED] == 10 * WALK


def test_a_row_that_is_used_stays_longer():
    slots = SlotMap(4, ("a",), 1)
    for ids in ([0, 1, 2, 3], [0, 2], [4, 5]):
        slots.release(slots.assign(*group_of([np.array(ids)])).slots, trained=False)
    assert slots.slots_of("a", np.arange(6, dtype=np.uint64)).tolist() == (
        [0, -1, 2, -1, 1, 3]
    )


def test_a_slot_takes_at_most_32_bytes():
    assert SlotMap(100_000, TABLES, 2).size_bytes <= 32 * 100_000


def test_counts_stay_at_their_greatest():
    slots = SlotMap(1, ("a",), 1)
    group, _ = group_of([np.array([7])])
    for _ in range(3):
        got = slots.assign(group, np.array([2**32 - 1], np.uint32))
        slots.release(got.slots, trained=True)
    assert slots.take_dirty(1).counts.tolist() == [2**32 - 1]


def test_without_counts_each_row_comes_once():
    slots = SlotMap(2, ("a",), 1)
    group, _ = group_of([np.array([7])])
    assert slots.assign(group, None).missed.counts.tolist() == [1]


def test_a_batch_of_other_tables_or_servers_is_rejected():
    group, counts = group_of([np.array([7])], 2)
    with pytest.raises(BatchError, match=r"\('b',\) on 2 servers.*\('a',\) on 2"):
        SlotMap(8, ("b",), 2).assign(group, counts)
    with pytest.raises(BatchError, match=r"on 1 servers.*on 2"):
        SlotMap(8, ("a",), 1).assign(group, counts)


def test_no_more_batches_than_pins_can_count_are_in_flight(monkeypatch):
    monkeypatch.setattr(slot_map, "_MOST_FLIGHTS", 2)
    slots = SlotMap(8, ("a",), 1)
    got = [slots.assign(*group_of([np.array([7])])) for _ in range(3)]
    assert got[2] is None
    slots.release(got[0].slots, trained=False)
    assert slots.assign(*group_of([np.array([7])])) is not None


@pytest.mark.parametrize("num_slots", [0, 2**31])
def test_a_map_has_slots_that_int32_can_tell_apart(num_slots):
    with pytest.raises(ConfigError, match="1 to 2147483647 slots"):
        SlotMap(num_slots, ("a",), 1)


def snapshot_of(num_slots):
    slots = SlotMap(num_slots, ("a", "b"), 1)
    slots.assign(*group_of([np.arange(3), np.arange(2)]))
    slots.forget("a", np.arange(2, dtype=np.uint64))
    return slots.snapshot()


def damaged(column, row, value):
    kept = snapshot_of(8)
    kept.records[row, column] = value
    return kept


@pytest.mark.parametrize(
    ("num_slots", "kept"),
    [
        (4, snapshot_of(8)),
        (8, Snapshot(snapshot_of(8).records, np.array([9, 0, 2], np.uint64))),
        (8, Snapshot(snapshot_of(8).records, np.array([0, 0, 3], np.uint64))),
        (8, damaged(0, 1, 10**9)),
        (8, damaged(0, 3, 1)),
        (8, damaged(1, 2, 7 << 32)),
        (8, damaged(0, 4, 0)),
    ],
)
def test_what_is_no_snapshot_of_such_a_map_is_rejected(num_slots, kept):
    with pytest.raises(CheckpointError, match=f"5 used slots for {num_slots}"):
        SlotMap(num_slots, ("a", "b"), 1).restore(kept)


def test_a_map_that_is_used_is_not_restored():
    slots = SlotMap(8, ("a", "b"), 1)
    slots.assign(*group_of([np.arange(3), np.arange(2)]))
    with pytest.raises(CheckpointError, match="of which 5 were used"):
        slots.restore(snapshot_of(8))
