"""Stores of six tables, random requests to them, and their copies."""

import numpy as np
from hypothesis import strategies as st

from persia_torchrec import Expiry
from persia_torchrec.embedding.optim import SGD, Adagrad, Adam
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.row_copy import RowExport, RowImport, split_by_table
from persia_torchrec.table import TableSpec
from tests.support.consistency import check_store, ids_oldest_first
from tests.support.servers import ids_of

# "a" and "c" share an arena.
TABLES = [
    TableSpec(name="a", dim=4, optimizer=SGD(0.5)),
    TableSpec(name="b", dim=3, optimizer=Adam(0.1), keeps_metadata=True),
    TableSpec(name="c", dim=2, optimizer=Adagrad(0.1)),
    TableSpec(name="d", dim=5, optimizer=Adagrad(0.1), weight_dtype="bf16"),
    TableSpec(name="e", dim=1, optimizer=SGD(0.5), expiry=Expiry(seconds_to_live=50)),
    TableSpec(name="f", dim=3, optimizer=SGD(0.5, 0.9), weight_dtype="fp16"),
]
tables = st.integers(0, len(TABLES) - 1)
ids = st.lists(st.integers(0, 12), max_size=6, unique=True)
requests = st.lists(st.tuples(tables, ids, st.booleans()), max_size=30)
evictions = st.sampled_from(["lru", "lfu"])


def store_of(capacity_rows=40, eviction="lru", specs=TABLES, **settings):
    store = EmbeddingStore(
        capacity_rows, eviction=eviction, clock=lambda: 7.0, **settings
    )
    store.add_tables(specs)
    return store


def use(store, table, ids):
    out = np.empty((len(ids), store.tables[table].dim), dtype=np.float32)
    store.lookup(table, ids_of(*ids), out, training=True)
    return out


def update(store, table, ids):
    shape = (len(ids), store.tables[table].dim)
    grads = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) - 3
    store.update(table, ids_of(*ids), grads)


def run(store, requests):
    for table, of_table, is_updated in requests:
        use(store, table, of_table)
        if is_updated:
            update(store, table, of_table)


def exported(store, between=lambda: None):
    """Return table and columns of all blocks of an export."""
    export = RowExport(store)
    blocks = []
    for _ in range(10_000):
        chunk = export.advance()
        if chunk is not None:
            blocks += split_by_table(chunk, export.tables)
        elif export.is_done:
            return blocks
        between()
    raise AssertionError("the export does not end")


def import_into(store, blocks, tick):
    """Put blocks into a store; return how many rows it kept."""
    uses = [rows.uses for _, rows in blocks]
    numbers = [np.full(len(rows), t, dtype=np.uint16) for t, rows in blocks]
    frequencies = [
        rows.metadata[:, 0] if rows.metadata.size else np.ones(len(rows), np.uint32)
        for _, rows in blocks
    ]
    moving = RowImport(
        store,
        np.concatenate([np.empty(0, np.uint64), *uses]),
        np.concatenate([np.empty(0, np.uint16), *numbers]),
        np.concatenate([np.empty(0, np.uint32), *frequencies]),
    )
    for table, rows in blocks:
        moving.add(table, rows, np.ones(len(rows), dtype=np.bool_))
    moving.finish(tick)
    check_store(store)
    return moving.num_kept


def copy_of(store, **settings):
    copy = store_of(store.rows.capacity_rows, **settings)
    import_into(copy, exported(store), store.rows.tick)
    for mine, other in zip(copy.states, store.states, strict=True):
        mine.num_updates = other.num_updates
    return copy


def assert_same(one, other):
    rows = ids_oldest_first(one)
    assert rows == ids_oldest_first(other)
    for number, spec in enumerate(one.tables):
        ids = ids_of(*(id_ for table, id_ in rows if table == number))
        assert one.read(number, ids).tobytes() == other.read(number, ids).tobytes()
        if spec.keeps_metadata:
            left, right = one.metadata(number, ids), other.metadata(number, ids)
            for name in ("frequency", "first_step", "last_step", "last_s"):
                assert np.array_equal(getattr(left, name), getattr(right, name))
