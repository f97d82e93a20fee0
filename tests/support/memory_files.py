"""The table of servers with a memory file, and batches that train it."""

import numpy as np
import torch

from persia_torchrec.client.codec import BatchNumber
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.sharding.on_device import DeviceGradients
from persia_torchrec.table import TableSpec
from tests.support.servers import ids_of, missed

IDS = ids_of(*range(0, 2000, 7), 2**64 - 1)
SPEC = TableSpec(name="item", dim=8, optimizer=Adagrad(0.1), keeps_metadata=True)


def train(client, number, *, is_late=False):
    """Train a batch; return the rows that it read.

    Gradients that are late are copied when they are sent, as those on a device.
    """
    batch, tables = BatchNumber(1, number), [("item", client.split(IDS))]
    rows = client.pull(tables, batch=batch)
    grads = np.random.default_rng(number).normal(size=rows[0].shape)
    given = [grads.astype(np.float32)]
    if is_late:
        given = DeviceGradients([torch.from_numpy(given[0])], None)
    assert missed(client.push(tables, given, batch)) == 0
    return rows[0].tobytes()
