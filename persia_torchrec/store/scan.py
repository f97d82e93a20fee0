"""Walk the rows of one table, a slice of slots at a time.

A row keeps its slot as long as it lives, so that a walk over the slots of the table's
arena meets each row once, whatever is looked up, updated or evicted between two slices:

    slots   | 0 | 1 | 2 | 3 | 4 | 5 | ...        those ever used
            `-- slice --'-- slice --'
                        ^ next_slot: where the next slice begins

What a walk promises: a row that lives from its first slice to its last is met exactly
once, as it is when its slice is read. A row that is made or taken out meanwhile may be
met or not; one that is evicted and comes back may be met twice.

The slots say where the rows are; what is there is for others to read: ids by
:func:`ids_at`, weights and optimizer state by ``update.read_floats``, metadata by
``metadata.read_metadata``. They hold until the store is asked for anything else.

Dimension key:
    N: rows of one slice
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import compiled
from persia_torchrec.store.lookup import Ids, Slots
from persia_torchrec.store.memory import load_word
from persia_torchrec.store.rows import (
    ARENA,
    OWNER_SHIFT,
    USED,
    WORD,
    Floats,
    Layout,
    Words,
    rows_at,
)

MAX_SLOTS = 1 << 20
"""Slots that one slice walks over: a few milliseconds where no row is of the table."""


@dataclass(frozen=True, slots=True)
class TableSlice:
    """Where the rows of a table are, within some slots.

    Attributes:
        slots: uint32 ``(N,)``, ascending.
        next_slot: where the next slice begins; None at the end of the table.
    """

    slots: Slots
    next_slot: int | None


@dataclass(frozen=True, slots=True)
class ScannedRows:
    """Some rows of a table.

    Attributes:
        ids: uint64 ``(N,)``, each once.
        rows: float32 ``(N, D + S)``, weights and optimizer state.
        next_slot: where to go on; None at the end of the table.
    """

    ids: Ids
    rows: Floats
    next_slot: int | None


def scan_slots(
    start: int, max_rows: int, arenas: Words, layout: Layout, max_slots: int = MAX_SLOTS
) -> TableSlice:
    """Find the next rows of a table.

    Args:
        start: slot to begin at: 0, then ``next_slot`` of the slice before.
        max_rows: rows to find at most, ``>= 1``.
        arenas: the directory of arenas.
        layout: of the table's rows.
        max_slots: slots to walk over at most, ``>= 1``. A slice may come back short,
            or empty, before the table's end.
    """
    num_used = int(arenas[layout[ARENA], USED])
    stop = min(start + max_slots, num_used)
    slots_N = np.empty(min(max_rows, max(stop - start, 0)), dtype=np.uint32)
    num, next_slot = find_rows(start, stop, slots_N, arenas, layout)
    return TableSlice(slots_N[:num], next_slot if next_slot < num_used else None)


@compiled
def find_rows(
    start: int, stop: int, slots_N: Slots, arenas: Words, layout: Layout
) -> tuple[int, int]:
    """Find the rows of one table among some slots.

    Args:
        start: first slot.
        stop: bound behind the last slot, at most the slots ever used.
        slots_N: uint32 ``(N,)``, overwritten from the front; the search ends when it
            is full.
        arenas: the directory of arenas.
        layout: of the table's rows.

    Returns:
        How many rows were found, and the slot at which the search ended.
    """
    rows = rows_at(arenas, layout)
    num = 0
    slot = np.uint64(start)
    while slot < np.uint64(stop) and num < len(slots_N):
        word = load_word(rows.base + slot * rows.stride + WORD)
        if word >> OWNER_SHIFT == rows.owner:
            slots_N[num] = np.uint32(slot)
            num += 1
        slot += np.uint64(1)
    return num, int(slot)


def ids_at(slots_N: Slots, words: npt.NDArray[np.uint64]) -> Ids:
    """Return the ids of rows; uint64 ``(N,)``.

    Args:
        slots_N: uint32 ``(N,)``, where the rows are.
        words: of the arena of these rows.
    """
    return np.ascontiguousarray(words[slots_N, 0])
