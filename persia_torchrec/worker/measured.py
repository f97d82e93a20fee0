"""What an embedding worker tells a metrics gateway: PERSIA's metrics of that role.

The measuring stands around a lookup and is left out where nobody wants to know. What
PERSIA has as the value of the last batch is here the mean of the batches since the last
push.

Dimension key:
    U: unique ids of one table in a batch
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.client.codec import PushOutcome
from persia_torchrec.config import EmbeddingSchema, MetricsSettings
from persia_torchrec.metrics import Observations, Reading
from persia_torchrec.routing.hashing import Ids
from persia_torchrec.wire.gateway import is_pushed, push_metrics
from persia_torchrec.worker.bags import Bags, FeatureSpec
from persia_torchrec.worker.distinct import DistinctIds
from persia_torchrec.worker.embedding_worker import RoutedBatch
from persia_torchrec.worker.pooling import Floats
from persia_torchrec.worker.process import WorkerProcess
from persia_torchrec.worker.pulled import Outputs
from persia_torchrec.worker.schema import features_of
from persia_torchrec.worker.slots import SlotsLookup

_HELPS = {
    "batch_unique_indices_rate": "different ids of a batch, of all its ids",
    "lookup_preprocess_time_cost_sec": "making the ids of a batch unique",
    "lookup_rpc_time_cost_sec": "getting the rows of a batch from the servers",
    "lookup_postprocess_time_cost_sec": "making embeddings of the rows",
    "lookup_total_time_cost_sec": "the lookup of a batch",
    "update_gradient_time_cost_sec": "the update of a batch, until it is applied",
    "nan_count": "values of gradients that were not finite",
    "nan_grad_skipped": "gradients of an embedding with such a value: no row moved",
}
_PENDING_HELP = "batches of data loaders that no trainer has asked for yet"
_STALENESS_HELP = "training batches looked up and not yet updated"
_DISTINCT_HELP = "about how many different ids the feature had since the start"


class MeasuredLookup(SlotsLookup):
    """A lookup that measures itself. Any thread may call any method but ``read``.

    Args:
        client: of the servers; the worker does not close it.
        features: one a slot.
    """

    def __init__(
        self, client: EmbeddingClient, features: Sequence[FeatureSpec]
    ) -> None:
        super().__init__(client, features)
        self._observed = Observations(_HELPS)
        self._distinct = {feature.name: DistinctIds() for feature in self.features}
        DistinctIds().add(np.zeros(1, dtype=np.uint64))  # compiles it, if need be
        self._began = threading.local()
        for feature in self.features:
            self._observed.count("nan_count", 0, feature.name)
            self._observed.count("nan_grad_skipped", 0, feature.name)

    def pull(
        self, bags: Mapping[str, Bags], number: BatchNumber | None
    ) -> tuple[Outputs, RoutedBatch]:
        """Fetch the rows of a batch; see :meth:`SlotsLookup.pull`."""
        self._began.s = time.perf_counter()
        with self._observed.timed("lookup_total_time_cost_sec"):
            outputs, batch = super().pull(bags, number)
        self._note_ids(bags, batch)
        return outputs, batch

    def rows_of(self, batch: RoutedBatch) -> list[Floats]:
        """Fetch the unique rows; see :meth:`EmbeddingWorker.rows_of`."""
        passed_s = time.perf_counter() - self._began.s
        self._observed.observe("lookup_preprocess_time_cost_sec", passed_s)
        with self._observed.timed("lookup_rpc_time_cost_sec"):
            return super().rows_of(batch)

    def outputs_of(self, rows: Sequence[Floats], batch: RoutedBatch) -> Outputs:
        """Make embeddings of the rows; see :meth:`SlotsLookup.outputs_of`."""
        with self._observed.timed("lookup_postprocess_time_cost_sec"):
            return super().outputs_of(rows, batch)

    def update(self, batch: RoutedBatch, grads: Outputs) -> PushOutcome:
        """Push gradients and wait; see :meth:`SlotsLookup.update`."""
        with self._observed.timed("update_gradient_time_cost_sec"):
            outcome = super().update(batch, grads)
        if outcome.num_refused:  # else all of them were finite
            self._note_not_finite(batch, grads)
        return outcome

    def read(self) -> list[Reading]:
        """Return what was measured."""
        name = "estimated_distinct_id"
        return [
            *self._observed.read(),
            *(
                Reading(name, ids.estimate(), _DISTINCT_HELP, feature=feature)
                for feature, ids in self._distinct.items()
            ),
        ]

    def _note_ids(self, bags: Mapping[str, Bags], batch: RoutedBatch) -> None:
        for f, feature in enumerate(batch.features.specs):
            ids = bags[feature.key].ids
            if len(ids) == 0:
                continue
            rounds = feature.hash_stack_rounds
            unique_U = self._unique_ids(batch, f)
            # Where buckets stand for ids, the ids themselves are those of the batch.
            self._distinct[feature.name].add(ids if rounds else unique_U)
            rate = len(unique_U) / (len(ids) * max(rounds, 1))
            self._observed.observe("batch_unique_indices_rate", rate, feature.name)

    def _unique_ids(self, batch: RoutedBatch, f: int) -> Ids:
        """Return the different ids of a feature, of all those of its table."""
        table_of = batch.features.table_of
        ids_U = batch.tables[table_of[f]][1].ids
        if table_of.count(table_of[f]) == 1:
            return ids_U
        is_used_U = np.zeros(len(ids_U), dtype=np.bool_)
        is_used_U[batch.inverses[f]] = True
        return ids_U[is_used_U]

    def _note_not_finite(self, batch: RoutedBatch, grads: Outputs) -> None:
        for feature, grad in self.gradients_of_slots(batch, grads):
            is_bad = ~np.isfinite(grad)
            if num := int(np.count_nonzero(is_bad)):
                num_embeddings = int(np.count_nonzero(is_bad.any(axis=1)))
                self._observed.count("nan_count", num, feature.name)
                self._observed.count("nan_grad_skipped", num_embeddings, feature.name)


def make_lookup(
    client: EmbeddingClient, schema: EmbeddingSchema, settings: MetricsSettings
) -> SlotsLookup:
    """Return the lookup of an embedding worker: a measured one, if somebody looks."""
    kind = MeasuredLookup if is_pushed(settings) else SlotsLookup
    return kind(client, features_of(schema))


@contextmanager
def pushing_metrics(
    process: WorkerProcess, lookup: SlotsLookup, index: int, settings: MetricsSettings
) -> Iterator[None]:
    """Push the metrics of an embedding worker while a block runs, and at its end.

    Args:
        process: tells what waits in it.
        lookup: what ``make_lookup`` returned for the same settings.
        index: which worker this is.
        settings: of the global config.
    """

    def read() -> list[Reading]:
        return [
            Reading("num_pending_batches", process.num_pending, _PENDING_HELP),
            Reading("staleness", process.num_stale, _STALENESS_HELP),
            *(lookup.read() if isinstance(lookup, MeasuredLookup) else ()),
        ]

    pushes = push_metrics("embedding_worker", index, settings, read)
    try:
        yield
    finally:
        if pushes is not None:
            pushes.close()
