"""The store's hottest loops: use the rows of ids, and make those that are missing.

The memory of several ids is on its way at once. While a loop is at one id, it
prefetches what others will need:

    id i + 24    hash it, prefetch its line of the index
    id i + 8     read that line, prefetch the row that it probably means
    id i         check that it is the row, touch it, copy its weights

A training lookup uses all rows that are there, and then makes those that are missing.
The rows that leave for them stand at the front of the log. So the memory that an
eviction needs is prefetched in two steps, some rows ahead: the header of the row that
will leave; then its line of the index and the rest of the row, which the new row takes.

Dimension key:
    N: ids of one request
    K: ids that get a row
    D: embedding dim
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import compiled, inlined, inlined_kernel, specialized
from persia_torchrec.embedding.setting import Kernel
from persia_torchrec.intrinsics import (
    copy_bytes,
    floats_at,
    load_u32,
    load_u64,
    prefetch,
    store_u32,
    store_u64,
    unowned,
)
from persia_torchrec.store import memory, recency
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
    likely_slot,
    remove_entry,
)
from persia_torchrec.store.memory import Counts, Floats, Ids, Layout, RowsAt, Slots

Indices = npt.NDArray[np.int64]

NO_ROOM = -1
"""What :func:`lookup_training` returns where a log must be enlarged first."""

CHUNK = 32
"""Ids for which the index makes room, and which are prefetched, at a time."""

_FAR = 24
_NEAR = 8
_RING = 31
"""Length of the ring of ids ahead, less one: a power of two, less one."""

_LARGEST_COUNT = np.uint64(2**32 - 1)
_LINE = np.uint64(64)
_MANY_LINES = np.uint64(640)
_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_S32 = np.uint64(32)
_LOW = np.uint64(2**32 - 1)


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
    store = memory.store_at(layout)
    if not recency.compact_for(store.logs, store.arenas, len(ids_N)):
        return NO_ROOM
    store.tally[memory.TICK] += 1
    ids_N, counts_N = unowned(ids_N), unowned(counts_N)
    rows, index = memory.rows_at(store, layout), index_at(store)
    log, num_classes = np.uint64(store.logs.ctypes.data), len(store.logs)
    tick = np.uint64(store.tally[memory.TICK])
    target = np.uint64(out_ND.ctypes.data)
    row_bytes = np.uint64(4 * rows.dim)
    num_missing = 0
    ahead = np.empty(_RING + 1, np.uint64), np.empty(_RING + 1, np.uint64)
    for i in range(-_FAR, len(ids_N)):
        _look_ahead(i, ids_N, ahead, index, rows)
        if i < 0:
            continue
        slot = _confirm(i, ids_N, ahead, index, rows)
        if slot == NOT_FOUND:
            slots_N[i] = memory.MISSING
            missing_N[num_missing] = i
            num_missing += 1
            continue
        slots_N[i] = np.uint32(slot)
        address = rows.base + slot * rows.stride
        class_ = _ZERO
        if rows.has_metadata:
            count = np.uint64(counts_N[i]) if len(counts_N) else _ONE
            class_ = count_up(address, count, num_classes)
        if load_u64(address + memory.WORD) & memory.TICK_MASK != tick:
            recency.touch(log, class_, rows, address, slot, tick)
        memory.read_weights(rows, address, target + np.uint64(i) * row_bytes)
    store.tally[memory.HITS] += len(ids_N) - num_missing
    store.tally[memory.MISSES] += num_missing
    return num_missing


@compiled
def lookup_readonly(
    layout: Layout, ids_N: Ids, out_ND: Floats, value: np.float32
) -> None:
    """Copy weights to ``out_ND``, C-contiguous; an id without a row reads ``value``."""
    store = memory.store_at(layout)
    ids_N, out_ND = unowned(ids_N), unowned(out_ND)
    rows, index = memory.rows_at(store, layout), index_at(store)
    target = np.uint64(out_ND.ctypes.data)
    row_bytes = np.uint64(4 * rows.dim)
    ahead = np.empty(_RING + 1, np.uint64), np.empty(_RING + 1, np.uint64)
    for i in range(-_FAR, len(ids_N)):
        _look_ahead(i, ids_N, ahead, index, rows)
        if i < 0:
            continue
        slot = _confirm(i, ids_N, ahead, index, rows)
        if slot == NOT_FOUND:
            store.tally[memory.MISSES] += 1
            out_ND[i, :] = value
        else:
            store.tally[memory.HITS] += 1
            address = rows.base + slot * rows.stride
            memory.read_weights(rows, address, target + np.uint64(i) * row_bytes)


@compiled
def find_slots(layout: Layout, ids_N: Ids) -> Slots:
    """Return the slot of each id, or ``MISSING``; refreshes no row."""
    store = memory.store_at(layout)
    rows, index = memory.rows_at(store, layout), index_at(store)
    ahead = np.empty(_RING + 1, np.uint64), np.empty(_RING + 1, np.uint64)
    slots = np.empty(len(ids_N), dtype=np.uint32)
    for i in range(-_FAR, len(ids_N)):
        _look_ahead(i, ids_N, ahead, index, rows)
        if i >= 0:
            slot = _confirm(i, ids_N, ahead, index, rows)
            slots[i] = memory.MISSING if slot == NOT_FOUND else np.uint32(slot)
    return slots


@compiled
def find_rows(layout: Layout, start: int, stop: int, slots_N: Slots) -> tuple[int, int]:
    """Fill ``slots_N`` with a table's slots in ``[start, stop)``, until it is full.

    Returns how many there are, and the slot at which the search ended.
    """
    rows = memory.rows_at(memory.store_at(layout), layout)
    num = 0
    slot = np.uint64(start)
    while slot < np.uint64(stop) and num < len(slots_N):
        word = load_u64(rows.base + slot * rows.stride + memory.WORD)
        if word >> memory.OWNER_SHIFT == rows.owner:
            slots_N[num] = np.uint32(slot)
            num += 1
        slot += _ONE
    return num, int(slot)


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
    frequency = load_u32(address + memory.FREQUENCY) + count
    frequency = min(frequency, _LARGEST_COUNT)
    store_u32(address + memory.FREQUENCY, frequency)
    return recency.classify(frequency) if num_classes > 1 else _ZERO


@inlined
def _look_ahead(
    i: int,
    ids_N: Ids,
    ahead: tuple[memory.Words, memory.Words],
    index: IndexAt,
    rows: RowsAt,
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
    i: int,
    ids_N: Ids,
    ahead: tuple[memory.Words, memory.Words],
    index: IndexAt,
    rows: RowsAt,
) -> np.uint64:
    """Return the slot of the i-th id, or ``NOT_FOUND``."""
    hashes, likely = ahead
    slot = likely[i & _RING]
    if slot == NOT_FOUND:
        return NOT_FOUND
    if memory.is_row_of(rows.base + slot * rows.stride, ids_N[i], rows.owner):
        return slot
    # Another id with the same hash comes before it in the index.
    return find_slot(index, rows, ids_N[i], hashes[i & _RING])


@cache
def build_insert(kernel: Kernel) -> Callable[..., None]:
    """Compile the loop that makes the rows of the ids at ``chosen_K``, and uses them.

    Arguments as in :func:`lookup_training`, which has made room for N touches. A
    repeated id gets one row.
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
        store = memory.store_at(layout)
        rows = memory.rows_at(store, layout)
        log, tick = (
            np.uint64(store.logs.ctypes.data),
            np.uint64(store.tally[memory.TICK]),
        )
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
                    store.tally[memory.INSERTED] += 1
                    begin_row(rows, layout, address, ids_N[i])
                    class_ = _ZERO
                    if rows.has_metadata:
                        class_ = count_up(address, count, len(store.logs))
                    recency.touch(log, class_, rows, address, slot, tick)
                elif rows.has_metadata:
                    count_up(address, count, 1)
                slots_N[i] = np.uint32(slot)
                memory.read_weights(rows, address, target + np.uint64(i) * row_bytes)

    return specialized(insert, kernel)


def _build_begin_row(kernel: Kernel) -> Callable[..., None]:
    """Compile what writes the weights, state and metadata of a new row."""
    draw_weights = inlined_kernel(kernel, is_as_written=True)

    @inlined
    def begin_row(
        rows: RowsAt, layout: Layout, address: np.uint64, id_: np.uint64
    ) -> None:
        numbers, seed = floats_at(layout[memory.FILL]), id_ ^ layout[memory.SEED]
        if rows.dtype == FP32:
            weights = floats_at(address + rows.weights)
            draw_weights(numbers, seed, weights, rows.dim)
        else:
            draw_weights(numbers, seed, floats_at(layout[memory.SCRATCH]), rows.dim)
            memory.write_weights(rows, address, layout[memory.SCRATCH])
        copy_bytes(address + rows.state, layout[memory.INITIAL_STATE], rows.state_bytes)
        if rows.has_metadata:
            store_u32(address + memory.FREQUENCY, _ZERO)
            store_u32(address + memory.LAST_STEP, layout[memory.STEP])
            store_u32(address + memory.FIRST_STEP, layout[memory.STEP])
            store_u32(address + memory.LAST_S, layout[memory.NOW_S])

    return begin_row


@inlined
def prepare_chunk(
    store: memory.StoreAt, rows: RowsAt, ids_N: Ids, chosen_K: Indices
) -> IndexAt:
    """Make room in the index for up to ``CHUNK`` ids, and prefetch what they need."""
    grow_a_little(store, len(chosen_K))
    index = index_at(store)
    for k in range(len(chosen_K)):
        prefetch(find_home(index, hash_id(ids_N[chosen_K[k]], rows.owner)))
    num_leaving = (
        store.tally[memory.ROWS] + len(chosen_K) - store.tally[memory.CAPACITY]
    )
    if num_leaving > 0:
        _prefetch_leaving(store, index, min(num_leaving, len(chosen_K)))
    return index


@inlined
def find_or_make(
    store: memory.StoreAt, index: IndexAt, rows: RowsAt, id_: np.uint64
) -> tuple[np.uint64, bool]:
    """Return the slot of an id, and whether it is new; then its row has an id alone.

    If the store is full, the row leaves that should leave first.
    """
    hash_ = hash_id(id_, rows.owner)
    slot = find_slot(index, rows, id_, hash_)
    if slot != NOT_FOUND:
        return slot, False
    if store.tally[memory.ROWS] >= store.tally[memory.CAPACITY]:
        row = recency.pop_oldest(store.logs, store.arenas)
        if row != recency.NONE:
            remove_row(store, index, row >> _S32, row & _LOW)
            store.tally[memory.EVICTED] += 1
    slot = memory.take_slot(store.arenas, rows.arena)
    store_u64(rows.base + slot * rows.stride, id_)
    add_entry(index, (hash_ << _S32) | (slot + _ONE))
    store.cursor[ENTRIES] += _ONE
    store.tally[memory.ROWS] += 1
    return slot, True


@inlined
def remove_row(
    store: memory.StoreAt, index: IndexAt, arena: np.uint64, slot: np.uint64
) -> None:
    """Take a row out of the index and free its slot; its record stays in the log."""
    address, tally = memory.locate_row(store.arenas, arena, slot), store.tally
    id_, owner = (
        load_u64(address),
        load_u64(address + memory.WORD) >> memory.OWNER_SHIFT,
    )
    remove_entry(index, hash_id(id_, owner), slot)
    store.cursor[ENTRIES] -= _ONE
    memory.free_slot(store.arenas, arena, slot)
    tally[memory.ROWS] -= 1
    if tally[memory.LEFT_ROOM] > 0:
        store_u64(np.uint64(tally[memory.LEFT_AT]), id_)
        store_u64(np.uint64(tally[memory.LEFT_AT]) + memory.WORD, owner)
        tally[memory.LEFT_AT] += 16
        tally[memory.LEFT_ROOM] -= 1


@compiled
def remove_ids(layout: Layout, ids_N: Ids) -> None:
    """Take the rows of ids out; an id without a row changes nothing."""
    store = memory.store_at(layout)
    rows, index = memory.rows_at(store, layout), index_at(store)
    for i in range(len(ids_N)):
        slot = find_slot(index, rows, ids_N[i], hash_id(ids_N[i], rows.owner))
        if slot != NOT_FOUND:
            remove_row(store, index, rows.arena, slot)


@compiled
def _prefetch_leaving(store: memory.StoreAt, index: IndexAt, num_rows: int) -> None:
    """Prefetch the memory of the next rows to leave, and headers further on."""
    logs, arenas = store.logs, store.arenas
    class_ = recency.first_to_leave(logs)
    arena = logs[class_, recency.HEAD_ARENA]
    base, stride = arenas[arena, memory.BASE], arenas[arena, memory.STRIDE]
    for ahead in range(num_rows):
        slot = recency.slot_to_leave(logs, class_, ahead)
        # A guess may not be a slot, but what is read must be memory of ours.
        if slot < arenas[arena, memory.USED]:
            address = base + slot * stride
            owner = load_u64(address + memory.WORD) >> memory.OWNER_SHIFT
            prefetch(find_home(index, hash_id(load_u64(address), owner)))
            prefetch_row(address, stride)
    for ahead in range(num_rows, 2 * num_rows):
        prefetch(base + recency.slot_to_leave(logs, class_, ahead) * stride)
