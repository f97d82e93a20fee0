"""The files of the dense half, of joint deltas and of a log's runs that are fuzzed."""

import ctypes
import gzip
import random
from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import torch

from persia_torchrec.checkpoint import catalog, increment_log
from persia_torchrec.checkpoint.catalog import Delta, DenseEntries, Manifest, Saved
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increment_log import Log, Retention
from persia_torchrec.checkpoint.load import ShardLoad, Target
from persia_torchrec.data import (
    ArrowDataset,
    CsvDataset,
    IdColumn,
    JsonDataset,
    LabelColumn,
    ParquetDataset,
)
from persia_torchrec.errors import DataError
from persia_torchrec.training.checkpoint import (
    apply_state,
    load_dense,
    names_in,
    read_state,
    save_dense_beside,
    state_bytes,
)
from tests.fuzz.formats import (
    CAPACITY,
    CREATED,
    filled_store,
    run_with_log,
    temporary_folder,
)
from tests.fuzz.mutations import change_json, flip, oversize
from tests.fuzz.running import Format
from tests.support.consistency import check_store


def deltas() -> Format:
    """A joint delta, which names a place in the log of a server."""
    folder = temporary_folder()
    _, _, name = run_with_log(folder)
    checkpoint = Folder(folder / "run" / "checkpoint-00000001")
    logs = Folder(folder / "logs")
    tables = Manifest.read(checkpoint).tables
    at = (catalog.LogPosition(name, 2),)
    delta = Delta(logs.url, at, tables, DenseEntries(("adam",)), CREATED, 14)
    of_delta = catalog.begin_delta(checkpoint)
    of_delta.write_json(catalog.DELTA, delta)
    store = filled_store()

    def check(data: bytes) -> None:
        of_delta.write(catalog.DELTA, data)
        found = Saved.read(of_delta)
        assert found.delta is not None
        store.clear()
        load = ShardLoad(
            found.checkpoint,
            Target(0, 1, CAPACITY, False),
            store,
            logs=logs,
            until=found.delta.positions,
        )
        load.check()
        load.load()
        check_store(store)

    return Format([of_delta.read(catalog.DELTA)], change_json, check)


def runs_of_logs() -> Format:
    """The runs that a log's server dumped to, by which increments are deleted."""
    folder = temporary_folder()
    _, _, name = run_with_log(folder)
    logs = Folder(folder / "logs")
    log: Log = logs.child(name).read_json(increment_log.LOG_FILE, Log)
    retention = Retention(logs, log)
    retention.begun.append(str(folder / "run" / "checkpoint-00000001"))
    retention.apply(counts_begun=True)
    seed = logs.child(name).read(catalog.RUNS_FILE)

    def check(data: bytes) -> None:
        logs.child(name).write(catalog.RUNS_FILE, data)
        Retention(logs, log).apply(counts_begun=True)
        if increment_log.list_increments(logs.child(name)) != [1]:
            raise AssertionError("an increment that a checkpoint needs is deleted")
        logs.child(name).read_json(catalog.RUNS_FILE, list[str])

    return Format([seed], change_json, check)


def dense_halves() -> Format:
    """A folder that torch has written: which of its files, then what it holds."""
    folder = temporary_folder()
    model, adam = _model_and_optimizer()
    state = {"model": model, "adam": adam, "step": 7, "text": "x"}
    checkpoint = Folder(folder / "checkpoint-00000001")
    save_dense_beside(None, state, checkpoint)
    manifest = Manifest((), (), CREATED, 12, DenseEntries(("adam",)))
    checkpoint.write_json(catalog.MANIFEST, manifest)
    dense = folder / "checkpoint-00000001" / catalog.DENSE
    names = sorted(path.name for path in dense.iterdir())
    contents = [(dense / name).read_bytes() for name in names]

    def check(data: bytes) -> None:
        which = (data or b"\0")[0] % len(names)
        for number, (name, content) in enumerate(zip(names, contents, strict=True)):
            (dense / name).write_bytes(data[1:] if number == which else content)
        assert len(names_in(checkpoint)) >= 0
        load_dense(checkpoint, dict(state))

    seeds = [bytes([n]) + content for n, content in enumerate(contents)]
    return Format(seeds, _change_rest, check)


def dense_files() -> Format:
    """The files of a context: a state dictionary of a model."""
    folder = Folder(temporary_folder())
    model, _ = _model_and_optimizer()

    def check(data: bytes) -> None:
        folder.write("dense.pt", data)
        apply_state(model, read_state(folder, "dense.pt"), "dense.pt")

    return Format([state_bytes(model.state_dict())], flip, check)


def data_files() -> Format:
    """Files of rows, the first byte of each which kind it is."""
    # The default pool keeps what is freed. So does glibc, once a large block was freed,
    # unless its threshold is set (M_MMAP_THRESHOLD).
    pa.set_memory_pool(pa.system_memory_pool())
    ctypes.CDLL(None).mallopt(-3, 2**17)
    folder = temporary_folder()
    ids, texts = [[1, 2], [], [3], None], ["a", None, "b", "c"]
    table = pa.table({"u": ids, "t": texts, "y": [1.0, 0.0, 1.0, 0.5]})
    settings = {"store_schema": False, "write_page_checksum": True}
    pq.write_table(table, folder / "0", row_group_size=2, **settings)
    pq.write_table(table, folder / "1", use_dictionary=False, compression="zstd")
    with pa.ipc.new_file(folder / "2", table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    text = '{"u": [1, 2], "t": "a", "y": 1}\n{"u": [], "t": "b", "y": 0}\n'
    (folder / "3").write_text(text)
    lines = b"u,t,y\n1|2,a,1\n,b,0\n3,c,0.5\n"
    (folder / "4").write_bytes(lines)
    (folder / "5").write_bytes(gzip.compress(lines))
    columns = (IdColumn("u", None, "|", False), IdColumn("t"), LabelColumn("y"))
    kinds = [ParquetDataset] * 2 + [ArrowDataset, JsonDataset] + [CsvDataset] * 2
    seeds = [bytes([n]) + (folder / f"{n}").read_bytes() for n in range(len(kinds))]

    def check(data: bytes) -> None:
        number = (data or b"\0")[0] % len(kinds)
        path = folder / "tried"
        path.write_bytes(data[1:])
        more = {"header": True} if kinds[number] is CsvDataset else {}
        labels, ids = [], []
        try:
            for batch in kinds[number](path, 3, columns, **more):
                assert len(batch.labels[0]) <= 3
                labels += batch.labels[0].tolist()
                ids += batch.id_features["u"].values().tolist()
        except DataError as exc:
            if path.name not in str(exc):
                raise AssertionError(f"no file in {exc}") from exc
            raise
        if kinds[number] is ParquetDataset:
            with pq.ParquetFile(path) as file:
                _require_rows(file.read(use_threads=False), labels, ids)
        if kinds[number] is ArrowDataset:
            with path.open("rb") as file:
                _require_rows(pa.ipc.open_file(file).read_all(), labels, ids)

    # pyarrow allocates what the header of a page says.
    return Format(seeds, _change_rest, check, most_of_one_mib=2048)


def _require_rows(table: pa.Table, labels: list[float], ids: list[int]) -> None:
    """Require the rows that pyarrow reads."""
    expected = table["y"].cast(pa.float64()).cast(pa.float32(), safe=False)
    assert labels == expected.to_pylist()
    values = table["u"]
    while pa.types.is_list(values.type):
        values = pa.compute.list_flatten(values)
    assert ids == [int(value) for value in values.to_pylist()]


def _model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    adam.step()
    return model, adam


def _change_rest(rng: random.Random, data: bytes) -> bytes:
    return data[:1] + rng.choice((flip, oversize))(rng, data[1:])


TRAINING_FORMATS: dict[str, Callable[[], Format]] = {
    "joint delta": deltas,
    "runs of a log": runs_of_logs,
    "dense half": dense_halves,
    "dense file": dense_files,
    "file of rows": data_files,
}
"""By name, what makes a format."""
