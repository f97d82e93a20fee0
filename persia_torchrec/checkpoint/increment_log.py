"""Write what changes on a server, increment after increment, while it goes on serving.

    server's thread                            this thread
      journal --cut--> inbox  ---------------> which ids have changed, each once
      gathers their rows <----- asked --------    |
                         ------ gathered -------> checksum --> file, number + 1

The server's thread never waits for this one: it hands over what the journal noted, and
copies rows when it has time. All queues are bounded.

An increment is begun when something has changed and the one before is written, so that
a file system that is slow makes increments larger and fewer. When it fails, the log
ends: an increment is never left out. Where the server's thread has no processor for
itself, this one waits.
"""

import contextlib
import dataclasses
import logging
import os
import queue
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from persia_torchrec.checkpoint import manifest
from persia_torchrec.checkpoint.block_file import Written
from persia_torchrec.checkpoint.changes import Bools, ChangedIds, PendingChanges
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increment_file import (
    IncrementHead,
    IncrementWriter,
    increment_name,
)
from persia_torchrec.checkpoint.log_folder import LOG_FILE, LogInfo, increments_in
from persia_torchrec.errors import CheckpointError
from persia_torchrec.store.journal import Changes
from persia_torchrec.store.row_columns import RowColumns

logger = logging.getLogger(__name__)

_MAX_ASKED = 8
_PART_BYTES = 2**18
_NICE = 10
_CHECK_S = 0.1


@dataclass(frozen=True, slots=True)
class Cut:
    """What a journal noted, and how far the server had come then.

    Attributes:
        changes: since the cut before.
        head: of the increment that would begin now; its number, and whether rows were
            dropped, are not looked at.
    """

    changes: Changes
    head: IncrementHead


@dataclass(frozen=True, slots=True)
class Asked:
    """Rows that are to be gathered.

    Attributes:
        table: number of the table.
        changed: their ids.
    """

    table: int
    changed: ChangedIds


@dataclass(frozen=True, slots=True)
class _Gathered:
    asked: Asked
    rows: RowColumns
    found: Bools


class IncrementLog:
    """A thread that writes one log. The server's thread calls all methods.

    Args:
        folder: of all logs.
        info: of this one.
        max_cuts: cuts that may wait.
        max_ids: different ids of these that may be put together meanwhile.

    Attributes:
        info: of this log.
        number: of the increment that is being written, or will be next.
        num_rows: rows written.
        num_bytes: bytes written.
        error: what made it fail; None so far.
    """

    def __init__(
        self, folder: Folder, info: LogInfo, *, max_cuts: int, max_ids: int
    ) -> None:
        self.info = info
        self.number = 1
        self.num_rows = self.num_bytes = 0
        self.error: Exception | None = None
        self._all = folder
        self._max_ids = max_ids
        self._inbox: queue.Queue[Cut] = queue.Queue(max_cuts)
        self._dumps: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._asked: queue.Queue[Asked] = queue.Queue(_MAX_ASKED)
        # No more are asked for than fit: whoever was asked can always answer.
        self._gathered: queue.Queue[_Gathered] = queue.Queue(_MAX_ASKED)
        self._next = PendingChanges()
        self._head: IncrementHead | None = None
        self._num_cuts = 0  # in the next increment
        self._ending = threading.Event()
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="increments")
        self._thread.daemon = True
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether :meth:`add` may be called."""
        return not self._inbox.full()

    @property
    def is_writing(self) -> bool:
        """Whether a cut that was handed over is not written yet."""
        return self._inbox.unfinished_tasks > 0

    @property
    def asks(self) -> bool:
        """Whether rows are asked for now."""
        return not self._asked.empty()

    def add(self, cut: Cut) -> None:
        """Hand over what has changed since; there must be room."""
        self._inbox.put_nowait(cut)

    def next_asked(self) -> Asked | None:
        """Return which rows to gather, if any are asked for."""
        try:
            return self._asked.get_nowait()
        except queue.Empty:
            return None

    def put(self, asked: Asked, rows: RowColumns, found: Bools) -> None:
        """Hand over rows that were asked for, as they are now, and which were there."""
        self._gathered.put_nowait(_Gathered(asked, rows, found))

    def note_dump(self, url: str, number: int) -> None:
        """A dump into a folder begins, on which the log can be put from a number on.

        Increments that are older than the latest complete dump before it are deleted.
        """
        self._dumps.put((url, number))

    def end(self) -> None:
        """Write what is left; :attr:`is_over` says when that is done."""
        self._ending.set()

    def cancel(self) -> None:
        """Give up what is not written. Nobody has to wait for that."""
        self._cancelled.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be written."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            _yield_to_others()
            self._folder = self._all.child(self.info.name)
            self._folder.make()
            self.info.write(self._folder)
            self._write_all()
        except _CancelledError:
            logger.debug("log %s was given up", self.info.name)
            if self.number == 1:  # nothing is in it
                with contextlib.suppress(Exception):  # it does no harm
                    self._folder.remove(LOG_FILE)
        except Exception as exc:  # handed to whoever looks at the error
            if not isinstance(exc, CheckpointError):
                logger.exception("writing log %s failed", self.info.name)
            self.error = exc

    def _write_all(self) -> None:
        pruning = _Pruning(self._folder)
        while True:
            is_last = self._ending.is_set()
            self._take_cuts(_CHECK_S)
            if self._head is None:
                if is_last:
                    return
                continue
            pending = self._next
            head = dataclasses.replace(
                self._head, number=self.number, was_cleared=pending.was_cleared
            )
            num_cuts = self._num_cuts
            self._next, self._head, self._num_cuts = PendingChanges(), None, 0
            written = self._write(pending, head)
            self.num_rows += written.num_rows
            self.num_bytes += written.size_bytes
            self.number += 1
            for _ in range(num_cuts):
                self._inbox.task_done()
            pruning.prune(self._take_dumps())

    def _write(self, pending: PendingChanges, head: IncrementHead) -> Written:
        with self._folder.created(increment_name(head.number)) as file:
            writer = IncrementWriter(file, head)
            for done in self._all_gathered(_parts(pending, head)):
                rows, found_N, changed = done.rows, done.found, done.asked.changed
                rows.uses[:] = changed.uses[found_N]
                writer.write_rows(done.asked.table, rows)
                gone_N = changed.ids[~found_N & changed.have_left]
                writer.write_gone(done.asked.table, gone_N)
            return writer.end()

    def _all_gathered(self, parts: Iterator[Asked]) -> Iterator[_Gathered]:
        """Ask for rows, some parts ahead, and yield them as they come."""
        num_open = 0
        part = next(parts, None)
        while part is not None or num_open:
            while part is not None and num_open < _MAX_ASKED:
                self._asked.put_nowait(part)
                num_open += 1
                part = next(parts, None)
            with contextlib.suppress(queue.Empty):
                done = self._gathered.get(timeout=_CHECK_S)
                num_open -= 1
                yield done
            self._take_cuts(0)

    def _take_cuts(self, timeout_s: float) -> bool:
        """Add the cuts that have come to the next increment; return if any had."""
        if self._cancelled.is_set():
            raise _CancelledError
        any_came = False
        with contextlib.suppress(queue.Empty):
            while self._next.num_ids < self._max_ids:
                if timeout_s and not any_came:
                    cut = self._inbox.get(timeout=timeout_s)
                else:
                    cut = self._inbox.get_nowait()
                any_came = True
                self._next.add(cut.changes)
                self._head = cut.head
                self._num_cuts += 1
        return any_came

    def _take_dumps(self) -> list[tuple[str, int]]:
        dumps = []
        with contextlib.suppress(queue.Empty):
            while True:
                dumps.append(self._dumps.get_nowait())
        return dumps


class _Pruning:
    """Deletes increments that nobody needs who follows a complete checkpoint.

    Of each folder of checkpoints the latest complete one counts.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._dumps: list[tuple[str, int]] = []

    def prune(self, begun: list[tuple[str, int]]) -> None:
        """Note dumps that have begun; keep what is needed from the latest complete."""
        if not begun:
            return
        latest: dict[str, int] = {}
        for url, number in self._dumps:
            run = url.rpartition("/")[0]
            if Folder(url).size_of(manifest.NAME) is not None:
                latest[run] = max(number, latest.get(run, 0))
        self._dumps += begun
        if not latest:
            return
        first = min(latest.values())
        for number in increments_in(self._folder):
            if number < first:
                self._folder.remove(increment_name(number))
        self._dumps = [dump for dump in self._dumps if dump[1] >= first]


def _parts(pending: PendingChanges, head: IncrementHead) -> Iterator[Asked]:
    for table, changed in pending.tables.items():
        row_bytes = head.tables[table].shape.row_bytes
        for part in changed.parts(max(_PART_BYTES // row_bytes, 1)):
            yield Asked(table, part)


def _yield_to_others() -> None:
    """Let other threads have the processor first, where a thread can say that."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class _CancelledError(Exception):
    """The log was given up."""
