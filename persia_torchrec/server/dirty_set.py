"""The dirty set: changed rows, evicted ids and waiting ids of an increment.

Dimension key:
    N: slots as a request changed them
    L: ids that have left
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Ids, Slots, Words
from persia_torchrec.checkpoint.row_file import Block
from persia_torchrec.embedding.setting import Sightings
from persia_torchrec.jit.compiled import compiled
from persia_torchrec.store.change_log import ChangedSlots, Changes
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.memory import LARGEST_TICK, MISSING, POSITION_BITS
from persia_torchrec.store.row_copy import gather_rows

Uses = npt.NDArray[np.uint64]
Copy = Callable[[EmbeddingStore], Block]

_LAST_POSITION = np.uint64(2**POSITION_BITS - 1)
_POSITION_BITS = np.uint64(POSITION_BITS)
_ONE, _63 = np.uint64(1), np.uint64(63)


class DirtySet:
    """What has changed since the previous increment: slots, and ids that have left.

    ``len`` counts each slot once. Of all notes of a slot the last one counts: they are
    read from the end, and a bit says that a slot is still to come.
    """

    def __init__(self, capacity_rows: int) -> None:
        self._num_words = capacity_rows // 64 + 1
        self._notes: list[ChangedSlots] = []
        self._marks: dict[int, Words] = {}  # by number of the arena
        self.num_noted = self._num_marked = 0
        self.left: list[tuple[int, Ids]] = []
        """Table and ids of rows that have left; some may be back."""
        self.seen: list[tuple[int, Ids]] = []  # table, and ids that were counted
        self.was_cleared = False
        self.dropped: list[str] = []

    def __len__(self) -> int:
        return self._num_marked + sum(len(ids) for _, ids in self.left + self.seen)

    def add(self, changes: Changes) -> None:
        """Add what a journal noted next."""
        if changes.was_cleared:
            self._notes, self._marks, self.left, self.seen = [], {}, [], []
            self.num_noted = self._num_marked = 0
            self.was_cleared = True
        self.dropped += changes.dropped
        for note in changes.slots:
            if note.arena not in self._marks:
                self._marks[note.arena] = np.zeros(self._num_words, dtype=np.uint64)
            self._num_marked += _mark(self._marks[note.arena], note.slots)
        self._notes += changes.slots
        self.seen += changes.seen
        self.num_noted += changes.num_rows
        for left in changes.left:
            owners, ids_L = left[:, 1], left[:, 0]
            for owner in np.unique(owners).tolist():
                self.left.append((owner - 1, ids_L[owners == owner]))

    def take(self, rows_a_slice: Mapping[int, int]) -> Iterator[tuple[int, Copy]]:
        """Yield, for each slice of all that has changed, its table and what copies it.

        The number of rows is by table; other tables were dropped. The uses of rows are
        those of ``RowColumns``; 0 where a row has not been used.
        """
        pieces: dict[int, list[tuple[Slots, Uses]]] = {}
        # The last use first; updates, which are no use, at the end.
        for note in sorted(self._notes, key=lambda note: -note.tick):
            tick = np.uint64(min(note.tick, LARGEST_TICK))
            piece = _unmark(self._marks[note.arena], note.slots, tick)
            pieces.setdefault(note.table, []).append(piece)
        for table in pieces.keys() & rows_a_slice.keys():
            of_table = pieces[table]
            slots, uses = map(np.concatenate, zip(*of_table, strict=True))
            for part in _parts(len(slots), rows_a_slice[table]):
                copy = partial(gather_rows, table=table, slots_N=slots[part])
                yield table, partial(copy, uses_N=uses[part])
        for table, ids in self.left:
            if table not in rows_a_slice:
                continue
            for part in _parts(len(ids), rows_a_slice[table]):
                yield table, partial(_find_gone, table=table, ids_L=ids[part])
        for table in {table for table, _ in self.seen} & rows_a_slice.keys():
            seen = np.unique(
                np.concatenate([ids for t, ids in self.seen if t == table])
            )
            for part in _parts(len(seen), rows_a_slice[table]):
                yield table, partial(_find_sightings, table=table, ids_N=seen[part])


def _parts(num: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, num, size))


def _find_gone(store: EmbeddingStore, table: int, ids_L: Ids) -> Ids:
    """Return those ids that have no row."""
    gone: Ids = ids_L[store.find(table, ids_L) == MISSING]
    return gone


def _find_sightings(store: EmbeddingStore, table: int, ids_N: Ids) -> Sightings:
    """Return what the admission remembers of different ids."""
    state = store.states[table]
    return state.spec.admission.sightings_of(state.remembered, ids_N)


@compiled
def _mark(marks: Words, slots_N: Slots) -> int:
    """Set the bits of slots; return how many were not set."""
    num = 0
    for n in range(len(slots_N)):
        word, bit = slots_N[n] >> 6, _ONE << (np.uint64(slots_N[n]) & _63)
        num += marks[word] & bit == 0
        marks[word] |= bit
    return num


@compiled
def _unmark(marks: Words, slots_N: Slots, tick: np.uint64) -> tuple[Slots, Uses]:
    """Return the slots whose bits are set, and their uses; the bits are set no more."""
    slots = np.empty(len(slots_N), dtype=np.uint32)
    uses = np.zeros(len(slots_N), dtype=np.uint64)
    num = 0
    for n in range(len(slots_N)):
        word, bit = slots_N[n] >> 6, _ONE << (np.uint64(slots_N[n]) & _63)
        if marks[word] & bit:
            marks[word] ^= bit
            slots[num] = slots_N[n]
            if tick:
                uses[num] = (tick << _POSITION_BITS) | min(np.uint64(n), _LAST_POSITION)
            num += 1
    return slots[:num].copy(), uses[:num].copy()
