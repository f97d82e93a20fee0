"""What a coordinator is asked and tells: values out of their range are rejected."""

import pytest

from persia_torchrec.errors import ConfigError
from persia_torchrec.job.requests import Beat, JobTimings, Register


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heartbeat_s": 0.0}, "heartbeat_s must be > 0. Received: 0.0"),
        ({"grace_s": float("nan")}, "grace_s must be > 0. Received: nan"),
        ({"heartbeat_s": 3.0, "silent_s": 5.0}, "must be at least two heartbeats"),
    ],
)
def test_timings_that_cannot_work_are_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        JobTimings(**changes)


def test_a_job_on_one_machine_has_less_time_to_save(monkeypatch):
    elsewhere = JobTimings().grace_s
    monkeypatch.setenv("TORCHX_JOB_ID", "local_cwd://x/y")
    assert JobTimings().grace_s < elsewhere


def test_a_request_is_of_a_member_by_role_and_index():
    assert {kind.__name__ for kind in (Beat, Register) if hasattr(kind, "who")} == {
        "Beat",
        "Register",
    }
