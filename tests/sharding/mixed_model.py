"""A model some of whose tables are on the servers, and the same in plain TorchRec."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.optimizers import in_backward_optimizer_filter

from persia_torchrec import (
    Adagrad,
    MixedSharder,
    Placement,
    RemoteEmbeddingBagCollectionSharder,
    RemoteEmbeddingCollectionSharder,
)
from persia_torchrec.sharding import torchrec_api
from persia_torchrec.sharding.sharder import RemoteSharder
from tests.support.remote_job import META, RemoteJob, kjt_of, shard

needs_mixed_sequences = pytest.mark.skipif(
    not torchrec_api.MIXES_SEQUENCES, reason="MixedSharder rejects sequences before 1.8"
)

NUM_IDS = 40
KEYS = ["user", "ad", "query", "place", "item"]

COLUMNS = ["user@user", "ad", "query", "item", "user@home", "place"]
WIDTHS = [8, 16, 16, 4, 8, 4]

REMOTE = ("user", "item")
LOCAL = ("home", "term", "place")

LR, EPS = 0.05, 1e-8
ADAGRAD = Adagrad(lr=LR, initial_accumulator_value=0, eps=EPS)
FUSED = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": LR, "eps": EPS}


def tables():
    """Remote and local tables in turn; "user" is a feature of one of each."""
    return [
        EmbeddingBagConfig(NUM_IDS, 8, name="user", feature_names=["user"]),
        EmbeddingBagConfig(NUM_IDS, 16, name="term", feature_names=["ad", "query"]),
        EmbeddingBagConfig(NUM_IDS, 4, name="item", feature_names=["item"]),
        EmbeddingBagConfig(NUM_IDS, 8, name="home", feature_names=["user"]),
        EmbeddingBagConfig(
            *(NUM_IDS, 4),
            name="place",
            feature_names=["place"],
            pooling=PoolingType.MEAN,
        ),
    ]


class Model(nn.Module):
    """The columns of a collection, and two layers over them.

    The columns are taken by name: plain TorchRec orders them by sharding type.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=tables(), device=META)
        self.over = nn.Sequential(nn.Linear(56, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, ids: KeyedJaggedTensor):
        pooled = self.bags(ids)
        columns = torch.cat([pooled[name] for name in COLUMNS], dim=1)
        return self.over(columns).squeeze(1)


class SequenceModel(nn.Module):
    """The same over a collection of sequences, whose embeddings are added up."""

    def __init__(self) -> None:
        super().__init__()
        configs = [
            EmbeddingConfig(NUM_IDS, 8, name=t.name, feature_names=t.feature_names)
            for t in tables()
        ]
        self.sequences = EmbeddingCollection(tables=configs, device=META)
        self.over = nn.Sequential(nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, ids: KeyedJaggedTensor):
        output = self.sequences(ids)
        sums = torch.cat([added_up(output[name]) for name in COLUMNS], dim=1)
        return self.over(sums).squeeze(1)


def added_up(sequences: JaggedTensor) -> torch.Tensor:
    lengths = sequences.lengths()
    sample_of = torch.arange(len(lengths)).repeat_interleave(lengths)
    zeros = torch.zeros(len(lengths), sequences.values().shape[1])
    return zeros.index_add(0, sample_of, sequences.values())


class CpuSharder(EmbeddingBagCollectionSharder):
    """TorchRec's, which on CPUs can shard rows, but does not offer it."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [*super().sharding_types(compute_device_type), "row_wise"]


@dataclass(frozen=True)
class Kind:
    """A kind of collection: a model of it, its sharders, its keys in state dicts."""

    model: type[nn.Module]
    local: type[BaseEmbeddingSharder]
    remote: type[RemoteSharder]
    prefix: str


BAGS = Kind(
    *(Model, CpuSharder, RemoteEmbeddingBagCollectionSharder, "bags.embedding_bags")
)
SEQUENCES = Kind(
    SequenceModel,
    EmbeddingCollectionSharder,
    RemoteEmbeddingCollectionSharder,
    "sequences.embeddings",
)


def constraints(sharding_type: str, names=LOCAL) -> dict[str, ParameterConstraints]:
    return {name: ParameterConstraints([sharding_type]) for name in names}


EACH_ITS_TYPE = (
    constraints("data_parallel", ["home"])
    | constraints("row_wise", ["term"])
    | constraints("table_wise", ["place"])
)


def batches(num_steps: int, rank: int = 0, world_size: int = 1, num_samples: int = 16):
    """Yield every ``world_size``-th sample of batches of bags of 0 to 3 ids."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        bags = {
            key: [
                torch.randint(NUM_IDS, (n,), generator=generator).tolist()
                for n in torch.randint(4, (num_samples,), generator=generator).tolist()
            ]
            for key in KEYS
        }
        score = torch.tensor([float(sum(bag) % 2) for bag in bags["user"]])
        mine = {key: feature[rank::world_size] for key, feature in bags.items()}
        yield kjt_of(mine), score[rank::world_size]


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of what is not updated in the backward pass."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return torch.optim.SGD(dense.values(), lr=0.5)


def train(model: nn.Module, batches) -> np.ndarray:
    """Return the loss of each step."""
    optimizer = dense_optimizer(model)
    losses = []
    for ids, labels in batches:
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


def put_some_on_servers(
    job: RemoteJob, kind=BAGS, *, constraints=None, placement=None, **settings
) -> DistributedModelParallel:
    """Shard the model as a user does: one more sharder, the stock planner."""
    remote = kind.remote(job.client, ADAGRAD, **settings)
    sharder = MixedSharder(
        remote, placement or Placement(local=LOCAL), kind.local(FUSED)
    )
    model = shard(kind.model(), sharder, constraints=constraints)
    job.adopt(model)
    return model
