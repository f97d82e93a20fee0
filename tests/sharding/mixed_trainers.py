"""What each of two trainers does with a mixed model, and one on the joined batches."""

import contextlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from persia_torchrec import (
    EmbeddingClient,
    MixedSharder,
    Placement,
    RemoteEmbeddingBagCollectionSharder,
    describe_placement,
)
from tests.sharding.mixed_model import (
    ADAGRAD,
    EACH_ITS_TYPE,
    FUSED,
    LOCAL,
    NUM_IDS,
    REMOTE,
    CpuSharder,
    Model,
    batches,
    train,
)
from tests.support.groups import trainer_of_group
from tests.support.remote_job import ids_of, shard, tensors_of

NUM_STEPS = 15


def run_trainer(rank: int, world_size: int, addresses: list[str], folder: Path) -> None:
    """Be one of the trainers; leave what was learnt in the folder."""
    with trainer_of_group(rank, world_size, folder / "process group"):
        np.savez(folder / f"{rank}.npz", **learn(addresses))


def learn(addresses: list[str]) -> dict[str, np.ndarray]:
    """Train on this trainer's share of each batch; return weights, by name."""
    with sharded_model(addresses) as (model, client):
        set_local_rows(model)
        share = batches(NUM_STEPS, dist.get_rank(), dist.get_world_size())
        train(model, share)
        state = tensors_of(model)
        return {
            **{table: client.read(table, ids_of(range(NUM_IDS))) for table in REMOTE},
            **{name: whole(weight) for name, weight in state.items()},
            "placement": np.array(describe_placement(model)),
        }


@contextlib.contextmanager
def sharded_model(addresses):
    """Shard the model with some tables on the servers; close it in the end."""
    with contextlib.closing(EmbeddingClient.connect(addresses)) as client:
        remote = RemoteEmbeddingBagCollectionSharder(client, ADAGRAD)
        sharder = MixedSharder(remote, Placement(local=LOCAL), CpuSharder(FUSED))
        torch.manual_seed(0)
        yield shard(Model(), sharder, constraints=EACH_ITS_TYPE), client
        remote.close()


def set_local_rows(model: nn.Module) -> None:
    """Start from the same rows, on whichever side."""
    for table in LOCAL:
        weight = model.state_dict()[f"bags.embedding_bags.{table}.weight"]
        for piece, offset in pieces(weight):
            row = torch.arange(piece.shape[0]) + offset[0]
            dim = torch.arange(piece.shape[1]) + offset[1]
            piece.copy_(torch.sin(row[:, None] * 7.0 + dim) * 0.1)


def pieces(weight):
    """Yield what this trainer holds of a table, with its offsets."""
    if not hasattr(weight, "local_shards"):
        yield weight, (0, 0)
        return
    for piece in weight.local_shards():
        yield piece.tensor, piece.metadata.shard_offsets


def whole(weight) -> np.ndarray:
    """Return a weight whole, put together from the trainers that hold it."""
    if not hasattr(weight, "local_shards"):
        return weight.detach().numpy()
    rows = torch.zeros(weight.metadata().size)
    for piece, (row, dim) in pieces(weight):
        rows[row : row + piece.shape[0], dim : dim + piece.shape[1]] = piece
    dist.all_reduce(rows)
    return rows.numpy()
