import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec import AdmitProbability
from persia_torchrec.embedding.optim import SGD, Adagrad
from persia_torchrec.errors import StoreError
from persia_torchrec.store import embedding_store
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.memory import MISSING
from persia_torchrec.table import TableSpec
from tests.support.consistency import check_store, ids_oldest_first
from tests.support.servers import ids_of

# All rows are of one width and share an arena, but those of "wide".
TABLES = [
    TableSpec(name="a", dim=2, optimizer=Adagrad(0.1)),
    TableSpec(name="b", dim=4, optimizer=SGD(0.1), weight_dtype="fp32"),
    TableSpec(name="halves", dim=4, optimizer=Adagrad(0.1, vectorwise_shared=True)),
    TableSpec(name="wide", dim=16, optimizer=SGD(0.1)),
    TableSpec(name="bf16", dim=3, optimizer=Adagrad(0.1), weight_dtype="bf16"),
]


@pytest.fixture
def store():
    store = EmbeddingStore(40)
    store.add_tables(TABLES)
    return store


def look_up(store, table, ids):
    out = np.empty((len(ids), store.tables[table].dim), dtype=np.float32)
    store.lookup(table, ids, out, training=True)


def scan_all(store, table, max_rows):
    """Return the slices of a whole walk."""
    slices, start = [], 0
    while start is not None:
        slices.append(store.scan(table, start, max_rows))
        start = slices[-1].next_slot
    return slices


@given(
    requests=st.lists(
        st.tuples(
            st.integers(0, len(TABLES) - 1),
            st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 30), max_size=30),
        ),
        max_size=8,
    ),
    max_rows=st.integers(1, 9),
)
def test_a_walk_meets_each_row_of_a_table_once(requests, max_rows):
    store = EmbeddingStore(40)  # so that rows are evicted, and slots used again
    store.add_tables(TABLES)
    for table, ids in requests:
        look_up(store, table, np.array(ids, dtype=np.uint64))
    met = 0
    for table in range(len(TABLES)):
        slices = scan_all(store, table, max_rows)
        assert all(len(s.ids) <= max_rows for s in slices)
        ids = np.concatenate([s.ids for s in slices])
        assert len(set(ids.tolist())) == len(ids)
        rows = np.concatenate([s.rows for s in slices])
        assert np.array_equal(rows, store.read(table, ids))
        assert (store.find(table, ids) != MISSING).all()
        met += len(ids)
    assert met == store.num_rows


def test_a_row_that_lives_on_is_met_once_whatever_happens_meanwhile(store):
    look_up(store, 0, np.arange(20, dtype=np.uint64))
    ids, start = [], 0
    while start is not None:
        part = store.scan(0, start, 3)
        ids += part.ids.tolist()
        start = part.next_slot
        # New rows, and lookups of the old ones, which are then the last to leave.
        look_up(store, 1, np.arange(len(ids) * 9, dtype=np.uint64) % 20)
        look_up(store, 0, np.arange(20, dtype=np.uint64))
        store.update(0, ids_of(0, 1), np.ones((2, 2), dtype=np.float32))
    assert sorted(ids) == list(range(20))


def test_a_walk_counts_and_changes_nothing(store):
    look_up(store, 0, np.arange(9, dtype=np.uint64))
    before = store.counters(), ids_oldest_first(store)
    scan_all(store, 0, 4)
    assert (store.counters(), ids_oldest_first(store)) == before
    check_store(store)


def test_a_table_without_rows_is_at_its_end(store):
    part = store.scan(3, 0, 5)
    assert part.next_slot is None
    assert part.ids.shape == (0,)
    assert part.rows.shape == (0, 16)


def test_a_walk_continues_after_the_rows_were_dropped(store):
    look_up(store, 0, np.arange(20, dtype=np.uint64))
    next_slot = store.scan(0, 0, 10).next_slot
    store.clear()
    assert store.scan(0, next_slot, 10).next_slot is None


def test_a_slice_looks_at_a_bounded_number_of_slots(store, monkeypatch):
    monkeypatch.setattr(embedding_store, "MAX_SCANNED_SLOTS", 16)
    look_up(store, 1, np.arange(30, dtype=np.uint64))
    look_up(store, 0, ids_of(5))
    part = store.scan(0, 0, 5)
    assert (len(part.ids), part.next_slot) == (0, 16)
    part = store.scan(0, 16, 5)
    assert (part.ids.tolist(), part.next_slot) == ([5], None)


class TestWrite:
    """Rows are written with their optimizer state, or without."""

    @pytest.mark.parametrize("table", range(len(TABLES)))
    def test_written_data_are_read_back(self, store, table):
        spec = TABLES[table]
        ids = ids_of(7, 2**63, 9)
        shape = (3, spec.dim + spec.num_state_floats)
        rows = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        store.write(table, ids, rows)
        assert np.array_equal(store.read(table, ids), rows)

    def test_weights_alone_leave_the_state_of_a_row(self, store):
        rows = np.arange(8, dtype=np.float32).reshape(2, 4)
        store.write(0, ids_of(1, 2), rows)
        store.write(0, ids_of(2, 3), -rows[:, :2])
        read = store.read(0, ids_of(1, 2, 3))
        assert read[:2].tolist() == [[0, 1, 2, 3], [0, -1, 6, 7]]
        initial = TABLES[0].optimizer.initial_state(2)
        assert np.array_equal(read[2], [-4, -5, *initial])

    def test_rows_are_written_admitted_or_not(self, store):
        spec = TableSpec(
            name="b", dim=4, optimizer=SGD(0.1), admission=AdmitProbability(0.0)
        )
        store.add_table(spec)
        store.write(1, ids_of(1), np.ones((1, 4), dtype=np.float32))
        assert store.read(1, ids_of(1)).tolist() == [[1, 1, 1, 1]]
        look_up(store, 1, ids_of(2))
        assert store.find(1, ids_of(2)) == [MISSING]

    def test_more_rows_than_fit_are_rejected(self, store):
        with pytest.raises(StoreError, match=r"At most 40 rows fit\. Received: 41"):
            store.write(0, np.arange(41, dtype=np.uint64), np.ones((41, 2)))


def test_a_step_is_counted_on_from_where_it_was_set(store):
    store.set_step(0, 41)
    store.update(0, ids_of(1), np.ones((1, 2), dtype=np.float32))
    assert [state.num_updates for state in store.states[:2]] == [42, 0]
