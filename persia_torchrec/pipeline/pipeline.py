"""Batches in flight: pulls ahead of the training, pushes behind it.

    start()  -> queue -> pulling thread: take a permit, pull -> the batch is here
    push()   -> queue -> pushing thread: sum per row, send ...  acknowledged: permit
                         (push_queue.py)                                      back

Training pulls happen in the order of ``start``, each under a permit of the staleness
bound (see ``staleness.py``); evaluation pulls take none and have threads of their own,
so that they never wait for one. They wait for the pushes before them, and so read what
was trained. A training batch whose embeddings are dropped without a
push (no backward pass came, or it raised) is given up: the servers are told, and the
permit comes back.
"""

import contextlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Self

from persia_torchrec import timeouts
from persia_torchrec.client.client import BatchNumber, Reply
from persia_torchrec.client.codec import MOST_BATCHES, BatchCount
from persia_torchrec.errors import BatchError, ConfigError, PersiaError, StalenessError
from persia_torchrec.lookup.sharded_lookup import Outputs, RowGradients, add_up
from persia_torchrec.pipeline.joint import Trainers
from persia_torchrec.pipeline.push_queue import (
    Handle,
    Lookup,
    Push,
    PushQueue,
    Source,
    Tasks,
)
from persia_torchrec.pipeline.staleness import (
    CLOSED,
    Permit,
    StalenessSemaphore,
    TrainingSummary,
)
from persia_torchrec.rpc.messages import NO_GENERATION

logger = logging.getLogger(__name__)

_MAX_WAITING = 4096
"""Batches that may wait for their pull."""


class PrefetchedBatch(Generic[Handle]):
    """A batch on its way to the model, and the one push that it may get.

    Hand it to the model in place of its ids. The states of a training batch:

        started -> here -> pushed | given up
               `-> failed

    ``ids`` are the batch as the lookup takes it, or what returns that in the thread
    that pulls; ``given`` is the batch as the caller has it. When it
    has ``arrived``, ``outputs`` are what the lookup gave, ``handle`` what a push needs.
    """

    outputs: Any
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
        self.permit = Permit()
        self.arrived = threading.Event()
        self.error: BaseException | None = None
        self.after: Sequence[Callable[[], None]] = ()  # waits, before the pull
        self._give_up: Any = None
        self.again: PrefetchedBatch[Handle] | None = None  # in its place, if recalled

    @property
    def latest(self) -> "PrefetchedBatch[Handle]":
        """The pull that is valid: its own, or the one in its place."""
        return self.again or self

    @property
    def source(self) -> Any:
        """The batch as torch has it; an error if its pull began by a reference."""
        if self.given is None:
            raise BatchError(
                "A collection that uses weights, or returns indices, must be given a "
                "KeyedJaggedTensor. Received: a batch whose pull began without one."
            )
        return self.given

    def record_stream(self, stream: object) -> None:
        """Tell that a stream uses what the caller gave; rows tell it by themselves."""
        if self.given is not None:
            self.given.record_stream(stream)

    def wait(self, timeout_s: float | None = None) -> Self:
        """Wait for the batch, by default as long as requests may take, to push it."""
        if self.is_training:
            self._pipeline.semaphore.hold(self.permit)
        # A pull ends in time by itself, as do earlier pushes, whose permits it awaits.
        timeout_s = timeout_s or 2 * self._pipeline.timeout_s + 5
        if not (self.arrived.is_set() or self._await(timeout_s)):
            raise StalenessError(
                f"The rows of a batch must come within {timeout_s:g} s. "
                "Does every training batch before it get its backward pass? A train "
                "pipeline may have pulled a later batch: train it first, or give the "
                "sharder a larger staleness."
            )
        if self.error is not None:
            raise self.error
        return self

    def _waits_for(self) -> str:
        """Return why the pull has not begun; the connections say why it takes long."""
        why = self._pipeline.semaphore.waits_for(self.permit)
        is_late = self.is_training and why
        return f"the rows of a batch wait for {why}" if is_late else ""

    def _await(self, timeout_s: float) -> bool:
        tally = self._pipeline.tally
        with tally.waiting() if self.is_training else contextlib.nullcontext():
            said_s = min(timeout_s, timeouts.SAY_S)
            if self.arrived.wait(said_s):
                return True
            with timeouts.saying(logger, self._waits_for, first_s=0.0):
                return self.arrived.wait(timeout_s - said_s)

    def push(self, grads: Outputs) -> None:
        """Send gradients of the shapes of ``outputs``, not to be changed any more.

        It waits for the servers at staleness 0, and raises errors of earlier pushes.
        """
        self.send(lambda: grads)()

    def send(self, grads: Callable[[], Outputs]) -> Callable[[], None]:
        """Begin to push what ``grads`` will return, in the pushing thread.

        What it returns waits for the servers at staleness 0, and raises errors. The
        gradients of one more backward pass through the batch are a step of their own,
        as in TorchRec.
        """
        if self._give_up is None:
            raise BatchError(
                "Only a training batch's gradients can be pushed. Received: a batch "
                "that was looked up for evaluation."
            )
        pipeline = self._pipeline
        if not self._give_up.alive:
            return pipeline.send_again(self.handle, grads)
        if self._number is not None:
            pipeline.batches.has_trained(self._number.batch)
        if pipeline.num_parts > 1:
            wait = pipeline.put_part(self.handle, grads, self.permit)
        else:
            wait = pipeline.put(Push(self._step(), grads, self.permit))
        # Not before: an interrupt, as by Ctrl-C, leaves a batch that can be given up.
        self._give_up.detach()
        self.permit.let_go()
        return wait

    def give_up(self) -> None:
        """Give up: no gradients will come, nor an update that this is a part of.

        It is a step all the same, of which the other trainers have their gradients, as
        where a backward pass gave some that are not finite. Does nothing after a push.
        """
        if self._give_up is None or not self._give_up.detach():
            return
        if self._pipeline.num_parts > 1:
            self._pipeline.put_part(self.handle, None, self.permit)
        else:
            self._pipeline.give_up(self._step(), self.permit)

    def _step(self) -> Handle:
        """Return what a push needs, as a share of a joint step if there are some."""
        pipeline = self._pipeline
        if pipeline.trainers is None:
            return self.handle
        assert self._number is not None, "a training batch"
        return pipeline.lookup.again(self.handle, pipeline.number_step(self._number))

    @property
    def is_recalled(self) -> bool:
        """Whether its pull is taken back, and another must take its place."""
        return self.permit.has_left

    def recall(self) -> None:
        """Take back the pull of a training batch for which no thread waits.

        The permit comes back, and may be another's.
        """
        if self.permit.was_held:
            return
        self._pipeline.semaphore.recall(self.permit)
        if self._give_up is not None:  # or pull() gives it up
            self._give_up()

    def pull(self) -> None:
        """Pull the batch; a thread of the pipeline calls this."""
        ids, self._ids = self._ids, None
        after, self.after = self.after, ()
        for wait in after:
            wait()
        pipeline, number, permit = self._pipeline, self._number, self.permit
        try:
            ids = ids() if callable(ids) else ids
            self.outputs, self.handle = pipeline.lookup.pull(ids, number)
        except BaseException:
            if number is not None:
                pipeline.semaphore.give_back(permit)
            raise
        if number is not None:
            # Runs at most once: when this object is no longer used, unless push() came.
            self._give_up = weakref.finalize(
                self,
                pipeline.give_up,
                self.handle,
                permit,
                is_forgotten=True,
            )
            self._give_up.atexit = False
            if self.is_recalled:
                self._give_up()
            pipeline.semaphore.arrived(permit)
        self.arrived.set()


class Pulls:
    """Threads that pull batches. Any thread may call any method.

    One thread at a time takes the oldest batch and its permit. If each batch waited for
    itself, a later one could get the permit that an earlier one needs, and the trainer,
    which waits for the earlier one, would never give it back.
    """

    def __init__(self, name: str, semaphore: StalenessSemaphore | None) -> None:
        self._name = name
        self._semaphore = semaphore
        self._turn = threading.Lock()  # of the thread that takes a batch
        self._changed = threading.Condition()
        self._waiting: deque[PrefetchedBatch[Any]] = deque()  # guarded by _changed
        self._max_threads = 1  # guarded by _changed
        self._num_threads = 0  # guarded by _changed
        self._is_closing = False  # guarded by _changed

    def set_num_threads(self, num: int) -> None:
        """Change how many batches may be pulled at once; running pulls proceed."""
        if num < 1:
            raise ConfigError(f"At least one puller is needed. Received: {num}.")
        with self._changed:
            self._max_threads = num
            self._changed.notify_all()

    def submit(self, batch: PrefetchedBatch[Any]) -> None:
        """Have a batch pulled; rejected if too many wait for their turn."""
        with self._changed:
            if len(self._waiting) >= _MAX_WAITING:
                raise StalenessError(
                    f"At most {_MAX_WAITING} batches can be started ahead of the one "
                    "that waits. Does every training batch get its backward pass?"
                )
            self._waiting.append(batch)
            if self._num_threads < self._max_threads:
                index = self._num_threads
                self._num_threads += 1
                run, name = partial(self._run, index), f"{self._name} {index}"
                threading.Thread(target=run, name=name, daemon=True).start()
            self._changed.notify()

    def close(self) -> None:
        """Fail the batches whose pull has not begun, and end the threads."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def _run(self, index: int) -> None:
        while True:
            batch = None  # the wait for the next must not keep this one
            try:
                with self._turn:
                    batch = self._next(index)
                    if batch is None:
                        return
                    if self._is_closing:
                        raise PersiaError(CLOSED)
                    is_wanted = self._semaphore is None or self._semaphore.take(
                        batch.permit
                    )
                if is_wanted:
                    batch.pull()
            except Exception as exc:  # noqa: BLE001  # raised by wait()
                assert batch is not None
                batch.error = exc
                batch.arrived.set()

    def _next(self, index: int) -> PrefetchedBatch[Any] | None:
        """Wait for a batch; return None if the thread is one too many, or to end."""
        with self._changed:
            while index < self._max_threads:
                if self._waiting:
                    return self._waiting.popleft()
                if self._is_closing:
                    break
                self._changed.wait()
            self._num_threads -= 1
            return None


class BatchPipeline(PushQueue[Source, Handle]):
    """The batches of one embedding collection. Any thread may call any method.

    Only ``change_tables`` is for one thread at a time. ``staleness`` bounds the batches
    between pull and acknowledged push; 0 makes :meth:`PrefetchedBatch.push` wait, which
    equals ordinary training.

    Attributes:
        trainers: those that this one updates with, if it does.
        batches: how far those of this trainer are numbered.
        training: the pulls of training batches.
        evaluation: the pulls of others.
        trains_rows: what evaluation pulls wait for, by what was pushed when they were
            started: this pipeline, and others of this trainer with the same tables.
        evaluation_waits: whether they do.
        max_in_flight: training batches that may be, by the bound on staleness.
        num_parts: training batches whose gradients are one update.
    """

    evaluation_waits = True

    def __init__(
        self, lookup: Lookup[Source, Handle], *, staleness: int, timeout_s: float
    ) -> None:
        super().__init__(lookup, timeout_s)
        self._rank = self._first_number = 0
        self.batches = BatchCount()
        self.trainers: Trainers | None = None  # guarded by _starting, set before use
        self._stream = BatchNumber.new_stream(NO_GENERATION)
        self._starting = threading.Lock()
        self._num_started = 0  # guarded by _starting
        self.num_parts = 1
        self._num_kept = 0  # parts of an update so far. guarded by _starting
        # Gradients of these, or None if the update is dropped: of the pushing thread.
        self._kept: list[RowGradients] | None = []
        self.trains_rows = weakref.WeakSet[BatchPipeline[Any, Any]]([self])
        self.training = Pulls("training pulls", self.semaphore)
        self.evaluation = Pulls("evaluation pulls", None)
        self.set_staleness(staleness)
        self._thread.start()
        # Where a model is dropped without close(); at exit the threads just end.
        weakref.finalize(
            self,
            _end_threads,
            self._pid,
            self._queue,
            self.semaphore,
            self.training,
            self.evaluation,
        ).atexit = False

    def set_staleness(self, staleness: int, *, pulls_late: bool = False) -> None:
        """Change the bound when the pushes so far are applied, and no batch is open.

        ``pulls_late`` keeps no more batches in flight than hide the pulls.
        """
        if staleness < 0:
            raise ConfigError(f"staleness must be >= 0. Received: {staleness}.")
        self.flush()
        num = max(staleness, 1)
        self.semaphore.resize(num, timeouts.PIPELINE_SETTLE_S, pulls_late=pulls_late)
        self.max_in_flight, self.waits_for_ack = num, staleness == 0

    def set_generation(self, generation: int) -> None:
        """Begin a stream of a generation of the trainers; before the first batch."""
        with self._starting:
            self._stream = BatchNumber.new_stream(generation)

    def set_count(self, rank: int, batches: BatchCount) -> None:
        """Number batches as those of a trainer; before the first."""
        with self._starting:
            self._rank, self.batches = rank, batches
            self._first_number = BatchCount.number(rank, 0)

    def set_trainers(self, trainers: Trainers) -> None:
        """Make every update a share of a joint step; before the first batch."""
        with self._starting:
            self.trainers, self.tally.is_joint = trainers, True
            self.timeout_s += trainers.timeout_s

    def start(
        self, ids: Source, *, training: bool, given: object = None
    ) -> PrefetchedBatch[Handle]:
        """Begin to pull a batch; returns at once. ``given`` is for its ``source``."""
        self.raise_error()
        batch: PrefetchedBatch[Handle]
        if not training:
            batch = PrefetchedBatch(self, ids, given)
            self.tally.num_evaluated += 1
            if self.evaluation_waits:
                trains = self.trains_rows
                batch.after = [wait for p in trains for wait in p.pushes_so_far()]
            self.evaluation.submit(batch)
            return batch
        with self._starting:
            batch = PrefetchedBatch(self, ids, given, self._next_number())
            self.tally.num_samples += _num_samples(ids if given is None else given)
            self.training.submit(batch)
        return batch

    def _next_number(self) -> BatchNumber:
        self._num_started = max(self._num_started, self.batches.first) + 1
        if self._num_started > MOST_BATCHES:
            BatchCount.number(self._rank, self._num_started)  # raises
        return BatchNumber(self._stream, self._first_number + self._num_started)

    def number_step(self, number: BatchNumber) -> BatchNumber:
        """Return the number of an update, with this trainer's next share, if any."""
        if self.trainers is None:
            return number
        with self._starting:
            return number._replace(share=self.trainers.next_share())

    def accumulate(self, num_parts: int) -> None:
        """Make one update of the gradients of every ``num_parts`` training batches.

        The gradients of rows of a batch are kept, and the servers told that it gets no
        update. Those of the last one are added to them, each id once, and pushed under
        a number of the update's own. An update that has begun gets no further part.
        """
        self.end_update()
        self.num_parts = num_parts

    def end_update(self) -> None:
        """Push the parts of the update that has begun, if one has."""
        if self._num_kept and not self._is_closed:
            self._put_update()()

    def drop_update(self) -> None:
        """Drop the parts of the update that has begun, if one has."""
        if self._num_kept:
            self._put_call(self._drop_kept, waits_for_acks=False)

    def put_part(
        self, handle: Handle, grads: Callable[[], Outputs] | None, permit: Permit
    ) -> Callable[[], None]:
        """Keep the gradients of a batch for its update; without any that is dropped.

        The last part begins to push the update. What it returns waits as that of
        :meth:`put` does.
        """
        with self._starting:
            self._num_kept += 1
            is_last = self._num_kept == self.num_parts
        wait = self.raise_error
        if grads is None:
            self.give_up(handle, permit)
            self._put_call(self._drop_kept, waits_for_acks=False)
        else:
            part = Push(handle, grads, permit, send=self._keep, is_update=False)
            wait = self.put(part)
        return self._put_update() if is_last else wait

    def _put_update(self) -> Callable[[], None]:
        with self._starting:
            self._num_kept, number = 0, self._next_number()
        permit = Permit()
        self.semaphore.add(permit)
        send = partial(self._send_kept, self.number_step(number))
        update: Push[Any] = Push(None, None, permit, send=send)
        return self.put(update)

    def _keep(self, handle: Handle, grads: Outputs) -> Sequence[Reply]:
        lookup: Any = self.lookup  # one of this process, which knows rows
        gradients = lookup.gradients_of(handle, grads)
        if self._kept is not None:
            self._kept.append(gradients)
        return self.lookup.abandon(handle)

    def _drop_kept(self) -> None:
        self._kept = None

    def _send_kept(self, number: BatchNumber, *_: object) -> Sequence[Reply]:
        kept, self._kept = self._kept, []
        lookup: Any = self.lookup
        replies: Sequence[Reply] = lookup.send(add_up(kept or []), number)
        return replies

    def send_again(
        self, handle: Handle, grads: Callable[[], Outputs]
    ) -> Callable[[], None]:
        """Push the gradients of a batch that was pushed, as the batch that is next.

        All trainers that update jointly do so at the same place among their batches.
        """
        with self._starting:
            number = self._next_number()
        self.batches.has_trained(number.batch)
        permit = Permit()
        self.semaphore.add(permit)
        if self.num_parts > 1:
            return self.put_part(self.lookup.again(handle, number), grads, permit)
        again = self.lookup.again(handle, self.number_step(number))
        return self.put(Push(again, grads, permit))

    def leave(self) -> None:
        """Let the joint steps of other trainers proceed without this one, from now on.

        Backward passes so far count still. Later ones belong to the joint steps of a
        new group, in which all trainers take part again.
        """
        self.raise_error()
        self.end_update()
        self._put_leave()

    def summary(self) -> TrainingSummary:
        """Return what became of the training batches so far."""
        total = self.tally.total
        return TrainingSummary(
            **self.semaphore.counts(),
            num_dropped=self.tally.num_dropped,
            num_gradients=total.num_gradients,
            num_evicted=total.num_evicted,
            num_lost=total.num_lost,
        )

    def close(self) -> None:
        """Stop the threads; pushes that were begun are sent. May be called twice."""
        if self._pid != os.getpid():
            return  # a forked child
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._settled.notify_all()
        self.semaphore.close()
        self._put_leave()
        joint_s = 0.0
        if self.trainers is not None:
            end = partial(self.trainers.end, "it has closed its tables")
            self._put_call(end, waits_for_acks=False)
            joint_s = self.trainers.timeout_s
        self.training.close()
        self.evaluation.close()
        self._queue.put(None)
        self._thread.join(self.timeout_s - joint_s)

    def _put_leave(self) -> None:
        if self.trainers is not None:
            with self._starting:
                share = self.trainers.next_group()
            leave = partial(self.trainers.client.leave, share)
            self._put_call(leave, waits_for_acks=False)


class PullOrder:
    """Training batches of one collection that are begun; the training thread's.

    A train pipeline begins the pull of a batch some batches before the model uses it,
    and uses them in that order. But between its ``detach()`` and ``attach()`` the model
    may be given another batch, whose pull is begun last and used first:

        begun    1  2                    4      pulled ahead by the pipeline
                          3                     by the model itself, and used at once
        used     1        3   2   4

    With few permits, batch 2 has the one that 3 needs, and is used behind it. So it is
    *recalled*: the servers are told that it gets no gradients, its permit comes back,
    and ``begin`` pulls it again when the model uses it, behind the update of 3, as in a
    plain loop. Batches that were begun behind one that is pulled again are so too,
    behind it. Counts of lookups, as those of an admission by frequency, have both.
    """

    def __init__(self, begin: Callable[[Any], PrefetchedBatch[Any]]) -> None:
        self._begin = begin
        # In their order. The caller may drop them.
        self._begun: list[weakref.ref[PrefetchedBatch[Any]]] = []

    def started(self, batch: PrefetchedBatch[Any]) -> None:
        """Note a batch whose pull is begun, and which will be used."""
        if batch.given is not None:
            self._begun = [one for one in self._begun if one() is not None]
            self._begun.append(weakref.ref(batch))

    def consumed(
        self, batch: PrefetchedBatch[Any], max_in_flight: int
    ) -> PrefetchedBatch[Any]:
        """Return the pull of a batch that is used now; it is no other's turn any more.

        If ``max_in_flight`` batches are before it, they would not let it be pulled.
        """
        begun = [one for ref_ in self._begun if (one := ref_()) is not None]
        if batch not in begun:
            return batch
        n = begun.index(batch)
        before, behind = begun[:n], begun[n + 1 :]
        self._begun = [weakref.ref(one) for one in before + behind]
        if len(before) >= max_in_flight:
            for one in before:
                one.latest.recall()
        if batch.latest.is_recalled:
            for one in behind:
                one.latest.recall()
            for one in (batch, *behind):
                if one.latest.is_recalled:
                    one.again = self._begin(one.given)
        return batch.latest


def _num_samples(batch: object) -> int:
    """Return the samples of a batch: of bags by feature, or of what tells it."""
    if isinstance(batch, Mapping):
        return max((len(bags.lengths) for bags in batch.values()), default=0)
    return getattr(batch, "batch_size", 0)


def _end_threads(
    pid: int, tasks: Tasks, semaphore: StalenessSemaphore, *pulls: Pulls
) -> None:
    """End the threads of a pipeline, from garbage collection: waits for nothing."""
    if pid != os.getpid():  # a forked child has no threads, and maybe locks of theirs
        return
    semaphore.close()
    for threads in pulls:
        threads.close()
    tasks.put(None)
