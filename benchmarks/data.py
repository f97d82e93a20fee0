"""How many rows a second does a dataset read, and how many does pyarrow alone?

``files``: made-up click logs, a label, text of few and of many values, and lists of
tokens, by Zipf. A CSV and a Parquet file are opened and read for one epoch, in turns,
and every batch of one is compared with that of the other.

``parquet``: a label, 13 numbers and 26 lists of 0 to 5 ids, in row groups of several
sizes, beside ``read_row_group`` of pyarrow in one thread. ``lines``: CSV and Criteo's
lines of as many columns, beside ``read_csv`` in one thread of the same columns.
``memory``: what an epoch takes above what is taken after the imports, in a process of
its own.
"""

import multiprocessing
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch

from benchmarks.harness import Benchmark, Settings, Table, timed
from examples.dlrm import criteo
from persia_torchrec.data import (
    CsvDataset,
    DenseColumn,
    IdColumn,
    LabelColumn,
    ParquetDataset,
    write_parquet,
)
from persia_torchrec.device.batches import TorchRecBatch
from persia_torchrec.errors import StoreError

Column = IdColumn | LabelColumn | DenseColumn

_MIB = 2**20
_BLOCK_ROWS = 65_536


@dataclass(frozen=True, kw_only=True)
class DataSettings(Settings):
    """The rows that are read."""

    rows: Annotated[int, "of the files"] = 100_000
    texts: Annotated[int, "columns of one token"] = 15
    lists: Annotated[int, "columns of several tokens"] = 2
    tokens: Annotated[int, "of a list, at most"] = 30
    batch_size: Annotated[int, "rows of a batch"] = 512
    repeats: Annotated[int, "epochs of each kind of file"] = 5
    wide_rows: Annotated[int, "of the files beside pyarrow"] = 300_000
    wide_batch_size: Annotated[int, "rows of a batch of these"] = 4096
    row_groups: Annotated[tuple[int, ...], "rows of each"] = (
        *(100, 8192, 65_536),
        300_000,
    )
    memory_row_groups: Annotated[tuple[int, ...], "likewise, for memory"] = (
        _BLOCK_ROWS,
        2**20,
    )


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


# Beside pyarrow

_LISTS = [f"list{n}" for n in range(26)]
_NUMBERS = [f"number{n}" for n in range(13)]
WIDE: list[Column] = [
    LabelColumn("label"),
    *(DenseColumn(name) for name in _NUMBERS),
    *(IdColumn(name, separator="|", is_text=False) for name in _LISTS),
]
"""The columns of :func:`wide_table`."""


def wide_table(num_rows: int) -> pa.Table:
    """Return made-up rows: a label, 13 numbers, and 26 lists of 0 to 5 ids."""
    rng = np.random.default_rng(3)
    table = {"label": rng.integers(2, size=num_rows).astype(np.float32)}
    table |= {name: rng.random(num_rows, np.float32) for name in _NUMBERS}
    for name in _LISTS:
        ends = np.cumsum(rng.integers(6, size=num_rows), dtype=np.int32)
        ids = rng.zipf(1.3, int(ends[-1])) % 10**6
        offsets = pa.array(np.concatenate([np.zeros(1, np.int32), ends]))
        table[name] = pa.ListArray.from_arrays(offsets, pa.array(ids))
    return pa.table(table)


def _read_groups(path: Path) -> int:
    with pq.ParquetFile(path) as file:
        return sum(
            file.read_row_group(group, use_threads=False).num_rows
            for group in range(file.num_row_groups)
        )


def _num_rows(batches: Callable[[], Iterable[TorchRecBatch]]) -> int:
    return sum(batch.id_features.stride() for batch in batches())


def _paired(
    ways: Sequence[Callable[[], int]], num_rows: int, repeats: int
) -> list[tuple[float, list[float]]]:
    """Return rows a second of each way, and its parts of the first one's in turns."""
    seconds: list[list[float]] = [[] for _ in ways]
    for way in ways:
        if way() != num_rows:
            raise StoreError(f"{num_rows} rows must be read. Fewer or more were.")
    for _ in range(repeats):
        for taken, way in zip(seconds, ways, strict=True):
            taken.append(timed(way)[0])
    return [
        (
            num_rows / median(taken),
            [a / b for a, b in zip(seconds[0], taken, strict=True)],
        )
        for taken in seconds
    ]


def _measure_parquet(settings: DataSettings) -> list[Table]:
    rows: list[list[object]] = []
    wide = wide_table(settings.wide_rows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.parquet")
        for size in settings.row_groups:
            table = wide.slice(0, max(600 * size, 1))
            pq.write_table(table, path, row_group_size=size)
            dataset = partial(ParquetDataset, path, settings.wide_batch_size, WIDE)
            kinds = [dataset, partial(dataset, shuffle=True)]
            kinds += [partial(dataset, num_parallel_reads=2)]
            ways = [
                partial(_read_groups, path),
                *(partial(_num_rows, k) for k in kinds),
            ]
            found = _paired(ways, table.num_rows, settings.repeats)
            [plain, shuffled, two] = [parts for _, parts in found[1:]]
            shares = [a / b for a, b in zip(shuffled, plain, strict=True)]
            speedups = [a / b for a, b in zip(two, plain, strict=True)]
            cells = [size, found[0][0], found[1][0], median(plain)]
            rows.append([*cells, median(shares), median(speedups)])
    question = (
        "Beside read_row_group of pyarrow in one thread; the median of all turns."
    )
    header = "rows a group | pyarrow, rows/s | dataset, rows/s | of pyarrow's | "
    header += "shuffled, of the dataset's | two readers, of the dataset's"
    return [Table("parquet", question, header, rows)]


def _criteo_rows(path: Path, batch_size: int) -> int:
    batches = criteo.batches(criteo.read_lines([path]), batch_size)
    return sum(len(batch.labels) for batch in batches)


def _read_csv(path: Path, kinds: dict[str, pa.DataType], delimiter: str) -> int:
    options = pa.csv.ReadOptions(use_threads=False, column_names=list(kinds))
    convert = pa.csv.ConvertOptions(column_types=kinds)
    parse = pa.csv.ParseOptions(delimiter=delimiter)
    return int(pa.csv.read_csv(path, options, parse, convert).num_rows)


def _measure_lines(settings: DataSettings) -> list[Table]:
    names = [f"{n}" for n in range(40)]
    columns: list[Column] = [LabelColumn(names[0])]
    columns += [DenseColumn(name, fill=0) for name in names[1:14]]
    columns += [IdColumn(name) for name in names[14:]]
    kinds = dict.fromkeys(names[:14], pa.float64()) | dict.fromkeys(
        names[14:], pa.string()
    )
    num_rows, size = settings.rows, settings.wide_batch_size
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as folder:
        tabs, commas = Path(folder, "tabs"), Path(folder, "commas")
        lines = b"".join(criteo.generate_lines(num_rows, 1))
        tabs.write_bytes(lines)
        commas.write_bytes(lines.replace(b"\t", b","))
        dataset = partial(CsvDataset, commas, size, columns)
        two = partial(dataset, num_parallel_reads=2)
        kinds_of_lines: list[tuple[str, Path, str, Callable[[], int]]] = [
            ("CSV", commas, ",", partial(_num_rows, dataset)),
            ("CSV, two readers", commas, ",", partial(_num_rows, two)),
            ("Criteo's example", tabs, "\t", partial(_criteo_rows, tabs, size)),
        ]
        for name, path, delimiter, way in kinds_of_lines:
            alone = partial(_read_csv, path, kinds, delimiter)
            found = _paired([alone, way], num_rows, settings.repeats)
            rows.append([name, found[0][0], found[1][0], median(found[1][1])])
    question = "Beside read_csv of pyarrow in one thread; the median of all turns."
    header = "lines | pyarrow, rows/s | dataset, rows/s | of pyarrow's"
    return [Table("lines", question, header, rows)]


def _peak_of(path: Path, batch_size: int, *, shuffle: bool) -> list[float]:
    """Return MiB above those after the imports, and seconds to the first batch."""

    def mib(name: str) -> float:
        status = Path("/proc/self/status").read_text()
        found = re.search(rf"{name}:\s+(\d+) kB", status)
        return int(found[1]) / 1024 if found else float("nan")

    few = path.with_name("few")
    list(ParquetDataset(few, batch_size, WIDE, shuffle=shuffle))  # compiles
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before, start = mib("VmRSS"), time.perf_counter()
    batches = iter(ParquetDataset(path, batch_size, WIDE, shuffle=shuffle))
    next(batches)
    first_s = time.perf_counter() - start
    for _ in batches:
        pass
    return [mib("VmHWM") - before, first_s]


def _measure_memory(settings: DataSettings) -> list[Table]:
    rows: list[list[object]] = []
    block = wide_table(min(_BLOCK_ROWS, settings.wide_rows))
    most = max(settings.memory_row_groups)
    fresh = multiprocessing.get_context("forkserver")
    fresh.set_forkserver_preload([__name__])  # imports once, and reads nothing
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows")
        pq.write_table(block.slice(0, 1000), path.with_name("few"))
        for size in settings.memory_row_groups:
            with pq.ParquetWriter(path, block.schema) as writer:
                parts = [block] * max(size // len(block), 1)
                for _ in range(max(most // size, 1)):
                    writer.write_table(pa.concat_tables(parts), row_group_size=size)
            for shuffle in (False, True):
                given = path, settings.wide_batch_size
                with fresh.Pool(1) as pool:
                    peak_mib, first_s = pool.apply(
                        _peak_of, given, {"shuffle": shuffle}
                    )
                blocks = peak_mib * _MIB / block.nbytes
                rows.append([size, shuffle, peak_mib, blocks, first_s])
    question = f"A block is {len(block)} rows in Arrow, {block.nbytes / _MIB:.0f} MiB."
    header = "rows a group | shuffled | peak, MiB | in blocks | first batch, s"
    return [Table("memory", question, header, rows)]


BENCHMARK = Benchmark(
    name="data",
    normal=DataSettings(),
    tiny=DataSettings(
        rows=300,
        texts=2,
        tokens=3,
        batch_size=64,
        repeats=2,
        wide_rows=500,
        wide_batch_size=64,
        row_groups=(100,),
        memory_row_groups=(250,),
    ),
    figures={
        "files": _measure_files,
        "parquet": _measure_parquet,
        "lines": _measure_lines,
        "memory": _measure_memory,
    },
)
