import threading
import time

import pytest

from persia_torchrec.errors import ConfigError, PersiaError, StalenessError
from persia_torchrec.pipeline.staleness import Permit, StalenessSemaphore
from tests.servers import DEADLINE_S


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


def test_a_permit_that_is_given_back_twice_counts_once():
    permits = StalenessSemaphore(1, timeout_s=0.05)
    first = take(permits)
    permits.give_back(first)
    take(permits)
    permits.give_back(first)
    with pytest.raises(StalenessError):
        take(permits)


def test_who_waits_gets_the_permit_that_comes_back():
    permits = StalenessSemaphore(1, timeout_s=DEADLINE_S)
    held = take(permits)
    taken = threading.Event()
    waiting = threading.Thread(target=lambda: (take(permits), taken.set()))
    waiting.start()
    assert not taken.wait(0.05)
    permits.give_back(held)
    assert taken.wait(DEADLINE_S)
    waiting.join(DEADLINE_S)


def test_who_holds_all_that_are_out_goes_on_without_one():
    permits = StalenessSemaphore(2, timeout_s=0.05)
    held = [hold(permits) for _ in range(2)]
    more = Permit()
    with pytest.raises(StalenessError):
        permits.take(more)  # nobody waits for this batch: it is only pulled ahead
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
    more, taken = Permit(), threading.Event()
    waiting = threading.Thread(target=lambda: (permits.take(more), taken.set()))
    waiting.start()
    assert not taken.wait(0.05)
    permits.hold(more)
    assert taken.wait(DEADLINE_S)
    waiting.join(DEADLINE_S)


@pytest.mark.parametrize("how", ["pushed", "not held", "of another thread"])
def test_who_does_not_hold_all_that_are_out_waits(how):
    permits = StalenessSemaphore(2, timeout_s=0.05)
    hold(permits)
    if how == "of another thread":
        other = threading.Thread(target=hold, args=(permits,))
        other.start()
        other.join(DEADLINE_S)
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


def test_closing_fails_who_waits_and_who_comes_later():
    permits = StalenessSemaphore(1, timeout_s=DEADLINE_S)
    held = take(permits)
    errors = []

    def wait():
        try:
            take(permits)
        except PersiaError as exc:
            errors.append(str(exc))

    waiting = threading.Thread(target=wait)
    waiting.start()
    permits.close()
    waiting.join(DEADLINE_S / 2)
    permits.give_back(held)
    wait()
    assert errors == ["The embedding pipeline is closed."] * 2


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
    waiting = threading.Thread(target=lambda: take(permits))
    waiting.start()
    waiting.join(0.05)
    assert counts(permits)[0] == 2
    permits.give_back(second)
    waiting.join(DEADLINE_S)
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
