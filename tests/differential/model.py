"""The module of a drawn model, its batches, and how its optimizers are given."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply
from torchrec import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)

from tests.differential.drawing import (
    FUSED_MODULE,
    FUSED_PARAMS,
    HALVES,
    SHARDER,
    SOME_IN_BACKWARD,
    TABLES,
    Choice,
    Collection,
    Drawn,
    Table,
)
from tests.support.models import OnHost
from tests.support.remote_job import META

NUM_DENSE, WIDTH = 2, 6
LOSS_SCALE = 4.0
DENSE_LR = 0.1


@dataclass
class Batch(OnHost):
    """Dense features, labels, and the ids of each collection."""

    dense: torch.Tensor
    labels: torch.Tensor
    first: KeyedJaggedTensor
    second: KeyedJaggedTensor


class Over(nn.Sequential):
    """The dense half."""

    def __init__(self, drawn: Drawn) -> None:
        dim = sum(table.dim for c in drawn.collections for table, _ in c.features)
        layers = nn.Linear(dim + NUM_DENSE, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
        super().__init__(*layers)


def loss_of(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch, whose gradients are neither tiny nor huge."""
    of_samples = nn.functional.binary_cross_entropy_with_logits(
        output.squeeze(1), labels
    )
    return LOSS_SCALE * of_samples


class Net(nn.Module):
    """The collections, and a dense half over their columns.

    Columns are taken by name: plain TorchRec orders them by sharding type. Each id of a
    sequence counts by itself, so that pooling cannot replace it.
    """

    def __init__(self, drawn: Drawn, *, in_plain: bool) -> None:
        super().__init__()
        self.over = Over(drawn)
        self.first = _module(drawn, drawn.collections[0], in_plain=in_plain)
        if len(drawn.collections) > 1:
            self.second = _module(drawn, drawn.collections[1], in_plain=in_plain)
        self.columns = [
            [(c.column(table, key), c.has_bags) for table, key in c.features]
            for c in drawn.collections
        ]
        # Where a fault is planted.
        self.taken = nn.ModuleList(nn.Identity() for c in self.columns for _ in c)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = [self.first(batch.first)]
        if len(self.columns) > 1:
            outputs.append(self.second(batch.second))
        parts, number = [batch.dense], 0
        for output, columns in zip(outputs, self.columns, strict=True):
            for name, has_bags in columns:
                take = torch.tanh if has_bags else sum_by_sample
                parts.append(self.taken[number](take(output[name])))
                number += 1
        logits = self.over(torch.cat(parts, dim=1))
        return loss_of(logits, batch.labels), logits.detach()


@torch.fx.wrap
def sum_by_sample(feature):
    """Add up the embeddings of a sample, each bent before."""
    values, lengths = torch.tanh(feature.values()), feature.lengths()
    sample = torch.arange(len(lengths)).repeat_interleave(lengths)
    zeros = torch.zeros(len(lengths), values.shape[1])
    return zeros.index_add(0, sample, values)


def _module(drawn: Drawn, collection: Collection, *, in_plain: bool) -> nn.Module:
    """Return a collection on the meta device, with the optimizers of the model."""
    kinds = [EmbeddingCollection, EmbeddingBagCollection]
    kind: Any = kinds[collection.has_bags]
    given: dict[str, Any] = {"is_weighted": True} if collection.is_weighted else {}
    if drawn.way == FUSED_MODULE:
        kind = [FusedEmbeddingCollection, FusedEmbeddingBagCollection]
        kind = kind[collection.has_bags]
        choice = collection.tables[0].choice
        more = {"optimizer_kwargs": _arguments(choice, collection.tables)}
        given |= {"optimizer_type": choice.cls, **more}
    module = kind(
        tables=[config_of(t) for t in collection.tables], device=META, **given
    )
    weights = {name.split(".")[-2]: w for name, w in module.named_parameters()}
    for table in collection.tables:
        if table.is_applied or (in_plain and drawn.way in (SHARDER, TABLES)):
            apply(
                table.choice.cls,
                [weights[table.name]],
                _arguments(table.choice, [table]),
            )
        weights[table.name].requires_grad_(table.requires_grad)
    return module


def config_of(table: Table) -> EmbeddingBagConfig | EmbeddingConfig:
    """Return TorchRec's config of a table."""
    given = {
        "name": table.name,
        "embedding_dim": table.dim,
        "num_embeddings": table.num_rows,
        "feature_names": list(table.features),
        "data_type": DataType[table.dtype],
    }
    if not table.pooling:
        return EmbeddingConfig(**given)
    return EmbeddingBagConfig(**given, pooling=PoolingType[table.pooling])


def _arguments(choice: Choice, tables: Iterable[Table]) -> dict[str, Any]:
    given = dict(choice.arguments)
    takes_more = not choice.cls.__module__.startswith("torch.optim")
    if takes_more and any(table.dtype in HALVES for table in tables):
        given["stochastic_rounding"] = False
    return given


def fused_params_of(drawn: Drawn) -> dict[str, Any] | None:
    """Return the ``fused_params`` of a model that has its optimizer there."""
    if drawn.way not in (FUSED_PARAMS, SOME_IN_BACKWARD):
        return None
    given = _arguments(drawn.common, [table for _, table in drawn.tables])
    given["learning_rate"] = given.pop("lr")
    if "betas" in given:
        given["beta1"], given["beta2"] = given.pop("betas")
    kind = optimizer_type_to_emb_opt_type(drawn.common.cls)
    return {"optimizer": kind, **given}


def make_batches(drawn: Drawn, rank: int) -> list[Batch]:
    """Return the batches of a trainer."""
    generator = torch.Generator().manual_seed(10 * drawn.seed + rank)
    return [_batch(drawn, generator) for _ in range(drawn.num_steps[rank])]


def _batch(drawn: Drawn, generator: torch.Generator) -> Batch:
    num = int(torch.randint(1, 9, (), generator=generator))
    dense = torch.randn(num, NUM_DENSE, generator=generator)
    labels = (torch.rand(num, generator=generator) < 0.5).float()
    ids = [_ids(drawn, c, num, generator) for c in drawn.collections]
    return Batch(dense, labels, ids[0], ids[-1])


def _ids(
    drawn: Drawn, collection: Collection, num: int, generator: torch.Generator
) -> KeyedJaggedTensor:
    """Return bags of 0 to 4 ids; now and then a feature has none in the batch."""

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator)

    keys, more, kept = collection.keys, {}, [num] * len(collection.keys)
    if drawn.is_vbe:
        kept = (1 + integers(num, len(keys))).tolist()
        samples = torch.stack([_referring(of_key, num, generator) for of_key in kept])
        more["stride_per_key_per_rank"] = [[of_key] for of_key in kept]
        more["inverse_indices"] = (keys, samples)
    lengths = [integers(5, of_key) for of_key in kept]
    if integers(4, 1) == 0:
        lengths[integers(len(keys), 1)].zero_()
    ids = []
    for key, of_key in zip(keys, lengths, strict=True):
        num_rows = min(t.num_rows for t in collection.tables if key in t.features)
        ids.append(integers(num_rows, int(of_key.sum())))
    values = torch.cat(ids)
    sizes = 0.5 + torch.rand(len(values), generator=generator)
    weights = sizes * (1 - 2 * integers(2, len(values)))
    return KeyedJaggedTensor(
        keys,
        values.int() if drawn.has_int32 else values,
        weights if collection.is_weighted else None,
        lengths=torch.cat(lengths).int(),
        **more,
    )


def _referring(num_kept: int, num: int, generator: torch.Generator) -> torch.Tensor:
    """Return which kept sample each sample is; each is that of one at least."""
    further = torch.randint(num_kept, (num - num_kept,), generator=generator)
    every = torch.cat([torch.arange(num_kept), further])
    return every[torch.randperm(num, generator=generator)]
