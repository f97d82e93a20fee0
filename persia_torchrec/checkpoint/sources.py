"""From where to follow a training: a checkpoint, and a place in each server's log.

A server of the training begins a new log whenever its rows are others, so that of each
server the log that began last tells what is true now. It can be followed from a
checkpoint that says where in all of the logs its dump began, or which is what all of
them are based on: not some so and some so, since these would be of two runs. Where
there are several such checkpoints, the latest has the fewest increments after it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.log_folder import LogInfo
from persia_torchrec.checkpoint.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Source:
    """Where to go on in the log of one server.

    Attributes:
        log: name of its folder.
        number: of the next increment.
    """

    log: str
    number: int


@dataclass(frozen=True, slots=True)
class Start:
    """From where a training can be followed.

    Attributes:
        folder: of the checkpoint.
        created: when it was, as its manifest says.
        sources: one a server of the training, in the order of their shards.
    """

    folder: Folder
    created: str
    sources: tuple[Source, ...]

    @property
    def logs(self) -> tuple[str, ...]:
        """Names of the logs."""
        return tuple(source.log for source in self.sources)


def latest_logs(logs: Sequence[LogInfo]) -> list[LogInfo]:
    """Return the log that each server of the training writes now, by shard.

    Args:
        logs: all, those that began first first.

    Returns:
        One a server; none if there is none, or while a server has not begun its own.
    """
    if not logs:
        return []
    num_shards = logs[-1].num_shards
    latest = {log.shard: log for log in logs if log.num_shards == num_shards}
    if len(latest) < num_shards:
        return []
    return [latest[shard] for shard in range(num_shards)]


def find_start(
    logs: Sequence[LogInfo], checkpoints: Iterable[tuple[Folder, Manifest]]
) -> Start | None:
    """Return from where to follow some logs.

    Args:
        logs: of :func:`latest_logs`.
        checkpoints: that are complete, the latest first.

    Returns:
        The latest checkpoint that fits, and the first increments after it; or None.
    """
    for folder, manifest in checkpoints if logs else ():
        for source_of in (_by_place, _by_base):
            found = [source_of(log, manifest) for log in logs]
            sources = tuple(source for source in found if source is not None)
            if len(sources) == len(logs):
                return Start(folder, manifest.created, sources)
    return None


def find_end(
    logs: Sequence[LogInfo], folder: Folder, manifest: Manifest
) -> Start | None:
    """Return from where to go on from a checkpoint to the end of a training.

    Args:
        logs: all, those that began first first.
        folder: of the checkpoint.
        manifest: of the checkpoint.

    Returns:
        The last logs, one of each server, that can be put on the checkpoint; or None.
    """
    candidates = [
        latest_logs([log for log in logs if source_of(log, manifest) is not None])
        for source_of in (_by_place, _by_base)
    ]
    last = max(candidates, key=lambda found: found[0].begun if found else "")
    return find_start(last, [(folder, manifest)])


def _by_place(log: LogInfo, manifest: Manifest) -> Source | None:
    """Return where the dump began in a log."""
    if len(manifest.shards) != log.num_shards:
        return None
    place: Mapping[str, object] = manifest.shards[log.shard].log or {}
    number = place.get("number")
    is_of_it = place.get("log") == log.name and isinstance(number, int)
    return Source(log.name, int(str(number))) if is_of_it else None


def _by_base(log: LogInfo, manifest: Manifest) -> Source | None:
    """Return the beginning of a log that was begun on the checkpoint."""
    is_of_it = log.base.kind == "checkpoint" and log.base.created == manifest.created
    return Source(log.name, 1) if is_of_it else None
