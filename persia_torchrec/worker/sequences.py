"""The lookup that does not pool: one row for every id, as the batch has them.

    output of a feature      = rows[inverse]
    gradient of rows[u]      = sum of the gradients of every place where u stands

Dimension key:
    L: ids of one feature in a batch
    U: unique ids of its table
    D: embedding dim
"""

from collections.abc import Sequence

import numpy as np

from persia_torchrec.compiled import compiled, read_only
from persia_torchrec.routing.dedup import Positions
from persia_torchrec.worker.embedding_worker import EmbeddingWorker, RoutedBatch
from persia_torchrec.worker.pooling import Floats
from persia_torchrec.worker.pulled import Outputs


class SequenceLookup(EmbeddingWorker):
    """Gives a row for each id; its outputs are float32 ``(L, D)``, one a feature."""

    def shapes(self, batch: RoutedBatch) -> list[tuple[int, ...]]:
        """Return the shape of each feature's output."""
        return [
            (len(inverse_L), dim)
            for inverse_L, dim in zip(batch.inverses, self.dims(), strict=True)
        ]

    def outputs_of(self, rows: Sequence[Floats], batch: RoutedBatch) -> Outputs:
        """Gather the row of each id."""
        return tuple(
            gather(rows[table], inverse_L)
            for table, inverse_L in zip(self.table_of, batch.inverses, strict=True)
        )

    def row_gradients(self, grads: Outputs, batch: RoutedBatch) -> list[Floats]:
        """Sum the gradients of each row."""
        sums = self.no_gradients(batch)
        for f, grads_LD in enumerate(grads):
            scatter_add(grads_LD, batch.inverses[f], sums[self.table_of[f]])
        return sums


def gather(rows_UD: Floats, inverse_L: Positions) -> Floats:
    """Return the row of each id.

    Args:
        rows_UD: float32 ``(U, D)``.
        inverse_L: int32 ``(L,)``, which row each id is.

    Returns:
        float32 ``(L, D)``.

    Example:
        >>> rows_UD = np.array([[1, 2], [3, 4]], dtype=np.float32)
        >>> gather(rows_UD, np.array([1, 1, 0], dtype=np.int32)).tolist()
        [[3.0, 4.0], [3.0, 4.0], [1.0, 2.0]]
    """
    return _gather(read_only(rows_UD), read_only(inverse_L))


def scatter_add(grads_LD: Floats, inverse_L: Positions, out_UD: Floats) -> None:
    """Add the gradient of each id to that of its row.

    Args:
        grads_LD: float32 ``(L, D)``.
        inverse_L: int32 ``(L,)``, which row each id is.
        out_UD: float32 ``(U, D)``, added to.
    """
    _scatter_add(read_only(grads_LD), read_only(inverse_L), out_UD)


@compiled
def _gather(rows_UD: Floats, inverse_L: Positions) -> Floats:
    dim = rows_UD.shape[1]
    out_LD = np.empty((len(inverse_L), dim), dtype=np.float32)
    for j in range(len(inverse_L)):
        row, out = rows_UD[inverse_L[j]], out_LD[j]
        for d in range(dim):
            out[d] = row[d]
    return out_LD


@compiled
def _scatter_add(grads_LD: Floats, inverse_L: Positions, out_UD: Floats) -> None:
    dim = out_UD.shape[1]
    for j in range(len(inverse_L)):
        grad, out = grads_LD[j], out_UD[inverse_L[j]]
        for d in range(dim):
            out[d] += grad[d]
