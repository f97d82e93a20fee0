"""PERSIA's contexts: ``with TrainCtx(...) as ctx:`` around a training loop.

``DataCtx`` sends batches from a data loader process. ``TrainCtx`` trains on them in the
trainer; ``eval_ctx`` within it evaluates, and changes nothing on the servers.
"""

import enum
import logging
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import torch
from torch import nn

from persia_torchrec import env
from persia_torchrec.config import load_embedding_config
from persia_torchrec.data.dataflow import BatchSender, ReferencedBatch
from persia_torchrec.data.loader import (
    LookupSettings,
    PersiaTrainingBatch,
    enter_context,
    entered_context,
    leave_context,
)
from persia_torchrec.embedding import EmbeddingConfig
from persia_torchrec.embedding.data import PersiaBatch
from persia_torchrec.embedding.optim import Optimizer
from persia_torchrec.errors import ConfigError, DataflowError
from persia_torchrec.training.engine import Engine, EngineConfig
from persia_torchrec.wire.discovery import AddressBook
from persia_torchrec.worker.remote import RemoteWorkers
from persia_torchrec.worker.schema import bags_of

logger = logging.getLogger(__name__)

_DISCOVERY_TIMEOUT_S = 600.0
_SEND_TIMEOUT_S = 900.0
_FIRST_RETRY_S = 0.002
_LAST_RETRY_S = 0.5


class PreprocessMode(enum.Enum):
    """What a context makes of a batch."""

    TRAIN = 1
    """Embeddings want a gradient."""

    EVAL = 2
    """They do not, and the servers are only read."""


class DataCtx:
    """Send batches from a data loader process to embedding workers and trainers.

    The constructor waits until workers and trainers have registered: a trainer does
    when it first iterates over its ``StreamingDataset``. Leaving the block without an
    exception tells the trainers that this loader has no more batches.

    Raises:
        ConfigError: this process belongs to no job.
        DiscoveryError: workers or trainers did not register in time.
    """

    def __init__(self) -> None:
        store = env.job_store()
        if store is None:
            raise ConfigError(
                "DataCtx must belong to a job: PERSIA_STORE_PORT is not set. Start the "
                "data loader through torchx (see components/)."
            )
        self._loader = env.get_replica_index()
        self._num_loaders = env.get_replica_size()
        book = AddressBook.join(*store)
        workers = book.addresses("worker", timeout_s=_DISCOVERY_TIMEOUT_S)
        trainers = book.addresses("trainer", timeout_s=_DISCOVERY_TIMEOUT_S)
        book.close()
        self._workers = RemoteWorkers(workers)
        self._sender = BatchSender(
            trainers, loader=self._loader, num_loaders=self._num_loaders
        )
        self._num_sent = 0

    def send_data(self, persia_batch: PersiaBatch) -> None:
        """Send a batch; waits while the buffers of worker or trainer are full.

        The ids go to one of the embedding workers in turn, the rest to the trainer
        ``batch_id % number of trainers``. Sets the batch's ``batch_id``.

        Raises:
            BatchError: the features are not those of the embedding config.
            DataflowError: a buffer stayed full for 15 minutes.
            ServerError: a worker or a trainer refuses the batch, or does not answer.
        """
        worker = self._num_sent % self._workers.num_workers
        batch_id = self._num_sent * self._num_loaders + self._loader
        persia_batch.batch_id = batch_id
        bags = bags_of({f.name: f for f in persia_batch.id_type_features})
        deadline = time.monotonic() + _SEND_TIMEOUT_S
        waits = _waits("embedding worker", deadline)
        while (ref := self._workers.buffer(worker, self._loader, bags)) is None:
            time.sleep(next(waits))
        trainer = batch_id % self._sender.num_trainers
        origin = (worker, self._loader, ref)
        waits = _waits("trainer", deadline)
        while not self._sender.send(trainer, persia_batch, origin):
            time.sleep(next(waits))
        self._num_sent += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if exc is None:
                self._sender.end()
                logger.info("data loader sent batches=%d", self._num_sent)
        finally:
            self._sender.close()
            self._workers.close()


class EmbeddingCtx:
    """Look up embeddings and run the dense model on them.

    Enter it within a ``TrainCtx``, whose connections it uses. Entering and leaving it
    changes nothing on the servers.

    Args:
        preprocess_mode: what to make of batches; ``EVAL``.
        model: the dense model; that of the ``TrainCtx`` by default.

    Raises:
        ConfigError: no ``TrainCtx`` is entered.
    """

    def __init__(
        self, preprocess_mode: PreprocessMode, model: nn.Module | None = None
    ) -> None:
        self.preprocess_mode = preprocess_mode
        self._engine = self._find_engine()
        self.model = model if model is not None else self._model_of_outer()

    def start_lookup(
        self, batch: PersiaBatch | ReferencedBatch, settings: LookupSettings
    ) -> PersiaTrainingBatch:
        """Begin to look up a batch; a ``DataLoader`` calls this."""
        parts = batch.rest if isinstance(batch, ReferencedBatch) else batch
        is_training = (
            parts.requires_grad and self.preprocess_mode is PreprocessMode.TRAIN
        )
        return PersiaTrainingBatch(
            pull=self._engine.start_pull(
                batch, is_training=is_training, settings=settings
            ),
            non_id_type_features=tuple(parts.non_id_type_features),
            labels=tuple(parts.labels),
            is_training=is_training,
            meta=parts.meta,
            batch_id=parts.batch_id,
        )

    def prepare_features(
        self, batch: PersiaTrainingBatch
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor] | None]:
        """Make tensors of a batch, on the context's device.

        Returns:
            Dense features; embeddings, float32 ``(B, dim)`` a slot in the order of the
            embedding config, which want a gradient in training; labels, or None.
        """
        non_id_tensors, labels = self._dense_tensors(batch)
        return non_id_tensors, self._engine.embed(batch.pull), labels

    def forward(
        self, batch: PersiaTrainingBatch
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """Run the model on a batch; return its output and the labels."""
        non_id_tensors, embeddings, labels = self.prepare_features(batch)
        return self.model(non_id_tensors, embeddings), labels

    def get_embedding_from_data(
        self, persia_batch: PersiaBatch, device_id: int | None = None
    ) -> PersiaTrainingBatch:
        """Begin to look up a batch of this process, for evaluation.

        Args:
            persia_batch: with its ids.
            device_id: the context's own device; another is refused.

        Raises:
            ConfigError: another device than the context's.
        """
        if device_id is not None and device_id != self._engine.device.index:
            raise ConfigError(
                f"device_id must be that of the context, {self._engine.device.index}. "
                f"Received: {device_id}."
            )
        return PersiaTrainingBatch(
            pull=self._engine.start_pull(persia_batch, is_training=False),
            non_id_type_features=tuple(persia_batch.non_id_type_features),
            labels=tuple(persia_batch.labels),
            is_training=False,
            meta=persia_batch.meta,
            batch_id=persia_batch.batch_id,
        )

    def get_embedding_size(self) -> list[int]:
        """Return how many rows each embedding server holds."""
        return self._engine.client.num_rows()

    def clear_embeddings(self) -> None:
        """Drop all rows on all embedding servers."""
        self._engine.flush()
        self._engine.client.clear()

    def __enter__(self) -> Self:
        enter_context(self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        leave_context(self)

    def _dense_tensors(
        self, batch: PersiaTrainingBatch
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        device = self._engine.device
        non_id = [torch.from_numpy(f.data) for f in batch.non_id_type_features]
        labels = [torch.from_numpy(label.data) for label in batch.labels]
        return (
            [tensor.to(device, non_blocking=True) for tensor in non_id],
            [tensor.to(device, non_blocking=True) for tensor in labels] or None,
        )

    def _find_engine(self) -> Engine:
        outer = entered_context()
        if not isinstance(outer, EmbeddingCtx):
            raise ConfigError(
                "An evaluation context must be made within a TrainCtx, whose servers "
                "it reads. Received: none is entered."
            )
        return outer._engine

    def _model_of_outer(self) -> nn.Module:
        outer = entered_context()
        assert isinstance(outer, EmbeddingCtx)
        return outer.model


class TrainCtx(EmbeddingCtx):
    """Train a dense model and its embeddings.

    The model and its embeddings go into TorchRec's ``DistributedModelParallel``, the
    embeddings sharded over the servers of the job. Leaving the block without an
    exception waits until every update is applied.

    Args:
        embedding_optimizer: of all embeddings; the servers apply it.
        dense_optimizer: of the model's parameters.
        model: the dense model, already on its device. Its ``forward`` takes a list of
            dense tensors and a list of embedding tensors.
        embedding_config: how rows start, and how far weights may go.
        device_id: CUDA device of the model; None is the CPU.
        mixed_precision: run the model under autocast with a scaled loss; CUDA only.
        grad_scalar_update_factor: by how much the loss scale falls when an embedding
            gradient was not finite.
        backward_buffer_size: updates that may wait when the ``DataLoader`` sets no
            staleness bound.

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
        *,
        model: nn.Module,
        embedding_config: EmbeddingConfig | None = None,
        device_id: int | None = None,
    ) -> None:
        if grad_scalar_update_factor <= 1 or backward_buffer_size < 1:
            raise ConfigError(
                "grad_scalar_update_factor must be > 1 and backward_buffer_size >= 1. "
                f"Received: {grad_scalar_update_factor} and {backward_buffer_size}."
            )
        device = _device(device_id, mixed_precision=mixed_precision)
        path = env.embedding_config_path()
        if path is None:
            raise ConfigError(
                "TrainCtx must know the slots: PERSIA_EMBEDDING_CONFIG is not set. "
                "Start the script through torchx with --embedding_config."
            )
        self.preprocess_mode = PreprocessMode.TRAIN
        self.model = model
        self.dense_optimizer = dense_optimizer
        self._update_factor = grad_scalar_update_factor
        self._scaler = torch.amp.GradScaler("cuda") if mixed_precision else None
        self._engine = Engine(
            model,
            EngineConfig(
                schema=load_embedding_config(path),
                optimizer=embedding_optimizer,
                embedding_config=embedding_config or EmbeddingConfig(),
                device=device,
                backward_buffer_size=backward_buffer_size,
            ),
        )

    def forward(
        self, batch: PersiaTrainingBatch
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """Run the model on a batch; return its output and the labels."""
        non_id_tensors, labels = self._dense_tensors(batch)
        enabled = self._scaler is not None
        with torch.autocast(self._engine.device.type, enabled=enabled):
            if batch.is_training:
                output = self._engine.run(non_id_tensors, batch.pull)
            else:
                output = self.model(non_id_tensors, self._engine.embed(batch.pull))
        assert isinstance(output, torch.Tensor), "a model returns one tensor"
        # Loss functions such as BCELoss take no half precision.
        return output.float() if enabled else output, labels

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
        self.dense_optimizer.zero_grad()
        return loss

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

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc, traceback)
        try:
            if exc is None:
                self._engine.flush()
                missed = self._engine.num_missed
                if missed:
                    logger.warning(
                        "%d gradients came after their rows had been evicted; raise "
                        "the servers' capacity if that is a large part",
                        missed,
                    )
        finally:
            self._engine.close()


def eval_ctx(model: nn.Module | None = None) -> EmbeddingCtx:
    """Return a context for evaluation; see :class:`EmbeddingCtx`."""
    return EmbeddingCtx(PreprocessMode.EVAL, model)


def _device(device_id: int | None, *, mixed_precision: bool) -> torch.device:
    if device_id is None:
        if mixed_precision:
            raise ConfigError(
                "mixed_precision must be False on the CPU: it needs a CUDA device. "
                "Pass mixed_precision=False, or a device_id."
            )
        return torch.device("cpu")
    if not torch.cuda.is_available() or not 0 <= device_id < torch.cuda.device_count():
        raise ConfigError(
            f"device_id must be a CUDA device of this machine, in "
            f"[0, {torch.cuda.device_count()}). Received: {device_id}."
        )
    torch.cuda.set_device(device_id)
    return torch.device("cuda", device_id)


def _waits(where: str, deadline: float) -> Iterator[float]:
    """Yield growing times to wait, until the deadline."""
    wait_s = _FIRST_RETRY_S
    while time.monotonic() < deadline:
        yield wait_s
        wait_s = min(2 * wait_s, _LAST_RETRY_S)
    raise DataflowError(
        f"The {where} must take the batch within {_SEND_TIMEOUT_S:g} s. "
        "Received: its buffer stayed full. Does the training go on?"
    )
