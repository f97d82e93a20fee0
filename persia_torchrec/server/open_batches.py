"""Training batches between their lookup and their update, and how stale they are.

A batch is *open* from its lookup until its update is applied. The number of open
batches of one stream (one trainer's embedding collection) is what its staleness bound
limits; the server counts it, so that the bound can be checked. While a batch is open,
the server also keeps the slots of its rows, which its update needs again, and how many
updates each of its watched ids has had:

    lookup of a batch    remember the number of updates of each watched id so far
    update of a batch    the updates since then are the staleness of this gradient for
                         this row: count it in the histogram, and the row's update

A row that no other batch updated in between is not stale, however many batches were
open. The updates of all trainers count.

Watching every id would cost a good part of a lookup. One id in 16 is watched, chosen by
a hash of its table and itself, so the histogram is that of a sixteenth of the rows. The
same hash chooses one of 2**20 counters. Two watched ids may share a counter, and then
each counts for the other: of the rows whose batch waited while ``u`` watched ids were
updated, one in ``2**20 / u`` counts an update too many.

Dimension key:
    N: ids of one request, or those of them that are watched
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from persia_torchrec.wire.messages import TableIds

Slots = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.uint32]
Batch = tuple[int, int]
"""Stream of a batch, and its number in the stream."""

T = TypeVar("T")

MAX_SLOTS = 2**25
"""Slots kept by default: 128 MiB."""

MAX_STALENESS = 64
"""The last number of the histogram counts this staleness and all above."""

MAX_WATCHED = 2**22
"""Watched ids remembered by default: 48 MiB."""

_MAX_OPEN = 4096
_NUM_COUNTERS = 2**20
_WATCHED_SHIFT = np.uint64(60)  # the bits above are 0 in one hash of 16
_OFFSET_SHIFT = np.uint64(40)
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio
_ARRAY_COST = 64  # what an array costs besides its elements, in elements


class _PerBatch(Generic[T]):
    """Items by batch, of a bounded size; the batch begun first is dropped first."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._items: OrderedDict[Batch, list[tuple[T, int]]] = OrderedDict()
        self.size = 0

    def add(self, batch: Batch, item: T, size: int) -> None:
        cost = size + _ARRAY_COST
        self._items.setdefault(batch, []).append((item, cost))
        self.size += cost
        while self.size > self._max_size:
            self.pop_all(next(iter(self._items)))

    def pop(self, batch: Batch, is_wanted: Callable[[T], bool]) -> T | None:
        items = self._items.get(batch, [])
        for i, (item, cost) in enumerate(items):
            if is_wanted(item):
                del items[i]
                self.size -= cost
                return item
        return None

    def pop_all(self, batch: Batch) -> list[T]:
        items = self._items.pop(batch, [])
        self.size -= sum(cost for _, cost in items)
        return [item for item, _ in items]

    def clear(self) -> None:
        """Forget all items."""
        self._items.clear()
        self.size = 0


class SlotCache(_PerBatch[tuple[int, Slots]]):
    """Slots of the rows of open batches, from a lookup to its update.

    The store verifies them, so a wrong or a missing hint costs time only. Owned by one
    thread.

    Args:
        max_slots: slots kept of all batches together, 64 more being counted for each
            array. Beyond that, the batch begun first loses all of its own.
    """

    def __init__(self, max_slots: int = MAX_SLOTS) -> None:
        super().__init__(max_slots)

    def keep(self, batch: Batch, table: int, slots_N: Slots) -> None:
        """Keep what a lookup found; the array is not copied."""
        self.add(batch, (table, slots_N), len(slots_N))

    def take(self, batch: Batch, table: int, num_ids: int) -> Slots | None:
        """Hand out, once, what the first lookup of ``num_ids`` ids of a table found.

        Returns:
            uint32 ``(num_ids,)``, or None if nothing fits (any more).
        """
        found = self.pop(
            batch, lambda kept: (kept[0], len(kept[1])) == (table, num_ids)
        )
        return None if found is None else found[1]


class RowStaleness:
    """Histogram of updates between the pull of a row and its gradient.

    Owned by one thread.

    Args:
        max_watched: ids remembered of all open batches together, 64 more being counted
            for each request. Beyond that, the batch pulled first is forgotten, and is
            missing in the histogram.

    Attributes:
        histogram: int64 ``(MAX_STALENESS + 1,)``: gradients of watched rows by their
            staleness.
    """

    def __init__(self, max_watched: int = MAX_WATCHED) -> None:
        self._num_updates: Counts = np.zeros(_NUM_COUNTERS, dtype=np.uint32)
        self._pulled: _PerBatch[tuple[Offsets, Counts]] = _PerBatch(max_watched)
        self.histogram = np.zeros(MAX_STALENESS + 1, dtype=np.int64)

    def pulled(self, batch: Batch, tables: Sequence[TableIds]) -> None:
        """A lookup of a training batch has been answered; it may be one of several."""
        offsets_N = find_watched(tables)
        seen_N = self._num_updates[offsets_N]
        self._pulled.add(batch, (offsets_N, seen_N), len(offsets_N))

    def applied(self, batches: Sequence[Batch]) -> None:
        """The updates of batches are applied as one: each row gets one update more.

        Args:
            batches: several are those of a joint step.
        """
        lookups = [
            lookup for batch in batches for lookup in self._pulled.pop_all(batch)
        ]
        for offsets_N, seen_N in lookups:
            staleness_N = self._num_updates[offsets_N] - seen_N
            self.histogram += np.bincount(
                np.minimum(staleness_N, MAX_STALENESS), minlength=MAX_STALENESS + 1
            )
        if lookups:
            offsets = np.concatenate([offsets_N for offsets_N, _ in lookups])
            self._num_updates[offsets] += np.uint32(1)  # once, however often named

    def drop(self, batch: Batch) -> None:
        """Forget a batch: it gets no update."""
        self._pulled.pop_all(batch)

    def counters(self) -> dict[str, int]:
        """Return the histogram, as ``staleness_0`` and so on to the largest seen."""
        seen = np.flatnonzero(self.histogram)
        num = int(seen[-1]) + 1 if len(seen) else 1
        return {f"staleness_{k}": int(self.histogram[k]) for k in range(num)}


class OpenBatches:
    """Training batches whose update is not yet applied. Owned by the serving thread.

    Attributes:
        slots: of the rows of open batches.
        staleness: of the rows of updates.
    """

    def __init__(self) -> None:
        self._open: dict[int, set[int]] = {}
        self._num_open = self._max_open = 0
        self.slots = SlotCache()
        self.staleness = RowStaleness()

    def begin(
        self, batch: Batch, tables: Sequence[TableIds], slots: Iterable[Slots]
    ) -> None:
        """A training lookup of a batch has been answered; it may be one of several.

        Args:
            batch: the batch.
            tables: the ids of the lookup.
            slots: where their rows are, per table.
        """
        stream, number = batch
        numbers = self._open.setdefault(stream, set())
        numbers.add(number)
        if len(numbers) > _MAX_OPEN:
            # A trainer that died leaves its stream open; a live one is bounded.
            for forgotten in numbers:
                self._forget((stream, forgotten))
            numbers.clear()
        self.staleness.pulled(batch, tables)
        for t, slots_N in zip(tables, slots, strict=True):
            self.slots.keep(batch, t.table, slots_N)
        self._num_open = max(map(len, self._open.values()))
        self._max_open = max(self._max_open, self._num_open)

    def end(self, batch: Batch) -> None:
        """The update of a batch has been applied, or its trainer gave it up."""
        stream, number = batch
        self._forget(batch)
        numbers = self._open.get(stream, set())
        numbers.discard(number)
        if not numbers:
            self._open.pop(stream, None)
        self._num_open = max(map(len, self._open.values()), default=0)

    def counters(self) -> dict[str, int]:
        """Return the histogram, the slots kept, and the open batches of a stream."""
        return {
            **self.staleness.counters(),
            "hinted_slots": self.slots.size,
            "open_batches": self._num_open,
            "open_batches_max": self._max_open,
        }

    def _forget(self, batch: Batch) -> None:
        self.slots.pop_all(batch)
        self.staleness.drop(batch)


def find_watched(tables: Sequence[TableIds]) -> Offsets:
    """Return the offsets of the counters of the watched ids; uint64 ``(N,)``.

    An id has one counter, always the same, in whichever request it comes.
    """
    if not tables:
        return np.empty(0, dtype=np.uint64)
    salted = [t.ids ^ np.uint64((t.table + 1) * _GOLDEN % 2**64) for t in tables]
    hashes = salted[0] if len(salted) == 1 else np.concatenate(salted)
    hashes *= np.uint64(_GOLDEN)  # an array: it wraps around
    watched_N: Offsets = hashes[hashes >> _WATCHED_SHIFT == 0]
    return watched_N >> _OFFSET_SHIFT
