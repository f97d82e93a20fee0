"""Batches on their way: pulls ahead of the training, pushes behind it.

    start()  -> queue -> pulling thread: take a permit, pull -> the batch is ready
    push()   -> queue -> pushing thread: sum a row, send ...  acknowledged: permit back
                         (worker/pusher.py)

Training pulls happen in the order of ``start``, each under a permit of the staleness
bound (see ``client/permits.py``); evaluation pulls take none and have threads of
their own, so that they never wait behind a training pull that waits for a permit.
Pushes are sent in the order of ``push`` and acknowledged in the background. A change of
tables goes through their queue: it waits for the acknowledgements of those before it.

A training batch whose embeddings are dropped without a push (no backward pass
came, or it raised) is given up: the servers are told, and the permit comes back.

An error of a background push is raised by the next call, whichever it is.
"""

import threading
from concurrent.futures import Future
from functools import partial
from typing import Generic, Protocol, TypeVar

from persia_torchrec.client.client import BatchNumber
from persia_torchrec.client.permits import LookupCounts, Permit, Permits
from persia_torchrec.errors import ConfigError
from persia_torchrec.table import TableChange
from persia_torchrec.worker.pulled import HeldPull, Outputs
from persia_torchrec.worker.pulled import PulledBatch as PulledBatch
from persia_torchrec.worker.puller import Puller
from persia_torchrec.worker.pusher import Push, Pusher, Updates
from persia_torchrec.worker.tally import TrainingSummary
from persia_torchrec.worker.trainers import Trainers

_PERMIT_TIMEOUT_S = 3600.0
"""A permit comes when the trainer goes on, which an evaluation may delay for long."""

_SETTLE_S = 1.0
"""What batches that nobody uses any more may take to be given up."""

Source = TypeVar("Source", contravariant=True)
Handle = TypeVar("Handle")


class Lookup(Updates[Handle], Protocol[Source, Handle]):
    """Something that pulls batches and pushes their gradients.

    An embedding worker in this process, or the way to one in another.
    """

    def pull(
        self, source: Source, number: BatchNumber | None
    ) -> tuple[Outputs, Handle]:
        """Return the embeddings of a batch, and what a push needs."""


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
        _require_staleness(staleness)
        self._lookup = lookup
        self._timeout_s = timeout_s
        self._trainers: Trainers | None = None  # locked by _lock, set before use
        self._stream = BatchNumber.new_stream()
        self._lock = threading.Lock()
        self._num_started = 0  # guarded by _lock
        self._pusher: Pusher[Handle] = Pusher(lookup, timeout_s)
        self._lookups = LookupCounts()
        self._training = Puller("training pulls")
        self._evaluation = Puller("evaluation pulls")
        self.set_staleness(staleness)
        self.set_num_pullers(1)

    def set_staleness(self, staleness: int) -> None:
        """Change the bound; only while no training batch is under way.

        Waits for the pushes so far, and a moment for batches that are being given up.

        Raises:
            ConfigError: ``staleness`` is negative, or batches are under way.
            PersiaError: a push of before failed.
        """
        _require_staleness(staleness)
        self.flush()
        if num_open := self._pusher.num_open(_SETTLE_S):
            raise ConfigError(
                "The staleness bound can change only while no batch is under way. "
                f"Received: {num_open} batches without acknowledgement."
            )
        with self._lock:
            self._waits_for_ack = staleness == 0
            self._permits = Permits(max(staleness, 1), _PERMIT_TIMEOUT_S, self._lookups)

    def set_num_pullers(self, num: int) -> None:
        """Change how many training batches may be pulled at once; before the first.

        Raises:
            ConfigError: ``num`` is below 1.
        """
        if num < 1:
            raise ConfigError(f"At least one puller is needed. Received: {num}.")
        self._training.set_num_threads(num)

    def set_num_evaluation_pullers(self, num: int) -> None:
        """Change how many batches for evaluation may be pulled at once.

        Waits for those under way.

        Raises:
            ConfigError: ``num`` is below 1.
        """
        if num < 1:
            raise ConfigError(f"At least one puller is needed. Received: {num}.")
        self._evaluation.set_num_threads(num)

    def bound_updates(self, *, held: int, sent: int) -> None:
        """Bound the updates behind the training; before the first batch.

        Args:
            held: whose gradients are in memory: those that wait, and those sent. One
                more makes :meth:`PulledBatch.push` wait.
            sent: to the servers, and not acknowledged.

        Raises:
            ConfigError: a number is below 1.
        """
        self._pusher.bound(held=held, sent=sent)

    @property
    def timeout_s(self) -> float:
        """Seconds that an acknowledgement may take."""
        return self._pusher.timeout_s

    def set_trainers(self, trainers: Trainers) -> None:
        """Make every update a share of a joint step; before the first batch.

        Args:
            trainers: those that this one updates with; handed over.
        """
        with self._lock:
            self._trainers = trainers
            self._pusher.timeout_s = self._timeout_s + trainers.timeout_s

    def start(self, source: Source, *, training: bool) -> Future[PulledBatch[Handle]]:
        """Begin to pull a batch; returns at once.

        Args:
            source: the batch, as the lookup takes it.
            training: whether its gradients will be pushed.

        Raises:
            PersiaError: a push of before failed, or the pipeline is closed.
        """
        self._pusher.raise_error()
        if not training:
            return self._evaluation.submit(
                lambda: None, lambda: self._pull_for_evaluation(source), Future()
            )
        with self._lock:
            self._num_started += 1
            share = self._trainers.next_share() if self._trainers else None
            number = BatchNumber(self._stream, self._num_started, share)
            permit = self._permits.ask()
        return self._training.submit(
            permit.take, lambda: self._pull(source, number, permit), HeldPull(permit)
        )

    def change_tables(self, change: TableChange) -> Future[None]:
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
        return self._pusher.change_tables(change)

    def leave(self) -> None:
        """Let the joint steps of other trainers go on without this one, from now on.

        Batches so far count still. Those after it belong to the joint steps of a new
        round, in which all trainers take part again, each when it has left this one.
        Does nothing where trainers do not update jointly.

        Raises:
            PersiaError: a push of before failed, or the pipeline is closed.
        """
        self._pusher.raise_error()
        self._put_leave()

    @property
    def num_missed(self) -> int:
        """Ids so far without a row when their gradient came: evicted, not admitted."""
        return self._pusher.tally.total.num_missed

    @property
    def num_refused(self) -> int:
        """Rows so far whose gradient was not finite, so that no server applied it."""
        return self._pusher.tally.total.num_refused

    def summary(self) -> TrainingSummary:
        """Return what became of the training batches so far."""
        tally = self._pusher.tally
        total = tally.total
        with self._lock:
            permits = self._permits
        lookups = permits.counts()
        return TrainingSummary(
            num_lookups=lookups.num,
            num_waited=lookups.num_waited,
            num_lacking=lookups.num_lacking,
            max_lacking=permits.num - 1,
            num_dropped=tally.num_dropped,
            num_gradients=total.num_gradients,
            num_evicted=total.num_evicted,
        )

    def flush(self) -> None:
        """Wait until every push and every change of tables so far is applied.

        Raises:
            PersiaError: one of them failed, or was not acknowledged in time.
        """
        self._pusher.flush()

    def close(self) -> None:
        """Stop the threads; pushes that were begun are sent. May be called twice."""
        if not self._pusher.begin_to_close():
            return
        with self._lock:
            self._permits.close()
        self._put_leave()
        if self._trainers is not None:
            end = partial(self._trainers.end, "it has closed its tables")
            self._pusher.put_message(end)
        self._training.close()
        self._evaluation.close()
        self._pusher.close(self._timeout_s)

    def _put_leave(self) -> None:
        with self._lock:
            trainers = self._trainers
            share = trainers.next_group() if trainers else None
        if trainers is not None and share is not None:
            self._pusher.put_message(partial(trainers.leave, share))

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
        self._pusher.open_batch()
        return PulledBatch(
            outputs,
            handle,
            lambda grads: self._push(Push(handle, grads, permit)),
            partial(self._give_up, handle, permit),
        )

    def _push(self, push: Push[Handle]) -> None:
        push.permit.let_go()
        self._pusher.put(push, waits_for_ack=self._waits_for_ack)

    def _give_up(self, handle: Handle, permit: Permit, was_dropped: bool) -> None:
        """Give a batch up; takes no lock, as a garbage collection may call it."""
        was_used = permit.holder is not None  # or was only pulled ahead
        permit.let_go()
        push = Push(handle, None, permit, was_dropped=was_dropped and was_used)
        self._pusher.put_given_up(push)


def _require_staleness(staleness: int) -> None:
    if staleness < 0:
        raise ConfigError(f"staleness must be >= 0. Received: {staleness}.")
