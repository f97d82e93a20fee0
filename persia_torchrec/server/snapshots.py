"""A server's counters, handed by the thread that owns them to one that asks.

    pushing thread   ask() -> is_wanted ... wait ... <- the counters
    serving thread   between two requests: is_wanted? -> give(counters)

So nothing that counts has a lock: the serving thread looks at one attribute a round,
and makes a snapshot when somebody waits for it.
"""

import threading
from collections.abc import Mapping

Counters = Mapping[str, int]


class Snapshots:
    """The latest counters of a server.

    ``give`` and ``close`` belong to the serving thread, ``ask`` to one other.

    Attributes:
        is_wanted: whether somebody waits; written under a lock, read without: who
            reads too early reads again in the next round.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self._changed = threading.Condition()
        self._latest: Counters | None = None  # guarded by _changed
        self._is_closed = False  # guarded by _changed

    def ask(self, timeout_s: float) -> Counters | None:
        """Wait for the counters of now.

        Args:
            timeout_s: how long to wait. A server is quick to answer unless it applies
                something large, loads a checkpoint, or does not serve yet.

        Returns:
            The counters; those of the last time where there are none in time; the last
            ones after the end; None before the first.
        """
        with self._changed:
            self.is_wanted = not self._is_closed
            self._changed.wait_for(lambda: not self.is_wanted, timeout_s)
            return self._latest

    def give(self, counters: Counters) -> None:
        """Hand out the counters of now."""
        with self._changed:
            self._latest = counters
            self.is_wanted = False
            self._changed.notify_all()

    def close(self, counters: Counters) -> None:
        """Hand out the last counters: nobody is to wait from now on."""
        with self._changed:
            self._is_closed = True
        self.give(counters)
