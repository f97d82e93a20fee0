"""The processes of a job as children of this one."""

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from persia_torchrec import timeouts
from persia_torchrec.errors import JobError
from persia_torchrec.job.children import Children, Watch
from persia_torchrec.job.member_record import MemberRecord
from persia_torchrec.job.registry import AddressBook
from tests.support.ports import draw_port
from tests.support.processes import DEADLINE_S, wait_until

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def job():
    """Children that are ended after the test."""
    job = Children()
    with contextlib.ExitStack() as stack:
        stack.callback(job.end)
        yield job


def start_coordinator(job, *flags):
    """Start one; return its process."""
    job.start_module("coordinator", "job.coordinator", *flags)
    return job._processes[0][1]


def test_a_job_that_has_not_ended_in_time_is_an_error(job):
    start_coordinator(job, "--port", str(draw_port()), "--trainers", "1")
    with pytest.raises(
        JobError, match=r"must end within 0 s\. .* Give a longer timeou"
    ):
        job.wait_for_coordinator(0)


def test_a_process_that_fails_before_it_joins_is_named(job):
    start_coordinator(job, "--port", "none")
    wait_until(job.find_failed, "the coordinator fails")
    with pytest.raises(JobError, match="failed: coordinator ended with status 2; its"):
        job.require_none_failed()


def test_a_process_that_does_not_end_is_killed(job, monkeypatch, caplog):
    monkeypatch.setattr(timeouts, "CHILD_END_S", 0)
    process = start_coordinator(job, "--port", str(draw_port()), "--trainers", "1")
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # it is stopped
    job.end()
    assert process.returncode == -signal.SIGKILL
    assert "coordinator does not end; killing it" in caplog.text


def test_a_job_whose_coordinator_is_gone_has_failed(job):
    port = draw_port()
    flags = ["--heartbeat-s", "0.1", "--trainers", "1"]
    process = start_coordinator(job, "--port", str(port), *flags)
    book = AddressBook.join("localhost", port, look=job.require_none_failed)
    process.kill()
    process.wait()
    with ThreadPoolExecutor(1) as other_thread:  # which a watch does not interrupt
        watch = other_thread.submit(Watch, book, job).result()
    wait_until(watch.disarm, "the watch finds the failure")
    assert watch.stop().startswith("the coordinator is gone: ")
    book.close()


def test_the_verdict_of_a_job_is_the_status_of_its_coordinator(job, monkeypatch):
    """A coordinator that is slow to answer, or to end, has not failed."""
    port = draw_port()
    flags = ["--heartbeat-s", "0.1", "--trainers", "1"]
    flags += ["--leave-timeout-s", "0.1", "--linger-s", "0"]
    process = start_coordinator(job, "--port", str(port), *flags)
    book = AddressBook.join("localhost", port, look=job.require_none_failed)
    watch = Watch(book, job)
    try:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # it is stopped
        with monkeypatch.context() as patch:
            patch.setattr(timeouts, "REGISTRY_ANSWER_S", 0.1)
            with pytest.raises(JobError):
                book.state()
            assert watch._find_failure() is None
        os.kill(process.pid, signal.SIGCONT)
        MemberRecord(book, "trainer", 0).report_done()
        assert job.wait_for_coordinator(DEADLINE_S) == 0
        assert watch._find_failure() is None
    finally:
        failure = watch.stop()
    assert failure is None
    book.close()
