"""The checkpoints and logs of increments of a run, and what each consists of.

    run-7/checkpoint-00000001/{manifest.json, shard-00000-of-00002.rows, ..., dense/}
    run-7/checkpoint-00000002/     without a manifest: not complete, never loaded

    incremental_dir/shard-00000-of-00002-6f1c03b95a2e/     a log of one server
      log.json                  what its first increment applies to
      000000000001.increment    applies to the result of the previous one

A dump takes a new number, a server begins a new log when its rows are replaced, and
when a write failed. A log may continue another one: they are a line. Lines are followed
from a checkpoint whose manifest names a position in every one of them, or that is the
base of every one of them, in one history: a mixture would combine two runs.
docs/formats/checkpoint.md describes the files.
"""

import os
import re
import secrets
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.errors import CheckpointError
from persia_torchrec.table import TableSpec

MANIFEST = "manifest.json"  # name of the file that makes a checkpoint complete
DELTA = "delta.json"  # name of the file that makes a delta complete
DENSE = "dense"  # folder of the dense half
RUNS_FILE = "runs.json"  # name of the file with the runs that a log's server dumped to
LOG_FILE = "log.json"  # name of the file that describes a log; it is written first
_NAME = r"checkpoint-(\d{8,})"
_LOG_NAME = r"shard-(\d{5,})-of-\d{5,}-[0-9a-f]{12}"
_ATTEMPTS = 100
_MAX_SHARDS = 2**16

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Tick = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class SavedTable(msgspec.Struct, frozen=True):
    """A table in a file: its settings as JSON, its step, and the form of its rows."""

    description: dict[str, Any] = msgspec.field(name="spec")
    num_updates: Count
    has_metadata: bool
    thresholds: list[float] = []

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.description.get("name"))

    @property
    def spec(self) -> TableSpec:
        """Its settings."""
        return TableSpec.from_json(self.description)


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A position in the log of one server: before increment ``number``."""

    log: str
    number: Count


@dataclass(frozen=True, slots=True)
class SavedShard:
    """What one server wrote, for the manifest; ``checksum`` is ``Written``'s."""

    file: str
    num_rows: Count
    size_bytes: Count
    checksum: Count
    tick: Tick  # of the server's last request
    server: Mapping[str, Any]  # the server's settings, for people
    log: LogPosition | None = None
    """Where in the server's log of increments the dump began; None without a log."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.file):
            raise ValueError(f"file must be a plain name, not {self.file!r:.100}")


@dataclass(frozen=True, slots=True)
class DumpResult:
    """What one server has dumped: its entries of the manifest."""

    tables: tuple[SavedTable, ...]
    shard: SavedShard


class Loaded(msgspec.Struct, frozen=True):
    """What a server has loaded: rows in its store, and increments applied to them.

    For ``num_left_out`` rows, those that would be evicted first, there was no room. The
    admissions of the tables in ``forgotten`` count from 0 again.
    """

    num_rows: int
    num_left_out: int
    num_increments: int
    forgotten: list[str] = []


@dataclass(frozen=True, slots=True)
class EndedIncrement:
    """Where one server's log has all that had changed: folder of the logs, position."""

    folder: str
    position: LogPosition
    tables: tuple[SavedTable, ...]


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


@dataclass(frozen=True, slots=True)
class Delta:
    """What follows a checkpoint, whose folder has that of the delta: both halves.

    Rows are the checkpoint's with the increments in the folder ``increments`` before a
    position in the log of each server; the dense half is whole.
    """

    increments: str
    positions: tuple[LogPosition, ...]
    tables: tuple[SavedTable, ...]
    dense: DenseHalf
    created: str
    step: int | None = None
    format: Literal["persia_torchrec delta"] = "persia_torchrec delta"
    version: Literal[1] = 1


class Saved(NamedTuple):
    """A state that can be loaded: a checkpoint, or a delta and its checkpoint."""

    folder: Folder
    checkpoint: Folder
    manifest: Manifest
    delta: Delta | None

    @property
    def dense(self) -> DenseHalf | None:
        """The dense half that belongs to it."""
        return self.manifest.dense if self.delta is None else self.delta.dense

    @property
    def tables(self) -> tuple[SavedTable, ...]:
        """The tables, as they were then."""
        return self.manifest.tables if self.delta is None else self.delta.tables

    @classmethod
    def read(cls, folder: Folder) -> "Saved":
        """Read what is in the folder of a checkpoint or a delta."""
        if folder.file_size(DELTA) is None:
            return cls(folder, folder, Manifest.read(folder), None)
        checkpoint = Folder(folder.url.rpartition("/")[0])
        delta: Delta = folder.read_json(DELTA, Delta)
        return cls(folder, checkpoint, Manifest.read(checkpoint), delta)


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
    return _begin(Folder(path), "checkpoint")


def begin_delta(checkpoint: Folder) -> Folder:
    """Make the folder of the next delta of a checkpoint, in that of the checkpoint."""
    return _begin(checkpoint, "delta")


def _begin(within: Folder, kind: str) -> Folder:
    begin = max(within.numbers(rf"{kind}-(\d{{8,}})"), default=0) + 1
    for number in range(begin, begin + _ATTEMPTS):
        folder = within.child(f"{kind}-{number:08d}")
        if folder.make():
            return folder
    raise CheckpointError(
        f"A new folder must be made in {within.url}. Received: {_ATTEMPTS} names that "
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


def saved_states(path: str | os.PathLike[str]) -> Iterator[Folder]:
    """Yield what is complete of a run, latest first: deltas, then their checkpoint.

    A path of one checkpoint, or of one delta, gives that alone.
    """
    run = Folder(path)
    if DELTA in run.names():
        yield run
        return
    for checkpoint in complete_checkpoints(run):
        if checkpoint.url != run.url:
            yield from complete_deltas(checkpoint)
        yield checkpoint


def complete_deltas(checkpoint: Folder) -> Iterator[Folder]:
    """Yield the complete deltas of a checkpoint, latest first."""
    for number in reversed(checkpoint.numbers(r"delta-(\d{8,})")):
        folder = checkpoint.child(f"delta-{number:08d}")
        if DELTA in folder.names():
            yield folder


def delete_older(run: Folder, num_kept: int) -> None:
    """Delete what is older than the ``num_kept`` latest complete checkpoints of a run.

    Call it once a newer one is complete. Each loses its manifest first, so that none
    that is half deleted is loaded. Dumps that were given up are deleted, too.
    """
    complete = [folder.url for folder in complete_checkpoints(run)]
    kept = complete[:num_kept]
    for number in run.numbers(_NAME) if len(kept) == num_kept else ():
        folder = run.child(f"checkpoint-{number:08d}")
        if folder.url == kept[-1]:
            return
        folder.remove(MANIFEST)
        folder.remove_all()


def require_shard(shard: int, num_shards: int) -> None:
    """Raise ValueError unless ``shard`` is in ``[0, num_shards)``."""
    if not 0 <= shard < num_shards <= _MAX_SHARDS:
        raise ValueError(f"shard must be in [0, {num_shards}), not {shard}")


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
