"""Work of a server besides its requests: in threads, and in slices between requests.

Slices have a CPU budget (a token bucket) while requests for rows arrive; an idle server
works all the time.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from persia_torchrec import timeouts
from persia_torchrec.errors import CheckpointError

logger = logging.getLogger(__name__)

_MAX_CREDIT_S = 0.005  # how much credit may be saved up
_BUSY_S = 0.2  # how long after the last request for rows the server counts as busy
_POLL_MS = 2  # how soon an idle server checks again whether the work can continue


class BackgroundTask:
    """Work in a thread; ``phase`` says how far it is, ``error`` why it has failed."""

    def __init__(self, what: str) -> None:
        self.phase = ""
        self.error: Exception | None = None
        self.cancelled = threading.Event()
        self._what = what

    def start(self, phase: str, work: Callable[[], None], end_phase: str) -> None:
        """Do something in a new thread; the previous one has ended."""
        self.phase = phase

        def run() -> None:
            try:
                work()
            except Exception as exc:  # reported by the attribute
                if not isinstance(exc, CheckpointError):
                    logger.exception("%s failed", self._what)
                self.error = self.error or exc
            self.phase = "failed" if self.error else end_phase
            if self.cancelled.is_set():
                self.cancel()  # what it has left, if any

        self._thread = threading.Thread(target=run, name=phase, daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Give up; the thread ends soon. May be called twice."""
        self.cancelled.set()

    def close(self) -> None:
        """Give up, and wait for the thread. May be called twice."""
        self.cancel()
        self._thread.join(timeouts.BACKGROUND_CLOSE_S)

    def require_not_cancelled(self) -> None:
        """Raise an error that ends the thread, if it is cancelled."""
        if self.cancelled.is_set():
            raise CheckpointError(f"{self._what}: cancelled.")


@dataclass(slots=True)
class Activity:
    """When rows were last asked for: ``last_s``, which the serving loop sets."""

    clock: Callable[[], float] = time.monotonic
    cpu_clock: Callable[[], float] = time.thread_time
    last_s: float = -math.inf

    @property
    def is_busy(self) -> bool:
        """Whether requests for rows arrive."""
        return self.clock() - self.last_s < _BUSY_S


class CpuBudget:
    """The budget of one kind of slices: ``fraction`` of a CPU on a busy server.

    A caller may set another ``fraction`` at any time.
    """

    def __init__(self, fraction: float, activity: Activity) -> None:
        self.fraction = fraction
        self._activity = activity
        self._seen_s = self._credit_s = 0.0

    def has_credit(self) -> bool:
        """Return whether there is credit for a slice."""
        now_s = self._activity.clock()
        earned_s = (now_s - self._seen_s) * self.fraction
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

    def wait_ms(self, idle_ms: int, *, is_ready: bool) -> int:
        """Return how long to wait for a message before a slice, if that is ready."""
        if is_ready and self.has_credit():
            return 0
        # A thread that wakes up often waits longer for a CPU when a request comes. So
        # on a busy server the next slice waits for that request.
        return idle_ms if self._activity.is_busy else _POLL_MS
