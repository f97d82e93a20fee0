"""What an inference server counts: requests, predictions, and the age of its rows.

Each metric of a model has the labels ``model`` and, where versions differ, ``version``.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

_BUCKETS_S = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)
_AGES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
_LABELS = ("model", "version")


@dataclass
class Totals:
    """Of one version of a model: numbers of requests and samples, nanoseconds."""

    num_succeeded: int = 0
    num_failed: int = 0
    num_samples: int = 0
    succeeded_ns: int = 0
    failed_ns: int = 0
    num_queued: int = 0
    queued_ns: int = 0
    last_ms: int = 0  # since 1970


@dataclass
class Statistics:
    """Counts what was predicted. Any thread may call any method."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[tuple[str, str], Totals] = {}
        self._series: dict[tuple[str, str], tuple[Histogram, Counter]] = {}
        self._statuses: dict[tuple[str, str], Counter] = {}
        self._queues: dict[str, Histogram] = {}
        self._requests = Counter(
            "persia_serving_requests",
            "Requests by their status",
            ("protocol", "status"),
            registry=self.registry,
        )
        self._samples = Counter(
            "persia_serving_samples",
            "Samples predicted",
            _LABELS,
            registry=self.registry,
        )
        self._latency = Histogram(
            "persia_serving_predict_seconds",
            "Seconds of a prediction, lookup and model",
            _LABELS,
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self._add_times()
        self._add_others()

    def _add_times(self) -> None:
        """Make the histograms of what is not the prediction itself."""
        self._request = Histogram(
            "persia_serving_request_seconds",
            "Seconds of a prediction, from the first byte to the last of its answer",
            ("protocol",),
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self._protocols = {one: self._request.labels(one) for one in ("http", "grpc")}
        self._queue = Histogram(
            "persia_serving_queue_seconds",
            "Seconds that a request waits for a thread, or for its batch",
            ("model",),
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self.loop_delay = Histogram(
            "persia_serving_event_loop_delay_seconds",
            "Seconds by which the event loop of HTTP is late, four times a second",
            buckets=_BUCKETS_S,
            registry=self.registry,
        )

    def _add_others(self) -> None:
        """Make what does not depend on the version."""
        self.degraded = Counter(
            "persia_serving_degraded_samples",
            "Samples that got the default answer, as embeddings did not answer",
            ("model",),
            registry=self.registry,
        )
        self.short_circuited = Counter(
            "persia_serving_short_circuited_requests",
            "Requests for which embeddings that hang were not asked",
            ("model",),
            registry=self.registry,
        )
        self.age = Histogram(
            "persia_serving_rows_age_seconds",
            "Age of rows that follow a training, once a second at most",
            ("model",),
            registry=self.registry,
            buckets=_AGES_S,
        )
        self.without_row = Gauge(
            "persia_serving_ids_without_row",
            "Ids that had no row, as those never trained, since the servers started",
            ("model",),
            registry=self.registry,
        )
        self.in_progress = Gauge(
            "persia_serving_in_progress",
            "Requests in progress",
            registry=self.registry,
        )

    def begin(self, model: str) -> None:
        """Count from 0 on what may never happen to a model, as a rate needs the 0."""
        for counter in (self.degraded, self.short_circuited):
            counter.labels(model)

    @contextmanager
    def timed(self, model: str, version: str, num_samples: int) -> Iterator[None]:
        """Time a prediction, and count whether it succeeds."""
        start_ns, has_failed = time.perf_counter_ns(), True
        try:
            yield
            has_failed = False
        finally:
            took_ns = time.perf_counter_ns() - start_ns
            with self._lock:
                totals = self._totals.setdefault((model, version), Totals())
                totals.last_ms = time.time_ns() // 10**6
                if has_failed:
                    totals.num_failed += 1
                    totals.failed_ns += took_ns
                else:
                    totals.num_succeeded += 1
                    totals.succeeded_ns += took_ns
                    totals.num_samples += num_samples
                if not has_failed:
                    latency, samples = self._of_version(model, version)
                    latency.observe(took_ns / 1e9)
                    samples.inc(num_samples)

    def answered(self, protocol: str, start_s: float) -> None:
        """Note that the last byte of a prediction is sent; of ``perf_counter()``."""
        self._protocols[protocol].observe(time.perf_counter() - start_s)

    def queued(self, model: str, version: str, waited_s: float) -> None:
        """Note how long a request has waited until work on it began."""
        with self._lock:
            totals = self._totals.setdefault((model, version), Totals())
            totals.num_queued += 1
            totals.queued_ns += int(waited_s * 1e9)
            queue = self._queues.get(model)
            if queue is None:
                queue = self._queues[model] = self._queue.labels(model)
        queue.observe(waited_s)

    # Each of the labels is looked up once: the client library is slow to find it.

    def _of_version(self, model: str, version: str) -> tuple[Histogram, Counter]:
        found = self._series.get((model, version))
        if found is None:
            labels = model, version
            found = self._latency.labels(*labels), self._samples.labels(*labels)
            self._series[labels] = found
        return found

    def forget(self, model: str, version: str) -> None:
        """Drop what was counted for a version, which is unloaded."""
        with self._lock:
            self._totals.pop((model, version), None)
            if self._series.pop((model, version), None) is not None:
                self._latency.remove(model, version)
                self._samples.remove(model, version)

    def count(self, protocol: str, status: str) -> None:
        """Count a request by its status."""
        counter = self._statuses.get((protocol, status))
        if counter is None:
            counter = self._requests.labels(protocol, status)
            self._statuses[protocol, status] = counter
        counter.inc()

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def of_versions(self, model: str, versions: list[str]) -> list[Mapping[str, Any]]:
        """Return ``model_stats`` of the protocol's extension of statistics."""
        with self._lock:
            found = {v: self._totals.get((model, v), Totals()) for v in versions}
            return [_describe(model, version, t) for version, t in found.items()]


def _describe(model: str, version: str, totals: Totals) -> Mapping[str, Any]:
    none = {"count": 0, "ns": 0}
    success = {"count": totals.num_succeeded, "ns": totals.succeeded_ns}
    return {
        "name": model,
        "version": version,
        "last_inference": totals.last_ms,
        "inference_count": totals.num_samples,
        "execution_count": totals.num_succeeded,
        "inference_stats": {
            "success": success,
            "fail": {"count": totals.num_failed, "ns": totals.failed_ns},
            "queue": {"count": totals.num_queued, "ns": totals.queued_ns},
            "compute_input": none,
            "compute_infer": success,
            "compute_output": none,
            "cache_hit": none,
            "cache_miss": none,
        },
        "batch_stats": [],
    }
