"""Records of the slots of a cache, and the index that finds the slot of a row.

    record   id
             no row | dirty | uses | pins | table | hits      bits 1, 1, 2, 12, 16, 32
    entry    hash (32 bits) | slot + 1 (32 bits)               0: empty
    home     line (hash * number of lines) >> 32; then the next ones, round

A line is eight entries, a cache line, and is compared as a whole. ``LOAD`` of the
entries are in use at most. A removal closes the gap that it leaves.
"""

from typing import Any, NamedTuple

import numpy as np

from persia_torchrec.arrays import Words
from persia_torchrec.jit import intrinsics as cpu
from persia_torchrec.jit.compiled import compiled, inlined

LOAD = 0.55
NONE = np.uint64(2**64 - 1)
"""No slot; as int32 -1."""
LOW, TABLE = np.uint64(2**32 - 1), np.uint64(2**16 - 1)
PIN, PINS = np.uint64(2**48), np.uint64(2**60 - 2**48)
USE, USES = np.uint64(2**60), np.uint64(3 * 2**60)
IS_DIRTY, NO_ROW = np.uint64(2**62), np.uint64(2**63)

_MUL_A, _MUL_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_0, _1, _2, _8, _29, _32, _64 = map(np.uint64, (0, 1, 2, 8, 29, 32, 64))


class SlotIndex(NamedTuple):
    """Words of the records, two a slot; address of the lines, and their number."""

    words: Words
    lines: Any
    num_lines: Any


@inlined
def table_of(word: Any) -> Any:
    """Return the number of the table of a record's row."""
    return (word >> _32) & TABLE


@inlined
def hash_row(id_: Any, table: Any) -> Any:
    """Return a 32-bit hash of a row, as uint64."""
    x = id_ ^ (table * _GOLDEN)
    x = (x ^ (x >> _32)) * _MUL_A
    x = (x ^ (x >> _29)) * _MUL_B
    return x >> _32


@inlined
def find_home(index: SlotIndex, hash_: Any) -> Any:
    """Return the address of the line where the search for a hash begins."""
    return index.lines + _64 * ((hash_ * index.num_lines) >> _32)


@inlined
def is_row(index: SlotIndex, slot: Any, id_: Any, table: Any) -> Any:
    """Return whether a slot that is in the index has this row."""
    own = index.words[_2 * slot]
    return own == id_ and table_of(index.words[_2 * slot + _1]) == table


@inlined
def find_slot(index: SlotIndex, id_: Any, table: Any, hash_: Any) -> Any:
    """Return the slot of a row, or ``NONE``."""
    line = find_home(index, hash_)
    while True:
        empty = cpu.words_empty(line)
        fits = cpu.upper_halves_equal(line, hash_) & ~empty
        while fits != _0:
            slot = _slot_at(line, fits)
            if is_row(index, slot, id_, table):
                return slot
            fits &= fits - _1
        if empty != _0:
            return NONE
        line = _next(index, line)


@inlined
def likely_slot(index: SlotIndex, hash_: Any) -> Any:
    """Return the slot of the first entry whose hash fits; ``NONE``: no row has it."""
    line = find_home(index, hash_)
    while True:
        empty = cpu.words_empty(line)
        fits = cpu.upper_halves_equal(line, hash_) & ~empty
        if fits != _0:
            return _slot_at(line, fits)
        if empty != _0:
            return NONE
        line = _next(index, line)


@inlined
def add_entry(index: SlotIndex, slot: Any, hash_: Any) -> None:
    """Add an entry for a slot."""
    line = find_home(index, hash_)
    empty = cpu.words_empty(line)
    while empty == _0:
        line = _next(index, line)
        empty = cpu.words_empty(line)
    cpu.store_u64(line + _8 * cpu.lowest_bit(empty), (hash_ << _32) | (slot + _1))


@inlined
def remove_entry(index: SlotIndex, slot: Any, hash_: Any) -> None:
    """Take out the entry of a slot; if its line was full, others may overflow it."""
    line = find_home(index, hash_)
    fits = cpu.upper_halves_equal(line, hash_)
    while fits == _0 or _slot_at(line, fits) != slot:
        if fits == _0:
            line = _next(index, line)
            fits = cpu.upper_halves_equal(line, hash_)
        else:
            fits &= fits - _1
    was_full = cpu.words_empty(line) == _0
    gap = line + _8 * cpu.lowest_bit(fits)
    cpu.store_u64(gap, _0)
    if was_full:
        _fill_gap(index, line, gap)


@compiled
def _fill_gap(index: SlotIndex, line: Any, gap: Any) -> None:
    """Fill the gap in a line that was full with an entry that overflowed it."""
    next_, was_full = line, True
    while was_full:
        next_ = _next(index, next_)
        was_full = cpu.words_empty(next_) == _0
        for k in range(8):
            at = next_ + _8 * np.uint64(k)
            entry = cpu.load_u64(at)
            home = find_home(index, entry >> _32)
            steps = _distance(index, home, next_)
            if entry != _0 and steps >= _distance(index, line, next_):
                cpu.store_u64(gap, entry)
                cpu.store_u64(at, _0)
                line, gap = next_, at
                break


@inlined
def _distance(index: SlotIndex, line: Any, to: Any) -> Any:
    """Return how far a line is after another, in bytes, going round."""
    return to - line if to >= line else to - line + _64 * index.num_lines


@inlined
def _next(index: SlotIndex, line: Any) -> Any:
    line += _64
    return line if line != index.lines + _64 * index.num_lines else index.lines


@inlined
def _slot_at(line: Any, fits: Any) -> Any:
    """Return the slot of the first entry of a line whose bit is set."""
    return (cpu.load_u64(line + _8 * cpu.lowest_bit(fits)) & LOW) - _1
