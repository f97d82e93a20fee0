"""What each of several trainers does, and a single one on their joined batches."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from persia_torchrec import (
    SGD,
    EmbeddingClient,
    RemoteEmbeddingBagCollectionSharder,
)
from tests.sharding.remote_job import META, ids_of, kjt_of, remote_modules, shard

NUM_IDS = 30
NUM_STEPS = 20
NUM_SAMPLES = 16  # of the joined batch

TABLES = [
    EmbeddingBagConfig(NUM_IDS, 8, name="term", feature_names=["ad", "query"]),
    EmbeddingBagConfig(NUM_IDS, 4, name="user", feature_names=["user"]),
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection(tables=TABLES, device=META)
        self.over = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, ids):
        return self.over(self.embeddings(ids).values()).squeeze(1)


@dataclass(frozen=True)
class Run:
    """One training: servers of its own, and how gradients are divided."""

    name: str
    addresses: list[str]
    lr: float
    gradient_division: bool


def run_trainer(rank: int, world_size: int, runs: list[Run], folder: Path) -> None:
    """Be one of the trainers; leave what was learnt in the folder."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=world_size,
        store=dist.FileStore(str(folder / "process group"), world_size),
    )
    for run in runs:
        dense, rows = train(run)
        np.savez(folder / f"{run.name} {rank}.npz", dense=dense, rows=rows)
    dist.destroy_process_group()


def train(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Train on this trainer's share of each batch; return dense weights and rows."""
    client = EmbeddingClient.connect(run.addresses)
    sharder = RemoteEmbeddingBagCollectionSharder(
        client, SGD(run.lr), gradient_division=run.gradient_division
    )
    torch.manual_seed(0)
    model = shard(Model(), sharder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for ids, labels in batches(dist.get_rank(), dist.get_world_size()):
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids), labels)
        optimizer.zero_grad()
        # Trainers do not wait for each other's pulls and pushes, only for dense
        # gradients; here they do, so that all see the same rows.
        dist.barrier()
        loss.backward()
        optimizer.step()
        dist.barrier()
    dense = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    every_id = ids_of(range(NUM_IDS))
    rows = [client.read(table.name, every_id).ravel() for table in TABLES]
    for module in remote_modules(model):
        module.pipeline.close()
    client.close()
    return dense, np.concatenate(rows)


def batches(rank: int, world_size: int):
    """Yield every ``world_size``-th sample of the joined batches."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(NUM_STEPS):
        lengths = torch.randint(4, (3, NUM_SAMPLES), generator=generator).tolist()
        bags = {
            key: [
                torch.randint(NUM_IDS, (n,), generator=generator).tolist()
                for n in lengths[f]
            ][rank::world_size]
            for f, key in enumerate(["ad", "query", "user"])
        }
        labels = torch.rand(NUM_SAMPLES, generator=generator).round()
        yield kjt_of(bags), labels[rank::world_size]
