"""What ``status`` says first of a job in which something is wrong, and what helps."""

import contextlib
import json
import os
import re
import shlex
import signal

import pytest
from click.testing import CliRunner
from rich.console import Console

from persia_torchrec import timeouts
from persia_torchrec.command import main
from persia_torchrec.command.jobs import _drawn, _echo_left
from persia_torchrec.job import job_list
from persia_torchrec.job.process_identity import ProcessIdentity
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.requests import Register
from persia_torchrec.job.status import MemberStatus, Status
from tests.support.processes import wait_until
from tests.support.script_jobs import WAIT_FOR_GO, Job

OURS = "0123456789abcdefghijklmnopqrstuvwxyz"
TRAINS_UNTIL_IT_HANGS = """
import pathlib, time
from persia_torchrec.job.member import JobMember
steps = []
JobMember.current.progress = lambda: len(steps)
print('at work', flush=True)
while not pathlib.Path('hang').exists():
    steps.append(time.sleep(0.02))
time.sleep(600)
"""


@pytest.fixture
def job(processes, monkeypatch):
    """A job whose trainer steps, and whose server has a supervisor."""
    folder = str(processes.folder / "state")
    monkeypatch.setenv("XDG_STATE_HOME", folder)
    more = {"env": {"XDG_STATE_HOME": folder}, "stalled_s": 1.0}
    times = ("--silent-s", "2", "--leave-timeout-s", "2")
    job = Job(processes, *times, server=1, trainer=1, **more)
    job.start_member("serve").has_printed("serving")
    job.start("trainer", TRAINS_UNTIL_IT_HANGS).has_printed("at work")
    with contextlib.closing(AddressBook.join("localhost", job.port)) as job.book:
        yield job


def first_line():
    """Return the first line of the status, and the exit code."""
    result = CliRunner().invoke(main, ["status"])
    assert not isinstance(result.exception, Exception), result.output
    return result.output.partition("\n")[0], result.exit_code


def says(pattern):
    """Wait until the first line has a pattern, and the exit code is 1; return it."""
    wait_until(lambda: re.match(pattern, first_line()[0]), pattern, details=first_line)
    line, code = first_line()
    assert code == 1
    assert re.search(r", for [\d.]+m?s\. Run: persia-torchrec", line)
    return line


def is_well():
    def has_no_problem():
        line, code = first_line()
        return code == 0 and line.startswith(job_list.find_jobs()[0].job_id)

    wait_until(has_no_problem, "all is well", details=first_line)


def run_remedy(line):
    _, _, command = line.partition(". Run: ")
    name, *words = shlex.split(command)
    assert name == "persia-torchrec"
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_first_line_names_a_process_that_hangs_its_time_and_a_remedy(job):
    is_well()
    server = job.book.member("server", 0).process
    os.kill(server.supervisor.pid, signal.SIGSTOP)
    os.kill(server.pid, signal.SIGKILL)
    line = says(rf"server 0 was killed: process {server.pid} has ended")
    assert "Run: persia-torchrec logs server 0" in line
    os.kill(server.supervisor.pid, signal.SIGCONT)
    is_well()

    server = job.book.member("server", 0).process
    os.kill(server.pid, signal.SIGSTOP)
    line = says(rf"server 0 is lost: no heartbeat comes from process {server.pid}")
    assert "is killed: server 0 is started again" in run_remedy(line)
    is_well()

    (job.folder / "hang").touch()
    line = says(
        r"trainer 0 is stalled: process \d+ sends heartbeats, and makes no step"
    )
    assert "Run: persia-torchrec logs trainer 0" in line  # nothing starts it again


@pytest.mark.multiprocess
def test_a_job_that_a_loader_has_failed_names_it_with_its_log(job):
    job.counts["loader"] = 1
    raising = "raise ValueError('row 7 has no label')"
    job.start("loader", raising).status()
    assert job.coordinator.status() == 1
    line = says(r"the job has failed: loader 0: ValueError: row 7 has no label")
    assert "Run: persia-torchrec logs loader 0" in line
    assert "raise ValueError" in run_remedy(line)
    failed = json.loads(CliRunner().invoke(main, ["status", "--json"]).stdout)
    assert failed["state"] == "failed"
    assert [(one["kind"], one["who"]) for one in failed["problems"]] == [
        ("failed", "loader 0")
    ]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_stop_reports_which_process_it_waits_for(job, monkeypatch):
    monkeypatch.setattr(timeouts, "SAY_S", 0.2)
    is_well()
    os.kill(job.book.member("trainer", 0).process.pid, signal.SIGSTOP)
    ended = CliRunner().invoke(main, ["stop", "--no-save"])
    assert re.search(
        r"waiting for .*trainer 0 \((running|silent|lost|killed)\)", ended.stderr
    )
    assert "has ended" in ended.stdout
    _echo_left(job_list.find_jobs()[0])  # as of one that ends between two looks


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_coordinator_that_hangs_is_named_and_killed(job, monkeypatch):
    monkeypatch.setattr(timeouts, "VERB_JOIN_S", 0.5)
    is_well()
    job.coordinator.send(signal.SIGSTOP)
    pid = job.coordinator.pid
    line = says(rf"coordinator 0 is lost: process {pid} does not answer")
    assert "is killed: coordinator 0 is gone, and the job fails" in run_remedy(line)
    line = says(rf"the job is lost: its coordinator, process {pid}, was killed")
    assert "the address book of job" in run_remedy(line)


@pytest.mark.multiprocess
def test_a_process_with_another_token_is_told_of_and_joins_with_the_right_one(
    processes, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(processes.folder / "state"))
    monkeypatch.delenv("PERSIA_JOB_TOKEN_FILE")
    monkeypatch.setenv("PERSIA_JOB_TOKEN", "ours" + OURS)
    job = Job(processes, trainer=1)
    job.coordinator.has_printed("is open at port")
    theirs = {"PERSIA_JOB_TOKEN": "theirs" + OURS}
    assert job.start("trainer", WAIT_FOR_GO, env=theirs).status() == 1
    rejected = re.compile(
        r"trainer 0 has not joined; \d+ connections with another token were rejected, "
        r"for [\d.]+s\. Run: persia-torchrec logs trainer 0 --job "
    )
    wait_until(lambda: rejected.match(first_line()[0]), "it says", details=first_line)
    line, code = first_line()
    assert code == 0
    monkeypatch.setenv("PERSIA_JOB_TOKEN", "theirs" + OURS)  # its operator has it
    told = CliRunner().invoke(main, ["status"])
    assert "rejects this process" in str(told.output) + str(told.exception)
    assert "is lost" not in told.output
    monkeypatch.setenv("PERSIA_JOB_TOKEN", "ours" + OURS)
    told = CliRunner().invoke(main, shlex.split(line.partition(". Run: ")[2])[1:])
    assert "Of a process that has not joined" in told.output
    job.start("trainer", WAIT_FOR_GO).has_printed("at work")
    is_well()
    (job.folder / "go").touch()
    assert job.coordinator.status() == 0


def elsewhere(book):
    """Register a process of another host."""
    process = ProcessIdentity(77, "elsewhere", "7", "nonce")
    book.call(Register("server", 0, process, log="node3 /logs/a"), str)


def test_a_process_on_another_host_is_killed_by_a_command_that_is_printed(book):
    elsewhere(book)
    place = ["--job", f"127.0.0.1:{book.port}"]
    told = CliRunner().invoke(main, ["kill", "server", "0", *place])
    assert told.exit_code == 1
    assert "ssh node3 kill -KILL 77\n" in told.output
    assert "--overlap --nodelist node3 kill -KILL 77\n" in told.output
    assert "kubectl exec node3 -- kill -KILL 77\n" in told.output
    told = CliRunner().invoke(main, ["kill", "trainer", "0", *place])
    assert "trainer 0 must run. Received: it has not joined." in told.output


def test_a_look_at_a_job_makes_no_token(book, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    elsewhere(book)
    assert CliRunner().invoke(main, ["status", f"127.0.0.1:{book.port}"]).output
    CliRunner().invoke(main, ["doctor"])
    assert [*tmp_path.iterdir()] == []


def test_a_status_fits_into_80_columns():
    figures = {"rows": 12_345_678, "capacity_rows": 20_000_000, "bytes": 2**33}
    figures |= {"evictions": 1234, "lookups_a_second": 1234.5, "idle": 0.123}
    figures |= {"updates_a_second": 1234.5, "hit_rate": 0.9876, "lookup_us": 12_345}
    figures |= {"p99_us": 12_345, "queue": 64}
    trained = {"step": 1_234_567, "steps_a_second": 123.4, "samples_a_second": 1e6}
    trained |= {"cache_hits": 0.5123, "cache_saves": -0.123, "dirty_rows": 1_234_567}
    trained |= {"dirty_s": 59.5}
    trained |= {"loss": 0.12345, "waits": 0.123, "staleness": 1.23}
    of_all = {"host": "worker-node-17", "pid": 4_194_304, "port": 65_535}
    of_all |= {"since_s": 1e6, "restarts": 3, "memory_bytes": 2**34, "heard_s": 0.5}
    members = [
        MemberStatus(role=role, index=12, state="running", step_s=7200, **of_all, **own)
        for role, own in (("server", figures), ("trainer", trained))
    ]
    status = Status(job="j", state="running", since_s=1.0, folder="/", members=members)
    console = Console(width=80)
    with console.capture() as captured:
        console.print(_drawn(status))
    text = captured.get()
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for word in ("worker-node-17", "4194304", "12.3M", "0.9876", "1234567", "1.23"):
        assert word in text
