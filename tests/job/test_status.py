"""The status of a job whose members are this test: states, figures and problems."""

import re

import pytest
from msgspec import structs

from persia_torchrec import timeouts
from persia_torchrec.job import state
from persia_torchrec.job.process_identity import ProcessIdentity
from persia_torchrec.job.requests import (
    Beat,
    Fail,
    JobTimings,
    Register,
    Report,
    SetNote,
    TellToEnd,
)
from persia_torchrec.job.saves import SAVES, Saves
from persia_torchrec.job.state import AwakeClock, JobState
from persia_torchrec.job.status import Statuses

TICK_S = 0.5
FULL = "No space left on device"
WELL = "running"


class Watched:
    """A job of one server and one trainer on another host, and its status."""

    def __init__(self, *members):
        self.job = JobState("seven", AwakeClock(0.0), timings=JobTimings())
        self.statuses = Statuses("/there")
        self.now = {"step": 0.0, "requests_lookup": 0.0}
        for role in members or ("server", "trainer"):
            process = ProcessIdentity(7, "elsewhere", "7", role)
            self.job.register(Register(role, 0, process, log="node3 /logs/a"))

    def beat(self, role, step=0, **more):
        figures = {"at_s": self.job.clock.now_s, **more.pop("figures", {})}
        beat = Beat(role, 0, role, step, figures=figures, **more)
        self.job.beat(beat)
        self.statuses.hear(self.job, beat)

    def passes(self, seconds, *beating, steps_a_second=0.0, **more):
        """Let time pass, in which members send heartbeats, and the trainer steps."""
        until_s = self.job.clock.now_s + seconds
        while self.job.clock.now_s < until_s:
            self.job.clock.advance(self.job.clock.seen_s + TICK_S)
            self.now["step"] += TICK_S * steps_a_second
            for role in beating:
                step = int(self.now["step"]) if role == "trainer" else 0
                self.beat(role, step, **more)

    def look(self):
        return self.statuses.of(self.job)

    def state(self, role):
        [state] = [one.state for one in self.look().members if one.role == role]
        return state

    def problem(self):
        """Return the only problem, as kind, who, and whether it is wrong."""
        [one] = self.look().problems
        return one.kind, one.who, one.is_wrong


@pytest.fixture
def job():
    watched = Watched()
    watched.passes(10, "server", "trainer", steps_a_second=4)
    assert watched.look().problems == []
    return watched


def test_a_server_without_heartbeats_is_silent_and_then_lost(job):
    job.passes(3, "trainer", steps_a_second=4)
    assert job.state("server") == WELL
    job.passes(2, "trainer", steps_a_second=4)
    assert job.state("server") == "silent"
    assert job.problem() == ("silent", "server 0", False)
    assert not job.look().is_wrong
    job.passes(20, "trainer", steps_a_second=4)
    assert job.state("server") == "lost"
    status = job.look()
    assert status.is_wrong
    [problem] = status.problems
    assert problem.remedy == "persia-torchrec kill server 0 --job seven"
    assert problem.since_s == pytest.approx(25, abs=1)
    job.beat("server")
    assert job.state("server") == WELL


def test_no_process_is_silent_while_one_compiles(job):
    job.passes(15, "trainer", steps_a_second=4, is_compiling=True)
    assert job.state("server") == WELL
    assert job.problem() == ("compiling", "trainer 0", False)
    job.passes(10, "trainer", steps_a_second=4, is_compiling=True)
    assert job.state("server") == "lost"


def test_a_trainer_that_beats_and_makes_no_step_is_stalled(job):
    figures = {"loss": 0.5, "row_wait_seconds": 0.0}
    job.passes(55, "server", "trainer", figures=figures)
    assert job.look().problems == []
    assert job.look().members[1].step_s == pytest.approx(55, abs=1)
    job.passes(10, "server", "trainer", figures=figures)
    assert job.state("trainer") == "stalled"
    assert job.problem() == ("stalled", "trainer 0", True)
    assert job.look().loss is None
    job.passes(1, "server", "trainer", steps_a_second=4)
    assert job.state("trainer") == WELL


@pytest.mark.parametrize(
    ("how", "figures"),
    [({"is_paused": True}, {}), ({"is_compiling": True}, {}), ({}, {"last_step": 40})],
    ids=["saves", "compiles", "is done"],
)
def test_a_trainer_that_has_a_reason_is_not_stalled(job, how, figures):
    job.passes(100, "server", "trainer", figures=figures, **how)
    assert job.state("trainer") == WELL


def test_a_trainer_that_evaluates_is_not_stalled(job):
    for num in range(100):
        job.passes(1, "server", "trainer", figures={"batches_evaluated": num})
    assert job.state("trainer") == WELL


def test_slow_steps_are_no_stall():
    job = Watched()
    job.passes(100, "server", "trainer", steps_a_second=0.1)
    job.passes(150, "server", "trainer")
    assert job.state("trainer") == WELL
    job.passes(100, "server", "trainer")
    assert job.state("trainer") == "stalled"


def test_a_stall_does_not_change_what_a_step_usually_takes(job):
    for _ in range(3):
        job.passes(100, "server", "trainer")
        assert job.state("trainer") == "stalled"
        job.passes(1, "server", "trainer", steps_a_second=2)
        assert job.state("trainer") == WELL


def test_steps_that_become_slow_are_usual_after_a_while(job):
    job.passes(30 * 100, "server", "trainer", steps_a_second=0.01)
    job.passes(90, "server", "trainer")
    assert job.state("trainer") == WELL


def test_a_trainer_without_a_step_starts():
    job = Watched()
    job.passes(200, "server", "trainer")
    assert job.state("trainer") == WELL


def test_a_trainer_that_resumes_and_skips_batches_has_made_no_step():
    job = Watched()
    job.passes(2, "server", "trainer", figures={"samples": 0})
    job.now["step"] = 500
    job.passes(100, "server", "trainer", figures={"samples": 0})
    assert job.state("trainer") == WELL
    assert job.look().members[1].step_s is None


def test_a_server_whose_figures_do_not_come_any_more_is_stalled(job):
    for _ in range(70):
        job.passes(1, "trainer", steps_a_second=4)
        job.job.beat(Beat("server", 0, "server"))
        job.statuses.hear(job.job, Beat("server", 0, "server"))
    assert job.state("server") == "stalled"
    assert "answers nothing" in job.look().problems[0].text


def test_figures_have_an_age_and_end_when_they_are_old(job):
    job.passes(10, "server", figures={"rows": 5, "requests_lookup": 1})
    assert job.look().members[0].rows == 5
    job.passes(timeouts.FIGURES_S / 2, "trainer")
    line = job.look().members[0]
    assert line.rows == 5
    assert line.figures_s == pytest.approx(timeouts.FIGURES_S / 2, abs=1)
    job.passes(timeouts.FIGURES_S / 2 + 1, "trainer")
    line = job.look().members[0]
    assert (line.rows, line.lookups_a_second, line.memory_bytes) == (None,) * 3
    assert line.figures_s > timeouts.FIGURES_S


def test_rates_are_those_of_the_last_seconds(job):
    for second in range(20):
        num = second if second < 10 else 100 * second
        figures = {"step": num, "samples": num, "row_wait_seconds": 0.25 * second}
        job.passes(1, figures=figures)
        job.beat("trainer", figures=figures)
    line = job.look().members[1]
    assert line.samples_a_second == pytest.approx(100, rel=0.01)
    assert line.waits == pytest.approx(0.25, rel=0.01)


def test_the_cause_comes_first(job):
    job.passes(70, "trainer")
    status = job.look()
    assert [one.kind for one in status.problems] == ["lost", "stalled"]
    assert [bool(one.remedy) for one in status.problems] == [True, False]


def test_a_process_that_has_not_joined_is_no_fault_and_has_a_log_when_it_is_late():
    job = Watched("trainer")
    job.job.member("server", 0)
    job.beat("trainer")
    assert job.problem() == ("starting", "server 0", False)
    assert job.look().problems[0].remedy == ""
    job.passes(11, "trainer", steps_a_second=4)
    job.statuses.num_rejected = 4
    [late] = job.look().problems
    assert not late.is_wrong
    assert late.remedy == "persia-torchrec logs server 0 --job seven"
    assert late.since_s == pytest.approx(11, abs=1)
    assert late.text.endswith("; 4 connections with another token were rejected")


@pytest.mark.parametrize(("num", "is_wrong"), [(1, False), (2, False), (3, True)])
def test_three_failed_saves_need_a_hand(job, num, is_wrong):
    note = Saves(4, 5, num, FULL).text()
    job.job.set_note(SetNote(SAVES, note))
    assert job.problem() == ("saves", "trainer 0", is_wrong)
    assert FULL in job.look().problems[0].text
    job.passes(5, "server", "trainer", steps_a_second=4)
    assert job.look().problems[0].since_s == pytest.approx(5, abs=1)
    job.job.set_note(SetNote(SAVES, Saves(5, 5).text()))
    assert job.look().problems == []


def test_a_server_that_evicts_rows_is_told(job):
    for second in range(1, 5):
        job.passes(1)
        figures = {"evictions": 90 * second, "hits": 0, "misses": 100 * second}
        job.beat("server", figures={**figures, "requests_lookup": second})
    assert job.problem() == ("evictions", "server 0", False)
    [problem] = job.look().problems
    assert "evicts 90 rows a second" in problem.text
    assert problem.remedy == "persia-torchrec scale seven --servers 2"
    job.job.clock.advance(job.job.clock.seen_s + 1)
    assert job.look().problems[0].since_s == pytest.approx(1, abs=0.1)


def test_a_process_that_was_killed_is_told_with_its_log():
    job = Watched()
    own = ProcessIdentity.of_this_process()
    gone = structs.replace(own, start="0", nonce="gone")
    job.job.register(Register("server", 0, gone, "server"))
    [problem] = job.look().problems
    assert (problem.kind, problem.who) == ("killed", "server 0")
    assert problem.remedy == "persia-torchrec logs server 0 --job seven"
    assert problem.text.endswith("has ended")  # no cause is known


@pytest.mark.parametrize(
    ("num", "cause"), [(3, ""), (4, ": probably memory was short")]
)
def test_a_process_that_was_killed_has_a_cause_where_the_kernel_counts_one(
    monkeypatch, num, cause
):
    monkeypatch.setattr(state, "memory_kills", lambda: {"memory.events": 3})
    job = Watched()
    server = job.job.member("server", 0)
    job.job.tick([server])
    job.passes(11, "server", "trainer")
    job.job.tick([server])
    monkeypatch.setattr(state, "memory_kills", lambda: {"memory.events": num})
    gone = structs.replace(ProcessIdentity.of_this_process(), start="0", nonce="gone")
    job.job.register(Register("server", 0, gone, "server"))
    why = job.job.tick([server])
    assert re.match(rf"server 0 \(process \d+\) was killed{cause}", why)
    assert re.search(rf"has ended{cause}", job.look().problems[0].text)
    assert why.endswith("has risen") == bool(cause)


def test_a_process_that_has_raised_says_why_until_it_is_back(job):
    process = job.job.member("trainer", 0).process
    cause = "RuntimeError: can't\nallocate memory"
    job.job.report(Report("trainer", 0, left=process, pid=7, cause=cause))
    [problem] = job.look().problems
    assert (problem.kind, problem.is_wrong) == ("raised", True)
    assert problem.text == "trainer 0 has failed: RuntimeError: can't allocate memory"
    assert problem.remedy == "persia-torchrec logs trainer 0 --job seven"
    back = structs.replace(process, nonce="back", pid=8)
    job.job.register(Register("trainer", 0, back, "trainer"))
    assert job.look().problems == []


def test_the_busiest_tables_and_features_come_first(job):
    for second in range(1, 7):
        job.passes(1)
        updates = {"updates/item": second, "updates/a/b": 10 * second}
        job.beat("server", figures=updates)
        job.beat("trainer", figures={"ids/item/x": 6 * second, "ids/a/b/y": second})
    status = job.look()
    assert [(one.table, one.num) for one in status.tables] == [("a/b", 60), ("item", 6)]
    features = [(one.table, one.feature, one.num) for one in status.features]
    assert features == [("item", "x", 36), ("a/b", "y", 6)]
    assert status.tables[0].a_second == pytest.approx(10, rel=0.01)


TOLD = "coordinator: it was told to end (SIGTERM)"


@pytest.mark.parametrize(
    ("reason", "saves", "expected"),
    [
        (TOLD, Saves(46, 46), "stopped"),
        (TOLD, None, "stopped"),
        (f"{TOLD}, twice", Saves(46, 46), "stopped"),
        (TOLD, Saves(46, 133, 1, FULL), "failed"),
        (f"{TOLD}, and trainer 0 did not exit within grace_s=5", Saves(4, 4), "failed"),
        ("trainer 0: ValueError", None, "failed"),
    ],
)
def test_a_job_that_was_told_to_end_is_stopped(job, reason, saves, expected):
    job.job.tell_to_end(TellToEnd("SIGTERM", "persia-torchrec stop"))
    assert job.look().state == "ending"
    if saves is not None:
        job.job.set_note(SetNote(SAVES, saves.text()))
    who, _, why = reason.partition(": ")
    job.job.fail(Fail(who, why))
    status = job.look()
    assert status.state == expected
    assert status.told == "SIGTERM to persia-torchrec stop"
    assert status.is_wrong == (expected == "failed")
    if status.is_wrong:
        assert status.problems[0].since_s == 0.0
        assert "\n" not in status.problems[0].text


def test_a_process_that_has_left_is_no_fault(job):
    process = job.job.member("server", 0).process
    job.job.report(Report("server", 0, left=process))
    job.passes(30, "trainer", steps_a_second=4)
    assert job.state("server") == "left"
    assert job.look().problems == []
