"""The change log: which rows changed since the previous increment.

A copy of a store stays equal to it if it gets, again and again, the rows that have
changed since the last time, whole, and the ids of those that have left: the dirty set,
which :meth:`ChangeJournal.cut` returns. The journal copies no row:

    lookup, write   tick, slots in the order of use     they were used, perhaps made
    update          slots                               their floats have changed
    lookup          ids                                 an admission has counted them
    eviction, sweep (id, owner), one after the other    they have left

A slot that has got another row since has a later note of that; the row before has left.
An update is not noted where a lookup of the same ids was, since the last cut.

In a memory file the same is also written into a ring of words, before a change is
complete, and stays there until it is released. The next process may find more than has
changed there, never less: a row that is copied without a change does no harm.

    token | previous token | head | tail | lacks | 0 0 0                8 words
    kind (3 bits), table (16), arena (13), K (32) | tick | K numbers    a note; others

Slots take half a word each, the numbers of (id, owner) and ids one.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Ids, Indices, Slots, Words
from persia_torchrec.errors import StoreError
from persia_torchrec.jit.compiled import compiled
from persia_torchrec.store import memory
from persia_torchrec.store.memory import StoreMemory, Tally

RING_WORDS = 2**22
"""Words of the ring: 32 MiB, of which only what is used costs memory."""

_FIRST_ROOM = 4096
_NO_SLOTS = np.empty(0, dtype=np.uint32)
_TOKEN, _PREVIOUS, _HEAD, _TAIL, _LACKS = range(5)
_HEADER_WORDS, _NOTE_WORDS = 8, 2
_CHANGED, _LEFT, _CLEARED, _SKIPPED, _SEEN, _DROPPED = range(1, 7)
_WORDS = _LEFT, _SEEN  # kinds whose numbers are of 64 bits


class ChangedSlots(NamedTuple):
    """Rows of one table that a request has changed, by slot.

    ``tick`` is that of a training lookup or write, whose slots are in the order of use;
    0 of an update.
    """

    table: int
    arena: int
    tick: int
    slots: Slots


@dataclass(slots=True)
class Changes:
    """What has changed in some interval: the dirty set."""

    slots: list[ChangedSlots] = field(default_factory=list)
    """Of training lookups, writes and updates, in their order."""
    left: list[Words] = field(default_factory=list)
    """uint64 ``(K, 2)`` each: id, and number of the table plus one."""
    seen: list[tuple[int, Ids]] = field(default_factory=list)
    """Tables, and ids that their admissions have counted."""
    was_cleared: bool = False
    """Before all that, every row was dropped."""
    dropped: list[str] = field(default_factory=list)
    """Names of tables that were dropped; what is named of these counts for nothing."""
    num_rows: int = 0
    """That are named above, repeats included."""
    num_requests: int = 0
    """Updates and steps that are named here: without rows, too, a step has changed."""
    number: int = 0
    """Of the cut that returned them; 0 before."""


class _Note(NamedTuple):
    kind: int
    numbers: npt.NDArray[Any]
    table: int = 0
    arena: int = 0
    tick: int = 0


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
        self._halves = self._notes.view(np.uint32)
        head, tail = (int(self._header[at]) for at in (_HEAD, _TAIL))
        fits = tail <= head <= tail + len(self._notes)
        memory.require_sound(fits, "a ring of notes")

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
        head, size = self.head, len(self._notes)
        num = _num_words(note.kind, len(note.numbers))
        at = head % size
        skipped = size - at if at + num > size else 0
        end = head + skipped + num
        if end - int(self._header[_TAIL]) > size or not self._has_room(at, num):
            self._header[_LACKS] = 1
            return False
        if skipped:
            self._notes[at] = _SKIPPED << 61
            at = 0
        where = note.table << 45 | note.arena << 32
        self._notes[at] = note.kind << 61 | where | len(note.numbers)
        self._notes[at + 1] = note.tick
        self._numbers_at(note.kind, at, len(note.numbers))[:] = note.numbers
        self._header[_HEAD] = end
        return True

    def notes(self) -> Iterator[_Note]:
        """Yield all notes that were not released, the oldest first."""
        at, size = int(self._header[_TAIL]), len(self._notes)
        while at < self.head:
            word, tick = (int(self._notes[(at + k) % size]) for k in range(2))
            kind, num = word >> 61, word & 0xFFFFFFFF
            if kind == _SKIPPED:
                at += size - at % size
                continue
            fits = _CHANGED <= kind <= _DROPPED and _num_words(kind, num) <= size
            memory.require_sound(fits, "notes")
            numbers = self._numbers_at(kind, at % size, num).copy()
            yield _Note(kind, numbers, word >> 45 & 0xFFFF, word >> 32 & 0x1FFF, tick)
            at += _num_words(kind, num)

    def release(self, head: int, *, lacks: bool) -> None:
        """Forget the notes before ``head``; tell whether it ``lacks`` later ones."""
        self._header[_TAIL] = head
        self._header[_LACKS] = int(lacks)

    def _numbers_at(self, kind: int, at: int, num: int) -> npt.NDArray[Any]:
        begin = at + _NOTE_WORDS
        if kind in _WORDS:
            return self._notes[begin : begin + num]
        return self._halves[2 * begin : 2 * begin + num]

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
        self._looked_up: dict[int, tuple[Slots, Ids]] = {}  # since the last cut
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
        self._looked_up.clear()
        self.changes = Changes()
        self._cuts.clear()
        if self._ring is not None and not keeps:
            self._ring.restart(0, keeps=False)

    def previous(
        self, dropped: Mapping[int, str] | None = None
    ) -> tuple[list[int], Changes]:
        """Return the tokens of what the previous process noted, and its changes.

        ``dropped`` are the names of tables that were dropped, by number. That another
        one is noted as dropped means that the process died before.
        """
        changes, names = Changes(), dropped or {}
        if self._ring is None:
            return [], changes
        for kind, numbers, table, arena, tick in self._ring.notes():
            if kind == _CHANGED:
                changes.slots.append(ChangedSlots(table, arena, tick, numbers))
                changes.num_requests += tick == 0
            elif kind == _LEFT:
                changes.left.append(numbers.reshape(-1, 2))
            elif kind == _SEEN:
                changes.seen.append((table, numbers))
            elif kind == _DROPPED:
                changes.dropped += [names[table]] if table in names else []
            else:
                changes = Changes(was_cleared=True, dropped=changes.dropped)
            changes.num_rows += len(numbers)
        return self._ring.tokens, changes

    @property
    def is_empty(self) -> bool:
        """Whether nothing has happened since the last cut."""
        changes = self.changes
        is_noted = bool(changes.num_rows or changes.num_requests or changes.dropped)
        is_noted = is_noted or changes.was_cleared
        has_left = self._tally[memory.LEFT_ROOM] < len(self._left)
        return not (is_noted or has_left)

    def make_room(self, num_rows: int) -> None:
        """Make room so that this many rows can leave before the next call."""
        if self.is_on and self._tally[memory.LEFT_ROOM] < num_rows:
            self._list_next(max(num_rows, 2 * len(self._left)))

    def changed(self, slots: ChangedSlots) -> None:
        """Note a training lookup, a write, or an update."""
        self.changes.num_requests += slots.tick == 0
        if len(slots.slots):
            self.changes.slots.append(slots)
            self.changes.num_rows += len(slots.slots)
        self._keep(_Note(_CHANGED, slots.slots, *slots[:3]))

    def looked_up(self, slots_N: Slots, ids_N: Ids) -> None:
        """Note that :meth:`used` has the rows of updates with these slots as hints."""
        self._looked_up[id(slots_N)] = slots_N, ids_N

    def used(self, slots: ChangedSlots, missing_K: Indices, made_K: Indices) -> None:
        """Note a training lookup of a table, by slots; see :func:`slots_in_order`."""
        slots_N = slots.slots
        if len(missing_K):
            slots_N = slots_in_order(slots_N, missing_K, made_K)
        self.changed(slots._replace(slots=slots_N))

    def seen(self, table: int, ids_K: Ids) -> None:
        """Note ids that an admission has counted."""
        if len(ids_K):
            self.changes.seen.append((table, ids_K))
            self.changes.num_rows += len(ids_K)
            self._keep(_Note(_SEEN, ids_K, table))

    def is_noted(self, hints_N: Slots | None, ids_N: Ids) -> bool:
        """Return whether the lookup that returned hints is noted since the last cut."""
        slots_N, known_N = self._looked_up.get(id(hints_N), (None, ids_N))
        return slots_N is not None and np.array_equal(known_N, ids_N)

    def cleared(self) -> None:
        """Note that all rows were dropped; also for what a killed process noted."""
        if self.is_on:
            dropped = self.cut().dropped
            self.changes.was_cleared, self.changes.dropped = True, dropped
        self._keep(_Note(_CLEARED, _NO_SLOTS))

    def dropping(self, table: int) -> None:
        """Note for the next process that a table is about to be dropped."""
        self._keep(_Note(_DROPPED, _NO_SLOTS, table))

    def dropped(self, names: Sequence[str]) -> None:
        """Note that tables were dropped."""
        if self.is_on:
            self.changes.dropped += names

    def leaving(self, table: int, ids_K: Ids) -> None:
        """Note ids whose rows are dropped before :meth:`begin`; later ones are listed.

        So do those by which the store completes what a killed process has begun.
        """
        if not self.is_on and self._ring is not None and self._ring.tokens:
            owners_K = np.full(len(ids_K), table + 1, dtype=np.uint64)
            self._keep(_Note(_LEFT, np.stack([ids_K, owners_K], axis=1).reshape(-1)))

    def keep_left(self) -> None:
        """Write down which rows have left, before their change is complete."""
        if not self.is_on:
            return
        num = len(self._left) - int(self._tally[memory.LEFT_ROOM])
        if num > self._num_kept:
            words = self._left[self._num_kept : num].reshape(-1)
            self._keep(_Note(_LEFT, words))
            self._num_kept = num

    def cut(self) -> Changes:
        """Return what was noted since the last cut."""
        self._list_next(_FIRST_ROOM)
        self._looked_up.clear()
        changes, self.changes = self.changes, Changes()
        self._num_cuts += 1
        changes.number = self._num_cuts
        if self._ring is not None:
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
            self.changes.num_rows += num
        self._left = np.empty((room, 2), dtype=np.uint64)
        self._num_kept = 0
        self._tally[memory.LEFT_AT] = self._left.ctypes.data
        self._tally[memory.LEFT_ROOM] = room


def _num_words(kind: int, num: int) -> int:
    """Return the words of a note of so many numbers."""
    return _NOTE_WORDS + (num if kind in _WORDS else (num + 1) // 2)


@compiled
def slots_in_order(slots_N: Slots, missing_K: Indices, made_K: Indices) -> Slots:
    """Return slots in the order of use: those that were there, then those ``made_K``.

    ``missing_K`` are the positions, ascending, of ids that had no row.
    """
    ordered = np.empty(len(slots_N) - len(missing_K) + len(made_K), dtype=np.uint32)
    num = k = 0
    for n in range(len(slots_N)):
        if k < len(missing_K) and missing_K[k] == n:
            k += 1
        else:
            ordered[num] = slots_N[n]
            num += 1
    for n in made_K:
        ordered[num] = slots_N[n]
        num += 1
    return ordered
