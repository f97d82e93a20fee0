"""Put an increment into a store, a slice at a time between requests.

What has left goes first, so that there is room; then rows are written over those that
are there; then they are touched in the order of their uses. An increment may be put in
twice, and one may be put in that is older than the store, if those that follow come
too: what counts for a row is the last increment that names it.
"""

from collections.abc import Iterator

import numpy as np

from persia_torchrec.checkpoint.fitting import form_of, frequencies_of, with_metadata
from persia_torchrec.checkpoint.increment_file import Increment
from persia_torchrec.errors import CheckpointError
from persia_torchrec.routing.hashing import Ids
from persia_torchrec.routing.shard import is_of_shard
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.row_columns import RowColumns
from persia_torchrec.store.row_import import RowImport

_SLICE_ROWS = 2048


class IncrementImport:
    """One increment on its way into a store. Whoever owns the store calls it.

    Args:
        store: gets the rows.
        increment: of any server of the job that is followed.
        shard: of the store's server, whose rows alone are taken.
        num_shards: of how many servers.

    Attributes:
        num_rows: rows written so far.

    Raises:
        CheckpointError: its tables do not fit those of the store.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        increment: Increment,
        shard: int,
        num_shards: int,
    ) -> None:
        self._store = store
        self._shard, self._num_shards = shard, num_shards
        self._increment = increment
        self.num_rows = 0
        self._require_fitting()
        self._steps = self._work()

    def advance(self) -> bool:
        """Do a slice of the work; return whether there is more."""
        return next(self._steps, None) is not None

    def _work(self) -> Iterator[bool]:
        store, head = self._store, self._increment.head
        numbers = np.array(
            store.add_tables([table.spec for table in head.tables]), dtype=np.uint16
        )
        if head.was_cleared:
            yield from self._drop_rows_of(head.shard, head.num_shards)
        for table, ids_N in self._increment.gone:
            yield from self._remove(int(numbers[table]), ids_N)
        own = [(int(numbers[t]), self._own(rows)) for t, rows in self._increment.rows]
        yield True
        rows_in = self._rows_in(own)
        first = 0
        for table, rows in own:
            is_kept_N = rows_in.is_kept[first : first + len(rows)]
            yield from self._remove(table, rows.ids[~is_kept_N])
            first += len(rows)
        first = 0
        for table, rows in own:
            state = store.memory.tables.states[table]
            for part in _slices(with_metadata(rows, state)):
                all_N = np.ones(len(part), dtype=np.bool_)
                first = rows_in.add(table, first, part, all_N)
                self.num_rows += len(part)
                yield True
        while rows_in.touch_some():
            yield True
        rows_in.finish(head.tick)
        states = store.memory.tables.states
        for number, num_updates in zip(numbers, head.num_updates, strict=True):
            state = states[number]
            before = 0 if head.was_cleared else state.num_updates
            state.num_updates = max(before, num_updates)

    def _rows_in(self, own: list[tuple[int, RowColumns]]) -> RowImport:
        uses = [rows.uses for _, rows in own]
        tables = [np.full(len(rows), table, np.uint16) for table, rows in own]
        frequencies = [frequencies_of(rows) for _, rows in own]
        return RowImport(
            self._store.memory,
            self._store.capacity_rows,
            np.concatenate([np.empty(0, np.uint64), *uses]),
            np.concatenate([np.empty(0, np.uint16), *tables]),
            np.concatenate([np.empty(0, np.uint32), *frequencies]),
            continues=True,
        )

    def _own(self, rows: RowColumns) -> RowColumns:
        """Return those rows that are of this server."""
        if self._num_shards == 1:
            return rows
        is_own_N = is_of_shard(rows.ids, self._shard, self._num_shards)
        return RowColumns(*(column[is_own_N] for column in rows.columns()))

    def _drop_rows_of(self, shard: int, num_shards: int) -> Iterator[bool]:
        """Drop all rows that are of a server of the training."""
        for table in range(len(self._store.tables)):
            start: int | None = 0
            while start is not None:
                found = self._store.scan(table, start, _SLICE_ROWS)
                is_of_it_N = is_of_shard(found.ids, shard, num_shards)
                self._store.remove(table, found.ids[is_of_it_N])
                start = found.next_slot
                yield True

    def _remove(self, table: int, ids_N: Ids) -> Iterator[bool]:
        for start in range(0, len(ids_N), _SLICE_ROWS):
            self._store.remove(table, ids_N[start : start + _SLICE_ROWS])
            yield True

    def _require_fitting(self) -> None:
        forms = {spec.name: form_of(spec) for spec in self._store.tables}
        for table in self._increment.head.tables:
            form = form_of(table.spec)
            known = forms.get(table.spec.name, form)
            if known != form:
                raise CheckpointError(
                    f"Increment {self._increment.head.number} of "
                    f"{self._increment.head.log}: table {table.spec.name!r} must have "
                    f"{known}, as on this server. Received: {form}."
                )


def _slices(rows: RowColumns) -> Iterator[RowColumns]:
    for start in range(0, len(rows), _SLICE_ROWS):
        columns = (c[start : start + _SLICE_ROWS] for c in rows.columns())
        yield RowColumns(*columns)
