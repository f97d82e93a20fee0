"""Which files a data set is made of, and how loaders share them."""

import functools
import gzip
import http.server
import json
import pickle
import re
import resource
import threading
from collections import Counter
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from persia_torchrec import from_torchrec
from persia_torchrec.data import (
    ArrowDataset,
    CsvDataset,
    DenseColumn,
    IdColumn,
    LabelColumn,
    NpyDataset,
    ParquetDataset,
    WorkQueue,
    plain_tensors,
    torchrec_batch,
)
from persia_torchrec.datasets import reading, tables
from persia_torchrec.datasets.sources import require_same_files
from persia_torchrec.errors import ConfigError, DataError

COLUMNS = IdColumn("id", is_text=False), LabelColumn("label")
DAY = IdColumn("day", column="dt", is_text=False, unit="D")


def ids_of(batches, name="id"):
    return [n for b in batches for n in b.id_features[name].values().tolist()]


def write(path, ids, **settings):
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = pa.array(ids, pa.int64())
    table = pa.table({"id": ids, "label": pa.array([1.0] * len(ids), pa.float64())})
    pq.write_table(table, path, **settings)
    return path


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    """Return a folder as Spark writes it: 40 rows of two days, and a part without."""
    root = tmp_path_factory.mktemp("days")
    for day in range(2):
        for part in range(2):
            first = day * 20 + part * 10
            path = root / f"dt=1970-01-0{day + 1}" / f"part-{part}.parquet"
            write(path, range(first, first + 10), row_group_size=3)
    write(root / "dt=1970-01-01" / "part-2.parquet", [])
    (root / "_SUCCESS").touch()
    (root / "dt=1970-01-01" / ".part-0.crc").write_bytes(b"crc")
    return root


def test_a_folder_a_glob_and_a_list_are_the_same_files(days, caplog):
    parts = sorted(days.glob("*/part-[01].parquet"))
    for files in (days, str(days), f"{days}/dt=*", f"{days}/**/part-[01]*", parts):
        dataset = ParquetDataset(files, 7, [*COLUMNS, DAY])
        assert ids_of(dataset) == list(range(40))
        assert ids_of(dataset, "day") == [0] * 20 + [1] * 20
    assert "1 of 5 files have no rows: " in caplog.text
    assert "dt=1970-01-01/part-2.parquet (" in caplog.text
    assert Counter(ids_of(ParquetDataset(WorkQueue([days]), 7, COLUMNS))) == Counter(
        range(40)
    )


def test_paths_without_a_file_are_named(days, tmp_path):
    for files, message in (
        (tmp_path / "none", "none must be a file. Received: nothing of that name"),
        (f"{tmp_path}/*.parquet", r"\*.parquet must be a file. Received: nothing that"),
        (tmp_path, "a folder without files"),
    ):
        with pytest.raises(DataError, match=message):
            ParquetDataset(files, 7, COLUMNS)
    for files, message in (
        ([], "files must be at least one"),
        ([days, days], "files must be different. Received: .* twice"),
        ("klingon://x", "must be a URL that fsspec can open"),
    ):
        with pytest.raises(ConfigError, match=message):
            ParquetDataset(files, 7, COLUMNS)
    with pytest.raises(
        DataError, match=r"part-2.parquet must have rows. Received: none"
    ):
        ParquetDataset(days / "dt=1970-01-01/part-2.parquet", 7, COLUMNS)


@pytest.mark.parametrize(
    "other", [{"id": ["1"], "label": [1.0]}, {"id": [1], "label": [[1.0]]}]
)
def test_types_that_change_between_files_name_both(days, tmp_path, other):
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table(other), path)
    with pytest.raises(DataError) as caught:
        ParquetDataset([days, path], 7, COLUMNS)
    assert "part-0.parquet" in str(caught.value)
    assert "other.parquet" in str(caught.value)


def test_a_position_is_that_of_its_files_alone(tmp_path):
    for day in range(3):
        (tmp_path / f"{day}").mkdir()
        lines = [f"{100 * (day + 1) + n},1\n" for n in range(40)]
        (tmp_path / f"{day}" / "part-0.csv").write_text("".join(lines))

    def dataset(root, *days):
        paths = [root / f"{day}" / "part-0.csv" for day in days]
        return CsvDataset(paths, 4, COLUMNS)

    first = dataset(tmp_path, 0, 1)
    rows = iter(first)
    seen = ids_of(next(rows) for _ in range(11))
    state = json.loads(json.dumps(first.state_dict()))
    for wrong, message in (((1, 0), "another order"), ((0, 2), "2/part-0.csv")):
        with pytest.raises(ConfigError, match=message):
            dataset(tmp_path, *wrong).load_state_dict(state)
    moved = tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
    second = dataset(moved, 0, 1)
    second.load_state_dict(state)
    assert seen + ids_of(second) == [*range(100, 140), *range(200, 240)]
    paths = [moved / f"{day}" / "part-0.csv" for day in (0, 1)]
    queue = CsvDataset(WorkQueue(paths), 4, COLUMNS).state_dict()
    other = CsvDataset(WorkQueue(paths[::-1]), 4, COLUMNS)
    with pytest.raises(ConfigError, match="another order"):
        other.load_state_dict(queue)


def test_files_cost_no_descriptors(tmp_path):
    for n in range(150):
        (tmp_path / f"{n:03}.csv.gz").write_bytes(gzip.compress(b"%d,1\n" % n))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = max(int(open_one.name) for open_one in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 100, hard))
    try:
        dataset = CsvDataset(tmp_path, 64, COLUMNS)
        assert ids_of(dataset) == list(range(150))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Serves files, and ranges of them, as object stores do."""

    def log_message(self, *args):
        pass

    def do_GET(self):
        path = self.translate_path(self.path)
        with open(path, "rb") as file:  # noqa: PTH123
            data = file.read()
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        start, stop = 0, len(data)
        if match:
            start, stop = int(match[1]), min(int(match[2] or len(data)) + 1, len(data))
        self.send_response(206 if match else 200)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        self.wfile.write(data[start:stop])


def test_files_at_urls(days, tmp_path):
    (tmp_path / "rows.csv").write_text("".join(f"{n},1\n" for n in range(500)))
    memory = fsspec.filesystem("memory")
    memory.pipe("/logs/dt=1970-01-02/rows.csv", (tmp_path / "rows.csv").read_bytes())
    memory.pipe("/logs/_SUCCESS", b"")
    dataset = CsvDataset("memory://logs", 64, [*COLUMNS, DAY])
    assert ids_of(dataset) == list(range(500))
    assert set(ids_of(dataset, "day")) == {1}
    handler = functools.partial(Ranges, directory=str(days))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        urls = [f"{base}/dt=1970-01-0{d}/part-1.parquet" for d in (1, 2)]
        dataset = ParquetDataset(urls, 7, [*COLUMNS, DAY], num_parallel_reads=2)
        assert ids_of(dataset) == [*range(10, 20), *range(30, 40)]
        with pytest.raises(DataError, match=r"must be (a file|readable)"):
            ParquetDataset(f"{base}/none.parquet", 7, COLUMNS)
        server.shutdown()


@pytest.mark.parametrize(("num_workers", "context"), [(0, None), (2, "fork")])
def test_workers_of_a_loader_share_the_rows(days, num_workers, context):
    dataset = pickle.loads(pickle.dumps(ParquetDataset(days, 7, COLUMNS, shuffle=True)))
    loader = DataLoader(
        dataset,
        batch_size=None,
        num_workers=num_workers,
        multiprocessing_context=context,
    )
    orders = []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        orders.append(ids_of(loader))
        assert sorted(orders[-1]) == list(range(40))
    assert orders[0] != orders[1]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_that_saves_its_position_continues(days, num_workers):
    module = pytest.importorskip("torchdata.stateful_dataloader")
    settings = {"batch_size": None, "num_workers": num_workers}

    def loader():
        dataset = ParquetDataset(days, 3, COLUMNS, shuffle=True)
        return module.StatefulDataLoader(dataset, **settings)

    first, second = loader(), loader()
    rows = iter(first)
    seen = ids_of(next(rows) for _ in range(5))
    second.load_state_dict(first.state_dict())
    assert sorted(seen + ids_of(second)) == list(range(40))


def test_a_queue_stays_in_its_process(days):
    dataset = ParquetDataset(WorkQueue([days]), 7, COLUMNS)
    with pytest.raises(ConfigError, match=r"must stay in its process.*num_workers=0"):
        pickle.dumps(dataset)
    with pytest.raises(ConfigError, match="must not be set with a WorkQueue"):
        dataset.set_epoch(1)


def test_batches_of_other_kinds(days):
    columns = (*COLUMNS, DenseColumn("one", column="label"))
    [tensors] = ParquetDataset(days, 40, columns, convert=plain_tensors)
    assert tensors["id.values"].tolist() == list(range(40))
    assert set(tensors) == {"id.values", "id.lengths", "label", "one"}
    [batch] = ParquetDataset(days, 40, columns, convert=torchrec_batch)
    assert batch.dense_features.shape == (40, 1)
    assert batch.sparse_features["id"].values().tolist() == list(range(40))
    assert torch.equal(batch.labels, torch.ones(40))
    [batch] = ParquetDataset(days, 40, columns, convert=from_torchrec)
    assert batch.id_type_features[0].ids.tolist() == list(range(40))


def test_large_row_groups_come_in_blocks(tmp_path, monkeypatch):
    path = write(tmp_path / "rows.parquet", range(100))
    monkeypatch.setattr(tables, "BLOCK_ROWS", 9)
    monkeypatch.setattr(reading, "SHUFFLE_ROWS", 20)
    for num_readers in (1, 2):
        settings = {"num_parallel_reads": num_readers}
        assert ids_of(ParquetDataset(path, 7, COLUMNS, **settings)) == list(range(100))
        dataset = ParquetDataset(path, 7, COLUMNS, shuffle=True, **settings)
        orders = [ids_of(dataset) for _ in range(2)]
        assert [sorted(order) for order in orders] == [list(range(100))] * 2
        assert orders[0] != orders[1]
        for num_batches in (1, 5, 9):
            first = ParquetDataset(path, 7, COLUMNS, shuffle=True, **settings)
            rows = iter(first)
            taken = ids_of(next(rows) for _ in range(num_batches))
            second = ParquetDataset(path, 7, COLUMNS, shuffle=True)
            second.load_state_dict(first.state_dict())
            assert taken + ids_of(second) == orders[0]


def test_arrow_files_streams_and_arrays_of_criteo(tmp_path):
    table = pa.table({"id": list(range(30)), "label": [0.0] * 30})
    for name, new in (("file", pa.ipc.new_file), ("stream", pa.ipc.new_stream)):
        with new(tmp_path / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
        assert ids_of(ArrowDataset(tmp_path / name, 8, COLUMNS)) == list(range(30))
    (tmp_path / "file").write_bytes(b"ARROW1 and nothing else")
    with pytest.raises(DataError, match="file must be a file of Arrow IPC"):
        ArrowDataset(tmp_path / "file", 8, COLUMNS)
    rng = np.random.default_rng(0)
    arrays = {
        "dense": rng.random((10, 13), dtype=np.float32),
        "sparse": rng.integers(0, 9, (10, 26), dtype=np.int32),
        "labels": rng.integers(0, 2, (10, 1), dtype=np.int32),
    }
    for name, array in arrays.items():
        np.save(tmp_path / f"day_0_{name}.npy", array)
    columns = (
        LabelColumn("label"),
        *(DenseColumn(f"int_{i}") for i in range(13)),
        *(IdColumn(f"cat_{i}", is_text=False) for i in range(26)),
    )
    [batch] = NpyDataset(tmp_path / "day_0_dense.npy", 10, columns)
    ids = batch.id_features.values().reshape(26, 10).T
    assert torch.equal(ids, torch.from_numpy(arrays["sparse"]).long())
    assert torch.equal(
        torch.cat(batch.dense_features, 1), torch.from_numpy(arrays["dense"])
    )
    assert batch.labels[0].tolist() == arrays["labels"][:, 0].tolist()
    np.save(tmp_path / "day_0_labels.npy", arrays["labels"][:9])
    with pytest.raises(DataError, match=r"same number of rows. Received: \[9, 10\]"):
        NpyDataset(tmp_path / "day_0_dense.npy", 10, columns)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([["a", "b"], ["b", "a"]], "trainer 1 has another order, compared with"),
        ([["a"], ["a"], ["a", "c"]], r"trainer 2 has \['c'\] besides, compared"),
        ([["a", "b"], ["a", "c"]], r"1 lacks \['b'\] and has \['c'\] besides"),
    ],
)
def test_lists_of_trainers_that_differ_are_named(lists, message):
    with pytest.raises(ConfigError, match=message):
        require_same_files(lists)
    require_same_files([lists[0]] * 3)
