"""Membership in a job: register, heartbeat, end with the job, deregister.

A job ends as one. A member sends heartbeats to the coordinator, learns from it that the
job is finished or has failed, and then ends, whatever its main thread does:

    the job is finished       what was given to ``call_at_end`` is called; the main
                              thread leaves the ``with`` block by itself. An expendable
                              member (a data loader) is interrupted, and ends with
                              status 0; so it does if it raises, as it may when the
                              others have left. Trainers are the first to leave, see
                              ``job/coordinator.py``.
    the job has failed, the   who failed is logged; ``call_at_end``; the main thread
    coordinator or the        is interrupted by SIGTERM; after ``leave_s`` the process
    parent process has ended  ends with status 1, even if its main thread is stuck.
    this process raised       the others are told why, and the exception propagates.
    the job is told to end:   trainers save and end, as below. Then the job has failed
    a process got SIGTERM,    for this reason, and the others end. A process that has
    SIGINT, SIGHUP, SIGUSR1   got the signal N ends with status 128 + N. A second signal
    or SIGUSR2                ends the job at once.

In a job that is told to end a trainer saves after its current step, where it is
``recoverable`` or in a ``TrainCtx`` that saves; any other is interrupted, or has a
handler of its own. Data loaders end when trainers need no more batches; servers and
embedding workers, when trainers have ended, or after ``grace_s``. A job of no trainers
ends at once.

With a supervisor (``job/supervisor.py``) this is otherwise:

    this process raised       the coordinator is told why, and the process ends with
                              START_AGAIN. Not if the exception is a ConfigError, nor if
                              a script has raised it at the same line and step at an
                              earlier start, and it is of the script's own:
                              ``failures.find_place``.
    the supervisor has ended  the kernel has killed this process, too.

That of a trainer under torchrun is torchrun, as long as it may start all of them again.
Before it does, it ends those that are left by SIGTERM, which is no failure then: for
one of several trainers under torchrun SIGTERM counts if the job is told to end by
another process, too.

A coordinator with a supervisor is waited for, up to ``recovery_timeout_s``.

Three threads do it. One sends heartbeats, one request each, and may get stuck if the
network does; another touches no network and watches the first. A third receives
signals, which the main thread may miss: see ``signals.py``. Clocks of two hosts are
never compared: who waits for heartbeats, or for their answers, has its own.

torchx's local scheduler starts all roles of a job as its children, and when one ends,
it lets the others run. So they watch each other: a member does not wait for a
coordinator that has ended, nor the coordinator for one that ended before it joined.
"""

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from types import FrameType
from typing import ClassVar, NoReturn, Self

from persia_torchrec import env, timeouts
from persia_torchrec.errors import ConfigError, JobError
from persia_torchrec.job import failures, process_identity
from persia_torchrec.job.member_record import MemberRecord
from persia_torchrec.job.process_identity import METRICS_AT, OwnFigures, Siblings
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.requests import Outcome
from persia_torchrec.job.saves import LAST_CHECKPOINT, SAVES, Saves
from persia_torchrec.job.signals import (
    START_AGAIN,
    WARNINGS,
    EndSignals,
    compiles_here,
    end_daemons_at_exit,
    is_in_compiler,
)
from persia_torchrec.job.state import AwakeClock
from persia_torchrec.rpc.addresses import bind_gloo, local_address

logger = logging.getLogger(__name__)

_RETRY_S = 0.1
_LOOK_S = 0.5  # between two looks at the heartbeats, at most


def tell_before_joining(exc: ConfigError) -> None:
    """Log why this process is about to fail, and have it wait shortly for its job.

    It fails by the same error when it has joined, so that the job learns of it; who
    reads its log need not wait for that, as for a coordinator that is not there yet.
    """
    logger.error("%s", exc)
    wait_s = min(env.join_timeout_s(), timeouts.TELL_S)
    env.set_variable("PERSIA_JOIN_TIMEOUT_S", f"{wait_s:g}")


class JobMember(OwnFigures):
    """This process as a member of a job, from here to the end of a ``with`` block.

    It registers in the address book at ``store``; enter the block at once. A process
    that is rejected here is not a member: it ends alone, and the job continues. Leaving
    the block by an exception, by ``SystemExit`` with a status other than 0, or before
    the job has ended makes the whole job fail. The main thread enters and leaves the
    block, and calls the methods, which are those of ``lifetime.Lifetime``; the
    process is made to end soon after the block. An ``expendable`` one may be
    interrupted once the job is finished. ``ended`` is set once the job has, as far as
    is known here, and ``told_again`` by a second signal; ``host`` is where to listen,
    the interface that leads to the book. Each heartbeat has what ``OwnFigures`` are.

    The process ends with the one that started it, unless ``watches_parent`` is set to
    False before.
    """

    watches_parent = True
    current: "ClassVar[JobMember | None]" = None  # of this process, once it is entered
    saves_at_end = False  # in a block that saves when it ``is_ending``
    _is_compiling = False
    num_pauses = 0  # that threads are in. guarded by _pausing
    _pausing = threading.Lock()
    _has_asked = False  # for the verdict, since a signal came
    _has_decided = False  # whether the main thread must leave by it
    _told = ""  # the signal by which the job is told to end
    _own_signal = 0  # number of one that has come here
    _ends_since_s = math.inf  # guarded by _lock
    _is_deferred = False  # whether the last signal interrupted nothing
    _num_beats = 0  # written by the heartbeat thread only
    # of the guard thread
    _coordinator_ran: tuple[int | None, float] = -1, 0.0  # how often, and when last
    _repeat = ""  # what a failure says that would only repeat
    _unreported = ""  # why it fails, as a thread that does not tell the job has found

    def __init__(
        self,
        role: str,
        index: int,
        size: int,
        *,
        store: tuple[str, int, str],
        expendable: bool = False,
    ) -> None:
        look = Siblings().require_coordinator
        book = AddressBook.join(*store, look=look)
        self.who = f"{role} {index}"
        self.book = book
        self.host = local_address(book.host_name)
        self.greeting = book.greeting
        self.ended = threading.Event()
        self._replica = (role, index, size)
        self.record = MemberRecord(book, role, index)
        self.expendable = expendable
        self.notes = {}
        self._timings = book.timings()
        self._view = book.view()  # the last one, of a heartbeat
        if env.num_group_restarts():
            self._require_running()
        self._signals = EndSignals(self._hear, handler=self._interrupt)
        self._pid = os.getpid()
        self._supervisor = process_identity.find_supervisor()
        self._parent = env.agent() or os.getppid()
        self._callbacks: Future[None] = Future()  # done: they have been called
        self._when_done: list[Callable[[], None]] = []
        self._verdict: tuple[Outcome, str] = ("running", "")  # set under _lock
        self._lock = threading.Lock()  # no handler of signals takes it
        self._waiting = threading.Event()
        self._leaving = threading.Event()
        self._must_leave = threading.Event()  # the main thread, by a signal
        self.told_again = threading.Event()  # a second signal has come
        self._beating = threading.Thread(
            target=self._keep_beating, name="job-heartbeat", daemon=True
        )
        self._join()

    def _join(self) -> None:
        """Serve metrics, where that is asked for, and become the member."""
        role, index, size = self._replica
        self.book.claim_size(role, index, size)
        if address := self.serve_metrics(role, index, self.greeting.job_id, self.host):
            self.book.tell(METRICS_AT + self.who, address)
        by_torchrun = role == "trainer" and env.is_under_torchrun()
        agent = self._parent if by_torchrun else None
        if self.record.register(self._timings.silent_s, agent):
            # Also where torchrun counts no restart, as none of its own has failed.
            env.set_variable("PERSIA_RESTARTS", max(env.num_restarts(), 1))
        if role == "trainer":
            bind_gloo(self.host)
        member = f"{self.book.port} {role} {index} {self._pid}"
        env.set_variable("PERSIA_MEMBER", member)
        process_identity.report_joined()

    def tell_checkpoint(self, path: str) -> None:
        """Make known in the job that a checkpoint is complete."""
        if self.is_here:
            with contextlib.suppress(JobError):  # the coordinator has ended
                self.book.tell(LAST_CHECKPOINT, path)

    def tell_saves(self, saves: Saves) -> None:
        """Make known in the job how the saves of its trainers go."""
        if self.is_here:
            with contextlib.suppress(JobError):  # the coordinator has ended
                self.book.tell(SAVES, saves.text())

    @property
    def save_request(self) -> str:
        """The last request for a save, as far as the last heartbeat knows; or ""."""
        return self._view.save_request

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Have another thread call something quick when the job ends, or has ended."""
        self._callbacks.add_done_callback(lambda _: callback())

    @property
    def is_here(self) -> bool:
        """Whether this process is the member, and no forked child of it."""
        return self._pid == os.getpid()

    def call_when_done(self, callback: Callable[[], None]) -> None:
        """Have the main thread call something when its script has ended well."""
        self._when_done.append(callback)

    def report_done(self) -> None:
        """Report that the script has ended well, and what was given to be called."""
        for callback in self._when_done:
            callback()
        self.record.report_done()

    def register(self, address: str) -> None:
        """Make the address of this process known to the job: it is ready."""
        self.book.register(*self._replica, address)
        self.become_ready()

    def report_compiling(self, is_compiling: bool) -> None:
        """Report a compilation of loops; see ``ExtendableDeadline``."""
        self._is_compiling = is_compiling

    @classmethod
    @contextlib.contextmanager
    def pausing(cls) -> Iterator[None]:
        """Make known in the job, if there is one, that no steps come in a block."""
        member = cls.current
        if member is None:
            yield
            return
        with cls._pausing:
            member.num_pauses += 1
        try:
            yield
        finally:
            with cls._pausing:
                member.num_pauses -= 1

    def wait_for_end(self) -> None:
        """Wait until the job is finished; JobError says why it failed."""
        self._waiting.set()
        self.ended.wait()
        self._raise_failure()

    @property
    def is_ending(self) -> bool:
        """Whether a script without a handler of its own must :meth:`end_as_told`."""
        told = self._told
        return bool(told) and not self._signals.is_foreign(signal.Signals[told])

    def learns_to_end(self, *, is_likely: bool) -> bool:
        """Return whether ``is_ending``; where that is likely, ask for some seconds."""
        until_s = time.monotonic() + timeouts.MEMBER_DECISION_S
        while is_likely and not self._told and time.monotonic() < until_s:
            self._ask_for_verdict()
            if self._verdict[0] != "running":
                break
            time.sleep(_RETRY_S)
        return self.is_ending

    def report_last_step(self) -> None:
        """Make known that the trainers of a job that is told to end train no more."""
        with contextlib.suppress(JobError):  # the coordinator has ended
            self.book.report_last_step()

    def end_as_told(self) -> NoReturn:
        """Leave the block, once all is saved, as the job is told to end."""
        self._waiting.set()  # not to be interrupted any more
        sys.exit(f"the job is told to end ({self._told})")

    def is_consequence(self, exc: BaseException) -> bool:
        """Return whether the end of the job may be why this member has raised."""
        self._ask_for_cause(exc)
        if self._verdict[0] == "failed":
            return failures.may_be_consequence(exc)
        return self.expendable and self._verdict[0] == "finished"

    def __enter__(self) -> Self:
        JobMember.current = self
        process_identity.set_title(self.who, self.book.greeting.job_id)
        end_daemons_at_exit()
        self._beating.start()
        self._signals.__enter__()
        threading.Thread(target=self._guard, name="job-guard", daemon=True).start()
        logger.info("%s joined the job at %s", self.who, self.book.host_name)
        return self

    def __exit__(self, _: object, exc: BaseException | None, traceback: object) -> bool:
        if not self.is_here:
            return False  # a forked child that leaves the block as it exits
        cause = None if exc is None else failures.describe(exc)
        has_raised = cause is not None  # SystemExit with status 0 is not a failure
        if exc is not None and has_raised:
            self._ask_for_cause(exc)
        is_needless = has_raised and self.expendable and self._verdict[0] == "finished"
        is_known = False  # the exception is on the console, from an earlier start
        if is_needless:
            logger.info("job finished; stopping %s: %s", self.who, cause)
        elif has_raised and self._told:
            self._leave_as_told(exc)
        elif has_raised and self._may_start_again(exc) and not self._find_repeat(exc):
            self._end_and_start_again(str(cause), exc)
        elif has_raised or self._unreported or self._verdict[0] == "running":
            is_known = self._is_known(cause)
            why = self._unreported if failures.may_be_consequence(exc) else ""
            reason = why or cause or "it left before the job had ended"
            self._fail(f"{reason}{self._repeat}")
        self._leave()
        if self._verdict[0] == "finished":  # no signal makes that a failure
            self._signals.ignore()
        self._signals.__exit__()
        state, reason = self._verdict
        if has_raised and self._told and state != "finished":
            raise SystemExit(self._told_status())
        is_own = has_raised and reason.startswith(f"{self.who}: ") and not is_known
        is_consequence = not is_own and failures.may_be_consequence(exc)
        if state == "failed" and (is_known or is_consequence):
            logger.debug("%s raised because the job had failed", self.who, exc_info=exc)
            raise SystemExit(1)  # without a traceback
        return is_needless

    def _leave_as_told(self, exc: BaseException | None) -> None:
        """Wait until others have saved: torchrun takes an end for a failure."""
        error = None if isinstance(exc, SystemExit | KeyboardInterrupt) else exc
        logger.info("%s exits: graceful shutdown of the job", self.who, exc_info=error)
        with contextlib.suppress(JobError):  # the coordinator has ended
            self.record.report_saved()
        if not self.expendable:
            self._waiting.set()
            self.ended.wait(self._timings.grace_s + self._timings.leave_s)

    def _told_status(self) -> int:
        return 128 + self._own_signal if self._own_signal else 1

    def _hear(self, name: str) -> None:
        """Begin to end, or end at once; in the thread that receives signals."""
        if self._must_leave.is_set():
            return  # it may be of this process, to interrupt the main thread
        self._own_signal = self._own_signal or signal.Signals[name]
        if time.monotonic() - self._begin_to_end(name) > timeouts.SAME_SIGNAL_S:
            self.told_again.set()

    def _begin_to_end(self, name: str) -> float:
        """End by a signal, in a thread of its own; return since when it does."""
        with self._lock:
            since_s, now_s = self._ends_since_s, time.monotonic()
            self._ends_since_s = min(since_s, now_s)
        if since_s == math.inf:
            end = partial(self._end_by, name)
            threading.Thread(target=end, name="job-ending", daemon=True).start()
        return min(since_s, now_s)

    def _end_by(self, name: str) -> None:
        """Make the process end by a signal, which it or another member has got."""
        if not self._is_of_group:  # torchrun starts it again, in a job that runs
            self.book.recovery_s = 0.0
        self._ask_for_verdict()
        if self._verdict[0] == "finished":
            self.ended.set()
        elif self._verdict[0] == "running":
            self._tell_to_end(name)
        self._has_asked = True
        timings, number = self._timings, signal.Signals[name]
        until_s = time.monotonic() + timings.leave_s
        until_s += timings.grace_s if self._told else 0.0
        while time.monotonic() < until_s and not self.told_again.is_set():
            is_free = self._is_deferred or not self._must_leave.is_set()
            if is_free and not self._continues(number):  # again, if it had no effect
                self._must_leave.set()
                self._signals.interrupt(number)
            self._has_decided = True
            if self.ended.is_set() or self._leaving.wait(_RETRY_S):
                return
        self._ask_for_verdict()
        if self._may_start_again(None):
            os._exit(START_AGAIN)
        if self._verdict[0] == "running":
            twice = ", twice" if self.told_again.is_set() else ""
            self._fail(f"ended from outside ({name}){twice}")
        self._end(*self._verdict)

    @property
    def _is_of_group(self) -> bool:
        """Whether torchrun ends this trainer when another one has failed."""
        role, _, size = self._replica
        return role == "trainer" and size > 1 and env.is_under_torchrun()

    def _tell_to_end(self, name: str) -> None:
        """Have the job end, if it is one of trainers, and note whether it is told to.

        torchrun ends trainers by SIGTERM before it starts them again: others than the
        one that has failed.
        """
        with contextlib.suppress(JobError):  # the coordinator has ended
            if not self.book.view().has_trainers:
                return
            if not self._is_of_group or signal.Signals[name] in WARNINGS:
                self.book.tell_to_end(name, self.who)
            until_s = time.monotonic() + timeouts.MEMBER_AGENT_S
            while not (told := self.book.view().signal) and time.monotonic() < until_s:
                time.sleep(_RETRY_S)
            self._told = told

    def _continues(self, number: signal.Signals) -> bool:
        """Return whether the main thread continues, though it is told to end."""
        if not self._told:
            return False
        if self._waiting.is_set():  # its work is done
            return True
        if self._replica[0] == "trainer":
            return self.saves_at_end or self._signals.has_passed(number)
        if self.expendable:
            half_s = self._ends_since_s + self._timings.grace_s / 2
            return time.monotonic() < half_s and not self._view.is_after_last_step
        return True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Make the main thread leave the block; the handler of signals."""
        self._is_deferred = is_in_compiler(frame)
        if self._is_deferred:
            return
        state, _ = self._verdict
        if state == "running":
            # Another thread asks why; signal.pause() must not return meanwhile.
            leaves = self._must_leave.is_set
            self._signals.poll(
                lambda: leaves() or self._has_decided, timeouts.MEMBER_DECISION_S
            )
            if not leaves():
                return
            why = f"ended from outside ({signal.Signals(number).name})"
            if number == signal.SIGINT:
                raise KeyboardInterrupt(why)
            sys.exit(why)
        if state == "failed":
            raise SystemExit(self._told_status() if self._told else 1)
        if self.expendable and not self._waiting.is_set():
            raise SystemExit(0)

    def _may_start_again(self, exc: BaseException | None) -> bool:
        """Return whether an exception is for the supervisor, and not for the job."""
        is_final = self._has_asked and not env.is_under_torchrun()
        is_final |= isinstance(exc, ConfigError) or bool(self._told)
        is_final |= self._verdict[0] != "running"
        return self._supervisor is not None and not is_final

    def _find_repeat(self, exc: BaseException | None) -> str:
        """Return what a failure of a script says that it would only repeat; or "".

        It has raised there at an earlier start, and no step was trained since.
        """
        role, _, _ = self._replica
        place = failures.find_place(exc) if role in ("trainer", "loader") else None
        num_steps = self._num_steps() if role == "trainer" else None
        if place is not None:
            with contextlib.suppress(JobError):  # the coordinator has ended
                if self.record.report_raise(place, num_steps):
                    self._repeat = (
                        f"; the second {place} at the same step, so that the script is "
                        "not started again"
                    )
        return self._repeat

    def _is_known(self, cause: str | None) -> bool:
        """Return whether this member has failed with a cause before; note the cause."""
        if cause is None or not env.num_group_restarts():
            return False
        with contextlib.suppress(JobError):  # the coordinator has ended
            return not self.record.report_failure(cause)
        return False

    def _end_and_start_again(self, cause: str, exc: BaseException | None) -> None:
        """Report the cause, and have the supervisor start this process again."""
        is_new = True
        with contextlib.suppress(JobError):  # the coordinator has ended
            is_new = self.record.report_failure(cause)
        traceback = exc if is_new and not self._has_asked else None  # of a signal
        logger.info(
            "%s exits; its supervisor restarts it", self.who, exc_info=traceback
        )
        end = threading.Timer(self._timings.leave_s, os._exit, (START_AGAIN,))
        end.daemon = True
        end.start()
        self._leave()
        raise SystemExit(START_AGAIN)

    def _fail(self, reason: str) -> None:
        with contextlib.suppress(JobError):  # the coordinator has ended
            view = self.book.fail(self.who, reason)
            self._note(view.outcome, view.reason)  # another may have failed before
        self._fail_alone(f"{self.who}: {reason}")

    def _fail_alone(self, reason: str) -> None:
        """End as of a failed job, for a reason that the coordinator may not know."""
        self._end("failed", reason, is_known=False)

    def _leave(self) -> None:
        """Say goodbye; of a finished job, when all trainers have left."""
        self._waiting.set()  # not to be interrupted any more
        if self._verdict[0] == "finished":
            self.ended.wait(self._timings.finish_s)
        self._leaving.set()
        self._beating.join(timeouts.MEMBER_LEAVE_S)

    def _raise_failure(self) -> None:
        state, reason = self._verdict
        if state == "failed":
            raise JobError(f"The job failed: {reason}")

    def _require_running(self) -> None:
        """End this process, which was started again, if the job is over."""
        view = self._view
        if view.outcome == "failed":
            raise JobError(f"The job failed: {view.reason}")
        if not env.num_restarts():  # by torchrun, to which any end is a failure
            return
        if view.outcome == "finished":
            raise SystemExit(0)
        if told := view.signal:
            raise JobError(f"The job is told to end ({told}): nothing starts again.")

    def _require_place(self, successor: int) -> None:
        """End this process at once if another one is this member by now.

        It was stopped, or cut off, for so long that the job has given it up.
        """
        if successor:
            logger.error("%s exits: replaced by process %d", self.who, successor)
            os._exit(1)

    def _ask_for_verdict(self) -> None:
        """Read the state of the job, without waiting for the next heartbeat."""
        with contextlib.suppress(JobError):  # the coordinator has ended
            view = self.book.view()
            self._note(view.outcome, view.reason)
            self._told = self._told or view.signal

    def _ask_for_cause(self, exc: BaseException) -> None:
        """Ask whether the job has failed, which may be the reason for an exception."""
        self._ask_for_verdict()
        # If a lost connection has raised it, others may report more.
        is_waiting = failures.is_of_connection(exc) and self._supervisor is None
        deadline = time.monotonic() + (timeouts.MEMBER_CAUSE_S if is_waiting else 0)
        while self._verdict[0] == "running" and time.monotonic() < deadline:
            time.sleep(_RETRY_S)
            self._ask_for_verdict()

    def _note(self, state: Outcome, reason: str, *, is_known: bool = True) -> None:
        """Remember, and log, how the job ended, if it has; the first verdict stands.

        The coordinator logs a reason that it knows.
        """
        with self._lock:  # held while logging, so that the process does not end before
            if self._verdict[0] != "running":
                return
            self._verdict = (state, reason)
            if state == "failed":
                who = failures.find_member(reason)
                why = f"{who} has failed" if who else "see the coordinator's log"
                if who == self.who and (cause := reason.partition(who)[2])[:1] == ":":
                    why += cause  # its log is where one looks for it
                why = why if is_known else reason
                level = logging.ERROR
                if failures.was_told(reason):
                    level, why = logging.INFO, "the job was told to end"
                logger.log(level, "%s ends: %s", self.who, why)
                if env.is_under_torchrun():
                    failures.tell_launcher(reason)

    def _end(self, state: Outcome, reason: str, *, is_known: bool = True) -> None:
        """Remember how the job ended, if it has, and have this process end."""
        self._note(state, reason, is_known=is_known)
        if state != "running":
            self.ended.set()

    def _num_steps(self) -> int:
        return 0 if self.progress is None else self.progress()

    def _keep_beating(self) -> None:
        try:
            told: Mapping[str, float] = {}
            while not self._leaving.is_set():
                num_steps, figures = self._num_steps(), self.figures()
                view = self.record.beat(
                    num_steps,
                    self.notes,
                    {} if figures is told else figures,
                    is_compiling=self._is_compiling or compiles_here(),
                    is_paused=self.num_pauses > 0 or self.is_paused(),
                )
                told = figures
                self._require_place(view.successor)
                self._num_beats += 1  # first: another one was not silent
                self._view = view
                if view.signal:
                    self._told = view.signal
                    self._begin_to_end(view.signal)
                is_first = self._replica[0] == "trainer"  # to leave a finished job
                if view.outcome == "finished" and not is_first and not view.is_over:
                    self._note(view.outcome, view.reason)
                else:
                    self._end(view.outcome, view.reason)
                self._leaving.wait(view.next_beat_s)
            self.record.leave()
        except JobError as exc:
            self._fail_alone(f"{self.who} lost the coordinator: {exc}")
        except Exception as exc:  # else the guard would blame the coordinator
            logger.exception("the heartbeat thread of %s failed", self.who)
            self._unreported = f"the heartbeat of {self.who} broke: {exc!r}"
            self._fail_alone(self._unreported)

    def _guard(self) -> None:
        """End the process with the job; in a thread that touches no network."""
        try:
            self._watch_parent_and_beats()
            self._callbacks.set_result(None)
            self._end_process()
        except Exception:  # else the process would outlive its job
            logger.exception("the guard thread of %s failed", self.who)
            os._exit(1)

    def _watch_parent_and_beats(self) -> None:
        """Return once the job has ended, for any reason."""
        timings = self._timings
        tick_s = min(timings.heartbeat_s / 2, _LOOK_S)
        clock, last_seen, heard_s = AwakeClock(time.monotonic()), -1, 0.0
        while not self.ended.wait(tick_s):
            # Of a process that did not run the coordinator is not to blame.
            now_s = clock.advance(time.monotonic())
            if self._num_beats != last_seen:
                heard_s, last_seen = now_s, self._num_beats
            if self.watches_parent and os.getppid() != self._parent:
                if env.is_under_torchrun() and self._supervisor is not None:
                    os._exit(START_AGAIN)  # the next torchrun starts another
                parent = "torchrun" if env.is_under_torchrun() else "process"
                self._unreported = f"lost the {parent} that started it"
                self._fail_alone(f"{self.who} {self._unreported}")
            silent_s = now_s - heard_s
            limit_s = max(timings.silent_s, self.book.recovery_s)
            if silent_s > limit_s:
                silent = f"no answer of the coordinator for {limit_s:g} s"
                self._fail_alone(f"{self.who}: {silent}")
            if silent_s > timings.silent_s / 4:
                self._look_at_coordinator(now_s, silent_s)

    def _look_at_coordinator(self, now_s: float, silent_s: float) -> None:
        """Kill one of this host that is stopped: it would stay, and torchx with it.

        One that runs is not to blame: this process alone may be cut off.
        """
        coordinator, limit_s = self._view.coordinator, self._timings.silent_s
        if coordinator is None:
            return
        num_runs, ran_s = self._coordinator_ran
        if (num := coordinator.num_runs()) is None or num != num_runs:
            num_runs, ran_s = num, now_s
        self._coordinator_ran = num_runs, ran_s
        is_stopped = silent_s > limit_s and now_s - ran_s > limit_s / 2
        if is_stopped and coordinator.kill():
            logger.warning("killed the coordinator (%d)", coordinator.pid)

    def _end_process(self) -> None:
        """Make this process end within its time, now that the job has ended."""
        has_failed = self._verdict[0] == "failed"
        seconds, status = self._timings.finish_s, 1
        if has_failed or (self.expendable and not self._waiting.is_set()):
            seconds, status = self._timings.leave_s, int(has_failed)
            if not has_failed:
                logger.info("job finished; stopping %s", self.who)
            if not self._leaving.wait(timeouts.MEMBER_VOLUNTARY_S if has_failed else 0):
                self._must_leave.set()
                self._signals.interrupt(signal.SIGTERM)
        time.sleep(seconds)  # it should have ended by itself then
        if not has_failed and self._leaving.is_set():  # what is slow is Python's end
            status = 0
        late = f"{self.who} did not end within {seconds:g} s of the job's end"
        logger.warning("%s, and is ended with status %d", late, status)
        self._leave()
        os._exit(status)
