"""Metrics of a trainer: of its tables, its steps, its samples and its loss.

    each pipeline's tally and semaphore  --read()-->  a push, a scrape, a heartbeat
    run.step(loss=...), TrainCtx.backward  --tell-----------^

They are kept when their model is dropped, so that no counter falls. A ``TrainCtx``
publishes those of its tables itself.
"""

import atexit
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from persia_torchrec import env
from persia_torchrec.device.transfer import ToHost
from persia_torchrec.errors import ConfigError
from persia_torchrec.job.member import JobMember
from persia_torchrec.job.process_identity import IDS_OF, own_figures
from persia_torchrec.job.requests import MAX_FIGURE_NAME
from persia_torchrec.metrics.push import (
    is_published,
    publish_metrics,
)
from persia_torchrec.metrics.push_settings import metrics_settings
from persia_torchrec.metrics.values import Means, Reading
from persia_torchrec.parsing.decoding import require_at_least_1
from persia_torchrec.pipeline.pipeline import BatchPipeline

if TYPE_CHECKING:
    from persia_torchrec.pipeline.staleness import BatchStatistics, StalenessSemaphore
    from persia_torchrec.sharding.cache_settings import CacheCounts

_MAX_FEATURES = 100  # of which a heartbeat tells, those with the most ids
_HELP = "of this trainer; see docs/metrics.md"


class LatestLoss:
    """The last loss that was told, read without a wait for a GPU.

    The thread that trains tells it; any thread may read it.
    """

    def __init__(self) -> None:
        self._coming: ToHost | None = None
        self._value: float | None = None

    def tell(self, loss: torch.Tensor | float) -> None:
        """Note a loss; one of a GPU is copied, unless the copy before is on its way."""
        if not isinstance(loss, torch.Tensor):
            self._coming, self._value = None, float(loss)
            return
        if loss.numel() != 1:
            raise ConfigError(
                "loss must be a number, or a tensor with one element. Received: the "
                f"shape {tuple(loss.shape)}. Give loss.mean()."
            )
        if self._coming is not None:
            if not self._coming.is_here():
                return
            self._value = float(self._coming.read().item())
        given = loss if loss.dtype is torch.float32 else loss.detach().float()
        self._coming = ToHost(given, until_then=0.0)

    def read(self) -> float | None:
        """Return the last loss that is here; None: none was told."""
        coming = self._coming
        if coming is not None and coming.is_here():
            self._value = float(coming.read().item())
        return self._value


class TrainerCounts:
    """What became of the batches of one model. Any thread may read it.

    Attributes:
        num_skipped: backward passes that pushed nothing: not finite. The thread that
            trains counts them.
        cache: what its cache has done, if it has one.
    """

    def __init__(self) -> None:
        self.num_skipped = 0
        self.cache: CacheCounts | None = None
        self._pipelines: list[tuple[BatchStatistics, StalenessSemaphore]] = []

    def add(self, pipeline: BatchPipeline[Any, Any]) -> None:
        """Count the batches of one more collection."""
        self._pipelines.append((pipeline.tally, pipeline.semaphore))

    def read(self) -> dict[str, int]:
        """Return all counters, by name."""
        totals = [tally.total for tally, _ in self._pipelines]
        lookups = [semaphore.counts() for _, semaphore in self._pipelines]
        of_cache = {} if self.cache is None else self.cache.read()
        return of_cache | {
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
            "batches_evaluated": sum(
                tally.num_evaluated for tally, _ in self._pipelines
            ),
        }

    def tallies(self) -> list["BatchStatistics"]:
        """Return what is counted of each collection."""
        return [tally for tally, _ in self._pipelines]


def readings(models: Sequence[TrainerCounts], loss: LatestLoss) -> list[Reading]:
    """Return the metrics of a trainer: of some models the sum."""
    each = [model.read() for model in models]
    caches = [model.cache.gauges() for model in models if model.cache is not None]
    tallies = [tally for model in models for tally in model.tallies()]
    names = dict.fromkeys(name for model in each for name in model)
    found = []
    for name in names:
        total = sum(model.get(name, 0) for model in each)
        found.append(Reading(f"persia_{name}", total, _HELP, "counter"))
    for name in dict.fromkeys(name for gauges in caches for name in gauges):
        most = max(gauges[name] for gauges in caches)
        found.append(Reading(f"persia_{name}", most, _HELP))
    # Each collection counts a batch.
    busiest = max(tallies, key=lambda tally: tally.num_pushed, default=None)
    if busiest is None:
        return found
    waited_s = sum(tally.waited_ns() for tally in tallies) / 1e9
    samples = max(tally.num_samples for tally in tallies)
    steps = busiest.steps
    found += [
        Reading("persia_step", _step(busiest), "steps that are trained"),
        Reading("persia_samples", samples, "samples looked up for training", "counter"),
        Reading("persia_row_wait_seconds", waited_s, "waits for rows", "counter"),
        Reading(
            "persia_step_seconds",
            steps.total_ns / 1e9,
            "time between two updates",
            "histogram",
            bins=tuple(steps.bins),
        ),
    ]
    name, text = "persia_other_passes", "passes with other batches after a resume"
    found.append(Reading(name, TrainerMetrics.num_other_passes, text, "counter"))
    num_ids: Counter[str] = Counter()
    for (_, feature), num in _ids_of(tallies):
        num_ids[feature] += num
    name, text = "persia_feature_ids", "ids of a feature, looked up for training"
    found += [Reading(name, n, text, "counter", f) for f, n in num_ids.items()]
    if (last := TrainerMetrics.last_step) is not None:
        found.append(Reading("persia_last_step", last, "at which the training ends"))
    if (latest := loss.read()) is not None:
        found.append(Reading("persia_loss", latest, "the last loss that was told"))
    return found


def _ids_of(tallies: Sequence["BatchStatistics"]) -> list[tuple[tuple[str, str], int]]:
    """Return how many ids of each table and feature were looked up for training."""
    return [one for tally in tallies for one in [*tally.num_ids.items()]]


def _step(tally: "BatchStatistics") -> int:
    """Return the step of the training, that before a restart included."""
    member = JobMember.current
    return member.progress() if member and member.progress else tally.num_pushed


class TrainerMetrics:
    """The metrics of this process, while it is a trainer of a job; for any thread.

    Attributes:
        last_step: at which the training ends, as far as that is known.
        num_other_passes: that had other batches after a resume than before.
    """

    loss: ClassVar = LatestLoss()
    last_step: ClassVar[int | None] = None
    num_other_passes: ClassVar[int] = 0
    _lock = threading.Lock()
    _models: ClassVar[list[TrainerCounts]] = []  # guarded by _lock
    _stop: ClassVar[Callable[[], None] | None] = None  # guarded by _lock

    @classmethod
    def begin(cls, model: TrainerCounts) -> None:
        """Publish the metrics of a model too, until the process ends.

        Nothing is published outside of a job, nor pushed where no gateway is named.
        """
        if env.job_store() is None:
            return
        cls.watch(model)
        settings = metrics_settings()
        if not is_published(settings):
            return
        with cls._lock:
            if cls._stop is None:
                rank = env.get_rank()
                cls._stop = publish_metrics("nn_worker", rank, settings, cls._read)
                atexit.register(cls.end)

    @classmethod
    def watch(cls, model: TrainerCounts) -> None:
        """Let the job know with each heartbeat how the training of a model goes."""
        with cls._lock:
            cls._models.append(model)
        if JobMember.current is not None:
            JobMember.current.figures = cls._figures

    @classmethod
    def ends_at(cls, last_step: int | None) -> int | None:
        """Note the step at which the training ends, if it is known, and return it.

        Raises:
            ConfigError: it is not at least 1.
        """
        require_at_least_1(last_step=last_step)
        cls.last_step = last_step
        return last_step

    @classmethod
    def expect(
        cls, batches: object, num_steps: int, num_batches: int, num_passes: int = 0
    ) -> None:
        """Note the step at which a pass over batches ends, if they have a length.

        ``num_batches`` of the pass are trained, by the last of ``num_steps`` steps;
        ``num_passes`` more of them follow.
        """
        cls.last_step = None
        if isinstance(batches, Sized):
            with contextlib.suppress(TypeError):  # a DataLoader of an IterableDataset
                left = max(len(batches) - num_batches, 0)
                cls.last_step = num_steps + left + num_passes * len(batches)

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
    def _read(cls, _: Means | None = None) -> list[Reading]:
        with cls._lock:
            models = list(cls._models)
        return readings(models, cls.loss)

    @classmethod
    def _figures(cls) -> Mapping[str, float]:
        with cls._lock:
            models = list(cls._models)
        found = {
            reading.name.removeprefix("persia_"): reading.value
            for reading in readings(models, cls.loss)
            if not (reading.bins or reading.feature)
        }
        ids = _ids_of([tally for model in models for tally in model.tallies()])
        busiest = sorted(ids, key=lambda one: one[1], reverse=True)[:_MAX_FEATURES]
        for (table, feature), num in busiest:
            name = f"{IDS_OF}{table}/{feature}"
            if len(name) <= MAX_FIGURE_NAME:
                found[name] = num
        return {**found, **own_figures()}
