"""The state of a job, as its coordinator holds it: no sockets, no threads, no files.

``JobState`` is all that a coordinator knows: members, addresses, sizes, notes, and the
verdict. Requests of members change it, each by one method, and so does :meth:`tick`,
which finds members that have ended or are silent:

    beat         one request a heartbeat: progress, notes, whether loops are compiled
    register     take the place of a member: compare-and-set of its process
    report       the work is done, all is saved, the process leaves, why it has failed
    claim_size   size of a role, and the address of one of its processes
    find_role    the addresses of a role, as far as they are known
    set_note     what one process tells the others: compare-and-set where it asks for it
    fail, finish, tell_to_end     the first verdict on a job stands

Time is seconds of ``AwakeClock``: those in which the coordinator runs, so that members
are not to blame if it was stopped. The caller has the lock, and advances the clock.
"""

import logging
import math
from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec import structs

from persia_torchrec import timeouts
from persia_torchrec.errors import FrameError
from persia_torchrec.job.process_identity import ProcessIdentity, memory_kills
from persia_torchrec.job.requests import (
    Beat,
    ClaimSize,
    Fail,
    FindNotes,
    FindRole,
    Finish,
    Found,
    Index,
    JobTimings,
    Look,
    Meet,
    Outcome,
    Raise,
    Read,
    Register,
    Report,
    Request,
    Role,
    SetNote,
    TellLastStep,
    TellToEnd,
    View,
    Welcome,
)
from persia_torchrec.job.saves import SAVE_REQUEST

logger = logging.getLogger("persia_torchrec.job.coordinator")  # which ticks

Ending = Literal["left", "killed", "lost"]

MAX_ANSWER = 2**20  # characters
MAX_MEMBERS = 2**14
MAX_KEYS = 2**18
MAX_CHARACTERS = 2**28  # of all addresses and notes, with their names

_QUICK_S = 0.1  # between heartbeats when a job ends
_MOST_BEATS, _MOST_QUICK = 100, 1000  # heartbeats a second that all members send
_MOST_POLLS = 2048  # looks a second of all members, of those that wait
_POLL_S = 0.05
_SLOW = 5  # a member is, after this part of the time in which it counts as silent
_LONGEST_STEP_S = 1.0
_COUNT_KILLS_S = 5.0  # between two looks at the counters of kills
_TRAINED = 2**62  # progress that NN workers count is beyond that of others


class AwakeClock(msgspec.Struct):
    """Seconds in which this process runs: of a pause, one second counts at most."""

    seen_s: float
    now_s: float = 0.0

    def advance(self, monotonic_s: float) -> float:
        """Return the time; call it several times a second."""
        self.now_s += min(max(monotonic_s - self.seen_s, 0.0), _LONGEST_STEP_S)
        self.seen_s = monotonic_s
        return self.now_s


class Raised(msgspec.Struct, frozen=True):
    """Where a script has raised, at which start, and how much was trained then."""

    start: int
    progress: int
    place: str


class Member(msgspec.Struct, eq=False):
    """One member, as the coordinator knows it."""

    role: Role
    index: Index
    process: ProcessIdentity | None = None  # that has registered last
    agent: ProcessIdentity | None = None  # the torchrun that has started it
    left: ProcessIdentity | None = None  # that has told that it leaves
    log: str | None = None  # its host, and the file that its stderr is
    connection: bytes = b""  # name of it
    is_lost: bool = False  # the connection is
    is_done: bool = False
    has_saved: bool = False
    progress: int = 0  # the most that it has reported
    pid: int = 0  # of a process that has reported the cause of its end
    cause: str = ""
    # How often it was started again since there was progress of the whole job, and
    # how much that was at the last time.
    num_restarts: int = 0
    progress_then: int = -1
    restarts_in_all: int = 0
    num_beats: int = 0
    joined_s: float = 0.0  # when its process has registered
    beat_s: float = 0.0  # when it was heard last
    is_slow: bool = False
    away_since_s: float | None = None

    @property
    def who(self) -> str:
        """Its name, as "server 0"."""
        return f"{self.role} {self.index}"

    def ending(self) -> Ending | None:
        """Return how its process has ended; None if it has not, or not joined yet."""
        if self.process is None:
            return None
        if self.left == self.process:
            return "left"
        if self.process.has_ended():
            return "killed"
        return "lost" if self.is_lost else None

    def cause_of_end(self) -> str:
        """Return why its process has ended, or will, as far as that is known; or ""."""
        is_its = self.process is not None and self.pid == self.process.pid
        return self.cause if is_its else ""

    def failure(self) -> str:
        """Return why its process has ended by itself, or ""."""
        return self.cause_of_end() if self.ending() == "left" else ""

    def is_gone(self) -> bool:
        """Return whether it has ended, and its process, agent and supervisor too."""
        process, ending = self.process, self.ending()
        if process is None or ending is None:
            return False
        if ending != "left" and process.supervisor is None:
            return True
        is_running = process.is_running()
        for above in (self.agent, process.supervisor):
            if above is not None and above.is_running():
                return False
        # None: of another host, where the connection ends with the process.
        return self.is_lost if is_running is None else not is_running

    def has_nothing_to_save(self) -> bool:
        """Return whether that is so, in a job that is told to end."""
        is_over = self.has_saved or self.is_done
        return self.process is None or is_over or self.ending() is not None

    def note_absence(self, wrong: str, now_s: float) -> None:
        """Note that the job waits for its return."""
        if self.away_since_s is None:
            self.away_since_s = now_s
            logger.warning("%s; the job waits for its return", wrong)

    def note_return(self, now_s: float) -> None:
        """Note that it is there."""
        if self.away_since_s is not None:
            away_s = now_s - self.away_since_s
            logger.info("%s is back, failover took %.1f s", self.who, away_s)
            self.away_since_s = None

    def count_restart(self, progress: int) -> None:
        """Count a restart, of those without progress of the job."""
        self.num_restarts *= progress <= self.progress_then
        self.num_restarts += 1
        self.restarts_in_all += 1
        self.progress_then = progress


class JobState(msgspec.Struct):
    """All that the coordinator of a job knows."""

    job_id: str
    clock: AwakeClock
    recovery_s: float = 0.0  # for which members wait for the coordinator's return
    timings: JobTimings = msgspec.field(default_factory=JobTimings)
    max_restarts: int = 3
    outcome: Outcome = "running"
    reason: str = ""
    ended_s: float = 0.0  # when it has failed
    is_over: bool = False
    signal: str = ""
    signal_to: str = ""
    ends_since_s: float | None = None  # when it was told to end
    is_after_last_step: bool = False
    compiling_s: float | None = None  # when a process has compiled last
    members: dict[str, Member] = {}
    sizes: dict[str, int] = {}
    addresses: dict[str, str] = {}
    notes: dict[str, str] = {}
    raised: dict[str, Raised] = {}
    # How many processes the kernel has ended as memory was short: by who counts them,
    # some seconds ago, and then.
    memory_kills: tuple[dict[str, int], dict[str, int]] = ({}, {})
    memory_kills_s: float = -math.inf
    num_characters: int = 0
    is_stale: bool = False  # whether what is written of it is older

    # What a coordinator reads and does

    def member(self, role: str, index: int) -> Member:
        """Return a member, which may have to join yet."""
        who = f"{role} {index}"
        member = self.members.get(who)
        if member is None:
            if len(self.members) >= MAX_MEMBERS:
                raise FrameError(f"A job must have at most {MAX_MEMBERS} members.")
            member = self.members[who] = Member(role, index)
        return member

    def resume(self, monotonic_s: float) -> None:
        """Continue with the state of a coordinator that has ended."""
        clock = self.clock
        clock.now_s += max(monotonic_s - clock.seen_s, 0.0)
        clock.seen_s = monotonic_s
        for member in self.members.values():
            member.beat_s, member.is_slow, member.is_lost = clock.now_s, False, False

    def progress(self) -> int:
        """Return a number that grows with trained batches, or with time without ends.

        What NN workers count holds, as others do their work again when these have gone
        back to a checkpoint; but not all scripts count.
        """
        if not self._has_trainers():
            return int(self.clock.now_s / timeouts.CALM_S)
        trained = self._num_trained()
        others = sum(member.progress for member in self.members.values())
        return _TRAINED + trained if trained else others

    def tick(self, members: Iterable[Member], *, is_told: bool = False) -> str | None:
        """Look at members; return why the job fails, or None.

        Nothing starts again in a job that ``is_told`` to end.
        """
        progress = self.progress()
        if self.clock.now_s - self.memory_kills_s > _COUNT_KILLS_S:
            _, before = self.memory_kills
            self.memory_kills = before, memory_kills()
            self.memory_kills_s = self.clock.now_s
        for member in members:
            failure = self._check(member, progress, is_told=is_told)
            if failure is not None:
                return failure
        return None

    def next_beat_s(self) -> float:
        """Return when a member shall send its next heartbeat: later in a large job."""
        num, timings = len(self.members), self.timings
        if self.signal or (self.outcome == "finished" and not self.is_over):
            return max(_QUICK_S, num / _MOST_QUICK)
        longest_s = timings.silent_s / 2.5
        return max(timings.heartbeat_s, min(num / _MOST_BEATS, longest_s))

    def told(self) -> str:
        """Return by which signal it is told to end, and who has got that; or ""."""
        return f"{self.signal} to {self.signal_to}" if self.signal else ""

    def slow_s(self) -> float:
        """Return the silence of a member from which its heartbeat is late."""
        return max(self.timings.silent_s / _SLOW, 1.5 * self.next_beat_s())

    def is_compiling(self) -> bool:
        """Return whether a process of the job compiles loops."""
        if self.compiling_s is None:
            return False
        longest_s = max(timeouts.COMPILING_BEAT_S, 2 * self.next_beat_s())
        return self.clock.now_s < self.compiling_s + longest_s

    # Requests

    def meet(self, _: Meet) -> Welcome:
        """Say which job this is."""
        return Welcome(self.job_id, self.recovery_s)

    def look(self, _: Request | None = None, *, successor: int = 0) -> View:
        """Say how the job is."""
        coordinator = self.members.get("coordinator 0")
        return View(
            outcome=self.outcome,
            reason=self.reason,
            is_over=self.is_over,
            signal=self.signal,
            signal_to=self.signal_to,
            is_after_last_step=self.is_after_last_step,
            save_request=self.notes.get(SAVE_REQUEST, ""),
            has_trainers=self._has_trainers(),
            is_compiling=self.is_compiling(),
            coordinator=coordinator.process if coordinator else None,
            successor=successor,
            next_beat_s=self.next_beat_s(),
        )

    def beat(self, beat: Beat) -> View:
        """Note a heartbeat; one of a process that was replaced is none."""
        member = self.members.get(beat.who)
        process = None if member is None else member.process
        if member is None or process is None:
            return self.look()
        if process.nonce != beat.nonce:
            return self.look(successor=process.pid)
        now_s = self.clock.now_s
        member.num_beats += 1
        member.beat_s, member.is_slow = now_s, False
        self._advance(member, beat.progress)
        if beat.is_compiling:
            self.compiling_s = now_s
        for name, value in beat.notes.items():
            self._put(self.notes, name, value)
        return self.look()

    def read(self, request: Read) -> Member:
        """Return a copy of a member."""
        member = self.members.get(request.who)
        return structs.replace(member or Member(request.role, request.index))

    def register(self, request: Register) -> str:
        """Set a member's process if it is as expected; return its nonce then."""
        member, process = self.member(request.role, request.index), request.process
        previous, now_s = member.process, self.clock.now_s
        nonce = previous.nonce if previous else ""
        if process == previous or nonce != request.expected:
            return nonce
        member.process, member.agent, member.log = process, request.agent, request.log
        member.is_done = member.has_saved = member.is_lost = member.is_slow = False
        member.connection = b""
        member.num_beats += 1
        member.joined_s = member.beat_s = now_s
        if previous is not None and process.supervisor is not None:
            if request.role != "coordinator":
                ended = f"{member.who} (process {previous.pid}) has ended"
                member.note_absence(ended, now_s)
            member.count_restart(self.progress())
        return process.nonce

    def report(self, report: Report) -> bool:
        """Note what a member reports."""
        member = self.member(report.role, report.index)
        self._advance(member, report.progress)
        member.is_done |= report.is_done
        member.has_saved |= report.has_saved
        member.left = report.left or member.left
        is_new = report.cause != member.cause
        if report.cause:
            member.pid, member.cause = report.pid, report.cause
        return is_new

    def note_raise(self, request: Raise) -> bool:
        """Note where a script has raised; return whether it did so before a restart.

        It did if as much was trained then. All trainers are of one script.
        """
        place, progress = request.place, request.progress
        progress = self._num_trained() if progress is None else progress
        who = request.role if request.role == "trainer" else request.who
        then = self.raised.get(who)
        if then and (then.place, then.progress) == (place, progress):
            return then.start < request.start
        self.raised[who] = Raised(request.start, progress, place)
        return False

    def claim_size(self, request: ClaimSize) -> int:
        """Set the size of a role if none is known, and an address if it is the same."""
        role, size = request.role, request.size
        if role not in self.sizes and len(self.sizes) >= MAX_MEMBERS:
            raise FrameError(f"A job must have at most {MAX_MEMBERS} roles.")
        known = self.sizes.setdefault(role, size)
        if known == size and request.address is not None:
            self._put(self.addresses, request.who, request.address)
        return known

    def find_role(self, request: FindRole) -> Found:
        """Return the addresses of a role."""
        role, size = request.role, self.sizes.get(request.role)
        if size is None:
            return self._found(None)
        return self._found([self.addresses.get(f"{role} {i}") for i in range(size)])

    def find_notes(self, request: FindNotes) -> Found:
        """Return notes."""
        return self._found([self.notes.get(name) for name in request.names])

    def set_note(self, request: SetNote) -> str:
        """Set a note, if it is what is expected; return what it is then."""
        name, expected = request.name, request.expected
        if expected is None or self.notes.get(name, "") == expected:
            self._put(self.notes, name, request.value)
        return self.notes.get(name, "")

    def finish(self, request: Finish) -> View:
        """End the job as finished, unless it has failed; for its trainers at first."""
        if self.outcome != "failed":
            self.outcome, self.is_over = "finished", self.is_over or request.is_over
        return self.look()

    def fail(self, request: Fail) -> View:
        """End the job as failed, unless it has ended."""
        if self.outcome == "running":
            self.outcome, self.is_over = "failed", True
            self.ended_s = self.clock.now_s
            self.reason = f"{request.who}: {request.reason}"
        return self.look()

    def tell_to_end(self, request: TellToEnd) -> View:
        """Note the first signal by which the job is told to end, and who has got it."""
        if not self.signal:
            self.signal, self.signal_to = request.signal, request.who
            self.ends_since_s = self.clock.now_s
        return self.look()

    def report_last_step(self, _: TellLastStep) -> View:
        """Note that trainers of a job that is told to end train no more."""
        self.is_after_last_step = True
        return self.look()

    # What these have in common

    def _has_trainers(self) -> bool:
        return "trainer" in self.sizes or "trainer 0" in self.members

    def _num_trained(self) -> int:
        every = self.members.values()
        return sum(member.progress for member in every if member.role == "trainer")

    def _advance(self, member: Member, progress: int) -> None:
        if progress > member.progress:
            member.progress, self.is_stale = progress, True

    def _found(self, values: list[str | None] | None) -> Found:
        size = sum(len(value) for value in values or () if value)
        if size > MAX_ANSWER:
            raise FrameError(
                f"An answer must have at most {MAX_ANSWER} characters. "
                f"Received: a request for {size}."
            )
        wait_s = max(_POLL_S, len(self.members) / _MOST_POLLS)
        return Found(values, self.look(), wait_s)

    def _put(self, texts: dict[str, str], key: str, value: str) -> None:
        is_new, previous = key not in texts, texts.get(key, "")
        size = self.num_characters + len(value) - len(previous) + is_new * len(key)
        num = len(self.notes) + len(self.addresses) + is_new
        if size > MAX_CHARACTERS or num > MAX_KEYS:
            raise FrameError(
                f"An address book must have at most {MAX_KEYS} keys, and "
                f"{MAX_CHARACTERS} characters."
            )
        self.num_characters, texts[key] = size, value
        self.is_stale |= value != previous

    def _check(self, member: Member, progress: int, *, is_told: bool) -> str | None:
        """Return why the job fails by a member, or None."""
        process = member.process
        if process is None:
            return None
        now_s, ending = self.clock.now_s, member.ending()
        agent = member.agent if is_told and ending is None else None
        if agent is not None and agent.has_ended():
            return f"the torchrun of {member.who} was killed"
        is_news = ending == "killed" and member.away_since_s is None
        if is_news and member.pid != process.pid:
            member.pid, member.cause = process.pid, self._why_killed()
        wrong = self._find_wrong(member, process, ending)
        if wrong is None:
            if member.away_since_s is not None:
                member.note_return(now_s)
                self.is_stale = True
            return None
        if process.supervisor is None:
            return wrong
        if member.away_since_s is None:
            member.note_absence(wrong, now_s)
            self.is_stale = True
        return self._find_limit(member, wrong, ending, progress, is_told=is_told)

    def _find_limit(
        self,
        member: Member,
        wrong: str,
        ending: Ending | None,
        progress: int,
        *,
        is_told: bool,
    ) -> str | None:
        """Return why the job waits no longer for a member that has a supervisor."""
        assert member.process is not None
        supervisor, since_s = member.process.supervisor, member.away_since_s
        assert supervisor is not None
        assert since_s is not None
        has_ended = ending in ("killed", "left")
        is_at_limit = member.num_restarts >= self.max_restarts
        if is_at_limit and has_ended and progress <= member.progress_then:
            return f"{wrong}, after {member.num_restarts} restarts without progress"
        limit_s = self.timings.recovery_timeout_s
        if has_ended and supervisor.has_ended():
            wrong = f"{wrong}, and so was its supervisor"
            if is_told or supervisor.is_last():
                return f"{wrong}: nothing starts it again"
            limit_s = min(limit_s, timeouts.UNSUPERVISED_S)
        if self.clock.now_s - since_s > limit_s:
            return f"{wrong}, and was not back within {limit_s:g} s"
        return None

    def _why_killed(self) -> str:
        """Return why a process was killed just now, if a counter of kills tells."""
        before, _ = self.memory_kills
        for source, num in memory_kills().items():
            if num > before.get(source, num):
                return f"probably memory was short, as oom_kill of {source} has risen"
        return ""

    def _find_wrong(
        self, member: Member, process: ProcessIdentity, ending: Ending | None
    ) -> str | None:
        """Return what is wrong with a member, or None."""
        who = member.who
        cause = member.cause_of_end()
        if ending == "killed":
            wrong = f"{who} (process {process.pid}) was killed"
            return f"{wrong}: {cause}" if cause else wrong
        if ending == "lost":
            return (
                f"{who} was lost: its process (pid {process.pid}) was killed, or its "
                "host does not answer"
            )
        if ending == "left" and cause:
            return f"{who}: {cause}"
        silent_s, limit_s = self.clock.now_s - member.beat_s, self.timings.silent_s
        if silent_s <= limit_s / _SLOW:
            return None
        slow_s = self.slow_s()
        is_late = silent_s > slow_s and not self.is_compiling()
        if ending is None and is_late and not member.is_slow:
            member.is_slow = True
            logger.warning("%s has sent no heartbeat for %.1f s", who, slow_s)
        return f"{who} was silent for {limit_s:g} s" if silent_s > limit_s else None


ANSWERS = {
    Meet: JobState.meet,
    Look: JobState.look,
    Beat: JobState.beat,
    Read: JobState.read,
    Register: JobState.register,
    Report: JobState.report,
    Raise: JobState.note_raise,
    ClaimSize: JobState.claim_size,
    FindRole: JobState.find_role,
    FindNotes: JobState.find_notes,
    SetNote: JobState.set_note,
    Finish: JobState.finish,
    Fail: JobState.fail,
    TellToEnd: JobState.tell_to_end,
    TellLastStep: JobState.report_last_step,
}
"""By the kind of a request, what answers it."""

UNWRITTEN = (Meet, Look, Beat, Read, FindRole, FindNotes)
"""Requests whose answer does not wait until the state is written."""
