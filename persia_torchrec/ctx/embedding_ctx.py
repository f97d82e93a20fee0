"""What training and evaluation share: the connections of a trainer."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.ctx.lookup_ctx import LookupCtx, PreprocessMode
from persia_torchrec.data.loader import enter_context, entered_context, leave_context
from persia_torchrec.embedding import EmbeddingConfig
from persia_torchrec.errors import ConfigError
from persia_torchrec.training.checkpoint import everywhere
from persia_torchrec.training.context_checkpoints import (
    apply_state,
    is_first,
    read_state,
    script_bytes,
    state_bytes,
)
from persia_torchrec.training.engine import Engine


class EmbeddingCtx(LookupCtx):
    """Look up embeddings and run the dense model on them.

    Enter it within a ``TrainCtx``, whose connections it uses. Entering it waits until
    the updates that this trainer has sent so far are applied, so that what has been
    trained is what is evaluated; it changes nothing on the servers.

    Args:
        preprocess_mode: what to make of batches; ``EVAL``, or ``INFERENCE``.
        model: the dense model; that of the ``TrainCtx`` by default.

    Raises:
        ConfigError: no ``TrainCtx`` is entered.
    """

    model: nn.Module

    def __init__(
        self, preprocess_mode: PreprocessMode, model: nn.Module | None = None
    ) -> None:
        self.preprocess_mode = preprocess_mode
        self._engine = self._find_engine()
        self.model = model if model is not None else self._model_of_outer()

    @property
    def _source(self) -> Engine:
        return self._engine

    def note_wait(self, seconds: float) -> None:
        """Learn how long a ``DataLoader`` made its caller wait; it calls this."""
        self._engine.note_wait(seconds)

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

    def dump_checkpoint(
        self,
        dst_dir: str,
        dense_filename: str = "dense.pt",
        jit_dense_filename: str = "jit_dense.pt",
        blocking: bool = True,
        with_jit_model: bool = False,
    ) -> None:
        """Write a checkpoint of the dense model and the embeddings.

        It takes a new folder in ``dst_dir``, and touches nothing else there::

            dst_dir/checkpoint-00000001/
              dense.pt                     the model's state_dict, by torch.save
              jit_dense.pt                 with_jit_model: for torch.jit.load
              shard-00000-of-00002.rows    one a server
              manifest.json                written last: the checkpoint is complete

        :meth:`load_checkpoint` takes ``dst_dir``, for its latest complete checkpoint,
        or the path of one of them.

        Every rank may call it, or rank 0 alone, which writes; the others only wait for
        their own updates. All updates that this trainer has sent are in it. With
        several trainers under way, those that others have sent last may not be, up to
        the bound on staleness.

        Args:
            dst_dir: a folder that trainers and servers share, made if it is missing,
                or a URL that fsspec knows.
            dense_filename: of the model's state.
            jit_dense_filename: of the model as TorchScript.
            blocking: False returns when the dense files are written; the servers write
                their rows while training goes on, a row as it is at some moment until
                then. :meth:`wait_for_dump_embedding` says what became of it.
            with_jit_model: write the model as TorchScript too.

        Raises:
            CheckpointError: it cannot be written, or a dump of before failed.
            ConfigError: TorchScript does not take the model, or the path or a name is
                no good.
            ServerError: a server failed.
        """
        files = self._dense_files(
            dense_filename, jit_dense_filename if with_jit_model else None
        )
        self._engine.checkpoints.dump(dst_dir, files, blocking=blocking)

    def load_checkpoint(
        self,
        src_dir: str,
        map_location: str | None = None,
        dense_filename: str = "dense.pt",
        blocking: bool = True,
    ) -> None:
        """Load the dense model and the embeddings; all ranks call it together.

        What model and servers hold is replaced. The servers may be more or fewer than
        those that wrote the checkpoint.

        Args:
            src_dir: what :meth:`dump_checkpoint` was given, for the latest complete
                checkpoint in it, or the path of one.
            map_location: where the file is read to, as ``torch.load`` takes it; the CPU
                by default. The model stays on its device.
            dense_filename: of the model's state.
            blocking: False returns when the model is loaded; the servers refuse lookups
                until :meth:`wait_for_load_embedding`.

        Raises:
            CheckpointError: there is no complete checkpoint, or it does not fit model
                or tables; with ``blocking`` and unless the model's own file is at
                fault, nothing has changed.
        """
        self._load(src_dir, {dense_filename: self.model}, map_location, blocking)

    def dump_embedding(self, dst_dir: str, blocking: bool = True) -> None:
        """Write a checkpoint of the embeddings alone: :meth:`dump_checkpoint`."""
        self._engine.checkpoints.dump(dst_dir, {}, blocking=blocking)

    def load_embedding(self, src_dir: str, blocking: bool = True) -> None:
        """Load the embeddings alone: :meth:`load_checkpoint`."""
        self._load(src_dir, {}, None, blocking)

    def wait_for_dump_embedding(self) -> None:
        """Wait until no dump is under way.

        Raises:
            PersiaError: the last one failed; it is told once.
        """
        self._engine.checkpoints.wait_for_dump()

    def wait_for_load_embedding(self) -> None:
        """Wait until no load is under way; all ranks call it together.

        Raises:
            CheckpointError: the last one failed; it is told once.
        """
        self._engine.checkpoints.wait_for_load()

    def dump_torch_state_dict(
        self,
        torch_instance: nn.Module | torch.optim.Optimizer,
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
        torch_instance: nn.Module | torch.optim.Optimizer,
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

    def _dense_files(self, dense: str, jit: str | None) -> dict[str, bytes]:
        """Return the model's files by name; none where another rank writes them."""
        if not is_first():
            return {}
        files = {dense: state_bytes(self.model.state_dict())}
        if jit is not None:
            files[jit] = script_bytes(self.model)
        return files

    def _load(
        self,
        src_dir: str,
        targets: Mapping[str, nn.Module | torch.optim.Optimizer],
        map_location: str | None,
        blocking: bool,
    ) -> Folder:
        """Load the rows, and each file into what is given for it; return where from."""
        folder = self._engine.checkpoints.find(src_dir)
        states: dict[str, Any] = {}

        def read() -> None:
            for name in targets:
                states[name] = read_state(folder, name, map_location)

        def apply() -> None:
            for name, target in targets.items():
                apply_state(target, states[name], folder.path_of(name))

        everywhere(read)
        self._engine.checkpoints.load(folder, blocking=blocking)
        everywhere(apply)
        return folder

    def __enter__(self) -> Self:
        """Enter the context.

        Raises:
            PersiaError: an update before an evaluation failed.
        """
        if self.preprocess_mode is not PreprocessMode.TRAIN:
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


def eval_ctx(model: nn.Module | None = None) -> EmbeddingCtx:
    """Return a context for evaluation; see :class:`EmbeddingCtx`."""
    return EmbeddingCtx(PreprocessMode.EVAL, model)
