"""Trainers whose data end at different steps, and who save and resume together."""

import itertools
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

from persia_torchrec import (
    SGD,
    Constant,
    EmbeddingClient,
    RemoteEmbeddingBagCollectionSharder,
    TableSettings,
    env,
)
from persia_torchrec.sharding.training_blocks import join
from persia_torchrec.training.recoverable import recoverable
from tests.support.faults import kill_self
from tests.support.groups import trainer_of_group
from tests.support.remote_job import META, kjt_of, shard

TABLE = EmbeddingBagConfig(1000, 4, name="id", feature_names=["id"])
IDS_OF_A_TRAINER = 1000


class Counts(nn.Module):
    """Subtracts 1 from the row of each id, by SGD; its dense half moves by the ids.

    The loss has no minimum, near which a rounding would decide where weights are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection(tables=[TABLE], device=META)
        self.dense = nn.Linear(1, 1)

    def forward(self, id_: int):
        rows = self.embeddings(kjt_of({"id": [[id_]]})).values()
        return rows.sum() + self.dense(torch.tensor([[id_ / 100]])).sum()


def make_counts(client: EmbeddingClient):
    """Return the model, its sharder, and its dense optimizer, which has a state."""
    torch.manual_seed(1)
    sharder = RemoteEmbeddingBagCollectionSharder(
        client,
        SGD(1.0),
        staleness=0,
        gradient_division=False,
        tables={"id": TableSettings(initializer=Constant(0.0))},
    )
    wrapper = DefaultDataParallelWrapper(static_graph=False)
    model = shard(Counts(), sharder, data_parallel_wrapper=wrapper)
    return model, sharder, torch.optim.Adam(model.parameters(), lr=0.01)


def train_step(model, optimizer, id_: int) -> None:
    """Train one id."""
    optimizer.zero_grad()
    model(id_).backward()
    optimizer.step()


def expected_trainings(passes: list[tuple[int, ...]]) -> np.ndarray:
    """Return how often each id is trained, by trainer, if nothing is lost."""
    counts = np.zeros((len(passes[0]), IDS_OF_A_TRAINER), int)
    for nums in passes:
        for rank, num in enumerate(nums):
            counts[rank, :num] += 1
    return counts


def expected_dense(passes: list[tuple[int, ...]]) -> np.ndarray:
    """Return the weights of the dense half, as one trainer alone learns them."""
    torch.manual_seed(1)
    dense = Counts().dense
    optimizer = torch.optim.Adam(dense.parameters(), lr=0.01)
    for nums in passes:
        data = [ids_of_trainer(rank, num) for rank, num in enumerate(nums)]
        for step in range(max(nums)):
            ids = [of_trainer[step] for of_trainer in data if step < len(of_trainer)]
            optimizer.zero_grad()
            loss = sum(dense(torch.tensor([[n / 100]])).sum() for n in ids)
            (loss / len(nums)).backward()
            optimizer.step()
    weights = [parameter.detach().numpy().ravel() for parameter in dense.parameters()]
    return np.concatenate(weights)


def ids_of_trainer(rank: int, num: int) -> range:
    """Return the ids that a trainer has in one pass, a step each."""
    return range(IDS_OF_A_TRAINER * rank, IDS_OF_A_TRAINER * rank + num)


def train(
    rank: int,
    size: int,
    addresses: list[str],
    folder: Path,
    passes: list[tuple[int, ...]],
    dies_at: int,
    settings: dict[str, object],
) -> None:
    """Be one of some trainers; the last one is killed before it counts a step.

    Args:
        rank: of this one.
        size: how many there are.
        addresses: of the servers.
        folder: of the checkpoints.
        passes: of each, how many steps each trainer has.
        dies_at: steps of all passes after which the last trainer is killed; 0: none.
        settings: of ``recoverable``, beside a checkpoint each fifth step.
    """
    group = trainer_of_group(rank, size, folder / f"group {env.num_group_restarts()}")
    with group, closing(EmbeddingClient.connect(addresses)) as client:
        model, sharder, optimizer = make_counts(client)
        state = {"model": model, "optimizer": optimizer, "num_seen": 0}
        saves = {"interval_s": 0, "save_steps": 5, "keep": 100, **settings}
        numbers = itertools.count(1)
        with recoverable(folder / "run", state, client, sharder, **saves) as run:
            print(f"resumed from {run.resumed_from}", flush=True)
            for nums in passes:
                with join(model):
                    for id_ in run.skip(ids_of_trainer(rank, nums[rank])):
                        train_step(model, optimizer, id_)
                        state["num_seen"] += 1
                        if rank == size - 1 and next(numbers) == dies_at:
                            kill_self()
                        run.step()
        steps = [float(s["step"]) for s in optimizer.state.values()]
        moments = [s["exp_avg_sq"].sum().item() for s in optimizer.state.values()]
        dense = [p.sum().item() for p in model.module.dense.parameters()]
        print(f"trained {state['num_seen']}; dense {dense} {steps} {moments}")
        sharder.flush()
        dist.barrier()
        sharder.close()
