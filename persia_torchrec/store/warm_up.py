"""Compile, or load, every loop of the store before the first request needs it."""

import numpy as np

from persia_torchrec.embedding.optim import SGD, Adagrad, Adam
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.table import TableSpec

_OPTIMIZERS = {
    "sgd": SGD(0.1),
    "adagrad": Adagrad(),
    "rowwise adagrad": Adagrad(vectorwise_shared=True),
    "adam": Adam(),
}


def warm_up() -> None:
    """Run every loop once, on a store of its own.

    The first time on a machine this takes some twenty seconds; later processes find
    the machine code on disk.
    """
    store = EmbeddingStore(4)
    ids = np.arange(6, dtype=np.uint64)
    for name, optimizer in _OPTIMIZERS.items():
        table = store.add_table(TableSpec(name=name, dim=2, optimizer=optimizer))
        rows = np.zeros((len(ids), 2), dtype=np.float32)
        for _ in range(300):  # until log and index have been made larger
            store.lookup(table, ids, rows, training=True)
        store.lookup(table, ids, rows, training=False)
        store.update(table, ids, rows)
        store.write(table, ids[:4], rows[:4])
        store.read(table, ids)
