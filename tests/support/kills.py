"""Requests by number, and a store that is killed in the middle of them."""

import os
import signal
import sys
import time
import traceback
from dataclasses import astuple, replace

import numpy as np

from persia_torchrec import (
    AdmitBloom,
    AdmitFrequency,
    AdmitProbability,
    DynamicDim,
    Expiry,
)
from persia_torchrec.embedding.optim import SGD, Adagrad, Adam
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.stored_table import TableState
from persia_torchrec.table import TableSpec
from tests.support.consistency import check_store, ids_oldest_first

TABLES = [
    TableSpec(
        name="adam",
        dim=9,
        optimizer=Adam(0.1),
        admission=AdmitFrequency(2, 60),
        shared_rows=2,
    ),
    TableSpec(name="half", dim=8, optimizer=Adagrad(0.1), weight_dtype="fp16"),
    TableSpec(
        name="bloom",
        dim=4,
        optimizer=SGD(0.1, 0.9),
        admission=AdmitBloom(3, 500),
        expiry=Expiry(steps_to_live=30),
        dynamic=DynamicDim(2, period=5),
    ),
]
FBGEMM_TABLES = [
    TableSpec(name="rare", dim=8, optimizer=SGD(0.1), admission=AdmitFrequency(2, 60)),
    TableSpec(name="half", dim=8, optimizer=Adagrad(0.1), weight_dtype="fp16"),
    TableSpec(
        name="brain",
        dim=4,
        optimizer=Adagrad(0.1),
        weight_dtype="bf16",
        admission=AdmitProbability(0.8),
        keeps_metadata=True,
    ),
]
"""With optimizers and dims that fbgemm has."""

PART_TABLES = [
    TableSpec(
        name="adaptive",
        dim=4,
        optimizer=Adam(0.1),
        weight_dtype="fp16",
        admission=AdmitFrequency(3),
        expiry=Expiry(seconds_to_live=40),
        keeps_metadata=True,
        shared_rows=7,
    ),
    TableSpec(
        name="dynamic",
        dim=9,
        optimizer=Adam(0.1),
        admission=AdmitFrequency(2),
        expiry=Expiry(min_l2_norm=0.02, spared_steps=20),
        dynamic=DynamicDim(3, period=4),
        keeps_metadata=True,
    ),
    TableSpec(
        name="two",
        dim=8,
        optimizer=Adagrad(0.1),
        weight_dtype="bf16",
        expiry=Expiry(steps_to_live=60),
        dynamic=DynamicDim(2, period=1),
    ),
]
"""With shared rows, and with blocks; their metadata is kept."""
TABLES_OF = {"compiled": TABLES, "fbgemm": FBGEMM_TABLES, "parts": PART_TABLES}

CAPACITY_ROWS = 300
NUM_IDS = 1000
_DEADLINE_S = 60.0


def store_of(path=None, eviction="lru", engine="compiled"):
    store = EmbeddingStore(
        CAPACITY_ROWS,
        memory_file=path,
        eviction=eviction,
        optimizer_engine="fbgemm" if engine == "fbgemm" else "compiled",
        clock=lambda: 7.0,
    )
    notes = store.notes(4)
    store.rows.memory.commit(notes, 4)
    if not store.tables:
        store.add_tables(TABLES_OF[engine])
    return store


def request(store, number):
    """Make the request of this number, and note that it was made."""
    rng = np.random.default_rng(number)
    store.rows.seconds.clock = lambda: float(number)
    if number % 50 == 31:
        first = store.tables[0]
        optimizer = replace(first.optimizer, lr=float(rng.uniform(0.01, 1)))
        store.add_table(replace(first, optimizer=optimizer))
    with store.rows.transaction() as one:
        if number % 5 == 2:
            use_several(store, number, rng)
        if number % 7 == 3:
            use_states(store, number, rng)
        for table in rng.permutation(3)[: rng.integers(1, 4)].tolist():
            ids = rng.zipf(1.2, rng.integers(1, 200)).astype(np.uint64) % NUM_IDS
            dim = store.tables[table].dim
            rows = rng.normal(size=(len(ids), dim)).astype(np.float32)
            change(store, number, table, ids, rows)
        if number % 19 == 7:
            store.sweep(100)
            store.remove(0, np.arange(10, dtype=np.uint64))
        if number % 23 == 5:
            store.set_step(1, number)
        if number % 211 == 150:
            store.clear()
        one.note(0, number + 1)


def use_several(store, number, rng):
    """Look all tables up, or update them, or both, by one call each."""
    nums, dims = rng.integers(0, 150, 3), [table.dim for table in store.tables[:3]]
    ids = rng.zipf(1.2, nums.sum()).astype(np.uint64) % NUM_IDS
    asked = (0, 1, 2), ids, np.cumsum([0, *nums])
    rows = rng.normal(size=(nums * dims).sum()).astype(np.float32)
    hints = [None]
    if number % 2:
        hints = store.lookup_tables(*asked, rows.copy())
    if number % 4:
        store.add_updates(*asked, rows, hints[0] if len(hints) == 1 else None)


def use_states(store, number, rng):
    """Look rows up with their state, and write as many others."""
    tables = (1, 2) if store.tables == FBGEMM_TABLES else (1,)
    if store.states[1].spec.parts():
        return
    nums = rng.integers(0, 100, len(tables))
    ids = rng.zipf(1.2, (2, nums.sum())).astype(np.uint64) % NUM_IDS
    starts, widths = np.cumsum([0, *nums]), store.group(tables).widths
    # Sums of squares are not negative.
    rows = np.abs(rng.normal(size=nums.dot(widths))).astype(np.float32)
    seen = np.zeros(len(ids[0]), np.uint32)
    store.lookup_states(tables, ids[0], starts, rows.copy(), seen)
    given = {"counts_N": seen, "frequencies_N": seen[::-1]} if number % 2 else {}
    steps = np.full(len(tables), number) if number % 3 else None
    store.write_tables(tables, ids[1], starts, rows, steps_T=steps, **given)


def change(store, number, table, ids, rows):
    if number % 3 == 0:
        store.lookup(table, ids, rows, training=True)
    elif number % 8 == 1:
        store.write(table, ids[:20], rows[:20])
    else:
        hints = store.find(table, ids) if number % 2 else None
        if number % 4 == 2:
            hints = store.lookup(table, ids, np.empty_like(rows), training=True)
        store.add_update(table, ids, rows, hints)


def state_of(store):
    """Return all that a store holds, so that it can be compared."""
    tables = []
    for number, state in enumerate(store.states):
        ids = np.arange(NUM_IDS, dtype=np.uint64)
        # What a dropped table still has, without its parts.
        read = TableState.read if state.is_dropped else type(state).read
        tables.append(read(state, ids).tobytes())
        if state.has_metadata:
            tables += [
                column.tolist() for column in astuple(store.metadata(number, ids))
            ]
        tables += [state.num_updates, state.remembered.tobytes()]
        tables.append(state.thresholds.tolist())
    counters = store.counters()
    del counters["bytes"]  # logs are cleaned sooner or later
    return [tables, ids_oldest_first(store), store.rows.tick, counters]


def kill_again_and_again(path, eviction, engine, num_kills, seed=0):
    """Kill forked processes that use a store; compare with one that is never killed."""
    rng = np.random.default_rng(seed)
    undisturbed, made = store_of(None, eviction, engine), 0
    for number in range(num_kills):
        begun, tell = os.pipe()
        child = os.fork()
        if child == 0:
            run_until_killed(path, eviction, engine, tell)
        os.close(tell)
        assert os.read(begun, 1) == b"."
        # Every other one is killed after it has made a request, however slow it is.
        acknowledged = len(os.read(begun, 1)) if number % 2 else 0
        time.sleep(rng.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        acknowledged += len(read_all(begun))
        store = store_of(path, eviction, engine)
        num_visible = int(store.notes(4)[0])
        assert made + acknowledged <= num_visible <= made + acknowledged + 1
        while made < num_visible:
            request(undisturbed, made)
            made += 1
        check_store(store)
        assert state_of(store) == state_of(undisturbed), f"after request {made}"
        store.rows.memory.close(is_clean=False)
    assert made >= num_kills // 2


def run_until_killed(path, eviction, engine, tell):
    """Make requests without end; write a byte when each has been made."""
    try:
        store = store_of(path, eviction, engine)
        number = int(store.notes(4)[0])
        os.write(tell, b".")
        deadline = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline:
            request(store, number)
            number += 1
            os.write(tell, b".")
    except Exception:  # noqa: BLE001  # for the test to print
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def read_all(file):
    """Return what is left in a pipe whose other end is closed, and close it."""
    found = b""
    while piece := os.read(file, 2**16):
        found += piece
    os.close(file)
    return found
