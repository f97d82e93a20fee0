"""The index: from (table, id) to a slot.

One hash table of 8-byte entries for all tables of the server. Eight entries are a
cache line, and a line is compared as a whole, without a branch for each entry:

    entry     hash (32 bits) | slot + 1 (32 bits)        0: empty
    home      line (hash * number of lines) >> 32

It uses open addressing with linear probing, by lines, without wrapping around: after
the last line are some more for what overflows. The entry does not hold the id: where
the hash fits, the row's header, which the lookup touches anyway, is compared. A
removal closes the gap that it leaves (no tombstones).

The index grows in place, a few entries at a time, without reading any row. The home
rises with the hash; with more lines every home lies further back. So the entries move
from the last to the first, and one hash tells which have moved:

    hash >= BOUNDARY    home by the NEW number of lines
    hash <  BOUNDARY    home by the OLD number

    [ not yet moved ........ ]boundary   (gap)   [ moved .................. ]
"""

from typing import NamedTuple

import numpy as np

from persia_torchrec.arrays import Words
from persia_torchrec.jit import intrinsics as cpu
from persia_torchrec.jit.compiled import compiled, inlined
from persia_torchrec.store import memory
from persia_torchrec.store.memory import WORD, RowsAt, StoreAt, StoreMemory, is_row_of

OLD, NEW, BOUNDARY, ENTRIES, LIMIT, LINES = range(6)
"""Columns of the index's cursor: numbers of lines, the first hash that has moved,
entries, most lines that there may be; bytes from the cursor to the lines."""

NOT_FOUND = np.uint64(2**64 - 1)
"""What :func:`find_slot` returns for an id that has no row."""

_ENTRIES_PER_LINE = 8
_MIN_LINES = 32
OVERFLOW_LINES = 8192
_LOAD_TO_GROW = 0.56
_FINAL_LOAD = 0.58
_GROWTH = 1.25
_SLAB = np.uint64(8)

_MUL_A = np.uint64(0xBF58476D1CE4E5B9)
_MUL_B = np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_S29, _S32 = np.uint64(29), np.uint64(32)
_LOW = np.uint64(2**32 - 1)
_ALL_HASHES = np.uint64(2**32)
_LINE = np.uint64(64)
_ZERO, _ONE = np.uint64(0), np.uint64(1)


class Index:
    """Lines of entries, uint64 ``(lines, 8)``, and their cursor, uint64 ``(6,)``.

    Only the first ``NEW`` lines and those that their entries overflow into are used.
    """

    def __init__(self, capacity_rows: int, source: StoreMemory) -> None:
        self._memory = source
        self.cursor = source.area(memory.CURSOR)[: LINES + 1]
        if source.is_new:
            enough = int(capacity_rows / (_FINAL_LOAD * _ENTRIES_PER_LINE)) + 1
            self.cursor[LIMIT] = max(enough, _MIN_LINES)
            num_lines = int(self.cursor[LIMIT]) + OVERFLOW_LINES
            [words] = source.reserve(_ENTRIES_PER_LINE * num_lines)
            self._begin(words.reshape(-1, _ENTRIES_PER_LINE))
        else:
            address = memory.address_at(self.cursor, int(self.cursor[LINES]))
            self.lines = source.find(address).reshape(-1, _ENTRIES_PER_LINE)
            old, new, boundary, entries, limit, _ = self.cursor.tolist()
            fits = _MIN_LINES <= min(old, new) <= max(old, new) <= limit
            fits &= limit + OVERFLOW_LINES <= len(self.lines)
            fits &= boundary <= 2**32 and entries <= capacity_rows
            memory.require_sound(fits, "a cursor of the index")

    def clear(self) -> None:
        """Drop all entries."""
        [lines] = self._memory.emptied(self.lines)
        self._begin(lines)

    def make_room(self, num_new: int) -> None:
        """Allocate the lines that :func:`grow_a_little` may use for more entries."""
        num_lines = int(self.cursor[NEW])
        num_entries = int(self.cursor[ENTRIES]) + num_new
        enough = num_entries / (_LOAD_TO_GROW * _ENTRIES_PER_LINE)
        if enough > num_lines:
            num_lines = min(int(enough * _GROWTH) + 2, int(self.cursor[LIMIT]))
        num_words = _ENTRIES_PER_LINE * (num_lines + OVERFLOW_LINES)
        self._memory.commit(self.lines, num_words)

    def _begin(self, lines: Words) -> None:
        self.lines = lines
        self.cursor[[OLD, NEW, BOUNDARY, ENTRIES]] = _MIN_LINES, _MIN_LINES, 0, 0
        self.cursor[LINES] = memory.distance(self.cursor, lines)
        self.make_room(0)

    @property
    def size_bytes(self) -> int:
        """Bytes of the lines in use."""
        return int(self.cursor[NEW]) * int(_LINE)


class IndexAt(NamedTuple):
    """Where the index is, until it grows: address, numbers of lines, boundary.

    ``log`` is that of :class:`StoreAt`.
    """

    lines: np.uint64
    old: np.uint64
    new: np.uint64
    boundary: np.uint64
    log: np.uint64


@inlined
def index_at(store: StoreAt) -> IndexAt:
    """Return where the index is now."""
    cursor, address = store.cursor, np.uint64(store.lines.ctypes.data)
    return IndexAt(address, cursor[OLD], cursor[NEW], cursor[BOUNDARY], store.log)


@inlined
def hash_id(id_: np.uint64, owner: np.uint64) -> np.uint64:
    """Return a 32-bit hash of an id and its owner, as uint64."""
    x = id_ ^ (owner * _GOLDEN)
    x = (x ^ (x >> _S32)) * _MUL_A
    x = (x ^ (x >> _S29)) * _MUL_B
    return x >> _S32


@inlined
def find_home(index: IndexAt, hash_: np.uint64) -> np.uint64:
    """Return the address of the line where the search for a hash begins."""
    num_lines = index.new if hash_ >= index.boundary else index.old
    return index.lines + _LINE * ((hash_ * num_lines) >> _S32)


@inlined
def find_slot(
    index: IndexAt, rows: RowsAt, id_: np.uint64, hash_: np.uint64
) -> np.uint64:
    """Return the slot of an id, or ``NOT_FOUND``; ``hash_`` is :func:`hash_id`'s."""
    line = find_home(index, hash_)
    while True:
        empty = cpu.words_empty(line)
        fits = cpu.upper_halves_equal(line, hash_) & ~empty
        while fits != _ZERO:
            slot = _slot_at(line, fits)
            if is_row_of(rows, slot, id_):
                return slot
            fits &= fits - _ONE
        if empty != _ZERO:
            return NOT_FOUND
        line += _LINE


@inlined
def likely_slot(index: IndexAt, hash_: np.uint64) -> np.uint64:
    """Return the slot of the first entry whose hash fits, without reading the row."""
    line = find_home(index, hash_)
    while True:
        empty = cpu.words_empty(line)
        fits = cpu.upper_halves_equal(line, hash_) & ~empty
        if fits != _ZERO:
            return _slot_at(line, fits)
        if empty != _ZERO:
            return NOT_FOUND
        line += _LINE


@inlined
def add_entry(index: IndexAt, entry: np.uint64) -> None:
    """Add ``hash << 32 | slot + 1``; :func:`grow_a_little` has made room.

    The caller counts it: ``cursor[ENTRIES]``.
    """
    line = find_home(index, entry >> _S32)
    while cpu.words_empty(line) == _ZERO:
        line += _LINE
    _write(index, line + WORD * cpu.lowest_bit(cpu.words_empty(line)), entry)


@inlined
def remove_entry(index: IndexAt, hash_: np.uint64, slot: np.uint64) -> None:
    """Take out a slot that is in the index, and close the gap it leaves.

    If its line was full, others may have overflowed it. The caller counts the removal.
    """
    line = find_home(index, hash_)
    while True:
        fits = cpu.upper_halves_equal(line, hash_)
        while fits != _ZERO and _slot_at(line, fits) != slot:
            fits &= fits - _ONE
        if fits != _ZERO:
            break
        line += _LINE
    was_full = cpu.words_empty(line) == _ZERO
    gap = line + WORD * cpu.lowest_bit(fits)
    _write(index, gap, _ZERO)
    if was_full:
        _fill_gap(index, line, gap)


@compiled
def grow_a_little(store: StoreAt, num_new: int) -> None:
    """Make room for ``num_new`` more entries, moving a few of those there are."""
    cursor = store.cursor
    if cursor[BOUNDARY] == _ZERO:
        num_entries = np.float64(cursor[ENTRIES]) + num_new
        enough = num_entries / (_LOAD_TO_GROW * _ENTRIES_PER_LINE)
        if cursor[NEW] >= cursor[LIMIT] or enough <= np.float64(cursor[NEW]):
            return
        num_lines = np.uint64(max(enough, np.float64(cursor[NEW]) * _GROWTH)) + _ONE
        cursor[NEW] = min(num_lines, cursor[LIMIT])
        cursor[BOUNDARY] = _ALL_HASHES
    # A slab of 8 lines for each four entries: all have moved when the load has risen
    # by a sixteenth.
    for _ in range(num_new // 4 + 1):
        _move_slab(store)
        if cursor[BOUNDARY] == _ZERO:
            break


@inlined
def _write(index: IndexAt, address: np.uint64, entry: np.uint64) -> None:
    """Write an entry, or 0, over the word at an address."""
    memory.keep_words(index.log, address, _ONE)
    cpu.store_u64(address, entry)


@inlined
def _slot_at(line: np.uint64, fits: np.uint64) -> np.uint64:
    """Return the slot of the first entry of a line whose bit is set."""
    return (cpu.load_u64(line + WORD * cpu.lowest_bit(fits)) & _LOW) - _ONE


@compiled
def _fill_gap(index: IndexAt, line: np.uint64, gap: np.uint64) -> None:
    """Fill the gap in a line that was full with an entry that overflowed it."""
    next_ = line + _LINE
    while True:
        was_full = cpu.words_empty(next_) == _ZERO
        at = next_
        while at < next_ + _LINE:
            entry = cpu.load_u64(at)
            if entry != _ZERO and find_home(index, entry >> _S32) <= line:
                break
            at += WORD
        if at < next_ + _LINE:
            _write(index, gap, cpu.load_u64(at))
            _write(index, at, _ZERO)
            line, gap = next_, at
        if not was_full:
            return
        next_ += _LINE


@compiled
def _move_slab(store: StoreAt) -> None:
    """Move the last entries that have not moved.

    All entries of a range that ends at a line that is not full are taken out and added
    again. Those that overflowed into it, or have moved already, return to where they
    were.
    """
    lines, cursor = store.lines, store.cursor
    old = cursor[OLD]
    end = (cursor[BOUNDARY] * old) >> _S32
    start = end - _SLAB if end > _SLAB else _ZERO
    address = np.uint64(lines.ctypes.data)
    while cpu.words_empty(address + _LINE * end) == _ZERO:
        end += _ONE
    end += _ONE
    num_words = np.uint64(_ENTRIES_PER_LINE) * (end - start)
    memory.keep_words(store.log, address + _LINE * start, num_words)
    taken = lines[start:end].copy().reshape(-1)
    lines[start:end] = _ZERO
    # The first hash whose old home is `start` or a later line.
    cursor[BOUNDARY] = ((start << _S32) + old - _ONE) // old
    if start == _ZERO:
        cursor[BOUNDARY] = _ZERO
        cursor[OLD] = cursor[NEW]
    index = index_at(store)
    for entry in taken:
        if entry != _ZERO:
            add_entry(index, entry)
