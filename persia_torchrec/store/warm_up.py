"""Compile, or load, every loop of the store before the first request needs it."""

import os
from dataclasses import replace

import numpy as np

from persia_torchrec.arrays import Floats
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.embedding.usage import DynamicDim, Expiry
from persia_torchrec.jit.compiled import share
from persia_torchrec.store import memory, memory_file, row_copy
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.table import TableSpec

_IDS = np.arange(6, dtype=np.uint64)
_STARTS = np.array([0, len(_IDS)])
_COUNTS = np.ones(len(_IDS), dtype=np.uint32)


def warm_up(*, in_file: bool = True) -> None:
    """Run every loop once, on stores of its own: in private memory and ``in_file``.

    The first time on a machine this takes about a minute of processor time, which
    processes that do so at once share; later ones find the machine code on disk. The
    loops of optimizers, initializers and admissions other than the defaults are
    compiled, or loaded in some milliseconds, when the first table with one is added.
    """
    _run(EmbeddingStore(8))
    if not in_file:  # which takes address space
        return
    file = os.memfd_create("store")
    memory_file.logger.disabled = True  # this file says nothing of that of a server
    try:
        store = EmbeddingStore(8, memory_file=f"/proc/self/fd/{file}")
        _run(store)
        store.rows.tally[memory.CHANGE] = memory.REQUEST  # as if it had died there
        store.close()
        EmbeddingStore(8, memory_file=f"/proc/self/fd/{file}").close()
    finally:
        memory_file.logger.disabled = False
        os.close(file)


def _run(store: EmbeddingStore) -> None:
    spec = TableSpec(name="item", dim=2, optimizer=Adagrad())
    rows = replace(spec, expiry=Expiry(steps_to_live=9), ids_without_row="initial")
    blocks = replace(spec, name="blocks", dynamic=DynamicDim(2, period=1))
    item, blocks_table = store.add_table(rows), store.add_table(blocks)
    share(
        {
            "rows": lambda: _use(store, item),
            "expiry": lambda: store.sweep(1),
            "copies": lambda: _copy(store),
            "changes": lambda: _change(store),
            "blocks": lambda: _end_period(store, blocks_table),
        }
    )


def _use(store: EmbeddingStore, table: int) -> None:
    rows = np.zeros((len(_IDS), 2), dtype=np.float32)
    slots = store.lookup(table, _IDS, rows, training=True, counts_N=_COUNTS)
    store.lookup(table, _IDS, rows, training=False)
    store.update(table, _IDS, rows, slots)
    store.write(table, _IDS[:4], rows[:4])
    states = np.zeros(4 * len(_IDS), dtype=np.float32)
    store.lookup_states((table,), _IDS, _STARTS, states, _COUNTS.copy())
    store.write_tables((table,), _IDS, _STARTS, states, frequencies_N=_COUNTS)
    store.read(table, _IDS)
    store.scan(table, 0, 1)
    store.remove(table, _IDS[:1])


def _copy(store: EmbeddingStore) -> None:
    """Export the rows of a store, and import them there."""
    _make_rows(store, 0)
    export = row_copy.RowExport(store)
    while not export.is_done:
        chunk = export.advance()
        split = row_copy.split_by_table(chunk, export.tables) if chunk else []
        for table, columns in split:
            uses, numbers = np.array([1], np.uint64), np.array([table], np.uint16)
            moving = row_copy.RowImport(store, uses, numbers, _COUNTS)
            moving.add(table, columns, np.arange(len(columns)) == 0)
            moving.finish(1)


def _change(store: EmbeddingStore) -> None:
    rows = _make_rows(store, 0)
    columns = row_copy.gather_rows(store, 0, store.find(0, _IDS), _IDS)
    for _ in row_copy.put_changes(store, [(0, columns)]):
        pass
    store.update(0, _IDS, rows)


def _end_period(store: EmbeddingStore, table: int) -> None:
    rows = _make_rows(store, table)
    store.update(table, _IDS, rows)
    store.lookup(table, _IDS, rows, training=False)  # zeros without a row


def _make_rows(store: EmbeddingStore, table: int) -> Floats:
    """Look the ids up in training; return their weights ``(N, 2)``."""
    rows = np.zeros((len(_IDS), 2), dtype=np.float32)
    store.lookup(table, _IDS, rows, training=True)
    return rows
