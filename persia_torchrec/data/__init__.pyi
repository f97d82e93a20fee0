from persia_torchrec.datasets.columns import (
    DenseColumn as DenseColumn,
    IdColumn as IdColumn,
    LabelColumn as LabelColumn,
)
from persia_torchrec.datasets.formats import (
    ArrowDataset as ArrowDataset,
    CsvDataset as CsvDataset,
    JsonDataset as JsonDataset,
    NpyDataset as NpyDataset,
    ParquetDataset as ParquetDataset,
)
from persia_torchrec.datasets.formats import write_parquet as write_parquet
from persia_torchrec.datasets.files import CsvFormat as CsvFormat
from persia_torchrec.datasets.steps import (
    plain_tensors as plain_tensors,
    torchrec_batch as torchrec_batch,
)
from persia_torchrec.persia.loader import (
    DataLoader as DataLoader,
    IterableDataset as IterableDataset,
    IterableDatasetBase as IterableDatasetBase,
    PersiaTrainingBatch as PersiaTrainingBatch,
    StreamingDataset as StreamingDataset,
)
from persia_torchrec.datasets.work_queue import (
    RowGroups as RowGroups,
    WorkQueue as WorkQueue,
    row_group_slices as row_group_slices,
)
