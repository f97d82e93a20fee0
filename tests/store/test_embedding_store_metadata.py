import numpy as np
import pytest

from persia_torchrec import Expiry
from persia_torchrec.embedding.optim import SGD, Adam
from persia_torchrec.errors import ConfigError
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.table import TableSpec
from tests.support.servers import ids_of

LARGEST = 2**32 - 1


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.9

    def __call__(self) -> float:
        return self.now_s


def store_of(*specs, **settings):
    clock = Clock()
    store = EmbeddingStore(10, clock=clock, **settings)
    for spec in specs:
        store.add_table(spec)
    return store, clock


def look_up(store, ids, counts=None, *, training=True):
    out = np.empty((len(ids), store.tables[0].dim), dtype=np.float32)
    counts = None if counts is None else np.array(counts, dtype=np.uint32)
    store.lookup(0, ids, out, training=training, counts_N=counts)
    return out


def metadata(store, *ids):
    found = store.metadata(0, ids_of(*ids))
    names = ("frequency", "first_step", "last_step", "last_s")
    columns = [getattr(found, name) for name in names]
    assert all(column.dtype == np.uint32 for column in columns)
    return np.stack(columns, axis=1).tolist()


def update(store, *ids):
    grads = np.ones((len(ids), store.tables[0].dim), dtype=np.float32)
    store.update(0, ids_of(*ids), grads)


ITEM = TableSpec(name="item", dim=3, optimizer=Adam(), keeps_metadata=True)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_row_remembers_how_often_it_was_seen_and_when_it_was_made_and_updated(dtype):
    spec = TableSpec(
        name="item", dim=3, optimizer=Adam(), keeps_metadata=True, weight_dtype=dtype
    )
    store, clock = store_of(spec)
    look_up(store, ids_of(7, 8))
    assert metadata(store, 7, 8) == [[1, 0, 0, 1000]] * 2
    clock.now_s = 1005.0
    update(store, 7)
    look_up(store, ids_of(9, 7, 9), [4, 2, 3])
    assert metadata(store, 9, 7, 8) == [
        [7, 1, 1, 1005],
        [3, 0, 1, 1005],
        [1, 0, 0, 1000],
    ]
    clock.now_s = 1010.0
    update(store, 8)
    assert metadata(store, 8) == [[1, 0, 2, 1010]]


def test_lookups_that_are_not_for_training_and_reads_are_not_counted():
    store, clock = store_of(ITEM)
    look_up(store, ids_of(7))
    before = metadata(store, 7)
    clock.now_s += 100
    look_up(store, ids_of(7, 8), training=False)
    store.read(0, ids_of(7))
    assert metadata(store, 7) == before
    assert metadata(store, 8) == [[0, 0, 0, 0]]


def test_an_id_without_a_row_reads_zeros_and_gets_no_row():
    store, _ = store_of(ITEM)
    look_up(store, ids_of(0))
    assert metadata(store, 2**64 - 1, 0, 5)[::2] == [[0] * 4] * 2
    assert metadata(store) == []
    assert store.num_rows == 1


def test_a_row_that_comes_back_is_counted_again():
    store, clock = store_of(ITEM)
    look_up(store, ids_of(1), [9])
    update(store, 1)
    look_up(store, np.arange(2, 12, dtype=np.uint64))
    assert metadata(store, 1) == [[0] * 4]
    clock.now_s = 2000.0
    look_up(store, ids_of(1), [2])
    assert metadata(store, 1) == [[2, 1, 1, 2000]]


def test_a_count_stays_at_the_largest_number():
    store, _ = store_of(ITEM)
    look_up(store, ids_of(1), [LARGEST - 1])
    frequencies = []
    for _ in range(3):
        look_up(store, ids_of(1))
        frequencies.append(metadata(store, 1)[0][0])
    assert frequencies == [LARGEST] * 3


def test_a_gradient_that_is_rejected_updates_no_metadata():
    store, clock = store_of(ITEM)
    look_up(store, ids_of(1))
    clock.now_s += 50
    store.update(0, ids_of(1), np.full((1, 3), np.nan, dtype=np.float32))
    assert metadata(store, 1) == [[1, 0, 0, 1000]]


def test_a_table_that_keeps_no_metadata_reports_it():
    store, _ = store_of(TableSpec(name="item", dim=3, optimizer=SGD(0.1)))
    with pytest.raises(ConfigError, match=r"'item' keeps no metadata\. Add it with"):
        store.metadata(0, ids_of(1))
    assert not store.wants_counts(0)


@pytest.mark.parametrize(
    ("expiry", "eviction"), [(Expiry(steps_to_live=1), "lru"), (Expiry(), "lfu")]
)
def test_settings_that_need_metadata_keep_them(expiry, eviction):
    spec = TableSpec(name="item", dim=3, optimizer=SGD(0.1), expiry=expiry)
    store, _ = store_of(spec, eviction=eviction)
    look_up(store, ids_of(1), [3])
    assert metadata(store, 1) == [[3, 0, 0, 1000]]
    assert store.wants_counts(0)
