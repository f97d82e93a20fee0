"""Rows outside of a store: one array for each column of theirs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Offsets
from persia_torchrec.store.recency import classify_all
from persia_torchrec.table import TableSpec

METADATA_WORDS = 4
SLICE_ROWS = 2048


@dataclass(frozen=True, slots=True)
class RowColumns:
    """Some rows of one table.

    ``uses`` says when each was last used: the request's tick, and in the lowest 24 bits
    the position among the rows of that request. All servers of a job get the same
    requests, so that their ticks can be compared. ``metadata`` is ``(N, 4)``:
    frequency, last step, first step, last second; or ``(N, 0)``. 16-bit weights are
    their bits, in uint16.
    """

    ids: npt.NDArray[np.uint64]
    uses: npt.NDArray[np.uint64]
    metadata: npt.NDArray[np.uint32]
    state: npt.NDArray[np.float32]
    weights: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.ids)

    def columns(self) -> list[npt.NDArray[Any]]:
        """Return the columns, in the order above."""
        return [self.ids, self.uses, self.metadata, self.state, self.weights]

    def addresses(self) -> npt.NDArray[np.uint64]:
        """Return where the columns are, for loops; the caller keeps them alive."""
        addresses = [column.ctypes.data for column in self.columns()]
        return np.array(addresses, dtype=np.uint64)


Rows = list[tuple[int, RowColumns]]
"""Rows of one table each, with its index in the head of their file."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """The form of a table's columns."""

    spec: TableSpec
    has_metadata: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all columns."""
        return sum(column.nbytes for column in self.empty(1).columns())

    def empty(self, num_rows: int) -> RowColumns:
        """Return columns with room for rows."""
        spec = self.spec
        dtype = np.float32 if spec.weight_dtype == "fp32" else np.uint16
        return RowColumns(
            np.empty(num_rows, np.uint64),
            np.empty(num_rows, np.uint64),
            np.empty((num_rows, METADATA_WORDS * self.has_metadata), np.uint32),
            np.empty((num_rows, spec.num_row_floats), np.float32),
            np.empty((num_rows, spec.row_dim), dtype),
        )

    def view(self, payload: bytes) -> RowColumns:
        """View the bytes of whole rows, column after column, as columns."""
        num_rows, offset = len(payload) // self.row_bytes, 0
        columns = []
        for column in self.empty(num_rows).columns():
            flat = np.frombuffer(payload, column.dtype, column.size, offset)
            columns.append(flat.reshape(column.shape))
            offset += flat.nbytes
        return RowColumns(*columns)


def frequencies(rows: RowColumns) -> npt.NDArray[np.uint32]:
    """Return the uses of each row; 1 where that is unknown."""
    if rows.metadata.shape[1]:
        return np.ascontiguousarray(rows.metadata[:, 0])
    return np.ones(len(rows), dtype=np.uint32)


def eviction_order(tables: Rows, is_pinned: Sequence[bool], *, is_lfu: bool) -> Offsets:
    """Return the offsets of all rows, tables joined, in the order of eviction."""
    uses_R = np.concatenate(
        [np.empty(0, np.uint64), *(rows.uses for _, rows in tables)]
    )
    num_rows = np.array([len(rows) for _, rows in tables], dtype=np.int64)
    keys = [uses_R, np.repeat(np.array(is_pinned, dtype=np.bool_), num_rows)]
    if is_lfu:  # the last one counts most
        of_tables = [frequencies(rows) for _, rows in tables]
        joined = np.concatenate([np.empty(0, np.uint32), *of_tables])
        keys.insert(1, classify_all(joined))
    return np.lexsort(keys)


def slices(tables: Rows, offsets_R: Offsets) -> Iterator[tuple[int, RowColumns]]:
    """Yield rows in the order of their offsets: runs of one table, in slices."""
    if len(offsets_R) == 0:
        return
    starts = np.cumsum([0, *(len(rows) for _, rows in tables)])
    which_R = np.searchsorted(starts, offsets_R, side="right") - 1
    borders = np.flatnonzero(np.diff(which_R)) + 1
    for run in np.split(offsets_R, borders):
        which = int(np.searchsorted(starts, run[0], side="right")) - 1
        table, rows = tables[which]
        for start in range(0, len(run), SLICE_ROWS):
            at = run[start : start + SLICE_ROWS] - starts[which]
            yield table, RowColumns(*(column[at] for column in rows.columns()))
