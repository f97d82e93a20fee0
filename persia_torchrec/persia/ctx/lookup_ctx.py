"""The contexts that look up: tensors of a batch, the model on embeddings, state files.

Unlike the base, and ``DataCtx``, this needs torch and TorchRec.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from persia_torchrec.checkpoint import catalog
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.signature import EXTRA_FILE, ModelSignature
from persia_torchrec.device.transfer import Staged, Staging, dense_tensor
from persia_torchrec.errors import ConfigError
from persia_torchrec.persia import kjt, loader
from persia_torchrec.persia.batch import PersiaBatch, ReferencedBatch
from persia_torchrec.persia.ctx.base_ctx import BaseCtx, PreprocessMode
from persia_torchrec.persia.engine import Engine
from persia_torchrec.persia.slot_tensors import Slots, run_dense
from persia_torchrec.persia.slots_reader import SlotsReader
from persia_torchrec.training import checkpoint

logger = logging.getLogger(__name__)

Tensors = list[torch.Tensor]
_AT_ONCE = loader.LookupSettings(1, 1, None)
B = TypeVar("B", bound=PersiaBatch | ReferencedBatch)


class LookupCtx(BaseCtx):
    """Look up embeddings and run the dense model, if there is one, on them."""

    preprocess_mode: PreprocessMode
    model: nn.Module | None
    embeddings: Engine | SlotsReader
    _staging: Staging | None = None
    _signature: ModelSignature | None = None

    @property
    def _device(self) -> torch.device:
        """The device of tensors."""
        if self.device_id is None:
            return torch.device("cpu")
        return torch.device("cuda", self.device_id)

    def start_lookup(
        self,
        batch: PersiaBatch | ReferencedBatch,
        settings: loader.LookupSettings | None = None,
    ) -> loader.PersiaTrainingBatch:
        """Begin to look up a batch: to evaluate, unless a loader gives its settings.

        Nothing else may have its arrays; the tensors on the CPU share them.
        """
        is_training = False
        if settings is not None:
            num_workers = min(settings.num_workers, self.threadpool_worker_size)
            settings = settings._replace(num_workers=num_workers)
            is_training = (
                isinstance(self.embeddings, Engine)
                and batch.requires_grad
                and self.preprocess_mode is PreprocessMode.TRAIN
            )
        pull = self.embeddings.start_pull(
            batch, is_training=is_training, settings=settings
        )
        return loader.PersiaTrainingBatch(
            pull=pull,
            non_id_type_features=batch.non_id_type_features,
            labels=batch.labels,
            is_training=is_training,
            meta=batch.meta,
            batch_id=batch.batch_id,
            loader=batch.origin.loader if isinstance(batch, ReferencedBatch) else None,
            staged=self._stage(batch),
        )

    @property
    def takes_ids(self) -> bool:
        """Whether data loaders send the ids to this process itself."""
        return isinstance(self.embeddings, Engine) and self.embeddings.takes_ids

    trained: Mapping[int, int] = {}
    """By data loader, its last batch that was trained before a restart."""

    def skip(self, batches: Iterator[B], dataset: object) -> Iterator[B]:
        """Leave out batches of a ``DataLoader`` that were trained before a restart."""
        return batches

    def count(
        self, batches: Iterator[loader.PersiaTrainingBatch]
    ) -> Iterator[loader.PersiaTrainingBatch]:
        """Learn which batches a ``DataLoader`` hands out."""
        return batches

    def note_wait(self, seconds: float) -> None:
        """Learn how long a ``DataLoader`` made its caller wait for a batch."""
        if isinstance(self.embeddings, Engine):  # only trainers have metrics
            self.embeddings.loader_wait_s = seconds

    def prepare_features(
        self, persia_training_batch: loader.PersiaTrainingBatch
    ) -> tuple[Tensors, Tensors, Tensors | None]:
        """Make tensors of a batch, on the context's device.

        To train a model of one's own on them is right with one trainer; with several,
        only :meth:`forward` averages the dense gradients.

        Returns:
            Dense features; embeddings, float32, a tensor per slot of the batch, in
            the order of its ``id_type_features``, which want a gradient if the mode is
            ``TRAIN``; labels, or None, as in inference. A pooled slot is ``(B, dim)``.
            A raw one is ``(B, sample_fixed_size, dim + 1)``: a vector for each id of a
            sample, and a last channel that is 1 where there is an id.
        """
        batch = self._looked_up(persia_training_batch)
        non_id_tensors, labels = self._dense_tensors(batch)
        return non_id_tensors, list(self._embed(batch).values()), labels

    def forward(self, batch: loader.PersiaTrainingBatch) -> tuple[Any, Tensors | None]:
        """Run the model on a batch; return its output and the labels, or None."""
        model, batch = self._require_model(), self._looked_up(batch)
        non_id_tensors, labels = self._dense_tensors(batch)
        if self.takes_ids and isinstance(self.embeddings, Engine):
            return self.embeddings.evaluate(model, non_id_tensors, batch.pull), labels
        slots = self._embed(batch)
        output = run_dense(model, non_id_tensors, slots)
        self._learn_signature([*slots], batch, output)
        return output, labels

    def _looked_up(self, batch: Any) -> loader.PersiaTrainingBatch:
        """Return a batch of a ``DataLoader``; any other is looked up from now on."""
        if isinstance(batch, loader.PersiaTrainingBatch):
            return batch
        persia_batch = kjt.to_persia(batch)
        if isinstance(persia_batch, PersiaBatch):
            persia_batch = self._copied(persia_batch)
        return self.start_lookup(persia_batch, _AT_ONCE)

    def _copied(self, batch: PersiaBatch) -> PersiaBatch:
        """Return a batch of the user's with memory of its own.

        What goes to a GPU is copied when it is staged.
        """
        is_staged = self.embeddings.device.type in Staging.DEVICES
        return batch.copy(copies_dense=not is_staged)

    def get_embedding_from_data(
        self, persia_batch: PersiaBatch, device_id: int | None = None
    ) -> loader.PersiaTrainingBatch:
        """Begin to evaluate a batch; ``device_id`` may only be the context's own."""
        device = self.embeddings.device
        if device_id is not None and device_id != device.index:
            raise ConfigError(
                f"device_id must be that of the context, {device.index}. "
                f"Received: {device_id}."
            )
        return self.start_lookup(self._copied(persia_batch))

    def get_embedding_from_bytes(
        self, data: bytes, device_id: int | None = None
    ) -> loader.PersiaTrainingBatch:
        """As :meth:`get_embedding_from_data`, of what ``PersiaBatch.to_bytes`` gave."""
        return self.get_embedding_from_data(PersiaBatch.from_bytes(data), device_id)

    def dump_torch_state_dict(
        self,
        torch_instance: checkpoint.Target,
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
        """
        if not checkpoint.is_first():
            return
        if is_jit:
            data = checkpoint.script_bytes(torch_instance, self._extra_files())
        else:
            data = checkpoint.state_bytes(torch_instance.state_dict())
        folder = Folder(dst_dir)
        folder.make()
        folder.write(file_name, data)
        catalog.note_replaced(folder, file_name)

    def load_torch_state_dict(
        self,
        torch_instance: checkpoint.Target,
        src_dir: str,
        map_location: str | None = None,
    ) -> None:
        """Load the state of a model or an optimizer; the instance stays on its device.

        ``src_dir`` is the file itself, as PERSIA has it: folder and name.
        ``map_location`` is that of ``torch.load``; the CPU by default.
        """
        resumed = self.model, getattr(self, "dense_optimizer", None)
        if torch_instance in resumed and self._is_skipped("load_torch_state_dict()"):
            return
        path, _, name = src_dir.rpartition("/")
        if not name:
            raise ConfigError(
                f"src_dir must be the path of a file. Received: {src_dir!r}."
            )
        state = checkpoint.read_state(Folder(path or "."), name, map_location)
        checkpoint.apply_state(torch_instance, state, src_dir)

    def _extra_files(self) -> dict[str, bytes]:
        """Return what a TorchScript file of the model has beside the model."""
        if self._signature is None:
            return {}
        return {EXTRA_FILE: self._signature.encode()}

    def _is_skipped(self, call: str) -> bool:
        """Return whether a call would undo what training resumes from; log it then."""
        engine = self.embeddings
        path = engine.resumed_from if isinstance(engine, Engine) else None
        if path is not None:
            logger.info("%s is skipped: training resumes from %s", call, path)
        return path is not None

    def _learn_signature(
        self, slots: Sequence[str], batch: loader.PersiaTrainingBatch, output: object
    ) -> None:
        """Take down the model's inputs, of the first batch that it has run on."""
        if self._signature is None:
            dense = batch.non_id_type_features
            self._signature = ModelSignature.of(slots, dense, output)

    def _require_model(self) -> nn.Module:
        if self.model is None:
            raise ConfigError(
                "A context must have a model for this. Received: model=None. Give it "
                "one, or call prepare_features() and run a model of your own."
            )
        return self.model

    def _embed(self, batch: loader.PersiaTrainingBatch) -> Slots:
        """Wait for the embeddings of a batch; in training they want a gradient."""
        embeddings = self.embeddings.embed(batch.pull)
        if self.preprocess_mode is PreprocessMode.TRAIN:
            for tensor in embeddings.values():
                tensor.requires_grad_()
        return embeddings

    def _stage(self, batch: PersiaBatch | ReferencedBatch) -> Staged | None:
        """Begin to copy what has no ids to a GPU, if there is one."""
        device = self.embeddings.device
        if device.type not in Staging.DEVICES:
            return None
        if self._staging is None:
            self._staging = Staging(device)
        arrays = [feature.data for feature in batch.non_id_type_features]
        if self.preprocess_mode is not PreprocessMode.INFERENCE:
            arrays += [label.data for label in batch.labels]
        return self._staging.start(arrays)

    def _dense_tensors(
        self, batch: loader.PersiaTrainingBatch
    ) -> tuple[Tensors, Tensors | None]:
        device, num = self.embeddings.device, len(batch.non_id_type_features)
        if batch.staged is not None:
            tensors = list(batch.staged.wait())
            return tensors[:num], tensors[num:] or None
        non_id = [dense_tensor(f.data, device) for f in batch.non_id_type_features]
        if self.preprocess_mode is PreprocessMode.INFERENCE:
            return non_id, None
        labels = [dense_tensor(label.data, device) for label in batch.labels]
        return non_id, labels or None
