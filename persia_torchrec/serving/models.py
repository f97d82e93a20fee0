"""The models of an inference server, by name, each with its versions.

    load     opens a version beside those there are, predicts once, and makes it current
    unload   takes a version out; requests in progress end with it, then it is closed

A version is a dense model and the rows of the same checkpoint, so that an answer never
joins two. Its number is that of the checkpoint.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from persia_torchrec import timeouts
from persia_torchrec.errors import BatchError, PersiaError, ServerError
from persia_torchrec.persia.batch import PersiaBatch
from persia_torchrec.persia.signature import ModelSignature
from persia_torchrec.serving.batching import Floats, Inputs
from persia_torchrec.serving.predictor import Predictor, repeating

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
        self._add_others()

    def _add_others(self) -> None:
        """Make what has no labels."""
        self.degraded = Counter(
            "persia_serving_degraded_samples",
            "Samples that got the default answer, as embeddings did not answer",
            registry=self.registry,
        )
        self.age = Histogram(
            "persia_serving_rows_age_seconds",
            "Age of rows that follow a training, once a second at most",
            registry=self.registry,
            buckets=_AGES_S,
        )
        self.without_row = Gauge(
            "persia_serving_ids_without_row",
            "Ids that had no row, as those never trained, since the servers started",
            registry=self.registry,
        )
        self.in_progress = Gauge(
            "persia_serving_in_progress",
            "Requests in progress",
            registry=self.registry,
        )

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

    # Each of the labels is looked up once: the client library is slow to find it.

    def _of_version(self, model: str, version: str) -> tuple[Histogram, Counter]:
        found = self._series.get((model, version))
        if found is None:
            labels = model, version
            found = self._latency.labels(*labels), self._samples.labels(*labels)
            self._series[labels] = found
        return found

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
            "queue": none,
            "compute_input": none,
            "compute_infer": success,
            "compute_output": none,
            "cache_hit": none,
            "cache_miss": none,
        },
        "batch_stats": [],
    }


logger = logging.getLogger(__name__)


class UnknownModelError(PersiaError):
    """A request names a model or a version that is not loaded."""


class Answer(NamedTuple):
    """What is predicted for a batch.

    Attributes:
        output: float32 ``(B, ...)``.
        is_degraded: whether it is the default, as embeddings did not answer.
    """

    output: Floats
    is_degraded: bool = False


@dataclass
class Version:
    """One version of a model; ``close`` frees its rows."""

    predictor: Predictor
    close: Callable[[], None] = lambda: None
    num_users: int = 0

    @property
    def number(self) -> str:
        """The number of the checkpoint."""
        return self.predictor.model.version


Open = Callable[[str | None], Version]
"""Opens a version: of the checkpoint of a number, or the latest one for None."""


@dataclass
class Models:
    """One name with its versions. Any thread may call any method.

    Attributes:
        name: of the model.
        statistics: of all predictions.
        default_answer: what is predicted for each sample while embeddings do not
            answer; None: nothing, the request gets their error.
    """

    name: str
    open: Open | None = None
    statistics: Statistics = field(default_factory=Statistics)
    default_answer: float | None = None
    _versions: dict[str, Version] = field(default_factory=dict)
    _current: str | None = None
    _ready: tuple[float, dict[str, object]] | None = None
    _tell_s: float = 0.0

    def __post_init__(self) -> None:
        self._changed = threading.Condition()  # guards all of it
        self._loading = threading.Lock()

    def add(self, version: Version) -> None:
        """Make a version the current one, beside the others."""
        with self._changed:
            number = version.number
            previous = self._versions.get(number)
            self._versions[number] = version
            self._current, self._ready = number, None
        if previous is not None:
            self._drain(previous)
        logger.info("model %s: version %s is current", self.name, number)

    def load(self, number: str | None = None) -> str:
        """Open a version, the latest for None, and make it current; return its number.

        Raises:
            PersiaError: it cannot be opened; the current one stays.
        """
        if self.open is None:
            raise BatchError(
                "Only a model with its own servers can be loaded by a request. "
                "Received: embedding workers, whose rows stay."
            )
        with self._loading:  # two at once would need the memory of two
            version = self.open(number)
            self.add(version)
            return version.number

    def unload(self, number: str | None = None) -> None:
        """Take a version out, or all; requests in progress end with it."""
        with self._changed:
            numbers = [*self._versions] if number is None else [number]
            leaving = [self._require(n) for n in numbers]
            for n in numbers:
                del self._versions[n]
            if self._current not in self._versions:
                self._current = max(self._versions, key=_order, default=None)
            self._ready = None
        for version in leaving:
            self._drain(version)
        logger.info("model %s: version %s is unloaded", self.name, ", ".join(numbers))

    def close(self) -> None:
        """Unload all. May be called twice."""
        if self.versions():
            self.unload()

    def versions(self) -> list[str]:
        """Return the numbers of all versions, ascending."""
        with self._changed:
            return sorted(self._versions, key=_order)

    @contextlib.contextmanager
    def using(self, name: str, number: str | None) -> Iterator[Version]:
        """Hold a version, the current one for None, until the end of a block."""
        self.require_name(name)
        with self._changed:
            version = self._require(number)
            version.num_users += 1
        try:
            yield version
        finally:
            with self._changed:
                version.num_users -= 1
                self._changed.notify_all()

    def require_name(self, name: str) -> None:
        """Raise UnknownModelError for another name than the model's."""
        if name != self.name:
            raise UnknownModelError(
                f"The model must be {self.name!r}. Received: {name!r:.100}."
            )

    def signature(self, name: str, number: str | None = None) -> ModelSignature:
        """Return the inputs of a version by name, or raise BatchError if unknown."""
        with self.using(name, number) as version:
            return require_signature(version)

    def predict(
        self, version: Version, batch: PersiaBatch | Inputs, *, is_text: bool = False
    ) -> Answer:
        """Predict with a version that is held; see :meth:`Predictor.predict`."""
        size, predictor = batch.batch_size, version.predictor
        try:
            with self.statistics.timed(self.name, version.number, size):
                return Answer(predictor.predict(batch, is_text=is_text))
        except ServerError as exc:
            return self._default(exc, version, size)

    async def predict_together(
        self, version: Version, batch: PersiaBatch | Inputs, *, is_text: bool = False
    ) -> Answer:
        """Predict as :meth:`predict`, with other requests; no thread waits for it."""
        size, predictor = batch.batch_size, version.predictor
        try:
            with self.statistics.timed(self.name, version.number, size):
                output = await predictor.predict_together(batch, is_text=is_text)
                return Answer(output)
        except ServerError as exc:
            return self._default(exc, version, size)

    def _default(self, exc: ServerError, version: Version, size: int) -> Answer:
        """Return the default answer; without one, raise why it would be given."""
        if self.default_answer is None:
            raise exc
        self.statistics.degraded.inc(size)
        self._tell_degraded(exc)
        signature = version.predictor.model.signature
        shape = (1,) if signature is None else signature.output or ()
        value = np.float32(self.default_answer)
        return Answer(np.full((size, *shape), value), is_degraded=True)

    def _tell_degraded(self, exc: ServerError) -> None:
        """Log why answers are the default ones, once in a while."""
        with self._changed:
            now_s = time.monotonic()
            is_due = now_s >= self._tell_s
            self._tell_s = now_s + timeouts.MODEL_TELL_S if is_due else self._tell_s
        if is_due:
            logger.warning(
                "model %s answers %g: %s", self.name, self.default_answer, exc
            )

    def rows_age_s(self) -> float | None:
        """Return how old rows that follow a training are, at most; None: unknown."""
        health = self._ready
        following = None if health is None else health[1].get("following")
        if health is None or not isinstance(following, dict):
            return None
        asked_s = health[0] - timeouts.MODEL_READY_S
        return float(following["delay_s"]) + time.monotonic() - asked_s

    def health(self) -> dict[str, object]:
        """Return readiness, model and rows; asks the servers once a second at most."""
        with self._changed:
            if self._ready is not None and time.monotonic() < self._ready[0]:
                return self._ready[1]
        try:
            with self.using(self.name, None) as version:
                health = version.predictor.health()
                health["version"] = version.number
        except UnknownModelError as exc:
            health = {"ready": False, "error": str(exc)}
        if isinstance(num := health.get("ids_without_row"), int):
            self.statistics.without_row.set(num)
        following = health.get("following")
        if isinstance(following, dict):
            self.statistics.age.observe(following["delay_s"])
        with self._changed:
            previous = self._ready
            self._ready = time.monotonic() + timeouts.MODEL_READY_S, health
        if previous is not None and previous[1]["ready"] != health["ready"]:
            what = "ready" if health["ready"] else f"not ready: {health['error']}"
            logger.warning("model %s is %s", self.name, what)
        return health

    def require_ready(self) -> None:
        """Raise ServerError unless it is ready."""
        health = self.health()
        if not health["ready"]:
            raise ServerError(str(health["error"]), server=f"model {self.name}")

    def _require(self, number: str | None) -> Version:
        number = self._current if number is None else number
        if number is None or number not in self._versions:
            raise UnknownModelError(
                f"Model {self.name!r} must have this version; it has "
                f"{sorted(self._versions, key=_order) or 'none'}. Received: "
                f"{number if number is not None else 'none that is current'}."
            )
        return self._versions[number]

    def _drain(self, version: Version) -> None:
        """Close a version when the requests in progress have ended."""
        with self._changed:
            self._changed.wait_for(
                lambda: version.num_users == 0, timeouts.MODEL_DRAIN_S
            )
        version.predictor.close()
        version.close()


@contextlib.contextmanager
def following_checkpoints(
    models: Models, newest: Callable[[], str | None], poll_s: float = 1.0
) -> Iterator[None]:
    """Load each later checkpoint, rows and dense model together, during a block.

    ``newest`` returns the number of the latest complete one; None if there is none. The
    previous version is unloaded when the new one is current.
    """

    def load_newest() -> None:
        number, held = newest(), models.versions()
        if number is not None and number not in held:
            models.load(number)
            for previous in held:
                models.unload(previous)

    with repeating(load_newest, "version", poll_s):
        yield


def require_signature(version: Version) -> ModelSignature:
    """Return the inputs of a version by name, or raise BatchError if unknown."""
    model = version.predictor.model
    if model.signature is None:
        raise BatchError(
            f"{model.path} must have the names of its inputs, as files of "
            "dump_checkpoint(with_jit_model=True) do. Received: one without. Write the "
            "checkpoint again, or send PersiaBatch.to_bytes() to /predict."
        )
    return model.signature


def _order(number: str) -> tuple[int, str]:
    return int(number) if number.isdigit() else 0, number
