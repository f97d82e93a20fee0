"""Metrics of a trainer's tables, pushed by one thread for all its models.

    each pipeline's tally and semaphore  --read()-->  metrics pushes  -->  the gateway

They are kept when their model is dropped, so that no counter falls. A ``TrainCtx``
pushes for its tables itself.
"""

import atexit
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from persia_torchrec import env
from persia_torchrec.metrics.push import is_pushed, metrics_settings, push_metrics
from persia_torchrec.metrics.values import Reading
from persia_torchrec.pipeline.pipeline import BatchPipeline

if TYPE_CHECKING:
    from persia_torchrec.pipeline.staleness import StalenessSemaphore, Tally

_HELP = "of this trainer; see docs/metrics.md"


class TrainerCounts:
    """What became of the batches of one model. Any thread may read it.

    Attributes:
        num_skipped: backward passes that pushed nothing: not finite. The thread that
            trains counts them.
    """

    def __init__(self) -> None:
        self.num_skipped = 0
        self._pipelines: list[tuple[Tally, StalenessSemaphore]] = []

    def add(self, pipeline: BatchPipeline[Any, Any]) -> None:
        """Count the batches of one more collection."""
        self._pipelines.append((pipeline.tally, pipeline.semaphore))

    def read(self) -> dict[str, int]:
        """Return all counters, by name."""
        totals = [tally.total for tally, _ in self._pipelines]
        lookups = [semaphore.counts() for _, semaphore in self._pipelines]
        return {
            "gradients_missed": sum(total.num_missed for total in totals),
            "gradients_refused": sum(total.num_refused for total in totals),
            "gradients_evicted": sum(total.num_evicted for total in totals),
            "gradients": sum(total.num_gradients for total in totals),
            "updates_lost": sum(total.num_lost for total in totals),
            "batches_skipped": self.num_skipped,
            "batches_dropped": sum(tally.num_dropped for tally, _ in self._pipelines),
            "lookups": sum(counts["num_lookups"] for counts in lookups),
            "lookups_waited": sum(counts["num_waited"] for counts in lookups),
            "batches_lacking": sum(counts["num_lacking"] for counts in lookups),
        }


def readings(models: Iterable[TrainerCounts]) -> list[Reading]:
    """Return the counters of some models, each the sum of all."""
    each = [model.read() for model in models]
    return [
        Reading(f"persia_{name}", sum(model[name] for model in each), _HELP, "counter")
        for name in (each[0] if each else ())
    ]


class TrainerMetrics:
    """The pushes of this process, while it is a trainer of a job; for any thread."""

    _lock = threading.Lock()
    _models: ClassVar[list[TrainerCounts]] = []  # guarded by _lock
    _stop: ClassVar[Callable[[], None] | None] = None  # guarded by _lock

    @classmethod
    def begin(cls, model: TrainerCounts) -> None:
        """Push the counters of a model too, until the process ends.

        Nothing is pushed outside of a job, or where no gateway is named.
        """
        settings = metrics_settings()
        if env.job_store() is None or not is_pushed(settings):
            return
        with cls._lock:
            cls._models.append(model)
            if cls._stop is None:
                rank = env.get_rank()
                cls._stop = push_metrics("nn_worker", rank, settings, cls._read)
                atexit.register(cls.end)

    @classmethod
    def end(cls) -> None:
        """Push once more, and forget all models. May be called twice."""
        with cls._lock:
            stop, cls._stop = cls._stop, None
        if stop is not None:
            stop()
            atexit.unregister(cls.end)
        with cls._lock:
            cls._models.clear()

    @classmethod
    def _read(cls) -> list[Reading]:
        with cls._lock:
            models = list(cls._models)
        return readings(models)
