"""What rows would be if they were made now, without making them."""

from dataclasses import replace

import numpy as np

from persia_torchrec.embedding.admission import AdmitAll
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.lookup import Ids
from persia_torchrec.store.rows import Floats
from persia_torchrec.table import TableSpec


def initial_rows(spec: TableSpec, ids_N: Ids) -> Floats:
    """Return the rows that ids of a table start with, on whatever server.

    Args:
        spec: the table.
        ids_N: uint64 ``(N,)``, without repeats.

    Returns:
        float32 ``(N, D + S)``, weights and optimizer state.
    """
    store = EmbeddingStore(max(len(ids_N), 1), optimizer_engine="fused")
    table = store.add_table(replace(spec, admission=AdmitAll()))
    weights_ND = np.empty((len(ids_N), spec.dim), dtype=np.float32)
    store.lookup(table, ids_N, weights_ND, training=True)
    return store.read(table, ids_N)
