"""The state of a job changes by requests and with time, without sockets."""

import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from persia_torchrec.job.coordinator import Coordinator, CoordinatorConfig
from persia_torchrec.job.process_identity import ProcessIdentity
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.requests import (
    Beat,
    ClaimSize,
    Fail,
    FindNotes,
    FindRole,
    Finish,
    JobTimings,
    Look,
    Raise,
    Register,
    Report,
    SetNote,
    TellLastStep,
    TellToEnd,
)
from persia_torchrec.job.state import ANSWERS, AwakeClock, JobState

TICK_S = 0.25
TIMINGS = JobTimings(silent_s=20.0, recovery_timeout_s=600.0)


def elsewhere(number, supervisor=None):
    """Return a process of another host, of whose end only its silence tells."""
    return ProcessIdentity(number, "elsewhere", "7", f"n{number}", "", supervisor)


def job_of(num, supervisor=None):
    """Return a job of trainers that have registered, and these."""
    job = JobState("job", AwakeClock(0.0), timings=TIMINGS)
    for index in range(num):
        job.register(Register("trainer", index, elsewhere(index, supervisor)))
    return job, [*job.members.values()]


def ask(job, request):
    return ANSWERS[type(request)](job, request)


def pass_time(job, seconds, *beating):
    """Let time pass, in which members send heartbeats; return how the job fails."""
    until_s = job.clock.now_s + seconds
    while job.clock.now_s < until_s:
        job.clock.advance(job.clock.seen_s + TICK_S)
        for index in beating:
            job.beat(Beat("trainer", index, f"n{index}"))
        failure = job.tick(job.members.values())
        if failure is not None:
            return failure
    return None


@pytest.mark.parametrize("num", [8, 64, 512])
def test_a_silence_is_noticed_when_its_limit_is_over(num):
    job, _ = job_of(num)
    beating = range(num - 1)
    assert pass_time(job, 20.0, *beating) is None
    assert pass_time(job, 2.0, *beating) == f"trainer {num - 1} was silent for 20 s"


@pytest.mark.parametrize("tick_s", [0.1, 0.9])
def test_a_recovery_has_so_many_seconds_however_long_a_tick_takes(tick_s):
    job, (member,) = job_of(1, elsewhere(7))
    while (failure := job.tick([member])) is None:
        job.clock.advance(job.clock.seen_s + tick_s)
    assert failure == "trainer 0 was silent for 20 s, and was not back within 600 s"
    assert 620.0 < job.clock.now_s < 622.0


def test_members_are_not_to_blame_for_a_pause_of_the_coordinator():
    job, (member,) = job_of(1)
    job.clock.advance(3600.0)
    assert job.clock.now_s == 1.0
    assert job.tick([member]) is None


def test_a_member_that_is_heard_again_is_back(caplog):
    caplog.set_level("INFO")
    job, (member,) = job_of(1, elsewhere(7))
    assert pass_time(job, 30.0) is None
    job.beat(Beat("trainer", 0, "n0"))
    assert job.tick([member]) is None
    assert caplog.messages == [
        "trainer 0 has sent no heartbeat for 4.0 s",
        "trainer 0 was silent for 20 s; the job waits for its return",
        "trainer 0 is back, failover took 9.8 s",
    ]


@pytest.mark.parametrize(
    ("num", "next_beat_s", "quick_s"),
    [(8, 1.0, 0.1), (100, 1.0, 0.1), (512, 5.12, 0.512), (2048, 8.0, 2.048)],
)
def test_heartbeats_are_rarer_in_a_large_job(num, next_beat_s, quick_s):
    job, _ = job_of(num)
    assert job.next_beat_s() == pytest.approx(next_beat_s)
    job.finish(Finish(is_over=False))
    assert job.next_beat_s() == pytest.approx(quick_s)


def test_a_heartbeat_of_a_process_that_was_replaced_is_none():
    job, (member,) = job_of(1)
    assert job.beat(Beat("trainer", 0, "n0")).successor == 0
    job.register(Register("trainer", 0, elsewhere(9), "n0"))
    num = member.num_beats
    assert job.beat(Beat("trainer", 0, "n0")).successor == 9
    assert member.num_beats == num


def test_a_place_is_taken_by_whom_its_holder_was_told():
    job, (member,) = job_of(1)
    assert job.register(Register("trainer", 0, elsewhere(8), "n7")) == "n0"
    assert job.register(Register("trainer", 0, elsewhere(8), "n0")) == "n8"
    assert job.register(Register("trainer", 0, elsewhere(8), "n0")) == "n8"  # again
    assert member.process == elsewhere(8)


def test_progress_and_notes_come_with_a_heartbeat():
    job, (member,) = job_of(1)
    job.beat(Beat("trainer", 0, "n0", 7, notes={"run": "a"}))
    job.beat(Beat("trainer", 0, "n0", 3))  # from a checkpoint on
    assert member.progress == 7
    assert job.find_notes(FindNotes(["run", "other"])).values == ["a", None]


def test_a_script_that_raises_again_without_progress_is_known():
    job, (member,) = job_of(1)
    raised = [
        job.note_raise(Raise("loader", 0, start, place))
        for start, place in [(0, "a:1"), (0, "a:1"), (1, "b:1"), (2, "b:1")]
    ]
    assert raised == [False, False, False, True]
    member.progress = 1
    assert not job.note_raise(Raise("loader", 0, 3, "b:1"))


INDEX = st.integers(0, 2)
REQUESTS = st.one_of(
    st.builds(
        lambda index, number: Register(
            "trainer", index, elsewhere(number), f"n{index}"
        ),
        INDEX,
        st.integers(0, 5),
    ),
    st.builds(lambda i, n: Beat("trainer", i, f"n{n}", n), INDEX, st.integers(0, 5)),
    st.builds(lambda i, n: Report("trainer", i, n, n > 3), INDEX, st.integers(0, 5)),
    st.builds(lambda i, n: ClaimSize("server", i, n, f"at {i}"), INDEX, INDEX),
    st.builds(
        SetNote, st.sampled_from("ab"), st.text(max_size=3), st.none() | st.text()
    ),
    st.builds(Fail, st.just("trainer 0"), st.sampled_from(["x", "y"])),
    st.builds(Finish, st.booleans()),
    st.builds(TellToEnd, st.sampled_from(["SIGTERM", "SIGINT"]), st.just("server 0")),
    st.just(TellLastStep()),
    st.just(FindRole("server")),
    st.floats(0.0, 30.0),
)


@settings(max_examples=40)
@given(st.lists(REQUESTS, max_size=30), st.data())
def test_a_state_read_back_continues(steps, data):
    job, _ = job_of(3)
    cut = data.draw(st.integers(0, len(steps)))
    verdict = None
    for number, step in enumerate(steps):
        if number == cut:  # the coordinator is killed, and the next one continues
            job = msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=JobState)
        before = [structs.asdict(m) for m in job.members.values()]
        if isinstance(step, float):
            job.clock.advance(job.clock.seen_s + step)
            job.tick(job.members.values())
            continue
        answer = ask(job, step)
        twice = msgspec.json.encode(ask(job, step))
        if not isinstance(step, Report | Beat | Register):
            assert twice == msgspec.json.encode(answer)  # a request is sent again
        after = [structs.asdict(m) for m in job.members.values()]
        for then, now in zip(before, after, strict=True):
            assert now["progress"] >= then["progress"]
            assert now["beat_s"] >= then["beat_s"]
        verdict = verdict or (job.reason if job.outcome != "running" else None)
        assert job.outcome == "running" or job.reason == (verdict or "")
    view = ask(job, Look())
    assert (view.outcome, view.reason) == (job.outcome, job.reason)


def test_the_coordinator_has_no_connection_to_itself():
    own, config = psutil.Process(), CoordinatorConfig(port=0, num_trainers=2)
    before = len(own.net_connections("tcp"))
    book = AddressBook.host(0)
    try:
        watching = Coordinator(config, book)
        book.claim_size("trainer", 0, 2)
        for index in range(2):
            book.call(Register("trainer", index, elsewhere(index)), str)
        assert watching._failure(joining_is_over=False) is None
        assert book.state() == ("running", "")
        assert len(own.net_connections("tcp")) == before + 1  # which listens
        with_member = AddressBook.join("localhost", book.port)
        assert with_member.state() == ("running", "")
        assert len(own.net_connections("tcp")) == before + 3  # both ends of one
        with_member.close()
    finally:
        book.close()
