import logging
import threading

import pytest

from persia_torchrec import timeouts
from tests.support.processes import DEADLINE_S, wait_until

logger = logging.getLogger(__name__)


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(timeouts, "SAY_S", 0.02)


def test_a_long_wait_is_said_again_at_twice_the_time_and_at_its_end(soon, caplog):
    calls = []
    with timeouts.saying(logger, lambda: calls.append(1) or "waiting for a server"):
        wait_until(lambda: len(calls) == 4, "the fourth line")
    assert caplog.messages[0].startswith("waiting for a server, for ")
    assert caplog.messages[-1].startswith("waited ")
    assert caplog.messages[-1].endswith(" s: waiting for a server")


def wait_threads():
    return [one for one in threading.enumerate() if one.name == "long wait"]


def test_a_short_wait_says_nothing_and_has_no_thread(caplog):
    wait_until(lambda: wait_threads() == [], "those of earlier tests have ended")
    for _ in range(1000):
        with timeouts.saying(logger, lambda: "never"):
            pass
    assert caplog.messages == []
    assert wait_threads() == []


def test_what_is_waited_for_may_take_long_to_tell_without_delay_of_the_end(soon):
    told, may_tell = threading.Event(), threading.Event()

    def what():
        told.set()
        may_tell.wait(DEADLINE_S)
        return "late"

    with timeouts.saying(logger, what):
        assert told.wait(DEADLINE_S)
    may_tell.set()
