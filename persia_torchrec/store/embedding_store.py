"""The store: all tables of one shard, at most ``capacity`` rows of them together.

It joins the parts of this folder: the index finds a row's slot, the rows hold weights
and optimizer state, the recency logs say which row leaves when the store is full,
initializer and optimizer change the floats. One thread owns a store; nothing here
locks.

    ids --index--> slots --rows--> weights
                     |
                  recency: a training lookup refreshes; nothing else does

Dimension key:
    N: ids of one request
    D: embedding dim
    S: optimizer-state floats a row
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import read_only
from persia_torchrec.errors import ConfigError, StoreError
from persia_torchrec.store.engine_choice import OptimizerEngine
from persia_torchrec.store.index import MAX_ROWS
from persia_torchrec.store.insert import insert
from persia_torchrec.store.journal import ChangeJournal, UsedRows
from persia_torchrec.store.lookup import (
    MISSING,
    REJECTED,
    TICK,
    Counts,
    Ids,
    Slots,
    find_slots,
    look_at,
    look_up,
)
from persia_torchrec.store.metadata import Metadata, read_metadata
from persia_torchrec.store.rows import HAS_METADATA, Floats
from persia_torchrec.store.scan import ScannedRows
from persia_torchrec.store.shard_memory import ShardMemory
from persia_torchrec.store.sweep import Sweeper
from persia_torchrec.store.table_state import TableState
from persia_torchrec.store.tables import Tables
from persia_torchrec.store.update import UpdateResult as UpdateResult
from persia_torchrec.store.update import write_floats
from persia_torchrec.table import TableSpec

Eviction = Literal["lru", "lfu"]
"""Which row leaves a full store: the least recently, or least frequently used."""

_NO_SLOTS = np.empty(0, dtype=np.uint32)
_NO_COUNTS = read_only(np.empty(0, dtype=np.uint32))
_NO_PLACES = np.empty(0, dtype=np.int64)
_NO_IDS = np.empty(0, dtype=np.uint64)


class EmbeddingStore:
    """Rows by table and id, least recently used out first.

    Args:
        capacity_rows: rows of all tables together, in ``[1, 2**32 - 2]``.
        eviction: which row leaves when the store is full. ``lfu`` costs 16 bytes a
            row for the frequency.
        optimizer_engine: what applies updates: the ``fused`` loop, ``fbgemm``'s CPU
            kernels, or whichever was measured to be faster. They compute the same.
        clock: returns the present second; rows that expire by time go by it.

    Attributes:
        journal: notes which rows change, once told to.

    Raises:
        ConfigError: ``capacity_rows``, ``eviction`` or ``optimizer_engine`` is out of
            its range, or fbgemm is chosen and not installed.
        StoreError: the operating system refuses the address space.
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
        self._tables = Tables(
            capacity_rows, optimizer_engine=optimizer_engine, has_metadata=is_lfu
        )
        self._memory = ShardMemory(capacity_rows, self._tables, is_lfu=is_lfu)
        self._sweeper = Sweeper()
        self._clock = clock
        self._num_missed = self._num_refused = 0
        self.journal = ChangeJournal(self._memory.tally)

    @property
    def tables(self) -> list[TableSpec]:
        """The tables, in the order in which they were added."""
        return [state.spec for state in self._tables.states]

    @property
    def num_tables(self) -> int:
        """How many tables there are."""
        return len(self._tables.states)

    @property
    def is_lfu(self) -> bool:
        """Whether the least frequently used row is evicted first."""
        return len(self._memory.logs.directory) > 1

    @property
    def memory(self) -> ShardMemory:
        """Everything it keeps, for what copies rows out and in."""
        return self._memory

    def add_tables(self, specs: Sequence[TableSpec]) -> list[int]:
        """Make tables known, or change those that are; when one cannot be, do nothing.

        Args:
            specs: what the rows of a known table look like must be what it was; initial
                values, learning rate, admission and the like may change.

        Returns:
            The number of each table, in the order in which tables were first added.

        Raises:
            ConfigError: a table is known with another dim, weight dtype or metadata,
                or with an optimizer whose state is laid out otherwise; or fbgemm is
                the chosen engine, and lacks the optimizer or the dim; or two tables
                have the same name.
            StoreError: no memory for the rows, or too many tables.
        """
        return self._tables.add(specs)

    def add_table(self, spec: TableSpec) -> int:
        """Add one table: :meth:`add_tables`."""
        return self.add_tables([spec])[0]

    def table_number(self, name: str) -> int:
        """Return the number of a table.

        Raises:
            ConfigError: there is no such table.
        """
        return self._tables.number_of(name)

    def wants_counts(self, table: int) -> bool:
        """Return whether it matters how often an id is in a batch."""
        state = self._tables.states[table]
        return state.admission is not None or bool(state.layout[HAS_METADATA])

    def lookup(
        self,
        table: int,
        ids_N: Ids,
        out_ND: Floats,
        *,
        training: bool,
        counts_N: Counts | None = None,
    ) -> Slots:
        """Copy the weights of ids.

        Args:
            table: number of the table.
            ids_N: uint64 ``(N,)``, any order, repeats allowed.
            out_ND: float32 ``(N, D)``, C-contiguous, overwritten.
            training: count each row as used, then make the missing rows in the order
                of the ids, evicting if need be. An id that is not admitted, and
                without ``training`` every id that has no row, reads the table's
                ``unadmitted_value``, and nothing changes.
            counts_N: uint32 ``(N,)``, how often each id is in the batch; once each if
                not given.

        Returns:
            uint32 ``(N,)``, where the rows are: hints for :meth:`update`. Empty
            without ``training``.
        """
        ids_N = read_only(ids_N)
        state = self._tables.states[table]
        rows = self._memory.rows(state)
        if not training:
            value = np.float32(state.spec.admission.unadmitted_value)
            look_at(ids_N, out_ND, *rows, self._memory.tally, state.layout, value)
            return _NO_SLOTS
        counts_N = _NO_COUNTS if counts_N is None else read_only(counts_N)
        slots_N = np.empty(len(ids_N), dtype=np.uint32)
        missing_N = np.empty(len(ids_N), dtype=np.int64)
        self._memory.tally[TICK] += 1
        self._memory.logs.make_room(self._tables.directory, len(ids_N))
        num_missing = look_up(
            *(ids_N, counts_N, out_ND, slots_N, missing_N, *rows),
            *(self._memory.logs.directory, self._memory.tally, state.layout),
        )
        missing = admitted = _NO_PLACES
        if num_missing:
            missing = missing_N[:num_missing].copy()  # the journal may keep it
            admitted = state.admit(ids_N, counts_N, missing, out_ND)
            self._memory.tally[REJECTED] += len(missing) - len(admitted)
            self._insert(state, ids_N, counts_N, admitted, out_ND, slots_N)
        if self.journal.is_on:
            when = table, int(self._memory.tally[TICK])
            self.journal.used(UsedRows(*when, ids_N, missing, admitted))
        return slots_N

    def update(
        self,
        table: int,
        ids_N: Ids,
        grads_ND: Floats,
        hints_N: Slots | None = None,
    ) -> UpdateResult:
        """Apply the table's optimizer to the rows of ids; refreshes no row.

        Args:
            table: number of the table.
            ids_N: uint64 ``(N,)``; an id that comes twice is updated twice.
            grads_ND: float32 ``(N, D)``.
            hints_N: uint32 ``(N,)``, what the lookup of these ids returned. Each hint
                is checked; a wrong one costs time only.

        Returns:
            How many ids have no row any more, and how many gradients were refused.
            Both are counted, and move nothing.
        """
        state = self._tables.states[table]
        state.num_updates += 1
        ids_N, grads_ND = read_only(ids_N), read_only(grads_ND)
        rows = self._memory.rows(state)
        if hints_N is None or len(hints_N) != len(ids_N):
            hints_N = find_slots(ids_N, *rows[1:], state.layout)
        self.journal.updated(table, ids_N)
        counts = state.apply(rows, ids_N, hints_N, grads_ND, self._clock())
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

        In a full LFU store new rows may be the least frequent, and leave for the next
        ones of the same request.

        Args:
            table: number of the table.
            ids_N: uint64 ``(N,)``, N at most the capacity.
            rows_NK: float32 ``(N, D)``, weights, and optimizer state stays; or
                ``(N, D + S)``, weights and state.

        Raises:
            StoreError: more ids than the store can hold.
        """
        if len(ids_N) > self.capacity_rows:
            raise StoreError(
                f"At most {self.capacity_rows} rows fit. Received: {len(ids_N)} ids."
            )
        state = self._tables.states[table]
        weights_ND = np.empty((len(ids_N), state.spec.dim), dtype=np.float32)
        admission, state.admission = state.admission, None
        try:
            self.lookup(table, ids_N, weights_ND, training=True)
        finally:
            state.admission = admission
        slots_N, floats = self.find(table, ids_N), self._memory.rows(state)[0]
        write_floats(slots_N, read_only(rows_NK), floats, state.layout)

    def read(self, table: int, ids_N: Ids) -> Floats:
        """Return weights and optimizer state of ids; changes and counts nothing.

        Returns:
            float32 ``(N, D + S)``; zeros for an id that has no row.
        """
        slots_N = self.find(table, ids_N)
        return self._memory.floats_at(self._tables.states[table], slots_N)

    def scan(self, table: int, start: int, max_rows: int) -> ScannedRows:
        """Return some rows of a table; what a walk promises stands in ``scan.py``.

        Args:
            table: number of the table.
            start: 0, then ``next_slot`` of the rows before.
            max_rows: rows at most, ``>= 1``.
        """
        return self._memory.scan(self._tables.states[table], start, max_rows)

    def step(self, table: int) -> int:
        """Return how many update requests a table had: Adam's ``t``."""
        return self._tables.states[table].num_updates

    def set_step(self, table: int, step: int) -> None:
        """Go on counting a table's update requests from ``step``."""
        self._tables.states[table].num_updates = step
        self.journal.updated(table, _NO_IDS)

    def metadata(self, table: int, ids_N: Ids) -> Metadata:
        """Return how often ids were looked up, and when they were last updated.

        Raises:
            ConfigError: the table keeps no metadata.
        """
        state = self._tables.states[table]
        state.require_metadata()
        return read_metadata(self.find(table, ids_N), self._memory.rows(state)[0])

    def find(self, table: int, ids_N: Ids) -> Slots:
        """Return the slot of each id, or ``MISSING``; uint32 ``(N,)``."""
        state = self._tables.states[table]
        return find_slots(read_only(ids_N), *self._memory.rows(state)[1:], state.layout)

    def has(self, table: int, ids_N: Ids) -> npt.NDArray[np.bool_]:
        """Return for each id whether it has a row; bool ``(N,)``."""
        return self.find(table, ids_N) != MISSING

    def sweep(self, max_rows: int) -> bool:
        """Take out rows that have expired, among the next ``max_rows`` slots.

        Returns:
            Whether more is to be done now: False at the end of a pass over all slots,
            and where no table has an expiry.
        """
        self.journal.make_room(max_rows)
        return self._sweeper.sweep(max_rows, self._memory, self._clock())

    def remove(self, table: int, ids_N: Ids) -> None:
        """Drop the rows of ids; those that have none do not matter.

        Args:
            table: number of the table.
            ids_N: uint64 ``(N,)``.
        """
        self.journal.make_room(len(ids_N))
        self._memory.remove(self._tables.states[table], ids_N)

    def take_rows_of(self, other: "EmbeddingStore") -> None:
        """Have the tables and rows of another store, which nobody may use any more."""
        self.journal.end()
        self._tables, self._memory = other._tables, other._memory
        self.journal = other.journal

    def clear(self) -> None:
        """Drop all rows and their optimizer state; the tables stay known."""
        self._memory.clear()
        self.journal.cleared()

    @property
    def num_rows(self) -> int:
        """Rows in use, of all tables."""
        return self._memory.num_rows

    def counters(self) -> dict[str, int]:
        """Return what has been counted since the start, and the rows in use now."""
        return {
            "rows": self.num_rows,
            "capacity_rows": self.capacity_rows,
            "bytes": self._memory.size_bytes,
            **self._memory.counters(),
            "gradients_missed": self._num_missed,
            "gradients_refused": self._num_refused,
        }

    def check(self) -> None:
        """Raise AssertionError if index, rows and recency do not agree."""
        assert self.num_rows <= self.capacity_rows
        self._memory.check()

    def ids_oldest_first(self) -> list[tuple[int, int]]:
        """Return ``(table, id)`` of every row, the next to leave first."""
        return self._memory.ids_oldest_first()

    def _insert(
        self,
        state: TableState,
        ids_N: Ids,
        counts_N: Counts,
        places: npt.NDArray[np.int64],
        out_ND: Floats,
        slots_N: Slots,
    ) -> None:
        memory, filling = self._memory, state.filling
        self.journal.make_room(len(places))
        seed = np.uint64(state.spec.seed)
        insert(
            *(ids_N, counts_N, places, out_ND, slots_N, *memory.rows(state)),
            *(memory.logs.directory, memory.tally, state.layout, self.capacity_rows),
            *(filling.kind, filling.numbers, seed, state.initial_state),
            *state.now(self._clock()),
            state.scratch,
        )
