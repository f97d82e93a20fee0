"""Open batches, and the slots of their rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.server.open_batches import OpenBatches
from tests.support.servers import segments_of

PER_ARRAY = 64
"""What the bound counts for a lookup, and for a table of it, besides the slots."""


def slots(num, first=0):
    return np.arange(first, first + num, dtype=np.uint32)


def begin(batches, batch, *found):
    """Begin a batch, or another lookup of it, with a table and slots each."""
    asked = segments_of([(table, range(len(slots_N))) for table, slots_N in found])
    batches.begin(batch, asked, [slots_N for _, slots_N in found])


def apply(batches, updated):
    """Return the slots of the lookups of batches, by table."""
    return [
        [found for lookup in lookups for found in lookup.by_table()]
        for lookups in batches.apply(updated)
    ]


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
            [mine], yours = apply(fast, [batch]), slow.take(batch)
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
    assert apply(batches, [(1, 1)]) == [[]]
    assert batches.counters()["open_batches"] == 1


def test_a_batch_that_has_ended_has_no_slots():
    batches = OpenBatches()
    for batch in (1, 2):
        begin(batches, (7, batch), (0, slots(3)), (1, slots(4)))
    batches.end((7, 1))
    first, second = apply(batches, [(7, 1), (7, 2)])
    assert (len(first), len(second)) == (0, 2)
    batches.end((7, 2))
    assert batches.num_slots == 0


def test_a_stream_that_never_ends_a_batch_keeps_a_bounded_number():
    batches = OpenBatches()
    for batch in range(10_000):
        begin(batches, (7, batch), (0, slots(1)))
    assert batches.counters()["open_batches_max"] <= 4097
    assert batches.num_slots <= 4096 * (1 + 2 * PER_ARRAY)


def test_batches_beyond_the_bound_have_no_slots():
    batches = OpenBatches(max_slots=2 * (2 * PER_ARRAY + 1))
    for batch in range(3):
        begin(batches, (1, batch), (0, slots(1, batch)))
    first, *others = apply(batches, [(1, batch) for batch in range(3)])
    assert first == []
    assert [int(slots_N[0]) for [(_, slots_N)] in others] == [1, 2]


def test_a_lookup_in_parts_has_the_slots_of_all():
    batches = OpenBatches()
    for table in range(2):
        begin(batches, (1, 5), (table, slots(1)))
    [found] = apply(batches, [(1, 5)])
    assert [table for table, _ in found] == [0, 1]


def test_a_stream_that_never_ends_a_batch_is_forgotten():
    batches = OpenBatches()
    for batch in range(5000):
        begin(batches, (7, batch), (0, slots(1)))
    batches.end((7, 0))
    assert apply(batches, [(7, 0)]) == [[]]
