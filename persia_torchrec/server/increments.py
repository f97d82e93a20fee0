"""Write the increments of a training server, in the background of its requests.

    serving thread                                   writing thread
      journal --FlushRequest--> inbox  ------------> dirty set: each changed slot once
      copies their rows <---- slices of slots ------    |
                         -----------------------------> checksum --> file, number + 1

The serving thread never waits for the other. An increment begins at each interval, if
something has changed, and is written before the next one: what is lost with the memory
of a server changed within two intervals. Rows are copied evenly over the time, or
earlier within a budget of the processor. Where the file system is too slow, increments
become larger and fewer, what waits is bounded, and a warning says what would be lost. A
failed write ends the log, and training continues: a new log starts after some seconds
(``timeouts.INCREMENTS_RETRY_S``), once the blocked write has returned, and followers
must reload from the next checkpoint. A load also ends the log; the next one can be
followed from the checkpoint that was loaded. A server that lost its memory continues
the log that it has restored its rows from.
"""

import contextlib
import dataclasses
import logging
import math
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from persia_torchrec import timeouts
from persia_torchrec.checkpoint import increment_log
from persia_torchrec.checkpoint.background import Activity, BackgroundTask, CpuBudget
from persia_torchrec.checkpoint.catalog import LogPosition
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increment_log import Base, Log, Retention
from persia_torchrec.checkpoint.row_file import (
    Block,
    IncrementHead,
    RowFileWriter,
    saved_tables,
    shape_of,
)
from persia_torchrec.checkpoint.writer import FolderWriter
from persia_torchrec.errors import CheckpointError
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.dirty_set import Copy, DirtySet
from persia_torchrec.store.change_log import Changes
from persia_torchrec.store.embedding_store import EmbeddingStore

logger = logging.getLogger(__name__)


_MAX_RATIO = 20  # bytes of increments since a dump, by those of rows, before a warning
_LEAST_BYTES = 2**24  # of which no warning, and no base, is worth it
_CPU_FRACTION = 0.06  # of a CPU for what could wait, the writing included
_SPREAD = 0.25  # of an interval, in which the rows of the previous one are copied
_TOLERATED_S = 1.0  # beyond two intervals, before a warning
_POLL_S = 0.002  # how soon rows are copied that the other thread had no room for
_MAX_BUFFERS = 32  # how many times ``increments_buffer_rows`` may be noted for one
_MAX_SLICES = 8  # copied slices that may wait to be written
_SLICE_BYTES = 2**19
_CHECK_S = 0.1


class FlushRequest(NamedTuple):
    """What a journal noted, and the head of an increment that would begin then.

    ``numbers`` are those of the tables in the head. If none ``is_due``, it begins when
    many rows have changed. Its rows are copied until ``end_s``, by the clock of the
    activity. What comes after one that is the last of
    its increment, as a client asked for, ``is_last``, is in the next.
    """

    changes: Changes
    head: IncrementHead
    numbers: list[int]
    is_due: bool
    end_s: float
    is_last: bool = False


class IncrementWriter(BackgroundTask):
    """Writes one log while its phase is ``writing``; the serving thread calls it.

    ``number`` is that of the increment which is being written, or will be next.
    ``inbox`` has flush requests until they are written. When a dump has begun, which
    ``retention`` is told, and when ``prune_wanted`` is set, increments are deleted that
    no complete checkpoint needs. When ``entry_ends`` is set, this server's entry is
    taken out of the base: at first, if no other log is continued. ``ending`` makes the
    thread write what is left.
    """

    def __init__(
        self,
        folder: Folder,
        log: Log,
        config: ServerConfig,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(f"Writing log {log.name}")
        self.log = log
        self.number = 1
        self.written = Counter(increment_rows=0, increment_bytes=0)
        self.cpu_s = 0.0  # of the thread
        self._logs, self._folder = folder, folder.child(log.name)
        self._config = config
        self.inbox: queue.Queue[FlushRequest] = queue.Queue(config.increments_queue)
        self.retention = Retention(folder, log, config.own_urls)
        self.prune_wanted = threading.Event()
        self.entry_ends = threading.Event()
        if log.base.kind != "log":
            self.entry_ends.set()
        self.ending = threading.Event()
        self._wanted: deque[tuple[int, Copy]] = deque()
        self._copied: queue.SimpleQueue[tuple[int, Block]]
        self._copied = queue.SimpleQueue()
        self._dirty = DirtySet(config.capacity_rows)
        self._head: IncrementHead | None = None
        self._numbers: list[int] = []  # of its tables
        self._is_due, self._is_last, self._end_s = False, False, math.inf
        self._num_flushes = 0  # in the next increment
        self.ended = 0, 0  # the last cut that was the last, and the number after it
        self._copied_s, self._slice_s = math.inf, 0.0  # of the current one
        self._clock = clock
        self._last_cut = self.num_cuts_written = 0
        self.start("writing", self._run, "written")

    @property
    def wants_rows(self) -> bool:
        """Whether :meth:`copy_rows` has something to do."""
        return bool(self._wanted) and self._copied.qsize() < _MAX_SLICES

    @property
    def next_s(self) -> float:
        """When the next rows that are wanted must be copied, at the latest."""
        num = len(self._wanted)
        return self._copied_s - num * self._slice_s if num else math.inf

    def copy_rows(self, store: EmbeddingStore) -> None:
        """Copy the next rows that are wanted."""
        table, copy = self._wanted.popleft()
        self._copied.put((table, copy(store)))

    def cancel(self) -> None:
        """Give up what is not written, without waiting for the thread."""
        self.cancelled.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self.inbox.get_nowait()

    def _run(self) -> None:
        has_begun = False
        try:
            number = increment_log.next_number(self._logs)
            self._folder.make()
            log = dataclasses.replace(self.log, number=number)
            self._folder.write_json(increment_log.LOG_FILE, log)
            has_begun = True
            while True:
                is_last = self.ending.is_set()
                self._take_flushes(_CHECK_S)
                if self.prune_wanted.is_set():
                    self.prune_wanted.clear()
                    self.retention.apply(counts_begun=True)
                if self.entry_ends.is_set():
                    self.entry_ends.clear()
                    increment_log.end_entry(self._logs, log.shard, log.num_shards)
                if self._head is not None and (is_last or self._begins()):
                    self._write_next(self._head)
                elif is_last:
                    return
        except CheckpointError:
            if not has_begun:
                with contextlib.suppress(Exception):  # a leftover does no harm
                    self._folder.remove(increment_log.LOG_FILE)
                    self._folder.remove_all()  # others know a log by its folder
            raise

    def _begins(self) -> bool:
        is_large = len(self._dirty) >= self._config.increments_buffer_rows
        return self._is_due or is_large or self._is_full()

    def _is_full(self) -> bool:
        most = _MAX_BUFFERS * self._config.increments_buffer_rows
        return self._dirty.num_noted >= most

    def _write_next(self, head: IncrementHead) -> None:
        dirty, num_flushes, last_cut = self._dirty, self._num_flushes, self._last_cut
        is_last = self._is_last
        self._copied_s, self._slice_s = self._end_s, 0.0
        self._dirty, self._head = DirtySet(self._config.capacity_rows), None
        self._is_due, self._is_last, self._end_s = False, False, math.inf
        self._num_flushes = 0
        head = msgspec.structs.replace(
            head,
            number=self.number,
            was_cleared=dirty.was_cleared,
            dropped=tuple(dirty.dropped),
        )
        with self._folder.created(increment_log.increment_name(self.number)) as file:
            writer = RowFileWriter(file, head)
            self._write_rows(writer, dirty, head, self._numbers)
            written = writer.end()
        self.written["increment_rows"] += written.num_rows
        self.written["increment_bytes"] += written.size_bytes
        self.number += 1
        if is_last:
            self.ended = last_cut, self.number
        self.num_cuts_written = last_cut
        for _ in range(num_flushes):
            self.inbox.task_done()
        if self.retention.begun:
            self.retention.apply(counts_begun=False)

    def _write_rows(
        self,
        writer: RowFileWriter,
        dirty: DirtySet,
        head: IncrementHead,
        numbers: list[int],
    ) -> None:
        num_slices, left_s = 0, max(self._copied_s - self._clock(), 0.0)
        index_of = {number: index for index, number in enumerate(numbers)}
        shapes = list(map(shape_of, head.tables))
        sizes = [max(_SLICE_BYTES // shape.row_bytes, 1) for shape in shapes]
        for wanted in dirty.take(dict(zip(numbers, sizes, strict=True))):
            self._wanted.append(wanted)
            num_slices += 1
        self._slice_s = left_s / max(num_slices, 1)
        while num_slices:
            with contextlib.suppress(queue.Empty):
                table, block = self._copied.get(timeout=_CHECK_S)
                writer.write(index_of[table], block)
                num_slices -= 1
            self._take_flushes(0)

    def _take_flushes(self, timeout_s: float) -> None:
        """Add the flush requests that have come to the next increment."""
        self.require_not_cancelled()
        self.cpu_s = time.thread_time()
        with contextlib.suppress(queue.Empty):
            while not (self._is_last or self._is_full()):
                flush = self.inbox.get(timeout_s > 0, timeout_s)
                timeout_s = 0
                self._num_flushes += 1
                self._is_due |= flush.is_due
                self._is_last = flush.is_last
                if flush.is_last:  # the current increment is waited for, too
                    self._copied_s = min(self._copied_s, flush.end_s)
                self._end_s = min(self._end_s, flush.end_s)
                self._dirty.add(flush.changes)
                self._head, self._last_cut = flush.head, flush.changes.number
                self._numbers = flush.numbers


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
        self._num_cpus, self._charged_cpu_s = len(os.sched_getaffinity(0)), 0.0
        self._writer: IncrementWriter | None = None
        self._failed: IncrementWriter | None = None  # the last one that did
        self._begin_s = -math.inf  # when the next log begins, if there is none
        self.next_log = Base("empty"), ""
        self._bytes_at_dump = 0  # of increments
        self._compared_bytes, self._wants_base = 0, False
        self._warn_bytes = _LEAST_BYTES
        self._owner: FolderWriter | None = None
        self._noted: Changes | None = None  # by the previous process
        self._flushed_s = 0.0
        self._waits_for_more = False  # what was handed over, until the next is due
        # Cuts that are not written yet, and when they were made; all before is written.
        self._cuts: deque[tuple[int, float]] = deque()
        self._written_s, self._max_age_s = activity.clock(), 0.0
        self._warn_s = self._tolerated_s = 2 * config.increments_interval_s
        names = "increment_rows", "increment_bytes", "increment_logs_failed"
        self._counts = Counter(dict.fromkeys(names, 0))  # of logs that have ended
        if config.increments_dir is None:
            store.rows.journal.end()  # no log of a process before has what changes now
            return
        self._folder = Folder(config.increments_dir)
        try:
            self._folder.make()
        except CheckpointError as exc:
            raise CheckpointError(
                f"increments_dir must be a folder that can be made. Received: {exc}"
            ) from exc
        if config.writer:
            self._owner = FolderWriter(
                self._folder,
                config.writer,
                pid=os.getppid(),  # which starts this one again
                takes_over=config.take_over,
            )
        if store.states:  # in a memory file
            self.next_log = self._continue()

    @property
    def wants_base(self) -> bool:
        """Whether the increments since the last dump are many times the rows."""
        ratio = self._config.increments_base_ratio
        if not (ratio and self.is_writing):
            return False
        num_bytes = self._num_bytes() - self._bytes_at_dump
        if num_bytes != self._compared_bytes:  # by an increment, not in every turn
            self._compared_bytes = num_bytes
            is_much = num_bytes >= _LEAST_BYTES
            self._wants_base = is_much and num_bytes > ratio * self._row_bytes()
        return self._wants_base

    def begin_base(self) -> LogPosition | None:
        """Note that a base begins; return the log's position, if any."""
        return self.begin_dump(None)

    def begin_dump(self, url: str | None) -> LogPosition | None:
        """Note that a dump into a folder begins; return the log's position, if any."""
        writer = self._writer
        if writer is None:
            return None
        number = writer.number  # the writer's thread counts up meanwhile
        self._bytes_at_dump, self._warn_bytes = self._num_bytes(), _LEAST_BYTES
        if url is not None:
            writer.retention.begun.append(url)
        return LogPosition(writer.log.name, number)

    def prune(self) -> None:
        """Have increments deleted that no complete checkpoint needs."""
        if self._writer is not None:
            self._writer.prune_wanted.set()

    def end_increment(self, *, before_drop: bool = False) -> int | None:
        """Begin an increment to which nothing later is added; return its last cut.

        If a table is dropped after it (``before_drop``), the base loses this server's
        entry before it is written. None: it must wait, as no log is written, too much
        is still to be written, or blocks that ids have lost are to be freed.
        """
        writer = self._writer
        if writer is None or writer.error is not None or not self._may_cut(writer):
            return None
        if before_drop:
            writer.entry_ends.set()
        self._flush(writer, is_due=True, is_last=True)
        number, _ = self._cuts[-1]
        return number

    @property
    def is_writing(self) -> bool:
        """Whether there is a log that has not failed."""
        return self._writer is not None and self._writer.error is None

    def has_flushed_since(self, cut: int) -> bool:
        """Return whether an increment may have begun behind that of a cut."""
        return bool(self._cuts) and self._cuts[-1][0] > cut

    def ended_before(self, cut: int) -> LogPosition | None:
        """Return what follows the increment of a cut, once that is written."""
        writer = self._writer
        if writer is None or writer.ended[0] != cut:
            return None
        return LogPosition(writer.log.name, writer.ended[1])

    def suspend(self, *, keeps: bool = False) -> None:
        """Close the log: a load begins, or the process ends, and ``keeps`` the ring."""
        self._store.rows.journal.end(keeps=keeps)
        self._begin_s = math.inf
        if self._writer is not None:
            self._counts.update(self._writer.written)
            self._writer.cancel()
            self._writer = None

    def _continue(self) -> tuple[Base, str]:
        """Return base and history of a log that continues the previous process's."""
        states = self._store.states
        dropped = {s.number: s.spec.name for s in states if s.is_dropped}
        tokens, changes = self._store.rows.journal.previous(dropped)
        lines = increment_log.find_lines(self._folder, {})
        logs = {line.logs[0].token: line.logs[0] for line in lines}
        for log in [logs[token] for token in tokens if token in logs]:
            folder = self._folder.child(log.name)
            number = max(increment_log.list_increments(folder), default=0) + 1
            self._noted = changes
            return Base("log", parent=LogPosition(log.name, number)), log.history
        return Base("unknown"), ""

    def begin_log(self, base: Base, history: str = "") -> None:
        """Begin a new log, if increments are written, on the current rows."""
        config = self._config
        if config.increments_dir is None:
            return
        log = Log.begin(config.shard, config.num_shards, base, history)
        noted, self._noted = self._noted, None
        clock = self._activity.clock
        self._writer = IncrementWriter(self._folder, log, config, clock)
        self._charged_cpu_s, self._waits_for_more = 0.0, False
        self._store.rows.journal.begin(log.token, noted)
        self._cuts.clear()
        self._flushed_s = self._written_s = clock()
        logger.info("log %s begins, base=%s", log.name, base.kind)

    def work(self, idle_ms: int) -> int:
        """Flush, copy some rows, begin a log; return how long to wait for a message."""
        writer, config, now_s = self._writer, self._config, self._activity.clock()
        if self._owner is not None and self._owner.lost is not None:
            self.suspend()  # for good; the owner has logged it
            return idle_ms
        if writer is not None:
            self._note_written(writer, now_s)
            self._charge(writer)
        is_full = (
            self._store.rows.journal.changes.num_rows >= config.increments_buffer_rows
        )
        is_due = now_s - self._flushed_s >= config.increments_interval_s
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
                f"{config.increments_queue} flush requests wait to be written to "
                f"{self._folder.url}, as many as may wait. Use a faster file system, "
                "or raise incremental_channel_capacity"
            )
            self._fail(writer, CheckpointError(reason))
        elif (is_due or is_full) and self._may_cut(writer):
            self._flush(writer, is_due=is_due)
        else:
            self._copy_rows(writer, now_s)
        writer = self._writer
        return idle_ms if writer is None else self._wait_ms(writer, now_s, idle_ms)

    def _copy_rows(self, writer: IncrementWriter, now_s: float) -> None:
        """Copy rows that must be copied now, or else some that the budget allows."""
        has_credit = self._budget.has_credit()
        while writer.wants_rows and (has_credit or writer.next_s <= now_s):
            with self._budget.spend():
                writer.copy_rows(self._store)
            has_credit = False

    def _wait_ms(self, writer: IncrementWriter, now_s: float, idle_ms: int) -> int:
        if writer.inbox.unfinished_tasks:
            idle_ms = self._budget.wait_ms(idle_ms, is_ready=writer.wants_rows)
        until_s = writer.next_s
        if not writer.wants_rows:
            until_s = max(until_s, now_s + _POLL_S)
        if not writer.inbox.full():
            due_s = self._flushed_s + self._config.increments_interval_s
            until_s = min(until_s, due_s)
        return max(min(idle_ms, math.ceil(1000 * min(until_s - now_s, 1e3))), 0)

    def _num_bytes(self) -> int:
        """Return the bytes of all increments that this process has written."""
        written = self._writer.written if self._writer is not None else Counter()
        return self._counts["increment_bytes"] + written["increment_bytes"]

    def _row_bytes(self) -> int:
        return max(self._store.counters()["bytes"], 1)

    def _warn_of_size(self) -> None:
        """Warn if the increments since the last dump are many times the rows."""
        num_bytes = self._num_bytes() - self._bytes_at_dump
        if num_bytes < self._warn_bytes:
            return
        self._warn_bytes = 2 * num_bytes
        rows = self._row_bytes()
        if num_bytes > _MAX_RATIO * rows:
            logger.warning(
                "increments since the last dump have %d bytes in %s, %d times those of "
                "the rows. None is deleted, and a restore reads all, until two newer "
                "checkpoints are complete: dump now and then, or set "
                "increments_base_ratio.",
                num_bytes,
                self._folder.url,
                num_bytes // rows,
            )

    def _note_written(self, writer: IncrementWriter, now_s: float) -> None:
        """Note what has been written, and warn if that is long ago."""
        self._store.rows.journal.release(writer.num_cuts_written)
        if self._cuts and self._cuts[0][0] <= writer.num_cuts_written:
            self._warn_of_size()
        age_s = now_s - self._written_s
        while self._cuts and self._cuts[0][0] <= writer.num_cuts_written:
            self._max_age_s = max(self._max_age_s, age_s)
            _, self._written_s = self._cuts.popleft()
            if age_s <= self._tolerated_s:
                self._warn_s = self._tolerated_s
        if self._cuts and age_s > self._warn_s + _TOLERATED_S:
            self._warn_s = 2 * age_s
            logger.warning(
                "increments are %.1f s behind; changes since then are lost if this "
                "server's memory is lost; two intervals are %g s. Use a faster "
                "file system, more servers, or a longer interval.",
                age_s,
                self._tolerated_s,
            )

    def counters(self) -> dict[str, int]:
        """Return what has been written, and how often a log has failed."""
        if self._config.increments_dir is None:
            return {}
        writer = self._writer
        is_empty = writer is not None and not writer.inbox.unfinished_tasks
        is_written = is_empty and self._store.rows.journal.is_empty
        counts = self._counts.copy()
        counts.update({} if writer is None else writer.written)
        number = 0 if writer is None else writer.number - 1
        age_s = 0.0 if is_written else self._activity.clock() - self._written_s
        return {
            **counts,
            "increments": number,
            "increments_waiting": int(not is_written),
            "unwritten_ms": int(1000 * age_s),
            "unwritten_ms_max": int(1000 * max(self._max_age_s, age_s)),
        }

    def close(self) -> None:
        """Write what is left, for ten seconds at most. May be called twice."""
        with contextlib.ExitStack() as stack:
            if self._owner is not None:
                stack.callback(self._owner.release)
            self._write_rest()

    def _write_rest(self) -> None:
        writer = self._writer
        if writer is None:
            return
        deadline = time.monotonic() + timeouts.INCREMENTS_CLOSE_S
        while writer.phase == "writing" and time.monotonic() < deadline:
            if self._store.rows.journal.is_empty:
                writer.ending.set()
            elif not writer.inbox.full():
                self._flush(writer, is_due=True)
            if writer.wants_rows:
                writer.copy_rows(self._store)
            else:
                time.sleep(0.001)
        if writer.phase != "written":
            reason = (
                writer.error or f"not written within {timeouts.INCREMENTS_CLOSE_S:g} s"
            )
            logger.error("log %s is not complete: %s", writer.log.name, reason)
        self._store.rows.journal.release(writer.num_cuts_written)
        self.suspend(keeps=True)

    def _fail(self, writer: IncrementWriter, exc: Exception) -> None:
        logger.error(
            "log %s failed: %s. Training continues; followers must reload from the "
            "next checkpoint. A new log begins in %g s.",
            writer.log.name,
            exc,
            timeouts.INCREMENTS_RETRY_S,
        )
        self._counts["increment_logs_failed"] += 1
        self._failed = writer
        self.suspend()
        self._begin_s = self._activity.clock() + timeouts.INCREMENTS_RETRY_S

    def _charge(self, writer: IncrementWriter) -> None:
        """Charge what the other thread took of the CPUs that both may use."""
        cpu_s = writer.cpu_s
        self._budget.charge((cpu_s - self._charged_cpu_s) / self._num_cpus)
        self._charged_cpu_s = cpu_s

    def _may_cut(self, writer: IncrementWriter) -> bool:
        """Return whether there is room, and no block that is lost would be written."""
        return not (writer.inbox.full() or self._store.must_free_blocks)

    def _flush(
        self, writer: IncrementWriter, *, is_due: bool, is_last: bool = False
    ) -> None:
        store, config, now_s = self._store, self._config, self._activity.clock()
        if is_due:
            self._flushed_s = now_s
        if store.rows.journal.is_empty and not (self._waits_for_more or is_last):
            if not self._cuts:
                self._written_s = now_s
            return
        self._waits_for_more = not is_due
        store.free_blocks()  # where they did not wait: the log ends
        head = IncrementHead(
            log=writer.log.name,
            number=0,
            shard=config.shard,
            num_shards=config.num_shards,
            created_s=time.time(),  # noqa: TID251  # others compare it with their clock
            tick=store.rows.tick_in_files,
            was_cleared=False,
            tables=saved_tables(store.present, store.rows.seconds),
        )
        numbers = [state.number for state in store.present]
        changes = store.rows.journal.cut()
        self._cuts.append((changes.number, now_s))
        spread = _SPREAD if is_due else 1 + _SPREAD
        end_s = self._flushed_s + spread * config.increments_interval_s
        if is_last:
            end_s = now_s
        writer.inbox.put_nowait(
            FlushRequest(changes, head, numbers, is_due, end_s, is_last)
        )
