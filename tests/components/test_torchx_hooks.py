"""What a role changes of torchx's requests: logs that stay, an image that lacks."""

import subprocess
import sys
from pathlib import Path

import pytest
from persia_torchrec.components import jobs
from torchx.runner import get_runner

from persia_torchrec.errors import ConfigError
from tests.support.processes import DEADLINE_S

TRAIN = ("persia.train_torchrec", "--script", "train.py")


@pytest.fixture
def dryrun(monkeypatch, tmp_path):
    """Return what torchx asks its scheduler for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    def dryrun(scheduler, run_dir="", **cfg):
        with get_runner() as runner:
            app = jobs.train_torchrec(script="train.py", run_dir=run_dir)
            return runner.dryrun(app, scheduler, cfg).request

    return dryrun


def test_logs_of_this_machine_stay_in_the_folder_of_the_job(dryrun, tmp_path):
    request = dryrun("local_cwd")
    logs = tmp_path / "runs" / request.app_id / "logs"
    assert request.log_dir == str(logs)
    for role, params in request.role_params.items():
        [one] = params
        folder = logs / role / "0"
        assert Path(one.combined) == folder / "combined.log"
        assert {Path(one.stdout).parent, Path(one.stderr).parent} == {folder}
        assert Path(one.env["TORCHELASTIC_ERROR_FILE"]).parent == folder
        assert request.role_log_dirs[role] == [str(folder)]


def test_logs_of_a_job_that_continues_have_the_number_of_its_start(dryrun, tmp_path):
    logs = tmp_path / "mine/logs"
    for folder in (logs, logs / "2", logs / "3"):
        request = dryrun("local_cwd", run_dir="mine")
        assert request.log_dir == str(folder)
        for role in request.role_params:
            assert request.role_log_dirs[role] == [str(folder / role / "0")]
        folder.mkdir(parents=True)
    request = dryrun("local_cwd", run_dir="s3://bucket/mine")
    assert request.log_dir == str(tmp_path / "runs" / request.app_id / "logs")


def test_a_folder_of_logs_that_is_named_holds_them(dryrun, tmp_path):
    request = dryrun("local_cwd", log_dir=str(tmp_path / "mine"))
    named = tmp_path / "mine/torchx" / request.app_id
    assert request.log_dir == str(named)
    [server] = request.role_params["server"]
    assert server.combined == str(named / "server/0/combined.log")


def test_docker_is_asked_for_nothing_without_an_image(dryrun):
    with pytest.raises(
        ConfigError, match=r"image must be named for Docker, by --image"
    ):
        dryrun("local_docker")


@pytest.mark.slow
def test_torchx_says_in_a_line_what_its_default_scheduler_lacks(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "torchx.cli.main", "run", *TRAIN],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 1
    assert (
        "none for the role coordinator. To start it on this machine, without"
        in (ended.stderr.splitlines()[-1])
    )
    assert "Traceback" not in ended.stderr
