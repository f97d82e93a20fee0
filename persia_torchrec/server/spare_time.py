"""How much of a processor a server's own work may take while rows are asked for.

What nobody waits for uses every moment in which the server has nothing else to do.
While rows are asked for it earns credit, as time passes, and spends it: so trainers
that share the machine are not held up.
"""

import time

_MAX_CREDIT_S = 0.005
"""How much credit may come together."""

_IN_USE_S = 0.2
"""How long after the last request for rows the server counts as in use."""

WAIT_MS = 2
"""How soon to look again whether work can go on, when the server is not in use."""


class SpareTime:
    """The time of one kind of work. The serving thread owns it.

    Args:
        share: part of a processor that the work may take while the server is in use.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._used_s = float("-inf")
        self._seen_s = self._credit_s = 0.0

    def rows_are_asked_for(self) -> None:
        """A request for rows has come."""
        self._used_s = time.monotonic()

    def is_in_use(self) -> bool:
        """Return whether rows have been asked for just now."""
        return time.monotonic() - self._used_s < _IN_USE_S

    def may_work(self) -> bool:
        """Return whether there is credit for a slice."""
        now_s = time.monotonic()
        earned_s = (now_s - self._seen_s) * self._share
        self._credit_s = min(self._credit_s + earned_s, _MAX_CREDIT_S)
        self._seen_s = now_s
        if not self.is_in_use():
            self._credit_s = _MAX_CREDIT_S
        return self._credit_s > 0

    def spend(self, seconds: float) -> None:
        """A slice has taken so much of a processor."""
        self._credit_s -= seconds

    def wait_ms(self, idle_ms: int) -> int:
        """Return how long the server may wait for a message before the next slice."""
        if self.may_work():
            return 0
        # Who wakes up again and again waits longer for the processor when a request
        # comes: so the next slice waits for that request.
        return idle_ms if self.is_in_use() else WAIT_MS
