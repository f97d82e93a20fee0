"""A PERSIA user's scripts, as PERSIA's own documentation writes them.

Nothing but the imports says that it is not PERSIA. Whether a user clicks on the photos
that are shown follows from the user's and the photos' ids, so that there is something
to learn.
"""

from collections.abc import Mapping
from pathlib import Path

from tests.support.forked_jobs import ForkedJob
from tests.support.hosts import Host

GLOBAL_CONFIG = """
common_config:
  job_type: Train
embedding_worker_config:
  forward_buffer_size: 1000
embedding_parameter_server_config:
  capacity: 1000000
"""

EMBEDDING_CONFIG = """
feature_index_prefix_bit: 8
slots_config:
  user_id:
    dim: 16
  photo_id:
    dim: 8
    sqrt_scaling: true
  liked_photo_id:
    dim: 8
feature_groups:
  photos:
    - photo_id
    - liked_photo_id
"""

DATA_GENERATOR = """
import numpy as np

from persia_torchrec.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)

BATCH_SIZE = 64


def photos(rng):
    return [
        rng.integers(0, 60, length).astype(np.uint64)
        for length in rng.integers(0, 5, BATCH_SIZE)
    ]


def make_batch(number, requires_grad=True):
    rng = np.random.default_rng(number)
    user_id = rng.integers(0, 40, BATCH_SIZE).astype(np.uint64)
    photo_id, liked_photo_id = photos(rng), photos(rng)
    height_batch_data = rng.normal(170, 10, (BATCH_SIZE, 1)).astype(np.float32)
    image_data = rng.integers(0, 255, (BATCH_SIZE, 4, 4, 3)).astype(np.uint8)
    taste = np.where(user_id % 2 == 0, 1.5, -1.5)
    score = taste + [np.sum(ids % 3 == 1) - 0.7 for ids in photo_id]
    ctr_batch_data = (score > 0).reshape(-1, 1)
    income_batch_data = (user_id * 1000).astype(np.float32).reshape(-1, 1)
    return PersiaBatch(
        [
            IDTypeFeatureWithSingleID("user_id", user_id),
            IDTypeFeature("photo_id", photo_id),
            IDTypeFeature("liked_photo_id", liked_photo_id),
        ],
        non_id_type_features=[
            NonIDTypeFeature(height_batch_data, name="height"),
            NonIDTypeFeature(image_data, name="LSVR_image"),
        ],
        labels=[
            Label(ctr_batch_data, name="ctr"),
            Label(income_batch_data, name="income"),
        ],
        requires_grad=requires_grad,
        meta=str(number).encode(),
    )
"""

DATA_LOADER = """
import os

from data_generator import make_batch
from tqdm import tqdm

from persia_torchrec.ctx import DataCtx
from persia_torchrec.env import get_replica_index, get_replica_size
from persia_torchrec.logger import get_default_logger

logger = get_default_logger("data_loader")

if __name__ == "__main__":
    numbers = range(
        get_replica_index(), int(os.environ["NUM_BATCHES"]), get_replica_size()
    )
    with DataCtx() as ctx:
        for number in tqdm(numbers, desc="gen batch data..."):
            ctx.send_data(make_batch(number))
            logger.info(f"sent batch {number}")
"""

MODEL = """
from typing import List

import torch


class DNN(torch.nn.Module):
    def __init__(self):
        super(DNN, self).__init__()
        self.image = torch.nn.Linear(4 * 4 * 3, 4)
        self.sparse = torch.nn.Linear(16 + 8 + 8, 32)
        self.bn = torch.nn.BatchNorm1d(32 + 4 + 1)
        self.ctr = torch.nn.Linear(32 + 4 + 1, 1)
        self.income = torch.nn.Linear(32 + 4 + 1, 1)

    def forward(
        self,
        non_id_type_feature_tensors: List[torch.Tensor],
        id_type_feature_embedding_tensors: List[torch.Tensor],
    ):
        height, image = non_id_type_feature_tensors
        x = torch.cat(
            [
                self.sparse(torch.cat(id_type_feature_embedding_tensors, dim=1)),
                self.image(image.float().flatten(1) / 255),
                height,
            ],
            dim=1,
        )
        x = self.bn(x)
        return torch.sigmoid(self.ctr(x)), self.income(x)
"""

TRAIN = """
import hashlib
import os

import numpy as np
import torch
from data_generator import make_batch
from model import DNN

from persia_torchrec.ctx import TrainCtx, eval_ctx
from persia_torchrec.data import DataLoader, IterableDataset, StreamingDataset
from persia_torchrec.embedding import EmbeddingConfig
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.env import get_local_rank, get_rank, get_world_size
from persia_torchrec.logger import get_default_logger
from persia_torchrec.utils import setup_seed

logger = get_default_logger("nn_worker")

setup_seed(3)

TEST_INTERVAL = 10
LAST_BATCH = int(os.environ.get("LAST_BATCH", "-1"))


class TestDataset(IterableDataset):
    def __init__(self):
        super(TestDataset, self).__init__(buffer_size=10)

    def __iter__(self):
        for number in range(10_000, 10_010):
            yield make_batch(number, requires_grad=False)


def test(model: torch.nn.Module, data_loader: DataLoader):
    hits = []
    model.eval()
    with eval_ctx(model=model) as ctx:
        for batch_idx, batch_data in enumerate(data_loader):
            (pred, _), labels = ctx.forward(batch_data)
            assert batch_data.meta == str(10_000 + batch_idx).encode()
            hits.append(((pred > 0.5) == labels[0]).float().mean().item())
        sizes = ctx.get_embedding_size()
    model.train()
    logger.info(f"test accuracy {np.mean(hits):.4f}, rows {sizes}")
    return np.mean(hits)


if __name__ == "__main__":
    model = DNN()
    rank, device_id, world_size = get_rank(), get_local_rank(), get_world_size()
    logger.info(f"rank {rank} of {world_size}, local rank {device_id}")
    mixed_precision, device_id = False, None

    dense_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    embedding_optimizer = Adagrad(lr=1e-1)
    embedding_config = EmbeddingConfig(
        emb_initialization=(-0.1, 0.1), admit_probability=1.0, weight_bound=10
    )
    loss_fn = torch.nn.BCELoss(reduction="mean")

    with TrainCtx(
        model=model,
        embedding_config=embedding_config,
        embedding_optimizer=embedding_optimizer,
        dense_optimizer=dense_optimizer,
        mixed_precision=mixed_precision,
        device_id=device_id,
    ) as ctx:
        train_dataloader = DataLoader(StreamingDataset(10), embedding_staleness=10)
        test_loader = DataLoader(TestDataset())

        logger.info("start to training...")
        for (batch_idx, data) in enumerate(train_dataloader):
            if batch_idx == LAST_BATCH:
                break
            assert data.meta == str(data.batch_id).encode()
            ((ctr, income), labels) = ctx.forward(data)
            loss = loss_fn(ctr, labels[0].float())
            loss = loss + 1e-3 * (income / 10_000 - labels[1] / 10_000).abs().mean()
            scaled_loss = ctx.backward(loss)
            accuracy = ((ctr > 0.5) == labels[0]).float().mean()
            logger.info(
                f"current idx: {batch_idx} loss: {float(loss)} "
                f"scaled_loss: {float(scaled_loss)} accuracy: {float(accuracy)}"
            )
            if batch_idx % TEST_INTERVAL == 0 and batch_idx != 0:
                test(model, test_loader)
        accuracy = test(model, test_loader)

    dense = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    digest = hashlib.sha256(dense).hexdigest()[:16]
    print(
        f"rank {rank}: trained {batch_idx + (LAST_BATCH < 0)} batches, "
        f"accuracy {accuracy:.4f}, dense {digest}"
    )
"""


class Scripts:
    """The scripts, written to a folder, and how they are started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("data_generator.py", DATA_GENERATOR)
        self.write("data_loader.py", DATA_LOADER)
        self.write("model.py", MODEL)
        self.write("train.py", TRAIN)
        self.write("embedding_config.yml", EMBEDDING_CONFIG)
        self.write("global_config.yml", GLOBAL_CONFIG)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def start(
        self,
        *arguments: str,
        num_batches: int,
        hosts: Mapping[str, Host] | None = None,
        **variables: str,
    ) -> ForkedJob:
        """Start the whole job; further arguments are those of the component."""
        return ForkedJob(
            self.folder,
            "train",
            *("--nn_worker", "train.py", "--data_loader", "data_loader.py"),
            *("--embedding_config", "embedding_config.yml"),
            *("--global_config", "global_config.yml"),
            *arguments,
            variables={"NUM_BATCHES": str(num_batches), **variables},
            hosts=hosts,
        )
