"""The training whose checkpoints ``stored/7774c3f/training`` has, and its data."""

import numpy as np
import torch
from torch import nn

from persia_torchrec import (
    Adagrad,
    Adam,
    AdmitFrequency,
    TableSettings,
    remote_sharders,
)
from persia_torchrec.data import CsvDataset, IdColumn, LabelColumn, WorkQueue
from tests.support.models import tables_of
from tests.support.remote_job import Bags, shard
from tests.support.stored_files import STORED, hex_of

COLUMNS = (IdColumn("id", is_text=False), LabelColumn("label"))
FILES = [STORED / "data" / f"{n}.csv" for n in range(3)]
TABLES = ["first", "second"]
SETTINGS = {
    "first": TableSettings(optimizer=Adam(0.1)),
    "second": TableSettings(admission=AdmitFrequency(2), keeps_metadata=True),
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = Bags(tables_of(TABLES, 20, 2, feature="id"))
        self.top = nn.Linear(4, 1)

    def forward(self, ids):
        return self.top(self.bags(ids).values())


class Trainer:
    """All that the training consists of."""

    def __init__(self, client, seed):
        torch.manual_seed(seed)
        self.client = client
        self.sharders = remote_sharders(client, Adagrad(0.1), tables=SETTINGS)
        self.model = shard(Model(), *self.sharders)
        self.optimizer = torch.optim.Adam(self.model.module.top.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.data = rows_in_order()
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "data": self.data,
            "losses": [],
        }

    def train(self, batch):
        labels = batch.labels[0].reshape(-1, 1).float()
        loss = (self.model(batch.id_features) - labels).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.state["losses"].append(loss.item())

    def describe(self):
        """Return all that it has learnt, as JSON's values."""
        self.sharders.flush()
        ids = np.arange(20, dtype=np.uint64)
        found = self.optimizer.state_dict()["state"]
        return {
            "losses": self.state.get("losses"),
            "weights": [_hex(p) for p in self.model.module.top.parameters()],
            "adam": [{k: _hex(v) for k, v in found[n].items()} for n in sorted(found)],
            "rate": self.scheduler.get_last_lr(),
            "rows": {
                t: hex_of(self.client.read(t, ids, initial=False)) for t in TABLES
            },
            "uses": self.client.metadata("second", ids).frequency.tolist(),
            "steps": [self.client.step(t) for t in TABLES],
        }


def rows_in_order():
    """Return a dataset with shuffled rows."""
    return CsvDataset(FILES, 4, COLUMNS, shuffle=True, seed=3)


def rows_of_a_queue():
    """Return a dataset whose files are taken from a queue."""
    queue = WorkQueue(FILES, 2, seed=3)
    return CsvDataset(queue, 4, COLUMNS, shuffle=True, seed=3)


def ids_in(batch):
    return batch.id_features["id"].values().tolist()


def _hex(tensor):
    return tensor.detach().numpy().tobytes().hex()
