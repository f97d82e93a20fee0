"""Which rows of a server have changed: each id once, however often it was named.

A journal (``store/journal.py``) names ids as the requests did. Here they are put
together, by any thread: which ids have to be looked at, when each was last used, and
which have left at some moment.

Dimension key:
    U: ids of one table, each once
    L: ids as they were named
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import read_only
from persia_torchrec.routing.dedup import unique_ids
from persia_torchrec.routing.hashing import Ids
from persia_torchrec.store.journal import Changes
from persia_torchrec.store.row_columns import PLACE_BITS

Uses = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

_LAST_PLACE = np.uint64(2**PLACE_BITS - 1)


@dataclass(frozen=True, slots=True)
class ChangedIds:
    """What has changed in one table.

    Attributes:
        ids: uint64 ``(U,)``, each once; read-only.
        latest: uint64 ``(U,)``, when each was last used, so that the largest of
            several counts: the tick of the request, and in the lowest 24 bits how far
            before the last place it stood. 0 where it was not used.
        have_left: bool ``(U,)``, whether its row has left at some moment; it may be
            there again.
    """

    ids: Ids
    latest: Uses
    have_left: Bools

    @property
    def uses(self) -> Uses:
        """When each was last used, as in ``RowColumns``; 0 where it was not."""
        return np.where(self.latest == 0, self.latest, self.latest ^ _LAST_PLACE)

    def __len__(self) -> int:
        return len(self.ids)

    def parts(self, num_ids: int) -> Iterator["ChangedIds"]:
        """Yield all of it, so many ids at a time."""
        for start in range(0, len(self), num_ids):
            part = slice(start, start + num_ids)
            yield ChangedIds(self.ids[part], self.latest[part], self.have_left[part])


_NOTHING = ChangedIds(
    read_only(np.empty(0, np.uint64)), np.empty(0, np.uint64), np.empty(0, np.bool_)
)


class PendingChanges:
    """Changes that wait to be written. Owned by one thread.

    Attributes:
        tables: by number of the table.
        was_cleared: all rows were dropped before.
        num_ids: ids in it.
    """

    def __init__(self) -> None:
        self.tables: dict[int, ChangedIds] = {}
        self.was_cleared = False

    @property
    def num_ids(self) -> int:
        """Ids of all tables."""
        return sum(map(len, self.tables.values()))

    def add(self, changes: Changes) -> None:
        """Add what happened next."""
        if changes.was_cleared:
            self.tables, self.was_cleared = {}, True
        pieces: dict[int, _Pieces] = {}
        for used in changes.used:
            ids_L = used.in_order()
            places = np.minimum(np.arange(len(ids_L), dtype=np.uint64), _LAST_PLACE)
            latest = np.uint64(used.tick << PLACE_BITS) | (_LAST_PLACE - places)
            pieces.setdefault(used.table, _Pieces()).add(ids_L, latest)
        for table, ids_L in changes.updated:
            pieces.setdefault(table, _Pieces()).add(ids_L)
        for left in changes.left:
            for owner in np.unique(left[:, 1]).tolist():
                ids_L = left[left[:, 1] == owner, 0]
                pieces.setdefault(owner - 1, _Pieces()).add(ids_L, have_left=True)
        for table, of_table in pieces.items():
            before = self.tables.get(table, _NOTHING)
            self.tables[table] = of_table.together(before)


class _Pieces:
    """Ids of one table, as they were named."""

    def __init__(self) -> None:
        self._ids: list[Ids] = []
        self._latest: list[Uses] = []
        self._have_left: list[Bools] = []

    def add(
        self, ids_L: Ids, latest: Uses | None = None, *, have_left: bool = False
    ) -> None:
        unused = np.zeros(len(ids_L), np.uint64)
        self._ids.append(ids_L)
        self._latest.append(unused if latest is None else latest)
        self._have_left.append(np.full(len(ids_L), have_left))

    def together(self, before: ChangedIds) -> ChangedIds:
        """Return all ids, each once with its latest use."""
        unique = unique_ids(np.concatenate([before.ids, *self._ids]))
        latest_U = np.zeros(len(unique.ids), dtype=np.uint64)
        latest_L = np.concatenate([before.latest, *self._latest])
        np.maximum.at(latest_U, unique.inverse, latest_L)
        have_left_U = np.zeros(len(unique.ids), dtype=np.bool_)
        have_left_L = np.concatenate([before.have_left, *self._have_left])
        have_left_U[unique.inverse[have_left_L]] = True
        return ChangedIds(read_only(unique.ids), latest_U, have_left_U)
