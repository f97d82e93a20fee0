"""How long others wait for a process that compiles its loops.

The first start on a machine compiles, which takes half a minute of processor time, and
much longer where many processes do it on few cores. That is progress: a time limit that
is about processes which are stuck does not count it. A process says that it compiles by
its heartbeats in a job (``discovery.py``), by lines to whoever started it
(``service_main.py``), and by refusing clients (``NotReadyError``).
"""

MAX_COMPILING_S = 900.0
"""By how much any time limit is extended at most."""

_BEATS_S = 5.0
"""Longer than between two heartbeats of a process that compiles on a busy machine."""


class Patience:
    """A deadline that is put off for as long as a process of the job compiles.

    Owned by the thread that waits, which looks several times a second.

    Args:
        deadline: as ``now``; put off by ``MAX_COMPILING_S`` at most.
        now: of ``time.monotonic()``.
    """

    def __init__(self, deadline: float, now: float) -> None:
        self._deadline = deadline
        self._last_deadline = deadline + MAX_COMPILING_S
        self._last_look = now
        self._num_beats: int | None = None
        self._compiles_until = 0.0

    def is_over(self, num_beats: int, now: float) -> bool:
        """Return whether the time has run out.

        Args:
            num_beats: what lies in the address book, and grows with each heartbeat of
                a process that compiles.
            now: of ``time.monotonic()``.
        """
        if self._num_beats is not None and num_beats != self._num_beats:
            self._compiles_until = now + _BEATS_S
        if now < self._compiles_until:
            self._deadline += now - self._last_look
        self._num_beats, self._last_look = num_beats, now
        return now >= min(self._deadline, self._last_deadline)
