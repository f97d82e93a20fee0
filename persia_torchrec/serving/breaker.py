"""A circuit breaker, so that not each request waits for embeddings that hang.

    closed   each request asks them
    open     after three timeouts in a row a request gets an error at once, but for a
             trial now and then, one at a time; an answer to it closes the breaker

Embeddings that are away answer with an error, at once: it stays closed.
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator

from persia_torchrec import timeouts
from persia_torchrec.errors import RemoteError, RequestTimeoutError, ServerError

logger = logging.getLogger(__name__)

NUM_TIMEOUTS = 3


class NotAskedError(RequestTimeoutError):
    """Embeddings that have hung were not asked."""


class Breaker:
    """Says whether embeddings are asked. Any thread may call any method."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_timeouts = 0  # in a row. guarded by _lock
        self._trial_s = math.inf  # when the next is due. guarded by _lock

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Let a block ask, and learn of how it ends.

        Raises:
            NotAskedError: they hang, and no trial is due.
        """
        if self._num_timeouts >= NUM_TIMEOUTS:
            self._begin_trial()
        try:
            yield
        except ServerError as exc:
            self._learn(exc)
            raise
        except BaseException:  # it may not have come as far as to ask
            self._put_off()
            raise
        if self._num_timeouts:
            self._close()

    def _begin_trial(self) -> None:
        with self._lock:
            if self._clock() < self._trial_s:
                raise NotAskedError(
                    f"not asked, as {self._num_timeouts} requests in a row had no "
                    "reply in time. One tries again each second.",
                    server="embeddings",
                )
            self._trial_s = math.inf

    def _learn(self, exc: ServerError) -> None:
        kind = exc.kind if isinstance(exc, RemoteError) else ""
        is_timeout = isinstance(exc, RequestTimeoutError)
        if not is_timeout and kind != RequestTimeoutError.__name__:
            self._close()
            return
        with self._lock:
            self._num_timeouts += 1
            if self._num_timeouts == NUM_TIMEOUTS:
                logger.warning("embeddings hang; one request a second asks: %s", exc)
        self._put_off()

    def _put_off(self) -> None:
        """Have the next trial be due in a while."""
        with self._lock:
            self._trial_s = self._clock() + timeouts.MODEL_TRIAL_S

    def _close(self) -> None:
        with self._lock:
            if self._num_timeouts >= NUM_TIMEOUTS:
                logger.warning("embeddings answer again")
            self._num_timeouts = 0
