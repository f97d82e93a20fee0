"""The data and the models of the benchmark ``quality``: those of the examples.

Dimension key:
    N: samples
    F: features, an id each
    L: labels
"""

import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torchrec.models.dlrm import DenseArch, InteractionArch, OverArch

from persia_torchrec.embedding.optim import Adagrad, Adam, Optimizer

_EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
_CHUNK = 4096  # rows that are read at once


class Part(NamedTuple):
    """Samples: float32 ``(N, K)``, int64 ``(N, F)`` from 0 on, float32 ``(N, L)``."""

    dense: torch.Tensor
    ids: torch.Tensor
    labels: torch.Tensor

    def take(self, which: Any) -> "Part":
        """Return some of the samples."""
        return Part(*(tensor[which] for tensor in self))


@dataclass(frozen=True, kw_only=True)
class Task:
    """A data set, and a model that learns it.

    Attributes:
        labels: names of the tasks, in the order of ``Part.labels``.
        make_dense: makes what gives logits, or probabilities, ``(N, L)`` of the dense
            numbers and the pooled rows ``(N, F * dim)``.
        loss: of its output and the labels.
        dense_optimizer: of its parameters.
        rows: the optimizer of the rows on servers; ``plain_rows`` is torch's.
        std: of the rows before the first step.
    """

    train: Part
    test: Part
    labels: tuple[str, ...]
    dim: int
    batch_size: int
    epochs: int
    make_dense: Callable[[], nn.Module]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    dense_optimizer: Callable[[Any], torch.optim.Optimizer]
    rows: Optimizer
    plain_rows: Callable[[Any], torch.optim.Optimizer]
    std: float

    @property
    def names(self) -> list[str]:
        """Names of the tables, and of their features."""
        return [f"feature{f}" for f in range(self.train.ids.shape[1])]

    def num_ids(self) -> list[int]:
        """Return how many ids each feature has."""
        both = torch.cat([self.train.ids, self.test.ids])
        return [int(most) + 1 for most in both.amax(dim=0)]


def example(path: str) -> ModuleType:
    """Return a module of the examples, which are no package."""
    folder = str((_EXAMPLES / path).parent)
    if folder not in sys.path:
        sys.path.append(folder)  # of the modules that it imports
    name = f"quality_{path.replace('/', '_').removesuffix('.py')}"
    spec = importlib.util.spec_from_file_location(name, _EXAMPLES / path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def adult_task(folder: Path | None) -> Task:
    """PERSIA's example: its network, optimizers and batches."""
    obtain, model = example("adult_income/obtain.py"), example("adult_income/model.py")
    parts = obtain.load_adult(folder) if folder else obtain.make_up()
    train, test = (
        Part(*map(torch.from_numpy, (p.dense, p.ids.astype(np.int64), p.labels)))
        for p in parts
    )

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dnn = model.DNN()

        def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
            return self.dnn([dense], [pooled])  # type: ignore[no-any-return]

    return Task(
        train=train,
        test=test,
        labels=("income",),
        dim=model.EMBEDDING_DIM,
        batch_size=128,
        epochs=1,
        make_dense=Network,
        loss=nn.BCELoss(),
        dense_optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        rows=Adagrad(lr=1e-2),
        plain_rows=lambda p: torch.optim.Adagrad(
            p, lr=1e-2, initial_accumulator_value=1e-2, eps=1e-10
        ),
        std=0.01,
    )


def census_task(folder: Path, epochs: int) -> Task:
    """DeepRec's example: PLE, corrected, with two tasks."""
    data, model = example("ple/data.py"), example("ple/model.py")
    opened = data.open_data(data.CENSUS, folder, _CHUNK, ev=False)

    def part(batches: Any) -> Part:
        given = list(batches)
        keys = list(data.CENSUS.features)
        ids = [b.id_features.values().view(len(keys), -1).T for b in given]
        labels = [torch.stack(tuple(b.labels), dim=1) for b in given]
        both = torch.cat(ids), torch.cat(labels)
        return Part(torch.zeros(len(both[0]), 0), *both)

    train, test = compact(part(opened.train), part(opened.test))
    width = train.ids.shape[1] * model.DIM

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ple = model.DenseModel("ple", width, corrected=True)

        def forward(self, _: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
            return self.ple(pooled)  # type: ignore[no-any-return]

    return Task(
        train=train,
        test=test,
        labels=data.CENSUS.labels,
        dim=model.DIM,
        batch_size=512,
        epochs=epochs,
        make_dense=Network,
        loss=nn.BCEWithLogitsLoss(),
        dense_optimizer=lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
        rows=Adam(lr=1e-3),
        plain_rows=lambda p: torch.optim.SparseAdam(list(p), lr=1e-3),
        std=model.CORRECTED_STD,
    )


class Dlrm(nn.Module):
    """TorchRec's DLRM without its tables."""

    def __init__(self, num_dense: int, num_features: int, dim: int) -> None:
        super().__init__()
        self.bottom = DenseArch(num_dense, [64, dim])
        self.interaction = InteractionArch(num_features)
        width = dim + num_features + math.comb(num_features, 2)
        self.over = OverArch(width, [128, 64, 1])
        self._shape = num_features, dim

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """Return logits ``(N, 1)``."""
        rows = pooled.view(-1, *self._shape)
        return self.over(self.interaction(self.bottom(dense), rows))  # type: ignore[no-any-return]


def dlrm_task(rows: int) -> Task:
    """TorchRec's DLRM on lines of Criteo's format, whose labels were planted."""
    criteo = example("dlrm/criteo.py")

    def part(num: int, seed: int) -> Part:
        [batch] = criteo.batches(criteo.generate_lines(num, seed), num)
        ids = batch.sparse_features.values().view(len(criteo.CATEGORIES), -1).T
        return Part(batch.dense_features, ids, batch.labels[:, None])

    train, test = compact(part(rows, 0), part(rows // 4, 1))
    dim, shape = 16, (train.dense.shape[1], train.ids.shape[1])
    return Task(
        train=train,
        test=test,
        labels=("click",),
        dim=dim,
        batch_size=512,
        epochs=1,
        make_dense=lambda: Dlrm(*shape, dim),
        loss=nn.BCEWithLogitsLoss(),
        dense_optimizer=lambda p: torch.optim.Adam(p, lr=1e-3),
        rows=Adagrad(lr=0.05, initial_accumulator_value=0, eps=1e-8),
        plain_rows=lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-8),
        std=0.01,
    )


def compact(train: Part, test: Part) -> tuple[Part, Part]:
    """Number the ids of each feature from 0, as a table of plain TorchRec needs it."""
    both = torch.cat([train.ids, test.ids])
    columns = [column.unique(return_inverse=True)[1] for column in both.T]
    ids = torch.stack(columns, dim=1)
    num = len(train.ids)
    return train._replace(ids=ids[:num]), test._replace(ids=ids[num:])
