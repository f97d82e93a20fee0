import threading
import time

import pytest

from persia_torchrec.client.permits import LookupCounts, Permits
from persia_torchrec.errors import ConfigError, PersiaError, StalenessError
from tests.servers import DEADLINE_S


def take(permits):
    permit = permits.ask()
    permit.take()
    return permit


def hold(permits):
    """Take a permit, and hold its batch in this thread."""
    permit = take(permits)
    permit.hold()
    return permit


def test_no_more_permits_are_out_than_there_are():
    permits = Permits(2, timeout_s=0.05)
    held = [take(permits) for _ in range(2)]
    started = time.monotonic()
    with pytest.raises(StalenessError, match=r"2 batches have been pulled.* 0\.05 s"):
        take(permits)
    assert 0.05 <= time.monotonic() - started < 2
    held[0].give_back()
    take(permits)


def test_a_permit_that_is_given_back_twice_counts_once():
    permits = Permits(1, timeout_s=0.05)
    first = take(permits)
    first.give_back()
    take(permits)
    first.give_back()
    with pytest.raises(StalenessError):
        take(permits)


def test_who_waits_gets_the_permit_that_comes_back():
    permits = Permits(1, timeout_s=DEADLINE_S)
    held = take(permits)
    taken = threading.Event()
    waiting = threading.Thread(target=lambda: (take(permits), taken.set()))
    waiting.start()
    assert not taken.wait(0.05)
    held.give_back()
    assert taken.wait(DEADLINE_S)
    waiting.join(DEADLINE_S)


def test_who_holds_all_that_are_out_goes_on_without_one():
    permits = Permits(2, timeout_s=0.05)
    held = [hold(permits) for _ in range(2)]
    more = permits.ask()
    with pytest.raises(StalenessError):
        more.take()  # nobody waits for this batch: it is only pulled ahead
    more.hold()
    more.take()
    for permit in (*held, more):
        permit.let_go()
    with pytest.raises(StalenessError):
        take(permits)
    held[0].give_back()
    with pytest.raises(StalenessError):
        take(permits)  # still as many are out as there may be
    more.give_back()
    take(permits)


def test_to_hold_a_batch_wakes_the_thread_that_takes_its_permit():
    permits = Permits(1, timeout_s=DEADLINE_S)
    hold(permits)
    more, taken = permits.ask(), threading.Event()
    waiting = threading.Thread(target=lambda: (more.take(), taken.set()))
    waiting.start()
    assert not taken.wait(0.05)
    more.hold()
    assert taken.wait(DEADLINE_S)
    waiting.join(DEADLINE_S)


@pytest.mark.parametrize("how", ["pushed", "not held", "of another thread"])
def test_who_does_not_hold_all_that_are_out_waits(how):
    permits = Permits(2, timeout_s=0.05)
    hold(permits)
    if how == "of another thread":
        other = threading.Thread(target=hold, args=(permits,))
        other.start()
        other.join(DEADLINE_S)
    else:
        permit = take(permits)
        if how == "pushed":
            permit.hold()
            permit.let_go()
            permit.hold()  # looks at its rows again
    more = permits.ask()
    more.hold()
    with pytest.raises(StalenessError):
        more.take()


def test_closing_fails_who_waits_and_who_comes_later():
    permits = Permits(1, timeout_s=DEADLINE_S)
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
    held.give_back()
    wait()
    assert errors == ["The embedding pipeline is closed."] * 2


def test_no_permits_at_all_are_refused():
    with pytest.raises(ConfigError, match=r"at least one permit\. Received: 0\."):
        Permits(0, timeout_s=1.0)


def test_a_permit_counts_what_its_batch_lacks_and_whether_it_waited():
    permits = Permits(2, timeout_s=DEADLINE_S)
    first, second = take(permits), take(permits)
    assert permits.counts() == LookupCounts(num=2, num_waited=0, num_lacking=1)
    waiting = threading.Thread(target=lambda: take(permits))
    waiting.start()
    waiting.join(0.05)
    assert permits.counts().num == 2
    second.give_back()
    waiting.join(DEADLINE_S)
    assert permits.counts() == LookupCounts(num=3, num_waited=1, num_lacking=2)
    following = Permits(1, timeout_s=DEADLINE_S, counts=permits.counts())
    take(following)
    assert following.counts() == LookupCounts(num=4, num_waited=1, num_lacking=2)
    first.give_back()


def test_a_permit_that_never_came_is_no_lookup():
    permits = Permits(1, timeout_s=0.05)
    take(permits)
    with pytest.raises(StalenessError):
        take(permits)
    assert permits.counts() == LookupCounts(num=1)
