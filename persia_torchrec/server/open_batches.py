"""Batches that were looked up and not updated yet: their slots, and their staleness.

A lookup in training keeps the slots of its rows for the update, which then needs no
search. What is kept is bounded; an update without its slots looks its ids up again.

Dimension key:
    N: ids of one table in one request, or those of them that are watched
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec.rpc.messages import TableIds

Slots = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.uint32]
Batch = tuple[int, int]
"""Stream of a batch (one trainer's embedding collection), and its number there."""
TableSlots = tuple[int, Slots]
"""A table, and where a lookup found its rows, in the order of the request; with blocks
``(N, blocks)``."""

MAX_SLOTS = 2**25  # slots kept by default: 128 MiB
MAX_STALENESS = 64
"""The last number of the histogram counts this staleness and all above."""

_MAX_OPEN = 4096
_NUM_COUNTERS = 2**20
_WATCHED_SHIFT = np.uint64(60)  # the bits above are 0 in one hash of 16
_OFFSET_SHIFT = np.uint64(40)
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio
_ARRAY_COST = 64  # what an array costs besides its slots, in slots


class _Lookup(NamedTuple):
    slots: list[TableSlots]
    watched: Offsets
    seen: Counts  # their updates at the lookup
    cost: int


class OpenBatches:
    """Training batches whose update is not yet applied. Owned by the serving thread.

    Beyond ``max_slots`` slots (64 more count for each lookup and table), the batch
    begun first loses its own: its update searches its rows again, and is missing in
    ``histogram``, the gradients of watched rows by their staleness.

    Watching every id would cost a good part of a lookup. One id in 16 is watched,
    chosen by a hash of its table and itself, which also chooses one of 2**20 counters.
    Of the rows whose batch waited while ``u`` watched ids were updated, one in
    ``2**20 / u`` shares its counter with one of them, and counts an update too many.
    """

    def __init__(self, max_slots: int = MAX_SLOTS) -> None:
        self._max_slots = max_slots
        self._open: dict[int, set[int]] = {}
        self._max_open = 0
        self._lookups: OrderedDict[Batch, list[_Lookup]] = OrderedDict()
        self._num_updates: Counts = np.zeros(_NUM_COUNTERS, dtype=np.uint32)
        self.num_slots = 0
        self.histogram = np.zeros(MAX_STALENESS + 1, dtype=np.int64)

    def begin(
        self, batch: Batch, tables: Sequence[TableIds], slots: Iterable[Slots]
    ) -> None:
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
        watched_N = find_watched(tables)
        kept, cost = [], _ARRAY_COST
        for t, slots_N in zip(tables, slots, strict=True):
            kept.append((t.table, slots_N))
            cost += slots_N.size + _ARRAY_COST
        lookup = _Lookup(kept, watched_N, self._num_updates[watched_N], cost)
        self._lookups.setdefault(batch, []).append(lookup)
        self.num_slots += cost
        while self.num_slots > self._max_slots:
            self._pop(next(iter(self._lookups)))

    def apply(self, batches: Sequence[Batch]) -> list[list[TableSlots]]:
        """Count one update for each row of batches; return the slots kept of each."""
        slots: list[list[TableSlots]] = []
        watched = []
        for batch in batches:
            slots.append([])
            for lookup in self._pop(batch):
                slots[-1] += lookup.slots
                watched.append(lookup.watched)
                staleness_N = self._num_updates[lookup.watched] - lookup.seen
                self.histogram += np.bincount(
                    np.minimum(staleness_N, MAX_STALENESS), minlength=MAX_STALENESS + 1
                )
        if watched:  # one update per row, however often it is named
            self._num_updates[np.concatenate(watched)] += np.uint32(1)
        return slots

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
        """Return the histogram, the slots kept, and the open batches of a stream."""
        seen = np.flatnonzero(self.histogram)
        num = int(seen[-1]) + 1 if len(seen) else 1
        return {
            **{f"staleness_{k}": int(self.histogram[k]) for k in range(num)},
            "hinted_slots": self.num_slots,
            "open_batches": max(map(len, self._open.values()), default=0),
            "open_batches_max": self._max_open,
        }

    def _pop(self, batch: Batch) -> list[_Lookup]:
        lookups = self._lookups.pop(batch, [])
        self.num_slots -= sum(lookup.cost for lookup in lookups)
        return lookups


def find_watched(tables: Sequence[TableIds]) -> Offsets:
    """Return the offsets of the counters of the watched ids; uint64 ``(N,)``."""
    if not tables:
        return np.empty(0, dtype=np.uint64)
    salted = [t.ids ^ np.uint64((t.table + 1) * _GOLDEN % 2**64) for t in tables]
    hashes = salted[0] if len(salted) == 1 else np.concatenate(salted)
    hashes *= np.uint64(_GOLDEN)  # an array: it wraps around
    watched_N: Offsets = hashes[hashes >> _WATCHED_SHIFT == 0]
    return watched_N >> _OFFSET_SHIFT
