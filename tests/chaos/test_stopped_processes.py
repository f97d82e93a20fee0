"""Processes that are stopped and do not answer, and networks that are cut."""

import contextlib
import os
import signal
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from persia_torchrec.server.cluster import EmbeddingCluster
from persia_torchrec.wire.address_book import AddressBook
from persia_torchrec.wire.member_record import MemberRecord
from tests.forked_jobs import ROOT
from tests.integration.persia_scripts import Scripts
from tests.launch.jobs import Job
from tests.launch.test_coordinator import WAIT_FOR_GO
from tests.processes import DEADLINE_S, Processes, wait_until
from tests.server.test_restarts import NUM_IDS, Trainer
from tests.servers import ids_of
from tests.wire.test_transport import Relay

LOST_S = 6  # after which the kernel ends the connections of a network that is cut

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
            first, member = record.process(), MemberRecord(book, "server", 0).process()
            os.kill(first.pid, signal.SIGSTOP)
            wait_until(
                lambda: record.process() != first,
                "the next one",
                details=trainer.output,
            )
            os.kill(member.pid, signal.SIGSTOP)
            silent = "server 0 was silent for 2 s; the job waits for its return"
            job.coordinator.has_printed(silent)
            os.kill(member.pid, signal.SIGCONT)
            job.coordinator.has_printed("server 0 is back, after ")
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
            stopped = MemberRecord(book, "server", 0).process()
            os.kill(stopped.pid, signal.SIGSTOP)
            second = job.start_member("serve", name="again")
            second.has_printed("serving")
            os.kill(stopped.pid, signal.SIGCONT)
            assert first.status() == 1
            assert "server 0 was given up, and ends: another process" in first.output()
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
        job.coordinator.has_printed("server 0 has sent no heartbeat for 4.0 s")
        if seconds > LOST_S:
            job.coordinator.has_printed("server 0 was lost: its process")
            job.coordinator.has_printed("server 0 is back, after ")
        (job.folder / "go").touch()
        assert [p.status() for p in (trainer, job.coordinator, server)] == [0, 0, 0]


@pytest.mark.parametrize("seconds", [5, 15, 60])
def test_every_batch_is_trained_once_though_processes_are_stopped(tmp_path, seconds):
    """Each of one, so that training waits for it."""
    with Scripts(tmp_path).start(
        *("--recover", "True", "--python", sys.executable),
        num_batches=2000,
        PYTHONPATH=str(ROOT),
    ) as job:
        job.has_printed("current idx: 5 ")
        with contextlib.closing(AddressBook.join("localhost", job.port)) as book:
            for role in ("server", "worker", "loader", "coordinator"):
                process = MemberRecord(book, role, 0).process()
                os.kill(process.pid, signal.SIGSTOP)
                time.sleep(seconds)
                with contextlib.suppress(ProcessLookupError):  # it was replaced
                    os.kill(process.pid, signal.SIGCONT)
                if role != "coordinator":
                    job.has_printed(f"{role} 0 has sent no heartbeat for 4.0 s")
        ended = job.wait()
    assert ended.status == 0, ended.output
    assert ended.line(r"rank 0: trained (\d+) batches") == "2000"
    assert ("was silent for 20 s; the job waits" in ended.output) == (seconds > 20)


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
