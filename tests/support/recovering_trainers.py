"""What trainers do that are killed and started again, each in its own process."""

import math
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from persia_torchrec import env
from persia_torchrec.ctx import TrainCtx
from persia_torchrec.data import DataLoader
from persia_torchrec.embedding.optim import SGD, Adagrad
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.logger import get_default_logger
from persia_torchrec.training import schedule as schedule_module
from persia_torchrec.training.recoverable import recoverable
from tests.support.faults import kill_self
from tests.support.groups import trainer_of_group
from tests.support.local_job import Batches, SumOfEmbeddings, batch_of
from tests.support.two_trainers import ADAM, Trainer, batches, loss_of
from tests.support.two_trainers import Model as TorchRecModel

NUM_COUNTED = 8

PASSES = ((3, 3), (4, 2))
"""Batches of each of two trainers, in each pass."""


class Model(nn.Module):
    """Has random numbers and, on each trainer its own, running means."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1)
        self.layers = nn.Sequential(*layers)

    def forward(self, non_id_tensors, embeddings):
        return self.layers(embeddings[0])


def save_after_each_step() -> None:
    """Let checkpoints take more than a twentieth of the time."""
    schedule_module._LEAST_INTERVAL = 0
    env.set_variable("PERSIA_CHECKPOINT_INTERVAL_S", 1e-9)


def save_no_more(ctx: TrainCtx) -> None:
    """Save a checkpoint after this step, and none after that."""
    ctx._recovery.clock._interval_s = math.inf


def run_script(folder: Path, last_saved: int, dies_at: int) -> None:
    """Be a trainer with PERSIA's context; leave what was learnt in the folder.

    Args:
        folder: for results, and a checkpoint that the script would load.
        last_saved: step after which it saves no more, in its first life.
        dies_at: step in which trainer 1 is killed then; 0: none.
    """
    torch.set_num_threads(1)
    get_default_logger()
    save_after_each_step()
    rank = env.get_rank()
    torch.manual_seed(rank)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    is_first_life, num_steps = env.num_group_restarts() == 0, 0
    with TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(0.1),
        dense_optimizer=optimizer,
        mixed_precision=False,
    ) as ctx:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        ctx.register_state(schedule=schedule)
        if rank == 0:
            ctx.clear_embeddings()
        ctx.configure_embedding_parameter_servers(EmbeddingConfig((0.01, 0.02)))
        dist.barrier()
        for number, nums in enumerate(PASSES):
            dataset = Batches(lambda n=number, num=nums[rank]: data(rank, n, num))
            for batch in DataLoader(dataset, reproducible=True, embedding_staleness=1):
                num_steps += 1
                if num_steps == last_saved and is_first_life:
                    save_no_more(ctx)
                output, labels = ctx.forward(batch)
                if rank == 1 and num_steps == dies_at and is_first_life:
                    kill_self()
                ctx.backward((output - labels[0]).square().mean())
            schedule.step()
    weights = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    means = model.layers[0].running_mean.numpy()
    np.savez(
        folder / f"{rank}.npz", weights=weights, means=means, lr=schedule.get_last_lr()
    )
    dist.destroy_process_group()


def data(rank, number, num):
    """Yield batches whose ids no other trainer has: updates of several race."""
    rng = np.random.default_rng([rank, number])
    for _ in range(num):
        ids = rng.integers(30 * rank, 30 * rank + 30, (6, 2)).tolist()
        yield batch_of(*ids, label=float(rng.integers(2)))


def count(folder: Path, last_saved: int, dies_at: int, resume: str) -> None:
    """Be the only trainer, each of whose updates adds 1; write down each that is sent.

    Args:
        folder: for the number of updates.
        last_saved: step after which it saves no more, in its first life.
        dies_at: step after which it is killed then.
        resume: of the context.
    """
    torch.set_num_threads(1)
    save_after_each_step()
    model, is_first_life = SumOfEmbeddings(), env.num_group_restarts() == 0
    with TrainCtx(
        model=model,
        embedding_optimizer=SGD(1.0),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        mixed_precision=False,
        embedding_config=EmbeddingConfig((0, 0), weight_bound=0),
        resume=resume,
    ) as ctx:
        dataset = Batches([batch_of([7], [100 + n]) for n in range(NUM_COUNTED)])
        loader = DataLoader(dataset, reproducible=True, embedding_staleness=1)
        for step, batch in enumerate(loader, start=1):
            if step == last_saved and is_first_life:
                save_no_more(ctx)
            output, _ = ctx.forward(batch)
            with (folder / "sent").open("a") as file:
                file.write("7\n")
            ctx.backward(-output.sum())
            if step == dies_at and is_first_life:
                ctx.embeddings.flush()
                kill_self()


def run_torchrec(rank, addresses, folder: Path, dies_at: int) -> None:
    """Be one of two trainers of a TorchRec model, within ``recoverable``."""
    schedule_module._LEAST_INTERVAL = 0
    life = env.num_group_restarts()
    group = trainer_of_group(rank, 2, folder / f"process group {dies_at} {life}")
    with group, Trainer(addresses, TorchRecModel, ADAM, staleness=1) as trainer:
        optimizer = torch.optim.Adam(trainer.model.parameters(), lr=0.05)
        schedules = {
            name: torch.optim.lr_scheduler.ExponentialLR(scheduled, 0.9)
            for name, scheduled in (
                ("dense rates", optimizer),
                ("rates of rows", trainer.sharder.optimizer),
            )
        }
        state = {"model": trainer.model, "optimizer": optimizer, **schedules}
        state["num_seen"] = 0
        with recoverable(
            folder / f"run {dies_at}",
            state,
            trainer.client,
            trainer.sharder,
            interval_s=1e-9,
        ) as run:
            for number in range(2):
                for batch in run.skip(Shuffled(list(batches(rank, 4, seed=number)))):
                    loss = loss_of(trainer.model, [batch])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    for schedule in schedules.values():
                        schedule.step()
                    state["num_seen"] += 1
                    if rank == 1 and state["num_seen"] == dies_at and life == 0:
                        kill_self()
                    run.step()
        learnt = trainer.learnt()
        steps = trainer.client.step("term")
    np.savez(
        folder / f"{dies_at} {rank}.npz",
        lr=optimizer.param_groups[0]["lr"],
        num_seen=state["num_seen"],
        steps=steps,
        **learnt,
    )


class Shuffled:
    """A loader that draws its order from torch's global generator."""

    def __init__(self, batches) -> None:
        self._batches = batches

    def __iter__(self):
        for index in torch.randperm(len(self._batches)).tolist():
            yield self._batches[index]
