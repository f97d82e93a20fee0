"""The rows of a store, of all its tables, and transactions that change them.

What names a table here is its layout (``memory.py``). The changes of one request are
applied atomically:

    transaction() .. lookups, sweeps, removals |  updates, writes, steps, a clear, notes
                     done at once              |  done at the end, in their order

In private memory that is all. In a memory file what changes is kept so that it can be
undone: see ``undo_log.py``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from persia_torchrec.arrays import Ids, Words
from persia_torchrec.errors import StoreError
from persia_torchrec.jit.compiled import read_only
from persia_torchrec.store import loops, memory
from persia_torchrec.store.change_log import ChangeJournal, Ring
from persia_torchrec.store.expiry import ExpiryClock
from persia_torchrec.store.fbgemm_engine import FbgemmEngine
from persia_torchrec.store.index import Index
from persia_torchrec.store.memory import Arenas, Layout, StoreMemory, TableAt, Tally
from persia_torchrec.store.memory_file import MemoryFile, Published
from persia_torchrec.store.recency import RecencyLogs
from persia_torchrec.store.undo_log import UndoLog

KEPT_BYTES = 800
"""Kept of a row that is made or leaves besides its bytes, most if the index grows."""


class UpdateResult(NamedTuple):
    """How many gradients were not applied.

    ``num_missed`` had no row, of which ``num_unadmitted`` were never admitted, the
    others evicted; ``num_refused`` held NaN or an infinity.
    """

    num_missed: int
    num_refused: int
    num_unadmitted: int = 0


NOTHING_MISSED = UpdateResult(0, 0)


class Transaction:
    """Several calls of a store that are one change: see ``StoreRows.transaction``.

    ``results`` are those of its updates, in their order, when it has ended, and
    ``totals`` their sums; ``steps`` those of tables at its end. ``ended`` are tables of
    which a period has ended.
    """

    __slots__ = (
        "_changes",
        "_depth",
        "_drop_rows",
        "_num_bytes",
        "_results_at",
        "_rows",
        "ended",
        "has_begun",
        "notes",
        "results",
        "steps",
        "totals",
    )

    def __init__(self, rows: "StoreRows") -> None:
        self._rows, self._depth, self._num_bytes = rows, 0, 0
        self.results: list[UpdateResult] = []
        self.totals = NOTHING_MISSED
        self._changes: list[Callable[[Transaction], None]] = []
        self._drop_rows: Callable[[], None] | None = None
        self.notes: list[tuple[int, int]] = []
        self._results_at: list[int] = []
        self.steps: dict[int, int] = {}
        self.ended: list[int] = []
        self.has_begun = False

    def note(self, offset: int, value: int) -> None:
        """Set one of the store's notes, together with the rows."""
        self.notes.append((offset, value % 2**64))

    def note_results(self, offset: int) -> None:
        """Set three notes: ``totals``, missed, rejected, unadmitted."""
        self._results_at.append(offset)

    def add(self, num_bytes: int, change: Callable[["Transaction"], None]) -> None:
        """Do a change at the end, of which the undo log keeps ``num_bytes`` at most."""
        self._require_no_clear()
        self._num_bytes += num_bytes
        self._changes.append(change)

    def clear(self, drop_rows: Callable[[], None]) -> None:
        """Drop all rows at the end, as the last change."""
        self._require_no_clear()
        self._drop_rows = drop_rows

    def make_room(self) -> None:
        """Make room to keep what changes at the end."""
        if self._rows.undo_log is not None:
            num_notes = len(self.notes) + 3 * len(self._results_at)
            self._rows.undo_log.make_room(self._num_bytes + 16 * num_notes)

    def __enter__(self) -> Self:
        self._rows.opened = self
        self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        try:
            if kind is None:
                self._finish()
        finally:
            self._rows.opened = None
        if kind is None:
            if self.has_begun:
                self._rows.end()
            for number in dict.fromkeys(self.ended):
                self._rows.free_blocks_of(number)

    def _require_no_clear(self) -> None:
        if self._drop_rows is not None:
            raise StoreError(
                "A clear must be the last change of its request. Received: another one "
                "after it. Make it a request of its own."
            )

    def _finish(self) -> None:
        """Do what was left for the end."""
        rows, drop_rows, undo_log = self._rows, self._drop_rows, self._rows.undo_log
        if undo_log is not None and (
            self._changes or self._results_at or self.notes or drop_rows
        ):
            rows.begin()
            self.make_room()
        for change in self._changes:
            change(self)
        self._sum_up()
        for offset in self._results_at:
            self.notes += enumerate(self.totals, offset)
        if undo_log is None:
            if drop_rows:
                drop_rows()
            words = rows.notes.data  # faster than an array, word by word
            for offset, value in self.notes:
                words[offset] = value
        elif drop_rows:
            undo_log.begin_clear(rows.notes, _as_words(self.notes))
            drop_rows()
            undo_log.end_clear()
        elif self.notes:
            undo_log.note(rows.notes, _as_words(self.notes))

    def _sum_up(self) -> None:
        """Count what the updates have not applied."""
        if len(self.results) == 1:
            self.totals = self.results[0]
        elif self.results:
            self.totals = UpdateResult(*map(sum, zip(*self.results, strict=True)))
        if any(self.totals):
            self._rows.tally[memory.MISSED] += self.totals.num_missed
            self._rows.tally[memory.NOT_FINITE] += self.totals.num_refused


class StoreRows:
    """Memory, index, logs and journal of a store. Owned by the store's thread.

    Attributes:
        engine: fbgemm's, if it updates the rows; None for the compiled loops.
        tally: see ``memory.HITS`` and the others.
        undo_log: None in private memory.
        was_loading: the previous process died while it loaded a checkpoint, or before
            rows were written after that; no rows are left.
        seconds: by which rows expire.
        steps: of all tables.
        arenas: one per width of rows, see ``memory.py``.
        addresses: what every table's layout points to, see ``memory.store_at``.
        journal: notes which rows change, once told to.
        ring: what of that outlives the process, if anything does.
        notes: empty before they are reserved.
        opened: the transaction that is open, if one is.
        unfreed: of tables of which a period has ended, by number, what frees some of
            the blocks that ids have lost then, and returns whether others are left.
    """

    def __init__(
        self,
        source: StoreMemory,
        capacity_rows: int,
        num_classes: int,
        published: Published,
        *,
        engine: FbgemmEngine | None,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self.memory, self.capacity_rows, self.engine = source, capacity_rows, engine
        self.is_lfu = num_classes > 1
        self.tally: Tally = source.area(memory.TALLY).view(np.int64)
        self.undo_log: UndoLog | None = None
        if isinstance(source, MemoryFile):
            self.undo_log = UndoLog(source, self.tally, published.num_arenas)
        is_load = self.tally[memory.CHANGE] == memory.LOAD
        self.was_loading = bool(is_load or self.is_loading)
        self.tally[memory.CAPACITY] = capacity_rows
        self.seconds = ExpiryClock(self.tally, clock, monotonic)
        self.steps = source.area(memory.STEPS)
        self.index = Index(capacity_rows, source)
        self.logs = RecencyLogs(capacity_rows, num_classes, source)
        self.arenas = Arenas(capacity_rows, source, published.num_arenas)
        self.addresses: Words = np.zeros(6, dtype=np.uint64)
        self._set_addresses()
        self.ring = None
        if self.undo_log is not None:
            self.ring = Ring.open(source, self.steps, published.journal)
        self.journal = ChangeJournal(self.tally, self.ring)
        self.notes: Words = np.empty(0, dtype=np.uint64)
        notes_at, num_notes = published.notes
        if num_notes:
            address = memory.address_at(source.area(memory.RECOVERY), notes_at)
            self.notes = source.find(address)[:num_notes]
        self.opened: Transaction | None = None
        self._kept_bytes = 0  # at most, of rows that are being used
        self.unfreed: dict[int, Callable[[], bool]] = {}

    @property
    def log(self) -> memory.Log:
        """The address of the log of what changes."""
        return None if self.undo_log is None else self.undo_log.log

    @property
    def num_rows(self) -> int:
        """Rows in use, of all tables."""
        return int(self.tally[memory.ROWS])

    @property
    def tick(self) -> int:
        """Number of the last request that used rows."""
        return int(self.tally[memory.TICK])

    @tick.setter
    def tick(self, tick: int) -> None:
        self.tally[memory.TICK] = tick

    @property
    def tick_in_files(self) -> int:
        """The tick as files have it, where a use has 40 bits of it."""
        return min(self.tick, memory.LARGEST_TICK)

    @property
    def is_loading(self) -> bool:
        """Whether rows are being loaded: of a process that dies now, none are left."""
        return bool(self.tally[memory.LOADING])

    @is_loading.setter
    def is_loading(self, is_loading: bool) -> None:
        self.tally[memory.LOADING] = is_loading

    def arena(self, layout: Layout) -> Words:
        """Return the slots of the arena that a table's rows are in."""
        return self.arenas.words[int(layout[memory.ARENA])]

    def num_used(self, layout: Layout) -> int:
        """Return how many slots of that arena were ever used."""
        return int(self.arenas.directory[int(layout[memory.ARENA]), memory.USED])

    def transaction(self) -> Transaction:
        """Make several calls, and notes, one change.

        If the process dies, the next one that opens the memory file finds all of it, or
        nothing. Lookups, sweeps and removals are done at once; updates, writes, steps
        and a clear, which is the last one, at the end, and then notes. After an error
        nothing is done at the end. A transaction in another one is a part of that.
        """
        return self.opened or Transaction(self)

    def begin(self, num_touches: int = 0, num_bytes: int = 0) -> None:
        """Keep what a change needs to be undone, unless its transaction has begun.

        ``num_bytes`` are kept of rows that are used, at most, besides their touches.
        """
        if self.undo_log is None:
            return
        if self.opened is None or not self.opened.has_begun:
            self.undo_log.begin(self.index.cursor, self.logs.directory)
        if self.opened is not None:
            self.opened.has_begun = True
        if num_touches:
            self._kept_bytes = self.logs.make_room_to_keep(
                num_touches, self.undo_log, num_bytes
            )

    def end(self) -> None:
        """End a change, unless it is a part of an open transaction."""
        if self.journal.is_on:
            self.journal.keep_left()
        self._kept_bytes = 0
        if self.undo_log is not None and self.opened is None:
            self.undo_log.end()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change rows at once, or not at all."""
        self.begin()
        yield
        self.end()

    def make_room(self, layout: Layout, num_rows: int) -> None:
        """Make room for rows of a table that are about to be made."""
        while self.unfreed and self.num_rows + num_rows > self.capacity_rows:
            self.free_blocks()
        self.journal.make_room(num_rows)
        if self.undo_log is not None:
            self.make_room_to_keep(num_rows)
            self.arenas.make_room(int(layout[memory.ARENA]), num_rows)
            self.index.make_room(num_rows)

    def make_room_to_keep(self, num_rows: int) -> None:
        """Make room to keep rows that leave, and what changes where others are made."""
        if self.undo_log is None or self.tally[memory.CHANGE] == memory.LOAD:
            return
        strides = (words.strides[0] for words in self.arenas.words)
        num_bytes = num_rows * (max(strides, default=0) + KEPT_BYTES)
        self.undo_log.make_room(num_bytes + self._kept_bytes)

    def take_out(self, table: TableAt, ids_N: Ids) -> None:
        """Drop the rows of ids; those that have none are skipped."""
        self.journal.make_room(len(ids_N))
        with self.changing():
            self.journal.leaving(int(table[0][memory.OWNER]) - 1, ids_N)
            self.make_room_to_keep(len(ids_N))
            loops.remove_ids(table, read_only(ids_N))

    def free_blocks(self) -> None:
        """Free some of the blocks that ids have lost, of which there are some."""
        self.free_blocks_of(next(iter(self.unfreed)))

    def free_blocks_of(self, number: int) -> None:
        """Free some of the blocks that ids of a table have lost, if there are some."""
        free = self.unfreed.get(number)
        if free is not None and not free():
            del self.unfreed[number]

    def clear(self) -> None:
        """Drop all rows, as a part of what is in progress."""
        self.arenas.clear()
        self.index.clear()
        self.logs.clear()
        self.unfreed.clear()
        self.tally[[memory.ROWS, memory.PINNED_ROWS, memory.HAS_LARGE]] = 0
        self._set_addresses()
        self.journal.cleared()

    def describe_notes(self) -> tuple[int, int]:
        """Return where the notes are, and how many."""
        if self.notes.size == 0:
            return 0, 0
        area = self.memory.area(memory.RECOVERY)
        return memory.distance(area, self.notes), self.notes.size

    def counters(self) -> dict[str, int]:
        """Return what has been counted since the start, and the rows in use now."""
        strides, num_used = self.arenas.directory[:, [memory.STRIDE, memory.USED]].T
        num_bytes = int((strides * num_used).sum())
        return {
            "rows": self.num_rows,
            "capacity_rows": self.capacity_rows,
            "bytes": num_bytes + self.index.size_bytes + self.logs.size_bytes,
            **{name: int(self.tally[at]) for name, at in memory.COUNTERS.items()},
        }

    def _set_addresses(self) -> None:
        """Write what :func:`memory.store_at` reads: addresses, and how many logs."""
        logs, index = self.logs.directory, self.index
        arrays = index.lines, index.cursor, self.arenas.directory, logs, self.tally
        self.addresses[:] = [*(array.ctypes.data for array in arrays), len(logs)]


def _as_words(notes: list[tuple[int, int]]) -> Words:
    """Return notes as ``(offset, value)``, of an offset the last one."""
    return np.array(list(dict(notes).items()), dtype=np.uint64).reshape(-1, 2)
