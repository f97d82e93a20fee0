"""Scripts that no launcher has started, in interpreters of their own."""

import contextlib
import os
import sys

import pytest

from persia_torchrec.job.member_record import MemberRecord
from persia_torchrec.job.registry import AddressBook
from tests.support import helped
from tests.support.inference_job import run_server, run_worker
from tests.support.processes import is_running, run_script, wait_until
from tests.support.script_jobs import Job

pytestmark = pytest.mark.multiprocess

BEGIN = """
import multiprocessing, os, sys, threading, time
from persia_torchrec import env
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.implicit_member import join_job

store = env.job_store()

def join(role="trainer"):
    rank, size = env.get_replica_index(), env.get_replica_size()
    join_job(role, rank, size, store)

def as_a_process(target):
    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""
# From Python 3.13 on multiprocessing keeps the exception to itself.
IS_KEPT = sys.version_info >= (3, 13)
OF_A_FUNCTION = "trainer 0: exit status 1" if IS_KEPT else "trainer 0: ValueError: inva"
STAYS = """
join("loader")
print("joined", flush=True)
time.sleep(600)
"""
IN_TWO_THREADS = """
threads = [threading.Thread(target=join, args=("loader",)) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("joined", flush=True)
time.sleep(600)
"""
MISSES_THE_OTHERS = """
join("loader")
print("joined", flush=True)
book = AddressBook.join(*store)
while book.state()[0] == "running":
    time.sleep(0.01)
raise ConnectionError("the trainers are gone")
"""


def run_interpreter(path):
    """Become ``python path``; a name with a blank first is a shell's command."""
    command = [sys.executable, path]
    if not path.endswith(".py"):
        command = ["/bin/sh", "-c", path]
    os.execv(command[0], command)


class Scripts(Job):
    """A job whose scripts are started by themselves."""

    def run(self, role, text, index=0):
        """Start one; the text continues where it can join the job."""
        path = self.folder / f"{role}-{index}-of-{self.port}.py"
        path.write_text(BEGIN + text)
        return self.become(str(path), path.stem, role, index)

    def become(self, command, name, role, index=0, **env):
        """Start what ``run_interpreter`` does."""
        variables = {
            "PERSIA_STORE_PORT": str(self.port),
            "REPLICA_INDEX": str(index),
            "REPLICA_SIZE": str(self.counts[role]),
            **env,
        }
        return self.processes.start(name, run_interpreter, command, env=variables)


def test_scripts_that_end_well_have_done_their_work(processes):
    job = Scripts(processes, "--grace-s", "0.3", loader=3, trainer=3)
    loaders = [
        job.run("loader", text, index)
        for index, text in enumerate((STAYS, IN_TWO_THREADS, MISSES_THE_OTHERS))
    ]
    for loader in loaders:
        loader.has_printed("joined")
    texts = ["join(); join()", "join(); sys.exit()", "as_a_process(join)"]
    trainers = [job.run("trainer", text, index) for index, text in enumerate(texts)]
    for script in (*trainers, *loaders, job.coordinator):
        assert script.status() == 0, script.output()
        assert "Traceback" not in script.output()
    assert "stopping loader 2: ConnectionError: the trainers are" in loaders[2].output()


def test_a_script_that_ends_badly_fails_the_job_with_the_reason(processes):
    endings = {
        "raise ValueError('no data')": (1, "trainer 0: ValueError: no data"),
        "sys.exit(3)": (3, "trainer 0: exit status 3"),
        "os.kill(os.getpid(), 15); time.sleep(600)": (143, "shutdown (SIGTERM to"),
        "as_a_process(lambda: [join(), int('x')])": (1, OF_A_FUNCTION),
        "as_a_process(lambda: [join(), exit(2)])": (2, "trainer 0: exit status 2"),
    }
    started = []
    for text, (status, reason) in endings.items():
        job = Scripts(processes, trainer=1)
        beginning = "" if "process" in text else "join(); "
        started.append((job, job.run("trainer", beginning + text), status, reason))
    for job, script, status, reason in started:
        assert script.status() == status
        assert job.coordinator.status() == 1
        assert reason in job.coordinator.output()


def test_the_others_stay_until_trainers_and_their_torchrun_have_ended(processes):
    job = Scripts(processes, "--leave-timeout-s", "240", loader=1, trainer=1)
    loader = job.run("loader", STAYS)
    loader.has_printed("joined")
    script = job.folder / "train.py"
    script.write_text(BEGIN + "join()")
    agent = f"{sys.executable} {script}; while [ ! -e go ]; do sleep 0.05; done"
    trainer = job.become(agent, "agent", "trainer", TORCHELASTIC_RUN_ID="none")
    with contextlib.closing(AddressBook.join("localhost", job.port)) as book:
        record = MemberRecord(book, "trainer", 0)
        wait_until(lambda: book.state()[0] == "finished", "the trainer is done")
        wait_until(
            lambda: not is_running(record.process().pid), "its process has ended"
        )
        beats = MemberRecord(book, "loader", 0)
        now = beats.read().num_beats
        wait_until(lambda: beats.read().num_beats >= now + 5, "the loader lives on")
        assert not book.is_over()
        assert job.coordinator.process.is_alive()
        (job.folder / "go").touch()
    for running in (trainer, loader, job.coordinator):
        assert running.status() == 0, running.output()


TRAIN = "from tests.support import helped_training as t; t.train_and_tell()"
SEND = "from tests.support import helped; helped.send()"


def test_contexts_make_a_process_a_member(processes):
    job = Scripts(processes, loader=1, trainer=1, server=1, worker=1)
    (job.folder / "slots.yml").write_text("slots_config: {age: {dim: 4}}")
    (job.folder / "train.py").write_text(TRAIN)
    (job.folder / "send.py").write_text(SEND)
    env = {
        "PERSIA_STORE_PORT": str(job.port),
        "PERSIA_EMBEDDING_CONFIG": "slots.yml",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    started = [
        processes.start(name, *call, env=env)
        for name, *call in (
            ("trainer", run_script, job.folder / "train.py"),
            ("loader", run_script, job.folder / "send.py"),
            ("server", run_server),
            ("worker", run_worker),
        )
    ]
    for running in (*started, job.coordinator):
        assert running.status() == 0, running.output()
    trained = (job.folder / "trained.txt").read_text()
    assert trained == f"{helped.NUM_BATCHES} {helped.NUM_BATCHES} 1"
    for running in started:
        assert "joined the job at localhost" in running.output()
