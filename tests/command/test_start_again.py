"""``scale`` and ``rollback`` of a job that ``torchx run`` has started."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import wait_until
from tests.support.repository import ROOT
from tests.support.torchx_jobs import TorchxJob, marked

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]

SCRIPT = ("--script", "train.py --steps 100000 --pause 0.02")


@pytest.fixture
def job(tmp_path):
    """A job with two servers, which saves every second."""
    shutil.copy(ROOT / "examples/train.py", tmp_path)
    arguments = ("persia.train_torchrec", *SCRIPT, "--servers", "2")
    variables = {"PERSIA_CHECKPOINT_INTERVAL_S": "1"}
    resume = ("--run_dir", str(tmp_path / "run"))
    with TorchxJob(
        tmp_path, *arguments, *resume, variables=variables, cwd=tmp_path
    ) as job:
        job.has_printed("checkpoint-00000003")
        job.folder = tmp_path
        yield job


def verb(job, *words, waits=True):
    """Run the command as the job's user; one that does not wait becomes a job."""
    command = [sys.executable, "-m", "persia_torchrec.command", *words]
    name, value = job._mark.split("=")
    variables = {"HOME": str(job.folder), "PYTHONPATH": str(ROOT), name: value}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}"
    settings = {"cwd": job.folder, "env": {"PATH": path, **variables}}
    if not waits:
        with (job.folder / f"{words[0]}.txt").open("w") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, **settings)
    return subprocess.run(
        command, capture_output=True, text=True, check=False, **settings
    )


def status(job):
    """Return the one job that runs, as JSON; None: there is none, or several."""
    said = verb(job, "status", "--json").stdout
    return json.loads(said) if said.startswith("{") else None


def next_job(job, before):
    """Wait for another job than that of a status that trains; return its status."""
    found = {}

    def trains():
        now = status(job)
        if now is None or now["job"] == before["job"] or not now["step"]:
            return False
        found.update(now)
        return True

    outputs = [*job.folder.glob("*.txt")]
    wait_until(trains, "the next job trains", details=lambda: outputs[0].read_text())
    return found


def test_scale_continues_with_other_servers_and_rollback_from_a_checkpoint(job):
    before = status(job)
    assert [one["role"] for one in before["members"]].count("server") == 2
    assert before["eta_s"] > 0
    scaled = verb(job, "scale", "--servers", "3", waits=False)
    now = next_job(job, before)
    assert [one["role"] for one in now["members"]].count("server") == 3
    assert now["step"] >= before["step"]  # with a save
    output = (job.folder / "scale.txt").read_text()
    assert re.search(r"its last checkpoint: \S+/run/checkpoints/checkpoint-", output)
    assert "training resumes from" in output
    assert " are lost" not in output

    listed = json.loads(verb(job, "checkpoint", "ls", "run", "--json").stdout)
    old = listed[-1]
    verb(job, "checkpoint", "pin", old["checkpoint"])
    rolled_back = verb(job, "rollback", now["job"], old["checkpoint"], waits=False)
    back = next_job(job, now)
    output = (job.folder / "rollback.txt").read_text()
    (resumed,) = set(re.findall(r"training resumes from (\S+)", output))
    assert re.search(r"given up: steps? \d+", output)
    assert resumed.startswith(str(job.folder / "run-back-1"))
    assert Path(resumed).name == Path(old["checkpoint"]).name
    assert len([one for one in back["members"] if one["role"] == "server"]) == 3
    assert (job.folder / "run").is_dir()  # the other history
    wait_until(lambda: scaled.poll() is not None, "the scaled job has ended")

    ended = verb(job, "stop", back["job"])
    assert "run-back-1/checkpoints/checkpoint-" in ended.stdout, ended
    wait_until(lambda: not marked(job._mark, "persia_torchrec.server"), "all end")
    wait_until(lambda: rolled_back.poll() is not None, "torchx has ended")
