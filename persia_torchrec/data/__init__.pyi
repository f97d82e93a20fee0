from persia_torchrec.datasets.columns import (
    DenseColumn as DenseColumn,
    IdColumn as IdColumn,
    LabelColumn as LabelColumn,
)
from persia_torchrec.datasets.dataset import (
    CsvDataset as CsvDataset,
    ParquetDataset as ParquetDataset,
)
from persia_torchrec.datasets.files import write_parquet as write_parquet
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
