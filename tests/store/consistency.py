"""Check that the parts of a store agree: every row, entry and record, one by one."""

import numpy as np

from persia_torchrec.store.lookup import find_slots
from persia_torchrec.store.rows import ARENA, FREE, OWNER_SHIFT, TICK_MASK, USED


def check_store(store):
    """Raise AssertionError if index, rows and recency do not agree."""
    memory = store.memory
    assert memory.num_rows <= store.capacity_rows
    memory.index.check()
    num_found = 0
    for number, table in enumerate(memory.states):
        arena = int(table.layout[ARENA])
        words = memory.arenas[arena].words[: int(memory.directory[arena, USED]), :2]
        slots = np.flatnonzero(words[:, 1] >> OWNER_SHIFT == np.uint64(number + 1))
        assert (words[slots, 1] & TICK_MASK > 0).all()
        ids = np.ascontiguousarray(words[slots, 0])
        assert np.array_equal(find_slots(table.layout, ids), slots)
        num_found += len(slots)
    assert num_found == memory.num_rows
    check_free_slots(memory)
    next_to_leave = memory.logs.current_rows(memory.directory)
    assert len(next_to_leave) == len(set(next_to_leave)) == memory.num_rows
    for arena, slot in next_to_leave:
        assert memory.arenas[arena].words[slot, 1] != 0


def check_free_slots(memory):
    """Every slot ever used holds a row or is on the free list, once."""
    num_used = num_free = 0
    for arena, line in zip(memory.arenas, memory.directory, strict=True):
        free = set()
        head = int(line[FREE])
        while head:
            slot = head - 1
            assert slot not in free
            assert arena.words[slot, 1] == 0
            free.add(slot)
            head = int(arena.words[slot, 0])
        num_used += int(line[USED])
        num_free += len(free)
    assert num_used == memory.num_rows + num_free
