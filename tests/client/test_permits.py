import threading
import time

import pytest

from persia_torchrec.client.permits import Permits
from persia_torchrec.errors import ConfigError, PersiaError, StalenessError
from tests.servers import DEADLINE_S


def test_no_more_permits_are_out_than_there_are():
    permits = Permits(2, timeout_s=0.05)
    held = [permits.take() for _ in range(2)]
    started = time.monotonic()
    with pytest.raises(StalenessError, match=r"2 batches have been pulled.* 0\.05 s"):
        permits.take()
    assert 0.05 <= time.monotonic() - started < 2
    held[0].give_back()
    permits.take()


def test_a_permit_that_is_given_back_twice_counts_once():
    permits = Permits(1, timeout_s=0.05)
    first = permits.take()
    first.give_back()
    permits.take()
    first.give_back()
    with pytest.raises(StalenessError):
        permits.take()


def test_who_waits_gets_the_permit_that_comes_back():
    permits = Permits(1, timeout_s=DEADLINE_S)
    held = permits.take()
    taken = threading.Event()
    waiting = threading.Thread(target=lambda: (permits.take(), taken.set()))
    waiting.start()
    assert not taken.wait(0.05)
    held.give_back()
    assert taken.wait(DEADLINE_S)
    waiting.join(DEADLINE_S)


def test_closing_fails_who_waits_and_who_comes_later():
    permits = Permits(1, timeout_s=DEADLINE_S)
    held = permits.take()
    errors = []

    def wait():
        try:
            permits.take()
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
