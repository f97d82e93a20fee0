"""Jobs whose processes are started again: each is a real one, killed by a signal."""

import contextlib
import os
import re
import signal
import sys

import pytest

from persia_torchrec.job import supervisor
from persia_torchrec.job.member import LAST_CHECKPOINT
from persia_torchrec.job.member_record import MemberRecord
from persia_torchrec.job.registry import AddressBook
from tests.support import faults
from tests.support.processes import is_running, parent_of, wait_until
from tests.support.repository import ROOT
from tests.support.script_jobs import WAIT_FOR_EVER, WAIT_FOR_GO, Job

pytestmark = pytest.mark.multiprocess


@contextlib.contextmanager
def book_of(job):
    with contextlib.closing(AddressBook.join("localhost", job.port)) as book:
        yield book


def kill_command(process):
    faults.kill(process.pid)


def kill_supervisor(process):
    faults.kill(process.supervisor.pid)


def comes_back(job, book, role, kill):
    """Kill a process of a member; return it when the next one has its place."""
    record = MemberRecord(book, role, 0)
    wait_until(record.process, f"{role} 0 joins", details=job.coordinator.output)
    before = record.process()
    kill(before)
    wait_until(
        lambda: record.process() != before,
        f"{role} 0 is back",
        details=job.coordinator.output,
    )
    assert book.state() == ("running", "")
    return before


@pytest.mark.slow
def test_a_job_continues_when_members_coordinator_and_supervisors_are_killed(processes):
    job = Job(processes, recovers=True, server=1, trainer=1)
    server = job.start_member("serve")
    trainer = job.start("trainer", WAIT_FOR_GO)
    trainer.has_printed("at work")
    with book_of(job) as book:
        first = comes_back(job, book, "server", kill_command)
        job.coordinator.has_printed("server 0 is back, failover took ")
        coordinator = comes_back(job, book, "coordinator", kill_command)
        for role in ("server", "coordinator"):
            comes_back(job, book, role, kill_supervisor)
        assert book.ask(["timings"], timeout_s=1) != []
        last = [
            MemberRecord(book, role, 0).process() for role in ("server", "coordinator")
        ]
        (job.folder / "go").touch()
        assert trainer.status() == 0
    for process in last:
        for pid in (process.pid, process.supervisor.pid):
            wait_until(lambda pid=pid: not is_running(pid), "it ends")
    output = job.coordinator.output()
    killed = f"server 0 (process {first.pid}) was killed; the job waits for its return"
    assert output.count(killed) == 1
    ended = f"the coordinator (process {coordinator.pid}) has ended, and is back"
    assert output.count(ended) == 1
    assert "the job is finished" in output
    assert "ERROR" not in output + server.output() + trainer.output()
    assert server.output().endswith("left\n")


def test_a_member_that_always_raises_fails_the_job_and_is_shown_once(processes):
    job = Job(processes, "--restarts", "1", server=1, trainer=1)
    trainer = job.start("trainer", WAIT_FOR_EVER)
    server = job.start_member("fail")
    assert [p.status() for p in (job.coordinator, trainer, server)] == [1, 1, 1]
    cause = "server 0: ValueError: the table is round"
    output = job.coordinator.output()
    assert output.count(f"{cause}; the job waits for its return") in (1, 2)
    why = f"job failed: {cause}, after 1 restarts without progress; its log: "
    assert output.splitlines()[-1].endswith(f"{why}{server.log}")
    assert (
        server.output().count("ValueError") == server.output().count("Traceback") == 1
    )


def test_a_data_loader_that_only_repeats_its_error_is_not_started_a_third_time(
    processes,
):
    job = Job(processes, "--restarts", "9", trainer=1, loader=1)
    trainer = job.start("trainer", WAIT_FOR_EVER)
    path = processes.folder / "load.py"
    path.write_text("print('it reads', flush=True)\nraise KeyError('user')\n")
    code = f"from persia_torchrec.job import script; script.main(['loader', '{path}'])"
    variables = {"PERSIA_STORE_PORT": str(job.port), "PYTHONPATH": str(ROOT)}
    command = ["--", sys.executable, "-c", code]
    loader = processes.start("loader-0", supervisor.main, command, env=variables)
    assert [p.status() for p in (job.coordinator, trainer, loader)] == [1, 1, 1]
    assert loader.output().count("it reads") == 2
    told = job.coordinator.output().splitlines()[-1]
    why = f"loader 0: KeyError: 'user'; the second KeyError at {path}:2 at the same"
    assert f"job failed: {why} step" in told


def stop_supervisor_and_kill(process):
    os.kill(process.supervisor.pid, signal.SIGSTOP)
    kill_command(process)


def kill_all_of(process):
    """Also what starts a supervisor again."""
    inner = process.supervisor.pid
    faults.kill(process.pid, inner, parent_of(inner))


@pytest.mark.parametrize(
    ("kill", "recovery_timeout_s", "why"),
    [
        pytest.param(
            *(stop_supervisor_and_kill, 1, "was killed, and was not back within 1 s"),
            marks=pytest.mark.long,
        ),
        (kill_all_of, 3600, "was killed, and so was its supervisor: nothing starts it"),
    ],
)
def test_a_member_that_does_not_come_back_fails_the_job(
    processes, kill, recovery_timeout_s, why
):
    options = ["--recovery-timeout-s", str(recovery_timeout_s)]
    job = Job(processes, *options, "--leave-timeout-s", "2", server=1, trainer=1)
    trainer = job.start("trainer", WAIT_FOR_EVER)
    job.start_member("serve").has_printed("serving")
    with book_of(job) as book:
        process = MemberRecord(book, "server", 0).process()
        book.tell(LAST_CHECKPOINT, "runs/7")
        kill(process)
        assert job.coordinator.status() == 1
    output = job.coordinator.output()
    (last,) = re.findall("job failed: (.*)", output)
    assert last.startswith(f"server 0 (process {process.pid}) {why}")
    assert "; the last checkpoint is runs/7; its log: " in last
    assert "trainer 0 ends: server 0 has failed" in trainer.output()
