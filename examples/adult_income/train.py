"""The trainer (NN worker) of the Adult example: train, then test.

Trains until the data loaders have sent everything, then evaluates on the test rows
and prints ``test AUC 0.xxxxxx``.

Environment:
    REPRODUCIBLE: 1 to train on the batches in the order in which they were numbered.
    EMBEDDING_STALENESS: batches looked up whose update is not yet applied, at most.
    SEED: of the dense model's first weights.
    PERSIA_CKPT_DIR: folder that gets a checkpoint at the end.
    ADULT_LOSS_FILE: where rank 0 writes the loss of every step, one per line.
"""

import argparse
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from adult import AdultRows
from data_loader import batches
from model import DNN
from obtain import obtain_adult
from torchmetrics.functional.classification import binary_auroc

from persia_torchrec.ctx import TrainCtx, eval_ctx
from persia_torchrec.data import DataLoader, IterableDataset, StreamingDataset
from persia_torchrec.embedding.data import PersiaBatch
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.env import data_dir, get_local_rank, get_rank
from persia_torchrec.logger import get_default_logger
from persia_torchrec.utils import setup_seed

REPRODUCIBLE = bool(int(os.environ.get("REPRODUCIBLE", "0")))
EMBEDDING_STALENESS = int(os.environ.get("EMBEDDING_STALENESS", "10"))
SEED = int(os.environ.get("SEED", "3"))
CHECKPOINT_DIR = os.environ.get("PERSIA_CKPT_DIR")
LOSS_FILE = os.environ.get("ADULT_LOSS_FILE")

logger = get_default_logger("nn_worker")


class EvaluationSet(IterableDataset):
    """The test rows, read in this process: they need no data loader."""

    def __init__(self, rows: AdultRows) -> None:
        super().__init__(buffer_size=10)
        self.rows = rows

    def __iter__(self) -> Iterator[PersiaBatch]:
        yield from batches(self.rows, requires_grad=False)


def train(ctx: TrainCtx, loader: DataLoader) -> list[float]:
    """Take one step per batch until the data loaders have ended; return the losses."""
    loss_fn = torch.nn.BCELoss()
    losses = []
    for step, batch in enumerate(loader):
        output, labels = ctx.forward(batch)
        loss = loss_fn(output, labels[0])
        ctx.backward(loss)
        losses.append(loss.item())
        if step % 50 == 0:
            logger.info("step %d: loss %.6f", step, losses[-1])
    return losses


def evaluate(model: torch.nn.Module, rows: AdultRows) -> float:
    """Return the AUC on the test rows."""
    scores, targets = [], []
    model.eval()
    with eval_ctx(model=model) as ctx, torch.no_grad():
        for batch in DataLoader(EvaluationSet(rows)):
            output, labels = ctx.forward(batch)
            scores.append(output.cpu())
            targets.append(labels[0].cpu())
    return float(binary_auroc(torch.cat(scores), torch.cat(targets).int()))


def main() -> None:
    """Train one pass and test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default=data_dir(), help="folder of adult.test")
    data = obtain_adult(parser.parse_args().data_dir)
    level = logging.WARNING if data.is_made_up else logging.INFO
    logger.log(level, "data: %s", data.source)

    setup_seed(SEED)
    model = DNN()
    device_id = None
    if torch.cuda.is_available():
        # Where each process sees its own GPU only, that has index 0.
        device_id = get_local_rank() % torch.cuda.device_count()
        model.cuda(device_id)

    with TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=1e-2),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        mixed_precision=device_id is not None,
        device_id=device_id,
    ) as ctx:
        loader = DataLoader(
            StreamingDataset(10),
            reproducible=REPRODUCIBLE,
            embedding_staleness=EMBEDDING_STALENESS,
        )
        losses = train(ctx, loader)
        # Every rank evaluates: the model's collectives need all of them.
        auc = evaluate(model, data.test)
        if CHECKPOINT_DIR:
            ctx.dump_checkpoint(CHECKPOINT_DIR, with_jit_model=True)

    if get_rank() == 0:
        logger.info("trained %d steps", len(losses))
        if LOSS_FILE:
            lines = [f"{loss.hex()}\n" for loss in losses]
            Path(LOSS_FILE).write_text("".join(lines))
        print(f"test AUC {auc:.6f}", flush=True)


if __name__ == "__main__":
    main()
