"""A small PersiaBatch whose bytes are stored, and batches as values that compare."""

import numpy as np

from persia_torchrec.persia.batch import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)


def content(batch):
    """All that a batch says, as values that compare."""
    return (
        [
            (type(f), f.name, f.ids.tobytes(), f.lengths.tobytes())
            for f in batch.id_type_features
        ],
        [
            (type(d), d.name, d.data.dtype, d.data.shape, d.data.tobytes())
            for d in batch.non_id_type_features + batch.labels
        ],
        (batch.batch_size, batch.requires_grad, batch.meta, batch.batch_id),
    )


def small_batch():
    """The batch that ``batch_v1.bin`` holds."""
    batch = PersiaBatch(
        [
            IDTypeFeature("basket", [np.array([7, 2**64 - 1], np.uint64), empty_ids()]),
            IDTypeFeatureWithSingleID("user", np.array([1, 2], dtype=np.uint64)),
        ],
        [NonIDTypeFeature(np.array([[1.5], [-2.5]], dtype=np.float32), "height")],
        [Label(np.array([True, False]), "clicked")],
        meta=b"day 3",
    )
    batch.batch_id = 12
    return batch


def empty_ids():
    return np.empty(0, dtype=np.uint64)
