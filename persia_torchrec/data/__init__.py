"""Batches on their way to the model: datasets, the loader, KeyedJaggedTensors.

``torchrec.py`` needs torchrec and is imported by its full name.
"""

from persia_torchrec.data.dataset import (
    IterableDataset,
    IterableDatasetBase,
    StreamingDataset,
)
from persia_torchrec.data.loader import DataLoader, PersiaTrainingBatch

__all__ = [
    "DataLoader",
    "IterableDataset",
    "IterableDatasetBase",
    "PersiaTrainingBatch",
    "StreamingDataset",
]
