"""Which increments of a server's folder stay, and which are deleted.

An increment stays if it continues a complete checkpoint: the latest of a run, or one
that has deltas; where there is a base (``base.py``): the base, what is newer, or has
deltas. So it does not matter who deletes checkpoints, and a server that is killed
before it has deleted increments deletes them later. Each log has a list of the runs
that were dumped to while it was written.
"""

import logging
from collections import deque
from collections.abc import Container, Iterable, Sequence

from persia_torchrec.checkpoint import base, catalog, increment_log
from persia_torchrec.checkpoint.catalog import Manifest
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increment_log import Line, Log
from persia_torchrec.errors import CheckpointError

logger = logging.getLogger(__name__)


class Retention:
    """Deletes what no checkpoint needs of the logs of one shard, with the ``own`` log.

    Of the logs of other numbers of servers, those of shards that are no more go to the
    first ones. The thread that writes the log calls it; any may add to ``begun``, the
    folders of dumps that have begun.
    """

    def __init__(self, logs: Folder, own: Log) -> None:
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
            lines = increment_log.find_lines(self._logs, self._known)
            runs = self._read_runs({url.rpartition("/")[0] for url in begun})
            left_out = set() if counts_begun else begun
            continued = _continued_checkpoints(runs, left_out)
            kept = [manifest for manifest, _ in continued]
            if (found := base.read_base(self._logs)) is not None:
                kept = [found[1], *_needed_beside(continued, found[1])]
            needed = _needed_increments(lines, kept)
            for name in self._logs.names() if kept else ():
                shard = increment_log.shard_of_log(name)
                if shard is not None and shard % num_shards == self._own.shard:
                    self._prune(name, needed)
        except CheckpointError as exc:
            logger.warning("increments that no checkpoint needs stay: %s", exc)

    def _prune(self, name: str, needed: dict[str, int]) -> None:
        folder = self._logs.child(name)
        if name not in needed and name != self._own.name:
            # First: what is half deleted is no log, and deleted the next time.
            folder.remove(increment_log.LOG_FILE)
            folder.remove_all()
            self._known.pop(name, None)
            return
        for number in increment_log.list_increments(folder):
            if number < needed.get(name, 1):
                folder.remove(increment_log.increment_name(number))

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
                runs = runs | set(log.read_json(catalog.RUNS_FILE, list[str]))
        return runs


def _needed_beside(
    found: Iterable[tuple[Manifest, bool]], base: Manifest
) -> list[Manifest]:
    """Return the checkpoints that are newer than the base, and those with deltas."""
    return [m for m, has_deltas in found if has_deltas or m.created > base.created]


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
