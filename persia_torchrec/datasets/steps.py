"""Rows in their order, cut into steps and batches, and batches of other kinds."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
import torch.utils.data
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from persia_torchrec.arrays import Floats
from persia_torchrec.datasets import reading
from persia_torchrec.datasets.columns import Columns, Int64s, Rows
from persia_torchrec.device.batches import TorchRecBatch
from persia_torchrec.device.transfer import join_arrays
from persia_torchrec.errors import ConfigError
from persia_torchrec.parsing.decoding import require_at_least_1

logger = logging.getLogger(__name__)

_NUM_SHOWN = 5  # values of a label


class Settings(NamedTuple):
    """Which rows a dataset yields, in which order and batches."""

    batch_size: int
    partition_count: int
    partition_index: int
    drop_remainder: bool
    num_parallel_reads: int
    shuffle: int
    seed: int
    min_batch_size: int
    micro_batches: int
    rows: Int64s | None
    pin_memory: bool | None

    @property
    def shuffle_rows(self) -> int:
        """Rows that are put in a random order together, if any are."""
        return reading.SHUFFLE_ROWS if self.shuffle == 1 else self.shuffle

    @property
    def min_rows(self) -> int:
        """Rows that a step has at least."""
        return self.min_batch_size * self.micro_batches

    def check(self) -> None:
        """Raise ConfigError if a setting is out of range."""
        names = ["batch_size", "partition_count", "num_parallel_reads"]
        names += ["min_batch_size", "micro_batches"]
        require_at_least_1(**{name: getattr(self, name) for name in names})
        if not 0 <= self.partition_index < self.partition_count:
            raise ConfigError(
                f"partition_index must be in [0, {self.partition_count}). Received: "
                f"{self.partition_index}."
            )
        if self.min_rows > self.batch_size:
            raise ConfigError(
                "min_batch_size must be at most batch_size / micro_batches. Received: "
                f"{self.min_batch_size}, {self.batch_size} / {self.micro_batches}."
            )
        if self.seed < 0 or self.shuffle < 0:
            raise ConfigError(
                "seed must be at least 0, and shuffle a boolean or a number of rows. "
                f"Received: seed {self.seed}, shuffle {self.shuffle}."
            )


class RowSettings(TypedDict, total=False):
    """The keyword arguments of :class:`RowDataset`."""

    partition_count: int
    partition_index: int
    drop_remainder: bool
    num_parallel_reads: int
    shuffle: bool | int
    seed: int
    min_batch_size: int
    micro_batches: int
    rows: Int64s | None
    pin_memory: bool | None
    convert: Callable[[TorchRecBatch], Any] | None


class Span(NamedTuple):
    """Consecutive rows of a block."""

    block: Rows
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """How many they are."""
        return self.stop - self.start


def in_steps(blocks: Iterator[Rows], settings: Settings) -> Iterator[list[list[Span]]]:
    """Yield each step's parts; the rows of one are of one block, or of several."""
    size, least = settings.batch_size, settings.min_rows
    enough = size + (least if least > 1 else 0)  # so that the last one can join
    waiting: deque[Span] = deque()
    num_rows = 0

    def cut(wanted: int) -> list[Span]:
        spans = []
        while wanted:
            span = waiting.popleft()
            stop = min(span.start + wanted, span.stop)
            spans.append(span._replace(stop=stop))
            wanted -= stop - span.start
            if stop < span.stop:
                waiting.appendleft(span._replace(start=stop))
        return spans

    def parts(num_taken: int) -> list[list[Span]]:
        each, rest = divmod(num_taken, settings.micro_batches)
        return [cut(each + (part < rest)) for part in range(settings.micro_batches)]

    for block in blocks:
        waiting.append(Span(block, 0, block.num_rows))
        num_rows += block.num_rows
        while num_rows >= enough:
            num_rows -= size
            yield parts(size)
    if 0 < num_rows < least and not settings.drop_remainder:
        raise ConfigError(
            f"A step must have at least {least} rows, micro_batches * min_batch_size. "
            f"Received: {num_rows} that are left, of a loaded state or of a small part "
            "of the files. Load a state with the settings that it was saved with."
        )
    while num_rows >= (size if settings.drop_remainder else 1):
        joins = size < num_rows < size + least and not settings.drop_remainder
        taken = num_rows if joins else min(size, num_rows)
        num_rows -= taken
        yield parts(taken)


def batch_of(
    spans: Sequence[Span], num_rows: int, columns: Columns, *, is_pinned: bool
) -> TorchRecBatch:
    """Return the rows, of so many of a step, as tensors."""
    join = partial(join_arrays, is_pinned=is_pinned)
    blocks = [span.block.part(span.start, span.stop) for span in spans]
    every = [block.ids[f] for f in range(len(columns.ids)) for block in blocks]
    weights = None
    if any(column.is_weighted for column in columns.ids):
        weights = join([_weights_of(ids.values, ids.weights) for ids in every])

    def numbers(column: int, of_rows: Callable[[Rows], list[Floats]]) -> torch.Tensor:
        return join([of_rows(block)[column] for block in blocks])

    labels, dense = range(len(columns.labels)), range(len(columns.dense))
    features = (numbers(i, lambda rows: rows.dense) for i in dense)
    return TorchRecBatch(
        id_features=KeyedJaggedTensor(
            keys=[column.name for column in columns.ids],
            values=join([ids.values for ids in every]),
            weights=weights,
            lengths=join([ids.lengths() for ids in every]),
        ),
        labels=tuple(numbers(i, lambda rows: rows.labels) for i in labels),
        label_names=tuple(column.name for column in columns.labels),
        dense_features=tuple(f if f.ndim > 1 else f.unsqueeze(1) for f in features),
        dense_names=tuple(column.name for column in columns.dense),
        fraction=sum(block.num_rows for block in blocks) / num_rows,
    )


def _weights_of(values: Int64s, weights: Floats | None) -> Floats:
    return np.ones(len(values), np.float32) if weights is None else weights


def torchrec_batch(batch: TorchRecBatch) -> Batch:
    """Return a batch as TorchRec's own: ``convert=`` of a dataset.

    Returns:
        ``dense_features`` float32 ``(B, sum of sizes)``, ``sparse_features``, and
        ``labels`` float32 ``(B,)``, or ``(B, labels)`` of several.
    """
    dense, labels = batch.dense_features, batch.labels
    num_rows = batch.id_features.stride()
    return Batch(
        torch.cat(dense, 1) if dense else torch.empty(num_rows, 0, device="cpu"),
        batch.id_features,
        labels[0] if len(labels) == 1 else torch.stack([*labels], 1),
    )


def plain_tensors(batch: TorchRecBatch) -> dict[str, torch.Tensor]:
    """Return a batch as tensors by name: ``convert=`` of a dataset.

    Returns:
        Of labels and dense features the tensor, of each ID feature ``NAME.values`` and
        ``NAME.lengths``, and ``NAME.weights`` if it has some.
    """
    tensors = dict(zip(batch.label_names or (), batch.labels, strict=True))
    tensors |= zip(batch.dense_names or (), batch.dense_features, strict=True)
    for name, feature in batch.id_features.to_dict().items():
        tensors[f"{name}.values"] = feature.values()
        tensors[f"{name}.lengths"] = feature.lengths()
        if (weights := feature.weights_or_none()) is not None:
            tensors[f"{name}.weights"] = weights
    return tensors


def tell_epoch(
    missing: Mapping[str, int], others: Mapping[str, Counter[str]], columns: Columns
) -> None:
    """Log what an epoch has shown: missing values, labels without a positive."""
    if missing:
        logger.info("missing values of the epoch, by column: %s", missing)
    positives = {c.name: c.positive for c in columns.labels}
    for name, counts in others.items():
        logger.warning(
            "%s has no row with the positive value %r in this epoch: all labels "
            "are 0. Most frequent values: %s",
            name,
            positives[name],
            dict(counts.most_common(_NUM_SHOWN)),
        )


def worker_of_loader() -> tuple[int, int] | None:
    """Return number and count of this worker of a DataLoader; None: it is none."""
    info = torch.utils.data.get_worker_info()
    return None if info is None else (info.id, info.num_workers)
