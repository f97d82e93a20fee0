import dataclasses
import os
import re
import signal

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from persia_torchrec.errors import ConfigError
from persia_torchrec.job.member_record import MemberRecord
from persia_torchrec.job.process_identity import ProcessIdentity
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.registry_server import BookServer
from persia_torchrec.job.requests import Beat, JobTimings
from tests.support import members
from tests.support.processes import is_running, wait_until

pytestmark = pytest.mark.multiprocess

QUICK = JobTimings(heartbeat_s=0.1, silent_s=10.0, leave_s=0.3, finish_s=5.0)


@pytest.fixture
def book():
    book = AddressBook.host(0)
    book.publish(QUICK)
    yield book
    book.close()


def serve(book, processes, main=members.serve):
    """Start a member, and wait until it serves."""
    member = processes.start("member", main, book.port)
    member.has_printed("serving")
    return member


def test_a_member_leaves_with_status_0_when_the_job_is_finished(book, processes):
    member = serve(book, processes)
    record = MemberRecord(book, "server", 0)
    assert record.read().ending() is None
    book.finish()
    assert member.status() == 0
    assert "left" in member.output()
    assert record.read().ending() == "left"


def test_a_heartbeat_is_one_request(book, processes, monkeypatch):
    asked, answer = [], BookServer.answer

    def note(server, request, peer=b""):
        asked.append(type(request))
        return answer(server, request, peer)

    monkeypatch.setattr(BookServer, "answer", note)
    member = processes.start("member", members.serve, book.port)
    wait_until(lambda: asked.count(Beat) > 10, "it sends heartbeats")
    assert {*asked[asked.index(Beat) :]} == {Beat}
    book.finish()
    assert member.status() == 0


def test_an_exception_of_a_member_fails_the_job_and_the_member(book, processes):
    member = processes.start("member", members.fail, book.port)
    assert member.status() == 1
    assert book.state() == ("failed", "server 0: ValueError: the table is round")
    assert "in fail" in member.output()


@pytest.mark.parametrize("main", [members.leave_early, members.exit_early])
def test_a_member_that_leaves_before_the_end_fails_the_job(book, processes, main):
    member = processes.start("member", main, book.port)
    assert member.status() == 1
    assert book.state() == ("failed", "server 0: it left before the job had ended")


def test_a_member_ends_when_another_has_failed_and_logs_which(book, processes):
    member = serve(book, processes)
    book.fail("trainer 1", "the loss is not a number")
    assert member.status() == 1
    says_who_has_failed(member)
    assert "left" not in member.output()


@pytest.mark.parametrize("restarts", ["PERSIA_RESTARTS", "TORCHELASTIC_RESTART_COUNT"])
def test_a_process_that_is_started_again_does_not_join_a_job_that_has_failed(
    book, processes, restarts
):
    book.fail("trainer 1", "the loss is not a number")
    member = processes.start("member", members.serve, book.port, env={restarts: "1"})
    assert member.status() == 1
    assert "The job failed: trainer 1: the loss is not a number" in member.output()
    assert MemberRecord(book, "server", 0).process() is None


def test_a_member_that_compiles_reports_it_with_its_heartbeats(book, processes):
    member = processes.start("member", members.compile_loops, book.port)
    wait_until(lambda: book.view().is_compiling, "it compiles")
    book.finish()
    assert member.status() == 0


def test_a_heartbeat_that_breaks_ends_its_member_and_reports_why(book, processes):
    member = processes.start("member", members.break_heartbeat, book.port)
    assert member.status() == 1
    assert "the heartbeat of server 0 broke: ValueError" in member.output()
    state, reason = book.state()
    assert state == "failed"
    assert reason.startswith("server 0: the heartbeat of server 0 broke: ValueError")


def test_a_member_whose_main_thread_is_stuck_is_ended_when_the_job_fails(
    book, processes
):
    member = processes.start("member", members.be_stuck, book.port)
    member.has_printed("stuck")
    book.fail("trainer 1", "the loss is not a number")
    assert member.status() == 1
    record = MemberRecord(book, "server", 0)
    assert record.read().ending() == "left"


def test_a_member_ends_when_the_coordinator_has_ended(book, processes):
    member = serve(book, processes)
    book.close()
    assert member.status() == 1
    assert "server 0 lost the coordinator" in member.output()


def test_a_member_ends_when_the_coordinator_does_not_answer(tmp_path, processes):
    coordinator = processes.start("coordinator", _host_a_book, tmp_path / "port")
    coordinator.has_printed("open")
    port = int((tmp_path / "port").read_text())
    member = processes.start("member", members.serve, port)
    member.has_printed("serving")
    coordinator.send(signal.SIGSTOP)
    assert member.status() == 1
    assert "no answer of the coordinator for 1 s" in member.output()
    assert coordinator.status() == -signal.SIGKILL  # torchx would wait for it


def test_a_member_ends_when_its_parent_process_has_ended(book, processes):
    parent = processes.start("parent", members.serve_as_a_child, book.port)
    parent.has_printed("serving")
    parent.has_printed(".")
    child = int(re.search(r"child (\d+)\.", parent.output())[1])
    assert is_running(child)
    parent.send(signal.SIGKILL)
    wait_until(lambda: not is_running(child), "the child ends")
    assert "server 0 lost the process that started it" in parent.output()
    assert book.state() == ("failed", "server 0: lost the process that started it")


def test_a_forked_child_that_exits_does_not_fail_the_job(book, processes):
    member = processes.start("member", members.fork_a_child_that_leaves, book.port)
    member.has_printed("the child has ended")
    assert book.state() == ("running", "")
    book.finish()
    assert member.status() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "main", [members.serve, members.be_in_a_callback, members.be_in_the_compiler]
)
def test_a_member_that_gets_a_signal_fails_the_job(book, processes, main, number):
    member = serve(book, processes, main)
    member.send(number)
    assert member.status() == 1
    assert book.state() == ("failed", f"server 0: ended from outside ({number.name})")
    assert "damaged" not in member.output()


def test_a_signal_that_another_thread_receives_ends_a_member_that_waits(
    book, processes
):
    member = processes.start("member", members.wait_for_end, book.port)
    member.has_printed(" is there.")
    thread = re.search(r"thread (\d+) is there\.", member.output())[1]
    os.kill(int(thread), signal.SIGTERM)  # to its process, by way of this thread
    assert member.status() == 1
    assert book.state() == ("failed", "server 0: ended from outside (SIGTERM)")


def lives_on_until_the_end(book, member):
    record = MemberRecord(book, "server", 0)
    now = record.read().num_beats
    wait_until(lambda: record.read().num_beats >= now + 10, "the member lives on")
    assert book.state() == ("running", "")
    book.finish()
    assert member.status() == 0


def test_a_member_that_handles_a_signal_by_itself_keeps_running(book, processes):
    member = serve(book, processes, members.hear_by_itself)
    member.send(signal.SIGTERM)
    member.has_printed("heard")
    lives_on_until_the_end(book, member)


def test_a_signal_to_a_forked_child_does_not_reach_the_member(book, processes):
    member = processes.start("member", members.end_a_forked_child, book.port)
    member.has_printed(f"the child has ended by {signal.SIGTERM:d}.")
    lives_on_until_the_end(book, member)


def test_a_member_that_is_ended_because_another_has_failed_logs_which(book, processes):
    book.publish(dataclasses.replace(QUICK, heartbeat_s=30, silent_s=60))
    member = serve(book, processes)
    book.fail("trainer 1", "the loss is not a number")
    member.send(signal.SIGTERM)
    assert member.status() == 1
    says_who_has_failed(member)


def test_a_signal_that_the_main_thread_loses_ends_a_member_of_a_failed_job(
    book, processes
):
    book.publish(dataclasses.replace(QUICK, heartbeat_s=30, silent_s=60))
    member = serve(book, processes, members.be_in_a_callback)
    book.fail("trainer 1", "the loss is not a number")
    member.send(signal.SIGTERM)
    assert member.status() == 1
    assert "server 0 ends: trainer 1 has failed" in member.output()


def test_an_exception_of_an_expendable_member_after_the_end_is_ignored(book, processes):
    # The next heartbeat is due in 30 s: finish_s ends the wait of one that leaves.
    book.publish(dataclasses.replace(QUICK, heartbeat_s=30, silent_s=60, finish_s=0.5))
    member = serve(book, processes, members.fail_after_the_end)
    book.finish()
    assert member.status() == 0
    assert "the trainer is gone" in member.output()
    assert "left" in member.output()


def test_an_exception_caused_by_another_failure_is_not_the_reason(book, processes):
    book.publish(dataclasses.replace(QUICK, heartbeat_s=30, silent_s=60))
    member = serve(book, processes, members.fail_after_the_end)
    book.fail("trainer 1", "the loss is not a number")
    assert member.status() == 1
    says_who_has_failed(member, "loader 0")


def test_a_second_process_of_the_same_member_ends_alone(book, processes):
    member = serve(book, processes)
    second = processes.start("second", members.serve, book.port)
    assert second.status() == 1
    assert (
        "JobMismatchError: No other process must be server 0 in job '"
        in second.output()
    )
    assert f"at port {book.port}." in second.output()
    assert book.state() == ("running", "")
    book.finish()
    assert member.status() == 0


def test_a_process_with_another_size_of_its_role_ends_alone(book, processes):
    book.claim_size("server", 0, 2)  # as the coordinator was told
    second = processes.start("second", members.serve, book.port)
    assert second.status() == 1
    assert (
        "Received: 1 from server 0, 2 from another. Start 2, or tell the coordinator 1."
        in second.output()
    )
    assert book.state() == ("running", "")
    assert MemberRecord(book, "server", 0).process() is None


def test_a_killed_member_may_be_restarted(book, processes):
    member = serve(book, processes)
    member.send(signal.SIGKILL)
    again = processes.start("again", members.serve, book.port)
    again.has_printed("serving")
    book.finish()
    assert again.status() == 0


def test_a_member_ends_once_another_process_has_its_place(book, processes):
    """It was stopped, or cut off, for so long that it was given up."""
    member = serve(book, processes)
    book.job.member("server", 0).process = ProcessIdentity.of_this_process()
    assert member.status() == 1
    assert "server 0 exits: replaced by process " in member.output()
    assert "left" not in member.output()
    assert book.state() == ("running", "")


def test_an_error_of_the_process_group_waits_for_its_cause(book, processes):
    member = processes.start("member", members.lose_the_process_group, book.port)
    assert member.status() == 1
    assert book.state() == ("failed", "coordinator: trainer 1 was killed")
    says_who_has_failed(member)


def test_an_own_error_learns_although_another_has_failed_before(book, processes):
    """Two may fail by themselves; only what may be a consequence is left out."""
    book.fail("trainer 1", "the loss is not a number")
    member = processes.start("member", members.fail, book.port)
    assert member.status() == 1
    assert "ValueError: the table is round" in member.output()
    assert book.state() == ("failed", "trainer 1: the loss is not a number")


def test_torchrun_learns_why_a_trainer_of_its_own_ends(book, processes, tmp_path):
    path = tmp_path / "error.json"
    by_torchrun = {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_ERROR_FILE": str(path)}
    member = processes.start("member", members.fail, book.port, env=by_torchrun)
    assert member.status() == 1
    told = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert told.message["message"] == "server 0: ValueError: the table is round"
    assert told.timestamp > 0


@pytest.mark.parametrize(
    ("timings", "message"),
    [
        ({"silent_s": 1.5}, r"two heartbeats\. Received: 1\.5"),
        ({"grace_s": 0}, r"grace_s must be > 0\. Received: 0"),
    ],
)
def test_timings_that_cannot_work_are_rejected(timings, message):
    with pytest.raises(ConfigError, match=message):
        JobTimings(**timings)


def says_who_has_failed(member, who="server 0"):
    """Check that a member says so, and nothing else of the failure."""
    (line,) = (line for line in member.output().splitlines() if "ERROR" in line)
    assert line.endswith(f"{who} ends: trainer 1 has failed")
    assert "Traceback" not in member.output()
    assert "is not a number" not in member.output()


def _host_a_book(port_file):
    book = AddressBook.host(0)
    MemberRecord(book, "coordinator", 0).register(1.0)
    book.publish(dataclasses.replace(QUICK, silent_s=1.0))
    port_file.write_text(str(book.port))
    print("open", flush=True)
    signal.pause()
