"""A folder on this machine, or behind a URL that fsspec knows.

Writes are atomic: a file is written under a temporary name, synced to the disk, and
then renamed, on HDFS too; an object store makes an object visible when its upload ends.
"""

import contextlib
import errno
import fcntl
import io
import mmap
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urlsplit

import fsspec
import msgspec
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.local import LocalFileSystem

from persia_torchrec import env
from persia_torchrec.errors import CheckpointError, ConfigError, without_secrets
from persia_torchrec.parsing.decoding import parse_json

_BUFFER_BYTES = 2**20
_MAX_JSON_BYTES = 2**28
_MAX_SHOWN = 8  # names in an error
PROTOCOLS = frozenset(
    {
        *("file", "local", "s3", "s3a", "gs", "gcs", "abfs", "az", "oss"),
        *("hdfs", "webhdfs", "http", "https"),
    }
)
"""Of URLs that another process, or a file, may name: fsspec has others, as
``reference``, ``zip`` and ``github``, some of which run what they are given."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
_FOR_HDFS = (
    " For hdfs:// install persia-torchrec[hdfs], Java and Hadoop's client, and set "
    "JAVA_HOME, HADOOP_HOME and CLASSPATH."
)


class Folder:
    """Files in a folder, local or at a URL as ``s3://bucket/run-7``.

    Any thread may call any method. ``url`` is absolute, or has the protocol. Of
    ``roots``, where they are given, one must have it, and each file that is read.
    """

    def __init__(
        self, path: str | os.PathLike[str], roots: Sequence[str] | None = None
    ) -> None:
        if "\0" in os.fspath(path):
            raise ConfigError(f"A path must be without NUL. Received: {path!r:.500}.")
        if roots is not None:
            _require_within(os.fspath(path), roots)
        if not path:
            raise ConfigError(
                "A path must name a folder or a URL. Received: ''. The working "
                "directory is '.'."
            )
        self._roots = roots
        try:
            self._fs, root = fsspec.core.url_to_fs(os.fspath(path))
        except (ValueError, ImportError, OSError) as exc:
            if isinstance(exc, OSError) and exc.errno in (errno.EMFILE, errno.ENFILE):
                raise CheckpointError(f"Could not open {path}: {exc}.") from exc
            is_hdfs = os.fspath(path).startswith("hdfs:")
            raise ConfigError(
                "A checkpoint's path must be a local path or a URL that fsspec knows. "
                f"Received: {os.fspath(path)!r} ({exc}).{_FOR_HDFS if is_hdfs else ''}"
            ) from exc
        self._root = root
        self._is_local = isinstance(self._fs, LocalFileSystem)
        # fsspec's own form of a URL would leave out HDFS's host.
        self.url = root if self._is_local else os.fspath(path)

    def child(self, name: str) -> "Folder":
        """Return a folder in this one."""
        return Folder(self.file_path(name), self._roots)

    def file_path(self, name: str) -> str:
        """Return the path, or URL, of a file."""
        return f"{self.url.rstrip('/')}/{name}"

    def make(self) -> bool:
        """Make the folder; return False if it existed before."""
        self._require_no_file()
        with named_errors("make", self.url):
            if self._fs.exists(self._root):  # makedirs of HDFS does not tell
                return False
            try:
                self._fs.makedirs(self._root, exist_ok=False)
            except FileExistsError:
                return False
            return True

    def exists(self) -> bool:
        """Return whether the folder exists; always true on an object store."""
        with named_errors("list", self.url):
            return not self._is_local or Path(self._root).is_dir()

    def names(self) -> list[str]:
        """Return the names of the files and folders in this one; none if missing."""
        self._fs.invalidate_cache()
        self._require_no_file()
        with named_errors("list", self.url):
            try:
                entries = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
        return [entry.rstrip("/").rpartition("/")[2] for entry in entries]

    def described(self) -> str:
        """Return, for an error, what is there: names, or that there is no folder."""
        self._require_no_file()
        if not self.exists():
            return "no such folder"
        names = sorted(self.names())
        more = ["..."] if len(names) > _MAX_SHOWN else []
        shown = ", ".join([*names[:_MAX_SHOWN], *more])
        return f"a folder with {shown}" if names else "an empty folder"

    def numbers(self, pattern: str) -> list[int]:
        """Return the number in each name that fits a pattern, ascending."""
        matches = (re.fullmatch(pattern, name) for name in self.names())
        return sorted(int(match[1]) for match in matches if match)

    def file_size(self, name: str) -> int | None:
        """Return the bytes of a file; None if it is missing."""
        self._fs.invalidate_cache()
        with named_errors("look at", self.file_path(name)):
            try:
                return int(self._fs.size(self._within(name)))
            except FileNotFoundError:
                return None
            except NotADirectoryError:
                self._require_no_file()
                raise

    def writers(self, name: str) -> str:
        """Return why others than this user, or root, may change a file; "": none may.

        Links are resolved. Its folder and the file are looked at, not those above.
        """
        if not self._is_local:
            return "it is behind a URL"
        path = Path(self._within(name)).resolve()
        with named_errors("look at", str(path)):
            return env.writers_of(path.parent) or env.writers_of(path)

    def age_s(self, name: str) -> float:
        """Return the seconds since a file was written, by the file system's clock.

        0 where that is unknown: behind a URL, or without the file.
        """
        if not self._is_local or self.file_size(name) is None:
            return 0.0
        probe = f".probe-{os.getpid()}-{threading.get_ident()}"
        with named_errors("look at", self.file_path(name)):
            try:
                self.read(name)  # NFS asks its server then
                written_s = Path(self._within(name)).stat().st_mtime
                Path(self._within(probe)).touch()
                now_s = Path(self._within(probe)).stat().st_mtime
            except FileNotFoundError:
                return 0.0
            finally:
                Path(self._within(probe)).unlink(missing_ok=True)
        return max(now_s - written_s, 0.0)

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""
        with self.opened(name) as file:
            return file.read()

    def read_json(self, name: str, type_: type) -> Any:
        """Return the JSON value of a file, see ``parse_json``."""

        def error(message: str) -> CheckpointError:
            return CheckpointError(
                f"{message} This version of persia_torchrec has not written the file: "
                "load or follow another folder."
            )

        if (size := self.file_size(name) or 0) > _MAX_JSON_BYTES:
            raise error(
                f"{self.file_path(name)} must have at most {_MAX_JSON_BYTES} "
                f"bytes. Received: {size}."
            )
        return parse_json(self.read(name), type_, self.file_path(name), error)

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically."""
        with self.created(name) as file:
            file.write(data)

    def write_json(self, name: str, value: object) -> None:
        """Write a value as JSON that people can read, its URLs without passwords."""
        text = msgspec.json.format(msgspec.json.encode(value)).decode()
        self.write(name, without_secrets(text).encode())

    def remove(self, name: str) -> None:
        """Delete a file, if it exists."""
        with (
            named_errors("delete", self.file_path(name)),
            contextlib.suppress(FileNotFoundError),
        ):
            self._fs.rm_file(self._within(name))

    def remove_all(self) -> None:
        """Delete the folder and all that is in it, if it exists."""
        with (
            named_errors("delete", self.url),
            contextlib.suppress(FileNotFoundError),
        ):
            self._fs.rm(self._root, recursive=True)

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file to read it from the front."""
        if self._roots is not None:
            _require_within(self.file_path(name), self._roots)
        with named_errors("read", self.file_path(name)):
            path = Path(self._within(name))
            if self._is_local and path.exists() and not path.is_file():
                kind = (
                    "a folder; name a file in it" if path.is_dir() else "another kind"
                )
                raise CheckpointError(f"{path} must be a file. Received: {kind}.")
            with self._fs.open(self._within(name), "rb") as file:
                yield file

    @contextlib.contextmanager
    def created(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file to write it; it gets its name once the block has succeeded.

        Several processes may write it at a time, or one that was given up and its next.
        """
        mark = f"{os.getpid()}-{threading.get_ident()}."
        write = self._write_local if self._is_local else self._upload
        path = self._within(name)
        with named_errors("write", self.file_path(name)):
            yield from write(path, f"{path}.{mark}unfinished")

    def _require_no_file(self) -> None:
        with named_errors("list", self.url):
            is_file = self._is_local and Path(self._root).is_file()
        if is_file:
            raise CheckpointError(
                f"{self.url} must be a folder. Received: a file; its folder is "
                f"{self.url.rpartition('/')[0] or '/'}."
            )

    def _write_local(self, path: str, begun: str) -> Iterator[IO[bytes]]:
        unfinished = Path(begun)
        try:
            with contextlib.closing(_DirectFile(unfinished)) as file:
                yield cast("IO[bytes]", file)
                file.sync()
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        folder = os.open(self._root, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _upload(self, path: str, begun: str) -> Iterator[IO[bytes]]:
        # HDFS shows a file from its first byte on.
        is_renamed = isinstance(self._fs, ArrowFSWrapper)
        begun = begun if is_renamed else path
        file = self._fs.open(begun, "wb")
        try:
            yield file
        except BaseException:
            # Closing would complete the upload. An upload that cannot be discarded
            # is deleted.
            with contextlib.suppress(Exception):
                file.discard()
                file.closed = True
            with contextlib.suppress(Exception):
                self._fs.rm_file(begun)
            raise
        file.close()
        if is_renamed:
            self._fs.mv(begun, path)

    def _within(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


class _DirectFile(io.RawIOBase):
    """A new file that is written past the page cache, where the file system can.

    Else the system copies all of it, to memory that it has to free elsewhere.
    """

    _file = -1  # where it cannot be opened

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, _NEW, 0o666)
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)  # aligned, as it has to be
        self._num_bytes = 0

    def write(self, data: Any) -> int:
        """Write all of the data; return how many bytes."""
        left = memoryview(data).cast("B")
        num_bytes = len(left)
        while left:
            num = min(len(left), _BUFFER_BYTES - self._num_bytes)
            self._buffer[self._num_bytes : self._num_bytes + num] = left[:num]
            self._num_bytes += num
            left = left[num:]
            if self._num_bytes == _BUFFER_BYTES:
                self._write_out(getattr(os, "O_DIRECT", 0))  # Linux has it
        return num_bytes

    def sync(self) -> None:
        """Write all of it to the disk."""
        self._write_out(0)
        os.fsync(self._file)

    def close(self) -> None:
        """End the use of the file. May be called twice."""
        if not self.closed and self._file >= 0:
            os.close(self._file)
        super().close()

    def _write_out(self, mode: int) -> None:
        with contextlib.suppress(OSError):  # a file system that has no such mode
            fcntl.fcntl(self._file, fcntl.F_SETFL, mode)
        left = memoryview(self._buffer)[: self._num_bytes]
        self._num_bytes = 0
        while left:
            try:
                left = left[os.write(self._file, left) :]
            except OSError as exc:
                if exc.errno != errno.EINVAL or not mode:
                    raise
                mode = fcntl.fcntl(self._file, fcntl.F_SETFL, 0)  # which is 0


def require_received(path: str, own: Iterable[str] = ()) -> str:
    """Return a path that another process, or a file, names, or raise CheckpointError.

    It has a protocol of ``PROTOCOLS``, or one that a path of ``own`` has, which are
    those that the user of this process has named; so are those of the environment.
    Files name URLs without user and password: on a host of ``own`` they have its.
    """
    own = *own, env.checkpoint_dir(), env.text("PERSIA_CKPT_DIR") or ""
    allowed = PROTOCOLS | {fsspec.core.split_protocol(one)[0] for one in own}
    protocol = fsspec.core.split_protocol(path)[0] or "local"
    if "::" in path or protocol not in allowed:
        raise CheckpointError(
            "A path that a client or a file names must be local, or a URL of "
            f"{', '.join(sorted(PROTOCOLS))}, and no chain of them. Received: "
            f"{path!r:.500}. Start the servers with --checkpoint-protocols for others."
        )
    asked = urlsplit(path)
    for one in map(urlsplit, own):
        of_user, _, host = one.netloc.rpartition("@")
        if of_user and (one.scheme, host) == (asked.scheme, asked.netloc):
            return path.replace("://", f"://{of_user}@", 1)
    return path


@contextlib.contextmanager
def named_errors(verb: str, path: str) -> Iterator[None]:
    """Name the file in errors of the file system."""
    try:
        yield
    except OSError as exc:
        raise CheckpointError(f"Could not {verb} {path}: {exc}.") from exc


def _require_within(path: str, roots: Sequence[str]) -> None:
    """Raise CheckpointError unless one of some folders has a path."""
    if not any(_is_within(path, root) for root in roots):
        raise CheckpointError(
            "A path that a client names must be in one of the server's folders, links "
            f"resolved: {', '.join(roots)}. Received: {path!r:.500}. Start the server "
            "with --checkpoint-root, once for each folder."
        )


def _is_within(path: str, root: str) -> bool:
    """Return whether a folder has a path: local ones resolved, URLs as they are."""
    if _is_local(path) and _is_local(root):
        strip = fsspec.core.strip_protocol
        resolved, above = (Path(strip(one)).resolve() for one in (path, root))
        return resolved.is_relative_to(above)
    asked, allowed = urlsplit(path), urlsplit(root)
    parts, above_parts = asked.path.split("/"), allowed.path.rstrip("/").split("/")
    is_same = (asked.scheme, asked.netloc) == (allowed.scheme, allowed.netloc)
    is_below = parts[: len(above_parts)] == above_parts
    # "::" is of a file system in another.
    return is_same and is_below and ".." not in parts and "::" not in path


def _is_local(path: str) -> bool:
    protocol, _ = fsspec.core.split_protocol(path)
    return protocol in (None, "file", "local") and "::" not in path
