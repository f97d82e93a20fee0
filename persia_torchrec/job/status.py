"""The one status of a job: what its coordinator knows, and what heartbeats bring.

    heartbeats --hear--> Statuses --of--> Status   persia-torchrec status and top
      figures, steps                          |    the page of the job, status.json
                                              |--> its metrics: members by state
                                              `--> progress.py: a line, curves

The coordinator connects to no member, and no client asks a server: a figure is one that
a member's heartbeat has brought, and rates are those between two heartbeats. A figure
that is older than ``timeouts.FIGURES_S`` is unknown.

    absent    has not joined yet
    running   heartbeats come
    silent    none has come for the time after which the coordinator says so
    stalled   heartbeats come, but a trainer makes no step, or a server answers nothing
    lost      no heartbeat within the job's limit, or its connection is gone
    killed    its process has ended
    left      it has ended as it should

Problems are sorted, the cause before what follows from it. Those with ``is_wrong`` need
a hand; the others pass by themselves, or tell of a setting.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec
from msgspec import structs

from persia_torchrec import timeouts
from persia_torchrec.errors import without_secrets
from persia_torchrec.job import failures
from persia_torchrec.job.process_identity import (
    IDS_OF,
    UPDATES_OF,
    memory_bytes,
)
from persia_torchrec.job.requests import Beat
from persia_torchrec.job.saves import LAST_CHECKPOINT, Saves, verdict
from persia_torchrec.job.state import JobState, Member
from persia_torchrec.metrics.values import bins_of, quantile_us

ROLES = ("coordinator", "server", "worker", "loader", "trainer", "predictor")

State = Literal["absent", "running", "silent", "stalled", "lost", "killed", "left"]
STATES: tuple[State, ...] = (
    *("running", "absent", "silent", "stalled", "lost", "killed", "left"),
)
URGENT = "lost", "killed", "raised", "stalled", "saves"
"""Kinds of problems of a running job that need a hand: causes before what follows."""

_USUAL_STEPS = 20  # without one a trainer is stalled, and after STALLED_S at least
_NEW_STEP = 0.2  # weight of the last step in what one usually takes
_FAILED_SAVES = 3  # in a row, that need a hand
_EVICTED = 0.2  # of the ids looked up, from which a server is too small
_MOST_BUSY = 40  # tables, and features, that are told
_MOST_TEXT = 300  # characters of what a process says in a problem

Numbers = Mapping[str, float]


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a job; None is unknown."""

    role: str
    index: int
    state: State
    host: str | None = None
    pid: int | None = None
    port: int | None = None
    since_s: float | None = None
    """Since it has joined."""
    restarts: int = 0
    heard_s: float | None = None
    """Since its last heartbeat."""
    figures_s: float | None = None
    """Age of the figures below."""
    step_s: float | None = None
    """Since its last step: of a trainer; a batch of a worker, an update of a server."""
    memory_bytes: float | None = None

    rows: float | None = None
    capacity_rows: float | None = None
    bytes: float | None = None
    evictions: float | None = None
    evictions_a_second: float | None = None
    queue: float | None = None
    ids_a_second: float | None = None
    lookups_a_second: float | None = None
    updates_a_second: float | None = None
    hit_rate: float | None = None
    lookup_us: float | None = None
    p99_us: float | None = None
    idle: float | None = None

    step: int | None = None
    last_step: int | None = None
    steps_a_second: float | None = None
    samples_a_second: float | None = None
    loss: float | None = None
    waits: float | None = None
    """Share of the time that a trainer waits for rows, also while it waits."""
    staleness: float | None = None
    cache_hits: float | None = None
    """Share of unique rows of batches that a trainer had in its cache."""
    cache_saves: float | None = None
    """Share of the bytes of rows and gradients that its cache saves, or costs (< 0)."""
    dirty_rows: float | None = None
    """Cached rows that were trained, and are not written back."""
    dirty_s: float | None = None
    """How old the oldest of them may be."""

    @property
    def who(self) -> str:
        """Its name, as "server 0"."""
        return f"{self.role} {self.index}"


class Problem(msgspec.Struct, frozen=True):
    """What is wrong with a job, or may be.

    Attributes:
        kind: a state of a member, or ``raised``, ``failed``, ``saves``, ``starting``,
            ``compiling``, ``evictions``.
        who: a member, or "".
        since_s: seconds, if they are known.
        remedy: a command, or "": it passes by itself.
        text: a sentence, without the time and the remedy.
        is_wrong: whether a hand is needed.
    """

    kind: str
    who: str
    since_s: float | None
    remedy: str
    text: str
    is_wrong: bool = True


class Busy(msgspec.Struct, frozen=True):
    """A table, or a feature of one: updates, or ids, and how many a second."""

    table: str
    num: int
    a_second: float
    feature: str = ""


class Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint as its coordinator has found it.

    Attributes:
        path: as the job tells it.
        created: when it was taken, in ISO 8601; empty: it cannot be read.
        is_whole: whether all files are there, with their sizes.
        why: it cannot be read.
    """

    path: str
    created: str = ""
    is_whole: bool = False
    why: str = ""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A job now; None is unknown."""

    job: str
    state: str
    """``running``, ``ending``, ``finished``, ``stopped`` or ``failed``."""
    reason: str = ""
    told: str = ""
    """By which signal it is told to end, and who has got that."""
    since_s: float
    folder: str
    step: int | None = None
    last_step: int | None = None
    eta_s: float | None = None
    samples_a_second: float | None = None
    loss: float | None = None
    checkpoint: str | None = None
    checkpoint_age_s: float | None = None
    checkpoint_is_whole: bool | None = None
    """By the sizes of its files, as its coordinator sees them."""
    checkpoint_error: str = ""
    failed_saves: str = ""
    problems: Sequence[Problem] = ()
    members: Sequence[MemberStatus] = ()
    tables: Sequence[Busy] = ()
    """The busiest, by updates."""
    features: Sequence[Busy] = ()
    """The busiest, by ids."""

    @property
    def is_wrong(self) -> bool:
        """Whether a hand is needed."""
        return any(problem.is_wrong for problem in self.problems)


class _Reading(NamedTuple):
    """Figures of a member, and when they have come, by the coordinator's clock."""

    at_s: float
    numbers: dict[str, float]


class _Heard:
    """What the heartbeats of one process have brought.

    Attributes:
        step_s: when it made its last step; None: none is known.
        moved_s: when it made a step, or did else what may take long.
        usual_s: what a step takes.
        compiles_s: since when it compiles.
    """

    def __init__(self, nonce: str, now_s: float) -> None:
        self.nonce = nonce
        self.readings: list[_Reading] = []  # rates are between the first and the last
        self.step_s: float | None = None
        self.moved_s = now_s
        self.usual_s: float | None = None
        self.compiles_s: float | None = None
        self.is_done = False  # with its last step
        self._step, self._num_read = -1, 0.0

    def hear(self, beat: Beat, now_s: float, *, is_paused: bool) -> None:
        """Note a heartbeat."""
        numbers = {n: v for n, v in beat.figures.items() if v is not None}
        self.compiles_s = (self.compiles_s or now_s) if beat.is_compiling else None
        self._move(beat.progress, numbers, now_s, is_paused=is_paused)
        if not numbers:
            return
        last = self.readings[-1].numbers if self.readings else {}
        if last and numbers.get("at_s") == last.get("at_s"):
            return  # sent again
        self.readings.append(_Reading(now_s, numbers))
        while len(self.readings) > 2 and self._window_s(1) >= timeouts.STATUS_S / 2:
            del self.readings[0]
        if len(self.readings) > 3:
            del self.readings[2]

    def _window_s(self, first: int) -> float:
        return self.readings[-1].at_s - self.readings[first].at_s

    def _move(
        self, progress: int, numbers: Numbers, now_s: float, *, is_paused: bool
    ) -> None:
        step = max(progress, int(numbers.get("step", 0)))
        num_read = numbers.get("batches_evaluated", self._num_read)
        num = step - self._step
        has_begun = numbers.get("samples", 1) > 0  # else it resumes at a step
        if num > 0 and self._step >= 0 and has_begun:
            took_s = (now_s - self.moved_s) / num
            if self.usual_s is None:
                self.usual_s = took_s
            else:
                if now_s - self.moved_s > self._stalled_s():  # that is not usual
                    took_s = min(took_s, 2 * self.usual_s)
                self.usual_s += _NEW_STEP * (took_s - self.usual_s)
            self.step_s = now_s
        if num > 0 or num_read > self._num_read or is_paused:
            self.moved_s = now_s
        self._step, self._num_read = max(step, self._step), num_read
        self.is_done = 0 < numbers.get("last_step", 0) <= step

    def stalls_at_s(self, role: str) -> float:
        """Return when it is stalled, unless it moves before; infinity: never."""
        if role == "server" and self.readings:
            return max(self.readings[-1].at_s, self.moved_s) + timeouts.STALLED_S
        if role != "trainer" or self.step_s is None or self.is_done:
            return float("inf")
        return self.moved_s + self._stalled_s()

    def _stalled_s(self) -> float:
        """Return how long a trainer may take for a step."""
        return max(timeouts.STALLED_S, _USUAL_STEPS * (self.usual_s or 0.0))


class Statuses:
    """Hears heartbeats, and returns the status of their job. Its owner has the lock.

    Attributes:
        checkpoint: the newest one, which a thread of its own looks at.
        num_rejected: connections that have not proven the job's token.
    """

    def __init__(self, folder: str) -> None:
        self.checkpoint: Checkpoint | None = None
        self.num_rejected = 0
        self._folder = folder
        self._heard: dict[str, _Heard] = {}
        self._failed_since_s: float | None = None
        self._full_since_s: dict[str, float] = {}

    def hear(self, job: JobState, beat: Beat) -> None:
        """Note a heartbeat of the process that is the member now."""
        now_s, heard = job.clock.now_s, self._heard.get(beat.who)
        if heard is None or heard.nonce != beat.nonce:
            heard = self._heard[beat.who] = _Heard(beat.nonce, now_s)
        is_paused = beat.is_paused or job.is_compiling()
        heard.hear(beat, now_s, is_paused=is_paused)

    def of(self, job: JobState) -> Status:
        """Return the status of a job now."""
        known = [one for one in job.members.values() if one.role in ROLES]
        known.sort(key=lambda one: (ROLES.index(one.role), one.index))
        members = [self._member(job, one) for one in known]
        saves, newest = Saves.of(job.notes), job.notes.get(LAST_CHECKPOINT, "")
        found = self.checkpoint or Checkpoint(newest)
        is_known = bool(found.created or found.why)
        is_ending = bool(job.signal) and job.outcome == "running"
        state = "ending" if is_ending else verdict(job.outcome, job.reason, saves)
        return Status(
            job=job.job_id,
            state=state,
            reason=job.reason,
            told=job.told(),
            since_s=round(job.clock.now_s, 1),
            folder=self._folder,
            **_training(members),  # type: ignore[arg-type]  # the step is whole
            checkpoint=without_secrets(found.path) or None,
            checkpoint_age_s=age_s(found.created) if is_known else None,
            checkpoint_is_whole=found.is_whole if is_known else None,
            checkpoint_error=found.why if is_known else "",
            failed_saves=saves.failed() if saves else "",
            problems=self._problems(job, known, members, saves),
            members=members,
            tables=self._busiest(job, UPDATES_OF),
            features=self._busiest(job, IDS_OF),
        )

    def _member(self, job: JobState, member: Member) -> MemberStatus:
        process, now_s = member.process, job.clock.now_s
        heard = self._heard.get(member.who)
        if heard is None or process is None or heard.nonce != process.nonce:
            heard = _Heard("", now_s)
        state = _state(job, member, heard)
        port = job.addresses.get(member.who, "").rpartition(":")[2]
        line: dict[str, float | None] = {}
        if process is not None:
            line["since_s"] = round(now_s - member.joined_s, 1)
        if member.role == "coordinator":
            line["memory_bytes"] = memory_bytes()
        elif process is not None:
            line["heard_s"] = round(now_s - member.beat_s, 1)
            if heard.step_s is not None:
                line["step_s"] = round(now_s - heard.step_s, 1)
            line |= _figures(member.role, heard, now_s)
        if member.role == "trainer":
            line["step"] = int(line.get("step") or member.progress)
            line["last_step"] = int(line.get("last_step") or 0) or None
        if state == "stalled":
            line["loss"] = None
        return MemberStatus(
            role=member.role,
            index=member.index,
            state=state,
            host=(member.log or "").partition(" ")[0] or None,
            pid=process.pid if process else None,
            port=int(port) if port.isdecimal() else None,
            restarts=member.restarts_in_all,
            **line,  # type: ignore[arg-type]  # the fields that are numbers
        )

    def _problems(
        self,
        job: JobState,
        known: Sequence[Member],
        members: Sequence[MemberStatus],
        saves: Saves | None,
    ) -> list[Problem]:
        """Return what is wrong, the cause of all first."""
        if job.outcome != "running":
            state = verdict(job.outcome, job.reason, saves)
            since_s = round(job.clock.now_s - job.ended_s, 1)
            return failed(job.job_id, state, job.reason, since_s)
        found = [
            problem
            for member, status in zip(known, members, strict=True)
            if (problem := self._problem(job, member, status)) is not None
        ]
        found += self._of_saves(job, saves)
        kinds = {kind: number for number, kind in enumerate(URGENT)}
        found.sort(key=lambda one: (not one.is_wrong, kinds.get(one.kind, len(kinds))))
        if found and found[0].kind in URGENT[:3]:  # for which trainers wait
            return [
                structs.replace(one, remedy="") if one.kind == "stalled" else one
                for one in found
            ]
        return found

    def _problem(
        self, job: JobState, member: Member, status: MemberStatus
    ) -> Problem | None:
        who, state = member.who, status.state
        kill = f"persia-torchrec kill {who} --job {job.job_id}"
        logs = _logs(who, job.job_id)
        if state == "lost":
            text = f"{who} is lost: no heartbeat comes from process {status.pid}"
            return Problem(state, who, status.heard_s, kill, text)
        if state == "killed" or member.failure():
            away_s = member.away_since_s
            since_s = job.clock.now_s - away_s if away_s is not None else None
            text = f"{who} was killed: process {status.pid} has ended"
            if cause := one_line(member.cause_of_end()):
                has_ended = text if state == "killed" else f"{who} has failed"
                text = f"{has_ended}: {cause}"
            kind = state if state == "killed" else "raised"
            return Problem(kind, who, since_s, logs, text)
        if state == "stalled":
            is_back = member.process is not None and member.process.supervisor
            return self._stalled(job, status, kill if is_back else logs)
        if state == "absent" and not job.signal:
            return self._absent(job, who)
        if state == "silent":
            text = f"{who} is late: no heartbeat"
            return Problem(state, who, status.heard_s, "", text, is_wrong=False)
        heard_of = self._heard.get(who)
        if heard_of is not None and heard_of.compiles_s is not None:
            since_s = job.clock.now_s - heard_of.compiles_s
            text = f"{who} compiles"
            return Problem("compiling", who, since_s, "", text, is_wrong=False)
        return self._evictions(job, status)

    def _stalled(self, job: JobState, status: MemberStatus, remedy: str) -> Problem:
        who, since_s = status.who, status.step_s
        what = "makes no step" if status.role == "trainer" else "answers nothing"
        if since_s is None or status.role == "server":
            moved_s = self._heard[who].moved_s
            since_s = status.figures_s or job.clock.now_s - moved_s
        text = f"{who} is stalled: process {status.pid} sends heartbeats, and {what}"
        return Problem("stalled", who, since_s, remedy, text)

    def _absent(self, job: JobState, who: str) -> Problem:
        since_s = job.clock.now_s
        text, remedy = f"{who} starts: it has not joined", ""
        if since_s > timeouts.SAY_S:
            text, remedy = f"{who} has not joined", _logs(who, job.job_id)
            if self.num_rejected:
                num = self.num_rejected
                text += f"; {num} connections with another token were rejected"
        return Problem("starting", who, since_s, remedy, text, is_wrong=False)

    def _evictions(self, job: JobState, status: MemberStatus) -> Problem | None:
        """Return that a server evicts rows before they learn, if it does."""
        rate, lookups, who = status.evictions_a_second, status.ids_a_second, status.who
        if not rate or not lookups or rate < _EVICTED * lookups:
            self._full_since_s.pop(who, None)
            return None
        now_s = job.clock.now_s
        since_s = now_s - self._full_since_s.setdefault(who, now_s)
        text = (
            f"{who} is full, and evicts {rate:,.0f} rows a second, of {lookups:,.0f} "
            "ids that are looked up"
        )
        more = sum(one.role == "server" for one in job.members.values()) + 1
        remedy = f"persia-torchrec scale {job.job_id} --servers {more}"
        return Problem("evictions", who, since_s, remedy, text, is_wrong=False)

    def _of_saves(self, job: JobState, saves: Saves | None) -> list[Problem]:
        if saves is None or not saves.num_failed:
            self._failed_since_s = None
            return []
        since_s = self._failed_since_s = self._failed_since_s or job.clock.now_s
        return [
            Problem(
                "saves",
                "trainer 0",
                round(job.clock.now_s - since_s, 1),
                _logs("trainer 0", job.job_id),
                f"trainer 0: {one_line(saves.failed())}",
                is_wrong=saves.num_failed >= _FAILED_SAVES,
            )
        ]

    def _busiest(self, job: JobState, kind: str) -> list[Busy]:
        """Return the busiest tables, or features: trainers add up, servers do not."""
        num, rates = Counter[str](), defaultdict[str, float](float)
        role = "server" if kind == UPDATES_OF else "trainer"
        for who, heard in self._heard.items():
            if not heard.readings or job.members[who].role != role:
                continue
            first, last = heard.readings[0], heard.readings[-1]
            passed_s = _passed_s(first, last)
            for name in (one for one in last.numbers if one.startswith(kind)):
                value = last.numbers[name]
                rate = (value - first.numbers.get(name, value)) / (passed_s or 1.0)
                if kind == UPDATES_OF:
                    num[name] = max(num[name], int(value))
                    rates[name] = max(rates[name], rate)
                else:
                    num[name] += int(value)
                    rates[name] += rate
        order = sorted(num, key=lambda one: (-rates[one], -num[one]))[:_MOST_BUSY]
        found = []
        for name in order:
            table, feature = name.removeprefix(kind), ""
            if kind == IDS_OF:
                table, _, feature = table.rpartition("/")
            found.append(Busy(table, num[name], round(rates[name], 1), feature))
        return found


def at_s(iso: str) -> float | None:
    """Return a time in ISO 8601 as seconds since 1970; None if it is none."""
    try:
        return datetime.fromisoformat(iso).timestamp()
    except ValueError:
        return None


def age_s(iso: str) -> float | None:
    """Return the seconds since a time in ISO 8601; None if it is none."""
    then_s = at_s(iso)
    if then_s is None:
        return None
    return max(datetime.now(UTC).timestamp() - then_s, 0.0)


def _state(job: JobState, member: Member, heard: _Heard) -> State:
    if member.process is None:
        return "absent"
    if (ending := member.ending()) is not None:
        return ending
    silent_s = job.clock.now_s - member.beat_s
    if member.role == "coordinator":
        return "running"
    if silent_s > job.timings.silent_s:
        return "lost"
    if silent_s > job.slow_s() and not job.is_compiling():
        return "silent"
    is_over = job.signal or job.outcome != "running" or member.is_done
    is_late = job.clock.now_s > heard.stalls_at_s(member.role)
    return "stalled" if is_late and not is_over else "running"


def failed(
    job_id: str, state: str, reason: str, since_s: float | None
) -> list[Problem]:
    """Return why a job has ended, if it has failed, or its coordinator was killed."""
    how = {"failed": "has failed", "lost": "is lost"}.get(state)
    if how is None:
        return []
    who = failures.find_member(reason) or "coordinator 0"
    text = f"the job {how}: {one_line(reason).removesuffix('.')}"
    return [Problem(state, who, since_s, _logs(who, job_id), text)]


def _logs(who: str, job_id: str) -> str:
    return f"persia-torchrec logs {who} --job {job_id}"


def one_line(text: str) -> str:
    """Return what a process says of itself as one line; its log has the whole."""
    line = " ".join(text.split())
    return line if len(line) <= _MOST_TEXT else f"{line[:_MOST_TEXT]}..."


def _passed_s(first: _Reading, last: _Reading) -> float:
    """Return the seconds between two readings, by the member's clock if it tells."""
    if "at_s" in first.numbers and "at_s" in last.numbers:
        return last.numbers["at_s"] - first.numbers["at_s"]
    return last.at_s - first.at_s


def _figures(role: str, heard: _Heard, now_s: float) -> dict[str, float | None]:
    """Return what a member says of itself, and how fast that changes."""
    if not heard.readings:
        return {}
    first, last = heard.readings[0], heard.readings[-1]
    age = now_s - last.at_s
    found: dict[str, float | None] = {"figures_s": round(age, 1)}
    if age > timeouts.FIGURES_S:
        return found
    found["memory_bytes"] = last.numbers.get("memory_bytes")
    passed_s = _passed_s(first, last)
    of_role = {"server": _of_server, "trainer": _of_trainer}.get(role)
    if of_role is not None:
        before = first.numbers if passed_s > 0 else {}
        found |= of_role(last.numbers, before, passed_s)
    return found


def _of_server(
    now: Numbers, before: Numbers, passed_s: float
) -> dict[str, float | None]:
    line: dict[str, float | None] = {
        "rows": now.get("rows"),
        "capacity_rows": now.get("capacity_rows"),
        "bytes": now.get("bytes"),
        "evictions": now.get("evictions"),
        "queue": now.get("updates_queued"),
    }
    if not before:
        return line
    risen = {name: now[name] - before.get(name, 0) for name in now}
    times_us = {name: us for name, us in risen.items() if name.endswith("_us")}
    lookups = risen.get("requests_lookup", 0)
    found = risen.get("hits", 0) + risen.get("misses", 0)
    bins = bins_of({name: int(value) for name, value in risen.items()}, "lookup")
    p99_us = quantile_us(bins, 0.99)
    return line | {
        "evictions_a_second": round(risen.get("evictions", 0) / passed_s, 1),
        "ids_a_second": round(found / passed_s, 1),
        "lookups_a_second": round(lookups / passed_s, 1),
        "updates_a_second": round(risen.get("requests_update", 0) / passed_s, 1),
        "hit_rate": round(risen["hits"] / found, 4) if found else None,
        "lookup_us": round(times_us.get("lookup_us", 0) / lookups) if lookups else None,
        "p99_us": None if p99_us is None else round(p99_us),
        "idle": round(times_us.get("idle_us", 0) / (sum(times_us.values()) or 1), 3),
    }


def _of_trainer(
    now: Numbers, before: Numbers, passed_s: float
) -> dict[str, float | None]:
    line = {name: now.get(name) for name in ("step", "last_step", "loss")}
    line["dirty_rows"] = now.get("cache_dirty_rows")
    line["dirty_s"] = now.get("cache_dirty_seconds")
    if not before:
        return line

    def risen(name: str) -> float:
        return now.get(name, 0) - before.get(name, 0)

    lookups = risen("lookups")
    found = risen("cache_hits") + risen("cache_misses")
    moved, plain = risen("cache_moved_bytes"), risen("cache_plain_bytes")
    return line | {
        "cache_hits": round(risen("cache_hits") / found, 4) if found else None,
        "cache_saves": round(1 - moved / plain, 3) if plain else None,
        "steps_a_second": round(risen("step") / passed_s, 1),
        "samples_a_second": round(risen("samples") / passed_s, 1),
        "waits": round(min(risen("row_wait_seconds") / passed_s, 1.0), 3),
        "staleness": round(risen("batches_lacking") / lookups, 2) if lookups else None,
    }


def _training(members: Iterable[MemberStatus]) -> dict[str, float | int | None]:
    """Return how the training goes, by its trainers; None: it is unknown.

    The step is the largest, samples a second the sum, the loss the mean; how long the
    training takes until its last step is told where a trainer knows that step.
    """
    trainers = [one for one in members if one.role == "trainer"]
    step = max((one.step or 0 for one in trainers), default=0)
    rates = [r for one in trainers if (r := one.samples_a_second) is not None]
    losses = [loss for one in trainers if (loss := one.loss) is not None]
    pace = max((one.steps_a_second or 0.0 for one in trainers), default=0.0)
    last = int(max((one.last_step or 0 for one in trainers), default=0))
    has_eta = last >= step and bool(last) and pace > 0
    return {
        "step": step or None,
        "last_step": last or None,
        "eta_s": round((last - step) / pace, 1) if has_eta else None,
        "samples_a_second": round(sum(rates), 1) if rates else None,
        "loss": fmean(losses) if losses else None,
    }
