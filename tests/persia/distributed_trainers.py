"""What each of two trainers does, with one distributed option after the other."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from persia_torchrec import env
from persia_torchrec.ctx import TrainCtx
from persia_torchrec.data import DataLoader
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.persia.batch import Label, NonIDTypeFeature, PersiaBatch
from persia_torchrec.persia.distributed import DistributedBaseOption
from tests.support.local_job import Batches, batch_of
from tests.support.ports import draw_port

NUM_FEATURES = 20
NUM_SAMPLES = 8
LR = 0.3


@dataclass(frozen=True)
class Run:
    """One training with an option, ``num_batches[rank]`` batches a trainer."""

    name: str
    option: DistributedBaseOption | None
    num_batches: tuple[int, int] = (12, 12)
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    overflows: tuple[int, ...] = ()
    """Batches of trainer 1 whose embedding gradient is infinite, under a loss scale."""
    master_port: int = field(default_factory=draw_port)


class Model(nn.Module):
    """Of dense features alone, so that what it learns can be computed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.over = nn.Linear(NUM_FEATURES, 1)
        self.overflows = False

    def forward(self, non_id_tensors, embeddings):
        if self.overflows:
            embeddings[0].register_hook(lambda grad: grad + torch.inf)
        return self.over(non_id_tensors[0]) + 0 * embeddings[0].sum(1, keepdim=True)


def make_model(rank: int) -> Model:
    torch.manual_seed(rank)  # trainers must not depend on equal seeds
    return Model()


def loss_of(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(output, label)


def batch(rank: int, number: int) -> PersiaBatch:
    rng = np.random.default_rng([rank, number])
    dense = rng.normal(size=(NUM_SAMPLES, NUM_FEATURES)).astype(np.float32)
    label = (dense.sum(axis=1, keepdims=True) > 0).astype(np.float32)
    ids = batch_of(*[[7]] * NUM_SAMPLES).id_type_features
    return PersiaBatch(ids, [NonIDTypeFeature(dense)], [Label(label)])


def run_trainer(runs: list[Run], folder: Path) -> None:
    """Be one of the trainers; leave what was learnt in the folder."""
    torch.set_num_threads(1)
    rank = env.get_rank()
    env.set_variable("MASTER_ADDR", "127.0.0.1")
    for run in runs:
        env.set_variable("MASTER_PORT", run.master_port)
        weights, scales = train(run, rank)
        np.save(folder / f"{run.name} {rank}.npy", weights)
        np.save(folder / f"scales of {run.name} {rank}.npy", scales)
        dist.destroy_process_group()


def train(run: Run, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return weights and loss scale after each step, and at the end; a row each."""
    model = make_model(rank)
    ctx = TrainCtx(
        model=model,
        embedding_optimizer=SGD(0.1),
        dense_optimizer=run.optimizer(model.parameters(), lr=LR),
        mixed_precision=False,
        distributed_option=run.option,
    )
    if run.overflows:  # what mixed_precision makes, on the CPU
        ctx._scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    with ctx:
        seen = []
        batches = [batch(rank, number) for number in range(run.num_batches[rank])]
        for number, data in enumerate(DataLoader(Batches(batches))):
            model.overflows = rank == 1 and number in run.overflows
            output, labels = ctx.forward(data)
            ctx.backward(loss_of(output, labels[0]))
            seen.append((weights_of(model), scale_of(ctx)))
    weights, scales = zip(*seen, (weights_of(model), scale_of(ctx)), strict=True)
    return np.stack(weights), np.array(scales)


def scale_of(ctx: TrainCtx) -> float:
    return 1.0 if ctx._scaler is None else ctx._scaler.get_scale()


def weights_of(model: nn.Module) -> np.ndarray:
    return nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()
