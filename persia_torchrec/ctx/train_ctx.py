"""The trainer's context: both halves of the model, stepped together."""

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from persia_torchrec import env
from persia_torchrec.config import EmbeddingSchema, load_embedding_config
from persia_torchrec.ctx.embedding_ctx import EmbeddingCtx
from persia_torchrec.ctx.lookup_ctx import PreprocessMode, cuda_device
from persia_torchrec.data.loader import PersiaTrainingBatch
from persia_torchrec.distributed import (
    DistributedBaseOption,
    get_default_distributed_option,
)
from persia_torchrec.embedding import EmbeddingConfig
from persia_torchrec.embedding.optim import Optimizer
from persia_torchrec.errors import ConfigError
from persia_torchrec.table import TableSettings
from persia_torchrec.training.context_checkpoints import read_state, state_bytes
from persia_torchrec.training.engine import Engine, EngineConfig
from persia_torchrec.worker.slots_of_job import ask_for_slots

logger = logging.getLogger(__name__)

_DISCOVERY_TIMEOUT_S = 300.0
_TRAINING = "training.pt"


class TrainCtx(EmbeddingCtx):
    """Train a dense model and its embeddings.

    The model and its embeddings go into TorchRec's ``DistributedModelParallel``, the
    embeddings sharded over the servers of the job. Leaving the block without an
    exception waits until every update is applied, and until all trainers leave theirs:
    their numbers of batches may differ.

    Args:
        embedding_optimizer: of all embeddings; the servers apply it. Its learning rate
            may follow a schedule, see the attribute of the same name.
        dense_optimizer: of the model's parameters.
        model: the dense model, already on its device. Its ``forward`` takes a list of
            dense tensors and a list of embedding tensors.
        embedding_config: how rows start, and how far weights may go.
        tables: settings of single tables, by feature group (a slot without one is its
            own); they win over ``embedding_optimizer`` and ``embedding_config``.
        device_id: CUDA device of the model; None is the CPU.
        mixed_precision: run the model under autocast with a scaled loss; CUDA only.
        grad_scalar_update_factor: by how much the loss scale falls when an embedding
            gradient was not finite.
        backward_buffer_size: updates that may wait when the ``DataLoader`` sets no
            staleness bound.
        distributed_option: how several trainers keep their dense models alike;
            ``get_default_distributed_option(device_id)`` by default.

    Attributes:
        embedding_optimizer: the learning rates of the embeddings as a torch optimizer,
            for ``torch.optim.lr_scheduler``. A changed rate holds from the next
            :meth:`backward` on.

    Raises:
        ConfigError: a setting that cannot work, or this process belongs to no job.
        DiscoveryError: workers or servers did not register in time.
        ServerError: a server refuses the tables.
    """

    def __init__(
        self,
        embedding_optimizer: Optimizer,
        dense_optimizer: torch.optim.Optimizer,
        grad_scalar_update_factor: float = 4,
        backward_buffer_size: int = 10,
        mixed_precision: bool = True,
        distributed_option: DistributedBaseOption | None = None,
        *,
        model: nn.Module,
        embedding_config: EmbeddingConfig | None = None,
        tables: Mapping[str, TableSettings] | None = None,
        device_id: int | None = None,
    ) -> None:
        if grad_scalar_update_factor <= 1 or backward_buffer_size < 1:
            raise ConfigError(
                "grad_scalar_update_factor must be > 1 and backward_buffer_size >= 1. "
                f"Received: {grad_scalar_update_factor} and {backward_buffer_size}."
            )
        device = _device(device_id, mixed_precision=mixed_precision)
        self.preprocess_mode = PreprocessMode.TRAIN
        self.model = model
        self.dense_optimizer = dense_optimizer
        self._update_factor = grad_scalar_update_factor
        self._scaler = torch.amp.GradScaler("cuda") if mixed_precision else None
        self._engine = Engine(
            model,
            EngineConfig(
                schema=_slots(),
                optimizer=embedding_optimizer,
                embedding_config=embedding_config or EmbeddingConfig(),
                tables=dict(tables or {}),
                device=device,
                distributed=distributed_option
                or get_default_distributed_option(device_id),
                backward_buffer_size=backward_buffer_size,
            ),
        )
        self.embedding_optimizer = self._engine.sharder.optimizer

    def forward(
        self, batch: PersiaTrainingBatch
    ) -> tuple[Any, list[torch.Tensor] | None]:
        """Run the model on a batch.

        Returns:
            What the model returns, a tensor as a rule; and the labels, or None.
        """
        non_id_tensors, labels = self._dense_tensors(batch)
        enabled = self._scaler is not None
        with torch.autocast(self._engine.device.type, enabled=enabled):
            if batch.is_training:
                output = self._engine.run(non_id_tensors, batch.pull)
            else:
                output = self.model(non_id_tensors, self._engine.embed(batch.pull))
        # Loss functions such as BCELoss take no half precision.
        return _in_full_precision(output) if enabled else output, labels

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Update both halves of the model.

        The embedding gradients go to the servers, the dense optimizer steps, and the
        dense gradients are set to zero.

        Args:
            loss: of the batch that :meth:`forward` was called with last.

        Returns:
            The loss, scaled under mixed precision.
        """
        if self._scaler is None:
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self.dense_optimizer.step()
        else:
            loss = self._backward_scaled(loss, self._scaler)
        self._engine.after_step()
        self.embedding_optimizer.step()
        self.dense_optimizer.zero_grad()
        return loss

    def dump_checkpoint(  # type: ignore[override]  # PERSIA names them otherwise here
        self,
        dst_dir: str,
        dense_model_filename: str = "dense.pt",
        jit_dense_model_filename: str = "jit_dense.pt",
        opt_filename: str = "opt.pt",
        blocking: bool = True,
        with_jit_model: bool = False,
    ) -> None:
        """Write a checkpoint with all that training needs to go on.

        As ``EmbeddingCtx.dump_checkpoint``, and two files more: ``opt.pt`` is the dense
        optimizer's state_dict, ``training.pt`` the loss scale and the learning rates of
        the embeddings. Call it between :meth:`backward` and the next :meth:`forward`.

        Args:
            dst_dir: a folder that trainers and servers share, or a URL.
            dense_model_filename: of the model's state.
            jit_dense_model_filename: of the model as TorchScript.
            opt_filename: of the dense optimizer's state.
            blocking: False lets the servers write while training goes on.
            with_jit_model: write the model as TorchScript too.

        Raises:
            PersiaError: as ``EmbeddingCtx.dump_checkpoint``.
        """
        files = self._dense_files(
            dense_model_filename, jit_dense_model_filename if with_jit_model else None
        )
        if files:
            rates = self.embedding_optimizer.learning_rates()
            scaler = None if self._scaler is None else self._scaler.state_dict()
            training = {"learning_rates": rates, "grad_scaler": scaler}
            files[opt_filename] = state_bytes(self.dense_optimizer.state_dict())
            files[_TRAINING] = state_bytes(training)
            if len(files) != 3 + with_jit_model:
                raise ConfigError(
                    f"The files must have names of their own, and none {_TRAINING}. "
                    f"Received: {sorted(files)} for {3 + with_jit_model} files."
                )
        self._engine.checkpoints.dump(dst_dir, files, blocking=blocking)

    def load_checkpoint(  # type: ignore[override]  # as above
        self,
        src_dir: str,
        map_location: str | None = None,
        dense_model_filename: str = "dense.pt",
        opt_filename: str = "opt.pt",
        blocking: bool = True,
    ) -> None:
        """Load all that training needs to go on; all ranks call it together.

        As ``EmbeddingCtx.load_checkpoint``, and the dense optimizer, the loss scale and
        the learning rates of the embeddings too. Call it before the ``DataLoader``
        begins.

        Args:
            src_dir: what :meth:`dump_checkpoint` was given, or the path of one.
            map_location: as ``torch.load`` takes it; the CPU by default.
            dense_model_filename: of the model's state.
            opt_filename: of the dense optimizer's state.
            blocking: False returns before the servers are done.

        Raises:
            CheckpointError: as ``EmbeddingCtx.load_checkpoint``.
        """
        targets: dict[str, nn.Module | torch.optim.Optimizer] = {
            dense_model_filename: self.model,
            opt_filename: self.dense_optimizer,
        }
        folder = self._load(src_dir, targets, map_location, blocking)
        training = read_state(folder, _TRAINING)
        for group in self.embedding_optimizer.param_groups:
            rates = training["learning_rates"]
            group["lr"] = rates.get(group["table"], group["lr"])
        self.embedding_optimizer.step()
        if self._scaler is not None and training["grad_scaler"]:
            self._scaler.load_state_dict(training["grad_scaler"])

    def _backward_scaled(
        self, loss: torch.Tensor, scaler: torch.amp.GradScaler
    ) -> torch.Tensor:
        scaled = scaler.scale(loss)
        scale = scaler.get_scale()
        self._engine.set_loss_scale(scale)
        num_skipped = self._engine.num_skipped
        scaled.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        scaler.step(self.dense_optimizer)
        if self._engine.num_skipped == num_skipped:
            scaler.update()
        else:
            scaler.update(scale / self._update_factor)
        return scaled

    def __enter__(self) -> Self:
        """Enter the context; the trainers of a job do so together."""
        self._in_step = self._engine.in_step()
        self._in_step.__enter__()
        return super().__enter__()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc, traceback)
        try:
            self._in_step.__exit__(exc_type, exc, traceback)
            if exc is None:
                self._engine.flush()
                self._engine.checkpoints.wait_for_dump()
                missed = self._engine.num_missed
                if missed:
                    logger.warning(
                        "%d gradients came after their rows had been evicted; raise "
                        "the servers' capacity if that is a large part",
                        missed,
                    )
        finally:
            self._engine.close()


def _slots() -> EmbeddingSchema:
    """Return the slots: of this process's file, or else of the embedding workers'."""
    path = env.embedding_config_path()
    if path is not None:
        return load_embedding_config(path)
    store = env.job_store()
    if store is None:
        raise ConfigError(
            "A training context must belong to a job: PERSIA_STORE_PORT is not set. "
            "Start the script through torchx (see components/), or persia-launcher."
        )
    return ask_for_slots(store, timeout_s=_DISCOVERY_TIMEOUT_S)


def _in_full_precision(output: Any) -> Any:
    """Turn the halves in a tensor, or in a tuple, list or dict of them, to float32."""
    if isinstance(output, torch.Tensor):
        is_half = output.dtype in (torch.float16, torch.bfloat16)
        return output.float() if is_half else output
    if isinstance(output, dict):
        return {key: _in_full_precision(value) for key, value in output.items()}
    if isinstance(output, tuple | list):
        make = getattr(output, "_make", type(output))  # a named tuple has one
        return make(map(_in_full_precision, output))
    return output


def _device(device_id: int | None, *, mixed_precision: bool) -> torch.device:
    if device_id is None:
        if mixed_precision:
            raise ConfigError(
                "mixed_precision must be False on the CPU: it needs a CUDA device. "
                "Pass mixed_precision=False, or a device_id."
            )
        return torch.device("cpu")
    device = cuda_device(device_id)
    torch.cuda.set_device(device_id)
    return device
