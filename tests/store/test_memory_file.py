import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from persia_torchrec import AdmitBloom, AdmitFrequency, Expiry
from persia_torchrec.embedding.optim import SGD, Adagrad, Adam
from persia_torchrec.errors import ConfigError, StoreError
from persia_torchrec.store import memory, memory_file
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.memory import MISSING
from persia_torchrec.table import TableSpec
from tests.store.memory_use import MIB, resident_bytes
from tests.support.consistency import check_store, ids_oldest_first
from tests.support.faults import kill_self
from tests.support.processes import Processes
from tests.support.servers import ids_of

SGD_TABLE = TableSpec(name="sgd", dim=2, optimizer=SGD(1.0))
TABLES = [
    TableSpec(name="adam", dim=9, optimizer=Adam(0.1), admission=AdmitFrequency(2)),
    TableSpec(name="half", dim=8, optimizer=Adagrad(0.1), weight_dtype="fp16"),
    TableSpec(
        name="bloom",
        dim=4,
        optimizer=SGD(0.1, 0.9),
        admission=AdmitBloom(3, 500),
        expiry=Expiry(steps_to_live=30),
    ),
]
SETTINGS = {"optimizer_engine": "compiled", "clock": lambda: 7.0}


def store_of(capacity_rows=100, path=None, **settings):
    return EmbeddingStore(capacity_rows, memory_file=path, **{**SETTINGS, **settings})


def allocated_bytes(path):
    return 512 * Path(path).stat().st_blocks


def run(store, seed, num_requests=30):
    """Make requests of all kinds; return everything that is answered."""
    rng = np.random.default_rng(seed)
    answers = []
    for number in range(num_requests):
        table = int(rng.integers(len(store.tables)))
        ids = rng.zipf(1.3, 200).astype(np.uint64) % np.uint64(400)
        rows = np.zeros((len(ids), store.tables[table].dim), dtype=np.float32)
        slots = store.lookup(table, ids, rows, training=True)
        grads = rng.normal(size=rows.shape).astype(np.float32)
        result = store.update(table, ids, grads, slots)
        store.lookup(table, ids[::-1], rows, training=False)
        answers += [rows.tobytes(), slots.tobytes(), result]
        if number % 10 == 7:
            store.write(table, ids[:20], rows[:20])
            store.sweep(40)
            store.remove(table, ids[-3:])
    counters = store.counters()
    del counters["bytes"]  # logs are cleaned sooner or later
    return [*answers, ids_oldest_first(store), store.rows.tick, counters]


def run_and_die(path, eviction, seed):
    """Make requests, and be killed before the next one."""
    store = store_of(path=path, eviction=eviction)
    store.add_tables(TABLES)
    run(store, seed)
    kill_self()


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_after_sigkill_another_process_continues_exactly(tmp_path, path, eviction):
    undisturbed = store_of(eviction=eviction)
    undisturbed.add_tables(TABLES)
    run(undisturbed, 0)
    with Processes(tmp_path) as processes:
        died = processes.start("store", run_and_die, path, eviction, 0)
        assert died.status() == -signal.SIGKILL, died.output()
    store = store_of(path=path, eviction=eviction)
    assert store.tables == TABLES
    check_store(store)
    for seed in (1, 2):
        assert run(store, seed) == run(undisturbed, seed)
        assert store.counters()["evictions"] > 100
        # Settings of the killed process hold; changed ones are written down too.
        changed = replace(TABLES[0], optimizer=Adam(0.2), admission=AdmitFrequency(3))
        for one in (store, undisturbed):
            one.add_table(changed)
    check_store(store)
    store.close()


def test_opening_a_memory_file_reads_no_rows(path):
    num_rows, dim = 100_000, 64
    spec = replace(SGD_TABLE, dim=dim)
    store = store_of(num_rows, path)
    store.add_table(spec)
    ids = np.arange(num_rows, dtype=np.uint64)
    rows = np.empty((num_rows, dim), dtype=np.float32)
    store.lookup(0, ids, rows, training=True)
    store.close()
    del store
    before = resident_bytes()
    store = store_of(num_rows, path)
    assert resident_bytes() - before < 4 * MIB
    assert store.num_rows == num_rows
    assert np.array_equal(store.read(0, ids), rows)


def test_a_file_costs_what_is_used_and_gives_it_back(path):
    spec, ids = replace(SGD_TABLE, dim=64), np.arange(50_000, dtype=np.uint64)
    private, store = store_of(10**8), store_of(10**8, path)
    for one in (private, store):
        one.add_table(spec)
        empty = allocated_bytes(path)
        for some in np.split(ids, 50):
            one.lookup(0, some, np.empty((len(some), 64), np.float32), training=True)
    used = store.counters()["bytes"]
    assert used == private.counters()["bytes"]  # no byte a row more
    assert used <= allocated_bytes(path) - empty < 1.125 * used + 2 * MIB
    store.clear()
    check_store(store)
    assert allocated_bytes(path) <= empty + 2 * MIB  # to undo and complete requests
    assert not store.read(0, ids[:3]).any()


def test_a_file_has_one_store_at_a_time(path):
    store = store_of(path=path)
    with pytest.raises(StoreError, match=rf"One store.*{os.getpid()} has it"):
        store_of(path=path)
    store.close()
    store.close()
    store_of(path=path)


@pytest.mark.parametrize(
    ("capacity_rows", "settings", "received"),
    [(99, {}, "99 rows, lru"), (100, {"eviction": "lfu"}, "100 rows, lfu")],
)
def test_memory_of_other_settings_is_rejected(path, capacity_rows, settings, received):
    store_of(path=path).close()
    with pytest.raises(ConfigError, match=f"100 rows, lru. Received: {received}"):
        store_of(capacity_rows, path, **settings)
    store_of(path=path).close()


def test_memory_of_another_layout_is_rejected(path):
    store = store_of(path=path)
    header = store.rows.memory.area(memory.Area(0, 64))
    header[memory_file.VERSION_AT] += np.uint64(1)
    store.close()
    with pytest.raises(StoreError, match=r"layout 5. Received: layout 6"):
        store_of(path=path)
    header[memory_file.VERSION_AT] = 3
    with pytest.raises(StoreError, match=r"layout 5. Received: layout 3"):
        store_of(path=path)


def test_memory_of_the_layout_before_is_used_and_stays_readable_by_its_version(path):
    store, undisturbed = store_of(path=path), store_of()
    header = store.rows.memory.area(memory.Area(0, 64))
    assert header[memory_file.VERSION_AT] == 5
    header[memory_file.VERSION_AT] = 4  # its files differ in nothing else
    for one in (store, undisturbed):
        one.add_tables(TABLES)
    for seed in range(3):
        assert run(store, seed) == run(undisturbed, seed)
        store.close()
        store = store_of(path=path)
        assert store.rows.memory.area(memory.Area(0, 64))[memory_file.VERSION_AT] == 4


@pytest.mark.parametrize(
    ("word", "number"),
    [
        *((memory_file.FEATURES, bit) for bit in (1, 2, 4, 2**63)),
        *((memory_file.PARTITIONS, num) for num in (0, 2)),
        (memory_file.FIRST_AREA, 8192),
    ],
)
def test_memory_with_what_this_version_does_not_know_is_rejected(path, word, number):
    store = store_of(path=path)
    header = store.rows.memory.area(memory.Area(0, 64))
    before = int(header[word])
    header[word] = number
    store.close()
    with pytest.raises(StoreError, match=rf"features \[.*{number}.*\]\. Start"):
        store_of(path=path)
    header[word] = before
    store_of(path=path).close()


@pytest.mark.parametrize("is_closed", [True, False])
def test_memory_of_another_boot_is_used_only_if_it_was_closed(path, is_closed):
    store = store_of(path=path)
    store.add_table(SGD_TABLE)
    store.rows.memory.area(memory.Area(0, 64))[memory_file.BOOT] ^= np.uint64(1)
    store.rows.memory.close(is_clean=is_closed)
    if is_closed:
        assert store_of(path=path).tables == [SGD_TABLE]
    else:
        with pytest.raises(StoreError, match="closed before the machine started again"):
            store_of(path=path)


class AdmitForeign(AdmitFrequency):
    """An admission that keeps nothing of what it changes."""

    kind = "foreign"

    def num_kept_bytes(self):
        return 0


@pytest.mark.parametrize(
    ("max_waiting_rows", "is_small"), [(100, True), (10**5, False)]
)
def test_a_foreign_admission_is_undone_if_its_memory_is_small(
    path, max_waiting_rows, is_small
):
    spec = replace(TABLES[0], admission=AdmitFrequency(9, max_waiting_rows))
    store = store_of(path=path)
    store.add_table(spec)
    state = store.states[0]
    state.spec = replace(spec, admission=AdmitForeign(9, max_waiting_rows))
    ids, rows = ids_of(1, 2, 3), np.empty((3, 9), np.float32)
    store.lookup(0, ids, rows, training=True)
    before = state.remembered.copy()
    store.lookup(0, ids + np.uint64(2), rows, training=True)
    assert not np.array_equal(state.remembered, before)
    store.rows.tally[memory.CHANGE] = memory.REQUEST
    store.rows.memory.close(is_clean=False)
    if is_small:
        assert np.array_equal(store_of(path=path).states[0].remembered, before)
    else:
        with pytest.raises(StoreError, match="that changed more than was kept"):
            store_of(path=path)


def test_tables_that_cannot_be_added_leave_nothing(path):
    store = store_of(path=path)
    store.add_table(SGD_TABLE)
    used = allocated_bytes(path)
    new = replace(SGD_TABLE, name="new", dim=5, admission=AdmitBloom(2, 10**7))
    with pytest.raises(ConfigError, match="has dim 2"):
        store.add_tables([new, replace(SGD_TABLE, dim=3)])
    assert store.tables == [SGD_TABLE]
    assert allocated_bytes(path) == used
    store.rows.memory.close(is_clean=False)
    store = store_of(path=path)
    store.add_tables(TABLES)
    run(store, 0)
    check_store(store)


def test_a_path_without_a_file_gets_one(tmp_path):
    path = str(tmp_path / "memory")
    store = store_of(path=path)
    store.add_table(SGD_TABLE)
    store.close()
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert store_of(path=path).tables == [SGD_TABLE]


def test_a_file_that_others_may_use_becomes_that_of_its_user_alone(tmp_path):
    path = tmp_path / "rows"
    path.touch(0o666)
    path.chmod(0o666)
    store = store_of(path=str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    store.close()


@pytest.mark.parametrize("kind", ["link", "pipe", "file of another user"])
def test_what_is_no_file_of_this_user_is_rejected(tmp_path, kind):
    path = tmp_path / "rows"
    if kind == "link":
        (tmp_path / "target").touch()
        path.symlink_to(tmp_path / "target")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.touch(0o600)
        if os.geteuid():
            pytest.skip("only root can give a file to another user")
        os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match=r"memory file must be a .*file"):
        store_of(path=str(path))


def test_a_file_of_something_else_is_rejected(tmp_path):
    file = tmp_path / "file"
    file.write_text("rows")
    with pytest.raises(ConfigError, match=r"empty, or of a store\. Received: 4 bytes"):
        store_of(path=str(file))
    assert file.read_text() == "rows"
    with pytest.raises(ConfigError, match=r"read and written.*Received: .*directory"):
        store_of(path=str(tmp_path))


def test_a_file_that_was_never_finished_is_made_again(path):
    store = store_of(path=path)
    store.add_table(SGD_TABLE)
    header = store.rows.memory.area(memory.Area(0, 64))
    header[memory_file.STATE] = memory_file.MAKING
    store.rows.memory.close(is_clean=False)
    assert store_of(path=path).tables == []


@pytest.mark.parametrize("tmpfs", ["size=8m"], indirect=True)
def test_a_full_file_system_fails_the_request_and_no_more(tmpfs):
    store = store_of(10**6, tmpfs)
    store.add_table(replace(SGD_TABLE, dim=64))
    ids, rows = np.arange(10**5, dtype=np.uint64), np.empty((10**5, 64), np.float32)
    store.lookup(0, ids[:1000], rows[:1000], training=True)
    with pytest.raises(
        StoreError, match=r"No space left .* --memory-dir, or .*--shm-size"
    ):
        store.lookup(0, ids, rows, training=True)
    with pytest.raises(StoreError, match="must have room for the store"):
        store.add_table(replace(TABLES[2], admission=AdmitBloom(2, 10**8)))
    check_store(store)
    store.lookup(0, ids[:2000], rows[:2000], training=True)
    assert (store.find(0, ids[:2000]) != MISSING).all()
    store.rows.memory.close(is_clean=False)
    store = store_of(10**6, tmpfs)
    check_store(store)
    assert np.array_equal(store.read(0, ids[:2000]), rows[:2000])


@pytest.mark.parametrize("tmpfs", ["huge=within_size,size=200m"], indirect=True)
def test_memory_of_huge_pages_is_allocated_in_whole_ones(tmpfs):
    store = store_of(path=tmpfs)
    store.add_tables(TABLES)
    run(store, 0)
    # The head alone has 1 MiB, where the kernel finds no huge page for it.
    assert allocated_bytes(tmpfs) % (2 * MIB) in (0, MIB)
    rows = store.num_rows
    store.close()
    assert store_of(path=tmpfs).num_rows == rows


def test_the_change_log_of_another_process_is_dropped(path):
    store = store_of(path=path)
    store.add_tables(TABLES)
    store.rows.journal.begin()
    run(store, 0)
    store.rows.memory.close(is_clean=False)
    store = store_of(path=path)
    address, room = store.rows.tally[[memory.LEFT_AT, memory.LEFT_ROOM]]
    assert address == room == 0
    run(store, 1)
    store.rows.journal.begin()
    assert store.rows.journal.is_empty
    store.remove(0, ids_of(*range(400)))
    check_store(store)


def test_a_hint_beyond_what_is_allocated_is_no_row(path):
    store = store_of(path=path)
    store.add_tables(TABLES)
    run(store, 0)
    slots = np.array([2**32 - 2, 99, 100], dtype=np.uint32)
    grads = np.ones((3, 9), dtype=np.float32)
    unknown = ids_of(10**9, 10**9 + 1, 10**9 + 2)
    assert store.update(0, unknown, grads, slots).num_missed == 3
