"""Make what a request changes one change: done at once, or at the request's end.

    request() .. lookups, sweeps, removals  |  updates, writes, steps, clears, notes
                 done at once               |  done at the end, in their order

In private memory that is all. In a memory file what changes is kept so that it can be
undone: see ``recovery.py``.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from persia_torchrec.compiled import read_only
from persia_torchrec.errors import StoreError
from persia_torchrec.store import loops, memory
from persia_torchrec.store.memory import Floats, Ids, Slots, Words
from persia_torchrec.store.recovery import (
    CLEAR,
    ROW_BYTES,
    STEP,
    UPDATE,
    WRITE,
    Change,
    Recovery,
    Request,
    UpdateResult,
)
from persia_torchrec.store.tables import TableState

if TYPE_CHECKING:
    from persia_torchrec.store.embedding_store import EmbeddingStore

_KEPT_BYTES = 800
"""Kept of a row that is made or leaves besides its bytes, most if the index grows."""

_NUM_RESULTS = len(UpdateResult._fields)


class Requests:
    """The requests of one store, whose thread owns them.

    ``recovery`` is None in private memory; ``notes`` are empty before
    :meth:`make_notes`.
    """

    def __init__(self, store: "EmbeddingStore", recovery: Recovery | None) -> None:
        self._store: EmbeddingStore = weakref.proxy(store)  # which owns this
        self.recovery = recovery
        self._open: Request | None = None
        self.notes: Words = np.empty(0, dtype=np.uint64)

    @property
    def log(self) -> memory.Log:
        """The address of the log of what changes."""
        return None if self.recovery is None else self.recovery.log

    @contextmanager
    def request(self) -> Iterator[Request]:
        """Begin a request, or continue the one that is open."""
        if self._open is not None:
            yield self._open
            return
        self._open = request = Request()
        try:
            yield request
            if request.changes or request.notes or request.results_at:
                self._finish(request)
        finally:
            self._open = None
        if request.has_begun or request.changes:
            self.end()

    def make_notes(self, num_words: int) -> Words:
        """Return the notes; see ``EmbeddingStore.notes``."""
        store = self._store
        if self.notes.size == 0:
            [self.notes] = store.memory.reserve(num_words)
            store.publish(store.states)
        if self.notes.size != num_words:
            raise StoreError(
                f"The memory file must be used with the {self.notes.size} notes that "
                f"it was made for. Received: {num_words}. Start the version that made "
                "it, or delete the file."
            )
        return self.notes

    def open_notes(self, at: int, num_words: int) -> None:
        """Find the notes that :meth:`describe_notes` described."""
        if num_words:
            source = self._store.memory
            address = memory.address_at(source.area(memory.RECOVERY), at)
            self.notes = source.find(address)[:num_words]

    def describe_notes(self) -> tuple[int, int]:
        """Return where the notes are, and how many."""
        if self.notes.size == 0:
            return 0, 0
        area = self._store.memory.area(memory.RECOVERY)
        return memory.distance(area, self.notes), self.notes.size

    def begin(self, num_touches: int = 0) -> None:
        """Keep what a change needs to be undone, unless its request has begun."""
        if self.recovery is None:
            return
        logs, request = self._store.logs, self._open
        if request is None or not request.has_begun:
            self.recovery.begin(self._store.index.cursor, logs.directory)
        if request is not None:
            request.has_begun = True
        if num_touches:
            logs.make_room_to_keep(num_touches, self.recovery)

    def end(self) -> None:
        """End a change, unless it is a part of an open request."""
        self._store.journal.keep_left()
        if self.recovery is not None and self._open is None:
            self.recovery.end()

    def make_room(self, num_rows: int) -> None:
        """Make room to keep rows that leave, and what changes where others are made."""
        store = self._store
        if self.recovery is None or store.tally[memory.CHANGE] == memory.LOAD:
            return
        widest = max((words.strides[0] for words in store.arenas.words), default=0)
        self.recovery.make_room(num_rows * (widest + _KEPT_BYTES))

    def keep_admission(self, state: TableState, num_ids: int) -> None:
        """Keep what an admission remembers, or make room for what it keeps itself."""
        if (
            self.recovery is None
            or state.admission is None
            or not state.remembered.size
        ):
            return
        if num_bytes := state.spec.admission.num_kept_bytes():
            self.recovery.make_room(num_bytes * num_ids)
        else:
            self.recovery.keep_all(state.remembered)

    def add_update(
        self, table: int, ids_N: Ids, grads_ND: Floats, hints_N: Slots | None
    ) -> None:
        """Update rows at the end of the request that is open."""
        assert self._open is not None
        state, steps = self._store.states[table], self._open.steps
        ids_N = read_only(ids_N)
        if hints_N is None or len(hints_N) != len(ids_N):
            hints_N = loops.find_slots(state.layout, ids_N)
        if self._store.journal.is_on:
            self._store.journal.updated(table, ids_N)
        steps[table] = steps.get(table, state.num_updates) + 1
        arrays = ids_N, read_only(hints_N), read_only(grads_ND)
        self.add(Change(UPDATE, table, steps[table], *arrays))

    def add(self, change: Change) -> None:
        """Do a change at the end of the request that is open."""
        assert self._open is not None
        changes = self._open.changes
        if changes and changes[-1].kind == CLEAR:
            raise StoreError(
                "A clear must be the last change of its request. Received: another one "
                "after it. Make it a request of its own."
            )
        changes.append(change)

    def complete(self) -> None:
        """Complete what the previous process of the memory has begun."""
        change = self._store.tally[memory.CHANGE]
        if change == memory.CLEAR and self.recovery is not None:
            self._store.drop_rows()
            self.recovery.end_clear()
            self.end()
        if self._store.was_loading:
            self._store.drop_rows()  # and load again
            self._store.tally[memory.CHANGE] = memory.LOAD
            self._store.is_loading = False

    def _finish(self, request: Request) -> None:
        """Do what a request has left for its end."""
        store, changes, recovery = self._store, request.changes, self.recovery
        for number, change in enumerate(changes):
            if change.kind == WRITE:  # rows may have left since
                slots_N = read_only(store.find(change.table, change.ids))
                changes[number] = change._replace(hints=slots_N)
        if recovery is not None:
            self.begin()
            num_notes = len(request.notes) + _NUM_RESULTS * len(request.results_at)
            recovery.make_room(sum(map(self._count_bytes, changes)) + 16 * num_notes)
        now_s = max(int(store.clock()), 0)
        is_clear = bool(changes) and changes[-1].kind == CLEAR
        for change in changes[: len(changes) - is_clear]:
            self._change(request, change, now_s)
        if is_clear:
            self._clear(self._notes_of(request))
        elif recovery is not None:
            recovery.note(self.notes, self._notes_of(request))
        else:
            self._set_notes(self._notes_of(request))

    def _clear(self, notes_N2: Words) -> None:
        """Drop all rows, and set notes."""
        if self.recovery is not None:
            self.recovery.begin_clear(self.notes, notes_N2)
        self._store.drop_rows()
        if self.recovery is not None:
            self.recovery.end_clear()
        else:
            self._set_notes(notes_N2)

    def _notes_of(self, request: Request) -> Words:
        """Count the results of a request; return its notes, with their offsets."""
        sums = [sum(column) for column in zip(*request.results, strict=True)]
        if any(sums):
            self._store.tally[memory.MISSED] += sums[0]
            self._store.tally[memory.REFUSED] += sums[1]
        notes = dict(request.notes)  # the last one of an offset
        for offset in request.results_at:
            notes.update(enumerate(sums or [0] * _NUM_RESULTS, offset))
        return np.array(list(notes.items()), dtype=np.uint64).reshape(-1, 2)

    def _set_notes(self, notes_N2: Words) -> None:
        self.notes[notes_N2[:, 0]] = notes_N2[:, 1]

    def _count_bytes(self, change: Change) -> int:
        """Return what keeping a change takes."""
        if change.kind not in (UPDATE, WRITE):
            return ROW_BYTES
        row_bytes = self._store.arena(self._store.states[change.table]).strides[0]
        return ROW_BYTES + len(change.ids) * (row_bytes + ROW_BYTES)

    def _change(self, request: Request, change: Change, now_s: int) -> None:
        state, recovery = self._store.states[change.table], self.recovery
        if change.kind == WRITE:
            if recovery is not None:
                recovery.keep_rows(state.layout, change.hints)
            memory.write_rows(state.layout, change.hints, change.values)
            return
        if recovery is not None:
            recovery.keep(state.step)
        if change.kind == STEP:
            state.num_updates = change.step
            return
        arrays = change.ids, change.hints, change.values
        counts = state.step_rows(*arrays, step=change.step, now_s=now_s)
        request.results.append(self._build_result(change, *counts))

    def _build_result(self, change: Change, missed: int, refused: int) -> UpdateResult:
        unadmitted, state = 0, self._store.states[change.table]
        if missed and state.admission is not None:
            # Its lookup left it without a row, if what that found is known.
            num_without = int(np.count_nonzero(change.hints == memory.MISSING))
            unadmitted = min(num_without, missed)
        return UpdateResult(missed, refused, unadmitted)
