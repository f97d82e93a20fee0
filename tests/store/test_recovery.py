import contextlib
import os

import numpy as np
import pytest

from persia_torchrec import AdmitFrequency, Expiry
from persia_torchrec.embedding.initializer import Uniform
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.errors import StoreError
from persia_torchrec.store import memory
from persia_torchrec.store.embedding_store import EmbeddingStore, UpdateResult
from persia_torchrec.store.index import BOUNDARY
from persia_torchrec.store.recency import TAIL, TRIGGER
from persia_torchrec.table import TableSpec
from tests.processes import Processes
from tests.servers import ids_of
from tests.store import kills
from tests.store.consistency import check_store, ids_oldest_first
from tests.store.stepwise import DiedError, run_stepwise

TABLE = TableSpec(name="sgd", dim=2, optimizer=SGD(1.0), initializer=Uniform(0, 0))
OTHER = TableSpec(
    name="other",
    dim=4,
    optimizer=SGD(1.0, 0.5),
    initializer=Uniform(0, 0),
    admission=AdmitFrequency(2, 5),
    expiry=Expiry(steps_to_live=2),
)


@pytest.fixture
def path():
    """A file that this process holds open, for itself and for others."""
    file = os.memfd_create("store")
    yield f"/proc/{os.getpid()}/fd/{file}"
    os.close(file)


def store_of(path=None, capacity_rows=8, **settings):
    settings = {"optimizer_engine": "fused", "clock": lambda: 7.0, **settings}
    store = EmbeddingStore(capacity_rows, memory_file=path, **settings)
    if not store.tables:
        store.add_tables([TABLE, OTHER])
    return store


def notes_of(store, num):
    notes = store.notes(num)
    store.memory.commit(notes, num)
    return notes


def ones(num, dim=2):
    return np.ones((num, dim), dtype=np.float32)


def look_up(store, *ids, table=0):
    out = ones(len(ids), store.tables[table].dim)
    return store.lookup(table, ids_of(*ids), out, training=True)


@pytest.mark.parametrize("has_file", [False, True])
def test_a_request_does_updates_and_notes_at_its_end(path, has_file):
    store = store_of(path if has_file else None)
    notes = notes_of(store, 8)
    with store.request() as request:
        hints = look_up(store, 1, 2)
        store.add_update(0, ids_of(1, 2), ones(2), hints)
        store.add_update(0, ids_of(2, 9), ones(2))
        store.set_step(1, 5)
        request.note(1, 7)
        request.note(1, -1)
        request.note_results(4)
        assert not store.read(0, ids_of(1, 2)).any()
        assert not notes.any()
    assert request.results == [UpdateResult(0, 0), UpdateResult(1, 0)]
    assert store.read(0, ids_of(1, 2)).tolist() == [[-1, -1], [-2, -2]]
    assert notes.tolist() == [0, 2**64 - 1, 0, 0, 1, 0, 0, 0]
    assert [state.num_updates for state in store.states] == [2, 5]
    assert store.counters()["gradients_missed"] == 1
    store.close()
    if has_file:
        store = store_of(path)
        assert notes_of(store, 8).tolist() == notes.tolist()
        with pytest.raises(StoreError, match=r"with the 8 notes .* Received: 9"):
            store.notes(9)


def test_after_an_error_a_request_does_nothing_at_its_end(path):
    store = store_of(path)
    notes = notes_of(store, 1)
    look_up(store, 1)

    def fail():
        with store.request() as request:
            store.add_update(0, ids_of(1), ones(1))
            store.clear()
            request.note(0, 1)
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()
    assert store.num_rows == 1
    assert not store.read(0, ids_of(1)).any()
    assert not notes.any()
    store.update(0, ids_of(1), ones(1))
    assert store.read(0, ids_of(1)).tolist() == [[-1, -1]]


def test_a_write_does_not_reach_rows_that_left_in_the_same_request(path):
    store = store_of(path, capacity_rows=2)
    with store.request():
        store.write(0, ids_of(1, 2), 5 * ones(2))
        look_up(store, 3)
    assert store.read(0, ids_of(1, 2, 3)).tolist() == [[0, 0], [5, 5], [0, 0]]


# DEATH AFTER ANY STORE
#
# The loops run as plain Python, once for each store that they do, and die after it. The
# compiled ones open the memory then: all of it is there, or nothing.


def update_two_tables(store):
    with store.request() as request:
        grads = ones(4)
        grads[2] = np.nan
        store.add_update(0, ids_of(1, 2, 3, 1), grads)
        store.add_update(1, ids_of(9, 1), ones(2, 4))
        request.note(0, 1)
        request.note_results(1)


def look_up_known_and_new_ids(store):
    with store.request() as request:
        look_up(store, 3, 20, 1, 21, 20)
        look_up(store, 3, 5, 6, 2, table=1)  # the first three are candidates
        request.note(0, 1)


def write_rows(store):
    store.write(0, ids_of(30, 1), 3 * ones(2))


def sweep_and_remove(store):
    with store.request():
        store.sweep(100)
        store.remove(0, ids_of(2))


def clear(store):
    with store.request() as request:
        store.add_update(0, ids_of(1, 99), ones(2))
        store.clear()
        request.note(0, 1)


def fill(store):
    """Fill the store, with logs that are about to be cleaned, and some candidates."""
    notes_of(store, 4)
    look_up(store, 1, 2, 3)
    for _ in range(2):
        look_up(store, 1, 2, 9, table=1)
    look_up(store, 5, 6, 7, 8, table=1)
    for _ in range(3):
        store.update(1, ids_of(2), ones(1, 4))
    logs = store.logs.directory
    while not (logs[:, TRIGGER] <= logs[:, TAIL]).any():
        look_up(store, 3, 2)


def grow(store):
    look_up(store, *range(100, 140))


def fill_index(store):
    """Add rows until the index grows, and some entries have moved."""
    notes_of(store, 4)
    number = 1000
    while not store.index.cursor[BOUNDARY]:
        look_up(store, *range(number, number + 10))
        number += 10


CASES = [
    (8, "lru", fill, update_two_tables),
    (8, "lru", fill, look_up_known_and_new_ids),
    (8, "lfu", fill, look_up_known_and_new_ids),
    (8, "lru", fill, write_rows),
    (8, "lru", fill, sweep_and_remove),
    (8, "lru", fill, clear),
    (2000, "lru", fill_index, grow),
]


def state_of(store):
    rows = [store.read(table, ids_of(*range(40))).tolist() for table in (0, 1)]
    steps = [state.num_updates for state in store.states]
    remembered = [state.remembered.tolist() for state in store.states]
    counters = store.counters()
    del counters["bytes"]
    notes = store.notes(4).tolist()
    order = ids_oldest_first(store)
    return [rows, steps, remembered, counters, notes, order, store.tick]


def extents(path):
    """Return what is allocated of a file: where, and its bytes."""
    found, at = [], 0
    with open(path, "rb") as file:  # noqa: PTH123  # a descriptor
        size = os.fstat(file.fileno()).st_size
        while True:
            try:
                begin = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                return size, found
            at = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
            found.append((begin, os.pread(file.fileno(), at - begin, begin)))


def restore(path, size, found):
    os.truncate(path, 0)
    os.truncate(path, size)
    with open(path, "r+b") as file:  # noqa: PTH123
        for begin, data in found:
            os.pwrite(file.fileno(), data, begin)


def die_after(monkeypatch, path, settings, num_stores, action):
    """Open the memory, and die after so many stores of an action; return how many."""
    with monkeypatch.context() as patched, np.errstate(over="ignore"):
        stores = run_stepwise(patched)
        if action is None:
            stores.left = num_stores
        with contextlib.suppress(DiedError):
            store = store_of(path, **settings)
            if action is not None:
                stores.num, stores.left = 0, num_stores
                with contextlib.suppress(DiedError):
                    action(store)
            store.memory.close(is_clean=False)
        return stores.num


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=[f"{action.__name__}-{eviction}" for _, eviction, _, action in CASES],
)
def test_death_after_any_store_leaves_a_whole_request(monkeypatch, path, case):
    die_after_any_store(monkeypatch, path, case, most=40)


def die_after_any_store(monkeypatch, path, case, most):
    """Die after some store, again and again: all of the request is there, or none."""
    capacity_rows, eviction, prepare, action = case
    settings = {"capacity_rows": capacity_rows, "eviction": eviction}
    store = store_of(path, **settings)
    prepare(store)
    before = state_of(store)
    store.memory.close(is_clean=False)
    begin = extents(path)
    num_stores = die_after(monkeypatch, path, settings, None, action)
    store = store_of(path, **settings)
    after = state_of(store)
    assert before != after
    store.memory.close(is_clean=False)
    num_after = 0
    step = 1 + num_stores // most
    for num in sorted({*range(1, num_stores, step), num_stores - 1, num_stores}):
        restore(path, *begin)
        assert die_after(monkeypatch, path, settings, num, action) == num
        store = store_of(path, **settings)
        check_store(store)
        state = state_of(store)
        assert state in (before, after), f"{num} of {num_stores}"
        num_after += state == after
        store.memory.close(is_clean=False)
    assert num_after > 0


@pytest.mark.parametrize(
    ("action", "fraction"), [(update_two_tables, 0.8), (look_up_known_and_new_ids, 0.5)]
)
def test_death_within_recovery_leaves_a_whole_request(
    monkeypatch, path, action, fraction
):
    store = store_of(path)
    fill(store)
    before = state_of(store)
    store.memory.close(is_clean=False)
    begin = extents(path)
    num_stores = die_after(monkeypatch, path, {}, None, action)
    store = store_of(path)
    after = state_of(store)
    store.memory.close(is_clean=False)
    restore(path, *begin)
    die_after(monkeypatch, path, {}, int(fraction * num_stores), action)
    dead, num = extents(path), 0
    while True:
        num += 1
        restore(path, *dead)
        if die_after(monkeypatch, path, {}, num, None) < num:
            break
        store = store_of(path)
        check_store(store)
        assert state_of(store) in (before, after), num
        store.memory.close(is_clean=False)
    assert num > 10


def run_and_be_killed(path, eviction, engine, num_kills):
    kills.kill_again_and_again(path, eviction, engine, num_kills)


@pytest.mark.parametrize(
    ("eviction", "engine", "num_kills"),
    [("lru", "fused", 20), ("lfu", "fused", 10), ("lru", "fbgemm", 10)],
    ids=["lru", "lfu", "fbgemm"],
)
def test_sigkill_at_any_moment_leaves_whole_requests(
    tmp_path, path, eviction, engine, num_kills
):
    arguments = path, eviction, engine, num_kills
    with Processes(tmp_path) as processes:
        process = processes.start("store", run_and_be_killed, *arguments)
        assert process.status() == 0, process.output()


def test_half_a_load_leaves_no_rows(path):
    store = store_of(path)
    look_up(store, 1, 2)
    store.tally[memory.CHANGE] = memory.LOAD
    store.memory.close(is_clean=False)
    for _ in range(2):  # until rows are written
        store = store_of(path)
        assert store.was_loading
        assert store.num_rows == 0
        check_store(store)
        store.memory.close(is_clean=False)
    store = store_of(path)
    look_up(store, 1)
    store.close()
    assert not store_of(path).was_loading
