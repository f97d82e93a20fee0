"""What a server tells a metrics gateway.

Every counter of ``METRICS.md`` under its own name with ``persia_`` before it, and
PERSIA's metrics, which follow from these. What PERSIA has as the value of the last
request is here the mean of the requests since the last push.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from persia_torchrec.metrics import Means, Reading
from persia_torchrec.server.server import EmbeddingServer
from persia_torchrec.server.snapshots import Counters
from persia_torchrec.wire.gateway import push_metrics

GAUGES = frozenset(
    (
        *("rows", "capacity_rows", "bytes", "hinted_slots"),
        *("updates_queued", "joint_steps", "joint_bytes", "open_batches"),
        *("increments", "increments_waiting", "increment_delay_ms", "following_lost"),
    )
)
"""Counters of a server that go up and down; so do those that end in ``_max``."""

_ASK_TIMEOUT_S = 2.0

_PAGE = "see persia_torchrec/server/METRICS.md"


@dataclass(frozen=True, slots=True)
class _Mean:
    """A metric of PERSIA as a quotient of what was counted since the last push."""

    name: str
    help: str
    totals: Sequence[str]
    nums: Sequence[str]
    scale: float = 1e-6
    """A unit of ``totals``, in the metric's; seconds a microsecond by default."""


_MEANS = (
    _Mean(
        "index_miss_ratio",
        "ids looked up without a row, of all looked up",
        ("misses",),
        ("hits", "misses"),
        scale=1.0,
    ),
    _Mean(
        "lookup_hashmap_time_cost_sec",
        "the store's part of a lookup for training, or of a reading of rows",
        ("lookup_us",),
        ("requests_train", "requests_read", "requests_metadata", "requests_export"),
    ),
    _Mean(
        "lookup_inference_batch_time_cost_sec",
        "the store's part of a lookup that is not for training",
        ("inference_us",),
        ("requests_lookup_inference",),
    ),
    _Mean(
        "set_embedding_time_cost_sec",
        "the store's part of a writing of rows",
        ("write_us",),
        ("requests_write",),
    ),
    _Mean(
        "decode_indices_time_cost_sec",
        "reading a lookup, an update or a writing",
        ("decode_us",),
        ("requests_lookup", "requests_update", "requests_write"),
    ),
    _Mean(
        "encode_embedding_time_cost_sec",
        "making the reply of a lookup",
        ("encode_us",),
        ("requests_lookup",),
    ),
)

_COUNTS = (
    ("index_miss_count", "misses", "ids looked up without a row"),
    (
        "gradient_id_miss_count",
        "gradients_missed",
        "ids updated without a row: evicted since the lookup, or not admitted",
    ),
)


def serve_and_push(server: EmbeddingServer, when_ready: Callable[[str], None]) -> None:
    """Serve until the server is stopped, and push its metrics meanwhile.

    Args:
        server: with its settings.
        when_ready: see ``EmbeddingServer.serve``.

    Raises:
        CheckpointError: the checkpoint of the settings cannot be loaded.
        ConfigError: the environment does not name the gateway as it must.
    """
    readings = ServerReadings(server.snapshots.ask)
    shard, settings = server.config.shard, server.config.metrics
    pushes = push_metrics("embedding_parameter_server", shard, settings, readings.read)
    try:
        server.serve(when_ready)
    finally:
        if pushes is not None:
            pushes.close()


class ServerReadings:
    """The metrics of a server. Owned by the thread that pushes them.

    Args:
        ask: returns the counters of now within so many seconds, see ``Snapshots.ask``.
    """

    def __init__(self, ask: Callable[[float], Counters | None]) -> None:
        self._ask = ask
        self._means = Means()

    def read(self) -> list[Reading]:
        """Return all metrics; none while the server has not begun to serve."""
        counters = self._ask(_ASK_TIMEOUT_S)
        if counters is None:
            return []
        return [
            *self._read_means(counters),
            *(
                Reading(name, counters.get(counter, 0), help_, "untyped")
                for name, counter, help_ in _COUNTS
            ),
            *_delay(counters),
            *(_own(name, value) for name, value in counters.items()),
        ]

    def _read_means(self, counters: Counters) -> list[Reading]:
        inference = counters.get("requests_lookup_inference", 0)
        training = counters.get("requests_lookup", 0) - inference
        counters = {**counters, "requests_train": training}
        readings = []
        for mean in _MEANS:
            total = sum(counters.get(name, 0) for name in mean.totals)
            num = sum(counters.get(name, 0) for name in mean.nums)
            value = self._means.since_last(mean.name, total * mean.scale, num)
            if value is not None:
                readings.append(Reading(mean.name, value, mean.help))
        return readings


def _delay(counters: Counters) -> Iterator[Reading]:
    if "increment_delay_ms" in counters:
        help_ = "from the writing of an increment until a follower has put it in"
        delay_s = counters["increment_delay_ms"] / 1000
        yield Reading("inc_update_delay_sec", delay_s, help_)


def _own(name: str, value: int) -> Reading:
    is_gauge = name in GAUGES or name.endswith("_max")
    return Reading(f"persia_{name}", value, _PAGE, "gauge" if is_gauge else "counter")
