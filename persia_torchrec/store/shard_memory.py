"""The memory of one shard: tables and their arenas, index, recency, counts."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from persia_torchrec.errors import ConfigError, StoreError
from persia_torchrec.store.fbgemm_engine import EngineChoice, OptimizerEngine
from persia_torchrec.store.index import Index
from persia_torchrec.store.recency import NUM_LFU_CLASSES, RecencyLogs
from persia_torchrec.store.rows import (
    ARENA,
    CAPACITY,
    EVICTED,
    EXPIRED_NORM,
    EXPIRED_SECONDS,
    EXPIRED_STEPS,
    HITS,
    INSERTED,
    MISSES,
    NUM_TALLIES,
    REJECTED,
    ROWS,
    STORE,
    TICK,
    USED,
    Arena,
    StoreAt,
    Tally,
    Words,
    build_layout,
    words_per_row,
)
from persia_torchrec.store.tables import TableState
from persia_torchrec.table import TableSpec

_MAX_TABLES = 2**16 - 2

_COUNTERS = {
    "hits": HITS,
    "misses": MISSES,
    "inserted": INSERTED,
    "rejected": REJECTED,
    "evictions": EVICTED,
    "expired_steps": EXPIRED_STEPS,
    "expired_seconds": EXPIRED_SECONDS,
    "expired_norm": EXPIRED_NORM,
}


class ShardMemory:
    """All that a store keeps. Owned by the store's thread.

    With ``is_lfu`` frequency, and not recency alone, says which row leaves, and the
    rows of every table carry metadata. ``states`` has one per table, in the order in
    which they were added, ``arenas`` one per width of rows; for ``tally`` see
    ``rows.HITS`` and the others.
    """

    def __init__(
        self, capacity_rows: int, optimizer_engine: OptimizerEngine, *, is_lfu: bool
    ) -> None:
        self._capacity_rows = capacity_rows
        self._keeps_metadata = is_lfu
        self._engine_choice = EngineChoice(optimizer_engine)
        self._numbers: dict[str, int] = {}
        self.states: list[TableState] = []
        self.arenas: list[Arena] = []
        self.directory: Words = np.zeros((0, 5), dtype=np.uint64)
        self.index = Index(capacity_rows)
        self.logs = RecencyLogs(capacity_rows, NUM_LFU_CLASSES if is_lfu else 1)
        self.tally: Tally = np.zeros(NUM_TALLIES, dtype=np.int64)
        self.tally[CAPACITY] = capacity_rows
        # What every table's layout points to: see rows.store_at.
        self._addresses: Words = np.zeros(6, dtype=np.uint64)
        self._set_addresses()

    def add_tables(self, specs: Sequence[TableSpec]) -> list[int]:
        """Add or change tables: :meth:`EmbeddingStore.add_tables`."""
        _require_different_names(specs)
        for spec in specs:
            self._require_fitting(spec)
        numbers, states, arenas = [], list(self.states), list(self.arenas)
        for spec in specs:
            number = self._numbers.get(spec.name, len(states))
            numbers.append(number)
            if number < len(states):
                engine = self._engine_choice.choose(spec)
                states[number] = states[number].changed(spec, engine)
            else:
                states.append(self._new_state(spec, number, arenas))
        new_lines = [arena.directory_line() for arena in arenas[len(self.arenas) :]]
        lines = np.array(new_lines, dtype=np.uint64).reshape(-1, 5)
        self.directory = np.concatenate([self.directory, lines])
        self.states, self.arenas = states, arenas
        self._numbers.update(zip((s.name for s in specs), numbers, strict=True))
        self._set_addresses()
        return numbers

    def clear(self) -> None:
        """Drop all rows, and what the tables remember; what was counted stays so."""
        self.arenas = [
            Arena.reserve(self._capacity_rows, arena.words_per_row)
            for arena in self.arenas
        ]
        lines = [arena.directory_line() for arena in self.arenas]
        self.directory = np.array(lines, dtype=np.uint64).reshape(-1, 5)
        self.states = [state.cleared() for state in self.states]
        self.index.clear()
        self.logs.clear()
        self.tally[ROWS] = 0
        self._set_addresses()

    @property
    def num_rows(self) -> int:
        """Rows in use, of all tables."""
        return int(self.tally[ROWS])

    @property
    def tick(self) -> int:
        """Number of the last request that used rows."""
        return int(self.tally[TICK])

    @tick.setter
    def tick(self, tick: int) -> None:
        self.tally[TICK] = tick

    def arena(self, state: TableState) -> Words:
        """Return the slots of the arena that a table's rows are in."""
        return self.arenas[int(state.layout[ARENA])].words

    def counters(self) -> dict[str, int]:
        """Return rows and bytes in use, and the counts since the start."""
        strides = [arena.words_per_row * 8 for arena in self.arenas]
        rows = self.directory[:, USED] * np.array(strides, dtype=np.uint64)
        return {
            "rows": self.num_rows,
            "capacity_rows": self._capacity_rows,
            "bytes": int(rows.sum()) + self.index.size_bytes + self.logs.size_bytes,
            **{name: int(self.tally[at]) for name, at in _COUNTERS.items()},
        }

    def _set_addresses(self) -> None:
        logs = self.logs.directory
        arrays = (self.index.lines, self.index.cursor, self.directory, logs, self.tally)
        self._addresses[:] = StoreAt(*arrays).addresses()

    def _new_state(
        self, spec: TableSpec, number: int, arenas: list[Arena]
    ) -> TableState:
        """Return the state of a new table; add an arena if none has its width."""
        if number >= _MAX_TABLES:
            raise StoreError(f"A server holds at most {_MAX_TABLES} tables.")
        has_metadata = spec.has_metadata or self._keeps_metadata
        layout = build_layout(spec, number, has_metadata=has_metadata)
        words, widths = words_per_row(layout), [a.words_per_row for a in arenas]
        if words not in widths:
            arenas.append(Arena.reserve(self._capacity_rows, words))
            widths.append(words)
        layout[ARENA] = widths.index(words)
        layout[STORE] = self._addresses.ctypes.data
        return TableState(spec, layout, self._engine_choice.choose(spec))

    def _require_fitting(self, spec: TableSpec) -> None:
        """Raise ConfigError if the rows of a known table would look otherwise."""
        self._engine_choice.require_fitting(spec)
        number = self._numbers.get(spec.name)
        if number is None:
            return
        known = self._describe(self.states[number].spec)
        if known != self._describe(spec):
            raise ConfigError(
                f"Table {spec.name!r} has {known} on this server. Received: "
                f"{self._describe(spec)}. Use another table name, or restart the "
                "servers to clear them."
            )

    def _describe(self, spec: TableSpec) -> str:
        """Describe the rows of a table."""
        has_own_metadata = spec.has_metadata and not self._keeps_metadata
        return spec.describe_rows(with_metadata=has_own_metadata)


def _require_different_names(specs: Sequence[TableSpec]) -> None:
    for name, times in Counter(spec.name for spec in specs).items():
        if times > 1:
            raise ConfigError(
                "Tables added together must have different names. "
                f"Received: {name!r} {times} times."
            )
