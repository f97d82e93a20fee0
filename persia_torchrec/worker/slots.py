"""The lookup of PERSIA's slots: some are pooled, some are raw.

    pooled slots -> one array (B, T), each slot in its own columns
    a raw slot   -> one array (N, D), a vector for each of its different ids, and where
                    these stand in the samples (see ``raw_ids.py``)

Where buckets of a hash stack stand for an id, its vector is the sum of theirs; with
root scaling, divided by the root of their number.

Dimension key:
    B: samples
    N: different ids of a raw slot
    D: embedding dim
    T: sum of the dims of the pooled slots
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.client.outcome import PushOutcome
from persia_torchrec.wire.messages import Precision
from persia_torchrec.worker.bags import Bags, FeatureSpec
from persia_torchrec.worker.embedding_worker import EmbeddingWorker, RoutedBatch
from persia_torchrec.worker.hello import Hello, Slot
from persia_torchrec.worker.pooling import Floats, add_gradients, pool
from persia_torchrec.worker.pulled import Outputs
from persia_torchrec.worker.raw_ids import raw_ids


class SlotsLookup(EmbeddingWorker):
    """Pools the pooled slots of a batch, and gives a vector for each id of the others.

    Its outputs are float32 ``(B, T)``, also where T is 0, and ``(N, D)`` a raw slot, in
    the order of the features.

    Args:
        client: of the servers; the worker does not close it.
        features: in the order of the outputs, or of their columns.
        precision: how rows and gradients travel.
    """

    def __init__(
        self,
        client: EmbeddingClient,
        features: Sequence[FeatureSpec],
        *,
        precision: Precision = Precision.FP32,
    ) -> None:
        super().__init__(client, features, precision=precision)
        numbered = list(enumerate(self.features))
        self._pooled = [f for f, feature in numbered if not feature.num_places]
        self._raw = [f for f, feature in numbered if feature.num_places]
        # The features of each output.
        self._parts = [self._pooled, *([f] for f in self._raw)]

    def pull(
        self, bags: Mapping[str, Bags], number: BatchNumber | None
    ) -> tuple[Outputs, RoutedBatch]:
        """Fetch the rows of a batch; see :meth:`EmbeddingWorker.pull`.

        Returns:
            The outputs; and what :meth:`push` needs, with the places of the raw slots.
        """
        num_samples = self.check(bags)
        bags_of = {feature.name: bags[feature.key] for feature in self.features}
        places = []
        for f in self._raw:
            feature = self.features[f]
            raw = raw_ids(bags_of[feature.name], feature.num_places)
            bags_of[feature.name] = raw.bags()
            places.append(raw.places)
        batch = self.route(bags_of, num_samples, number)
        batch = replace(batch, places=places)
        return self.outputs_of(self.rows_of(batch), batch), batch

    def update(self, batch: RoutedBatch, grads: Outputs) -> PushOutcome:
        """Push the gradients of a training batch, and wait until they are applied.

        Raises:
            PersiaError: as :meth:`push`, or a server failed.
        """
        return self.outcome(self.push(batch, grads))

    def gradients_of_slots(
        self, grads: Sequence[Floats]
    ) -> Iterator[tuple[FeatureSpec, Floats]]:
        """Yield each slot with its part of the outputs, or of their gradients."""
        dims = self.dims()
        for part, grad in zip(self._parts, grads, strict=True):
            ends = np.cumsum([dims[f] for f in part])[:-1]
            pieces = np.split(grad, ends, axis=1) if part else []
            for f, piece in zip(part, pieces, strict=True):
                yield self.features[f], piece

    def hello(self) -> Hello:
        """Tell the slots, and how many rows the servers hold.

        Raises:
            ConfigError: the tables are not known yet.
            ServerError: a server failed, refused (it loads a checkpoint), or did not
                answer in time.
        """
        slots = tuple(
            Slot(name=feature.name, dim=dim, num_places=feature.num_places)
            for feature, dim in zip(self.features, self.dims(), strict=True)
        )
        return Hello(slots, tuple(self._client.num_rows()))

    def shapes(self, batch: RoutedBatch) -> list[tuple[int, ...]]:
        """Return the shape of each output."""
        dims = self.dims()
        raw = [(len(batch.lengths[f]), dims[f]) for f in self._raw]
        return [(batch.num_samples, sum(dims[f] for f in self._pooled)), *raw]

    def outputs_of(self, rows: Sequence[Floats], batch: RoutedBatch) -> Outputs:
        """Sum the rows of each bag, or of each id's buckets."""
        return tuple(
            pool(self.feature_bags(rows, batch, part), num)
            for part, (num, _) in zip(self._parts, self.shapes(batch), strict=True)
        )

    def row_gradients(self, grads: Outputs, batch: RoutedBatch) -> list[Floats]:
        """Sum the gradients of each row."""
        sums = self.no_gradients(batch)
        for part, grad in zip(self._parts, grads, strict=True):
            add_gradients(grad, self.feature_bags(sums, batch, part))
        return sums
