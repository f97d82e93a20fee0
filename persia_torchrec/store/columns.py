"""Rows outside of a store: one array for each column of theirs."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from persia_torchrec.table import TableSpec

METADATA_WORDS = 4


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
