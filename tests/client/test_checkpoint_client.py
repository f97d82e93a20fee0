"""Dump and load of whole servers: what is kept, and what is rejected."""

import json
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from persia_torchrec import Expiry, Uniform
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.load import ShardLoad, Target
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.embedding.optim import SGD, Adagrad, Adam
from persia_torchrec.errors import CheckpointError, RemoteError, ServerError
from persia_torchrec.server.checkpoint_service import ShardDump
from persia_torchrec.store import row_copy
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.row_copy import RowImport
from persia_torchrec.table import TableSpec
from tests.support.servers import DEADLINE_S, ids_of

pytestmark = pytest.mark.slow

ADAM = TableSpec(name="adam", dim=3, optimizer=Adam(0.1), initializer=Uniform(-1, 1))
HALF = TableSpec(name="half", dim=5, optimizer=Adagrad(0.1), weight_dtype="bf16")
SEEN = TableSpec(name="seen", dim=2, optimizer=SGD(0.1), keeps_metadata=True)
TABLES = [ADAM, HALF, SEEN]


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "run")


class Job:
    """Servers and a client that trains on them."""

    def __init__(self, servers, num_servers, tables=TABLES, **settings):
        self.running = servers.start(num_servers, **settings)
        self.client = servers.client(self.running)
        self.client.add_tables(tables)
        self.tables = tables
        self.num_batches = 0

    @property
    def checkpoints(self):
        return self.client.checkpoints

    def train(self, *ids, tables=None):
        """Train all tables on a batch; the gradients follow from the weights."""
        split = self.client.split(ids_of(*ids))
        names = [(spec.name, split) for spec in tables or self.tables]
        self.num_batches += 1
        batch = BatchNumber(1, self.num_batches)
        rows = self.client.pull(names, batch=batch)
        grads = [np.sin(7 * rows_UD) + 0.1 for rows_UD in rows]
        assert (
            self.client.outcome(self.client.push(names, grads, batch)).num_missed == 0
        )

    def train_many(self, seed, num_batches=10):
        rng = np.random.default_rng(seed)
        for _ in range(num_batches):
            self.train(*rng.choice(200, 20, replace=False).tolist())

    def rows(self, num_ids=200):
        ids = np.arange(num_ids, dtype=np.uint64)
        return [self.client.read(spec.name, ids) for spec in self.tables]

    def total(self, counter):
        return sum(counters[counter] for counters in self.client.counters())


def assert_equal(rows, others):
    for one, other in zip(rows, others, strict=True):
        assert one.tobytes() == other.tobytes()


def assert_same_rows(one, other):
    assert all(np.abs(rows).sum() > 0 for rows in one.rows())
    assert_equal(one.rows(), other.rows())


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (1, 3), (3, 2), (2, 4)])
def test_training_continues_as_if_nothing_had_been(servers, path, before, after):
    job, other = Job(servers, before), Job(servers, after)
    job.train_many(0)
    saved = job.checkpoints.dump(path, step=10)
    assert (saved.step, saved.num_rows) == (10, job.total("rows"))
    other.train(1, 2, 3)  # what is dropped
    loaded = other.checkpoints.load(path)
    assert (loaded.path, loaded.num_rows, loaded.num_left_out) == (
        *(saved.path, saved.num_rows, 0),
    )
    assert other.total("rows") == job.total("rows")
    assert_same_rows(other, job)
    for one in (job, other):
        one.train_many(1)
    # Adam's step and all: the same floats on any number of servers.
    assert_same_rows(other, job)
    ids = np.arange(200, dtype=np.uint64)
    one, two = (j.client.metadata("seen", ids) for j in (job, other))
    assert np.array_equal(one.frequency, two.frequency)
    assert np.array_equal(one.last_step, two.last_step)


def test_without_the_optimizers_step_the_rows_would_differ(servers, path):
    job, other = Job(servers, 1, [ADAM]), Job(servers, 1, [ADAM])
    job.train_many(0)
    saved = job.checkpoints.dump(path)
    manifest = Path(saved.path) / "manifest.json"
    value = json.loads(manifest.read_text())
    assert value["tables"][0]["num_updates"] == 10
    value["tables"][0]["num_updates"] = 0
    manifest.write_text(json.dumps(value))
    other.checkpoints.load(path)
    assert_same_rows(other, job)
    for one in (job, other):
        one.train_many(1)
    assert not np.allclose(other.rows()[0], job.rows()[0], rtol=1e-3)


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
@pytest.mark.parametrize("num_servers", [1, 2])
def test_rows_leave_in_the_same_order_afterwards(servers, path, num_servers, eviction):
    settings = {"capacity_rows": 90, "eviction": eviction}
    job = Job(servers, num_servers, **settings)
    other = Job(servers, num_servers, **settings)
    job.train_many(0, num_batches=4)
    job.checkpoints.dump(path)
    other.checkpoints.load(path)
    for one in (job, other):
        one.train_many(1, num_batches=3)
    assert job.total("evictions") > other.total("evictions") > 10
    assert_same_rows(other, job)


def test_smaller_servers_leave_out_the_rows_used_longest_ago(servers, path):
    job = Job(servers, 1, [SEEN])
    job.train(*range(30))
    job.train(*range(10))
    job.checkpoints.dump(path)
    small = Job(servers, 1, [SEEN], capacity_rows=12)
    loaded = small.checkpoints.load(path)
    assert loaded.num_left_out == 18
    (rows,) = small.rows(30)
    assert np.abs(rows).any(axis=1).tolist() == [
        id_ < 10 or id_ >= 28 for id_ in range(30)
    ]


def test_rows_can_be_put_over_those_that_are_there(servers, path):
    job, other = Job(servers, 2), Job(servers, 1, [SEEN, ADAM])
    job.train(1, 2, 3)
    job.checkpoints.dump(path)
    other.train(3, 4)
    (before, _), (mine, _) = other.rows(5), (job.rows(5)[2], None)
    other.client.add_tables([TableSpec(name="new", dim=2, optimizer=SGD(0.1))])
    with pytest.raises(RemoteError, match=r"\['new'\] of the model.*rename={'half': "):
        other.checkpoints.load(path)
    assert np.array_equal(other.rows(5)[0], before)
    other.checkpoints.load(path, replace=False)
    after, _ = other.rows(5)
    assert np.array_equal(after[1:4], mine[1:4])
    assert np.array_equal(after[4], before[4])
    assert other.total("rows") == 3 * 3 + 2


def test_a_server_without_tables_takes_those_of_the_checkpoint(servers, path):
    job, other = Job(servers, 1), Job(servers, 2, [])
    job.train_many(0)
    job.checkpoints.dump(path)
    other.checkpoints.load(path)
    other.client.add_tables(TABLES)
    other.tables = TABLES
    assert_same_rows(other, job)


@pytest.mark.parametrize(
    "changed",
    [
        {"dim": 4},
        {"optimizer": SGD(0.1)},
        {"optimizer": Adagrad(0.1, vectorwise_shared=True)},
    ],
)
def test_a_table_that_does_not_fit_is_rejected_and_nothing_changes(
    servers, path, changed
):
    job = Job(servers, 2)
    job.train_many(0)
    job.checkpoints.dump(path)
    spec = TableSpec(**{"name": "adam", "dim": 3, "optimizer": Adam(0.1), **changed})
    other = Job(servers, 2, [spec, HALF, SEEN])
    other.train(1, 2, 3)
    before = other.rows()
    with pytest.raises(
        RemoteError, match=r"server \d .*table 'adam' must have dim .* Received: dim 3,"
    ):
        other.checkpoints.load(path)
    assert_equal(other.rows(), before)
    other.train(1, 2, 3)


def test_settings_of_the_servers_win_over_those_of_the_checkpoint(servers, path):
    job = Job(servers, 1, [SEEN])
    job.train(1)
    job.checkpoints.dump(path)
    other = Job(servers, 1, [SEEN])
    other.client.set_learning_rate(0.0)
    other.checkpoints.load(path)
    before = other.rows()
    other.train(1)
    assert np.array_equal(other.rows()[0], before[0])


def test_the_latest_complete_checkpoint_is_loaded_or_one_by_its_path(servers, path):
    job = Job(servers, 2)
    rows, folders = [], []
    for step in range(3):
        job.train_many(step)
        rows.append(job.rows())
        folders.append(job.checkpoints.dump(path, step=step).path)
    (Path(folders[2]) / "manifest.json").unlink()
    for where, expected in ((path, 1), (folders[0], 0), (path, 1)):
        assert job.checkpoints.load(where).step == expected
        assert_equal(job.rows(), rows[expected])


def test_a_dump_that_fails_leaves_the_previous_checkpoint(servers, path):
    job = Job(servers, 2)
    job.train_many(0)
    first = job.checkpoints.dump(path)
    before = job.rows()
    job.train_many(1)
    job.running[1].stop()
    with pytest.raises(ServerError, match=r"embedding server 1 .*dump to"):
        job.checkpoints.dump(path)
    other = Job(servers, 2)
    assert other.checkpoints.load(path).path == first.path
    assert_equal(other.rows(), before)


@pytest.mark.parametrize("damage", ["cut off", "changed", "missing"])
def test_a_damaged_file_is_rejected_by_its_name_and_nothing_changes(
    servers, path, damage
):
    job = Job(servers, 2)
    job.train_many(0)
    file = Path(job.checkpoints.dump(path).path) / "shard-00001-of-00002.rows"
    data = bytearray(file.read_bytes())
    if damage == "cut off":
        file.write_bytes(data[:-20])
    elif damage == "changed":
        data[-100] ^= 1
        file.write_bytes(data)
    else:
        file.unlink()
    before = job.rows()
    with pytest.raises(RemoteError, match=r"server 1 .*shard-00001-of-00002\.rows"):
        job.checkpoints.load(path)
    assert_equal(job.rows(), before)
    assert job.total("rows") > 0


def test_where_there_is_no_checkpoint_nothing_is_loaded(servers, path):
    job = Job(servers, 1)
    with pytest.raises(CheckpointError, match="must be a checkpoint, or hold one"):
        job.checkpoints.load(path)


def test_servers_write_to_any_place_that_fsspec_knows(servers):
    # One server: two readers of a file in fsspec's memory disturb each other.
    allowed = {"checkpoint_protocols": ("memory",)}
    job, other = Job(servers, 1, **allowed), Job(servers, 1, **allowed)
    job.train_many(0)
    job.checkpoints.dump("memory://test_checkpoints/run")
    other.checkpoints.load("memory://test_checkpoints/run")
    assert_same_rows(other, job)


def test_empty_servers_can_be_dumped_and_loaded(servers, path):
    job, other = Job(servers, 2), Job(servers, 1)
    job.train()
    assert job.checkpoints.dump(path).num_rows == 0
    other.train(1)
    other.checkpoints.load(path)
    assert other.total("rows") == 0


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_servers_without_tables_can_be_dumped_and_loaded(servers, path, num_servers):
    job, other = Job(servers, 2, []), Job(servers, num_servers, [])
    job.checkpoints.dump(path)
    for replaces in (True, False):
        assert other.checkpoints.load(path, replace=replaces).num_rows == 0
    other.client.add_tables([SEEN])
    other.checkpoints.load(path, replace=False)
    other.train(1, 2, tables=[SEEN])
    assert other.total("rows") == 2


def test_a_delta_of_no_tables_is_written_and_loaded(servers, tmp_path):
    logs = str(tmp_path / "logs")
    job, other = Job(servers, 2, [], increments_dir=logs), Job(servers, 1, [])
    saved = job.checkpoints.dump(tmp_path / "run")
    delta = job.checkpoints.start_delta(Folder(saved.path), timeout_s=DEADLINE_S)
    assert [of_server.tables for of_server in delta.wait()] == [(), ()]
    loaded = other.checkpoints.load(saved.path, increments=logs)
    assert (loaded.num_rows, loaded.num_increments) == (0, 2)


def test_files_are_as_long_as_their_rows(servers, path):
    job = Job(servers, 2, [ADAM], capacity_rows=1_000_000)
    job.train(*range(20_000))
    saved = job.checkpoints.dump(path)
    assert saved.num_rows == 20_000
    in_memory = 20_000 * 4 * (ADAM.dim + ADAM.num_state_floats)
    ids_and_uses = 20_000 * 16
    assert saved.size_bytes < 1.01 * (in_memory + ids_and_uses) + 4000
    total = sum(file.stat().st_size for file in Path(saved.path).glob("*.rows"))
    assert total == saved.size_bytes


def step_dumps(monkeypatch):
    """Hold dumps back: each release of the semaphore lets a slice of one continue."""
    monkeypatch.setattr(row_copy, "_SLICE_RECORDS", 100)
    monkeypatch.setattr(row_copy, "_SLICE_BYTES", 2**8)
    slices, advance = threading.Semaphore(0), ShardDump.advance

    def advance_if_released(self):
        return advance(self) if slices.acquire(blocking=False) else 0.0

    monkeypatch.setattr(ShardDump, "advance", advance_if_released)
    return slices


@pytest.fixture
def begin_dump(servers, path, monkeypatch):
    """Return what begins a dump of a job, until each server has copied some."""
    slices = step_dumps(monkeypatch)

    def begin(num_servers):
        job = Job(servers, num_servers, [ADAM], capacity_rows=10_000)
        job.train(*range(5_000))
        task = job.checkpoints.start_dump(path)

        def has_progressed():
            slices.release()
            return task.progress > 0

        wait_for(has_progressed)
        return job, task, slices

    return begin


def test_rows_are_trained_while_they_are_dumped(servers, path, monkeypatch):
    slices = step_dumps(monkeypatch)
    job = Job(servers, 2, [ADAM], capacity_rows=100_000)
    job.train(*range(10_000))
    seen = [job.client.read("adam", np.arange(10_000, dtype=np.uint64))]
    task = job.checkpoints.start_dump(path)
    fractions = []
    while not task.is_done:
        job.train(*range(0, 10_000, 3))
        seen.append(job.client.read("adam", np.arange(10_000, dtype=np.uint64)))
        fractions.append(task.progress)
        slices.release(500)
    saved = task.wait(DEADLINE_S)
    assert len(seen) > 3
    assert fractions == sorted(fractions)
    assert saved.num_rows == 10_000
    other = Job(servers, 1, [ADAM], capacity_rows=100_000)
    other.checkpoints.load(path)
    rows = other.client.read("adam", np.arange(10_000, dtype=np.uint64))
    # Each row is whole, as it was between two updates.
    fits = np.stack([(rows == before).all(axis=1) for before in seen])
    assert fits.any(axis=0).all()


def test_one_dump_at_a_time_and_the_next_one_waits(servers, path, begin_dump, caplog):
    job, task, slices = begin_dump(1)
    others = servers.client(job.running).checkpoints
    with pytest.raises(RemoteError, match="one checkpoint at a time"):
        others.dump(path, timeout_s=0.0)
    other = others.start_dump(path)
    wait_for(lambda: "waiting for its end" in caplog.text)
    slices.release(100_000)
    assert task.wait(DEADLINE_S).num_rows == 5_000
    assert other.wait(DEADLINE_S).num_rows == 5_000


@pytest.mark.parametrize("end", ["cancel", "clear"])
def test_a_dump_that_is_ended_early_is_not_complete(path, begin_dump, end):
    job, task, slices = begin_dump(2)
    if end == "cancel":
        task.cancel()
        message = "It was cancelled"
    else:
        job.client.clear()
        message = "ended early: the rows were dropped"
    with pytest.raises((CheckpointError, RemoteError), match=message):
        task.wait(DEADLINE_S)
    assert not list(Path(path).rglob("*"))  # nor does a server write there any more
    slices.release(50_000)
    job.train(1)
    assert job.checkpoints.dump(path).num_rows == (5_000 if end == "cancel" else 1)


def test_a_server_that_stops_during_a_dump_fails_it(begin_dump):
    job, task, _ = begin_dump(2)
    job.running[0].stop()
    with pytest.raises(ServerError, match="embedding server 0"):
        task.wait(DEADLINE_S)


def test_a_dump_that_takes_too_long_reports_which_server(servers, path, monkeypatch):
    monkeypatch.setattr(row_copy, "_SLICE_BYTES", 2**6)
    job = Job(servers, 1, [ADAM], capacity_rows=100_000)
    job.train(*range(50_000))
    with pytest.raises(TimeoutError, match=r"server 0 .*not done in time"):
        job.checkpoints.dump(path, timeout_s=0.01)
    monkeypatch.setattr(row_copy, "_SLICE_BYTES", 2**18)
    assert job.checkpoints.dump(path).num_rows == 50_000


def test_requests_for_rows_are_rejected_while_a_server_fills_its_store(
    servers, path, monkeypatch
):
    job = Job(servers, 1, [ADAM])
    job.train(1)
    job.checkpoints.dump(path)
    may_go_on = threading.Event()
    is_filling = threading.Event()
    clear = EmbeddingStore.clear

    def slow_clear(store):
        is_filling.set()
        assert may_go_on.wait(DEADLINE_S)
        clear(store)

    monkeypatch.setattr(EmbeddingStore, "clear", slow_clear)
    task = job.checkpoints.start_load(path)
    assert is_filling.wait(DEADLINE_S)
    with pytest.raises(RemoteError, match="loads a checkpoint, and has no rows until"):
        job.train(1)
    servers.client(job.running)  # it still answers
    may_go_on.set()
    task.wait(DEADLINE_S)
    job.train(1)


def test_a_load_that_fails_half_way_leaves_the_store_empty(servers, path, monkeypatch):
    job = Job(servers, 1, [ADAM])
    job.train(*range(100))
    job.checkpoints.dump(path)

    def fail(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(RowImport, "finish", fail)
    with pytest.raises(RemoteError, match="the disk is gone"):
        job.checkpoints.load(path)
    assert job.total("rows") == 0
    monkeypatch.undo()
    assert job.checkpoints.load(path).num_rows == 100


def wait_for(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_rows_are_not_older_after_a_pause_between_dump_and_load(servers, path):
    spec = replace(SEEN, expiry=Expiry(seconds_to_live=100))
    job = Job(servers, 1, [spec])
    job.train(1, 2, 3)
    saved = job.checkpoints.dump(path)
    later_s = time.time() + 604_800.0
    store = EmbeddingStore(10, clock=lambda: later_s)
    load = ShardLoad(Folder(saved.path), Target(0, 1, 10, is_lfu=False), store)
    load.check()
    load.load()
    assert store.num_rows == 3
    for num_rows in (3, 0):
        while store.sweep(100):
            pass
        assert store.num_rows == num_rows
        later_s += 101


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_rows_that_are_not_finite_are_counted(servers, path, table, caplog):
    job = Job(servers, 2, [table])
    job.train(*range(20))
    bad = np.full((3, table.dim), np.nan, dtype=np.float32)
    job.client.write(table.name, ids_of(3, 4, 5), bad)
    caplog.clear()
    job.checkpoints.dump(path)
    told = f"3 rows have a NaN or an infinity.*3 of table '{table.name}'"
    assert re.search(told, caplog.text)
    caplog.clear()
    other = Job(servers, 1, [table])
    assert other.checkpoints.load(path).num_not_finite == 3
    assert re.search(told, caplog.text)
    (before,), (rows,) = job.rows(20), other.rows(20)
    np.testing.assert_array_equal(before, rows)
