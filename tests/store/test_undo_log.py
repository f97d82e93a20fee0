import numpy as np
import pytest

from persia_torchrec import AdmitFrequency, Expiry
from persia_torchrec.embedding.initializer import Uniform
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.errors import StoreError
from persia_torchrec.store import memory
from persia_torchrec.store.embedding_store import EmbeddingStore, UpdateResult
from persia_torchrec.table import TableSpec
from tests.support import deaths, kills
from tests.support.consistency import check_store
from tests.support.processes import Processes
from tests.support.servers import ids_of

pytestmark = pytest.mark.slow

TABLE = TableSpec(name="sgd", dim=2, optimizer=SGD(1.0), initializer=Uniform(0, 0))
OTHER = TableSpec(
    name="other",
    dim=4,
    optimizer=SGD(1.0, 0.5),
    initializer=Uniform(0, 0),
    admission=AdmitFrequency(2, 5),
    expiry=Expiry(steps_to_live=2),
)


def store_of(path=None, capacity_rows=8, **settings):
    settings = {"optimizer_engine": "compiled", "clock": lambda: 7.0, **settings}
    store = EmbeddingStore(capacity_rows, memory_file=path, **settings)
    if not store.tables:
        store.add_tables([TABLE, OTHER])
    return store


def notes_of(store, num):
    notes = store.notes(num)
    store.rows.memory.commit(notes, num)
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
    with store.rows.transaction() as request:
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
        with store.rows.transaction() as request:
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
    with store.rows.transaction():
        store.write(0, ids_of(1, 2), 5 * ones(2))
        look_up(store, 3)
    assert store.read(0, ids_of(1, 2, 3)).tolist() == [[0, 0], [5, 5], [0, 0]]


@pytest.mark.skipif(not deaths.ARE_POSSIBLE, reason="needs the trap flag of x86")
def test_death_before_any_store_leaves_a_whole_request(tmp_path, path):
    with Processes(tmp_path) as processes:
        process = processes.start("store", deaths.die_now_and_then, path)
        assert process.status() == 0, process.output()


@pytest.mark.parametrize(
    ("eviction", "engine", "num_kills"),
    [("lru", "compiled", 10), ("lfu", "compiled", 6), ("lru", "fbgemm", 6)],
    ids=["lru", "lfu", "fbgemm"],
)
def test_sigkill_at_any_moment_leaves_whole_requests(
    tmp_path, path, eviction, engine, num_kills
):
    arguments = path, eviction, engine, num_kills
    with Processes(tmp_path) as processes:
        process = processes.start("store", kills.kill_again_and_again, *arguments)
        assert process.status() == 0, process.output()


@pytest.mark.parametrize("column", [memory.CHANGE, memory.LOADING])
def test_half_a_load_leaves_no_rows(path, column):
    store = store_of(path)
    look_up(store, 1, 2)
    store.rows.tally[column] = memory.LOAD
    store.rows.memory.close(is_clean=False)
    for _ in range(2):  # until rows are written
        store = store_of(path)
        assert store.rows.was_loading
        assert store.num_rows == 0
        check_store(store)
        store.rows.memory.close(is_clean=False)
    store = store_of(path)
    look_up(store, 1)
    store.close()
    assert not store_of(path).rows.was_loading
