"""Open batches: the slots of their rows, and how stale their gradients are."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec import SGD
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.server.open_batches import (
    MAX_STALENESS,
    OpenBatches,
    RowStaleness,
    SlotCache,
    find_watched,
)
from persia_torchrec.table import TableSpec
from persia_torchrec.wire.messages import TableIds
from tests.servers import ids_of

PER_ARRAY = 64
"""What the bounds count for an array besides its elements."""


def slots(num, first=0):
    return np.arange(first, first + num, dtype=np.uint32)


class SlowCache:
    """Every array that was kept, oldest batch first: what the cache should do."""

    def __init__(self, max_slots):
        self.max_slots = max_slots
        self.batches = []  # of [name, [(table, slots)]]

    def keep(self, name, table, slots_N):
        for of, arrays in self.batches:
            if of == name:
                arrays.append((table, slots_N))
                break
        else:
            self.batches.append([name, [(table, slots_N)]])
        while self.num_slots() > self.max_slots:
            del self.batches[0]

    def num_slots(self):
        arrays = [array for _, arrays in self.batches for _, array in arrays]
        return sum(len(array) + PER_ARRAY for array in arrays)

    def take(self, name, table, num):
        for of, arrays in self.batches:
            for i, (of_table, array) in enumerate(arrays):
                if (of, of_table, len(array)) == (name, table, num):
                    return arrays.pop(i)[1]
        return None

    def drop(self, name):
        self.batches = [batch for batch in self.batches if batch[0] != name]


names = st.tuples(st.integers(0, 1), st.integers(0, 3))
steps = st.lists(
    st.tuples(st.just("keep"), names, st.integers(0, 2), st.integers(0, 4))
    | st.tuples(st.just("take"), names, st.integers(0, 2), st.integers(0, 4))
    | st.tuples(st.just("drop"), names),
    max_size=40,
)


@given(steps, st.sampled_from([0, 66, 140, 300, 10_000]))
def test_slots_are_what_was_kept_within_the_bound(steps, max_slots):
    fast, slow = SlotCache(max_slots), SlowCache(max_slots)
    for number, (step, name, *args) in enumerate(steps):
        if step == "keep":
            table, num = args
            fast.keep(name, table, slots(num, number))
            slow.keep(name, table, slots(num, number))
        elif step == "take":
            mine, yours = fast.take(name, *args), slow.take(name, *args)
            assert (mine is None) == (yours is None)
            assert mine is None or mine.tolist() == yours.tolist()
        else:
            fast.pop_all(name)
            slow.drop(name)
        assert fast.size == slow.num_slots() <= max_slots


def test_a_batch_looked_up_in_several_requests_gets_the_slots_of_each():
    hints = SlotCache()
    hints.keep((1, 1), 0, slots(3))
    hints.keep((1, 1), 5, slots(3, 10))
    hints.keep((1, 1), 0, slots(3, 20))
    assert hints.take((1, 1), 0, 3).tolist() == [0, 1, 2]
    assert hints.take((1, 1), 0, 3).tolist() == [20, 21, 22]
    assert hints.take((1, 1), 0, 3) is None
    assert hints.take((1, 1), 5, 4) is None
    assert hints.take((1, 1), 5, 3).tolist() == [10, 11, 12]
    assert hints.size == 0


def test_clearing_forgets_all_slots():
    hints = SlotCache()
    hints.keep((1, 1), 0, slots(3))
    hints.clear()
    assert hints.size == 0
    assert hints.take((1, 1), 0, 3) is None


def begin(batches, batch, *nums):
    """Begin a batch of stream 7 whose tables have some ids each."""
    tables = [TableIds(table, ids_of(*range(num))) for table, num in enumerate(nums)]
    batches.begin((7, batch), tables, [slots(num) for num in nums])


def test_a_batch_that_has_ended_has_no_slots():
    batches = OpenBatches()
    for batch in (1, 2):
        begin(batches, batch, 3, 4)
    batches.end((7, 1))
    assert batches.slots.take((7, 1), 0, 3) is None
    assert batches.slots.take((7, 2), 1, 4) is not None
    batches.end((7, 2))
    assert batches.slots.size == 0


def test_a_stream_that_never_ends_a_batch_keeps_a_bounded_number():
    batches = OpenBatches()
    for batch in range(10_000):
        begin(batches, batch, 1)
    assert batches.counters()["open_batches_max"] <= 4097
    assert batches.slots.size <= 4096 * (1 + PER_ARRAY)


def is_watched(table, id_):
    return len(find_watched([TableIds(table, ids_of(id_))])) == 1


WATCHED = [
    (table, id_) for table in range(2) for id_ in range(80) if is_watched(table, id_)
]
UNWATCHED = [(0, id_) for id_ in range(80) if not is_watched(0, id_)]


def request(rows):
    """Return the ids of each table, as a request names them."""
    return [
        TableIds(table, ids_of(*(id_ for of, id_ in rows if of == table)))
        for table in sorted({table for table, _ in rows})
    ]


class SlowStaleness:
    """Remembers every update of every row: what the histogram should be."""

    def __init__(self):
        self.updates, self.pulled_at, self.histogram = [], {}, {}

    def pulled(self, batch, rows):
        self.pulled_at[batch] = (len(self.updates), rows)

    def applied(self, batch):
        since, rows = self.pulled_at.pop(batch)
        for row in rows:
            staleness = min(self.updates[since:].count(row), MAX_STALENESS)
            self.histogram[staleness] = self.histogram.get(staleness, 0) + 1
        self.updates += rows


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["pull", "apply", "drop"]),
        st.lists(st.sampled_from(WATCHED), unique=True),
        st.integers(0, 5),
    ),
    max_size=40,
)


@given(STEPS)
def test_the_histogram_is_what_a_list_of_all_updates_says(steps):
    staleness, slow, under_way = RowStaleness(), SlowStaleness(), []
    for number, (step, rows, which) in enumerate(steps):
        if step == "pull":
            staleness.pulled((3, number), request([*rows, *UNWATCHED]))
            slow.pulled(number, rows)
            under_way.append(number)
        elif under_way:
            batch = under_way.pop(which % len(under_way))
            if step == "apply":
                staleness.applied([(3, batch)])
                slow.applied(batch)
            else:
                staleness.drop((3, batch))
    expected = [slow.histogram.get(k, 0) for k in range(MAX_STALENESS + 1)]
    assert staleness.histogram.tolist() == expected


def test_one_id_in_sixteen_is_watched_and_few_share_a_counter():
    ids = np.arange(160_000, dtype=np.uint64) * np.uint64(1000)
    offsets = find_watched([TableIds(0, ids), TableIds(1, ids)])
    assert 19_000 < len(offsets) < 21_000
    assert len(np.unique(offsets)) > 0.98 * len(offsets)


def test_very_stale_rows_are_counted_together():
    staleness = RowStaleness()
    rows = request(WATCHED[:1])
    staleness.pulled((1, 0), rows)
    for batch in range(1, MAX_STALENESS + 10):
        staleness.pulled((1, batch), rows)
        staleness.applied([(1, batch)])
    staleness.applied([(1, 0)])
    assert staleness.counters()[f"staleness_{MAX_STALENESS}"] == 1
    assert staleness.counters()["staleness_0"] == MAX_STALENESS + 9


def test_batches_beyond_the_bound_are_forgotten_and_not_measured():
    staleness = RowStaleness(max_watched=2 * (PER_ARRAY + 1))
    rows = request(WATCHED[:1])
    for batch in range(3):
        staleness.pulled((1, batch), rows)
    for batch in range(3):
        staleness.applied([(1, batch)])
    assert staleness.counters() == {"staleness_0": 1, "staleness_1": 1}


def test_a_lookup_in_parts_is_measured_whole():
    staleness = RowStaleness()
    for row in WATCHED[:2]:
        staleness.pulled((1, 5), request([row]))
    staleness.applied([(1, 5)])
    assert staleness.counters() == {"staleness_0": 2}


def test_a_joint_step_is_one_update():
    staleness = RowStaleness()
    first, second = request(WATCHED[:2]), request(WATCHED[1:3])
    for step in range(2):
        staleness.pulled((1, step), first)
        staleness.pulled((2, step), second)
    for step in range(2):
        staleness.applied([(1, step), (2, step)])
    assert staleness.counters() == {"staleness_0": 4, "staleness_1": 4}


def test_a_stream_that_never_ends_a_batch_is_forgotten():
    batches = OpenBatches()
    for batch in range(5000):
        batches.begin((7, batch), request(WATCHED[:1]), [slots(1)])
    batches.end((7, 0))
    batches.staleness.applied([(7, 0)])
    assert batches.staleness.counters() == {"staleness_0": 0}


def test_a_client_adds_the_histograms_of_its_servers_up(servers):
    client = servers.client(servers.start(2, capacity_rows=10_000))
    client.add_tables([TableSpec(name="item", dim=1, optimizer=SGD(1.0))])
    assert client.staleness().tolist() == [0]
    split = client.split(np.arange(800, dtype=np.uint64))
    tables, grads = [("item", split)], [np.ones((800, 1), dtype=np.float32)]
    batches = [BatchNumber(1, number) for number in range(4)]
    for batch in batches:
        client.pull(tables, batch=batch)
    for batch in batches[:3]:
        client.outcome(client.push(tables, grads, batch))
    client.outcome(client.push([], [], batches[3]))  # given up
    counts = client.staleness().tolist()
    assert counts == [counts[0]] * 3
    assert 30 < counts[0] < 70
    assert [c["staleness_2"] > 0 for c in client.counters()] == [True, True]
