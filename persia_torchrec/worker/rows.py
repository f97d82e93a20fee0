"""The lookup that leaves the rest to others: the unique rows of each table.

For pooling where the model is, as on a GPU: each row crosses the way there once,
however often its id is in the batch. Which row each id is, the batch says.
"""

from collections.abc import Sequence

from persia_torchrec.worker.embedding_worker import EmbeddingWorker, RoutedBatch
from persia_torchrec.worker.pooling import Floats
from persia_torchrec.worker.pulled import Outputs


class RowsLookup(EmbeddingWorker):
    """Gives the unique rows; its outputs are float32 ``(U, D)``, one a table.

    They cannot be written to: they may be views of the message that was received.
    """

    def shapes(self, batch: RoutedBatch) -> list[tuple[int, ...]]:
        """Return the shape of each table's output."""
        return [*self.row_shapes(batch)]

    def outputs_of(self, rows: Sequence[Floats], batch: RoutedBatch) -> Outputs:
        """Return the rows."""
        return tuple(rows)

    def row_gradients(self, grads: Outputs, batch: RoutedBatch) -> list[Floats]:
        """Return the gradients."""
        return list(grads)
