"""The schedule of checkpoints: by the clock of rank 0 and by steps.

Between two checkpoints there may be joint deltas, of what has changed of the dense
model and of rows:

every trainer   flush: its updates are acknowledged by the servers
rank 0          makes a folder in that of the latest checkpoint; each server ends an
                increment, and says where in its log
every trainer   writes its shards of the dense half
rank 0          writes the positions last: the delta is complete
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from persia_torchrec import timeouts
from persia_torchrec.checkpoint import catalog
from persia_torchrec.checkpoint.catalog import LoadRules
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.client.checkpoint_client import SavedCheckpoint
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.errors import ConfigError
from persia_torchrec.job import trainer_group
from persia_torchrec.job.member import JobMember
from persia_torchrec.sharding.backward_pass import UnevenInputsHook
from persia_torchrec.sharding.table_control import Sharders
from persia_torchrec.training.checkpoint import (
    at_first,
    describe_dense,
    discarding,
    flush_all,
    is_first,
    save_dense_beside,
)


@JobMember.pausing()
def save_delta(
    path: str | os.PathLike[str],
    state: dict[str, Any],
    client: EmbeddingClient,
    sharders: Sharders,
    *,
    step: int | None = None,
    timeout_s: float = timeouts.CHECKPOINT_S,
) -> SavedCheckpoint:
    """Write what has changed since the latest checkpoint, both halves; return it.

    Of the rows those that have changed since the servers' last increments are written,
    once each, and the dense half whole. Every trainer calls it, as
    :func:`save_checkpoint`; the delta belongs to the latest complete checkpoint, which
    :func:`load_checkpoint` loads with all increments before the delta. The servers' own
    increments, at their interval, hold rows again that change again: let the interval
    be longer than the time between two deltas.

    Args:
        path: that of :func:`save_checkpoint`.
        state: the dense half, as there.
        sharders: as there.
        client: of the servers, which must write increments (``increments_dir``).
        step: of the training.
        timeout_s: seconds that the servers may take.

    Raises:
        CheckpointError: there is no new delta, as a trainer or a server failed, or no
            checkpoint from which increments lead to now: save a whole one.
    """
    limit_s = timeouts.exchange_s(client.recovery_s, timeout_s)
    flush_all(sharders)
    own = client.checkpoints.job
    found = at_first(lambda: catalog.find_checkpoint(path, own=own).url, str)
    checkpoint = Folder(found)
    folder = Folder(at_first(lambda: catalog.begin_delta(checkpoint).url, str))

    def complete() -> SavedCheckpoint:
        assert servers is not None  # rank 0 does this
        ended = servers.wait()
        delta = catalog.Delta(
            ended[0].folder,
            tuple(of_server.position for of_server in ended),
            catalog.merge_tables([of_server.tables for of_server in ended]),
            describe_dense(begun, sharders),
            datetime.now(UTC).isoformat(),
            step,
            num_batches=num_batches,
            files=catalog.sum_files(folder),
        )
        folder.write_json(catalog.DELTA, delta)
        manifest = catalog.Manifest.read(checkpoint)
        saved = SavedCheckpoint.of(checkpoint, manifest)
        return dataclasses.replace(saved, path=folder.url, step=step)

    servers = None
    with discarding(folder, catalog.DELTA):
        if is_first():
            servers = client.checkpoints.start_delta(checkpoint, timeout_s=timeout_s)
        num = client.batches.trained
        num_batches, begun = save_dense_beside(servers, state, folder, num_batches=num)
        return at_first(complete, SavedCheckpoint, limit_s)


_LEAST_INTERVAL = 20  # times what the last checkpoint took: at most 5 % of the time
_MAX_STEPS = 256  # between two questions whether it is time
_MAX_S = 1.0  # between them, too, where steps are short: a job may be told to end
Resume = Literal["exact", "rows_ahead"]
OnOtherBatches = Literal["error", "continue"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryConfig:
    """Where a training is saved by itself, how often, and how it is resumed."""

    folder: str | os.PathLike[str]
    """Of the checkpoints of this run; trainers and servers share it."""
    interval_s: float = timeouts.CHECKPOINT_INTERVAL_S
    """Seconds between two checkpoints, or 20 times what the last one took if that is
    more; 0: there are none."""
    resume: Resume = "exact"
    """Whether the servers go back to the checkpoint, or keep ``rows_ahead`` of it."""
    save_steps: int = 0
    """Steps between two checkpoints, beside the interval; 0: time alone decides."""
    keep: int = 2
    """Newest checkpoints that stay."""
    delta_interval_s: float = 0.0
    """Seconds between two deltas, or 20 times what the last one took if that is more;
    0: there are none."""
    rules: LoadRules = field(default_factory=lambda: LoadRules(missing="error"))
    """What becomes of tables that have changed since."""
    on_other_batches: OnOtherBatches = "error"
    """What a resume does where a loader gives other batches than those trained."""

    def __post_init__(self) -> None:
        for name, least in (("save_steps", 0), ("keep", 1)):
            if getattr(self, name) < least:
                received = getattr(self, name)
                raise ConfigError(f"{name} must be >= {least}. Received: {received}.")
        for interval_s in (self.interval_s, self.delta_interval_s):
            if not interval_s >= 0:
                raise ConfigError(
                    f"The checkpoint interval must be >= 0 s. Received: {interval_s}."
                )
        if self.resume not in get_args(Resume):
            raise ConfigError(
                f"resume must be one of {get_args(Resume)}. Received: {self.resume!r}."
            )
        if self.on_other_batches not in get_args(OnOtherBatches):
            raise ConfigError(
                f"on_other_batches must be one of {get_args(OnOtherBatches)}. "
                f"Received: {self.on_other_batches!r}."
            )

    @property
    def saves(self) -> bool:
        """Whether checkpoints are saved during the training."""
        return bool(self.interval_s or self.save_steps or self.delta_interval_s)


class CheckpointClock(UnevenInputsHook):
    """Tells all trainers at the same step that it is time for a checkpoint.

    All call :meth:`is_time` after each step. A trainer at the end of its data, within
    :func:`join`, answers instead of it after each step of the others.

    Attributes:
        save_ended: takes part in a checkpoint of the others.
        catch_up: is called at the end of ``join``, with whether the trainer was one of
            the last that trained.
        num_trained: steps of the whole training, those of other trainers included.
        is_delta: at rank 0, whether it was time for a delta only.
        is_last: whether a trainer has been told to end: no other checkpoint follows.
    """

    def __init__(
        self,
        interval_s: float,
        now: Callable[[], float] = time.monotonic,
        *,
        save_steps: int = 0,
        delta_interval_s: float = 0.0,
        must_end: Callable[[], bool] = lambda: False,
        must_save: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._must_end, self._must_save = must_end, must_save
        self.save_ended: Callable[[], None] = lambda: None
        self.catch_up: Callable[[bool], None] = lambda _: None
        self._interval_s, self._save_steps = interval_s, save_steps
        self._delta_interval_s = delta_interval_s
        self._now = now
        self.num_trained = 0
        self.is_delta = self.is_last = False
        self._left = 1  # steps until rank 0 is asked
        self._num_answered = self._num_seen = 0  # steps of others
        self._due_s = self._delta_due_s = math.inf
        self.restart(0.0)

    def restart(self, took_s: float, *, was_delta: bool = False) -> None:
        """Count from now on; the last checkpoint, or delta, took some seconds."""
        self._num_steps, self._began_s = 0, self._now()
        least_s = self._began_s + _LEAST_INTERVAL * took_s
        if self._delta_interval_s:
            due_s = self._began_s + self._delta_interval_s
            self._delta_due_s = max(due_s, least_s)
        if self._interval_s and not was_delta:
            self._due_s = max(self._began_s + self._interval_s, least_s)

    def is_time(self) -> bool:
        """Return whether all trainers save a checkpoint now."""
        if work := Join.notify_join_context(self):
            work.wait()
        return self._count()

    def has_answered(self) -> bool:
        """Return whether others have made steps since the last call, at its end."""
        num, self._num_seen = self._num_answered - self._num_seen, self._num_answered
        return num > 0

    def main_hook(self) -> None:
        """Take part in a question of the others, and in a checkpoint if it is time."""
        self._num_answered += 1
        if self._count():
            self.save_ended()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take from a trainer that trained last what the others have not."""
        self.catch_up(is_last_joiner)

    def _count(self) -> bool:
        self._num_steps += 1
        self.num_trained += 1
        self._left -= 1
        is_told = not _has_others() and (self._must_end() or self._must_save())
        if self._left > 0 and not is_told:
            return False
        answer = torch.tensor([_MAX_STEPS, not self._must_end()], device="cpu")
        if is_first():
            answer[0] = self._steps_to_wait()
        if _has_others():
            group = self.cpu_group()
            with trainer_group.waiting(group, "whether to save"):
                dist.all_reduce(answer, dist.ReduceOp.MIN, group)
        steps, all_continue = answer.tolist()
        self.is_last = not all_continue
        self._left = max(steps, 1)
        return steps == 0 or self.is_last

    def _steps_to_wait(self) -> int:
        """Return 0 if it is time, or steps until it may be."""
        if self._must_save():
            self.is_delta = False
            return 0
        steps = self._steps_until(self._due_s)
        if self._save_steps:
            steps = min(steps, -self.num_trained % self._save_steps)
        self.is_delta = steps > 0
        return min(steps, self._steps_until(self._delta_due_s))

    def _steps_until(self, due_s: float) -> int:
        """Return 0 if it is time, or the steps of half of the rest, or of a second."""
        now_s = self._now()
        if now_s >= due_s:
            return 0
        step_s = (now_s - self._began_s) / self._num_steps
        # One that is alone looks at each step whether it is told to end.
        most_s = 2 * _MAX_S if _has_others() else math.inf
        steps = min(due_s - now_s, most_s) / max(2 * step_s, 1e-6)
        return max(int(min(steps, _MAX_STEPS)), 1)


def _has_others() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1
