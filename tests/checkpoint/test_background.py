"""Work beside requests: its phases, its end, and what it may take of a CPU."""

import threading

import pytest

from persia_torchrec.checkpoint.background import Activity, BackgroundTask, CpuBudget
from persia_torchrec.errors import CheckpointError
from tests.support.processes import wait_until


def test_a_task_has_the_phase_that_it_is_in():
    task, may_end = BackgroundTask("A dump"), threading.Event()
    task.start("writing", may_end.wait, "written")
    assert task.phase == "writing"
    may_end.set()
    wait_until(lambda: task.phase == "written", "the task ends")
    assert task.error is None


def test_a_task_that_is_closed_is_cancelled_and_has_ended():
    task = BackgroundTask("A dump")

    def work():
        assert task.cancelled.wait(60)
        task.require_not_cancelled()

    task.start("writing", work, "written")
    task.close()
    task.close()
    assert task.phase == "failed"
    assert isinstance(task.error, CheckpointError)
    assert str(task.error) == "A dump: cancelled."


@pytest.mark.parametrize("idle_ms", [50])
def test_slices_of_a_busy_server_take_their_fraction_and_of_an_idle_one_all(idle_ms):
    now_s, cpu_s = [100.0], [0.0]
    activity = Activity(lambda: now_s[0], lambda: cpu_s[0])
    budget = CpuBudget(0.1, activity)
    activity.last_s = now_s[0]
    assert budget.wait_ms(idle_ms, is_ready=False) == idle_ms  # a request wakes it
    assert budget.wait_ms(idle_ms, is_ready=True) == 0
    with budget.spend():
        cpu_s[0] += 0.015
    activity.last_s = now_s[0]
    assert not budget.has_credit()
    now_s[0] += 0.09  # a tenth of which is less than was spent beyond the credit
    activity.last_s = now_s[0]
    assert not budget.has_credit()
    now_s[0] += 0.05
    activity.last_s = now_s[0]
    assert budget.has_credit()
    budget.charge(10.0)
    assert not budget.has_credit()
    now_s[0] += 1.0  # without a request
    assert budget.has_credit()
    assert budget.wait_ms(idle_ms, is_ready=False) < idle_ms
