"""What a trainer tells a metrics gateway: PERSIA's metrics of its NN workers.

What PERSIA has as the value of the last batch is here the mean of the batches since the
last push. Without a gateway the numbers are made and not read.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial

from persia_torchrec import env
from persia_torchrec.client.client import BatchNumber, Reply
from persia_torchrec.config import MetricsSettings, load_global_config
from persia_torchrec.embedding.data import ReferencedBatch
from persia_torchrec.errors import PersiaError
from persia_torchrec.lookup.bags import Bags
from persia_torchrec.lookup.sharded_lookup import Outputs
from persia_torchrec.metrics import Observations, Reading
from persia_torchrec.pipeline.pipeline import PrefetchedBatch
from persia_torchrec.pipeline.worker_client import RemoteBatch, RemoteWorkers
from persia_torchrec.wire.gateway import Pushes, push_metrics

_FORWARD = "forward_client_time_cost_sec"
_FORWARD_ERROR = "forward_error"
_BACKWARD = "backward_client_time_cost_sec"
_WAIT = "get_train_batch_time_cost_more_than_1ms_sec"

_HELPS = {
    _FORWARD: "a lookup by an embedding worker",
    _FORWARD_ERROR: "lookups that failed",
    _BACKWARD: "an update by an embedding worker, until it is applied",
    _WAIT: "waiting for a training batch and its rows, where it took more than 1 ms",
}

_SHORT_S = 1e-3

Totals = Callable[[], Mapping[str, int]]
"""Returns further counters, by name; the pushing thread calls it."""


class Measures:
    """What is measured in one trainer; ``observed`` has the numbers, for all threads.

    The main thread calls :meth:`note_wait` and :meth:`wait_for`.
    """

    def __init__(self) -> None:
        self.observed = Observations(_HELPS)
        self.observed.count(_FORWARD_ERROR, 0)
        self._waited_s = 0.0

    def note_wait(self, seconds: float) -> None:
        """Note the latency of the batch that is trained on next."""
        self._waited_s = seconds

    def wait_for(self, wait: Callable[[], PrefetchedBatch[RemoteBatch]]) -> None:
        """Wait until the rows of a batch are here, too.

        Raises:
            PersiaError: what went wrong with them.
        """
        began_s = time.perf_counter()
        is_training = wait().is_training
        passed_s = self._waited_s + time.perf_counter() - began_s
        self._waited_s = 0.0
        if is_training and passed_s > _SHORT_S:
            self.observed.observe(_WAIT, passed_s)

    def push(self, settings: MetricsSettings, totals: Totals) -> Pushes | None:
        """Begin to push all that is measured, and counters of the trainer's own.

        Returns:
            Pushes until it is closed; None where none are wanted.
        """

        def read() -> list[Reading]:
            own = (
                Reading(f"persia_{name}", total, "of this trainer's pushes", "counter")
                for name, total in totals().items()
            )
            return [*self.observed.read(), *own]

        return push_metrics("nn_worker", env.get_rank(), settings, read)


class MeasuredWorkers(RemoteWorkers):
    """Connections to all embedding workers, with timers around pulls and pushes.

    Attributes:
        observed: where the numbers go.
    """

    observed: Observations

    def pull(
        self,
        source: ReferencedBatch | Mapping[str, Bags],
        number: BatchNumber | None,
    ) -> tuple[Outputs, RemoteBatch]:
        """Have a batch pulled and pooled; see :meth:`RemoteWorkers.pull`."""
        try:
            with self.observed.timed(_FORWARD):
                return super().pull(source, number)
        except PersiaError:
            self.observed.count(_FORWARD_ERROR)
            raise

    def push(self, handle: RemoteBatch, grads: Outputs) -> list[Reply]:
        """Send the gradients of a batch; see :meth:`RemoteWorkers.push`."""
        began_s = time.perf_counter()
        replies = super().push(handle, grads)
        for reply in replies:
            reply.add_done_callback(partial(self._note_reply, began_s))
        return replies

    def _note_reply(self, began_s: float, reply: Reply) -> None:
        if reply.exception() is None:
            self.observed.observe(_BACKWARD, time.perf_counter() - began_s)


def metrics_settings() -> MetricsSettings:
    """Return ``metrics_config`` of the file that the environment names, or defaults.

    A trainer needs nothing else of that file: without a gateway it is not read.
    """
    gateway, path = env.metrics_gateway(), env.global_config_path()
    if path is None or gateway is None:
        return MetricsSettings()
    return load_global_config(path, warns=False).common.metrics
