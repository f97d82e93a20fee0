import numpy as np
import pytest

from persia_torchrec.embedding.optim import Adam
from persia_torchrec.errors import StoreError
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.memory import reserve
from persia_torchrec.table import TableSpec
from tests.store.memory_use import MIB, resident_bytes


def test_reserved_memory_is_zero_and_can_be_written():
    words = reserve(10**9)
    words[-1] = 7
    assert words[-1] == 7
    assert not words[[0, 10**8, 10**9 - 2]].any()


def test_memory_grows_with_use_and_not_with_the_capacity():
    before = resident_bytes()
    store = EmbeddingStore(10**9)
    tables = [
        store.add_table(TableSpec(name=f"{dim}", dim=dim, optimizer=Adam()))
        for dim in (8, 64)
    ]
    ids = np.arange(1000, dtype=np.uint64)
    for table, dim in zip(tables, (8, 64), strict=True):
        out = np.empty((len(ids), dim), dtype=np.float32)
        store.lookup(table, ids, out, training=True)
    assert resident_bytes() - before < 50 * MIB


def test_a_failed_reservation_is_rejected():
    with pytest.raises(StoreError, match=r"must grant address space.*Lower the"):
        reserve(2**60)
