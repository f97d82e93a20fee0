"""The store's hottest loop: find the rows of ids, touch them, copy their weights.

The memory of several ids is on its way at once. While the loop is at one id, it
prefetches what others will need:

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
from persia_torchrec.intrinsics import load_u32, load_u64, prefetch, store_u32, unowned
from persia_torchrec.store.index import (
    NOT_FOUND,
    IndexAt,
    find_home,
    find_slot,
    hash_id,
    index_at,
    likely_slot,
)
from persia_torchrec.store.recency import classify, compact_for, touch
from persia_torchrec.store.rows import (
    FREQUENCY,
    HITS,
    MISSES,
    MISSING,
    TICK,
    TICK_MASK,
    WORD,
    Counts,
    Floats,
    Ids,
    Layout,
    RowsAt,
    Slots,
    Words,
    is_row_of,
    read_weights,
    rows_at,
    store_at,
)

Indices = npt.NDArray[np.int64]

NO_ROOM = -1
"""What :func:`lookup_training` returns where a log must be enlarged first."""

_FAR = 24
_NEAR = 8
_RING = 31
"""Length of the ring of ids ahead, less one: a power of two, less one."""

_LARGEST_COUNT = np.uint64(2**32 - 1)
_LINE = np.uint64(64)
_MANY_LINES = np.uint64(640)
_ZERO = np.uint64(0)
_ONE = np.uint64(1)


@compiled
def lookup_training(
    layout: Layout,
    ids_N: Ids,
    counts_N: Counts,
    out_ND: Floats,
    slots_N: Slots,
    missing_N: Indices,
) -> int:
    """Use the rows of ids that have one; return how many have none.

    The first of repeated ids touches the row. ``counts_N`` is how often each id is in
    the batch, or empty for once each. Overwrites ``out_ND``, C-contiguous, where there
    is a row; ``slots_N`` with slots or ``MISSING``; and ``missing_N``, from the front,
    with the positions of ids without a row. If it returns ``NO_ROOM``, nothing has
    happened.
    """
    store = store_at(layout)
    if not compact_for(store.logs, store.arenas, len(ids_N)):
        return NO_ROOM
    store.tally[TICK] += 1
    ids_N, counts_N = unowned(ids_N), unowned(counts_N)
    rows, index = rows_at(store, layout), index_at(store)
    log, num_classes = np.uint64(store.logs.ctypes.data), len(store.logs)
    tick = np.uint64(store.tally[TICK])
    target = np.uint64(out_ND.ctypes.data)
    row_bytes = np.uint64(4 * rows.dim)
    num_missing = 0
    hashes = np.empty(_RING + 1, dtype=np.uint64)
    likely = np.empty(_RING + 1, dtype=np.uint64)
    for i in range(-_FAR, len(ids_N)):
        _look_ahead(i, ids_N, (hashes, likely), index, rows)
        if i < 0:
            continue
        slot = _confirm(i, ids_N, (hashes, likely), index, rows)
        if slot == NOT_FOUND:
            slots_N[i] = MISSING
            missing_N[num_missing] = i
            num_missing += 1
            continue
        slots_N[i] = np.uint32(slot)
        address = rows.base + slot * rows.stride
        class_ = _ZERO
        if rows.has_metadata:
            count = np.uint64(counts_N[i]) if len(counts_N) else _ONE
            class_ = count_up(address, count, num_classes)
        if load_u64(address + WORD) & TICK_MASK != tick:
            touch(log, class_, rows, address, slot, tick)
        read_weights(rows, address, target + np.uint64(i) * row_bytes)
    store.tally[HITS] += len(ids_N) - num_missing
    store.tally[MISSES] += num_missing
    return num_missing


@compiled
def lookup_readonly(
    layout: Layout, ids_N: Ids, out_ND: Floats, value: np.float32
) -> None:
    """Copy weights to ``out_ND``, C-contiguous; an id without a row reads ``value``."""
    store = store_at(layout)
    ids_N, out_ND = unowned(ids_N), unowned(out_ND)
    rows, index = rows_at(store, layout), index_at(store)
    target = np.uint64(out_ND.ctypes.data)
    row_bytes = np.uint64(4 * rows.dim)
    hashes = np.empty(_RING + 1, dtype=np.uint64)
    likely = np.empty(_RING + 1, dtype=np.uint64)
    for i in range(-_FAR, len(ids_N)):
        _look_ahead(i, ids_N, (hashes, likely), index, rows)
        if i < 0:
            continue
        slot = _confirm(i, ids_N, (hashes, likely), index, rows)
        if slot == NOT_FOUND:
            store.tally[MISSES] += 1
            out_ND[i, :] = value
        else:
            store.tally[HITS] += 1
            address = rows.base + slot * rows.stride
            read_weights(rows, address, target + np.uint64(i) * row_bytes)


@compiled
def find_slots(layout: Layout, ids_N: Ids) -> Slots:
    """Return the slot of each id, or ``MISSING``; refreshes no row."""
    store = store_at(layout)
    rows, index = rows_at(store, layout), index_at(store)
    hashes = np.empty(_RING + 1, dtype=np.uint64)
    likely = np.empty(_RING + 1, dtype=np.uint64)
    slots = np.empty(len(ids_N), dtype=np.uint32)
    for i in range(-_FAR, len(ids_N)):
        _look_ahead(i, ids_N, (hashes, likely), index, rows)
        if i >= 0:
            slot = _confirm(i, ids_N, (hashes, likely), index, rows)
            slots[i] = MISSING if slot == NOT_FOUND else np.uint32(slot)
    return slots


@inlined
def prefetch_row(address: np.uint64, num_bytes: np.uint64) -> None:
    """Prefetch the memory of a row.

    Of a long row only the beginning: the processor notices by itself that the rest is
    wanted too, and prefetching all of it would keep others waiting.
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
    frequency = load_u32(address + FREQUENCY) + count
    frequency = min(frequency, _LARGEST_COUNT)
    store_u32(address + FREQUENCY, frequency)
    return classify(frequency) if num_classes > 1 else _ZERO


@inlined
def _look_ahead(
    i: int, ids_N: Ids, ahead: tuple[Words, Words], index: IndexAt, rows: RowsAt
) -> None:
    """Prefetch the memory that ids after the i-th, from ``-_FAR``, will need.

    ``ahead`` are two rings: the hashes of the ids ahead; and for each a slot to be
    confirmed, or ``NOT_FOUND``, which is certain.
    """
    hashes, likely = ahead
    far, near = i + _FAR, i + _NEAR
    if far < len(ids_N):
        hash_ = hash_id(ids_N[far], rows.owner)
        hashes[far & _RING] = hash_
        prefetch(find_home(index, hash_))
    if 0 <= near < len(ids_N):
        slot = likely_slot(index, hashes[near & _RING])
        likely[near & _RING] = slot
        if slot != NOT_FOUND:
            end_of_weights = rows.weights + rows.weight_bytes
            prefetch_row(rows.base + slot * rows.stride, end_of_weights)
            prefetch(rows.tags + slot)


@inlined
def _confirm(
    i: int, ids_N: Ids, ahead: tuple[Words, Words], index: IndexAt, rows: RowsAt
) -> np.uint64:
    """Return the slot of the i-th id, or ``NOT_FOUND``."""
    hashes, likely = ahead
    slot = likely[i & _RING]
    if slot == NOT_FOUND:
        return NOT_FOUND
    if is_row_of(rows.base + slot * rows.stride, ids_N[i], rows.owner):
        return slot
    # Another id with the same hash comes before it in the index.
    return find_slot(index, rows, ids_N[i], hashes[i & _RING])
