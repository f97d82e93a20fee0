"""When embeddings are asked, and when not."""

import contextlib

import pytest

from persia_torchrec import timeouts
from persia_torchrec.errors import (
    BatchError,
    RemoteError,
    RequestTimeoutError,
    ServerError,
)
from persia_torchrec.serving.breaker import Breaker, NotAskedError

LATE = RequestTimeoutError("no reply", server="server 0")
LATE_THERE = RemoteError("no reply", server="worker 0", kind="RequestTimeoutError")
AWAY = ServerError("away", server="server 0")


class Asked:
    """Embeddings that answer, or raise an error; each test sets the time."""

    def __init__(self):
        self.now_s = 0.0
        self.breaker = Breaker(lambda: self.now_s)

    def by(self, *errors):
        """Return how many of the requests that end so ask; None is an answer."""
        num = 0
        for error in errors:
            expected = [NotAskedError, *([type(error)] if error else [])]
            with contextlib.suppress(*expected), self.breaker.asking():
                num += 1
                if error:
                    raise error
        return num


@pytest.mark.parametrize("late", [LATE, LATE_THERE])
def test_after_three_timeouts_in_a_row_one_request_a_second_asks(late):
    asked = Asked()
    assert asked.by(late, late, None, late, late, late, late, late) == 6
    for _ in range(2):
        asked.now_s += timeouts.MODEL_TRIAL_S
        assert asked.by(late, late) == 1
    asked.now_s += timeouts.MODEL_TRIAL_S
    with asked.breaker.asking():  # while one tries, no other does
        assert asked.by(None) == 0
        asked.now_s += 10 * timeouts.MODEL_TRIAL_S
        assert asked.by(None) == 0
    assert asked.by(None, late, late, None) == 4  # it was answered


def test_other_errors_do_not_open_it_and_end_a_trial():
    asked = Asked()
    assert asked.by(*[AWAY, BatchError("invalid")] * 5) == 10
    assert asked.by(LATE, LATE, AWAY, LATE, LATE, BatchError("invalid"), LATE) == 7
    asked.now_s += timeouts.MODEL_TRIAL_S
    assert asked.by(BatchError("invalid"), None) == 1
    asked.now_s += timeouts.MODEL_TRIAL_S
    assert asked.by(AWAY, None) == 2  # it is no timeout


def test_the_error_says_why_they_are_not_asked():
    asked = Asked()
    asked.by(LATE, LATE, LATE)
    match = "3 requests in a row had no reply"
    with pytest.raises(NotAskedError, match=match), asked.breaker.asking():
        pass
