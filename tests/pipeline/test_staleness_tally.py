import logging

import pytest

from persia_torchrec.client.codec import PushOutcome
from persia_torchrec.pipeline.staleness import BatchStatistics, TrainingSummary
from tests.support.processes import wait_until


@pytest.fixture
def num_warnings(caplog):
    """Return how many warnings the tally has logged."""
    caplog.set_level(logging.INFO, "persia_torchrec.pipeline.staleness")

    def num_warnings():
        of_tally = [r for r in caplog.records if r.name.endswith("pipeline.staleness")]
        return [r.levelno for r in of_tally].count(logging.WARNING)

    return num_warnings


def updates(tally, num, *, missed=0, unadmitted=0, gradients=1000):
    """Count updates whose gradients came too late for some rows."""
    for _ in range(num):
        tally.applied(PushOutcome(missed, 0, unadmitted, gradients))


def use(tally, drops, *, pushed):
    """Drop so many batches without a backward pass, and perhaps push one then."""
    for _ in range(drops):
        tally.dropped()
    if pushed:
        tally.pushed()


def test_eight_batches_without_a_backward_pass_at_first_are_one_warning(num_warnings):
    tally = BatchStatistics()
    for drops, expected in ((7, 0), (1, 1), (199, 1)):
        use(tally, drops, pushed=False)
        assert num_warnings() == expected
    assert tally.num_dropped == 207


def test_a_warning_of_backward_passes_comes_once_whatever_follows(num_warnings):
    tally = BatchStatistics()
    for _ in range(3):
        use(tally, 100, pushed=True)
    assert num_warnings() == 1


def test_after_a_backward_pass_it_takes_many_without_one(num_warnings):
    tally = BatchStatistics()
    tally.pushed()
    for _ in range(5):  # as where each validation forgets no_grad
        use(tally, 63, pushed=True)
    assert num_warnings() == 0
    use(tally, 64, pushed=False)
    assert num_warnings() == 1


def test_every_second_batch_may_have_no_backward_pass(num_warnings):
    tally = BatchStatistics()
    for _ in range(100):
        use(tally, 1, pushed=True)
    assert num_warnings() == 0
    assert tally.num_dropped == 100


@pytest.mark.parametrize(("missed", "expected"), [(0, 0), (9, 0), (10, 1), (1000, 1)])
def test_one_percent_of_evicted_rows_is_one_warning(num_warnings, missed, expected):
    tally = BatchStatistics()
    updates(tally, 31, missed=missed)
    assert num_warnings() == 0
    updates(tally, 1, missed=missed)
    assert num_warnings() == expected
    updates(tally, 320, missed=missed)
    assert num_warnings() == expected


def test_evicted_rows_are_warned_of_again_when_their_share_has_doubled(num_warnings):
    tally = BatchStatistics()
    seen = []
    for missed in (10, 19, 20, 39, 10, 0, 40):
        updates(tally, 32, missed=missed)
        seen.append(num_warnings())
    assert seen == [1, 1, 2, 2, 2, 2, 3]
    assert tally.total.num_evicted == 32 * (10 + 19 + 20 + 39 + 10 + 40)


def test_the_share_is_that_of_a_window_and_not_of_the_whole_training(num_warnings):
    tally = BatchStatistics()
    updates(tally, 32 * 100)
    updates(tally, 32, missed=10)
    assert num_warnings() == 1
    assert tally.total.num_evicted / tally.total.num_gradients < 0.001


def test_rows_that_were_never_admitted_are_not_called_evicted(num_warnings):
    tally = BatchStatistics()
    updates(tally, 64, missed=500, unadmitted=500)
    assert num_warnings() == 0
    assert tally.total.num_evicted == 0
    updates(tally, 32, missed=500, unadmitted=490)
    assert num_warnings() == 1


def test_rejected_gradients_are_warned_of_at_each_further_digit(num_warnings):
    tally = BatchStatistics()
    seen = []
    for refused in (0, 1, 8, 1, 89, 1):
        tally.applied(PushOutcome(0, refused, 0, 1000))
        seen.append(num_warnings())
    assert seen == [0, 1, 1, 2, 2, 3]


def test_steps_are_between_pushes():
    tally = BatchStatistics()
    for _ in range(3):
        tally.pushed()
    assert (tally.num_pushed, sum(tally.steps.bins)) == (3, 2)


def test_summaries_of_several_collections_add_up():
    one = TrainingSummary(
        num_lookups=10,
        num_waited=5,
        num_lacking=20,
        max_lacking=3,
        num_dropped=1,
        num_gradients=100,
        num_evicted=10,
    )
    both = TrainingSummary.total([one, one])
    assert both.num_lookups == 20
    assert both.num_dropped == 2
    assert both.max_lacking == 3
    assert (both.mean_staleness, both.share_waited, both.share_evicted) == (2, 0.5, 0.1)
    nothing = TrainingSummary.total([])
    assert nothing == TrainingSummary()
    assert nothing.mean_staleness == nothing.share_waited == nothing.share_evicted == 0


def test_a_wait_for_rows_counts_while_it_lasts():
    tally = BatchStatistics()
    with tally.waiting():
        before = tally.waited_ns()
        wait_until(lambda: tally.waited_ns() > before, "the wait is counted")
        with tally.waiting():  # of another thread
            both = tally.waited_ns()
    ended = tally.waited_ns()
    assert ended > both > before
    assert tally.waited_ns() == ended
