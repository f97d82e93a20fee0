"""``persia-torchrec run``: a job of this machine, its terminal, its logs, its end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import DEADLINE_S
from tests.support.repository import ROOT

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def run(folder, *words):
    """Run the command in a folder, which is the user's home, too."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}"
    return subprocess.run(
        [sys.executable, "-m", "persia_torchrec.command", *words],
        cwd=folder,
        env={"PATH": path, "HOME": str(folder), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_a_script_trains_with_its_servers_and_leaves_its_logs(tmp_path):
    (tmp_path / "train.py").write_text("import sys; print('trained', sys.argv[1:])")
    ended = run(tmp_path, "run", "--servers", "2", "train.py", "--epochs", "3")
    assert ended.returncode == 0, ended.stderr
    assert "trainer/0 trained ['--epochs', '3']" in ended.stderr
    assert "the job is finished" in ended.stderr
    assert "persia_torchrec.job" not in ended.stderr  # records are shown in short
    [job] = (tmp_path / "runs").iterdir()
    logs = {str(one.parent.relative_to(job)) for one in job.rglob("combined.log")}
    members = "coordinator/0", "server/0", "server/1", "trainer/0"
    assert logs == {f"logs/{member}" for member in members}
    [known] = json.loads(run(tmp_path, "ps", "--all", "--json").stdout)
    assert (known["job"], known["state"]) == (job.name, "finished")
    shown = run(tmp_path, "logs", "trainer", "0")
    assert "trained ['--epochs', '3']" in shown.stdout


def test_a_job_that_fails_says_why_and_ends_with_1(tmp_path):
    (tmp_path / "train.py").write_text("raise ValueError('no data')")
    ended = run(tmp_path, "run", "train.py")
    assert ended.returncode == 1
    assert "job failed: trainer 0: ValueError: no data" in ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("the job has failed: trainer 0: ValueError: no data")
    assert ". Run: persia-torchrec logs trainer 0 --job " in last


def test_a_setting_out_of_range_is_a_line(tmp_path):
    (tmp_path / "train.py").touch()
    ended = run(tmp_path, "run", "--capacity", "0", "train.py")
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        "persia-torchrec: capacity must be in [1, 4294967294]. Received: 0."
    ]


@pytest.mark.parametrize(
    ("setting", "received"),
    [
        (["--run-dir", "train.py"], "Not a directory: "),
        (["--python", "./python"], "No such file or directory: './python'"),
    ],
)
def test_what_this_machine_cannot_start_is_a_line(tmp_path, setting, received):
    (tmp_path / "train.py").touch()
    ended = run(tmp_path, "run", *setting, "train.py")
    assert ended.returncode == 1
    [line] = ended.stderr.splitlines()
    assert received in line
    assert line.endswith("Choose another --run-dir or --python.")
