"""A small DLRM for the servers and for plain TorchRec: its batches and optimizers."""

from dataclasses import dataclass

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

from persia_torchrec import SGD, Adagrad
from tests.integration.twins import WithLoss
from tests.support.remote_job import META
from tests.support.two_trainers import Case

NUM_IDS = 40
NUM_SAMPLES = 32

LR = 0.2
FEATURES = {"ad": 16, "query": 16, "user": 8, "place": 4}

SGD_CASE = Case(SGD(4.0), EmbOptimType.EXACT_SGD, {"learning_rate": 4.0})
ADAGRAD = {"learning_rate": 0.05, "eps": 1e-8}
ADAGRAD_CASE = Case(
    Adagrad(lr=0.05, initial_accumulator_value=0, eps=1e-8),
    EmbOptimType.EXACT_ADAGRAD,
    ADAGRAD,
)
ROWWISE_CASE = Case(
    Adagrad(lr=0.05, initial_accumulator_value=0, eps=1e-8, vectorwise_shared=True),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    ADAGRAD,
)
CASES = [
    pytest.param(SGD_CASE, id="SGD"),
    pytest.param(ADAGRAD_CASE, id="Adagrad"),
    pytest.param(ROWWISE_CASE, id="rowwise Adagrad"),
]


def tables():
    return [
        EmbeddingBagConfig(NUM_IDS, 16, name="term", feature_names=["ad", "query"]),
        EmbeddingBagConfig(NUM_IDS, 8, name="user", feature_names=["user"]),
        EmbeddingBagConfig(
            NUM_IDS,
            *(4,),
            name="place",
            feature_names=["place"],
            pooling=PoolingType.MEAN,
        ),
    ]


class Dlrm(nn.Module):
    """Dense features and projected embeddings, and all their dot products."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection(tables=tables(), device=META)
        self.bottom = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8))
        self.project = nn.ModuleDict(
            {key: nn.Linear(dim, 8, bias=False) for key, dim in FEATURES.items()}
        )
        self.over = nn.Sequential(nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense, ids):
        bottom = self.bottom(dense)
        pooled = self.embeddings(ids)
        projected = [self.project[key](pooled[key]) for key in FEATURES]
        vectors = torch.stack([bottom, *projected], dim=1)
        row, column = torch.triu_indices(5, 5, offset=1)
        dots = (vectors @ vectors.transpose(1, 2))[:, row, column]
        return self.over(torch.cat([bottom, dots], dim=1)).squeeze(1)


@dataclass(frozen=True)
class Batch:
    dense: torch.Tensor
    ids: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device):
        return Batch(self.dense.to(device), self.ids.to(device), self.labels.to(device))


def make_batch(generator):
    """Bags of 0 to 4 ids, the small ones often; ids and dense tell the label."""
    num_bags = len(FEATURES) * NUM_SAMPLES
    lengths = torch.randint(5, (num_bags,), generator=generator)
    ids = (torch.rand(int(lengths.sum()), generator=generator) ** 2 * NUM_IDS).long()
    dense = torch.randn(NUM_SAMPLES, 3, generator=generator)
    bag_of_id = torch.arange(num_bags).repeat_interleave(lengths)
    scores = torch.zeros(num_bags).index_add_(0, bag_of_id, (ids % 3 - 1).float())
    score = scores.view(-1, NUM_SAMPLES).sum(0) + dense[:, 0]
    kjt = KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths.int())
    return Batch(dense, kjt, (score > 0).float())


def make_batches(num):
    generator = torch.Generator().manual_seed(0)
    return [make_batch(generator) for _ in range(num)]


def make_model():
    return WithLoss(Dlrm())


def plain_sharder(case):
    return EmbeddingBagCollectionSharder({"optimizer": case.kind, **case.arguments})
