from collections import OrderedDict

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from persia_torchrec.store.recency import (
    NONE,
    RecencyLog,
    pop_oldest,
    record_of,
    touch,
)
from persia_torchrec.store.rows import Arena, address_of, free_slot

NUM_SLOTS = 5
places = st.tuples(st.integers(0, 1), st.integers(0, NUM_SLOTS - 1))


class Rows:
    """Two arenas of rows, and the log of their use."""

    def __init__(self) -> None:
        arenas = [Arena.reserve(NUM_SLOTS, words) for words in (3, 4)]
        self.arenas = arenas
        lines = [arena.directory_line() for arena in arenas]
        self.directory = np.array(lines, dtype=np.uint64)
        self.log = RecencyLog()

    def touch(self, places: list[tuple[int, int]], num_rows: int) -> None:
        """Touch rows, all within the room made at once, as one request does."""
        self.log.make_room(self.directory, len(places), num_rows)
        for arena, slot in places:
            at = (np.uint64(arena), np.uint64(slot))
            address = np.uint64(address_of(self.directory, *at))
            record = np.uint64(record_of(*at))
            touch(
                *(self.log.ring, self.log.cursor, address, np.uint64(arena + 1)),
                record,
            )

    def pop(self) -> tuple[int, int] | None:
        record = pop_oldest(self.log.ring, self.log.cursor, self.directory)
        if record == NONE:
            return None
        place = (int(record) >> 32, int(record) % 2**32)
        free_slot(self.directory, *map(np.uint64, place))
        return place


class RecencyMachine(RuleBasedStateMachine):
    """Any order of touches and removals agrees with an OrderedDict."""

    @initialize()
    def begin(self):
        self.fast = Rows()
        self.slow: OrderedDict[tuple[int, int], None] = OrderedDict()

    @rule(places=st.lists(places, max_size=8), times=st.sampled_from([1, 2, 3, 200]))
    def touch(self, places, times):
        for place in places * times:
            self.slow[place] = None
            self.slow.move_to_end(place)
        self.fast.touch(places * times, len(self.slow))

    @precondition(lambda self: self.slow)
    @rule()
    def pop(self):
        assert self.fast.pop() == self.slow.popitem(last=False)[0]

    @precondition(lambda self: not self.slow)
    @rule()
    def pop_nothing(self):
        assert self.fast.pop() is None

    @rule()
    def clear(self):
        self.begin()

    @invariant()
    def same_order(self):
        rows = self.fast.log.current_rows(self.fast.directory)
        assert rows == list(self.slow)


TestRecency = RecencyMachine.TestCase


def test_a_log_that_only_grows_is_copied_in_order_and_stays_small():
    rows = Rows()
    order = [(0, 3), (1, 0), (0, 1)]
    for _ in range(2000):
        rows.touch([(0, 1), *order, (0, 1)], 3)
        assert len(rows.log.ring) < 4096
    assert rows.log.current_rows(rows.directory) == order


def test_looking_at_the_order_does_not_change_it():
    rows = Rows()
    rows.touch([(0, 3), (1, 0)], 2)
    twice = [rows.log.current_rows(rows.directory) for _ in range(2)]
    assert twice == [[(0, 3), (1, 0)]] * 2
    assert rows.pop() == (0, 3)


def test_a_slot_that_is_used_again_is_as_young_as_its_new_row():
    rows = Rows()
    rows.touch([(0, 0), (0, 1), (0, 0), (0, 0)], 2)
    assert rows.pop() == (0, 1)
    assert rows.pop() == (0, 0)
    rows.touch([(0, 1), (0, 0)], 2)
    assert rows.log.current_rows(rows.directory) == [(0, 1), (0, 0)]
