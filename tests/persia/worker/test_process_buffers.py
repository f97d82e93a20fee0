import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from persia_torchrec.client.client import BatchNumber
from persia_torchrec.client.codec import NOTHING, PushOutcome
from persia_torchrec.errors import DataflowError, LostBatchError
from persia_torchrec.lookup.bags import Bags
from persia_torchrec.lookup.sharded_lookup import BatchFeatures, RoutedBatch
from persia_torchrec.persia.worker.process import AwaitingGradient, IdBuffer
from tests.support.servers import DEADLINE_S
from tests.support.threads import all_at_once

CAPACITY = 3
EXPIRES_S = 10.0
loaders = st.integers(0, 1)


class Clock:
    """Time that passes when the test says so."""

    now = 100.0

    def __call__(self):
        return self.now


def bags_of(number):
    ids, lengths = np.array([number], dtype=np.uint64), np.ones(1, dtype=np.int32)
    return {"item": Bags(ids, lengths)}


def number_of(bags):
    return int(bags["item"].ids[0])


class BufferMachine(RuleBasedStateMachine):
    """Any order of calls agrees with one dictionary a loader."""

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.buffer = IdBuffer(CAPACITY, EXPIRES_S, self.clock)
        self.kept = {0: OrderedDict(), 1: OrderedDict()}
        self.gone = []
        self.num_put = 0

    @rule(loader=loaders)
    def put(self, loader):
        kept = self.kept[loader]
        if len(kept) == CAPACITY:
            latest = self.clock.now - EXPIRES_S
            expired = [n for n, since in kept.items() if since < latest]
            for number in expired:
                del kept[number]
                self.gone.append((loader, number))
        self.num_put += 1
        is_kept = self.buffer.put(loader, self.num_put, bags_of(self.num_put))
        assert is_kept == (len(kept) < CAPACITY)
        if is_kept:
            kept[self.num_put] = self.clock.now

    @rule(seconds=st.floats(0, EXPIRES_S))
    def wait(self, seconds):
        self.clock.now += seconds

    @precondition(lambda self: any(self.kept.values()))
    @rule(data=st.data())
    def remove(self, data):
        loader = data.draw(st.sampled_from([n for n in (0, 1) if self.kept[n]]))
        number = data.draw(st.sampled_from(sorted(self.kept[loader])))
        self.buffer.remove(loader, number)
        del self.kept[loader][number]
        self.gone.append((loader, number))

    @invariant()
    def holds_what_it_should(self):
        assert len(self.buffer) == sum(map(len, self.kept.values()))
        for loader, kept in self.kept.items():
            for number in kept:
                assert number_of(self.buffer.peek(loader, number)) == number
        for loader, number in self.gone[-3:]:
            with pytest.raises(DataflowError):
                self.buffer.peek(loader, number)


TestIdBuffer = BufferMachine.TestCase


def test_an_unknown_batch_is_named_with_what_may_have_happened():
    buffer = IdBuffer(CAPACITY, EXPIRES_S)
    message = r"Batch 7 of data loader 2 .*buffered_data_expired_sec \(10 s\)"
    with pytest.raises(DataflowError, match=message):
        buffer.peek(2, 7)


def test_a_batch_of_another_loader_is_not_found():
    buffer = IdBuffer(CAPACITY, EXPIRES_S)
    buffer.put(0, 1, bags_of(1))
    with pytest.raises(LostBatchError):
        buffer.peek(1, 1)


def test_removing_what_is_gone_does_nothing():
    buffer = IdBuffer(CAPACITY, EXPIRES_S)
    buffer.put(0, 1, bags_of(1))
    buffer.remove(0, 1)
    buffer.remove(0, 1)
    buffer.remove(5, 1)
    assert len(buffer) == 0


def test_a_batch_that_is_old_stays_while_there_is_room():
    clock = Clock()
    buffer = IdBuffer(CAPACITY, EXPIRES_S, clock)
    buffer.put(0, 1, bags_of(1))
    clock.now += 100 * EXPIRES_S
    buffer.put(0, 2, bags_of(2))
    assert number_of(buffer.peek(0, 1)) == 1


def test_threads_put_what_is_their_own():
    buffer = IdBuffer(1000, EXPIRES_S)

    def put(loader):
        for number in range(200):
            assert buffer.put(loader, number, bags_of(number))

    all_at_once(put, range(3))
    assert len(buffer) == 600


def test_of_a_batch_that_comes_again_the_last_ids_are_kept():
    buffer = IdBuffer(1, EXPIRES_S)
    assert buffer.put(0, 7, bags_of(1))
    assert buffer.put(0, 7, bags_of(2))
    assert number_of(buffer.peek(0, 7)) == 2
    buffer.remove(0, 7)
    assert buffer.put(0, 7, bags_of(3))
    with pytest.raises(LostBatchError):
        buffer.peek(0, 7)
    assert buffer.put(0, 7, bags_of(4), again=True)
    assert number_of(buffer.peek(0, 7)) == 4


def routed(number):
    return RoutedBatch(*[None] * 9, BatchFeatures([]), number=number)


def test_a_batch_that_awaits_its_gradient_is_settled_once():
    waiting = AwaitingGradient()
    first, other = BatchNumber(1, 1), BatchNumber(2, 1)
    batch = routed(first)
    waiting.put(first, batch)
    waiting.put(other, routed(other))
    assert waiting.find(first) is batch
    outcomes = []

    def settle():
        assert len(waiting) == 2  # its update is not yet applied
        outcomes.append(PushOutcome(0, 0, 0, len(outcomes)))
        return outcomes[-1]

    assert waiting.settle(first, settle) is waiting.settle(first, settle)
    assert len(outcomes) == len(waiting) == 1
    waiting.put(first, batch)  # a lookup that was late
    assert waiting.find(first) is None
    assert waiting.find(other).number == other


def test_concurrent_callers_get_the_same_outcome():
    waiting, number = AwaitingGradient(), BatchNumber(1, 1)
    begun, go_on = threading.Event(), threading.Event()

    def settle():
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return NOTHING

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(waiting.settle, number, settle)
        assert begun.wait(DEADLINE_S)
        second = pool.submit(waiting.settle, number, pytest.fail)
        go_on.set()
        assert first.result(DEADLINE_S) is second.result(DEADLINE_S) is NOTHING


def test_a_batch_whose_update_failed_is_kept():
    waiting, number = AwaitingGradient(), BatchNumber(1, 1)
    waiting.put(number, routed(number))
    with pytest.raises(ZeroDivisionError):
        waiting.settle(number, lambda: 1 // 0)
    assert len(waiting) == 1
    assert waiting.settle(number, lambda: NOTHING) is NOTHING
    assert len(waiting) == 0


def test_batches_that_never_get_their_gradient_are_noticed():
    waiting, batch = AwaitingGradient(), routed(None)
    for number in range(65536):
        waiting.put(BatchNumber(1, number), batch)
    with pytest.raises(DataflowError, match=r"At most 65536 .* its backward pass\?"):
        waiting.put(BatchNumber(1, 65536), batch)
