"""Open batches: the slots of their rows, and how stale their gradients are."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_torchrec import SGD
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.rpc.messages import TableIds
from persia_torchrec.server.open_batches import (
    MAX_STALENESS,
    OpenBatches,
    find_watched,
)
from persia_torchrec.table import TableSpec
from tests.support.servers import ids_of

PER_ARRAY = 64
"""What the bound counts for a lookup, and for a table of it, besides the slots."""


def slots(num, first=0):
    return np.arange(first, first + num, dtype=np.uint32)


def begin(batches, batch, *found):
    """Begin a batch, or another lookup of it, with a table and slots each."""
    tables = [TableIds(table, ids_of(*range(len(slots_N)))) for table, slots_N in found]
    batches.begin(batch, tables, [slots_N for _, slots_N in found])


class SlowCache:
    """Every lookup, oldest batch first: what should be kept."""

    def __init__(self, max_slots):
        self.max_slots = max_slots
        self.batches = {}  # of lists of lookups, of lists of (table, slots)

    def begin(self, batch, *found):
        self.batches.setdefault(batch, []).append(found)
        while self.num_slots() > self.max_slots:
            del self.batches[next(iter(self.batches))]

    def num_slots(self):
        lookups = [found for lookups in self.batches.values() for found in lookups]
        arrays = [len(slots_N) for found in lookups for _, slots_N in found]
        return sum(arrays) + PER_ARRAY * (len(arrays) + len(lookups))

    def take(self, batch):
        return [array for found in self.batches.pop(batch, []) for array in found]


numbers = st.tuples(st.integers(0, 1), st.integers(0, 3))
arrays = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=3)
steps = st.lists(
    st.tuples(st.sampled_from(["begin", "apply", "end"]), numbers, arrays), max_size=40
)


@given(steps, st.sampled_from([0, 66, 140, 300, 10_000]))
def test_slots_are_what_was_kept_within_the_bound(steps, max_slots):
    fast, slow = OpenBatches(max_slots), SlowCache(max_slots)
    for number, (step, batch, nums) in enumerate(steps):
        found = [(table, slots(num, number)) for table, num in nums]
        if step == "begin":
            begin(fast, batch, *found)
            slow.begin(batch, *found)
        elif step == "apply":
            [mine], yours = fast.apply([batch]), slow.take(batch)
            assert [(t, array.tolist()) for t, array in mine] == [
                (t, array.tolist()) for t, array in yours
            ]
        else:
            fast.end(batch)
            slow.take(batch)
        assert fast.num_slots == slow.num_slots() <= max_slots


def test_clearing_forgets_all_slots():
    batches = OpenBatches()
    begin(batches, (1, 1), (0, slots(3)))
    batches.clear_slots()
    assert batches.num_slots == 0
    assert batches.apply([(1, 1)]) == [[]]
    assert batches.counters()["open_batches"] == 1


def test_a_batch_that_has_ended_has_no_slots():
    batches = OpenBatches()
    for batch in (1, 2):
        begin(batches, (7, batch), (0, slots(3)), (1, slots(4)))
    batches.end((7, 1))
    first, second = batches.apply([(7, 1), (7, 2)])
    assert (len(first), len(second)) == (0, 2)
    batches.end((7, 2))
    assert batches.num_slots == 0


def test_a_stream_that_never_ends_a_batch_keeps_a_bounded_number():
    batches = OpenBatches()
    for batch in range(10_000):
        begin(batches, (7, batch), (0, slots(1)))
    assert batches.counters()["open_batches_max"] <= 4097
    assert batches.num_slots <= 4096 * (1 + 2 * PER_ARRAY)


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


def pull(batches, batch, tables):
    batches.begin(batch, tables, [slots(len(t.ids)) for t in tables])


def staleness_of(batches):
    counters = batches.counters().items()
    return {name: num for name, num in counters if name.startswith("staleness_")}


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
    batches, slow, under_way = OpenBatches(), SlowStaleness(), []
    for number, (step, rows, which) in enumerate(steps):
        if step == "pull":
            pull(batches, (3, number), request([*rows, *UNWATCHED]))
            slow.pulled(number, rows)
            under_way.append(number)
        elif under_way:
            batch = under_way.pop(which % len(under_way))
            if step == "apply":
                batches.apply([(3, batch)])
                slow.applied(batch)
            else:
                batches.end((3, batch))
    expected = [slow.histogram.get(k, 0) for k in range(MAX_STALENESS + 1)]
    assert batches.histogram.tolist() == expected


def test_one_id_in_sixteen_is_watched_and_few_share_a_counter():
    ids = np.arange(160_000, dtype=np.uint64) * np.uint64(1000)
    offsets = find_watched([TableIds(0, ids), TableIds(1, ids)])
    assert 19_000 < len(offsets) < 21_000
    assert len(np.unique(offsets)) > 0.98 * len(offsets)


def test_very_stale_rows_are_counted_together():
    batches = OpenBatches()
    rows = request(WATCHED[:1])
    pull(batches, (1, 0), rows)
    for batch in range(1, MAX_STALENESS + 10):
        pull(batches, (1, batch), rows)
        batches.apply([(1, batch)])
    batches.apply([(1, 0)])
    assert staleness_of(batches)[f"staleness_{MAX_STALENESS}"] == 1
    assert staleness_of(batches)["staleness_0"] == MAX_STALENESS + 9


def test_batches_beyond_the_bound_are_forgotten_and_not_measured():
    batches = OpenBatches(max_slots=2 * (2 * PER_ARRAY + 1))
    rows = request(WATCHED[:1])
    for batch in range(3):
        pull(batches, (1, batch), rows)
    for batch in range(3):
        batches.apply([(1, batch)])
    assert staleness_of(batches) == {"staleness_0": 1, "staleness_1": 1}


def test_a_lookup_in_parts_is_measured_whole():
    batches = OpenBatches()
    for row in WATCHED[:2]:
        pull(batches, (1, 5), request([row]))
    batches.apply([(1, 5)])
    assert staleness_of(batches) == {"staleness_0": 2}


def test_a_joint_step_is_one_update():
    batches = OpenBatches()
    first, second = request(WATCHED[:2]), request(WATCHED[1:3])
    for step in range(2):
        pull(batches, (1, step), first)
        pull(batches, (2, step), second)
    for step in range(2):
        batches.apply([(1, step), (2, step)])
    assert staleness_of(batches) == {"staleness_0": 4, "staleness_1": 4}


def test_a_stream_that_never_ends_a_batch_is_forgotten():
    batches = OpenBatches()
    for batch in range(5000):
        pull(batches, (7, batch), request(WATCHED[:1]))
    batches.end((7, 0))
    batches.apply([(7, 0)])
    assert staleness_of(batches) == {"staleness_0": 0}


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


@settings(max_examples=20)
@given(st.integers(2**32 - 9, 2**32 - 1), st.integers(0, 20))
def test_staleness_is_right_where_the_count_of_updates_begins_again(num_before, num):
    batches, rows = OpenBatches(), request(WATCHED[:1])
    batches._num_updates[:] = num_before
    pull(batches, (1, 0), rows)
    for batch in range(1, num + 1):
        pull(batches, (1, batch), rows)
        batches.apply([(1, batch)])
    before = staleness_of(batches).get(f"staleness_{num}", 0)
    batches.apply([(1, 0)])
    assert staleness_of(batches)[f"staleness_{num}"] == before + 1
