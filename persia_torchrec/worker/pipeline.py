"""Batches on their way: pulls ahead of the training, pushes behind it.

    start()  -> queue -> pulling thread: take a permit, pull -> the batch is ready
    push()   -> queue -> pushing thread: sum a row, send ...  acknowledged: permit back

Training pulls happen in the order of ``start``, each under a permit of the staleness
bound (see ``client/permits.py``); evaluation pulls take none and have a thread of
their own, so that they never wait behind a training pull that waits for a permit.
Pushes are sent in the order of ``push`` and acknowledged in the background. A change of
tables goes through their queue: it waits for the acknowledgements of those before it.

A training batch whose embeddings are dropped without a push (no backward pass
came, or it raised) is given up: the servers are told, and the permit comes back.

An error of a background push is raised by the next call, whichever it is.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from persia_torchrec.client.client import BatchNumber, Reply
from persia_torchrec.client.outcome import PushOutcome
from persia_torchrec.client.permits import Permit, Permits
from persia_torchrec.errors import ConfigError, PersiaError, StalenessError
from persia_torchrec.table import TableChange
from persia_torchrec.wire.messages import Share
from persia_torchrec.worker.pulled import Outputs
from persia_torchrec.worker.pulled import PulledBatch as PulledBatch
from persia_torchrec.worker.puller import CLOSED, Puller
from persia_torchrec.worker.trainers import Trainers

logger = logging.getLogger(__name__)

_PERMIT_TIMEOUT_S = 3600.0
"""A permit comes when the trainer goes on, which an evaluation may delay for long."""

_SETTLE_S = 1.0
"""What batches that nobody uses any more may take to be given up."""

_PUSH_MARGIN_S = 5.0

_MAX_CHANGES = 16
"""Changes of tables that may wait; one more waits for the oldest."""


Source = TypeVar("Source", contravariant=True)
Handle = TypeVar("Handle")


class Lookup(Protocol[Source, Handle]):
    """Something that pulls batches and pushes their gradients.

    An embedding worker in this process, or the way to one in another.
    """

    def pull(
        self, source: Source, number: BatchNumber | None
    ) -> tuple[Outputs, Handle]:
        """Return the embeddings of a batch, and what a push needs."""

    def push(self, handle: Handle, grads: Outputs) -> Sequence[Reply]:
        """Send the gradients of a batch; replies come when they are applied."""

    def abandon(self, handle: Handle) -> Sequence[Reply]:
        """Tell that a training batch gets no gradients."""

    def outcome(self, replies: Sequence[Reply]) -> PushOutcome:
        """Return which gradients of a push were not applied; may wait."""

    def change_tables(self, change: TableChange) -> None:
        """Change the settings of the tables; no push is under way."""


@dataclass(frozen=True, slots=True)
class _Push(Generic[Handle]):
    handle: Handle
    grads: Outputs | None  # None: the batch is given up
    permit: Permit
    done: "Future[None]"


@dataclass(frozen=True, slots=True)
class _Change:
    change: TableChange
    done: "Future[None]"


@dataclass(frozen=True, slots=True)
class _Leave:
    share: Share
    trainers: Trainers
    done: "Future[None]"


class BatchPipeline(Generic[Source, Handle]):
    """The batches of one embedding collection. Any thread may call any method.

    Only :meth:`change_tables` is for one thread at a time.

    Args:
        lookup: where batches are pulled from and pushed to.
        staleness: batches that may be between pull and acknowledged push; 0 makes
            :meth:`PulledBatch.push` wait, which equals ordinary training.
        timeout_s: seconds that a wait for an acknowledgement may take.

    Raises:
        ConfigError: ``staleness`` is negative.
    """

    def __init__(
        self, lookup: Lookup[Source, Handle], *, staleness: int, timeout_s: float
    ) -> None:
        self._lookup = lookup
        self._timeout_s = timeout_s
        self._trainers: Trainers | None = None  # locked by _lock, set before use
        self._stream = BatchNumber.new_stream()
        self._lock = threading.Lock()
        self._num_started = 0  # guarded by _lock
        self._num_missed = 0  # guarded by _lock
        self._num_refused = 0  # guarded by _lock
        self._error: BaseException | None = None  # guarded by _lock
        self._num_open = 0  # guarded by _lock
        self._one_finished = threading.Condition(self._lock)
        self._under_way: set[Future[None]] = set()  # guarded by _lock
        self._is_closed = False  # guarded by _lock
        self.set_staleness(staleness)
        self._changes: deque[Future[None]] = deque()  # of the thread that changes
        # Bounded by the permits (a push needs one, and a pull waits for one), and by
        # the changes that may wait.
        self._pushes: queue.SimpleQueue[_Push[Handle] | _Change | _Leave | None]
        self._pushes = queue.SimpleQueue()
        self._training = Puller("training pulls")
        self._evaluation = Puller("evaluation pulls")
        self.set_num_pullers(1)
        self._pusher = threading.Thread(
            target=self._run_pushes, name="pushes", daemon=True
        )
        self._pusher.start()

    def set_staleness(self, staleness: int) -> None:
        """Change the bound; only while no training batch is under way.

        Waits for the pushes so far, and a moment for batches that are being given up.

        Raises:
            ConfigError: ``staleness`` is negative, or batches are under way.
            PersiaError: a push of before failed.
        """
        if staleness < 0:
            raise ConfigError(f"staleness must be >= 0. Received: {staleness}.")
        self.flush()
        with self._lock:
            self._one_finished.wait_for(lambda: self._num_open == 0, _SETTLE_S)
            if self._num_open:
                raise ConfigError(
                    "The staleness bound can change only while no batch is under way. "
                    f"Received: {self._num_open} batches without acknowledgement."
                )
            self._waits_for_ack = staleness == 0
            self._permits = Permits(max(staleness, 1), _PERMIT_TIMEOUT_S)

    def set_num_pullers(self, num: int) -> None:
        """Change how many training batches may be pulled at once; before the first.

        Raises:
            ConfigError: ``num`` is below 1.
        """
        if num < 1:
            raise ConfigError(f"At least one puller is needed. Received: {num}.")
        self._training.set_num_threads(num)

    @property
    def timeout_s(self) -> float:
        """Seconds that an acknowledgement may take."""
        trainers = self._trainers
        return self._timeout_s + (trainers.timeout_s if trainers else 0)

    def set_trainers(self, trainers: Trainers) -> None:
        """Make every update a share of a joint step; before the first batch.

        Args:
            trainers: those that this one updates with; handed over.
        """
        with self._lock:
            self._trainers = trainers

    def start(self, source: Source, *, training: bool) -> "Future[PulledBatch[Handle]]":
        """Begin to pull a batch; returns at once.

        Args:
            source: the batch, as the lookup takes it.
            training: whether its gradients will be pushed.

        Raises:
            PersiaError: a push of before failed, or the pipeline is closed.
        """
        self._raise_error()
        if not training:
            return self._evaluation.submit(
                lambda: None, lambda _: self._pull_for_evaluation(source)
            )
        with self._lock:
            self._num_started += 1
            share = self._trainers.next_share() if self._trainers else None
            number = BatchNumber(self._stream, self._num_started, share)
            permits = self._permits
        return self._training.submit(
            permits.take, lambda permit: self._pull(source, number, permit)
        )

    def change_tables(self, change: TableChange) -> "Future[None]":
        """Change the settings of tables, in order with the pushes; returns at once.

        Pushes so far are applied with the settings of before, later ones with the new.
        When many changes wait, it first waits for the oldest.

        Args:
            change: of each table; it is called by another thread.

        Returns:
            Ends when every server has the new settings, or with its error.

        Raises:
            PersiaError: a push of before failed, or the pipeline is closed.
        """
        self._raise_error()
        if len(self._changes) == _MAX_CHANGES:
            self._await(self._changes.popleft())
        done: Future[None] = Future()
        self._changes.append(done)
        with self._lock:
            if self._is_closed:
                raise PersiaError(CLOSED)
            self._under_way.add(done)
            self._pushes.put(_Change(change, done))
        return done

    def leave(self) -> None:
        """Let the joint steps of other trainers go on without this one, from now on.

        Batches so far count still. Those after it belong to the joint steps of a new
        round, in which all trainers take part again, each when it has left this one.
        Does nothing where trainers do not update jointly.

        Raises:
            PersiaError: a push of before failed, or the pipeline is closed.
        """
        self._raise_error()
        with self._lock:
            self._put_leave()

    @property
    def num_missed(self) -> int:
        """Ids so far whose row had been evicted when their gradient came."""
        with self._lock:
            return self._num_missed

    @property
    def num_refused(self) -> int:
        """Rows so far whose gradient was not finite, so that no server applied it."""
        with self._lock:
            return self._num_refused

    def flush(self) -> None:
        """Wait until every push and every change of tables so far is applied.

        Raises:
            PersiaError: one of them failed, or was not acknowledged in time.
        """
        with self._lock:
            waiting = list(self._under_way)
        for done in waiting:
            self._await(done)
        self._raise_error()

    def close(self) -> None:
        """Stop the threads; pushes that were begun are sent. May be called twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._permits.close()
            self._put_leave()
        self._training.close()
        self._evaluation.close()
        self._pushes.put(None)
        self._pusher.join(timeout=self._timeout_s)

    def _put_leave(self) -> None:
        """Tell the servers, behind the pushes so far. Called with the lock held."""
        if self._trainers is not None:
            share, done = self._trainers.next_group(), Future[None]()
            self._under_way.add(done)
            self._pushes.put(_Leave(share, self._trainers, done))

    def _pull_for_evaluation(self, source: Source) -> PulledBatch[Handle]:
        outputs, handle = self._lookup.pull(source, None)
        return PulledBatch(outputs, handle, None, None)

    def _pull(
        self, source: Source, number: BatchNumber, permit: Permit
    ) -> PulledBatch[Handle]:
        try:
            outputs, handle = self._lookup.pull(source, number)
        except BaseException:
            if self._trainers is not None:
                self._trainers.give_up(number)  # the others wait for its share
            permit.give_back()
            raise
        with self._lock:
            self._num_open += 1
        return PulledBatch(
            outputs,
            handle,
            lambda grads: self._push(_Push(handle, grads, permit, Future())),
            lambda: self._pushes.put(_Push(handle, None, permit, Future())),
        )

    def _push(self, push: _Push[Handle]) -> None:
        with self._lock:
            if self._is_closed:
                raise PersiaError(CLOSED)
            self._under_way.add(push.done)
            self._pushes.put(push)
        if self._waits_for_ack:
            self._await(push.done)
        self._raise_error()

    def _await(self, done: "Future[None]") -> None:
        # Its requests end in an error in time, which says what was asked of whom; the
        # margin is for pushes that stand in the queue before it.
        timeout_s = self.timeout_s + _PUSH_MARGIN_S
        try:
            done.result(timeout_s)
        except PersiaError:
            raise
        except TimeoutError:
            raise StalenessError(
                f"A push was not acknowledged within {timeout_s:g} s."
            ) from None

    def _run_pushes(self) -> None:
        sent: list[Future[None]] = []  # bounded by the permits
        while (push := self._pushes.get()) is not None:
            sent = [done for done in sent if not done.done()]
            if isinstance(push, _Change):
                self._apply_change(push, sent)
                continue
            if isinstance(push, _Leave):
                self._tell(push)
                continue
            sent.append(push.done)
            try:
                if push.grads is None:
                    replies = self._lookup.abandon(push.handle)
                else:
                    replies = self._lookup.push(push.handle, push.grads)
            except Exception as exc:  # noqa: BLE001  # handed to the next caller
                self._finish(push, exc)
                continue
            _when_all_done(replies, partial(self._settle, push, replies))

    def _apply_change(self, change: _Change, sent: Sequence["Future[None]"]) -> None:
        try:
            for done in sent:
                self._await(done)
            self._lookup.change_tables(change.change)
        except Exception as exc:  # noqa: BLE001  # handed to the next caller
            self._end(change.done, exc)
        else:
            self._end(change.done, None)

    def _tell(self, leave: _Leave) -> None:
        try:
            leave.trainers.leave(leave.share)
        except Exception as exc:  # noqa: BLE001  # handed to the next caller
            self._end(leave.done, exc)
        else:
            self._end(leave.done, None)

    def _settle(self, push: _Push[Handle], replies: Sequence[Reply]) -> None:
        """All replies to a push have come, each with a result or an error."""
        try:
            outcome = self._lookup.outcome(replies)
        except Exception as exc:  # noqa: BLE001  # handed to the next caller
            self._finish(push, exc)
            return
        with self._lock:
            num_before = self._num_refused
            self._num_missed += outcome.num_missed
            self._num_refused += outcome.num_refused
        if outcome.num_refused and _digits(num_before) < _digits(self._num_refused):
            logger.warning(
                "refused=%d gradients of rows so far, which were not finite: they "
                "were dropped. Does the training diverge?",
                num_before + outcome.num_refused,
            )
        self._finish(push, None)

    def _finish(self, push: _Push[Handle], error: Exception | None) -> None:
        with self._lock:
            self._num_open -= 1
            self._one_finished.notify_all()
        self._note(error)
        push.permit.give_back()
        self._end(push.done, error)

    def _end(self, done: "Future[None]", error: Exception | None) -> None:
        self._note(error)
        with self._lock:
            self._under_way.discard(done)
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def _note(self, error: Exception | None) -> None:
        """Keep the first error, for the next caller."""
        with self._lock:
            if error is not None and self._error is None and not self._is_closed:
                logger.error("a push failed: %s", error)
                self._error = error

    def _raise_error(self) -> None:
        with self._lock:
            error = self._error
            if error is None and self._is_closed:
                error = PersiaError(CLOSED)
        if error is not None:
            raise error


def _digits(number: int) -> int:
    """Return 0 for 0, else the number of digits: it rises with every tenfold."""
    return len(str(number)) if number else 0


def _when_all_done(replies: Sequence[Reply], call: Callable[[], None]) -> None:
    """Call once every reply is there; by the thread that brings the last one."""
    lock = threading.Lock()
    left = len(replies)

    def count(_: Reply) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if is_last:
            call()

    if not replies:
        call()
    for reply in replies:
        reply.add_done_callback(count)
