"""Write the rows of one server to a file, while the server is serving.

    server's thread                        this thread
      RowExport --1 MiB of slots--> queue --> columns --> checksum --> file

The queue is bounded, and the server's thread never waits for it.
"""

import contextlib
import queue
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from persia_torchrec.checkpoint.catalog import LogPosition, SavedShard, shard_name
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.row_file import RowFileWriter, SavedTable, ShardHead
from persia_torchrec.checkpoint.task import BackgroundTask
from persia_torchrec.errors import CheckpointError
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.row_export import RawRows, RowExport, split_by_table

_MAX_CHUNKS = 4
_CHECK_S = 0.1


@dataclass(frozen=True, slots=True)
class DumpResult:
    """What one server has dumped: its entries of the manifest."""

    tables: tuple[SavedTable, ...]
    shard: SavedShard


class ShardDump(BackgroundTask):
    """A dump of one server: ``dumping``, then ``dumped`` or ``failed``.

    The server's thread calls all methods. ``server`` are its settings, for the
    manifest, as is ``result``. ``log`` is where in the log of increments it begins.
    """

    def __init__(
        self, folder: Folder, store: EmbeddingStore, server: Mapping[str, Any]
    ) -> None:
        if not folder.exists():
            raise CheckpointError(
                f"The folder {folder.url} must exist. Received: it does not. Give a "
                "path that all servers and trainers share."
            )
        self._name = shard_name(server["shard"], server["num_shards"])
        super().__init__(folder.file_path(self._name))
        self._folder = folder
        self._store = store
        self._server = server
        self.log: LogPosition | None = None
        self._tables = self._describe_tables(len(store.tables))
        self._export = RowExport(store.memory)
        self._chunks: queue.Queue[RawRows | None] = queue.Queue(_MAX_CHUNKS)
        self._has_copied_all = False
        self._tick = 0
        self._writer_cpu_s = self._charged_cpu_s = 0.0
        self.result: DumpResult | None = None
        self._start("dumping", self._write, "dumped")

    @property
    def progress(self) -> float:
        """The fraction of the slots that are copied."""
        return self._export.progress

    @property
    def is_copying(self) -> bool:
        """Whether :meth:`advance` has something to do, now or later."""
        return self.phase == "dumping" and not self._has_copied_all

    @property
    def has_room(self) -> bool:
        """Whether :meth:`advance` may be called."""
        return not self._chunks.full()

    def advance(self) -> float:
        """Copy a slice; return the seconds of a CPU that the writing took since."""
        chunk = self._export.advance()
        if chunk is not None:
            self._chunks.put_nowait(chunk)
        elif self._export.is_done:
            self._tables = self._describe_tables(len(self._tables))  # with their steps
            self._tick = self._store.memory.tick
            self._chunks.put_nowait(None)
            self._has_copied_all = True
        cpu_s = self._writer_cpu_s
        self._charged_cpu_s, since_s = cpu_s, cpu_s - self._charged_cpu_s
        return since_s

    def end_early(self, why: str) -> None:
        """Give the dump up, unless it is over."""
        if self.phase == "dumping":
            self.error = CheckpointError(f"The dump ended early: {why}.")
            self.phase = "failed"
        self.cancel()

    def _describe_tables(self, num_tables: int) -> tuple[SavedTable, ...]:
        states = self._store.memory.states[:num_tables]
        return tuple(map(SavedTable.from_state, states))

    def _write(self) -> None:
        shard, num_shards = self._server["shard"], self._server["num_shards"]
        head = ShardHead(shard=shard, num_shards=num_shards, tables=self._tables)
        with self._folder.created(self._name) as file:
            writer = RowFileWriter(file, head)
            while (chunk := self._next_chunk()) is not None:
                for table, rows in split_by_table(chunk, self._export.tables):
                    writer.write_rows(table, rows)
                del chunk
                self._writer_cpu_s = time.thread_time()
            written = writer.end()
        saved = SavedShard(self._name, *written, self._tick, self._server, self.log)
        self.result = DumpResult(self._tables, saved)

    def _next_chunk(self) -> RawRows | None:
        while True:
            self._require_not_cancelled()
            with contextlib.suppress(queue.Empty):
                return self._chunks.get(timeout=_CHECK_S)
