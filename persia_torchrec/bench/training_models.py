"""The two models of the training benchmark: plain TorchRec's, and one on the servers.

Both are TorchRec's DLRM inside ``DistributedModelParallel`` and differ in the sharder
alone. Plain TorchRec holds the tables in this process and updates them in the backward
pass, by fbgemm's fused rowwise Adagrad; the servers apply the same optimizer.
"""

import time
from collections.abc import Callable, Sequence

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.optimizers import in_backward_optimizer_filter

from persia_torchrec.bench.training_batches import TABLES
from persia_torchrec.bench.training_settings import (
    DENSE_LAYERS,
    EPS,
    LEARNING_RATE,
    NUM_DENSE,
    OVER_LAYERS,
)
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.sharding.sharder import RemoteEmbeddingBagCollectionSharder

_CPU = torch.device("cpu")
_SEED = 20_236


class Trainer:
    """A model that is trained batch by batch.

    Args:
        model: returns a loss and what belongs to it.
        is_pipelined: train with ``TrainPipelineSparseDist``, which begins the lookup of
            a batch a step ahead, or with a plain loop.
        flush: waits until every update so far is applied.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        *,
        is_pipelined: bool,
        flush: Callable[[], None],
    ) -> None:
        self.model = model
        self._flush = flush
        dense = dict(in_backward_optimizer_filter(model.named_parameters()))
        self._optimizer = torch.optim.SGD(dense.values(), LEARNING_RATE)
        self._pipeline = (
            TrainPipelineSparseDist(model, self._optimizer, _CPU)
            if is_pipelined
            else None
        )

    def train(self, batches: Sequence[Batch]) -> list[float]:
        """Take a step a batch; return the losses when every update is applied."""
        if self._pipeline is None:
            losses = [self._step(batch) for batch in batches]
        else:
            rest = iter(batches)
            losses = [float(self._pipeline.progress(rest)[0]) for _ in batches]
        self._flush()
        return losses

    def seconds(self, batches: Sequence[Batch]) -> float:
        """Return how long training takes, to the last update."""
        start = time.perf_counter()
        self.train(batches)
        return time.perf_counter() - start

    def _step(self, batch: Batch) -> float:
        self._optimizer.zero_grad()
        loss, _ = self.model(batch)
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())


def plain_trainer(dim: int, table_rows: int) -> Trainer:
    """Return plain TorchRec's model, its tables in this process."""
    sharder = EmbeddingBagCollectionSharder(
        fused_params={
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": LEARNING_RATE,
            "eps": EPS,
        }
    )
    fused = ParameterConstraints(
        sharding_types=["table_wise"], compute_kernels=["fused"]
    )
    constraints = dict.fromkeys(TABLES, fused)
    model = _shard(_dlrm(dim, table_rows), sharder, constraints)
    return Trainer(model, is_pipelined=False, flush=lambda: None)


def remote_trainer(
    client: EmbeddingClient, dim: int, table_rows: int, staleness: int
) -> tuple[Trainer, RemoteEmbeddingBagCollectionSharder]:
    """Return the model on the servers, and its sharder, for the caller to close.

    With a staleness of 2 or more, the lookup of a batch begins a step ahead.
    """
    optimizer = Adagrad(
        LEARNING_RATE, initial_accumulator_value=0, eps=EPS, vectorwise_shared=True
    )
    sharder = RemoteEmbeddingBagCollectionSharder(client, optimizer, staleness)
    model = _shard(_dlrm(dim, table_rows), sharder)
    is_pipelined = staleness >= 2
    trainer = Trainer(model, is_pipelined=is_pipelined, flush=sharder.flush)
    return trainer, sharder


def table_weights(trainer: Trainer, table: int) -> torch.Tensor:
    """Return the weights of a table of plain TorchRec, float32 ``(rows, D)``."""
    name = f"model.sparse_arch.embedding_bag_collection.embedding_bags.{TABLES[table]}"
    (shard,) = trainer.model.state_dict()[f"{name}.weight"].local_shards()
    weights: torch.Tensor = shard.tensor
    return weights


def _dlrm(dim: int, table_rows: int) -> DLRMTrain:
    """Return the model, its dense weights always the same, its tables on meta."""
    torch.manual_seed(_SEED)
    tables = [
        EmbeddingBagConfig(table_rows, dim, name=name, feature_names=[name])
        for name in TABLES
    ]
    dlrm = DLRM(
        EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        dense_in_features=NUM_DENSE,
        dense_arch_layer_sizes=[*DENSE_LAYERS, dim],
        over_arch_layer_sizes=list(OVER_LAYERS),
        dense_device=_CPU,
    )
    return DLRMTrain(dlrm)


def _shard(
    model: torch.nn.Module,
    sharder: ModuleSharder[EmbeddingBagCollection],
    constraints: dict[str, ParameterConstraints] | None = None,
) -> DistributedModelParallel:
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"), constraints=constraints
    )
    plan = planner.plan(model, [sharder])
    return DistributedModelParallel(model, sharders=[sharder], plan=plan, device=_CPU)
