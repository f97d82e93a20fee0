"""Pushes behind the training: sent in their order, acknowledged in the background.

    put(push) -> queue -> pushing thread: sum a row, send ...  acknowledged: settled

A change of tables goes through the same queue: it waits for the acknowledgements of the
pushes before it. So does the word that this trainer leaves the others. An error of a
push is raised by the next call, whichever it is.

Beside the permits two bounds may hold: on the pushes whose gradients are in memory, for
which ``put`` waits, and on those that are sent and not acknowledged, for which the
pushing thread waits.
"""

import logging
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from persia_torchrec.client.client import Reply
from persia_torchrec.client.codec import PushOutcome
from persia_torchrec.client.permits import Permit
from persia_torchrec.errors import ConfigError, PersiaError, StalenessError
from persia_torchrec.table import TableChange
from persia_torchrec.worker.pulled import Outputs
from persia_torchrec.worker.puller import CLOSED
from persia_torchrec.worker.tally import Tally

logger = logging.getLogger(__name__)

_PUSH_MARGIN_S = 5.0

_MAX_CHANGES = 16
"""Changes of tables that may wait; one more waits for the oldest."""

Handle = TypeVar("Handle")
Pulled = TypeVar("Pulled", contravariant=True)


class Updates(Protocol[Pulled]):
    """Something that pushes the gradients of batches."""

    def push(self, handle: Pulled, grads: Outputs) -> Sequence[Reply]:
        """Send the gradients of a batch; replies come when they are applied."""

    def abandon(self, handle: Pulled) -> Sequence[Reply]:
        """Tell that a training batch gets no gradients."""

    def outcome(self, replies: Sequence[Reply]) -> PushOutcome:
        """Return which gradients of a push were not applied; may wait."""

    def change_tables(self, change: TableChange) -> None:
        """Change the settings of the tables; no push is under way."""


@dataclass(frozen=True, slots=True)
class Push(Generic[Handle]):
    """The gradients of a batch, or None when it is given up, and its permit."""

    handle: Handle
    grads: Outputs | None
    permit: Permit
    was_dropped: bool = False  # a model used it, and no backward pass came
    done: "Future[None]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Change:
    change: TableChange
    done: "Future[None]"


@dataclass(frozen=True, slots=True)
class _Message:
    send: Callable[[], None]
    done: "Future[None]"


class Pusher(Generic[Handle]):
    """Sends the pushes of one collection. Any thread may call any method.

    Only :meth:`change_tables` is for one thread at a time.

    Args:
        updates: where batches are pushed to.
        timeout_s: seconds that a wait for an acknowledgement may take.

    Attributes:
        timeout_s: the same; not to be changed while a push is under way.
        tally: what became of the pushes.
    """

    def __init__(self, updates: Updates[Handle], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.tally = Tally()
        self._updates = updates
        self._lock = threading.Lock()
        self._error: BaseException | None = None  # guarded by _lock
        self._num_open = 0  # guarded by _lock
        self._one_finished = threading.Condition(self._lock)
        self._max_held: float = math.inf
        self._max_sent: float = math.inf
        self._held: set[Future[None]] = set()  # with gradients. guarded by _lock
        self._sent: set[Future[None]] = set()  # of these. guarded by _lock
        self._under_way: set[Future[None]] = set()  # guarded by _lock
        self._is_closed = False  # guarded by _lock
        self._changes: deque[Future[None]] = deque()  # of the thread that changes
        # Bounded by the permits (a push needs one, and a pull waits for one), and by
        # the changes that may wait.
        self._queue: queue.SimpleQueue[Push[Handle] | _Change | _Message | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pushes", daemon=True)
        self._thread.start()

    def bound(self, *, held: int, sent: int) -> None:
        """Bound the pushes with gradients; before the first.

        Args:
            held: that are waiting, or sent and not acknowledged.
            sent: that are sent and not acknowledged.

        Raises:
            ConfigError: a number is below 1.
        """
        if held < 1 or sent < 1:
            raise ConfigError(
                f"At least one update must be possible. Received: {held} and {sent}."
            )
        with self._lock:
            self._max_held, self._max_sent = held, sent

    def open_batch(self) -> None:
        """Count a batch that will be pushed or given up."""
        with self._lock:
            self._num_open += 1

    def num_open(self, timeout_s: float) -> int:
        """Wait a while until no batch is open; return how many are."""
        with self._lock:
            self._one_finished.wait_for(lambda: self._num_open == 0, timeout_s)
            return self._num_open

    def put(self, push: Push[Handle], *, waits_for_ack: bool) -> None:
        """Send the gradients of an open batch; returns at once unless asked to wait.

        Where as many are held as may be, it first waits for an acknowledgement.

        Raises:
            PersiaError: a push of before failed, or this one if it is waited for, or
                the pusher is closed, or no acknowledgement came in time.
        """
        with self._lock:
            has_room = self._wait_for_room(
                lambda: len(self._held) < self._max_held or self._is_closed
            )
            if self._is_closed:
                raise PersiaError(CLOSED)
            if not has_room:
                raise self._no_room()
            self._held.add(push.done)
            self._under_way.add(push.done)
            self._queue.put(push)
        if waits_for_ack:
            self._await(push.done)
        self.raise_error()

    def put_given_up(self, push: Push[Handle]) -> None:
        """Give an open batch up; takes no lock, as a garbage collection may call it."""
        self._queue.put(push)

    def put_message(self, send: Callable[[], None]) -> None:
        """Have something sent behind the pushes so far; it waits for its reply."""
        message = _Message(send, Future())
        with self._lock:
            self._under_way.add(message.done)
            self._queue.put(message)

    def change_tables(self, change: TableChange) -> "Future[None]":
        """Change the settings of tables behind the pushes so far; returns at once.

        When many changes wait, it first waits for the oldest.

        Raises:
            PersiaError: a push of before failed, or the pusher is closed.
        """
        self.raise_error()
        if len(self._changes) == _MAX_CHANGES:
            self._await(self._changes.popleft())
        done: Future[None] = Future()
        self._changes.append(done)
        with self._lock:
            if self._is_closed:
                raise PersiaError(CLOSED)
            self._under_way.add(done)
            self._queue.put(_Change(change, done))
        return done

    def flush(self) -> None:
        """Wait until everything so far is applied.

        Raises:
            PersiaError: some of it failed, or was not acknowledged in time.
        """
        with self._lock:
            waiting = list(self._under_way)
        for done in waiting:
            self._await(done)
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the first error of a push so far, if there is one, or that of closing.

        Raises:
            PersiaError: as it says.
        """
        with self._lock:
            error = self._error
            if error is None and self._is_closed:
                error = PersiaError(CLOSED)
        if error is not None:
            raise error

    def begin_to_close(self) -> bool:
        """Refuse further pushes; return False where that has been done before."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            self._one_finished.notify_all()
        return not was_closed

    def close(self, timeout_s: float) -> None:
        """Stop the thread; pushes that were begun are sent."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    @property
    def _ack_timeout_s(self) -> float:
        # Its requests end in an error in time, which says what was asked of whom; the
        # margin is for pushes that stand in the queue before it.
        return self.timeout_s + _PUSH_MARGIN_S

    def _await(self, done: "Future[None]") -> None:
        timeout_s = self._ack_timeout_s
        try:
            done.result(timeout_s)
        except PersiaError:
            raise
        except TimeoutError:
            raise StalenessError(
                f"A push was not acknowledged within {timeout_s:g} s."
            ) from None

    def _run(self) -> None:
        sent: list[Future[None]] = []  # bounded by the permits
        while (push := self._queue.get()) is not None:
            sent = [done for done in sent if not done.done()]
            match push:
                case _Change():
                    self._send(push.done, partial(self._apply_change, push, sent))
                case _Message():
                    self._send(push.done, push.send)
                case _:
                    sent.append(push.done)
                    self._send_push(push)

    def _send(self, done: "Future[None]", send: Callable[[], None]) -> None:
        try:
            send()
        except Exception as exc:  # noqa: BLE001  # handed to the next caller
            self._end(done, exc)
        else:
            self._end(done, None)

    def _apply_change(self, change: _Change, sent: Sequence["Future[None]"]) -> None:
        for done in sent:
            self._await(done)
        self._updates.change_tables(change.change)

    def _wait_for_room(self, has_room: Callable[[], bool]) -> bool:
        """Wait until there is room, if acknowledgements come; the lock is held."""
        return self._one_finished.wait_for(has_room, self._ack_timeout_s)

    def _no_room(self) -> StalenessError:
        return StalenessError(
            f"One of {len(self._held)} updates must be acknowledged within "
            f"{self._ack_timeout_s:g} s. Received: none."
        )

    def _send_push(self, push: Push[Handle]) -> None:
        if push.was_dropped:
            self.tally.dropped()
        if push.grads is not None:
            self.tally.pushed()
            with self._lock:
                has_room = self._wait_for_room(lambda: len(self._sent) < self._max_sent)
                self._sent.add(push.done)
            if not has_room:
                self._finish(push, self._no_room())
                return
        try:
            if push.grads is None:
                replies = self._updates.abandon(push.handle)
            else:
                replies = self._updates.push(push.handle, push.grads)
        except Exception as exc:  # noqa: BLE001  # handed to the next caller
            self._finish(push, exc)
            return
        _when_all_done(replies, partial(self._settle, push, replies))

    def _settle(self, push: Push[Handle], replies: Sequence[Reply]) -> None:
        """All replies to a push have come, each with a result or an error."""
        try:
            outcome = self._updates.outcome(replies)
        except Exception as exc:  # noqa: BLE001  # handed to the next caller
            self._finish(push, exc)
            return
        if push.grads is not None:
            total = self.tally.applied(outcome).num_refused
            num_before = total - outcome.num_refused
            if _digits(num_before) < _digits(total):
                logger.warning(
                    "refused=%d gradients of rows so far, which were not finite: they "
                    "were dropped. Does the training diverge?",
                    total,
                )
        self._finish(push, None)

    def _finish(self, push: Push[Handle], error: Exception | None) -> None:
        with self._lock:
            self._num_open -= 1
            self._held.discard(push.done)
            self._sent.discard(push.done)
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


def _digits(number: int) -> int:
    """Return 0 for 0, else the number of digits: it rises with every tenfold."""
    return len(str(number)) if number else 0


def _when_all_done(replies: Sequence[Reply], call: Callable[[], None]) -> None:
    """Call once every reply is there; by the thread that brings the last one."""
    lock = threading.Lock()
    left = len(replies)

    def count(_: object) -> None:
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
