"""What contexts of a model share: a batch's embeddings, and the model on them."""

import enum
from abc import abstractmethod
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.ctx.base_ctx import BaseCtx
from persia_torchrec.data.dataflow import ReferencedBatch
from persia_torchrec.data.dense import dense_tensor
from persia_torchrec.data.loader import LookupSettings, PersiaTrainingBatch
from persia_torchrec.embedding.data import PersiaBatch
from persia_torchrec.errors import ConfigError
from persia_torchrec.training.checkpoint import (
    Target,
    apply_state,
    is_first,
    read_state,
    script_bytes,
    state_bytes,
)


class PreprocessMode(enum.Enum):
    """What a context makes of a batch."""

    TRAIN = 1
    """Embeddings want a gradient. Outside a ``TrainCtx`` the servers are only read,
    and the gradient stays with the tensors: only ``TrainCtx.backward`` sends any."""

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
        """Wait for a batch's embeddings, a tensor a slot, in the order of the batch."""


class LookupCtx(BaseCtx):
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

    @property
    def _can_train(self) -> bool:
        """Whether gradients of its batches can get to the servers."""
        return False

    def start_lookup(
        self, batch: PersiaBatch | ReferencedBatch, settings: LookupSettings
    ) -> PersiaTrainingBatch:
        """Begin to look up a batch; a ``DataLoader`` calls this.

        Args:
            batch: with its ids, or with the reference to where they wait.
            settings: of the loader; this context may allow fewer lookups at once.
        """
        num_workers = min(settings.num_workers, self.threadpool_worker_size)
        settings = replace(settings, num_workers=num_workers)
        parts = batch.rest if isinstance(batch, ReferencedBatch) else batch
        is_training = (
            self._can_train
            and parts.requires_grad
            and self.preprocess_mode is PreprocessMode.TRAIN
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
            Dense features; embeddings, float32, a tensor a slot of the batch, in the
            order of its ``id_type_features``, which want a gradient in training;
            labels, or None, as in inference. A pooled slot is ``(B, dim)``. A raw one
            is ``(B, sample_fixed_size, dim + 1)``: a vector for each id of a sample,
            and a last channel that is 1 where there is an id.
        """
        non_id_tensors, labels = self._dense_tensors(batch)
        embeddings = self._source.embed(batch.pull)
        if self.preprocess_mode is PreprocessMode.TRAIN and not self._can_train:
            embeddings = [e.requires_grad_() for e in embeddings]
        return non_id_tensors, embeddings, labels

    def forward(
        self, batch: PersiaTrainingBatch
    ) -> tuple[Any, list[torch.Tensor] | None]:
        """Run the model on a batch.

        Returns:
            What the model returns, a tensor as a rule; and the labels, or None.

        Raises:
            ConfigError: this context has no model.
        """
        model = self._require_model()
        non_id_tensors, embeddings, labels = self.prepare_features(batch)
        return model(non_id_tensors, embeddings), labels

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

    def dump_torch_state_dict(
        self,
        torch_instance: Target,
        dst_dir: str,
        file_name: str,
        is_jit: bool = False,
    ) -> None:
        """Write the state of a model or an optimizer to a file; rank 0 does.

        A file of that name is replaced when the new one is complete.

        Args:
            torch_instance: whose ``state_dict`` is written.
            dst_dir: folder, made if it is missing, or a URL that fsspec knows.
            file_name: in that folder.
            is_jit: write a model as TorchScript instead.

        Raises:
            CheckpointError: it cannot be written.
            ConfigError: TorchScript does not take the model.
        """
        if not is_first():
            return
        if is_jit:
            if not isinstance(torch_instance, nn.Module):
                raise ConfigError(
                    f"is_jit is for models. Received: {type(torch_instance).__name__}."
                )
            data = script_bytes(torch_instance)
        else:
            data = state_bytes(torch_instance.state_dict())
        folder = Folder(dst_dir)
        folder.make()
        folder.write(file_name, data)

    def load_torch_state_dict(
        self,
        torch_instance: Target,
        src_dir: str,
        map_location: str | None = None,
    ) -> None:
        """Load the state of a model or an optimizer from a file.

        Args:
            torch_instance: what is loaded into; it stays on its device.
            src_dir: of the file itself, as PERSIA has it: folder and name.
            map_location: as ``torch.load`` takes it; the CPU by default.

        Raises:
            CheckpointError: there is no such file, or it does not fit.
        """
        path, _, name = src_dir.rpartition("/")
        state = read_state(Folder(path or "."), name, map_location)
        apply_state(torch_instance, state, src_dir)

    def _require_model(self) -> nn.Module:
        if self.model is None:
            raise ConfigError(
                "A context must have a model for this. Received: model=None. Give it "
                "one, or call prepare_features() and run a model of your own."
            )
        return self.model

    def _dense_tensors(
        self, batch: PersiaTrainingBatch
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        device = self._source.device
        non_id = [dense_tensor(f.data, device) for f in batch.non_id_type_features]
        if self.preprocess_mode is PreprocessMode.INFERENCE:
            return non_id, None
        labels = [dense_tensor(label.data, device) for label in batch.labels]
        return non_id, labels or None
