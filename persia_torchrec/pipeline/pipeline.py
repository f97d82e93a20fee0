"""Batches in flight: pulls ahead of the training, pushes behind it.

    start()  -> queue -> pulling thread: take a permit, pull -> the batch is here
    push()   -> queue -> pushing thread: sum per row, send ...  acknowledged: permit
                         (push_queue.py)                                      back

Training pulls happen in the order of ``start``, each under a permit of the staleness
bound (see ``staleness.py``); evaluation pulls take none and have threads of their own,
so that they never wait behind a training pull that waits for a permit. Pushes are sent
in the order of ``push`` and acknowledged in the background. A change of tables goes
through their queue: it waits for the acknowledgements of those before it.

A training batch whose embeddings are dropped without a push (no backward pass
came, or it raised) is given up: the servers are told, and the permit comes back.

An error of a background push is raised by the next call, whichever it is.
"""

import threading
import weakref
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar

from persia_torchrec import timeouts
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.errors import BatchError, ConfigError, StalenessError
from persia_torchrec.lookup.sharded_lookup import Outputs
from persia_torchrec.pipeline.joint import Trainers
from persia_torchrec.pipeline.prefetch_queue import PrefetchQueue
from persia_torchrec.pipeline.push_queue import Push, PushQueue, Updates
from persia_torchrec.pipeline.staleness import (
    LookupCounts,
    Permit,
    StalenessSemaphore,
)
from persia_torchrec.pipeline.tally import TrainingSummary
from persia_torchrec.table import TableChange

_SETTLE_S = 1.0
"""What batches that are not used any more may take to be given up."""

Source = TypeVar("Source", contravariant=True)
Handle = TypeVar("Handle")


class Lookup(Updates[Handle], Protocol[Source, Handle]):
    """Something that pulls batches and pushes their gradients.

    A ``ShardedLookup`` of this process, or the way to workers that have one.
    """

    def pull(
        self, source: Source, number: BatchNumber | None
    ) -> tuple[Outputs, Handle]:
        """Return the embeddings of a batch, and what a push needs."""


class PrefetchedBatch(Generic[Handle]):
    """A batch on its way to the model, and the one push that it may get.

    Hand it to the model in place of its ids. The states of a training batch:

        started -> here -> pushed | given up
               `-> failed

    Attributes:
        outputs: float32, C-contiguous: what the lookup gave, once the batch is here.
        handle: what else the lookup knows of the batch then.
        is_training: whether it can be pushed.
        given: the batch as the caller has it, see :attr:`source`.
    """

    outputs: Outputs
    handle: Handle

    def __init__(
        self,
        pipeline: "BatchPipeline[Any, Handle]",
        ids: object,
        given: Any = None,
        number: BatchNumber | None = None,
    ) -> None:
        self.is_training = number is not None
        self.given = given
        self._pipeline = pipeline
        self._ids: Any = ids
        self._number = number
        self._semaphore = pipeline.semaphore
        self._permit = Permit()
        self._arrived = threading.Event()
        self._error: BaseException | None = None
        self._give_up: Any = None

    @property
    def source(self) -> Any:
        """The batch as torch has it.

        Raises:
            BatchError: its pull began otherwise, as by a reference to its ids.
        """
        if self.given is None:
            raise BatchError(
                "A collection that uses weights, or returns indices, must be given a "
                "KeyedJaggedTensor. Received: a batch whose pull began without one."
            )
        return self.given

    def record_stream(self, stream: object) -> None:
        """Do nothing: ``wait`` records streams; the ids are the batch's own."""

    def is_here(self, timeout_s: float = 0) -> bool:
        """Return whether the batch is here, or failed; does not hold it.

        Args:
            timeout_s: seconds to wait for it.
        """
        return self._arrived.wait(timeout_s)

    def wait(self, timeout_s: float | None = None) -> Self:
        """Wait for the batch, to push it from this thread's backward pass.

        Args:
            timeout_s: seconds that it may take; as long as requests may by default.

        Raises:
            PersiaError: what went wrong, as ServerError or StalenessError.
        """
        if self.is_training:
            self._semaphore.hold(self._permit)
        # A pull ends in time by itself; before it may come a wait for a permit, until
        # earlier pushes are acknowledged, which end in time as well.
        timeout_s = timeout_s or 2 * self._pipeline.timeout_s + 5
        if not self._arrived.wait(timeout_s):
            raise StalenessError(
                f"The rows of a batch must come within {timeout_s:g} s. "
                "Does every training batch before it get its backward pass?"
            )
        if self._error is not None:
            raise self._error
        return self

    def push(self, grads: Outputs) -> None:
        """Send the gradients of ``outputs``; waits for the servers at staleness 0.

        Args:
            grads: float32, of the shapes of ``outputs``; not to be changed any more.

        Raises:
            BatchError: this batch was pushed before, or was not pulled for training.
            PersiaError: an earlier push failed, or, at staleness 0, this one.
        """
        if self._give_up is None or not self._give_up.detach():
            raise BatchError(
                "A training batch's gradients can be pushed once. Received: a second "
                "backward pass, or a batch that was looked up for evaluation."
            )
        self._permit.let_go()
        push = Push(self.handle, grads, self._permit, self._semaphore)
        waits_for_ack = self._pipeline.waits_for_ack
        self._pipeline.pushes.put(push, waits_for_ack=waits_for_ack)

    def give_up(self) -> None:
        """Make room for another batch: no gradients will come.

        Does nothing after a push. A batch that is dropped gives itself up.
        """
        if self._give_up is not None and self._give_up.detach():
            self._permit.let_go()
            push: Push[Handle]
            push = Push(self.handle, None, self._permit, self._semaphore)
            self._pipeline.pushes.put_given_up(push)

    def begin(self) -> None:
        """Wait for a permit; a thread of the pipeline calls this."""
        if self.is_training:
            self._semaphore.take(self._permit)

    def run(self) -> None:
        """Pull the batch; a thread of the pipeline calls this."""
        ids, self._ids = self._ids, None
        pipeline, number, permit = self._pipeline, self._number, self._permit
        try:
            self.outputs, self.handle = pipeline.lookup.pull(ids, number)
        except BaseException:
            if number is not None:
                if pipeline.trainers is not None:
                    pipeline.trainers.give_up(number)  # the others wait for its share
                self._semaphore.give_back(permit)
            raise
        if number is not None:
            pipeline.pushes.open_batch()
            # Runs at most once: when this object is no longer used, unless push() came.
            self._give_up = weakref.finalize(
                self, _drop, pipeline.pushes, self.handle, permit, self._semaphore
            )
            self._give_up.atexit = False
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Take an error; a thread of the pipeline calls this."""
        self._error = error
        self._arrived.set()


def _drop(
    pushes: PushQueue[Handle],
    handle: Handle,
    permit: Permit,
    semaphore: StalenessSemaphore,
) -> None:
    """Give a dropped batch up; takes no lock, as a garbage collection may call it."""
    was_used = permit.was_held  # or was only pulled ahead
    permit.let_go()
    pushes.put_given_up(Push(handle, None, permit, semaphore, was_dropped=was_used))


class BatchPipeline(Generic[Source, Handle]):
    """The batches of one embedding collection. Any thread may call any method.

    Only :meth:`change_tables` is for one thread at a time.

    Args:
        lookup: where batches are pulled from and pushed to.
        staleness: batches that may be between pull and acknowledged push; 0 makes
            :meth:`PrefetchedBatch.push` wait, which equals ordinary training.
        timeout_s: seconds that a wait for an acknowledgement may take.

    Attributes:
        lookup: as given.
        pushes: the pushes of the batches.
        semaphore: the permits; replaced when the bound changes.
        waits_for_ack: whether a push waits for its acknowledgement.
        trainers: those that this one updates with, if it does.

    Raises:
        ConfigError: ``staleness`` is negative.
    """

    def __init__(
        self, lookup: Lookup[Source, Handle], *, staleness: int, timeout_s: float
    ) -> None:
        _require_staleness(staleness)
        self.lookup = lookup
        self.trainers: Trainers | None = None  # locked by _lock, set before use
        self._timeout_s = timeout_s
        self._stream = BatchNumber.new_stream()
        self._lock = threading.Lock()
        self._num_started = 0  # guarded by _lock
        self.pushes: PushQueue[Handle] = PushQueue(lookup, timeout_s)
        self._lookups = LookupCounts()
        self._training = PrefetchQueue("training pulls")
        self._evaluation = PrefetchQueue("evaluation pulls")
        self.set_staleness(staleness)

    def set_staleness(self, staleness: int) -> None:
        """Change the bound; only while no training batch is in flight.

        Waits for the pushes so far, and a moment for batches that are being given up.

        Raises:
            ConfigError: ``staleness`` is negative, or batches are in flight.
            PersiaError: an earlier push failed.
        """
        _require_staleness(staleness)
        self.flush()
        if num_open := self.pushes.num_open(_SETTLE_S):
            raise ConfigError(
                "The staleness bound can change only while no batch is in flight. "
                f"Received: {num_open} batches without acknowledgement."
            )
        with self._lock:
            self.waits_for_ack = staleness == 0
            self.semaphore = StalenessSemaphore(
                max(staleness, 1), timeouts.PERMIT_S, self._lookups
            )

    def set_num_pullers(
        self, *, training: int | None = None, evaluation: int | None = None
    ) -> None:
        """Change how many batches may be pulled at once.

        Args:
            training: of training; before the first.
            evaluation: of evaluation; those in flight are not ended.

        Raises:
            ConfigError: a number is below 1.
        """
        for num, pulls in ((training, self._training), (evaluation, self._evaluation)):
            if num is not None and num < 1:
                raise ConfigError(f"At least one puller is needed. Received: {num}.")
            if num is not None:
                pulls.set_num_threads(num)

    @property
    def timeout_s(self) -> float:
        """Seconds that an acknowledgement may take."""
        return self.pushes.timeout_s

    def set_trainers(self, trainers: Trainers) -> None:
        """Make every update a share of a joint step; before the first batch.

        Args:
            trainers: those that this one updates with; handed over.
        """
        with self._lock:
            self.trainers = trainers
            self.pushes.timeout_s = self._timeout_s + trainers.timeout_s

    def start(
        self, ids: Source, *, training: bool, given: object = None
    ) -> PrefetchedBatch[Handle]:
        """Begin to pull a batch; returns at once.

        Args:
            ids: the batch, as the lookup takes it.
            training: whether its gradients will be pushed.
            given: the batch as the caller has it, for ``PrefetchedBatch.source``.

        Raises:
            PersiaError: an earlier push failed, or the pipeline is closed.
        """
        self.pushes.raise_error()
        batch: PrefetchedBatch[Handle]
        if not training:
            batch = PrefetchedBatch(self, ids, given)
            self._evaluation.submit(batch)
            return batch
        with self._lock:
            self._num_started += 1
            share = self.trainers.next_share() if self.trainers else None
            number = BatchNumber(self._stream, self._num_started, share)
            batch = PrefetchedBatch(self, ids, given, number)
            self._training.submit(batch)
        return batch

    def change_tables(self, change: TableChange) -> Future[None]:
        """Change the settings of tables, in order with the pushes; returns at once.

        Pushes so far are applied with the previous settings, later ones with the new.
        When many changes wait, it first waits for the oldest.

        Args:
            change: of each table; it is called by another thread.

        Returns:
            Ends when every server has the new settings, or with its error.

        Raises:
            PersiaError: an earlier push failed, or the pipeline is closed.
        """
        return self.pushes.change_tables(change)

    def leave(self) -> None:
        """Let the joint steps of other trainers proceed without this one, from now on.

        Batches so far count still. Those after it belong to the joint steps of a new
        round, in which all trainers take part again, each when it has left this one.
        Does nothing where trainers do not update jointly.

        Raises:
            PersiaError: an earlier push failed, or the pipeline is closed.
        """
        self.pushes.raise_error()
        self._put_leave()

    @property
    def num_missed(self) -> int:
        """Ids so far without a row when their gradient came: evicted, not admitted."""
        return self.pushes.tally.total.num_missed

    @property
    def num_refused(self) -> int:
        """Rows so far whose gradient was not finite, so that no server applied it."""
        return self.pushes.tally.total.num_refused

    def summary(self) -> TrainingSummary:
        """Return what became of the training batches so far."""
        tally = self.pushes.tally
        total = tally.total
        with self._lock:
            semaphore = self.semaphore
        lookups = semaphore.counts()
        return TrainingSummary(
            num_lookups=lookups.num,
            num_waited=lookups.num_waited,
            num_lacking=lookups.num_lacking,
            max_lacking=semaphore.num - 1,
            num_dropped=tally.num_dropped,
            num_gradients=total.num_gradients,
            num_evicted=total.num_evicted,
        )

    def flush(self) -> None:
        """Wait until every push and every change of tables so far is applied.

        Raises:
            PersiaError: one of them failed, or was not acknowledged in time.
        """
        self.pushes.flush()

    def close(self) -> None:
        """Stop the threads; pushes that were begun are sent. May be called twice."""
        if not self.pushes.begin_to_close():
            return
        with self._lock:
            self.semaphore.close()
        self._put_leave()
        if self.trainers is not None:
            end = partial(self.trainers.end, "it has closed its tables")
            self.pushes.put_message(end)
        self._training.close()
        self._evaluation.close()
        self.pushes.close(self._timeout_s)

    def _put_leave(self) -> None:
        with self._lock:
            trainers = self.trainers
            share = trainers.next_group() if trainers else None
        if trainers is not None and share is not None:
            self.pushes.put_message(partial(trainers.leave, share))


def _require_staleness(staleness: int) -> None:
    if staleness < 0:
        raise ConfigError(f"staleness must be >= 0. Received: {staleness}.")
