"""Rows of one checkpoint in the process that predicts, which lookups only read."""

import logging
import threading
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from persia_torchrec import timeouts
from persia_torchrec.arrays import Counts, Floats
from persia_torchrec.checkpoint.catalog import Manifest
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.load import ShardLoad, Target
from persia_torchrec.client.codec import BatchNumber, KnownTable, KnownTables
from persia_torchrec.errors import ConfigError
from persia_torchrec.routing.route import IdGroup
from persia_torchrec.rpc.messages import Precision
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.table import TableSpec

logger = logging.getLogger(__name__)


class _Read(NamedTuple):
    """Rows that were read: float32 ``(U, D)`` per group."""

    rows: list[Floats]

    def pieces(self) -> list[list[Floats]]:
        """Return the rows of each group, in one array."""
        return [[rows_UD] for rows_UD in self.rows]


class LocalRows:
    """The rows of a checkpoint in memory of this process, a ``RowSource``.

    It reads what a server of inference reads of the same checkpoint. Any thread may
    call any method. A checkpoint that cannot be read is a CheckpointError.

    Attributes:
        is_local: True, the rows are in this process.
        tables: those of the checkpoint, by name.
        num_servers: how ids are spread: 1, this process.
        serves: the URL of the checkpoint.
        timeout_s: as a client has it; a lookup waits for no server.
    """

    is_local: ClassVar[bool] = True
    num_servers = 1

    def __init__(self, folder: Folder) -> None:
        capacity = max(Manifest.read(folder).num_rows, 1)
        self._store = EmbeddingStore(capacity)
        target = Target(0, self.num_servers, capacity, is_lfu=False, has_state=False)
        load = ShardLoad(folder, target, self._store)
        load.check()
        load.load()
        logger.info("loaded %s num_rows=%d", folder.url, self._store.num_rows)
        self.tables = KnownTables()
        for state in self._store.present:
            wants_counts = self._store.wants_counts(state.number)
            known = KnownTable(state.spec, (state.number,), wants_counts)
            self.tables[state.spec.name] = known
        self.serves = folder.url
        self.timeout_s = timeouts.REQUEST_S
        self._reading = threading.Lock()  # the store counts what it reads

    def table(self, name: str) -> TableSpec:
        """Return a table of the checkpoint."""
        return self.tables[name].spec

    def counters(self, timeout_s: float | None = None) -> list[dict[str, int]]:
        """Return what the store counts, see ``docs/metrics.md``."""
        return [self._store.counters()]

    def close(self) -> None:
        """Drop the rows, after the lookups in progress. May be called twice."""
        with self._reading:
            self._store = EmbeddingStore(1)
            self.tables.clear()

    def learn_tables(self) -> list[TableSpec]:
        """Return all tables of the checkpoint."""
        return [table.spec for table in self.tables.values()]

    def begin_pull(
        self,
        tables: Sequence[IdGroup],
        batch: BatchNumber | None,
        precision: Precision = Precision.FP32,
        counts: Sequence[Counts | None] | None = None,
    ) -> _Read:
        """Read the rows of a batch that is not for training; zeros without a row.

        They do not travel: ``precision`` and ``counts`` change nothing.
        """
        if batch is not None:
            raise ConfigError(
                "A checkpoint that is read in this process cannot be trained. "
                f"Received: batch {batch.batch}. Start servers, and load it there."
            )
        rows = []
        for group in tables:
            known = [self.tables[name] for name in group.tables]
            out_UD = np.empty((len(group.ids), known[0].spec.dim), dtype=np.float32)
            numbers = tuple([table.numbers[0] for table in known])
            starts_T = np.concatenate(([0], np.cumsum(group.num_ids[0])))
            with self._reading:
                self._store.read_tables(
                    numbers, group.ids, starts_T, out_UD.reshape(-1)
                )
            rows.append(out_UD)
        return _Read(rows)
