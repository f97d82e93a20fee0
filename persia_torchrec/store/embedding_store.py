"""The store: all tables of one shard, at most ``capacity`` rows of them together.

One thread owns a store; nothing here locks.

    ids --index--> slots --memory--> weights
                     |
                  recency: a training lookup refreshes; nothing else does

In a memory file every change is all or nothing: see ``undo_log.py``.
"""

import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np

from persia_torchrec.arrays import Counts, Floats, Ids, Slots, Starts, Words
from persia_torchrec.embedding.limits import MAX_ROWS
from persia_torchrec.errors import ConfigError, StoreError
from persia_torchrec.jit.compiled import read_only
from persia_torchrec.parsing.decoding import parse_json
from persia_torchrec.routing.route import split_rows
from persia_torchrec.store import loops, memory, table_states
from persia_torchrec.store.expiry import Sweeps
from persia_torchrec.store.fbgemm_engine import start_engine
from persia_torchrec.store.memory import PrivateMemory, ScannedRows, StoreMemory
from persia_torchrec.store.memory_file import MemoryFile, Published
from persia_torchrec.store.recency import NUM_LFU_CLASSES
from persia_torchrec.store.store_rows import StoreRows, UpdateResult
from persia_torchrec.store.stored_table import TableState, look_up_rows
from persia_torchrec.store.table_group import TableGroup
from persia_torchrec.table import Metadata, TableSpec, with_parts

Eviction = Literal["lru", "lfu"]
"""Which row leaves a full store: the least recently, or least frequently used."""

MAX_SCANNED_SLOTS = 1 << 20
"""Slots that a scan walks over: a few milliseconds where no row is of the table."""

_MAX_GROUPED = 2**16  # tables of all groups that are kept
_SWEPT = [memory.SWEPT_ARENA, memory.SWEPT_SLOT]
_NO_SLOTS = np.empty(0, dtype=np.uint32)
_NO_FREQUENCIES = np.empty(0, dtype=np.uint32)


class EmbeddingStore:
    """Rows by table and id, least recently used out first.

    Attributes:
        rows: of all tables.
        states: the tables, in the order in which they were added; those that were
            dropped keep their numbers.
        leaving: of dropped tables whose rows are still to be freed, by number, the slot
            to look at next.

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
        is_system = clock is time.time  # noqa: TID251  # as above
        num_classes = NUM_LFU_CLASSES if eviction == "lfu" else 1
        engine = start_engine(optimizer_engine)
        source: StoreMemory = PrivateMemory()
        if memory_file is not None:
            source = MemoryFile(memory_file, capacity_rows, num_classes)
        try:
            text = source.tables or b"{}"
            found: Published = parse_json(text, Published, "A memory file", StoreError)
            self.rows = StoreRows(
                source,
                capacity_rows,
                num_classes,
                found,
                engine=engine,
                clock=clock,
                monotonic=monotonic or (time.monotonic if is_system else clock),
            )
            self._open(found)
        except BaseException:
            source.close(is_clean=False)
            raise

    def _open(self, found: Published) -> None:
        """Open the tables, and complete what the previous process has begun."""
        rows, undo_log = self.rows, self.rows.undo_log
        self._sweeps = Sweeps(rows.tally, rows.seconds)
        self._groups: dict[tuple[int, ...], TableGroup] = {}
        self.states = [
            table_states.open_published(rows, table, number)
            for number, table in enumerate(found.tables)
        ]
        self.leaving = {state.number: 0 for state in self.states if state.is_dropped}
        table_states.link(self.states)
        if rows.memory.is_new:
            self._publish([])
        if rows.tally[memory.CHANGE] == memory.CLEAR and undo_log is not None:
            self._drop_rows()
            undo_log.end_clear()
            rows.end()
        if rows.was_loading:
            self._drop_rows()  # and load again
            rows.tally[memory.CHANGE] = memory.LOAD
            rows.is_loading = False
        self.free_blocks()

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
        return self.rows.num_rows

    @property
    def num_updates(self) -> int:
        """The sum of the tables' steps."""
        return sum(state.num_updates for state in self.present if not state.is_part)

    def add_tables(self, specs: Sequence[TableSpec]) -> list[int]:
        """Add tables, or change known ones; return their numbers.

        The rows of a known table keep their form. An error changes no table.
        """
        self.free_blocks()  # by the rules as they were
        number_of = {state.spec.name: state.number for state in self.present}
        states, rows = list(self.states), self.rows
        num_arenas = len(rows.arenas.words)
        try:
            for spec in with_parts(specs):
                number = number_of.setdefault(spec.name, len(states))
                if number < len(states):
                    states[number] = table_states.change(states[number], spec)
                else:
                    states.append(table_states.make(rows, spec, number))
            self._publish(states)
        except BaseException:
            rows.arenas.drop(num_arenas)
            rows.memory.rewind()
            raise
        for before, state in zip(self.states, states, strict=False):
            if before.remembered is not state.remembered and before.remembered.size:
                rows.memory.emptied(before.remembered)
        self.states = states
        self._relink()
        return [number_of[spec.name] for spec in specs]

    def add_table(self, spec: TableSpec) -> int:
        """Add one table: :meth:`add_tables`."""
        return self.add_tables([spec])[0]

    def copy_tables(self, of: "EmbeddingStore") -> None:
        """Give an empty store the tables of another one, with their numbers."""
        for number, other in enumerate(of.states):
            self.states.append(table_states.make(self.rows, other.spec, number))
            self.states[-1].is_dropped = other.is_dropped
        self._publish(self.states)
        self._relink()

    def drop_tables(self, numbers: Sequence[int]) -> None:
        """Drop tables, and their parts: at once, all or nothing.

        Their numbers are never used again, their names may be. :meth:`sweep` frees
        their rows.
        """
        states, journal = [self.states[n] for n in numbers], self.rows.journal
        parts = {part.name for state in states for part in state.spec.parts()}
        states += [s for s in self.present if s.spec.name in parts and s not in states]
        for state in states:
            journal.dropping(state.number)
            state.is_dropped = True
        try:
            self._publish(self.states)
        except BaseException:
            for state in states:
                state.is_dropped = False
            raise
        journal.dropped([state.spec.name for state in states])
        for state in states:
            self.leaving[state.number] = 0
            table_states.forget(state)
        self._relink()

    def free_rows(self, max_rows: int) -> None:
        """Free some rows of dropped tables, of which there are some."""
        number, start = next(iter(self.leaving.items()))
        next_slot = table_states.free_rows(self.states[number], start, max_rows)
        if next_slot is None:
            del self.leaving[number]
        else:
            self.leaving[number] = next_slot

    def _relink(self) -> None:
        """Link the tables, and make all groups again: their tables have changed."""
        self._groups.clear()
        table_states.link(self.states)

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
            return state.look_up(ids_N, out_ND, counts_N, batch)
        state.read_only(ids_N, out_ND)
        return _NO_SLOTS

    def group(self, tables: tuple[int, ...]) -> TableGroup:
        """Return tables, by number, as what loops take at once."""
        found = self._groups.get(tables)
        if found is None:
            if sum(map(len, self._groups)) + len(tables) > _MAX_GROUPED:
                self._groups.clear()
            states = [self.states[number] for number in tables]
            found = TableGroup(self.rows, states)
            self._groups[tables] = found
        return found

    def is_group(self, tables: tuple[int, ...]) -> bool:
        """Return whether :meth:`group` has made these, and none was dropped since."""
        return tables in self._groups

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
        if not tables:
            return [_NO_SLOTS]
        if group.is_looked_up_at_once:
            slots_N = look_up_rows(group.tables, ids_N, starts_T, out, counts_N, batch)
            return [slots_N]
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

    def lookup_states(
        self,
        tables: tuple[int, ...],
        ids_N: Ids,
        starts_T: Starts,
        out: Floats,
        frequencies_N: Counts,
        *,
        counts_N: Counts | None = None,
        batch: int = 0,
    ) -> Slots:
        """Do :meth:`lookup_tables` with the optimizer state behind the weights.

        An id that is not admitted reads the state of a new row, and has no slot:
        ``MISSING``. Also writes how often each row was seen, with this time, where the
        table keeps metadata; ``frequencies_N`` may be empty. A table with several rows
        an id is a ConfigError.
        """
        group = self._with_one_row(tables)
        if not tables:
            return _NO_SLOTS
        how = loops.READ_ROWS
        return look_up_rows(
            group.tables, ids_N, starts_T, out, counts_N, batch, how, frequencies_N
        )

    def write_tables(
        self,
        tables: tuple[int, ...],
        ids_N: Ids,
        starts_T: Starts,
        rows: Floats,
        *,
        counts_N: Counts | None = None,
        frequencies_N: Counts | None = None,
        steps_T: Starts | None = None,
    ) -> None:
        """Set weights and state of ids of several tables, in any order.

        Ids and rows are as in :meth:`lookup_states`. Missing rows are made, admitted or
        not, and all are touched; none leaves for another one of the same call, and what
        finds no room is counted. A row has then been seen ``counts_N`` times more than
        it had been, or than ``frequencies_N`` if that is more; once by default.
        ``steps_T`` are updates that each table has had at least: rows note that of
        their table as their last, and the second.
        """
        group, num = self._with_one_row(tables), self.rows.capacity_rows
        if len(ids_N) > num:
            raise StoreError(f"At most {num} rows fit. Received: {len(ids_N)} ids.")
        how = loops.WRITE_ROWS if steps_T is None else loops.WRITE_UPDATED
        known = _NO_FREQUENCIES if frequencies_N is None else frequencies_N.copy()
        with self.rows.transaction():
            if steps_T is not None:
                group.raise_steps(steps_T)
            if tables:
                look_up_rows(
                    group.tables, ids_N, starts_T, rows, counts_N, 0, how, known
                )

    def _with_one_row(self, tables: tuple[int, ...]) -> TableGroup:
        """Return tables that have one row an id."""
        group = self.group(tables)
        if not group.has_one_row:
            names = [state.spec.name for state in group.states]
            raise ConfigError(
                "Tables must have one row an id, so that rows travel with state: no "
                f"shared_rows, no dynamic. Received: {', '.join(map(repr, names))}."
            )
        return group

    def read_tables(
        self, tables: tuple[int, ...], ids_N: Ids, starts_T: Starts, out: Floats
    ) -> None:
        """Do lookups that are not for training, one of each table, in their order.

        Ids and ``out`` are as in :meth:`lookup_tables`.
        """
        group, ids_N = self.group(tables), read_only(ids_N)
        if group.is_read_at_once:
            layouts_T, _ = group.at
            values_T = group.unadmitted_values
            loops.lookup_readonly(layouts_T, ids_N, starts_T, out, values_T)
            return
        rows, starts = split_rows(out, starts_T, group.dims), starts_T.tolist()
        for t, (state, out_ND) in enumerate(zip(group.states, rows, strict=True)):
            state.read_only(ids_N[starts[t] : starts[t + 1]], out_ND)

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
        with self.rows.transaction() as transaction:
            self.add_update(table, ids_N, grads_ND, hints_N)
        return transaction.results[-1]

    def add_update(
        self, table: int, ids_N: Ids, grads_ND: Floats, hints_N: Slots | None = None
    ) -> None:
        """Do :meth:`update` at the end of the transaction, which has the result."""
        self.states[table].add_update(ids_N, grads_ND, hints_N)

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
            group.add_update(ids_N, starts_T, grads, hints_N)
            return
        starts, rows = starts_T.tolist(), split_rows(grads, starts_T, group.dims)
        for t, (table, grads_ND) in enumerate(zip(tables, rows, strict=True)):
            part = slice(starts[t], starts[t + 1])
            hints = None if hints_N is None else hints_N[part]
            self.add_update(table, ids_N[part], grads_ND, hints)

    def notes(self, num_words: int) -> Words:
        """Return words that live as long as the memory, zero at first.

        Transactions set them. The number is the same at every call. They cost nothing
        until they are committed in ``memory``, and can be used then.
        """
        rows = self.rows
        if rows.notes.size == 0:
            [rows.notes] = rows.memory.reserve(num_words)
            self._publish(self.states)
        if rows.notes.size != num_words:
            raise StoreError(
                f"The memory file must be used with the {rows.notes.size} notes that "
                f"it was made for. Received: {num_words}. Start the version that made "
                "it, or delete the file."
            )
        return rows.notes

    def write(self, table: int, ids_N: Ids, rows_NK: Floats) -> None:
        """Set weights ``(N, D)``, or weights and state ``(N, D + S)``, of ids.

        Missing rows are made, admitted or not. In a full LFU store new rows may be the
        least frequent, and leave for the next ones of the same request.
        """
        if len(ids_N) > self.rows.capacity_rows:
            raise StoreError(
                f"At most {self.rows.capacity_rows} rows fit. Received: {len(ids_N)} "
                "ids."
            )
        self.states[table].write(ids_N, rows_NK)

    def read(self, table: int, ids_N: Ids) -> Floats:
        """Return weights and state of ids, ``(N, D + S)``; zeros without a row."""
        return self.states[table].read(ids_N)

    def scan(
        self, table: int, start: int, max_rows: int, *, only_ids: bool = False
    ) -> ScannedRows:
        """Return the next rows of a table, in the order of their slots.

        ``start`` is 0, then ``next_slot`` of the previous slice, which may be short, or
        empty, before the end. A row that lives from the first slice to the last is met
        exactly once; one that is evicted and comes back may be met twice.
        """
        layout = self.states[table].layout
        num_used = self.rows.num_used(layout)
        stop = min(start + MAX_SCANNED_SLOTS, num_used)
        slots_N = np.empty(min(max_rows, max(stop - start, 0)), dtype=np.uint32)
        num, next_slot = loops.find_rows(layout, start, stop, slots_N)
        ids_N = np.ascontiguousarray(self.rows.arena(layout)[slots_N[:num], 0])
        end = next_slot if next_slot < num_used else None
        read = ids_N[:0] if only_ids else ids_N
        return ScannedRows(ids_N, self.read(table, read), end)

    def set_step(self, table: int, step: int) -> None:
        """Continue counting a table's update requests from ``step``."""
        self.states[table].add_step(step)

    def metadata(self, table: int, ids_N: Ids) -> Metadata:
        """Return how often ids were looked up, and when they were last updated."""
        state = self.states[table]
        if not state.has_metadata:
            raise ConfigError(
                f"Table {state.spec.name!r} keeps no metadata. Add it with "
                "keeps_metadata=True."
            )
        slots_N = state.find(ids_N)
        has_row = slots_N != memory.MISSING
        columns_N4 = np.zeros((len(slots_N), 4), dtype=np.uint32)
        begin = int(memory.FREQUENCY) // 4
        words = self.rows.arena(state.layout).view(np.uint32)
        columns_N4[has_row] = words[slots_N[has_row], begin : begin + 4]
        frequency, last_step, first_step, last_s = columns_N4.T
        return Metadata(frequency, first_step, last_step, last_s)

    def find(self, table: int, ids_N: Ids) -> Slots:
        """Return the slot of each id, or ``MISSING``; uint32 ``(N,)``."""
        return self.states[table].find(ids_N)

    def sweep(self, max_rows: int) -> bool:
        """Take out rows of dropped tables, lost blocks, then rows that have expired.

        Looks at ``max_rows`` slots. Returns False at the end of a pass.
        """
        rows = self.rows
        if self.leaving:
            self.free_rows(max_rows)
            return bool(self.leaving or rows.unfreed)
        if rows.unfreed:
            rows.free_blocks()
            return True
        present = {state.number: state.spec for state in self.present}
        expiring = {number: s for number, s in present.items() if s.expiry.is_on}
        if not expiring:
            return False
        rows.journal.make_room(max_rows)
        layouts_T = np.stack([state.layout for state in self.states])
        directory = rows.arenas.directory
        arena, slot = rows.tally[_SWEPT].tolist()
        rules_T = self._sweeps.begin_slice(
            expiring, len(layouts_T), is_first=not (arena or slot)
        )
        with rows.changing():
            rows.make_room_to_keep(max_rows)
            while max_rows > 0 and arena < len(directory):
                num_used = int(directory[arena, memory.USED])
                stop = min(slot + max_rows, num_used)
                loops.sweep_slots((arena, slot, stop), layouts_T, rules_T, rows.log)
                max_rows -= max(stop - slot, 0)  # it may have been cleared since
                arena, slot = (arena, stop) if stop < num_used else (arena + 1, 0)
            is_over = arena == len(directory)
            rows.tally[_SWEPT] = (0, 0) if is_over else (arena, slot)
        if is_over:
            self._sweeps.end_pass([spec.name for spec in expiring.values()])
        return not is_over

    @property
    def must_free_blocks(self) -> bool:
        """Whether ids have lost blocks that were not freed yet: a period has ended."""
        return bool(self.rows.unfreed)

    def free_blocks(self) -> None:
        """Free all blocks that ids have lost, and set the thresholds of that period."""
        while self.rows.unfreed:
            self.rows.free_blocks()

    def remove(self, table: int, ids_N: Ids) -> None:
        """Drop the rows of ids; those that have none are skipped."""
        self.free_blocks()  # these rows are still ranked
        self.rows.take_out(self.states[table].at, ids_N)

    def take_rows_of(self, other: "EmbeddingStore") -> None:
        """Take over the tables and rows of another store, which is not used again."""
        vars(self).update(vars(other))

    def clear(self) -> None:
        """Drop all rows and their optimizer state; the tables stay known."""
        with self.rows.transaction() as transaction:
            transaction.clear(self._drop_rows)

    def _drop_rows(self) -> None:
        """Clear, as a part of what is in progress."""
        for number, state in enumerate(self.states):
            state.forget()
            self.rows.steps[number] = 0
        self.leaving.clear()
        self.rows.clear()

    def close(self) -> None:
        """End the use of the memory. The store is not used again."""
        self.rows.memory.close()

    def counters(self) -> dict[str, int]:
        """Return what has been counted since the start, and the rows in use now."""
        return self.rows.counters()

    def _publish(self, states: Sequence[TableState]) -> None:
        """Write down the tables, for a process that opens the memory later."""
        rows = self.rows
        if rows.undo_log is None:
            return
        found = Published(
            len(rows.arenas.words),
            [state.describe() for state in states],
            rows.describe_notes(),
            rows.ring.at(rows.steps) if rows.ring else 0,
        )
        rows.memory.publish(msgspec.json.encode(found))
