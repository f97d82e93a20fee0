import threading
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from persia_torchrec.client.client import BatchNumber
from persia_torchrec.errors import DataflowError
from persia_torchrec.lookup.bags import Bags
from persia_torchrec.lookup.sharded_lookup import BatchFeatures, RoutedBatch
from persia_torchrec.worker.process import AwaitingGradient, IdBuffer

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
            expired = [ref for ref, (since, _) in kept.items() if since < latest]
            for reference in expired:
                del kept[reference]
                self.gone.append((loader, reference))
        self.num_put += 1
        reference = self.buffer.put(loader, bags_of(self.num_put))
        assert (reference is None) == (len(kept) == CAPACITY)
        if reference is not None:
            assert all(reference not in others for others in self.kept.values())
            kept[reference] = (self.clock.now, self.num_put)

    @rule(seconds=st.floats(0, EXPIRES_S))
    def wait(self, seconds):
        self.clock.now += seconds

    @precondition(lambda self: any(self.kept.values()))
    @rule(data=st.data())
    def remove(self, data):
        loader = data.draw(st.sampled_from([n for n in (0, 1) if self.kept[n]]))
        reference = data.draw(st.sampled_from(sorted(self.kept[loader])))
        self.buffer.remove(loader, reference)
        del self.kept[loader][reference]
        self.gone.append((loader, reference))

    @invariant()
    def holds_what_it_should(self):
        assert len(self.buffer) == sum(map(len, self.kept.values()))
        for loader, kept in self.kept.items():
            for reference, (_, number) in kept.items():
                assert number_of(self.buffer.peek(loader, reference)) == number
        for loader, reference in self.gone[-3:]:
            with pytest.raises(DataflowError):
                self.buffer.peek(loader, reference)


TestIdBuffer = BufferMachine.TestCase


def test_an_unknown_batch_is_named_with_what_may_have_happened():
    buffer = IdBuffer(CAPACITY, EXPIRES_S)
    message = r"Batch 7 of data loader 2 .*buffered_data_expired_sec \(10 s\)"
    with pytest.raises(DataflowError, match=message):
        buffer.peek(2, 7)


def test_a_batch_of_another_loader_is_not_found():
    buffer = IdBuffer(CAPACITY, EXPIRES_S)
    reference = buffer.put(0, bags_of(1))
    with pytest.raises(DataflowError):
        buffer.peek(1, reference)


def test_removing_what_is_gone_does_nothing():
    buffer = IdBuffer(CAPACITY, EXPIRES_S)
    reference = buffer.put(0, bags_of(1))
    buffer.remove(0, reference)
    buffer.remove(0, reference)
    buffer.remove(5, reference)
    assert len(buffer) == 0


def test_a_batch_that_is_old_stays_while_there_is_room():
    clock = Clock()
    buffer = IdBuffer(CAPACITY, EXPIRES_S, clock)
    reference = buffer.put(0, bags_of(1))
    clock.now += 100 * EXPIRES_S
    buffer.put(0, bags_of(2))
    assert number_of(buffer.peek(0, reference)) == 1


def test_threads_get_references_of_their_own():
    buffer = IdBuffer(1000, EXPIRES_S)
    references = [[], [], []]

    def put(mine):
        mine.extend(buffer.put(0, bags_of(number)) for number in range(200))

    threads = [threading.Thread(target=put, args=(mine,)) for mine in references]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set().union(*references)) == len(buffer) == 600


def routed(number):
    return RoutedBatch(number, BatchFeatures([]), [], [], [], [], [], [], (), ())


def test_a_batch_that_awaits_its_gradient_is_taken_once():
    waiting = AwaitingGradient()
    first, other = BatchNumber(1, 1), BatchNumber(2, 1)
    batch = routed(first)
    waiting.put(first, batch)
    waiting.put(other, routed(other))
    assert len(waiting) == 2
    with waiting.taken(first) as taken:
        assert taken is batch
        assert len(waiting) == 2  # its update is not yet applied
    assert len(waiting) == 1
    with (
        pytest.raises(DataflowError, match="Batch 1 must have been pulled here for"),
        waiting.taken(first),
    ):
        pytest.fail("it was taken twice")
    with waiting.taken(other) as taken:
        assert taken.number == other
    assert len(waiting) == 0


def test_batches_that_never_get_their_gradient_are_noticed():
    waiting, batch = AwaitingGradient(), routed(None)
    for number in range(65536):
        waiting.put(BatchNumber(1, number), batch)
    with pytest.raises(DataflowError, match=r"At most 65536 .* its backward pass\?"):
        waiting.put(BatchNumber(1, 65536), batch)
