import itertools
from collections import OrderedDict

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

from persia_torchrec.jit.kernel import NO_LOG
from persia_torchrec.store.memory import (
    Arenas,
    PrivateMemory,
    RowsAt,
    free_slot,
    locate_row,
)
from persia_torchrec.store.recency import (
    COMPACTING,
    HEAD,
    NUM_LFU_CLASSES,
    READ,
    SIZE,
    TAIL,
    WRITE,
    RecencyLogs,
    classify,
    classify_all,
    pop_oldest,
    touch,
)
from tests.support.consistency import rows_oldest_first

NUM_SLOTS = 40
NUM_CLASSES = 3
WORDS_PER_SEGMENT = 5
"""Words of a request of one row: a mark and a slot."""

RowAt = tuple[int, int]


class Rows:
    """Two arenas of rows, and the logs of their use."""

    def __init__(
        self, num_classes: int = 1, capacity: int = 2 * NUM_SLOTS, num_slots=NUM_SLOTS
    ) -> None:
        self.arenas = Arenas(num_slots, PrivateMemory())
        for words_per_row in (3, 4):
            self.arenas.add(words_per_row)
        self.directory = self.arenas.directory
        self.logs = RecencyLogs(capacity, num_classes, PrivateMemory())
        self.tick = 0

    def begin_request(self, num_touches: int) -> None:
        self.tick += 1
        self.logs.make_room(self.directory, num_touches)

    def touch(self, place: RowAt, class_: int = 0) -> None:
        arena, slot = map(np.uint64, place)
        tags = np.uint64(self.arenas.tags[int(arena)].ctypes.data)
        base, stride = np.uint64(0), np.uint64(0)
        some = np.uint64(8), np.uint64(8), np.uint64(8), np.uint64(8), False
        place = base, stride, tags, np.uint64(0), arena, arena + np.uint64(1)
        rows = RowsAt(*place, 1, 0, *some, False)
        address = np.uint64(locate_row(self.directory, arena, slot))
        logs = np.uint64(self.logs.directory.ctypes.data)
        touch(logs, np.uint64(class_), rows, address, slot, np.uint64(self.tick))

    def request(self, arena: int, slots: list[int], class_: int = 0) -> None:
        """Touch rows of one arena, each once."""
        self.begin_request(len(slots))
        for slot in slots:
            self.touch((arena, slot), class_)

    def pop(self) -> RowAt | None:
        row = pop_oldest(self.logs.directory, self.directory)
        if row == 2**64 - 1:
            return None
        place = (int(row) >> 32, int(row) % 2**32)
        self.free(place)
        return place

    def free(self, place: RowAt) -> None:
        free_slot(self.directory, *map(np.uint64, place), NO_LOG)

    def order(self) -> list[RowAt]:
        return rows_oldest_first(self.logs, self.directory)

    def words(self, class_: int = 0) -> int:
        return int(self.logs.directory[class_, TAIL])

    def is_compacting(self, class_: int = 0) -> bool:
        return bool(self.logs.directory[class_, COMPACTING])


arenas = st.integers(0, 1)
slots = st.integers(0, NUM_SLOTS - 1)
classes = st.integers(0, NUM_CLASSES - 1)
few = st.lists(slots, max_size=4, unique=True)


class RecencyMachine(RuleBasedStateMachine):
    """Any order of requests and removals agrees with a dictionary per class."""

    @initialize(
        num_classes=st.sampled_from([1, NUM_CLASSES]),
        capacity=st.sampled_from([1, 2 * NUM_SLOTS]),
        num_requests=st.integers(0, 40),
        is_compacted=st.sampled_from([True, True, False]),
    )
    def begin(self, num_classes, capacity, num_requests, *, is_compacted):
        self.fast = Rows(num_classes, capacity)
        self.slow: list[OrderedDict[RowAt, None]] = [
            OrderedDict() for _ in range(num_classes)
        ]
        for number in itertools.count():
            compacts = self.fast.is_compacting() or not is_compacted
            if number >= num_requests and compacts:
                break
            self.touch_many(number % 2, number * 3 % NUM_SLOTS, 3, 0)

    def use(self, place, class_):
        class_ %= len(self.slow)
        self.fast.touch(place, class_)
        for rows in self.slow:
            rows.pop(place, None)
        self.slow[class_][place] = None

    def pop_one(self):
        rows = next((rows for rows in self.slow if rows), None)
        expected = None if rows is None else rows.popitem(last=False)[0]
        assert self.fast.pop() == expected
        return expected

    @rule(arena=arenas, slots=few, class_=classes)
    def touch(self, arena, slots, class_):
        self.fast.begin_request(len(slots))
        for slot in slots:
            self.use((arena, slot), class_)

    @rule(
        arena=arenas,
        start=slots,
        num=st.sampled_from([1, 1, 5, NUM_SLOTS]),
        class_=classes,
    )
    def touch_many(self, arena, start, num, class_):
        self.touch(arena, [(start + i) % NUM_SLOTS for i in range(num)], class_)

    @rule(arena=arenas, slots=few)
    def touch_in_classes_of_their_own(self, arena, slots):
        self.fast.begin_request(len(slots))
        for number, slot in enumerate(slots):
            self.use((arena, slot), number)

    @rule(arena=arenas, num=st.sampled_from([1, 1, 1, 2, 2, 100]), class_=classes)
    def make_rows_for_which_others_leave(self, arena, num, class_):
        self.fast.begin_request(num)
        for _ in range(num):
            place = self.pop_one()
            if place is not None and place[0] == arena:
                self.use(place, class_)

    @rule(num_touches=st.integers(0, 4))
    def make_room(self, num_touches):
        self.fast.begin_request(num_touches)

    @rule(num=st.sampled_from([1, 1, 2, 10]))
    def pop(self, num):
        for _ in range(num):
            self.pop_one()

    @precondition(lambda self: self.fast.is_compacting())
    @rule(by=st.integers(-1, 1))
    def pop_to_where_compaction_writes(self, by):
        line = self.fast.logs.directory[0]
        for _ in range(max(int(line[WRITE]) - int(line[HEAD]) + by, 0)):
            self.pop_one()

    @rule(places=st.lists(st.tuples(arenas, slots), max_size=10))
    def free(self, places):
        for place in places:
            for rows in self.slow:
                if rows.pop(place, 0) is None:
                    self.fast.free(place)

    @rule()
    def clear(self):
        self.begin(len(self.slow), 2 * NUM_SLOTS, 0, is_compacted=False)

    @invariant()
    def same_order(self):
        assert self.fast.order() == [row for rows in self.slow for row in rows]
        for line in self.fast.logs.directory:
            assert line[HEAD] <= line[TAIL] <= line[SIZE]
            if line[COMPACTING]:
                assert line[HEAD] <= line[WRITE] <= line[READ] <= line[TAIL]


TestRecency = pytest.mark.slow(RecencyMachine.TestCase)


def compacted(num_words: int) -> float:
    """Return words at which a log of so many words that are current stays."""
    return 4 / 3 * (1.5 * num_words + 64)


@pytest.mark.parametrize(
    ("num_rows", "num_touches", "shuffles", "words_per_row"),
    [
        (1000, 1000, False, 1.004),
        (1000, 1000, True, 1.004),
        (1000, 50, False, 1.08),
        (30, 1, False, WORDS_PER_SEGMENT),
        (30, 1, True, WORDS_PER_SEGMENT),
        (50, 2, False, 3),
        (50, 2, True, WORDS_PER_SEGMENT),  # the other row may be used again
    ],
)
def test_a_log_stays_short_while_its_rows_take_turns(
    num_rows, num_touches, shuffles, words_per_row
):
    # A record per row and a mark per request, 1.5 times as much when compaction starts,
    # and a third of that comes while it runs: 2 words per row for long requests.
    rows = Rows(1, num_rows, num_slots=num_rows)
    rng = np.random.default_rng(0)
    order = np.arange(num_rows)
    most = 0
    memory = rows.logs.directory[0, 0]
    for _ in range(40 if num_rows < 100 else 12):
        if shuffles:
            rng.shuffle(order)
        for start in range(0, num_rows, num_touches):
            rows.request(0, order[start : start + num_touches].tolist())
            most = max(most, rows.words())
    assert most <= compacted(words_per_row * num_rows) + 2 * (num_touches + 4)
    assert rows.order() == [(0, slot) for slot in order]
    assert rows.logs.directory[0, 0] == memory
    assert rows.logs.size_bytes == 4 * rows.words()


def test_the_log_of_a_full_store_stays_short_while_rows_come_and_go():
    rows = Rows(1, 30, num_slots=30)
    rows.request(0, list(range(30)))
    for _ in range(1000):
        rows.begin_request(1)
        rows.touch(rows.pop())
        assert rows.words() <= compacted(WORDS_PER_SEGMENT * 30) + 2 * (1 + 4)
    assert len(rows.order()) == 30


def test_a_log_that_grows_is_compacted_each_time_it_has_grown_by_half():
    rows = Rows(1, 4000, num_slots=4000)
    num_compactions = 0
    for start in range(0, 4000, 10):
        was_compacting = rows.is_compacting()
        rows.request(0, list(range(start, start + 10)))
        num_compactions += rows.is_compacting() and not was_compacting
    assert 4 <= num_compactions <= 11
    assert rows.order() == [(0, slot) for slot in range(4000)]


def log_under_compaction(num_written: int = 1) -> Rows:
    """Return a log of 60 rows in segments of three, of which a little is compacted."""
    rows = Rows(1, 60, num_slots=60)
    for number in itertools.count():
        was_compacting = rows.is_compacting()
        start = number % 20 * 3
        rows.request(0, [start, start + 1, start + 2])
        if number > 20 and rows.is_compacting() and not was_compacting:
            break
    while rows.logs.directory[0, WRITE] < num_written:
        rows.begin_request(0)
    assert rows.is_compacting()
    return rows


@pytest.mark.parametrize("num_written", [1, 20, 70])
@pytest.mark.parametrize("num_popped", [1, 5, 12, 40, 59])
def test_rows_leave_in_order_while_the_log_is_compacted(num_written, num_popped):
    rows = log_under_compaction(num_written)
    order = rows.order()
    assert len(order) == 60
    num_written = int(rows.logs.directory[0, WRITE])
    assert num_written < 2 * 59
    assert [rows.pop() for _ in range(num_popped)] == order[:num_popped]
    # A segment of three takes seven words, the first four of them its mark.
    num_compacted = num_written // 7 * 3 + max(num_written % 7 - 4, 0)
    assert rows.is_compacting() == (num_popped <= num_compacted)
    assert rows.order() == order[num_popped:]
    rows.request(1, [0])
    for _ in range(40):
        assert rows.order() == [*order[num_popped:], (1, 0)]
        rows.begin_request(0)
    assert not rows.is_compacting()


@pytest.mark.slow
def test_a_request_larger_than_the_capacity_fits():
    rows = Rows(1, 1, num_slots=20_000)
    memory = rows.logs.directory[0, 0]
    rows.request(1, [3, 1])
    rows.request(0, list(range(20_000)))
    assert rows.logs.directory[0, 0] != memory
    rows.request(1, [1])
    rows.request(0, list(range(19_999, -1, -1)))
    expected = [(1, 3), (1, 1), *((0, slot) for slot in range(19_999, -1, -1))]
    assert rows.order() == expected
    assert rows.words() <= rows.logs.directory[0, SIZE]


def test_a_log_that_is_enlarged_while_it_is_compacted_keeps_its_order():
    rows = log_under_compaction()
    order = rows.order()
    rows.begin_request(10_000)
    assert not rows.is_compacting()
    assert rows.logs.directory[0, SIZE] >= 10_000
    rows.touch((1, 7))
    assert rows.order() == [*order, (1, 7)]


def test_looking_at_the_order_does_not_change_it():
    rows = Rows()
    rows.request(0, [3])
    rows.request(1, [0])
    assert [rows.order() for _ in range(2)] == [[(0, 3), (1, 0)]] * 2
    assert rows.pop() == (0, 3)


def test_a_slot_that_is_used_again_is_as_young_as_its_new_row():
    rows = Rows()
    rows.request(0, [0, 1])
    rows.request(0, [0])
    assert [rows.pop(), rows.pop(), rows.pop()] == [(0, 1), (0, 0), None]
    rows.request(0, [1, 0])
    assert rows.order() == [(0, 1), (0, 0)]


def test_a_row_is_only_in_the_class_in_which_it_was_last_used():
    rows = Rows(NUM_LFU_CLASSES)
    rows.request(0, [0, 1], class_=1)
    rows.request(0, [0], class_=NUM_LFU_CLASSES - 1)
    rows.request(0, [2], class_=0)
    assert rows.order() == [(0, 2), (0, 1), (0, 0)]
    rows.request(0, [0], class_=0)
    assert rows.order() == [(0, 2), (0, 0), (0, 1)]


def test_a_class_of_frequencies_is_exact_below_16_and_a_power_of_two_above():
    for frequency in [
        *range(200),
        *(2**k + by for k in range(8, 32) for by in (-1, 0)),
    ]:
        expected = frequency if frequency < 16 else 12 + int(np.log2(frequency))
        assert classify(np.uint64(frequency)) == expected
        assert classify_all(np.array([frequency], dtype=np.uint32)) == expected
    assert classify(np.uint64(2**32 - 1)) == NUM_LFU_CLASSES - 1
    assert classify_all(np.array([2**32 - 1], dtype=np.uint32)) == NUM_LFU_CLASSES - 1
