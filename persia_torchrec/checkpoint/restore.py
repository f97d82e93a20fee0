"""Restore a server without memory from checkpoint and increments.

    a complete checkpoint --> its rows of this server --> the increments behind it

The newest checkpoint is taken that the log of this server follows; without one, the
increments of a log that began with no rows; else the newest checkpoint alone. What
cannot be read is left out, and the next best is taken. The other servers keep their
rows: those of this one are older, by what had not been written.
"""

import logging
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from persia_torchrec.checkpoint import catalog, increment_log
from persia_torchrec.checkpoint.catalog import LogPosition, Manifest
from persia_torchrec.checkpoint.fitting import Drops
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increment_log import Base, Line
from persia_torchrec.checkpoint.load import (
    Increment,
    SeenIds,
    ShardLoad,
    Target,
    apply_increment,
)
from persia_torchrec.checkpoint.row_file import IncrementHead
from persia_torchrec.errors import CheckpointError
from persia_torchrec.store import memory
from persia_torchrec.store.embedding_store import EmbeddingStore

logger = logging.getLogger(__name__)


class Restored(NamedTuple):
    """What was restored; ``base`` and ``history`` are those of the next log.

    ``written_s`` is when the last of it was written, in seconds since 1970, or None.
    """

    checkpoint: str = ""  # its URL, if there was one
    num_increments: int = 0
    written_s: float | None = None
    base: Base = Base("empty")
    history: str = ""


class _Plan(NamedTuple):
    """A checkpoint, if any, and where the log of this server continues it."""

    checkpoint: tuple[Folder, Manifest] | None
    line: Line | None = None
    position: LogPosition | None = None


class _Applied(NamedTuple):
    """The increments that were applied, and where the next one would be."""

    heads: list[IncrementHead]
    position: LogPosition
    is_all: bool  # whether there are no others


def restore(
    store: EmbeddingStore, target: Target, run: Folder | None, logs: Folder | None
) -> Restored:
    """Restore the rows of a server into its store, which has none, and its tables.

    ``run`` is the folder of the job's checkpoints, ``logs`` that of its increments.
    """
    lines = [] if logs is None else increment_log.find_lines(logs, {})
    own = [line for line in lines if line.is_of(target.shard, target.num_shards)]
    store.rows.is_loading, found = True, Restored()  # the next process begins again
    for plan in _plans(lines, own[-1] if own else None, run, logs):
        try:
            found = _carry_out(plan, store, target, logs)
            break
        except CheckpointError as exc:
            logger.warning(
                "skipping unreadable checkpoint, falling back to an older one: %s", exc
            )
            store.clear()
    store.rows.is_loading = False
    if num_evicted := int(store.rows.tally[memory.EVICTED]):
        logger.warning(
            "%d restored rows were evicted: the server has room for %d: "
            "raise --capacity, or add servers",
            num_evicted,
            store.rows.capacity_rows,
        )
    return found


def _plans(
    lines: Sequence[Line], line: Line | None, run: Folder | None, logs: Folder | None
) -> Iterator[_Plan]:
    """Yield what can be restored, the best first; ``line`` is this server's last."""
    others = []
    found = list(_checkpoints(run))
    if logs is not None and (base := increment_log.read_base(logs)) is not None:
        newer = [increment_log.is_newer(m, base[1], lines) for _, m in found]
        found.insert((*newer, False).index(False), base)
    for checkpoint in found:
        position = None
        if line is not None:
            _, manifest = checkpoint
            position = line.position_in(manifest) or line.position_after(manifest)
        if position is None:
            others.append(_Plan(checkpoint))
        else:
            yield _Plan(checkpoint, line, position)
    if line is not None and line.logs[-1].base.kind == "empty":
        yield _Plan(None, line, LogPosition(line.logs[-1].name, 1))
    yield from others


def _checkpoints(run: Folder | None) -> Iterator[tuple[Folder, Manifest]]:
    for folder in () if run is None else catalog.complete_checkpoints(run):
        try:
            manifest = Manifest.read(folder)
        except CheckpointError as exc:
            logger.warning(
                "skipping unreadable checkpoint, falling back to an older one: %s", exc
            )
        else:
            yield folder, manifest


def _carry_out(
    plan: _Plan, store: EmbeddingStore, target: Target, logs: Folder | None
) -> Restored:
    url, written_s, of_rows = "", None, Base("empty")
    dumped = 0  # tick of the end of the dump, if increments follow from its beginning
    if plan.checkpoint is not None:
        folder, manifest = plan.checkpoint
        load = ShardLoad(folder, target, store)
        load.check()
        load.load()
        url, of_rows = folder.url, load.base
        written_s = written_at(folder, manifest)
        if plan.line is not None and not plan.line.position_after(manifest):
            dumped = manifest.shards[target.shard].tick
    if logs is None or plan.line is None or plan.position is None:
        return Restored(url, written_s=written_s, base=of_rows)
    applied = _apply(plan.line, plan.position, store, target, logs)
    last_tick = applied.heads[-1].tick if applied.heads else 0
    if not applied.heads and plan.checkpoint is None:
        path = logs.child(plan.position.log).file_path(increment_log.increment_name(1))
        raise CheckpointError(f"{path} must exist. Received: no such file.")
    # Else a follower lacks what the dump took after the last increment.
    is_exact = applied.is_all and last_tick >= dumped
    histories = {log.name: log.history for log in plan.line.logs}
    if of_rows.kind != "unknown":  # rows were left out
        of_rows = Base("log", parent=applied.position)
    return Restored(
        url,
        len(applied.heads),
        applied.heads[-1].created_s if applied.heads else written_s,
        of_rows,
        histories[applied.position.log] if is_exact else "",
    )


def _apply(
    line: Line,
    position: LogPosition,
    store: EmbeddingStore,
    target: Target,
    logs: Folder,
) -> _Applied:
    """Apply the increments from a position on, as long as they can be read."""
    heads: list[IncrementHead] = []
    seen, drops = SeenIds(store, target), Drops()
    for name, first, stop in line.segments(position):
        log = logs.child(name)
        last = (
            max(increment_log.list_increments(log), default=0)
            if stop is None
            else stop - 1
        )
        for number in range(first, last + 1):
            try:
                increment = Increment.read(log, number).select(target)
            except CheckpointError as exc:
                logger.warning("skipping this increment and later ones: %s", exc)
                place = LogPosition(name, number)
                seen.put()
                return _Applied(heads, place, is_all=False)
            for _ in apply_increment(store, increment, seen, drops=drops):
                pass
            heads.append(increment.head)
        position = LogPosition(name, max(first, last + 1))
    seen.put()
    return _Applied(heads, position, is_all=True)


def written_at(folder: Folder, manifest: Manifest) -> float:
    """Return when a checkpoint was written, in seconds since 1970."""
    try:
        return datetime.fromisoformat(manifest.created).timestamp()
    except (ValueError, OverflowError) as exc:
        raise CheckpointError(
            f"{folder.file_path(catalog.MANIFEST)}: created must be a date. Received: "
            f"{manifest.created!r:.100}."
        ) from exc
