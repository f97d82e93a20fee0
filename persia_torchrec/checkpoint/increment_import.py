"""Put an increment into a store, a slice at a time between requests.

    any thread         OwnChanges.of()   the server's own rows, in the order in which
                                         they would leave, in slices
    store's thread     IncrementImport   what has left goes first, then the slices

An increment may be put in twice, and one may be put in that is older than the store, if
those that follow come too: what counts for a row is the last increment that names it.

Dimension key:
    R: rows of an increment that are of this server
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from persia_torchrec.checkpoint.fitting import form_of, frequencies_of, with_metadata
from persia_torchrec.checkpoint.increment_file import Increment, IncrementHead
from persia_torchrec.errors import CheckpointError
from persia_torchrec.routing.hashing import Ids
from persia_torchrec.routing.shard import is_of_shard
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.recency import classes_of
from persia_torchrec.store.row_changes import RowChanges
from persia_torchrec.store.row_columns import RowColumns
from persia_torchrec.table import TableSpec

_SLICE_ROWS = 2048

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OwnChanges:
    """What of an increment is one server's.

    Attributes:
        head: of the increment.
        gone: place of the table in the head's list, and ids whose rows have left, or
            for which there is no room.
        rows: place of the table, and some rows of it; all in the order in which they
            would leave.
    """

    head: IncrementHead
    gone: list[tuple[int, Ids]]
    rows: list[tuple[int, RowColumns]]

    @classmethod
    def of(
        cls,
        increment: Increment,
        shard: int,
        num_shards: int,
        *,
        capacity_rows: int,
        is_lfu: bool,
    ) -> "OwnChanges":
        """Take a server's part of an increment; any thread may call this.

        Args:
            increment: of any server of the training.
            shard: of the server, whose rows alone are taken.
            num_shards: of how many servers.
            capacity_rows: of the server.
            is_lfu: whether the least frequently used row leaves first.
        """
        own = [(t, _own(rows, shard, num_shards)) for t, rows in increment.rows]
        tables = _together(own)
        places_R = _leaving_order(tables, is_lfu=is_lfu)
        num_left_out = max(len(places_R) - capacity_rows, 0)
        gone = [
            *increment.gone,
            *((t, rows.ids) for t, rows in _runs(tables, places_R[:num_left_out])),
        ]
        return cls(increment.head, gone, list(_runs(tables, places_R[num_left_out:])))


class IncrementImport:
    """One increment on its way into a store. Whoever owns the store calls it.

    Args:
        store: gets the rows, and the tables that it does not know.
        changes: of the store's server.
        follows: take over what an id without a row reads; every other setting of a
            known table stays.

    Attributes:
        num_rows: rows written so far.

    Raises:
        CheckpointError: its tables do not fit those of the store.
        StoreError: there is no memory for a new table.
    """

    def __init__(
        self, store: EmbeddingStore, changes: OwnChanges, *, follows: bool
    ) -> None:
        self._store = store
        self._changes = changes
        self.num_rows = 0
        head = changes.head
        require_fitting(head, {spec.name: form_of(spec) for spec in store.tables})
        self._numbers = _add_tables(store, head, follows=follows)
        self._steps = self._work()

    def advance(self) -> bool:
        """Do a slice of the work; return whether there is more."""
        return next(self._steps, None) is not None

    def _work(self) -> Iterator[bool]:
        store, head = self._store, self._changes.head
        if head.was_cleared:
            yield from self._drop_rows_of(head.shard, head.num_shards)
        for table, ids_N in self._changes.gone:
            for start in range(0, len(ids_N), _SLICE_ROWS):
                part = ids_N[start : start + _SLICE_ROWS]
                store.remove(self._numbers[table], part)
                yield True
        states = store.memory.tables.states
        rows_in = RowChanges(store.memory, store.capacity_rows)
        for table, rows in self._changes.rows:
            number = self._numbers[table]
            rows_in.put(number, with_metadata(rows, states[number]))
            self.num_rows += len(rows)
            yield True
        rows_in.finish(head.tick)
        for number, num_updates in zip(self._numbers, head.num_updates, strict=True):
            before = 0 if head.was_cleared else states[number].num_updates
            states[number].num_updates = max(before, num_updates)

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


def require_fitting(head: IncrementHead, forms: Mapping[str, str]) -> None:
    """Check that the tables of an increment are those that are known.

    Args:
        head: of the increment.
        forms: by name of a known table, what its rows look like: ``form_of``.

    Raises:
        CheckpointError: one has other rows.
    """
    for table in head.tables:
        form = form_of(table.spec)
        known = forms.get(table.spec.name, form)
        if known != form:
            raise CheckpointError(
                f"Increment {head.number} of {head.log}: table {table.spec.name!r} "
                f"must have {known}, as on this server. Received: {form}."
            )


def _add_tables(
    store: EmbeddingStore, head: IncrementHead, *, follows: bool
) -> list[int]:
    """Make the tables known that are not; return the number of each."""
    known = {spec.name: spec for spec in store.tables}

    def wanted(spec: TableSpec) -> TableSpec:
        before = known.get(spec.name)
        if before is None:
            return spec
        return replace(before, admission=spec.admission) if follows else before

    return store.add_tables([wanted(table.spec) for table in head.tables])


def _own(rows: RowColumns, shard: int, num_shards: int) -> RowColumns:
    """Return those rows that are of a server."""
    if num_shards == 1:
        return rows
    is_own_N = is_of_shard(rows.ids, shard, num_shards)
    return RowColumns(*(column[is_own_N] for column in rows.columns()))


def _together(blocks: list[tuple[int, RowColumns]]) -> list[tuple[int, RowColumns]]:
    """Return the rows of each table together."""
    of_table: dict[int, list[RowColumns]] = {}
    for table, rows in blocks:
        of_table.setdefault(table, []).append(rows)
    return [
        (table, RowColumns(*map(np.concatenate, zip(*columns, strict=True))))
        for table, all_rows in of_table.items()
        for columns in [[rows.columns() for rows in all_rows]]
    ]


def _leaving_order(tables: list[tuple[int, RowColumns]], *, is_lfu: bool) -> Places:
    """Return the places of all rows, one table's after the other's, as they leave."""
    empty = np.empty(0, dtype=np.uint64)
    uses_R = np.concatenate([empty, *(rows.uses for _, rows in tables)])
    if not is_lfu:
        return np.argsort(uses_R, kind="stable")
    frequencies = [frequencies_of(rows) for _, rows in tables]
    frequencies_R = np.concatenate([np.empty(0, dtype=np.uint32), *frequencies])
    return np.lexsort((uses_R, classes_of(frequencies_R)))


def _runs(
    tables: list[tuple[int, RowColumns]], places_R: Places
) -> Iterator[tuple[int, RowColumns]]:
    """Yield rows in the order of their places: runs of one table, in slices."""
    if len(places_R) == 0:
        return
    starts = np.cumsum([0, *(len(rows) for _, rows in tables)])
    which_R = np.searchsorted(starts, places_R, side="right") - 1
    borders = np.flatnonzero(np.diff(which_R)) + 1
    for run in np.split(places_R, borders):
        which = int(np.searchsorted(starts, run[0], side="right")) - 1
        table, rows = tables[which]
        for start in range(0, len(run), _SLICE_ROWS):
            at = run[start : start + _SLICE_ROWS] - starts[which]
            yield table, RowColumns(*(column[at] for column in rows.columns()))
