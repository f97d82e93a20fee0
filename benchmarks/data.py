"""How many rows a second does a dataset read from CSV, and from Parquet?

Made-up click logs: a label, text of few and of many values, and lists of tokens, by
Zipf. Both files are opened and read for one epoch, in turns, and every batch of one is
compared with that of the other. ``opened`` is the time until the first batch could be
asked for: of a CSV file every line is checked then.
"""

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import torch

from benchmarks.harness import Benchmark, Settings, Table, timed
from persia_torchrec.datasets.batches import TorchRecBatch
from persia_torchrec.datasets.columns import Column, IdColumn, LabelColumn
from persia_torchrec.datasets.conversion import write_parquet
from persia_torchrec.datasets.formats import CsvDataset, ParquetDataset
from persia_torchrec.errors import StoreError


@dataclass(frozen=True, kw_only=True)
class DataSettings(Settings):
    """The rows that are read."""

    rows: Annotated[int, "of the files"] = 100_000
    texts: Annotated[int, "columns of one token"] = 15
    lists: Annotated[int, "columns of several tokens"] = 2
    tokens: Annotated[int, "of a list, at most"] = 30
    batch_size: Annotated[int, "rows of a batch"] = 512
    repeats: Annotated[int, "epochs of each kind of file"] = 5


def write_csv(path: Path, settings: DataSettings) -> list[Column]:
    """Write made-up rows; return the columns."""
    rng = np.random.default_rng(20_240)
    columns: list[Column] = [LabelColumn("click")]
    fields = [rng.integers(2, size=settings.rows).astype(str).tolist()]
    for number in range(settings.texts):
        ids = rng.zipf(1.1 + 0.1 * number, settings.rows) % 10**6
        fields.append([f"{value}" for value in ids.tolist()])
        columns.append(IdColumn(f"text{number}"))
    for number in range(settings.lists):
        sizes = rng.integers(settings.tokens + 1, size=settings.rows)
        ids = (rng.zipf(1.3, int(sizes.sum())) % 10**6).astype(str)
        parts = np.split(ids, np.cumsum(sizes)[:-1])
        fields.append(["|".join(part.tolist()) for part in parts])
        columns.append(IdColumn(f"list{number}", separator="|"))
    with path.open("w", encoding="utf-8") as file:
        file.writelines(",".join(row) + "\n" for row in zip(*fields, strict=True))
    return columns


def _require_equal(csv: list[TorchRecBatch], parquet: list[TorchRecBatch]) -> None:
    for one, other in zip(csv, parquet, strict=True):
        pairs = [
            (one.id_features.values(), other.id_features.values()),
            (one.id_features.lengths(), other.id_features.lengths()),
            *zip(one.labels, other.labels, strict=True),
        ]
        if not all(torch.equal(a, b) for a, b in pairs):
            raise StoreError("CSV and Parquet must give equal batches. They differ.")


def _measure_files(settings: DataSettings) -> list[Table]:
    with tempfile.TemporaryDirectory() as folder:
        csv, parquet = Path(folder, "rows.csv"), Path(folder, "rows.parquet")
        columns = write_csv(csv, settings)
        write_parquet(csv, parquet, columns)
        size = settings.batch_size
        kinds: dict[str, tuple[type[CsvDataset] | type[ParquetDataset], Path]]
        kinds = {"CSV": (CsvDataset, csv), "Parquet": (ParquetDataset, parquet)}
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
        for _ in range(settings.repeats):
            read: dict[str, list[TorchRecBatch]] = {}
            for name, (kind, path) in kinds.items():
                opened_s, dataset = timed(partial(kind, path, size, columns))
                read_s, read[name] = timed(partial(list, dataset))
                seconds[name].append((opened_s, read_s))
            _require_equal(read["CSV"], read["Parquet"])
        bytes_of = {name: path.stat().st_size for name, (_, path) in kinds.items()}
    rows, of_csv = [], seconds["CSV"]
    for name, taken in seconds.items():
        ratio = median(sum(a) / sum(b) for a, b in zip(of_csv, taken, strict=True))
        opened_s, read_s = (median(one) for one in zip(*taken, strict=True))
        rate = settings.rows / median(sum(both) for both in taken)
        rows.append(
            [name, bytes_of[name] / settings.rows, opened_s, read_s, rate, ratio]
        )
    question = "One epoch, opened and read in turns; the median of all turns."
    header = "file | bytes a row | opened, s | read, s | rows/s | of CSV's rows/s"
    return [Table("files", question, header, rows)]


BENCHMARK = Benchmark(
    name="data",
    normal=DataSettings(),
    tiny=DataSettings(rows=300, texts=2, tokens=3, batch_size=64, repeats=2),
    figures={"files": _measure_files},
)
