"""The lookup that pools: one vector a bag, all features side by side.

    rows of the unique ids -> one array (B, T), each feature in its own columns
    its gradient           -> gradient of each unique id, summed over the batch

Dimension key:
    B: samples
    U: unique ids of one table
    D: embedding dim
    T: sum of the dims of all features
"""

from collections.abc import Sequence

from persia_torchrec.worker.embedding_worker import EmbeddingWorker, RoutedBatch
from persia_torchrec.worker.pooling import Floats, add_gradients, pool
from persia_torchrec.worker.pulled import Outputs


class PooledLookup(EmbeddingWorker):
    """Pools the bags of a batch; its one output is float32 ``(B, T)``."""

    def shapes(self, batch: RoutedBatch) -> list[tuple[int, ...]]:
        """Return the shape of the one output."""
        return [(batch.num_samples, sum(self.dims()))]

    def outputs_of(self, rows: Sequence[Floats], batch: RoutedBatch) -> Outputs:
        """Pool the rows of a batch."""
        return (pool(self.feature_bags(rows, batch), batch.num_samples),)

    def row_gradients(self, grads: Outputs, batch: RoutedBatch) -> list[Floats]:
        """Sum the gradients of the bags for each row in them."""
        (grads_BT,) = grads
        sums = self.no_gradients(batch)
        add_gradients(grads_BT, self.feature_bags(sums, batch))
        return sums
