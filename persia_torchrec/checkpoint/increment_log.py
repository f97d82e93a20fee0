"""Increment logs: the files that a follower or a restart applies, in order.

    increments_dir/shard-00000-of-00002-6f1c03b95a2e/     a log of one server
      log.json                  what its first increment applies to
      000000000001.increment    applies to the result of the previous one

A server begins a new log when its rows are replaced, and when a write failed. A log may
continue another one: they are a line. Lines are followed from a checkpoint whose
manifest names a position in every one of them, or that is the base of every one of
them, in one history: a mixture would combine two runs. docs/formats/checkpoint.md
describes the files.

The base of the increments is a checkpoint that servers write by themselves:

    increments_dir/base/shard-00000-of-00002-4f2a.rows    a server's rows
                         shard-00000-of-00002.json         its entry: file, position
                         manifest.json                     of the latest entries of all

Where the log is many times the rows, each server writes its rows there, so that older
increments can go. No process brings the servers together: each of them, when its entry
is written, writes the manifest of all entries there are. Their moments differ; with the
increments behind each position they are the rows of the training.

An increment stays if it continues a complete checkpoint: the latest of a run, or one
that has deltas; where there is a base: the base, what is newer, or has deltas. So it
does not matter who deletes checkpoints, and a server that is killed before it has
deleted increments deletes them later. The last one of a log stays, so that a follower
that is further back sees that some are missing. Each log has a list of the runs that
were dumped to while it was written.

What is newer is told by numbers, never by clocks, which differ between hosts and are
set back: logs are numbered, increments in a log, and manifests have a position. One
without a position in any log here is older than those that have one.
"""

import contextlib
import logging
import re
import secrets
from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from persia_torchrec.checkpoint import catalog
from persia_torchrec.checkpoint.catalog import (
    DumpResult,
    LogPosition,
    Manifest,
    require_shard,
)
from persia_torchrec.checkpoint.folder import Folder, require_received
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

    ``number`` is larger than those of all logs that were there when it began; 0 in logs
    of previous versions, which are ordered by ``begun``. ``history`` is a random
    number. Servers that load a checkpoint together draw one together; a log that
    continues another one, and lacks nothing of it, has the same.
    """

    name: str
    shard: int
    num_shards: int
    begun: str
    base: Base
    history: str = ""
    format: Literal["persia_torchrec increments"] = "persia_torchrec increments"
    version: Literal[1] = 1
    number: catalog.Count = 0

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


def next_number(folder: Folder) -> int:
    """Return the number of a log that begins now, beside those in a folder."""
    numbers = [0]
    for name in folder.names():
        if re.fullmatch(_LOG_NAME, name):
            with contextlib.suppress(CheckpointError):  # it is deleted just now
                log: Log = folder.child(name).read_json(LOG_FILE, Log)
                numbers.append(log.number)
    return max(numbers) + 1


def shard_of_log(name: str) -> int | None:
    """Return whose log would have a name; None if no log would."""
    found = re.fullmatch(_LOG_NAME, name)
    return int(found[1]) if found else None


def lines_of(logs: Iterable[Log]) -> list[Line]:
    """Return the line of each log, the oldest log first."""
    ordered = sorted(logs, key=lambda log: (log.number, log.begun, log.name))
    by_name = {log.name: log for log in ordered}
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
        key=lambda found: lines.index(found[0]) if found else -1,
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


_ATTEMPTS = 10


def base_of(logs: Folder) -> Folder:
    """Return the folder of the base of the logs in a folder."""
    return logs.child("base")


def draw_name(shard: int, num_shards: int) -> str:
    """Return a name for the next file of a server's rows."""
    return f"{_prefix(shard, num_shards)}-{secrets.token_hex(4)}.rows"


def read_base(logs: Folder) -> tuple[Folder, Manifest] | None:
    """Return the base, if all servers have written their part of it."""
    folder = base_of(logs)
    manifest = _read_manifest(folder)
    return None if manifest is None else (folder, manifest)


def is_newer(first: Manifest, second: Manifest, lines: Sequence[Line]) -> bool:
    """Return whether a checkpoint has changes that another lacks, by their positions.

    ``lines`` are those of all logs, as :func:`find_lines` returns them. The moments of
    servers in one checkpoint may differ: those of one server are compared.
    """
    order = {line.logs[0].name: place for place, line in enumerate(lines)}

    def positions(manifest: Manifest) -> list[tuple[int, int]]:
        logs = [shard.log for shard in manifest.shards]
        return [(order.get(p.log, -1), p.number) if p else (-1, 0) for p in logs]

    ours, others = positions(first), positions(second)
    if len(ours) != len(others):  # of other numbers of servers
        return max(ours, default=(-1, 0)) > max(others, default=(-1, 0))
    return any(our > other for our, other in zip(ours, others, strict=True))


def newer_base(
    logs: Folder, lines: Sequence[Line], last: Sequence[Line], than: Manifest
) -> Folder | None:
    """Return the base if a checkpoint is not newer, and the last lines continue it.

    ``lines`` are those of all logs.
    """
    found = read_base(logs)
    if found is None or is_newer(than, found[1], lines) or not last:
        return None
    is_continued = all(line.position_in(found[1]) for line in last)
    return found[0] if is_continued else None


def add_to_base(folder: Folder, part: DumpResult, shard: int, num_shards: int) -> None:
    """Make a file part of the base; of its server only the one before it stays.

    The manifest that another server writes meanwhile may still name that; and one that
    lacks an entry stays, with its files.
    """
    entry = f"{_prefix(shard, num_shards)}.json"
    kept = {part.shard.file}
    if folder.file_size(entry) is not None:
        previous: DumpResult = folder.read_json(entry, DumpResult)
        kept.add(previous.shard.file)
    folder.write_json(entry, part)
    for _ in range(_ATTEMPTS):
        parts = _read_parts(folder, num_shards)
        if len(parts) < num_shards:
            break
        tables = catalog.merge_tables([of_server.tables for of_server in parts])
        shards = tuple(of_server.shard for of_server in parts)
        Manifest(tables, shards, datetime.now(UTC).isoformat()).write(folder)
        if [p.shard for p in _read_parts(folder, num_shards)] == list(shards):
            break  # else another server has written an entry meanwhile
    if (found := _read_manifest(folder)) is not None:
        kept |= {named.file for named in found.shards}
    own = re.compile(rf"{_prefix(shard, num_shards)}-[0-9a-f]+\.rows")
    for name in folder.names():
        if own.fullmatch(name) and name not in kept:
            folder.remove(name)


def end_entry(logs: Folder, shard: int, num_shards: int) -> None:
    """Take a server's entry out of the base: a drop or a log of other rows begins.

    The manifest stays as it is until all servers have new entries: with rows of one
    server before the drop or load, and of another after it, it would mix two tables, or
    be followed by no line while increments are deleted for it.
    """
    base_of(logs).remove(f"{_prefix(shard, num_shards)}.json")


def _prefix(shard: int, num_shards: int) -> str:
    return f"shard-{shard:05d}-of-{num_shards:05d}"


def _read_manifest(folder: Folder) -> Manifest | None:
    with contextlib.suppress(CheckpointError):  # none, or one of another version
        return Manifest.read(folder)
    return None


def _read_parts(folder: Folder, num_shards: int) -> list[DumpResult]:
    parts: list[DumpResult] = []
    for shard in range(num_shards):
        name = f"{_prefix(shard, num_shards)}.json"
        if folder.file_size(name) is not None:
            parts.append(folder.read_json(name, DumpResult))
    return parts


logger = logging.getLogger(__name__)


class Retention:
    """Deletes what no checkpoint needs of the logs of one shard, with the ``own`` log.

    Of the logs of other numbers of servers, those of shards that are no more go to the
    first ones. The thread that writes the log calls it; any may add to ``begun``, the
    folders of dumps that have begun. Runs that files name may have the protocols of
    ``own_urls``, too.
    """

    def __init__(self, logs: Folder, own: Log, own_urls: Sequence[str] = ()) -> None:
        self._own_urls = *own_urls, logs.url
        self.begun: deque[str] = deque()
        self._logs = logs
        self._own = own
        self._noted: set[str] = set()  # runs, in the file
        self._known: dict[str, Log] = {}

    def apply(self, *, counts_begun: bool) -> None:
        """Delete what is not needed; what cannot be deleted now stays.

        Dumps that have begun count the next time, if they do not now: followers read
        increments of the checkpoint before for a while.
        """
        num_shards = self._own.num_shards
        begun = {self.begun.popleft() for _ in range(len(self.begun))}
        try:
            lines = find_lines(self._logs, self._known)
            runs = self._read_runs({url.rpartition("/")[0] for url in begun})
            left_out = set() if counts_begun else begun
            continued = _continued_checkpoints(runs, left_out)
            kept = [manifest for manifest, _ in continued]
            if (found := read_base(self._logs)) is not None:
                kept = [found[1], *_needed_beside(continued, found[1], lines)]
            needed = _needed_increments(lines, kept)
            for name in self._logs.names() if kept else ():
                shard = shard_of_log(name)
                if shard is not None and shard % num_shards == self._own.shard:
                    self._prune(name, needed)
        except CheckpointError as exc:
            logger.warning("obsolete increments could not be deleted: %s", exc)

    def _prune(self, name: str, needed: dict[str, int]) -> None:
        folder = self._logs.child(name)
        if name not in needed and name != self._own.name:
            # First: what is half deleted is no log, and deleted the next time.
            folder.remove(LOG_FILE)
            folder.remove_all()
            self._known.pop(name, None)
            return
        for number in list_increments(folder)[:-1]:  # the last one: others are missed
            if number < needed.get(name, 1):
                folder.remove(increment_name(number))

    def _read_runs(self, added: set[str]) -> set[str]:
        """Return the runs of all logs, and note those that are new."""
        runs = self._noted | added
        if runs != self._noted:
            own = self._logs.child(self._own.name)
            own.write_json(catalog.RUNS_FILE, sorted(runs))
            self._noted = runs
        for name in self._known:
            log = self._logs.child(name)
            if log.file_size(catalog.RUNS_FILE) is not None:
                named = log.read_json(catalog.RUNS_FILE, list[str])
                runs |= {require_received(run, self._own_urls) for run in named}
        return runs


def _needed_beside(
    found: Iterable[tuple[Manifest, bool]], base: Manifest, lines: Sequence[Line]
) -> list[Manifest]:
    """Return the checkpoints that are newer than the base, and those with deltas."""
    return [m for m, has_deltas in found if has_deltas or is_newer(m, base, lines)]


def _continued_checkpoints(
    runs: Iterable[str], left_out: Container[str]
) -> list[tuple[Manifest, bool]]:
    """Return what increments continue: the latest of each run, and all with deltas.

    With each, whether it has deltas.
    """
    found = []
    for run in runs:
        complete = [
            f
            for f in catalog.complete_checkpoints(Folder(run))
            if f.url not in left_out
        ]
        for place, folder in enumerate(complete):
            has_deltas = next(catalog.complete_deltas(folder), None) is not None
            if not place or has_deltas:
                found.append((Manifest.read(folder), has_deltas))
    return found


def _needed_increments(
    lines: Sequence[Line], checkpoints: Iterable[Manifest]
) -> dict[str, int]:
    """Return by log the first increment that continues some checkpoint, if any does."""
    needed: dict[str, int] = {}
    for manifest in checkpoints:
        for line in lines:
            begin = line.position_in(manifest) or line.position_after(manifest)
            for log, first, _ in line.segments(begin) if begin else ():
                needed[log] = min(needed.get(log, first), first)
    return needed
