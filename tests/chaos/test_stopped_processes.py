"""Processes that are stopped and do not answer, and networks that are cut."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from persia_torchrec.data import DataLoader, StreamingDataset
from persia_torchrec.job import supervisor
from persia_torchrec.job.member_record import MemberRecord
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.requests import JobTimings
from persia_torchrec.server.cluster import EmbeddingCluster
from tests.support.faults import Relay, stopped
from tests.support.feeding import (
    FROM_ZERO,
    NUM_BATCHES,
    NUM_LOADERS,
    Feeders,
    counted,
)
from tests.support.feeding import NUM_IDS as NUM_FED
from tests.support.local_job import LocalJob
from tests.support.persia_scripts import Scripts
from tests.support.processes import DEADLINE_S, Processes, is_running, wait_until
from tests.support.repository import ROOT
from tests.support.restarted_servers import NUM_IDS, Trainer
from tests.support.script_jobs import WAIT_FOR_GO, Job
from tests.support.servers import ids_of

LOST_S = 6  # after which the kernel ends the connections of a network that is cut
PAUSE_S, PERIOD_S = 2.0, 0.2  # between two networks that are cut, two stops of one
MOST_AHEAD = 100  # batches of a data loader
ROLES = ["server", "worker", "loader", "trainer", "coordinator"]

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def cut(relay, seconds):
    """Cut a network for a while: at both ends the kernel does what it does then."""
    relay.is_open.clear()
    time.sleep(min(seconds, LOST_S))
    if seconds > LOST_S:
        relay.break_both_ends()
    time.sleep(max(seconds - LOST_S, 0))
    relay.is_open.set()


def test_a_stopped_coordinator_is_replaced_and_a_stopped_member_waited_for(tmp_path):
    with Processes(tmp_path) as processes:
        job = Job(processes, "--silent-s", "2", recovers=True, server=1, trainer=1)
        server = job.start_member("serve")
        trainer = job.start("trainer", WAIT_FOR_GO)
        trainer.has_printed("at work")
        server.has_printed("serving")
        with contextlib.closing(AddressBook.join("localhost", job.port)) as book:
            record = MemberRecord(book, "coordinator", 0)
            first, member = (
                record.process(),
                MemberRecord(book, "server", 0).process(),
            )
            os.kill(first.pid, signal.SIGSTOP)
            wait_until(
                lambda: record.process() != first,
                "the next one",
                details=trainer.output,
            )
            with stopped(member.pid):
                silent = "server 0 was silent for 2 s; the job waits for its return"
                job.coordinator.has_printed(silent)
            job.coordinator.has_printed("server 0 is back, failover took ")
            assert book.state() == ("running", "")
        (job.folder / "go").touch()
        assert [p.status() for p in (trainer, job.coordinator, server)] == [0, 0, 0]
    killed = f"killed the coordinator ({first.pid})"
    assert killed in trainer.output() + server.output()


def test_a_stopped_member_that_was_replaced_ends_when_it_runs_again(tmp_path):
    with Processes(tmp_path) as processes:
        job = Job(processes, "--silent-s", "2", recovers=True, server=1, trainer=1)
        trainer = job.start("trainer", WAIT_FOR_GO)
        first = job.start_member("serve")
        first.has_printed("serving")
        with contextlib.closing(AddressBook.join("localhost", job.port)) as book:
            with stopped(MemberRecord(book, "server", 0).process().pid):
                second = job.start_member("serve", name="again")
                second.has_printed("serving")
            assert first.status() == 1
            assert "server 0 exits: replaced by process" in first.output()
            assert book.state() == ("running", "")
        (job.folder / "go").touch()
        assert [p.status() for p in (trainer, job.coordinator, second)] == [0, 0, 0]


@pytest.mark.parametrize("seconds", [5, 15, 60])
def test_a_member_whose_network_is_cut_is_waited_for(tmp_path, seconds):
    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(Processes(tmp_path))
        job = Job(processes, recovers=True, server=1, trainer=1)
        trainer = job.start("trainer", WAIT_FOR_GO)
        trainer.has_printed("at work")
        relay = Relay(f"tcp://127.0.0.1:{job.port}")
        stack.callback(relay.close)
        server = job.start_member("serve", port=int(relay.address.rpartition(":")[2]))
        server.has_printed("serving")
        cut(relay, seconds)
        if seconds > LOST_S:
            job.coordinator.has_printed("server 0 has sent no heartbeat for 4.0 s")
            job.coordinator.has_printed("server 0 was lost: its process")
            job.coordinator.has_printed("server 0 is back, failover took ")
        (job.folder / "go").touch()
        assert [p.status() for p in (trainer, job.coordinator, server)] == [0, 0, 0]
    assert "killed the coordinator" not in server.output()  # which has run all the time


@pytest.mark.parametrize(
    ("seconds", "awake_s"),
    [(5, 0), (15, 0), (60, 0), (15, 0.02)],
    ids=["5 s", "15 s", "60 s", "15 s slow"],
)
def test_every_batch_is_trained_once_though_processes_are_stopped(
    tmp_path, seconds, awake_s
):
    """Each of one, so that training waits for it."""
    with Scripts(tmp_path).start(
        *("--restarts", "3", "--python", sys.executable),
        num_batches=600,
        PYTHONPATH=str(ROOT),
    ) as job:
        job.has_printed("current idx: 5 ")
        with contextlib.closing(AddressBook.join("localhost", job.port)) as book:
            for role in ROLES:
                process = MemberRecord(book, role, 0).process()
                stop(process.pid, seconds, awake_s)
                if role == "trainer":  # the others wait for it, and take no more
                    num_ahead = count_batches(job, "sent batch", "current idx")
                if role != "coordinator" and seconds > LOST_S and not awake_s:
                    job.has_printed(f"{role} 0 has sent no heartbeat for 4.0 s")
        ended = job.wait()
    assert ended.status == 0, ended.output
    assert ended.line(r"rank 0: trained (\d+) batches") == "600"
    assert ("was silent for 20 s; the job waits" in ended.output) == (seconds > 20)
    assert num_ahead < MOST_AHEAD


def count_batches(job, sent, trained):
    """Return how many batches data loaders are ahead."""
    output = job.output()
    return output.count(sent) - output.count(trained)


def stop(pid, seconds, awake_s):
    """Stop a process for a while, or have it run for a moment from time to time."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError):  # it was replaced
        while time.monotonic() < deadline:
            with stopped(pid):
                time.sleep(PERIOD_S if awake_s else seconds)
            time.sleep(awake_s)


def test_a_server_that_runs_again_changes_nothing_when_another_has_its_place(tmp_path):
    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(Processes(tmp_path))
        job = stack.enter_context(
            Scripts(tmp_path).start(
                *("--restarts", "3", "--python", sys.executable),
                num_batches=500,
                PYTHONPATH=str(ROOT),
                PERSIA_CHECKPOINT_INTERVAL_S="1",
            )
        )
        job.has_printed("automatic checkpoint")
        book = AddressBook.join("localhost", job.port)
        stack.enter_context(contextlib.closing(book))
        record = MemberRecord(book, "server", 0)
        first = record.process()
        os.kill(first.pid, signal.SIGSTOP)
        command, environment = (
            Path(f"/proc/{first.pid}/{name}").read_text().split("\0")[:-1]
            for name in ("cmdline", "environ")
        )
        second = processes.start(
            *("second", supervisor.main),
            ["--port", "0", "--memory-dir", "private", "--", *command],
            env=dict(variable.split("=", 1) for variable in environment),
            inherits=False,
        )
        job.has_printed("server 0 is back, failover took ")
        num_trained = job.output().count("current idx")
        os.kill(first.pid, signal.SIGCONT)
        wait_until(lambda: not is_running(first.pid), "it ends", details=job.output)
        wait_until(
            lambda: job.output().count("current idx") > num_trained + 20,
            "the training continues",
            details=job.output,
        )
        ended = job.wait()
        assert second.status() == 0, second.output()
    assert "server 0 exits: replaced by process" in ended.logs["server 0"]
    assert ended.line(r"rank 0: trained (\d+) batches") == "500"
    assert "the job is finished" in ended.output


@pytest.mark.parametrize("seconds", [5, 15, 60])
def test_every_batch_is_trained_once_though_networks_are_cut(
    tmp_path, monkeypatch, seconds
):
    """One after the other: to a server, to an embedding worker, to the NN worker."""
    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(Processes(tmp_path))
        job = stack.enter_context(
            LocalJob(tmp_path, monkeypatch, num_workers=0, recovery_s=DEADLINE_S)
        )
        job.book.publish(JobTimings(heartbeat_s=0.1))
        feeders, relays = Feeders(processes, job), []
        has_begun = threading.Event()

        def add_relay(role):
            """Have those who look for the first of a role find a relay."""
            wait_until(lambda: job.book.address(role, 0), f"{role} 0 is there")
            relays.append(Relay(job.book.address(role, 0)))
            stack.callback(relays[-1].close)
            job.book.register(role, 0, job.book.job.sizes[role], relays[-1].address)

        def cut_each():
            add_relay("trainer")
            for index in range(NUM_LOADERS):
                feeders.start_loader(index)
            assert has_begun.wait(DEADLINE_S)
            for relay in relays:
                cut(relay, seconds)
                time.sleep(PAUSE_S)

        add_relay("server")
        for index in range(2):
            feeders.start_worker(index)
        wait_until(lambda: job.book.address("worker", 1), "worker 1 is there")
        add_relay("worker")
        cutting = threading.Thread(target=cut_each, daemon=True)
        with job.train_ctx(embedding_config=FROM_ZERO) as ctx:
            cutting.start()
            numbers = []
            for batch in DataLoader(StreamingDataset(3), embedding_staleness=4):
                has_begun.set()
                numbers.append(batch.batch_id)
                ctx.backward(-ctx.forward(batch)[0].sum())
                # So that there are batches as long as networks are cut.
                cutting.join(len(relays) * (seconds + PAUSE_S) / NUM_BATCHES)
        assert not cutting.is_alive()
        assert sorted(numbers) == list(range(NUM_BATCHES))
        feeders.finish()
        job.client.learn_tables()
        assert job.read("item", *range(NUM_FED)).tolist() == counted()


@pytest.mark.parametrize("seconds", [5, 15, 60])
@pytest.mark.parametrize("what", ["a server is stopped", "the network is cut"])
def test_no_update_is_lost_or_applied_twice_though_servers_do_not_answer(what, seconds):
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(EmbeddingCluster.local(restarts=True))
        relays = [Relay(address) for address in cluster.addresses]
        for relay in relays:
            stack.callback(relay.close)
        addresses = [relay.address for relay in relays]
        through = SimpleNamespace(addresses=addresses, recovery_s=DEADLINE_S)
        trainers = [Trainer(through, seed) for seed in range(2)]
        for trainer in trainers:
            stack.callback(trainer.close)
            trainer.start()
        before = [trainer.num_steps + 20 for trainer in trainers]
        wait_until(
            lambda: all(t.num_steps > n for t, n in zip(trainers, before, strict=True)),
            "they train",
        )
        if what == "a server is stopped":
            cluster.processes[0].send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            cluster.processes[0].send_signal(signal.SIGCONT)
        else:
            cut(relays[0], seconds)
        for trainer in trainers:
            trainer.last_step = trainer.num_steps + 50
        for trainer in trainers:
            trainer.join(DEADLINE_S)
            assert not trainer.is_alive()
            assert trainer.error is None
        expected = sum((trainer.counts for trainer in trainers), Counter())
        weights = trainers[0].client.read("count", ids_of(*range(NUM_IDS)))[:, 0]
        assert weights.tolist() == [float(expected[id_]) for id_ in range(NUM_IDS)]
