"""Planners, readers and writers of torch's checkpoints, without tables on servers.

torch lists the tensors of a checkpoint in a pickle, which may name any function: it is
read without running anything that it names.
"""

import io
import logging
import os
import pickle  # noqa: TID251  # torch has written one
import pickletools
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import default_planner, metadata
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.errors import CheckpointError
from persia_torchrec.job.failures import with_causes
from persia_torchrec.sharding.state_dict import is_state_entry

logger = logging.getLogger(__name__)

_WHOLE = torch.Tensor, nn.Parameter  # others may be a part, and have their own checks


class DenseOnly:
    """Leaves out the entries of tables on the servers, which save their own rows."""

    state_dict: dict[str, Any]
    mappings: dict[str, Any]

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Plan without the entries of tables."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)  # type: ignore[misc]
        state = self.state_dict.items()
        self.state_dict = {k: v for k, v in state if not is_state_entry(v)}
        self.mappings = {key: self.mappings[key] for key in self.state_dict}


class SavePlanner(DenseOnly, default_planner.DefaultSavePlanner):
    """Saves the dense half."""


class LoadPlanner(DenseOnly, default_planner.DefaultLoadPlanner):
    """Loads what the checkpoint has in the same shape; other things are an error.

    With ``resets`` they stay as they are, and are named.
    """

    resets = False
    _leaves_out = False

    def create_local_plan(self) -> Any:
        """Plan what is loaded; torch would look for a key that is left out."""
        if not self._leaves_out or self.metadata is None:
            return super().create_local_plan()
        return default_planner.create_default_local_load_plan(
            self.state_dict, self.metadata
        )

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Leave out what cannot be loaded, or raise an error that names all of it."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        saved = storage_meta.state_dict_metadata
        changed = {}
        for key, value in self.state_dict.items():
            received = getattr(saved.get(key), "size", None)
            if key not in saved:
                changed[key] = "is new"
            elif type(value) in _WHOLE and value.shape != received:
                size = "no tensor" if received is None else list(received)
                changed[key] = f"has shape {list(value.shape)}, and had {size}"
        self._leaves_out = bool(changed)
        if not changed:
            return
        told = "; ".join(f"{key} {what}" for key, what in sorted(changed.items()))
        if not self.resets:
            raise CheckpointError(
                "The model's parameters must be those of the checkpoint. Received: "
                f'{told}. With on_change="reset state" of load_checkpoint, recoverable '
                "or TrainCtx, these begin again."
            )
        if is_coordinator:
            logger.warning("dense parameters, reset to their initial values: %s", told)
        state = self.state_dict.items()
        self.state_dict = {k: v for k, v in state if k not in changed}
        self.mappings = {key: self.mappings[key] for key in self.state_dict}

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Read what is no tensor, without running anything that a file names."""
        torch.load(value, weights_only=True)  # torch's own reader runs what it finds
        value.seek(0)
        super().load_bytes(read_item, value)


_TORCHS_LIST = ".metadata"
_METADATA = (
    "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
    "TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING"
)
_OF_A_LIST = {
    *(f"torch.distributed.checkpoint.metadata.{name}" for name in _METADATA.split()),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.Size",
    "torch.serialization._get_layout",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",  # Python 3.13
}


def reader_of(dense: Folder) -> "FileReader | UrlReader":
    """Return what reads the folder of a dense half."""
    return (UrlReader if "://" in dense.url else FileReader)(dense.url)


class _Reader:
    """Reads torch's list of tensors, without running anything that a file names."""

    path: str | os.PathLike[str]
    load_id: str

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        read = _read_list(Folder(os.fspath(self.path)))
        read.storage_meta = read.storage_meta or metadata.StorageMeta()
        read.storage_meta.load_id = self.load_id
        return read


class FileReader(_Reader, FileSystemReader):
    """Reads from a file system of this host."""


class UrlReader(_Reader, FsspecReader):
    """Reads from what fsspec knows."""


def writer_of(dense: Folder) -> "FileWriter | UrlWriter":
    """Return what writes the folder of a dense half."""
    return (UrlWriter if "://" in dense.url else FileWriter)(dense.url)


class _Writer:
    """Raises the error of the disk, which torch hides behind one of its own."""

    def write_data(self, *args: Any) -> Any:
        try:
            return super().write_data(*args)  # type: ignore[misc]
        except RuntimeError as exc:  # as it ends a file that lacks something
            for cause in with_causes(exc):
                if isinstance(cause, OSError):
                    raise cause from None
            raise


class FileWriter(_Writer, FileSystemWriter):
    """Writes to a file system of this host."""


class UrlWriter(_Writer, FsspecWriter):
    """Writes to what fsspec knows."""


class _ListUnpickler(pickle.Unpickler):  # torch has written a pickle
    """Makes what torch's list of tensors consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in _OF_A_LIST:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(
            f"{_TORCHS_LIST} must list tensors. Received: {module}.{name}, which could "
            "be anything. Load a checkpoint that has not been changed."
        )


def _read_list(folder: Folder) -> metadata.Metadata:
    data = folder.read(_TORCHS_LIST)
    try:
        for operation, number, _ in pickletools.genops(data):  # none beyond the end
            if operation.name.endswith("PUT") and int(number or 0) > len(data):
                raise pickle.UnpicklingError(f"an object has the number {number}")
        read = _ListUnpickler(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except Exception as exc:  # what a damaged file makes the reader raise has no list
        raise _damaged(folder, f"{type(exc).__name__}: {exc}") from exc
    if isinstance(read, metadata.Metadata):
        listed = vars(read).get("state_dict_metadata")
        if isinstance(listed, dict) and all(isinstance(name, str) for name in listed):
            return read
    raise _damaged(folder, f"a {type(read).__name__} without names of tensors")


def _damaged(folder: Folder, received: str) -> CheckpointError:
    return CheckpointError(
        f"{folder.file_path(_TORCHS_LIST)} must be torch's list of tensors. Received: "
        f"{received[:200]}. Load another checkpoint."
    )
