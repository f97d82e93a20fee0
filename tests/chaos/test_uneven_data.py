"""A job whose trainers' data end at different steps, and whose processes are killed."""

from functools import partial

import pytest

from tests.chaos.killing import AGENT, SUPERVISOR, Killer
from tests.support.uneven_job import end_job, num_steps, uneven_job, wait_for_steps

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

ROLES = 2 * ["trainer", "server"] + ["coordinator", SUPERVISOR, AGENT]
MOST_STEPS = 40


def test_each_step_counts_once_when_all_roles_are_killed(
    tmp_path, draw, kills, record_property
):
    with uneven_job(tmp_path, MOST_STEPS, PAUSE_S="0.02") as (job, book):
        wait_for_steps(tmp_path, job)
        given = tmp_path, job, book, draw, partial(num_steps, tmp_path), ROLES
        killer = Killer(*given, server=2, trainer=2)
        killer.kill(kills(200))
        record_property("measured", killer.summary())
        end_job(tmp_path, job, MOST_STEPS)
