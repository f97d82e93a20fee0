"""What a file says of tables and rows, as the tables of a store take it.

Dimension key:
    N: rows of a block
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

import numpy as np
import numpy.typing as npt

from persia_torchrec.checkpoint.catalog import SavedTable
from persia_torchrec.embedding.admission import AdmitAll
from persia_torchrec.embedding.usage import DynamicDim
from persia_torchrec.errors import CheckpointError
from persia_torchrec.store import memory
from persia_torchrec.store.columns import METADATA_WORDS, RowColumns
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.row_copy import initial_rows
from persia_torchrec.store.table import TableState
from persia_torchrec.table import TableSpec

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


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


def fitted(
    rows: RowColumns,
    store: EmbeddingStore,
    number: int,
    moved_s: Mapping[str, int],
    not_finite: Counter[str],
) -> RowColumns:
    """Return rows as a table of the store takes them; count those that are not finite.

    ``moved_s`` is what :func:`continue_seconds` returned.
    """
    state = store.states[number]
    is_bad_N = find_not_finite(rows, state.spec)
    if is_bad_N.any():
        not_finite[state.spec.name] += int(np.count_nonzero(is_bad_N))
        if state.spec.resets_non_finite:
            rows = _reset(rows, state.spec, is_bad_N)
    if not _are_moderate(rows, state.spec):
        store.tally[memory.HAS_LARGE] = 1
    return _with_metadata(rows, store, number, moved_s)


def find_not_finite(rows: RowColumns, spec: TableSpec) -> Bools:
    """Return which rows have a NaN or an infinity; bool ``(N,)``."""
    weights, state = _floats_of(rows, spec)
    has_bad_N = np.zeros(len(rows), dtype=np.bool_)
    for floats in (weights, state):
        has_bad_N |= np.any(~np.isfinite(floats), axis=1)
    return has_bad_N


def _floats_of(rows: RowColumns, spec: TableSpec) -> tuple[Floats, Floats]:
    """Return weights as floats, and the optimizer's part of the state."""
    weights = rows.weights
    if spec.weight_dtype == "bf16":
        weights = (weights.astype(np.uint32) << 16).view(np.float32)
    elif spec.weight_dtype == "fp16":
        weights = weights.view(np.float16).astype(np.float32)
    num_state = len(spec.optimizer.initial_state(spec.row_dim))
    return weights, rows.state[:, :num_state]


def _are_moderate(rows: RowColumns, spec: TableSpec) -> bool:
    largest = memory.MODERATE_WEIGHT, memory.MODERATE_STATE
    pairs = zip(_floats_of(rows, spec), largest, strict=True)
    return all(np.abs(x).max(initial=0) <= limit for x, limit in pairs)


def _reset(rows: RowColumns, spec: TableSpec, is_reset_N: Bools) -> RowColumns:
    """Return rows some of which have initial weights and optimizer state."""
    ids_K = np.ascontiguousarray(rows.ids[is_reset_N])
    plain = replace(spec, shared_rows=0, admission=AdmitAll(), dynamic=DynamicDim())
    plain = replace(plain, dim=spec.row_dim, weight_dtype="fp32")
    weights_KD = initial_rows(plain, ids_K)[:, : spec.row_dim]
    weights, state = rows.weights.copy(), rows.state.copy()
    if spec.weight_dtype == "bf16":
        weights[is_reset_N] = (weights_KD.view(np.uint32) >> 16).astype(np.uint16)
    elif spec.weight_dtype == "fp16":
        weights[is_reset_N] = weights_KD.astype(np.float16).view(weights.dtype)
    else:
        weights[is_reset_N] = weights_KD
    initial = spec.optimizer.initial_state(spec.row_dim)
    state[is_reset_N, : len(initial)] = initial
    return replace(rows, weights=weights, state=state)


def _with_metadata(
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
