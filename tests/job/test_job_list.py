import os
import subprocess
import sys

import pytest

from persia_torchrec.errors import ConfigError
from persia_torchrec.job import job_list
from persia_torchrec.job.job_list import find_jobs, listed, record_of


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "persia_torchrec/jobs"


def test_a_job_is_listed_while_it_runs_and_how_it_ended(folder):
    with listed(record_of("job", 29400)) as told:
        [record] = find_jobs()
        assert (record.job_id, record.port, record.state) == ("job", 29400, "running")
        assert record.command == []
        assert record.coordinator.pid == os.getpid()
        told |= {"outcome": "failed", "reason": "why", "logs": {"server 0": "host log"}}
    [record] = find_jobs()
    assert (record.state, record.reason) == ("failed", "why")
    assert record.logs == {"server 0": "host log"}
    assert record.ended


@pytest.mark.parametrize("launcher", ["torchx", "honcho"])
def test_the_command_that_has_started_a_job_here_is_kept(
    folder, monkeypatch, tmp_path, launcher
):
    program = tmp_path / launcher
    program.write_text("print(flush=True)\ninput()")
    command = [sys.executable, str(program), "run", "train.py --epochs 2"]
    monkeypatch.setenv("TORCHX_JOB_ID", "local_cwd://torchx/job")
    monkeypatch.setenv("PERSIA_STORE_HOST_ENV", "TORCHX_RANK0_HOST")
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as started:
        started.stdout.readline()  # from here on the kernel has its command line
        monkeypatch.setenv("PERSIA_SUPERVISOR_PARENT", str(started.pid))
        record = record_of("job", 29400)
        started.communicate(b"\n")
    assert record.command == (command if launcher == "torchx" else [])


def test_a_coordinator_that_reports_no_end_is_lost(folder):
    with listed(record_of("job", 29400)):
        pass
    assert [one.state for one in find_jobs()] == ["lost"]


def test_what_another_version_has_written_is_left_out(folder):
    record_of("job", 29400).write()
    (folder / "other.json").write_text('{"job_id": 7}')
    assert [one.job_id for one in find_jobs()] == ["job"]


@pytest.mark.parametrize("name", ["", "job.json"])
def test_what_others_may_write_to_is_not_listed(folder, name):
    record_of("job", 29400).write()
    assert (folder / "job.json").stat().st_mode & 0o077 == 0
    (folder / name).chmod(0o777)
    with pytest.raises(ConfigError, match=r"has mode 777.*XDG_STATE_HOME"):
        find_jobs()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["", "job.json"])
def test_what_another_user_has_made_is_not_listed(folder, name):
    record_of("job", 29400).write()
    os.chown(folder / name, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        find_jobs()
    if not name:
        record_of("other", 29400).write()  # a job runs without it
        assert not (folder / "other.json").exists()


def test_the_oldest_that_have_ended_leave(folder, monkeypatch):
    monkeypatch.setattr(job_list, "_MAX_JOBS", 2)
    for number in range(5):
        monkeypatch.setattr(job_list, "now", lambda at=number: f"2026-01-0{at + 1}")
        with listed(record_of(f"job-{number}", 29400)) as told:
            told["outcome"] = "finished"
    assert [one.job_id for one in find_jobs()] == ["job-4", "job-3"]


def test_a_job_runs_where_nothing_can_be_written(folder, monkeypatch):
    folder.parent.parent.chmod(0o700)
    folder.parent.write_text("in the way")
    with listed(record_of("job", 29400)):
        assert find_jobs() == []
    monkeypatch.setenv("XDG_STATE_HOME", "")
    monkeypatch.setattr("pathlib.Path.expanduser", _no_home)
    with listed(record_of("job", 29400)):
        assert find_jobs() == []


def _no_home(path):
    raise RuntimeError(path)
