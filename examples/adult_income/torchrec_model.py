"""The trainer of the Adult example as a TorchRec user writes it.

The same data loaders feed it, unchanged: they send ids to this process itself, and the
job has no embedding worker. Its tables are the slots of ``embedding_config.yml``, and
its rows those that ``train.py`` trains.

    data_loader.py -> DataLoader(as_torchrec=True) -> TrainPipelineSparseDist

The environment and what it prints are those of ``train.py``.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from adult import AdultRows
from data_loader import batches
from model import DNN, EMBEDDING_DIM
from obtain import obtain_adult
from torchmetrics.functional.classification import binary_auroc
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
from train import EMBEDDING_STALENESS, LOSS_FILE, REPRODUCIBLE, SEED, logger

from persia_torchrec import (
    Adagrad,
    EmbeddingClient,
    join,
    recoverable,
    remote_sharders,
)
from persia_torchrec.data import DataLoader, StreamingDataset
from persia_torchrec.env import data_dir, embedding_config_path, get_rank
from persia_torchrec.utils import setup_seed

SLOTS = ["workclass", "education", "marital_status", "occupation"]
SLOTS += ["relationship", "race", "gender", "native_country"]


class TorchRecModel(torch.nn.Module):
    """The network of ``model.py`` behind a collection of tables."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = DNN()
        self.bags = EmbeddingBagCollection(
            tables=[
                # The name is the slot's, or that of its feature group. The servers'
                # tables have no length.
                EmbeddingBagConfig(1, EMBEDDING_DIM, slot, feature_names=[slot])
                for slot in SLOTS
            ],
            device=torch.device("meta"),
        )
        self.loss = torch.nn.BCELoss()

    def forward(
        self, batch: Batch
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return the loss, of which a pipeline runs the backward pass, and the output.

        That is the loss, and the probability of the label 1, float32 ``(B, 1)``.
        """
        embeddings = self.bags(batch.sparse_features).values()
        output = self.dense([batch.dense_features], [embeddings])
        loss = self.loss(output, batch.labels)
        return loss, (loss.detach(), output.detach())


def train(
    model: DistributedModelParallel,
    optimizer: torch.optim.Optimizer,
    client: EmbeddingClient,
    sharders: list,
    device: torch.device,
) -> list[float]:
    """Take one step per batch until the data loaders have ended; return the losses.

    Started again, it continues where the last checkpoint was.
    """
    loader = DataLoader(
        StreamingDataset(10),
        reproducible=REPRODUCIBLE,
        as_torchrec=True,
        ids_on_host=True,
    )
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    losses = []
    state = {"model": model, "optimizer": optimizer}
    with join(model), recoverable(None, state, client, sharders) as run:
        data = run.skip(loader)
        while True:
            try:
                loss, _ = pipeline.progress(data)
            except StopIteration:
                break
            losses.append(loss.item())
            run.step()
    pipeline.detach()
    sharders.flush()
    return losses


def evaluate(
    model: DistributedModelParallel, rows: AdultRows, device: torch.device
) -> float:
    """Return the AUC on the test rows, which this process reads."""
    data = batches(rows, requires_grad=False)
    scores, targets = [], []
    model.eval()
    with torch.no_grad():
        for batch in DataLoader(data, as_torchrec=True, device=device):
            _, (_, output) = model(batch)
            scores.append(output.cpu())
            targets.append(batch.labels.cpu())
    return float(binary_auroc(torch.cat(scores), torch.cat(targets).int()))


def main() -> None:
    """Train one pass and test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default=data_dir(), help="folder of adult.test")
    data = obtain_adult(parser.parse_args().data_dir)
    logger.info("data: %s", data.source)
    dist.init_process_group("gloo")
    setup_seed(SEED)
    device = torch.device("cpu")
    client = EmbeddingClient.of_job()
    sharders = remote_sharders(
        client,
        Adagrad(lr=1e-2),
        staleness=EMBEDDING_STALENESS,
        embedding_config=embedding_config_path(),
    )
    model = DistributedModelParallel(
        TorchRecModel(),
        device=device,
        sharders=sharders,
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False),
    )
    dense = [p for p in model.parameters() if p.device.type != "meta"]
    optimizer = torch.optim.SGD(dense, lr=0.1)
    losses = train(model, optimizer, client, sharders, device)
    auc = evaluate(model, data.test, device)
    if get_rank() == 0:
        logger.info("trained %d steps", len(losses))
        if LOSS_FILE:
            Path(LOSS_FILE).write_text("".join(f"{loss.hex()}\n" for loss in losses))
        print(f"test AUC {auc:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
