"""The trainer's context: both halves of the model, stepped together."""

import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn

from persia_torchrec import env
from persia_torchrec.checkpoint.catalog import LoadRules, Missing, OnChange
from persia_torchrec.device.transfer import ToHost
from persia_torchrec.embedding.optim import Optimizer
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.errors import ConfigError
from persia_torchrec.job.member import JobMember
from persia_torchrec.parsing.decoding import require_at_least_1
from persia_torchrec.persia import distributed
from persia_torchrec.persia.ctx.base_ctx import BaseCtx, PreprocessMode
from persia_torchrec.persia.ctx.embedding_ctx import EmbeddingCtx
from persia_torchrec.persia.ctx.lookup_ctx import B, Tensors
from persia_torchrec.persia.engine import Engine
from persia_torchrec.persia.global_config import reject_inference
from persia_torchrec.persia.loader import PersiaTrainingBatch
from persia_torchrec.persia.torchrec_engine import TorchRecEngine, has_collections
from persia_torchrec.pipeline.staleness import TrainingSummary
from persia_torchrec.sharding.optimizer import set_values
from persia_torchrec.sharding.table_control import loss_scale
from persia_torchrec.sharding.trainer_metrics import TrainerMetrics
from persia_torchrec.table import TableSettings
from persia_torchrec.training.checkpoint import Target, read_state, state_bytes
from persia_torchrec.training.recovery import Recovery, folder_of_job
from persia_torchrec.training.schedule import (
    OnOtherBatches,
    RecoveryConfig,
    Resume,
)

logger = logging.getLogger(__name__)

_MAX_PENDING = 256
"""Copies that may be on their way; what comes when there are more is not looked at."""


class NonFiniteWatch:
    """Warns of outputs and losses that are not finite, once per run of such steps.

    The sum of zero times each number is NaN if one is not finite, and 0 if all are. It
    is computed where the numbers are. From a GPU it comes by itself, and is read by a
    later call; on the CPU it is there at once. The thread that trains calls it.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[int, str, ToHost]] = deque()
        self._last = -1  # step that was not finite

    def note(self, step: int, what: Literal["output", "loss"], value: Any) -> None:
        """Look at the floating tensors in a value, in tuples, lists and dicts too."""
        self.tell()
        sums: dict[torch.device, torch.Tensor] = {}
        for tensor in _tensors_in(value):
            of_tensor = (tensor.detach() * 0).sum()
            known = sums.get(tensor.device)
            sums[tensor.device] = of_tensor if known is None else known + of_tensor
        for of_device in sums.values():
            if len(self._pending) < _MAX_PENDING:
                copy = ToHost(of_device.float(), until_then=0.0)
                self._pending.append((step, what, copy))
        self.tell()

    def tell(self, *, is_over: bool = False) -> None:
        """Warn of what has come; at the end of a training, of what is there then."""
        while self._pending and (is_over or self._pending[0][2].is_here()):
            step, what, copy = self._pending.popleft()
            if np.isfinite(copy.read()):
                continue
            if step > self._last + 1 or self._last < 0:
                logger.warning(
                    "the %s of step %d is not finite; steps in a row are named once. "
                    "Look for features that are not scaled (float16 under autocast "
                    "ends at 65,504), and for a learning rate that is too high",
                    what,
                    step,
                )
            self._last = step


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        is_plain = value.layout == torch.strided and not value.is_nested
        if value.is_floating_point() and is_plain:
            yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors_in(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors_in(one)


_TRAINING = "training.pt"
_MIN_SCALE = 1.0  # of the loss; gradients that overflow at 1 do so at any scale

_numbers = itertools.count(1)  # of the contexts of this process


class TrainCtx(EmbeddingCtx):
    """Train a dense model and its embeddings.

    Both go into TorchRec's ``DistributedModelParallel``, the embeddings sharded over
    the servers of the job. Leaving the block without an exception waits until every
    update is applied, and until all trainers leave theirs: their numbers of batches may
    differ. The arguments have PERSIA's order; ``tables`` is our own.

    Args:
        embedding_optimizer: of all embeddings; the servers apply it.
        dense_optimizer: of the model's parameters.
        grad_scalar_update_factor: by how much the loss scale falls when an embedding
            gradient was not finite, on any trainer that averages dense gradients.
        backward_buffer_size: updates that may wait when the ``DataLoader`` sets no
            staleness bound.
        backward_workers_size: updates that may be on their way to the servers at once,
            sent and not acknowledged.
        grad_update_buffer_size: updates whose gradients may be in memory, waiting or on
            their way: :meth:`backward` waits before it holds one more.
        lookup_emb_directly: whether batches of this process are looked up, of an
            ``IterableDataset`` or by ``get_embedding_from_data``. If not, they are
            rejected: all come from data loaders.
        mixed_precision: scale the loss, so that small gradients of a model in half
            precision are not lost, and divide gradients by the scale again; CUDA only.
            The scale falls while gradients are not finite, to 1 at least. As PERSIA's
            it puts nothing under autocast: use ``torch.autocast`` around
            :meth:`forward`, or in the model.
        distributed_option: how several trainers keep their dense models alike;
            ``get_default_distributed_option(device_id)`` by default.
        model: the dense model, already on its device; it must be given. Its ``forward``
            takes a list of dense tensors and a list of embedding tensors, these in the
            order of the batch's ``id_type_features``. Or a TorchRec model, whose
            ``forward`` takes dense features, one tensor, and a ``KeyedJaggedTensor``,
            with which it calls its collections. These go to the servers; ids come to
            this process itself, and the job needs no embedding worker.
        embedding_config: how rows start, and how far weights may go.
        threadpool_worker_size: see :class:`BaseCtx`.
        device_id: CUDA device of the model; None is the CPU.
        tables: settings of single tables, by feature group (a slot without one is its
            own); they win over ``embedding_optimizer`` and ``embedding_config``.
        checkpoint_interval_s: seconds between automatic checkpoints, from which
            training continues when the trainers are started again; 0: there are none.
            None: ``PERSIA_CHECKPOINT_INTERVAL_S``, or else 600 where something starts
            trainers again, as ``torchrun --max-restarts`` does. One is saved when the
            block ends well, too, and when the job is told to end from outside, after
            the current step. They are in
            ``PERSIA_RUN_DIR``, or in a folder of the job in
            ``PERSIA_CHECKPOINT_DIR``, which trainers and servers share.
        resume: "exact" takes the servers back to the checkpoint; with "rows_ahead" rows
            keep the updates since. None: ``PERSIA_RESUME``, or else "exact".
        missing: what becomes of the checkpoint's tables that the model does not have
            when training resumes: "error" or "skip". Tables that the checkpoint does
            not have begin again.
        on_change: what becomes of a table with another dim or optimizer, and of changed
            parameters of the model: "error", "reset state" or "reset table".
        rename: by names of the checkpoint's tables, what they are called now.
        last_step: at which the training ends, at least 1, for those who look at the
            job. None: the end of a pass over a dataset that has a length.
        on_other_batches: "error" where a data set of the trainer's own, which is read
            again from the beginning of its pass when training resumes, yields other
            batches than those that are trained; "continue" trains on, with a warning
            and ``persia_other_passes_total``.

    Attributes:
        embedding_optimizer: the learning rates of the embeddings, for
            ``torch.optim.lr_scheduler``; a new rate holds from the next
            :meth:`backward` on.
        rank_id, world_size: of this trainer, as the environment says.
        mixed_precision: the argument.

    Raises:
        ConfigError: a setting that cannot work, or this process belongs to no job.
        DiscoveryError: workers or servers did not register in time.
    """

    preprocess_mode = PreprocessMode.TRAIN
    model: nn.Module
    embeddings: Engine
    _recovery: Recovery | None = None
    _num_steps = 0

    def __init__(
        self,
        embedding_optimizer: Optimizer,
        dense_optimizer: torch.optim.Optimizer,
        grad_scalar_update_factor: float = 4,
        backward_buffer_size: int = 10,
        backward_workers_size: int = 8,
        grad_update_buffer_size: int = 60,
        lookup_emb_directly: bool = True,
        mixed_precision: bool = True,
        distributed_option: distributed.DistributedBaseOption | None = None,
        model: nn.Module | None = None,
        embedding_config: EmbeddingConfig | None = None,
        threadpool_worker_size: int = 10,
        device_id: int | None = None,
        *,
        tables: Mapping[str, TableSettings] | None = None,
        checkpoint_interval_s: float | None = None,
        resume: Resume | None = None,
        missing: Missing = "error",
        on_change: OnChange = "error",
        rename: Mapping[str, str] | None = None,
        last_step: int | None = None,
        on_other_batches: OnOtherBatches = "error",
    ) -> None:
        reject_inference("NN worker", env.global_config_path())
        self._update_factor = _require_falling(grad_scalar_update_factor)
        _require_device(device_id, mixed_precision=mixed_precision)
        require_at_least_1(
            backward_buffer_size=backward_buffer_size,
            backward_workers_size=backward_workers_size,
            grad_update_buffer_size=grad_update_buffer_size,
        )
        self._last_step = TrainerMetrics.ends_at(last_step)
        # Not EmbeddingCtx's: the connections are those of an engine.
        BaseCtx.__init__(self, threadpool_worker_size, device_id)
        self.model = model = _require_given(model)
        self.dense_optimizer = dense_optimizer
        self.mixed_precision = mixed_precision
        self.rank_id, self.world_size = env.get_rank(), env.get_world_size()
        self._scaler = torch.amp.GradScaler("cuda") if mixed_precision else None
        self.embedding_config = embedding_config or EmbeddingConfig()
        kind = TorchRecEngine if has_collections(model) else Engine
        self.embeddings = engine = kind(
            model,
            self._device,
            distributed_option or distributed.get_default_distributed_option(device_id),
            embedding_optimizer,
            self.embedding_config,
            dict(tables or {}),
        )
        engine.backward_buffer_size = backward_buffer_size
        engine.lookup_emb_directly = lookup_emb_directly
        engine.bound(held=grad_update_buffer_size, sent=backward_workers_size)
        self.embedding_optimizer = engine.sharder.optimizer
        self._watch = NonFiniteWatch()
        self._own_state: dict[str, Any] = {}
        rules = LoadRules(missing, on_change, dict(rename or {}))
        of_load: Missing = "skip" if rules.missing == "skip" else "add"
        engine.checkpoints.rules = LoadRules(of_load, rules.on_change, rules.rename)
        self._recovery_config = replace(
            _configure_recovery(
                engine.job_id, checkpoint_interval_s, resume, on_other_batches
            ),
            rules=rules,
        )

    def forward(self, batch: PersiaTrainingBatch) -> tuple[Any, Tensors | None]:
        """Run the model on a batch; return its output and the labels, or None.

        A batch that is no ``DataLoader``'s, of PERSIA's kind or TorchRec's, is looked
        up from now on; one with ``requires_grad`` awaits its :meth:`backward`.

        A ``torch.autocast`` of the caller holds, in ``eval_ctx`` too, and the output is
        as the model gives it. Of an output and a loss that are not finite a warning
        names the step, once per run of such steps; on a GPU one step later.
        """
        batch = self._looked_up(batch)
        non_id_tensors, labels = self._dense_tensors(batch)
        if not batch.is_training:
            engine, given = self.embeddings, (non_id_tensors, batch.pull)
            return engine.evaluate(self.model, *given), labels
        output = self.embeddings.run(non_id_tensors, batch.pull)
        if not self.takes_ids:
            self._learn_signature(self.embeddings.hybrid.slots, batch, output)
        self._watch.note(self._num_steps + 1, "output", output)
        return output, labels

    def backward(
        self, loss: torch.Tensor, embedding_gradient_check_frequency: int = 20
    ) -> torch.Tensor:
        """Update both halves of the model; return the loss, scaled in mixed precision.

        The embedding gradients go to the servers, the dense optimizer steps, and the
        dense gradients are set to zero.

        Args:
            loss: of the batch that :meth:`forward` was called with last.
            embedding_gradient_check_frequency: of how many batches at least one is
                checked for embedding gradients that are not finite, at least 1. Each
                is, whatever the number: what is not finite moves no row.

        Raises:
            PersiaError: an earlier update failed, or was not acknowledged in time.
        """
        require_at_least_1(
            embedding_gradient_check_frequency=embedding_gradient_check_frequency
        )
        self._watch.note(self._num_steps + 1, "loss", loss)
        TrainerMetrics.loss.tell(loss)
        if self._scaler is None:
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self.dense_optimizer.step()
        else:
            loss = self._step_scaled(loss, self._scaler)
        weights = self.embeddings.weights
        have_met = weights is None or weights.after_step()
        self.embedding_optimizer.step()
        self.dense_optimizer.zero_grad()
        self._num_steps += 1
        if self._recovery is not None:
            self._recovery.step(may_save=have_met)
        return loss

    def _step_scaled(
        self, loss: torch.Tensor, scaler: torch.amp.GradScaler
    ) -> torch.Tensor:
        """Update both halves under a loss scale; return the scaled loss.

        The scale stays a tensor: to read it would make this thread wait for a GPU.
        """
        scale = loss_scale(scaler, self.embeddings.device).clamp(min=_MIN_SCALE)
        scaler.update(scale)  # while all overflows it falls without end
        loss = scaler.scale(loss)
        has_skipped = self.embeddings.backward(loss, scale)
        scaler.step(self.dense_optimizer)
        backoff_factor = scaler.get_backoff_factor()
        if has_skipped:
            self.embeddings.mark_skipped(scaler)
            scaler.set_backoff_factor(1 / self._update_factor)
        scaler.update()
        scaler.set_backoff_factor(backoff_factor)
        return loss

    def register_state(self, **state: Any) -> None:
        """Keep what the script has of its own in automatic checkpoints, by name.

        Each trainer keeps its own: what has ``state_dict`` and ``load_state_dict``, as
        schedulers have. A training that is resumed sets them when it looks up its first
        batch: call this before, with the same names each time.
        """
        self._own_state |= state

    def skip(self, batches: Iterator[B], dataset: object) -> Iterator[B]:
        """Leave out batches of a ``DataLoader`` that were trained before a restart."""
        recovery, num_batches = self._recovery, 0
        if recovery is not None:
            batches = recovery.skip_ahead(batches, dataset)
            num_batches = recovery.num_batches
        if self._last_step is None:
            TrainerMetrics.expect(dataset, self._num_steps, num_batches)
        return batches

    def count(
        self, batches: Iterator[PersiaTrainingBatch]
    ) -> Iterator[PersiaTrainingBatch]:
        """Learn which batches a ``DataLoader`` hands out."""
        return batches if self._recovery is None else self._recovery.count(batches)

    def summary(self) -> TrainingSummary:
        """Return how stale the rows of this trainer's batches were; the end logs it."""
        return self.embeddings.sharder.summary()

    def dump_checkpoint(  # type: ignore[override]  # PERSIA names them otherwise here
        self,
        dst_dir: str,
        dense_model_filename: str = "dense.pt",
        jit_dense_model_filename: str = "jit_dense.pt",
        opt_filename: str = "opt.pt",
        blocking: bool = True,
        with_jit_model: bool = False,
    ) -> None:
        """Write a checkpoint with all that training needs to continue.

        As ``EmbeddingCtx.dump_checkpoint``, and two files more: ``opt.pt`` is the dense
        optimizer's state_dict, ``training.pt`` the loss scale and the learning rates of
        the embeddings. Call it between :meth:`backward` and the next :meth:`forward`.
        """
        jit_filename = jit_dense_model_filename if with_jit_model else None
        files = self._dense_files(dense_model_filename, jit_filename)
        if files:
            rates = self.embedding_optimizer.learning_rates()
            scaler = None if self._scaler is None else self._scaler.state_dict()
            training = {"learning_rates": rates, "grad_scaler": scaler}
            files[opt_filename] = state_bytes(self.dense_optimizer.state_dict())
            files[_TRAINING] = state_bytes(training)
            if len(files) != 3 + with_jit_model:
                raise ConfigError(
                    f"The files must have distinct names, and none {_TRAINING}. "
                    f"Received: {sorted(files)} for {3 + with_jit_model} files."
                )
        self.embeddings.checkpoints.dump(dst_dir, files, blocking=blocking)

    def load_checkpoint(  # type: ignore[override]  # as above
        self,
        src_dir: str,
        map_location: str | None = None,
        dense_model_filename: str = "dense.pt",
        opt_filename: str = "opt.pt",
        blocking: bool = True,
    ) -> None:
        """Load all that training needs to continue; all ranks call it together.

        As ``EmbeddingCtx.load_checkpoint``, and the dense optimizer, the loss scale and
        the learning rates of the embeddings too. Call it before the ``DataLoader``
        begins.
        """
        if self._is_skipped("load_checkpoint()"):
            return
        targets: dict[str, Target] = {
            dense_model_filename: self.model,
            opt_filename: self.dense_optimizer,
        }
        folder = self.embeddings.checkpoints.load(
            src_dir, targets, map_location, blocking=blocking
        )
        training = read_state(folder, _TRAINING)
        for group in self.embedding_optimizer.param_groups:
            rates = training["learning_rates"]
            set_values(group, {"lr": rates.get(group["table"], group["lr"])})
        self.embedding_optimizer.step()
        if self._scaler is not None and training["grad_scaler"]:
            self._scaler.load_state_dict(training["grad_scaler"])

    @contextlib.contextmanager
    def _block(self) -> Iterator[None]:
        with contextlib.closing(self.embeddings) as engine:
            self._recovery = recovery = self._make_recovery(engine)
            if recovery is not None:
                recovery.resume(is_restart=env.num_group_restarts() > 0)
                engine.resumed_from = recovery.resumed_from
                self.trained = dict(recovery.last_numbers)
                self._num_steps = recovery.num_steps
            if (member := JobMember.current) is not None:
                member.progress = lambda: self._num_steps
            clock = None if recovery is None else recovery.clock
            ending = contextlib.nullcontext() if recovery is None else recovery.ending()
            with ending:
                try:
                    with engine.in_step(self._scaler, clock):
                        yield
                finally:  # it may be why the block ends
                    self._watch.tell(is_over=True)
                engine.flush()
                engine.checkpoints.wait_for_dump()
            engine.sharder.report_at_end(self.get_embedding_size())

    def _make_recovery(self, engine: Engine) -> Recovery | None:
        if not self._recovery_config.interval_s:
            return None
        state = self._own_state
        state |= {"model": self.model, "optimizer": self.dense_optimizer}
        if self._scaler is not None:
            state["grad_scaler"] = self._scaler
        return Recovery(
            self._recovery_config,
            engine.client,
            engine.sharder,
            state,
            is_replicated=engine.weights is None,
        )


def _require_falling(grad_scalar_update_factor: float) -> float:
    if grad_scalar_update_factor <= 1:
        raise ConfigError(
            "grad_scalar_update_factor must be > 1. "
            f"Received: {grad_scalar_update_factor}."
        )
    return grad_scalar_update_factor


def _require_given(model: nn.Module | None) -> nn.Module:
    if model is None:
        raise ConfigError(
            "A TrainCtx must have a model. Received: model=None. Give the one whose "
            "parameters dense_optimizer has."
        )
    return model


def _require_device(device_id: int | None, *, mixed_precision: bool) -> None:
    if mixed_precision and device_id is None:
        raise ConfigError(
            "mixed_precision must be False on the CPU: it needs a CUDA device. "
            "Pass mixed_precision=False, or a device_id."
        )


def _configure_recovery(
    job_id: str,
    interval_s: float | None,
    resume: Resume | None,
    on_other_batches: OnOtherBatches,
) -> RecoveryConfig:
    """Return what arguments of a context say, or else the environment."""
    if interval_s is None:
        interval_s = env.checkpoint_interval_s()
    number, run = next(_numbers), folder_of_job(job_id)
    return RecoveryConfig(
        folder=f"{run}-{number}" if number > 1 else run,
        interval_s=interval_s,
        resume=resume or cast("Resume", env.resume() or "exact"),
        on_other_batches=on_other_batches,
    )
