"""The store's hot loops: use the rows of ids, make those that are missing, step rows.

The memory of many ids is on its way at once. A lookup goes through its ids in chunks
of 128, in short loops, of which the processor has several rounds in work:

    chunk c + 2    hash the ids, prefetch their lines of the index
    chunk c + 1    read those lines: the rows that the ids probably mean
    chunk c        id i + 12    prefetch the row
                   id i         check that it is the row, touch it, copy its weights

A training lookup uses all rows that are there, and then makes those that are missing.
The rows that leave for them stand at the front of the log, so their memory is
prefetched in two steps: the header; then its line of the index and the rest of the row.

A write goes the same way, and copies into the rows; those that it makes do not leave
for each other.

An update takes as hints the slots that the lookup of the same ids returned. Each is
checked against the row's header, which the update touches anyway; a row that has moved
or left since is looked up in the index. So no gradient reaches another id. A gradient
that holds NaN or an infinity would ruin its row for good: it is rejected and counted.
So is one whose step leaves the row not finite (``finite.py``).
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Counts, Floats, Ids, Indices, Slots, Starts, Words
from persia_torchrec.embedding.setting import Kernel
from persia_torchrec.jit import intrinsics as cpu
from persia_torchrec.jit.compiled import (
    compiled,
    inlined,
    inlined_kernel,
    specialized,
)
from persia_torchrec.jit.float16 import FP32
from persia_torchrec.jit.kernel import NO_LOG
from persia_torchrec.store import finite, memory, recency, undo_log
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
from persia_torchrec.store.memory import Layout, Log, RowsAt, TableAt, TablesAt

"""Where each table's part of an array begins, and the end of the last, ``(T + 1,)``."""
Rules = npt.NDArray[np.float64]
Rings = tuple[Words, Words]
"""Of the ids ahead: hashes of a chunk; of two chunks the slots to be confirmed, or
``NOT_FOUND``, for certain."""

READ_ROWS, WRITE_ROWS, WRITE_UPDATED = range(3)
"""What is copied: weights and state out of rows; into rows, as they are, or as an
update of this step has left them."""

Copied = tuple[int, int, Counts, int] | None
"""Rows that are copied with their state, table by table: their address; one of the
above; of rows with metadata their frequencies, uint32 ``(N,)`` or empty, which a read
overwrites, and of which a written row has had its own at least; the first tick of the
request, rows used since which do not leave for others. None: weights are read. So
there is a loop of its own for these."""

NO_ROOM = -1
"""What :func:`lookup_training` returns, doing nothing, where a log must be enlarged."""

CHUNK = 32
"""Ids for which the index makes room, and which are prefetched, at a time."""

STEPS_TO_LIVE, SECONDS_TO_LIVE, MIN_L2_NORM, SPARED_STEPS, NOW_OF_ROWS = range(5)
"""Columns of the rules of expiry: the limits of ``Expiry``, the current second."""

_LOOKED_AHEAD = 128
"""Ids whose index is read at a time, a power of two: a few KiB of hashes and slots."""

_IN_CHUNK, _IN_RING = _LOOKED_AHEAD - 1, 2 * _LOOKED_AHEAD - 1
_LOOKUP_AHEAD, _UPDATE_AHEAD = 12, 10
"""How far ahead rows are prefetched."""

_INFINITE = np.float32(np.inf)
_MODERATE = finite.MODERATE_WEIGHT * finite.MODERATE_WEIGHT
_LARGEST_COUNT = np.uint64(2**32 - 1)
_LINE = np.uint64(64)
_MANY_LINES = np.uint64(640)
_ZERO, _ONE = np.uint64(0), np.uint64(1)
_S32, _LOW = np.uint64(32), np.uint64(2**32 - 1)


@compiled
def lookup_training(
    tables: TablesAt,
    begin: tuple[int, int, Copied],
    ids_N: Ids,
    counts_N: Counts,
    starts_T: Starts,
    out: Floats,
    slots_N: Slots,
    missing_N: Indices,
) -> tuple[int, int]:
    """Use the rows of ids that have one, table by table, up to one without all rows.

    Returns that table's position, or T, and how many of its ids have no row; or
    ``NO_ROOM``, having done nothing. The first of repeated ids touches the row.

    Args:
        tables: of T tables; each is a request of its own, with its own tick.
        begin: the position of the first table to look up; the touches for which a log
            needs room, 0 where it was made; what is copied instead of weights.
        ids_N: of all tables, those of table t from ``starts_T[t]`` on, ``(T + 1,)``.
        counts_N: how often each id is in the batch, or empty for once each.
        starts_T: see above.
        out: is overwritten with the weights, flat and table by table, where there is a
            row.
        slots_N: is overwritten with slots or ``MISSING``.
        missing_N: is overwritten, from the front, with the positions within the table
            of ids without a row.
    """
    layouts_T, log_if_any = tables
    log = memory.log_address(log_if_any)
    ids_N, counts_N = cpu.unowned(ids_N), cpu.unowned(counts_N)
    target = _address_of(out, begin[2])
    for t in range(len(layouts_T)):
        layout = memory.layout_at(layouts_T[t])
        first, num_ids = starts_T[t], starts_T[t + 1] - starts_T[t]
        row_bytes = np.uint64(4) * _width_of(layout, begin[2])
        begin_of_rows = target
        target += np.uint64(num_ids) * row_bytes
        if t < begin[0]:
            continue
        if t == begin[0] and begin[1]:
            store = memory.changing_store_at(layout, log)
            logs, arenas = store.logs, store.arenas
            if not recency.compact_for(logs, arenas, begin[1], log):
                return t, NO_ROOM
        num_missing = _look_up_table(
            layout,
            log,
            ids_N[first : first + num_ids],
            counts_N[first : first + num_ids],
            begin_of_rows,
            slots_N[first : first + num_ids],
            missing_N,
            _part_of(begin[2], first, num_ids),
        )
        if num_missing:
            return t, num_missing
    return len(layouts_T), 0


@compiled
def _look_up_table(
    layout: Layout,
    log: np.uint64,
    ids_N: Ids,
    counts_N: Counts,
    target: np.uint64,
    slots_N: Slots,
    missing_N: Indices,
    copied: Copied,
) -> int:
    """Use the rows of a table's ids that have one; return how many have none."""
    ids_N, counts_N = cpu.unowned(ids_N), cpu.unowned(counts_N)
    slots_N, missing_N = cpu.unowned(slots_N), cpu.unowned(missing_N)
    store = memory.changing_store_at(layout, log)
    store.tally[memory.TICK] += 1
    rows, index = memory.rows_at(store, layout), index_at(store)
    logs, num_classes = np.uint64(store.logs.ctypes.data), len(store.logs)
    tick = np.uint64(store.tally[memory.TICK])
    row_bytes = np.uint64(4) * _width_of(layout, copied)
    num_missing = 0
    num_ahead = _bytes_used(rows, copied)
    ahead = _begin_ahead(ids_N, index, rows, num_ahead)
    for i in range(len(ids_N)):
        slot = _next_slot(i, ids_N, ahead, index, rows, num_ahead)
        if slot == NOT_FOUND:
            slots_N[i] = memory.MISSING
            missing_N[num_missing] = i
            num_missing += 1
            continue
        slots_N[i] = np.uint32(slot)
        address = rows.base + slot * rows.stride
        is_first = memory.tick_at(address) != tick
        if _is_write(copied):
            memory.keep_row(
                store.log, address + memory.WORD, rows.stride // memory.WORD - _ONE
            )
        elif is_first:
            undo_log.keep_use(store.log, address, rows.has_metadata)
        class_ = _ZERO
        if rows.has_metadata:
            count = np.uint64(counts_N[i]) if len(counts_N) else _ONE
            class_ = _count_copied(address, count, num_classes, i, copied)
        if is_first:
            recency.touch(logs, class_, rows, address, slot, tick)
        at = target + np.uint64(i) * row_bytes
        _copy(store, rows, layout, address, at, copied)
    if not _is_write(copied):
        store.tally[memory.HITS] += len(ids_N) - num_missing
        store.tally[memory.MISSES] += num_missing
    return num_missing


@inlined
def _address_of(out: Floats, copied: Copied) -> np.uint64:
    if copied is None:
        return np.uint64(out.ctypes.data)
    return np.uint64(copied[0])


@inlined
def _width_of(layout: Layout, copied: Copied) -> np.uint64:
    """Return the floats of a row that are copied."""
    if copied is None:
        return layout[memory.DIM]
    return layout[memory.DIM] + layout[memory.NUM_STATE]


@inlined
def _part_of(copied: Copied, first: int, num: int) -> Copied:
    """Return what is copied of one table; the address is another argument."""
    if copied is None:
        return copied
    return copied[0], copied[1], copied[2][first : first + num], copied[3]


@inlined
def _bytes_used(rows: RowsAt, copied: Copied) -> np.uint64:
    """Return the bytes of a row that are prefetched."""
    if copied is None:
        return rows.weights + rows.weight_bytes
    return rows.stride


@inlined
def _is_write(copied: Copied) -> bool:
    if copied is None:
        return False
    return copied[1] != READ_ROWS


@inlined
def _count_copied(
    address: np.uint64, count: np.uint64, num_classes: int, i: int, copied: Copied
) -> np.uint64:
    """Do :func:`count_up` of the row that is copied from, or to, place i."""
    if copied is None:
        return count_up(address, count, num_classes)
    frequency = address + memory.FREQUENCY
    if len(copied[2]) and copied[1] != READ_ROWS:
        known = np.uint64(copied[2][i])
        cpu.store_u32(frequency, max(cpu.load_u32(frequency), known))
    class_ = count_up(address, count, num_classes)
    if len(copied[2]) and copied[1] == READ_ROWS:
        copied[2][i] = np.uint32(cpu.load_u32(frequency))
    return class_


@inlined
def _copy(
    store: memory.StoreAt,
    rows: RowsAt,
    layout: Layout,
    address: np.uint64,
    other: np.uint64,
    copied: Copied,
) -> None:
    """Copy the row at an address to another one, or from there."""
    if copied is None:
        memory.read_weights(rows, address, other)
    elif copied[1] == READ_ROWS:
        memory.read_row(rows, address, other)
    else:
        memory.write_row(rows, address, other)
        num = rows.dim + np.int64(rows.state_bytes) // 4
        if not finite.squares(cpu.floats_at(other), num) <= _MODERATE:
            store.tally[memory.HAS_LARGE] = 1
        if rows.has_metadata and copied[1] == WRITE_UPDATED:
            cpu.store_u32(address + memory.LAST_STEP, layout[memory.STEP])
            cpu.store_u32(address + memory.LAST_S, layout[memory.NOW_S])


@compiled
def lookup_readonly(
    layouts_T: Ids, ids_N: Ids, starts_T: Starts, out: Floats, values_T: Floats
) -> None:
    """Copy the weights of ids of T tables; nothing changes but counts.

    Tables, ids and ``out`` are as in :func:`lookup_training`; an id without a row reads
    the value of its table.
    """
    ids_N, out = cpu.unowned(ids_N), cpu.unowned(out)
    begin = 0
    for t in range(len(layouts_T)):
        layout = memory.layout_at(layouts_T[t])
        end = begin + (starts_T[t + 1] - starts_T[t]) * np.int64(layout[memory.DIM])
        ids = ids_N[starts_T[t] : starts_T[t + 1]]
        _read_table(layout, ids, out[begin:end], values_T[t])
        begin = end


@compiled
def _read_table(layout: Layout, ids_N: Ids, out: Floats, value: np.float32) -> None:
    ids_N, out = cpu.unowned(ids_N), cpu.unowned(out)
    store = memory.store_at(layout)
    rows, index = memory.rows_at(store, layout), index_at(store)
    target = np.uint64(out.ctypes.data)
    row_bytes = np.uint64(4 * rows.dim)
    num_missing = 0
    num_ahead = rows.weights + rows.weight_bytes
    ahead = _begin_ahead(ids_N, index, rows, num_ahead)
    for i in range(len(ids_N)):
        slot = _next_slot(i, ids_N, ahead, index, rows, num_ahead)
        if slot == NOT_FOUND:
            out[i * rows.dim : (i + 1) * rows.dim] = value
            num_missing += 1
        else:
            address = rows.base + slot * rows.stride
            memory.read_weights(rows, address, target + np.uint64(i) * row_bytes)
    store.tally[memory.HITS] += len(ids_N) - num_missing
    store.tally[memory.MISSES] += num_missing


@compiled
def find_slots(layout: Layout, ids_N: Ids) -> Slots:
    """Return the slot of each id, or ``MISSING``; refreshes no row."""
    store = memory.store_at(layout)
    rows, index = memory.rows_at(store, layout), index_at(store)
    slots = np.empty(len(ids_N), dtype=np.uint32)
    ids_N = cpu.unowned(ids_N)
    num_ahead = rows.weights + rows.weight_bytes
    ahead = _begin_ahead(ids_N, index, rows, num_ahead)
    for i in range(len(ids_N)):
        slot = _next_slot(i, ids_N, ahead, index, rows, num_ahead)
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
        if memory.owner_at(rows.base + slot * rows.stride) == rows.owner:
            slots_N[num] = np.uint32(slot)
            num += 1
        slot += _ONE
    return num, int(slot)


@inlined
def prefetch_row(address: np.uint64, num_bytes: np.uint64) -> None:
    """Prefetch the memory of a row."""
    if num_bytes > _MANY_LINES:
        # The processor notices by itself that the rest is wanted too, and prefetching
        # all of it would keep others waiting.
        cpu.prefetch(address)
        cpu.prefetch(address + _LINE)
    else:
        prefetch_lines(address, num_bytes)


@inlined
def prefetch_lines(address: np.uint64, num_bytes: np.uint64) -> None:
    """Prefetch all of a row's memory, however long."""
    last = address + num_bytes - _ONE
    while address < last:
        cpu.prefetch(address)
        address += _LINE
    cpu.prefetch(last)


@cache
def build_read_only(kernel: Kernel) -> Callable[..., None]:
    """Compile :func:`lookup_readonly` where ids without a row read what it begins with.

    ``row_W`` is memory for one row.
    """
    begin_row = build_begin_row(kernel)

    def read_only(layout: Layout, ids_N: Ids, out_ND: Floats, row_W: Ids) -> None:
        store = memory.store_at(layout)
        ids_N, out_ND = cpu.unowned(ids_N), cpu.unowned(out_ND)
        rows, index = memory.rows_at(store, layout), index_at(store)
        target = np.uint64(out_ND.ctypes.data)
        row_bytes = np.uint64(4 * rows.dim)
        num_ahead = rows.weights + rows.weight_bytes
        ahead = _begin_ahead(ids_N, index, rows, num_ahead)
        for i in range(len(ids_N)):
            slot = _next_slot(i, ids_N, ahead, index, rows, num_ahead)
            address = rows.base + slot * rows.stride
            if slot == NOT_FOUND:
                address = np.uint64(row_W.ctypes.data)
                begin_row(rows, layout, address, ids_N[i])
            store.tally[memory.MISSES if slot == NOT_FOUND else memory.HITS] += 1
            memory.read_weights(rows, address, target + np.uint64(i) * row_bytes)

    return specialized(read_only, kernel)


@inlined
def count_up(address: np.uint64, count: np.uint64, num_classes: int) -> np.uint64:
    """Add to a row's frequency; return the row's class."""
    frequency = cpu.load_u32(address + memory.FREQUENCY) + count
    frequency = min(frequency, _LARGEST_COUNT)
    cpu.store_u32(address + memory.FREQUENCY, frequency)
    return recency.classify(frequency) if num_classes > 1 else _ZERO


@compiled
def _begin_ahead(
    ids_N: Ids, index: IndexAt, rows: RowsAt, num_bytes: np.uint64
) -> Rings:
    """Guess the slots of the first chunk; prefetch ``num_bytes`` of the first rows."""
    ahead = np.empty(_IN_CHUNK + 1, np.uint64), np.empty(_IN_RING + 1, np.uint64)
    for start in (-2 * _LOOKED_AHEAD, -_LOOKED_AHEAD):
        _look_ahead(start, ids_N, ahead, index, rows)
    for i in range(min(_LOOKUP_AHEAD, len(ids_N))):
        _prefetch_likely(ahead[1][i], rows, num_bytes)
    return ahead


@compiled
def _look_ahead(
    start: int, ids_N: Ids, ahead: Rings, index: IndexAt, rows: RowsAt
) -> None:
    """Guess the slots of the chunk after that at ``start``; hash the one after it."""
    hashes, likely = ahead
    next_ = start + _LOOKED_AHEAD
    num_hashed = min(len(ids_N) - next_ - _LOOKED_AHEAD, _LOOKED_AHEAD)
    num_guessed = min(len(ids_N) - next_, _LOOKED_AHEAD) if next_ >= 0 else 0
    for k in range(max(num_guessed, num_hashed)):
        if k < num_guessed:
            likely[(next_ + k) & _IN_RING] = likely_slot(index, hashes[k])
        if k < num_hashed:
            hash_ = hash_id(ids_N[next_ + _LOOKED_AHEAD + k], rows.owner)
            hashes[k] = hash_
            cpu.prefetch(find_home(index, hash_))


@inlined
def _prefetch_likely(slot: np.uint64, rows: RowsAt, num_bytes: np.uint64) -> None:
    """Prefetch ``num_bytes`` and the tag of the row at a slot, if one."""
    if slot != NOT_FOUND:
        address = rows.base + slot * rows.stride
        prefetch_row(address, num_bytes)
        cpu.prefetch(rows.tags + slot)


@inlined
def _next_slot(
    i: int,
    ids_N: Ids,
    ahead: Rings,
    index: IndexAt,
    rows: RowsAt,
    num_bytes: np.uint64,
) -> np.uint64:
    """Return the slot of the i-th id, or ``NOT_FOUND``; prefetch what follows."""
    if i & _IN_CHUNK == 0:
        _look_ahead(i, ids_N, ahead, index, rows)
    likely = ahead[1]
    if i + _LOOKUP_AHEAD < len(ids_N):
        _prefetch_likely(likely[(i + _LOOKUP_AHEAD) & _IN_RING], rows, num_bytes)
    slot = likely[i & _IN_RING]
    if slot == NOT_FOUND or memory.is_row_of(rows, slot, ids_N[i]):
        return slot
    # Another id with the same hash comes before it in the index.
    return find_slot(index, rows, ids_N[i], hash_id(ids_N[i], rows.owner))


@cache
def build_insert(kernel: Kernel) -> Callable[..., None]:
    """Compile the loop that makes the rows of chosen ids, and uses them.

    Arguments as in :func:`lookup_training`, which has made room for N touches. A
    repeated id gets one row. ``chosen``: offsets; sightings before, of each or of none.
    A row that is written gets none, and ``MISSING``, where no row is left to leave.
    """
    begin_row = build_begin_row(kernel)

    def insert(
        table: TableAt,
        ids_N: Ids,
        counts_N: Counts,
        chosen: tuple[Indices, Counts],
        out_ND: Floats,
        slots_N: Slots,
        copied: Copied,
    ) -> None:
        ids_N, counts_N = cpu.unowned(ids_N), cpu.unowned(counts_N)
        chosen_K, waited_K = cpu.unowned(chosen[0]), cpu.unowned(chosen[1])
        layout = cpu.unowned(table[0])
        store = memory.changing_store_at(layout, memory.log_address(table[1]))
        rows, tick = memory.rows_at(store, layout), np.uint64(store.tally[memory.TICK])
        logs = np.uint64(store.logs.ctypes.data)
        target = _address_of(out_ND, copied)
        row_bytes = np.uint64(4) * _width_of(layout, copied)
        spared = _first_tick(copied)
        for start in range(0, len(chosen_K), CHUNK):
            stop = min(start + CHUNK, len(chosen_K))
            index = prepare_chunk(store, rows, ids_N, chosen_K[start:stop])
            for k in range(start, stop):
                i = chosen_K[k]
                count = np.uint64(counts_N[i]) if len(counts_N) else _ONE
                id_, at = ids_N[i], target + np.uint64(i) * row_bytes
                slot, is_new = find_or_make(store, index, rows, id_, spared)
                if slot == NOT_FOUND:
                    store.tally[memory.NO_ROOM] += 1
                    slots_N[i] = memory.MISSING
                    continue
                address = rows.base + slot * rows.stride
                if is_new and not _is_write(copied):
                    begin_row(rows, layout, address, id_)
                elif is_new:
                    _begin_metadata(rows, layout, address)
                class_ = _ZERO
                if rows.has_metadata:
                    count += (
                        np.uint64(waited_K[k]) if len(waited_K) and is_new else _ZERO
                    )
                    num_classes = len(store.logs)
                    class_ = _count_copied(address, count, num_classes, i, copied)
                if is_new:
                    store.tally[memory.INSERTED] += 1
                    recency.touch(logs, class_, rows, address, slot, tick)
                slots_N[i] = np.uint32(slot)
                _copy(store, rows, layout, address, at, copied)

    return specialized(insert, kernel)


@inlined
def _first_tick(copied: Copied) -> np.uint64:
    """Return the tick since which rows do not leave."""
    if copied is None:
        return recency.NO_TICK
    return np.uint64(copied[3]) if copied[1] != READ_ROWS else recency.NO_TICK


def build_begin_row(kernel: Kernel) -> Callable[..., None]:
    """Compile what writes the weights, state and metadata of a new row."""
    draw_weights = inlined_kernel(kernel, is_as_written=True)

    @inlined
    def begin_row(
        rows: RowsAt, layout: Layout, address: np.uint64, id_: np.uint64
    ) -> None:
        numbers, seed = cpu.floats_at(layout[memory.FILL]), id_ ^ layout[memory.SEED]
        is_fp32, scratch = rows.dtype == FP32, layout[memory.SCRATCH]
        weights = address + rows.weights if is_fp32 else scratch
        draw_weights(numbers, seed, cpu.floats_at(weights), rows.dim)
        if not is_fp32:
            memory.write_weights(rows, address, scratch)
        initial = layout[memory.INITIAL_STATE]
        cpu.copy_bytes(address + rows.state, initial, rows.state_bytes)
        _begin_metadata(rows, layout, address)

    return begin_row


@inlined
def _begin_metadata(rows: RowsAt, layout: Layout, address: np.uint64) -> None:
    if rows.has_metadata:
        cpu.store_u32(address + memory.FREQUENCY, _ZERO)
        cpu.store_u32(address + memory.LAST_STEP, layout[memory.STEP])
        cpu.store_u32(address + memory.FIRST_STEP, layout[memory.STEP])
        cpu.store_u32(address + memory.LAST_S, layout[memory.NOW_S])


@inlined
def prepare_chunk(
    store: memory.StoreAt, rows: RowsAt, ids_N: Ids, chosen_K: Indices
) -> IndexAt:
    """Make room in the index for up to ``CHUNK`` ids, and prefetch what they need."""
    grow_a_little(store, len(chosen_K))
    index = index_at(store)
    for k in range(len(chosen_K)):
        cpu.prefetch(find_home(index, hash_id(ids_N[chosen_K[k]], rows.owner)))
    room = store.tally[memory.CAPACITY] - store.tally[memory.ROWS]
    if room < len(chosen_K):
        num_leaving = min(len(chosen_K) - room, len(chosen_K))
        _prefetch_leaving(store, index, num_leaving)
    return index


@inlined
def find_or_make(
    store: memory.StoreAt,
    index: IndexAt,
    rows: RowsAt,
    id_: np.uint64,
    spared: np.uint64,
) -> tuple[np.uint64, bool]:
    """Return the slot of an id, and whether it is new; then its row has an id alone.

    If the store is full, the row leaves that should leave first, of those that were not
    used since the tick ``spared``. If there is none, ``NOT_FOUND``.
    """
    hash_ = hash_id(id_, rows.owner)
    slot = find_slot(index, rows, id_, hash_)
    if slot != NOT_FOUND:
        return slot, False
    if store.tally[memory.ROWS] >= store.tally[memory.CAPACITY]:
        row = recency.pop_oldest(store.logs, store.arenas, spared)
        if row != recency.NONE:
            remove_row(store, index, row >> _S32, row & _LOW)
            store.tally[memory.EVICTED] += 1
        elif spared != recency.NO_TICK:
            return NOT_FOUND, False
    slot = memory.take_slot(store.arenas, rows.arena, store.log)
    cpu.store_u64(rows.base + slot * rows.stride, id_)
    add_entry(index, (hash_ << _S32) | (slot + _ONE))
    store.cursor[ENTRIES] += _ONE
    store.tally[memory.ROWS] += 1
    store.tally[memory.PINNED_ROWS] += np.int64(rows.is_pinned)
    return slot, True


@inlined
def remove_row(
    store: memory.StoreAt, index: IndexAt, arena: np.uint64, slot: np.uint64
) -> None:
    """Take a row out of the index and free its slot; its record stays in the log."""
    address, tally = memory.locate_row(store.arenas, arena, slot), store.tally
    id_, owner = cpu.load_u64(address), memory.owner_at(address)
    remove_entry(index, hash_id(id_, owner), slot)
    store.cursor[ENTRIES] -= _ONE
    memory.free_slot(store.arenas, arena, slot, store.log)
    tally[memory.ROWS] -= 1
    if tally[memory.LEFT_ROOM] > 0:
        cpu.store_u64(np.uint64(tally[memory.LEFT_AT]), id_)
        cpu.store_u64(np.uint64(tally[memory.LEFT_AT]) + memory.WORD, owner)
        tally[memory.LEFT_AT] += 16
        tally[memory.LEFT_ROOM] -= 1


@compiled
def remove_ids(table: TableAt, ids_N: Ids) -> None:
    """Take the rows of ids out; an id without a row changes nothing."""
    layout, log = table
    store = memory.changing_store_at(layout, memory.log_address(log))
    rows, index = memory.rows_at(store, layout), index_at(store)
    for i in range(len(ids_N)):
        slot = find_slot(index, rows, ids_N[i], hash_id(ids_N[i], rows.owner))
        if slot != NOT_FOUND:
            remove_row(store, index, rows.arena, slot)
            store.tally[memory.PINNED_ROWS] -= np.int64(rows.is_pinned)


@compiled
def _prefetch_leaving(store: memory.StoreAt, index: IndexAt, num_rows: int) -> None:
    """Prefetch the memory of the next rows to leave, and headers further on."""
    logs, arenas = store.logs, store.arenas
    class_ = recency.first_to_leave(logs)
    arena = logs[class_, recency.HEAD_ARENA]
    base = memory.arena_address(arenas, arena, memory.BASE)
    stride = arenas[arena, memory.STRIDE]
    for ahead in range(num_rows):
        slot = recency.slot_to_leave(logs, class_, ahead)
        # A guess may not be a slot, but what is read must be memory of ours.
        if slot < arenas[arena, memory.USED]:
            address = base + slot * stride
            hash_ = hash_id(cpu.load_u64(address), memory.owner_at(address))
            cpu.prefetch(find_home(index, hash_))
            prefetch_row(address, stride)
    for ahead in range(num_rows, 2 * num_rows):
        cpu.prefetch(base + recency.slot_to_leave(logs, class_, ahead) * stride)


@compiled
def sweep_slots(
    where: tuple[int, int, int],
    layouts_T: Layout,
    rules_T: Rules,
    log: Log,
) -> None:
    """Take out the expired rows of ``where``: an arena, its first slot, the end slot.

    ``rules_T`` is float64 ``(T, 5)``: see ``STEPS_TO_LIVE`` and the others.
    """
    store = memory.changing_store_at(layouts_T[0], memory.log_address(log))
    arena, index = np.uint64(where[0]), index_at(store)
    for slot in range(where[1], where[2]):
        address = memory.locate_row(store.arenas, arena, np.uint64(slot))
        owner = memory.owner_at(address)
        if owner == np.uint64(0):
            continue
        table = np.int64(owner) - 1
        layout, rules = layouts_T[table], rules_T[table]
        if not rules.any():
            continue
        age_steps = _steps_since(layout, address + memory.LAST_STEP)
        age_s = rules[NOW_OF_ROWS] - np.float64(cpu.load_u32(address + memory.LAST_S))
        if 0 < rules[STEPS_TO_LIVE] < age_steps:
            store.tally[memory.EXPIRED_STEPS] += 1
        elif 0 < rules[SECONDS_TO_LIVE] < age_s:
            store.tally[memory.EXPIRED_SECONDS] += 1
        elif _is_below_norm(memory.rows_at(store, layout), layout, address, rules):
            store.tally[memory.EXPIRED_NORM] += 1
        else:
            continue
        remove_row(store, index, arena, np.uint64(slot))


@inlined
def _steps_since(layout: Layout, address: np.uint64) -> np.int64:
    """Return the age of a step that a row has, modulo 2**32: see ``Expiry``."""
    age_steps = np.int64(np.int32(layout[memory.STEP] - cpu.load_u32(address)))
    return max(age_steps, np.int64(0))


@compiled
def _is_below_norm(
    rows: RowsAt, layout: Layout, address: np.uint64, rules: Rules
) -> bool:
    age_steps = _steps_since(layout, address + memory.FIRST_STEP)
    if rules[MIN_L2_NORM] <= 0 or age_steps < rules[SPARED_STEPS]:
        return False
    memory.read_weights(rows, address, layout[memory.SCRATCH])
    weights = cpu.floats_at(layout[memory.SCRATCH])
    total = 0.0
    for d in range(rows.dim):
        total += np.float64(weights[d]) * np.float64(weights[d])
    return total < rules[MIN_L2_NORM] * rules[MIN_L2_NORM]


@cache
def build_update(kernel: Kernel) -> Callable[..., None]:
    """Compile the loop that applies one step of an optimizer to the row of each id.

    Tables, ids and ``starts_T`` are as in :func:`lookup_training`. ``slots_N`` are
    hints, or ``MISSING``; ``grads`` the gradients, flat, table by table; ``now_T2`` the
    step and the second. ``numbers_TK`` are the largest magnitude of a weight after the
    update (inf for none), the largest sum of squares of a gradient after whose step a
    row is not looked at, the floats of the optimizer's state, and then the optimizer's
    numbers. The loop writes to ``results_T2`` how many ids have no row, and how many
    gradients were rejected.
    """
    step = finite.build_step(kernel)

    def update(
        tables: TablesAt,
        ids_N: Ids,
        starts_T: Starts,
        slots_N: Slots,
        grads: Floats,
        now_T2: Words,
        numbers_TK: Floats,
        results_T2: Starts,
    ) -> None:
        ids_N, slots_N = cpu.unowned(ids_N), cpu.unowned(slots_N)
        numbers_TK, starts_T = cpu.unowned(numbers_TK), cpu.unowned(starts_T)
        layouts_T, log = cpu.unowned(tables[0]), memory.log_address(tables[1])
        grad = np.uint64(grads.ctypes.data)
        for t in range(len(layouts_T)):
            layout = memory.layout_at(layouts_T[t])
            grad_bytes = np.uint64(4) * layout[memory.DIM]
            layout[memory.STEP], layout[memory.NOW_S] = now_T2[t, 0], now_T2[t, 1]
            store = memory.store_at(layout)
            rows, index = memory.rows_at(store, layout), index_at(store)
            numbers = numbers_TK[t]
            table_at, numbers_at = (layout, store.tally), finite.read_numbers(numbers)
            moderate = finite.moderate_squares(numbers[1], store.tally)
            num_missed = num_refused = 0
            end = starts_T[t + 1]
            for i in range(starts_T[t], end):
                if i + _UPDATE_AHEAD < end:
                    ahead = np.uint64(slots_N[i + _UPDATE_AHEAD])
                    _prefetch_updated(rows, ahead, log)
                hint = np.uint64(slots_N[i])
                slot = find_hinted(index, rows, ids_N[i], hint)
                address, g = rows.base + slot * rows.stride, cpu.floats_at(grad)
                grad += grad_bytes
                if slot == NOT_FOUND:
                    num_missed += 1
                    continue
                is_sure = finite.squares(g, rows.dim) <= moderate
                if not is_sure and not memory.is_finite(g, rows.dim):
                    num_refused += 1
                    continue
                undo_log.keep_updated(log, address, rows.stride)
                if not step(table_at, rows, address, numbers_at, g, is_sure):
                    num_refused += 1
                if not is_sure:
                    moderate = finite.moderate_squares(numbers[1], store.tally)
            results_T2[t, 0], results_T2[t, 1] = num_missed, num_refused

    return specialized(update, kernel)


@inlined
def _prefetch_updated(rows: RowsAt, slot: np.uint64, log: np.uint64) -> None:
    """Prefetch a row that is updated; one that is kept needs all of it at once."""
    address = rows.base + slot * rows.stride
    if log == NO_LOG:
        prefetch_row(address, rows.stride)
    else:
        prefetch_lines(address, rows.stride)


@inlined
def find_hinted(
    index: IndexAt, rows: RowsAt, id_: np.uint64, hint: np.uint64
) -> np.uint64:
    """Return the slot of an id, the hint if that is right, or ``NOT_FOUND``."""
    if memory.is_row_of(rows, hint, id_):
        return hint
    return find_slot(index, rows, id_, hash_id(id_, rows.owner))
