"""Check that the parts of a store agree: every row, entry and record, one by one."""

import numpy as np

from persia_torchrec.jit.kernel import LOST
from persia_torchrec.store.index import BOUNDARY, ENTRIES, NEW, OLD, OVERFLOW_LINES
from persia_torchrec.store.loops import find_slots
from persia_torchrec.store.memory import (
    ARENA,
    FREE,
    OWNER_SHIFT,
    PINNED_ROWS,
    RECOVERY,
    TICK_MASK,
    USED,
    distance,
)
from persia_torchrec.store.recency import LOG, NONE, pop_oldest
from persia_torchrec.store.table_blocks import TableOfBlocks


def check_store(store):
    """Raise AssertionError if index, rows and recency do not agree."""
    assert store.num_rows <= store.rows.capacity_rows
    if store.rows.undo_log is not None:
        assert not store.rows.memory.area(RECOVERY)[int(LOST) // 8]
    check_index(store.rows.index)
    blocks = [state for state in store.present if isinstance(state, TableOfBlocks)]
    assert not any(state.must_free for state in blocks)
    assert not store.must_free_blocks
    num_found = num_pinned = 0
    for number, table in enumerate(store.states):
        arena = int(table.layout[ARENA])
        num_used = int(store.rows.arenas.directory[arena, USED])
        words = store.rows.arenas.words[arena][:num_used, :2]
        slots = np.flatnonzero(words[:, 1] >> OWNER_SHIFT == np.uint64(number + 1))
        assert (words[slots, 1] & TICK_MASK > 0).all()
        ids = np.ascontiguousarray(words[slots, 0])
        assert np.array_equal(find_slots(table.layout, ids), slots)
        num_found += len(slots)
        num_pinned += len(slots) if table.is_pinned else 0
    assert num_found == store.num_rows
    assert num_pinned == store.rows.tally[PINNED_ROWS]
    check_free_slots(store)
    next_to_leave = rows_oldest_first(store.rows.logs, store.rows.arenas.directory)
    num_leaving = store.num_rows - num_pinned
    assert len(next_to_leave) == len(set(next_to_leave)) == num_leaving
    for arena, slot in next_to_leave:
        assert store.rows.arenas.words[arena][slot, 1] != 0


def check_free_slots(store):
    """Every slot ever used holds a row or is on the free list, once."""
    num_used = num_free = 0
    arenas = store.rows.arenas
    for arena, line in zip(arenas.words, arenas.directory, strict=True):
        free = set()
        head = int(line[FREE])
        while head:
            slot = head - 1
            assert slot not in free
            assert arena[slot, 1] == 0
            free.add(slot)
            head = int(arena[slot, 0])
        num_used += int(line[USED])
        num_free += len(free)
    assert num_used == store.num_rows + num_free


def check_index(index):
    """Raise AssertionError if an entry could not be found from its home."""
    lines = index.lines[: int(index.cursor[NEW]) + OVERFLOW_LINES]
    at, column = np.nonzero(lines)
    assert len(at) == int(index.cursor[ENTRIES])
    hashes = lines[at, column] >> np.uint64(32)
    moved = hashes >= index.cursor[BOUNDARY]
    num_lines = np.where(moved, index.cursor[NEW], index.cursor[OLD])
    homes = ((hashes * num_lines) >> np.uint64(32)).astype(np.int64)
    num_full_before = np.concatenate([[0], np.cumsum((lines != 0).all(axis=1))])
    assert (homes <= at).all()
    full_between = num_full_before[at] - num_full_before[homes]
    assert (full_between == at - homes).all()


def rows_oldest_first(logs, arenas):
    """Return ``(arena, slot)`` of every row in use, the next to leave first."""
    directory = logs.directory.copy()
    directory[:, LOG] += np.uint64(distance(directory, logs.directory))
    rows = []
    while (row := pop_oldest(directory, arenas)) != NONE:
        rows.append((int(row) >> 32, int(row) % 2**32))
    return rows


def ids_oldest_first(store):
    """Return ``(table, id)`` of every row, the next to leave first."""
    rows = []
    for arena, slot in rows_oldest_first(store.rows.logs, store.rows.arenas.directory):
        id_, meta = store.rows.arenas.words[arena][slot, :2]
        rows.append((int(meta >> OWNER_SHIFT) - 1, int(id_)))
    return rows
