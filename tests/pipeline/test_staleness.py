import heapq
import itertools
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_torchrec.errors import ConfigError, PersiaError, StalenessError
from persia_torchrec.pipeline.staleness import Depth, Permit, StalenessSemaphore
from tests.support.servers import DEADLINE_S
from tests.support.threads import InThread


def take(permits):
    permit = Permit()
    permits.take(permit)
    return permit


def hold(permits):
    """Take a permit, and hold its batch in this thread."""
    permit = take(permits)
    permits.hold(permit)
    return permit


def test_no_more_permits_are_out_than_there_are():
    permits = StalenessSemaphore(2, timeout_s=0.05)
    held = [take(permits) for _ in range(2)]
    started = time.monotonic()
    with pytest.raises(StalenessError, match=r"2 batches have been pulled.* 0\.05 s"):
        take(permits)
    assert time.monotonic() - started >= 0.05
    permits.give_back(held[0])
    take(permits)


def test_what_a_batch_waits_for_is_a_backward_pass_or_an_acknowledgement():
    permits = StalenessSemaphore(2, timeout_s=0.05)
    first, second = take(permits), take(permits)
    assert permits.waits_for(first) == ""
    assert permits.waits_for(Permit()) == "the backward pass of 2 batches"
    first.let_go()
    assert permits.waits_for(Permit()) == "the backward pass of 1 batches"
    second.let_go()
    assert permits.waits_for(Permit()) == ""


def test_a_permit_that_is_given_back_twice_counts_once():
    permits = StalenessSemaphore(1, timeout_s=0.05)
    first = take(permits)
    permits.give_back(first)
    take(permits)
    permits.give_back(first)
    with pytest.raises(StalenessError):
        take(permits)


def test_a_waiting_caller_gets_a_returned_permit():
    permits = StalenessSemaphore(1, timeout_s=DEADLINE_S)
    held = take(permits)
    waiting = InThread(take, permits)
    assert waiting.still_waits()
    permits.give_back(held)
    waiting.result()


def test_the_holder_of_all_permits_continues():
    permits = StalenessSemaphore(2, timeout_s=0.05)
    held = [hold(permits) for _ in range(2)]
    more = Permit()
    with pytest.raises(StalenessError):
        permits.take(more)  # no caller waits for this batch: it is only pulled ahead
    permits.hold(more)
    permits.take(more)
    for permit in (*held, more):
        permit.let_go()
    with pytest.raises(StalenessError):
        take(permits)
    permits.give_back(held[0])
    with pytest.raises(StalenessError):
        take(permits)  # still as many are out as there may be
    permits.give_back(more)
    take(permits)


def test_to_hold_a_batch_wakes_the_thread_that_takes_its_permit():
    permits = StalenessSemaphore(1, timeout_s=DEADLINE_S)
    hold(permits)
    more = Permit()
    waiting = InThread(permits.take, more)
    assert waiting.still_waits()
    permits.hold(more)
    waiting.result()


@pytest.mark.parametrize("how", ["pushed", "not held", "of another thread"])
def test_a_holder_of_some_permits_waits(how):
    permits = StalenessSemaphore(2, timeout_s=0.05)
    hold(permits)
    if how == "of another thread":
        InThread(hold, permits).result()
    else:
        permit = take(permits)
        if how == "pushed":
            permits.hold(permit)
            permit.let_go()
            permits.hold(permit)  # looks at its rows again
    more = Permit()
    permits.hold(more)
    with pytest.raises(StalenessError):
        permits.take(more)


def test_closing_fails_waiting_and_later_callers():
    permits = StalenessSemaphore(1, timeout_s=DEADLINE_S)
    held = take(permits)
    waiting = InThread(take, permits)
    permits.close()
    with pytest.raises(PersiaError, match=r"^The embedding pipeline is closed\.$"):
        waiting.result(DEADLINE_S / 2)
    permits.give_back(held)
    with pytest.raises(PersiaError, match=r"^The embedding pipeline is closed\.$"):
        take(permits)


def test_the_bound_changes_when_all_permits_are_back():
    permits = StalenessSemaphore(1, timeout_s=0.05)
    first = take(permits)
    with pytest.raises(ConfigError, match=r"no batch is in flight\. Received: 1 batch"):
        permits.resize(3, timeout_s=0.05)
    threading.Timer(0.05, permits.give_back, (first,)).start()
    permits.resize(3, timeout_s=DEADLINE_S)
    for _ in range(3):
        take(permits)
    with pytest.raises(StalenessError):
        take(permits)


def counts(permits):
    """Return lookups, those that waited, and the updates that they lacked."""
    return tuple(permits.counts().values())[:3]


def test_a_permit_counts_what_its_batch_lacks_and_whether_it_waited():
    permits = StalenessSemaphore(2, timeout_s=DEADLINE_S)
    first, second = take(permits), take(permits)
    assert counts(permits) == (2, 0, 1)
    waiting = InThread(take, permits)
    assert waiting.still_waits()
    assert counts(permits)[0] == 2
    permits.give_back(second)
    waiting.result()
    assert counts(permits) == (3, 1, 2)
    permits.give_back(first)
    take(permits)
    assert counts(permits) == (4, 1, 3)


def test_a_permit_that_never_came_is_no_lookup():
    permits = StalenessSemaphore(1, timeout_s=0.05)
    take(permits)
    with pytest.raises(StalenessError):
        take(permits)
    assert counts(permits) == (1, 0, 0)


def test_a_batch_that_is_recalled_is_not_pulled():
    permits = StalenessSemaphore(1, timeout_s=DEADLINE_S)
    take(permits)
    more = Permit()
    waiting = InThread(permits.take, more)
    assert waiting.still_waits()
    permits.recall(more)
    assert waiting.result() is False
    assert counts(permits) == (1, 0, 0)


def test_a_step_is_the_mean_without_the_longest_and_an_outlier_counts_once():
    depth, now_s = Depth(20), 0.0
    assert depth.num == 2

    def measure(num, *steps_s, late_s):
        nonlocal now_s
        for step_s in steps_s:
            now_s += step_s
            depth.measure(num, now_s, now_s + late_s)
        return depth.num

    assert measure(4, *[0.5, 1.5] * 16, late_s=-1.0) == 3
    assert measure(2, *[1.0] * 40, late_s=-5.0) == 2
    assert measure(2, 1.0, late_s=10.0) == 2
    assert measure(2, 11.0, late_s=10.0) == 3


class Training:
    """A trainer and its servers, on a clock that moves from event to event.

    The rows of a batch come ``pull_s`` after their pull has begun, its acknowledgement
    ``ack_s`` after its step, which takes ``step_s``. Data are always ready.
    """

    def __init__(self, most, *, pull_s, step_s, ack_s):
        self.most, self.pull_s, self.step_s, self.ack_s = most, pull_s, step_s, ack_s
        self.now_s, self.events, self.order = 0.0, [], itertools.count()
        self.permits = StalenessSemaphore(1, 0, clock=lambda: self.now_s)
        self.permits.resize(most, 0, pulls_late=True)
        self.waiting, self.in_flight, self.depths = deque(), set(), []

    def train(self, num_steps, at_once=1):
        """Return how long steps waited; each asks for its batches, the last first."""
        batches = [Permit() for _ in range(num_steps * at_once)]
        self.waiting.extend(batches)
        waits_s = []
        for first in range(0, len(batches), at_once):
            began_s, of_step = self.now_s, batches[first : first + at_once]
            for permit in reversed(of_step):
                self.permits.hold(permit)
                self.go_on(lambda permit=permit: permit.arrived_s is not None)
            waits_s.append(self.now_s - began_s)
            is_done = threading.Event()
            self.after(self.step_s, is_done.set)
            self.go_on(is_done.is_set)
            for permit in of_step:
                permit.let_go()
                self.after(self.ack_s, partial(self.acknowledge, permit))
        return waits_s

    def after(self, seconds, do):
        heapq.heappush(self.events, (self.now_s + seconds, next(self.order), do))

    def go_on(self, is_over):
        self.pull()
        while not is_over():
            assert self.events, "nothing more happens"
            self.now_s, _, do = heapq.heappop(self.events)
            do()
            self.pull()

    def pull(self):
        with suppress(StalenessError):  # not yet
            while self.waiting:
                self.permits.take(self.waiting[0])
                permit = self.waiting.popleft()
                self.in_flight.add(permit)
                self.depths.append(len(self.in_flight))
                assert self.depths[-1] <= self.most
                self.after(self.pull_s, partial(self.permits.arrived, permit))

    def acknowledge(self, permit):
        self.in_flight.discard(permit)
        self.permits.give_back(permit)


latencies_s = st.floats(0.0, 8.0)
steps_s = st.floats(0.1, 10.0)


@settings(max_examples=25)
@given(latencies_s, steps_s, latencies_s, st.integers(2, 20))
def test_the_fewest_batches_that_hide_the_pulls_are_in_flight(
    pull_s, step_s, ack_s, most
):
    training = Training(most, pull_s=pull_s, step_s=step_s, ack_s=ack_s)
    training.train(200)
    waits_s, depth = training.train(100), sorted(training.depths[-100:])[50]
    assert depth == most or sum(waits_s[20:]) <= 8 * step_s
    assert depth == 2 or (depth - 2) * step_s <= (pull_s + ack_s) * 1.01


@given(
    st.lists(st.tuples(latencies_s, steps_s, latencies_s), min_size=1, max_size=30),
    st.integers(2, 12),
    st.data(),
)
def test_no_latency_makes_training_stop_or_the_bound_be_exceeded(times, most, data):
    at_once = data.draw(st.integers(1, most))
    training = Training(most, pull_s=0, step_s=1, ack_s=0)
    for training.pull_s, training.step_s, training.ack_s in times:
        training.train(3, at_once)


def test_more_are_in_flight_when_latency_rises_and_fewer_when_it_fell():
    training = Training(20, pull_s=0.4, step_s=1, ack_s=0.4)
    training.train(100)
    assert max(training.depths) == 2
    training.pull_s = 5.4
    training.train(60)
    assert training.depths[-1] == 7
    assert sum(training.train(100)[20:]) == 0
    training.pull_s = 0.4
    training.train(200)
    assert training.depths[-1] == 2
