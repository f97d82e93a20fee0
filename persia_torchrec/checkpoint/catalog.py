"""The checkpoints of a run, in one folder, and what each of them consists of.

    run-7/checkpoint-00000001/{manifest.json, shard-00000-of-00002.rows, ..., dense/}
    run-7/checkpoint-00000002/     without a manifest: not complete, never loaded

Each dump takes a new number, so an interrupted dump leaves the previous checkpoints as
they are; its own folder may be deleted. FORMAT.md describes the files.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.row_file import SavedTable
from persia_torchrec.errors import CheckpointError

MANIFEST = "manifest.json"
"""Name of the file that makes a checkpoint complete."""

DENSE = "dense"
"""Folder of the dense half."""

_NAME = re.compile(r"checkpoint-(\d{8,})")
_ATTEMPTS = 100


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A position in the log of one server: before increment ``number``."""

    log: str
    number: int


@dataclass(frozen=True, slots=True)
class SavedShard:
    """What one server wrote, for the manifest."""

    file: str
    num_rows: int
    size_bytes: int
    checksum: int
    """See ``row_file.Written``."""
    tick: int
    """Of the server's last request."""
    server: Mapping[str, Any]
    """The server's settings, for people."""
    log: LogPosition | None = None
    """Where in the server's log of increments the dump began; None without a log."""


@dataclass(frozen=True, slots=True)
class DenseHalf:
    """The dense half of a checkpoint: names of the optimizers that have state."""

    begun: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete checkpoint: the tables and files of all servers."""

    tables: tuple[SavedTable, ...]
    shards: tuple[SavedShard, ...]
    created: str
    """ISO 8601."""
    step: int | None = None
    """Of the training, as the user gave it."""
    dense: DenseHalf | None = None
    format: Literal["persia_torchrec checkpoint"] = "persia_torchrec checkpoint"
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        for table in self.tables:
            _ = table.spec  # a ConfigError if it is not valid

    @property
    def capacity_rows(self) -> int | None:
        """Rows that all servers together could hold; None if that is unknown."""
        capacities = [shard.server.get("capacity_rows") for shard in self.shards]
        known = [number for number in capacities if isinstance(number, int)]
        return sum(known) if len(known) == len(capacities) else None

    @property
    def num_rows(self) -> int:
        """Rows of all servers."""
        return sum(shard.num_rows for shard in self.shards)

    @property
    def size_bytes(self) -> int:
        """Bytes of the files of all servers."""
        return sum(shard.size_bytes for shard in self.shards)

    def write(self, folder: Folder) -> None:
        """Make the checkpoint in a folder complete."""
        for shard in self.shards:
            size_bytes = folder.file_size(shard.file)
            if size_bytes != shard.size_bytes:
                raise CheckpointError(
                    f"{folder.file_path(shard.file)} must have the {shard.size_bytes} "
                    f"bytes that a server wrote. Received: {size_bytes or 'no file'}. "
                    "Give a path that all servers and trainers share."
                )
        folder.write(MANIFEST, msgspec.json.format(msgspec.json.encode(self)))

    @classmethod
    def read(cls, folder: Folder) -> "Manifest":
        """Read the manifest of a checkpoint."""
        if folder.file_size(MANIFEST) is None:
            raise CheckpointError(
                f"{folder.file_path(MANIFEST)} is missing: its checkpoint is not "
                "complete, or does not exist."
            )
        manifest: Manifest = folder.read_json(MANIFEST, cls)
        return manifest


def merge_tables(servers: Sequence[Sequence[SavedTable]]) -> tuple[SavedTable, ...]:
    """Return the tables of all servers, each once, with its largest step.

    Every server gets every update: steps differ by those that are not applied yet.
    """
    tables: dict[str, SavedTable] = {}
    for table in (table for tables_P in servers for table in tables_P):
        known = tables.setdefault(table.name, table)
        if known.num_updates < table.num_updates:
            tables[table.name] = table
    return tuple(tables.values())


def begin_checkpoint(path: str | os.PathLike[str]) -> Folder:
    """Make the folder of the next checkpoint of a run."""
    run = Folder(path)
    number = max(_read_numbers(run), default=0)
    for _ in range(_ATTEMPTS):
        number += 1
        folder = run.child(f"checkpoint-{number:08d}")
        if folder.make():
            return folder
    raise CheckpointError(
        f"A new folder must be made in {run.url}. Received: {_ATTEMPTS} names that "
        "other processes took first. How many jobs write there?"
    )


def find_checkpoint(path: str | os.PathLike[str]) -> Folder:
    """Return the complete checkpoint at a path, or the latest of a run."""
    run = Folder(path)
    folder = next(complete_checkpoints(run), None)
    if folder is None:
        raise CheckpointError(
            f"{run.url} must be a checkpoint, or hold one that is complete (that has a "
            f"{MANIFEST}). Received: a folder with "
            f"{sorted(run.names())[:8] or 'nothing'}."
        )
    return folder


def complete_checkpoints(run: Folder) -> Iterator[Folder]:
    """Yield the complete checkpoints of a run, or the one itself; latest first."""
    if MANIFEST in run.names():
        yield run
        return
    for number in sorted(_read_numbers(run), reverse=True):
        folder = run.child(f"checkpoint-{number:08d}")
        if MANIFEST in folder.names():
            yield folder


def shard_name(shard: int, num_shards: int) -> str:
    """Return the name of a server's file."""
    return f"shard-{shard:05d}-of-{num_shards:05d}.rows"


def _read_numbers(run: Folder) -> list[int]:
    matches = (_NAME.fullmatch(name) for name in run.names())
    return [int(match[1]) for match in matches if match]
