"""Logs of increments: what a follower, or a restart, applies in which order.

    incremental_dir/shard-00000-of-00002-6f1c03b95a2e/     a log of one server
      log.json                  what its first increment applies to
      000000000001.increment    applies to the result of the previous one

A server begins a new log when its rows are replaced, and when a write failed. A log may
continue another one: they are a line. Lines are followed from a checkpoint whose
manifest names a position in every one of them, or that is the base of every one of
them, in one history: a mixture would combine two runs. docs/formats/checkpoint.md
describes the files.
"""

import re
import secrets
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from persia_torchrec.checkpoint.catalog import LogPosition, Manifest, require_shard
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.errors import CheckpointError

LOG_FILE = "log.json"  # name of the file that describes a log; it is written first
_LOG_NAME = r"shard-(\d{5,})-of-\d{5,}-[0-9a-f]{12}"


@dataclass(frozen=True, slots=True)
class Base:
    """What the first increment of a log applies to.

    ``checkpoint`` is a path or URL, ``created`` as its manifest says; ``parent`` is
    where another log is continued. ``unknown`` rows have no copy: their log can only be
    followed from a checkpoint that was dumped while it was written.
    """

    kind: Literal["empty", "checkpoint", "log", "unknown"]
    checkpoint: str = ""
    created: str = ""
    parent: LogPosition | None = None


@dataclass(frozen=True, slots=True)
class Log:
    """A log of one server, named as its folder; ``begun`` is ISO 8601, UTC.

    ``history`` is a random number. Servers that load a checkpoint together draw one
    together; a log that continues another one, and lacks nothing of it, has the same.
    """

    name: str
    shard: int
    num_shards: int
    begun: str
    base: Base
    history: str = ""
    format: Literal["persia_torchrec increments"] = "persia_torchrec increments"
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        require_shard(self.shard, self.num_shards)

    @property
    def token(self) -> int:
        """The random number in its name, of 48 bits."""
        return int(self.name.rpartition("-")[2], 16)

    @classmethod
    def begin(cls, shard: int, num_shards: int, base: Base, history: str = "") -> "Log":
        """Describe a log that begins now, by default with a history of its own."""
        name = f"shard-{shard:05d}-of-{num_shards:05d}-{secrets.token_hex(6)}"
        history = history or secrets.token_hex(6)
        now = datetime.now(UTC).isoformat()
        return cls(name, shard, num_shards, now, base, history)


class Segment(NamedTuple):
    """Increments of one log: from ``first`` to that before ``stop``, or to its end."""

    log: str
    first: int
    stop: int | None


@dataclass(frozen=True, slots=True)
class Line:
    """A log of one server, ``logs[0]``, and those that it continues, latest first."""

    logs: tuple[Log, ...]

    def is_of(self, shard: int, num_shards: int) -> bool:
        """Return whether it is of a server."""
        return (self.logs[0].shard, self.logs[0].num_shards) == (shard, num_shards)

    def position_in(self, manifest: Manifest) -> LogPosition | None:
        """Return where the dump of a checkpoint began in these logs, if it did."""
        if len(manifest.shards) != self.logs[0].num_shards:
            return None
        position = manifest.shards[self.logs[0].shard].log
        segments = [] if position is None else self.segments(position)
        if position is None or not segments:
            return None
        stop = segments[0].stop  # what came after it was rolled back
        return position if stop is None or position.number <= stop else None

    def position_after(self, manifest: Manifest) -> LogPosition | None:
        """Return the beginning of the first log, if the checkpoint is its base."""
        first = self.logs[-1]
        is_checkpoint = first.base.kind == "checkpoint"
        is_base = is_checkpoint and first.base.created == manifest.created
        return LogPosition(first.name, 1) if is_base else None

    def segments(self, position: LogPosition) -> list[Segment]:
        """Return what follows a position, the oldest first; nothing in other logs."""
        segments: list[Segment] = []
        stop: int | None = None
        for log in self.logs:
            if log.name == position.log:
                return [Segment(log.name, position.number, stop), *segments[::-1]]
            segments.append(Segment(log.name, 1, stop))
            stop = log.base.parent.number if log.base.parent else None
        return []

    def next_position(
        self, position: LogPosition, allowed: Container[str] = ()
    ) -> LogPosition | None:
        """Return where to read on after following as far as ``position``.

        None: what was followed is not of this line, or was rolled back. Logs of another
        history than the one before it are ``allowed`` by name.
        """
        segments = self.segments(position)
        stop = segments[0].stop if segments else 0
        if stop is None or position.number < stop:
            return position
        if position.number > stop:
            return None
        by_name = {log.name: log for log in self.logs}
        previous, log = (by_name[segment.log] for segment in segments[:2])
        is_same = log.history == previous.history or log.name in allowed
        return LogPosition(log.name, 1) if is_same else None


class Start(NamedTuple):
    """Where to begin to follow a training: a checkpoint, and a position per server."""

    folder: Folder
    created: str
    positions: tuple[LogPosition, ...]
    lines: tuple[Line, ...]

    def has_increments(self, logs: Folder) -> bool:
        """Return whether the increments from the positions on have not been deleted."""
        for begin in self.positions:
            numbers = list_increments(logs.child(begin.log))
            if numbers and min(numbers) > begin.number:
                return False
        return True

    def leads_over(self, position: LogPosition) -> bool:
        """Return whether the increment at a position is among those that follow."""
        return any(
            log == position.log
            and first <= position.number
            and (stop is None or position.number < stop)
            for line, begin in zip(self.lines, self.positions, strict=True)
            for log, first, stop in line.segments(begin)
        )


def find_lines(folder: Folder, known: dict[str, Log]) -> list[Line]:
    """Return the line of each log in a folder, the oldest log first.

    Logs in ``known``, by name, are not read again; the others are added to it. One
    without a description has just begun, and is left out.
    """
    names = [name for name in folder.names() if re.fullmatch(_LOG_NAME, name)]
    for name in names:
        child = folder.child(name)
        if name not in known and LOG_FILE in child.names():
            log: Log = child.read_json(LOG_FILE, Log)
            if log.name != name:
                raise CheckpointError(
                    f"{child.file_path(LOG_FILE)} must describe log {name}. "
                    f"Received: {log.name!r:.100}."
                )
            known[name] = log
    return lines_of([known[name] for name in names if name in known])


def shard_of_log(name: str) -> int | None:
    """Return whose log would have a name; None if no log would."""
    found = re.fullmatch(_LOG_NAME, name)
    return int(found[1]) if found else None


def lines_of(logs: Iterable[Log]) -> list[Line]:
    """Return the line of each log, the oldest log first."""
    by_name = {log.name: log for log in sorted(logs, key=lambda g: (g.begun, g.name))}
    lines: list[Line] = []
    for log in by_name.values():
        line = [log]
        while (parent := line[-1].base.parent) and len(line) <= len(by_name):
            if parent.log not in by_name:
                break
            line.append(by_name[parent.log])
        lines.append(Line(tuple(line)))
    return lines


def latest_lines(lines: Sequence[Line]) -> list[Line]:
    """Return the last line of each server, by shard; none if one has none."""
    num_shards = lines[-1].logs[0].num_shards if lines else 0
    if num_shards > len(lines):
        return []
    latest = []
    for shard in range(num_shards):
        latest += [line for line in lines if line.is_of(shard, num_shards)][-1:]
    return latest if len(latest) == num_shards else []


def find_start(
    lines: Sequence[Line], checkpoints: Iterable[tuple[Folder, Manifest]]
) -> Start | None:
    """Return the first checkpoint that fits the latest lines, and what follows it."""
    has_one_history = len({line.logs[-1].history for line in lines}) == 1
    for folder, manifest in checkpoints if lines else ():
        for position in (Line.position_in, Line.position_after):
            found = [position(line, manifest) for line in lines]
            positions = tuple(p for p in found if p is not None)
            fits = has_one_history or position is Line.position_in
            if fits and len(positions) == len(lines):
                return Start(folder, manifest.created, positions, tuple(lines))
    return None


def find_end(lines: Sequence[Line], folder: Folder, manifest: Manifest) -> Start | None:
    """Return the last lines, of all, oldest first, that apply to a checkpoint."""
    candidates: dict[str | None, list[Line]] = {None: [], "": []}
    for line in lines:
        if line.position_in(manifest):
            candidates[None].append(line)
        if line.position_after(manifest):
            candidates.setdefault(line.logs[-1].history, []).append(line)
    last = max(
        map(latest_lines, candidates.values()),
        key=lambda found: found[0].logs[0].begun if found else "",
    )
    return find_start(last, [(folder, manifest)])


def find_start_of(
    lines: Sequence[Line],
    until: Sequence[LogPosition],
    checkpoint: tuple[Folder, Manifest],
) -> Start | None:
    """Return how lines lead from a checkpoint to positions; None if they do not."""
    by_log = {line.logs[0].name: line for line in lines}
    if not all(position.log in by_log for position in until):
        return None
    start = find_start([by_log[position.log] for position in until], [checkpoint])
    if start is None:
        return None
    for begin, end in zip(start.positions, until, strict=True):
        if begin.log == end.log and begin.number > end.number:
            return None
    return start


def increment_name(number: int) -> str:
    """Return the name of an increment's file."""
    return f"{number:012d}.increment"


def list_increments(folder: Folder) -> list[int]:
    """Return the numbers of a log's increments, ascending."""
    return folder.numbers(r"(\d+)\.increment")
