"""The models of most tests, whose tables are on the meta device, and their batches."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.streamable import Pipelineable

META = torch.device("meta")


def tables_of(
    names: Iterable[str],
    num_ids: int = 10,
    dim: int = 4,
    *,
    feature: str | None = None,
    kind: type = EmbeddingBagConfig,
    **settings: Any,
) -> list[Any]:
    """Return a table for each name, of the feature of that name or of one for all."""
    return [
        kind(num_ids, dim, name, feature_names=[feature or name], **settings)
        for name in names
    ]


def bags_of(
    names: Iterable[str], *sizes: int, device: torch.device = META, **settings: Any
) -> EmbeddingBagCollection:
    """Return bags of :func:`tables_of`."""
    tables = tables_of(names, *sizes, **settings)
    return EmbeddingBagCollection(tables=tables, device=device)


def sequences_of(
    names: Iterable[str], *sizes: int, device: torch.device = META, **settings: Any
) -> EmbeddingCollection:
    """Return sequences of :func:`tables_of`."""
    tables = tables_of(names, *sizes, kind=EmbeddingConfig, **settings)
    return EmbeddingCollection(tables=tables, device=device)


class Tower(nn.Module):
    """Bags, and a linear layer over all their columns."""

    def __init__(
        self, tables: list[EmbeddingBagConfig], device: torch.device = META
    ) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=tables, device=device)
        width = sum(table.embedding_dim * table.num_features() for table in tables)
        self.over = nn.Linear(width, 1)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.bags(ids).values()).squeeze(1)


class BothKinds(nn.Module):
    """Bags and sequences; gives the sum of all their weights."""

    def __init__(self, bags: EmbeddingBagCollection, rows: EmbeddingCollection) -> None:
        super().__init__()
        self.bags, self.rows = bags, rows

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        sequences = self.rows(ids).values()
        return self.bags(ids).values().sum() + sum(s.values().sum() for s in sequences)


class OnHost(Pipelineable):
    """A batch as a train pipeline wants it, of which nothing lives on a device."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        parts = {f.name: getattr(self, f.name).to(device) for f in fields(self)}
        return replace(self, **parts)

    def pin_memory(self) -> Self:
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        """Nothing here needs to outlive its stream."""


@dataclass
class Batch(OnHost):
    """Ids and labels."""

    ids: KeyedJaggedTensor
    labels: torch.Tensor


class WithLoss(nn.Module):
    """Bags as a train pipeline wants them: the loss is the sum of their columns."""

    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags

    def forward(self, ids: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = self.bags(ids).values()
        return values.sum(), values.detach()
