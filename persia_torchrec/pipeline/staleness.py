"""Bounded staleness (back-pressure), and statistics of the batches under it.

A training batch takes a permit before its rows are pulled, which comes back once, when
every server has acknowledged its update, or when it has failed or was dropped. With
``n`` permits the rows of a batch lack the updates of at most ``n - 1`` earlier batches;
one permit is the schedule of ordinary training.

A thread may need several batches for one backward pass: when a module is called twice
in a forward pass, or the losses of several batches are added up. It *holds* a batch
from when it waits for it until it pushes it. When it waits for one more and holds all
that are out, only it could give a permit back: so this batch proceeds without waiting,
and sees the rows before the updates of the others, as it would if tables were local.

A semaphore that pulls late keeps fewer batches in flight than there are permits: the
fewest that hide the pulls behind the training, by what was measured. Rows are then less
stale, and steps take no longer. Batches that a thread waits for are never delayed.

What users forget (backward passes, capacity, finite gradients) is logged, once or when
it has grown, not for each batch.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from operator import add
from statistics import fmean

import msgspec

from persia_torchrec.client.codec import NOTHING, PushOutcome
from persia_torchrec.errors import ConfigError, PersiaError, StalenessError
from persia_torchrec.metrics.values import Durations

logger = logging.getLogger(__name__)

# Batches in a row without a backward pass: while none has had one, and when some have,
# since an evaluation may have forgotten ``no_grad``.
_MAX_DROPPED_AT_FIRST, _MAX_DROPPED = 8, 64

# Updates after which the fraction of evicted rows is checked, and that to be logged.
_WINDOW_UPDATES, _EVICTED_FRACTION = 32, 0.01

# Batches by which the number in flight is chosen. Together they may make the trainer
# wait for one of its steps: for 3 % of the time.
_MEASURED_BATCHES, _LATE_STEPS = 32, 1

CLOSED = "The embedding pipeline is closed."


class Permit:
    """The permit of a batch, which a thread holds until it is pushed or dropped."""

    holder: int | None = None
    was_held = False
    has_left = False
    num_in_flight = 0  # with its own, when it was taken
    asked_s: float | None = None
    arrived_s: float | None = None

    def let_go(self) -> None:
        """Note that the batch is pushed or dropped; finalizers call it: no lock."""
        self.has_left = True
        self.holder = None


class StalenessSemaphore:
    """The permits of one stream of batches. Any thread may call any method.

    ``num`` batches may be between pull and acknowledgement. ``clock`` gives seconds.
    """

    def __init__(
        self,
        num: int,
        timeout_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._num = num  # guarded by _changed
        self._timeout_s = timeout_s
        self._clock = clock
        self._changed = threading.Condition()
        self._out: set[Permit] = set()  # guarded by _changed
        self._asked: set[Permit] = set()  # of these none is out. guarded by _changed
        self._depth: Depth | None = None  # guarded by _changed
        self._is_closed = False  # guarded by _changed
        names = "num_lookups", "num_waited", "num_lacking"
        self._counts = dict.fromkeys(names, 0)  # guarded by _changed

    def resize(self, num: int, timeout_s: float, *, pulls_late: bool = False) -> None:
        """Change how many permits there are; a ConfigError unless all come back."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._out, timeout_s):
                raise ConfigError(
                    "The staleness bound can change only while no batch is in flight. "
                    f"Received: {len(self._out)} batches without acknowledgement."
                )
            self._num = num
            self._depth = Depth(num) if pulls_late and num > 1 else None

    def counts(self) -> dict[str, int]:
        """Return what a :class:`TrainingSummary` says of lookups."""
        with self._changed:
            return {**self._counts, "max_lacking": self._num - 1}

    def take(self, permit: Permit) -> bool:
        """Wait until a batch may be pulled; return False if it is recalled."""
        with self._changed:
            is_full = len(self._out) >= self._num
            must_wait = is_full and not self._has_one_for(permit)
            may_take = not (must_wait or self._depth) or self._changed.wait_for(
                lambda: self._is_closed or permit.has_left or self._may_take(permit),
                self._timeout_s,
            )
            if self._is_closed:
                raise PersiaError(CLOSED)
            if permit.has_left:
                return False
            if not may_take:
                raise StalenessError(
                    f"{len(self._out)} batches have been pulled and not updated for "
                    f"{self._timeout_s:g} s, the maximum in flight. "
                    "Does every training batch get its backward pass?"
                )
            self._counts["num_lookups"] += 1
            self._counts["num_waited"] += must_wait
            self._counts["num_lacking"] += len(self._out)
            self._out.add(permit)
            self._asked.discard(permit)
            permit.num_in_flight = len(self._out)
            return True

    def waits_for(self, permit: Permit) -> str:
        """Return which batches keep a permit that another one waits for."""
        with self._changed:
            if permit in self._out or len(self._out) < self._num:
                return ""
            num_held = sum(not other.has_left for other in self._out)
        return f"the backward pass of {num_held} batches" if num_held else ""

    def recall(self, permit: Permit) -> None:
        """Let a batch that waits for its pull not be pulled."""
        with self._changed:
            permit.let_go()
            self._changed.notify_all()

    def add(self, permit: Permit) -> None:
        """Let one more update be under way, without a wait: later ones wait for it."""
        permit.let_go()  # it waits for no backward pass
        with self._changed:
            self._out.add(permit)

    def hold(self, permit: Permit) -> None:
        """Note that the calling thread waits for a batch, and will push it."""
        if not permit.has_left:
            permit.holder, permit.was_held = threading.get_ident(), True
            with self._changed:
                if self._depth is not None and permit.asked_s is None:
                    permit.asked_s = self._clock()
                    if not permit.num_in_flight:
                        self._asked.add(permit)
                    self._measure(permit)
                self._changed.notify_all()

    def arrived(self, permit: Permit) -> None:
        """Note that the rows of a batch are here."""
        if self._depth is not None:
            with self._changed:
                permit.arrived_s = self._clock()
                self._measure(permit)

    def give_back(self, permit: Permit) -> None:
        """Let another batch be pulled; may be called twice."""
        with self._changed:
            self._out.discard(permit)
            self._changed.notify_all()

    def close(self) -> None:
        """Hand out no further permit; a thread that waits for one gets an error."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _measure(self, permit: Permit) -> None:
        asked_s, arrived_s = permit.asked_s, permit.arrived_s
        if self._depth and asked_s is not None and arrived_s is not None:
            self._depth.measure(permit.num_in_flight, asked_s, arrived_s)
            self._changed.notify_all()

    def _may_take(self, permit: Permit) -> bool:
        """Return whether a batch may be pulled now; not if none is waited for yet."""
        if self._depth is None or self._asked:
            return self._has_one_for(permit)
        return len(self._out) < self._depth.num

    def _has_one_for(self, permit: Permit) -> bool:
        """Return whether one is left, or its thread holds the batches of all others."""
        thread = permit.holder
        return len(self._out) < self._num or (
            thread is not None and all(out.holder == thread for out in self._out)
        )


class Depth:
    """The fewest batches in flight that hide the pulls behind the training.

    A batch whose pull began as one of ``n`` in flight, and whose rows came ``late_s``
    seconds after the trainer asked for them, needed ``n + late_s / step_s``: with one
    more in flight a pull begins a step earlier. Rows that lay ready were late by a
    negative time. More than a step does not count: one outlier tells little.

    Attributes:
        num: the number, in ``[2, most]``: the smallest with which the last 32 batches
            would have been late by one step, all together.
    """

    def __init__(self, most: int) -> None:
        self.num = 2
        self._most = most
        self._needs = deque[float](maxlen=_MEASURED_BATCHES)
        self._steps_s = deque[float](maxlen=_MEASURED_BATCHES)
        self._began_s: float | None = None  # when the trainer had the latest batch

    def measure(self, num: int, asked_s: float, arrived_s: float) -> None:
        """Take in a batch that the trainer has, in the order in which it asks."""
        if self._began_s is not None:
            self._steps_s.append(asked_s - self._began_s)
            # Without the longest: an evaluation, or a compilation, is no step.
            num_steps = len(self._steps_s) - len(self._steps_s) // 8
            step_s = max(fmean(sorted(self._steps_s)[:num_steps]), 1e-6)
            self._needs.append(num + min((arrived_s - asked_s) / step_s, 1.0))
            while self.num > 2 and self._late_steps(self.num - 1) <= _LATE_STEPS:
                self.num -= 1
            while self.num < self._most and self._late_steps(self.num) > _LATE_STEPS:
                self.num += 1
        self._began_s = max(asked_s, arrived_s)

    def _late_steps(self, num: int) -> float:
        return sum([need - num for need in self._needs if need > num])


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSummary:
    """What became of the training batches of one trainer so far.

    Attributes:
        num_lookups: training batches that were pulled, or are on their way.
        num_waited: of these, how many had to wait for the staleness bound.
        num_lacking: earlier batches whose update a lookup lacked, over all lookups.
        num_dropped: batches that a model used, and that got no backward pass.
        num_gradients: rows that had a gradient, in acknowledged updates.
        num_evicted: of these, how many had left the servers since their lookup.
        num_lost: updates that a server had not acknowledged when it lost its memory.
        num_lost_updates: updates of all trainers that servers had applied, and lost
            with their memory: they were not written yet. As far as the job knew.
        num_lost_rows: how many rows these had changed, about.
        max_lacking: earlier batches whose update one lookup may lack, by the bound.
    """

    num_lookups: int = 0
    num_waited: int = 0
    num_lacking: int = 0
    num_dropped: int = 0
    num_gradients: int = 0
    num_evicted: int = 0
    num_lost: int = 0
    num_lost_updates: int = 0
    num_lost_rows: int = 0
    max_lacking: int = 0

    @classmethod
    def total(cls, summaries: Iterable["TrainingSummary"]) -> "TrainingSummary":
        """Put summaries of several collections together."""
        columns = zip(*map(astuple, [cls(), *summaries]), strict=True)
        return cls(
            **{
                field.name: max(values) if field.name == "max_lacking" else sum(values)
                for field, values in zip(fields(cls), columns, strict=True)
            }
        )

    @property
    def mean_staleness(self) -> float:
        """Earlier batches of this trainer whose update a lookup lacked, on average."""
        return self.num_lacking / max(self.num_lookups, 1)

    @property
    def share_waited(self) -> float:
        """Which fraction of the lookups had to wait for the staleness bound."""
        return self.num_waited / max(self.num_lookups, 1)

    @property
    def share_evicted(self) -> float:
        """Which fraction of the gradients came after their rows had been evicted."""
        return self.num_evicted / max(self.num_gradients, 1)


class BatchStatistics:
    """Counts of one pipeline, and its warnings. Any thread may call any method.

    Attributes:
        is_joint: several trainers update jointly.
        total: what became of all updates so far.
        num_dropped: batches that a model used, and that got no backward pass.
        num_pushed: updates that were sent, one for each step.
        steps: time between each two of these.
        num_samples: looked up for training; the pipeline counts them.
        num_evaluated: batches that were looked up for evaluation; it counts them.
        num_ids: looked up for training, by table and feature; the lookup counts them,
            where it is one of this process.
    """

    def __init__(self) -> None:
        self.is_joint = False
        self.num_pushed = self.num_samples = self.num_evaluated = 0
        self.num_ids: Mapping[tuple[str, str], int] = {}
        self.steps = Durations()
        self._pushed_ns = 0  # when the last update was sent
        self._lock = threading.Lock()  # of all below; the public ones may be read
        self.total = self._before_window = NOTHING
        self.num_dropped = 0
        self._waited_ns = 0
        self._waits_since_ns: list[int] = []  # of each thread that waits now
        self._num_in_window = 0
        self._fraction_to_warn_of = _EVICTED_FRACTION
        self._num_in_row = 0  # without a backward pass
        self._max_in_row: int | None = _MAX_DROPPED_AT_FIRST

    def pushed(self) -> None:
        """Count a batch that got its backward pass."""
        now_ns = time.perf_counter_ns()
        with self._lock:
            if self.num_pushed:
                self.steps.add(now_ns - self._pushed_ns)
            self.num_pushed += 1
            self._pushed_ns = now_ns
            self._num_in_row = 0
            if self._max_in_row is not None:
                self._max_in_row = _MAX_DROPPED

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what a thread waits for the rows of a batch, during a block."""
        began_ns = time.perf_counter_ns()
        with self._lock:
            self._waits_since_ns.append(began_ns)
        try:
            yield
        finally:
            with self._lock:
                self._waits_since_ns.remove(began_ns)
                self._waited_ns += time.perf_counter_ns() - began_ns

    def waited_ns(self) -> int:
        """Return what threads have waited for rows, those that wait now included."""
        with self._lock:
            now_ns = time.perf_counter_ns()
            current_ns = sum(now_ns - since_ns for since_ns in self._waits_since_ns)
            return self._waited_ns + current_ns

    def dropped(self) -> None:
        """Count a batch that a model used, and that got no backward pass."""
        if self.is_joint and not self.num_dropped:
            logger.warning(
                "a training batch got no backward pass, and is no step of the trainers "
                "that update jointly: the next batch that gets one takes its number. "
                "To look rows up, use model.eval() or torch.no_grad()."
            )
        with self._lock:
            self.num_dropped += 1
            self._num_in_row += 1
            if self._num_in_row != self._max_in_row:
                return
            num_in_row, self._max_in_row = self._num_in_row, None  # logged once
        logger.warning(
            "%d training batches in a row got no backward pass: their rows were looked "
            "up, and do not learn. Call ctx.backward(loss), or loss.backward(), for "
            "every batch. If they are for evaluation, look them up in eval_ctx, or "
            "under model.eval() or torch.no_grad().",
            num_in_row,
        )

    def applied(self, outcome: PushOutcome) -> None:
        """Count an acknowledged update."""
        num_evicted = num_gradients = 0
        fraction = 0.0
        with self._lock:
            previous = self.total.num_refused
            so_far, of_push = map(msgspec.structs.astuple, (self.total, outcome))
            self.total = total = PushOutcome(*map(add, so_far, of_push))
            self._num_in_window += 1
            if self._num_in_window == _WINDOW_UPDATES:
                before, self._before_window = self._before_window, total
                num_evicted = total.num_evicted - before.num_evicted
                num_gradients = total.num_gradients - before.num_gradients
                fraction = num_evicted / max(num_gradients, 1)
                self._num_in_window = 0
            is_much = fraction >= self._fraction_to_warn_of
            if is_much:
                self._fraction_to_warn_of = 2 * fraction
        if is_much:
            logger.warning(
                "%.1f %% of the gradients of the last %d updates (%d of %d) came "
                "after the eviction of their rows, and were dropped: raise the "
                "servers' capacity, add servers, or lower the staleness.",
                100 * fraction,
                _WINDOW_UPDATES,
                num_evicted,
                num_gradients,
            )
        num_digits = len(str(previous)) if previous else 0
        if total.num_refused and len(str(total.num_refused)) > num_digits:
            logger.warning(
                "rejected=%d non-finite gradients of rows so far, all dropped."
                " Does the training diverge?",
                total.num_refused,
            )
