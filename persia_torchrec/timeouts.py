"""Times in seconds: defaults, and limits of what is waited for, by theme.

What waits for a process that is started again outlasts what that may take: a request is
shorter than ``RECOVERY_S``, joint steps and collective operations are longer.

How often something is polled stands beside its code. Each wait of a start may take
``PERSIA_JOIN_TIMEOUT_S``; a long one says what for. The page docs/reference/times.md is
generated from the themes and comments of this file.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

SAY_S = 10.0  # of a wait, until a line says for whom; the next are at twice the time

# Requests
REQUEST_S = 60.0  # a server answers a worker, a worker an inference server
TRAINING_REQUEST_S = 120.0  # a server or a worker answers a trainer
AWAY_S = 10.0  # an embedding worker or server of inference is back, or another is asked
ADD_TABLES_S = 120.0  # the servers have all tables; the first time they compile
RESTORE_SETTINGS_S = 2 * TRAINING_REQUEST_S + ADD_TABLES_S  # tables are as they were
PERMIT_S = 3600.0  # a staleness permit is free: the trainer takes steps meanwhile
RESEND_LEFT_S = 1.0  # requests that were sent again have at least so long
REPLY_GRACE_S = 5.0  # a reply is later than its deadline: the I/O thread is dead
HOST_SILENT_S = 6  # a host acknowledges nothing: connections to it are lost
SHARED_MEMORY_S = 10.0  # a client has fetched the memory that a server shares
PROOF_VALID_S = 300.0  # age of a proof's name, or difference of the clocks of two hosts

# Starts
JOIN_TIMEOUT_S = 600.0  # a cold compile, after an image has been pulled
READY_S = 600.0  # servers have loaded their checkpoint, the workers over them answer
COMPILING_S = 900.0  # the longest extension while a process compiles its loops
COMPILING_TURN_S = 120.0  # another process has compiled the loop that this one misses
COMPILING_BEAT_S = 5.0  # more than between two heartbeats of a process that compiles
ROLES_START_S = 5.0  # torchx has started all roles
PORT_HELD_S = 1.0  # a port is held by what does not listen: it is taken

# Heartbeats and recovery
HEARTBEAT_S = 1.0  # between two heartbeats of a member
SILENT_S = 20.0  # a member without heartbeats counts as dead
RECOVERY_S = 600.0  # a member with a supervisor is back after it was killed
UNSUPERVISED_S = 60.0  # the next supervisor has started a member again
CONNECTION_LOST_S = 1.0  # a member's connection is absent: it is lost
MEMBERS_BACK_S = 5.0  # members are connected to the next coordinator
PROGRESS_WRITE_S = 1.0  # progress is written
SIBLING_GONE_S = 1.5  # a sibling is missing: a process table is not read atomically
CALM_S = 60.0  # without an end: progress of a job that does not train

# The address book
REGISTRY_JOIN_S = 30.0  # it answers a process that joins
REGISTRY_ANSWER_S = 30.0  # it answers a member
REGISTRY_RECONNECT_S = 3.0  # a member connects to it again
TELL_S = 30.0  # it hears of a process that cannot start, by a mistake in its files
REGISTRY_OVER_S = 10.0  # a process that was started again finds it, or the job is over

# Ends
GRACE_S = 20.0  # trainers save when the job is told to end
LOCAL_GRACE_S = 5.0  # the same on one machine, as torchx kills 10 s after SIGTERM
LEAVE_S = 30.0  # trainers have ended after the job, and then the others
FINISH_S = 20.0  # a member has left after the job is finished
MAIN_THREAD_LEAVE_S = 3.0  # an interrupted main thread has ended by itself
LINGER_S = 1.5  # the coordinator stays after the last member, for the lines of its log
COMMAND_END_S = 60.0  # a command with a supervisor has ended after a signal
DAEMON_END_S = 1.0  # a daemon of multiprocessing has ended by SIGTERM
CHILD_END_S = 10.0  # a process that this one has started has ended
SAME_SIGNAL_S = 2.0  # signals are one: from a scheduler, a supervisor and torchrun
SIGNALS_CLOSE_S = 2.0  # the thread that handles signals has ended
MEMBER_LEAVE_S = 2.0  # the thread of a member's heartbeats has ended
MEMBER_VOLUNTARY_S = 0.5  # a member of a failed job ends by itself
MEMBER_AGENT_S = 1.0  # a torchrun that is told to end says so
MEMBER_DECISION_S = 2.0  # an interrupted main thread learns why
MEMBER_CAUSE_S = 4.0  # an error of a connection waits for the one that caused it

# Training
JOINT_UPDATE_S = 900.0  # all trainers have sent their gradients of a joint step
JOINT_GRACE_S = 1.0  # a trainer's connection of joint steps is back
JOINT_UNREAD_S = 4.0  # a busy server reads the last shares of a lost trainer
JOINT_FAREWELL_S = 1.0  # servers answer a process that ends
PUSH_QUEUE_MARGIN_S = 5.0  # pushes before the one that is waited for
CACHE_PARTS_S = 1.0  # no batch is in flight, so that a cache can share its slots
PIPELINE_SETTLE_S = 1.0  # batches that are not used any more are given up
SEND_BATCH_S = 900.0  # a loader's batch is taken; full buffers make it wait
STREAM_PUT_S = 0.5  # a batch has room in a buffer, until the end is looked for
STREAM_TRY_S = 5.0  # a worker answers, where a message may be sent again
READS_CLOSE_S = 10.0  # a thread has read what it just reads of a file
WORKER_AVOID_S = 5.0  # a worker that has hung is asked after the others
WORKER_CONNECT_S = 5.0  # servers answer an embedding worker that starts

# Checkpoints and increments
CHECKPOINT_INTERVAL_S = 600.0  # between two automatic checkpoints
CHECKPOINT_S = 3600.0  # all servers have written or loaded a checkpoint
CHECKED_S = 5.0  # a client asks again for a load that is checked, or has ended
SAVE_CANCEL_S = 30.0  # servers have ended a save that failed elsewhere
SAVE_CLOSE_S = 10.0  # a save in the background has ended
BACKGROUND_CLOSE_S = 10.0  # the thread that writes a checkpoint has ended
WRITER_SILENT_S = 30.0  # a writer of a folder without heartbeats counts as ended
INCREMENTS_CLOSE_S = 10.0  # the last increment is written
INCREMENTS_RETRY_S = 10.0  # a new log begins after one that failed
FOLLOWER_RETRY_S = 30.0  # a follower reads again what it could not read

# A cluster without a job
CLUSTER_STOP_S = 10.0  # a server has ended after a signal
CLUSTER_LINE_S = 0.5  # a line is read that a server has written already
CLUSTER_RECOVERY_S = 60.0  # a client waits for a server that is started again
CLUSTER_RESTART_S = 120.0  # such a server answers

# The command line
VERB_JOIN_S = 5.0  # a job's coordinator answers
VERB_ANSWER_S = 10.0  # its servers answer
VERB_END_S = 120.0  # a job that is told to end has ended

# Metrics
PUSH_S = 5.0  # the gateway takes a push
LAST_PUSH_S = 2.0  # the same at the end of a role
PUSH_CLOSE_S = 3.0  # the end of a role waits for that push and one in progress
METRICS_ASK_S = 2.0  # a server answers with its counters
METRICS_HTTP_S = 10.0  # a request to an endpoint of metrics is answered
STATUS_S = 5.0  # between two looks at what members of a job say of themselves
FIGURES_S = 20.0  # a figure that no heartbeat has renewed is unknown
STALLED_S = 60.0  # a process that beats has made no step: it is stalled

# Serving
HTTP_RECEIVE_S = 30.0  # a request has arrived
HTTP_KEEP_ALIVE_S = 75  # an idle connection stays open
HTTP_CLOSE_S = 60.0  # requests in progress are answered at the end
GRPC_CLOSE_S = 60.0  # the same of gRPC
GRPC_CHECK_S = 1.0  # the message of a health check of gRPC has come
GRPC_AGE_S = 3600.0  # a connection of gRPC begins to end, whose client connects again
PREDICTOR_CLOSE_S = 10.0  # a thread of a predictor has ended
PREDICTOR_RETRY_S = 10.0  # a later model is looked for again after an error
MODEL_READY_S = 1.0  # servers say whether a model is ready, and are asked again
MODEL_QUICK_S = 0.005  # a prediction for which other requests wait
MODEL_TRIAL_S = 1.0  # embeddings that hang are asked by a request again
MODEL_DRAIN_S = 60.0  # requests of a version that is taken out are answered
MODEL_TELL_S = 10.0  # between two lines about one error of a model

_MAX_NAMES = 12
_WATCH_S = 1.0  # between two looks for waits that have become long


def exchange_s(
    recovery_s: float = RECOVERY_S, checkpoint_s: float = CHECKPOINT_S
) -> float:
    """Return how long trainers wait for one of them that waits for servers.

    These may write a checkpoint, and be away before and meanwhile.
    """
    away_s = 2 * max(recovery_s, RECOVERY_S)
    return max(checkpoint_s, CHECKPOINT_S) + TRAINING_REQUEST_S + away_s


@contextlib.contextmanager
def saying(
    logger: logging.Logger,
    what: Callable[[], str],
    *,
    first_s: float | None = None,
    level: int = logging.WARNING,
) -> Iterator[None]:
    """Log what a block waits for after ``SAY_S`` seconds, and at twice the seconds.

    The first time is after ``first_s`` seconds, if it is given; the ``level`` of a
    start, which may take long, is INFO. An empty text is left out. The end of a wait
    that was said is said, too. A short wait costs microseconds; in a long one a thread
    of its own calls ``what``, which must not raise.
    """
    in_s = SAY_S if first_s is None else first_s
    wait = _Wait(partial(logger.log, level), what, time.monotonic(), in_s)
    _watch.add(wait)
    try:
        yield
    finally:
        _watch.remove(wait)
        wait.end()


class _Wait:
    """A block that waits; ``due_s`` is when the first line about it is due."""

    def __init__(
        self,
        log: Callable[..., None],
        what: Callable[[], str],
        now_s: float,
        in_s: float,
    ) -> None:
        self._log, self._what, self._begun_s = log, what, now_s
        self.due_s = now_s + in_s
        self._lock = threading.Lock()
        self._over: threading.Event | None = None  # of a wait that is long
        self._has_ended = False  # guarded by _lock
        self._said = ""  # guarded by _lock

    def start(self) -> None:
        """Have a thread say it until the end."""
        self._over = threading.Event()
        say = partial(self._say, self._over)
        threading.Thread(target=say, name="long wait", daemon=True).start()

    def end(self) -> None:
        """Say no more of it, but its end."""
        if self._over is None:
            return
        self._over.set()
        with self._lock:
            self._has_ended = True
            if self._said:
                seconds = time.monotonic() - self._begun_s
                self._log("waited %.0f s: %s", seconds, self._said)

    def _say(self, over: threading.Event) -> None:
        while not over.is_set():
            text, seconds = self._what(), time.monotonic() - self._begun_s
            with self._lock:
                if text and not self._has_ended:
                    self._said = text
                    self._log("%s, for %.0f s", text, seconds)
            next_s = self._begun_s + max(SAY_S, 2 * seconds)
            over.wait(next_s - time.monotonic())


class _Watch:
    """Finds waits that have become long, in a thread that is there while any is."""

    def __init__(self) -> None:
        self.begin()
        os.register_at_fork(after_in_child=self.begin)  # without its parent's thread

    def begin(self) -> None:
        """Know no wait."""
        self._changed = threading.Condition()
        self._waits: set[_Wait] = set()  # guarded by _changed
        self._look_s = 0.0  # when the thread looks again, 0 without. guarded by it

    def add(self, wait: _Wait) -> None:
        """Look whether a wait becomes long."""
        with self._changed:
            self._waits.add(wait)
            if not self._look_s:
                self._look_s = time.monotonic()
                name = "looks for long waits"
                threading.Thread(target=self._run, name=name, daemon=True).start()
            elif wait.due_s < self._look_s:
                self._changed.notify()

    def remove(self, wait: _Wait) -> None:
        """Look for a wait no more."""
        with self._changed:
            self._waits.discard(wait)

    def _run(self) -> None:
        with self._changed:
            while self._waits:
                now_s = time.monotonic()
                for wait in [one for one in self._waits if one.due_s <= now_s]:
                    self._waits.discard(wait)
                    wait.start()
                due = (one.due_s for one in self._waits)
                self._look_s = min([now_s + _WATCH_S, *due])
                self._changed.wait(self._look_s - now_s)
            self._look_s = 0.0


_watch = _Watch()


def waiting_for(missing: Sequence[str], num: int, kind: str = "roles") -> str:
    """Return "2 of 5 roles: waiting for server 1, trainer 0"; empty if none is."""
    if not missing:
        return ""
    return f"{len(missing)} of {num} {kind}: waiting for {some_of(missing)}"


def some_of(names: Sequence[str]) -> str:
    """Return the first of many names as a list."""
    return ", ".join([*names[:_MAX_NAMES], *(["..."] if names[_MAX_NAMES:] else [])])
