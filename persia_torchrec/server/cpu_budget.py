"""CPU budget (a token bucket) of background work while requests for rows arrive.

An idle server works in the background all the time.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_MAX_CREDIT_S = 0.005
"""How much credit may be saved up."""

_BUSY_S = 0.2
"""How long after the last request for rows the server counts as busy."""

POLL_MS = 2
"""How soon an idle server checks again whether the work can continue."""


class Activity:
    """When rows were last asked for: ``last_s``, which the serving loop sets."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.clock = clock
        self.cpu_clock = cpu_clock
        self.last_s = float("-inf")

    @property
    def is_busy(self) -> bool:
        """Whether requests for rows arrive."""
        return self.clock() - self.last_s < _BUSY_S


class CpuBudget:
    """The budget of one kind of work: ``fraction`` of a CPU on a busy server."""

    def __init__(self, fraction: float, activity: Activity) -> None:
        self._fraction = fraction
        self._activity = activity
        self._seen_s = self._credit_s = 0.0

    def has_credit(self) -> bool:
        """Return whether there is credit for a slice."""
        now_s = self._activity.clock()
        earned_s = (now_s - self._seen_s) * self._fraction
        self._credit_s = min(self._credit_s + earned_s, _MAX_CREDIT_S)
        self._seen_s = now_s
        if not self._activity.is_busy:
            self._credit_s = _MAX_CREDIT_S
        return self._credit_s > 0

    @contextmanager
    def spend(self) -> Iterator[None]:
        """Charge the CPU time of a block."""
        begin_s = self._activity.cpu_clock()
        yield
        self.charge(self._activity.cpu_clock() - begin_s)

    def charge(self, seconds: float) -> None:
        """Charge CPU time that another thread has used."""
        self._credit_s -= seconds

    def wait_ms(self, idle_ms: int) -> int:
        """Return how long the server may wait for a message before the next slice."""
        return 0 if self.has_credit() else self.poll_ms(idle_ms)

    def poll_ms(self, idle_ms: int) -> int:
        """Return how long to wait before the next check."""
        # A thread that wakes up often waits longer for a CPU when a request comes. So
        # on a busy server the next slice waits for that request.
        return idle_ms if self._activity.is_busy else POLL_MS
