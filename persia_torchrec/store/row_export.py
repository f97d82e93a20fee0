"""Copy rows out of a store: all of them while it stays in use, or those of some ids.

A row never moves while it lives, so that a walk over the slots meets it once:

    slots of an arena    [ copied ......... | next slice | ........... ] made since
                                            ^ now                      ^ at the start

Every row that lives from the first slice to the last is copied once, whole. A row that
is made meanwhile, or evicted and made again, may be there once, twice (the later use is
the valid one), or not at all. The store's thread only copies memory;
:func:`split_by_table` makes columns of it, in the thread that writes them.

A row's position in the request that used it last is in the log of uses, which is copied
when an export begins, and read a few records at a time. Rows that are used meanwhile
get no position: they are newer than all others, and nearly in order by their ticks.

    log   [tick 3] a b c   [tick 4] b d       positions   a: 0   c: 2   b: 0   d: 1

Dimension key:
    N: slots of a chunk, or ids
    K: rows of one table
    A: arenas
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import compiled
from persia_torchrec.intrinsics import (
    copy_bytes,
    load_u64,
    prefetch,
    store_u32,
    store_u64,
    unowned,
)
from persia_torchrec.store.float16 import FP32
from persia_torchrec.store.lookup import Indices, find_slots
from persia_torchrec.store.recency import (
    COMPACTING,
    HEAD,
    MARK,
    MARK_WORDS,
    READ,
    TAIL,
    WRITE,
    RecencyLogs,
)
from persia_torchrec.store.row_columns import POSITION_BITS, RowColumns
from persia_torchrec.store.rows import (
    DIM,
    DTYPE,
    FREQUENCY,
    HAS_METADATA,
    MISSING,
    NUM_STATE,
    OWNER_SHIFT,
    STATE,
    TICK_MASK,
    USED,
    WEIGHTS,
    WORD,
    Ids,
    Layout,
    Words,
    locate_row,
    reserve,
)
from persia_torchrec.store.shard_memory import ShardMemory
from persia_torchrec.store.tables import TableState

Numbers = npt.NDArray[np.uint32]

_CHUNK_BYTES = 2**20
_SLICE_BYTES = 2**18
_SLICE_RECORDS = 4096
_LARGEST_POSITION = np.uint64(2**POSITION_BITS - 1)
_POSITION_BITS = np.uint64(POSITION_BITS)

_AT, _TICK, _ARENA, _POSITION = range(4)  # columns of the cursor
_LOOK_AHEAD = 16
_S32 = np.uint64(32)
_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_2, _4, _8, _16 = (np.uint64(num) for num in (2, 4, 8, 16))


@dataclass(frozen=True, slots=True)
class RawRows:
    """Slots of an arena, used and free, and the position of each in its last use."""

    words: Words
    positions: Numbers


class RowExport:
    """A walk over all rows. The store's thread owns it; the store must not be cleared.

    ``tables`` are those that are exported, in the order of their numbers.
    """

    def __init__(self, memory: ShardMemory) -> None:
        self.tables = list(memory.states)
        self._arenas = list(memory.arenas)
        self._num_used = memory.directory[:, USED].astype(np.int64).tolist()
        self._order = UseOrder(memory.logs, memory.directory.copy())
        self._orders = True
        self._arena = self._slot = self._num_copied = 0
        self._chunk: RawRows | None = None
        self._skip_empty_arenas()

    @property
    def is_done(self) -> bool:
        """Whether all slots have been copied."""
        return self._arena == len(self._arenas)

    @property
    def progress(self) -> float:
        """Return which fraction of the slots has been copied, in [0, 1]."""
        return self._num_copied / max(sum(self._num_used), 1)

    def advance(self) -> RawRows | None:
        """Do a slice of the work, some tens of microseconds.

        Returns about 1 MiB of slots when they are copied; None before that.
        """
        if self._orders:
            self._orders = self._order.advance(_SLICE_RECORDS)
            return None
        if self.is_done:
            return None
        words = self._arenas[self._arena].words
        num_used = self._num_used[self._arena]
        row_bytes = words.shape[1] * 8
        if self._chunk is None:
            num_rows = min(max(_CHUNK_BYTES // row_bytes, 1), num_used - self._slot)
            self._first = self._slot
            self._chunk = RawRows(
                np.empty((num_rows, words.shape[1]), dtype=np.uint64),
                np.empty(num_rows, dtype=np.uint32),
            )
        chunk, begin = self._chunk, self._slot - self._first
        num = min(max(_SLICE_BYTES // row_bytes, 1), len(chunk.words) - begin)
        stop = self._slot + num
        chunk.words[begin : begin + num] = words[self._slot : stop]
        positions = self._order.positions[self._arena][self._slot : stop]
        chunk.positions[begin : begin + num] = positions
        self._slot = stop
        self._num_copied += num
        if begin + num < len(chunk.words):
            return None
        self._chunk = None
        if self._slot == num_used:
            self._arena, self._slot = self._arena + 1, 0
            self._skip_empty_arenas()
        return chunk

    def _skip_empty_arenas(self) -> None:
        while not self.is_done and self._num_used[self._arena] == 0:
            self._arena += 1


def split_by_table(
    chunk: RawRows, tables: Sequence[TableState]
) -> list[tuple[int, RowColumns]]:
    """Return the rows of a chunk as columns, with the numbers of their tables.

    Any thread may call it; it holds the interpreter for moments only. Rows of tables
    that were added after the export began are left out.
    """
    offsets, order = _group(chunk.words, len(tables))
    split = []
    for number in np.flatnonzero(np.diff(offsets)).tolist():
        slots_K = order[offsets[number] : offsets[number + 1]]
        table = tables[number]
        rows = table.shape.empty(len(slots_K))
        positions_K = chunk.positions[slots_K]
        copy_columns(chunk.words, slots_K, positions_K, table.layout, rows.addresses())
        split.append((number, rows))
    return split


def gather_rows(
    memory: ShardMemory, table: int, ids_N: Ids
) -> tuple[RowColumns, npt.NDArray[np.bool_]]:
    """Copy the rows of ids as they are now; the store's thread calls it.

    Nothing is counted. Returns the rows of those ids (read-only) that have one, in
    their order, with uses that have no meaning; and for each id whether it has a row.
    """
    state = memory.states[table]
    slots_N = find_slots(state.layout, ids_N)
    found_N = slots_N != MISSING
    slots_K = slots_N[found_N].astype(np.int64)
    rows = state.shape.empty(len(slots_K))
    positions_K = np.zeros(len(slots_K), dtype=np.uint32)
    words = memory.arena(state)
    copy_columns(words, slots_K, positions_K, state.layout, rows.addresses())
    return rows, found_N


class _Segment(NamedTuple):
    """A stretch of a log: its records, and the tick and arena of the first."""

    records: Numbers
    tick: np.uint64
    arena: np.uint64


class UseOrder:
    """The positions of rows in their requests. The store's thread owns it.

    The log records in use are copied; the directory is kept: the store must not be
    cleared. ``positions`` has an array per arena, with those of its slots.
    """

    def __init__(self, logs: RecencyLogs, directory: Words) -> None:
        self._segments = _copy_segments(logs)
        self._directory = directory
        num_used = directory[:, USED].tolist()
        self.positions = [reserve(num // 2 + 1).view(np.uint32) for num in num_used]
        addresses = [positions.ctypes.data for positions in self.positions]
        self._addresses = np.array(addresses, dtype=np.uint64)
        self._cursor = np.zeros(4, dtype=np.uint64)
        self._begin_segment()

    def advance(self, num_records: int) -> bool:
        """Read a few more records; return whether there are others after them."""
        if not self._segments:
            return False
        records, cursor = self._segments[0].records, self._cursor
        stop = min(int(cursor[_AT]) + num_records, len(records))
        _number_rows(records, stop, cursor, self._directory, self._addresses)
        if int(cursor[_AT]) >= len(records):
            self._segments.pop(0)
            self._begin_segment()
        return bool(self._segments)

    def _begin_segment(self) -> None:
        if self._segments:
            _, tick, arena = self._segments[0]
            if tick != self._cursor[_TICK]:
                self._cursor[_POSITION] = 0
            self._cursor[_AT], self._cursor[_TICK] = 0, tick
            self._cursor[_ARENA] = arena


def _copy_segments(logs: RecencyLogs) -> list[_Segment]:
    segments = []
    for line, words in zip(logs.directory, logs.words, strict=True):
        records = words.view(np.uint32)
        ends = [(HEAD, TAIL)]
        if line[COMPACTING]:
            ends = [(HEAD, WRITE), (READ, TAIL)]
        for begin, end in ends:
            copied = records[int(line[begin]) : int(line[end])].copy()
            if len(copied):
                segments.append(_Segment(copied, line[begin + 1], line[begin + 2]))
    return segments


@compiled
def _number_rows(
    records: Numbers, stop: int, cursor: Words, arenas: Words, addresses_A: Words
) -> None:
    """Write the positions of the rows of the next records of a segment.

    A mark is read as a whole, even across ``stop``. ``cursor`` is advanced;
    ``addresses_A`` says where the positions of each arena's slots are.
    """
    at, tick = np.int64(cursor[_AT]), cursor[_TICK]
    arena, position = cursor[_ARENA], cursor[_POSITION]
    while at < stop:
        slot = np.uint64(records[at])
        if slot == MARK:
            new = np.uint64(records[at + 2]) | (np.uint64(records[at + 3]) << _S32)
            if new != tick:
                position = _ZERO
            tick, arena = new, np.uint64(records[at + 1])
            at += MARK_WORDS
            continue
        if at + _LOOK_AHEAD < len(records):
            ahead = np.uint64(records[at + _LOOK_AHEAD])  # perhaps not a slot
            prefetch(locate_row(arenas, arena, ahead))
        word = load_u64(locate_row(arenas, arena, slot) + WORD)
        if word & TICK_MASK == tick:
            store_u32(addresses_A[arena] + _4 * slot, position)
        position += _ONE
        at += 1
    cursor[_AT], cursor[_TICK] = np.uint64(at), tick
    cursor[_ARENA], cursor[_POSITION] = arena, position


@compiled
def _group(words_NW: Words, num_tables: int) -> tuple[Indices, Indices]:
    """Sort slots by table, without free ones: where each table begins, the slots."""
    offsets = np.zeros(num_tables + 1, dtype=np.int64)
    for n in range(len(words_NW)):
        owner = np.int64(words_NW[n, 1] >> OWNER_SHIFT)
        if 1 <= owner <= num_tables:
            offsets[owner] += 1
    for t in range(num_tables):
        offsets[t + 1] += offsets[t]
    order = np.empty(offsets[num_tables], dtype=np.int64)
    cursor = offsets[:num_tables].copy()
    for n in range(len(words_NW)):
        owner = np.int64(words_NW[n, 1] >> OWNER_SHIFT)
        if 1 <= owner <= num_tables:
            order[cursor[owner - 1]] = n
            cursor[owner - 1] += 1
    return offsets, order


@compiled
def copy_columns(
    words_NW: Words, slots_K: Indices, positions_K: Numbers, layout: Layout, to: Words
) -> None:
    """Copy slots of a table to columns at addresses ``to``: :class:`RowColumns`."""
    words_NW = unowned(words_NW)
    stride = np.uint64(8 * words_NW.shape[1])
    base = np.uint64(words_NW.ctypes.data)
    ids, uses, metadata, state, weights = to[0], to[1], to[2], to[3], to[4]
    metadata_bytes = _16 * layout[HAS_METADATA]
    state_bytes = _4 * layout[NUM_STATE]
    weight_bytes = layout[DIM] * (_4 if layout[DTYPE] == FP32 else _2)
    from_state, from_weights = layout[STATE], layout[WEIGHTS]
    for k in range(len(slots_K)):
        address, row = base + np.uint64(slots_K[k]) * stride, np.uint64(k)
        store_u64(ids + _8 * row, load_u64(address))
        position = min(np.uint64(positions_K[k]), _LARGEST_POSITION)
        tick = load_u64(address + WORD) & TICK_MASK
        store_u64(uses + _8 * row, (tick << _POSITION_BITS) | position)
        to_metadata = metadata + row * metadata_bytes
        copy_bytes(to_metadata, address + FREQUENCY, metadata_bytes)
        copy_bytes(state + row * state_bytes, address + from_state, state_bytes)
        copy_bytes(weights + row * weight_bytes, address + from_weights, weight_bytes)
