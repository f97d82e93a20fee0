"""Make rows for ids that have none, and take out the rows that must leave for them.

What leaves is known in advance: it stands at the front of the log. So the memory that
an eviction needs is asked for in two steps, some rows ahead: the header of the row that
will leave, and, once that is there, its bucket in the index and the rest of the row,
which the new row will take.

Dimension key:
    N: ids of one request
    K: ids that get a row
    D: embedding dim
    S: optimizer-state floats a row
"""

import numpy as np

from persia_torchrec.compiled import compiled, inlined
from persia_torchrec.store.halves import round_to_nearest
from persia_torchrec.store.index import (
    ENTRIES,
    NOT_FOUND,
    IndexAt,
    add_entry,
    find_slot,
    grow_a_little,
    hash_of,
    home_of,
    index_at,
    remove_entry,
)
from persia_torchrec.store.initializer import UNIFORM, fill_row, fill_uniform
from persia_torchrec.store.lookup import (
    EVICTED,
    INSERTED,
    LEFT_AT,
    LEFT_ROOM,
    ROWS,
    TICK,
    Counts,
    Ids,
    Places,
    Slots,
    Tally,
    copy_weights,
    count_up,
    prefetch_row,
)
from persia_torchrec.store.memory import (
    load_word,
    prefetch,
    store_half_word,
    store_word,
    unowned,
)
from persia_torchrec.store.recency import (
    HEAD_ARENA,
    NONE,
    arena_of,
    first_to_leave,
    pop_oldest,
    slot_of,
    slot_to_leave,
    touch,
)
from persia_torchrec.store.rows import (
    BASE,
    DIM,
    DTYPE,
    FIRST_STEP,
    FP32,
    FREQUENCY,
    HAS_METADATA,
    LAST_S,
    LAST_STEP,
    NUM_STATE,
    OWNER_SHIFT,
    STATE,
    STRIDE,
    USED,
    WEIGHTS,
    WORD,
    Floats,
    Layout,
    RowsAt,
    Words,
    address_of,
    free_slot,
    rows_at,
    take_slot,
)

_CHUNK = 32
_ZERO = np.uint64(0)
_ONE = np.uint64(1)


@compiled
def insert(
    ids_N: Ids,
    counts_N: Counts,
    places_K: Places,
    out_ND: Floats,
    slots_N: Slots,
    floats: Floats,
    lines: Words,
    cursor: Words,
    arenas: Words,
    logs: Words,
    tally: Tally,
    layout: Layout,
    capacity: int,
    kind: int,
    numbers: Floats,
    seed: np.uint64,
    initial_state_S: Floats,
    step: np.uint64,
    now_s: np.uint64,
    scratch_D: Floats,
) -> None:
    """Make rows, use them, and copy their weights.

    Args:
        ids_N: uint64 ``(N,)``.
        counts_N: uint32 ``(N,)``, how often each id is in the batch; or empty.
        places_K: int64 ``(K,)``, which of them get a row; an id that comes twice gets
            one.
        out_ND: float32 ``(N, D)``, C-contiguous; overwritten at those places.
        slots_N: uint32 ``(N,)``; overwritten at those places.
        floats: the arena of this table's rows.
        lines: of the index.
        cursor: of the index.
        arenas: the directory of arenas.
        logs: the directory of logs, with room for K touches.
        tally: int64 ``(12,)``, counted up.
        layout: of the table's rows.
        capacity: rows that the store may hold; the oldest leave.
        kind: of the initializer.
        numbers: of the initializer.
        seed: mixed into the id for the initial weights.
        initial_state_S: float32 ``(S,)``, the optimizer state of a new row.
        step: of the table.
        now_s: second of this request.
        scratch_D: float32 ``(D,)``, overwritten.
    """
    ids_N, counts_N, out_ND = unowned(ids_N), unowned(counts_N), unowned(out_ND)
    floats, layout, numbers = unowned(floats), unowned(layout), unowned(numbers)
    arenas, logs, cursor = unowned(arenas), unowned(logs), unowned(cursor)
    tally, scratch_D = unowned(tally), unowned(scratch_D)
    rows = rows_at(arenas, layout)
    log = np.uint64(logs.ctypes.data)
    tick = np.uint64(tally[TICK])
    has_metadata = layout[HAS_METADATA] != 0
    for start in range(0, len(places_K), _CHUNK):
        stop = min(start + _CHUNK, len(places_K))
        grow_a_little(lines, cursor, stop - start)
        index = index_at(lines, cursor)
        num_leaving = tally[ROWS] + stop - start - capacity
        _prefetch_homes(ids_N, places_K, start, stop, index, rows)
        if num_leaving > 0:
            _prefetch_leaving(index, arenas, logs, min(num_leaving, stop - start))
        for k in range(start, stop):
            i = places_K[k]
            hash_ = hash_of(ids_N[i], rows.owner)
            count = np.uint64(counts_N[i]) if len(counts_N) else _ONE
            slot = find_slot(index, rows, ids_N[i], hash_)
            if slot == NOT_FOUND:
                if tally[ROWS] >= capacity:
                    evict_oldest(index, cursor, arenas, logs, tally)
                slot = take_slot(arenas, rows.arena)
                _enter_row(ids_N[i], hash_, slot, index, rows, cursor, tally)
                _begin_row(
                    *(floats, slot, layout, ids_N[i] ^ seed, kind, numbers),
                    *(initial_state_S, scratch_D),
                )
                address = rows.base + slot * rows.stride
                class_ = _ZERO
                if has_metadata:
                    _begin_metadata(address, step, now_s)
                    class_ = count_up(address, count, len(logs))
                touch(log, class_, rows, address, slot, tick)
            elif has_metadata:
                count_up(rows.base + slot * rows.stride, count, 1)
            slots_N[i] = np.uint32(slot)
            copy_weights(floats, slot, rows, layout, out_ND, i)


@inlined
def _enter_row(
    id_: np.uint64,
    hash_: np.uint64,
    slot: np.uint64,
    index: IndexAt,
    rows: RowsAt,
    cursor: Words,
    tally: Tally,
) -> None:
    """Give a slot to an id, in the row's header and in the index."""
    store_word(rows.base + slot * rows.stride, id_)
    add_entry(index, hash_, slot)
    cursor[ENTRIES] += _ONE
    tally[ROWS] += 1
    tally[INSERTED] += 1


@inlined
def evict_oldest(
    index: IndexAt, cursor: Words, arenas: Words, logs: Words, tally: Tally
) -> None:
    """Take the row out that should leave first."""
    row = pop_oldest(logs, arenas)
    if row == NONE:
        return
    remove_row(arena_of(row), slot_of(row), index, cursor, arenas, tally)
    tally[EVICTED] += 1


@inlined
def remove_row(
    arena: np.uint64,
    slot: np.uint64,
    index: IndexAt,
    cursor: Words,
    arenas: Words,
    tally: Tally,
) -> None:
    """Take a row out of the index and free its slot; its record stays in the log."""
    address = address_of(arenas, arena, slot)
    id_, owner = load_word(address), load_word(address + WORD) >> OWNER_SHIFT
    remove_entry(index, hash_of(id_, owner), slot)
    cursor[ENTRIES] -= _ONE
    free_slot(arenas, arena, slot)
    tally[ROWS] -= 1
    if tally[LEFT_ROOM] > 0:
        store_word(np.uint64(tally[LEFT_AT]), id_)
        store_word(np.uint64(tally[LEFT_AT]) + WORD, owner)
        tally[LEFT_AT] += 16
        tally[LEFT_ROOM] -= 1


@compiled
def remove_ids(
    ids_N: Ids,
    floats: Floats,
    lines: Words,
    cursor: Words,
    arenas: Words,
    tally: Tally,
    layout: Layout,
) -> None:
    """Take the rows of ids out; an id without a row changes nothing.

    Args:
        ids_N: uint64 ``(N,)``.
        floats: the arena of this table's rows.
        lines: of the index.
        cursor: of the index.
        arenas: the directory of arenas.
        tally: int64 ``(12,)``, counted down.
        layout: of the table's rows.
    """
    rows, index = rows_at(arenas, layout), index_at(lines, cursor)
    for i in range(len(ids_N)):
        slot = find_slot(index, rows, ids_N[i], hash_of(ids_N[i], rows.owner))
        if slot != NOT_FOUND:
            remove_row(rows.arena, slot, index, cursor, arenas, tally)


@inlined
def _prefetch_homes(
    ids_N: Ids,
    places_K: Places,
    start: int,
    stop: int,
    index: IndexAt,
    rows: RowsAt,
) -> None:
    """Ask for the lines of the index that the next ids will need."""
    for k in range(start, stop):
        prefetch(home_of(index, hash_of(ids_N[places_K[k]], rows.owner)))


@compiled
def _prefetch_leaving(
    index: IndexAt, arenas: Words, logs: Words, num_rows: int
) -> None:
    """Ask for the memory of the next rows to leave, and for headers further on."""
    class_ = first_to_leave(logs)
    arena = logs[class_, HEAD_ARENA]
    base, stride = arenas[arena, BASE], arenas[arena, STRIDE]
    for ahead in range(num_rows):
        slot = slot_to_leave(logs, class_, ahead)
        # A guess may be no slot, but what is read must be memory of ours.
        if slot < arenas[arena, USED]:
            address = base + slot * stride
            owner = load_word(address + WORD) >> OWNER_SHIFT
            prefetch(home_of(index, hash_of(load_word(address), owner)))
            prefetch_row(address, stride)
    for ahead in range(num_rows, 2 * num_rows):
        prefetch(base + slot_to_leave(logs, class_, ahead) * stride)


@inlined
def _begin_row(
    floats: Floats,
    slot: np.uint64,
    layout: Layout,
    seed: np.uint64,
    kind: int,
    numbers: Floats,
    initial_state_S: Floats,
    scratch_D: Floats,
) -> None:
    """Write a new row's weights and optimizer state."""
    begin, dim = layout[WEIGHTS], layout[DIM]
    if layout[DTYPE] == FP32:
        weights = floats[slot, begin : begin + dim]
        if kind == UNIFORM:
            fill_uniform(weights, seed, numbers[0], numbers[1])
        else:
            fill_row(kind, numbers, seed, weights)
    else:
        fill_row(kind, numbers, seed, scratch_D)
        halves = floats.view(np.uint16)[slot, 2 * begin : 2 * begin + dim]
        round_to_nearest(scratch_D, halves, layout[DTYPE])
    state = floats[slot, layout[STATE] : layout[STATE] + layout[NUM_STATE]]
    for s in range(len(state)):
        state[s] = initial_state_S[s]


@inlined
def _begin_metadata(address: np.uint64, step: np.uint64, now_s: np.uint64) -> None:
    store_half_word(address + FREQUENCY, _ZERO)
    store_half_word(address + LAST_STEP, step)
    store_half_word(address + FIRST_STEP, step)
    store_half_word(address + LAST_S, now_s)
