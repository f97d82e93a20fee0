"""Rows outside of a store: a column for each of their parts.

Dimension key:
    N: rows
    D: embedding dim
    S: optimizer-state floats per row
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from persia_torchrec.errors import FrameError
from persia_torchrec.table import TableSpec

POSITION_BITS = 24
"""Bits of a use that hold the row's position in its request."""

METADATA_WORDS = 4

_DTYPES = {"fp32": np.float32, "fp16": np.uint16, "bf16": np.uint16}


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

    dim: int
    num_state_floats: int
    has_metadata: bool
    weight_dtype: npt.DTypeLike

    @classmethod
    def of(cls, spec: TableSpec, *, has_metadata: bool) -> "RowShape":
        """Return the shape of a table's rows."""
        dtype = _DTYPES[spec.weight_dtype]
        return cls(spec.dim, spec.num_state_floats, has_metadata, dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all columns."""
        weight_bytes = self.dim * np.dtype(self.weight_dtype).itemsize
        metadata_bytes = 4 * METADATA_WORDS * self.has_metadata
        return 16 + metadata_bytes + 4 * self.num_state_floats + weight_bytes

    def empty(self, num_rows: int) -> RowColumns:
        """Return columns with room for rows."""
        return RowColumns(
            np.empty(num_rows, np.uint64),
            np.empty(num_rows, np.uint64),
            np.empty((num_rows, METADATA_WORDS * self.has_metadata), np.uint32),
            np.empty((num_rows, self.num_state_floats), np.float32),
            np.empty((num_rows, self.dim), self.weight_dtype),
        )

    def view(self, payload: bytes | bytearray | memoryview) -> RowColumns:
        """View bytes, column after column, as columns; refuse a fraction of a row."""
        num_rows, rest = divmod(len(payload), self.row_bytes)
        if rest:
            raise FrameError(
                f"A row takes {self.row_bytes} bytes. Received: {len(payload)} bytes."
            )
        columns = []
        offset = 0
        for column in self.empty(0).columns():
            width = int(np.prod(column.shape[1:]))
            flat = np.frombuffer(payload, column.dtype, num_rows * width, offset)
            columns.append(flat.reshape(num_rows, *column.shape[1:]))
            offset += flat.nbytes
        return RowColumns(*columns)
