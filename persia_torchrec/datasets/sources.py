"""Resolve the files of a data set: paths, folders, globs, URLs, hive partitions.

    "day1.csv"             a file
    "days/"                all files below a folder, sorted by path
    "days/*/part-*"        those that match, sorted; ``**`` matches folders, too
    "s3://bucket/days/"    the same at a URL, by fsspec: s3, gs, hdfs, http, ...

In a folder, names that begin with ``_`` or ``.``, as ``_SUCCESS``, are left out. A part
of a path as ``dt=2026-01-31`` is a hive partition: the value of the column ``dt`` in
all rows of the files below it, unless a file has a column of that name.

A file of a list keeps its place: trainers that divide the same list must have it in
the same order, so that a list from ``glob`` is to be sorted.
"""

import glob
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

import fsspec

from persia_torchrec.datasets.columns import require
from persia_torchrec.errors import ConfigError, DataError, without_secrets

_PARTITION = re.compile(r"([A-Za-z_][\w.-]*)=([^=]*)")
_CHECKSUM = re.compile(r"^(?:.*/)?([^/]*) \((\d+ bytes), xxh3 [0-9a-f]+\)")
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_BLOCK = 1 << 16  # bytes of a checksum at each end of a file
_MAX_FOOTER = 1 << 24
_NUM_SHOWN = 3  # files in a message


@dataclass(frozen=True)
class Source:
    """One file.

    Attributes:
        url: its path, or URL, for messages and for opening it.
        size: in bytes.
        name: its path below the folder that all files of the data set share.
        partitions: values of hive partitions, by column; None: no value.
        filesystem: of fsspec; None: it is a local file.
    """

    url: str
    size: int
    name: str = ""
    partitions: tuple[tuple[str, str | None], ...] = ()
    filesystem: Any = None

    @property
    def path(self) -> Path | str:
        """The path of a local file; else the URL."""
        return Path(self.url) if self.filesystem is None else self.url

    def open(self) -> BinaryIO:
        """Open the file for reading.

        Raises:
            DataError: it cannot be opened.
        """
        try:
            if self.filesystem is None:
                return Path(self.url).open("rb")
            file: BinaryIO = self.filesystem.open(self.url, "rb")
        except (OSError, ValueError) as exc:
            raise DataError(f"{self.url} must be readable. Received: {exc}.") from exc
        return file

    def identity(self) -> str:
        """Return name, size and a checksum: of a Parquet footer, or of both ends."""
        with self.open() as file:
            first = file.read(_BLOCK)
            file.seek(max(self.size - 8, 0))
            end = file.read(8)
            num_bytes = _BLOCK
            if end[4:] == b"PAR1":
                num_bytes = min(int.from_bytes(end[:4], "little") + 8, _MAX_FOOTER)
            file.seek(max(self.size - num_bytes, 0))
            digest = require("xxhash").xxh3_64_hexdigest(first + file.read(num_bytes))
        return f"{self.name} ({self.size} bytes, xxh3 {digest})"


Files = str | os.PathLike[str] | Source | Sequence[str | os.PathLike[str] | Source]


def find_sources(files: Files) -> list[Source]:
    """Return the files that paths, folders, globs and URLs name, in their order.

    Raises:
        ConfigError: there is no path, a file is named twice, or the library of a URL is
            missing.
        DataError: a path has no file.
    """
    is_one = isinstance(files, str | os.PathLike | Source)
    found: list[Source] = []
    for entry in [files] if is_one else list(files):  # type: ignore[arg-type]
        found += [entry] if isinstance(entry, Source) else _expand(os.fspath(entry))  # type: ignore[arg-type]
    if not found:
        raise ConfigError(
            "files must be at least one. Received: none. Does the glob match?"
        )
    urls = [source.url for source in found]
    if len(set(urls)) < len(urls):
        twice = next(url for url in urls if urls.count(url) > 1)
        raise ConfigError(f"files must be different. Received: {twice} twice.")
    if len(found) == 1:
        return [replace(found[0], name=os.path.basename(_full(found[0])))]  # noqa: PTH119 URLs
    common = os.path.commonpath([os.path.dirname(_full(s)) for s in found])  # noqa: PTH120
    return [replace(s, name=_full(s)[len(common) :].lstrip("/")) for s in found]


def legacy_identity(identity: str) -> str:
    """Return what an earlier version saved of a file: its last name, and its size."""
    return _CHECKSUM.sub(r"\1 (\2)", identity)


def _full(source: Source) -> str:
    if source.filesystem is None:
        return os.path.abspath(source.url)  # noqa: PTH100 keeps links
    return without_secrets(source.url).replace("://", "/", 1)


def _expand(text: str) -> list[Source]:
    if text.startswith("file://"):
        text = unquote(text.removeprefix("file://"))
    if "://" in text:
        return _expand_url(text)
    if glob.has_magic(text) and not os.path.lexists(text):
        paths = [p for p in sorted(_glob(text)) if _is_shown(p)]
        if not paths:
            raise _none(text, "nothing that matches")
        whole = text.endswith("**")  # names files and their folders
        return [
            source
            for path in paths
            if not (whole and os.path.isdir(path))  # noqa: PTH112
            for source in _expand_path(path)
        ]
    return _expand_path(text)


def _glob(text: str) -> list[str]:
    return glob.glob(text, recursive=True)  # noqa: PTH207 of any folder


def _expand_path(text: str) -> list[Source]:
    try:
        status = os.stat(text)  # noqa: PTH116
    except (OSError, ValueError) as exc:
        raise _none(text, "nothing of that name") from exc
    if not stat.S_ISDIR(status.st_mode):
        if not stat.S_ISREG(status.st_mode):
            raise _none(text, "no regular file")
        return [Source(text, status.st_size, partitions=_partitions(text))]
    found = []
    for folder, folders, names in os.walk(text):
        folders[:] = sorted(filter(_is_shown, folders))
        paths = [os.path.join(folder, name) for name in names if _is_shown(name)]  # noqa: PTH118
        found += [path for path in paths if os.path.isfile(path)]  # noqa: PTH113
    if not found:
        raise _none(text, "a folder without files")
    return [
        Source(path, os.stat(path).st_size, partitions=_partitions(path))  # noqa: PTH116
        for path in sorted(found)
    ]


def _expand_url(url: str) -> list[Source]:
    protocol = url.partition("://")[0]
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
        if glob.has_magic(path) and not filesystem.exists(path):
            paths = sorted(filter(_is_shown, filesystem.glob(path)))
        elif filesystem.isfile(path):
            paths = [path]
        else:
            root = path.rstrip("/") + "/"
            paths = [
                found
                for found in sorted(filesystem.find(path))
                if all(map(_is_shown, found.removeprefix(root).split("/")))
            ]
        sizes = [filesystem.size(path) for path in paths]
    except (ImportError, ValueError) as exc:
        raise ConfigError(
            f"{url} must be a URL that fsspec can open. Received: {exc}."
        ) from exc
    except Exception as exc:
        raise DataError(f"{url} must be readable. Received: {exc!r}.") from exc
    if not paths:
        raise _none(url, "nothing of that name")
    if None in sizes:
        raise DataError(
            f"{url} must have a size, so that parts of it can be read. Received: "
            f"none from {protocol}."
        )
    return [
        Source(
            path if "://" in path else f"{protocol}://{path.lstrip('/')}",
            size,
            partitions=_partitions(path),
            filesystem=filesystem,
        )
        for path, size in zip(paths, sizes, strict=True)
    ]


def _is_shown(path: str) -> bool:
    return not path.rstrip("/").rpartition("/")[2].startswith(("_", "."))


def _partitions(path: str) -> tuple[tuple[str, str | None], ...]:
    found: dict[str, str | None] = {}
    for part in path.split("/")[:-1]:
        if match := _PARTITION.fullmatch(part):
            value = unquote(match[2])
            found[match[1]] = None if value == _NO_VALUE else value
    return tuple(found.items())


def _none(path: str, received: str) -> DataError:
    return DataError(
        f"{path} must be a file. Received: {received}. Check the path; relative ones "
        "begin at the working directory."
    )


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Say in which settings a saved state differs from a dataset, files by name."""
    faults = []
    for name, value in here.items():
        if (before := saved.get(name)) == value:
            continue
        if name != "files":
            faults.append(f"{name}: {before} was saved, {value} is here")
            continue
        if missing := [file for file in before or [] if file not in value]:
            faults.append(f"files that were saved and are not here: {missing}")
        if new := [file for file in value if file not in (before or [])]:
            faults.append(f"files that are here and were not saved: {new}")
        if not (missing or new):
            faults.append("files in another order")
    return faults


def require_same_files(lists: Sequence[Sequence[str]]) -> None:
    """Require that all trainers divide the same files; ``lists`` has each one's.

    Raises:
        ConfigError: a trainer's are others, or in another order; it names them.
    """
    first = lists[0]
    for rank, files in enumerate(lists):
        if list(files) == list(first):
            continue
        lacking = [file for file in first if file not in set(files)]
        others = [file for file in files if file not in set(first)]
        what = [f"lacks {lacking[:_NUM_SHOWN]}"] if lacking else []
        what += [f"has {others[:_NUM_SHOWN]} besides"] if others else []
        raise ConfigError(
            "Trainers must divide the same files, in the same order. Received: trainer "
            f"{rank} {' and '.join(what) or 'has another order'}, compared with "
            f"trainer 0, which has {len(first)}. Sort the list, and see that each "
            "trainer finds the same folder; files of its own need no partition_count."
        )
