"""What became of training batches, counted; what users forget is logged at once.

    a batch that was used and dropped   no backward pass came: its rows do not learn
    gradients of evicted rows           the servers' capacity is too small
    gradients that are not finite       the training diverges
    lookups that wait for their bound   how stale the rows are; see ``staleness.py``

A warning comes when there is something to be done about it, and not again for each
batch: of dropped batches once, of evicted rows when their fraction has doubled, of
refused gradients when there are ten times as many.
"""

import logging
import threading
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields

from persia_torchrec.client.codec import PushOutcome

logger = logging.getLogger(__name__)

_MAX_DROPPED_AT_FIRST = 8
"""Batches in a row without a backward pass, while none has had one."""

_MAX_DROPPED = 64
"""The same, when some have had one: an evaluation may have forgotten ``no_grad``."""

_WINDOW_UPDATES = 32
"""Updates after which the fraction of evicted rows is checked."""

_EVICTED_FRACTION = 0.01
"""Of the gradients of a window; from there on it is logged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSummary:
    """What became of the training batches of one trainer so far.

    Attributes:
        num_lookups: training batches that were pulled, or are on their way.
        num_waited: of these, how many had to wait for the staleness bound.
        num_lacking: earlier batches whose update the rows of a lookup lacked, added up
            over all lookups.
        num_dropped: batches that a model used, and that got no backward pass.
        num_gradients: rows that updates had a gradient for, in acknowledged updates.
        num_evicted: of these, how many had left the servers since their lookup.
        max_lacking: earlier batches whose update one lookup may lack, by the bound.
    """

    num_lookups: int = 0
    num_waited: int = 0
    num_lacking: int = 0
    num_dropped: int = 0
    num_gradients: int = 0
    num_evicted: int = 0
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


class Tally:
    """Counts of one pipeline, and its warnings. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = PushOutcome()  # guarded by _lock
        self._window = PushOutcome()  # guarded by _lock
        self._num_in_window = 0  # guarded by _lock
        self._fraction_to_warn_of = _EVICTED_FRACTION  # guarded by _lock
        self._num_dropped = 0  # guarded by _lock
        self._num_in_row = 0  # without a backward pass. guarded by _lock
        self._max_in_row: int | None = _MAX_DROPPED_AT_FIRST  # guarded by _lock

    @property
    def total(self) -> PushOutcome:
        """What became of all updates so far."""
        with self._lock:
            return self._total

    @property
    def num_dropped(self) -> int:
        """Batches that a model used, and that got no backward pass."""
        with self._lock:
            return self._num_dropped

    def pushed(self) -> None:
        """Count a batch that got its backward pass."""
        with self._lock:
            self._num_in_row = 0
            if self._max_in_row is not None:
                self._max_in_row = _MAX_DROPPED

    def dropped(self) -> None:
        """Count a batch that a model used, and that got no backward pass."""
        with self._lock:
            self._num_dropped += 1
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
        with self._lock:
            previous, self._total = self._total, self._total.plus(outcome)
            num_refused = self._total.num_refused
            self._window = window = self._window.plus(outcome)
            self._num_in_window += 1
            fraction = 0.0
            if self._num_in_window == _WINDOW_UPDATES:
                self._window, self._num_in_window = PushOutcome(), 0
                fraction = window.num_evicted / max(window.num_gradients, 1)
            is_much = fraction >= self._fraction_to_warn_of
            if is_much:
                self._fraction_to_warn_of = 2 * fraction
        if is_much:
            logger.warning(
                "%.1f %% of the gradients of the last %d updates (%d of %d) came after "
                "their rows had been evicted, and moved none: raise the servers' "
                "capacity, add servers, or lower the staleness.",
                100 * fraction,
                _WINDOW_UPDATES,
                window.num_evicted,
                window.num_gradients,
            )
        if num_refused and len(str(num_refused)) > (
            len(str(previous.num_refused)) if previous.num_refused else 0
        ):
            logger.warning(
                "refused=%d gradients of rows so far, which were not finite: they were "
                "dropped. Does the training diverge?",
                num_refused,
            )
