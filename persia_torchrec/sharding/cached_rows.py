"""A batch whose rows are in slots: pooled there by fbgemm, and trained there.

    pulling thread   unique ids -> slots, whose rows are there then  (row_cache.py)
    compute          bags of slots -> fbgemm                         (cache_slots.py)
    backward pass    gradient of the bags -> fbgemm, which steps the rows

Tables that are not cached take the way of ``on_device.py``, in the same batch.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch

from persia_torchrec.client.client import Reply
from persia_torchrec.errors import BatchError
from persia_torchrec.lookup.sharded_lookup import RoutedBatch
from persia_torchrec.sharding.on_device import (
    DeviceBatch,
    Pooled,
    RowsOnDevice,
    Tensors,
)
from persia_torchrec.sharding.row_cache import Held, Pin, RowCache
from persia_torchrec.table import TableSpec


class Steps:
    """The steps of rows in slots that a backward pass takes, together."""

    def __init__(
        self, steps: Sequence[tuple[Held, torch.Tensor, torch.Tensor]]
    ) -> None:
        self._steps = steps

    def are_finite(self) -> bool:
        """Return whether all gradients are."""
        return all(bool(grad.isfinite().all()) for _, _, grad in self._steps)

    def take(self) -> int:
        """Step all rows; return how many bags have a gradient that is not finite.

        These count as 0.
        """
        num_refused = 0
        for (pool, slots_U), bags, grad in self._steps:
            grad_ND = grad.reshape(bags.shape)
            are_finite_N = grad_ND.isfinite().all(dim=1)
            num = int((~are_finite_N).sum())
            if num:
                num_refused += num
                grad_ND = torch.where(are_finite_N[:, None], grad_ND, 0.0)
            _, rate, make = bags.of_slots  # type: ignore[attr-defined]
            if rate != pool.rate:  # fbgemm steps with that of the forward pass
                bags = make()
            pool.step(bags, grad_ND, slots_U)
        return num_refused


class CachedBatch(DeviceBatch):
    """A training batch some of whose groups have their rows in slots."""

    def __init__(self, here: DeviceBatch, pin: Pin) -> None:
        for each in fields(here):
            setattr(self, each.name, getattr(here, each.name))
        self._held = dict(zip(here.elsewhere, pin.held, strict=True))
        self._pin: Pin | None = pin  # until graphs have it

    def follow(self, specs: Mapping[str, TableSpec]) -> None:
        """Take the learning rates of tables, before a forward pass."""
        for held in self._held.values():
            held.pool.follow(specs)

    def pool(self, weights: torch.Tensor | None) -> Pooled:
        """Pool all bags; those of slots stay in graphs of their own, which pin them."""
        pin, self._pin = self._pin, None
        if pin is None:
            raise BatchError(
                "The rows of a batch are in their slots for one forward pass. Received:"
                " another one of the same batch. Give the model the batch again."
            )
        pooled = super().pool(weights)
        outputs, graphs = list(pooled.outputs), []
        for group, held in self._held.items():
            slots_L, offsets = self._slots_of_ids(group), self.indices[group].offsets
            if self.each_id:
                offsets = torch.arange(len(slots_L) + 1, device="cpu")
            make = partial(
                held.pool.pool_bags,
                slots_L.long(),
                offsets.long(),
                pooled.weights[group],
            )
            bags, rate = make(), held.pool.rate
            # It ends when autograd frees the bags.
            bags.of_slots = pin, rate, make  # type: ignore[attr-defined]
            graphs.append(bags)
            columns = self.batch.plan.group_of.count(group) * (not self.each_id) or 1
            outputs[group] = bags.detach().view(-1, columns * held.pool.dim)
        return pooled._replace(outputs=tuple(outputs), graphs=tuple(graphs))

    def rows_of(self, group: int, pooled: Pooled) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a matrix with a group's rows, and which of it each id is, int32."""
        if group in self._held:
            return self._held[group].pool.weights, self._slots_of_ids(group)
        return super().rows_of(group, pooled)

    def _slots_of_ids(self, group: int) -> torch.Tensor:
        slots_U = torch.from_numpy(self._held[group].slots)
        return slots_U.index_select(0, self.indices[group].rows)

    def take_steps(
        self,
        graphs: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        specs: Mapping[str, TableSpec],
    ) -> tuple[list[torch.Tensor], Steps]:
        """Return the gradients of rows to push, and the steps of those in slots.

        ``graphs`` are of these; ``specs`` have the rates.
        """
        left = [g for group, g in enumerate(grads) if group not in self._held]
        steps = []
        for (group, held), bags in zip(self._held.items(), graphs, strict=True):
            if held.pool.follow(specs):  # frozen: servers learn that rows were used
                held.pool.map.mark_dirty(held.slots)
            else:
                steps.append((held, bags, grads[group]))
        return left, Steps(steps)


class ReadBatch(DeviceBatch):
    """A batch for evaluation; of some rows newer weights were in slots."""

    def __init__(
        self,
        here: DeviceBatch,
        newer: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        for each in fields(here):
            setattr(self, each.name, getattr(here, each.name))
        self._newer = newer

    def wide_rows(self) -> Tensors:
        """Return the rows as float32, once they are there."""
        rows = list(super().wide_rows())
        for group, (positions_N, weights_ND) in self._newer.items():
            rows[group] = rows[group].index_copy(0, positions_N, weights_ND)
        return tuple(rows)


class CachedRows(RowsOnDevice):
    """Has the rows of some tables in slots; gives a ``CachedBatch`` for training."""

    def __init__(self, cache: RowCache, *args: Any, **settings: Any) -> None:
        super().__init__(cache.client, *args, **settings)
        self.cache = cache
        self.pools: dict[str, int] = {}  # by table
        self._all.pools = self.pools

    def use_slots(self, specs: Sequence[TableSpec]) -> None:
        """Have tables in slots; before the first batch."""
        for spec in specs:
            num = sum(feature.table == spec.name for feature in self.features)
            self.pools[spec.name] = self.cache.add(spec, self, num)

    def fetch(self, batch: RoutedBatch, elsewhere: Collection[int] = ()) -> Any:
        """Have the rows of a training batch in slots, or read those of another."""
        groups, counts = batch.groups, batch.occurrences
        cached = [g for g, group in enumerate(groups) if group.tables[0] in self.pools]
        if batch.number is not None:
            asked, counts = [groups[g] for g in cached], [counts[g] for g in cached]
            pin = self.cache.hold(asked, counts, batch.number)
            return CachedBatch(super().fetch(batch, cached), pin)
        with self.cache.sending:
            newer = {g: self.cache.find(groups[g]) for g in cached}
            return ReadBatch(super().fetch(batch), newer)

    def push(self, batch: RoutedBatch, grads: Any) -> list[Reply]:
        """Send the gradients of the groups without slots, which are given."""
        if not self.cache.settings.flush_s:
            self.cache.flush()
        rest = [g for g in batch.groups if g.tables[0] not in self.pools]
        return super().push(replace(batch, groups=rest), grads) if rest else []

    def abandon(self, batch: RoutedBatch) -> list[Reply]:
        """Tell the servers that a batch with rows there gets no gradients."""
        is_there = any(group.tables[0] not in self.pools for group in batch.groups)
        return super().abandon(batch) if is_there else []
