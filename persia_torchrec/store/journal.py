"""Note which rows change, so that the changes can be written elsewhere.

A copy of a store stays equal to it if it gets, again and again, the rows that have
changed since the last time, whole, and the ids of those that have left: the dirty set,
which :meth:`ChangeJournal.cut` returns. The journal copies no row:

    lookup, write   ids, tick of the request          they were used, perhaps made
    update          ids                               their floats have changed
    eviction, sweep (id, owner), one after the other  they have left

In a memory file the same is also written into a ring of words, before a change is
complete, and stays there until it is released. The next process may find more than has
changed there, never less: a row that is copied without a change does no harm.

    token | previous token | head | tail | lacks | 0 0 0      8 words
    kind (8 bits), table (24), K (32) | tick | K words        a note; others follow
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from persia_torchrec.errors import StoreError
from persia_torchrec.store import memory
from persia_torchrec.store.loops import Indices
from persia_torchrec.store.memory import Ids, StoreMemory, Tally, Words

RING_WORDS = 2**22
"""Words of the ring: 32 MiB, of which only what is used costs memory."""

_FIRST_ROOM = 4096
_NO_INDICES = np.empty(0, dtype=np.int64)
_NO_WORDS = np.empty(0, dtype=np.uint64)
_TOKEN, _PREVIOUS, _HEAD, _TAIL, _LACKS = range(5)
_HEADER_WORDS, _NOTE_WORDS = 8, 2
_USED, _UPDATED, _LEFT, _CLEARED, _SKIPPED = range(1, 6)


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
    number: int = 0
    """Of the cut that returned them; 0 before."""


class _Note(NamedTuple):
    kind: int
    table: int
    tick: int
    words: Words


class Ring:
    """What a journal noted, in memory that outlives the process; see above.

    ``head`` and ``tail`` count words. A note is never cut in two: one that would be is
    preceded by a note of no words, which skips to the first word.
    """

    def __init__(self, words: Words, commit: Callable[[Words, int], int]) -> None:
        self.words, self._commit = words, commit
        commit(words, _HEADER_WORDS)
        self._header = words[:_HEADER_WORDS].data
        self._notes = words[_HEADER_WORDS:]

    @classmethod
    def open(cls, source: StoreMemory, begin: Words, at: int) -> "Ring | None":
        """Return the ring of a memory file; it may have none, a new file gets one."""
        if source.is_new:
            [words] = source.reserve(RING_WORDS)
        elif at:
            words = source.find(memory.address_at(begin, at))[:RING_WORDS]
        else:
            return None
        return cls(words, source.commit)

    def at(self, begin: Words) -> int:
        """Return the bytes from an area to the ring."""
        return memory.distance(begin, self.words)

    @property
    def head(self) -> int:
        """Where the next note begins."""
        return int(self._header[_HEAD])

    @property
    def tokens(self) -> list[int]:
        """What the notes belong to, and what they belonged to before; none if lost."""
        tokens = [int(self._header[at]) for at in (_TOKEN, _PREVIOUS)]
        return [] if self._header[_LACKS] else [token for token in tokens if token]

    def restart(self, token: int, *, keeps: bool) -> None:
        """Give the notes, or with ``keeps`` False no notes, another token."""
        if keeps:
            self._header[_PREVIOUS] = self._header[_TOKEN]
        else:
            for at in (_TOKEN, _PREVIOUS, _HEAD, _TAIL, _LACKS):
                self._header[at] = 0
        self._header[_TOKEN] = token

    def append(self, note: _Note) -> bool:
        """Write a note down, if there is a token; return False if there is no room."""
        if not self._header[_TOKEN]:
            return True
        head, size, num = self.head, len(self._notes), _NOTE_WORDS + len(note.words)
        at = head % size
        skipped = size - at if at + num > size else 0
        end = head + skipped + num
        if end - int(self._header[_TAIL]) > size or not self._has_room(at, num):
            self._header[_LACKS] = 1
            return False
        if skipped:
            self._notes[at] = _SKIPPED << 56
            at = 0
        self._notes[at] = note.kind << 56 | note.table << 32 | len(note.words)
        self._notes[at + 1] = note.tick
        self._notes[at + _NOTE_WORDS : at + num] = note.words
        self._header[_HEAD] = end
        return True

    def notes(self) -> Iterator[_Note]:
        """Yield all notes that were not released, the oldest first."""
        at, size = int(self._header[_TAIL]), len(self._notes)
        while at < self.head:
            word = int(self._notes[at % size])
            kind, table, num = word >> 56, word >> 32 & 0xFFFFFF, word & 0xFFFFFFFF
            if kind == _SKIPPED:
                at += size - at % size
                continue
            begin = at % size + _NOTE_WORDS
            tick = int(self._notes[at % size + 1])
            yield _Note(kind, table, tick, self._notes[begin : begin + num].copy())
            at += _NOTE_WORDS + num

    def release(self, head: int, *, lacks: bool) -> None:
        """Forget the notes before ``head``; tell whether it ``lacks`` later ones."""
        self._header[_TAIL] = head
        self._header[_LACKS] = int(lacks)

    def _has_room(self, at: int, num_words: int) -> bool:
        stop = min(at + num_words + 1, len(self._notes))
        try:
            self._commit(self.words, _HEADER_WORDS + stop)
        except StoreError:  # the file system is full
            return False
        return True


class ChangeJournal:
    """What has changed since the last cut. Owned by the store's thread.

    The store's loops find the list of rows that leave in ``tally``. ``ring`` is None in
    memory that ends with the process.
    """

    def __init__(self, tally: Tally, ring: Ring | None = None) -> None:
        self._tally = tally
        # In a memory file, the list was that of another process.
        tally[memory.LEFT_AT] = tally[memory.LEFT_ROOM] = 0
        self._left: Words = np.empty((0, 2), dtype=np.uint64)
        self._num_kept = 0  # rows that have left, of the list, that the ring has
        self._ring = ring
        self._cuts: deque[tuple[int, int]] = deque()  # and the ring's head then
        self._num_cuts = 0
        self._lacking = 0  # the last cut of which the ring lacks something
        self.changes = Changes()
        self.is_on = False

    def begin(self, token: int = 0, changes: Changes | None = None) -> None:
        """Start noting what changes, behind changes of the previous process.

        ``token``, of at most 63 bits, names what is noted to the next process.
        """
        self.end(keeps=True)
        if self._ring is not None:
            self._ring.restart(token, keeps=changes is not None)
        self.changes = changes or self.changes
        self._list_next(_FIRST_ROOM)
        self.is_on = True

    def end(self, *, keeps: bool = False) -> None:
        """Stop noting, and forget what was noted; the ring ``keeps`` it or not."""
        self.is_on = False
        self._list_next(0)
        self.changes = Changes()
        self._cuts.clear()
        if self._ring is not None and not keeps:
            self._ring.restart(0, keeps=False)

    def previous(self) -> tuple[list[int], Changes]:
        """Return the tokens of what the previous process noted, and its changes."""
        changes = Changes()
        for kind, table, tick, words in (
            () if self._ring is None else self._ring.notes()
        ):
            if kind == _USED:
                rows = UsedRows(table, tick, words, _NO_INDICES, _NO_INDICES)
                changes.used.append(rows)
            elif kind == _UPDATED:
                changes.updated.append((table, words))
                changes.num_requests += 1
            elif kind == _LEFT:
                changes.left.append(words.reshape(-1, 2))
            else:
                changes = Changes(was_cleared=True)
            changes.num_ids += len(words)
        return ([] if self._ring is None else self._ring.tokens), changes

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
            if self._ring is not None:
                self._keep(_Note(_USED, rows.table, rows.tick, rows.in_order()))

    def updated(self, table: int, ids_N: Ids) -> None:
        """Note an update."""
        self.changes.num_requests += 1
        self._keep(_Note(_UPDATED, table, 0, ids_N))
        if len(ids_N):
            self.changes.updated.append((table, ids_N))
            self.changes.num_ids += len(ids_N)

    def cleared(self) -> None:
        """Note that all rows were dropped; also for what a killed process noted."""
        if self.is_on:
            self.cut()
            self.changes.was_cleared = True
        self._keep(_Note(_CLEARED, 0, 0, _NO_WORDS))

    def keep_left(self) -> None:
        """Write down which rows have left, before their change is complete."""
        if not self.is_on:
            return
        num = len(self._left) - int(self._tally[memory.LEFT_ROOM])
        if num > self._num_kept:
            words = self._left[self._num_kept : num].reshape(-1)
            self._keep(_Note(_LEFT, 0, 0, words))
            self._num_kept = num

    def cut(self) -> Changes:
        """Return what was noted since the last cut."""
        self._list_next(_FIRST_ROOM)
        changes, self.changes = self.changes, Changes()
        if self._ring is not None:
            self._num_cuts += 1
            changes.number = self._num_cuts
            self._cuts.append((self._num_cuts, self._ring.head))
        return changes

    def release(self, number: int) -> None:
        """Forget what the cuts up to a number returned: it is written elsewhere."""
        while self._ring is not None and self._cuts and self._cuts[0][0] <= number:
            _, head = self._cuts.popleft()
            self._ring.release(head, lacks=number < self._lacking)

    def _keep(self, note: _Note) -> None:
        if self._ring is not None and not self._ring.append(note):
            self._lacking = self._num_cuts + 1

    def _list_next(self, room: int) -> None:
        """Note the rows that have left; begin a list with room for others."""
        self.keep_left()
        num = len(self._left) - int(self._tally[memory.LEFT_ROOM])
        if num:
            self.changes.left.append(self._left[:num].copy())
            self.changes.num_ids += num
        self._left = np.empty((room, 2), dtype=np.uint64)
        self._num_kept = 0
        self._tally[memory.LEFT_AT] = self._left.ctypes.data
        self._tally[memory.LEFT_ROOM] = room
