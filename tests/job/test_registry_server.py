"""The state of a job outlives its coordinator."""

import os

import pytest

from persia_torchrec.job.registry_server import Journal
from persia_torchrec.job.state import AwakeClock, JobState


@pytest.fixture
def memory():
    descriptor = os.memfd_create("book")
    yield descriptor
    os.close(descriptor)


def test_the_next_coordinator_reads_what_the_last_one_wrote(memory):
    assert Journal(memory).read() is None
    for note in ("first", "second"):
        job = JobState("seven", AwakeClock(0.0))
        job.notes["checkpoint"], job.is_stale = note, True
        Journal(memory).write(job)
        assert not job.is_stale
    read = Journal(memory).read()
    assert (read.job_id, read.notes) == ("seven", {"checkpoint": "second"})


def test_without_memory_nothing_is_kept():
    journal = Journal()
    journal.write(JobState("seven", AwakeClock(0.0)))
    assert journal.read() is None
