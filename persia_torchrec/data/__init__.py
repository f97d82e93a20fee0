"""Batches on their way to the model; ``torchrec.py`` is imported by its full name."""

from persia_torchrec.data.loader import DataLoader as DataLoader
from persia_torchrec.data.loader import IterableDataset as IterableDataset
from persia_torchrec.data.loader import IterableDatasetBase as IterableDatasetBase
from persia_torchrec.data.loader import PersiaTrainingBatch as PersiaTrainingBatch
from persia_torchrec.data.loader import StreamingDataset as StreamingDataset
