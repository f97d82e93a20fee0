"""Metrics of a process: counters, gauges with their maximum, means between two pushes.

``metrics/push.py`` turns a ``Reading`` into ``prometheus_client``'s types, whose
``Summary`` does not have PERSIA's gauges of means since the last push.
"""

import threading
import time
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "untyped"]
_Key = tuple[str, str | None]  # name and feature


class Reading(NamedTuple):
    """One current number, for a gateway that keeps numbers over time."""

    name: str  # without the ending of a counter
    value: float
    help: str
    kind: Kind = "gauge"  # ``untyped`` is a counter whose name another program fixed
    feature: str | None = None  # value of the label ``feat``


class Means:
    """Means of what happened between two readings. Owned by one thread."""

    def __init__(self) -> None:
        self._previous: dict[Hashable, tuple[float, float]] = {}
        self._means: dict[Hashable, float] = {}

    def since_last(self, key: Hashable, total: float, num: float) -> float | None:
        """Return the mean since the last call for a key, of the sums so far.

        Without new values it is the previous mean, and None before the first.
        """
        previous_total, previous_num = self._previous.get(key, (0.0, 0.0))
        if num > previous_num:
            self._means[key] = (total - previous_total) / (num - previous_num)
            self._previous[key] = (total, num)
        return self._means.get(key)


class Observations:
    """What several threads measure; one thread reads it.

    ``helps`` has name -> help of all that is measured.
    """

    def __init__(self, helps: Mapping[str, str]) -> None:
        self._helps = helps
        self._lock = threading.Lock()
        self._sums: dict[_Key, tuple[float, int]] = {}  # and numbers. guarded by _lock
        self._counts: dict[_Key, int] = {}  # guarded by _lock
        self._means: dict[_Key, float] = {}  # of the last reading

    def observe(self, name: str, value: float, feature: str | None = None) -> None:
        """Record a value; its mean since the last reading is read."""
        with self._lock:
            total, num = self._sums.get((name, feature), (0.0, 0))
            self._sums[name, feature] = total + value, num + 1

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Record the seconds of a block, unless it raises."""
        began_s = time.perf_counter()
        yield
        self.observe(name, time.perf_counter() - began_s)

    def count(self, name: str, times: int = 1, feature: str | None = None) -> None:
        """Count something; 0 says that it has not happened yet."""
        with self._lock:
            self._counts[name, feature] = self._counts.get((name, feature), 0) + times

    def read(self) -> list[Reading]:
        """Return every count, and every mean: the previous one if there is no new."""
        with self._lock:
            sums, self._sums = self._sums, {}
            counts = dict(self._counts)
        self._means |= {key: total / num for key, (total, num) in sums.items()}
        kinds: dict[Kind, Mapping[_Key, float]] = {
            "untyped": counts,
            "gauge": self._means,
        }
        return [
            Reading(name, value, self._helps[name], kind, feature)
            for kind, values in kinds.items()
            for (name, feature), value in values.items()
        ]
