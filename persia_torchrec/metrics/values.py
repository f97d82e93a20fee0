"""Metrics of a process: counters, gauges with their maximum, means, histograms.

``metrics/endpoint.py`` turns a ``Reading`` into ``prometheus_client``'s types, whose
``Summary`` does not have PERSIA's gauges of means since the previous reading. Each
reader, as a pusher or an endpoint, has ``Means`` of its own.

The serving thread of a server counts without a lock, and makes a snapshot when it is
asked to:

    pushing thread   ask() -> is_wanted ... wait ... <- the counters
    serving thread   between two requests: is_wanted? -> give(counters)

Read are every counter of ``docs/metrics.md`` as ``persia_NAME``, and PERSIA's metrics:
the value of the last request is here the mean since the previous reading.
"""

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from persia_torchrec import timeouts

Kind = Literal["counter", "gauge", "untyped", "histogram"]
_Key = tuple[str, str | None]  # name and feature

_FIRST_US, _NUM_BINS = 16, 22  # the last bin with an end ends at 34 s
_FIRST_NS = 1000 * _FIRST_US


class Reading(NamedTuple):
    """One current number, or a histogram, for a program that keeps them over time."""

    name: str  # without the ending of a counter
    value: float  # of a histogram the sum, in seconds
    help: str
    kind: Kind = "gauge"  # ``untyped`` is a counter whose name another program fixed
    feature: str | None = None  # value of the label ``feat``
    bins: Sequence[int] = ()  # of a histogram, see ``Durations``


class Durations:
    """How long something took, counted in bins of which each is twice the previous.

        bin      0       1        ...  21         22
        below    16 us   32 us         33.6 s     infinity

    Owned by one thread; others may read.

    Attributes:
        bins: number of durations in each.
        total_ns: their sum.
    """

    def __init__(self) -> None:
        self.bins = [0] * (_NUM_BINS + 1)
        self.total_ns = 0

    def add(self, ns: int) -> None:
        """Count a duration in nanoseconds."""
        self.total_ns += ns
        self.bins[min((ns // _FIRST_NS).bit_length(), _NUM_BINS)] += 1

    def counters(self, name: str) -> dict[str, int]:
        """Return the sum as ``NAME_us_sum``, and bins with durations by their ends."""
        named = zip(_ENDS, self.bins, strict=True)
        bins = {f"{name}_us_{end}": num for end, num in named if num}
        return {f"{name}_us_sum": self.total_ns // 1000, **bins}


_ENDS = [*(str(_FIRST_US << index) for index in range(_NUM_BINS)), "inf"]

BIN_ENDS_S = [*((_FIRST_US << index) / 1e6 for index in range(_NUM_BINS)), math.inf]
"""Where the bins of ``Durations`` end, in seconds."""


def bins_of(counters: Mapping[str, int], name: str) -> list[int]:
    """Return the bins of a histogram that is among counters."""
    return [counters.get(f"{name}_us_{end}", 0) for end in _ENDS]


def quantile_us(bins: Sequence[int], fraction: float) -> float | None:
    """Return a quantile of durations in microseconds, or None where there are none.

    It is interpolated within its bin, as Prometheus does; of what took 34 s or longer,
    34 s.
    """
    rank, below = fraction * sum(bins), 0
    for index, num in enumerate(bins):
        if num and below + num >= rank:
            end = _FIRST_US << min(index, _NUM_BINS - 1)
            start = 0 if index == 0 else _FIRST_US << (index - 1)
            return start + (end - start) * (rank - below) / num
        below += num
    return None


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
    """What several threads measure, and others read.

    ``helps`` has name -> help of all that is measured.
    """

    def __init__(self, helps: Mapping[str, str]) -> None:
        self._helps = helps
        self._lock = threading.Lock()
        self._sums: dict[_Key, tuple[float, int]] = {}  # and numbers. guarded by _lock
        self._counts: dict[_Key, int] = {}  # guarded by _lock

    def observe(self, name: str, value: float, feature: str | None = None) -> None:
        """Record a value; the mean of those since the previous reading is read."""
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

    def read(self, means: Means) -> list[Reading]:
        """Return every count, and every mean: the previous one if there is no new."""
        with self._lock:
            sums, counts = dict(self._sums), dict(self._counts)
        since = {key: means.since_last(key, *so_far) for key, so_far in sums.items()}
        kinds: dict[Kind, Mapping[_Key, float | None]] = {
            "untyped": counts,
            "gauge": since,
        }
        return [
            Reading(name, value, self._helps[name], kind, feature)
            for kind, values in kinds.items()
            for (name, feature), value in values.items()
            if value is not None
        ]


Counters = Mapping[str, int]

STAGES = (
    *("idle", "receive", "decode", "lookup", "inference", "update", "write", "encode"),
    *("send", "sweep", "dump", "other"),
)
"""What the serving thread does."""

GAUGES = {
    *("rows", "capacity_rows", "bytes", "hinted_slots", "updates_queued"),
    *("joint_steps", "joint_bytes", "open_batches", "increments"),
    *("increments_waiting", "increment_delay_ms", "following_lost", "unwritten_ms"),
    *("increment_age_ms", "shared_memory_bytes", "shared_memory_clients"),
}
"""Counters of a server that go up and down; so do those that end in ``_max``."""


_PAGE = "see docs/metrics.md"

_MEANS = {
    "index_miss_ratio": (
        *("misses", "hits misses"),
        "fraction of the ids looked up that have no row",
    ),
    "lookup_hashmap_time_cost_sec": (
        *(
            "lookup_us",
            "requests_train requests_read requests_metadata requests_export",
        ),
        "time in the store per training lookup or read of rows",
    ),
    "lookup_inference_batch_time_cost_sec": (
        *("inference_us", "requests_lookup_inference"),
        "time in the store per read-only lookup",
    ),
    "set_embedding_time_cost_sec": (
        *("write_us", "requests_write", "time in the store per write of rows"),
    ),
    "decode_indices_time_cost_sec": (
        *("decode_us", "requests_lookup requests_update requests_write"),
        "time to decode a lookup, an update or a write",
    ),
    "encode_embedding_time_cost_sec": (
        *("encode_us", "requests_lookup", "time to encode the reply of a lookup"),
    ),
}
"""PERSIA's means: a counter divided by the sum of others, and help. A counter of
microseconds becomes one of seconds."""

_COUNTS = {
    "index_miss_count": ("misses", "ids looked up that have no row"),
    "gradient_id_miss_count": (
        "gradients_missed",
        "ids updated that have no row: evicted since the lookup, or not admitted",
    ),
}


class Stages:
    """Attributes all time of one thread, which owns it, to the stage that then ends."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._ns = dict.fromkeys(STAGES, 0)
        self._clock_ns = clock_ns
        self._last_ns = clock_ns()

    def lap(self, stage: str) -> None:
        """End a stage."""
        now_ns = self._clock_ns()
        self._ns[stage] += now_ns - self._last_ns
        self._last_ns = now_ns

    @property
    def last_ns(self) -> int:
        """When the latest stage has ended."""
        return self._last_ns

    def counters(self) -> dict[str, int]:
        """Return the microseconds of each stage so far, as ``lookup_us``."""
        return {f"{stage}_us": ns // 1000 for stage, ns in self._ns.items()}


class Snapshots:
    """Counters that the serving thread gives, and other threads ask for."""

    def __init__(self) -> None:
        # Read without the lock: a stale value is corrected in the next round.
        self.is_wanted = False
        self.given_s = -math.inf  # when the current counters were given
        self._changed = threading.Condition()
        self._latest: Counters | None = None  # guarded by _changed
        self._is_closed = False  # guarded by _changed

    def ask(self, timeout_s: float) -> Counters | None:
        """Return the current counters, or the previous ones if none come in time."""
        with self._changed:
            self.is_wanted = not self._is_closed
            self._changed.wait_for(lambda: not self.is_wanted, timeout_s)
            return self._latest

    def give(self, counters: Counters, *, is_last: bool = False) -> None:
        """Publish the current counters."""
        with self._changed:
            self._latest, self._is_closed = counters, is_last
            self.given_s = time.monotonic()
            self.is_wanted = False
            self._changed.notify_all()


HISTOGRAMS = {
    "lookup": "from the arrival of a lookup until its reply is sent, on the server",
    "update": "what applying an update takes, without its wait",
    "queue": "how long an update waits on the server before it is applied",
}
"""Durations of a server, and help."""


class ServerReadings:
    """The metrics of a server, of ``Snapshots.ask``. Any thread may read."""

    def __init__(self, ask: Callable[[float], Counters | None]) -> None:
        self._ask = ask

    def read(self, means: Means) -> list[Reading]:
        """Return all metrics; none before the server is serving."""
        counters = self._ask(timeouts.METRICS_ASK_S)
        if counters is None:
            return []
        inference = counters.get("requests_lookup_inference", 0)
        training = counters.get("requests_lookup", 0) - inference
        of_means = {**counters, "requests_train": training}
        readings = []
        for name, (total, numbers, help_) in _MEANS.items():
            sum_ = of_means.get(total, 0) / (1e6 if total.endswith("_us") else 1)
            num = sum(of_means.get(number, 0) for number in numbers.split())
            mean = means.since_last(name, sum_, num)
            if mean is not None:
                readings.append(Reading(name, mean, help_))
        for name, (counter, help_) in _COUNTS.items():
            readings.append(Reading(name, counters.get(counter, 0), help_, "untyped"))
        if "increment_delay_ms" in counters:
            help_ = "time from the writing of an increment until a follower applied it"
            delay_s = counters["increment_delay_ms"] / 1000
            readings.append(Reading("inc_update_delay_sec", delay_s, help_))
        for name, help_ in HISTOGRAMS.items():
            sum_s = counters.get(f"{name}_us_sum", 0) / 1e6
            readings.append(
                Reading(
                    f"persia_{name}_seconds",
                    sum_s,
                    help_,
                    kind="histogram",
                    bins=bins_of(counters, name),
                )
            )
        return readings + readings_of(counters)


def readings_of(counters: Counters) -> list[Reading]:
    """Return the metrics that are counters as they are, but for histograms."""
    readings = []
    for name, value in counters.items():
        if name.rpartition("_us_")[0] in HISTOGRAMS:
            continue
        is_gauge = name in GAUGES or name.endswith("_max")
        kind: Literal["gauge", "counter"] = "gauge" if is_gauge else "counter"
        readings.append(Reading(f"persia_{name}", value, _PAGE, kind))
    return readings
