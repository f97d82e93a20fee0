"""The coordinator of a job: hosts the address book and decides when the job ends.

What it knows of the job is one ``JobState``, which it reads by attribute: members'
requests change it in the thread of the address book, this one looks at it every quarter
of a heartbeat (``state.py``).

The job is finished when every trainer has reported its work as done; a job of inference
servers, without trainers, when the coordinator gets a signal. Then the trainers leave;
when their processes have ended, and the torchrun that started them, the others do; and
the coordinator when those have ended. In this order, because a supervisor like honcho
ends all as soon as the first process has ended, which torchrun takes for a failure.

A member on the coordinator's host that does not leave in time, as a stopped one, is
killed, since torchx waits for every process. A finished job stays finished all the
same: what comes after the verdict is in the log only.

A job of trainers that is told to end from outside, by a signal to any of its members,
has ``grace_s`` for a last checkpoint. It ends when all trainers have saved, as one that
has failed, since it was not finished; a second signal ends it at once.

A member with a supervisor may be killed, raise, be lost or be silent: the job waits for
it. The job fails if it is not back within ``recovery_timeout_s``, was started again
``max_restarts`` times without progress, or lost its supervisor, too, so that nothing
starts it again. The coordinator itself may be killed as often: the next one finds the
address book as it was, and watches on.
"""

import contextlib
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec import structs

from persia_torchrec import env, timeouts
from persia_torchrec.errors import ConfigError, PersiaError, without_secrets
from persia_torchrec.job import failures, job_list, process_identity, report
from persia_torchrec.job.lifetime import run_service
from persia_torchrec.job.member_record import MemberRecord
from persia_torchrec.job.process_identity import Siblings, set_title
from persia_torchrec.job.progress import Progress
from persia_torchrec.job.registry import AddressBook, HostedBook
from persia_torchrec.job.requests import JobTimings, Outcome
from persia_torchrec.job.saves import LAST_CHECKPOINT, Saves
from persia_torchrec.job.signals import EndSignals
from persia_torchrec.job.state import Member
from persia_torchrec.parsing.command_line import parse_flags
from persia_torchrec.parsing.settings import declared
from persia_torchrec.rpc import auth
from persia_torchrec.rpc.addresses import LOOPBACK

logger = logging.getLogger("persia_torchrec.job.coordinator")  # also as __main__

_NOT_ENCRYPTED = (
    "nothing but the address book is encrypted between hosts: PERSIA_ENCRYPT=1 for all "
    "processes encrypts ids, rows and gradients, at about half of the rows a second"
)
_ROLES = ("server", "worker", "loader", "trainer", "predictor")


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorConfig:
    """Settings of the coordinator."""

    port: int = declared("port", default=...)
    num_trainers: int = declared(
        "trainers", default=0, also="The job is finished when all are done"
    )
    num_predictors: int = declared(
        "predictors",
        default=0,
        also="A job of these, without trainers, is finished when the coordinator is "
        "told to end",
    )
    num_servers: int = declared("servers", default=0)
    num_workers: int = declared("embedding_workers", default=0)
    num_loaders: int = declared("data_loaders", default=0)
    learn: tuple[Literal["server", "worker", "loader", "trainer"], ...] = field(
        default=(), metadata={"repeat": True}
    )
    """Role of which the first process tells how many there are, one at least; may be
    given several times."""
    nproc_per_node: int = declared("nproc_per_node")
    join_timeout_s: float = declared(
        "join_timeout_s", default_factory=env.join_timeout_s
    )
    leave_timeout_s: float = timeouts.LEAVE_S
    """How long after the end of the job the trainers may take to end, and then the
    others. One on the coordinator's host that has not left is killed then; others are
    left to their scheduler."""
    linger_s: float = timeouts.LINGER_S
    """How long to stay after the last member: torchx 0.7 stops reading the logs of a
    local job at the moment its last process ends, and may lose lines of the others."""
    max_restarts: int = declared("restarts")
    metrics_port: int | None = declared("metrics_port", default=None)
    timings: JobTimings = field(default_factory=JobTimings)
    """Heartbeat intervals and timeouts of all members."""

    def __post_init__(self) -> None:
        for role in self.learn:
            object.__setattr__(self, f"num_{role}s", 1)
        names = ("join_timeout_s", "leave_timeout_s", "nproc_per_node")
        positive = {name: getattr(self, name) for name in names}
        counts = {f"num_{role}s": size for role, size in self.sizes().items()}
        counts["max_restarts"] = self.max_restarts
        for name, value in {"linger_s": self.linger_s, **counts, **positive}.items():
            if value < 0 or (value == 0 and name in positive):
                must = "> 0" if name in positive else ">= 0"
                raise ConfigError(f"{name} must be {must}. Received: {value}.")
        if bool(self.num_trainers) == bool(self.num_predictors):
            raise ConfigError(
                "trainers must be >= 1, or predictors, one of them. Received: "
                f"{self.num_trainers} and {self.num_predictors}."
            )

    def tick_s(self) -> float:
        """Return the seconds between two looks at the members, at least."""
        return self.timings.heartbeat_s / 4

    def sizes(self) -> dict[str, int]:
        """Return how many members each role has, at least."""
        return {role: getattr(self, f"num_{role}s") for role in _ROLES}


class Coordinator:
    """Watches the members of one job, in one thread."""

    def __init__(self, config: CoordinatorConfig, book: HostedBook) -> None:
        self._config = config
        self._book, self._job = book, book.job
        self._job.max_restarts = config.max_restarts
        self._members_of: dict[str, list[Member]] = {role: [] for role in _ROLES}
        self._unlearned = set(config.learn)  # roles whose size no process has told
        for role, size in config.sizes().items():
            self._add_members(role, size)
        self._parent = os.getppid()
        self._siblings = Siblings()
        self._lacking_since: float | None = None
        self._end_signal = self._first_signal = ""
        self._signal_s = -math.inf
        self._is_hasty = False  # a second signal has come
        self._has_told = self._job.ends_since_s is not None

    def _add_members(self, role: str, size: int) -> None:
        """Watch all members of a role from now on."""
        members = self._members_of[role]
        with self._book.lock:
            for index in range(len(members), size):
                members.append(self._job.member(role, index))
        self._members = [
            one for of_role in self._members_of.values() for one in of_role
        ]
        self._trainers = self._members_of["trainer"]

    def _learn_sizes(self) -> None:
        """Watch the members of roles whose size a process has told meanwhile."""
        for role in sorted(self._unlearned):
            size = self._job.sizes.get(role)
            if size is not None:
                self._unlearned.discard(role)
                self._add_members(role, size)
                logger.info("the job has %s of the role %r", size, role)

    def end(self, signal_name: str) -> None:
        """End the job by a signal; a second one ends it at once. From any thread."""
        now_s = time.monotonic()
        if now_s - self._signal_s < timeouts.SAME_SIGNAL_S:
            return
        self._is_hasty = bool(self._first_signal)
        self._first_signal = self._first_signal or signal_name
        self._end_signal, self._signal_s = signal_name, now_s

    def run(self) -> int:
        """Watch the job until all members have left; return the exit status."""
        timings = self._config.timings
        for role, size in self._config.sizes().items():
            if size and role not in self._unlearned:
                self._book.claim_size(role, 0, size)
        previous = self._job.member("coordinator", 0).process
        MemberRecord(self._book, "coordinator", 0).register(timings.silent_s)
        self._book.publish(timings)
        if previous is not None:
            ended = "the coordinator (process %d) has ended, and is back"
            logger.warning(ended, previous.pid)
            self._require_few_restarts()
        job_id, port = self._book.greeting.job_id, self._book.port
        logger.info("the address book of job %s is open at port %d", job_id, port)
        state, reason = self._watch()
        self._end_signal = ""  # a later one is that of a supervisor in a hurry
        was_told = failures.was_told(reason)
        if state == "failed":
            if not was_told:
                logger.error("the job has failed, and all its processes end")
            failures.tell_launcher(self._cause(reason))
        else:
            logger.info("the job is finished")
            self._await(lambda: self._running(self._trainers))
            self._book.finish()
        self._await_ends()
        linger_s = 0 if self._end_signal else self._config.linger_s / 2
        time.sleep(linger_s)
        if state == "failed":  # the last line of all
            line = "job ended: %s" if was_told else "job failed: %s"
            logger.error(line, self._cause(reason))
        time.sleep(linger_s)
        return self._status(state, was_told=was_told)

    def summary(self) -> dict[str, object]:
        """Return what is known of the job when it has ended, for ``JobRecord``."""
        job = self._job
        known, own = [*job.members.values()], job.member("coordinator", 0).log or ""

        def beside(one: Member) -> str:  # that has not joined
            return failures.find_log_beside(own, one.who)

        return {
            "outcome": job.outcome,
            "reason": job.reason,
            "checkpoint": without_secrets(job.notes.get(LAST_CHECKPOINT, "")),
            "saves": Saves.of(job.notes),
            "told": job.told(),
            "logs": {one.who: log for one in known if (log := one.log or beside(one))},
        }

    def _status(self, state: Outcome, *, was_told: bool) -> int:
        """Return the exit status of a job: that of a signal to this process, if any.

        By that of another process's its supervisor would start it again.
        """
        if was_told and self._first_signal:
            return 128 + signal.Signals[self._first_signal]
        return 0 if state == "finished" else 1

    def _require_few_restarts(self) -> None:
        """Fail the job if this process ends again and again, without progress."""
        num = self._job.member("coordinator", 0).num_restarts - 1
        if num >= self._config.max_restarts:
            why = f"the coordinator ended too often: {num} restarts without progress"
            self._book.fail("coordinator", why)

    def _await_ends(self) -> None:
        """Wait until all members have left, and their processes have ended."""
        late = self._await(self._remaining)
        killed = [m for m in late if m.process is not None and m.process.kill()]
        for member in killed:
            logger.warning("killed %s", member.who)
        if names := ", ".join(one.who for one in late if one.process is not None):
            logger.error("did not exit in time: %s", names)
        left = [m for m in self._members if m not in late and m.process is not None]
        self._await(lambda: self._running([*left, *killed]))

    def _cause(self, reason: str) -> str:
        """Return why the job failed, the last checkpoint, and the failed one's log."""
        who = failures.find_member(reason)
        failed = (member for member in self._members if member.who == who)
        logs = [failures.find_log(member.who, member.log) for member in failed]
        why = reason.removeprefix("coordinator: ").removesuffix(".")
        checkpoint = self._job.notes.get(LAST_CHECKPOINT)
        last = f"the last checkpoint is {checkpoint}" if checkpoint else ""
        return "; ".join(filter(None, [why, last, *logs]))

    def _watch(self) -> tuple[Outcome, str]:
        is_joining = True

        def absent() -> str:
            return self._line(self._absent())

        with timeouts.saying(logger, absent, level=logging.INFO):
            while True:
                with self._book.lock:
                    now_s = self._job.clock.advance(time.monotonic())
                    self._learn_sizes()
                    if is_joining and not self._absent():
                        is_joining = False
                        process_identity.report_joined()
                    self._decide(now_s > self._config.join_timeout_s)
                    if self._job.outcome != "running":
                        return self._job.outcome, self._job.reason
                self._pause()

    def _decide(self, joining_is_over: bool) -> None:
        """End the job if it has failed, or if the work is done."""
        reason = self._failure(joining_is_over)
        if reason is not None:
            self._book.fail("coordinator", reason)
        elif not self._trainers:
            if self._end_signal:
                self._book.finish_trainers()
        elif "trainer" not in self._unlearned and self._is_done():
            self._book.finish_trainers()

    def _is_done(self) -> bool:
        return all(member.is_done for member in self._trainers)

    def _pause(self) -> None:
        """Wait for the next look at the members: later in a large job."""
        later_s = min(self._job.next_beat_s() / 4, self._config.timings.silent_s / 20)
        time.sleep(max(self._config.tick_s(), later_s))

    def _failure(self, joining_is_over: bool) -> str | None:
        was_told = self._has_told
        told = self._find_signal() if self._config.num_trainers else ""
        if not (told and was_told):  # a supervisor ends all soon after the first has
            failure = self._job.tick(self._members, is_told=bool(told))
            if failure is not None:
                return failure
        if told:
            return self._end_as_told(told)
        if os.getppid() != self._parent:
            return "the process that started it is gone"
        absent = self._absent()
        names = ", ".join(self._names(absent))
        if absent and joining_is_over:
            within = f"within {self._config.join_timeout_s:g} s"
            none = "; a coordinator must be told that a job has none of a role"
            hint = none if self._unlearned else ""
            return f"{names} did not join {within}; see their logs{hint}"
        if self._lacks_a_process(absent):
            return (
                f"a process ended before it joined, of {names}; see their logs. (Roles "
                "that are started one by one need the component persia.coordinator.)"
            )
        return None

    def _find_signal(self) -> str:
        """Return the signal by which the job is told to end, if it is; say so once."""
        if self._end_signal:
            self._book.tell_to_end(self._end_signal, "the coordinator")
        name = self._job.signal
        if name and not self._has_told:
            self._has_told = True
            logger.warning(
                "graceful shutdown (%s to %s): within %g s trainers save, then the "
                "other processes end. A second signal ends the job at once.",
                name,
                self._job.signal_to,
                self._config.timings.grace_s,
            )
        return name

    def _end_as_told(self, name: str) -> str | None:
        """Return why a job that is told to end has ended; None while trainers save."""
        told, grace_s = f"{failures.TOLD} ({name})", self._config.timings.grace_s
        if self._is_hasty:
            return f"{told}, twice"
        since_s = self._job.ends_since_s or 0.0
        late = [one for one in self._trainers if not one.has_nothing_to_save()]
        if late and self._job.clock.now_s - since_s > grace_s:
            names = ", ".join(member.who for member in late)
            return f"{told}, and {names} did not exit within grace_s={grace_s:g}"
        return None if late or self._is_done() else told

    def _absent(self) -> list[Member]:
        return [member for member in self._members if member.process is None]

    def _names(self, members: Sequence[Member]) -> list[str]:
        """Return names of members: "any server" where no process has told how many."""
        names = [member.who for member in members]
        unlearned = {f"{role} 0": f"any {role}" for role in self._unlearned}
        return [unlearned.get(name, name) for name in names]

    def _line(self, members: Sequence[Member]) -> str:
        return timeouts.waiting_for(self._names(members), len(self._members))

    def _lacks_a_process(self, absent: Sequence[Member]) -> bool:
        """Return whether fewer siblings are running than have yet to join."""
        running = self._siblings.running() if absent else None
        if running is None:
            self._lacking_since = None
            return False
        size = self._config.nproc_per_node
        num_absent = sum(member not in self._trainers for member in absent)
        for first in range(0, len(self._trainers), size):  # of one torchrun
            group = self._trainers[first : first + size]
            num_absent += all(member in absent for member in group)
        joined = process_identity.with_ancestors(os.getpid())
        for process in (m.process for m in self._members if m.process is not None):
            joined |= process_identity.with_ancestors(process.pid)
        if len(running - joined) >= num_absent:
            self._lacking_since = None
            return False
        now = time.monotonic()
        self._lacking_since = self._lacking_since or now
        return now - self._lacking_since > timeouts.ROLES_START_S

    def _await(self, remaining: Callable[[], list[Member]]) -> list[Member]:
        """Wait until no member remains; return those that do after the deadline."""
        deadline = time.monotonic() + self._config.leave_timeout_s
        members = remaining()
        with timeouts.saying(logger, lambda: f"{self._line(members)} to end"):
            while members and time.monotonic() < deadline:
                self._pause()
                members = remaining()
        return members

    def _running(self, members: Sequence[Member]) -> list[Member]:
        """Return the members whose processes have not ended; none after a signal."""
        return [m for m in members if not (self._end_signal or m.is_gone())]

    def _remaining(self) -> list[Member]:
        """Return the members that have not left.

        Also one that may join still: it would look for a closed address book. But what
        ends this process by a signal ends that one too, and where no process has
        joined, none is waited for.
        """
        remaining = [member for member in self._members if member.ending() is None]
        absent = self._absent()
        is_late = self._job.clock.now_s > self._config.join_timeout_s
        is_ended = bool(self._first_signal) or len(absent) == len(self._members)
        if not (is_ended or is_late or self._lacks_a_process(absent)):
            absent = [m for m in absent if self._has_no_torchrun(m)]
        return [m for m in remaining if m not in absent]

    def _has_no_torchrun(self, absent: Member) -> bool:
        """Return whether the torchrun is known to be gone that would have started it.

        Others of that torchrun, which have joined, tell so.
        """
        if absent not in self._trainers:
            return False
        size = self._config.nproc_per_node
        first = absent.index - absent.index % size
        for member in self._trainers[first : first + size]:
            if member.process is not None and member.agent is not None:
                above = (member.agent, member.process.supervisor)
                return all(one is None or one.has_ended() for one in above)
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Run the coordinator of one job; return 0 if the job was finished."""
    return run_service(logger.name, lambda: _serve(argv))


def _serve(argv: Sequence[str] | None) -> int:
    config = parse_flags(CoordinatorConfig, argv, prog=f"python -m {__spec__.name}")
    is_local, job_id = env.is_local_job(), env.job_id()
    is_supervised = process_identity.find_supervisor() is not None
    try:
        book = AddressBook.host(
            config.port,
            everywhere=not is_local,
            job_id=job_id,
            memory=env.memory_fd() if is_supervised else None,
            recovery_s=config.timings.recovery_timeout_s if is_supervised else 0.0,
        )
    except PersiaError as exc:
        cause = str(exc)
        if holder := job_list.holder_of_book(config.port):
            cause += f" Job {holder.job_id} has it, which runs in {holder.folder}."
        _fail_to_begin(job_list.record_of(job_id, config.port), cause)
        raise type(exc)(cause) from exc
    if why := auth.weakness(env.job_token()):
        logger.warning("%s", why)
    if not (is_local or env.encrypts()):
        logger.info("%s", _NOT_ENCRYPTED)
    coordinator = Coordinator(config, book)
    env.set_metrics_port(config.metrics_port)
    record = job_list.record_of(book.greeting.job_id, book.port)
    set_title("coordinator 0", book.greeting.job_id)
    with contextlib.ExitStack() as stack:
        folder = report.folder_of(book.greeting.job_id)
        progress = stack.enter_context(Progress(book, folder))
        if record.metrics_port:
            stack.enter_context(_page(book, progress, record))
        stack.enter_context(EndSignals(coordinator.end))
        record = structs.replace(record, report=str(folder or ""))
        told = stack.enter_context(job_list.listed(record))
        try:
            return coordinator.run()
        finally:
            told |= coordinator.summary()


def _page(
    book: HostedBook, progress: Progress, record: job_list.JobRecord
) -> contextlib.AbstractContextManager[object]:
    """Serve the page of the job; where that fails, the job is listed as failed."""
    # An HTTP server and prometheus_client, for those who want them.
    from persia_torchrec.job.status_page import StatusPage

    try:
        return StatusPage(
            book, progress, record, LOOPBACK if env.is_local_job() else ""
        )
    except PersiaError as exc:
        cause = str(exc)
        if holder := job_list.holder_of(record.metrics_port):
            cause += (
                f" Job {holder.job_id} has it, which runs in {holder.folder} with "
                f"--metrics_port {holder.metrics_port}. Set another one."
            )
        _fail_to_begin(record, cause)
        raise ConfigError(cause) from exc


def _fail_to_begin(record: job_list.JobRecord, cause: str) -> None:
    """List a job as failed whose coordinator cannot begin, and tell its launcher."""
    if record.job_id:
        with job_list.listed(record) as told:
            told |= {"outcome": "failed", "reason": cause}
    failures.tell_launcher(cause)


if __name__ == "__main__":
    sys.exit(main())
