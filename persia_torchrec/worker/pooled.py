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

import numpy as np

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
        (shape,) = self.shapes(batch)
        pooled_BT = np.empty(shape, dtype=np.float32)
        for f, columns in enumerate(self._columns()):
            feature = self.features[f]
            bags = batch.inverses[f], batch.lengths[f], feature.pooling
            pool(rows[self.table_of[f]], *bags, pooled_BT, columns)
        return (pooled_BT,)

    def row_gradients(self, grads: Outputs, batch: RoutedBatch) -> list[Floats]:
        """Sum the gradients of the bags for each row in them."""
        (grads_BT,) = grads
        sums = self.no_gradients(batch)
        for f, columns in enumerate(self._columns()):
            feature = self.features[f]
            bags = batch.inverses[f], batch.lengths[f], feature.pooling
            add_gradients(grads_BT, columns, *bags, sums[self.table_of[f]])
        return sums

    def _columns(self) -> list[slice]:
        stops = np.cumsum(self.dims()).tolist()
        return [
            slice(stop - dim, stop)
            for stop, dim in zip(stops, self.dims(), strict=True)
        ]
