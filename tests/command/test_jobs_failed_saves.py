"""A job whose saves fail says so, at its end too, and runs on where it may."""

import contextlib
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec import structs

from persia_torchrec.command import main
from persia_torchrec.command.jobs import lost_by
from persia_torchrec.job import job_list
from persia_torchrec.job.job_list import JobRecord
from persia_torchrec.job.process_identity import ProcessIdentity
from persia_torchrec.job.saves import Saves
from tests.support.endless_script import SCRIPT
from tests.support.forked_jobs import ForkedJob
from tests.support.processes import wait_until
from tests.support.script_jobs import WAIT_FOR_EVER, Job

FULL = "No space left on device"


@pytest.fixture
def disk(tmpfs):
    """The folder of a small file system."""
    return Path(tmpfs).parents[1] / "root" / "tmp"


@pytest.fixture
def job(disk, tmp_path, monkeypatch):
    """A job that saves into a small file system."""
    (tmp_path / "train.py").write_text(SCRIPT.replace("=10)", "=5)"))
    arguments = ["--servers", "1", "--script", "train.py", "--grace_s", "30"]
    arguments += ["--run_dir", f"{disk}/run"]
    with ForkedJob(tmp_path, "train_torchrec", *arguments) as job:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ".local/state"))
        job.has_printed("checkpoint-00000002")
        [record] = job_list.find_jobs()
        structs.replace(record, command=["torchx", "run", "it"]).write()
        yield job


def call(*words, status=0):
    """Return what the command prints."""
    result = CliRunner().invoke(main, words)
    assert result.exit_code == status, result.output
    return result.output


def status():
    return json.loads(CliRunner().invoke(main, ["status", "--json"]).stdout)


def fill(folder):
    """Write until there is no room."""
    junk = (folder / "junk").open("wb", buffering=0)
    with junk, contextlib.suppress(OSError):
        while True:
            junk.write(bytes(4096))


@pytest.mark.multiprocess
@pytest.mark.parametrize("tmpfs", ["size=4m"], indirect=True)
def test_a_job_whose_disk_is_full_says_so_and_ends_by_its_user_alone(job, disk):
    fill(disk)
    wait_until(lambda: "saves" in status()["failed_saves"], "two saves fail")
    told = CliRunner().invoke(main, ["status"]).output  # from the third on a fault
    assert re.search(rf"(?m)^trainer 0: the last \d+ saves failed: .*{FULL}", told)

    scaled = call("scale", "--servers", "2", status=1)
    assert re.search(rf"must save .* failed: .*{FULL}.* The job runs on", scaled)
    then = status()
    assert then["state"] == "running"
    wait_until(lambda: status()["step"] > then["step"], "the job trains on")

    stopped = call("stop", status=1)
    lost = re.search(
        rf"the last save failed: .*{FULL}.*; steps (\d+) to (\d+) are", stopped
    )
    assert int(lost[1]) % 5 == 1  # behind a checkpoint
    assert int(lost[2]) > then["step"] > int(lost[1])


@pytest.mark.multiprocess
def test_a_job_that_saves_nothing_says_so(processes):
    job = Job(processes, trainer=1)
    job.start("trainer", WAIT_FOR_EVER).has_printed("at work")
    assert "saves nothing" in call("stop", f"localhost:{job.port}")


def record_of(reason, saves, outcome="failed"):
    identity = ProcessIdentity.of_this_process()
    where = {"host": "localhost", "port": 1, "coordinator": identity}
    ended = {"outcome": outcome, "reason": reason, "saves": saves}
    return JobRecord(job_id="job", began="", folder="", **where, **ended)


TOLD = "coordinator: it was told to end (SIGTERM)"
LATE = f"{TOLD}, and trainer 0 did not exit within grace_s=5"


@pytest.mark.parametrize(
    ("reason", "saves", "expected"),
    [
        (TOLD, Saves(step=47, trained=47), ""),
        (TOLD, None, ""),
        (TOLD, Saves(46, 133, 1, FULL), f"failed: {FULL}; steps 47 to 133 are lost"),
        (LATE, Saves(46, 47), "within grace_s=5; step 47 are lost"),
        (LATE, Saves(46, 46), "within grace_s=5; steps behind step 46 are lost"),
    ],
)
def test_steps_that_no_checkpoint_has_are_named_with_the_cause(reason, saves, expected):
    lost = lost_by(record_of(reason, saves))
    assert lost.endswith(expected)
    assert bool(lost) == bool(expected)
