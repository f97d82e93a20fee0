"""The lookup of PERSIA's slots: some are pooled, some are raw.

    pooled slots -> one array (B, T), each slot in its own columns
    a raw slot   -> one array (N, D), a vector for each of its different ids, and where
                    these stand in the samples (``RawIds``)

A batch may have any of the slots; all that is done with them has its order. Where
buckets of a hash stack stand for an id, its vector is the sum of theirs; with root
scaling, divided by the root of their number. A feature group is one table. Ids get its
prefix, from which PERSIA draws the initial weights; so the table's seed is 0.

Dimensions: B samples, L ids of a slot, N different ids and F places per sample of a raw
slot, U unique ids of one table, D embedding dim, T sum of the dims of the pooled slots.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec import timeouts
from persia_torchrec.arrays import Ids, Lengths, Positions
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.client.codec import PushOutcome
from persia_torchrec.embedding.embedding_config import EmbeddingSchema
from persia_torchrec.embedding.optim import Optimizer
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.errors import BatchError, PersiaError, RequestTimeoutError
from persia_torchrec.jit.compiled import compiled, read_only
from persia_torchrec.lookup import sharded_lookup
from persia_torchrec.lookup.bags import Bags, FeatureSpec, JaggedIds, check_bags
from persia_torchrec.lookup.rows_state import RowsState
from persia_torchrec.lookup.sharded_lookup import Outputs, RoutedBatch
from persia_torchrec.metrics.values import Means, Observations, Reading
from persia_torchrec.routing.route import farmhash64, unique_ids
from persia_torchrec.table import TableSettings, TableSpec, require_known_tables

logger = logging.getLogger(__name__)

_RETRY_S = 0.1
_MAX_SELECTED = 64  # orders of slots whose features are kept
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One slot, as a model is given it."""

    name: str
    dim: int
    num_places: int  # of a sample's ids, each with a vector; 0: they are pooled to one


@dataclass(frozen=True, slots=True)
class LookupHello(RowsState):
    """The answer of a lookup that is ready: all slots, and the rows of each server.

    With ``is_fixed`` they serve one checkpoint, and follow nothing.
    """

    slots: tuple[Slot, ...] = ()
    is_fixed: bool = False


def wait_until_ready(
    ask: Callable[[float], LookupHello], timeout_s: float
) -> LookupHello:
    """Ask a lookup whether it is ready until it is; it raises why it is not.

    ``ask`` is given how many seconds it has.
    """
    deadline, why = time.monotonic() + timeout_s, "no answer yet"
    with timeouts.saying(logger, lambda: f"waiting for the embeddings: {why}"):
        while True:
            try:
                left_s = max(deadline - time.monotonic(), _RETRY_S)
                return ask(min(left_s, timeouts.REQUEST_S))
            except PersiaError as exc:
                why = str(exc)
                if time.monotonic() >= deadline:
                    raise RequestTimeoutError(
                        f"not ready within {timeout_s:g} s. {exc}", server="embeddings"
                    ) from exc
            time.sleep(_RETRY_S)


def require_slots(received: Sequence[str], expected: Sequence[str]) -> None:
    """Check that the ID features of a batch are slots, any of them and no others."""
    unknown = set(received).difference(expected)
    if unknown or not received:
        raise BatchError(
            "The ID features of a batch must be slots of the embedding config, at "
            f"least one of {sorted(expected)}. Received: {sorted(received)}, unknown "
            f"{sorted(unknown)}."
        )


def build_features(schema: EmbeddingSchema) -> tuple[FeatureSpec, ...]:
    """Return one feature per slot, in the file's order."""
    return tuple(
        FeatureSpec(
            name=slot.name,
            key=slot.name,
            table=slot.group,
            pooling="sqrt" if slot.sqrt_scaling else "sum",
            prefix=slot.index_prefix,
            prefix_bits=schema.feature_index_prefix_bit,
            hash_stack_rounds=slot.hash_stack.hash_stack_rounds,
            hash_stack_size=slot.hash_stack.embedding_size,
            num_places=0 if slot.embedding_summation else slot.sample_fixed_size,
        )
        for slot in schema.slots.values()
    )


def build_tables(
    schema: EmbeddingSchema,
    config: EmbeddingConfig,
    optimizer: Optimizer,
    settings: Mapping[str, TableSettings] | None = None,
) -> tuple[TableSpec, ...]:
    """Return one table per feature group; ``settings`` by group win over the others."""
    settings = settings or {}
    require_known_tables(settings, schema.groups)
    return tuple(
        settings.get(group, TableSettings()).apply_to(
            TableSpec(
                name=group,
                dim=schema.slots[slots[0]].dim,
                optimizer=optimizer,
                initializer=config.initializer,
                admission=config.admission,
                weight_bound=config.weight_bound,
            )
        )
        for group, slots in schema.groups.items()
    )


class RawIds(NamedTuple):
    """The ids of a raw slot, as PERSIA lays out what it does not pool.

    The first ``sample_fixed_size`` ids of a sample take its places. Each different id
    of the batch is looked up once, and a place names its row, from 1, or is empty, 0:

        samples [7, 8], [], [8, 9, 9]    ids     7  8  9
        of 2 places each                 places  1  2 | 0  0 | 2  3
    """

    ids: Ids  # uint64 (N,), in the order of their first appearance
    places: Positions  # int32 (B, F)


def build_raw_ids(bags: Bags, num_places: int) -> RawIds:
    """Give the ids of each sample their places."""
    kept, at = _first_ids(read_only(bags.ids), read_only(bags.lengths), num_places)
    unique = unique_ids(kept)
    places_BF = np.zeros((len(bags.lengths), num_places), dtype=np.int32)
    places_BF.reshape(-1)[at] = unique.inverse + 1
    return RawIds(unique.ids, places_BF)


@compiled
def _first_ids(
    ids_L: Ids, lengths_B: Lengths, num_places: int
) -> tuple[Ids, npt.NDArray[np.int64]]:
    """Return the first ids of each sample, and the places that they take."""
    kept = np.empty(len(ids_L), dtype=np.uint64)
    at = np.empty(len(ids_L), dtype=np.int64)
    num_kept = start = 0
    for b in range(len(lengths_B)):
        for column in range(min(lengths_B[b], num_places)):
            kept[num_kept] = ids_L[start + column]
            at[num_kept] = b * num_places + column
            num_kept += 1
        start += lengths_B[b]
    return kept[:num_kept], at[:num_kept]


class LookupMeasures(Observations):
    """What an embedding worker measures of a lookup: PERSIA's metrics of that role.

    PERSIA's values of the last batch are here means of the batches since the previous
    reading. Any thread may call any method but ``read``, which one calls at a time.
    """

    def __init__(self, features: Sequence[FeatureSpec]) -> None:
        super().__init__(_HELPS)
        self._distinct = {feature.name: DistinctIds() for feature in features}
        DistinctIds().add(np.zeros(1, dtype=np.uint64))  # compiles it, if need be
        for feature in features:
            self.count("nan_count", 0, feature.name)
            self.count("nan_grad_skipped", 0, feature.name)

    def read(self, means: Means) -> list[Reading]:
        """Return what was measured."""
        readings, name = super().read(means), "estimated_distinct_id"
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
    """Estimates how many different ids it was given. Any thread may call any method.

    HyperLogLog: the first bits of an id's hash choose a register, which keeps the
    longest run of zeros, plus one, at the end of the others::

        hash   rrrrrrrrrrrrrr bbbb...bbbb1000    register r keeps max(4, ...)
               14 bits        50 bits

    P. Flajolet et al., "HyperLogLog", 2007; the estimate is that of O. Ertl, "New
    cardinality estimation algorithms for HyperLogLog sketches", 2017 (algorithm 6),
    with a standard error of 0.8 % for few ids and many.
    """

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


class SlotsLookup(sharded_lookup.ShardedLookup):
    """Pools the pooled slots of a batch, and gives a vector for each id of the others.

    Its outputs are float32 ``(B, T)``, also where T is 0, and ``(N, D)`` per raw slot
    of the batch, in its order.
    """

    def __init__(
        self,
        source: sharded_lookup.RowSource,
        features: Sequence[FeatureSpec],
        measures: LookupMeasures | None = None,
    ) -> None:
        self.measures = measures
        timed = nullcontext if measures is None else measures.timed
        self._selected: dict[tuple[str, ...], sharded_lookup.BatchFeatures] = {}
        super().__init__(source, features, timed=timed)

    def pull(
        self, bags: Mapping[str, Bags], number: BatchNumber | None
    ) -> tuple[Outputs, RoutedBatch]:
        """Fetch the rows of a batch, and take down its ids."""
        outputs, batch = super().pull(bags, number)
        if self.measures is not None:
            self.measures.note_ids(bags, batch)
        return outputs, batch

    def update(self, batch: RoutedBatch, grads: Outputs) -> PushOutcome:
        """Push the gradients of a training batch, and wait until they are applied."""
        with self._timed("update_gradient_time_cost_sec"):
            replies = self.push(batch, grads)
            outcome = PushOutcome.read(replies)
        if self.measures is not None and outcome.num_refused:  # else all were finite
            self.measures.note_not_finite(batch, grads)
        return outcome

    def group(self, specs: Sequence[FeatureSpec]) -> list[list[int]]:
        """Return an output for all pooled slots, and one for each raw slot."""
        pooled = [f for f, spec in enumerate(specs) if not spec.num_places]
        return [pooled, *([f] for f, spec in enumerate(specs) if spec.num_places)]

    def select(
        self, bags: Mapping[str, Bags]
    ) -> tuple[sharded_lookup.BatchFeatures, JaggedIds, Sequence[Positions]]:
        """Return the slots of a batch, a bag for each id of the raw ones."""
        features = self._features_of(tuple(bags))
        if all(not spec.num_places for spec in features.specs):
            jagged = bags if isinstance(bags, JaggedIds) else None
            if jagged is None:
                check_bags(bags)
                jagged = JaggedIds.of(bags)
            return features, jagged, ()
        num_samples = check_bags(bags)
        selected, places = dict[str, Bags](), []
        for spec in features.specs:
            of_slot = bags[spec.key]
            if spec.num_places:
                raw = build_raw_ids(of_slot, spec.num_places)
                places.append(raw.places)
                of_slot = Bags(raw.ids, np.ones(len(raw.ids), dtype=np.int32))
            selected[spec.key] = of_slot
        jagged = JaggedIds.of(selected)
        jagged.num_samples = num_samples  # also where all slots are raw
        return features, jagged, places

    def _features_of(self, keys: tuple[str, ...]) -> sharded_lookup.BatchFeatures:
        """Return the features of a batch; those of the same slots are made once."""
        features = self._selected.get(keys)
        if features is None:
            spec_of = {feature.key: feature for feature in self.features}
            require_slots(keys, [*spec_of])
            specs = [spec_of[key] for key in keys]
            if len(self._selected) >= _MAX_SELECTED:
                self._selected.clear()
            features = sharded_lookup.BatchFeatures(specs, self.group(specs))
            self._selected[keys] = features
        return features

    def hello(self, timeout_s: float | None = None) -> LookupHello:
        """Tell all slots, how many rows the servers hold, and how far they follow."""
        slots = tuple(
            Slot(name=feature.name, dim=dim, num_places=feature.num_places)
            for feature, dim in zip(self.features, self.dims(), strict=True)
        )
        hello = LookupHello.of(self.source.counters(timeout_s))
        is_fixed = bool(self.source.serves)
        return replace(hello, slots=slots, is_fixed=is_fixed)
