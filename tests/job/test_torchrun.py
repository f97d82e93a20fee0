"""Trainers of a job that torchrun starts again, all of them when one fails."""

import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from persia_torchrec.errors import ConfigError, JobMismatchError
from persia_torchrec.job import torchrun
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.requests import JobTimings
from tests.support.processes import Processes, children_of, is_running, wait_until
from tests.support.script_jobs import WAIT_FOR_EVER, Job, start_trainers

pytestmark = pytest.mark.multiprocess

KILLED = """
import os, signal
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # until torchrun ends this one, too
print("trained by", os.environ["RANK"])
"""

KILLED_LATER = """
import os, pathlib, signal, time
print("at work", os.environ["RANK"], flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    while os.environ["RANK"] == "0" or not pathlib.Path("go").exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
print("trained by", os.environ["RANK"])
"""

RAISES = """
raise ValueError("a bug of its own")
"""


def meet(book, node_rank, nnodes=2):
    """Return the settings of an agent."""
    config = torchrun.AgentConfig(node_rank=node_rank, nnodes=nnodes)
    return torchrun.Agent(config, book)._meet()


def test_the_agents_of_a_job_are_started_once(monkeypatch):
    with contextlib.closing(AddressBook.host(0)) as book:
        book.publish(JobTimings())
        for node in range(2):
            meet(book, node)
            must = f"--node-rank {node} must be started once in a job. Received: job"
            with pytest.raises(JobMismatchError, match=must):
                meet(book, node)
        with pytest.raises(ConfigError, match="3 from machine of NN workers 2, 2"):
            meet(book, 2, nnodes=3)
        monkeypatch.setenv("PERSIA_RESTARTS", "1")
        meet(book, 0)


@pytest.mark.parametrize("nnodes", [1, 2])
def test_an_agent_has_no_port_and_no_file_before_its_nn_workers(nnodes):
    with contextlib.closing(AddressBook.host(0)) as book:
        book.publish(JobTimings())
        config = meet(book, 0, nnodes)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("address-book", "")
    assert config.logs_specs.root_log_dir == os.devnull


WAITS_FOR_GO = """
import os, pathlib, time
start, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
print(f"start {start} of rank {rank}", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.02)
print("trained by", rank)
"""


def run_with_its_own_temporary_folder(words):
    """Run torchrun with a temporary folder in the folder of the test."""
    tempfile.tempdir = os.environ["TMPDIR"] = str(Path("temporary").absolute())
    return torchrun.main(words)


def test_an_agent_keeps_no_file_that_a_cleaned_temporary_folder_takes_away(tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    with Processes(tmp_path) as processes:
        job = Job(processes, trainer=2)
        main = run_with_its_own_temporary_folder
        agent = start_trainers(
            processes, job, WAITS_FOR_GO, 2, max_restarts=1, main=main
        )
        for rank in range(2):
            agent.has_printed(f"start 0 of rank {rank}")
        assert list(folder.iterdir()) == []  # else an agent's file could grow
        shutil.rmtree(folder)
        os.kill(max(children_of(agent.pid)), signal.SIGKILL)
        for rank in range(2):
            agent.has_printed(f"start 1 of rank {rank}")
        (tmp_path / "go").touch()
        assert agent.status() == 0, agent.output()
        assert job.coordinator.status() == 0, job.coordinator.output()
        assert agent.output().count("trained by") == 2


def test_a_job_waits_for_trainers_that_torchrun_starts_again(tmp_path):
    with Processes(tmp_path) as processes:
        job = Job(processes, trainer=2)
        torchrun = start_trainers(processes, job, KILLED, 2, max_restarts=1)
        assert torchrun.status() == 0, torchrun.output()
        assert job.coordinator.status() == 0, job.coordinator.output()
        assert torchrun.output().count("trained by") == 2
        told = job.coordinator.output()
    assert "trainer 1 (process" in told
    assert "the job waits for its return" in told


@pytest.mark.long
def test_trainers_start_again_though_the_coordinator_is_away_when_one_is_killed(
    tmp_path,
):
    """For longer than a member waits that is told to end."""
    with Processes(tmp_path) as processes:
        job = Job(processes, trainer=2, recovers=True)
        torchrun = start_trainers(processes, job, KILLED_LATER, 2, max_restarts=1)
        for rank in range(2):
            torchrun.has_printed(f"at work {rank}")
        trainers = children_of(torchrun.pid)
        os.kill(job.coordinator.pid, signal.SIGSTOP)  # it starts no other one
        (inner,) = children_of(job.coordinator.pid)
        os.kill(inner, signal.SIGKILL)
        (tmp_path / "go").touch()
        wait_until(lambda: not any(map(is_running, trainers)), "both trainers end")
        os.kill(job.coordinator.pid, signal.SIGCONT)
        assert torchrun.status() == 0, torchrun.output()
        assert job.coordinator.status() == 0, job.coordinator.output()
    assert torchrun.output().count("trained by") == 2
    assert "lost the coordinator" not in torchrun.output()


def test_a_script_that_always_raises_fails_the_job_and_reports_why_once(tmp_path):
    with Processes(tmp_path) as processes:
        job = Job(processes, trainer=1)
        torchrun = start_trainers(processes, job, RAISES, 1, max_restarts=2)
        assert torchrun.status() != 0
        assert job.coordinator.status() == 1
        assert torchrun.output().count('    raise ValueError("a bug') == 1
        told = job.coordinator.output()
    assert "job failed: trainer 0: ValueError: a bug of its own" in told


STARTS = """
import os, pathlib, sys
from persia_torchrec.job.member import JobMember
rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
pathlib.Path(sys.argv[0]).with_name(f"start {start} of {rank}").touch()
"""

MEETS = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
"""


@pytest.mark.parametrize(
    ("num", "text", "num_starts"),
    [
        (1, RAISES, 2),
        pytest.param(2, MEETS + RAISES, 2, marks=pytest.mark.long),
        pytest.param(
            *(1, "JobMember.current.progress = lambda: int(start)" + RAISES, 4),
            marks=pytest.mark.long,
        ),
        pytest.param(1, "raise ConnectionResetError", 4, marks=pytest.mark.long),
    ],
)
def test_a_script_that_only_repeats_its_error_is_not_started_a_third_time(
    tmp_path, num, text, num_starts
):
    with Processes(tmp_path) as processes:
        job = Job(processes, "--restarts", "9", trainer=num)
        torchrun = start_trainers(processes, job, STARTS + text, num, max_restarts=3)
        assert torchrun.status() != 0
        assert job.coordinator.status() == 1
        starts = {path.name.split()[1] for path in tmp_path.glob("start *")}
        told = job.coordinator.output().splitlines()[-1]
    assert len(starts) == num_starts
    assert ("so that the script is not started again" in told) == (num_starts == 2)
    if num_starts == 2:
        line = rf"the second ValueError at {tmp_path}/train\.py:\d+ at the same step"
        assert re.search(rf"job failed: .* ValueError: a bug of its own; {line}", told)


HANGS_UP = """
import os, signal, time
os.kill(os.getppid(), signal.SIGHUP)  # as a terminal that is closed
time.sleep({seconds})
print("trained")
"""


SAVES = """
import os, signal, threading, time
told = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: told.set())
for _ in range(3):  # as of a scheduler, and of each supervisor
    os.kill(os.getppid(), signal.SIGTERM)  # the agent, which passes the first on
    told.wait()
    time.sleep(0.2)
print("saved")
"""


def test_a_script_that_ends_well_by_a_handler_of_its_own_leaves_a_cause(
    tmp_path, monkeypatch
):
    told = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(told))
    with Processes(tmp_path) as processes:
        job = Job(processes, trainer=1)
        agent = start_trainers(processes, job, SAVES, 1, max_restarts=1)
        assert agent.status() == 128 + signal.SIGTERM
        job.coordinator.status()
    assert "saved" in agent.output()
    cause = json.loads(told.read_text())["message"]["message"]
    assert "told to end (SIGTERM)" in cause


def run_in_the_background(words):
    """Run torchrun as nohup does."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return torchrun.main(words)


@pytest.mark.parametrize(
    "is_ignored", [False, pytest.param(True, marks=pytest.mark.long)]
)
def test_a_hang_up_ends_the_job_unless_it_was_ignored_at_the_start(
    tmp_path, is_ignored
):
    with Processes(tmp_path) as processes:
        job = Job(processes, trainer=1)
        text = HANGS_UP.format(seconds=1 if is_ignored else 600)
        main = run_in_the_background if is_ignored else torchrun.main
        agent = start_trainers(processes, job, text, 1, max_restarts=1, main=main)
        told = job.coordinator
        assert told.status() == (0 if is_ignored else 1), told.output()
        assert (agent.status() == 0) == is_ignored, agent.output()
        ended = "job ended: it was told to end (SIGHUP)" in told.output()
        assert ended != is_ignored
        assert ("trained" in agent.output()) == is_ignored


def test_a_torchrun_that_ended_first_is_named_where_all_are_ended_for_it(tmp_path):
    with Processes(tmp_path) as processes:
        flags = "--heartbeat-s", "4", "--leave-timeout-s", "1"  # a look a second
        job = Job(processes, *flags, trainer=1)
        agent = start_trainers(processes, job, WAIT_FOR_EVER, 1, max_restarts=0)
        agent.has_printed("at work")
        for trainer in children_of(agent.pid):
            os.kill(trainer, signal.SIGSTOP)  # else it may be first to say so
        agent.kill()
        job.coordinator.send(signal.SIGTERM)
        assert job.coordinator.status() == 1
        last = job.coordinator.output().splitlines()[-1]
    assert "job failed: the torchrun of trainer 0 was killed" in last


def test_a_trainer_that_lost_its_torchrun_says_so(tmp_path):
    with Processes(tmp_path) as processes:
        job = Job(processes, trainer=1)
        agent = start_trainers(processes, job, WAIT_FOR_EVER, 1, max_restarts=0)
        agent.has_printed("at work")
        agent.kill()
        assert job.coordinator.status() == 1
        last = job.coordinator.output().splitlines()[-1]
    assert "job failed: trainer 0: lost the torchrun that started it" in last


def test_an_agent_that_is_through_is_not_ended_since_its_book_is_closed(
    book, monkeypatch
):
    agent, killed = torchrun.Agent(torchrun.AgentConfig(), book), []
    agent._signals, writer = os.pipe()
    call = book.call

    def end_meanwhile(*request):
        agent._is_over.set()
        book.close()
        return call(*request)

    monkeypatch.setattr(book, "call", end_meanwhile)
    monkeypatch.setattr(os, "kill", lambda *to: killed.append(to))
    agent._watch()
    assert killed == []
    for descriptor in (agent._signals, writer):
        os.close(descriptor)
