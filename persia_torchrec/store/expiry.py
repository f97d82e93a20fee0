"""The seconds by which rows expire, and sweeps that take out those that have expired.

They are those in which a server runs, by the monotonic clock: they begin as the seconds
since 1970, which other rows note, and continue from where the memory file, or the
checkpoint that was loaded, ended. A step of the wall clock, as when a machine was
suspended, is noticed by the monotonic one; rows keep their age.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from persia_torchrec.embedding.usage import Expiry
from persia_torchrec.store import loops, memory
from persia_torchrec.store.memory import Tally
from persia_torchrec.table import TableSpec

logger = logging.getLogger(__name__)

JUMP_S = 60.0
"""A step of the wall clock that is named; less may be a correction of the time."""

_MANY_FRACTION, _MANY_ROWS = 0.1, 100
"""Of the rows at the beginning of a pass: how many that expire in it are named."""

_WARNED_S = 60.0  # between two warnings of many rows
_CAUSES = [memory.EXPIRED_STEPS, memory.EXPIRED_SECONDS, memory.EXPIRED_NORM]


class ExpiryClock:
    """The seconds of a store's rows. The store's thread owns it.

    ``clock`` returns the current second, ``monotonic`` seconds that never jump.
    """

    def __init__(
        self, tally: Tally, clock: Callable[[], float], monotonic: Callable[[], float]
    ) -> None:
        self._tally, self.clock, self.monotonic = tally, clock, monotonic
        self.running_s = float(tally[memory.RUNNING_S]) or clock()
        self._offset_s = clock() - monotonic()

    @property
    def running_s(self) -> float:
        """The running time: a load of a checkpoint sets it to that of the dump."""
        return self._begin_s + self.monotonic() - self._began_at_s

    @running_s.setter
    def running_s(self, seconds: float) -> None:
        self._begin_s, self._began_at_s = seconds, self.monotonic()
        self._tally[memory.RUNNING_S] = int(seconds)

    def now_s(self, expiry: Expiry) -> float:
        """Return the current second of rows with an expiry."""
        return self.running_s if expiry.is_by_running_time else self.clock()

    def note(self) -> None:
        """Keep the running time for the next process, and look for a jump."""
        self._tally[memory.RUNNING_S] = int(self.running_s)
        offset_s = self.clock() - self.monotonic()
        jump_s, self._offset_s = offset_s - self._offset_s, offset_s
        if abs(jump_s) > JUMP_S:
            logger.warning(
                "the clock of this machine jumped by %+.0f s: rows keep their age",
                jump_s,
            )


class Sweeps:
    """Takes expired rows out, a slice at a time. The store's thread owns it."""

    def __init__(self, tally: Tally, seconds: ExpiryClock) -> None:
        self._tally, self._seconds = tally, seconds
        self._num_before, self._num_rows = np.zeros(3, np.int64), 0  # at a pass's begin
        self._warned_at_s = -_WARNED_S

    def begin_slice(
        self, expiring: Mapping[int, TableSpec], num_tables: int, *, is_first: bool
    ) -> loops.Rules:
        """Note the time, and what there is at the beginning of a pass.

        Returns the rules of all tables, of which some have an expiry.
        """
        self._seconds.note()
        if is_first:
            self._num_before = self._tally[_CAUSES]
            self._num_rows = int(self._tally[memory.ROWS])
        rules_T = np.zeros((num_tables, 5), dtype=np.float64)
        for number, spec in expiring.items():
            now_s = self._seconds.now_s(spec.expiry)
            rules_T[number] = *spec.expiry.limits, now_s
        return rules_T

    def end_pass(self, names: Sequence[str]) -> None:
        """Name many rows that have expired in one pass."""
        causes = self._tally[_CAUSES] - self._num_before
        num, now_s = int(causes.sum()), self._seconds.monotonic()
        is_much = num >= max(_MANY_ROWS, _MANY_FRACTION * self._num_rows)
        if not is_much or now_s - self._warned_at_s < _WARNED_S:
            return
        self._warned_at_s = now_s
        logger.warning(
            "%d of %d rows expired at once: %d by steps_to_live, %d by "
            "seconds_to_live, %d by min_l2_norm; tables with an expiry: %s. Let rows "
            "live longer if they are wanted.",
            num,
            self._num_rows,
            *causes.tolist(),
            ", ".join(names),
        )
