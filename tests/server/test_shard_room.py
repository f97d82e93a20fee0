"""What a server tells of rows that it evicts."""

import logging

import numpy as np
import pytest

from persia_torchrec.embedding.optim import SGD
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.shard import Room
from persia_torchrec.table import TableSpec

ITEM = TableSpec(name="item", dim=4, optimizer=SGD(1.0))
CAPACITY = 600


@pytest.fixture
def store():
    store = ServerConfig(capacity_rows=CAPACITY).make_store()
    store.add_tables([ITEM])
    return store


def look_up(store, *of):
    """Look ids up 100 at a time, so that rows are made for them."""
    for first in range(*of, 100):
        ids = np.arange(first, first + 100, dtype=np.uint64)
        store.lookup(0, ids, np.empty((100, ITEM.dim), np.float32), training=True)


def test_evictions_and_then_many_of_them_are_told_once_each(store, caplog):
    room = Room(store, 3)
    look_up(store, 0, CAPACITY)
    room.check()
    assert room.text == ""
    look_up(store, CAPACITY, 700)
    room.check()
    assert room.text.startswith("embedding server 3 is full, and evicts the rows used")
    assert room.untold(b"one") == {"embedding server 3": room.text}
    assert room.untold(b"one") == {}
    look_up(store, 700, 1000)
    for _ in range(2):
        room.check()
        assert "evicts 400 rows while 1000 ids are looked up" in room.text
    assert room.untold(b"one") == {"embedding server 3": room.text}
    look_up(store, 1000, 3000)
    room.check()
    assert len(caplog.records) == 2


def test_a_look_that_finds_both_tells_that_most_rows_are_evicted(store, caplog):
    caplog.set_level(logging.WARNING, "persia_torchrec")
    room = Room(store, 0)
    look_up(store, 0, 2000)
    room.check()
    [told] = caplog.messages
    assert "evicts 1400 rows while 2000 ids are looked up" in told
    assert "It is full, and evicts the rows used least recently" in told
    look_up(store, 2000, 4000)
    room.check()
    assert caplog.messages == [told]
