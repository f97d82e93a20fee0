"""What all contexts share: a batch's embeddings, and the model on them."""

import enum
from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
from torch import nn

from persia_torchrec.data.dataflow import ReferencedBatch
from persia_torchrec.data.dense import dense_tensor
from persia_torchrec.data.loader import LookupSettings, PersiaTrainingBatch
from persia_torchrec.embedding.data import PersiaBatch
from persia_torchrec.errors import ConfigError


class PreprocessMode(enum.Enum):
    """What a context makes of a batch."""

    TRAIN = 1
    """Embeddings want a gradient."""

    EVAL = 2
    """They do not, and the servers are only read."""

    INFERENCE = 3
    """As EVAL, and labels are not looked at."""


class EmbeddingSource(Protocol):
    """Where a context gets embeddings from: a trainer's engine, or a reader."""

    @property
    def device(self) -> torch.device:
        """Where tensors are wanted."""

    def start_pull(
        self,
        batch: PersiaBatch | ReferencedBatch,
        *,
        is_training: bool,
        settings: LookupSettings | None = None,
    ) -> Any:
        """Begin to look up a batch."""

    def embed(self, pull: Any) -> list[torch.Tensor]:
        """Wait for a batch's embeddings, a tensor a slot."""


class LookupCtx(ABC):
    """Look up embeddings and run the dense model on them.

    Attributes:
        preprocess_mode: what to make of batches.
        model: the dense model, or None.
    """

    preprocess_mode: PreprocessMode
    model: nn.Module | None

    @property
    @abstractmethod
    def _source(self) -> EmbeddingSource:
        """Where embeddings come from."""

    def start_lookup(
        self, batch: PersiaBatch | ReferencedBatch, settings: LookupSettings
    ) -> PersiaTrainingBatch:
        """Begin to look up a batch; a ``DataLoader`` calls this."""
        parts = batch.rest if isinstance(batch, ReferencedBatch) else batch
        is_training = (
            parts.requires_grad and self.preprocess_mode is PreprocessMode.TRAIN
        )
        return PersiaTrainingBatch(
            pull=self._source.start_pull(
                batch, is_training=is_training, settings=settings
            ),
            non_id_type_features=tuple(parts.non_id_type_features),
            labels=tuple(parts.labels),
            is_training=is_training,
            meta=parts.meta,
            batch_id=parts.batch_id,
        )

    @abstractmethod
    def note_wait(self, seconds: float) -> None:
        """Learn how long a ``DataLoader`` made its caller wait; it calls this."""

    def prepare_features(
        self, batch: PersiaTrainingBatch
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor] | None]:
        """Make tensors of a batch, on the context's device.

        To train a model of one's own on them is right with one trainer; with several,
        only :meth:`forward` averages the dense gradients.

        Returns:
            Dense features; embeddings, float32, a tensor a slot in the order of the
            embedding config, which want a gradient in training; labels, or None, as in
            inference. A pooled slot is ``(B, dim)``. A raw one is
            ``(B, sample_fixed_size, dim + 1)``: a vector for each id of a sample, and
            a last channel that is 1 where there is an id.
        """
        non_id_tensors, labels = self._dense_tensors(batch)
        return non_id_tensors, self._source.embed(batch.pull), labels

    def forward(
        self, batch: PersiaTrainingBatch
    ) -> tuple[Any, list[torch.Tensor] | None]:
        """Run the model on a batch.

        Returns:
            What the model returns, a tensor as a rule; and the labels, or None.

        Raises:
            ConfigError: this context has no model.
        """
        if self.model is None:
            raise ConfigError(
                "A context must have a model to run. Received: model=None. Give it "
                "one, or call prepare_features() and run a model of your own."
            )
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
        device = self._source.device
        if device_id is not None and device_id != device.index:
            raise ConfigError(
                f"device_id must be that of the context, {device.index}. "
                f"Received: {device_id}."
            )
        return PersiaTrainingBatch(
            pull=self._source.start_pull(persia_batch, is_training=False),
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

    def _dense_tensors(
        self, batch: PersiaTrainingBatch
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        device = self._source.device
        non_id = [dense_tensor(f.data, device) for f in batch.non_id_type_features]
        if self.preprocess_mode is PreprocessMode.INFERENCE:
            return non_id, None
        labels = [dense_tensor(label.data, device) for label in batch.labels]
        return non_id, labels or None


def cuda_device(device_id: int) -> torch.device:
    """Return a CUDA device of this machine.

    Raises:
        ConfigError: there is no such device.
    """
    if not torch.cuda.is_available() or not 0 <= device_id < torch.cuda.device_count():
        raise ConfigError(
            f"device_id must be a CUDA device of this machine, in "
            f"[0, {torch.cuda.device_count()}). Received: {device_id}."
        )
    return torch.device("cuda", device_id)
