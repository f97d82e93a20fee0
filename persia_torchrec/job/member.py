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
    coordinator or the        is interrupted by SIGTERM; after ``grace_s`` the process
    parent process has ended  ends with status 1, even if its main thread is stuck.
    this process raised       the others are told why, and the exception propagates.
    this process got SIGTERM  the main thread is interrupted, by SystemExit or by
    or SIGINT                 KeyboardInterrupt. If it has not left the block after
                              ``grace_s``, the job has failed, and so on as above.

With a supervisor (``job/supervisor.py``) this is otherwise:

    this process raised       the coordinator is told why, and the process ends with
                              START_AGAIN. Not if the exception is a ConfigError, nor if
                              a script has raised it at the same line and step at an
                              earlier start, and it is of the script's own:
                              ``failures.find_place``.
    the supervisor has ended  the kernel has killed this process, too.

That of a trainer under torchrun is torchrun, as long as it may start all of them again.
Before it does, it ends those that are left by SIGTERM, which is no failure then.

A coordinator with a supervisor is waited for, up to ``recovery_timeout_s``.

Three threads do it. One sends heartbeats, and may get stuck if the network does;
another touches no network and watches the first. A third receives signals, which the
main thread may miss: see ``signals.py``. Clocks of two hosts are never compared: the
reader of a number of heartbeats measures for how long it did not grow.

torchx's local scheduler starts all roles of a job as its children, and when one ends,
it lets the others run. So they watch each other: a member does not wait for a
coordinator that has ended, nor the coordinator for one that ended before it joined.
"""

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from types import FrameType
from typing import ClassVar, Self

from persia_torchrec import env, timeouts
from persia_torchrec.errors import ConfigError, FrameError, JobError
from persia_torchrec.job import failures, process_identity
from persia_torchrec.job.member_record import MemberRecord
from persia_torchrec.job.process_identity import ProcessIdentity, Siblings
from persia_torchrec.job.registry import AddressBook, JobState
from persia_torchrec.job.registry_server import COMPILING
from persia_torchrec.job.signals import START_AGAIN, EndSignals, is_in_compiler
from persia_torchrec.parsing.decoding import parse_json
from persia_torchrec.rpc.addresses import interface_of, local_address

logger = logging.getLogger(__name__)

_TIMINGS = "timings"
LAST_CHECKPOINT = "checkpoint"  # note that names the last complete one
_LEAVE_TIMEOUT_S = 2.0
_VOLUNTARY_S = 0.5
_RETRY_S = 0.1
_VERDICT_S = 2.0  # how long an interrupted main thread waits for the job's state
_CAUSE_S = 4.0  # how long an error of a connection waits for one that caused it


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTimings:
    """Heartbeat intervals and timeouts of a job, set by the coordinator for all."""

    heartbeat_s: float = 1.0
    """Seconds between two heartbeats of a member."""

    silent_s: float = 20.0
    """A member, or the coordinator, without heartbeats for longer counts as dead."""

    grace_s: float = 3.0
    """What an interrupted main thread has to end by itself."""

    finish_s: float = 20.0
    """What a member has to leave after the job is finished."""

    recovery_timeout_s: float = timeouts.RECOVERY_S
    """How long the job waits for a member with a supervisor, or the coordinator, that
    was killed, is lost or silent. Then it fails."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ConfigError(f"{name} must be > 0. Received: {value}.")
        if self.silent_s < 2 * self.heartbeat_s:
            raise ConfigError(
                "silent_s must be at least two heartbeats. "
                f"Received: {self.silent_s} with heartbeat_s={self.heartbeat_s}."
            )

    def publish(self, book: AddressBook) -> None:
        """Make these the timings of the job; the coordinator calls it first."""
        book.tell(_TIMINGS, json.dumps(asdict(self)))

    @classmethod
    def read(cls, book: AddressBook) -> "JobTimings":
        """Return the timings of the job, once the coordinator has published them."""
        (text,) = book.ask([_TIMINGS])
        timings: JobTimings = parse_json(text, cls, "note 'timings'", FrameError)
        return timings


class JobMember:
    """This process as a member of a job, from here to the end of a ``with`` block.

    It registers in the address book at ``store``; enter the block at once. A process
    that is rejected here is not a member: it ends alone, and the job continues. Leaving
    the block by an exception, by ``SystemExit`` with a status other than 0, or before
    the job has ended makes the whole job fail. The main thread enters and leaves the
    block, and calls the methods, which are those of ``service.Lifetime``; the
    process is made to end soon after the block. An ``expendable`` one may be
    interrupted once the job is finished. ``ended`` is set once the job has, as far as
    is known here; ``host`` is where to listen, the interface that leads to the book.
    ``progress`` may be set to what returns a number that grows with trained batches; a
    thread of the member calls it with each heartbeat.

    The process ends with the one that started it, unless ``watches_parent`` is set to
    False before.
    """

    watches_parent = True
    current: "ClassVar[JobMember | None]" = None  # of this process, once it is entered
    progress: Callable[[], int] | None = None
    _repeat = ""  # what a failure says that would only repeat

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
        self._timings = JobTimings.read(book)
        if env.num_restarts():
            self._require_running()
        self._coordinator = self._find_coordinator()
        self._signals = EndSignals(self._hear, handler=self._interrupt)
        self._pid = os.getpid()
        self._supervisor = process_identity.find_supervisor()
        self._parent = env.agent() or os.getppid()
        self._callbacks: Future[None] = Future()  # done: they have been called
        self._verdict: tuple[JobState, str] = ("running", "")  # set under _lock
        self._lock = threading.Lock()  # no handler of signals takes it
        self._waiting = threading.Event()
        self._leaving = threading.Event()
        self._is_compiling = False
        self._has_asked = False  # for the verdict, since a signal came
        self._is_deferred = False  # whether the last signal interrupted nothing
        self._num_beats = 0  # written by the heartbeat thread only
        self._beating = threading.Thread(
            target=self._keep_beating, name="job-heartbeat", daemon=True
        )
        book.claim_size(role, index, size)
        if self.record.register(self._timings.silent_s):
            # Also where torchrun counts no restart, as none of its own has failed.
            env.set_variable("PERSIA_RESTARTS", max(env.num_restarts(), 1))
        if role == "trainer":
            _bind_gloo(self.host)
        if role == "trainer" and env.is_under_torchrun():
            self.record.tell_agent(self._parent)
        env.set_variable("PERSIA_MEMBER", f"{book.port} {role} {index} {self._pid}")
        process_identity.tell_joined()

    def tell_checkpoint(self, path: str) -> None:
        """Make known in the job that a checkpoint is complete."""
        if self._pid == os.getpid():  # else of a forked child
            with contextlib.suppress(JobError):  # the coordinator has ended
                self.book.tell(LAST_CHECKPOINT, path)

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Have another thread call something quick when the job ends, or has ended."""
        self._callbacks.add_done_callback(lambda _: callback())

    def register(self, address: str) -> None:
        """Make the address of this process known to the job."""
        self.book.register(*self._replica, address)

    def tell_compiling(self, is_compiling: bool) -> None:
        """Report whether this process compiles its loops; see ``Patience``."""
        self._is_compiling = is_compiling

    def wait_for_end(self) -> None:
        """Wait until the job is finished; JobError says why it failed."""
        self._waiting.set()
        self.ended.wait()
        self._raise_failure()

    def is_consequence(self, exc: BaseException) -> bool:
        """Return whether the end of the job may be why this member has raised."""
        self._ask_for_cause(exc)
        if self._verdict[0] == "failed":
            return failures.may_be_consequence(exc)
        return self.expendable and self._verdict[0] == "finished"

    def __enter__(self) -> Self:
        JobMember.current = self
        self._beating.start()
        self._signals.__enter__()
        threading.Thread(target=self._guard, name="job-guard", daemon=True).start()
        logger.info("%s joined the job at %s", self.who, self.book.host_name)
        return self

    def __exit__(self, _: object, exc: BaseException | None, traceback: object) -> bool:
        if os.getpid() != self._pid:
            return False  # a forked child that leaves the block as it exits
        cause = None if exc is None else failures.describe(exc)
        has_raised = cause is not None  # SystemExit with status 0 is not a failure
        if exc is not None and has_raised:
            self._ask_for_cause(exc)
        is_needless = has_raised and self.expendable and self._verdict[0] == "finished"
        is_known = False  # the exception is on the console, from an earlier start
        if is_needless:
            logger.info("the job is finished, %s ends: %s", self.who, cause)
        elif has_raised and self._may_start_again(exc) and not self._find_repeat(exc):
            self._end_and_start_again(str(cause), exc)
        elif has_raised or self._verdict[0] == "running":
            is_known = self._is_known(cause)
            reason = cause or "it left before the job had ended"
            self._fail(f"{reason}{self._repeat}")
        self._leave()
        if self._verdict[0] == "finished":  # no signal makes that a failure
            self._signals.ignore()
        self._signals.__exit__()
        state, reason = self._verdict
        is_own = has_raised and reason.startswith(f"{self.who}: ") and not is_known
        is_consequence = not is_own and failures.may_be_consequence(exc)
        if state == "failed" and (is_known or is_consequence):
            logger.debug("%s raised as the job had failed", self.who, exc_info=exc)
            raise SystemExit(1)  # without a traceback
        return is_needless

    def _hear(self, name: str) -> None:
        """Make the process end, in the thread that receives signals."""
        self.book.recovery_s = 0.0
        self._ask_for_verdict()
        self._has_asked = True
        if self._verdict[0] == "finished":
            self.ended.set()
        deadline = time.monotonic() + self._timings.grace_s
        while time.monotonic() < deadline:
            if self.ended.is_set() or self._leaving.wait(_RETRY_S):
                return
            if self._is_deferred:  # interrupt the main thread again
                self._signals.interrupt(signal.Signals[name])
        self._ask_for_verdict()
        if self._may_start_again(None):
            os._exit(START_AGAIN)
        if self._verdict[0] == "running":
            self._fail(f"ended from outside ({name})")
        else:
            self._end(*self._verdict)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Make the main thread leave the block; the handler of signals."""
        self._is_deferred = is_in_compiler(frame)
        if self._is_deferred:
            return
        # Slurm sends the signal as soon as another process has failed: ask why. The
        # thread that receives signals does: this one may hold the locks of a request.
        deadline = time.monotonic() + _VERDICT_S
        while not self._has_asked and time.monotonic() < deadline:
            if self._verdict[0] != "running":
                break
            time.sleep(_RETRY_S / 10)
        state, _ = self._verdict
        if state == "running":
            why = f"ended from outside ({signal.Signals(number).name})"
            if number == signal.SIGINT:
                raise KeyboardInterrupt(why)
            sys.exit(why)
        if state == "failed":
            raise SystemExit(1)
        if self.expendable and not self._waiting.is_set():
            raise SystemExit(0)

    def _may_start_again(self, exc: BaseException | None) -> bool:
        """Return whether an exception is for the supervisor, and not for the job."""
        is_final = isinstance(exc, ConfigError) or (
            self._has_asked and not env.is_under_torchrun()
        )
        return not (
            self._supervisor is None or is_final or self._verdict[0] != "running"
        )

    def _find_repeat(self, exc: BaseException | None) -> str:
        """Return what a failure of a script says that it would only repeat; or "".

        It has raised there at an earlier start, and no step was trained since.
        """
        role, _, _ = self._replica
        place = failures.find_place(exc) if role in ("trainer", "loader") else None
        if place is not None:
            with contextlib.suppress(JobError):  # the coordinator has ended
                if self.record.report_raise(place, self._num_trained()):
                    self._repeat = (
                        f"; the second {place} at the same step, so that the script is "
                        "not started again"
                    )
        return self._repeat

    def _num_trained(self) -> int:
        """Return steps of this trainer; or of all, as they have reported it."""
        if self._replica[0] == "trainer":
            return 0 if self.progress is None else self.progress()
        size = int(self.book.peek("address/trainer/size") or 0)
        trainers = (MemberRecord(self.book, "trainer", i) for i in range(size))
        return sum(trainer.progress() for trainer in trainers)

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
        logger.info("%s ends, and is started again", self.who, exc_info=traceback)
        end = threading.Timer(self._timings.grace_s, os._exit, (START_AGAIN,))
        end.daemon = True
        end.start()
        self._leave()
        raise SystemExit(START_AGAIN)

    def _fail(self, reason: str) -> None:
        with contextlib.suppress(JobError):  # the coordinator has ended
            self.book.fail(self.who, reason)
            self._note(*self.book.state())  # which another may have failed before
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
        self._beating.join(_LEAVE_TIMEOUT_S)

    def _raise_failure(self) -> None:
        state, reason = self._verdict
        if state == "failed":
            raise JobError(f"The job failed: {reason}")

    def _require_running(self) -> None:
        """End this process, which was started again, if the job is over."""
        state, reason = self.book.state()
        if state == "failed":
            raise JobError(f"The job failed: {reason}")
        if state == "finished":
            raise SystemExit(0)

    def _require_place(self) -> None:
        """End this process at once if another one is this member by now.

        It was stopped, or cut off, for so long that the job has given it up.
        """
        other = self.record.successor()
        if other is not None:
            logger.error(
                "%s was given up, and ends: another process (%d) has its place",
                *(self.who, other.pid),
            )
            os._exit(1)

    def _find_coordinator(self) -> ProcessIdentity | None:
        return MemberRecord(self.book, "coordinator", 0).process()

    def _ask_for_verdict(self) -> None:
        """Read the state of the job, without waiting for the next heartbeat."""
        with contextlib.suppress(JobError):  # the coordinator has ended
            self._note(*self.book.state())

    def _ask_for_cause(self, exc: BaseException) -> None:
        """Ask whether the job has failed, which may be the reason for an exception."""
        self._ask_for_verdict()
        # If a lost connection has raised it, others may report more.
        is_waiting = failures.is_of_connection(exc) and self._supervisor is None
        deadline = time.monotonic() + (_CAUSE_S if is_waiting else 0)
        while self._verdict[0] == "running" and time.monotonic() < deadline:
            time.sleep(_RETRY_S)
            self._ask_for_verdict()

    def _note(self, state: JobState, reason: str, *, is_known: bool = True) -> None:
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
                why = why if is_known else reason
                logger.error("%s ends: %s", self.who, why)
                if env.is_under_torchrun():
                    failures.tell_launcher(reason)

    def _end(self, state: JobState, reason: str, *, is_known: bool = True) -> None:
        """Remember how the job ended, if it has, and have this process end."""
        self._note(state, reason, is_known=is_known)
        if state != "running":
            self.ended.set()

    def _keep_beating(self) -> None:
        try:
            while not self._leaving.is_set():
                self.record.beat()
                self._require_place()
                if self.progress is not None:
                    self.record.report_progress(self.progress())
                if self._is_compiling:
                    self.book.increase(COMPILING)
                coordinator = self._coordinator
                if self.book.recovery_s:  # it may be another one
                    coordinator = self._find_coordinator()
                state, reason = self.book.state()
                self._num_beats += 1  # first: another one was not silent
                self._coordinator = coordinator
                is_first = self._replica[0] == "trainer"  # to leave a finished job
                if state == "finished" and not is_first and not self.book.is_over():
                    self._note(state, reason)
                    self._leaving.wait(_RETRY_S)
                else:
                    self._end(state, reason)
                    self._leaving.wait(self._timings.heartbeat_s)
            self.record.leave()
        except JobError as exc:
            self._fail_alone(f"{self.who} lost the coordinator: {exc}")
        except Exception as exc:  # else the guard would blame the coordinator
            logger.exception("the heartbeat of %s broke", self.who)
            self._fail_alone(f"the heartbeat of {self.who} broke: {exc!r}")

    def _guard(self) -> None:
        """End the process with the job; in a thread that touches no network."""
        try:
            self._watch_parent_and_beats()
            self._callbacks.set_result(None)
            self._end_process()
        except Exception:  # else the process would outlive its job
            logger.exception("the guard of %s broke", self.who)
            os._exit(1)

    def _watch_parent_and_beats(self) -> None:
        """Return once the job has ended, for any reason."""
        # Silence is counted in own ticks, not read off the clock: a process that did
        # not run at all for a while must not blame the coordinator.
        timings = self._timings
        tick_s = timings.heartbeat_s / 2
        silent_ticks, last_seen = 0, -1
        while not self.ended.wait(tick_s):
            silent_ticks += 1
            if self._num_beats != last_seen:
                silent_ticks, last_seen = 0, self._num_beats
            if self.watches_parent and os.getppid() != self._parent:
                if env.is_under_torchrun() and self._supervisor is not None:
                    os._exit(START_AGAIN)  # the next torchrun starts another
                self._fail_alone(f"{self.who} lost the process that started it")
            silent_s = silent_ticks * tick_s
            limit_s = max(timings.silent_s, self.book.recovery_s)
            if silent_s > limit_s:
                silent = f"no answer of the coordinator for {limit_s:g} s"
                self._fail_alone(f"{self.who}: {silent}")
            # One that is stopped, on this host, would stay, and torchx with it.
            coordinator = self._coordinator if silent_s > timings.silent_s else None
            if coordinator is not None and coordinator.kill():
                logger.warning("killed the coordinator (%d)", coordinator.pid)

    def _end_process(self) -> None:
        """Make this process end within its time, now that the job has ended."""
        has_failed = self._verdict[0] == "failed"
        seconds, status = self._timings.finish_s, 1
        if has_failed or (self.expendable and not self._waiting.is_set()):
            seconds, status = self._timings.grace_s, int(has_failed)
            if not has_failed:
                logger.info("the job is finished, %s is not needed any more", self.who)
            if not self._leaving.wait(_VOLUNTARY_S if has_failed else 0):
                self._signals.interrupt(signal.SIGTERM)
        time.sleep(seconds)  # it should have ended by itself then
        if not has_failed and self._leaving.is_set():  # what is slow is Python's end
            status = 0
        late = f"{self.who} did not end within {seconds:g} s of the job's end"
        logger.warning("%s, and is ended with status %d", late, status)
        self._leave()
        os._exit(status)


def _bind_gloo(host: str) -> None:
    """Have gloo connect by the interface of an address, unless the user names one.

    By itself it takes the one that has the address of the host's name, which may be the
    loopback interface.
    """
    name = interface_of(host)
    if name is not None and env.text("GLOO_SOCKET_IFNAME") is None:
        env.set_variable("GLOO_SOCKET_IFNAME", name)
