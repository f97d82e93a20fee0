"""A job whose NN worker waits, while its other processes are killed again and again."""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.errors import PersiaError
from persia_torchrec.job.member_record import MemberRecord
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.rpc.addresses import open_listening
from persia_torchrec.table import TableSpec
from tests.support.faults import kill
from tests.support.local_job import ONE_SLOT
from tests.support.ports import draw_port
from tests.support.processes import (
    DEADLINE_S,
    children_of,
    is_running,
    parent_of,
    wait_until,
)
from tests.support.torchx_jobs import TorchxJob

NUM_ROUNDS = 60
MEMBERS = [("server", 0), ("server", 1), ("worker", 0), ("coordinator", 0)]
TABLE = TableSpec(name="kept", dim=4, optimizer=Adagrad(0.1))
IDS = np.arange(10_000, dtype=np.uint64)
WAIT_FOR_GO = """
import pathlib, time
print("the trainer waits", flush=True)
while not pathlib.Path(__file__).with_name("go").exists():
    time.sleep(0.05)
"""


@contextlib.contextmanager
def waiting_job(folder, max_restarts=1000):
    """Start a job whose processes recover; give it, and its address book."""
    (folder / "wait.py").write_text(WAIT_FOR_GO)
    (folder / "embedding.yml").write_text(ONE_SLOT)
    (folder / "global.yml").write_text("{}")
    port = draw_port()
    arguments = ["--nn_worker", folder / "wait.py", "--data_loader", "none"]
    arguments += ["--data_loaders", 0, "--servers", 2, "--port", port]
    arguments += ["--embedding_config", folder / "embedding.yml"]
    arguments += ["--restarts", max_restarts]
    arguments += ["--global_config", folder / "global.yml"]
    with TorchxJob(folder, "persia.train", *map(str, arguments)) as job:
        job.has_printed("the trainer waits")
        with contextlib.closing(AddressBook.join("localhost", port)) as book:
            yield job, book


@contextlib.contextmanager
def client_of(book):
    """Give a client of the servers, once they are ready."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        servers = book.addresses("server")
        try:
            client = EmbeddingClient.connect(servers, greeting=book.greeting)
            break
        except PersiaError:
            assert time.monotonic() < deadline
    with contextlib.closing(client):
        yield client


def is_supervisor(pid):
    """Return whether a process is one, and not what orphans are given to."""
    return b"supervisor" in Path(f"/proc/{pid}/cmdline").read_bytes()


def draw_victims(process, draw):
    """Yield processes of a member to be killed; it starts again after these."""
    inner = process.supervisor.pid
    how = draw.choice(["command", "command", "again", "inner", "both", "outer"])
    outer = parent_of(inner)
    if how == "outer" and is_supervisor(outer):  # after which all else is as before
        yield outer
        wait_until(lambda: len(children_of(inner)) != 1, "forked a replacement")
    yield inner if how == "inner" else process.pid
    if how == "again":  # the next one, too, or its supervisor while there is none
        time.sleep(draw.random())
        yield from children_of(inner) or [inner]
    if how == "both":
        yield inner


def kill_some(book, draw):
    """Kill processes of some members; return which, and their identities."""
    killed = []
    for role, index in draw.sample(MEMBERS, draw.choice([1, 1, 1, 2, 3])):
        record = MemberRecord(book, role, index)
        wait_until(record.process, f"{role} {index} joins")
        process = record.process()
        for victim in draw_victims(process, draw):
            with contextlib.suppress(ProcessLookupError):
                kill(victim)
        killed.append((record, process))
    return killed


def test_a_waiting_job_survives_kills_of_all_roles_and_keeps_its_rows(tmp_path):
    draw = random.Random(15)
    with waiting_job(tmp_path) as (job, book):
        with client_of(book) as client:
            client.add_tables([TABLE])
            weights = np.random.default_rng(0).normal(size=(len(IDS), 4))
            client.write("kept", IDS, weights.astype(np.float32))
            before = client.read("kept", IDS)
        for _ in range(NUM_ROUNDS):
            for record, process in kill_some(book, draw):
                wait_until(
                    lambda record=record, process=process: record.process() != process,
                    f"{record.who} is back",
                    details=job.output,
                )
            assert book.state() == ("running", "")
        with client_of(book) as client:
            client.learn_tables()
            assert np.array_equal(client.read("kept", IDS), before)
        (tmp_path / "go").touch()
        ended = job.wait()
    assert "the job is finished" in ended.output
    assert "ERROR persia_torchrec" not in ended.output


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL]
)
def test_nothing_stays_behind_of_a_job_whose_launcher_is_ended(tmp_path, number):
    with waiting_job(tmp_path) as (job, _):
        pids = job.pids()
        # And two supervisors, torchrun and NN worker, and torchx.
        assert len(pids) == 3 * len(MEMBERS) + 5
        os.kill(job._torchx.pid, number)
        job._torchx.wait()
        wait_until(
            lambda: not any(map(is_running, pids)) and not job.pids(),
            "all processes end",
            details=job.output,
        )


def test_nothing_stays_behind_of_a_job_whose_processes_are_killed_at_once(tmp_path):
    shared = set(Path("/dev/shm").iterdir())
    with waiting_job(tmp_path) as (job, book):
        for pid in job.pids():
            with contextlib.suppress(ProcessLookupError):  # with its supervisor
                kill(pid)
        wait_until(lambda: not job.pids(), "all processes end", details=job.output)
        with open_listening(port=book.port):
            assert set(Path("/dev/shm").iterdir()) <= shared


@pytest.mark.parametrize("is_outer", [False, True])
def test_torchx_says_failed_only_if_the_process_that_it_started_was_killed(
    tmp_path, is_outer
):
    with waiting_job(tmp_path) as (job, book):
        record = MemberRecord(book, "server", 0)
        for role, num in (("server", 2), ("worker", 1)):  # which all start
            assert len(book.addresses(role)) == num
        process = record.process()
        inner = process.supervisor.pid
        if is_outer:
            kill(parent_of(inner))
            job.has_printed("forked a replacement")
            assert record.process() == process
        else:
            kill(inner)
            job.has_printed("server 0 is back, failover took ")
        (tmp_path / "go").touch()
        ended = job.wait()
    assert ended.status == is_outer
    assert "the job is finished" in ended.output


@pytest.mark.parametrize("role", ["server", "trainer", "coordinator"])
def test_a_job_fails_at_once_when_nothing_starts_a_process_again(tmp_path, role):
    with waiting_job(tmp_path) as (job, book):
        process = MemberRecord(book, role, 0).process()
        inner = process.supervisor.pid
        kill(process.pid, inner, parent_of(inner))
        ended = job.wait()
    assert ended.status == 1
    why = f"{role} 0 (process {process.pid}) was killed, and so was its supervisor: no"
    if role == "coordinator":
        why = "The coordinator has ended"
    assert why in ended.output


def test_a_job_whose_coordinator_is_killed_again_and_again_fails(tmp_path):
    with waiting_job(tmp_path, max_restarts=2) as (job, book):
        record = MemberRecord(book, "coordinator", 0)
        for num_left in (2, 1, 0):
            process = record.process()
            kill(process.pid)
            if num_left:
                wait_until(
                    lambda process=process: record.process() != process,
                    "it is back",
                    details=job.output,
                )
        ended = job.wait()
    assert ended.status == 1
    why = "job failed: the coordinator ended too often: 2 restarts without progress"
    assert why in ended.output
