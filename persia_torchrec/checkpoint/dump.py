"""Write the rows of one server to a file, while the server goes on serving.

    server's thread                        this thread
      RowExport --1 MiB of slots--> queue --> columns --> checksum --> file

The queue is bounded, and the server's thread never waits for it: when it is full, there
is nothing to do for the dump but to wait.
"""

import logging
import queue
import threading
import time

from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.shard_file import FileTable, ShardWriter, Written
from persia_torchrec.errors import CheckpointError
from persia_torchrec.store.row_export import ExportedTable, RawRows, split_by_table

logger = logging.getLogger(__name__)

_MAX_CHUNKS = 4
_CHECK_S = 0.1


class ShardDump:
    """A thread that writes one file.

    Args:
        folder: of the checkpoint; it must be there.
        name: of the file.
        shard: of the server.
        num_shards: of the job.
        tables: of the export, with their settings.

    Attributes:
        cpu_s: seconds of a processor that the thread has used.
        error: what made it fail; None so far.
        written: what it wrote, when it has ended without an error.
    """

    def __init__(
        self,
        folder: Folder,
        name: str,
        shard: int,
        num_shards: int,
        tables: list[tuple[ExportedTable, FileTable]],
    ) -> None:
        self._folder = folder
        self._name = name
        self._shard = shard
        self._num_shards = num_shards
        self._tables = tables
        self._chunks: queue.Queue[RawRows | None] = queue.Queue(_MAX_CHUNKS)
        self._cancelled = threading.Event()
        self.cpu_s = 0.0
        self.error: Exception | None = None
        self.written: Written | None = None
        self._thread = threading.Thread(target=self._run, name="dump", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether :meth:`put` may be called, by the one thread that calls it."""
        return not self._chunks.full()

    @property
    def is_over(self) -> bool:
        """Whether the file is written, or never will be."""
        return self.written is not None or self.error is not None

    def put(self, chunk: RawRows | None) -> None:
        """Hand over the next slots, or None after the last; there must be room."""
        self._chunks.put_nowait(chunk)

    def cancel(self) -> None:
        """Give the file up, and wait for the thread. May be called twice."""
        self._cancelled.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            self.written = self._write()
        except Exception as exc:  # handed to whoever asks for the state
            if not isinstance(exc, CheckpointError):
                logger.exception("writing %s failed", self._folder.path_of(self._name))
            self.error = exc

    def _write(self) -> Written:
        exported = [table for table, _ in self._tables]
        in_file = [table for _, table in self._tables]
        with self._folder.created(self._name) as file:
            writer = ShardWriter(file, self._shard, self._num_shards, in_file)
            while (chunk := self._next()) is not None:
                for table, rows in split_by_table(chunk, exported):
                    writer.write(table, rows)
                del chunk
                self.cpu_s = time.thread_time()
            return writer.end()

    def _next(self) -> RawRows | None:
        while not self._cancelled.is_set():
            try:
                return self._chunks.get(timeout=_CHECK_S)
            except queue.Empty:
                continue
        raise CheckpointError(f"{self._folder.path_of(self._name)}: given up.")
