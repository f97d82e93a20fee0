"""The loader: batches whose rows are already on their way.

    dataset -> begin the pull -> wait until the trainer asks -> batch

A batch's pull begins as soon as the dataset has it, up to ``forward_buffer_size``
batches before the trainer asks for it, and within the staleness bound.

PERSIA's ``DataLoader`` is given no context: it belongs to the one that is entered. That
is the only thing in this package that is known without being passed on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from persia_torchrec.data.dataset import (
    IterableDatasetBase,
    in_background,
    require_at_least_1,
)
from persia_torchrec.embedding.data import Label, NonIDTypeFeature
from persia_torchrec.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class PersiaTrainingBatch:
    """A batch as the trainer gets it; a context makes tensors of it.

    Attributes:
        pull: the batch's rows, on their way.
        non_id_type_features: dense features.
        labels: labels.
        is_training: whether a backward pass is expected.
        meta: the user's own bytes.
        batch_id: its number among all batches of all data loaders.
    """

    pull: Any
    non_id_type_features: tuple[NonIDTypeFeature, ...]
    labels: tuple[Label, ...]
    is_training: bool
    meta: bytes | None
    batch_id: int | None


class LookupSettings(NamedTuple):
    """How far lookups may be ahead of the training: arguments of a ``DataLoader``."""

    forward_buffer_size: int
    num_workers: int
    embedding_staleness: int | None


entered: list[Any] = []
"""Contexts, the current one last; loaders belong to the last ``LookupCtx``."""


def leave_context(context: object) -> None:
    """Take a context back, and with one that looks up any entered within it.

    One that only sends may be entered and left by another thread of this process.
    """
    if context not in entered:
        return
    index = entered.index(context)
    within = entered[index + 1 :]
    if _looks_up(context):
        within = [other for other in within if not _looks_up(other)]
    entered[index:] = within


def entered_context() -> Any:
    """Return the innermost context that looks up, or None."""
    return next(filter(_looks_up, reversed(entered)), None)


def _looks_up(context: object) -> bool:
    return hasattr(context, "start_lookup")


class DataLoader:
    """Iterate over a dataset's batches, with their rows on the way.

    Args:
        dataset: where the batches come from.
        forward_buffer_size: batches looked up ahead, at least 1.
        timeout_ms: how long to wait for a batch.
        num_workers: batches looked up at once, at least 1; the context's
            ``threadpool_worker_size`` may allow fewer. A reproducible loader looks up
            one at a time.
        reproducible: batches in the order in which the data loaders numbered them.
            Together with ``embedding_staleness=1`` two runs are equal to the last bit.
        embedding_staleness: training batches that may be between lookup and update, at
            least 1; 1 is the schedule without stale rows. None: as many as the buffers
            hold.
    """

    def __init__(
        self,
        dataset: IterableDatasetBase,
        forward_buffer_size: int = 10,
        timeout_ms: int = 600_000,
        num_workers: int = 10,
        reproducible: bool = False,
        embedding_staleness: int | None = None,
    ) -> None:
        require_at_least_1(
            forward_buffer_size=forward_buffer_size,
            timeout_ms=timeout_ms,
            num_workers=num_workers,
            embedding_staleness=embedding_staleness,
        )
        self.dataset = dataset
        self._timeout_s = timeout_ms / 1000
        self._reproducible = reproducible
        num_workers = 1 if reproducible else num_workers
        self._settings = LookupSettings(
            forward_buffer_size, num_workers, embedding_staleness
        )

    def __iter__(self) -> Iterator[PersiaTrainingBatch]:
        """Yield the batches of one pass; raise DataflowError if none comes in time."""
        context = entered_context()
        if context is None:
            raise ConfigError(
                "A DataLoader must be iterated over inside a context. "
                "Use `with TrainCtx(...):` or `with eval_ctx(...):` around the loop."
            )
        settings = self._settings
        batches = self.dataset.batches(self._timeout_s, in_order=self._reproducible)
        started = (context.start_lookup(batch, settings) for batch in batches)
        ahead = settings.forward_buffer_size
        return in_background(started, ahead, "lookups ahead", context.note_wait)
