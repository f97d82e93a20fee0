"""How stale lookups are, seen from the server.

A training batch is *open* from its lookup until its update is applied. The number of
open batches of one stream (one trainer's embedding collection) is what its staleness
bound limits; the server counts it for itself, so that the bound can be checked against
what really happened. While a batch is open, the server also keeps where its rows lie,
and how many updates they have had.
"""

from collections.abc import Iterable, Sequence

from persia_torchrec.metrics import Metrics
from persia_torchrec.server.hints import Hints, Slots
from persia_torchrec.server.row_staleness import RowStaleness
from persia_torchrec.wire.messages import TableIds

_MAX_OPEN = 4096


class OpenBatches:
    """Training batches looked up whose update is not yet applied, by stream.

    Args:
        metrics: gets the gauge ``open_batches``, the largest number of any stream; its
            maximum is the ``open_batches_max`` of the counters.

    Attributes:
        hints: where the rows of open batches lie.
        rows: how stale the rows of updates were.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._open: dict[int, set[int]] = {}
        self.hints = Hints()
        self.rows = RowStaleness()

    def begin(
        self,
        stream: int,
        batch: int,
        found: Iterable[tuple[int, Slots]] = (),
        tables: Sequence[TableIds] = (),
    ) -> None:
        """A training lookup of a batch has been answered; it may be one of several.

        Args:
            stream: of the batch.
            batch: its number in the stream.
            found: number of a table, and where the rows of the lookup lie in it.
            tables: the ids of the lookup.
        """
        batches = self._open.setdefault(stream, set())
        batches.add(batch)
        if len(batches) > _MAX_OPEN:
            # A trainer that died leaves its stream open; a live one is bounded.
            for forgotten in batches:
                self._forget(stream, forgotten)
            batches.clear()
        self.rows.pulled(stream, batch, tables)
        for table, slots_N in found:
            self.hints.keep(stream, batch, table, slots_N)
        self._publish()

    def end(self, stream: int, batch: int) -> None:
        """The update of a batch has been applied, or its trainer gave it up."""
        self._forget(stream, batch)
        batches = self._open.get(stream)
        if batches is not None:
            batches.discard(batch)
            if not batches:
                del self._open[stream]
        self._publish()

    def counters(self) -> dict[str, int]:
        """Return how stale rows were, and how many hints are kept."""
        return {**self.rows.counters(), "hinted_slots": self.hints.num_slots}

    def _forget(self, stream: int, batch: int) -> None:
        self.hints.drop(stream, batch)
        self.rows.drop(stream, batch)

    def _publish(self) -> None:
        largest = max((len(batches) for batches in self._open.values()), default=0)
        self._metrics.set_gauge("open_batches", largest)
