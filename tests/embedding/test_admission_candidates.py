from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from persia_torchrec.embedding.admission import (
    CHAIN,
    COUNT,
    NEWER,
    OLDER,
    AdmitFrequency,
    count_candidates,
    forget_candidates,
)
from persia_torchrec.embedding.setting import Sightings
from persia_torchrec.jit.compiled import compiled, inlined_kernel
from persia_torchrec.jit.kernel import NO_LOG
from persia_torchrec.store.memory import reserve
from tests.support import strategies

pytestmark = pytest.mark.slow

count = inlined_kernel(count_candidates)
forget = inlined_kernel(forget_candidates)


@compiled
def run_count(memory, p, ids, counts):
    return count(memory, p, ids, counts)


@compiled
def run_forget(memory, p, ids):
    forget(memory, p, ids)


class Candidates:
    """The memory of ``AdmitFrequency``, and what it says."""

    def __init__(self, max_rows):
        self.memory = reserve(AdmitFrequency(1, max_rows).num_memory_words())
        self.numbers = np.array([1, max_rows, NO_LOG, 0], dtype=np.uint64)
        self.admission = AdmitFrequency(1, max_rows)
        self.cells = self.memory[: 4 * (max_rows + 1)].view(np.uint32).reshape(-1, 8)
        self.heads = self.memory[4 * (max_rows + 1) :].view(np.uint32)
        self.max_rows = max_rows

    @property
    def num_waiting(self):
        return len(self.oldest_first())

    def add(self, ids, counts):
        self.numbers[-1] += np.uint64(2**24)  # the next request
        return run_count(self.memory, self.numbers, ids, counts)

    def forget(self, ids):
        run_forget(self.memory, self.numbers, ids)

    def oldest_first(self):
        waiting = []
        cell = int(self.cells[0, NEWER])
        while cell:
            waiting.append((int(self.memory[4 * cell]), int(self.cells[cell, COUNT])))
            cell = int(self.cells[cell, NEWER])
        return waiting

    def sightings(self):
        return self.admission.sightings(
            self.memory[: self.admission.num_used_words(self.memory)]
        )

    def check(self):
        """Raise AssertionError if ring, chains and number do not agree."""
        ids = [id_ for id_, _ in self.oldest_first()]
        assert len(ids) == len(set(ids)) <= self.max_rows
        num_chained = 0
        for cell in self.heads[self.heads != 0].tolist():
            while cell:
                num_chained += 1
                newer, older = self.cells[cell, [NEWER, OLDER]]
                assert self.cells[newer, OLDER] == cell == self.cells[older, NEWER]
                assert num_chained <= len(ids)
                cell = int(self.cells[cell, CHAIN])
        assert num_chained == len(ids)


counted = st.tuples(
    strategies.ids, st.sampled_from([1, 1, 1, 1, 2, 7, 2**31, 2**40, 2**63 - 1])
)


def arrays(pairs):
    ids = np.array([id_ for id_, _ in pairs], dtype=np.uint64)
    return ids, np.array([count for _, count in pairs], dtype=np.int64)


class CandidateMachine(RuleBasedStateMachine):
    """Any order of counted agrees with an OrderedDict that forgets its oldest."""

    @initialize(max_rows=st.integers(1, 9))
    def begin(self, max_rows):
        self.fast = Candidates(max_rows)
        self.slow: OrderedDict[int, int] = OrderedDict()
        self.max_rows = max_rows

    @rule(pairs=st.lists(counted, max_size=6), times=st.sampled_from([1, 1, 5]))
    def add(self, pairs, times):
        expected = []
        for id_, count in pairs * times:
            if id_ not in self.slow and len(self.slow) == self.max_rows:
                self.slow.popitem(last=False)
            self.slow[id_] = min(self.slow.get(id_, 0) + count, 2**32 - 1)
            self.slow.move_to_end(id_)
            expected.append(self.slow[id_])
        assert self.fast.add(*arrays(pairs * times)).tolist() == expected

    @rule(ids=strategies.id_arrays(10))
    def forget(self, ids):
        for id_ in ids.tolist():
            self.slow.pop(id_, None)
        self.fast.forget(ids)

    @rule(data=st.data())
    def forget_one_that_waits(self, data):
        if self.slow:
            id_ = data.draw(st.sampled_from(list(self.slow)))
            del self.slow[id_]
            self.fast.forget(np.array([id_], dtype=np.uint64))

    @invariant()
    def same_ids_counts_and_order(self):
        assert self.fast.oldest_first() == list(self.slow.items())
        self.fast.check()

    @rule(max_rows=st.integers(1, 12), data=st.data())
    def remember(self, max_rows, data):
        """Move all to another memory, in any order, or overwrite this one."""
        sightings = self.fast.sightings()
        order = data.draw(st.permutations(range(len(sightings.keys))))
        number = self.fast.numbers[-1]
        if data.draw(st.booleans()):
            self.fast, self.max_rows = Candidates(max_rows), max_rows
            self.fast.numbers[-1] = number
        mixed = Sightings(*(column[order] for column in sightings))
        self.fast.admission.remember(self.fast.memory, mixed)
        while len(self.slow) > self.max_rows:
            self.slow.popitem(last=False)

    @rule(ids=strategies.id_arrays(10))
    def find(self, ids):
        ids = np.unique(ids)
        found = self.fast.admission.sightings_of(self.fast.memory, ids)
        assert found.keys.tolist() == ids.tolist()
        assert found.values.tolist() == [self.slow.get(i, 0) for i in ids.tolist()]


TestCandidates = CandidateMachine.TestCase
TestCandidates.settings = settings(max_examples=settings().max_examples // 3)


def test_many_ids_are_counted_one_by_one():
    ids = np.random.default_rng(0).integers(0, 2**64, 30_000, dtype=np.uint64)
    counters = Candidates(len(ids))
    ones = np.ones(len(ids), dtype=np.int64)
    for total in (1, 2):
        assert (counters.add(ids, ones) == total).all()
    assert counters.num_waiting == len(ids)
    counters.forget(ids[::2])
    totals = counters.add(ids, ones)
    assert (totals[::2] == 1).all()
    assert (totals[1::2] == 3).all()
    counters.check()


def test_counters_reserve_address_space_and_no_memory():
    counters = Candidates(2**32 - 2)  # 160 GiB, if it were memory
    ids = np.array([5, 2**64 - 1], dtype=np.uint64)
    assert counters.add(ids, np.array([3, 4])).tolist() == [3, 4]


def test_arrays_that_may_not_be_written_to_are_taken_as_they_are():
    ids = np.frombuffer(np.uint64(7).tobytes(), dtype=np.uint64)
    counts = np.frombuffer(np.int64(2).tobytes(), dtype=np.int64)
    assert not ids.flags.writeable
    counters = Candidates(2)
    assert counters.add(ids, counts).tolist() == [2]
    counters.forget(ids)
    assert counters.num_waiting == 0


def test_check_notices_a_broken_ring():
    counters = Candidates(3)
    counters.add(np.arange(3, dtype=np.uint64), np.ones(3, dtype=np.int64))
    counters.cells[2, OLDER] = 3
    with pytest.raises(AssertionError):
        counters.check()
