"""Work in a thread of its own, which a server's thread begins, polls and cancels."""

import logging
import threading
from collections.abc import Callable

from persia_torchrec.errors import CheckpointError

logger = logging.getLogger(__name__)


class BackgroundTask:
    """A dump or a load: ``phase`` says how far it is, ``error`` why it has failed."""

    def __init__(self, what: str) -> None:
        self.phase = ""
        self.error: Exception | None = None
        self._what = what
        self._cancelled = threading.Event()

    def _start(self, phase: str, work: Callable[[], None], end_phase: str) -> None:
        self.phase = phase

        def run() -> None:
            try:
                work()
            except Exception as exc:  # reported by the attribute
                if not isinstance(exc, CheckpointError):
                    logger.exception("%s failed", self._what)
                self.error = self.error or exc
            self.phase = "failed" if self.error else end_phase

        self._thread = threading.Thread(target=run, name=phase, daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Give up, and wait for the thread. May be called twice."""
        self._cancelled.set()
        self._thread.join(timeout=10)

    def _require_not_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise CheckpointError(f"{self._what}: cancelled.")
