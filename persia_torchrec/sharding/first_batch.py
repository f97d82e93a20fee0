"""The first training batch on a GPU is pooled twice: by the GPU's way, and plainly.

    pool, gradients   both ways; their difference, as a number on the device
    backward pass     at its end one wait for these numbers, and the trainers agree
    then              the GPU's way alone; if it differs on any trainer, the plain one

The plain way is slow: it goes feature by feature, by ids and lengths of the batch, adds
up in float64, and uses neither an index of ``lookup/transposed.py`` nor an
``embedding_bag``. The model is given what the GPU's way gives, or where it differs what
the plain one does, which the device chooses: so the first step is right too.

Dimensions: B samples, L ids of one feature, U unique rows, D their dim.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from persia_torchrec.datasets.transfer import to_device
from persia_torchrec.lookup.sharded_lookup import RoutedBatch
from persia_torchrec.rpc.messages import Precision
from persia_torchrec.sharding.on_device import DeviceBatch, Pooled, Tensors

logger = logging.getLogger(__name__)

_POWERS = {"sum": 0.0, "mean": -1.0, "sqrt": -0.5}
"""By pooling: a bag's sum is multiplied by this power of the number of its ids."""


class FirstBatch:
    """How the batches of a sharder are pooled on a device, and how that is found out.

    Owned by the thread that trains, or that runs its backward pass.

    Attributes:
        is_open: whether training batches are pooled both ways, until all trainers have
            agreed at the end of the first backward pass.
        is_plain: whether they have found a difference.
    """

    def __init__(self) -> None:
        self.is_open = self.is_plain = False
        self._tolerance = 0.0  # until it begins
        self._found: list[torch.Tensor] = []

    def begin(self, precision: Precision) -> None:
        """Pool both ways from now on, if it is the first time."""
        if not self._tolerance:
            self.is_open = True
            self._tolerance = 1e-5 if precision is Precision.FP32 else 1e-2

    def way_of(self, pulled: DeviceBatch, *, is_training: bool) -> "Way":
        """Return what pools a batch."""
        if self.is_plain:
            return PlainBatch(pulled)
        if self.is_open and is_training:
            return ComparedBatch(pulled, PlainBatch(pulled), self)
        return pulled

    def chosen(
        self, found: torch.Tensor, plain: torch.Tensor, summed: torch.Tensor
    ) -> torch.Tensor:
        """Return what the GPU's way has found, or if it differs what the plain one has.

        Nothing waits. ``summed`` are the values that both have added up.
        """
        if not plain.numel():
            return plain
        difference = _difference(found, plain, summed)
        if self.is_open:
            self._found.append(difference)
        return torch.where(difference > self._tolerance, plain, found)

    def difference(self) -> float:
        """Return the largest difference so far; the one wait for the device."""
        if not self._found:
            return 0.0
        found, self._found = torch.stack(self._found), []
        return found.amax().item()

    def settle(self, difference: float) -> None:
        """Choose the way of all further batches, by the difference of all trainers."""
        if not self.is_open:
            return
        self.is_open = False
        self.is_plain = difference > self._tolerance
        if self.is_plain:
            logger.warning(
                "the device pools the first batch wrongly: it differs from plain sums "
                "by %.3g of the largest value (allowed: %g); tables are pooled feature "
                "by feature from now on, which is slow",
                difference,
                self._tolerance,
            )


def _difference(
    found: torch.Tensor, plain: torch.Tensor, summed: torch.Tensor
) -> torch.Tensor:
    """Return the largest difference, as a fraction of the largest value; a scalar.

    What is finite in neither agrees, as gradients under a loss scale that is too large;
    in one alone, it is infinite. The largest value is one of the sums or of what they
    add up, since that may cancel out.
    """
    is_finite, is_due = torch.isfinite(found), torch.isfinite(plain)
    gaps = (found - plain).abs_()
    gaps = torch.where(is_finite & is_due, gaps, torch.inf)
    gaps = torch.where(is_finite | is_due, gaps, 0.0)
    largest = torch.maximum(_largest(plain), _largest(summed))
    return gaps.amax() / largest.clamp_min(torch.finfo(torch.float32).tiny)


def _largest(values: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value that is finite; a scalar."""
    if not values.numel():
        return values.new_zeros(())
    return torch.where(torch.isfinite(values), values, 0.0).abs_().amax()


class PlainFeature(NamedTuple):
    """The ids of one feature, on a device, in their order."""

    group: int
    rows: torch.Tensor  # int64 (L,): the row of each id
    bags: torch.Tensor  # int64 (L,): its bag
    scales: torch.Tensor  # float64 (L,): by the pooling of the bag
    sources: torch.Tensor  # int64 (L,): its position in the batch's ids, for weights
    num_bags: int

    @classmethod
    def of(
        cls, batch: RoutedBatch, feature: int, device: torch.device, *, each_id: bool
    ) -> "PlainFeature":
        """Return those of a feature of a batch; with ``each_id`` a bag for each."""
        spec, plan = batch.features.specs[feature], batch.plan
        key = int(plan.columns.keys[feature])
        rows_L = batch.inverse_of(feature)
        of_key = batch.lengths[batch.bag_starts[key] : batch.bag_starts[key + 1]]
        lengths = of_key.astype(np.int64) * max(spec.hash_stack_rounds, 1)
        if each_id:
            lengths = np.ones(len(rows_L), dtype=np.int64)
        bags_L = np.repeat(np.arange(len(lengths)), lengths)
        scales_L = lengths[bags_L].astype(np.float64) ** _POWERS[spec.pooling]
        sources_L = int(batch.id_starts[key]) + np.arange(len(rows_L))
        if batch.sources is not None:
            sources_L = batch.sources[sources_L]
        arrays = rows_L.astype(np.int64), bags_L, scales_L, sources_L
        rows, bags, scales, sources = [
            to_device(torch.from_numpy(array), device) for array in arrays
        ]
        group, num_bags = plan.group_of[feature], len(lengths)
        return cls(group, rows, bags, scales, sources, num_bags)

    def factors(self, weights: torch.Tensor | None) -> torch.Tensor:
        """Return by what the row of each id is multiplied, float64 ``(L, 1)``."""
        if weights is None:
            return self.scales.unsqueeze(1)
        return (self.scales * weights.index_select(0, self.sources)).unsqueeze(1)


class PlainBatch:
    """A batch that is pooled feature by feature, as slowly as it is simple."""

    def __init__(self, pulled: DeviceBatch) -> None:
        self._pulled = pulled
        device, each_id = pulled.rows[0].device, pulled.each_id
        self._features = [
            PlainFeature.of(pulled.batch, f, device, each_id=each_id)
            for f in range(len(pulled.batch.features.specs))
        ]

    def pool(self, weights: torch.Tensor | None) -> Pooled:
        """Pool all bags; ``weights`` are of all ids of the batch, on the device."""
        rows = self._pulled.wide_rows()
        outputs: list[list[torch.Tensor]] = [[] for _ in rows]
        factors = [feature.factors(weights) for feature in self._features]
        for feature, factors_L1 in zip(self._features, factors, strict=True):
            rows_UD = rows[feature.group]
            rows_LD = rows_UD.index_select(0, feature.rows) * factors_L1
            sums_BD = rows_LD.new_zeros(feature.num_bags, rows_UD.shape[1])
            sums_BD = sums_BD.index_add(0, feature.bags, rows_LD)
            outputs[feature.group].append(sums_BD.to(torch.float32))
        across = 0 if self._pulled.each_id else 1
        joined = [torch.cat(of_group, dim=across) for of_group in outputs]
        return Pooled(tuple(joined), rows, tuple(factors))

    def gradients(self, pooled: Pooled, grads: Sequence[torch.Tensor]) -> Tensors:
        """Return the gradient of each group's rows; those of the outputs are given."""
        sums = [torch.zeros_like(rows, dtype=torch.float64) for rows in pooled.rows]
        each = self._by_feature(pooled, grads), pooled.weights
        for feature, grad_BD, factors_L1 in zip(self._features, *each, strict=True):
            assert factors_L1 is not None
            grads_LD = grad_BD.index_select(0, feature.bags) * factors_L1
            sums[feature.group].index_add_(0, feature.rows, grads_LD)
        return tuple([sums_UD.to(torch.float32) for sums_UD in sums])

    def weights_gradient(
        self, pooled: Pooled, grads: Sequence[torch.Tensor], weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of the weights of all ids."""
        sums = torch.zeros_like(weights, dtype=torch.float64)
        each = self._by_feature(pooled, grads)
        for feature, grad_BD in zip(self._features, each, strict=True):
            rows_LD = pooled.rows[feature.group].index_select(0, feature.rows)
            grads_LD = grad_BD.index_select(0, feature.bags)
            of_ids = (rows_LD.to(torch.float64) * grads_LD).sum(1) * feature.scales
            sums.index_add_(0, feature.sources, of_ids)
        return sums.to(weights.dtype)

    def _by_feature(
        self, pooled: Pooled, grads: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the gradient of each feature's bags, ``(B, D)`` or ``(L, D)``."""
        starts, found = [0] * len(grads), []
        for feature in self._features:
            g = feature.group
            across = 0 if self._pulled.each_id else 1
            num = feature.num_bags if self._pulled.each_id else pooled.rows[g].shape[1]
            found.append(grads[g].narrow(across, starts[g], num))
            starts[g] += num
        return found


@dataclass
class ComparedBatch:
    """A batch that is pooled both ways."""

    pulled: DeviceBatch
    plain: PlainBatch
    first: FirstBatch
    _pooled: Pooled = field(default_factory=lambda: Pooled((), (), ()))  # plainly

    def pool(self, weights: torch.Tensor | None) -> Pooled:
        """Pool all bags; ``weights`` are of all ids of the batch, on the device."""
        pooled, plain = self.pulled.pool(weights), self.plain.pool(weights)
        self._pooled = plain._replace(outputs=())
        outputs = self._chosen(pooled.outputs, plain.outputs, pooled.rows)
        return pooled._replace(outputs=outputs)

    def gradients(self, pooled: Pooled, grads: Sequence[torch.Tensor]) -> Tensors:
        """Return the gradient of each group's rows; those of the outputs are given."""
        found = self.pulled.gradients(pooled, grads)
        return self._chosen(found, self.plain.gradients(self._pooled, grads), grads)

    def weights_gradient(
        self, pooled: Pooled, grads: Sequence[torch.Tensor], weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of the weights of all ids."""
        found = self.pulled.weights_gradient(pooled, grads, weights)
        plain = self.plain.weights_gradient(self._pooled, grads, weights)
        pairs = zip(pooled.rows, grads, strict=True)
        largest = [_largest(rows) * _largest(grad) for rows, grad in pairs]
        return self.first.chosen(found, plain, torch.stack(largest))

    def _chosen(
        self,
        found: Sequence[torch.Tensor],
        plain: Sequence[torch.Tensor],
        summed: Sequence[torch.Tensor],
    ) -> Tensors:
        each = zip(found, plain, summed, strict=True)
        return tuple([self.first.chosen(*of_group) for of_group in each])


Way = DeviceBatch | PlainBatch | ComparedBatch
