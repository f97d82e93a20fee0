"""Which row of which table is in which slot of a cache.

All tables share the slots, and any row may have any slot. Rows that miss get slots
without a row, and then those that a hand finds, which goes round (CLOCK): it passes by
rows that were used since, up to ``MOST_USES`` times each, and slots of batches in
flight. Of other slots it passes by ``WALK`` a row that leaves, on average over a batch;
then the one with the fewest uses of those that it has passed for a row is taken. The
same calls in the same order have the same results.

Dimension key: U unique ids of a batch, N rows that move, P servers, T tables.
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Counts, Ids, Offsets, Positions, Words
from persia_torchrec.cache.slot_index import (
    IS_DIRTY,
    LOAD,
    LOW,
    NO_ROW,
    NONE,
    PIN,
    PINS,
    TABLE,
    USE,
    USES,
    SlotIndex,
    add_entry,
    find_home,
    find_slot,
    hash_row,
    is_row,
    likely_slot,
    remove_entry,
    table_of,
)
from persia_torchrec.errors import BatchError, CheckpointError, ConfigError
from persia_torchrec.jit import intrinsics as cpu
from persia_torchrec.jit.compiled import (
    compiled,
    inlined,
    read_only,
    report_compilation,
)
from persia_torchrec.routing.route import IdGroup, farmhash64_of, is_of_shard

MOST_USES = 3
WALK = 8
_MOST_SLOTS, _MOST_TABLES, _MOST_FLIGHTS = 2**31 - 1, 2**16, 2**12 - 1

RECORDS, LINES, NUM_LINES, NUM_SLOTS, HAND, CURSOR, USED, FREE = range(8)
HITS, MISSES, EVICTED, WRITTEN, ROWS, DIRTY, PINNED, WALKED = range(8, 16)
"""Columns of a map's state: addresses and sizes; where rows leave, where dirty ones are
looked for, how many slots were ever used, the first that has lost its row, plus 1 (its
id is the next one); what is counted."""

_AHEAD, _SOON = 64, 32  # ids whose lines, and whose records, are on their way

_0, _1, _2, _16, _32, _WALK = map(np.uint64, (0, 1, 2, 16, 32, WALK))


class Moves(NamedTuple):
    """Rows that miss, or that leave.

    Attributes:
        group: their ids by server, and then by table, as a request takes them.
        slots: int32 ``(N,)``, in the order of ``group.ids``.
        counts: uint32 ``(N,)``: of rows that miss, how often each is in the batch; of
            others, how often each was in batches that hit it, since it was last taken.
    """

    group: IdGroup
    slots: Positions
    counts: Counts


class Assigned(NamedTuple):
    """Slots of a batch, int32 ``(U,)``; rows to be read; dirty ones that were there."""

    slots: Positions
    missed: Moves
    left: Moves


class SlotCounters(NamedTuple):
    """Unique rows: the first four only rise; the others are there now.

    ``evicted`` are rows whose slot was taken, ``written_back`` dirty ones that left or
    were taken, ``num_pinned`` slots of batches in flight.
    """

    hits: int
    misses: int
    evicted: int
    written_back: int
    num_rows: int
    num_dirty: int
    num_pinned: int


class Snapshot(NamedTuple):
    """Rows and the order in which they leave; all are clean, and none is pinned.

    Attributes:
        records: uint64 ``(N, 2)``, of the slots that were ever used.
        hands: uint64 ``(3,)``, the state's columns from ``HAND`` on but ``USED``.
    """

    records: Words
    hands: Words


class SlotMap:
    """A map from rows of tables to the slots of a cache.

    Any thread may call any method. :meth:`release` and :meth:`mark_dirty` wait for no
    lock, so that finalizers may call them; what they say holds from the next call on.

    Args:
        num_slots: at most 2**31 - 1. A slot takes 31 bytes.
        tables: names, in the order of the groups of batches; at most 65,536.
        num_servers: what ids are divided among.
    """

    def __init__(
        self, num_slots: int, tables: tuple[str, ...], num_servers: int
    ) -> None:
        if not 0 < num_slots <= _MOST_SLOTS or len(tables) > _MOST_TABLES:
            raise ConfigError(
                f"A cache must have 1 to {_MOST_SLOTS} slots, and at most "
                f"{_MOST_TABLES} tables. Received: {num_slots}, {len(tables)}."
            )
        self.num_slots, self.tables, self.num_servers = num_slots, tables, num_servers
        self._shape = num_servers, len(tables)
        num_lines = int(num_slots / (8 * LOAD)) + 1
        self._records = np.zeros((num_slots, 2), dtype=np.uint64)
        self._lines = np.zeros(8 * num_lines + 7, dtype=np.uint64)
        self._state = np.zeros(16, dtype=np.uint64)
        lines = -(-self._lines.ctypes.data // 64) * 64
        self._state[:HAND] = self._records.ctypes.data, lines, num_lines, num_slots
        self._num_flights = 0
        self._ended = deque[tuple[Positions, bool, bool]]()
        self._lock = threading.Lock()  # guards all but _ended

    @property
    def size_bytes(self) -> int:
        """Bytes of the records and the index."""
        return self._records.nbytes + self._lines.nbytes

    @property
    def counters(self) -> SlotCounters:
        """What was counted."""
        with self._lock:
            self._settle()
            return SlotCounters(*self._state[HITS:WALKED].tolist())

    def assign(self, group: IdGroup, counts_U: Counts | None) -> Assigned | None:
        """Give each row of a batch a slot, which it keeps until the batch is released.

        Rows that left must be sent before those that missed are asked for. ``group``
        has the unique ids of all tables, ``counts_U``, uint32, how often each comes;
        None: once.

        Returns:
            None, and nothing has changed: so many slots are those of batches in flight
            that one of them must be released first.

        Raises:
            BatchError: the batch alone has more rows than there are slots.
        """
        num = len(group.ids)
        if num > self.num_slots:
            raise BatchError(
                "A cache must have a slot for each row of a batch. Received: "
                f"{num} rows, {self.num_slots} slots. Use a larger cache, or smaller "
                "batches."
            )
        if (len(group.num_ids), group.tables) != (self.num_servers, self.tables):
            raise BatchError(
                f"A batch must have the tables {self.tables} on {self.num_servers} "
                f"servers. Received: {group.tables} on {len(group.num_ids)}."
            )
        counts_U = np.ones(num, np.uint32) if counts_U is None else counts_U
        counts_U = read_only(counts_U)
        ids_U, num_PT = read_only(group.ids), read_only(group.num_ids)
        with self._lock:
            self._settle()
            if self._num_flights == _MOST_FLIGHTS:
                return None
            has_room, slots_U, missed, left = _assign(
                self._state, ids_U, counts_U, num_PT
            )
            self._num_flights += has_room
        if not has_room:
            return None
        return Assigned(slots_U, self._moves(*missed), self._moves(*left))

    def release(self, slots_U: Positions, *, trained: bool) -> None:
        """End the pins of a batch, once; its rows are dirty if it was trained."""
        self._ended.append((slots_U, True, trained))

    def mark_dirty(self, slots_U: Positions) -> None:
        """Note that rows have changed."""
        self._ended.append((slots_U, False, True))

    def take_dirty(self, max_rows: int) -> Moves:
        """Return dirty rows, which are clean then; fewer only if there are no more.

        They may leave at once: they must be sent before the next batch is assigned.
        """
        with self._lock:
            self._settle()
            return self._moves(*_take_dirty(self._state, max_rows, self._shape))

    def redirty(self, server: int, loading: Sequence[Positions] = ()) -> None:
        """Have all rows of a server be dirty, as it has lost them.

        Rows whose slots are ``loading`` have not come yet, and stay as they are.
        """
        with self._lock:
            self._settle()
            slots_N = self._slots_of(None)
            for slots_M in loading:
                slots_N = slots_N[~np.isin(slots_N, slots_M)]
            ids_N = self._records[slots_N, 0]
            is_own_N = is_of_shard(ids_N, server, self.num_servers)
            _end(self._state, read_only(slots_N[is_own_N]), False, True)

    def forget(self, table: str | None = None, ids_N: Ids | None = None) -> None:
        """Drop rows of a table, or all of it, or of all, without writing them back."""
        with self._lock:
            self._settle()
            if table is None or ids_N is None:
                slots_N = self._slots_of(table)
            else:
                t = self.tables.index(table)
                slots_N = _find_rows(self._state, t, read_only(ids_N))
            _forget(self._state, read_only(slots_N))

    def forget_slots(self, slots_N: Positions) -> None:
        """Drop the rows of slots, as those that servers do not admit; -1 is none.

        Batches in flight keep the slots until their release; others miss the rows.
        """
        with self._lock:
            self._settle()
            _forget(self._state, read_only(slots_N))

    def slots_of(self, table: str, ids_N: Ids) -> Positions:
        """Return the slot of each row, int32 ``(N,)``, or -1; this counts as no use."""
        with self._lock:
            return _find_rows(self._state, self.tables.index(table), read_only(ids_N))

    def rows(self) -> Moves:
        """Return all rows, by server, table and slot."""
        with self._lock:
            return self._moves(
                *_rows_of(self._state, self._slots_of(None), self._shape)
            )

    def snapshot(self) -> Snapshot:
        """Return what :meth:`restore` needs to have the same rows leave next."""
        with self._lock:
            self._settle()
            records, hands = _snapshot(self._state)
            return Snapshot(records, hands)

    def restore(self, snapshot: Snapshot) -> Moves:
        """Make an unused map what another one was; return its rows, to be read.

        The other may have had other servers, but not other tables or slots.

        Raises:
            CheckpointError: the map is used, or the snapshot is not of such a map; then
                the map is of no use.
        """
        with self._lock:
            records, hands = map(read_only, snapshot)
            if not _restore(self._state, records, hands, len(self.tables)):
                raise CheckpointError(
                    "A cache must be unused, and be restored from one of as many slots "
                    f"and tables. Received: {len(snapshot.records)} used slots for "
                    f"{self.num_slots}, of which {self._state[USED]} were used."
                )
        return self.rows()

    def _settle(self) -> None:
        """Have what was noted take effect, in its order."""
        while self._ended:
            slots_U, is_end, is_dirty = self._ended.popleft()
            self._num_flights -= is_end
            is_sound = _end(self._state, read_only(slots_U), is_end, is_dirty)
            assert is_sound, "a batch must be released once"

    def _slots_of(self, table: str | None) -> Positions:
        """Return the slots of all rows, or of a table's."""
        words = self._records[: int(self._state[USED]), 1]
        is_one = (words & NO_ROW) == 0
        if table is not None:
            is_one &= (words >> _32 & TABLE) == self.tables.index(table)
        return np.flatnonzero(is_one).astype(np.int32)

    def _moves(
        self, ids: Ids, slots: Positions, counts: Counts, num_PT: Offsets
    ) -> Moves:
        offsets = np.zeros(self.num_servers + 1, dtype=np.int64)
        num_PT.sum(axis=1).cumsum(out=offsets[1:])
        return Moves(IdGroup(self.tables, ids, offsets, num_PT), slots, counts)


def warm_up() -> None:
    """Compile, or load, the loops of a map; log it if they are compiled."""
    table, one = "table", np.ones((1, 1), dtype=np.int64)
    ids_U, offsets = np.zeros(1, dtype=np.uint64), np.arange(2)
    with report_compilation():
        slots = SlotMap(1, (table,), 1)
        assigned = slots.assign(IdGroup((table,), ids_U, offsets, one), None)
        assert assigned is not None, "an empty map has room"
        slots.release(assigned.slots, trained=True)
        slots.take_dirty(1)
        slots.redirty(0)
        SlotMap(1, (table,), 1).restore(slots.snapshot())
        slots.forget(table, ids_U)


_Rows = tuple[Ids, Positions, Counts, Offsets]
"""Ids, slots and counts of rows by server and table, and how many there are of each."""


class _Batch(NamedTuple):
    ids: Ids
    counts: Counts
    tables: npt.NDArray[np.uint16]
    hashes: Counts


class _Places(NamedTuple):
    """Rows that move, and how many of them are found; places are server * T + table."""

    ids: Ids
    slots: Positions
    counts: Counts
    places: Positions


@compiled
def _assign(
    state: Words, ids_U: Ids, counts_U: Counts, num_PT: Offsets
) -> tuple[bool, Positions, _Rows, _Rows]:
    num = len(ids_U)
    tables_U, hashes_U = np.empty(num, np.uint16), np.empty(num, np.uint32)
    i = 0
    for p in range(num_PT.shape[0]):
        for t in range(num_PT.shape[1]):
            for _ in range(num_PT[p, t]):
                tables_U[i], hashes_U[i] = t, hash_row(ids_U[i], np.uint64(t))
                i += 1
    batch = _Batch(ids_U, counts_U, tables_U, hashes_U)
    slots_U, later_N = np.empty(num, np.int32), np.empty(num, np.int32)
    has_room = state[PINNED] + np.uint64(num) <= state[NUM_SLOTS]
    has_room = has_room or _has_room(state, batch)
    num_later = _find_slots(state, batch, slots_U, later_N) if has_room else 0
    missed, left = _replace(state, batch, num_PT, slots_U, later_N[:num_later])
    return has_room, slots_U, missed, left


@compiled
def _has_room(state: Words, batch: _Batch) -> bool:
    """Return whether a batch and those in flight need no more slots than there are."""
    index, pinned = _index(state), state[PINNED]
    for i in range(len(batch.ids)):
        table, hash_ = np.uint64(batch.tables[i]), np.uint64(batch.hashes[i])
        slot = find_slot(index, batch.ids[i], table, hash_)
        if slot == NONE or (index.words[_2 * slot + _1] & PINS) == _0:
            pinned += _1
    return pinned <= state[NUM_SLOTS]


@compiled
def _find_slots(
    state: Words, batch: _Batch, slots_U: Positions, later_N: Positions
) -> int:
    """Use the slots of rows that hit; return how many miss, and write which."""
    index, num, num_later, num_pinned = _index(state), len(batch.ids), 0, _0
    for ahead in range(num + _AHEAD):
        if ahead < num:
            cpu.prefetch(find_home(index, np.uint64(batch.hashes[ahead])))
        soon = ahead - _SOON
        if 0 <= soon < num:
            slot = likely_slot(index, np.uint64(batch.hashes[soon]))
            slots_U[soon] = slot  # -1 for NONE
            _prefetch_record(state, slot)
        i = ahead - _AHEAD
        if i < 0:
            continue
        table, slot = np.uint64(batch.tables[i]), np.uint64(np.int64(slots_U[i]))
        if slot != NONE and not is_row(index, slot, batch.ids[i], table):
            slot = find_slot(index, batch.ids[i], table, np.uint64(batch.hashes[i]))
        if slot == NONE:
            later_N[num_later] = i
            num_later += 1
            continue
        slots_U[i], word = slot, index.words[_2 * slot + _1]
        if (word & PINS) == _0:
            num_pinned += _1
        if (word & USES) != USES:
            word += USE
        hits = min((word & LOW) + np.uint64(batch.counts[i]), LOW)
        index.words[_2 * slot + _1] = ((word & ~LOW) | hits) + PIN
    state[PINNED] += num_pinned
    state[HITS] += np.uint64(num - num_later)
    state[MISSES] += np.uint64(num_later)
    return num_later


@compiled
def _take_slots(state: Words, taken_N: Positions, hashes_N: Counts) -> int:
    """Choose slots, and pin them; return how many have no row, which are the first.

    ``hashes_N`` are those of the rows of the others.
    """
    index, num, first = _index(state), len(taken_N), 0
    while first < num and (state[FREE] != _0 or state[USED] < state[NUM_SLOTS]):
        if state[FREE] != _0:
            slot = state[FREE] - _1
            state[FREE] = index.words[_2 * slot]
        else:
            slot = state[USED]
            state[USED] += _1
        taken_N[first], index.words[_2 * slot + _1] = slot, PIN
        first += 1
    hand, passed, walked, budget = state[HAND], _0, _0, _0
    for n in range(first, num):
        budget += _WALK
        best, least = NONE, NONE
        while least != _0 and (walked < budget or best == NONE):
            slot, word = hand, index.words[_2 * hand + _1]
            hand = hand + _1 if hand + _1 < state[NUM_SLOTS] else _0
            uses = word & USES
            if uses != _0:
                index.words[_2 * slot + _1] = word - USE
            if (word & PINS) != _0:
                passed += _1
                continue
            walked += _1
            if uses < least:
                best, least = slot, uses
        word = index.words[_2 * best + _1]
        index.words[_2 * best + _1] = word + PIN
        taken_N[n], hashes_N[n] = best, hash_row(index.words[_2 * best], table_of(word))
    state[HAND] = hand
    state[WALKED] += walked + passed
    state[EVICTED] += np.uint64(num - first)
    state[PINNED] += np.uint64(num)
    state[ROWS] += np.uint64(first)
    return first


@compiled
def _replace(
    state: Words, batch: _Batch, num_PT: Offsets, slots_U: Positions, later_N: Positions
) -> tuple[_Rows, _Rows]:
    """Put rows that missed into slots; return them, and the dirty ones that left."""
    index, num, num_left = _index(state), len(later_N), 0
    taken_N, hashes_N = np.empty(num, np.int32), np.empty(num, np.uint32)
    first = _take_slots(state, taken_N, hashes_N)
    ids_N, counts_N, left = (
        np.empty(num, np.uint64),
        np.empty(num, np.uint32),
        _places(num),
    )
    for n in range(num):
        if n + _SOON < num:
            cpu.prefetch(find_home(index, np.uint64(hashes_N[n + _SOON])))
            later = np.uint64(later_N[n + _SOON])
            cpu.prefetch(find_home(index, np.uint64(batch.hashes[later])))
        i, slot = np.uint64(later_N[n]), np.uint64(taken_N[n])
        if n >= first:
            remove_entry(index, slot, np.uint64(hashes_N[n]))
            if (index.words[_2 * slot + _1] & IS_DIRTY) != _0:
                _note(index, slot, left, num_left, num_PT.shape)
                num_left += 1
        add_entry(index, slot, np.uint64(batch.hashes[i]))
        index.words[_2 * slot] = batch.ids[i]
        index.words[_2 * slot + _1] = (np.uint64(batch.tables[i]) << _32) | PIN
        slots_U[i], ids_N[n], counts_N[n] = slot, batch.ids[i], batch.counts[i]
    state[DIRTY] -= np.uint64(num_left)
    state[WRITTEN] += np.uint64(num_left)
    missed = ids_N, taken_N, counts_N, _count_places(later_N, num_PT)
    return missed, _sorted(left, num_left, num_PT.shape)


@compiled
def _count_places(later_N: Positions, num_PT: Offsets) -> Offsets:
    """Return how many of the ids that missed each table has on each server."""
    missed_PT, n, stop = np.zeros(num_PT.shape, np.int64), 0, 0
    for p in range(num_PT.shape[0]):
        for t in range(num_PT.shape[1]):
            first, stop = n, stop + num_PT[p, t]
            while n < len(later_N) and later_N[n] < stop:
                n += 1
            missed_PT[p, t] = n - first
    return missed_PT


@compiled
def _end(state: Words, slots_N: Positions, is_end: bool, is_dirty: bool) -> bool:
    """End pins of slots, or have their rows be dirty; False: one had no pin."""
    index, num, pin, num_dirty = _index(state), len(slots_N), PIN if is_end else _0, _0
    for n in range(num):
        if n + _AHEAD < num:
            _prefetch_record(state, np.uint64(slots_N[n + _AHEAD]))
        slot = np.uint64(slots_N[n])
        word = index.words[_2 * slot + _1]
        if is_end and (word & PINS) == _0:
            return False
        word -= pin
        if is_dirty and (word & (IS_DIRTY | NO_ROW)) == _0:
            word |= IS_DIRTY
            num_dirty += _1
        index.words[_2 * slot + _1] = word
        if is_end and (word & PINS) == _0:
            state[PINNED] -= _1
            _free(state, index, slot)
    state[DIRTY] += num_dirty
    return True


@compiled
def _take_dirty(state: Words, max_rows: int, shape: tuple[int, int]) -> _Rows:
    """Return dirty rows from the cursor on, and have them be clean."""
    index, num, num_dirty = _index(state), 0, np.int64(state[DIRTY])
    slots_N = np.empty(max_rows if max_rows < num_dirty else num_dirty, np.int32)
    while num < len(slots_N):
        slot = state[CURSOR]
        state[CURSOR] = slot + _1 if slot + _1 < state[USED] else _0
        if (index.words[_2 * slot + _1] & IS_DIRTY) != _0:
            slots_N[num] = slot
            num += 1
    rows = _rows_of(state, slots_N, shape)
    for n in range(num):
        index.words[_2 * np.uint64(slots_N[n]) + _1] &= ~(IS_DIRTY | LOW)
    state[DIRTY] -= np.uint64(num)
    state[WRITTEN] += np.uint64(num)
    return rows


@compiled
def _rows_of(state: Words, slots_N: Positions, shape: tuple[int, int]) -> _Rows:
    found = _places(len(slots_N))
    for n in range(len(slots_N)):
        _note(_index(state), np.uint64(slots_N[n]), found, n, shape)
    return _sorted(found, len(slots_N), shape)


@compiled
def _places(num: int) -> _Places:
    ids, slots = np.empty(num, np.uint64), np.empty(num, np.int32)
    return _Places(ids, slots, np.empty(num, np.uint32), np.empty(num, np.int32))


@inlined
def _note(
    index: SlotIndex, slot: Any, found: _Places, n: int, shape: tuple[int, int]
) -> None:
    id_, word = index.words[_2 * slot], index.words[_2 * slot + _1]
    found.ids[n], found.slots[n], found.counts[n] = id_, slot, word & LOW
    server = np.int64(farmhash64_of(id_) % np.uint64(shape[0]))
    found.places[n] = server * shape[1] + np.int64(table_of(word))


@compiled
def _sorted(found: _Places, num: int, shape: tuple[int, int]) -> _Rows:
    """Return rows by place, and in their order there: a counting sort."""
    nums, sorted_ = np.zeros(shape[0] * shape[1], np.int64), _places(num)
    for n in range(num):
        nums[found.places[n]] += 1
    starts = np.zeros(len(nums), np.int64)
    for place in range(len(nums) - 1):
        starts[place + 1] = starts[place] + nums[place]
    for n in range(num):
        place = found.places[n]
        to = starts[place]
        starts[place] = to + 1
        sorted_.ids[to], sorted_.slots[to] = found.ids[n], found.slots[n]
        sorted_.counts[to] = found.counts[n]
    return sorted_.ids, sorted_.slots, sorted_.counts, nums.reshape(shape)


@compiled
def _find_rows(state: Words, table: int, ids_N: Ids) -> Positions:
    """Return the slots of rows of a table, or -1."""
    slots_N = np.empty(len(ids_N), np.int32)
    for n in range(len(ids_N)):
        hash_ = hash_row(ids_N[n], np.uint64(table))
        slots_N[n] = find_slot(_index(state), ids_N[n], np.uint64(table), hash_)
    return slots_N


@compiled
def _forget(state: Words, slots_N: Positions) -> None:
    """Drop the rows of slots, which are free once no batch needs them."""
    index = _index(state)
    for n in range(len(slots_N)):
        slot = np.uint64(np.int64(slots_N[n]))
        word = NO_ROW if slot == NONE else index.words[_2 * slot + _1]
        if (word & NO_ROW) == _0:
            remove_entry(index, slot, hash_row(index.words[_2 * slot], table_of(word)))
            state[ROWS] -= _1
            if (word & IS_DIRTY) != _0:
                state[DIRTY] -= _1
            index.words[_2 * slot + _1] = (word & PINS) | NO_ROW
            _free(state, index, slot)


@compiled
def _snapshot(state: Words) -> tuple[Words, Words]:
    """Return the records without pins, hits and what is dirty, and the hands."""
    index, free = _index(state), state[FREE]
    records = np.empty((np.int64(state[USED]), 2), np.uint64)
    for slot in range(state[USED]):
        id_, word = index.words[_2 * slot], index.words[_2 * slot + _1]
        if (word & NO_ROW) != _0 and (word & PINS) != _0:
            id_, free = free, slot + _1
        records[slot, 0] = id_
        records[slot, 1] = word & ~(PINS | IS_DIRTY | LOW)
    return records, np.array([state[HAND], state[CURSOR], free])


@compiled
def _restore(state: Words, records: Words, hands: Words, num_tables: int) -> bool:
    """Take over records and hands; False, if they cannot be right."""
    index, num, num_free, free = _index(state), np.uint64(len(records)), _0, hands[2]
    fits = hands[0] < state[NUM_SLOTS] and hands[1] < max(num, _1)
    if state[USED] != _0 or num > state[NUM_SLOTS] or not fits:
        return False
    for slot in range(num):
        id_, word = records[slot, 0], records[slot, 1]
        index.words[_2 * slot], index.words[_2 * slot + _1] = id_, word
        if (word & NO_ROW) != _0:
            num_free += _1
            continue
        table, hash_ = table_of(word), hash_row(id_, table_of(word))
        is_new = find_slot(index, id_, table, hash_) == NONE
        if table >= np.uint64(num_tables) or not is_new:
            return False
        add_entry(index, slot, hash_)
    state[HAND], state[CURSOR], state[FREE] = hands[0], hands[1], free
    state[USED], state[ROWS] = num, num - num_free
    while _0 < free <= num and num_free > _0 and records[free - _1, 1] == NO_ROW:
        free, num_free = records[free - _1, 0], num_free - _1
    return free == _0 and num_free == _0


@inlined
def _index(state: Words) -> SlotIndex:
    return SlotIndex(cpu.words_at(state[RECORDS]), state[LINES], state[NUM_LINES])


@inlined
def _prefetch_record(state: Words, slot: np.uint64) -> None:
    cpu.prefetch(state[RECORDS] + _16 * slot)


@inlined
def _free(state: Words, index: SlotIndex, slot: np.uint64) -> None:
    """Have a slot be the next that is used, if it has no row, and no batch needs it."""
    if index.words[_2 * slot + _1] == NO_ROW:
        index.words[_2 * slot] = state[FREE]
        state[FREE] = slot + _1
