"""Put rows of a checkpoint into a store, so that it evicts them in the same order.

First it is said which rows will come, by their uses alone: those that would leave first
are left out if the store is too small. Then the rows come, in any order, and get their
slots. At the end they are touched, in the order of their uses, as requests would have
done it:

    uses  --RowImport()--> which to keep, their order, a tick for each
    rows  --add()--------> slots
            finish() ----> records in the logs

A row that comes twice keeps its later use. Rows that were in the store before count as
used before all that come; they leave first, if the store is full.

Dimension key:
    R: rows that may come, numbered in the order in which they do
    N: those of one call
"""

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import compiled, inlined, read_only
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
)
from persia_torchrec.store.insert import evict_oldest
from persia_torchrec.store.lookup import ROWS, TICK, Tally
from persia_torchrec.store.memory import (
    copy_bytes,
    load_half_word,
    load_word,
    prefetch,
    store_word,
    unowned,
)
from persia_torchrec.store.recency import MARK_WORDS, class_of, classes_of, touch
from persia_torchrec.store.row_columns import PLACE_BITS, RowColumns
from persia_torchrec.store.rows import (
    DIM,
    DTYPE,
    FP32,
    FREQUENCY,
    HAS_METADATA,
    NUM_STATE,
    OWNER_SHIFT,
    STATE,
    TICK_MASK,
    WEIGHTS,
    WORD,
    Layout,
    RowsAt,
    Words,
    rows_at,
    take_slot,
)
from persia_torchrec.store.shard_memory import ShardMemory

Numbers = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NEVER = np.uint64(0)
"""The tick of a row that is left out."""

_NONE_KEEP = np.empty(0, dtype=np.bool_)

_CHUNK = 32
_TOUCHES = 2**16
_PLACE_BITS = np.uint64(PLACE_BITS)


class RowImport:
    """Rows on their way into a store. Whoever owns the store calls it.

    Args:
        memory: of the store.
        capacity_rows: of the store.
        uses_R: uint64, see :class:`RowColumns`.
        tables_R: uint16, number in the store of each row's table.
        frequencies_R: uint32, as the metadata say; only an LFU store reads it.
    """

    def __init__(
        self,
        memory: ShardMemory,
        capacity_rows: int,
        uses_R: Words,
        tables_R: npt.NDArray[np.uint16],
        frequencies_R: Numbers,
    ) -> None:
        self._memory = memory
        self._capacity_rows = capacity_rows
        self._tables = tables_R
        self._order = np.argsort(uses_R, kind="stable")
        if len(uses_R) > capacity_rows:
            leaving = self._order
            if len(memory.logs.directory) > 1:
                classes_R = classes_of(frequencies_R)
                leaving = np.lexsort((uses_R, classes_R))
            is_kept = np.ones(len(uses_R), dtype=np.bool_)
            is_kept[leaving[:-capacity_rows]] = False
            self._order = self._order[is_kept[self._order]]
        self.num_kept = len(self._order)
        base = np.uint64(memory.tally[TICK])
        self._ticks = np.zeros(len(uses_R), dtype=np.uint64)
        _draw_ticks(self._order, uses_R, tables_R, base, self._ticks)
        self._slots = np.zeros(len(uses_R), dtype=np.uint32)

    def add(self, table: int, first: int, rows: RowColumns, is_own_N: Bools) -> int:
        """Put some rows into the store.

        Args:
            table: number of the table.
            first: which of the rows that may come is the first of these.
            rows: of this table; their metadata have the store's form.
            is_own_N: which of them are rows that may come; the others are skipped.

        Returns:
            How many rows may have come by now.
        """
        ticks_N = np.zeros(len(rows), dtype=np.uint64)
        stop = first + int(is_own_N.sum())
        ticks_N[is_own_N] = self._ticks[first:stop]
        slots_N = np.zeros(len(rows), dtype=np.uint32)
        memory = self._memory
        state = memory.tables.states[table]
        _, lines, cursor, directory = memory.rows(state)
        add_rows(
            *(read_only(rows.ids), ticks_N, _NONE_KEEP, read_only(rows.metadata)),
            *(read_only(rows.state), read_only(rows.weights).view(np.uint8), slots_N),
            *(lines, cursor, directory, memory.logs.directory),
            *(memory.tally, state.layout, self._capacity_rows),
        )
        self._slots[first:stop] = slots_N[is_own_N]
        self._ticks[first:stop] = ticks_N[is_own_N]
        return stop

    def finish(self, tick: int) -> None:
        """Make the uses known to the store, when all rows have come.

        Args:
            tick: of the last request before the checkpoint, as its server counted.
        """
        memory = self._memory
        base = int(memory.tally[TICK])
        layouts_T = np.stack([state.layout for state in memory.tables.states])
        for start in range(0, len(self._order), _TOUCHES):
            part = self._order[start : start + _TOUCHES]
            directory = memory.tables.directory
            memory.logs.make_room(directory, (1 + MARK_WORDS) * len(part))
            _touch_rows(
                *(part, self._ticks, self._slots, self._tables, layouts_T),
                *(directory, memory.logs.directory),
            )
        last = int(self._ticks.max(initial=0))
        memory.tally[TICK] = max(last, base + tick)


@compiled
def _draw_ticks(
    order: Places,
    uses_R: Words,
    tables_R: npt.NDArray[np.uint16],
    base: np.uint64,
    ticks_R: Words,
) -> None:
    """Give rows of one request one tick, later requests later ones.

    A tick is that of the checkpoint, unless several tables share it, as they may when
    rows come from several servers: in a log, a tick belongs to one arena.
    """
    tick, old, table = base, np.uint64(0), np.uint16(0)
    for r in order:
        of_row = uses_R[r] >> _PLACE_BITS
        if tick == base or of_row != old or tables_R[r] != table:
            tick = max(tick + np.uint64(1), base + of_row)
            old, table = of_row, tables_R[r]
        ticks_R[r] = tick


@compiled
def add_rows(
    ids_N: Words,
    ticks_N: Words,
    keeps_place_N: Bools,
    metadata_N: Numbers,
    state_NS: npt.NDArray[np.float32],
    weights_N: npt.NDArray[np.uint8],
    slots_N: Numbers,
    lines: Words,
    cursor: Words,
    arenas: Words,
    logs: Words,
    tally: Tally,
    layout: Layout,
    capacity: int,
) -> None:
    """Write rows into slots; those whose tick is ``NEVER`` are skipped.

    A row that has come with the same or a later use gets the tick ``NEVER``.

    Args:
        ids_N: uint64 ``(N,)``.
        ticks_N: uint64 ``(N,)``; changed.
        keeps_place_N: bool ``(N,)``: a row that is there keeps its place in the order
            in which rows leave; the others are touched at once. Or empty: none is
            touched, and those that are written cannot leave until they are.
        metadata_N: uint32 ``(N, 4)`` or ``(N, 0)``, as the table keeps it.
        state_NS: float32 ``(N, S)``.
        weights_N: the bytes of all weights.
        slots_N: uint32 ``(N,)``, overwritten.
        lines: of the index.
        cursor: of the index.
        arenas: the directory of arenas.
        logs: the directory of logs, with room for N touches, if any is to be touched.
        tally: int64 ``(12,)``, counted up.
        layout: of the table's rows.
        capacity: rows that the store may hold; the oldest leave.
    """
    arenas, logs = unowned(arenas), unowned(logs)
    rows = rows_at(arenas, layout)
    weight_bytes = np.uint64(layout[DIM] * (4 if layout[DTYPE] == FP32 else 2))
    state_bytes = np.uint64(4 * layout[NUM_STATE])
    metadata_bytes = np.uint64(16 if layout[HAS_METADATA] else 0)
    to_state, to_weights = np.uint64(4 * layout[STATE]), np.uint64(4 * layout[WEIGHTS])
    from_weights = np.uint64(weights_N.ctypes.data)
    from_state = np.uint64(state_NS.ctypes.data)
    from_metadata = np.uint64(metadata_N.ctypes.data)
    for start in range(0, len(ids_N), _CHUNK):
        stop = min(start + _CHUNK, len(ids_N))
        grow_a_little(lines, cursor, stop - start)
        index = index_at(lines, cursor)
        for n in range(start, stop):
            prefetch(home_of(index, hash_of(ids_N[n], rows.owner)))
        for n in range(start, stop):
            if ticks_N[n] == NEVER:
                continue
            slot, before = _find_or_make(
                ids_N[n], index, rows, cursor, arenas, logs, tally, capacity
            )
            slots_N[n] = np.uint32(slot)
            if before >= ticks_N[n]:
                ticks_N[n] = NEVER
            else:
                address, row = rows.base + slot * rows.stride, np.uint64(n)
                metadata = from_metadata + row * metadata_bytes
                copy_bytes(address + FREQUENCY, metadata, metadata_bytes)
                state = from_state + row * state_bytes
                copy_bytes(address + to_state, state, state_bytes)
                weights = from_weights + row * weight_bytes
                copy_bytes(address + to_weights, weights, weight_bytes)
                keeps = len(keeps_place_N) > 0 and keeps_place_N[n] and before != NEVER
                tick = before if keeps else ticks_N[n]
                store_word(address + WORD, (rows.owner << OWNER_SHIFT) | tick)
                if len(keeps_place_N) and not keeps:
                    _touch(logs, rows, address, slot, tick)


@inlined
def _find_or_make(
    id_: np.uint64,
    index: IndexAt,
    rows: RowsAt,
    cursor: Words,
    arenas: Words,
    logs: Words,
    tally: Tally,
    capacity: int,
) -> tuple[np.uint64, np.uint64]:
    """Return the slot of an id, and the row's tick; NEVER if it had none before."""
    hash_ = hash_of(id_, rows.owner)
    slot = find_slot(index, rows, id_, hash_)
    if slot != NOT_FOUND:
        return slot, load_word(rows.base + slot * rows.stride + WORD) & TICK_MASK
    if tally[ROWS] >= capacity:
        evict_oldest(index, cursor, arenas, logs, tally)
    slot = take_slot(arenas, rows.arena)
    store_word(rows.base + slot * rows.stride, id_)
    add_entry(index, hash_, slot)
    cursor[ENTRIES] += np.uint64(1)
    tally[ROWS] += 1
    return slot, NEVER


@inlined
def _touch(
    logs: Words, rows: RowsAt, address: np.uint64, slot: np.uint64, tick: np.uint64
) -> None:
    class_ = np.uint64(0)
    if len(logs) > 1:
        class_ = class_of(load_half_word(address + FREQUENCY))
    touch(np.uint64(logs.ctypes.data), class_, rows, address, slot, tick)


@compiled
def _touch_rows(
    order: Places,
    ticks_R: Words,
    slots_R: Numbers,
    tables_R: npt.NDArray[np.uint16],
    layouts_T: Layout,
    arenas: Words,
    logs: Words,
) -> None:
    for r in order:
        if ticks_R[r] == NEVER:
            continue
        layout = layouts_T[tables_R[r]]
        rows = rows_at(arenas, layout)
        slot = np.uint64(slots_R[r])
        _touch(logs, rows, rows.base + slot * rows.stride, slot, ticks_R[r])
