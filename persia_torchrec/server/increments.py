"""What a server that trains writes of its changes, beside its requests.

The journal of the store notes which rows change. Every so many seconds, or ids, what it
noted goes to the thread that writes the log, which asks for the rows; they are copied
when the server has nothing else to do. While rows are asked for, that takes a tenth of
a processor.

When the log cannot be written the training goes on. The log ends, which is counted and
logged, and some seconds later another begins, once the first hangs no more: whoever
follows needs the next checkpoint then. A load of a checkpoint ends the log too; the
next one can be followed from that.
"""

import logging
import time

from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increment_file import IncrementHead
from persia_torchrec.checkpoint.increment_log import Cut, IncrementLog
from persia_torchrec.checkpoint.log_folder import Base, LogInfo
from persia_torchrec.checkpoint.shard_file import FileTable
from persia_torchrec.errors import CheckpointError
from persia_torchrec.metrics import Metrics
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.spare_time import WAIT_MS, SpareTime
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.lookup import TICK
from persia_torchrec.store.row_gather import gather_rows
from persia_torchrec.store.rows import HAS_METADATA

logger = logging.getLogger(__name__)

_SHARE_IN_USE = 0.1
"""Part of a processor that gathering rows takes while rows are asked for."""

_RETRY_S = 10.0
"""After a failure, how soon another log begins."""

_CLOSE_S = 10.0

_MAX_BUFFERS = 32
"""How many times the buffer's rows may be put together for one increment."""


class Increments:
    """The log of one server. The serving thread owns it.

    Args:
        config: of the server; without an ``incremental_dir`` nothing is written.
        store: of the server.

    Raises:
        CheckpointError: the folder cannot be made, or written to.
        ConfigError: its path is a URL that fsspec does not know.
    """

    def __init__(self, config: ServerConfig, store: EmbeddingStore) -> None:
        self._config = config
        self._store = store
        self._spare_time = SpareTime(_SHARE_IN_USE)
        self._metrics = Metrics()
        self._log: IncrementLog | None = None
        self._failed: IncrementLog | None = None  # the last one that did
        self._begin_s = float("inf")  # when the next log begins, if there is none
        self._cut_s = 0.0
        self._num_rows = self._num_bytes = 0  # of logs that have ended
        if config.incremental_dir is not None:
            self._folder = Folder(config.incremental_dir)
            self._folder.make()
            self._begin(Base("empty"))

    def rows_are_asked_for(self) -> None:
        """A request for rows has come."""
        self._spare_time.rows_are_asked_for()

    def begin_dump(self, url: str) -> dict[str, object] | None:
        """A dump into a folder begins; return where in the log, for its manifest."""
        if self._log is None:
            return None
        number = self._log.number  # the log's thread counts on meanwhile
        self._log.note_dump(url, number)
        return {"log": self._log.info.name, "number": number}

    def suspend(self) -> None:
        """All rows will be others: end the log."""
        if self._config.incremental_dir is not None:
            self._end()

    def resume(self, base: Base) -> None:
        """Begin another log, on the rows of now."""
        if self._config.incremental_dir is not None:
            self._begin(base)

    def wait_ms(self, idle_ms: int) -> int:
        """Return how long the server may wait for a message, ``idle_ms`` at most."""
        log = self._log
        if log is None or not log.is_writing:
            return idle_ms
        if log.asks:
            return self._spare_time.wait_ms(idle_ms)
        return idle_ms if self._spare_time.is_in_use() else WAIT_MS

    def work(self) -> None:
        """Do what is due: hand over what has changed, gather some rows."""
        if self._log is None:
            # One thread at most hangs with a file system.
            is_over = self._failed is None or self._failed.is_over
            if is_over and time.monotonic() >= self._begin_s:
                self.resume(Base("unknown"))
            return
        if self._log.error is not None:
            self._fail(self._log.error)
            return
        self._cut_if_due(self._log)
        if self._log is not None and self._log.asks and self._spare_time.may_work():
            begin_s = time.thread_time()
            self._gather(self._log)
            self._spare_time.spend(time.thread_time() - begin_s)

    def counters(self) -> dict[str, int]:
        """Return what has been written, and how often a log has ended early."""
        if self._config.incremental_dir is None:
            return {}
        log = self._log
        is_empty = self._store.journal.is_empty
        is_written = log is not None and not log.is_writing and is_empty
        return {
            "increments": 0 if log is None else log.number - 1,
            "increments_waiting": int(not is_written),
            "increment_rows": self._num_rows + (0 if log is None else log.num_rows),
            "increment_bytes": self._num_bytes + (0 if log is None else log.num_bytes),
            "increment_logs_failed": 0,
            **self._metrics.snapshot(),
        }

    def close(self) -> None:
        """Write what is left, for ten seconds at most. May be called twice."""
        log = self._log
        if log is None:
            return
        deadline = time.monotonic() + _CLOSE_S
        while not log.is_over and time.monotonic() < deadline:
            if self._store.journal.is_empty:
                log.end()
            elif log.has_room:
                self._cut(log)
            if not self._gather(log):
                time.sleep(0.001)
        if log.error is not None or not log.is_over:
            reason = log.error or f"not written within {_CLOSE_S:g} s"
            logger.error("log %s lacks its end: %s", log.info.name, reason)
        self._end()

    def _begin(self, base: Base) -> None:
        config = self._config
        info = LogInfo.new(config.shard, config.num_shards, base)
        self._log = IncrementLog(
            self._folder,
            info,
            max_cuts=config.incremental_queue,
            max_ids=_MAX_BUFFERS * config.incremental_buffer_rows,
        )
        self._store.journal.begin()
        self._cut_s = time.monotonic()
        logger.info("log %s begins, base=%s", info.name, base.kind)

    def _end(self) -> None:
        self._store.journal.end()
        self._begin_s = float("inf")
        if self._log is not None:
            self._num_rows += self._log.num_rows
            self._num_bytes += self._log.num_bytes
            self._log.cancel()
            self._log = None

    def _fail(self, exc: Exception) -> None:
        name = self._folder.url if self._log is None else self._log.info.name
        logger.error(
            "log %s ends early: %s. Training goes on; who follows it needs the next "
            "checkpoint. Another log begins in %g s.",
            *(name, exc, _RETRY_S),
        )
        self._metrics.count("increment_logs_failed")
        self._failed = self._log
        self._end()
        self._begin_s = time.monotonic() + _RETRY_S

    def _cut_if_due(self, log: IncrementLog) -> None:
        journal, config = self._store.journal, self._config
        is_full = journal.num_ids >= config.incremental_buffer_rows
        waited_s = time.monotonic() - self._cut_s
        if is_full and not log.has_room:
            self._fail(
                CheckpointError(
                    f"{config.incremental_queue} cuts of changes wait to be written "
                    f"to {self._folder.url}, as many as may. Give a faster file "
                    "system, or raise incremental_channel_capacity"
                )
            )
        elif log.has_room and (is_full or waited_s >= config.incremental_interval_s):
            self._cut_s = time.monotonic()
            if not journal.is_empty:
                self._cut(log)

    def _cut(self, log: IncrementLog) -> None:
        memory = self._store.memory
        states = memory.tables.states
        head = IncrementHead(
            log=log.info.name,
            number=0,
            shard=self._config.shard,
            num_shards=self._config.num_shards,
            created_s=time.time(),  # noqa: TID251  # others compare it with their clock
            tick=int(memory.tally[TICK]),
            was_cleared=False,
            tables=[FileTable(s.spec, bool(s.layout[HAS_METADATA])) for s in states],
            num_updates=[state.num_updates for state in states],
        )
        log.add(Cut(self._store.journal.cut(), head))

    def _gather(self, log: IncrementLog) -> bool:
        """Copy the next rows that are asked for; return whether there were some."""
        asked = log.next_asked()
        if asked is not None:
            rows, found_N = gather_rows(
                self._store.memory, asked.table, asked.changed.ids
            )
            log.put(asked, rows, found_N)
        return asked is not None
