"""Whether saved rows fit the tables of a server, and how they are made to."""

import time

import numpy as np

from persia_torchrec.store.row_columns import METADATA_WORDS, RowColumns
from persia_torchrec.store.rows import HAS_METADATA
from persia_torchrec.store.table_state import TableState
from persia_torchrec.table import TableSpec


def form_of(spec: TableSpec) -> str:
    """Say what the rows of a table look like."""
    return (
        f"dim {spec.dim}, weights {spec.weight_dtype} and optimizer "
        f"{spec.optimizer.kind} ({spec.num_state_floats} state floats a row)"
    )


def with_metadata(rows: RowColumns, state: TableState) -> RowColumns:
    """Return rows with metadata if the table keeps them, and without otherwise.

    Rows that come without are as if they had been made now.
    """
    if not state.layout[HAS_METADATA]:
        return RowColumns(
            rows.ids, rows.uses, rows.metadata[:, :0], rows.state, rows.weights
        )
    if rows.metadata.shape[1]:
        return rows
    step, now_s = state.now(time.time())  # noqa: TID251  # kept in rows
    metadata = np.empty((len(rows), METADATA_WORDS), dtype=np.uint32)
    metadata[:] = np.array([1, step, step, now_s], dtype=np.uint32)
    return RowColumns(rows.ids, rows.uses, metadata, rows.state, rows.weights)


def frequencies_of(rows: RowColumns) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Return how often each row was looked up; once, where that is not known."""
    if rows.metadata.shape[1]:
        return np.ascontiguousarray(rows.metadata[:, 0])
    return np.ones(len(rows), dtype=np.uint32)
