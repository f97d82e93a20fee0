"""Processes of a job that are stopped, and do not answer."""

import contextlib
import os
import signal

import pytest

from persia_torchrec.wire.address_book import AddressBook
from persia_torchrec.wire.member_record import MemberRecord
from tests.launch.jobs import Job
from tests.launch.test_coordinator import WAIT_FOR_GO
from tests.processes import Processes, wait_until

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


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
