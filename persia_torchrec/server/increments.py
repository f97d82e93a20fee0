"""Write the increments of a training server, in the background of its requests.

    serving thread                                   writing thread
      journal --FlushRequest--> inbox  ------------> dirty set: each changed id once
      copies their rows <---- slices of ids --------    |
                         -----------------------------> checksum --> file, number + 1

The serving thread never waits for the other. An increment begins when something has
changed and the previous one is written, so a slow file system makes increments larger
and fewer; what waits is bounded. A failed write ends the log, and training continues: a
new log starts after RETRY_S, once the blocked write has returned, and followers must
reload from the next checkpoint. A load also ends the log; the next one can be followed
from the checkpoint that was loaded. A server that lost its memory continues the log
that it has restored its rows from.

Dimension key:
    U: ids of one table, each once
    L: ids as requests named them
"""

import contextlib
import logging
import math
import os
import queue
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from persia_torchrec.checkpoint import catalog
from persia_torchrec.checkpoint.background import Activity, BackgroundTask, CpuBudget
from persia_torchrec.checkpoint.catalog import Base, Log, LogPosition
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.row_file import IncrementHead, RowFileWriter, SavedTable
from persia_torchrec.compiled import read_only
from persia_torchrec.errors import CheckpointError
from persia_torchrec.routing.hashing import Ids
from persia_torchrec.routing.shard import unique_ids
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.journal import Changes
from persia_torchrec.store.row_moves import POSITION_BITS, RowColumns, gather_rows

logger = logging.getLogger(__name__)

Uses = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

RETRY_S = 10.0  # how soon after a failure a new log begins
_CPU_FRACTION = 0.1  # of a CPU that copying rows takes while requests for rows arrive
_MAX_BUFFERS = 32  # how many times ``incremental_buffer_rows`` one increment may have
_LAST_OFFSET = np.uint64(2**POSITION_BITS - 1)
_MAX_SLICES = 8  # copied slices that may wait to be written
_SLICE_BYTES = 2**18
_NICE = 10
_CHECK_S = 0.1
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class DirtyIds:
    """The ids of one table whose rows have changed, each once; ``(U,)`` each."""

    ids: Ids
    latest: Uses
    """When each was last used, such that the maximum of several is the last: the tick
    of the request, and in the lowest 24 bits the largest offset minus the offset in it.
    0 where it was not used."""
    have_left: Bools  # whether its row left at some moment; it may be back

    @property
    def uses(self) -> Uses:
        """When each was last used, as in ``RowColumns``; 0 where it was not."""
        return np.where(self.latest == 0, self.latest, self.latest ^ _LAST_OFFSET)

    def split(self, num_ids: int) -> Iterator["DirtyIds"]:
        """Yield all of it in slices."""
        for start in range(0, len(self.ids), num_ids):
            part = slice(start, start + num_ids)
            yield DirtyIds(self.ids[part], self.latest[part], self.have_left[part])


class DirtySet:
    """Which rows have changed since the previous increment, by number of the table."""

    def __init__(self) -> None:
        self.tables: dict[int, DirtyIds] = {}
        self.was_cleared = False

    def __len__(self) -> int:
        return sum(len(dirty.ids) for dirty in self.tables.values())

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
    latest_L = np.zeros(len(ids_L), np.uint64) if latest_L is None else latest_L
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


class IncrementWriter(BackgroundTask):
    """Writes one log while its phase is ``writing``; the serving thread calls it.

    ``number`` is that of the increment which is being written, or will be next.
    ``inbox`` has flush requests until they are written, ``dumps`` the folder of each
    dump that has begun, and the first increment that applies to it: increments that no
    complete dump needs are deleted. ``ending`` makes the thread write what is left.
    """

    def __init__(self, folder: Folder, log: Log, config: ServerConfig) -> None:
        super().__init__(f"Writing log {log.name}")
        self.log = log
        self.number = 1
        self.written = Counter(increment_rows=0, increment_bytes=0)
        self._folder = folder.child(log.name)
        self._max_ids = _MAX_BUFFERS * config.incremental_buffer_rows
        self.inbox: queue.Queue[FlushRequest] = queue.Queue(config.incremental_queue)
        self.dumps: deque[tuple[str, int]] = deque()
        self.ending = threading.Event()
        self._wanted: deque[tuple[int, DirtyIds]] = deque()
        self._copied: queue.SimpleQueue[tuple[int, DirtyIds, RowColumns, Bools]]
        self._copied = queue.SimpleQueue()
        self._dirty = DirtySet()
        self._head: IncrementHead | None = None
        self._num_flushes = 0  # in the next increment
        self._last_cut = self.num_cuts_written = 0
        self._known_dumps: list[tuple[str, int]] = []
        self.start("writing", self._run, "written")

    @property
    def wants_rows(self) -> bool:
        """Whether :meth:`copy_rows` has something to do."""
        return bool(self._wanted) and self._copied.qsize() < _MAX_SLICES

    def copy_rows(self, store: EmbeddingStore) -> None:
        """Copy the next rows that are wanted."""
        table, dirty = self._wanted.popleft()
        self._copied.put((table, dirty, *gather_rows(store, table, dirty.ids)))

    def cancel(self) -> None:
        """Give up what is not written, without waiting for the thread."""
        self.cancelled.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self.inbox.get_nowait()

    def _run(self) -> None:
        try:
            if sys.platform == "linux":  # a thread has a priority of its own there
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            self._folder.make()
            self._folder.write_json(catalog.LOG_FILE, self.log)
            while True:
                is_last = self.ending.is_set()
                self._take_flushes(_CHECK_S)
                if self._head is not None:
                    self._write_next(self._head)
                elif is_last:
                    return
        except CheckpointError:
            if self.cancelled.is_set() and self.number == 1:  # the log is empty
                with contextlib.suppress(Exception):  # a leftover does no harm
                    self._folder.remove(catalog.LOG_FILE)
            raise

    def _write_next(self, head: IncrementHead) -> None:
        dirty, num_flushes, last_cut = self._dirty, self._num_flushes, self._last_cut
        self._dirty, self._head, self._num_flushes = DirtySet(), None, 0
        head = msgspec.structs.replace(
            head, number=self.number, was_cleared=dirty.was_cleared
        )
        with self._folder.created(catalog.increment_name(self.number)) as file:
            writer = RowFileWriter(file, head)
            self._write_rows(writer, dirty, head)
            written = writer.end()
        self.written["increment_rows"] += written.num_rows
        self.written["increment_bytes"] += written.size_bytes
        self.number += 1
        self.num_cuts_written = last_cut
        for _ in range(num_flushes):
            self.inbox.task_done()
        self._prune()

    def _write_rows(
        self, writer: RowFileWriter, dirty: DirtySet, head: IncrementHead
    ) -> None:
        num_slices = 0
        for table, ids in dirty.tables.items():
            row_bytes = head.tables[table].shape.row_bytes
            for part in ids.split(max(_SLICE_BYTES // row_bytes, 1)):
                self._wanted.append((table, part))
                num_slices += 1
        while num_slices:
            with contextlib.suppress(queue.Empty):
                table, ids, rows, found_N = self._copied.get(timeout=_CHECK_S)
                num_slices -= 1
                rows.uses[:] = ids.uses[found_N]
                writer.write(table, rows)
                writer.write(table, ids.ids[~found_N & ids.have_left])
            self._take_flushes(0)

    def _take_flushes(self, timeout_s: float) -> None:
        """Add the flush requests that have come to the next increment."""
        self.require_not_cancelled()
        with contextlib.suppress(queue.Empty):
            while len(self._dirty) < self._max_ids:
                changes, self._head = self.inbox.get(timeout_s > 0, timeout_s)
                timeout_s = 0
                self._dirty.add(changes)
                self._last_cut = changes.number
                self._num_flushes += 1

    def _prune(self) -> None:
        """Delete increments that no complete checkpoint before the new dumps needs.

        Of each run the latest one counts.
        """
        if not self.dumps:
            return
        latest: dict[str, int] = {}
        for url, number in self._known_dumps:
            run = url.rpartition("/")[0]
            if Folder(url).file_size(catalog.MANIFEST) is not None:
                latest[run] = max(number, latest.get(run, 0))
        while self.dumps:
            self._known_dumps.append(self.dumps.popleft())
        first = min(latest.values(), default=0)
        for number in catalog.list_increments(self._folder) if first else ():
            if number < first:
                self._folder.remove(catalog.increment_name(number))
        self._known_dumps = [dump for dump in self._known_dumps if dump[1] >= first]


class Increments:
    """The logs of one server. The serving thread owns it.

    ``next_log`` is base and history of the one that :meth:`work` begins next.
    """

    def __init__(
        self, config: ServerConfig, store: EmbeddingStore, activity: Activity
    ) -> None:
        self._config = config
        self._store = store
        self._activity = activity
        self._budget = CpuBudget(_CPU_FRACTION, activity)
        self._writer: IncrementWriter | None = None
        self._failed: IncrementWriter | None = None  # the last one that did
        self._begin_s = -math.inf  # when the next log begins, if there is none
        self.next_log = Base("empty"), ""
        self._noted: Changes | None = None  # by the previous process
        self._flushed_s = 0.0
        names = "increment_rows", "increment_bytes", "increment_logs_failed"
        self._counts = Counter(dict.fromkeys(names, 0))  # of logs that have ended
        if config.incremental_dir is not None:
            self._folder = Folder(config.incremental_dir)
            self._folder.make()
            if store.states:  # in a memory file
                self.next_log = self._continue()

    def begin_dump(self, url: str) -> LogPosition | None:
        """Note that a dump into a folder begins; return the log's position, if any."""
        writer = self._writer
        if writer is None:
            return None
        number = writer.number  # the writer's thread counts up meanwhile
        writer.dumps.append((url, number))
        return LogPosition(writer.log.name, number)

    def suspend(self, *, keeps: bool = False) -> None:
        """Close the log: a load begins, or the process ends, and ``keeps`` the ring."""
        self._store.journal.end(keeps=keeps)
        self._begin_s = math.inf
        if self._writer is not None:
            self._counts.update(self._writer.written)
            self._writer.cancel()
            self._writer = None

    def _continue(self) -> tuple[Base, str]:
        """Return base and history of a log that continues the previous process's."""
        tokens, changes = self._store.journal.previous()
        lines = catalog.find_lines(self._folder, {})
        logs = {line.logs[0].token: line.logs[0] for line in lines}
        for log in [logs[token] for token in tokens if token in logs]:
            folder = self._folder.child(log.name)
            number = max(catalog.list_increments(folder), default=0) + 1
            self._noted = changes
            return Base("log", parent=LogPosition(log.name, number)), log.history
        return Base("unknown"), ""

    def begin_log(self, base: Base, history: str = "") -> None:
        """Begin a new log, if increments are written, on the current rows."""
        config = self._config
        if config.incremental_dir is None:
            return
        log = Log.begin(config.shard, config.num_shards, base, history)
        noted, self._noted = self._noted, None
        self._writer = IncrementWriter(self._folder, log, config)
        self._store.journal.begin(log.token, noted)
        self._flushed_s = self._activity.clock()
        logger.info("log %s begins, base=%s", log.name, base.kind)

    def work(self, idle_ms: int) -> int:
        """Flush, copy some rows, begin a log; return how long to wait for a message."""
        writer, config, now_s = self._writer, self._config, self._activity.clock()
        if writer is not None:
            self._store.journal.release(writer.num_cuts_written)
        is_full = self._store.journal.changes.num_ids >= config.incremental_buffer_rows
        is_due = is_full or now_s - self._flushed_s >= config.incremental_interval_s
        if writer is None:
            # A hanging file system blocks one thread at most.
            is_over = self._failed is None or self._failed.phase != "writing"
            if is_over and now_s >= self._begin_s:
                self._failed = None
                self.begin_log(*self.next_log)
                self.next_log = Base("unknown"), ""
        elif writer.error is not None:
            self._fail(writer, writer.error)
        elif is_full and writer.inbox.full():
            reason = (
                f"{config.incremental_queue} flush requests wait to be written to "
                f"{self._folder.url}, as many as may wait. Use a faster file system, "
                "or raise incremental_channel_capacity"
            )
            self._fail(writer, CheckpointError(reason))
        elif is_due and not writer.inbox.full():
            self._flush(writer)
        elif writer.wants_rows and self._budget.has_credit():
            with self._budget.spend():
                writer.copy_rows(self._store)
        writer = self._writer
        if writer is None or not writer.inbox.unfinished_tasks:
            return idle_ms
        return self._budget.wait_ms(idle_ms, is_ready=writer.wants_rows)

    def counters(self) -> dict[str, int]:
        """Return what has been written, and how often a log has failed."""
        if self._config.incremental_dir is None:
            return {}
        writer = self._writer
        is_empty = writer is not None and not writer.inbox.unfinished_tasks
        is_written = is_empty and self._store.journal.is_empty
        counts = self._counts.copy()
        counts.update({} if writer is None else writer.written)
        number = 0 if writer is None else writer.number - 1
        return {
            **counts,
            "increments": number,
            "increments_waiting": int(not is_written),
        }

    def close(self) -> None:
        """Write what is left, for ten seconds at most. May be called twice."""
        writer = self._writer
        if writer is None:
            return
        deadline = time.monotonic() + _CLOSE_S
        while writer.phase == "writing" and time.monotonic() < deadline:
            if self._store.journal.is_empty:
                writer.ending.set()
            elif not writer.inbox.full():
                self._flush(writer)
            if writer.wants_rows:
                writer.copy_rows(self._store)
            else:
                time.sleep(0.001)
        if writer.phase != "written":
            reason = writer.error or f"not written within {_CLOSE_S:g} s"
            logger.error("log %s is not complete: %s", writer.log.name, reason)
        self._store.journal.release(writer.num_cuts_written)
        self.suspend(keeps=True)

    def _fail(self, writer: IncrementWriter, exc: Exception) -> None:
        logger.error(
            "log %s failed: %s. Training continues; followers must reload from the "
            "next checkpoint. A new log begins in %g s.",
            writer.log.name,
            exc,
            RETRY_S,
        )
        self._counts["increment_logs_failed"] += 1
        self._failed = writer
        self.suspend()
        self._begin_s = self._activity.clock() + RETRY_S

    def _flush(self, writer: IncrementWriter) -> None:
        self._flushed_s = self._activity.clock()
        if self._store.journal.is_empty:
            return
        store, config = self._store, self._config
        head = IncrementHead(
            log=writer.log.name,
            number=0,
            shard=config.shard,
            num_shards=config.num_shards,
            created_s=time.time(),  # noqa: TID251  # others compare it with their clock
            tick=store.tick,
            was_cleared=False,
            tables=tuple(map(SavedTable.of, store.states)),
        )
        writer.inbox.put_nowait((store.journal.cut(), head))
