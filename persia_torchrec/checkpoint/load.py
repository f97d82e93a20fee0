"""Read a checkpoint into one server of any number.

A server needs the files of those servers whose ids may be its own now. An id is at
shard ``hash % P``; with P servers then and Q now, file p holds ids of shard q only if
p and q agree modulo the greatest common divisor of both:

    4 -> 4   its own file      4 -> 2   two of them      2 -> 3   all

Twice over: first everything is read and checked, and nothing is changed; only then,
when all servers have come so far, are the rows put into the store.
"""

import logging
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from persia_torchrec.checkpoint.fitting import form_of, frequencies_of, with_metadata
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increment_file import Increment, read_increment
from persia_torchrec.checkpoint.increment_import import (
    IncrementImport,
    OwnChanges,
    require_fitting,
)
from persia_torchrec.checkpoint.log_folder import Base, find_logs, increments_in
from persia_torchrec.checkpoint.manifest import Manifest, SavedShard, SavedTable
from persia_torchrec.checkpoint.shard_file import (
    ShardReader,
    Written,
    open_shard,
)
from persia_torchrec.checkpoint.sources import find_end
from persia_torchrec.errors import CheckpointError
from persia_torchrec.routing.shard import is_of_shard
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.lookup import TICK
from persia_torchrec.store.row_columns import RowColumns
from persia_torchrec.store.row_import import RowImport

logger = logging.getLogger(__name__)

T = TypeVar("T")

Bools = npt.NDArray[np.bool_]

Phase = Literal["checking", "checked", "loading", "loaded", "failed"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a server has loaded.

    Attributes:
        num_rows: rows put into the store.
        num_left_out: rows that would have left first, for which there was no room.
        num_increments: increments that were put on them.
    """

    num_rows: int
    num_left_out: int
    num_increments: int = 0


class ShardLoad:
    """Loads one server's share of a checkpoint, in a thread for each of the two parts.

    Args:
        folder: of the checkpoint.
        shard: which the server is now.
        num_shards: of how many.
        store: of the server. :meth:`load` takes it over until the phase is another
            than ``loading``.
        replaces: drop what the store holds; otherwise rows are put over it.
        logs: of the training that dumped the checkpoint: go on to where it ended.

    Attributes:
        phase: how far it has come.
        error: what made it fail; None so far.
        loaded: what it has loaded, in the end.
    """

    def __init__(
        self,
        folder: Folder,
        shard: int,
        num_shards: int,
        store: EmbeddingStore,
        *,
        replaces: bool,
        logs: Folder | None = None,
    ) -> None:
        self._folder = folder
        self._shard = shard
        self._num_shards = num_shards
        self._store = store
        self._replaces = replaces
        self._logs = logs
        self._increments: list[tuple[Folder, int]] = []
        self._num_read = self._num_to_read = 0
        self._cancelled = threading.Event()
        self.phase: Phase = "checking"
        self.error: Exception | None = None
        self.loaded: Loaded | None = None
        self._thread = self._start(self._check, "checked")

    @property
    def base(self) -> Base:
        """What the store holds when all is over, for a log of increments."""
        if self.phase != "loaded":
            return Base("empty")
        is_all = self.loaded is not None and not self.loaded.num_left_out
        if not self._replaces or self._logs is not None or not is_all:
            return Base("unknown")
        return Base("checkpoint", self._folder.url, self._manifest.created)

    @property
    def progress(self) -> float:
        """Return which part of the work is done, in [0, 1]."""
        if self.phase == "loaded":
            return 1.0
        return min(self._num_read / max(self._num_to_read, 1), 1.0)

    def load(self) -> None:
        """Begin the second part; the phase must be ``checked``."""
        assert self.phase == "checked"
        self.phase = "loading"
        self._thread = self._start(self._load, "loaded")

    def cancel(self) -> None:
        """Give up, and wait for the thread. May be called twice."""
        self._cancelled.set()
        self._thread.join(timeout=10)

    def _start(self, work: object, phase: Phase) -> threading.Thread:
        def run() -> None:
            try:
                work()  # type: ignore[operator]  # one of two methods below
            except Exception as exc:  # handed to whoever asks for the state
                if not isinstance(exc, CheckpointError):
                    logger.exception("loading %s failed", self._folder.url)
                self.error, self.phase = exc, "failed"
            else:
                self.phase = phase

        thread = threading.Thread(target=run, name="load", daemon=True)
        thread.start()
        return thread

    def _check(self) -> None:
        """Read everything, and remember the uses of the rows that are this server's."""
        manifest = self._manifest = Manifest.read(self._folder)
        for table in manifest.tables:
            self._require_fitting(table)
        if self._replaces:
            self._require_all_tables(manifest)
        if self._logs is not None:
            self._check_increments(self._logs, manifest)
        uses, tables, frequencies = [], [], []
        self._num_to_read = 2 * sum(s.size_bytes for s in self._files())
        number_of = {t.spec.name: i for i, t in enumerate(manifest.tables)}
        for name, rows, is_own_N in self._rows():
            uses.append(rows.uses[is_own_N])
            tables.append(np.full(len(uses[-1]), np.uint16(number_of[name])))
            frequencies.append(frequencies_of(rows)[is_own_N])
        self._uses = np.concatenate([np.empty(0, np.uint64), *uses])
        self._table_of = np.concatenate([np.empty(0, np.uint16), *tables])
        self._frequencies = np.concatenate([np.empty(0, np.uint32), *frequencies])

    def _load(self) -> None:
        """Put the rows into the store; if that fails, leave it empty."""
        try:
            self._fill()
        except BaseException:
            self._store.clear()
            raise

    def _fill(self) -> None:
        store, memory = self._store, self._store.memory
        known = {spec.name for spec in store.tables}
        saved = self._manifest.tables
        store.add_tables([t.spec for t in saved if t.spec.name not in known])
        if self._replaces:
            store.clear()
            memory.tally[TICK] = 0
        number_of = {spec.name: number for number, spec in enumerate(store.tables)}
        numbers = np.array([number_of[t.spec.name] for t in saved], dtype=np.uint16)
        for table in saved:
            state = memory.tables.states[number_of[table.spec.name]]
            state.num_updates = max(state.num_updates, table.num_updates)
        rows_in = RowImport(
            memory,
            store.capacity_rows,
            self._uses,
            numbers[self._table_of],
            self._frequencies,
        )
        first = 0
        for name, rows, is_own_N in self._rows():
            number = number_of[name]
            fitting = with_metadata(rows, memory.tables.states[number])
            first = rows_in.add(number, first, fitting, is_own_N)
        rows_in.finish(max((shard.tick for shard in self._manifest.shards), default=0))
        for log, number in self._increments:
            changes = OwnChanges.of(
                *(self._read(log, number), self._shard, self._num_shards),
                capacity_rows=store.capacity_rows,
                is_lfu=len(memory.logs.directory) > 1,
            )
            moving = IncrementImport(store, changes, follows=False)
            while moving.advance():
                pass
        self.loaded = Loaded(
            rows_in.num_kept,
            len(self._uses) - rows_in.num_kept,
            len(self._increments),
        )

    def _check_increments(self, logs: Folder, manifest: Manifest) -> None:
        """Find and read all increments that follow the checkpoint.

        Raises:
            CheckpointError: no log can be put on it; one is missing, or damaged.
        """
        end = find_end(find_logs(logs, {}), self._folder, manifest)
        if end is None:
            raise CheckpointError(
                f"{logs.url} must hold a log of every server that can be put on "
                f"{self._folder.url}. Received: {len(logs.names())} folders, none for "
                "some server. Load the checkpoint without increments."
            )
        specs = [*(table.spec for table in manifest.tables), *self._store.tables]
        forms = {spec.name: form_of(spec) for spec in specs}
        for source in self._own(end.sources):
            log = logs.child(source.log)
            numbers = [n for n in increments_in(log) if n >= source.number]
            if numbers != list(range(source.number, source.number + len(numbers))):
                raise CheckpointError(
                    f"{log.url} must have all increments from {source.number} on. "
                    f"Received: {numbers}. Load the checkpoint without increments."
                )
            for number in numbers:
                require_fitting(self._read(log, number).head, forms)
                self._increments.append((log, number))

    def _read(self, log: Folder, number: int) -> Increment:
        self._require_wanted()
        return read_increment(log, number)

    def _require_wanted(self) -> None:
        if self._cancelled.is_set():
            raise CheckpointError(f"Loading {self._folder.url}: given up.")

    def _files(self) -> list[SavedShard]:
        """Return the files that may hold rows of this server."""
        return self._own(self._manifest.shards)

    def _own(self, of_servers: Sequence[T]) -> list[T]:
        """Return those of the servers that wrote whose rows may be of this one."""
        common = math.gcd(len(of_servers), self._num_shards)
        return [
            of_server
            for number, of_server in enumerate(of_servers)
            if number % common == self._shard % common
        ]

    def _rows(self) -> Iterator[tuple[str, RowColumns, Bools]]:
        """Yield table, rows and which rows are this server's, of all blocks.

        Raises:
            CheckpointError: a file is not as the manifest says.
        """
        for saved in self._files():
            with open_shard(self._folder, saved.file) as reader:
                self._require_known(reader, saved)
                before = self._num_read
                for number, rows in reader.rows():
                    self._require_wanted()
                    self._num_read = before + reader.num_bytes
                    is_own_N = is_of_shard(rows.ids, self._shard, self._num_shards)
                    yield reader.tables[number].spec.name, rows, is_own_N
                expected = Written(saved.num_rows, saved.size_bytes, saved.checksum)
                if reader.written != expected:
                    raise CheckpointError(
                        f"{self._folder.path_of(saved.file)} must be the file of its "
                        f"manifest, {expected}. Received: {reader.written}."
                    )

    def _require_known(self, reader: ShardReader, saved: SavedShard) -> None:
        known = {(t.spec.name, form_of(t.spec)) for t in self._manifest.tables}
        for table in reader.tables:
            if (table.spec.name, form_of(table.spec)) not in known:
                raise CheckpointError(
                    f"{self._folder.path_of(saved.file)} must have tables of its "
                    f"manifest. Received: {table.spec.name!r}, {form_of(table.spec)}."
                )

    def _require_fitting(self, saved: SavedTable) -> None:
        for spec in self._store.tables:
            form, received = form_of(spec), form_of(saved.spec)
            if spec.name == saved.spec.name and form != received:
                raise CheckpointError(
                    f"{self._folder.url}: table {spec.name!r} must have {form}, "
                    f"as on this server. Received: {received}."
                )

    def _require_all_tables(self, manifest: Manifest) -> None:
        saved = {table.spec.name for table in manifest.tables}
        missing = {spec.name for spec in self._store.tables} - saved
        if missing:
            raise CheckpointError(
                f"{self._folder.url} must have all tables of this server. It lacks "
                f"{sorted(missing)}; it has {sorted(saved)}. To load it all the same, "
                "and leave the others as they are, use replace=False."
            )
