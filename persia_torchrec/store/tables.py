"""The tables of a store, and the arenas that their rows are in."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from persia_torchrec.errors import ConfigError, StoreError
from persia_torchrec.store.engine_choice import EngineChoice, OptimizerEngine
from persia_torchrec.store.rows import ARENA, Arena, layout_of, words_a_row
from persia_torchrec.store.table_state import TableState
from persia_torchrec.table import TableSpec

if TYPE_CHECKING:
    from persia_torchrec.store.fbgemm_engine import FbgemmEngine

_MAX_TABLES = 2**16 - 2


class Tables:
    """Tables by number and by name. Owned by the store's thread.

    Args:
        capacity_rows: slots that each arena must have.
        optimizer_engine: what applies updates.
        has_metadata: whether the rows of every table carry metadata.

    Attributes:
        states: one a table, in the order in which they were added.
        arenas: one for each width of rows.
        directory: of the arenas.

    Raises:
        ConfigError: the optimizer engine is unknown, or not installed.
    """

    def __init__(
        self,
        capacity_rows: int,
        *,
        optimizer_engine: OptimizerEngine,
        has_metadata: bool,
    ) -> None:
        self._capacity_rows = capacity_rows
        self._has_metadata = has_metadata
        self._engine_choice = EngineChoice(optimizer_engine)
        self._number_of: dict[str, int] = {}
        self.states: list[TableState] = []
        self.arenas: list[Arena] = []
        self.directory = np.zeros((0, 5), dtype=np.uint64)

    def add(self, specs: Sequence[TableSpec]) -> list[int]:
        """Make tables known, or change those that are; when one cannot be, do nothing.

        Returns:
            The number of each table.

        Raises:
            ConfigError: see :meth:`EmbeddingStore.add_tables`.
            StoreError: no memory for the rows, or too many tables.
        """
        _require_different_names(specs)
        for spec in specs:
            self._require_fitting(spec)
        numbers, states, arenas = [], list(self.states), list(self.arenas)
        for spec in specs:
            number = self._number_of.get(spec.name, len(states))
            numbers.append(number)
            if number < len(states):
                states[number] = states[number].changed(spec, self._engine_of(spec))
            else:
                states.append(self._new_state(spec, number, arenas))
        new_lines = [arena.directory_line() for arena in arenas[len(self.arenas) :]]
        lines = np.array(new_lines, dtype=np.uint64).reshape(-1, 5)
        self.directory = np.concatenate([self.directory, lines])
        self.states, self.arenas = states, arenas
        self._number_of.update(zip((s.name for s in specs), numbers, strict=True))
        return numbers

    def number_of(self, name: str) -> int:
        """Return the number of a table.

        Raises:
            ConfigError: there is no such table.
        """
        if name not in self._number_of:
            raise ConfigError(
                f"Unknown table {name!r}. This server has: {sorted(self._number_of)}."
            )
        return self._number_of[name]

    def clear(self) -> None:
        """Drop all rows, and what the tables remember; their settings stay."""
        self.arenas = [
            Arena.reserve(self._capacity_rows, arena.words_a_row)
            for arena in self.arenas
        ]
        lines = [arena.directory_line() for arena in self.arenas]
        self.directory = np.array(lines, dtype=np.uint64).reshape(-1, 5)
        self.states = [
            TableState.begin(state.spec, state.layout, state.engine)
            for state in self.states
        ]

    def _require_fitting(self, spec: TableSpec) -> None:
        """Raise ConfigError if the rows of a known table would look otherwise."""
        self._engine_choice.require_fitting(spec)
        number = self._number_of.get(spec.name)
        if number is None:
            return
        known = self._describe(self.states[number].spec)
        if known != self._describe(spec):
            raise ConfigError(
                f"Table {spec.name!r} has {known} on this server. Received: "
                f"{self._describe(spec)}. Use another table name, or restart "
                "the servers, which clears them."
            )

    def _describe(self, spec: TableSpec) -> str:
        """Say what the rows of a table look like."""
        has_own_metadata = spec.has_metadata and not self._has_metadata
        return spec.describe_rows(with_metadata=has_own_metadata)

    def _new_state(
        self, spec: TableSpec, number: int, arenas: list[Arena]
    ) -> TableState:
        """Return the state of a new table; add an arena if none has its width."""
        if number >= _MAX_TABLES:
            raise StoreError(f"A server holds at most {_MAX_TABLES} tables.")
        has_metadata = spec.has_metadata or self._has_metadata
        layout = layout_of(spec, has_metadata=has_metadata, arena=0, number=number)
        words = words_a_row(layout)
        widths = [arena.words_a_row for arena in arenas]
        if words not in widths:
            arenas.append(Arena.reserve(self._capacity_rows, words))
            widths.append(words)
        layout[ARENA] = widths.index(words)
        return TableState.begin(spec, layout, self._engine_of(spec))

    def _engine_of(self, spec: TableSpec) -> "FbgemmEngine | None":
        return self._engine_choice.engine_of(spec)


def _require_different_names(specs: Sequence[TableSpec]) -> None:
    for name, times in Counter(spec.name for spec in specs).items():
        if times > 1:
            raise ConfigError(
                "Tables added together must have different names. "
                f"Received: {name!r} {times} times."
            )
