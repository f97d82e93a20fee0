"""A dense parameter and the rows of a store, which move alike."""

import numpy as np
import torch

from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.table import TableSpec

IDS = np.arange(6, dtype=np.uint64)
DIM, STEPS = 4, 50


def gradients(step):
    return np.random.default_rng(step).normal(size=(len(IDS), DIM)).astype(np.float32)


def move_both(of_rows, dense):
    """Compare a parameter and the rows of a store, step by step."""
    store = EmbeddingStore(capacity_rows=100)
    (table,) = store.add_tables([TableSpec(name="t", dim=DIM, optimizer=of_rows)])
    start = np.empty((len(IDS), DIM), dtype=np.float32)
    store.lookup(table, IDS, start, training=True)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = dense([parameter])
    for step in range(STEPS):
        with store.rows.transaction():
            store.add_update(table, IDS, gradients(step))
        parameter.grad = torch.from_numpy(gradients(step))
        optimizer.step()
        rows = store.read(table, IDS)[:, :DIM]
        np.testing.assert_allclose(parameter.detach(), rows, rtol=1e-6, atol=1e-6)
    assert np.abs(rows - start).max() > 0.05
