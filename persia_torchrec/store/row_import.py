"""Put rows into a store: those of a checkpoint, or those that changed in another store.

A checkpoint's rows leave in the order in which they would have left. First the uses of
all rows are known: those that would leave first are left out if the store is too small.
Then the rows come, in any order; at the end they are touched, in the order of their
uses. A row that comes twice keeps its later use. Rows that were in the store before
count as used before all that come.

    uses  --RowImport()--> which to keep, their order, a tick for each
    rows  --add()--------> slots
            finish() ----> records in the logs

Changed rows come in the order in which they would leave, and each is touched as it is
written: a follower that is full before it receives the leader's evictions evicts the
same rows. A row that has changed without having been used keeps its position.

Dimension key:
    R: rows that may come, numbered in the order in which they do
    N: those of one call
"""

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import compiled, inlined, read_only
from persia_torchrec.intrinsics import copy_bytes, load_u32, load_u64, store_u64
from persia_torchrec.store.insert import CHUNK, find_or_make, prepare_chunk
from persia_torchrec.store.lookup import Indices
from persia_torchrec.store.recency import MARK_WORDS, classify, classify_all, touch
from persia_torchrec.store.row_columns import POSITION_BITS, RowColumns
from persia_torchrec.store.rows import (
    FREQUENCY,
    OWNER_SHIFT,
    TICK,
    TICK_MASK,
    WORD,
    Ids,
    Layout,
    RowsAt,
    Slots,
    StoreAt,
    Words,
    rows_at,
    store_at,
)
from persia_torchrec.store.shard_memory import ShardMemory

Numbers = npt.NDArray[np.uint32]
Bools = npt.NDArray[np.bool_]

NEVER = np.uint64(0)
"""The tick of a row that is left out."""

_NONE_KEEP = np.empty(0, dtype=np.bool_)

_TOUCHES = 2**16
_POSITION_BITS = np.uint64(POSITION_BITS)
_ONE = np.uint64(1)
_16 = np.uint64(16)


class RowImport:
    """Rows of a checkpoint on their way into a store. The store's thread owns it.

    ``uses_R`` are those of :class:`RowColumns`, ``tables_R`` numbers in this store;
    only an LFU store reads ``frequencies_R``.
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
        self._tables = tables_R
        self._order = np.argsort(uses_R, kind="stable")
        if len(uses_R) > capacity_rows:
            leaving = self._order
            if len(memory.logs.directory) > 1:
                leaving = np.lexsort((uses_R, classify_all(frequencies_R)))
            is_kept = np.ones(len(uses_R), dtype=np.bool_)
            is_kept[leaving[:-capacity_rows]] = False
            self._order = self._order[is_kept[self._order]]
        self.num_kept = len(self._order)
        self._ticks = np.zeros(len(uses_R), dtype=np.uint64)
        _draw_ticks(self._order, uses_R, tables_R, np.uint64(memory.tick), self._ticks)
        self._slots = np.zeros(len(uses_R), dtype=np.uint32)

    def add(self, table: int, first: int, rows: RowColumns, is_own_N: Bools) -> int:
        """Put rows of a table into the store; return how many rows have come by now.

        The first of them is number ``first`` of the rows that may come; those that are
        not ``is_own_N`` are skipped. Metadata have the store's form.
        """
        ticks_N = np.zeros(len(rows), dtype=np.uint64)
        stop = first + int(is_own_N.sum())
        ticks_N[is_own_N] = self._ticks[first:stop]
        slots_N = _add(self._memory, table, rows, ticks_N, _NONE_KEEP)
        self._slots[first:stop] = slots_N[is_own_N]
        self._ticks[first:stop] = ticks_N[is_own_N]
        return stop

    def finish(self, tick: int) -> None:
        """Touch the rows in the order of their uses, when all have come.

        ``tick`` is the last request's before the checkpoint, as its server counted.
        """
        memory, base = self._memory, self._memory.tick
        layouts_T = np.stack([state.layout for state in memory.states])
        for start in range(0, len(self._order), _TOUCHES):
            some = self._order[start : start + _TOUCHES]
            memory.logs.make_room(memory.directory, (1 + MARK_WORDS) * len(some))
            _touch_rows(some, self._ticks, self._slots, self._tables, layouts_T)
        last = int(self._ticks.max(initial=0))
        memory.tick = max(last, base + tick)


class RowChanges:
    """Changed rows on their way into a store. The store's thread owns it."""

    def __init__(self, memory: ShardMemory) -> None:
        self._memory = memory
        self._table = -1
        # The last tick that was given, and of which request of the other store.
        self._last = np.array([memory.tally[TICK], 0], dtype=np.uint64)

    def put(self, table: int, rows: RowColumns) -> None:
        """Write rows of one table over those that are there, or make them.

        They come in the order in which they would leave, with metadata of the store's
        form. A use of 0 keeps the row's position.
        """
        memory = self._memory
        ticks_N = np.empty(len(rows), dtype=np.uint64)
        is_other = table != self._table
        _draw_next_ticks(read_only(rows.uses), is_other, self._last, ticks_N)
        self._table = table
        memory.logs.make_room(memory.directory, (1 + MARK_WORDS) * len(rows))
        _add(memory, table, rows, ticks_N, rows.uses == 0)
        memory.tick = int(self._last[0])

    def finish(self, tick: int) -> None:
        """Continue counting requests from the other store's last one."""
        self._memory.tick = max(self._memory.tick, tick)


def _add(
    memory: ShardMemory, table: int, rows: RowColumns, ticks_N: Words, keeps_N: Bools
) -> Slots:
    """Write rows, and return their slots; see :func:`add_rows`."""
    columns = [np.ascontiguousarray(column) for column in rows.columns()]
    addresses = RowColumns(*columns).addresses()
    slots_N = np.zeros(len(rows), dtype=np.uint32)
    layout = memory.states[table].layout
    ids_N = read_only(rows.ids)
    add_rows(layout, ids_N, addresses, ticks_N, keeps_N, slots_N)
    return slots_N


@compiled
def add_rows(
    layout: Layout,
    ids_N: Ids,
    columns: Words,
    ticks_N: Words,
    keeps_position_N: Bools,
    slots_N: Slots,
) -> None:
    """Write rows into slots; those whose tick is ``NEVER`` are skipped.

    A row that has come with the same or a later use gets the tick ``NEVER``.
    ``columns`` are addresses: :class:`RowColumns`. Where ``keeps_position_N`` holds, a
    row that is there keeps its position in the order in which rows leave; the others
    are touched at once, for which the logs have room. If it is empty none is touched,
    and those that are written cannot leave until they are.
    """
    store = store_at(layout)
    rows = rows_at(store, layout)
    metadata, state, weights = columns[2], columns[3], columns[4]
    metadata_bytes = _16 if rows.has_metadata else np.uint64(0)
    all_ = np.arange(len(ids_N))
    for start in range(0, len(ids_N), CHUNK):
        stop = min(start + CHUNK, len(ids_N))
        index = prepare_chunk(store, rows, ids_N, all_[start:stop])
        for n in range(start, stop):
            if ticks_N[n] == NEVER:
                continue
            slot, is_new = find_or_make(store, index, rows, ids_N[n])
            slots_N[n] = np.uint32(slot)
            address, row = rows.base + slot * rows.stride, np.uint64(n)
            before = NEVER if is_new else load_u64(address + WORD) & TICK_MASK
            if before >= ticks_N[n]:
                ticks_N[n] = NEVER
                continue
            from_metadata = metadata + row * metadata_bytes
            copy_bytes(address + FREQUENCY, from_metadata, metadata_bytes)
            from_state = state + row * rows.state_bytes
            copy_bytes(address + rows.state, from_state, rows.state_bytes)
            from_weights = weights + row * rows.weight_bytes
            copy_bytes(address + rows.weights, from_weights, rows.weight_bytes)
            keeps = len(keeps_position_N) > 0 and keeps_position_N[n] and not is_new
            tick = before if keeps else ticks_N[n]
            store_u64(address + WORD, (rows.owner << OWNER_SHIFT) | tick)
            if len(keeps_position_N) and not keeps:
                _touch(store, rows, slot, tick)


@compiled
def _draw_ticks(
    order: Indices,
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
        of_row = uses_R[r] >> _POSITION_BITS
        if tick == base or of_row != old or tables_R[r] != table:
            tick = max(tick + _ONE, base + of_row)
            old, table = of_row, tables_R[r]
        ticks_R[r] = tick


@compiled
def _draw_next_ticks(
    uses_N: Words, is_other_table: bool, last: Words, ticks_N: Words
) -> None:
    """Give changed rows of one request one tick, the next ones later ones.

    A tick is the other store's where that is later than all of this one. In a log, a
    tick belongs to one arena: rows of another table get another.
    """
    tick, old = last[0], last[1]
    begins = is_other_table
    for n in range(len(uses_N)):
        of_row = uses_N[n] >> _POSITION_BITS
        if begins or of_row != old:
            tick = max(tick + _ONE, of_row)
            old, begins = of_row, False
        ticks_N[n] = tick
    last[0], last[1] = tick, old


@inlined
def _touch(store: StoreAt, rows: RowsAt, slot: np.uint64, tick: np.uint64) -> None:
    address, class_ = rows.base + slot * rows.stride, np.uint64(0)
    if len(store.logs) > 1:
        class_ = classify(load_u32(address + FREQUENCY))
    logs = np.uint64(store.logs.ctypes.data)
    touch(logs, class_, rows, address, slot, tick)


@compiled
def _touch_rows(
    order: Indices,
    ticks_R: Words,
    slots_R: Numbers,
    tables_R: npt.NDArray[np.uint16],
    layouts_T: Layout,
) -> None:
    store = store_at(layouts_T[0])
    for r in order:
        if ticks_R[r] != NEVER:
            rows = rows_at(store, layouts_T[tables_R[r]])
            _touch(store, rows, np.uint64(slots_R[r]), ticks_R[r])
