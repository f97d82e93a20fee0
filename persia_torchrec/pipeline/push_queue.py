"""Asynchronous pushes: sent in order, acknowledged in the background.

    put(push) -> queue -> pushing thread: sum per row, send ...  acknowledged: settled

A change of tables goes through the same queue, and waits for the acknowledgements of
the pushes before it. An error of a push is raised by the next call, whichever it is.
Besides the permits two bounds give back-pressure: on the pushes whose gradients are in
memory, for which ``put`` waits, and on those that are sent and not acknowledged, for
which the pushing thread waits.
"""

import itertools
import logging
import math
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from persia_torchrec import timeouts
from persia_torchrec.client.client import BatchNumber, Reply
from persia_torchrec.client.codec import PushOutcome
from persia_torchrec.errors import ConfigError, PersiaError, StalenessError
from persia_torchrec.lookup.sharded_lookup import Outputs, RowGradients, add_up
from persia_torchrec.pipeline.joint import AccumulationGroup, AddingLookup
from persia_torchrec.pipeline.staleness import CLOSED, Permit, StalenessSemaphore, Tally
from persia_torchrec.rpc.channel import OwnProcess
from persia_torchrec.table import TableChange

logger = logging.getLogger(__name__)


_MAX_CHANGES = 16
"""Changes of tables that may wait; one more waits for the oldest."""

Source = TypeVar("Source", contravariant=True)
Handle = TypeVar("Handle")


class Lookup(Protocol[Source, Handle]):
    """Pulls batches and pushes their gradients, in this process or through workers."""

    def pull(
        self, source: Source, number: BatchNumber | None
    ) -> tuple[Outputs, Handle]:
        """Return the embeddings of a batch, and what a push needs."""

    def push(self, handle: Handle, grads: Outputs) -> Sequence[Reply]:
        """Send the gradients of a batch; replies come when they are applied."""

    def again(self, handle: Handle, number: BatchNumber) -> Handle:
        """Return what one more push of a batch needs, under a number of its own."""

    def abandon(self, handle: Handle) -> Sequence[Reply]:
        """Tell that a training batch gets no gradients."""

    def change_tables(self, change: TableChange) -> None:
        """Change the settings of the tables; no push is in flight."""


@dataclass(frozen=True, slots=True)
class Push(Generic[Handle]):
    """The gradients of a batch, or None when it is given up.

    ``grads`` waits for them: they may be on their way from a device. Its permit is
    given back when it is settled, which ends ``done``; not if it is a part of a
    ``group``, which has that permit. ``was_dropped`` says that a model used the batch,
    and no backward pass came.
    """

    handle: Handle
    grads: Callable[[], Outputs] | None
    permit: Permit
    group: AccumulationGroup | None = None
    was_dropped: bool = False
    done: "Future[None]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Call:
    """Something else to do behind the pushes so far."""

    call: Callable[[], None]
    waits_for_acks: bool
    done: "Future[None]" = field(default_factory=Future)


Tasks = queue.SimpleQueue["tuple[PushQueue[Any, Any], Push[Any] | _Call] | None"]


class PushQueue(OwnProcess, Generic[Source, Handle]):
    """Sends the pushes of one collection. Any thread may call any method.

    Only :meth:`change_tables` is for one thread at a time. A wait for an
    acknowledgement takes ``timeout_s`` seconds at most, not to be changed while a push
    is in flight. ``waits_for_ack`` says whether a push is waited for.
    """

    def __init__(self, lookup: Lookup[Source, Handle], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.tally = Tally()
        self.semaphore = StalenessSemaphore(1, timeouts.PERMIT_S)
        self.waits_for_ack = False
        self.lookup = lookup
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)
        self._error: BaseException | None = None  # guarded by _lock
        self._max_held: float = math.inf
        self._max_sent: float = math.inf
        self._held: set[Future[None]] = set()  # with gradients. guarded by _lock
        self._sent: set[Future[None]] = set()  # of these. guarded by _lock
        # With each push. guarded by _lock
        self._in_flight: dict[Future[None], Push[Any] | None] = {}
        self._is_closed = False  # guarded by _lock
        self._awaits_gradients = False  # the pushing thread sets it
        self._changes: deque[Future[None]] = deque()  # of the thread that changes
        # Bounded by the permits (a push needs one, and a pull waits for one), and by
        # the changes that may wait.
        # Each task holds this object until it is done; the thread alone does not.
        self._queue = Tasks()
        self._thread = threading.Thread(
            target=self._run, args=(self._queue,), name="pushes", daemon=True
        )

    def bound(self, *, held: int, sent: int) -> None:
        """Bound, before the first, the pushes with gradients: all, and sent ones."""
        if held < 1 or sent < 1:
            raise ConfigError(
                f"backward_buffer_size and grad_update_buffer_size must be >= 1. "
                f"Received: {held} and {sent}."
            )
        with self._lock:
            self._max_held, self._max_sent = held, sent

    def put(self, push: Push[Handle]) -> Callable[[], None]:
        """Send the gradients of a pulled batch, when fewer are held than may be.

        What it returns waits for the acknowledgement, with ``waits_for_ack``, and
        raises the error of a push so far.
        """
        if self._pid != os.getpid():
            self.require_own_process()
        with self._lock:
            if len(self._held) >= self._max_held:
                self._settled.wait_for(
                    lambda: len(self._held) < self._max_held or self._is_closed,
                    self.timeout_s + timeouts.PUSH_QUEUE_MARGIN_S,
                )
            if self._is_closed:
                raise PersiaError(CLOSED)
            if len(self._held) >= self._max_held:
                raise self._no_room()
            self._held.add(push.done)
            self._in_flight[push.done] = push
            self._queue.put((self, push))

        def wait() -> None:
            if self.waits_for_ack:
                self._await(push.done)
                self._await_update_of(push.group)
            self.raise_error()

        return wait

    def give_up(
        self,
        handle: Handle,
        permit: Permit,
        group: AccumulationGroup | None,
        *,
        is_forgotten: bool = False,
    ) -> None:
        """Give a pulled batch up; takes no lock, as garbage collection may call it."""
        was_dropped = is_forgotten and permit.was_held  # not only pulled ahead
        if group is None:
            permit.let_go()
        else:
            group.let_go(is_forgotten=is_forgotten)
        self._queue.put((self, Push(handle, None, permit, group, was_dropped)))

    def number_step(self, number: BatchNumber) -> BatchNumber:
        """Return the number of an update, which may be a share of a joint step."""
        return number

    def fail_part(self, group: AccumulationGroup) -> None:
        """Settle a part that could not be pulled."""
        group.let_go(is_forgotten=True)
        settle = partial(self._settle_part, group, None)
        self._put_call(settle, waits_for_acks=False)

    def close_group(self, group: AccumulationGroup) -> "Future[None]":
        """Begin no further part of a group: it is pushed when these are settled."""

        def close() -> None:
            group.close()
            if group.is_complete and group.sent is None:
                self._send_update_of(group)

        group.is_over = True
        return self._put_call(close, waits_for_acks=False)

    def change_tables(self, change: TableChange) -> "Future[None]":
        """Change tables behind the pushes so far; many changes wait for the oldest."""
        self.raise_error()
        if len(self._changes) == _MAX_CHANGES:
            self._await(self._changes.popleft())
        call = partial(self.lookup.change_tables, change)
        self._changes.append(self._put_call(call, waits_for_acks=True))
        return self._changes[-1]

    def flush(self) -> None:
        """Wait until everything so far is applied, complete updates of parts too."""
        if self._pid != os.getpid():
            self.require_own_process()
        for _ in ("pushes", "updates that these have completed"):
            with self._lock:
                waiting = list(self._in_flight)
            for done in waiting:
                self._await(done)
        self.raise_error()

    def pushes_so_far(self) -> list[Callable[[], None]]:
        """Return waits for what is pushed, and not applied yet; each has a deadline.

        Parts of an update are waited for where the update is complete.
        """
        with self._lock:
            pushes = list(self._in_flight.values())

        def wait(push: Push[Any]) -> None:
            self._await(push.done)
            self._await_update_of(push.group)

        return [partial(wait, push) for push in pushes if push is not None]

    def raise_error(self) -> None:
        """Raise the first error of a push so far, or that of closing, if any."""
        if self._pid != os.getpid():
            self.require_own_process()
        with self._lock:
            error = self._error
            if error is None and self._is_closed:
                error = PersiaError(CLOSED)
        if error is not None:
            raise error

    def _put_call(
        self, call: Callable[[], None], *, waits_for_acks: bool
    ) -> "Future[None]":
        """Have something else done behind the pushes so far; return its end."""
        task = _Call(call, waits_for_acks)
        with self._lock:
            if self._is_closed and waits_for_acks:
                raise PersiaError(CLOSED)
            self._in_flight[task.done] = None
            self._queue.put((self, task))
        return task.done

    def _await(self, done: "Future[None]") -> None:
        # Its requests end in time in an error, which says what was asked of whom.
        timeout_s = self.timeout_s + timeouts.PUSH_QUEUE_MARGIN_S
        try:
            done.result(timeout_s)
        except PersiaError:
            raise
        except TimeoutError:
            why = "."
            if self._awaits_gradients:
                why = (
                    ": the device has not computed its gradients. Is another trainer "
                    "gone, for whose collective it waits?"
                )
            raise StalenessError(
                f"A push was not acknowledged within {timeout_s:g} s{why}"
            ) from None

    def _await_update_of(self, group: AccumulationGroup | None) -> None:
        """Wait for the update of a part's group, if that was the last one."""
        if group is not None and group.sent is not None:
            self._await(group.sent)

    @staticmethod
    def _run(tasks: Tasks) -> None:
        """Do the tasks of a queue until None; the wait for one holds no object."""
        pushes: list[Future[None]] = []  # bounded by the permits
        while (item := tasks.get()) is not None:
            self, task = item
            pushes = [done for done in pushes if not done.done()]
            try:
                if isinstance(task, Push):
                    pushes.append(task.done)
                    self._send(task)
                    continue
                for done in pushes if task.waits_for_acks else ():
                    self._await(done)
                task.call()
            except Exception as exc:  # noqa: BLE001  # raised by the next caller
                self._end(task, exc)
            else:
                self._end(task, None)
            finally:
                del item, self, task

    def _no_room(self) -> StalenessError:
        return StalenessError(
            f"One of {len(self._held)} updates must be acknowledged within "
            f"{self.timeout_s + timeouts.PUSH_QUEUE_MARGIN_S:g} s. Received: none."
        )

    def _send(self, push: Push[Handle]) -> None:
        if push.was_dropped:
            self.tally.dropped()
        if push.group is not None:
            push = self._take_part(push, push.group)
        if push.grads is None:
            replies = self.lookup.abandon(push.handle)
        else:
            self.tally.pushed()
            with self._lock:
                if len(self._sent) >= self._max_sent and not self._settled.wait_for(
                    lambda: len(self._sent) < self._max_sent,
                    self.timeout_s + timeouts.PUSH_QUEUE_MARGIN_S,
                ):
                    raise self._no_room()
                self._sent.add(push.done)
            replies = self.lookup.push(push.handle, self._gradients(push.grads))
        self._settle_by(replies, push)

    def _gradients(self, grads: Callable[[], Outputs]) -> Outputs:
        """Wait for gradients, which may be on their way from a device."""
        self._awaits_gradients = True
        try:
            return grads()
        finally:
            self._awaits_gradients = False

    def _take_part(self, push: Push[Handle], group: AccumulationGroup) -> Push[Handle]:
        """Keep the gradients of a part for its update; return what is to be given up.

        The update is pushed with the last part, before that is settled.
        """
        gradients = None
        if push.grads is not None:
            self.tally.pushed()
            grads = self._gradients(push.grads)
            gradients = self._adding().gradients_of(push.handle, grads)
        self._settle_part(group, gradients)
        return replace(push, grads=None)

    def _adding(self) -> AddingLookup[Handle]:
        assert isinstance(self.lookup, AddingLookup), "accumulate() has checked it"
        return self.lookup

    def _settle_part(
        self, group: AccumulationGroup, gradients: RowGradients | None
    ) -> None:
        group.settle(gradients)
        # Where the last part gets no gradients, an exception may be why, and the update
        # to be dropped: it waits until training has gone on, which closes it.
        is_sure = gradients is not None or group.is_over or group.is_dropped
        if group.is_complete and is_sure:
            self._send_update_of(group)

    def _send_update_of(self, group: AccumulationGroup) -> None:
        push: Push[Any] = Push(None, tuple, group.permit)
        with self._lock:
            self._in_flight[push.done] = push
        group.sent = push.done
        kept, group.kept = group.kept, []
        try:
            gradients = add_up([] if group.is_dropped else kept)
            number = group.number
            if group.is_step:
                number = self.number_step(number)
            replies = self._adding().send(gradients, number)
        except Exception as exc:  # noqa: BLE001  # raised by the next caller
            self._end(push, exc)
        else:
            self._settle_by(replies, push)

    def _settle_by(self, replies: Sequence[Reply], push: Push[Handle]) -> None:
        """Settle a push when the last of its replies has come."""
        left = itertools.count(len(replies) - 1, -1)  # atomic
        settle = partial(self._settle, push, replies, left)
        for reply in replies:
            reply.add_done_callback(settle)

    def _settle(
        self,
        push: Push[Handle],
        replies: Sequence[Reply],
        left: Iterator[int],
        _: object = None,
    ) -> None:
        """Count a reply; the thread that brings the last one settles the push."""
        if next(left) > 0:
            return
        try:
            outcome = PushOutcome.read(replies)
        except Exception as exc:  # noqa: BLE001  # raised by the next caller
            self._end(push, exc)
            return
        if push.grads is not None:
            self.tally.applied(outcome)
        self._end(push, None)

    def _end(self, task: Push[Handle] | _Call, error: Exception | None) -> None:
        with self._lock:
            if error is not None and self._error is None and not self._is_closed:
                logger.error("a push failed: %s", error)
                self._error = error  # raised by the next caller
            self._in_flight.pop(task.done, None)
            self._held.discard(task.done)
            self._sent.discard(task.done)
            self._settled.notify_all()
        if isinstance(task, Push) and task.group is None:
            self.semaphore.give_back(task.permit)
        if error is None:
            task.done.set_result(None)
        else:
            task.done.set_exception(error)
