"""Read what torch's distributed checkpoints hold, without running anything they name.

torch lists the tensors of a checkpoint in a pickle, which may name any function.
"""

import io
import os
import pickle  # noqa: TID251  # torch has written one
import pickletools
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.filesystem import FileSystemReader

from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.errors import CheckpointError

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
