import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from persia_torchrec.errors import ConfigError
from persia_torchrec.job import coordinator, job_list
from persia_torchrec.job.coordinator import CoordinatorConfig
from persia_torchrec.job.member_record import MemberRecord
from persia_torchrec.job.process_identity import ProcessIdentity
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.requests import ClaimSize, Register
from persia_torchrec.job.state import AwakeClock, JobState
from tests.support.ports import draw_port
from tests.support.processes import wait_until
from tests.support.script_jobs import (
    WAIT_FOR_EVER,
    WAIT_FOR_GO,
    Job,
    run_on_another_host,
)

multiprocess = pytest.mark.multiprocess


def fails_as_one(job, why, failed, *others):
    """Wait for the end: the coordinator says why in its last line, the others who."""
    assert job.coordinator.status() == 1
    last = job.coordinator.output().splitlines()[-1]
    assert last.endswith(f" job failed: {why}; its log: {failed.log}")
    assert job.coordinator.output().count(why) == 1
    name = failed.log.stem.replace("-", " ")
    for other in others:
        assert other.status() == 1
        assert f" ends: {name} has failed" in other.output()
        assert why not in other.output()
        assert "Traceback" not in other.output()


@multiprocess
def test_the_job_is_finished_when_all_trainers_are_done(processes):
    job = Job(processes, loader=1, trainer=2)
    loader = job.start("loader", "print('all sent')")
    first = job.start("trainer", "print('trained')", index=0)
    second = job.start("trainer", WAIT_FOR_GO, index=1)
    for early in (loader, first):
        early.has_printed("has ended, waiting")
    second.has_printed("at work")
    book = AddressBook.join("localhost", job.port)
    beats = MemberRecord(book, "loader", 0)
    now = beats.read().num_beats
    wait_until(lambda: beats.read().num_beats >= now + 5, "the loader lives on")
    assert book.state() == ("running", "")
    # Slurm would end the job soon after the first process that ends.
    assert loader.process.is_alive()
    assert first.process.is_alive()
    (job.folder / "go").touch()
    members = [loader, first, second]
    assert [member.status() for member in members] == [0, 0, 0]
    assert job.coordinator.status() == 0


@multiprocess
def test_a_loader_is_ended_with_status_0_when_the_job_is_finished(processes):
    job = Job(processes, loader=1, trainer=1)
    loader = job.start("loader", WAIT_FOR_EVER)
    loader.has_printed("at work")
    trainer = job.start("trainer", "")
    assert [trainer.status(), loader.status(), job.coordinator.status()] == [0, 0, 0]
    assert "job finished; stopping loader 0" in loader.output()


@multiprocess
def test_an_exception_of_a_trainer_ends_every_process_and_learns_once(
    processes, tmp_path
):
    """And torchx finds it in the coordinator's file for errors."""
    error_file = tmp_path / "error.json"
    env = {"TORCHELASTIC_ERROR_FILE": str(error_file)}
    job = Job(processes, env=env, loader=1, trainer=1)
    loader = job.start("loader", WAIT_FOR_EVER)
    trainer = job.start("trainer", "raise ValueError('the loss is not a number')")
    why = "trainer 0: ValueError: the loss is not a number"
    fails_as_one(job, why, trainer, loader)
    assert trainer.status() == 1
    assert trainer.output().count("Traceback") == 1
    assert "trainer 0 ends: trainer 0 has failed" in trainer.output()
    reply = json.loads(error_file.read_text())
    assert reply["message"]["message"] == f"{why}; its log: {trainer.log}"


@multiprocess
def test_a_trainer_that_is_done_fails_with_the_job(processes):
    job = Job(processes, trainer=2)
    done = job.start("trainer", "print('trained')", index=0)
    late = job.start("trainer", WAIT_FOR_GO + "raise ValueError('no data')", index=1)
    done.has_printed("has ended, waiting")
    (job.folder / "go").touch()
    fails_as_one(job, "trainer 1: ValueError: no data", late, done)


@multiprocess
def test_a_killed_member_ends_the_job(processes):
    job = Job(processes, loader=1, trainer=1)
    loader = job.start("loader", WAIT_FOR_EVER)
    trainer = job.start("trainer", WAIT_FOR_EVER)
    trainer.has_printed("at work")
    trainer.send(signal.SIGKILL)
    why = f"trainer 0 (process {trainer.pid}) was killed"
    fails_as_one(job, why, trainer, loader)


@multiprocess
def test_a_member_killed_on_another_host_is_named_by_its_lost_connection(processes):
    job = Job(processes, "--silent-s", "600", loader=1, trainer=1)
    loader = job.start("loader", WAIT_FOR_EVER)
    trainer = job.start("trainer", WAIT_FOR_EVER, main=run_on_another_host)
    trainer.has_printed("at work")
    trainer.send(signal.SIGKILL)
    why = (
        f"trainer 0 was lost: its process (pid {trainer.pid}) was killed, or its host "
        "does not answer"
    )
    fails_as_one(job, why, trainer, loader)


@multiprocess
def test_a_silent_member_ends_the_job_and_is_killed(processes):
    job = Job(processes, "--silent-s", "1", "--leave-timeout-s", "1", trainer=1)
    trainer = job.start("trainer", WAIT_FOR_EVER)
    trainer.has_printed("at work")
    trainer.send(signal.SIGSTOP)
    assert job.coordinator.status() == 1
    assert "trainer 0 was silent for 1 s" in job.coordinator.output()
    assert "did not exit in time: trainer 0" in job.coordinator.output()
    assert trainer.status() == -signal.SIGKILL  # torchx would wait for it


@multiprocess
def test_an_absent_member_ends_the_job(processes):
    job = Job(
        processes, *("--join-timeout-s", "3"), *("--leave-timeout-s", "1"), trainer=2
    )
    trainer = job.start("trainer", WAIT_FOR_EVER, index=1)
    assert trainer.status() == 1
    assert "trainer 1 ends: trainer 0 has failed" in trainer.output()
    assert job.coordinator.status() == 1
    assert "trainer 0 did not join within 3 s" in job.coordinator.output()
    assert "1 of 2 roles: waiting for trainer 0, for " in job.coordinator.output()


@multiprocess
def test_a_process_that_ends_before_it_joins_ends_a_local_torchx_job(processes):
    # The two processes have one parent, as those of torchx do.
    by_torchx = {"TORCHX_JOB_ID": "local_cwd://x/y", "PERSIA_STORE_HOST_ENV": "HOST"}
    job = Job(processes, env=by_torchx, loader=1, trainer=1)
    loader = job.start("loader", WAIT_FOR_EVER)
    loader.has_printed("at work")
    processes.start("trainer", int).status()  # a trainer that ends at once
    for running in (loader, job.coordinator):
        assert running.status() == 1
    assert "loader 0 ends: trainer 0 has failed" in loader.output()
    why = "job failed: a process ended before it joined, of trainer 0"
    assert why in job.coordinator.output()


@multiprocess
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_coordinator_ends_the_job(processes, number):
    job = Job(processes, loader=1, trainer=1)
    running = [job.start(role, WAIT_FOR_EVER) for role in ("loader", "trainer")]
    for member in running:
        member.has_printed("at work")
    job.coordinator.send(number)
    assert [member.status() for member in running] == [1, 1]
    assert job.coordinator.status() == 128 + number
    for member in running:
        assert re.search(" 0 ends(, as|:) the job .*told to", member.output())
    why = f"job ended: it was told to end ({number.name})"
    assert job.coordinator.output().endswith(f"{why}\n")


@multiprocess
def test_the_process_that_ended_first_is_named_where_all_are_ended_for_it(processes):
    job = Job(processes, "--heartbeat-s", "2", loader=1, trainer=1)  # a look per 0.5 s
    running = [job.start(role, WAIT_FOR_EVER) for role in ("loader", "trainer")]
    for member in running:
        member.has_printed("at work")
    loader, trainer = running
    loader.send(signal.SIGKILL)
    trainer.send(signal.SIGTERM)  # as honcho does
    assert job.coordinator.status() == 1
    assert trainer.status() == 143
    last = job.coordinator.output().splitlines()[-1]
    assert f"job failed: loader 0 (process {loader.pid}) was killed" in last


@multiprocess
def test_a_coordinator_that_its_supervisor_ends_waits_for_none_who_never_came(
    processes,
):
    job = Job(processes, "--leave-timeout-s", "3600", loader=1, trainer=1)
    assert job.start("loader", "raise ValueError('no data')").status() == 1
    job.coordinator.has_printed("all its processes end")
    job.coordinator.send(signal.SIGTERM)
    assert job.coordinator.status() == 1
    assert "job failed: loader 0: ValueError: no data" in job.coordinator.output()


@multiprocess
def test_a_job_ends_with_the_process_that_started_its_coordinator(processes):
    command = [sys.executable, "-m", "persia_torchrec.job.coordinator"]
    flags = ["--port", str(draw_port()), "--trainers", "1", "--heartbeat-s", "0.1"]
    flags += ["--leave-timeout-s", "3600", "--linger-s", "0"]
    parent = processes.start("parent", subprocess.run, [*command, *flags])
    parent.has_printed("the address book of job")
    parent.send(signal.SIGKILL)
    wait_until(
        lambda: "job failed: the process that started it is gone" in parent.output(),
        "the coordinator says why",
        details=parent.output,
    )
    assert "did not exit in time" not in parent.output()  # no process had joined


@multiprocess
def test_a_coordinator_that_no_process_joined_ends_at_once(processes):
    flags = "--leave-timeout-s", "3600", "--learn", "trainer"
    job = Job(processes, *flags, server=2, loader=1)
    job.coordinator.has_printed("the address book of job")
    job.coordinator.send(signal.SIGTERM)
    assert job.coordinator.status() == 143
    last = job.coordinator.output().splitlines()[-1]
    assert last.endswith("job ended: it was told to end (SIGTERM)")
    assert "did not exit in time" not in job.coordinator.output()


@multiprocess
def test_a_member_that_joins_a_failed_job_logs_who_has_failed(processes):
    job = Job(processes, loader=1, trainer=1)
    trainer = job.start("trainer", "raise ValueError('the loss is not a number')")
    assert trainer.status() == 1
    loader = job.start("loader", WAIT_FOR_EVER)
    assert loader.status() == 1
    fails_as_one(
        job, "trainer 0: ValueError: the loss is not a number", trainer, loader
    )


@multiprocess
def test_a_port_in_use_ends_the_coordinator_with_an_error(processes):
    other = AddressBook.host(0)
    arguments = ["--port", str(other.port), "--trainers", "1"]
    running = processes.start("coordinator", coordinator.main, arguments)
    assert running.status() == 1
    assert f"listen on port {other.port}" in running.output()
    other.close()


@multiprocess
def test_a_metrics_port_in_use_names_the_job_that_has_it(
    processes, monkeypatch, tmp_path
):
    error_file = tmp_path / "error.json"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PERSIA_JOB_ID", "second")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("PERSIA_METRICS_PORT", str(port))
        first = job_list.record_of("first", 29400)
        with job_list.listed(first):
            arguments = ["--port", "0", "--trainers", "1"]
            running = processes.start("coordinator", coordinator.main, arguments)
            assert running.status() == 1
            why = (
                rf"must be a port that is free at .* Received: {port}, .* Job first "
                rf"has it, which runs in {Path.cwd()} with --metrics_port {port}. Set"
            )
            assert re.search(why, running.output())
            assert re.search(
                why, json.loads(error_file.read_text())["message"]["message"]
            )
            failed = next(one for one in job_list.find_jobs() if one.job_id == "second")
            assert failed.state == "failed"
            assert re.search(why, failed.reason)
        assert job_list.holder_of(port) is None


@pytest.mark.slow
def test_a_port_of_another_job_is_named_and_the_job_is_listed(
    processes, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PERSIA_JOB_ID", "second")
    with contextlib.closing(AddressBook.host(0, job_id="first")) as book:
        with job_list.listed(job_list.record_of("first", book.port)):
            arguments = ["--port", str(book.port), "--num-trainers", "1"]
            running = processes.start("coordinator", coordinator.main, arguments)
            assert running.status() == 1
        [failed] = [one for one in job_list.find_jobs() if one.job_id == "second"]
    assert failed.state == "failed"
    assert f"listen on port {book.port}. " in failed.reason
    assert f" Job first has it, which runs in {Path.cwd()}." in failed.reason
    assert failed.logs["coordinator 0"].endswith(str(running.log))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({}, r"trainers must be >= 1, or predictors, .* Received: 0 and 0"),
        ({"num_trainers": 1, "num_predictors": 1}, r"one of them\. Received: 1 and 1"),
        ({"num_trainers": -1}, r"num_trainers must be >= 0"),
        ({"num_trainers": 1, "num_predictors": -1}, r"num_predictors must be >= 0"),
        ({"num_trainers": 1, "num_servers": -1}, r"num_servers must be >= 0"),
        ({"num_trainers": 1, "join_timeout_s": 0}, r"join_timeout_s must be > 0"),
    ],
)
def test_an_invalid_setting_is_rejected(counts, message):
    with pytest.raises(ConfigError, match=message):
        CoordinatorConfig(port=0, **counts)


@pytest.fixture
def deaths():
    """Say how often a member of a role has died, with how much progress of the job."""
    job = JobState("job", AwakeClock(0.0))
    job.claim_size(ClaimSize("trainer", 0, 2))
    own = ProcessIdentity.of_this_process()

    def die(role, progress):
        job.member("trainer", 1).progress = progress
        member = job.member(role, 0)
        dead = structs.replace(ProcessIdentity.of(2**22 + 1), supervisor=own)
        expected = member.process.nonce if member.process else ""
        assert job.register(Register(role, 0, dead, expected)) == dead.nonce
        return job.tick([member])

    die.job = job
    return die


@pytest.mark.parametrize("role", ["server", "worker", "loader", "trainer"])
def test_a_member_may_end_any_number_of_times_if_batches_are_trained_between(
    deaths, role
):
    assert [deaths(role, progress) for progress in range(100)] == [None] * 100
    assert deaths(role, 99) is None
    assert "after 3 restarts without progress" in deaths(role, 99)
    assert deaths(role, 100) is None


def test_a_coordinator_may_end_any_number_of_times_if_batches_are_trained_between():
    config = CoordinatorConfig(port=0, num_trainers=1, max_restarts=3)
    own = ProcessIdentity.of_this_process()
    with contextlib.closing(AddressBook.host(0)) as book:
        watching, member = coordinator.Coordinator(config, book), None

        def start_again(progress):
            nonlocal member
            book.job.member("trainer", 0).progress = progress
            process = structs.replace(ProcessIdentity.of(1), supervisor=own)
            expected = member.process.nonce if member else ""
            book.call(Register("coordinator", 0, process, expected), str)
            member = book.member("coordinator", 0)
            watching._require_few_restarts()
            return book.state()

        for progress in [0, *range(50), 49, 49]:
            assert start_again(progress) == ("running", "")
        why = (
            "coordinator: the coordinator ended too often: 3 restarts without progress"
        )
        assert start_again(49) == ("failed", why)


def test_the_next_coordinator_knows_how_often_a_member_has_ended(deaths):
    assert [deaths("server", 7) for _ in range(3)] == [None] * 3
    left = msgspec.msgpack.encode(deaths.job)
    assert "after 3 restarts" in deaths("server", 7)
    again = msgspec.msgpack.decode(left, type=JobState)
    again.resume(1.0)
    member = again.member("server", 0)
    assert (member.num_restarts, member.progress_then) == (2, 2**62 + 7)
    assert deaths("server", 8) is None


@multiprocess
def test_the_first_process_of_a_role_reports_how_many_there_are(processes):
    learn = ("--learn", "loader", "--learn", "trainer")
    job = Job(processes, *learn, "--join-timeout-s", "600")
    job.counts = {"loader": 2, "trainer": 1}
    first = job.start("loader", "print('all sent')", index=1)
    job.coordinator.has_printed("the job has 2 of the role 'loader'")
    job.coordinator.has_printed("waiting for loader 0, any trainer")
    others = [job.start("loader", "print('all sent')"), job.start("trainer", "")]
    ended = [one.status() for one in (first, *others, job.coordinator)]
    assert ended == [0, 0, 0, 0], job.coordinator.output()


def test_missing_members_are_named():
    learn = ("loader", "trainer")
    config = CoordinatorConfig(port=0, num_workers=1, learn=learn, join_timeout_s=3)
    with contextlib.closing(AddressBook.host(0)) as book:
        book.claim_size("trainer", 1, 2)
        MemberRecord(book, "trainer", 1).register(20)
        watching = coordinator.Coordinator(config, book)
        watching._learn_sizes()
        assert watching._failure(joining_is_over=False) is None
        assert watching._failure(joining_is_over=True) == (
            "worker 0, any loader, trainer 0 did not join within 3 s; see their logs; "
            "a coordinator must be told that a job has none of a role"
        )


def test_a_job_that_has_ended_waits_for_members_that_may_join_and_for_no_others():
    dead, own = ProcessIdentity.of(2**22 + 1), ProcessIdentity.of_this_process()
    config = CoordinatorConfig(port=0, num_trainers=4, nproc_per_node=2)

    def is_waited_for(**process):
        """Trainer 0 of two torchruns has joined; return for whom is waited then."""
        with contextlib.closing(AddressBook.host(0)) as book:
            agent = process.pop("agent")
            joined = structs.replace(dead, **process)
            book.call(Register("trainer", 0, joined, agent=agent), str)
            watching = coordinator.Coordinator(config, book)
            watching._job.clock.now_s = now_s
            return [member.index for member in watching._remaining()]

    now_s = 1.0
    assert is_waited_for(agent=own) == [1, 2, 3]
    assert is_waited_for(agent=dead, supervisor=own) == [1, 2, 3]
    assert is_waited_for(agent=dead) == [2, 3]
    assert is_waited_for(agent=dead, supervisor=dead) == [2, 3]
    now_s = config.join_timeout_s + 1
    assert is_waited_for(agent=own) == []


def test_a_coordinator_that_starts_again_knows_what_it_has_learned():
    config = CoordinatorConfig(port=0, learn=("server", "trainer"))
    assert config.num_trainers == 1
    with contextlib.closing(AddressBook.host(0)) as book:
        book.claim_size("server", 2, 3)
        watching = coordinator.Coordinator(config, book)
        watching._learn_sizes()
        names = watching._names(watching._members)
    assert names == ["server 0", "server 1", "server 2", "any trainer"]


@pytest.mark.parametrize(
    ("variables", "num"),
    [({}, 1), ({"PERSIA_ENCRYPT": "1"}, 0), ({"PERSIA_STORE_HOST": "127.0.0.1"}, 0)],
)
def test_a_job_on_several_hosts_says_once_that_it_is_not_encrypted(
    processes, variables, num
):
    job = Job(processes, trainer=1, env=variables)
    job.start("trainer", "print('trained')", env=variables)
    assert job.coordinator.status() == 0
    assert job.coordinator.output().count("PERSIA_ENCRYPT=1 for all processes") == num


def test_a_coordinator_warns_of_a_token_that_can_be_guessed(processes):
    weak = {"PERSIA_JOB_TOKEN": "0123456789abcdef", "PERSIA_JOB_TOKEN_FILE": ""}
    job = Job(processes, trainer=1, env=weak)
    job.start("trainer", "print('trained')", env=weak)
    assert job.coordinator.status() == 0
    assert job.coordinator.output().count("must be random, of 96 bits or more") == 1
    assert weak["PERSIA_JOB_TOKEN"] not in job.coordinator.output()
