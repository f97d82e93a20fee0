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
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from persia_torchrec import timeouts
from persia_torchrec.client.client import BatchNumber, Reply
from persia_torchrec.client.codec import PushOutcome
from persia_torchrec.errors import ConfigError, PersiaError, StalenessError
from persia_torchrec.lookup.sharded_lookup import Outputs
from persia_torchrec.pipeline.staleness import (
    CLOSED,
    BatchStatistics,
    Permit,
    StalenessSemaphore,
)
from persia_torchrec.rpc.own_process import OwnProcess
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
    given back when it is settled, which ends ``done``. ``was_dropped`` says that a
    model used the batch, and no backward pass came.

    By default the gradients are sent as an update. ``send`` does otherwise; whether it
    is one then, ``is_update`` says.
    """

    handle: Handle
    grads: Callable[[], Outputs] | None
    permit: Permit
    was_dropped: bool = False
    send: Callable[[Handle, Outputs], Sequence[Reply]] | None = None
    is_update: bool = True
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
        self.tally = BatchStatistics()
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
            if self.waits_for_ack and push.is_update:
                self._await(push.done)
            self.raise_error()

        return wait

    def give_up(
        self, handle: Handle, permit: Permit, *, is_forgotten: bool = False
    ) -> None:
        """Give a pulled batch up; takes no lock, as garbage collection may call it."""
        was_dropped = is_forgotten and permit.was_held  # not only pulled ahead
        permit.let_go()
        push = Push(handle, None, permit, was_dropped, is_update=False)
        if not self._is_closed:  # or no thread would take it out of the queue again
            self._queue.put((self, push))

    def change_tables(self, change: TableChange) -> "Future[None]":
        """Change tables behind the pushes so far; many changes wait for the oldest."""
        self.raise_error()
        if len(self._changes) == _MAX_CHANGES:
            self._await(self._changes.popleft())
        call = partial(self.lookup.change_tables, change)
        self._changes.append(self._put_call(call, waits_for_acks=True))
        return self._changes[-1]

    def flush(self) -> None:
        """Wait until everything so far is applied."""
        if self._pid != os.getpid():
            self.require_own_process()
        with self._lock:
            waiting = list(self._in_flight)
        for done in waiting:
            self._await(done)
        self.raise_error()

    def pushes_so_far(self) -> list[Callable[[], None]]:
        """Return waits for what is pushed, and not applied yet; each has a deadline."""
        with self._lock:
            pushes = [done for done, push in self._in_flight.items() if push]
        return [partial(self._await, done) for done in pushes]

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
        if push.grads is not None:
            self.tally.pushed()
        if push.is_update:
            with self._lock:
                if len(self._sent) >= self._max_sent and not self._settled.wait_for(
                    lambda: len(self._sent) < self._max_sent,
                    self.timeout_s + timeouts.PUSH_QUEUE_MARGIN_S,
                ):
                    raise self._no_room()
                self._sent.add(push.done)
        grads = () if push.grads is None else self._gradients(push.grads)
        if push.send is not None:
            replies = push.send(push.handle, grads)
        elif push.grads is None:
            replies = self.lookup.abandon(push.handle)
        else:
            replies = self.lookup.push(push.handle, grads)
        left = itertools.count(len(replies) - 1, -1)  # atomic
        settle = partial(self._settle, push, replies, left)
        for reply in replies:
            reply.add_done_callback(settle)
        if not replies:  # its rows are trained where they are
            settle()

    def _gradients(self, grads: Callable[[], Outputs]) -> Outputs:
        """Wait for gradients, which may be on their way from a device."""
        self._awaits_gradients = True
        try:
            return grads()
        finally:
            self._awaits_gradients = False

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
        if push.is_update:
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
        if isinstance(task, Push):
            self.semaphore.give_back(task.permit)
        if error is None:
            task.done.set_result(None)
        else:
            task.done.set_exception(error)
