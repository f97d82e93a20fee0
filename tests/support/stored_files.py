"""What revision 7774c3f wrote, ``stored/7774c3f``, and what it must hold when loaded.

Servers, stores and trainers of that revision wrote the files. The ``*.json`` beside
them say what they hold, as that revision read them: rows and optimizer state as the
hexadecimal bytes of little-endian float32, the rest as numbers. Later revisions do not
write them again: a format that changes gets a new version, and files of its own.

    checkpoint, increments     of two servers; the increments in two logs, one of which
                               continues the other
    training, context          both halves: of ``recoverable()`` with a delta, and of a
                               context of PERSIA's
    memory-*.npz               memory files: of a server that ended, of one that was
                               killed, of stores that died in the middle of a request
    messages, settings         what a server was asked and answered; settings as JSON
    data, positions            files of rows, and how far datasets had read them

A memory file is sparse: ``*.npz`` has its size, and the pages that are not zeros.
"""

import json
import os
import tarfile
import uuid
from dataclasses import astuple
from pathlib import Path

import numpy as np

from persia_torchrec import (
    SGD,
    Adagrad,
    Adam,
    AdmitBloom,
    AdmitFrequency,
    AdmitProbability,
    DynamicDim,
    Expiry,
)
from persia_torchrec.embedding.admission import AdmitAll
from persia_torchrec.embedding.initializer import (
    Constant,
    InverseSqrtDim,
    Normal,
    TruncatedNormal,
    Uniform,
)
from persia_torchrec.server.dedup import Streams
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.memory_file import BOOT
from persia_torchrec.table import TableSpec
from tests.support.consistency import check_store, ids_oldest_first
from tests.support.optimizers import EVERY_OPTIMIZER
from tests.support.repository import ROOT

STORED = ROOT / "tests/stored/7774c3f"
CAPACITY_ROWS = 40
FUSED = {"capacity_rows": CAPACITY_ROWS, "optimizer_engine": "compiled"}
"""Settings of the servers that wrote the files."""

SPECS = [
    TableSpec(name="plain", dim=4, optimizer=Adam(0.1)),
    TableSpec(
        name="half",
        dim=8,
        optimizer=Adagrad(0.1),
        weight_dtype="fp16",
        keeps_metadata=True,
    ),
    TableSpec(
        name="brain",
        dim=4,
        optimizer=SGD(0.1, 0.9),
        weight_dtype="bf16",
        expiry=Expiry(steps_to_live=1000),
    ),
    TableSpec(
        name="counted",
        dim=3,
        optimizer=Adam(0.1),
        admission=AdmitFrequency(3),
        shared_rows=3,
        seed=5,
    ),
    TableSpec(
        name="filtered",
        dim=2,
        optimizer=SGD(0.1),
        admission=AdmitBloom(3, expected_ids=200),
        keeps_metadata=True,
    ),
    TableSpec(
        name="dynamic",
        dim=4,
        optimizer=Adam(0.1),
        dynamic=DynamicDim(2, period=3),
        keeps_metadata=True,
    ),
]

ADMISSIONS = AdmitAll(), AdmitProbability(0.5), AdmitFrequency(3, 50), AdmitBloom(3, 50)
INITIALIZERS = (
    Uniform(-0.5, 0.25),
    InverseSqrtDim(),
    Normal(0.5, 0.25),
    TruncatedNormal(0.5, 0.25),
    Constant(0.5),
)
EXPIRIES = (
    Expiry(),
    Expiry(steps_to_live=5),
    Expiry(seconds_to_live=6),
    Expiry(min_l2_norm=0.5, spared_steps=3),
)


def table_of_settings(number, name):
    """Return a table of ``settings.json``, which has settings of every kind."""
    return TableSpec(
        name=name,
        dim=6,
        optimizer=EVERY_OPTIMIZER[name],
        admission=ADMISSIONS[number % 4],
        initializer=INITIALIZERS[number % 5],
        seed=2**64 - 1 - number,
        weight_dtype=("fp32", "fp16", "bf16")[number % 3],
        keeps_metadata=number % 2 == 1,
        weight_bound=float(number % 3),
        is_frozen=number % 5 == 1,
        expiry=EXPIRIES[number // 4 % 4],
        shared_rows=4 if number % 4 == 2 else 0,
        dynamic=DynamicDim(2, period=9) if number % 4 == 3 else DynamicDim(),
    )


def expected(name):
    """Return what a JSON file says."""
    return json.loads((STORED / name).read_text())


def unpacked(name, folder):
    """Return a stored folder, unpacked into another one."""
    with tarfile.open(STORED / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def describe(store):
    """Return all that a store holds, as JSON's values."""
    check_store(store)
    names = [spec.name for spec in store.tables]
    found = {
        "tick": store.rows.tick,
        "counters": store.counters(),
        "next to leave": [[names[t], id_] for t, id_ in ids_oldest_first(store)],
        "tables": [describe_table(store, n) for n in range(len(store.tables))],
    }
    del found["counters"]["bytes"]  # logs are cleaned sooner or later
    del found["counters"]["writes_without_room"]  # which earlier versions lack
    return json.loads(json.dumps(found))


def describe_table(store, number):
    """Return what a store holds of one table, its rows by id."""
    state, start, ids = store.states[number], 0, []
    while start is not None:
        scanned = store.scan(number, start, 1000)
        ids += scanned.ids.tolist()
        start = scanned.next_slot
    ids = np.array(sorted(ids), dtype=np.uint64)
    metadata = []
    if state.has_metadata:
        metadata = np.stack(astuple(store.metadata(number, ids)), axis=1).tolist()
    return {
        "name": state.spec.name,
        "rows": dict(zip(map(str, ids), hex_of(store.read(number, ids)), strict=True)),
        "metadata": metadata,
        "updates": state.num_updates,
        "thresholds": hex_of(state.thresholds[None]),
        "remembered": [column.tolist() for column in state.sightings()],
    }


def describe_memory(store):
    """Return all that a memory file keeps, as JSON's values."""
    streams = Streams(store)
    batches = [(stream, n) for stream in (1, 2, 7) for n in range(61)]
    outcomes = [[*batch, streams.outcome(batch)] for batch in batches]
    return {
        **describe(store),
        "changes": describe_changes(store.rows.journal),
        "was loading": store.rows.was_loading,
        "streams": json.loads(
            json.dumps(
                {
                    "incarnation": 0 if store.rows.was_loading else streams.incarnation,
                    "generation": streams.generation,
                    "open": streams.open_batches(),
                    "settled": [one for one in outcomes if one[-1] is not None],
                }
            )
        ),
    }


def describe_changes(journal):
    """Return what a journal kept for the next process, as JSON's values."""
    tokens, changes = journal.previous()
    return {
        "tokens": tokens,
        "slots": [[s.table, s.arena, s.tick, s.slots.tolist()] for s in changes.slots],
        "left": [rows.tolist() for rows in changes.left],
        "seen": [[table, ids.tolist()] for table, ids in changes.seen],
        "cleared": changes.was_cleared,
        "numbers": [changes.num_rows, changes.num_requests],
    }


def hex_of(floats_NW):
    """Return the bytes of each row, in hexadecimal digits."""
    return [row.tobytes().hex() for row in np.ascontiguousarray(floats_NW)]


def unpack_memory(name, path):
    """Make a stored memory file, which the boot of this machine has not closed."""
    found = np.load(STORED / name)
    os.truncate(path, int(found["size"]))
    boot = uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).int
    with open(path, "r+b") as file:  # noqa: PTH123  # a descriptor
        for offset, page in zip(found["offsets"].tolist(), found["pages"], strict=True):
            os.pwrite(file.fileno(), page.tobytes(), offset)
        words = np.array([boot >> 64, boot & (2**64 - 1)], dtype=np.uint64)
        os.pwrite(file.fileno(), words.tobytes(), 8 * BOOT)


def open_store(path, capacity_rows=CAPACITY_ROWS, eviction="lru"):
    """Open a memory file, or one that has no store."""
    return EmbeddingStore(
        capacity_rows,
        memory_file=path,
        eviction=eviction,
        optimizer_engine="compiled",
        clock=lambda: 7.0,
    )
