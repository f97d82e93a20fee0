"""Make what a request changes one change: done at once, or at the request's end.

    request() .. lookups, sweeps, removals  |  updates, writes, steps, clears, notes
                 done at once               |  done at the end, in their order

In private memory that is all. In a memory file the first part is kept so that it can be
undone, and the second one is written down before it is done: see ``recovery.py``.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from persia_torchrec.compiled import read_only
from persia_torchrec.errors import StoreError
from persia_torchrec.store import loops, memory
from persia_torchrec.store.fbgemm_engine import MOST_ROWS
from persia_torchrec.store.memory import Floats, Ids, Slots, Words
from persia_torchrec.store.recovery import (
    CLEAR,
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
        finally:
            self._open = None
        self.finish(request)

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
        self._open.changes.append(Change(UPDATE, table, steps[table], *arrays))

    def finish(self, request: Request) -> None:
        """Do what a request has left for its end."""
        if request.changes or request.notes:
            changes, store = request.changes, self._store
            for number, change in enumerate(changes):
                if change.kind == WRITE:  # rows may have left since
                    slots_N = read_only(store.find(change.table, change.ids))
                    changes[number] = change._replace(hints=slots_N)
            request.now_s = max(int(store.clock()), 0)
            tally = store.tally
            request.before = [int(tally[memory.MISSED]), int(tally[memory.REFUSED])]
            if self.recovery is not None:
                image_bytes = max(map(self._image_bytes, changes), default=0)
                self.recovery.keep(request, image_bytes)
            self._apply(request)
        if request.changes or request.notes or request.has_begun:
            self.end()

    def complete(self) -> None:
        """Complete what the previous process of the memory has begun."""
        change = self._store.tally[memory.CHANGE]
        if change == memory.COMMIT and self.recovery is not None:
            self._apply(*self.recovery.resume())
            self.end()
        if self._store.was_loading:
            self._store.drop_rows()  # and load again
            self._store.tally[memory.CHANGE] = memory.LOAD
            self._store.is_loading = False

    def _image_bytes(self, change: Change) -> int:
        """Return what the images of rows take that change at the same time."""
        if change.kind != UPDATE:
            return 0
        state = self._store.states[change.table]
        num_rows = 1 if state.engine is None else min(len(change.ids), MOST_ROWS)
        return 8 + num_rows * (self._store.arena(state).strides[0] + 16)

    def _apply(self, request: Request, first: int = 0, num_done: int = 0) -> None:
        """Make the changes of a request, from the ``num_done``-th row of the first."""
        recovery, results = self.recovery, request.results
        for number, change in enumerate(request.changes):
            if number < first and recovery is not None:
                if change.kind == UPDATE:
                    counts = recovery.counts(number)
                    results.append(self._build_result(change, *counts))
                continue
            if number > first and recovery is not None:
                recovery.begin_change(number)
            if change.kind == UPDATE:
                num = num_done if number == first else 0
                counts = self._update(change, request.now_s, num)
                if recovery is not None and len(request.changes) > 1:
                    recovery.keep_counts(number, *counts)
                results.append(self._build_result(change, *counts))
            else:
                self._change(change)
        sums = [sum(column) for column in zip(*request.results, strict=True)]
        if any(sums):
            missed, refused = request.before
            totals = missed + sums[0], refused + sums[1]
            self._store.tally[[memory.MISSED, memory.REFUSED]] = totals
        for offset in request.results_at:
            self.notes[offset : offset + _NUM_RESULTS] = sums or 0
        for offset, value in request.notes:
            self.notes[offset] = value

    def _update(self, change: Change, now_s: int, num_done: int) -> tuple[int, int]:
        """Update rows, of which the first are done; count what is not applied."""
        state = self._store.states[change.table]
        ids_N, hints_N, grads_ND = change.ids, change.hints, change.values
        missed = refused = 0
        if num_done:
            done = ids_N[:num_done], hints_N[:num_done], grads_ND[:num_done]
            missed, refused = loops.count_unapplied(state.layout, *done)
            ids_N, hints_N = ids_N[num_done:], hints_N[num_done:]
            grads_ND = grads_ND[num_done:]
        more = state.step_rows(ids_N, hints_N, grads_ND, step=change.step, now_s=now_s)
        return missed + more[0], refused + more[1]

    def _build_result(self, change: Change, missed: int, refused: int) -> UpdateResult:
        unadmitted, state = 0, self._store.states[change.table]
        if missed and state.admission is not None:
            # Its lookup left it without a row, if what that found is known.
            num_without = int(np.count_nonzero(change.hints == memory.MISSING))
            unadmitted = min(num_without, missed)
        return UpdateResult(missed, refused, unadmitted)

    def _change(self, change: Change) -> None:
        if change.kind == WRITE:
            layout = self._store.states[change.table].layout
            memory.write_rows(layout, change.hints, change.values)
        elif change.kind == STEP:
            self._store.states[change.table].num_updates = change.step
        else:
            assert change.kind == CLEAR
            self._store.drop_rows()
