"""Note which rows change, so that the changes can be written elsewhere.

A copy of a store stays equal to it if it gets, again and again, the rows that have
changed since the last time, whole, and the ids of those that have left: the dirty set,
which :meth:`ChangeJournal.cut` returns. The journal copies no row:

    lookup, write   ids, tick of the request          they were used, perhaps made
    update          ids                               their floats have changed
    eviction, sweep (id, owner), one after the other  they have left
"""

from dataclasses import dataclass, field

import numpy as np

from persia_torchrec.store import memory
from persia_torchrec.store.loops import Indices
from persia_torchrec.store.memory import Ids, Tally, Words

_FIRST_ROOM = 4096


@dataclass(frozen=True, slots=True)
class UsedRows:
    """A training lookup: it used the rows that were there, then it made others.

    ``missing`` are the positions in ``ids`` without a row, ``made`` those that got one.
    """

    table: int
    tick: int
    ids: Ids
    missing: Indices
    made: Indices

    def in_order(self) -> Ids:
        """Return the ids of rows in the order of use, where repeats count once."""
        if len(self.missing) == 0:
            return self.ids
        were_there = np.delete(self.ids, self.missing)
        return np.concatenate([were_there, self.ids[self.made]])


@dataclass(slots=True)
class Changes:
    """What has changed in some interval: the dirty set."""

    used: list[UsedRows] = field(default_factory=list)
    """Training lookups and writes, in their order."""
    updated: list[tuple[int, Ids]] = field(default_factory=list)
    """Table and ids of updates."""
    left: list[Words] = field(default_factory=list)
    """uint64 ``(K, 2)`` each: id, and number of the table plus one."""
    was_cleared: bool = False
    """Before all that, every row was dropped."""
    num_ids: int = 0
    """That are named above, repeats included."""
    num_requests: int = 0
    """That had an update, with ids or without."""


class ChangeJournal:
    """What has changed since the last cut. Owned by the store's thread.

    The store's loops find the list of rows that leave in ``tally``.
    """

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        # In a memory file, the list was that of another process.
        tally[memory.LEFT_AT] = tally[memory.LEFT_ROOM] = 0
        self._left: Words = np.empty((0, 2), dtype=np.uint64)
        self.changes = Changes()
        self.is_on = False

    def begin(self) -> None:
        """Start noting what changes."""
        self.end()
        self._list_next(_FIRST_ROOM)
        self.is_on = True

    def end(self) -> None:
        """Stop noting, and forget what was noted."""
        self.is_on = False
        self._list_next(0)
        self.changes = Changes()

    @property
    def is_empty(self) -> bool:
        """Whether nothing has happened since the last cut."""
        has_left = self._tally[memory.LEFT_ROOM] < len(self._left)
        return self.changes == Changes() and not has_left

    def make_room(self, num_rows: int) -> None:
        """Make room so that this many rows can leave before the next call."""
        if self.is_on and self._tally[memory.LEFT_ROOM] < num_rows:
            self._list_next(max(num_rows, 2 * len(self._left)))

    def used(self, rows: UsedRows) -> None:
        """Note a training lookup, or a write."""
        if len(rows.ids):
            self.changes.used.append(rows)
            self.changes.num_ids += len(rows.ids)

    def updated(self, table: int, ids_N: Ids) -> None:
        """Note an update."""
        self.changes.num_requests += 1
        if len(ids_N):
            self.changes.updated.append((table, ids_N))
            self.changes.num_ids += len(ids_N)

    def cleared(self) -> None:
        """Note that all rows were dropped."""
        self.cut()
        self.changes.was_cleared = True

    def cut(self) -> Changes:
        """Return what was noted since the last cut."""
        self._list_next(_FIRST_ROOM)
        changes, self.changes = self.changes, Changes()
        return changes

    def _list_next(self, room: int) -> None:
        """Note the rows that have left; begin a list with room for others."""
        num = len(self._left) - int(self._tally[memory.LEFT_ROOM])
        if num:
            self.changes.left.append(self._left[:num].copy())
            self.changes.num_ids += num
        self._left = np.empty((room, 2), dtype=np.uint64)
        self._tally[memory.LEFT_AT] = self._left.ctypes.data
        self._tally[memory.LEFT_ROOM] = room
