"""How stale rows really were: updates between the pull of a row and its gradient.

    lookup of a batch    remember how many updates each watched id has had so far
    update of a batch    what came since then is the staleness of this gradient for this
                         row; it is counted, and the row has had one update more

A row that nobody updated in between was not stale, however many batches went by. The
updates of all trainers count, since each moves the row.

To watch every id would cost a good part of what a lookup costs. One id in 16 is
watched, chosen by a hash of its table and itself, so that the histogram is that of a
sixteenth of the rows. How many updates an id has had is kept in a place that the same
hash chooses among 2**20. Two watched ids may share a place, and then each is taken for
the other: of the rows whose batch waited while ``u`` watched ids were updated, one in
``2**20 / u`` counts an update too many.

Dimension key:
    N: watched ids of one request
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from persia_torchrec.wire.messages import TableIds

Places = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.uint32]

MAX_STALENESS = 64
"""The last number of the histogram counts this staleness and all above."""

MAX_WATCHED = 2**22
"""Watched ids remembered by default: 48 MiB."""

_NUM_PLACES = 2**20
_WATCHED_BITS = 60  # the four above them are 0 in one hash of 16
_PLACE_BITS = 40
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio
_ENTRY = 64  # what a request costs beside its ids, in ids


class RowStaleness:
    """The histogram of one server. Owned by one thread.

    Args:
        max_watched: ids remembered of all open batches together, 64 more being counted
            for each request; beyond that, the batch that was pulled first is forgotten,
            and does not come into the histogram.

    Attributes:
        histogram: int64 ``(MAX_STALENESS + 1,)``: gradients of watched rows by their
            staleness.
    """

    def __init__(self, max_watched: int = MAX_WATCHED) -> None:
        self._max_watched = max_watched
        self._num_updates: Counts = np.zeros(_NUM_PLACES, dtype=np.uint32)
        self._pulled: OrderedDict[tuple[int, int], list[tuple[Places, Counts]]] = (
            OrderedDict()
        )
        self._num_watched = 0
        self.histogram: npt.NDArray[np.int64] = np.zeros(
            MAX_STALENESS + 1, dtype=np.int64
        )

    def pulled(self, stream: int, batch: int, tables: Sequence[TableIds]) -> None:
        """A lookup of a training batch has been answered; it may be one of several."""
        places_N = places_of_watched(tables)
        seen_N = self._num_updates[places_N]
        self._pulled.setdefault((stream, batch), []).append((places_N, seen_N))
        self._num_watched += _cost(places_N)
        while self._num_watched > self._max_watched:
            (of_stream, of_batch) = next(iter(self._pulled))
            self.drop(of_stream, of_batch)

    def applied(self, batches: Sequence[tuple[int, int]]) -> None:
        """The updates of batches are applied as one: each row gets one update more.

        Args:
            batches: stream and number of each; several are those of a joint step.
        """
        lookups = [lookup for batch in batches for lookup in self._take(*batch)]
        for places_N, seen_N in lookups:
            staleness_N = self._num_updates[places_N] - seen_N
            self.histogram += np.bincount(
                np.minimum(staleness_N, MAX_STALENESS), minlength=MAX_STALENESS + 1
            )
        if lookups:
            places = np.concatenate([places_N for places_N, _ in lookups])
            self._num_updates[places] += np.uint32(1)  # once, however often named

    def drop(self, stream: int, batch: int) -> None:
        """Forget a batch: it gets no update."""
        self._take(stream, batch)

    def counters(self) -> dict[str, int]:
        """Return the histogram, as ``staleness_0`` and so on to the largest seen."""
        seen = np.flatnonzero(self.histogram)
        num = int(seen[-1]) + 1 if len(seen) else 1
        return {f"staleness_{k}": int(self.histogram[k]) for k in range(num)}

    def _take(self, stream: int, batch: int) -> list[tuple[Places, Counts]]:
        lookups = self._pulled.pop((stream, batch), [])
        self._num_watched -= sum(_cost(places_N) for places_N, _ in lookups)
        return lookups


def places_of_watched(tables: Sequence[TableIds]) -> Places:
    """Return where the updates of the watched ids are counted; uint64 ``(N,)``.

    An id counts in one place, always the same, in whichever request it comes.
    """
    if not tables:
        return np.empty(0, dtype=np.uint64)
    salted = [t.ids ^ np.uint64((t.table + 1) * _GOLDEN % 2**64) for t in tables]
    hashes = salted[0] if len(salted) == 1 else np.concatenate(salted)
    hashes *= np.uint64(_GOLDEN)  # an array: it wraps around
    watched_N = hashes[hashes >> np.uint64(_WATCHED_BITS) == 0]
    places_N: Places = watched_N >> np.uint64(_PLACE_BITS)
    return places_N


def _cost(places_N: Places) -> int:
    return len(places_N) + _ENTRY
