"""A table of a few rows on a store, trained by given gradients."""

import numpy as np

from persia_torchrec.store.embedding_store import EmbeddingStore, UpdateResult
from persia_torchrec.table import TableSpec
from tests.support.trained_elsewhere import NUM_ROWS

EVERY_DIM = [1, 3, 8, 64]


class OneTable:
    """A table of a few rows on a store, with weights that are set."""

    def __init__(self, optimizer, weights, **settings):
        dim = weights.shape[1]
        spec = TableSpec(name="item", dim=dim, optimizer=optimizer, **settings)
        self.store = EmbeddingStore(NUM_ROWS)
        self.store.add_table(spec)
        self.ids = np.arange(len(weights), dtype=np.uint64)
        self.store.write(0, self.ids, weights)

    def step(self, rows, grads):
        assert self.store.update(0, self.ids[rows], grads) == UpdateResult(0, 0)

    @property
    def weights(self):
        return self.store.read(0, self.ids)[:, : self.store.tables[0].dim]

    @property
    def state(self):
        return self.store.read(0, self.ids)[:, self.store.tables[0].dim :]


def train_table(weights, steps, optimizer, **settings):
    table = OneTable(optimizer, weights, **settings)
    for rows, grads in steps:
        table.step(rows, grads)
    return table
