"""Loaders of numbered samples, as people have them; a worker imports little here."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from persia_torchrec.data import (
    IdColumn,
    ParquetDataset,
    WorkQueue,
    row_group_slices,
)

BATCH_SIZE = 4


@dataclass(frozen=True)
class Given:
    """What loaders are made of.

    Attributes:
        folder: with ``rows.parquet``, which has the samples of all trainers.
        num_samples: of one trainer.
        shuffle: whether each pass has an order of its own.
        num_passes: of a ``WorkQueue``.
        rank: of this trainer.
        num_trainers: which divide the file.
    """

    folder: Path
    num_samples: int
    shuffle: bool
    num_passes: int
    rank: int = 0
    num_trainers: int = 1

    @property
    def samples(self) -> range:
        """The samples of this trainer."""
        return range(self.rank, self.num_samples * self.num_trainers, self.num_trainers)

    def write_rows(self, row_group_size: int) -> None:
        """Write the file of all trainers."""
        table = pa.table({"x": range(self.num_samples * self.num_trainers)})
        path = self.folder / "rows.parquet"
        pq.write_table(table, path, row_group_size=row_group_size)


def rows(given: Given) -> ParquetDataset:
    """Return the dataset of this package."""
    return ParquetDataset(
        given.folder / "rows.parquet",
        BATCH_SIZE,
        [IdColumn("x", is_text=False)],
        partition_count=given.num_trainers,
        partition_index=given.rank,
        shuffle=given.shuffle,
    )


def queued_rows(given: Given) -> ParquetDataset:
    """Return the dataset of this package, of what trainers take from a queue."""
    slices = row_group_slices([given.folder / "rows.parquet"])
    queue = WorkQueue(slices, num_epochs=given.num_passes, shuffle=given.shuffle)
    return ParquetDataset(queue, BATCH_SIZE, [IdColumn("x", is_text=False)])


class Samples(IterableDataset):  # type: ignore[type-arg]
    """Samples without a position, in an order of torch's random numbers."""

    def __init__(self, given: Given) -> None:
        self._given = given

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        samples = np.array(self._given.samples)
        if self._given.shuffle and info is None:
            samples = samples[torch.randperm(len(samples)).numpy()]
        numbers = samples.tolist()
        yield from numbers if info is None else numbers[info.id :: info.num_workers]


class Batches:
    """A list of batches, in an order of torch's random numbers."""

    def __init__(self, given: Given) -> None:
        self._given = given

    def __iter__(self) -> Iterator[torch.Tensor]:
        samples = torch.tensor(self._given.samples)
        if self._given.shuffle:
            samples = samples[torch.randperm(len(samples))]
        yield from samples.split(BATCH_SIZE)


class Sampler(torch.utils.data.Sampler):  # type: ignore[type-arg]
    """Samples that torch's random or sequential sampler chooses."""

    def __init__(self, given: Given) -> None:
        kinds = torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler
        self._samples = given.samples
        self._sampler = kinds[not given.shuffle](given.samples)

    def __iter__(self) -> Iterator[int]:
        return map(self._samples.__getitem__, self._sampler)

    def __len__(self) -> int:
        return len(self._samples)


def of_nodes(given: Given) -> Any:
    """Return a loader of torchdata's nodes."""
    return nodes.Loader(nodes.Batcher(nodes.SamplerWrapper(Sampler(given)), BATCH_SIZE))


def streaming(given: Given) -> Any:
    """Return a stream of Hugging Face."""
    import datasets  # which tests do not install

    samples = datasets.Dataset.from_dict({"x": [*given.samples]})
    stream = samples.to_iterable_dataset(num_shards=5)
    return stream.shuffle(seed=1, buffer_size=1) if given.shuffle else stream


Make = Callable[[Given], Any]

LOADERS: dict[str, Make] = {
    "batches of a class": Batches,
    "ParquetDataset": rows,
    "streaming of Hugging Face": lambda g: streaming(g).batch(BATCH_SIZE),
    "torchdata.nodes": of_nodes,
    "torchdata.nodes of ParquetDataset": lambda g: nodes.Loader(
        nodes.IterableWrapper(rows(g))
    ),
}
SPAWNED = "DataLoader, 2 workers, spawned"
WORK_QUEUE = "ParquetDataset of a WorkQueue"


def add(kind: str, loader: Callable[..., Any], how: str, given: dict[str, Any]) -> None:
    """Add the loaders of a class of torch's with some settings of workers."""
    name = f"{kind}{how}"
    LOADERS[name] = lambda g: loader(g.samples, BATCH_SIZE, shuffle=g.shuffle, **given)
    LOADERS[f"{name}, of ParquetDataset"] = lambda g: loader(
        rows(g), batch_size=None, **given
    )
    LOADERS[f"{name}, of a stream"] = lambda g: loader(
        streaming(g), BATCH_SIZE, **given
    )
    LOADERS[f"{name}, iterable"] = lambda g: loader(Samples(g), BATCH_SIZE, **given)


for _class in (DataLoader, StatefulDataLoader):
    add(_class.__name__, _class, "", {})
    _workers = {"num_workers": 2, "multiprocessing_context": "fork"}
    add(_class.__name__, _class, ", 2 workers", _workers)
    add(
        _class.__name__, _class, ", persistent", _workers | {"persistent_workers": True}
    )

OF_JOBS: dict[str, Make] = LOADERS | {
    SPAWNED: lambda g: DataLoader(
        g.samples,
        BATCH_SIZE,
        shuffle=g.shuffle,
        num_workers=2,
        multiprocessing_context="spawn",
    ),
    WORK_QUEUE: queued_rows,
}


def has_state(loader: str) -> bool:
    """Return whether a loader of a name can be in ``state``."""
    return not loader.startswith(("DataLoader", "batches of a class"))
