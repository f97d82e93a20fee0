"""Make rows for ids that have none, and take out the rows that must leave for them.

What leaves stands at the front of the log. So the memory that an eviction needs is
prefetched in two steps, some rows ahead: the header of the row that will leave; then
its line of the index and the rest of the row, which the new row will take.

Dimension key:
    N: ids of one request
    K: ids that get a row
    D: embedding dim
"""

from collections.abc import Callable
from functools import cache

import numpy as np

from persia_torchrec.compiled import compiled, inlined, inlined_kernel, specialized
from persia_torchrec.embedding.setting import Kernel
from persia_torchrec.intrinsics import (
    copy_bytes,
    floats_at,
    load_u64,
    prefetch,
    store_u32,
    store_u64,
    unowned,
)
from persia_torchrec.store.float16 import FP32
from persia_torchrec.store.index import (
    ENTRIES,
    NOT_FOUND,
    IndexAt,
    add_entry,
    find_home,
    find_slot,
    grow_a_little,
    hash_id,
    index_at,
    remove_entry,
)
from persia_torchrec.store.lookup import Indices, count_up, prefetch_row
from persia_torchrec.store.recency import (
    HEAD_ARENA,
    NONE,
    first_to_leave,
    pop_oldest,
    slot_to_leave,
    touch,
)
from persia_torchrec.store.rows import (
    BASE,
    CAPACITY,
    EVICTED,
    FILL,
    FIRST_STEP,
    FREQUENCY,
    INITIAL_STATE,
    INSERTED,
    LAST_S,
    LAST_STEP,
    LEFT_AT,
    LEFT_ROOM,
    NOW_S,
    OWNER_SHIFT,
    ROWS,
    SCRATCH,
    SEED,
    STEP,
    STRIDE,
    TICK,
    USED,
    WORD,
    Counts,
    Floats,
    Ids,
    Layout,
    RowsAt,
    Slots,
    StoreAt,
    free_slot,
    locate_row,
    read_weights,
    rows_at,
    store_at,
    take_slot,
    write_weights,
)

CHUNK = 32
"""Ids for which the index makes room, and which are prefetched, at a time."""

_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_S32 = np.uint64(32)
_LOW = np.uint64(2**32 - 1)


@cache
def build_insert(kernel: Kernel) -> Callable[..., None]:
    """Compile the loop that makes rows, uses them, and copies their weights.

    The table's logs have room for N touches. ``counts_N`` is empty for once each.
    ``chosen_K`` says which ids get a row; a repeated id gets one. The loop writes their
    weights and slots to ``out_ND``, C-contiguous, and ``slots_N``.
    """
    begin_row = _build_begin_row(kernel)

    def insert(
        layout: Layout,
        ids_N: Ids,
        counts_N: Counts,
        chosen_K: Indices,
        out_ND: Floats,
        slots_N: Slots,
    ) -> None:
        ids_N, counts_N = unowned(ids_N), unowned(counts_N)
        layout, chosen_K = unowned(layout), unowned(chosen_K)
        store = store_at(layout)
        rows = rows_at(store, layout)
        log, tick = np.uint64(store.logs.ctypes.data), np.uint64(store.tally[TICK])
        target, row_bytes = np.uint64(out_ND.ctypes.data), np.uint64(4 * rows.dim)
        for start in range(0, len(chosen_K), CHUNK):
            stop = min(start + CHUNK, len(chosen_K))
            index = prepare_chunk(store, rows, ids_N, chosen_K[start:stop])
            for k in range(start, stop):
                i = chosen_K[k]
                count = np.uint64(counts_N[i]) if len(counts_N) else _ONE
                slot, is_new = find_or_make(store, index, rows, ids_N[i])
                address = rows.base + slot * rows.stride
                if is_new:
                    store.tally[INSERTED] += 1
                    begin_row(rows, layout, address, ids_N[i])
                    class_ = _ZERO
                    if rows.has_metadata:
                        class_ = count_up(address, count, len(store.logs))
                    touch(log, class_, rows, address, slot, tick)
                elif rows.has_metadata:
                    count_up(address, count, 1)
                slots_N[i] = np.uint32(slot)
                read_weights(rows, address, target + np.uint64(i) * row_bytes)

    return specialized(insert, kernel)


def _build_begin_row(kernel: Kernel) -> Callable[..., None]:
    """Compile what writes the weights, state and metadata of a new row."""
    draw_weights = inlined_kernel(kernel, is_as_written=True)

    @inlined
    def begin_row(
        rows: RowsAt, layout: Layout, address: np.uint64, id_: np.uint64
    ) -> None:
        numbers, seed = floats_at(layout[FILL]), id_ ^ layout[SEED]
        if rows.dtype == FP32:
            weights = floats_at(address + rows.weights)
            draw_weights(numbers, seed, weights, rows.dim)
        else:
            draw_weights(numbers, seed, floats_at(layout[SCRATCH]), rows.dim)
            write_weights(rows, address, layout[SCRATCH])
        copy_bytes(address + rows.state, layout[INITIAL_STATE], rows.state_bytes)
        if rows.has_metadata:
            store_u32(address + FREQUENCY, _ZERO)
            store_u32(address + LAST_STEP, layout[STEP])
            store_u32(address + FIRST_STEP, layout[STEP])
            store_u32(address + LAST_S, layout[NOW_S])

    return begin_row


@inlined
def prepare_chunk(
    store: StoreAt, rows: RowsAt, ids_N: Ids, chosen_K: Indices
) -> IndexAt:
    """Make room in the index for up to ``CHUNK`` ids, and prefetch what they need."""
    grow_a_little(store, len(chosen_K))
    index = index_at(store)
    for k in range(len(chosen_K)):
        prefetch(find_home(index, hash_id(ids_N[chosen_K[k]], rows.owner)))
    num_leaving = store.tally[ROWS] + len(chosen_K) - store.tally[CAPACITY]
    if num_leaving > 0:
        _prefetch_leaving(store, index, min(num_leaving, len(chosen_K)))
    return index


@inlined
def find_or_make(
    store: StoreAt, index: IndexAt, rows: RowsAt, id_: np.uint64
) -> tuple[np.uint64, bool]:
    """Return the slot of an id, and whether it is new; then its row has an id alone.

    If the store is full, the row leaves that should leave first.
    """
    hash_ = hash_id(id_, rows.owner)
    slot = find_slot(index, rows, id_, hash_)
    if slot != NOT_FOUND:
        return slot, False
    if store.tally[ROWS] >= store.tally[CAPACITY]:
        _evict_oldest(store, index)
    slot = take_slot(store.arenas, rows.arena)
    store_u64(rows.base + slot * rows.stride, id_)
    add_entry(index, hash_, slot)
    store.cursor[ENTRIES] += _ONE
    store.tally[ROWS] += 1
    return slot, True


@inlined
def remove_row(
    store: StoreAt, index: IndexAt, arena: np.uint64, slot: np.uint64
) -> None:
    """Take a row out of the index and free its slot; its record stays in the log."""
    address, tally = locate_row(store.arenas, arena, slot), store.tally
    id_, owner = load_u64(address), load_u64(address + WORD) >> OWNER_SHIFT
    remove_entry(index, hash_id(id_, owner), slot)
    store.cursor[ENTRIES] -= _ONE
    free_slot(store.arenas, arena, slot)
    tally[ROWS] -= 1
    if tally[LEFT_ROOM] > 0:
        store_u64(np.uint64(tally[LEFT_AT]), id_)
        store_u64(np.uint64(tally[LEFT_AT]) + WORD, owner)
        tally[LEFT_AT] += 16
        tally[LEFT_ROOM] -= 1


@compiled
def remove_ids(layout: Layout, ids_N: Ids) -> None:
    """Take the rows of ids out; an id without a row changes nothing."""
    store = store_at(layout)
    rows, index = rows_at(store, layout), index_at(store)
    for i in range(len(ids_N)):
        slot = find_slot(index, rows, ids_N[i], hash_id(ids_N[i], rows.owner))
        if slot != NOT_FOUND:
            remove_row(store, index, rows.arena, slot)


@inlined
def _evict_oldest(store: StoreAt, index: IndexAt) -> None:
    row = pop_oldest(store.logs, store.arenas)
    if row != NONE:
        remove_row(store, index, row >> _S32, row & _LOW)
        store.tally[EVICTED] += 1


@compiled
def _prefetch_leaving(store: StoreAt, index: IndexAt, num_rows: int) -> None:
    """Prefetch the memory of the next rows to leave, and headers further on."""
    logs, arenas = store.logs, store.arenas
    class_ = first_to_leave(logs)
    arena = logs[class_, HEAD_ARENA]
    base, stride = arenas[arena, BASE], arenas[arena, STRIDE]
    for ahead in range(num_rows):
        slot = slot_to_leave(logs, class_, ahead)
        # A guess may not be a slot, but what is read must be memory of ours.
        if slot < arenas[arena, USED]:
            address = base + slot * stride
            owner = load_u64(address + WORD) >> OWNER_SHIFT
            prefetch(find_home(index, hash_id(load_u64(address), owner)))
            prefetch_row(address, stride)
    for ahead in range(num_rows, 2 * num_rows):
        prefetch(base + slot_to_leave(logs, class_, ahead) * stride)
