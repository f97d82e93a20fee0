"""The store: all tables of one shard, at most ``capacity`` rows of them together.

One thread owns a store; nothing here locks.

    ids --index--> slots --rows--> weights
                     |
                  recency: a training lookup refreshes; nothing else does

Dimension key:
    N: ids of one request
    D: embedding dim
    S: optimizer-state floats per row
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import compiled, read_only
from persia_torchrec.embedding.admission import AdmitAll
from persia_torchrec.errors import ConfigError, StoreError
from persia_torchrec.intrinsics import load_u64
from persia_torchrec.store.expiry import Sweeper
from persia_torchrec.store.fbgemm_engine import OptimizerEngine
from persia_torchrec.store.index import MAX_ROWS
from persia_torchrec.store.insert import remove_ids
from persia_torchrec.store.journal import ChangeJournal, UsedRows
from persia_torchrec.store.lookup import (
    NO_ROOM,
    find_slots,
    lookup_readonly,
    lookup_training,
)
from persia_torchrec.store.rows import (
    ARENA,
    FIRST_STEP,
    FREQUENCY,
    LAST_S,
    LAST_STEP,
    MISSING,
    NOW_S,
    OWNER_SHIFT,
    REJECTED,
    USED,
    WORD,
    Counts,
    Floats,
    Ids,
    Layout,
    Slots,
    read_rows,
    rows_at,
    store_at,
    write_rows,
)
from persia_torchrec.store.shard_memory import ShardMemory
from persia_torchrec.store.update import UpdateResult
from persia_torchrec.table import TableSpec

Eviction = Literal["lru", "lfu"]
"""Which row leaves a full store: the least recently, or least frequently used."""

Numbers = npt.NDArray[np.uint32]

MAX_SCANNED_SLOTS = 1 << 20
"""Slots that a scan walks over: a few milliseconds where no row is of the table."""

_NO_SLOTS = np.empty(0, dtype=np.uint32)
_NO_COUNTS = read_only(np.empty(0, dtype=np.uint32))
_NO_INDICES = np.empty(0, dtype=np.int64)
_NO_IDS = np.empty(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class ScannedRows:
    """Some rows of a table: different ids, and float32 ``(N, D + S)`` rows.

    ``next_slot`` is where to continue; None at the end of the table.
    """

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

    frequency: Numbers
    first_step: Numbers
    last_step: Numbers
    last_s: Numbers


class EmbeddingStore:
    """Rows by table and id, least recently used out first.

    ``memory`` is for what copies rows out and in; ``journal`` notes which rows change,
    once told to.

    Args:
        capacity_rows: rows of all tables together, in ``[1, 2**32 - 2]``.
        eviction: ``lfu`` costs 16 bytes per row for the frequency.
        optimizer_engine: all engines compute the same.
        clock: returns the current second, by which rows expire.
    """

    def __init__(
        self,
        capacity_rows: int,
        *,
        eviction: Eviction = "lru",
        optimizer_engine: OptimizerEngine = "auto",
        clock: Callable[[], float] = time.time,  # noqa: TID251  # kept in rows
    ) -> None:
        if not 1 <= capacity_rows <= MAX_ROWS:
            raise ConfigError(
                f"capacity_rows must be in [1, {MAX_ROWS}]. Received: {capacity_rows}."
            )
        if eviction not in ("lru", "lfu"):
            raise ConfigError(f"eviction must be lru or lfu. Received: {eviction!r}.")
        self.capacity_rows = capacity_rows
        is_lfu = eviction == "lfu"
        self.memory = ShardMemory(capacity_rows, optimizer_engine, is_lfu=is_lfu)
        self._sweeper = Sweeper()
        self._clock = clock
        self._num_missed = self._num_refused = 0
        self.journal = ChangeJournal(self.memory.tally)

    @property
    def tables(self) -> list[TableSpec]:
        """The tables, in the order in which they were added."""
        return [state.spec for state in self.memory.states]

    @property
    def num_tables(self) -> int:
        """How many tables there are."""
        return len(self.memory.states)

    @property
    def is_lfu(self) -> bool:
        """Whether the least frequently used row is evicted first."""
        return len(self.memory.logs.directory) > 1

    def add_tables(self, specs: Sequence[TableSpec]) -> list[int]:
        """Make tables known, or change those that are; when one cannot be, do nothing.

        Returns the number of each table. The rows of a known table must keep their
        form; initial values, learning rate, admission and the like may change.
        """
        return self.memory.add_tables(specs)

    def add_table(self, spec: TableSpec) -> int:
        """Add one table: :meth:`add_tables`."""
        return self.add_tables([spec])[0]

    def wants_counts(self, table: int) -> bool:
        """Return whether it matters how often an id is in a batch."""
        state = self.memory.states[table]
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
        ``training`` every id that has no row, reads the table's ``unadmitted_value``,
        and nothing changes.

        ``out_ND`` is C-contiguous. ``counts_N`` is how often each id is in the batch;
        once each if not given. Returns the slots, hints for :meth:`update`; none
        without ``training``.
        """
        memory = self.memory
        state = memory.states[table]
        layout = state.layout
        if ids_N.flags.writeable:
            ids_N = read_only(ids_N)
        if not training:
            value = np.float32(state.spec.admission.unadmitted_value)
            lookup_readonly(layout, ids_N, out_ND, value)
            return _NO_SLOTS
        if counts_N is None:
            counts_N = _NO_COUNTS
        elif counts_N.flags.writeable:
            counts_N = read_only(counts_N)
        slots_N = np.empty(len(ids_N), dtype=np.uint32)
        missing_N = np.empty(len(ids_N), dtype=np.int64)
        arguments = layout, ids_N, counts_N, out_ND, slots_N, missing_N
        num_missing = lookup_training(*arguments)
        if num_missing == NO_ROOM:
            memory.logs.make_room(memory.directory, len(ids_N))
            num_missing = lookup_training(*arguments)
        missing = admitted = _NO_INDICES
        if num_missing:
            missing = missing_N[:num_missing].copy()  # the journal may keep it
            admitted = state.admit(ids_N, counts_N, missing, out_ND)
            memory.tally[REJECTED] += len(missing) - len(admitted)
            self.journal.make_room(len(admitted))
            layout[NOW_S] = max(int(self._clock()), 0)
            state.insert(layout, ids_N, counts_N, admitted, out_ND, slots_N)
        if self.journal.is_on:
            self.journal.used(UsedRows(table, memory.tick, ids_N, missing, admitted))
        return slots_N

    def update(
        self,
        table: int,
        ids_N: Ids,
        grads_ND: Floats,
        hints_N: Slots | None = None,
    ) -> UpdateResult:
        """Apply the table's optimizer to the rows of ids; refreshes no row.

        A repeated id is updated twice. ``hints_N`` is what the lookup of these ids
        returned; each hint is checked, and a wrong one costs time only. Missed and
        refused gradients are counted.
        """
        state = self.memory.states[table]
        ids_N, grads_ND = read_only(ids_N), read_only(grads_ND)
        if hints_N is None or len(hints_N) != len(ids_N):
            hints_N = find_slots(state.layout, ids_N)
        if self.journal.is_on:
            self.journal.updated(table, ids_N)
        counts = state.step_rows(ids_N, hints_N, grads_ND, self._clock())
        result = UpdateResult(*counts)
        if result.num_missed and state.admission is not None:
            # Its lookup left it without a row, if what that found is known.
            num_without = int(np.count_nonzero(hints_N == MISSING))
            num_unadmitted = min(num_without, result.num_missed)
            result = replace(result, num_unadmitted=num_unadmitted)
        self._num_missed += result.num_missed
        self._num_refused += result.num_refused
        return result

    def write(self, table: int, ids_N: Ids, rows_NK: Floats) -> None:
        """Set the rows of ids, making those that are missing, admitted or not.

        ``rows_NK`` holds weights ``(N, D)``, and optimizer state stays; or weights and
        state, ``(N, D + S)``. In a full LFU store new rows may be the least frequent,
        and leave for the next ones of the same request.
        """
        if len(ids_N) > self.capacity_rows:
            raise StoreError(
                f"At most {self.capacity_rows} rows fit. Received: {len(ids_N)} ids."
            )
        state = self.memory.states[table]
        weights_ND = np.empty((len(ids_N), state.spec.dim), dtype=np.float32)
        admission, state.admission = state.admission, None
        try:
            self.lookup(table, ids_N, weights_ND, training=True)
        finally:
            state.admission = admission
        write_rows(state.layout, self.find(table, ids_N), read_only(rows_NK))

    def read(self, table: int, ids_N: Ids) -> Floats:
        """Return weights and state of ids, ``(N, D + S)``; zeros without a row."""
        return self._read_slots(table, self.find(table, ids_N))

    def scan(
        self,
        table: int,
        start: int,
        max_rows: int,
        max_slots: int = MAX_SCANNED_SLOTS,
    ) -> ScannedRows:
        """Return the next rows of a table, a slice of slots at a time.

        A row keeps its slot as long as it lives. So a row that lives from the first
        slice to the last is met exactly once, as it is when its slice is read. A row
        that is made or taken out meanwhile may be met or not; one that is evicted and
        comes back may be met twice.

        ``start`` is 0, then ``next_slot`` of the previous slice. A slice ends after
        ``max_rows`` rows or ``max_slots`` slots: it may be short, or empty, before the
        end.
        """
        state = self.memory.states[table]
        num_used = int(self.memory.directory[int(state.layout[ARENA]), USED])
        stop = min(start + max_slots, num_used)
        slots_N = np.empty(min(max_rows, max(stop - start, 0)), dtype=np.uint32)
        num, next_slot = _find_rows(state.layout, start, stop, slots_N)
        slots_N = slots_N[:num]
        ids_N = np.ascontiguousarray(self.memory.arena(state)[slots_N, 0])
        end = next_slot if next_slot < num_used else None
        return ScannedRows(ids_N, self._read_slots(table, slots_N), end)

    def step(self, table: int) -> int:
        """Return how many update requests a table had: Adam's ``t``."""
        return self.memory.states[table].num_updates

    def set_step(self, table: int, step: int) -> None:
        """Continue counting a table's update requests from ``step``."""
        self.memory.states[table].num_updates = step
        self.journal.updated(table, _NO_IDS)

    def metadata(self, table: int, ids_N: Ids) -> Metadata:
        """Return how often ids were looked up, and when they were last updated."""
        state = self.memory.states[table]
        if not state.has_metadata:
            raise ConfigError(
                f"Table {state.spec.name!r} keeps no metadata. Add it with "
                "keeps_metadata=True."
            )
        slots_N = self.find(table, ids_N)
        has_row = slots_N != MISSING
        columns_R4 = self.memory.arena(state).view(np.uint32)
        found = []
        for offset in (FREQUENCY, FIRST_STEP, LAST_STEP, LAST_S):
            column = np.zeros(len(slots_N), dtype=np.uint32)
            column[has_row] = columns_R4[slots_N[has_row], int(offset) // 4]
            found.append(column)
        return Metadata(*found)

    def find(self, table: int, ids_N: Ids) -> Slots:
        """Return the slot of each id, or ``MISSING``; uint32 ``(N,)``."""
        return find_slots(self.memory.states[table].layout, read_only(ids_N))

    def has(self, table: int, ids_N: Ids) -> npt.NDArray[np.bool_]:
        """Return for each id whether it has a row; bool ``(N,)``."""
        return self.find(table, ids_N) != MISSING

    def sweep(self, max_rows: int) -> bool:
        """Take out rows that have expired, among the next ``max_rows`` slots.

        Returns False at the end of a pass over all slots, and where no table has an
        expiry.
        """
        self.journal.make_room(max_rows)
        memory = self.memory
        layouts = [state.layout for state in memory.states]
        expiries = [state.spec.expiry for state in memory.states]
        sweep = self._sweeper.sweep
        return sweep(max_rows, layouts, expiries, memory.directory, self._clock())

    def remove(self, table: int, ids_N: Ids) -> None:
        """Drop the rows of ids; those that have none are skipped."""
        self.journal.make_room(len(ids_N))
        remove_ids(self.memory.states[table].layout, read_only(ids_N))

    def take_rows_of(self, other: "EmbeddingStore") -> None:
        """Take over the tables and rows of another store, which is not used again."""
        self.journal.end()
        self.memory, self.journal = other.memory, other.journal

    def clear(self) -> None:
        """Drop all rows and their optimizer state; the tables stay known."""
        self.memory.clear()
        self.journal.cleared()

    @property
    def num_rows(self) -> int:
        """Rows in use, of all tables."""
        return self.memory.num_rows

    def counters(self) -> dict[str, int]:
        """Return what has been counted since the start, and the rows in use now."""
        return {
            **self.memory.counters(),
            "gradients_missed": self._num_missed,
            "gradients_refused": self._num_refused,
        }

    def _read_slots(self, table: int, slots_N: Slots) -> Floats:
        state = self.memory.states[table]
        width = state.spec.dim + state.spec.num_state_floats
        out = np.empty((len(slots_N), width), dtype=np.float32)
        read_rows(state.layout, slots_N, out)
        return out


def build_initial_rows(spec: TableSpec, ids_N: Ids) -> Floats:
    """Return the rows ``(N, D + S)`` that different ids start with, on any server."""
    store = EmbeddingStore(max(len(ids_N), 1), optimizer_engine="fused")
    table = store.add_table(replace(spec, admission=AdmitAll()))
    weights_ND = np.empty((len(ids_N), spec.dim), dtype=np.float32)
    store.lookup(table, ids_N, weights_ND, training=True)
    return store.read(table, ids_N)


@compiled
def _find_rows(
    layout: Layout, start: int, stop: int, slots_N: Slots
) -> tuple[int, int]:
    """Find the rows of one table among the slots from ``start`` to ``stop``.

    Fills ``slots_N`` from the front, and ends when it is full. Returns how many rows
    were found, and the slot at which the search ended.
    """
    rows = rows_at(store_at(layout), layout)
    num = 0
    slot = np.uint64(start)
    while slot < np.uint64(stop) and num < len(slots_N):
        word = load_u64(rows.base + slot * rows.stride + WORD)
        if word >> OWNER_SHIFT == rows.owner:
            slots_N[num] = np.uint32(slot)
            num += 1
        slot += np.uint64(1)
    return num, int(slot)
