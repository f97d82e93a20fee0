"""The lookup of PERSIA's slots: some are pooled, some are raw.

A batch may have any of the slots, in any order. Only its own are looked up, updated and
sent, and all of that has the order of the batch.

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

from persia_torchrec.client.client import BatchNumber
from persia_torchrec.client.codec import PushOutcome
from persia_torchrec.worker.bags import Bags, FeatureSpec
from persia_torchrec.worker.embedding_worker import (
    BatchFeatures,
    EmbeddingWorker,
    RoutedBatch,
)
from persia_torchrec.worker.hello import Hello, Slot, require_slots
from persia_torchrec.worker.pooling import Floats, add_gradients, pool
from persia_torchrec.worker.pulled import Outputs
from persia_torchrec.worker.raw_ids import raw_ids


class SlotsLookup(EmbeddingWorker):
    """Pools the pooled slots of a batch, and gives a vector for each id of the others.

    Its outputs are float32 ``(B, T)``, also where T is 0, and ``(N, D)`` a raw slot, of
    the slots that the batch has, in the order of the batch.

    Args:
        client: of the servers; the worker does not close it.
        features: one a slot.
        precision: how rows and gradients travel.
    """

    def pull(
        self, bags: Mapping[str, Bags], number: BatchNumber | None
    ) -> tuple[Outputs, RoutedBatch]:
        """Fetch the rows of a batch; see :meth:`EmbeddingWorker.pull`.

        Args:
            bags: by slot, at least one, in the order of the batch.
            number: as there.

        Returns:
            The outputs; and what :meth:`push` needs, with the names of the slots and
            the places of the raw ones.
        """
        num_samples = self.check(bags)
        feature_of = {feature.key: feature for feature in self.features}
        features = BatchFeatures([feature_of[key] for key in bags])
        bags_of = {feature.name: bags[feature.key] for feature in features.specs}
        places = []
        for feature in features.specs:
            if feature.num_places:
                raw = raw_ids(bags_of[feature.name], feature.num_places)
                bags_of[feature.name] = raw.bags()
                places.append(raw.places)
        batch = self.route(features, bags_of, num_samples, number)
        batch = replace(batch, places=places, slots=tuple(bags))
        return self.outputs_of(self.rows_of(batch), batch), batch

    def update(self, batch: RoutedBatch, grads: Outputs) -> PushOutcome:
        """Push the gradients of a training batch, and wait until they are applied.

        Raises:
            PersiaError: as :meth:`push`, or a server failed.
        """
        return self.outcome(self.push(batch, grads))

    def check(self, bags: Mapping[str, Bags]) -> int:
        """Check a batch against the slots; return its number of samples.

        Raises:
            BatchError: a slot is unknown, there is none, or they do not fit together.
        """
        require_slots(list(bags), [feature.key for feature in self.features])
        return self.check_bags(bags)

    def gradients_of_slots(
        self, batch: RoutedBatch, grads: Sequence[Floats]
    ) -> Iterator[tuple[FeatureSpec, Floats]]:
        """Yield each slot of a batch with its part of the outputs' gradients."""
        dims = self.dims(batch.features)
        for part, grad in zip(batch.features.pooled_and_raw, grads, strict=True):
            ends = np.cumsum([dims[f] for f in part])[:-1]
            pieces = np.split(grad, ends, axis=1) if part else []
            for f, piece in zip(part, pieces, strict=True):
                yield batch.features.specs[f], piece

    def hello(self) -> Hello:
        """Tell all slots, and how many rows the servers hold.

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
        dims = self.dims(batch.features)
        pooled, *raw = batch.features.pooled_and_raw
        return [
            (batch.num_samples, sum(dims[f] for f in pooled)),
            *((len(batch.lengths[f]), dims[f]) for (f,) in raw),
        ]

    def outputs_of(self, rows: Sequence[Floats], batch: RoutedBatch) -> Outputs:
        """Sum the rows of each bag, or of each id's buckets."""
        return tuple(
            pool(self.feature_bags(rows, batch, part), num)
            for part, (num, _) in zip(
                batch.features.pooled_and_raw, self.shapes(batch), strict=True
            )
        )

    def row_gradients(self, grads: Outputs, batch: RoutedBatch) -> list[Floats]:
        """Sum the gradients of each row."""
        sums = self.no_gradients(batch)
        for part, grad in zip(batch.features.pooled_and_raw, grads, strict=True):
            add_gradients(grad, self.feature_bags(sums, batch, part))
        return sums
