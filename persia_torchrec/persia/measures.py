"""What an embedding worker measures of its lookups: PERSIA's metrics of that role.

PERSIA's values of the last batch are here means of the batches since the last push.
Different ids are estimated by HyperLogLog: the first bits of an id's hash choose a
register, which keeps the longest run of zeros, plus one, at the end of the others:

    hash   rrrrrrrrrrrrrr bbbb...bbbb1000    register r keeps max(4, ...)
           14 bits        50 bits

P. Flajolet et al., "HyperLogLog", 2007; the estimate is that of O. Ertl, "New
cardinality estimation algorithms for HyperLogLog sketches", 2017 (algorithm 6), with a
standard error of 0.8 % for few ids and many.

Dimensions: L ids, in any order; U unique ids of one table in a batch.
"""

import math
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from persia_torchrec.jit.compiled import read_only
from persia_torchrec.lookup.bags import Bags, FeatureSpec
from persia_torchrec.lookup.sharded_lookup import Outputs, RoutedBatch
from persia_torchrec.metrics.values import Observations, Reading
from persia_torchrec.routing.hashing import Ids, farmhash64

_HELPS = {
    "batch_unique_indices_rate": "different ids of a batch, of all its ids",
    "lookup_preprocess_time_cost_sec": "making the ids of a batch unique",
    "lookup_rpc_time_cost_sec": "getting the rows of a batch from the servers",
    "lookup_postprocess_time_cost_sec": "making embeddings of the rows",
    "lookup_total_time_cost_sec": "the lookup of a batch",
    "update_gradient_time_cost_sec": "the update of a batch, until it is applied",
    "nan_count": "values of gradients that were not finite",
    "nan_grad_skipped": "gradients of an embedding with such a value: no row moved",
    "estimated_distinct_id": "about how many different ids came since the start",
}

_BITS = 14
_REGISTERS = 1 << _BITS
_LONGEST = 64 - _BITS
_MARK = np.uint64(1 << _LONGEST)
_POWERS = 2.0 ** np.arange(1, 64)  # of two, as many as the series below need


class LookupMeasures(Observations):
    """The numbers of one lookup. Any thread may call any method but ``read``."""

    def __init__(self, features: Sequence[FeatureSpec]) -> None:
        super().__init__(_HELPS)
        self._distinct = {feature.name: DistinctIds() for feature in features}
        DistinctIds().add(np.zeros(1, dtype=np.uint64))  # compiles it, if need be
        for feature in features:
            self.count("nan_count", 0, feature.name)
            self.count("nan_grad_skipped", 0, feature.name)

    def read(self) -> list[Reading]:
        """Return what was measured."""
        readings, name = super().read(), "estimated_distinct_id"
        for feature, ids in self._distinct.items():
            number = ids.estimate()
            readings.append(Reading(name, number, _HELPS[name], feature=feature))
        return readings

    def note_ids(self, bags: Mapping[str, Bags], batch: RoutedBatch) -> None:
        """Take down the ids of a batch, and which of them are different."""
        tables = [feature.table for feature in batch.features.specs]
        for f, feature in enumerate(batch.features.specs):
            ids = bags[feature.key].ids
            if len(ids) == 0:
                continue
            rounds = feature.hash_stack_rounds
            if tables.count(feature.table) > 1:
                ids_U = batch.groups[batch.plan.group_of[f]].ids
                is_used_U = np.zeros(len(ids_U), dtype=np.bool_)
                is_used_U[batch.inverse_of(f)] = True
                unique_U = ids_U[is_used_U]
            else:
                unique_U = batch.ids_of(f)
            # Where buckets stand for ids, the ids themselves are those of the batch.
            self._distinct[feature.name].add(ids if rounds else unique_U)
            rate = len(unique_U) / (len(ids) * max(rounds, 1))
            self.observe("batch_unique_indices_rate", rate, feature.name)

    def note_not_finite(self, batch: RoutedBatch, grads: Outputs) -> None:
        """Count values of gradients that are not finite, of each feature."""
        features = batch.features
        for output, grad in zip(features.outputs, grads, strict=True):
            start = 0
            for f in output:
                stop = start + batch.dim_of(f)
                is_bad = ~np.isfinite(grad[:, start:stop])
                start, name = stop, features.specs[f].name
                if num := int(np.count_nonzero(is_bad)):
                    num_embeddings = int(np.count_nonzero(is_bad.any(axis=1)))
                    self.count("nan_count", num, name)
                    self.count("nan_grad_skipped", num_embeddings, name)


class DistinctIds:
    """Estimates how many different ids it was given. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._registers = np.zeros(_REGISTERS, dtype=np.uint8)  # guarded by _lock

    def add(self, ids_L: Ids) -> None:
        """Take ids down: uint64 ``(L,)``, repeats allowed, may be empty."""
        hashes_L = farmhash64(read_only(ids_L))
        registers_L = (hashes_L >> np.uint64(_LONGEST)).astype(np.int64)
        rest_L = hashes_L | _MARK  # ends the run of a hash that has zeros only
        lowest_L = rest_L & (~rest_L + np.uint64(1))
        # A power of two is exact as a float, and its exponent the length of the run.
        runs_L = np.frexp(lowest_L.astype(np.float64))[1].astype(np.uint8)
        with self._lock:
            np.maximum.at(self._registers, registers_L, runs_L)

    def estimate(self) -> float:
        """Return about how many different ids there were."""
        with self._lock:
            num_with = np.bincount(self._registers, minlength=_LONGEST + 2)
        fractions = num_with / _REGISTERS
        empty, rest = fractions[0], 1 - fractions[_LONGEST + 1]
        if empty == 1:
            return 0.0
        # Ertl's tau of the registers that are not full, and sigma of the empty ones.
        total = (1 - rest - np.sum((1 - rest ** (1 / _POWERS)) ** 2 / _POWERS)) / 3
        for fraction in fractions[_LONGEST:0:-1]:
            total = (total + fraction) / 2
        total += empty + np.sum(empty**_POWERS * _POWERS / 2)
        return float(_REGISTERS / (2 * math.log(2) * total))
