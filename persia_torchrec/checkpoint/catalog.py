"""The checkpoints and logs of increments of a run, and what each consists of.

    run-7/checkpoint-00000001/{manifest.json, shard-00000-of-00002.rows, ..., dense/}
    run-7/checkpoint-00000002/     without a manifest: not complete, never loaded

    incremental_dir/shard-00000-of-00002-6f1c03b95a2e/     a log of one server
      log.json                  what its first increment applies to
      000000000001.increment    applies to the result of the previous one

A dump takes a new number, a server begins a new log when its rows are replaced, and
when a write failed. Logs are followed from a checkpoint whose manifest names a position
in every one of them, or that is the base of every one of them: a mixture would combine
two runs. FORMAT.md describes the files.
"""

import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Literal, NamedTuple

from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.row_file import SavedTable, require_shard
from persia_torchrec.errors import CheckpointError

MANIFEST = "manifest.json"  # name of the file that makes a checkpoint complete
DENSE = "dense"  # folder of the dense half
LOG_FILE = "log.json"  # name of the file that describes a log; it is written first
_NAME = r"checkpoint-(\d{8,})"
_LOG_NAME = r"shard-\d{5,}-of-\d{5,}-[0-9a-f]{12}"
_ATTEMPTS = 100


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A position in the log of one server: before increment ``number``."""

    log: str
    number: int


@dataclass(frozen=True, slots=True)
class SavedShard:
    """What one server wrote, for the manifest; ``checksum`` is ``Written``'s."""

    file: str
    num_rows: int
    size_bytes: int
    checksum: int
    tick: int  # of the server's last request
    server: Mapping[str, Any]  # the server's settings, for people
    log: LogPosition | None = None
    """Where in the server's log of increments the dump began; None without a log."""


@dataclass(frozen=True, slots=True)
class DumpResult:
    """What one server has dumped: its entries of the manifest."""

    tables: tuple[SavedTable, ...]
    shard: SavedShard


@dataclass(frozen=True, slots=True)
class DenseHalf:
    """The dense half of a checkpoint: names of the optimizers that have state."""

    begun: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete checkpoint; ``created`` is ISO 8601, ``step`` as the user gave it."""

    tables: tuple[SavedTable, ...]
    shards: tuple[SavedShard, ...]
    created: str
    step: int | None = None
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
        folder.write_json(MANIFEST, self)

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


def merge_tables(servers: Iterable[Sequence[SavedTable]]) -> tuple[SavedTable, ...]:
    """Return the tables of all servers, each once, with its largest step.

    Every server gets every update: steps differ by those that are not applied yet.
    """
    tables: dict[str, SavedTable] = {}
    for table in chain.from_iterable(servers):
        if tables.setdefault(table.name, table).num_updates < table.num_updates:
            tables[table.name] = table
    return tuple(tables.values())


def begin_checkpoint(path: str | os.PathLike[str]) -> Folder:
    """Make the folder of the next checkpoint of a run."""
    run = Folder(path)
    begin = max(run.numbers(_NAME), default=0) + 1
    for number in range(begin, begin + _ATTEMPTS):
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
    for number in reversed(run.numbers(_NAME)):
        folder = run.child(f"checkpoint-{number:08d}")
        if MANIFEST in folder.names():
            yield folder


@dataclass(frozen=True, slots=True)
class Base:
    """What the first increment of a log applies to.

    ``checkpoint`` is a path or URL, ``created`` as its manifest says. ``unknown`` rows
    have no copy: their log can only be followed from a checkpoint that was dumped while
    it was written.
    """

    kind: Literal["empty", "checkpoint", "unknown"]
    checkpoint: str = ""
    created: str = ""


@dataclass(frozen=True, slots=True)
class Log:
    """A log of one server, named as its folder; ``begun`` is ISO 8601, UTC."""

    name: str
    shard: int
    num_shards: int
    begun: str
    base: Base
    format: Literal["persia_torchrec increments"] = "persia_torchrec increments"
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        require_shard(self.shard, self.num_shards)

    @classmethod
    def begin(cls, shard: int, num_shards: int, base: Base) -> "Log":
        """Describe a log that begins now."""
        name = f"shard-{shard:05d}-of-{num_shards:05d}-{secrets.token_hex(6)}"
        return cls(name, shard, num_shards, datetime.now(UTC).isoformat(), base)

    def position_in(self, manifest: Manifest) -> LogPosition | None:
        """Return where the dump of a checkpoint began in this log, if it did."""
        if len(manifest.shards) != self.num_shards:
            return None
        position = manifest.shards[self.shard].log
        return position if position and position.log == self.name else None

    def position_after(self, manifest: Manifest) -> LogPosition | None:
        """Return the beginning of this log, if the checkpoint is its base."""
        is_checkpoint = self.base.kind == "checkpoint"
        is_base = is_checkpoint and self.base.created == manifest.created
        return LogPosition(self.name, 1) if is_base else None


class Start(NamedTuple):
    """Where to begin to follow a training: a checkpoint, and a position per server."""

    folder: Folder
    created: str
    positions: tuple[LogPosition, ...]


def find_logs(folder: Folder, known: dict[str, Log]) -> list[Log]:
    """Return the logs in a folder, oldest first.

    Those in ``known``, by name, are not read again; the others are added to it. A log
    without a description has just begun, and is left out.
    """
    names = [name for name in folder.names() if re.fullmatch(_LOG_NAME, name)]
    for name in names:
        child = folder.child(name)
        if name not in known and LOG_FILE in child.names():
            known[name] = child.read_json(LOG_FILE, Log)
    logs = [known[name] for name in names if name in known]
    return sorted(logs, key=lambda log: (log.begun, log.name))


def latest_logs(logs: Sequence[Log]) -> list[Log]:
    """Return the last of all logs of each server, by shard; none if one has none."""
    num_shards = logs[-1].num_shards if logs else 0
    latest = {log.shard: log for log in logs if log.num_shards == num_shards}
    is_complete = len(latest) == num_shards
    return [latest[shard] for shard in range(num_shards)] if is_complete else []


def find_start(
    logs: Sequence[Log], checkpoints: Iterable[tuple[Folder, Manifest]]
) -> Start | None:
    """Return the first checkpoint that fits the latest logs, and what follows it."""
    for folder, manifest in checkpoints if logs else ():
        for position in (Log.position_in, Log.position_after):
            found = [position(log, manifest) for log in logs]
            positions = tuple(p for p in found if p is not None)
            if len(positions) == len(logs):
                return Start(folder, manifest.created, positions)
    return None


def find_end(logs: Sequence[Log], folder: Folder, manifest: Manifest) -> Start | None:
    """Return the last logs, of all, oldest first, that apply to a checkpoint."""
    candidates = [
        latest_logs([log for log in logs if position(log, manifest) is not None])
        for position in (Log.position_in, Log.position_after)
    ]
    last = max(candidates, key=lambda found: found[0].begun if found else "")
    return find_start(last, [(folder, manifest)])


def increment_name(number: int) -> str:
    """Return the name of an increment's file."""
    return f"{number:012d}.increment"


def list_increments(folder: Folder) -> list[int]:
    """Return the numbers of a log's increments, ascending."""
    return folder.numbers(r"(\d+)\.increment")
