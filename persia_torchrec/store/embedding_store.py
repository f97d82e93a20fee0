"""The store: all tables of one shard, at most ``capacity`` rows of them together.

One thread owns a store; nothing here locks.

    ids --index--> slots --memory--> weights
                     |
                  recency: a training lookup refreshes; nothing else does

In a memory file every change is all or nothing: see ``undo_log.py``.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from persia_torchrec.errors import ConfigError, StoreError
from persia_torchrec.jit.compiled import read_only
from persia_torchrec.parsing.decoding import parse_json
from persia_torchrec.routing.route import split_rows
from persia_torchrec.store import loops, memory, table_states
from persia_torchrec.store.change_log import ChangedSlots, ChangeJournal, Ring
from persia_torchrec.store.expiry import ExpiryClock, Sweeps
from persia_torchrec.store.fbgemm_engine import start_engine
from persia_torchrec.store.index import MAX_ROWS, Index
from persia_torchrec.store.loops import Indices, Starts
from persia_torchrec.store.memory import (
    Arenas,
    Counts,
    Floats,
    Ids,
    PrivateMemory,
    ScannedRows,
    Slots,
    StoreMemory,
    Tally,
    Words,
)
from persia_torchrec.store.memory_file import MemoryFile
from persia_torchrec.store.recency import MARK_WORDS, NUM_LFU_CLASSES, RecencyLogs
from persia_torchrec.store.stored_table import Published, TableGroup, TableState
from persia_torchrec.store.transaction import CLEAR, STEP, WRITE, Change, Transactions
from persia_torchrec.store.transaction import Transaction as Transaction
from persia_torchrec.store.transaction import UpdateResult as UpdateResult
from persia_torchrec.store.undo_log import UndoLog
from persia_torchrec.table import Metadata, TableSpec, with_parts

Eviction = Literal["lru", "lfu"]
"""Which row leaves a full store: the least recently, or least frequently used."""

MAX_SCANNED_SLOTS = 1 << 20
"""Slots that a scan walks over: a few milliseconds where no row is of the table."""

_MAX_GROUPED = 2**16  # tables of all groups that are kept
_NO_SLOTS = np.empty(0, dtype=np.uint32)
_NO_COUNTS = read_only(np.empty(0, dtype=np.uint32))
_NO_INDICES = np.empty(0, dtype=np.int64)
_NONE_MADE = _NO_INDICES, _NO_INDICES


class EmbeddingStore:
    """Rows by table and id, least recently used out first.

    Attributes:
        states: the tables, in the order in which they were added; those that were
            dropped keep their numbers.
        leaving: of dropped tables whose rows are still to be freed, by number, the slot
            to look at next.
        arenas: one per width of rows, see ``memory.py``.
        tally: see ``memory.HITS`` and the others.
        journal: notes which rows change, once told to.
        steps: the steps of all tables.
        addresses: what every table's layout points to, see ``memory.store_at``.
        engine: fbgemm's, if it updates the rows; None for the compiled loops.
        was_loading: the previous process died while it loaded a checkpoint, or before
            rows were written after that; no rows are left.

    Args:
        capacity_rows: rows of all tables together, in ``[1, 2**32 - 2]``.
        eviction: ``lfu`` costs 16 bytes per row for the frequency.
        optimizer_engine: ``compiled`` or ``fbgemm``; both compute the same.
        clock: returns the current second.
        monotonic: returns seconds that never jump; by default those of ``clock``, if
            that is another than the system's.
        memory_file: a file that keeps all of it (see ``docs/formats/memory.md``). If it
            is that of an earlier store, whose process may have been killed at any
            instruction, this one continues with its tables and rows. None: private
            memory.
    """

    def __init__(
        self,
        capacity_rows: int,
        *,
        eviction: Eviction = "lru",
        optimizer_engine: str = "compiled",
        clock: Callable[[], float] = time.time,  # noqa: TID251  # kept in rows
        monotonic: Callable[[], float] | None = None,
        memory_file: str | None = None,
    ) -> None:
        if not 1 <= capacity_rows <= MAX_ROWS:
            raise ConfigError(
                f"capacity_rows must be in [1, {MAX_ROWS}]. Received: {capacity_rows}."
            )
        if eviction not in ("lru", "lfu"):
            raise ConfigError(f"eviction must be lru or lfu. Received: {eviction!r}.")
        self.capacity_rows = capacity_rows
        self.is_lfu = eviction == "lfu"
        self.engine = start_engine(optimizer_engine)
        self.clock = clock
        is_system = clock is time.time  # noqa: TID251  # as above
        self.monotonic = monotonic or (time.monotonic if is_system else clock)
        self.memory: StoreMemory = PrivateMemory()
        num_classes = NUM_LFU_CLASSES if self.is_lfu else 1
        if memory_file is not None:
            self.memory = MemoryFile(memory_file, capacity_rows, num_classes)
        try:
            self._open(num_classes)
        except BaseException:
            self.memory.close(is_clean=False)
            raise

    def _open(self, num_classes: int) -> None:
        """Find all that the memory holds, and make it whole."""
        text = self.memory.tables or b"{}"
        tables: Published = parse_json(text, Published, "A memory file", StoreError)
        self.tally: Tally = self.memory.area(memory.TALLY).view(np.int64)
        self.undo_log: UndoLog | None = None
        if isinstance(self.memory, MemoryFile):
            self.undo_log = UndoLog(self.memory, self.tally, tables.num_arenas)
        self._transactions = Transactions(self, self.undo_log)
        is_load = self.tally[memory.CHANGE] == memory.LOAD
        self.was_loading = bool(is_load or self.is_loading)
        self.tally[memory.CAPACITY] = self.capacity_rows
        self.seconds, self._sweeps = ExpiryClock(self), Sweeps(self)
        self.steps = self.memory.area(memory.STEPS)
        self.index = Index(self.capacity_rows, self.memory)
        self.logs = RecencyLogs(self.capacity_rows, num_classes, self.memory)
        self.arenas = Arenas(self.capacity_rows, self.memory, tables.num_arenas)
        self.addresses: Words = np.zeros(6, dtype=np.uint64)
        self.states: list[TableState] = []
        self.leaving: dict[int, int] = {}
        self._groups: dict[tuple[int, ...], TableGroup] = {}
        self._set_addresses()
        self._ring = None
        if self.undo_log is not None:
            self._ring = Ring.open(self.memory, self.steps, tables.journal)
        self.journal = ChangeJournal(self.tally, self._ring)
        for table in tables.tables:
            self.states.append(table_states.open_published(self, table))
        table_states.link(self)
        self._transactions.open_notes(*tables.notes)
        if self.memory.is_new:
            self.publish([])
        self._transactions.complete()

    @property
    def tables(self) -> list[TableSpec]:
        """The tables, in the order in which they were added."""
        return [state.spec for state in self.present]

    @property
    def present(self) -> list[TableState]:
        """The tables that were not dropped."""
        return [state for state in self.states if not state.is_dropped]

    @property
    def num_rows(self) -> int:
        """Rows in use, of all tables."""
        return int(self.tally[memory.ROWS])

    @property
    def num_updates(self) -> int:
        """The sum of the tables' steps."""
        return sum(state.num_updates for state in self.present if not state.is_part)

    @property
    def tick(self) -> int:
        """Number of the last request that used rows."""
        return int(self.tally[memory.TICK])

    @tick.setter
    def tick(self, tick: int) -> None:
        self.tally[memory.TICK] = tick

    @property
    def tick_in_files(self) -> int:
        """The tick as files have it, where a use has 40 bits of it."""
        return min(self.tick, memory.LARGEST_TICK)

    @property
    def is_loading(self) -> bool:
        """Whether rows are being loaded: of a process that dies now, none are left."""
        return bool(self.tally[memory.LOADING])

    @is_loading.setter
    def is_loading(self, is_loading: bool) -> None:
        self.tally[memory.LOADING] = is_loading

    def add_tables(self, specs: Sequence[TableSpec]) -> list[int]:
        """Add tables, or change known ones; return their numbers.

        The rows of a known table keep their form. An error changes no table.
        """
        self.free_blocks()  # by the rules as they were
        number_of = {state.spec.name: state.number for state in self.present}
        states, num_arenas = list(self.states), len(self.arenas.words)
        try:
            for spec in with_parts(specs):
                number = number_of.setdefault(spec.name, len(states))
                if number < len(states):
                    states[number] = table_states.change(self, states[number], spec)
                else:
                    states.append(table_states.make(self, spec, number))
            self.publish(states)
        except BaseException:
            self.arenas.drop(num_arenas)
            self.memory.rewind()
            raise
        for before, state in zip(self.states, states, strict=False):
            if before.remembered is not state.remembered and before.remembered.size:
                self.memory.emptied(before.remembered)
        self.states = states
        self.forget_groups()
        table_states.link(self)
        return [number_of[spec.name] for spec in specs]

    def add_table(self, spec: TableSpec) -> int:
        """Add one table: :meth:`add_tables`."""
        return self.add_tables([spec])[0]

    def wants_counts(self, table: int) -> bool:
        """Return whether it matters how often an id is in a batch."""
        state = self.states[table]
        return bool(state.admission or state.counts_ids or state.has_metadata)

    def lookup(
        self,
        table: int,
        ids_N: Ids,
        out_ND: Floats,
        *,
        training: bool,
        counts_N: Counts | None = None,
        batch: int = 0,
    ) -> Slots:
        """Copy the weights of ids, in any order and with repeats, to ``out_ND``.

        ``training`` counts each row as used, then makes the missing rows in the order
        of the ids, evicting if need be. An id that is not admitted, and without
        ``training`` every id that has no row, reads the table's ``unadmitted_value``;
        or with ``ids_without_row="initial"`` what its row would begin with.
        ``out_ND`` is C-contiguous. ``counts_N`` is how often each id is in the batch;
        once each if not given. ``batch`` is the batch's number, see ``BatchCount``.
        Returns the slots, hints for :meth:`update`, in training only; of a table with
        blocks those of all, ``(N, blocks)``.
        """
        state = self.states[table]
        if ids_N.flags.writeable:
            ids_N = read_only(ids_N)
        if training:
            return state.look_up(self, ids_N, out_ND, counts_N, batch)
        state.look_only(self, ids_N, out_ND)
        return _NO_SLOTS

    def group(self, tables: tuple[int, ...]) -> TableGroup:
        """Return tables, by number, as what loops take at once."""
        found = self._groups.get(tables)
        if found is None:
            if sum(map(len, self._groups)) + len(tables) > _MAX_GROUPED:
                self._groups.clear()
            found = TableGroup([self.states[number] for number in tables])
            self._groups[tables] = found
        return found

    def is_group(self, tables: tuple[int, ...]) -> bool:
        """Return whether :meth:`group` has made these, and none was dropped since."""
        return tables in self._groups

    def forget_groups(self) -> None:
        """Make all groups again: their tables have changed."""
        self._groups.clear()

    def lookup_tables(
        self,
        tables: tuple[int, ...],
        ids_N: Ids,
        starts_T: Starts,
        out: Floats,
        *,
        counts_N: Counts | None = None,
        batch: int = 0,
    ) -> list[Slots]:
        """Do training lookups, one of each table, in their order.

        Those of table t are ``ids_N[starts_T[t]:starts_T[t + 1]]``; ``starts_T`` has
        ``T + 1`` numbers. ``out`` is flat, its rows table by table. Returns the slots
        of all ids, as one array; or one of each table, if some has several rows an id.
        """
        group = self.group(tables)
        if group.is_looked_up_at_once:
            return [self.look_up_rows(group, ids_N, starts_T, out, counts_N, batch)]
        found, starts = [], starts_T.tolist()
        rows = split_rows(out, starts_T, group.dims)
        for t, (table, out_ND) in enumerate(zip(tables, rows, strict=True)):
            part = slice(starts[t], starts[t + 1])
            counts = counts_N if counts_N is None else counts_N[part]
            slots_N = self.lookup(
                table, ids_N[part], out_ND, training=True, counts_N=counts, batch=batch
            )
            found.append(slots_N)
        return found

    def look_up_rows(
        self,
        group: TableGroup,
        ids_N: Ids,
        starts_T: Starts,
        out: Floats,
        counts_N: Counts | None = None,
        batch: int = 0,
    ) -> Slots:
        """Do :meth:`lookup_tables` of rows that have one block."""
        if ids_N.flags.writeable:
            ids_N = read_only(ids_N)
        if counts_N is None:
            counts_N = _NO_COUNTS
        elif counts_N.flags.writeable:
            counts_N = read_only(counts_N)
        slots_N = np.empty(len(ids_N), dtype=np.uint32)
        missing_N = np.empty(len(ids_N), dtype=np.int64)
        num_tables, first_tick = len(group.states), self.tick + 1
        num_touches = len(ids_N) + MARK_WORDS * (num_tables - 1)
        made: dict[int, tuple[Indices, Indices]] = {}
        rows: list[Floats] = []  # by table, once one makes rows
        self._transactions.begin(num_touches)
        t, needed = 0, num_touches
        while t < num_tables:
            t, num_missing = loops.lookup_training(
                group.at,
                (t, needed),
                ids_N,
                counts_N,
                starts_T,
                out,
                slots_N,
                missing_N,
            )
            if num_missing == loops.NO_ROOM:
                directory = self.arenas.directory
                self.logs.make_room(directory, num_touches, self.undo_log)
                self._transactions.begin(num_touches)
            elif num_missing:
                missing = missing_N[:num_missing]
                if self.journal.is_on:
                    missing = missing.copy()  # the next table's follow
                part = slice(int(starts_T[t]), int(starts_T[t + 1]))
                rows = rows or split_rows(out, starts_T, group.row_dims)
                arrays = ids_N[part], counts_N[part], rows[t], slots_N[part]
                admitted = self._make_missing(group.states[t], batch, missing, arrays)
                made[t] = missing, admitted
                t, needed = t + 1, 0
        if self.journal.is_on:
            self.journal.looked_up(slots_N, ids_N)
            for t, state in enumerate(group.states):
                part = slice(int(starts_T[t]), int(starts_T[t + 1]))
                self._note_lookup(
                    state,
                    first_tick + t,
                    ids_N[part],
                    slots_N[part],
                    made.get(t, _NONE_MADE),
                )
        self._transactions.end()
        return slots_N

    def _note_lookup(
        self,
        state: TableState,
        tick: int,
        ids_N: Ids,
        slots_N: Slots,
        made: tuple[Indices, Indices],
    ) -> None:
        """Note a training lookup: ``made`` are positions of missing and of new ids."""
        self.journal.used(
            ChangedSlots(state.number, int(state.layout[memory.ARENA]), tick, slots_N),
            *made,
        )
        if state.remembered.size:
            self.journal.seen(state.number, ids_N[made[0]])

    def _make_missing(
        self,
        state: TableState,
        batch: int,
        missing: loops.Indices,
        arrays: tuple[Ids, Counts, Floats, Slots],
    ) -> loops.Indices:
        """Make the rows of those missing ids that are admitted; return which."""
        ids_N, counts_N, out_ND, slots_N = arrays
        self._transactions.keep_admission(state, len(missing))
        now = self.tick, batch
        chosen = admitted, _ = state.admit(ids_N, counts_N, missing, out_ND, now)
        self.tally[memory.REJECTED] += len(missing) - len(admitted)
        state.layout[memory.NOW_S] = self.now_s(state)
        rejects = state.admission is not None
        if rejects:
            state.make_for(self, ids_N, missing, admitted)
        self.make_room(state.number, len(admitted))
        state.insert(state.at, ids_N, counts_N, chosen, out_ND, slots_N)
        if rejects:
            state.begin_rows(ids_N, missing, admitted, out_ND)
        return admitted

    def update(
        self,
        table: int,
        ids_N: Ids,
        grads_ND: Floats,
        hints_N: Slots | None = None,
    ) -> UpdateResult:
        """Apply the table's optimizer to the rows of ids, repeated ones twice.

        ``hints_N`` is what the lookup of these ids returned; each hint is checked, and
        a wrong one costs time only, but that a block that none names gets no gradient.
        Within a transaction there is :meth:`add_update`.
        """
        with self.transaction() as transaction:
            self.add_update(table, ids_N, grads_ND, hints_N)
        return transaction.results[-1]

    def add_update(
        self, table: int, ids_N: Ids, grads_ND: Floats, hints_N: Slots | None = None
    ) -> None:
        """Do :meth:`update` at the end of the transaction, which has the result."""
        state = self.states[table]
        parts, grads_ND, hints_N = state.split_update(ids_N, grads_ND, hints_N)
        for part in parts:
            self._transactions.add_update(*part)
        self._transactions.add_update(table, ids_N, grads_ND, hints_N)

    def add_updates(
        self,
        tables: tuple[int, ...],
        ids_N: Ids,
        starts_T: Starts,
        grads: Floats,
        hints_N: Slots | None = None,
    ) -> None:
        """Do :meth:`add_update` of several tables; ``grads`` are flat, table by table.

        Those of table t are ``ids_N[starts_T[t]:starts_T[t + 1]]``. ``hints_N`` are the
        slots of all ids, as :meth:`lookup_tables` returned them.
        """
        group = self.group(tables)
        if group.updates is not None:
            self._transactions.add_updates(group, ids_N, starts_T, grads, hints_N)
            return
        starts, rows = starts_T.tolist(), split_rows(grads, starts_T, group.dims)
        for t, (table, grads_ND) in enumerate(zip(tables, rows, strict=True)):
            part = slice(starts[t], starts[t + 1])
            hints = None if hints_N is None else hints_N[part]
            self.add_update(table, ids_N[part], grads_ND, hints)

    def transaction(self) -> Transaction:
        """Make several calls, and notes, one change.

        If the process dies, the next one that opens the memory file finds all of it, or
        nothing. Lookups, sweeps and removals are done at once; updates, writes, steps
        and a clear, which is the last one, at the end, and then notes. After an error
        nothing is done at the end. A transaction in another one is a part of that.
        """
        return self._transactions.opened or Transaction(self._transactions)

    def notes(self, num_words: int) -> Words:
        """Return words that live as long as the memory, zero at first.

        Transactions set them. The number is the same at every call. They cost nothing
        until they are committed in ``memory``, and can be used then.
        """
        return self._transactions.make_notes(num_words)

    def write(self, table: int, ids_N: Ids, rows_NK: Floats) -> None:
        """Set weights ``(N, D)``, or weights and state ``(N, D + S)``, of ids.

        Missing rows are made, admitted or not. In a full LFU store new rows may be the
        least frequent, and leave for the next ones of the same request.
        """
        if len(ids_N) > self.capacity_rows:
            raise StoreError(
                f"At most {self.capacity_rows} rows fit. Received: {len(ids_N)} ids."
            )
        self.states[table].write(self, ids_N, rows_NK)

    def write_rows(self, state: TableState, ids_N: Ids, rows_NK: Floats) -> None:
        """Do :meth:`write` of rows that have one block."""
        weights_ND = np.empty((len(ids_N), state.spec.row_dim), dtype=np.float32)
        ids_N, rows_NK = read_only(ids_N), read_only(rows_NK)
        admission, state.admission = state.admission, None
        with self.transaction():
            try:
                state.look_up_rows(self, ids_N, weights_ND)
            finally:
                state.admission = admission
            self._transactions.add(
                Change(WRITE, state.number, ids=ids_N, values=rows_NK)
            )

    def read(self, table: int, ids_N: Ids) -> Floats:
        """Return weights and state of ids, ``(N, D + S)``; zeros without a row."""
        return self.states[table].read(self, ids_N)

    def scan(
        self, table: int, start: int, max_rows: int, *, only_ids: bool = False
    ) -> ScannedRows:
        """Return the next rows of a table, in the order of their slots.

        ``start`` is 0, then ``next_slot`` of the previous slice, which may be short, or
        empty, before the end. A row that lives from the first slice to the last is met
        exactly once; one that is evicted and comes back may be met twice.
        """
        state = self.states[table]
        words = self.arena(state)
        arena = int(state.layout[memory.ARENA])
        num_used = int(self.arenas.directory[arena, memory.USED])
        stop = min(start + MAX_SCANNED_SLOTS, num_used)
        slots_N = np.empty(min(max_rows, max(stop - start, 0)), dtype=np.uint32)
        num, next_slot = loops.find_rows(state.layout, start, stop, slots_N)
        ids_N = np.ascontiguousarray(words[slots_N[:num], 0])
        end = next_slot if next_slot < num_used else None
        read = ids_N[:0] if only_ids else ids_N
        return ScannedRows(ids_N, self.read(table, read), end)

    def set_step(self, table: int, step: int) -> None:
        """Continue counting a table's update requests from ``step``."""
        if self.journal.is_on:
            self.journal.changed(ChangedSlots(table, 0, 0, _NO_SLOTS))
        with self.transaction() as transaction:
            transaction.steps[table] = step
            self._transactions.add(Change(STEP, table, step))

    def metadata(self, table: int, ids_N: Ids) -> Metadata:
        """Return how often ids were looked up, and when they were last updated."""
        state = self.states[table]
        if not state.has_metadata:
            raise ConfigError(
                f"Table {state.spec.name!r} keeps no metadata. Add it with "
                "keeps_metadata=True."
            )
        slots_N = self.find(table, ids_N)
        has_row = slots_N != memory.MISSING
        columns_N4 = np.zeros((len(slots_N), 4), dtype=np.uint32)
        begin = int(memory.FREQUENCY) // 4
        words = self.arena(state).view(np.uint32)
        columns_N4[has_row] = words[slots_N[has_row], begin : begin + 4]
        frequency, last_step, first_step, last_s = columns_N4.T
        return Metadata(frequency, first_step, last_step, last_s)

    def find(self, table: int, ids_N: Ids) -> Slots:
        """Return the slot of each id, or ``MISSING``; uint32 ``(N,)``."""
        return loops.find_slots(self.states[table].layout, read_only(ids_N))

    def sweep(self, max_rows: int) -> bool:
        """Take out rows of dropped tables, lost blocks, then rows that have expired.

        Looks at ``max_rows`` slots. Returns False at the end of a pass.
        """
        if self.leaving:
            return table_states.free_rows(self, max_rows) or self.must_free_blocks
        if self.must_free_blocks:
            return self._transactions.free_blocks()
        if (rules_T := self._sweeps.rules()) is None:
            return False
        self.journal.make_room(max_rows)
        layouts_T = np.stack([state.layout for state in self.states])
        directory, log = self.arenas.directory, self._transactions.log
        next_ = [memory.SWEPT_ARENA, memory.SWEPT_SLOT]
        arena, slot = self.tally[next_].tolist()
        self._sweeps.begin_slice(is_first=not (arena or slot))
        with self.changing():
            self._transactions.make_room(max_rows)
            while max_rows > 0 and arena < len(directory):
                num_used = int(directory[arena, memory.USED])
                stop = min(slot + max_rows, num_used)
                loops.sweep_slots((arena, slot, stop), layouts_T, rules_T, log)
                max_rows -= max(stop - slot, 0)  # it may have been cleared since
                arena, slot = (arena, stop) if stop < num_used else (arena + 1, 0)
            is_over = arena == len(directory)
            self.tally[next_] = (0, 0) if is_over else (arena, slot)
        if is_over:
            self._sweeps.end_pass()
        return not is_over

    @property
    def must_free_blocks(self) -> bool:
        """Whether ids have lost blocks that were not freed yet: a period has ended."""
        return self._transactions.must_free_blocks

    def free_blocks(self) -> None:
        """Free all blocks that ids have lost, and set the thresholds of that period."""
        while self.must_free_blocks:
            self._transactions.free_blocks()

    def now_s(self, state: TableState) -> int:
        """Return the second that rows of a table note now."""
        by_clock = not state.is_by_running_time
        return max(int(self.clock() if by_clock else self.seconds.running_s), 0)

    def seconds_of(self, group: TableGroup) -> int | npt.NDArray[np.int64]:
        """Return the second that rows of tables note now: of each, or of all."""
        if not group.is_by_running_time.any():
            return max(int(self.clock()), 0)
        return np.array([self.now_s(state) for state in group.states])

    def remove(self, table: int, ids_N: Ids) -> None:
        """Drop the rows of ids; those that have none are skipped."""
        self.free_blocks()  # these rows are still ranked
        self.take_out(table, ids_N)

    def take_out(self, table: int, ids_N: Ids) -> None:
        """Drop the rows of ids, as :meth:`remove`, also while a period ends."""
        self.journal.make_room(len(ids_N))
        with self.changing():
            self.journal.leaving(table, ids_N)
            self._transactions.make_room(len(ids_N))
            loops.remove_ids(self.states[table].at, read_only(ids_N))

    def take_rows_of(self, other: "EmbeddingStore") -> None:
        """Take over the tables and rows of another store, which is not used again."""
        vars(self).update(vars(other))
        self._transactions = Transactions(self, self.undo_log)
        self.seconds, self._sweeps = ExpiryClock(self), Sweeps(self)

    def clear(self) -> None:
        """Drop all rows and their optimizer state; the tables stay known."""
        with self.transaction():
            self._transactions.add(Change(CLEAR))

    def drop_rows(self) -> None:
        """Clear, as a part of what is in progress."""
        self.arenas.clear()
        self.index.clear()
        self.logs.clear()
        for number, state in enumerate(self.states):
            state.forget(self.memory)
            self.steps[number] = 0
        self.leaving.clear()
        empty = [memory.ROWS, memory.PINNED_ROWS, memory.HAS_LARGE]
        self.tally[empty] = 0
        self._set_addresses()
        self.journal.cleared()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change rows at once, or not at all."""
        self._transactions.begin()
        yield
        self._transactions.end()

    def make_room(self, table: int, num_rows: int) -> None:
        """Make room for rows of a table that are about to be made."""
        self._transactions.free_blocks_for(num_rows)
        self.journal.make_room(num_rows)
        if self.undo_log is not None:
            arena = int(self.states[table].layout[memory.ARENA])
            self._transactions.make_room(num_rows)
            self.arenas.make_room(arena, num_rows)
            self.index.make_room(num_rows)

    def close(self) -> None:
        """End the use of the memory. The store is not used again."""
        self.memory.close()

    def arena(self, state: TableState) -> Words:
        """Return the slots of the arena that a table's rows are in."""
        return self.arenas.words[int(state.layout[memory.ARENA])]

    def counters(self) -> dict[str, int]:
        """Return what has been counted since the start, and the rows in use now."""
        strides, num_used = self.arenas.directory[:, [memory.STRIDE, memory.USED]].T
        num_bytes = int((strides * num_used).sum())
        return {
            "rows": self.num_rows,
            "capacity_rows": self.capacity_rows,
            "bytes": num_bytes + self.index.size_bytes + self.logs.size_bytes,
            **{name: int(self.tally[at]) for name, at in memory.COUNTERS.items()},
        }

    def _set_addresses(self) -> None:
        """Write what :func:`memory.store_at` reads: addresses, and how many logs."""
        logs, index = self.logs.directory, self.index
        arrays = index.lines, index.cursor, self.arenas.directory, logs, self.tally
        self.addresses[:] = [*(array.ctypes.data for array in arrays), len(logs)]

    def publish(self, states: Sequence[TableState]) -> None:
        """Write down the tables, for a process that opens the memory later."""
        if self.undo_log is None:
            return
        found = Published(
            len(self.arenas.words),
            [state.describe(self.steps) for state in states],
            self._transactions.describe_notes(),
            self._ring.at(self.steps) if self._ring else 0,
        )
        self.memory.publish(msgspec.json.encode(found))

    def read_slots(self, state: TableState, slots_N: Slots) -> Floats:
        """Return all floats of rows of one block; zeros for ``MISSING``."""
        width = state.spec.row_dim + state.spec.num_row_floats
        out = np.empty((len(slots_N), width), dtype=np.float32)
        memory.read_rows(state.layout, slots_N, out)
        return out
