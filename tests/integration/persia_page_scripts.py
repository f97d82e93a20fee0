"""The complete example of PERSIA's page on the training context, as a job.

With the data loader of the page on customization; data and model are our own. What had
to be corrected stands in ``test_persia_pages.py``. At the end the trainer tests once
more, when its training context is over.
"""

from pathlib import Path

from tests.support.forked_jobs import ForkedJob

FILES = {
    "global_config.yml": """
common_config:
  job_type: Train
embedding_parameter_server_config:
  capacity: 1000000
""",
    "embedding_config.yml": """
slots_config:
  user_id:
    dim: 8
  photo_id:
    dim: 8
""",
    "data_generator.py": '''
import numpy as np

from persia_torchrec.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
)

BATCH_SIZE = 64


def make_dataloader(first, last):
    """Every other user likes most photos, and odd photos are liked more."""
    for seed in range(first, last):
        rng = np.random.default_rng(seed)
        user_id = rng.integers(0, 30, BATCH_SIZE).astype(np.uint64)
        photos = [
            rng.integers(0, 30, num).astype(np.uint64)
            for num in rng.integers(1, 4, BATCH_SIZE)
        ]
        likes = [
            user % 2 - 0.5 + 0.7 * (np.mean(ids % 2) - 0.5) > 0
            for user, ids in zip(user_id.astype(int), photos)
        ]
        noise = rng.normal(size=(BATCH_SIZE, 2)).astype(np.float32)
        yield (
            [NonIDTypeFeature(noise, name="noise")],
            [
                IDTypeFeatureWithSingleID("user_id", user_id),
                IDTypeFeature("photo_id", photos),
            ],
            [Label(np.array(likes, dtype=np.float32).reshape(-1, 1), name="ctr")],
        )
''',
    "data_loader.py": """
from data_generator import make_dataloader

from persia_torchrec.ctx import DataCtx
from persia_torchrec.embedding.data import PersiaBatch

loader = make_dataloader(0, 250)

with DataCtx() as ctx:
    for (non_id_type_features, id_type_features, labels) in loader:
        batch_data = PersiaBatch(
            id_type_features=id_type_features,
            non_id_type_features=non_id_type_features,
            labels=labels,
            requires_grad=True,
        )
        ctx.send_data(batch_data)
""",
    "model.py": """
from typing import List

import torch


class DNN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(18, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
        )

    def forward(
        self,
        non_id_type_feature_tensors: List[torch.Tensor],
        id_type_feature_embedding_tensors: List[torch.Tensor],
    ):
        columns = non_id_type_feature_tensors + id_type_feature_embedding_tensors
        return torch.sigmoid(self.layers(torch.cat(columns, dim=1)))
""",
    "train.py": """
import json
import os

import numpy as np
import torch
from data_generator import make_dataloader
from model import DNN

from persia_torchrec.ctx import EmbeddingCtx, PreprocessMode, TrainCtx, eval_ctx
from persia_torchrec.data import DataLoader, IterableDataset, StreamingDataset
from persia_torchrec.embedding import EmbeddingConfig
from persia_torchrec.embedding.data import PersiaBatch
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.env import get_local_rank, get_rank, get_world_size
from persia_torchrec.logger import get_default_logger
from persia_torchrec.prelude import PersiaBatchDataSender  # as on the page
from persia_torchrec.utils import setup_seed

logger = get_default_logger("nn_worker")

setup_seed(3)

test_interval = 60


class TestDataset(IterableDataset):
    def __iter__(self):
        for non_id_type_features, id_type_features, labels in make_dataloader(900, 920):
            yield PersiaBatch(
                id_type_features,
                non_id_type_features=non_id_type_features,
                labels=labels,
                requires_grad=False,
                meta=json.dumps({"weight": 0.9}),
            )


def accuracy_of(ctx, data_loader):
    hits = []
    for data in data_loader:
        assert json.loads(data.consume_all_meta_data()) == {"weight": 0.9}
        (output, labels) = ctx.forward(data)
        hits.append(float((torch.round(output) == labels[0]).float().mean()))
    return np.mean(hits)


def test(model: torch.nn.Module, data_loader: DataLoader, cuda: bool):
    model.eval()
    with eval_ctx(model=model) as ctx, torch.no_grad():
        accuracy = accuracy_of(ctx, data_loader)
    model.train()
    return accuracy


if __name__ == "__main__":
    model = DNN()
    logger.info("init Simple DNN model...")
    rank, device_id, world_size = get_rank(), get_local_rank(), get_world_size()

    cuda = bool(int(os.environ.get("ENABLE_CUDA", 0)))
    mixed_precision = True

    if cuda:
        torch.cuda.set_device(device_id)
        model.cuda(device_id)
    else:
        mixed_precision = False
        device_id = None

    logger.info(f"device_id is {device_id}")

    dense_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    embedding_optimizer = Adagrad(lr=1e-1)
    loss_fn = torch.nn.BCELoss(reduction="mean")

    embedding_config = EmbeddingConfig(
        emb_initialization=(-1, 1), admit_probability=0.8, weight_bound=1
    )

    num_tests = 0
    with TrainCtx(
        model=model,
        embedding_config=embedding_config,
        embedding_optimizer=embedding_optimizer,
        dense_optimizer=dense_optimizer,
        mixed_precision=mixed_precision,
        device_id=device_id,
    ) as ctx:
        train_dataloader = DataLoader(StreamingDataset(10))
        test_loader = DataLoader(TestDataset())

        logger.info("start to training...")
        for (batch_idx, data) in enumerate(train_dataloader):
            (output, labels) = ctx.forward(data)
            label = labels[0]
            loss = loss_fn(output, label)
            scaled_loss = ctx.backward(loss)
            accuracy = (torch.round(output) == label).sum() / label.shape[0]

            logger.info(
                f"current idx: {batch_idx} loss: {float(loss)} "
                f"scaled_loss: {float(scaled_loss)} accuracy: {float(accuracy)}"
            )
            if batch_idx % test_interval == 0 and batch_idx != 0:
                test(model, test_loader, cuda)
                num_tests += 1
        within = test(model, test_loader, cuda)

    print(f"tested {num_tests} times")
    print(f"accuracy within the training {within:.6f}")

    model.eval()
    with EmbeddingCtx(PreprocessMode.EVAL, model=model, device_id=device_id) as ctx:
        after = accuracy_of(ctx, test_loader)
    print(f"accuracy after the training {after:.6f}")
""",
}


class Scripts:
    """The scripts, written to a folder, and how they are started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name, text in FILES.items():
            (folder / name).write_text(text)

    def start(self) -> ForkedJob:
        """Start the whole job."""
        return ForkedJob(
            self._folder,
            "train",
            *("--nn_worker", "train.py", "--data_loader", "data_loader.py"),
            *("--embedding_config", "embedding_config.yml"),
            *("--global_config", "global_config.yml"),
            *("--servers", "2", "--embedding_workers", "2"),
        )
