"""The models of the training benchmark, one beside the other, in turn."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle, islice
from statistics import median

import numpy as np
from torchrec.datasets.utils import Batch

from persia_torchrec.bench.machine import cpu_seconds
from persia_torchrec.bench.report import Cell
from persia_torchrec.bench.training_batches import ids_by_table
from persia_torchrec.bench.training_models import (
    Trainer,
    plain_trainer,
    remote_trainer,
)
from persia_torchrec.bench.training_servers import TrainingServer, fill, training_server
from persia_torchrec.bench.training_settings import TrainingSettings
from persia_torchrec.errors import StoreError

_RELATIVE_TOLERANCE = 1e-5
_NUM_WARM_STEPS = 2
_LOST = ("gradients_missed", "gradients_refused", "evictions")
"""Counters of a server."""


@dataclass(slots=True)
class Arm:
    """A model, and what was measured of it.

    Attributes:
        trainer: of the model.
        server: where its tables are; None: in this process.
        staleness: the bound, if there is a server.
        seconds: of each turn.
        trainer_s: processor time of this process in each turn.
        server_s: of the server's, where the system tells it.
    """

    trainer: Trainer
    server: TrainingServer | None = None
    staleness: int | None = None
    seconds: list[float] = field(default_factory=list)
    trainer_s: list[float] = field(default_factory=list)
    server_s: list[float] = field(default_factory=list)

    def take_turn(self, batches: Iterator[Batch], num_steps: int) -> None:
        """Time some steps, after two that are not timed."""
        self.trainer.train(list(islice(batches, _NUM_WARM_STEPS)))
        timed = list(islice(batches, num_steps))
        server_s, trainer_s = self._server_s(), time.process_time()
        self.seconds.append(self.trainer.seconds(timed))
        self.trainer_s.append(time.process_time() - trainer_s)
        server_stop_s = self._server_s()
        if server_s is not None and server_stop_s is not None:
            self.server_s.append(server_stop_s - server_s)

    def _server_s(self) -> float | None:
        return cpu_seconds(self.server.pid) if self.server else None


def measure_dim(
    settings: TrainingSettings, dim: int, batches: Sequence[Batch]
) -> list[dict[str, Cell]]:
    """Train all models of one dim in turn; plain TorchRec's is the first row.

    Raises:
        StoreError: a model on the servers computes something else than plain TorchRec,
            or a gradient did not reach its row.
        ServerError: a server does not start, fails, or does not answer.
    """
    with ExitStack() as stack:
        plain = Arm(plain_trainer(dim, settings.table_rows))
        arms = [plain, *_remote_arms(settings, dim, batches, plain, stack)]
        _check_losses(arms, batches[: settings.checked_steps])
        turns = cycle(batches)
        for _ in range(settings.repeats):
            first = [next(turns) for _ in range(settings.steps + _NUM_WARM_STEPS)]
            for arm in arms:
                arm.take_turn(iter(first), settings.steps)
        for arm in arms:
            if arm.server is not None:
                require_all_applied(arm.server.client.counters()[0])
        return [_row(settings, dim, arm, plain) for arm in arms]


def _remote_arms(
    settings: TrainingSettings,
    dim: int,
    batches: Sequence[Batch],
    plain: Arm,
    stack: ExitStack,
) -> list[Arm]:
    ids = ids_by_table(batches)
    num_ids = sum(map(len, ids))
    all_rows = settings.rows if dim == settings.dims[0] else settings.rows[:1]
    arms = []
    for rows in all_rows:
        server = stack.enter_context(training_server(max(rows, num_ids)))
        is_first = rows == settings.rows[0]
        for staleness in settings.staleness if is_first else settings.staleness[-1:]:
            trainer, sharder = remote_trainer(
                server.client, dim, settings.table_rows, staleness
            )
            stack.callback(sharder.close)
            arms.append(Arm(trainer, server, staleness))
        fill(server, plain.trainer, ids, settings.table_rows)
    return arms


def _check_losses(arms: Sequence[Arm], batches: Sequence[Batch]) -> None:
    """Compare the first losses with plain TorchRec's; no model has trained yet."""
    expected = arms[0].trainer.train(batches)
    for arm in arms:
        if arm.staleness == 0:
            require_same_losses(arm.trainer.train(batches), expected)


def require_same_losses(losses: Sequence[float], expected: Sequence[float]) -> None:
    """Compare the losses at staleness 0 with plain TorchRec's.

    Raises:
        StoreError: they differ by more than rounding does.
    """
    if not np.allclose(losses, expected, rtol=_RELATIVE_TOLERANCE, atol=0):
        raise StoreError(
            "With staleness 0 the losses must be plain TorchRec's, "
            f"{list(expected)}. Received: {list(losses)}."
        )


def require_all_applied(counters: Mapping[str, int]) -> None:
    """Refuse a server that has not applied every gradient to its row.

    Raises:
        StoreError: a gradient was missed or refused, or a row evicted.
    """
    lost = {name: counters.get(name, 0) for name in _LOST}
    if any(lost.values()):
        raise StoreError(f"Every gradient must reach its row. Received: {lost}.")


def _row(settings: TrainingSettings, dim: int, arm: Arm, plain: Arm) -> dict[str, Cell]:
    num_samples = settings.steps * settings.batch_size
    rates = [num_samples / seconds for seconds in arm.seconds]
    plain_rate = num_samples / median(plain.seconds)
    name = "plain TorchRec"
    if arm.staleness is not None:
        name = f"on the server, staleness {arm.staleness}"
    return {
        "dim": dim,
        "model": name,
        "rows": arm.server.num_rows if arm.server else None,
        "median": median(rates),
        "slowest": min(rates),
        "fastest": max(rates),
        "relative": median(rates) / plain_rate,
        "step_ms": _ms_a_step(settings, arm.seconds),
        "trainer_ms": _ms_a_step(settings, arm.trainer_s),
        "server_ms": _ms_a_step(settings, arm.server_s),
    }


def _ms_a_step(settings: TrainingSettings, seconds: Sequence[float]) -> float | None:
    return median(seconds) / settings.steps * 1e3 if seconds else None
