"""Checkpoints as PERSIA's contexts make them: few plain files beside the servers' rows.

    dst_dir/
      checkpoint-00000001/           each dump takes the next number
        dense.pt  opt.pt  ...        whole files, written by rank 0 first
        shard-00000-of-00002.rows    one a server
        manifest.json                written last: the checkpoint is complete

The plain files are what ``torch.save`` and ``torch.jit.save`` write. One dump is under
way at most, and one load; what becomes of them is told to whoever waits, or to the next
call.
"""

import contextlib
import io
import os
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from persia_torchrec import env
from persia_torchrec.checkpoint import manifest
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.series import find_checkpoint
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.errors import CheckpointError, ConfigError, PersiaError
from persia_torchrec.training.checkpoint import at_first, everywhere

if TYPE_CHECKING:
    from persia_torchrec.client.checkpoints import SavedCheckpoint, Task

Files = Mapping[str, bytes]
Target = nn.Module | torch.optim.Optimizer

_CLOSE_S = 10.0


class ContextCheckpoints:
    """Dumps and loads of one trainer's contexts; its main thread calls them.

    Args:
        client: of the servers; only rank 0 uses it.
        flush: waits until every update of this trainer is applied.
    """

    def __init__(self, client: EmbeddingClient, flush: Callable[[], None]) -> None:
        self._client = client
        self._flush = flush
        self._dump: Task[SavedCheckpoint] | None = None
        self._load: Task[SavedCheckpoint] | None = None
        self._is_loading = False

    def dump(
        self, path: str | os.PathLike[str], files: Files, *, blocking: bool
    ) -> None:
        """Write a checkpoint; ranks other than 0 wait for their updates only.

        Args:
            path: of the folder that gets the checkpoint's folder.
            files: bytes by name, written before the rows.
            blocking: wait for the end; otherwise for the files only.
        """
        _check_names(files)
        self.wait_for_dump()
        self._flush()
        if not is_first():
            return

        def add_files(folder: Folder) -> None:
            for name, data in files.items():
                folder.write(name, data)

        self._dump = self._client.checkpoints.start_dump(path, add_files=add_files)
        if blocking:
            self.wait_for_dump()

    def wait_for_dump(self) -> None:
        """Wait for the dump under way, if there is one; raise what made it fail."""
        task, self._dump = self._dump, None
        if task is not None:
            task.wait()

    def find(self, path: str | os.PathLike[str]) -> Folder:
        """Return the complete checkpoint that rank 0 finds; all ranks call this."""
        return Folder(at_first(lambda: find_checkpoint(path).url))

    def load(self, folder: Folder, *, blocking: bool) -> None:
        """Load the servers' rows; all ranks call this."""
        self.wait_for_dump()
        self.wait_for_load()
        everywhere(self._flush)
        self._is_loading = True
        at_first(lambda: self._start_load(folder))
        if blocking:
            self.wait_for_load()

    def wait_for_load(self) -> None:
        """Wait for the load under way, if there is one; all ranks call this."""
        if not self._is_loading:
            return
        self._is_loading = False
        at_first(self._end_load)

    def close(self) -> None:
        """Give up what is under way. May be called twice."""
        for task in (self._dump, self._load):
            if task is not None:
                task.cancel()
                with contextlib.suppress(PersiaError, TimeoutError):
                    task.wait(_CLOSE_S)
        self._dump = self._load = None

    def _start_load(self, folder: Folder) -> None:
        self._load = self._client.checkpoints.start_load(folder.url)

    def _end_load(self) -> None:
        task, self._load = self._load, None
        if task is not None:
            task.wait()


def is_first() -> bool:
    """Return whether this trainer writes the files: rank 0, or the only one."""
    return (dist.get_rank() if dist.is_initialized() else env.get_rank()) == 0


def state_bytes(state: object) -> bytes:
    """Return a state dictionary as ``torch.save`` writes it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def script_bytes(model: nn.Module) -> bytes:
    """Return a model as TorchScript, for ``torch.jit.load``.

    Raises:
        ConfigError: ``torch.jit.script`` does not take the model.
    """
    buffer = io.BytesIO()
    try:
        with warnings.catch_warnings():
            # torch deprecates TorchScript; PERSIA's file is TorchScript all the same.
            warnings.filterwarnings("ignore", ".*torch.jit.*", DeprecationWarning)
            torch.jit.save(torch.jit.script(model), buffer)
    except Exception as exc:  # the compiler raises a class for each kind of mistake
        raise ConfigError(
            "The dense model must be one that torch.jit.script takes; annotate the "
            "lists of tensors that its forward gets. Received: "
            f"{type(model).__name__} ({exc})."
        ) from exc
    return buffer.getvalue()


def read_state(folder: Folder, name: str, map_location: object = None) -> Any:
    """Return what :func:`state_bytes` wrote to a file.

    Args:
        folder: of the file.
        name: of the file.
        map_location: as ``torch.load`` takes it; None is the CPU, from where
            ``load_state_dict`` copies to the device of model and optimizer.

    Raises:
        CheckpointError: there is no such file, or it is damaged, or holds more than
            tensors, numbers and text.
    """
    if folder.size_of(name) is None:
        raise CheckpointError(
            f"{folder.path_of(name)} must be there. Received: {folder.url} with "
            f"{sorted(folder.names())[:8] or 'nothing'}. A dump of the embeddings "
            "alone is for load_embedding."
        )
    data = io.BytesIO(folder.read(name))
    where: Any = "cpu" if map_location is None else map_location
    try:
        return torch.load(data, map_location=where, weights_only=True)
    except Exception as exc:  # what a damaged file makes the reader raise has no list
        raise CheckpointError(
            f"{folder.path_of(name)} must be a file of torch.save. Received: {exc}."
        ) from exc


def apply_state(target: Target, state: Any, path: str) -> None:
    """Load a state dictionary into a model or an optimizer.

    Raises:
        CheckpointError: it is of another model or optimizer.
    """
    try:
        target.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CheckpointError(
            f"{path} must fit the {type(target).__name__}. Received: {exc}."
        ) from exc


def _check_names(files: Files) -> None:
    for name in files:
        if not name or "/" in name or name == manifest.NAME or name.endswith(".rows"):
            raise ConfigError(
                f"A file's name must be a plain one, neither {manifest.NAME} nor "
                f"*.rows. Received: {name!r}."
            )
