"""Trainers that take rows from one queue, are killed, and are others in number then."""

from contextlib import closing
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

from persia_torchrec import (
    SGD,
    Constant,
    EmbeddingClient,
    RemoteEmbeddingBagCollectionSharder,
    TableSettings,
    env,
)
from persia_torchrec.data import CsvDataset, IdColumn, LabelColumn, WorkQueue
from persia_torchrec.sharding.training_blocks import join
from persia_torchrec.training.recoverable import recoverable
from tests.support.faults import kill_self
from tests.support.groups import trainer_of_group
from tests.support.models import bags_of
from tests.support.processes import wait_until
from tests.support.remote_job import shard

COLUMNS = (IdColumn("id", is_text=False), LabelColumn("label"))
NUM_EPOCHS = 2


class Counts(nn.Module):
    """Adds 1 to the row of each id, by SGD."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = bags_of(["id"], 1000)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch):
        return -self.embeddings(batch.id_features).values().sum() + 0 * self.bias.sum()


def write_files(folder: Path, sizes) -> int:
    """Write files of numbered rows; return how many rows."""
    stops = np.cumsum([0, *sizes]).tolist()
    for number, (start, stop) in enumerate(pairwise(stops)):
        lines = "".join(f"{n},{n}\n" for n in range(start, stop))
        (folder / f"{number}.csv").write_text(lines)
    return stops[-1]


def train(rank: int, size: int, addresses, folder: Path, dies_at: int) -> None:
    """Be one of some trainers; the last one is killed before it counts a step.

    It has trained so many, and a checkpoint is complete. How many steps each takes
    depends on who is first at the queue: if the last one has fewer, it is killed when
    all have trained what they got.

    Args:
        rank: of this one.
        size: how many there are.
        addresses: of the servers.
        folder: of the files, and of the checkpoints.
        dies_at: the first step at which it may be; 0: none.
    """
    group = trainer_of_group(rank, size, folder / f"group {env.num_group_restarts()}")
    given = {"interval_s": 0, "save_steps": 3}
    dies = dies_at > 0 and rank == size - 1

    def is_saved() -> bool:
        return any((folder / "run").glob("checkpoint-*/manifest.json"))

    with group, closing(EmbeddingClient.connect(addresses)) as client:
        data = make_data(folder, batch_size=8 + rank)
        model, sharder, optimizer, together = make_model(client)
        state = {"model": model, "optimizer": optimizer, "data": data}
        with recoverable(folder / "run", state, client, sharder, **given) as run:
            with together():
                num_steps = 0
                # One batch is ahead, as in a train pipeline.
                for batch, _ in pairwise(chain(run.skip(data), [None])):
                    optimizer.zero_grad()
                    model(batch).backward()
                    optimizer.step()
                    num_steps += 1
                    if dies and num_steps >= dies_at and is_saved():
                        kill_self()
                    run.step()
            if dies:
                wait_until(is_saved, "a checkpoint")
                kill_self()
            print(f"resumed from {run.resumed_from}, {num_steps} steps")
        sharder.flush()
        dist.barrier()
        sharder.close()


def make_data(folder: Path, batch_size: int) -> CsvDataset:
    """Return a dataset of the queue of all files of a folder."""
    queue = WorkQueue(sorted(folder.glob("*.csv")), NUM_EPOCHS, seed=1)
    settings = {"shuffle": True, "num_parallel_reads": 2}
    return CsvDataset(queue, batch_size, COLUMNS, **settings)


def make_model(client: EmbeddingClient):
    """Return a model that counts, its sharder, its optimizer, and the block to use."""
    sharder = RemoteEmbeddingBagCollectionSharder(
        client,
        SGD(1.0),
        staleness=2,
        update="each",
        gradient_division=False,
        tables={"id": TableSettings(initializer=Constant(0.0))},
    )
    wrapper = DefaultDataParallelWrapper(static_graph=False)
    model = shard(Counts(), sharder, data_parallel_wrapper=wrapper)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return model, sharder, optimizer, partial(join, model)
