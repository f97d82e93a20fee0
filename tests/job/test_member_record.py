import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from msgspec import structs

from persia_torchrec import processes, timeouts
from persia_torchrec.errors import JobError, JobMismatchError
from persia_torchrec.job import process_identity as processes_module
from persia_torchrec.job.member_record import MemberRecord
from persia_torchrec.job.process_identity import ProcessIdentity, Siblings
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.requests import Register
from tests.support.processes import DEADLINE_S, wait_until

SILENT_S = 10.0
WAITING = [sys.executable, "-S", "-c", "print(flush=True); input()"]


def test_a_member_is_known_once_it_has_registered(book):
    record = MemberRecord(book, "server", 0)
    assert record.process() is None
    record.register(SILENT_S)
    process = MemberRecord(book, "server", 0).process()
    assert process is not None
    assert not process.has_ended()
    assert MemberRecord(book, "server", 1).process() is None


def test_every_heartbeat_is_counted(book):
    record, reader = MemberRecord(book, "server", 0), MemberRecord(book, "server", 0)
    record.register(SILENT_S)
    first = reader.read().num_beats
    record.beat(0, {})
    assert reader.read().num_beats == first + 1


def test_a_member_that_registers_again_has_not_left(book):
    record = MemberRecord(book, "server", 0)
    record.register(SILENT_S)
    before = record.process()
    record.leave()
    assert record.read().ending() == "left"
    assert record.read().left == before
    record.register(SILENT_S)
    assert record.read().ending() is None


@pytest.fixture
def alive(book):
    """A member that beats, in a place that others want."""
    member = MemberRecord(book, "server", 0)
    member.register(SILENT_S)
    stop = threading.Event()

    def beat():
        while not stop.wait(0.02):
            member.beat(0, {})

    beating = threading.Thread(target=beat)
    beating.start()
    yield member
    stop.set()
    beating.join()


def test_a_second_process_is_not_the_same_member(book, alive):
    before = alive.process()
    message = (
        rf"be server 0 in job '{book.greeting.job_id}', at port {book.port}\. "
        rf"Received: process {before.pid} is, in a job that is running\. .* another "
        r"\(--port"
    )
    with pytest.raises(JobMismatchError, match=message):
        MemberRecord(book, "server", 0).register(SILENT_S)
    assert alive.process() == before
    MemberRecord(book, "server", 1).register(SILENT_S)


def test_of_concurrent_registrations_one_succeeds(book):
    comers = [MemberRecord(book, "server", 0) for _ in range(8)]
    rejected = []

    def sign(comer):
        try:
            comer.register(SILENT_S)
        except JobMismatchError:
            rejected.append(comer)

    stop = threading.Event()
    threads = [threading.Thread(target=sign, args=(comer,)) for comer in comers]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not stop.wait(0.01):
        book.job.member("server", 0).num_beats += 1
    for thread in threads:
        thread.join()
    assert len(rejected) == len(comers) - 1


def put_holder(book, **changes):
    """Make another process server 0, which differs from this one as told."""
    MemberRecord(book, "server", 0).register(SILENT_S)
    member = book.job.member("server", 0)
    member.process = structs.replace(member.process, **changes)


def test_a_member_whose_process_has_ended_is_replaced_at_once(book):
    put_holder(book, pid=2**22 + 1)
    record = MemberRecord(book, "server", 0)
    record.register(3600)
    assert record.process().pid == os.getpid()


def test_a_member_is_replaced_at_once_by_the_next_of_its_supervisor(book, monkeypatch):
    monkeypatch.setenv("PERSIA_SUPERVISOR", str(os.getppid()))
    supervisor = ProcessIdentity.of(os.getppid())
    holder = structs.replace(ProcessIdentity.of(1), supervisor=supervisor)
    book.job.member("server", 0).process = holder
    record = MemberRecord(book, "server", 0)
    record.register(3600)
    assert record.process().pid == os.getpid()
    assert record.process().supervisor.is_same(supervisor)


def test_a_member_of_another_host_is_replaced_after_missed_heartbeats(book):
    put_holder(book, process_table="another boot")
    record = MemberRecord(book, "server", 0)
    record.register(0.2)
    assert record.process().process_table != "another boot"


def join_from_another_host(book):
    """Be server 0 of another host; return its connection."""
    other = AddressBook.join("localhost", book.port)
    own = ProcessIdentity.of_this_process()
    holder = structs.replace(own, process_table="another boot")
    assert other.call(Register("server", 0, holder), str) == holder.nonce
    return other


def test_a_member_of_another_host_whose_connection_is_lost_is_replaced_at_once(book):
    other = join_from_another_host(book)
    other.close()
    record = MemberRecord(book, "server", 0)
    record.register(3600)
    assert record.process().process_table != "another boot"


def test_a_member_of_another_host_is_gone_with_its_connection(book):
    other = join_from_another_host(book)
    record = MemberRecord(book, "server", 0)
    assert not record.read().is_gone()
    other.close()
    wait_until(lambda: record.read().is_gone(), "its process has ended")


def test_a_member_that_left_a_finished_job_is_not_replaced(book):
    record = MemberRecord(book, "trainer", 0)
    record.register(SILENT_S)
    book.finish()
    record.leave()
    with pytest.raises(JobMismatchError, match="in a job that is finished"):
        MemberRecord(book, "trainer", 0).register(SILENT_S)
    assert record.read().ending() == "left"
    MemberRecord(book, "loader", 0).register(SILENT_S)  # which was late


def test_a_member_reports_that_its_work_is_done(book):
    record = MemberRecord(book, "trainer", 0)
    assert not record.read().is_done
    record.report_done()
    assert MemberRecord(book, "trainer", 0).read().is_done


def test_a_process_has_ended_even_before_it_is_waited_for():
    with subprocess.Popen(
        [sys.executable, "-S", "-c", ""], stdout=subprocess.PIPE
    ) as child:
        child.stdout.read()
        process = structs.replace(ProcessIdentity.of_this_process(), pid=child.pid)
        while child.returncode is None and not process.has_ended():
            pass
        assert child.returncode is None
    assert process.has_ended()


def test_only_the_process_that_has_registered_is_killed():
    with subprocess.Popen(WAITING, stdin=subprocess.PIPE) as child:
        start = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")")[-1].split()
        own = ProcessIdentity.of_this_process()
        process = structs.replace(own, pid=child.pid, start=start[19])
        earlier = structs.replace(process, start="1")  # had its number before
        elsewhere = structs.replace(process, process_table="another boot")
        for other in (earlier, elsewhere):
            assert not other.kill()
        assert earlier.has_ended()
        assert child.poll() is None
        child.send_signal(signal.SIGSTOP)
        assert process.kill()
        assert child.wait(DEADLINE_S) == -signal.SIGKILL
    assert not process.kill()


def test_a_process_of_another_host_is_not_known_to_have_ended():
    own = ProcessIdentity.of_this_process()
    elsewhere = structs.replace(own, pid=2**22 + 1, process_table="another boot")
    assert not elsewhere.has_ended()


def test_where_the_host_does_not_tell_its_process_table_no_end_is_known(monkeypatch):
    def hide(path):
        raise PermissionError(path)

    processes.process_table.cache_clear()
    monkeypatch.setattr(Path, "readlink", hide)
    own = ProcessIdentity.of_this_process()
    assert own.process_table == ""
    ended = structs.replace(own, pid=2**22 + 1)
    assert not ended.has_ended()
    assert not ended.kill()
    processes.process_table.cache_clear()


def test_a_coordinator_that_has_ended_is_not_waited_for(monkeypatch):
    monkeypatch.setenv("TORCHX_JOB_ID", "local_cwd://x/y")
    monkeypatch.setenv("PERSIA_STORE_HOST_ENV", "HOST")
    monkeypatch.setattr(os, "getppid", os.getpid)  # the siblings: own children
    monkeypatch.setattr(processes_module, "_LOOK_S", 3600)  # the list is an old one
    monkeypatch.setattr(timeouts, "SIBLING_GONE_S", 0)
    siblings = Siblings()
    command = [*WAITING, "persia_torchrec.job.coordinator"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()  # its command line is known by then
        siblings.require_coordinator()
        child.kill()
    assert child.pid in siblings.running()
    siblings.require_coordinator()  # it may be a moment of the process table
    with pytest.raises(JobError, match=rf"process {os.getpid()} has started\. It has"):
        siblings.require_coordinator()
