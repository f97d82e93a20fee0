"""Which row was used least recently, exactly, without a linked list.

A list of rows linked in the order of their use costs three random memory accesses a
touch. Instead each touch appends the row to a log, which is written in sequence, and
stamps the row's header with the tick of that part of the log:

    log    [mark 1] a b c [mark 2] a d [mark 3] a ...
    tick   a: 3   b: 1   c: 1   d: 2

A record is *current* when its row's tick is that of the mark before it; every row has
exactly one current record. The first current record of the log is the least recently
used row. Records that are no longer current are skipped when they come to the front.

HOW IT STAYS EXACT: one part of the log never holds the same row twice. A touch of a
row that carries the present tick begins a new part, with the next tick, so that the
older record stops being current.

ODDITY: a row that is freed has tick 0, which no mark has, and a slot that is used again
gets a fresh tick: records of the former row are skipped like any other old record.

The log is a ring. When it is full, the current records are copied to a new one in
their order; the copy leaves at least as many free places as there are rows, so that a
touch pays for at most one record of a later copy.
"""

import numpy as np

from persia_torchrec.compiled import compiled
from persia_torchrec.store.memory import load_word, prefetch, reserve, store_word
from persia_torchrec.store.rows import (
    OWNER_SHIFT,
    TICK_MASK,
    WORD,
    Words,
    address_of,
)

HEAD, LENGTH, TICK, HEAD_TICK = range(4)
"""Places of the cursor: position of the oldest record, number of records, present tick,
tick of the part that the oldest record is in."""

NONE = np.uint64(2**64 - 1)
"""What :func:`pop_oldest` returns when there is no row."""

_MIN_WORDS = 1024
_LOOK_AHEAD = 16
_MARK = np.uint64(2**63)
_SLOT_BITS = np.uint64(32)
_SLOT_MASK = np.uint64(2**32 - 1)
_ONE = np.uint64(1)


class RecencyLog:
    """The log and its cursor. Not thread-safe: the store's one thread owns it.

    Attributes:
        ring: uint64, the records: ``arena << 32 | slot``, or a mark.
        cursor: uint64 ``(4,)``, see ``HEAD`` and the others.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self.ring = reserve(_MIN_WORDS)
        self.cursor = np.zeros(4, dtype=np.uint64)
        _begin_part(self.ring, self.cursor, _ONE)

    def make_room(self, arenas: Words, num_touches: int, num_rows: int) -> None:
        """Copy the log if ``num_touches`` more might not fit.

        Args:
            arenas: the directory of arenas.
            num_touches: touches that will come before the next call.
            num_rows: rows that are in use.
        """
        needed = 2 * num_touches + 2
        if int(self.cursor[LENGTH]) + needed <= len(self.ring):
            return
        spare = max(needed, num_rows)
        copy = reserve(2 * num_rows + 2 + spare + _MIN_WORDS)
        copied = _copy_current(self.ring, self.cursor, copy, arenas)
        self.ring = copy[: copied + spare + _MIN_WORDS]

    def current_rows(self, arenas: Words) -> list[tuple[int, int]]:
        """Return ``(arena, slot)`` of every row in use, least recently used first."""
        cursor = self.cursor.copy()
        rows = []
        while (record := pop_oldest(self.ring, cursor, arenas)) != NONE:
            rows.append((int(arena_of(record)), int(slot_of(record))))
        return rows


@compiled
def touch(
    ring: Words,
    cursor: Words,
    address: np.uint64,
    owner: np.uint64,
    record: np.uint64,
) -> None:
    """Make a row the most recently used.

    Args:
        ring: the log; there is room for two more words.
        cursor: its cursor.
        address: of the row's header.
        owner: number of the row's table plus one.
        record: ``arena << 32 | slot`` of the row.
    """
    if load_word(address + WORD) & TICK_MASK == cursor[TICK]:
        _begin_part(ring, cursor, cursor[TICK] + _ONE)
    _append(ring, cursor, record)
    store_word(address + WORD, (owner << OWNER_SHIFT) | cursor[TICK])


@compiled
def pop_oldest(ring: Words, cursor: Words, arenas: Words) -> np.uint64:
    """Take the record of the least recently used row out of the log.

    Returns:
        ``arena << 32 | slot``, or ``NONE`` when no row is in use.
    """
    while cursor[LENGTH] > np.uint64(0):
        head = cursor[HEAD]
        record = ring[head]
        ahead = head + np.uint64(_LOOK_AHEAD)
        if ahead < np.uint64(len(ring)) and not ring[ahead] & _MARK:
            prefetch(_address_of_record(arenas, ring[ahead]))
        cursor[HEAD] = (
            np.uint64(0) if head + _ONE == np.uint64(len(ring)) else head + _ONE
        )
        cursor[LENGTH] -= _ONE
        if record & _MARK:
            cursor[HEAD_TICK] = record ^ _MARK
        elif _tick_of(arenas, record) == cursor[HEAD_TICK]:
            return record
    return NONE


@compiled
def arena_of(record: np.uint64) -> np.uint64:
    """Return the arena that a record names."""
    return record >> _SLOT_BITS


@compiled
def slot_of(record: np.uint64) -> np.uint64:
    """Return the slot that a record names."""
    return record & _SLOT_MASK


@compiled
def record_of(arena: np.uint64, slot: np.uint64) -> np.uint64:
    """Return the record that names a slot of an arena."""
    return (arena << _SLOT_BITS) | slot


@compiled
def _begin_part(ring: Words, cursor: Words, tick: np.uint64) -> None:
    cursor[TICK] = tick
    _append(ring, cursor, tick | _MARK)


@compiled
def _append(ring: Words, cursor: Words, word: np.uint64) -> None:
    place = cursor[HEAD] + cursor[LENGTH]
    if place >= np.uint64(len(ring)):
        place -= np.uint64(len(ring))
    ring[place] = word
    cursor[LENGTH] += _ONE


@compiled
def _address_of_record(arenas: Words, record: np.uint64) -> np.uint64:
    return address_of(arenas, arena_of(record), slot_of(record))


@compiled
def _tick_of(arenas: Words, record: np.uint64) -> np.uint64:
    return load_word(_address_of_record(arenas, record) + WORD) & TICK_MASK


@compiled
def _copy_current(ring: Words, cursor: Words, copy: Words, arenas: Words) -> int:
    """Copy the current records in their order; return how many words that took."""
    present = cursor[TICK]
    count = 0
    last_mark = np.uint64(0)
    while True:
        record = pop_oldest(ring, cursor, arenas)
        if record == NONE:
            break
        if cursor[HEAD_TICK] != last_mark:
            last_mark = cursor[HEAD_TICK]
            copy[count] = last_mark | _MARK
            count += 1
        copy[count] = record
        count += 1
    if last_mark != present:
        # Later touches belong to the present part: it must have its mark.
        copy[count] = present | _MARK
        count += 1
    cursor[HEAD] = np.uint64(0)
    cursor[LENGTH] = np.uint64(count)
    return count
