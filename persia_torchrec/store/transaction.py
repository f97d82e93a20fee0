"""Transactions: the changes of one request are applied atomically.

    transaction() .. lookups, sweeps, removals |  updates, writes, steps, clears, notes
                     done at once              |  done at the end, in their order

In private memory that is all. In a memory file what changes is kept so that it can be
undone: see ``undo_log.py``.
"""

import weakref
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from persia_torchrec.errors import StoreError
from persia_torchrec.jit.compiled import read_only
from persia_torchrec.store import finite, loops, memory
from persia_torchrec.store.change_log import ChangedSlots
from persia_torchrec.store.loops import Starts
from persia_torchrec.store.memory import Floats, Ids, Slots, Words
from persia_torchrec.store.stored_table import TableGroup, TableState
from persia_torchrec.store.table_blocks import FIRST
from persia_torchrec.store.undo_log import ROW_BYTES, UndoLog

if TYPE_CHECKING:
    from persia_torchrec.store.embedding_store import EmbeddingStore

UPDATE, WRITE, STEP, CLEAR, UPDATE_GROUP = range(5)
"""Kinds of changes that are done at the end of a transaction."""

KEPT_BYTES = 800
"""Kept of a row that is made or leaves besides its bytes, most if the index grows."""

SLICE_ROWS = 2048
"""Rows that are looked at to free blocks at a time: about a millisecond."""

_NO_IDS = read_only(np.empty(0, dtype=np.uint64))
_NO_SLOTS = read_only(np.empty(0, dtype=np.uint32))
_NO_VALUES = read_only(np.empty((0, 0), dtype=np.float32))


class UpdateResult(NamedTuple):
    """How many gradients were not applied.

    ``num_missed`` had no row, of which ``num_unadmitted`` were never admitted, the
    others evicted; ``num_refused`` held NaN or an infinity.
    """

    num_missed: int
    num_refused: int
    num_unadmitted: int = 0


_NOTHING = UpdateResult(0, 0)


class Change(NamedTuple):
    """What a transaction does at its end; all arrays are read-only.

    ``values`` are gradients ``(N, D)``, or rows ``(N, K)``; ``step`` is the table's,
    afterwards; ``hints`` are slots.
    """

    kind: int
    table: int = 0
    step: int = 0
    ids: Ids = _NO_IDS
    hints: Slots = _NO_SLOTS
    values: Floats = _NO_VALUES


class GroupChange(NamedTuple):
    """An update of a group of tables, at the end of a transaction; see ``Change``.

    ``steps`` are the tables' afterwards, by number.
    """

    group: TableGroup
    steps: dict[int, int]
    ids: Ids
    starts: Starts
    hints: Slots
    values: Floats  # flat, table by table
    kind: int = UPDATE_GROUP


class Transaction:
    """Several calls of a store that are one change: see ``EmbeddingStore.transaction``.

    ``results`` are those of its updates, in their order, when it has ended, and
    ``totals`` their sums; ``steps`` those of tables at its end.
    """

    __slots__ = (
        "_depth",
        "_transactions",
        "changes",
        "has_begun",
        "notes",
        "results",
        "results_at",
        "steps",
        "totals",
    )

    def __init__(self, transactions: "Transactions") -> None:
        self._transactions, self._depth = transactions, 0
        self.results: list[UpdateResult] = []
        self.totals = _NOTHING
        self.changes: list[Change | GroupChange] = []
        self.notes: list[tuple[int, int]] = []
        self.results_at: list[int] = []
        self.steps: dict[int, int] = {}
        self.has_begun = False

    def note(self, offset: int, value: int) -> None:
        """Set one of the store's notes, together with the rows."""
        self.notes.append((offset, value % 2**64))

    def note_results(self, offset: int) -> None:
        """Set three notes: ``totals``, missed, rejected, unadmitted."""
        self.results_at.append(offset)

    def __enter__(self) -> Self:
        self._transactions.opened = self
        self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        try:
            if kind is None:
                self._transactions.finish(self)
        finally:
            self._transactions.opened = None
        if kind is None and (self.has_begun or self.changes):
            self._transactions.end()
            self._transactions.begin_to_free()


class Transactions:
    """The transactions of one store, whose thread owns them.

    ``undo_log`` is None in private memory; ``notes`` are empty before
    :meth:`make_notes`; ``opened`` is the transaction that is open, if one is.
    """

    def __init__(self, store: "EmbeddingStore", undo_log: UndoLog | None) -> None:
        self._store: EmbeddingStore = weakref.proxy(store)  # which owns this
        self.undo_log = undo_log
        self.opened: Transaction | None = None
        # Tables of which a period has ended, and where to continue freeing blocks.
        self._ended: dict[int, tuple[int, int]] = {}
        self._room_bytes = 0  # that the end of the transaction takes
        self.notes: Words = np.empty(0, dtype=np.uint64)

    @property
    def log(self) -> memory.Log:
        """The address of the log of what changes."""
        return None if self.undo_log is None else self.undo_log.log

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
        """Keep what a change needs to be undone, unless its transaction has begun."""
        if self.undo_log is None:
            return
        logs, transaction = self._store.logs, self.opened
        if transaction is None or not transaction.has_begun:
            self.undo_log.begin(self._store.index.cursor, logs.directory)
        if transaction is not None:
            transaction.has_begun = True
        if num_touches:
            logs.make_room_to_keep(num_touches, self.undo_log)

    def end(self) -> None:
        """End a change, unless it is a part of an open transaction."""
        if self._store.journal.is_on:
            self._store.journal.keep_left()
        if self.undo_log is not None and self.opened is None:
            self.undo_log.end()

    def make_room(self, num_rows: int) -> None:
        """Make room to keep rows that leave, and what changes where others are made."""
        store = self._store
        if self.undo_log is None or store.tally[memory.CHANGE] == memory.LOAD:
            return
        self.undo_log.make_room(num_rows * self._widest_row())

    def _widest_row(self) -> int:
        """Return what is kept where a row is made or leaves, at most."""
        strides = (words.strides[0] for words in self._store.arenas.words)
        return max(strides, default=0) + KEPT_BYTES

    def keep_admission(self, state: TableState, num_ids: int) -> None:
        """Keep what an admission remembers, or make room for what it keeps itself."""
        if (
            self.undo_log is None
            or state.admission is None
            or not state.remembered.size
        ):
            return
        if num_bytes := state.spec.admission.num_kept_bytes():
            self.undo_log.make_room(num_bytes * num_ids)
        else:
            self.undo_log.keep_all(state.remembered)

    def add_update(
        self, table: int, ids_N: Ids, grads_ND: Floats, hints_N: Slots | None
    ) -> None:
        """Update rows at the end of the transaction that is open."""
        assert self.opened is not None
        store, steps = self._store, self.opened.steps
        state, ids_N = store.states[table], read_only(ids_N)
        if hints_N is None or len(hints_N) != len(ids_N):
            hints_N = loops.find_slots(state.layout, ids_N)
        if store.journal.is_on and not store.journal.is_noted(hints_N, ids_N):
            self._note_changed(state, ids_N)
        steps[table] = steps.get(table, state.num_updates) + 1
        self.add(
            Change(
                UPDATE,
                table,
                steps[table],
                ids_N,
                read_only(hints_N),
                read_only(grads_ND),
            )
        )

    def add_updates(
        self,
        group: TableGroup,
        ids_N: Ids,
        starts_T: Starts,
        grads: Floats,
        hints_N: Slots | None,
    ) -> None:
        """Update rows of a group at the end of the transaction that is open."""
        assert self.opened is not None
        store, ids_N = self._store, read_only(ids_N)
        if hints_N is None or len(hints_N) != len(ids_N):
            parts = zip(group.states, starts_T[:-1], starts_T[1:], strict=True)
            found = [loops.find_slots(s.layout, ids_N[a:b]) for s, a, b in parts]
            hints_N = np.concatenate([_NO_SLOTS, *found])
        if store.journal.is_on and not store.journal.is_noted(hints_N, ids_N):
            for t, state in enumerate(group.states):
                self._note_changed(state, ids_N[starts_T[t] : starts_T[t + 1]])
        counted = self.opened.steps
        steps = {
            number: counted.get(number, step) + 1
            for number, step in zip(
                group.numbers.tolist(), store.steps[group.numbers].tolist(), strict=True
            )
        }
        counted.update(steps)
        self.add(
            GroupChange(
                group, steps, ids_N, starts_T, read_only(hints_N), read_only(grads)
            )
        )

    def _note_changed(self, state: TableState, ids_N: Ids) -> None:
        """Note the rows of ids, that are about to be updated."""
        slots_N = loops.find_slots(state.layout, ids_N)
        slots_N = slots_N[slots_N != memory.MISSING]
        arena = int(state.layout[memory.ARENA])
        self._store.journal.changed(ChangedSlots(state.number, arena, 0, slots_N))

    def add(self, change: Change | GroupChange) -> None:
        """Do a change at the end of the transaction that is open."""
        assert self.opened is not None
        changes = self.opened.changes
        if changes and changes[-1].kind == CLEAR:
            raise StoreError(
                "A clear must be the last change of its request. Received: another one "
                "after it. Make it a request of its own."
            )
        changes.append(change)

    def complete(self) -> None:
        """Complete what the previous process of the memory has begun."""
        change = self._store.tally[memory.CHANGE]
        if change == memory.CLEAR and self.undo_log is not None:
            self._store.drop_rows()
            self.undo_log.end_clear()
            self.end()
        if self._store.was_loading:
            self._store.drop_rows()  # and load again
            self._store.tally[memory.CHANGE] = memory.LOAD
            self._store.is_loading = False
        for state in self._store.present:
            if state.must_free(self._store):
                self._ended[state.number] = FIRST
        while self._ended:
            self.free_blocks()

    @property
    def must_free_blocks(self) -> bool:
        """Whether ids have lost blocks that were not freed yet: a period has ended."""
        return bool(self._ended)

    def begin_to_free(self) -> None:
        """Free a slice of the blocks of tables of which a period has just ended."""
        if self._ended:
            for number in [n for n, at in self._ended.items() if at is FIRST]:
                self._free_some_of(number)

    def free_blocks(self) -> bool:
        """Free some of the blocks that ids have lost; return True: there were some."""
        self._free_some_of(next(iter(self._ended)))
        return True

    def free_blocks_for(self, num_rows: int) -> None:
        """Free blocks until there is room for so many rows, or none is left."""
        store = self._store
        while self._ended and store.num_rows + num_rows > store.capacity_rows:
            self.free_blocks()

    def _free_all_of(self, number: int) -> None:
        """Free the blocks of a table, in the midst of what ends a request."""
        while number in self._ended:
            self._free_some_of(number)
        if self.undo_log is not None:
            self.undo_log.make_room(self._room_bytes)  # again: some of it was used

    def _free_some_of(self, number: int) -> None:
        state = self._store.states[number]
        begin = self._ended[number]  # where a table was dropped there is nothing
        next_ = state.free(self._store, begin, SLICE_ROWS)
        if next_ is None:
            del self._ended[number]
        else:
            self._ended[number] = next_

    def finish(self, transaction: Transaction) -> None:
        """Do what a transaction has left for its end."""
        changes, undo_log = transaction.changes, self.undo_log
        if not (changes or transaction.results_at) and (
            undo_log is None or not transaction.notes
        ):
            self._set_notes(transaction.notes)
            return
        if undo_log is not None:
            self.begin()
            num_notes = len(transaction.notes) + 3 * len(transaction.results_at)
            self._room_bytes = sum(map(self._count_bytes, changes)) + 16 * num_notes
            undo_log.make_room(self._room_bytes)
        is_clear = bool(changes) and changes[-1].kind == CLEAR
        if changes:
            for change in changes[:-1] if is_clear else changes:
                self._change(transaction, change)
        self._sum_up(transaction)
        for offset in transaction.results_at:
            transaction.notes += enumerate(transaction.totals, offset)
        if is_clear:
            self._clear(transaction.notes)
        elif undo_log is not None:
            undo_log.note(self.notes, _as_words(transaction.notes))
        else:
            self._set_notes(transaction.notes)

    def _sum_up(self, transaction: Transaction) -> None:
        """Count what the updates of a transaction have not applied."""
        results = transaction.results
        if len(results) == 1:
            transaction.totals = results[0]
        elif results:
            transaction.totals = UpdateResult(*map(sum, zip(*results, strict=True)))
        if any(transaction.totals):
            self._store.tally[memory.MISSED] += transaction.totals.num_missed
            self._store.tally[memory.NOT_FINITE] += transaction.totals.num_refused

    def _clear(self, notes: list[tuple[int, int]]) -> None:
        """Drop all rows, and set notes."""
        if self.undo_log is not None:
            self.undo_log.begin_clear(self.notes, _as_words(notes))
        self._store.drop_rows()
        self._ended.clear()
        if self.undo_log is not None:
            self.undo_log.end_clear()
        else:
            self._set_notes(notes)

    def _set_notes(self, notes: list[tuple[int, int]]) -> None:
        words = self.notes.data  # faster than an array, word by word
        for offset, value in notes:
            words[offset] = value

    def _count_bytes(self, change: Change | GroupChange) -> int:
        """Return what keeping a change takes."""
        if isinstance(change, GroupChange):
            nums = np.diff(change.starts)
            strides = [self._store.arena(s).strides[0] for s in change.group.states]
            num_bytes = nums * (np.array(strides) + ROW_BYTES)
            return int(num_bytes.sum()) + ROW_BYTES * len(nums)
        if change.kind not in (UPDATE, WRITE):
            return ROW_BYTES
        store, state = self._store, self._store.states[change.table]
        row_bytes = store.arena(state).strides[0]
        num_bytes = ROW_BYTES + len(change.ids) * (row_bytes + ROW_BYTES)
        if change.kind == UPDATE and state.ends_period(change.step):
            num_bytes += ROW_BYTES
        return num_bytes

    def _change(self, transaction: Transaction, change: Change | GroupChange) -> None:
        if isinstance(change, GroupChange):
            self._update_group(transaction, change)
            return
        kind, table, step, ids_N, _, values_NK = change
        state, undo_log = self._store.states[table], self.undo_log
        if kind == WRITE:
            self._write(state, ids_N, values_NK)
            return
        if table in self._ended and (kind == STEP or state.ends_period(step)):
            self._free_all_of(table)
        if undo_log is not None:
            undo_log.keep(state.step)
        if kind == STEP:
            state.num_updates = step
            return
        now_s = self._store.now_s(state)
        counts = state.apply(self._store, change, now_s)
        transaction.results.append(_result_of(state, change.hints, *counts))
        if state.ends_period(step):
            state.end_period(self._store)
            self._ended[table] = FIRST

    def _update_group(self, transaction: Transaction, change: GroupChange) -> None:
        """Apply the optimizers to rows of a group's tables."""
        group, steps, ids_N, starts_T, hints_N, grads, _ = change
        store, num_tables = self._store, len(group.states)
        if self.undo_log is not None:
            self.undo_log.keep_some(store.steps, group.numbers)
        now_T2 = np.empty((num_tables, 2), dtype=np.uint64)
        store.steps[group.numbers] = now_T2[:, 0] = [*steps.values()]
        now_T2[:, 1] = store.seconds_of(group)
        results_T2 = np.zeros((num_tables, 2), dtype=np.int64)
        layouts_T, log = group.at
        begin_of_grads = 0
        for update in group.updates or ():
            which = slice(update.begin, update.end)
            starts = starts_T[update.begin : update.end + 1]
            update.loop(
                (layouts_T[which], log),
                ids_N,
                starts,
                hints_N,
                grads[begin_of_grads:],
                now_T2[which],
                group.step_numbers(update, [*steps.values()][which]),
                results_T2[which],
            )
            begin_of_grads += int(np.diff(starts).dot(group.dims[which]))
        if not results_T2.any():
            transaction.results.append(_NOTHING)
            return
        for t, (missed, rejected) in enumerate(results_T2.tolist()):
            hints = hints_N[starts_T[t] : starts_T[t + 1]]
            transaction.results.append(
                _result_of(group.states[t], hints, missed, rejected)
            )

    def _write(self, state: TableState, ids_N: Ids, values_NK: Floats) -> None:
        slots_N = read_only(self._store.find(state.number, ids_N))  # rows may have left
        if self.undo_log is not None:
            self.undo_log.keep_rows(state.layout, slots_N)
        memory.write_rows(state.layout, slots_N, values_NK)
        if not np.abs(values_NK).max(initial=0) <= finite.MODERATE_WEIGHT:
            self._store.tally[memory.HAS_LARGE] = 1


def _result_of(
    state: TableState, hints_N: Slots, missed: int, rejected: int
) -> UpdateResult:
    unadmitted = 0
    if missed and state.admission is not None:
        # Its lookup left it without a row, if what that found is known.
        num_without = int(np.count_nonzero(hints_N == memory.MISSING))
        unadmitted = min(num_without, missed)
    return UpdateResult(missed, rejected, unadmitted)


def _as_words(notes: list[tuple[int, int]]) -> Words:
    """Return notes as ``(offset, value)``, of an offset the last one."""
    return np.array(list(dict(notes).items()), dtype=np.uint64).reshape(-1, 2)
