"""The store: all tables of one shard, at most ``capacity`` rows of them together.

One thread owns a store; nothing here locks.

    ids --index--> slots --memory--> weights
                     |
                  recency: a training lookup refreshes; nothing else does
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from persia_torchrec.compiled import read_only
from persia_torchrec.embedding.admission import AdmitAll
from persia_torchrec.errors import ConfigError, StoreError
from persia_torchrec.store import loops, memory
from persia_torchrec.store.fbgemm_engine import EngineChoice, OptimizerEngine
from persia_torchrec.store.index import MAX_ROWS, Index
from persia_torchrec.store.journal import ChangeJournal, UsedRows
from persia_torchrec.store.memory import (
    Arenas,
    Counts,
    Floats,
    Ids,
    PrivateMemory,
    Slots,
    StoreMemory,
    Tally,
    Words,
)
from persia_torchrec.store.memory_file import MemoryFile
from persia_torchrec.store.recency import NUM_LFU_CLASSES, RecencyLogs
from persia_torchrec.store.tables import TableState
from persia_torchrec.table import TableSpec

Eviction = Literal["lru", "lfu"]
"""Which row leaves a full store: the least recently, or least frequently used."""

MAX_SCANNED_SLOTS = 1 << 20
"""Slots that a scan walks over: a few milliseconds where no row is of the table."""

_COUNTERS = {
    "hits": memory.HITS,
    "misses": memory.MISSES,
    "inserted": memory.INSERTED,
    "rejected": memory.REJECTED,
    "evictions": memory.EVICTED,
    "expired_steps": memory.EXPIRED_STEPS,
    "expired_seconds": memory.EXPIRED_SECONDS,
    "expired_norm": memory.EXPIRED_NORM,
    "gradients_missed": memory.MISSED,
    "gradients_refused": memory.REFUSED,
}
_ROW_COLUMNS = [memory.WEIGHTS, memory.STATE, memory.NUM_STATE]
_NO_SLOTS = np.empty(0, dtype=np.uint32)
_NO_COUNTS = read_only(np.empty(0, dtype=np.uint32))
_NO_INDICES = np.empty(0, dtype=np.int64)
_NO_IDS = np.empty(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class ScannedRows:
    """Rows ``(N, D + S)`` of different ids; ``next_slot`` is None at the end."""

    ids: Ids
    rows: Floats
    next_slot: int | None


@dataclass(frozen=True, slots=True)
class Metadata:
    """Metadata of N ids; all 0 for an id that has no row.

    ``frequency`` counts how often the id was in training batches since its row was
    made, repeats included; it saturates. ``first_step`` and ``last_step`` are the
    table's steps when the row was made and last updated, ``last_s`` the second (since
    1970) of the latter.
    """

    frequency: Counts
    first_step: Counts
    last_step: Counts
    last_s: Counts


class UpdateResult(NamedTuple):
    """How many gradients were not applied.

    ``num_missed`` had no row, of which ``num_unadmitted`` were never admitted, the
    others evicted; ``num_refused`` held NaN or an infinity.
    """

    num_missed: int
    num_refused: int
    num_unadmitted: int = 0


class EmbeddingStore:
    """Rows by table and id, least recently used out first.

    Attributes:
        states: the tables, in the order in which they were added.
        arenas: one per width of rows, see ``memory.py``.
        tally: see ``memory.HITS`` and the others.
        journal: notes which rows change, once told to.

    Args:
        capacity_rows: rows of all tables together, in ``[1, 2**32 - 2]``.
        eviction: ``lfu`` costs 16 bytes per row for the frequency.
        optimizer_engine: all engines compute the same.
        clock: returns the current second, by which rows expire.
        memory_file: a file that keeps all of it (see ``LAYOUT.md``). If it is that of
            an earlier store, whose process may have been killed between two requests,
            this one continues with its tables and rows. None: private memory.
    """

    def __init__(
        self,
        capacity_rows: int,
        *,
        eviction: Eviction = "lru",
        optimizer_engine: OptimizerEngine = "auto",
        clock: Callable[[], float] = time.time,  # noqa: TID251  # kept in rows
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
        self._engine_choice = EngineChoice(optimizer_engine)
        self._clock = clock
        num_classes = NUM_LFU_CLASSES if self.is_lfu else 1
        self.memory: StoreMemory = PrivateMemory()
        if memory_file is not None:
            self.memory = MemoryFile(memory_file, capacity_rows, num_classes)
        tables = json.loads(self.memory.tables or '{"num_arenas": 0, "tables": []}')
        self.tally: Tally = self.memory.area(memory.TALLY).view(np.int64)
        self.tally[memory.CAPACITY] = capacity_rows
        self.journal = ChangeJournal(self.tally)
        self._steps = self.memory.area(memory.STEPS)
        self.index = Index(capacity_rows, self.memory)
        self.logs = RecencyLogs(capacity_rows, num_classes, self.memory)
        self.arenas = Arenas(capacity_rows, self.memory, tables["num_arenas"])
        # What every table's layout points to: see memory.store_at.
        self._addresses: Words = np.zeros(6, dtype=np.uint64)
        self.states: list[TableState] = []
        self._set_addresses()
        try:
            for table in tables["tables"]:
                self.states.append(self._open_table(**table))
            if self.memory.is_new:
                self._publish([])
            if self.tally[memory.CHANGE] == memory.CLEAR:
                self.clear()
        except BaseException:
            self.memory.close(is_clean=False)
            raise

    @property
    def tables(self) -> list[TableSpec]:
        """The tables, in the order in which they were added."""
        return [state.spec for state in self.states]

    @property
    def num_rows(self) -> int:
        """Rows in use, of all tables."""
        return int(self.tally[memory.ROWS])

    @property
    def tick(self) -> int:
        """Number of the last request that used rows."""
        return int(self.tally[memory.TICK])

    @tick.setter
    def tick(self, tick: int) -> None:
        self.tally[memory.TICK] = tick

    def add_tables(self, specs: Sequence[TableSpec]) -> list[int]:
        """Add tables, or change known ones; return their numbers.

        The rows of a known table keep their form. An error changes no table.
        """
        for name, times in Counter(spec.name for spec in specs).items():
            if times > 1:
                raise ConfigError(
                    "Tables added together must have different names. "
                    f"Received: {name!r} {times} times."
                )
        number_of = {spec.name: number for number, spec in enumerate(self.tables)}
        numbers = [number_of.setdefault(s.name, len(number_of)) for s in specs]
        states, num_arenas = list(self.states), len(self.arenas.words)
        try:
            for number, spec in zip(numbers, specs, strict=True):
                if number < len(states):
                    states[number] = self._change_table(states[number], spec)
                else:
                    states.append(self._make_table(spec, number))
            self._publish(states)
        except BaseException:
            self.arenas.drop(num_arenas)
            self.memory.rewind()
            raise
        for before, state in zip(self.states, states, strict=False):
            if before.remembered is not state.remembered and before.remembered.size:
                self.memory.emptied(before.remembered)
        self.states = states
        return numbers

    def add_table(self, spec: TableSpec) -> int:
        """Add one table: :meth:`add_tables`."""
        return self.add_tables([spec])[0]

    def wants_counts(self, table: int) -> bool:
        """Return whether it matters how often an id is in a batch."""
        state = self.states[table]
        return state.admission is not None or state.has_metadata

    def lookup(
        self,
        table: int,
        ids_N: Ids,
        out_ND: Floats,
        *,
        training: bool,
        counts_N: Counts | None = None,
    ) -> Slots:
        """Copy the weights of ids, in any order and with repeats, to ``out_ND``.

        ``training`` counts each row as used, then makes the missing rows in the order
        of the ids, evicting if need be. An id that is not admitted, and without
        ``training`` every id that has no row, reads the table's ``unadmitted_value``.
        ``out_ND`` is C-contiguous. ``counts_N`` is how often each id is in the batch;
        once each if not given. Returns the slots, hints for :meth:`update`, in
        training only.
        """
        state = self.states[table]
        layout = state.layout
        if ids_N.flags.writeable:
            ids_N = read_only(ids_N)
        if not training:
            value = np.float32(state.spec.admission.unadmitted_value)
            loops.lookup_readonly(layout, ids_N, out_ND, value)
            return _NO_SLOTS
        if counts_N is None:
            counts_N = _NO_COUNTS
        elif counts_N.flags.writeable:
            counts_N = read_only(counts_N)
        slots_N = np.empty(len(ids_N), dtype=np.uint32)
        missing_N = np.empty(len(ids_N), dtype=np.int64)
        arguments = layout, ids_N, counts_N, out_ND, slots_N, missing_N
        self.tally[memory.CHANGE] = memory.REQUEST
        num_missing = loops.lookup_training(*arguments)
        if num_missing == loops.NO_ROOM:
            self.logs.make_room(self.arenas.directory, len(ids_N))
            num_missing = loops.lookup_training(*arguments)
        missing = admitted = _NO_INDICES
        if num_missing:
            missing = missing_N[:num_missing].copy()  # the journal may keep it
            admitted = state.admit(ids_N, counts_N, missing, out_ND)
            self.tally[memory.REJECTED] += len(missing) - len(admitted)
            self.make_room(table, len(admitted))
            layout[memory.NOW_S] = max(int(self._clock()), 0)
            state.insert(layout, ids_N, counts_N, admitted, out_ND, slots_N)
        self.tally[memory.CHANGE] = memory.NO_CHANGE
        if self.journal.is_on:
            self.journal.used(UsedRows(table, self.tick, ids_N, missing, admitted))
        return slots_N

    def update(
        self,
        table: int,
        ids_N: Ids,
        grads_ND: Floats,
        hints_N: Slots | None = None,
    ) -> UpdateResult:
        """Apply the table's optimizer to the rows of ids, repeated ones twice.

        ``hints_N`` is what the lookup of these ids returned; each hint is checked, and
        a wrong one costs time only.
        """
        state = self.states[table]
        ids_N, grads_ND = read_only(ids_N), read_only(grads_ND)
        if hints_N is None or len(hints_N) != len(ids_N):
            hints_N = loops.find_slots(state.layout, ids_N)
        if self.journal.is_on:
            self.journal.updated(table, ids_N)
        hints_N = read_only(hints_N)
        self.tally[memory.CHANGE] = memory.REQUEST
        missed, refused = state.step_rows(ids_N, hints_N, grads_ND, self._clock())
        self.tally[memory.CHANGE] = memory.NO_CHANGE
        unadmitted = 0
        if missed and state.admission is not None:
            # Its lookup left it without a row, if what that found is known.
            num_without = int(np.count_nonzero(hints_N == memory.MISSING))
            unadmitted = min(num_without, missed)
        if missed or refused:
            self.tally[memory.MISSED] += missed
            self.tally[memory.REFUSED] += refused
        return UpdateResult(missed, refused, unadmitted)

    def write(self, table: int, ids_N: Ids, rows_NK: Floats) -> None:
        """Set weights ``(N, D)``, or weights and state ``(N, D + S)``, of ids.

        Missing rows are made, admitted or not. In a full LFU store new rows may be the
        least frequent, and leave for the next ones of the same request.
        """
        if len(ids_N) > self.capacity_rows:
            raise StoreError(
                f"At most {self.capacity_rows} rows fit. Received: {len(ids_N)} ids."
            )
        state = self.states[table]
        weights_ND = np.empty((len(ids_N), state.spec.dim), dtype=np.float32)
        admission, state.admission = state.admission, None
        try:
            self.lookup(table, ids_N, weights_ND, training=True)
        finally:
            state.admission = admission
        slots_N = self.find(table, ids_N)
        with self.changing(memory.REQUEST):
            memory.write_rows(state.layout, slots_N, read_only(rows_NK))

    def read(self, table: int, ids_N: Ids) -> Floats:
        """Return weights and state of ids, ``(N, D + S)``; zeros without a row."""
        return self._read_slots(table, self.find(table, ids_N))

    def scan(self, table: int, start: int, max_rows: int) -> ScannedRows:
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
        slots_N = slots_N[:num]
        ids_N = np.ascontiguousarray(words[slots_N, 0])
        end = next_slot if next_slot < num_used else None
        return ScannedRows(ids_N, self._read_slots(table, slots_N), end)

    def set_step(self, table: int, step: int) -> None:
        """Continue counting a table's update requests from ``step``."""
        self.states[table].num_updates = step
        if self.journal.is_on:
            self.journal.updated(table, _NO_IDS)

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
        """Take out rows that have expired, among the next ``max_rows`` slots.

        Returns False at the end of a pass, and where no table has an expiry.
        """
        expiries = [state.spec.expiry for state in self.states]
        if not any(expiry.is_on for expiry in expiries):
            return False
        self.journal.make_room(max_rows)
        layouts_T = np.stack([state.layout for state in self.states])
        rules_T = np.array(list(map(astuple, expiries)), dtype=np.float64)
        directory = self.arenas.directory
        next_ = [memory.SWEPT_ARENA, memory.SWEPT_SLOT]
        arena, slot = self.tally[next_].tolist()
        with self.changing(memory.REQUEST):
            while max_rows > 0 and arena < len(directory):
                num_used = int(directory[arena, memory.USED])
                stop = min(slot + max_rows, num_used)
                where = arena, slot, stop
                loops.sweep_slots(where, layouts_T, rules_T, self._clock())
                # The store may have been cleared since the last slice.
                max_rows -= max(stop - slot, 0)
                arena, slot = (arena, stop) if stop < num_used else (arena + 1, 0)
            is_over = arena == len(directory)
            self.tally[next_] = (0, 0) if is_over else (arena, slot)
        return not is_over

    def remove(self, table: int, ids_N: Ids) -> None:
        """Drop the rows of ids; those that have none are skipped."""
        self.journal.make_room(len(ids_N))
        with self.changing(memory.REQUEST):
            loops.remove_ids(self.states[table].layout, read_only(ids_N))

    def take_rows_of(self, other: "EmbeddingStore") -> None:
        """Take over the tables and rows of another store, which is not used again."""
        vars(self).update(vars(other))

    def clear(self) -> None:
        """Drop all rows and their optimizer state; the tables stay known."""
        with self.changing(memory.CLEAR):
            self.arenas.clear()
            self.index.clear()
            self.logs.clear()
            for state in self.states:
                remembered = state.remembered
                if remembered.size:
                    [remembered] = self.memory.emptied(remembered)
                    self.memory.commit(remembered, remembered.size)
                state.forget(remembered)
            self.tally[memory.ROWS] = 0
            self._set_addresses()
        if self.journal.is_on:
            self.journal.cleared()

    @contextmanager
    def changing(self, change: int) -> Iterator[None]:
        """Note in the memory what is in progress, so that half of it is recognised."""
        self.tally[memory.CHANGE] = change
        yield
        self.tally[memory.CHANGE] = memory.NO_CHANGE

    def make_room(self, table: int, num_rows: int) -> None:
        """Make room for rows of a table that are about to be made."""
        self.journal.make_room(num_rows)
        if isinstance(self.memory, MemoryFile):
            arena = int(self.states[table].layout[memory.ARENA])
            try:
                self.arenas.make_room(arena, num_rows)
                self.index.make_room(num_rows)
            except StoreError:
                if self.tally[memory.CHANGE] == memory.REQUEST:
                    self.tally[memory.CHANGE] = memory.NO_CHANGE  # it ends as a whole
                raise

    def close(self) -> None:
        """End the use of the memory. The store is not used again."""
        self.memory.close()

    def arena(self, state: TableState) -> Words:
        """Return the slots of the arena that a table's rows are in."""
        return self.arenas.words[int(state.layout[memory.ARENA])]

    def counters(self) -> dict[str, int]:
        """Return what has been counted since the start, and the rows in use now."""
        columns = self.arenas.directory[:, [memory.STRIDE, memory.USED]]
        strides, num_used = columns.T
        num_bytes = int((strides * num_used).sum())
        return {
            "rows": self.num_rows,
            "capacity_rows": self.capacity_rows,
            "bytes": num_bytes + self.index.size_bytes + self.logs.size_bytes,
            **{name: int(self.tally[at]) for name, at in _COUNTERS.items()},
        }

    def _set_addresses(self) -> None:
        """Write what :func:`memory.store_at` reads: addresses, and how many logs."""
        logs, index = self.logs.directory, self.index
        arrays = index.lines, index.cursor, self.arenas.directory, logs, self.tally
        self._addresses[:] = [*(array.ctypes.data for array in arrays), len(logs)]

    def _make_table(self, spec: TableSpec, number: int) -> TableState:
        """Return the state of a new table; add an arena if none has its width."""
        if number >= memory.MAX_TABLES:
            raise StoreError(f"A server holds at most {memory.MAX_TABLES} tables.")
        has_metadata = spec.has_metadata or self.is_lfu
        layout = memory.build_layout(spec, number, has_metadata=has_metadata)
        num_bytes = int(layout[memory.STATE]) + 4 * spec.num_state_floats
        width = (num_bytes + 7) // 8
        widths = [words.shape[1] for words in self.arenas.words]
        if width not in widths:
            self.arenas.add(width)
            widths.append(width)
        layout[memory.ARENA] = widths.index(width)
        return self._build_state(spec, layout, self._remember(spec))

    def _open_table(
        self, spec: dict[str, object], arena: int, row: list[int], remembered: int
    ) -> TableState:
        """Return the state of a table that :meth:`_publish` described."""
        known, number = TableSpec.from_json(spec), len(self.states)
        has_metadata = known.has_metadata or self.is_lfu
        layout = memory.build_layout(known, number, has_metadata=has_metadata)
        if layout[_ROW_COLUMNS].tolist() != row:
            raise StoreError(
                f"The rows of table {known.name!r} must have weights, state and width "
                f"at {layout[_ROW_COLUMNS].tolist()}. Received: {row} in the memory "
                "file. Start the version that made it, or delete the file."
            )
        layout[memory.ARENA] = arena
        words = np.empty(0, dtype=np.uint64)
        if remembered:
            words = self.memory.find(memory.address_at(self._steps, remembered))
        words = words[: known.admission.num_memory_words()]
        return self._build_state(known, layout, words)

    def _build_state(
        self, spec: TableSpec, layout: memory.Layout, remembered: Words
    ) -> TableState:
        number = int(layout[memory.OWNER]) - 1
        layout[memory.STORE] = self._addresses.ctypes.data
        engine = self._engine_choice.choose(spec)
        step = self._steps[number : number + 1]
        return TableState(spec, layout, engine, step=step, remembered=remembered)

    def _publish(self, states: Sequence[TableState]) -> None:
        """Write down the tables, for a process that opens the memory later."""
        if not isinstance(self.memory, MemoryFile):
            return
        tables = [
            {
                "spec": state.spec.to_json(),
                "arena": int(state.layout[memory.ARENA]),
                "row": state.layout[_ROW_COLUMNS].tolist(),
                "remembered": memory.distance(self._steps, state.remembered)
                * bool(state.remembered.size),
            }
            for state in states
        ]
        found = {"num_arenas": len(self.arenas.words), "tables": tables}
        self.memory.publish(json.dumps(found).encode())

    def _change_table(self, state: TableState, spec: TableSpec) -> TableState:
        """Return the state of a known table under new settings."""
        engine = self._engine_choice.choose(spec)
        self._require_same_rows(state.spec, spec)
        keeps = state.admits_as(spec)
        remembered = state.remembered if keeps else self._remember(spec)
        return state.changed(spec, engine, remembered)

    def _remember(self, spec: TableSpec) -> Words:
        """Return the memory of a table's admission, all of it allocated."""
        [remembered] = self.memory.reserve(spec.admission.num_memory_words())
        if remembered.size:
            self.memory.commit(remembered, remembered.size)
        return remembered

    def _require_same_rows(self, known: TableSpec, spec: TableSpec) -> None:
        """Raise ConfigError if the rows of a known table would look otherwise."""
        present, received = (
            one.describe_rows(with_metadata=one.has_metadata and not self.is_lfu)
            for one in (known, spec)
        )
        if present != received:
            raise ConfigError(
                f"Table {spec.name!r} has {present} on this server. Received: "
                f"{received}. Use another table name, or restart the servers to clear "
                "them."
            )

    def _read_slots(self, table: int, slots_N: Slots) -> Floats:
        state = self.states[table]
        width = state.spec.dim + state.spec.num_state_floats
        out = np.empty((len(slots_N), width), dtype=np.float32)
        memory.read_rows(state.layout, slots_N, out)
        return out


def build_initial_rows(spec: TableSpec, ids_N: Ids) -> Floats:
    """Return the rows ``(N, D + S)`` that different ids start with, on any server."""
    store = EmbeddingStore(max(len(ids_N), 1), optimizer_engine="fused")
    table = store.add_table(replace(spec, admission=AdmitAll()))
    weights_ND = np.empty((len(ids_N), spec.dim), dtype=np.float32)
    store.lookup(table, ids_N, weights_ND, training=True)
    return store.read(table, ids_N)
