"""Increments: the deltas between checkpoints, in logs, one folder for all of a job.

    incremental_dir/shard-00000-of-00002-6f1c03b95a2e/     a log of one server
      log.json                  what its first increment applies to
      000000000001.increment    a segment, see row_file.py

Each increment applies to the result of the previous one. A server begins a new log when
its rows are replaced, and when a write failed. Logs can be followed from a checkpoint
whose manifest names a position in every one of them, or from the checkpoint that is the
base of every one of them. A mixture would combine two runs.
"""

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, NamedTuple

import msgspec

from persia_torchrec.checkpoint.catalog import LogPosition, Manifest
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.row_file import (
    IncrementHead,
    RowFileReader,
    require_shard,
)
from persia_torchrec.routing.hashing import Ids
from persia_torchrec.store.row_columns import RowColumns

LOG_FILE = "log.json"
"""Name of the file that describes a log; it is written first."""

_NAME = re.compile(r"shard-(\d{5,})-of-(\d{5,})-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Base:
    """What the first increment of a log applies to.

    ``unknown`` rows have no copy: their log can only be followed from a checkpoint that
    was dumped while it was written.
    """

    kind: Literal["empty", "checkpoint", "unknown"]
    checkpoint: str = ""
    """Path or URL."""
    created: str = ""
    """As the manifest says."""


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

    def write(self, folder: Folder) -> None:
        """Write the description into the log's folder."""
        folder.write(LOG_FILE, msgspec.json.format(msgspec.json.encode(self)))

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


@dataclass(frozen=True, slots=True)
class Increment:
    """One increment, read: rows and ids that are gone, by number of the table."""

    head: IncrementHead
    rows: list[tuple[int, RowColumns]] = field(default_factory=list)
    gone: list[tuple[int, Ids]] = field(default_factory=list)


class Start(NamedTuple):
    """Where to begin to follow a training: a checkpoint, and a position per server."""

    folder: Folder
    created: str
    positions: tuple[LogPosition, ...]


def find_logs(folder: Folder, known: Mapping[str, Log]) -> list[Log]:
    """Return the logs in a folder, oldest first; ``known`` ones are not read again.

    A log without a description has just begun, and is left out.
    """
    logs = []
    for name in folder.names():
        if name in known:
            logs.append(known[name])
        elif _NAME.fullmatch(name):
            child = folder.child(name)
            if LOG_FILE in child.names():
                logs.append(child.read_json(LOG_FILE, Log))
    return sorted(logs, key=lambda log: (log.begun, log.name))


def latest_logs(logs: Sequence[Log]) -> list[Log]:
    """Return the last log of each server, by shard, of all logs, oldest first.

    There is none while a server has not begun its own.
    """
    num_shards = logs[-1].num_shards if logs else 0
    latest = {log.shard: log for log in logs if log.num_shards == num_shards}
    if latest.keys() != set(range(num_shards)):
        return []
    return [latest[shard] for shard in range(num_shards)]


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


def read_increment(folder: Folder, number: int) -> Increment:
    """Read an increment of the log in a folder, and check all of it."""
    name = increment_name(number)
    with folder.opened(name) as file:
        reader = RowFileReader(file, folder.file_path(name), IncrementHead)
        increment = Increment(reader.head)
        for table, block in reader.blocks():
            if isinstance(block, RowColumns):
                increment.rows.append((table, block))
            else:
                increment.gone.append((table, block))
    return increment


def increment_name(number: int) -> str:
    """Return the name of an increment's file."""
    return f"{number:012d}.increment"


def list_increments(folder: Folder) -> list[int]:
    """Return the numbers of a log's increments, ascending."""
    matches = (re.fullmatch(r"(\d+)\.increment", name) for name in folder.names())
    return sorted(int(match[1]) for match in matches if match)
