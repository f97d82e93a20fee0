"""Compile, or load, every loop of the store before the first request needs it."""

import os
from dataclasses import replace

import numpy as np

from persia_torchrec.embedding import admission
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.embedding.usage import DynamicDim, Expiry
from persia_torchrec.store import memory, memory_file, row_copy
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.table import TableSpec

_ADMISSIONS = (
    admission.AdmitAll(),
    admission.AdmitProbability(0.5),
    admission.AdmitFrequency(2),
    admission.AdmitBloom(2, 9),
)


def warm_up(*, in_file: bool = True) -> None:
    """Run every loop once, on stores of its own: in private memory and ``in_file``.

    The first time on a machine this takes about half a minute; later processes find
    the machine code on disk. The loops of optimizers and initializers other than the
    defaults are compiled, or loaded in some milliseconds, when the first table with one
    is added.
    """
    _run(EmbeddingStore(4))
    if not in_file:  # which takes address space
        return
    file = os.memfd_create("store")
    memory_file.logger.disabled = True  # this file says nothing of that of a server
    try:
        store = EmbeddingStore(4, memory_file=f"/proc/self/fd/{file}")
        _run(store)
        store.tally[memory.CHANGE] = memory.REQUEST  # as if it had died there
        store.close()
        EmbeddingStore(4, memory_file=f"/proc/self/fd/{file}").close()
    finally:
        memory_file.logger.disabled = False
        os.close(file)


def _run(store: EmbeddingStore) -> None:
    ids = np.arange(6, dtype=np.uint64)
    counts = np.ones(len(ids), dtype=np.uint32)
    rows = np.zeros((len(ids), 2), dtype=np.float32)
    expiry = Expiry(steps_to_live=9)
    spec = TableSpec(name="item", dim=2, optimizer=Adagrad(), expiry=expiry)
    for table, admits in enumerate(_ADMISSIONS):
        store.add_table(replace(spec, name=f"{table}", admission=admits))
        slots = store.lookup(table, ids, rows, training=True, counts_N=counts)
        store.lookup(table, ids, rows, training=False)
        store.update(table, ids, rows, slots)
        store.write(table, ids[:4], rows[:4])
        store.read(table, ids)
        store.scan(table, 0, 1)
        store.remove(table, ids[:1])
    store.sweep(1)
    export = row_copy.RowExport(store)
    while not export.is_done:
        chunk = export.advance()
        split = row_copy.split_by_table(chunk, export.tables) if chunk else []
        for table, columns in split:
            uses, numbers = np.array([1], np.uint64), np.array([table], np.uint16)
            moving = row_copy.RowImport(store, uses, numbers, counts)
            moving.add(table, columns, np.arange(len(columns)) == 0)
            moving.finish(1)
    columns = row_copy.gather_rows(store, 0, store.find(0, ids), ids)
    for _ in row_copy.put_changes(store, [(0, columns)]):
        pass
    store.update(0, ids, rows)
    spec = replace(
        spec, name="blocks", expiry=Expiry(), dynamic=DynamicDim(2, period=1)
    )
    table = store.add_table(spec)
    store.lookup(table, ids[:2], rows[:2], training=True)
    store.update(table, ids[:2], rows[:2])  # ends a period
