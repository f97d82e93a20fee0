"""Read checkpoints and increments into one server, of any number of servers.

An id is at shard ``hash % P``. With P servers when it was saved and Q now, file p holds
ids of shard q only if p and q agree modulo the greatest common divisor of P and Q:

    4 -> 4   its own file      4 -> 2   two of them      2 -> 3   all

A load is two-phase: first everything is read and checked, and nothing is changed; then,
once all servers have come so far, the rows are put into the store. Applying increments
is idempotent, and may begin with one that is older than the store if all later ones
follow: the last increment that names a row counts.

Dimension key:
    N: rows of a block
    R: rows of an increment that are of this server
"""

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Bools, Ids
from persia_torchrec.checkpoint import catalog, increment_log
from persia_torchrec.checkpoint.background import BackgroundTask
from persia_torchrec.checkpoint.catalog import (
    Loaded,
    LoadRules,
    LogPosition,
    Manifest,
    SavedShard,
    SavedTable,
    renamed,
)
from persia_torchrec.checkpoint.fitting import (
    Drops,
    Fitting,
    TablePlan,
    add_tables,
    continue_seconds,
    continues,
    has_changed,
    left_out,
    plan_tables,
    require_same_rows,
    rows_without_state,
    set_thresholds,
    tables_without_state,
    written_s,
)
from persia_torchrec.checkpoint.folder import Folder, named_errors
from persia_torchrec.checkpoint.increment_log import Base, Segment, newer_base
from persia_torchrec.checkpoint.row_file import (
    IncrementHead,
    RowFileReader,
    ShardHead,
    Written,
)
from persia_torchrec.embedding.setting import Sightings
from persia_torchrec.errors import CheckpointError
from persia_torchrec.routing.route import is_of_shard
from persia_torchrec.store import memory
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.row_columns import (
    SLICE_ROWS,
    RowColumns,
    Rows,
    eviction_order,
    frequencies,
    slices,
)
from persia_torchrec.store.row_copy import RowImport, put_changes
from persia_torchrec.table import TableSpec, names_of_shared

T = TypeVar("T")


_NO_ROWS = np.empty(0, np.uint64), np.empty(0, np.uint16), np.empty(0, np.uint32)


class Target(NamedTuple):
    """The server that rows are read for, and what its store evicts and keeps."""

    shard: int
    num_shards: int
    capacity_rows: int
    is_lfu: bool
    has_state: bool = True
    """Whether it keeps optimizer state: not where it serves inference."""

    def select(self, of_servers: Sequence[T]) -> list[T]:
        """Return the items of those writing servers that may hold rows of this one."""
        common = math.gcd(len(of_servers), self.num_shards)
        return list(of_servers[self.shard % common :: common])


@dataclass(frozen=True, slots=True)
class Increment:
    """One increment, or one server's part of it."""

    head: IncrementHead
    rows: Rows = field(default_factory=list)
    gone: list[tuple[int, Ids]] = field(default_factory=list)
    """Ids whose rows have left, or for which there is no room."""
    seen: list[tuple[int, Sightings]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Folder, number: int) -> "Increment":
        """Read an increment of the log in a folder, and check all of it."""
        name = increment_log.increment_name(number)
        with folder.opened(name) as file:
            reader = RowFileReader(file, folder.file_path(name), IncrementHead)
            increment = cls(reader.head)
            for table, block in reader.blocks():
                if isinstance(block, RowColumns):
                    increment.rows.append((table, block))
                elif isinstance(block, Sightings):
                    increment.seen.append((table, block))
                else:
                    increment.gone.append((table, block))
        return increment

    def select(self, target: Target) -> "Increment":
        """Return a server's part: its rows in slices, in the order of eviction."""
        blocks: dict[int, list[list[npt.NDArray[Any]]]] = {}
        head = self.head
        for table, rows in self.rows:
            if not target.has_state:
                rows = rows_without_state(rows, head.tables[table])
            shared_rows = self.head.tables[table].spec.shared_rows
            is_own_N = is_of_shard(rows.ids, *target[:2], shared_rows)
            columns = [column[is_own_N] for column in rows.columns()]
            blocks.setdefault(table, []).append(columns)
        tables = [
            (table, RowColumns(*map(np.concatenate, zip(*columns, strict=True))))
            for table, columns in blocks.items()
        ]
        pinned = names_of_shared(saved.spec for saved in self.head.tables)
        is_pinned = [self.head.tables[table].name in pinned for table, _ in tables]
        order_R = eviction_order(tables, is_pinned, is_lfu=target.is_lfu)
        num_left_out = max(len(order_R) - target.capacity_rows, 0)
        beyond = slices(tables, order_R[:num_left_out])
        gone = [*self.gone, *((table, rows.ids) for table, rows in beyond)]
        kept = list(slices(tables, order_R[num_left_out:]))
        if not target.has_state:
            tables_of = tables_without_state(head.tables)
            head = msgspec.structs.replace(head, tables=tables_of)
        return Increment(head, kept, gone, self.seen)

    def without(self, plans: Mapping[str, TablePlan]) -> "Increment":
        """Return what is loaded of it: nothing of tables that are left out."""
        out = {name for name, plan in plans.items() if not plan.has_rows}
        kept = {i for i, t in enumerate(self.head.tables) if t.name not in out}
        return Increment(
            self.head,
            [(table, rows) for table, rows in self.rows if table in kept],
            [(table, ids_N) for table, ids_N in self.gone if table in kept],
            [(table, seen) for table, seen in self.seen if table in kept],
        )


class SeenIds:
    """What admissions remember, on its way into the store of one server.

    It is collected from files, the oldest first, and then put in together: a store that
    loads is empty after a crash.
    """

    def __init__(self, store: EmbeddingStore, target: Target) -> None:
        self._store = store
        self._target = target
        self._found = {s.spec.name: [s.sightings()] for s in store.present}
        self.forgotten: set[str] = set()
        """Tables whose admission cannot continue with what was found."""

    def add(self, saved: SavedTable, sightings: Sightings) -> None:
        """Add what the admission of a table remembered."""
        states = {state.spec.name: state for state in self._store.present}
        spec = states[saved.name].spec
        admission = spec.admission
        if not admission.num_memory_words():
            return
        if not admission.counts_as(saved.spec.admission):
            self.forgotten.add(saved.name)
            return
        if admission.has_ids_as_keys:
            is_own_N = is_of_shard(sightings.keys, *self._target[:2], spec.shared_rows)
            sightings = Sightings(*(column[is_own_N] for column in sightings))
        self._found.setdefault(saved.name, []).append(sightings)

    def clear(self, shard: int, num_shards: int) -> None:
        """Drop the ids of one of the servers that wrote the files."""
        for state in self._store.present:
            found = self._found.get(state.spec.name, [])
            for at, sightings in enumerate(found):
                if state.spec.admission.has_ids_as_keys:
                    shared = state.spec.shared_rows
                    is_kept_N = ~is_of_shard(sightings.keys, shard, num_shards, shared)
                else:  # the filters of several servers cannot be told apart
                    is_kept_N = np.full(
                        len(sightings.keys), num_shards != self._target.num_shards
                    )
                found[at] = Sightings(*(column[is_kept_N] for column in sightings))

    def put(self) -> None:
        """Let the admissions remember it."""
        for state in self._store.present:
            found = self._found.get(state.spec.name, [])
            if found and state.remembered.size:
                seen = Sightings(*map(np.concatenate, zip(*found, strict=True)))
                state.spec.admission.remember(state.remembered, seen)


def apply_increment(
    store: EmbeddingStore,
    increment: Increment,
    seen: SeenIds | None,
    not_finite: Counter[str] | None = None,
    plans: Mapping[str, TablePlan] | None = None,
    drops: Drops | None = None,
) -> Iterator[int]:
    """Apply a server's part of an increment to its store; the store's owner runs it.

    Yields how many rows each slice of the work has written. ``seen`` is None if the
    store follows a training: then its tables take over what an id without a row reads.
    Rows that are not finite are counted by table. ``plans`` say what is taken of tables
    that differ from those of the store; or ``drops`` which of them are dropped.
    """
    head = increment.head
    if plans is None:
        names, stale = (drops or Drops()).take(head)
        yield from _drop_tables(store, names)
        plans = left_out(head.tables, stale)
        where = f"increment {head.number} of {head.log}"
        tables = [table for table in head.tables if table.name not in stale]
        require_same_rows(where, tables, store.tables)
        increment = increment.without(plans)
    numbers = add_tables(store, head.tables, plans, follows=seen is None)
    states = store.states
    if head.was_cleared:
        yield from _drop_rows_of(store, head)
    moved_s: dict[str, int] = {}
    if seen is not None:
        moved_s = continue_seconds(store, head.tables, head.created_s)
        if head.was_cleared:
            seen.clear(head.shard, head.num_shards)
        for table, sightings in increment.seen:
            seen.add(head.tables[table], sightings)
    for table, ids_N in increment.gone:
        for first in range(0, len(ids_N), SLICE_ROWS):
            store.remove(numbers[table], ids_N[first : first + SLICE_ROWS])
            yield 0
    fit = Fitting(
        store, moved_s, Counter() if not_finite is None else not_finite, plans
    )
    yield from put_changes(
        store,
        (
            (numbers[table], fit.rows(numbers[table], rows))
            for table, rows in increment.rows
        ),
    )
    store.rows.tick = max(store.rows.tick, head.tick)
    for number, saved in zip(numbers, head.tables, strict=True):
        if continues(plans, saved):
            previous = 0 if head.was_cleared else states[number].num_updates
            states[number].num_updates = max(previous, saved.num_updates)
            set_thresholds(states[number], saved)


def _drop_tables(store: EmbeddingStore, names: Sequence[str]) -> Iterator[int]:
    """Drop tables, and free their rows in slices."""
    numbers = [state.number for state in store.present if state.spec.name in names]
    if numbers:
        store.drop_tables(numbers)
    while store.leaving:
        store.free_rows(SLICE_ROWS)
        yield 0


def _drop_rows_of(store: EmbeddingStore, head: IncrementHead) -> Iterator[int]:
    """Drop the rows of the server that wrote an increment, in slices."""
    for state in store.present:
        start: int | None = 0
        while start is not None:
            found = store.scan(state.number, start, SLICE_ROWS)
            is_dropped_N = is_of_shard(
                found.ids, head.shard, head.num_shards, state.spec.shared_rows
            )
            store.remove(state.number, found.ids[is_dropped_N])
            start = found.next_slot
            yield 0


class ShardLoad(BackgroundTask):
    """Loads one server's part of a checkpoint: ``result``, at the end.

    :meth:`check` and :meth:`load` may take long: call them in a thread of their own,
    which owns the store while it loads. With ``replaces``, a load drops what the store
    holds; with the ``logs`` of the training, it applies all increments, or those before
    ``until``, a position for each server that wrote them. ``rules`` may be set before
    :meth:`check`.
    """

    def __init__(
        self,
        folder: Folder,
        target: Target,
        store: EmbeddingStore,
        *,
        replaces: bool = True,
        logs: Folder | None = None,
        until: Sequence[LogPosition] | None = None,
    ) -> None:
        super().__init__(f"Loading {folder.url}")
        self._folder = folder
        self._target = target
        self._store = store
        self._replaces = replaces
        self._logs = logs
        self._until = until
        self.rules = LoadRules()
        self._tables: tuple[SavedTable, ...] = ()  # under the names of the store
        self._known: dict[str, str] = {}  # what rows of the store's tables look like
        self._plans: dict[str, TablePlan] = {}
        self._notes: list[str] = []
        self._increments: list[tuple[Folder, IncrementHead]] = []
        # By shard and name of a table, the last increment that drops it.
        self._drops: dict[tuple[int, str], int] = {}
        self._end: LogPosition | None = None  # of the log of this server
        self._files: list[tuple[SavedShard, IO[bytes]]] = []
        self._opened = contextlib.ExitStack()
        self._num_read = self._num_to_read = 0
        self._dropped: set[str] = set()  # by increments
        self._has_changed = False  # a table, so that followers must load other rows
        self._routed: list[int] = []  # shared rows by which ids of a table are routed
        self._seen: list[tuple[int, Sightings]] = []  # with the index of their table
        self._ranked: dict[str, SavedTable] = {}  # with the thresholds of one server
        self.result: Loaded | None = None

    @property
    def base(self) -> Base:
        """What the store holds at the end, for a log of increments."""
        if self.result is None:
            return Base("empty")
        if not self._replaces or self.result.num_left_out or self._has_changed:
            return Base("unknown")
        if self._end:  # also if this server has no increments: others may have some
            return Base("log", parent=self._end)
        if self._increments:
            return Base("unknown")
        return Base("checkpoint", self._folder.url, self.manifest.created)

    @property
    def progress(self) -> float:
        """The fraction of the work that is done."""
        if self.result is not None:
            return 1.0
        return min(self._num_read / max(self._num_to_read, 1), 1.0)

    @property
    def fits_store(self) -> bool:
        """Whether the store has the tables with which the load was checked."""
        return self._known == _described(self._store.tables)

    def check(self) -> None:
        """Read everything, and remember the uses of the rows of this server."""
        try:
            self._check()
            self.require_not_cancelled()
        except BaseException:
            self._opened.close()
            raise

    def cancel(self) -> None:
        """Give up, and close the files, unless the thread will."""
        super().cancel()
        if self.phase == "checked":
            self._opened.close()

    def _check(self) -> None:
        manifest = self.manifest = self._read_manifest()
        self._tables = self._as_kept(manifest.tables)
        saved_specs = [table.spec for table in self._tables]
        known = {spec.name: spec for spec in self._store.tables}
        self._known = _described(known.values())
        self._routed = [known.get(spec.name, spec).shared_rows for spec in saved_specs]
        if self._logs is not None:
            self._check_increments(self._logs)
        self._plan_tables(known)
        files = self._target.select(manifest.shards)
        if self._routed != [spec.shared_rows for spec in saved_specs]:
            files = list(manifest.shards)  # an id may be in any
        self._num_to_read = 2 * sum(saved.size_bytes for saved in files)
        for saved in files:  # open until they are loaded: they may be deleted meanwhile
            opened = self._opened.enter_context(self._folder.opened(saved.file))
            self._files.append((saved, opened))
        found = [_NO_ROWS]
        for table, rows, is_own_N in self._read_rows():
            uses = rows.uses[is_own_N]
            tables = np.full(len(uses), np.uint16(table))
            found.append((uses, tables, frequencies(rows)[is_own_N]))
        columns = map(np.concatenate, zip(*found, strict=True))
        self._uses, self._table_of, self._frequencies = columns

    def _plan_tables(self, known: Mapping[str, TableSpec]) -> None:
        """Plan what is loaded of all tables, of the checkpoint and of increments."""
        self._dropped = {name for _, name in self._drops}
        found_in = {t.name: t for t in self._tables if t.name not in self._dropped}
        for at, (_, head) in enumerate(self._increments):
            stale = self._stale_of(at, head)
            in_head = {t.name: t for t in head.tables if t.name not in stale}
            found_in = in_head | found_in
        self._plans, self._notes = plan_tables(
            self._folder.url,
            list(found_in.values()),
            known,
            self.rules,
            may_share=self._logs is None,
            # A training drops tables, and adds others; inference follows.
            replaces=self._replaces and self._target.has_state,
        )
        self._has_changed = bool(self.rules.rename) or any(
            has_changed(plan, known.get(name, plan.spec))
            for name, plan in self._plans.items()
        )
        for at, (log, head) in enumerate(self._increments):
            path = log.file_path(increment_log.increment_name(head.number))
            stale = self._stale_of(at, head)
            tables_of = [table for table in head.tables if table.name not in stale]
            require_same_rows(path, tables_of, [p.spec for p in self._plans.values()])

    def _read_manifest(self) -> Manifest:
        """Read the manifest; that of the base, where all increments are put on it."""
        manifest = Manifest.read(self._folder)
        if self._logs is not None and self._until is None:
            lines = increment_log.find_lines(self._logs, {})
            end = increment_log.find_end(lines, self._folder, manifest)
            last = () if end is None else end.lines
            found = newer_base(self._logs, lines, last, manifest)
            if found is not None:
                self._folder = found
                return Manifest.read(found)
        return manifest

    def load(self) -> None:
        """Put the rows into the store, once checked; if that fails, leave it empty."""
        was_loading, self._store.rows.is_loading = self._store.rows.is_loading, True
        with self._opened:
            try:
                self._fill()
            except BaseException:
                self._store.clear()
                raise
            finally:
                self._store.rows.is_loading = was_loading

    def _fill(self) -> None:
        store = self._store
        num_evicted = -int(store.rows.tally[memory.EVICTED])
        saved = self._tables
        plans = {**self._plans, **left_out(saved, self._dropped)}
        numbers = add_tables(store, saved, plans, follows=False)
        if self._replaces:
            store.clear()
            store.rows.tick = 0
        moved_s = continue_seconds(
            store, saved, written_s(self.manifest.created), goes_back=self._replaces
        )
        for table, number in zip(saved, numbers, strict=True):
            if continues(plans, table):  # add_tables has ended its periods
                state = store.states[number]
                state.num_updates = max(state.num_updates, table.num_updates)
                set_thresholds(state, self._ranked.get(table.name, table))
        not_finite = Counter[str]()
        fit = Fitting(store, moved_s, not_finite, plans)
        rows_in = RowImport(
            store,
            self._uses,
            np.maximum(numbers, 0).astype(np.uint16)[self._table_of],
            self._frequencies,
        )
        for index, rows, is_own_N in self._read_rows():
            number = numbers[index]
            rows_in.add(number, fit.rows(number, rows), is_own_N)
        rows_in.finish(max((shard.tick for shard in self.manifest.shards), default=0))
        seen = self._put_increments(not_finite)
        num_evicted += int(store.rows.tally[memory.EVICTED])
        num_left_out = len(self._uses) - rows_in.num_kept + num_evicted
        self.result = Loaded(
            rows_in.num_kept,
            num_left_out,
            len(self._increments),
            sorted(seen.forgotten),
            store.rows.capacity_rows,
            dict(not_finite),
            self._notes,
        )

    def _put_increments(self, not_finite: Counter[str]) -> SeenIds:
        """Apply the increments, and what admissions remember, which is returned."""
        store, saved = self._store, self._tables
        seen = SeenIds(store, self._target)
        for index, sightings in self._seen:
            seen.add(saved[index], sightings)
        for at, (log, head) in enumerate(self._increments):
            self.require_not_cancelled()
            part = Increment.read(log, head.number).select(self._target)
            plans = {**self._plans, **left_out(head.tables, self._stale_of(at, head))}
            part = replace(part, head=head).without(plans)
            for _ in apply_increment(store, part, seen, not_finite, plans):
                pass
        seen.put()
        return seen

    def _check_increments(self, logs: Folder) -> None:
        """Find and read all increments that follow the checkpoint."""
        manifest, until = self.manifest, self._until
        lines = increment_log.find_lines(logs, {})
        if until is None:
            end = increment_log.find_end(lines, self._folder, manifest)
        else:
            end = increment_log.find_start_of(lines, until, (self._folder, manifest))
        if end is None:
            raise CheckpointError(
                f"{logs.url} must hold a log of every server that applies to "
                f"{self._folder.url}. Received: {logs.described()}, where some server "
                "has none. Load the checkpoint without increments."
            )
        stops = [None] * len(end.lines) if until is None else [u.number for u in until]
        followed = list(zip(end.lines, end.positions, stops, strict=True))
        for line, position, stop in self._target.select(followed):
            *earlier, last = line.segments(position)
            for segment in (*earlier, last._replace(stop=stop)):
                self._end = self._check_segment(logs, segment)
        if len(end.lines) != self._target.num_shards:
            self._end = None

    def _check_segment(self, logs: Folder, segment: Segment) -> LogPosition:
        """Read the increments of one log that follow the checkpoint; return its end."""
        log, (_, begin, stop) = logs.child(segment.log), segment
        numbers = [
            number
            for number in increment_log.list_increments(log)
            if number >= begin and (stop is None or number < stop)
        ]
        end = begin + len(numbers) if stop is None else stop
        is_whole = len(numbers) == end - begin
        if not is_whole or numbers != list(range(begin, end)):
            raise CheckpointError(
                f"{log.url} must have all increments from {begin} on"
                f"{'' if stop is None else f', before {stop}'}. Received: {numbers}. "
                "Load the checkpoint without increments."
            )
        for number in numbers:
            self.require_not_cancelled()
            head = self._renamed(Increment.read(log, number).head)
            for name in head.dropped:
                self._drops[head.shard, name] = len(self._increments)
            self._increments.append((log, head))
        return LogPosition(segment.log, end)

    def _stale_of(self, at: int, head: IncrementHead) -> set[str]:
        """Return the tables of an increment that a later one drops."""
        names = (table.name for table in head.tables)
        return {name for name in names if at < self._drops.get((head.shard, name), -1)}

    def _renamed(self, head: IncrementHead) -> IncrementHead:
        """Return the head of an increment with the names of the store's tables."""
        rename = self.rules.rename
        dropped = tuple(catalog.name_of(name, rename) for name in head.dropped)
        tables = self._as_kept(head.tables)
        return msgspec.structs.replace(head, tables=tables, dropped=dropped)

    def _as_kept(self, tables: Sequence[SavedTable]) -> tuple[SavedTable, ...]:
        """Return tables of a file as the store has them."""
        of_store = renamed(tables, self.rules.rename)
        return of_store if self._target.has_state else tables_without_state(of_store)

    def _read_rows(self) -> Iterator[tuple[int, RowColumns, Bools]]:
        """Yield of all blocks the table's index, rows, and which are this server's."""
        specs = [table.spec for table in self._tables]
        index_of = {spec.name: index for index, spec in enumerate(specs)}
        self._seen = []
        for saved, file in self._files:
            path = self._folder.file_path(saved.file)
            with named_errors("read", path):
                file.seek(0)
                reader = RowFileReader(file, path, ShardHead)
                tables = self._as_kept(reader.head.tables)
                require_same_rows(path, tables, specs, all_known=True)
                for table in tables:
                    self._ranked.setdefault(table.name, table)
                previous = self._num_read
                for number, block in reader.blocks():
                    self.require_not_cancelled()
                    self._num_read = previous + reader.num_bytes
                    name = tables[number].name
                    if name in self._dropped or not self._plans[name].has_rows:
                        continue
                    index = index_of[name]
                    if isinstance(block, RowColumns):
                        if not self._target.has_state:
                            saved_as = reader.head.tables[number]
                            block = rows_without_state(block, saved_as)
                        yield (
                            index,
                            block,
                            is_of_shard(
                                block.ids, *self._target[:2], self._routed[index]
                            ),
                        )
                    elif isinstance(block, Sightings):
                        self._seen.append((index, block))
                expected = Written(saved.num_rows, saved.size_bytes, saved.checksum)
                if reader.written != expected:
                    raise CheckpointError(
                        f"{path} must be the file of its manifest, {expected}. "
                        f"Received: {reader.written}."
                    )


def _described(specs: Iterable[TableSpec]) -> dict[str, str]:
    """Return by name what rows of tables look like."""
    return {spec.name: spec.describe_rows() for spec in specs}
