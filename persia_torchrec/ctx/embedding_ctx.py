"""What training and evaluation share: a batch's embeddings, and the model on them."""

import enum
from types import TracebackType
from typing import Any, Self

import numpy.typing as npt
import torch
from torch import nn

from persia_torchrec.data.dataflow import ReferencedBatch
from persia_torchrec.data.loader import (
    LookupSettings,
    PersiaTrainingBatch,
    enter_context,
    entered_context,
    leave_context,
)
from persia_torchrec.embedding import EmbeddingConfig
from persia_torchrec.embedding.data import PersiaBatch
from persia_torchrec.errors import ConfigError
from persia_torchrec.training.engine import Engine


class PreprocessMode(enum.Enum):
    """What a context makes of a batch."""

    TRAIN = 1
    """Embeddings want a gradient."""

    EVAL = 2
    """They do not, and the servers are only read."""


class EmbeddingCtx:
    """Look up embeddings and run the dense model on them.

    Enter it within a ``TrainCtx``, whose connections it uses. Entering it waits until
    the updates that this trainer has sent so far are applied, so that what has been
    trained is what is evaluated; it changes nothing on the servers.

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

        To train a model of one's own on them is right with one trainer; with several,
        only :meth:`forward` averages the dense gradients.

        Returns:
            Dense features; embeddings, float32, a tensor a slot in the order of the
            embedding config, which want a gradient in training; labels, or None. A
            pooled slot is ``(B, dim)``. A raw one is ``(B, sample_fixed_size, dim +
            1)``: a vector for each id of a sample, and a last channel that is 1 where
            there is an id.
        """
        non_id_tensors, labels = self._dense_tensors(batch)
        return non_id_tensors, self._engine.embed(batch.pull), labels

    def forward(
        self, batch: PersiaTrainingBatch
    ) -> tuple[Any, list[torch.Tensor] | None]:
        """Run the model on a batch.

        Returns:
            What the model returns, a tensor as a rule; and the labels, or None.
        """
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

    def get_embedding_from_bytes(
        self, data: bytes, device_id: int | None = None
    ) -> PersiaTrainingBatch:
        """Begin to look up a batch that was made bytes, for evaluation.

        Args:
            data: what ``PersiaBatch.to_bytes`` returned.
            device_id: the context's own device; another is refused.

        Raises:
            FrameError: these bytes are no batch.
            ConfigError: another device than the context's.
        """
        return self.get_embedding_from_data(PersiaBatch.from_bytes(data), device_id)

    def get_embedding_size(self) -> list[int]:
        """Return how many rows each embedding server holds."""
        return self._engine.client.num_rows()

    def configure_embedding_parameter_servers(
        self, embedding_config: EmbeddingConfig
    ) -> None:
        """Change how rows start and how far weights go; waits for all servers.

        Updates that this trainer sent before are applied with the settings of before,
        later ones with the new. The rows that are there keep their weights, until an
        update clamps them to the new bound. All trainers of a job should set the same.

        Args:
            embedding_config: the new settings of every table, but for those that the
                ``tables`` of the ``TrainCtx`` gave it.

        Raises:
            PersiaError: a server refuses, or an earlier update failed.
        """
        self._engine.configure(embedding_config)

    def clear_embeddings(self) -> None:
        """Drop all rows on all embedding servers."""
        self._engine.flush()
        self._engine.client.clear()

    def __enter__(self) -> Self:
        """Enter the context.

        Raises:
            PersiaError: an update before an evaluation failed.
        """
        if self.preprocess_mode is PreprocessMode.EVAL:
            self._engine.flush()
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
        non_id = [_tensor_of(feature.data) for feature in batch.non_id_type_features]
        labels = [_tensor_of(label.data) for label in batch.labels]
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


def _tensor_of(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return an array as a tensor; a batch made of bytes cannot be written to."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def eval_ctx(model: nn.Module | None = None) -> EmbeddingCtx:
    """Return a context for evaluation; see :class:`EmbeddingCtx`."""
    return EmbeddingCtx(PreprocessMode.EVAL, model)
