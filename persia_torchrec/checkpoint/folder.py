"""A folder on this machine, or behind a URL that fsspec knows.

A file is there as a whole or not at all, under its own name. On a file system it is
written under another name, brought to the disk, and then renamed; an object store makes
an object visible when all of it has come.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import fsspec
from fsspec.implementations.local import LocalFileSystem

from persia_torchrec.errors import CheckpointError, ConfigError

_UNFINISHED = ".unfinished"


class Folder:
    """Files in one folder. Any thread may call any method.

    Args:
        path: of a local folder, or a URL as ``"s3://bucket/run-7"``.

    Attributes:
        url: the folder's path as others can use it: absolute, or with its protocol.

    Raises:
        ConfigError: fsspec does not know the protocol, or lacks what it needs.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self._fs, self._path = fsspec.core.url_to_fs(os.fspath(path))
        except (ValueError, ImportError) as exc:
            raise ConfigError(
                "A checkpoint's path must be a local path or a URL that fsspec knows. "
                f"Received: {os.fspath(path)!r} ({exc})."
            ) from exc
        self._is_local = isinstance(self._fs, LocalFileSystem)
        self.url = self._path
        if not self._is_local:
            self.url = str(self._fs.unstrip_protocol(self._path))

    def child(self, name: str) -> "Folder":
        """Return a folder in this one."""
        return Folder(f"{self.url.rstrip('/')}/{name}")

    def make(self) -> bool:
        """Make the folder; return whether it was not there before."""
        with _errors("make", self.url):
            try:
                self._fs.makedirs(self._path, exist_ok=False)
            except FileExistsError:
                return False
            return True

    def exists(self) -> bool:
        """Return whether there is such a folder; object stores have none if empty."""
        return not self._is_local or Path(self._path).is_dir()

    def names(self) -> list[str]:
        """Return the names of the files and folders in this one; none if missing."""
        self._fs.invalidate_cache()
        with _errors("list", self.url):
            try:
                entries = self._fs.ls(self._path, detail=False)
            except FileNotFoundError:
                return []
        return [entry.rstrip("/").rpartition("/")[2] for entry in entries]

    def size_of(self, name: str) -> int | None:
        """Return the bytes of a file; None if it is missing."""
        self._fs.invalidate_cache()
        with _errors("look at", self.path_of(name)):
            try:
                return int(self._fs.size(self._within(name)))
            except FileNotFoundError:
                return None

    def read(self, name: str) -> bytes:
        """Return a file's bytes.

        Raises:
            CheckpointError: it cannot be read.
        """
        with self.opened(name) as file:
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Write a file, as a whole or not at all.

        Raises:
            CheckpointError: it cannot be written.
        """
        with self.created(name) as file:
            file.write(data)

    def remove(self, name: str) -> None:
        """Delete a file; one that is not there does not matter."""
        with (
            _errors("delete", self.path_of(name)),
            contextlib.suppress(FileNotFoundError),
        ):
            self._fs.rm_file(self._within(name))

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file to read it from the front."""
        with (
            _errors("read", self.path_of(name)),
            self._fs.open(self._within(name), "rb") as file,
        ):
            yield file

    @contextlib.contextmanager
    def created(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file to write it; at the end of the block it has its name.

        If the block fails, there is no file of this name, or the one of before.
        """
        path = self._within(name)
        with _errors("write", self.path_of(name)):
            if not self._is_local:
                yield from self._created_elsewhere(path)
                return
            unfinished = Path(f"{path}{_UNFINISHED}")
            try:
                with unfinished.open("wb", buffering=0) as raw:
                    yield raw
                    os.fsync(raw.fileno())
                unfinished.replace(path)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise
            _sync_folder(Path(self._path))

    def _created_elsewhere(self, path: str) -> Iterator[IO[bytes]]:
        file = self._fs.open(path, "wb")
        try:
            yield file
        except BaseException:
            # To close it would complete it. What cannot be given up is deleted.
            with contextlib.suppress(Exception):
                file.discard()
                file.closed = True
            with contextlib.suppress(Exception):
                self._fs.rm_file(path)
            raise
        file.close()

    def path_of(self, name: str) -> str:
        """Return the path of a file, for messages."""
        return f"{self.url.rstrip('/')}/{name}"

    def _within(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}"


@contextlib.contextmanager
def _errors(verb: str, path: str) -> Iterator[None]:
    """Name the file in errors of the file system."""
    try:
        yield
    except OSError as exc:
        raise CheckpointError(f"Could not {verb} {path}: {exc}.") from exc


def _sync_folder(path: Path) -> None:
    """Bring a new name to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
