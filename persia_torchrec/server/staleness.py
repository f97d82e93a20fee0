"""How stale lookups are, seen from the server.

A training batch is *open* from its lookup until its update is applied. The number of
open batches of one stream (one trainer's embedding collection) is what its staleness
bound limits; the server counts it for itself, so that the bound can be checked against
what really happened.
"""

from persia_torchrec.metrics import Metrics

_MAX_OPEN = 4096


class OpenBatches:
    """Training batches looked up whose update is not yet applied, by stream.

    Args:
        metrics: gets the gauge ``open_batches``, the largest number of any stream; its
            maximum is the ``open_batches_max`` of the counters.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._open: dict[int, set[int]] = {}

    def begin(self, stream: int, batch: int) -> None:
        """A training lookup of a batch has been answered."""
        batches = self._open.setdefault(stream, set())
        batches.add(batch)
        if len(batches) > _MAX_OPEN:
            # A trainer that died leaves its stream open; a live one is bounded.
            batches.clear()
        self._publish()

    def end(self, stream: int, batch: int) -> None:
        """The update of a batch has been applied, or its trainer gave it up."""
        batches = self._open.get(stream)
        if batches is not None:
            batches.discard(batch)
            if not batches:
                del self._open[stream]
        self._publish()

    def _publish(self) -> None:
        largest = max((len(batches) for batches in self._open.values()), default=0)
        self._metrics.set_gauge("open_batches", largest)
