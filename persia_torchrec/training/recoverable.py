"""The block in which a training loop is saved, and continues where it was."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch

from persia_torchrec import env, timeouts
from persia_torchrec.checkpoint import catalog
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.datasets.dataset import RowDataset
from persia_torchrec.errors import ConfigError
from persia_torchrec.job.member import JobMember
from persia_torchrec.sharding.table_control import Sharders
from persia_torchrec.sharding.trainer_metrics import TrainerMetrics
from persia_torchrec.training.recovery import Recovery, folder_of_job
from persia_torchrec.training.schedule import (
    OnOtherBatches,
    RecoveryConfig,
    Resume,
)

T = TypeVar("T")

_MAX_AHEAD = 128  # batches that a train pipeline may take before it steps


class RecoverableRun:
    """A training that ``recoverable`` saves and resumes.

    The thread that trains calls all methods, every trainer as often as the others.
    """

    def __init__(self, recovery: Recovery, last_step: int | None) -> None:
        self._recovery = recovery
        self._last_step = TrainerMetrics.ends_at(last_step)
        self._num_ahead = 0

    @property
    def resumed_from(self) -> str | None:
        """Path of the checkpoint that was loaded; None: training starts now."""
        return self._recovery.resumed_from

    @property
    def num_steps(self) -> int:
        """Steps that are trained, those before the checkpoint included."""
        return self._recovery.num_steps

    def epochs(self, num: int) -> Iterator[int]:
        """Yield the epochs of a training that are not over, from 0 to ``num`` - 1.

        The first is the one in which the checkpoint was saved. ``run.skip`` yields what
        is left of its pass: nothing, if that was its last step; then what stands behind
        the pass, such as an evaluation, runs once.

        Raises:
            ConfigError: it is called a second time, ``num`` is less than 1, or a
                dataset in ``state`` has a ``WorkQueue``, whose pass has all epochs.
        """
        for epoch in range(self._recovery.begin_epochs(num), num):
            self._recovery.begin_epoch(epoch)
            yield epoch
        self._recovery.begin_epoch(num)

    def skip(self, loader: Iterable[T]) -> Iterator[T]:
        """Return the batches of a pass over a loader, without those trained before.

        Call it once for each pass, whichever are over, or in :meth:`epochs`. What is
        read is found in ``state``, however it is wrapped, or is read again from the
        beginning of the pass: then the loader must give the same batches, from the same
        random numbers of torch, NumPy, Python and of generators in ``state``.
        """
        parts = loader.micro_batches if isinstance(loader, RowDataset) else 1
        rest = self._recovery.watch(self._recovery.skip(loader))
        if self._last_step is None and not isinstance(loader, RowDataset):
            TrainerMetrics.expect(
                loader,
                self.num_steps,
                self._recovery.num_batches,
                self._recovery.num_epochs_left,
            )
        for batch in rest:
            self._num_ahead += 1
            if self._num_ahead > _MAX_AHEAD * parts:
                raise ConfigError(
                    "step() must be called after each training step. Received: "
                    f"{self._num_ahead} batches since the last call."
                )
            self._recovery.take(batch)
            yield batch
        self._recovery.end_pass()

    def step(
        self, num_batches: int = 1, *, loss: torch.Tensor | float | None = None
    ) -> None:
        """Call it after the optimizer's step, with the batches that it was of.

        ``loss`` has one element; it is shown to those who look at the job. No thread
        waits for a GPU.
        """
        if loss is not None:
            TrainerMetrics.loss.tell(loss)
        self._num_ahead = 0
        self._recovery.count_trained(num_batches)
        self._recovery.step()

    def save(self) -> None:
        """Save a checkpoint now, as at the end.

        Raises:
            CheckpointError: a trainer or a server failed; there is no new checkpoint.
        """
        self._recovery.save()


@contextlib.contextmanager
def recoverable(
    path: str | os.PathLike[str] | None,
    state: dict[str, Any],
    client: EmbeddingClient,
    sharders: Sharders,
    *,
    interval_s: float | None = None,
    resume: Resume | None = None,
    save_steps: int = 0,
    keep: int = 2,
    delta_interval_s: float = 0.0,
    missing: catalog.Missing = "error",
    on_change: catalog.OnChange = "error",
    rename: Mapping[str, str] | None = None,
    last_step: int | None = None,
    on_other_batches: OnOtherBatches = "error",
) -> Iterator[RecoverableRun]:
    """Make a training loop continue where it was, when its trainers start again.

    Inside the block checkpoints of both halves are saved from time to time. Where there
    is one when the block is entered, it is loaded: start the same script again, as
    ``torchrun --max-restarts=3`` does by itself. One is saved when the block ends well,
    unless it has the last step; and in a job that is told to end from outside, by
    SIGTERM, Ctrl-C, SIGUSR1 or SIGUSR2, by the next ``run.step()``, which then raises
    SystemExit.

    All trainers enter it together, when the model is sharded. Fill tables inside the
    block, unless ``run.resumed_from``: what trainers that are started again before the
    first checkpoint have written is dropped.

    Args:
        path: of a folder that is this run's own, and that trainers and servers share.
            None: that of the job, which ``torchx run`` has given it.
        state: by name, all that the training consists of. Modules and optimizers are
            saved once for all trainers. Of everything else each trainer saves its own:
            what has ``state_dict`` and ``load_state_dict`` (schedulers, a
            ``GradScaler``, a data loader that continues by itself), numbers, tensors.
        client: of the servers.
        sharders: what puts tables on the servers, as of :func:`save_checkpoint`.
        interval_s: seconds between two checkpoints, in which training stands still; at
            least 20 times what the last one took. 0: time brings none, and without
            steps and deltas there is none at the end either. None:
            ``PERSIA_CHECKPOINT_INTERVAL_S``, or 600.
        resume: "exact" takes the servers back to the checkpoint; with "rows_ahead"
            they keep their rows. None: ``PERSIA_RESUME``, or "exact".
        save_steps: steps between two checkpoints; 0: steps bring none.
        keep: newest checkpoints that stay, with their deltas.
        delta_interval_s: seconds between two deltas (:func:`save_delta`), at least 20
            times what the last one took; the servers must write increments. 0: there
            are none.
        missing: "error" or "skip", as of :func:`load_checkpoint`.
        on_change: "error", "reset state" or "reset table", likewise.
        rename: by names of the checkpoint's tables, those of the model.
        last_step: at which the training ends, for those who look at the job. None: the
            end of a pass over a loader that has a length, but for a ``RowDataset``.
        on_other_batches: "error" where a loader that is read again from the beginning
            of its pass gives other batches than those that are trained; "continue"
            trains on, with a warning and ``persia_other_passes_total``.

    Raises:
        CheckpointError: there are complete checkpoints, and none can be loaded; or the
            one at the end failed.
        ConfigError: deltas are wanted, and the servers write no increments; or more
            trainers resume than have saved, and their data have a position.

    Example:
        ``with recoverable("runs/7", {"model": model, "optimizer": optimizer}, client,
        sharders) as run:`` and in it ``for batch in run.skip(loader):``, which ends
        with ``run.step()``
    """
    if path is None:
        path = folder_of_job(env.require_job_store("recoverable() without a path")[2])
    if interval_s is None:
        interval_s = env.checkpoint_interval_s(timeouts.CHECKPOINT_INTERVAL_S)
    config = RecoveryConfig(
        folder=path,
        interval_s=interval_s,
        resume=resume or cast("Resume", env.resume() or "exact"),
        save_steps=save_steps,
        keep=keep,
        delta_interval_s=delta_interval_s,
        rules=catalog.LoadRules(missing, on_change, dict(rename or {})),
        on_other_batches=on_other_batches,
    )
    recovery = Recovery(config, client, sharders, state)
    recovery.begin_generation()
    recovery.resume(is_restart=env.num_group_restarts() > 0)
    if (member := JobMember.current) is not None:
        member.progress = lambda: recovery.num_steps
        member.is_paused = recovery.clock.has_answered
    with recovery.ending(), recovery.joinable():
        yield RecoverableRun(recovery, last_step)
