"""Everything that a store keeps: tables with their rows, index, recency, counts."""

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import read_only
from persia_torchrec.store.consistency import check_store
from persia_torchrec.store.index import Index
from persia_torchrec.store.insert import remove_ids
from persia_torchrec.store.lookup import (
    EVICTED,
    EXPIRED_SECONDS,
    EXPIRED_STEPS,
    FADED,
    HITS,
    INSERTED,
    MISSES,
    REJECTED,
    ROWS,
    Ids,
    Slots,
)
from persia_torchrec.store.recency import NUM_LFU_CLASSES, RecencyLogs
from persia_torchrec.store.rows import ARENA, OWNER_SHIFT, USED, Floats, Words
from persia_torchrec.store.scan import ScannedRows, ids_at, scan_slots
from persia_torchrec.store.table_state import TableState
from persia_torchrec.store.tables import Tables
from persia_torchrec.store.update import read_floats

TableRows = tuple[Floats, Words, Words, Words]

_TALLY = {
    "hits": HITS,
    "misses": MISSES,
    "inserted": INSERTED,
    "rejected": REJECTED,
    "evictions": EVICTED,
    "expired_steps": EXPIRED_STEPS,
    "expired_seconds": EXPIRED_SECONDS,
    "expired_norm": FADED,
}
_NUM_PLACES = len(_TALLY) + 4  # rows, tick, list of what leaves


class ShardMemory:
    """The memory of one shard. Owned by the store's thread.

    Args:
        capacity_rows: rows of all tables together.
        tables: of the store.
        is_lfu: whether frequency, and not recency alone, says which row leaves.

    Attributes:
        tables: with the arenas of their rows.
        index: of all tables.
        logs: of their use.
        tally: int64, see ``lookup.HITS`` and the others.

    Raises:
        StoreError: the operating system refuses the address space.
    """

    def __init__(self, capacity_rows: int, tables: Tables, *, is_lfu: bool) -> None:
        self.tables = tables
        self.index = Index(capacity_rows)
        self.logs = RecencyLogs(capacity_rows, NUM_LFU_CLASSES if is_lfu else 1)
        self.tally: npt.NDArray[np.int64] = np.zeros(_NUM_PLACES, dtype=np.int64)

    def rows(self, state: TableState) -> TableRows:
        """Return what the loops take: the table's arena, the index, all arenas."""
        floats = self.tables.arenas[state.layout[ARENA]].floats
        return floats, self.index.lines, self.index.cursor, self.tables.directory

    def floats_at(self, state: TableState, slots_N: Slots) -> Floats:
        """Return weights and optimizer state of rows; ``MISSING`` reads zeros."""
        width = state.spec.dim + state.spec.num_state_floats
        out = np.empty((len(slots_N), width), dtype=np.float32)
        read_floats(slots_N, out, self.rows(state)[0], state.layout)
        return out

    def scan(self, state: TableState, start: int, max_rows: int) -> ScannedRows:
        """Return the next rows of a table, from slot ``start`` on."""
        found = scan_slots(start, max_rows, self.tables.directory, state.layout)
        words = self.tables.arenas[state.layout[ARENA]].words
        rows = self.floats_at(state, found.slots)
        return ScannedRows(ids_at(found.slots, words), rows, found.next_slot)

    def remove(self, state: TableState, ids_N: Ids) -> None:
        """Take the rows of ids out; those that have none do not matter."""
        remove_ids(read_only(ids_N), *self.rows(state), self.tally, state.layout)

    def clear(self) -> None:
        """Drop all rows; what has been counted stays counted."""
        self.tables.clear()
        self.index.clear()
        self.logs.clear()
        self.tally[ROWS] = 0

    @property
    def num_rows(self) -> int:
        """Rows in use, of all tables."""
        return int(self.tally[ROWS])

    @property
    def size_bytes(self) -> int:
        """Bytes of rows, index and recency logs that have been written to."""
        strides = [arena.words_a_row * 8 for arena in self.tables.arenas]
        rows = self.tables.directory[:, USED] * np.array(strides, dtype=np.uint64)
        return int(rows.sum()) + self.index.size_bytes + self.logs.size_bytes

    def counters(self) -> dict[str, int]:
        """Return the tally under its names."""
        return {name: int(self.tally[place]) for name, place in _TALLY.items()}

    def check(self) -> None:
        """Raise AssertionError if index, rows and recency do not agree."""
        check_store(
            *(self.tables.arenas, self.tables.directory, self.index, self.logs),
            *(self.tables.states, self.num_rows),
        )

    def ids_oldest_first(self) -> list[tuple[int, int]]:
        """Return ``(table, id)`` of every row, the next to leave first."""
        rows = []
        for arena, slot in self.logs.current_rows(self.tables.directory):
            id_, meta = self.tables.arenas[arena].words[slot, :2]
            rows.append((int(meta >> OWNER_SHIFT) - 1, int(id_)))
        return rows
