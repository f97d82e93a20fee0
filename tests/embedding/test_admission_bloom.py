from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from persia_torchrec import AdmitBloom
from persia_torchrec.embedding.admission import count_in_bloom
from persia_torchrec.errors import StoreError
from persia_torchrec.jit.compiled import compiled, inlined_kernel
from persia_torchrec.jit.kernel import NO_LOG
from persia_torchrec.store.memory import reserve
from tests.support import strategies
from tests.support.reference import ReferenceBloom

count = inlined_kernel(count_in_bloom)


@compiled
def run_count(memory, p, ids, counts):
    return count(memory, p, ids, counts)


class BloomCounters:
    """The memory of ``AdmitBloom``, and what it says."""

    def __init__(self, num_counters, num_hashes):
        self.memory = reserve((num_counters + 7) // 8)
        self.counters = self.memory.view(np.uint8)[:num_counters]
        self.numbers = np.array([1, num_counters, num_hashes, NO_LOG], dtype=np.uint64)

    def add(self, ids, counts):
        return run_count(self.memory, self.numbers, ids, counts)


counted = st.tuples(strategies.ids, st.sampled_from([0, 1, 1, 1, 2, 7, 255, 2**63 - 1]))


def arrays(pairs):
    ids = np.array([id_ for id_, _ in pairs], dtype=np.uint64)
    return ids, np.array([count for _, count in pairs], dtype=np.int64)


class BloomMachine(RuleBasedStateMachine):
    """Counts are those of plain lists of counters, and never below the truth."""

    @initialize(num_counters=st.integers(1, 40), num_hashes=st.integers(1, 9))
    def begin(self, num_counters, num_hashes):
        self.fast = BloomCounters(num_counters, num_hashes)
        self.slow = ReferenceBloom(num_counters, num_hashes)
        self.truth: Counter[int] = Counter()

    @rule(pairs=st.lists(counted, max_size=6), times=st.sampled_from([1, 1, 5]))
    def add(self, pairs, times):
        frequencies = self.fast.add(*arrays(pairs * times)).tolist()
        assert frequencies == [self.slow.add(*pair) for pair in pairs * times]
        for (id_, count), frequency in zip(pairs * times, frequencies, strict=True):
            self.truth[id_] += count
            assert frequency >= min(self.truth[id_], 255)
        assert self.fast.counters.tolist() == self.slow.counters


TestBloom = pytest.mark.slow(BloomMachine.TestCase)
TestBloom.settings = settings(max_examples=settings().max_examples // 3)


@pytest.mark.parametrize("rate", [0.01, 0.2])
def test_as_few_ids_as_expected_find_their_counters_raised_by_others(rate):
    bloom = AdmitBloom(2, expected_ids=50_000, false_positive_rate=rate)
    counters = BloomCounters(bloom.num_counters, bloom.num_hashes)
    ids = np.random.default_rng(0).integers(0, 2**64, 90_000, dtype=np.uint64)
    counters.add(ids[:50_000], np.ones(50_000, dtype=np.int64))
    raised = counters.add(ids[50_000:], np.zeros(40_000, dtype=np.int64)) > 0
    assert np.mean(raised) == pytest.approx(rate, rel=0.2)


def test_ids_in_a_row_are_spread_over_all_counters():
    counters = BloomCounters(1000, 1)
    counters.add(np.arange(20_000, dtype=np.uint64), np.ones(20_000, dtype=np.int64))
    # 20 ids a counter; with one hash each of them is counted.
    assert counters.counters.sum() == 20_000
    assert counters.counters.min() > 0
    assert counters.counters.max() < 50


def test_counters_reserve_address_space_and_no_memory():
    counters = BloomCounters(2**40, 7)
    ids = np.array([5, 2**64 - 1], dtype=np.uint64)
    assert counters.add(ids, np.array([3, 4])).tolist() == [3, 4]
    # The counters of both, on both sides of 2**32.
    assert np.count_nonzero(counters.counters[: 2**20]) == 0


def test_more_counters_than_there_are_addresses_are_rejected():
    with pytest.raises(StoreError, match="operating system must grant address space"):
        BloomCounters(2**60, 7)
