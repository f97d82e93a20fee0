"""What a file says of tables and rows, as the tables of a store take it.

Dimension key:
    N: rows of a block
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

import numpy as np

from persia_torchrec.checkpoint.catalog import SavedTable
from persia_torchrec.errors import CheckpointError
from persia_torchrec.store.columns import METADATA_WORDS, RowColumns
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.table import TableState
from persia_torchrec.table import TableSpec


def add_tables(
    store: EmbeddingStore, tables: Sequence[SavedTable], *, follows: bool
) -> list[int]:
    """Add unknown tables; return the number of each. Known settings stay.

    With ``follows``, known tables take over the admission.
    """
    known = {spec.name: spec for spec in store.tables}
    specs = []
    for spec in (table.spec for table in tables):
        known_spec = known.get(spec.name, spec)
        admission = spec.admission if follows else known_spec.admission
        specs.append(replace(known_spec, admission=admission))
    return store.add_tables(specs)


def set_thresholds(state: TableState, saved: SavedTable) -> None:
    """Let a table count blocks as one did that ranked the ids of its server."""
    if len(saved.thresholds) == state.thresholds.size:
        state.thresholds[:] = saved.thresholds


def require_same_rows(
    where: str,
    tables: Sequence[SavedTable],
    known_specs: Iterable[TableSpec],
    *,
    all_known: bool = False,
) -> None:
    """Refuse tables whose rows differ; with ``all_known``, unknown tables, too."""
    known = {spec.name: spec.describe_rows() for spec in known_specs}
    for spec in (table.spec for table in tables):
        received = spec.describe_rows()
        expected = known.get(spec.name, "no rows there" if all_known else received)
        if received != expected:
            raise CheckpointError(
                f"{where}: table {spec.name!r} must have {expected}. "
                f"Received: {received}."
            )


def continue_seconds(
    store: EmbeddingStore,
    tables: Sequence[SavedTable],
    written_s: float,
    *,
    goes_back: bool = False,
) -> dict[str, int]:
    """Let the running time continue where a file was written.

    So rows are as old as they were then. Returns the seconds by which the times of rows
    of a table must be moved, where any must. With ``goes_back`` the store has no rows
    of another time. ``written_s`` is for files that tell no seconds.
    """
    seconds_of = {table.name: table.now_s or written_s for table in tables}
    specs = {table.name: table.spec for table in tables}
    running = [
        seconds_of[name]
        for name, spec in specs.items()
        if spec.expiry.is_by_running_time and seconds_of[name]
    ]
    if running and (goes_back or max(running) > store.seconds.running_s):
        store.seconds.running_s = max(running)
    moved = {}
    for spec in store.tables:
        saved_s = seconds_of.get(spec.name)
        if saved_s and spec.expiry.is_by_running_time:
            moved[spec.name] = int(store.seconds.running_s) - int(saved_s)
    return moved


def written_s(created: str) -> float:
    """Return the second since 1970 of a date; 0 for what is none."""
    try:
        return datetime.fromisoformat(created).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def with_metadata(
    rows: RowColumns, store: EmbeddingStore, number: int, moved_s: Mapping[str, int]
) -> RowColumns:
    """Return rows with metadata if the table keeps them; missing ones are current."""
    state = store.states[number]
    if not state.has_metadata:
        return replace(rows, metadata=rows.metadata[:, :0])
    if rows.metadata.shape[1]:
        if by_s := moved_s.get(state.spec.name, 0):
            metadata = rows.metadata.copy()
            last_s = metadata[:, 3].astype(np.int64) + by_s
            metadata[:, 3] = last_s.clip(0, 2**32 - 1)
            return replace(rows, metadata=metadata)
        return rows
    step, now_s = state.num_updates, store.now_s(state)
    metadata = np.empty((len(rows), METADATA_WORDS), dtype=np.uint32)
    metadata[:] = np.array([1, step, step, now_s], dtype=np.uint32)
    return replace(rows, metadata=metadata)
