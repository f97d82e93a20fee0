"""Deadlines that are extended while a process of the job compiles its loops.

The first start on a host compiles, which takes half a minute of processor time, and
much longer where many processes do it on few cores. A timeout that detects stuck
processes does not count that time. A process reports that it compiles with its
heartbeats, by lines to its parent process, and by rejecting clients with
``NotReadyError``.
"""

from persia_torchrec import timeouts

_BEATS_S = 5.0
"""More than between two heartbeats of a process that compiles on a busy host."""


class Patience:
    """A deadline that is extended while a process of the job compiles.

    Owned by the thread that waits, which checks it several times per second.

    Args:
        deadline: as ``now``; extended by ``timeouts.COMPILING_S`` at most.
        now: of ``time.monotonic()``.
    """

    def __init__(self, deadline: float, now: float) -> None:
        self._deadline = deadline
        self._last_deadline = deadline + timeouts.COMPILING_S
        self._last_look = now
        self._num_beats: int | None = None
        self._compiles_until = 0.0

    def is_over(self, num_beats: int, now: float) -> bool:
        """Return whether the time has run out.

        Args:
            num_beats: the number in the address book that grows with each heartbeat
                of a process that compiles.
            now: of ``time.monotonic()``.
        """
        if self._num_beats is not None and num_beats != self._num_beats:
            self._compiles_until = now + _BEATS_S
        if now < self._compiles_until:
            self._deadline += now - self._last_look
        self._num_beats, self._last_look = num_beats, now
        return now >= min(self._deadline, self._last_deadline)
