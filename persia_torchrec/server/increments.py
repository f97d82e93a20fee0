"""Write the increments of a training server, in the background of its requests.

After an interval, or a number of ids, the notes of the store's journal go to the thread
that writes the log, which asks for the rows. A failed write ends the log; training
continues. A new log starts after RETRY_S, once the blocked write has returned.
Followers must then reload from the next checkpoint. A load of a checkpoint also ends
the log; the next one can be followed from that checkpoint.
"""

import logging
import time

from persia_torchrec.checkpoint.catalog import LogPosition
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increment_writer import IncrementWriter
from persia_torchrec.checkpoint.increments import Base, Log
from persia_torchrec.checkpoint.row_file import IncrementHead, SavedTable
from persia_torchrec.errors import CheckpointError
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.cpu_budget import Activity, CpuBudget
from persia_torchrec.store.embedding_store import EmbeddingStore

logger = logging.getLogger(__name__)

_CPU_FRACTION = 0.1
"""Of a CPU that copying rows takes while requests for rows arrive."""

RETRY_S = 10.0
"""How soon after a failure a new log begins."""

_CLOSE_S = 10.0

_MAX_BUFFERS = 32
"""How many times ``incremental_buffer_rows`` one increment may have."""


class Increments:
    """The log of one server. The serving thread owns it."""

    def __init__(
        self, config: ServerConfig, store: EmbeddingStore, activity: Activity
    ) -> None:
        self._config = config
        self._store = store
        self._activity = activity
        self._budget = CpuBudget(_CPU_FRACTION, activity)
        self._writer: IncrementWriter | None = None
        self._failed: IncrementWriter | None = None  # the last one that did
        self._begin_s = float("inf")  # when the next log begins, if there is none
        self._flushed_s = 0.0
        self._num_failed = 0
        self._num_rows = self._num_bytes = 0  # of logs that have ended
        if config.incremental_dir is not None:
            self._folder = Folder(config.incremental_dir)
            self._folder.make()
            self.resume(Base("empty"))

    def begin_dump(self, url: str) -> LogPosition | None:
        """Note that a dump into a folder begins; return the log's position, if any."""
        writer = self._writer
        if writer is None:
            return None
        number = writer.number  # the writer's thread counts up meanwhile
        writer.dumps.put((url, number))
        return LogPosition(writer.log.name, number)

    def suspend(self) -> None:
        """Close the log: a load is about to replace all rows."""
        self._store.journal.end()
        self._begin_s = float("inf")
        if self._writer is not None:
            self._num_rows += self._writer.num_rows
            self._num_bytes += self._writer.num_bytes
            self._writer.cancel()
            self._writer = None

    def resume(self, base: Base) -> None:
        """Begin a new log, if increments are written, on the current rows."""
        config = self._config
        if config.incremental_dir is None:
            return
        log = Log.begin(config.shard, config.num_shards, base)
        self._writer = IncrementWriter(
            self._folder,
            log,
            max_requests=config.incremental_queue,
            max_ids=_MAX_BUFFERS * config.incremental_buffer_rows,
        )
        self._store.journal.begin()
        self._flushed_s = self._activity.clock()
        logger.info("log %s begins, base=%s", log.name, base.kind)

    def wait_ms(self, idle_ms: int) -> int:
        """Return how long the server may wait for a message, ``idle_ms`` at most."""
        writer = self._writer
        if writer is None or not writer.is_writing:
            return idle_ms
        if writer.wants_rows:
            return self._budget.wait_ms(idle_ms)
        return self._budget.poll_ms(idle_ms)

    def work(self) -> None:
        """Do what is due: flush the journal, copy some rows, begin a log."""
        writer = self._writer
        if writer is None:
            # A hanging file system blocks one thread at most.
            is_over = self._failed is None or self._failed.phase != "writing"
            if is_over and self._activity.clock() >= self._begin_s:
                self.resume(Base("unknown"))
        elif writer.error is not None:
            self._fail(writer, writer.error)
        elif self._must_flush(writer):
            self._flush(writer)
        elif writer.wants_rows and self._budget.has_credit():
            with self._budget.spend():
                writer.gather(self._store.memory)

    def counters(self) -> dict[str, int]:
        """Return what has been written, and how often a log has failed."""
        if self._config.incremental_dir is None:
            return {}
        writer = self._writer
        is_empty = self._store.journal.is_empty
        is_written = writer is not None and not writer.is_writing and is_empty
        num_rows, num_bytes = (writer.num_rows, writer.num_bytes) if writer else (0, 0)
        return {
            "increments": 0 if writer is None else writer.number - 1,
            "increments_waiting": int(not is_written),
            "increment_rows": self._num_rows + num_rows,
            "increment_bytes": self._num_bytes + num_bytes,
            "increment_logs_failed": self._num_failed,
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
            if not writer.gather(self._store.memory):
                time.sleep(0.001)
        if writer.phase != "written":
            reason = writer.error or f"not written within {_CLOSE_S:g} s"
            logger.error("log %s is not complete: %s", writer.log.name, reason)
        self.suspend()

    def _fail(self, writer: IncrementWriter, exc: Exception) -> None:
        logger.error(
            "log %s failed: %s. Training continues; followers must reload from the "
            "next checkpoint. A new log begins in %g s.",
            writer.log.name,
            exc,
            RETRY_S,
        )
        self._num_failed += 1
        self._failed = writer
        self.suspend()
        self._begin_s = self._activity.clock() + RETRY_S

    def _must_flush(self, writer: IncrementWriter) -> bool:
        """Whether a flush is due; fail the log if it is, and there is no room."""
        journal, config = self._store.journal, self._config
        is_full = journal.num_ids >= config.incremental_buffer_rows
        waited_s = self._activity.clock() - self._flushed_s
        if is_full and writer.inbox.full():
            reason = (
                f"{config.incremental_queue} flush requests wait to be written to "
                f"{self._folder.url}, as many as may wait. Use a faster file system, "
                "or raise incremental_channel_capacity"
            )
            self._fail(writer, CheckpointError(reason))
            return False
        is_due = is_full or waited_s >= config.incremental_interval_s
        return is_due and not writer.inbox.full()

    def _flush(self, writer: IncrementWriter) -> None:
        self._flushed_s = self._activity.clock()
        if self._store.journal.is_empty:
            return
        memory, config = self._store.memory, self._config
        head = IncrementHead(
            log=writer.log.name,
            number=0,
            shard=config.shard,
            num_shards=config.num_shards,
            created_s=time.time(),  # noqa: TID251  # others compare it with their clock
            tick=memory.tick,
            was_cleared=False,
            tables=tuple(map(SavedTable.from_state, memory.states)),
        )
        writer.inbox.put_nowait((self._store.journal.cut(), head))
