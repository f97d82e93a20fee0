"""What each of two trainers does: dump, train on, and go back."""

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from persia_torchrec import env
from persia_torchrec.ctx import TrainCtx, eval_ctx
from persia_torchrec.data import DataLoader
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.errors import CheckpointError
from tests.persia.distributed_trainers import batch, loss_of, make_model, weights_of
from tests.support.local_job import Batches


def run_trainer(folder: Path, master_port: int) -> None:
    """Be one of the trainers; leave the dense weights, a row each time, in the folder.

    When the dump begins, after more steps, after the load, and after another when the
    training is over.
    """
    torch.set_num_threads(1)
    rank = env.get_rank()
    env.set_variable("MASTER_ADDR", "127.0.0.1")
    env.set_variable("MASTER_PORT", master_port)
    model = make_model(rank)
    with TrainCtx(
        model=model,
        embedding_optimizer=SGD(0.1),
        dense_optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
        mixed_precision=False,
    ) as ctx:
        train(ctx, rank, range(3))
        weights = [weights_of(model)]
        try:
            ctx.load_checkpoint(str(folder / "run"))
        except CheckpointError as exc:
            (folder / f"error {rank}").write_text(str(exc))
        if rank == 0:  # as scripts for PERSIA do
            ctx.dump_checkpoint(str(folder / "run"))
        train(ctx, rank, range(3, 6))
        weights.append(weights_of(model))
        ctx.load_checkpoint(str(folder / "run"), blocking=False)
        ctx.wait_for_load_embedding()
        weights.append(weights_of(model))
        ctx.dump_checkpoint(str(folder / "run"), blocking=False)  # by all
    torch.nn.init.zeros_(next(model.parameters()))
    with eval_ctx(model) as onlooking:  # the training is over
        onlooking.load_checkpoint(str(folder / "run"))
        weights.append(weights_of(model))
        onlooking.dump_embedding(str(folder / "rows"))
    np.save(folder / f"weights {rank}.npy", np.stack(weights))
    dist.destroy_process_group()


def train(ctx: TrainCtx, rank: int, numbers: range) -> None:
    for data in DataLoader(Batches([batch(rank, number) for number in numbers])):
        output, labels = ctx.forward(data)
        ctx.backward(loss_of(output, labels[0]))
