"""Batches of the training benchmark: 26 features of one id each, drawn by Zipf's law.

An id is also a row of plain TorchRec's table, so that both kinds of model train on the
same batches. Popular ids stand anywhere in a table, as they do after hashing.

Dimension key:
    B: samples
    F: features, one a table
"""

from collections.abc import Sequence

import numpy as np
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from persia_torchrec.bench.training_settings import (
    NUM_DENSE,
    NUM_TABLES,
    ZIPF_EXPONENT,
    TrainingSettings,
)
from persia_torchrec.bench.workload import Numbers, scattered, zipf_ranks

TABLES = tuple(f"table{f}" for f in range(NUM_TABLES))
"""Names of the tables, and of their features."""

_SEED = 20_235


def draw_batches(settings: TrainingSettings) -> list[Batch]:
    """Draw the batches; always the same for the same settings.

    Returns:
        Dense features float32 ``(B, 13)``, ids int64 as a KeyedJaggedTensor, and
        labels float32 ``(B,)`` that follow from both.
    """
    rng = np.random.default_rng(_SEED)
    return [_draw_batch(rng, settings) for _ in range(settings.batches)]


def _draw_batch(rng: np.random.Generator, settings: TrainingSettings) -> Batch:
    num, num_rows = settings.batch_size, settings.table_rows
    ranks = zipf_ranks(rng, ZIPF_EXPONENT, num_rows, NUM_TABLES * num)
    dense = rng.standard_normal((num, NUM_DENSE), dtype=np.float32)
    is_even = (ranks.reshape(NUM_TABLES, num) % 2 == 0).sum(axis=0)
    logits = dense[:, 0] + 0.5 * (is_even - is_even.mean())
    labels = logits + rng.logistic(size=num) > 0
    return Batch(
        torch.from_numpy(dense),
        KeyedJaggedTensor(
            keys=list(TABLES),
            values=torch.from_numpy(scattered(ranks, num_rows)),
            lengths=torch.ones(NUM_TABLES * num, dtype=torch.int32),
        ),
        torch.from_numpy(labels.astype(np.float32)),
    )


def ids_by_table(batches: Sequence[Batch]) -> list[Numbers]:
    """Return the ids that occur in the batches, int64, ascending, for each table."""
    ids = [b.sparse_features.values().numpy().reshape(NUM_TABLES, -1) for b in batches]
    return [np.unique(of_table) for of_table in np.concatenate(ids, axis=1)]
