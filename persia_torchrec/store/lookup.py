"""The store's hottest loop: find the rows of ids, touch them, copy their weights.

The memory of several ids is on its way at once. While the loop is at one id, it asks
for what others will need:

    id i + 24    hash it, prefetch its line of the index
    id i + 8     read that line, prefetch the row that it probably means
    id i         check that it is the row, touch it, copy its weights

Nothing is made or evicted here: a training lookup first uses all rows that are there,
and then makes those that are missing (see ``insert.py``).

Dimension key:
    N: ids of one request
    D: embedding dim
"""

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import compiled, inlined
from persia_torchrec.store.halves import widen
from persia_torchrec.store.index import (
    NOT_FOUND,
    IndexAt,
    find_slot,
    hash_of,
    home_of,
    index_at,
    is_row_of,
    likely_slot,
)
from persia_torchrec.store.memory import (
    copy_bytes,
    load_half_word,
    load_word,
    prefetch,
    store_half_word,
    unowned,
)
from persia_torchrec.store.recency import class_of, touch
from persia_torchrec.store.rows import (
    DIM,
    DTYPE,
    FP32,
    FREQUENCY,
    HAS_METADATA,
    TICK_MASK,
    WEIGHTS,
    WORD,
    Floats,
    Layout,
    RowsAt,
    Words,
    rows_at,
)

Ids = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.uint32]
Counts = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int64]
Tally = npt.NDArray[np.int64]

MISSING = np.uint32(2**32 - 1)
"""Slot of an id that has no row."""

HITS, MISSES, INSERTED, REJECTED, ROWS, TICK = range(6)
EVICTED, EXPIRED_STEPS, EXPIRED_SECONDS, FADED = range(6, 10)
LEFT_AT, LEFT_ROOM = range(10, 12)
"""Places of the tally: ids found, ids not found, rows made, ids refused a row, rows in
use, tick of the present request; rows that left because the store was full, because of
their age in steps, in seconds, because of their norm; address at which the next row to
leave is noted, or 0, and for how many there is room (see ``journal.py``)."""

_FAR = 24
_NEAR = 8
_RING = 31
"""Places of the ids ahead, less one: a power of two, less one."""

_LARGEST_COUNT = np.uint64(2**32 - 1)
_LINE = np.uint64(64)
_MANY_LINES = np.uint64(640)
_ZERO = np.uint64(0)
_ONE = np.uint64(1)


@compiled
def look_up(
    ids_N: Ids,
    counts_N: Counts,
    out_ND: Floats,
    slots_N: Slots,
    missing_N: Places,
    floats: Floats,
    lines: Words,
    cursor: Words,
    arenas: Words,
    logs: Words,
    tally: Tally,
    layout: Layout,
) -> int:
    """Use the rows of ids that have one, and copy their weights.

    Args:
        ids_N: uint64 ``(N,)``; may hold repeats, of which the first touches the row.
        counts_N: uint32 ``(N,)``, how often each id is in the batch; or empty, for
            once each.
        out_ND: float32 ``(N, D)``, C-contiguous; overwritten where there is a row.
        slots_N: uint32 ``(N,)``, overwritten: the slot, or ``MISSING``.
        missing_N: int64 ``(N,)``, overwritten from the front: which ids have no row.
        floats: the arena of this table's rows.
        lines: of the index.
        cursor: of the index.
        arenas: the directory of arenas.
        logs: the directory of logs, with room for N touches.
        tally: int64 ``(12,)``, see ``HITS`` and the others; counted up.
        layout: of the table's rows.

    Returns:
        How many ids have no row.
    """
    ids_N, counts_N, out_ND = unowned(ids_N), unowned(counts_N), unowned(out_ND)
    floats, layout = unowned(floats), unowned(layout)
    rows, index = rows_at(arenas, layout), index_at(lines, cursor)
    log, num_classes = np.uint64(logs.ctypes.data), len(logs)
    tick = np.uint64(tally[TICK])
    has_metadata = layout[HAS_METADATA] != 0
    num_missing = 0
    hashes = np.empty(_RING + 1, dtype=np.uint64)
    likely = np.empty(_RING + 1, dtype=np.uint64)
    for i in range(-_FAR, len(ids_N)):
        _look_ahead(i, ids_N, hashes, likely, index, rows)
        if i < 0:
            continue
        slot = _confirmed(i, ids_N, hashes, likely, index, rows)
        if slot == NOT_FOUND:
            slots_N[i] = MISSING
            missing_N[num_missing] = i
            num_missing += 1
            continue
        slots_N[i] = np.uint32(slot)
        address = rows.base + slot * rows.stride
        class_ = _ZERO
        if has_metadata:
            count = np.uint64(counts_N[i]) if len(counts_N) else _ONE
            class_ = count_up(address, count, num_classes)
        if load_word(address + WORD) & TICK_MASK != tick:
            touch(log, class_, rows, address, slot, tick)
        copy_weights(floats, slot, rows, layout, out_ND, i)
    tally[HITS] += len(ids_N) - num_missing
    tally[MISSES] += num_missing
    return num_missing


@compiled
def look_at(
    ids_N: Ids,
    out_ND: Floats,
    floats: Floats,
    lines: Words,
    cursor: Words,
    arenas: Words,
    tally: Tally,
    layout: Layout,
    value: np.float32,
) -> None:
    """Copy the weights of ids; an id without a row reads ``value``. Changes no row.

    Args:
        ids_N: uint64 ``(N,)``.
        out_ND: float32 ``(N, D)``, C-contiguous, overwritten.
        floats: the arena of this table's rows.
        lines: of the index.
        cursor: of the index.
        arenas: the directory of arenas.
        tally: int64 ``(12,)``; hits and misses are counted up.
        layout: of the table's rows.
        value: what every weight of an id without a row reads.
    """
    out_ND, floats, layout = unowned(out_ND), unowned(floats), unowned(layout)
    rows, index = rows_at(arenas, layout), index_at(lines, cursor)
    hashes = np.empty(_RING + 1, dtype=np.uint64)
    likely = np.empty(_RING + 1, dtype=np.uint64)
    for i in range(-_FAR, len(ids_N)):
        _look_ahead(i, ids_N, hashes, likely, index, rows)
        if i < 0:
            continue
        slot = _confirmed(i, ids_N, hashes, likely, index, rows)
        if slot == NOT_FOUND:
            tally[MISSES] += 1
            out_ND[i, :] = value
        else:
            tally[HITS] += 1
            copy_weights(floats, slot, rows, layout, out_ND, i)


@compiled
def find_slots(
    ids_N: Ids, lines: Words, cursor: Words, arenas: Words, layout: Layout
) -> Slots:
    """Find the slots of ids. Changes nothing, and refreshes no row.

    Args:
        ids_N: uint64 ``(N,)``.
        lines: of the index.
        cursor: of the index.
        arenas: the directory of arenas.
        layout: of the table's rows.

    Returns:
        uint32 ``(N,)``: the slot, or ``MISSING``.
    """
    rows, index = rows_at(arenas, layout), index_at(lines, cursor)
    hashes = np.empty(_RING + 1, dtype=np.uint64)
    likely = np.empty(_RING + 1, dtype=np.uint64)
    slots = np.empty(len(ids_N), dtype=np.uint32)
    for i in range(-_FAR, len(ids_N)):
        _look_ahead(i, ids_N, hashes, likely, index, rows)
        if i >= 0:
            slot = _confirmed(i, ids_N, hashes, likely, index, rows)
            slots[i] = MISSING if slot == NOT_FOUND else np.uint32(slot)
    return slots


@inlined
def prefetch_row(address: np.uint64, num_bytes: np.uint64) -> None:
    """Ask for the memory of a row.

    Of a long row only the beginning: the processor notices by itself that the rest is
    wanted too, and asking for all of it would keep others waiting.
    """
    if num_bytes > _MANY_LINES:
        prefetch(address)
        prefetch(address + _LINE)
        return
    last = address + num_bytes - _ONE
    while address < last:
        prefetch(address)
        address += _LINE
    prefetch(last)


@inlined
def count_up(address: np.uint64, count: np.uint64, num_classes: int) -> np.uint64:
    """Add to a row's frequency; return the row's class."""
    frequency = load_half_word(address + FREQUENCY) + count
    frequency = min(frequency, _LARGEST_COUNT)
    store_half_word(address + FREQUENCY, frequency)
    return class_of(frequency) if num_classes > 1 else _ZERO


@inlined
def copy_weights(
    floats: Floats,
    slot: np.uint64,
    rows: RowsAt,
    layout: Layout,
    out_ND: Floats,
    i: int,
) -> None:
    """Copy a row's weights to row ``i`` of an array."""
    if layout[DTYPE] == FP32:
        num_bytes = rows.end_of_weights - rows.weights
        target = np.uint64(out_ND.ctypes.data) + np.uint64(i) * num_bytes
        copy_bytes(target, rows.base + slot * rows.stride + rows.weights, num_bytes)
    else:
        begin = 2 * layout[WEIGHTS]
        halves = floats.view(np.uint16)[slot, begin : begin + layout[DIM]]
        widen(halves, out_ND[i], layout[DTYPE])


@inlined
def _look_ahead(
    i: int, ids_N: Ids, hashes: Ids, likely: Ids, index: IndexAt, rows: RowsAt
) -> None:
    """Ask for the memory that ids after place ``i`` will need.

    Args:
        i: place of the present id, from ``-_FAR``.
        ids_N: uint64 ``(N,)``.
        hashes: uint64, those of the ids ahead, in a ring.
        likely: uint64, in a ring as well: a slot to be confirmed, or ``NOT_FOUND``,
            which is certain.
        index: where the index is.
        rows: where the rows are.
    """
    far, near = i + _FAR, i + _NEAR
    if far < len(ids_N):
        hash_ = hash_of(ids_N[far], rows.owner)
        hashes[far & _RING] = hash_
        prefetch(home_of(index, hash_))
    if 0 <= near < len(ids_N):
        slot = likely_slot(index, hashes[near & _RING])
        likely[near & _RING] = slot
        if slot != NOT_FOUND:
            prefetch_row(rows.base + slot * rows.stride, rows.end_of_weights)
            prefetch(rows.tags + slot)


@inlined
def _confirmed(
    i: int, ids_N: Ids, hashes: Ids, likely: Ids, index: IndexAt, rows: RowsAt
) -> np.uint64:
    """Return the slot of the id at place ``i``, or ``NOT_FOUND``."""
    slot = likely[i & _RING]
    if slot == NOT_FOUND:
        return NOT_FOUND
    if is_row_of(rows.base + slot * rows.stride, ids_N[i], rows.owner):
        return slot
    # Another id with the same hash comes before it in the index.
    return find_slot(index, rows, ids_N[i], hashes[i & _RING])
