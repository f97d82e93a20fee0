"""Write what changes on a server, increment after increment, while it is serving.

    server's thread                                  this thread
      journal --FlushRequest--> inbox  ------------> dirty set: each changed id once
      copies their rows <------ GatherRequest ------    |
                         -----------------------------> checksum --> file, number + 1

The server's thread never waits for this one, and all queues are bounded. An increment
begins when something has changed and the previous one is written, so a slow file system
makes increments larger and fewer. A failure ends the log: none is ever left out.

Dimension key:
    U: ids of one table, each once
    L: ids as requests named them
"""

import contextlib
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from persia_torchrec.checkpoint.catalog import MANIFEST
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increments import (
    LOG_FILE,
    Log,
    increment_name,
    list_increments,
)
from persia_torchrec.checkpoint.row_file import IncrementHead, RowFileWriter, Written
from persia_torchrec.checkpoint.task import BackgroundTask
from persia_torchrec.compiled import read_only
from persia_torchrec.errors import CheckpointError
from persia_torchrec.routing.hashing import Ids
from persia_torchrec.routing.shard import unique_ids
from persia_torchrec.store.journal import Changes
from persia_torchrec.store.row_columns import POSITION_BITS, RowColumns
from persia_torchrec.store.row_export import gather_rows
from persia_torchrec.store.shard_memory import ShardMemory

Uses = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]
T = TypeVar("T")

_LAST_OFFSET = np.uint64(2**POSITION_BITS - 1)
_MAX_REQUESTS = 8
_REQUEST_BYTES = 2**18
_NICE = 10
_CHECK_S = 0.1


@dataclass(frozen=True, slots=True)
class DirtyIds:
    """The ids of one table whose rows have changed, each once; ``(U,)`` each."""

    ids: Ids
    latest: Uses
    """When each was last used, such that the maximum of several is the last: the tick
    of the request, and in the lowest 24 bits the largest offset minus the offset in it.
    0 where it was not used."""
    have_left: Bools
    """Whether its row left at some moment; it may be back."""

    @property
    def uses(self) -> Uses:
        """When each was last used, as in ``RowColumns``; 0 where it was not."""
        return np.where(self.latest == 0, self.latest, self.latest ^ _LAST_OFFSET)

    def __len__(self) -> int:
        return len(self.ids)

    def split(self, num_ids: int) -> Iterator["DirtyIds"]:
        """Yield all of it in slices."""
        for start in range(0, len(self), num_ids):
            part = slice(start, start + num_ids)
            yield DirtyIds(self.ids[part], self.latest[part], self.have_left[part])


class DirtySet:
    """Which rows have changed since the previous increment, by number of the table."""

    def __init__(self) -> None:
        self.tables: dict[int, DirtyIds] = {}
        self.was_cleared = False

    def add(self, changes: Changes) -> None:
        """Add what a journal noted next."""
        if changes.was_cleared:
            self.tables, self.was_cleared = {}, True
        named: dict[int, list[DirtyIds]] = {}
        for used in changes.used:
            ids_L = used.in_order()
            offsets = np.minimum(np.arange(len(ids_L), dtype=np.uint64), _LAST_OFFSET)
            latest_L = np.uint64(used.tick << POSITION_BITS) | (_LAST_OFFSET - offsets)
            named.setdefault(used.table, []).append(_named(ids_L, latest_L))
        for table, ids_L in changes.updated:
            named.setdefault(table, []).append(_named(ids_L))
        for left in changes.left:
            for owner in np.unique(left[:, 1]).tolist():
                ids_L = left[left[:, 1] == owner, 0]
                named.setdefault(owner - 1, []).append(_named(ids_L, has_left=True))
        for table, pieces in named.items():
            known = [self.tables[table]] if table in self.tables else []
            self.tables[table] = _merge([*known, *pieces])


def _named(
    ids_L: Ids, latest_L: Uses | None = None, *, has_left: bool = False
) -> DirtyIds:
    if latest_L is None:
        latest_L = np.zeros(len(ids_L), np.uint64)
    return DirtyIds(ids_L, latest_L, np.full(len(ids_L), has_left))


def _merge(pieces: Sequence[DirtyIds]) -> DirtyIds:
    """Return all ids, each once with its latest use."""
    unique = unique_ids(np.concatenate([piece.ids for piece in pieces]))
    latest_U = np.zeros(len(unique.ids), dtype=np.uint64)
    latest_L = np.concatenate([piece.latest for piece in pieces])
    np.maximum.at(latest_U, unique.inverse, latest_L)
    have_left_U = np.zeros(len(unique.ids), dtype=np.bool_)
    have_left_L = np.concatenate([piece.have_left for piece in pieces])
    have_left_U[unique.inverse[have_left_L]] = True
    return DirtyIds(read_only(unique.ids.copy()), latest_U, have_left_U)


FlushRequest = tuple[Changes, IncrementHead]
"""What a journal noted, and the head of an increment that would begin then."""


@dataclass(slots=True)
class GatherRequest:
    """Rows that the server's thread is to copy; ``found``: which ids have one."""

    table: int
    ids: DirtyIds
    rows: RowColumns
    found: Bools


class IncrementWriter(BackgroundTask):
    """Writes one log while its phase is ``writing``; the server's thread calls it.

    Args:
        folder: of all logs.
        max_requests: flush requests that may wait.
        max_ids: different ids of these that one increment may have, or some more.

    Attributes:
        number: of the increment that is being written, or will be next.
        inbox: takes flush requests.
        dumps: takes the folder of each dump that begins, and the first increment that
            applies to it. Increments that no complete dump needs are deleted.
        ending: set to write what is left, and end the thread.
        num_rows, num_bytes: written.
    """

    def __init__(
        self, folder: Folder, log: Log, *, max_requests: int, max_ids: int
    ) -> None:
        super().__init__(f"Writing log {log.name}")
        self.log = log
        self.number = 1
        self.num_rows = self.num_bytes = 0
        self._folder = folder.child(log.name)
        self._max_ids = max_ids
        self.inbox: queue.Queue[FlushRequest] = queue.Queue(max_requests)
        self.dumps: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self.ending = threading.Event()
        # At most _MAX_REQUESTS are in both queues together.
        self._to_gather: queue.SimpleQueue[tuple[int, DirtyIds]] = queue.SimpleQueue()
        self._gathered: queue.SimpleQueue[GatherRequest] = queue.SimpleQueue()
        self._dirty = DirtySet()
        self._head: IncrementHead | None = None
        self._num_flushes = 0  # in the next increment
        self._known_dumps: list[tuple[str, int]] = []
        self._start("writing", self._run, "written")

    @property
    def is_writing(self) -> bool:
        """Whether a flush request is not written yet."""
        return self.inbox.unfinished_tasks > 0

    @property
    def wants_rows(self) -> bool:
        """Whether :meth:`gather` has something to do."""
        return not self._to_gather.empty()

    def gather(self, memory: ShardMemory) -> bool:
        """Copy the next rows that are wanted; return False if there are none."""
        try:
            table, ids = self._to_gather.get_nowait()
        except queue.Empty:
            return False
        found = gather_rows(memory, table, ids.ids)
        self._gathered.put(GatherRequest(table, ids, *found))
        return True

    def cancel(self) -> None:
        """Give up what is not written, without waiting for the thread."""
        self._cancelled.set()
        _drain(self.inbox)

    def _run(self) -> None:
        try:
            if sys.platform == "linux":  # a thread has a priority of its own there
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            self._folder.make()
            self.log.write(self._folder)
            while True:
                is_last = self.ending.is_set()
                self._take_flushes(_CHECK_S)
                if self._head is not None:
                    self._write_next(self._head)
                elif is_last:
                    return
        except CheckpointError:
            if self._cancelled.is_set() and self.number == 1:  # the log is empty
                with contextlib.suppress(Exception):  # a leftover does no harm
                    self._folder.remove(LOG_FILE)
            raise

    def _write_next(self, head: IncrementHead) -> None:
        dirty, num_flushes = self._dirty, self._num_flushes
        self._dirty, self._head, self._num_flushes = DirtySet(), None, 0
        head = msgspec.structs.replace(
            head, number=self.number, was_cleared=dirty.was_cleared
        )
        written = self._write(dirty, head)
        self.num_rows += written.num_rows
        self.num_bytes += written.size_bytes
        self.number += 1
        for _ in range(num_flushes):
            self.inbox.task_done()
        self._prune(_drain(self.dumps))

    def _write(self, dirty: DirtySet, head: IncrementHead) -> Written:
        requests = deque(
            (table, part)
            for table, ids in dirty.tables.items()
            for part in ids.split(
                max(_REQUEST_BYTES // head.tables[table].shape.row_bytes, 1)
            )
        )
        num_open = 0
        with self._folder.created(increment_name(head.number)) as file:
            writer = RowFileWriter(file, head)
            while requests or num_open:
                while requests and num_open < _MAX_REQUESTS:
                    self._to_gather.put(requests.popleft())
                    num_open += 1
                with contextlib.suppress(queue.Empty):
                    copied = self._gathered.get(timeout=_CHECK_S)
                    num_open -= 1
                    ids, found_N = copied.ids, copied.found
                    copied.rows.uses[:] = ids.uses[found_N]
                    writer.write_rows(copied.table, copied.rows)
                    has_gone_N = ~found_N & ids.have_left
                    writer.write_gone(copied.table, ids.ids[has_gone_N])
                self._take_flushes(0)
            return writer.end()

    def _take_flushes(self, timeout_s: float) -> None:
        """Add the flush requests that have come to the next increment."""
        self._require_not_cancelled()
        with contextlib.suppress(queue.Empty):
            while sum(map(len, self._dirty.tables.values())) < self._max_ids:
                changes, self._head = self.inbox.get(timeout_s > 0, timeout_s)
                timeout_s = 0
                self._dirty.add(changes)
                self._num_flushes += 1

    def _prune(self, begun: list[tuple[str, int]]) -> None:
        """Delete increments that no follower of a complete checkpoint needs.

        Of each run the latest one counts that began before these dumps.
        """
        if not begun:
            return
        latest: dict[str, int] = {}
        for url, number in self._known_dumps:
            run = url.rpartition("/")[0]
            if Folder(url).file_size(MANIFEST) is not None:
                latest[run] = max(number, latest.get(run, 0))
        self._known_dumps += begun
        first = min(latest.values(), default=0)
        for number in list_increments(self._folder) if first else ():
            if number < first:
                self._folder.remove(increment_name(number))
        self._known_dumps = [dump for dump in self._known_dumps if dump[1] >= first]


def _drain(items: "queue.Queue[T] | queue.SimpleQueue[T]") -> list[T]:
    taken = []
    with contextlib.suppress(queue.Empty):
        while True:
            taken.append(items.get_nowait())
    return taken
