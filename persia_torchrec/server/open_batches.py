"""Batches from their lookup to their update, with the slots of their rows.

An update with the slots of its lookup needs no search. A bounded number of slots is
kept; an update without its slots looks its ids up again.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from persia_torchrec.arrays import Slots
from persia_torchrec.rpc.messages import TableSegments

Batch = tuple[int, int]
"""Stream of a batch (one trainer's embedding collection), and its number there."""
TableSlots = tuple[int, Slots]
"""A table, and where a lookup found its rows, in the order of the request; with blocks
``(N, blocks)``."""

_NO_IDS = np.empty(0, dtype=np.uint64)
MAX_SLOTS = 2**25  # slots kept by default: 128 MiB
_MAX_OPEN = 4096
_ARRAY_COST = 64  # what an array costs besides its slots, in slots


class LookedUp(NamedTuple):
    """The slots of a training lookup: of all ids in one array, or one a table."""

    asked: TableSegments
    slots: list[Slots]
    cost: int

    def by_table(self) -> list[TableSlots]:
        """Return the slots of each table."""
        tables, slots = self.asked.tables, self.slots
        if len(slots) != len(tables):
            slots = np.split(slots[0], self.asked.starts[1:-1])
        return list(zip(tables, slots, strict=True))


class OpenBatches:
    """Training batches whose update is not yet applied. Owned by the serving thread.

    Beyond ``max_slots`` slots (64 more count for each lookup and table), the batch
    begun first loses its own: its update searches its rows again.
    """

    def __init__(self, max_slots: int = MAX_SLOTS) -> None:
        self._max_slots = max_slots
        self._open: dict[int, set[int]] = {}
        self._max_open = 0
        self._lookups: OrderedDict[Batch, list[LookedUp]] = OrderedDict()
        self.num_slots = 0

    def begin(self, batch: Batch, asked: TableSegments, slots: list[Slots]) -> None:
        """Keep the slots of a training lookup, maybe one of several of its batch."""
        stream, number = batch
        numbers = self._open.setdefault(stream, set())
        numbers.add(number)
        if len(self._open) > _MAX_OPEN:  # of clients that have died
            self.drop(next(iter(self._open)).__eq__)
        self._max_open = max(self._max_open, len(numbers))
        if len(numbers) > _MAX_OPEN:
            # A trainer that died leaves its stream open; a live one is bounded.
            for forgotten in numbers:
                self._pop((stream, forgotten))
            numbers.clear()
        cost = sum(slots_N.size for slots_N in slots)
        cost += _ARRAY_COST * (1 + len(asked.tables))
        kept = asked._replace(ids=_NO_IDS)  # which hold their message
        self._lookups.setdefault(batch, []).append(LookedUp(kept, slots, cost))
        self.num_slots += cost
        while self.num_slots > self._max_slots:
            self._pop(next(iter(self._lookups)))

    def apply(self, batches: Sequence[Batch]) -> list[list[LookedUp]]:
        """Return the lookups of each batch that is updated; keep them no longer."""
        return [self._pop(batch) for batch in batches]

    def end(self, batch: Batch) -> None:
        """The update of a batch has been applied, or its trainer gave it up."""
        stream, number = batch
        self._pop(batch)  # if its update was not applied
        numbers = self._open.get(stream, set())
        numbers.discard(number)
        if not numbers:
            self._open.pop(stream, None)

    def reopen(self, batches: Iterable[Batch]) -> None:
        """Open batches that were open before the server was started again."""
        for stream, number in batches:
            self._open.setdefault(stream, set()).add(number)

    def drop(self, is_over: Callable[[int], bool]) -> None:
        """Give up the batches of streams."""
        for stream in list(filter(is_over, self._open)):
            for number in list(self._open[stream]):
                self.end((stream, number))

    def clear_slots(self) -> None:
        """Forget all slots: the rows were dropped."""
        self._lookups.clear()
        self.num_slots = 0

    def counters(self) -> dict[str, int]:
        """Return the slots kept, and the open batches of a stream."""
        return {
            "hinted_slots": self.num_slots,
            "open_batches": max(map(len, self._open.values()), default=0),
            "open_batches_max": self._max_open,
        }

    def _pop(self, batch: Batch) -> list[LookedUp]:
        lookups = self._lookups.pop(batch, [])
        self.num_slots -= sum(lookup.cost for lookup in lookups)
        return lookups
