"""The tables of a store: settings, compiled loops, and data beside the rows."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import (
    Bools,
    Counts,
    Doubles,
    Floats,
    Ids,
    Indices,
    Slots,
    Starts,
    Words,
)
from persia_torchrec.embedding.setting import Admission, Kernel, Sightings
from persia_torchrec.jit.compiled import (
    compile_all,
    compile_for,
    inlined_kernel,
    read_only,
    specialized,
)
from persia_torchrec.jit.float16 import largest_within
from persia_torchrec.jit.kernel import NO_LOG
from persia_torchrec.routing.route import split_rows
from persia_torchrec.store import finite, loops, memory
from persia_torchrec.store.change_log import ChangedSlots
from persia_torchrec.store.memory import LARGEST_TICK, POSITION_BITS, TableAt, TablesAt
from persia_torchrec.store.memory_file import ROW_COLUMNS, PublishedTable
from persia_torchrec.store.recency import MARK_WORDS
from persia_torchrec.store.store_rows import StoreRows, Transaction, UpdateResult
from persia_torchrec.store.undo_log import ROW_BYTES
from persia_torchrec.table import TableSpec

Admit: TypeAlias = Callable[[Ids, npt.NDArray[np.int64], int, int], Bools]
"""Counts ids that have no row, and returns which of them get one. The second array is
how often the batch holds each, ``>= 1``; how often each has been seen overwrites it.
Repeats are decided one after the other. Then the request's tick, and its batch."""

_NO_IDS = read_only(np.empty(0, dtype=np.uint64))
_NO_COUNTS = read_only(np.empty(0, dtype=np.uint32))
_NO_SLOTS = np.empty(0, dtype=np.uint32)
_NO_INDICES = np.empty(0, dtype=np.int64)
_NO_FREQUENCIES = np.empty(0, dtype=np.uint32)
_NO_FLOATS = np.empty(0, dtype=np.float32)
_NO_ROWS = np.empty((0, 0), dtype=np.float32)
_NONE_MADE = _NO_INDICES, _NO_INDICES


def build_admission(
    admission: Admission,
    seed: int,
    remembered: Words,
    log: np.uint64 = NO_LOG,
    *,
    recalls: bool = False,
) -> Admit | None:
    """Build what decides for a table, with its memory; None where all get a row.

    ``log`` is the address of the log that keeps what it changes, or 0. With ``recalls``
    it tells what it decided last.
    """
    kernel = admission.recall if recalls else admission.kernel
    if kernel is None:
        return None
    loop = _build_admit(kernel)
    p = np.array([*admission.kernel_numbers(seed), int(log), 0, 0], dtype=np.uint64)
    numbers, none = read_only(p), np.empty(0, dtype=np.bool_)
    compile_for(loop, remembered, numbers, _NO_IDS, _NO_INDICES, none)

    def admit(
        ids_N: Ids, counts_N: npt.NDArray[np.int64], tick: int, batch: int
    ) -> Bools:
        is_admitted_N = np.empty(len(ids_N), dtype=np.bool_)
        p[-2:] = min(tick, LARGEST_TICK) << POSITION_BITS, batch
        loop(remembered, numbers, read_only(ids_N), counts_N, is_admitted_N)
        return is_admitted_N

    return admit


@cache
def _build_admit(kernel: Kernel) -> Callable[..., None]:
    """Compile the kernel of an admission as a loop."""
    decide = inlined_kernel(kernel)

    def admit(
        remembered: Words,
        p: Words,
        ids_N: Ids,
        counts_N: npt.NDArray[np.int64],
        is_admitted_N: Bools,
    ) -> None:
        decide(remembered, p, ids_N, counts_N, is_admitted_N)

    return specialized(admit, kernel)


class PlainTables(NamedTuple):
    """T tables whose rows have one block, as loops take them.

    Per table the widths of weights, and of weights and state, and what the undo log
    keeps of a row, at most.
    """

    states: Sequence["TableState"]
    at: TablesAt
    dims: Indices
    widths: Indices
    kept_row_bytes: Indices

    @classmethod
    def of(cls, states: Sequence["TableState"], rows: StoreRows) -> "PlainTables":
        """Return tables of a store."""
        layouts_T = [state.layout.ctypes.data for state in states]
        numbers = [
            (s.spec.row_dim, s.spec.num_row_floats, s.kept_row_bytes) for s in states
        ]
        dims, state_floats, kept = np.array(numbers, dtype=np.int64).reshape(-1, 3).T
        at = np.array(layouts_T, dtype=np.uint64), rows.log
        return cls(states, at, dims.copy(), dims + state_floats, kept.copy())


class UsedRows(NamedTuple):
    """A table's part of a training lookup or a write; see :class:`loops.Copied`.

    Of N ids: counts or none, rows ``(N, W)``, slots.
    """

    ids: Ids
    counts: Counts
    rows: Floats
    slots: Slots
    copied: loops.Copied = None


class TableState:
    """One table of a store, a row for each id. Owned by the store's thread.

    ``TableOfBlocks`` and ``TableOfSharedRows`` are the other kinds.

    Its loops are compiled, or loaded; the layout's columns of settings are overwritten.
    ``rows`` are those of all tables; ``at`` is the layout and the log; ``step`` is the
    word that keeps the table's step, ``remembered`` what the admission remembers. The
    attribute ``admission`` is None when all ids are admitted; ``is_part`` says that it
    is a part of another table; ``thresholds`` are those of its blocks; ``number`` is
    which of the store's tables it is. ``insert`` makes rows: see
    :func:`loops.build_insert`.
    """

    counts_ids = False
    """Whether it matters how often an id is in a batch, for all that is a row's."""

    def __init__(
        self,
        spec: TableSpec,
        rows: StoreRows,
        layout: memory.Layout,
        *,
        step: Words,
        remembered: Words,
        thresholds: Doubles,
    ) -> None:
        self.thresholds = thresholds
        self.spec, self.rows, self.layout = spec, rows, layout
        self.at: TableAt = layout, rows.log
        self.number = int(layout[memory.OWNER]) - 1
        self.kept_row_bytes = rows.arena(layout).strides[0] + ROW_BYTES
        # Without itself, or stores would end in a collection only.
        self._tables = PlainTables.of([self], rows)._replace(states=())
        self._alone = self._tables.at
        self.is_by_running_time = spec.expiry.is_by_running_time
        value = spec.admission.unadmitted_value
        self.unadmitted_values = np.array([value], dtype=np.float32)
        self.has_metadata = bool(layout[memory.HAS_METADATA])
        self.remembered, self.step = remembered, step
        self.admission: Admit | None
        self.is_part = self.is_dropped = False
        self._steps = [layout]
        layout[memory.STEP] = step[0]
        self._begin_admission()
        state_S = np.zeros(spec.num_row_floats, dtype=np.float32)
        optimizer_S = spec.optimizer.initial_state(spec.row_dim)
        state_S[: len(optimizer_S)] = optimizer_S
        self.unadmitted_row = np.r_[
            np.repeat(self.unadmitted_values, spec.row_dim), state_S
        ]
        fill = spec.initializer.fill_numbers(spec.row_dim)
        self._kept = {
            memory.SCRATCH: np.empty(
                2 * spec.row_dim + spec.num_row_floats + 2, dtype=np.float32
            ),
            memory.FILL: np.array(fill, dtype=np.float32),
            memory.INITIAL_STATE: state_S,
        }
        for column, array in self._kept.items():
            layout[column] = array.ctypes.data
        layout[memory.SEED] = spec.seed
        layout[memory.TO_NEAREST] = not spec.stochastic_rounding
        self._checks = _checks(spec, self._kept[memory.FILL], state_S)
        self.insert = loops.build_insert(spec.initializer.kernel)
        has_begun = spec.ids_without_row != "zeros"
        num_words = int(layout[memory.STATE]) // 8 + spec.num_row_floats + 1
        self._begun_row: Words = np.zeros(num_words * has_begun, dtype=np.uint64)
        self.update_loop = self._compile_uses()

    def _compile_uses(self) -> Callable[..., Any]:
        """Compile training lookups, ``insert`` and updates; return the update.

        And reads of ids without a row, if they read what it begins with.
        """
        spec, slots = self.spec, _NO_COUNTS.copy()
        no_rows = np.empty((0, spec.row_dim), np.float32)
        used, chosen = (self.at, _NO_IDS, _NO_COUNTS), (_NO_INDICES, _NO_COUNTS)
        starts, flat = np.zeros(2, dtype=np.int64), no_rows.reshape(-1)
        asked = starts, flat, slots, _NO_INDICES
        calls: list[tuple[Any, ...]] = []
        for copied in (None, (0, loops.READ_ROWS, _NO_FREQUENCIES, 0)):
            begin = 0, 0, copied
            calls += [
                (loops.lookup_training, self._alone, begin, *used[1:], *asked),
                (self.insert, *used, chosen, no_rows, slots, copied),
            ]
        if self.rows.engine is not None:
            update: Callable[..., Any] = self.rows.engine.build_update(
                spec.optimizer, spec.row_dim
            )
        else:
            update = loops.build_update(spec.optimizer.kernel)
            now_T2 = np.zeros((1, 2), dtype=np.uint64)
            given = _NO_IDS, starts, _NO_COUNTS, read_only(flat), now_T2
            results_T2 = np.zeros((1, 2), dtype=np.int64)
            numbers_TK = self.step_numbers(1)[None]
            calls.append((update, self._alone, *given, numbers_TK, results_T2))
        if len(self._begun_row):
            self._read_begun = loops.build_read_only(spec.initializer.kernel)
            begun = self.layout, _NO_IDS, no_rows, self._begun_row
            calls.append((self._read_begun, *begun))
        compile_all(*calls)
        return update

    @property
    def reads_begun_rows(self) -> bool:
        """Whether an id without a row reads what its row would begin with."""
        return len(self._begun_row) > 0

    @property
    def is_pinned(self) -> bool:
        """Whether its rows are the shared rows of another table."""
        return bool(self.layout[memory.PINNED])

    @property
    def num_updates(self) -> int:
        """Update requests so far: the table's step, Adam's ``t``."""
        return int(self.step[0])

    @num_updates.setter
    def num_updates(self, step: int) -> None:
        self.step[0] = step
        for layout in self._steps:
            layout[memory.STEP] = step

    def link(self, parts: Sequence["TableState"]) -> None:
        """Find the tables that are parts of this one, and count their steps."""
        self._steps = [self.layout, *(part.layout for part in parts)]
        for part in parts:
            part.step, part.is_part = self.step, True
            part._steps = self._steps  # noqa: SLF001
        self.num_updates = self.num_updates

    def now_s(self) -> int:
        """Return the second that rows note now."""
        seconds = self.rows.seconds
        by_clock = not self.is_by_running_time
        return max(int(seconds.clock() if by_clock else seconds.running_s), 0)

    def find(self, ids_N: Ids) -> Slots:
        """Return the slot of each id, or ``MISSING``; uint32 ``(N,)``."""
        return loops.find_slots(self.layout, read_only(ids_N))

    def read_slots(self, slots_N: Slots) -> Floats:
        """Return all floats of rows of one block; zeros for ``MISSING``."""
        width = self.spec.row_dim + self.spec.num_row_floats
        out = np.empty((len(slots_N), width), dtype=np.float32)
        memory.read_rows(self.layout, slots_N, out)
        return out

    def look_up(
        self, ids_N: Ids, out_ND: Floats, counts_N: Counts | None, batch: int
    ) -> Slots:
        """Do a training lookup; return the slots, hints for an update."""
        return self.look_up_rows(ids_N, out_ND, counts_N, batch)

    def look_up_rows(
        self,
        ids_N: Ids,
        out_ND: Floats,
        counts_N: Counts | None = None,
        batch: int = 0,
    ) -> Slots:
        """Do a training lookup of rows that have one block."""
        starts, out = np.array([0, len(ids_N)]), out_ND.reshape(-1)
        tables = self._tables._replace(states=[self])
        return look_up_rows(tables, ids_N, starts, out, counts_N, batch)

    def make_missing(self, missing: Indices, batch: int, used: UsedRows) -> Indices:
        """Make the rows of those missing ids that are admitted; return which.

        Of a write, those that find room.
        """
        if used.copied is not None and used.copied[1] != loops.READ_ROWS:
            self.layout[memory.NOW_S] = self.now_s()
            self.insert_rows((missing, _NO_COUNTS), used)
            return missing[used.slots[missing] != memory.MISSING]
        self._keep_admission(len(missing))
        chosen = admitted, _ = self.admit(used, missing, (self.rows.tick, batch))
        self.rows.tally[memory.REJECTED] += len(missing) - len(admitted)
        self.layout[memory.NOW_S] = self.now_s()
        self.make_rows(missing, chosen, used)
        return admitted

    def make_rows(
        self, missing: Indices, chosen: tuple[Indices, Counts], used: UsedRows
    ) -> None:
        """Make the rows of chosen ids, some of those missing; copy them."""
        self.insert_rows(chosen, used)

    def insert_rows(self, chosen: tuple[Indices, Counts], used: UsedRows) -> None:
        """Make the rows of chosen ids, and copy them; :func:`loops.build_insert`."""
        self.rows.make_room(self.layout, len(chosen[0]))
        out_NW = used.rows if used.copied is None else _NO_ROWS
        ids_N, counts_N, slots_N = used.ids, used.counts, used.slots
        self.insert(self.at, ids_N, counts_N, chosen, out_NW, slots_N, used.copied)

    def _keep_admission(self, num_ids: int) -> None:
        """Keep what an admission remembers, or make room for what it keeps itself."""
        undo_log = self.rows.undo_log
        if undo_log is None or self.admission is None or not self.remembered.size:
            return
        if num_bytes := self.spec.admission.num_kept_bytes():
            undo_log.make_room(num_bytes * num_ids)
        else:
            undo_log.keep_all(self.remembered)

    def note_lookup(
        self, tick: int, ids_N: Ids, slots_N: Slots, made: tuple[Indices, Indices]
    ) -> None:
        """Note a training lookup: ``made`` are positions of missing and of new ids."""
        journal = self.rows.journal
        journal.used(self.changed_slots(slots_N, tick), *made)
        if self.remembered.size:
            journal.seen(self.number, ids_N[made[0]])

    def note_update(self, ids_N: Ids) -> None:
        """Note the rows of ids, that are about to be updated."""
        slots_N = self.find(ids_N)
        slots_N = slots_N[slots_N != memory.MISSING]
        self.rows.journal.changed(self.changed_slots(slots_N))

    def changed_slots(self, slots_N: Slots, tick: int = 0) -> ChangedSlots:
        """Return slots as the journal notes them."""
        return ChangedSlots(self.number, int(self.layout[memory.ARENA]), tick, slots_N)

    def _count_kept_bytes(self, num_rows: int) -> int:
        """Return what the undo log keeps of an update or a write, at most."""
        return 2 * ROW_BYTES + num_rows * self.kept_row_bytes

    def add_update(self, ids_N: Ids, grads_ND: Floats, hints_N: Slots | None) -> None:
        """Apply the optimizer to rows at the end of the transaction that is open."""
        rows, ids_N = self.rows, read_only(ids_N)
        assert rows.opened is not None
        if hints_N is None or len(hints_N) != len(ids_N):
            hints_N = self.find(ids_N)
        if rows.journal.is_on and not rows.journal.is_noted(hints_N, ids_N):
            self.note_update(ids_N)
        steps = rows.opened.steps
        steps[self.number] = step = steps.get(self.number, self.num_updates) + 1
        hints_N, grads_ND = read_only(hints_N), read_only(grads_ND)
        rows.opened.add(
            self._count_kept_bytes(len(ids_N)),
            partial(self.update, step, ids_N, hints_N, grads_ND),
        )

    def update(
        self,
        step: int,
        ids_N: Ids,
        hints_N: Slots,
        grads_ND: Floats,
        transaction: Transaction,
    ) -> None:
        """Apply the optimizer to rows, and count a step: the end of a transaction."""
        self._keep_step()
        missed, rejected = self.apply(step, ids_N, hints_N, grads_ND)
        transaction.results.append(self.result(hints_N, missed, rejected))

    def _keep_step(self) -> None:
        if self.rows.undo_log is not None:
            self.rows.undo_log.keep(self.step)

    def result(self, hints_N: Slots, missed: int, rejected: int) -> UpdateResult:
        """Return what was not applied of an update."""
        unadmitted = 0
        if missed and self.admission is not None:
            # Its lookup left it without a row, if what that found is known.
            num_without = int(np.count_nonzero(hints_N == memory.MISSING))
            unadmitted = min(num_without, missed)
        return UpdateResult(missed, rejected, unadmitted)

    def apply(
        self, step: int, ids_N: Ids, hints_N: Slots, grads_ND: Floats
    ) -> tuple[int, int]:
        """Apply the optimizer to the rows of ids.

        Returns how many ids have none, and how many gradients were rejected.
        """
        return self.step_rows(ids_N, hints_N, grads_ND, step=step, now_s=self.now_s())

    def add_step(self, step: int) -> None:
        """Continue counting update requests from a step, at a transaction's end."""
        journal = self.rows.journal
        if journal.is_on:
            journal.changed(self.changed_slots(_NO_SLOTS))
        with self.rows.transaction() as transaction:
            transaction.steps[self.number] = step
            transaction.add(ROW_BYTES, partial(self.set_step, step))

    def set_step(self, step: int, transaction: Transaction) -> None:
        """Do what :meth:`add_step` has added."""
        self._keep_step()
        self.num_updates = step

    def read(self, ids_N: Ids) -> Floats:
        """Return weights and state; zeros without a row."""
        return self.read_slots(self.find(ids_N))

    def write(self, ids_N: Ids, rows_NK: Floats) -> None:
        """Set weights, or weights and state; missing rows are made."""
        weights_ND = np.empty((len(ids_N), self.spec.row_dim), dtype=np.float32)
        ids_N, rows_NK = read_only(ids_N), read_only(rows_NK)
        admission, self.admission = self.admission, None
        with self.rows.transaction() as transaction:
            try:
                self.look_up_rows(ids_N, weights_ND)
            finally:
                self.admission = admission
            num_bytes = self._count_kept_bytes(len(ids_N))
            transaction.add(num_bytes, partial(self._overwrite, ids_N, rows_NK))

    def _overwrite(self, ids_N: Ids, rows_NK: Floats, transaction: Transaction) -> None:
        slots_N = read_only(self.find(ids_N))  # rows may have left
        if self.rows.undo_log is not None:
            self.rows.undo_log.keep_rows(self.layout, slots_N)
        memory.write_rows(self.layout, slots_N, rows_NK)
        if not np.abs(rows_NK).max(initial=0) <= finite.MODERATE_WEIGHT:
            self.rows.tally[memory.HAS_LARGE] = 1

    def admit(
        self, used: UsedRows, missing: Indices, now: tuple[int, int]
    ) -> tuple[Indices, Counts]:
        """Return which of the missing ids get a row, and how often they had waited.

        Writes what the others read: the state is that of a new row. ``now`` is the
        request's tick and batch. No ids have waited if the second array is empty.
        """
        if self.admission is None:
            return missing, _NO_COUNTS
        has_counts = len(used.counts) > 0
        counts = (
            used.counts[missing] if has_counts else np.ones(len(missing), np.uint32)
        )
        seen = counts.astype(np.int64)
        is_admitted = self.admission(used.ids[missing], seen, *now)
        used.rows[missing[~is_admitted]] = self.unadmitted_row[: used.rows.shape[1]]
        waited = (seen - counts)[is_admitted].astype(np.uint32)
        return missing[is_admitted], read_only(waited)

    def read_only(self, ids_N: Ids, out_ND: Floats) -> None:
        """Copy the weights of ids, read-only, and what those without a row read."""
        if self.reads_begun_rows:
            self._read_begun(self.layout, ids_N, out_ND, self._begun_row)
        else:
            starts, out = np.array([0, len(ids_N)]), out_ND.reshape(-1)
            loops.lookup_readonly(
                self._alone[0], ids_N, starts, out, self.unadmitted_values
            )

    def was_admitted(self, ids_N: Ids, batch: int) -> Bools:
        """Return which ids were admitted when they were seen last, in a batch."""
        recall = build_admission(
            self.spec.admission, self.spec.seed, self.remembered, recalls=True
        )
        if recall is None:
            return np.ones(len(ids_N), dtype=np.bool_)
        return recall(ids_N, np.zeros(len(ids_N), dtype=np.int64), 0, batch)

    def step_rows(
        self, ids_N: Ids, hints_N: Slots, grads_ND: Floats, *, step: int, now_s: int
    ) -> tuple[int, int]:
        """Apply the optimizer to the rows of ids; that is the table's step ``step``.

        All arrays are read-only. Returns how many ids have no row, and how many
        gradients were rejected.
        """
        if self.is_part:
            self.layout[memory.STEP] = step  # the table counts it, after its parts
        else:
            self.num_updates = step
        self.layout[memory.NOW_S] = now_s
        numbers = self.step_numbers(step)
        if self.rows.engine is not None:
            found: tuple[int, int] = self.update_loop(
                self.at, ids_N, hints_N, grads_ND, numbers
            )
            return found
        results_T2 = np.zeros((1, 2), dtype=np.int64)
        self.update_loop(
            self._alone,
            ids_N,
            np.array([0, len(ids_N)]),
            hints_N,
            grads_ND.reshape(-1),
            np.array([[step, now_s]], dtype=np.uint64),
            numbers[None],
            results_T2,
        )
        num_missed, num_refused = results_T2[0].tolist()
        return num_missed, num_refused

    def describe_both(self, spec: TableSpec) -> tuple[str, str]:
        """Return what its rows look like, and would under other settings."""
        present, received = (
            one.describe_rows(with_metadata=one.has_metadata and not self.rows.is_lfu)
            for one in (self.spec, spec)
        )
        return present, received

    def used_words(self) -> Words:
        """Return what the admission remembers, up to the last word that is used."""
        num = self.spec.admission.num_used_words(self.remembered)
        return self.remembered[:num]

    def sightings(self) -> Sightings:
        """Return what the admission remembers."""
        return self.spec.admission.sightings(self.used_words())

    def describe(self) -> PublishedTable:
        """Describe the table, for a process that opens the memory later.

        The memory of its admission is said by its distance from the steps.
        """
        begin, thresholds = self.rows.steps, self.thresholds.view(np.uint64)
        remembered = self.remembered
        return PublishedTable(
            self.spec.to_json(),
            int(self.layout[memory.ARENA]),
            self.layout[ROW_COLUMNS].tolist(),
            memory.distance(begin, remembered) if remembered.size else 0,
            memory.distance(begin, thresholds) if thresholds.size else 0,
            self.is_dropped,
        )

    def forget(self) -> None:
        """Forget step and candidates: all rows are dropped."""
        self.num_updates = 0
        if self.thresholds.size:
            self.thresholds[:] = self.spec.dynamic.first_thresholds()
        if self.remembered.size:
            [self.remembered] = self.rows.memory.emptied(self.remembered)
            self.rows.memory.commit(self.remembered, self.remembered.size)
        self._begin_admission()

    def _begin_admission(self) -> None:
        log = NO_LOG if self.rows.log is None else self.rows.log
        self.admission = build_admission(
            self.spec.admission, self.spec.seed, self.remembered, log
        )

    def steps_alike(self, other: "TableState") -> bool:
        """Return whether :meth:`step_numbers` of both are equal, of equal steps."""
        of_both = [(s.spec.optimizer, s.spec.row_dim, s._checks) for s in (self, other)]  # noqa: SLF001
        return of_both[0] == of_both[1]

    def step_numbers(self, step: int) -> Floats:
        """Return the bound of the weights, that of gradients, and the optimizer's."""
        numbers = self.spec.optimizer.step_numbers(self.spec.row_dim, max(step, 1))
        return np.array((*self._checks, *numbers), dtype=np.float32)


def look_up_rows(
    tables: PlainTables,
    ids_N: Ids,
    starts_T: Starts,
    out: Floats,
    counts_N: Counts | None,
    batch: int,
    how: int | None = None,
    frequencies_N: Counts = _NO_FREQUENCIES,
) -> Slots:
    """Do training lookups of tables whose rows have one block.

    ``how`` else to copy rows with their state, see ``loops.Copied``: out, or in.
    """
    if ids_N.flags.writeable:
        ids_N = read_only(ids_N)
    counts_N = _NO_COUNTS if counts_N is None else read_only(counts_N)
    states, rows = tables.states, tables.states[0].rows
    slots_N = np.empty(len(ids_N), dtype=np.uint32)
    missing_N = np.empty(len(ids_N), dtype=np.int64)
    num_tables, first_tick = len(states), rows.tick + 1
    num_touches = len(ids_N) + MARK_WORDS * (num_tables - 1)
    copied: loops.Copied = None
    target, widths_T, num_kept = out, tables.dims, 0
    if how is not None:
        copied = out.ctypes.data, how, frequencies_N, first_tick
        target, widths_T = _NO_FLOATS, tables.widths
        num_kept = int(np.diff(starts_T).dot(tables.kept_row_bytes))
    made: dict[int, tuple[Indices, Indices]] = {}
    parts: list[Floats] = []  # by table, once one makes rows
    rows.begin(num_touches, num_kept)
    t, begin = 0, (0, num_touches, copied)
    while t < num_tables:
        t, num_missing = loops.lookup_training(
            tables.at, begin, ids_N, counts_N, starts_T, target, slots_N, missing_N
        )
        if num_missing == loops.NO_ROOM:
            rows.logs.make_room(rows.arenas.directory, num_touches, rows.undo_log)
            rows.begin(num_touches, num_kept)
        elif num_missing:
            missing = missing_N[:num_missing]
            if rows.journal.is_on:
                missing = missing.copy()  # the next table's follow
            part = slice(int(starts_T[t]), int(starts_T[t + 1]))
            parts = parts or split_rows(out, starts_T, widths_T)
            used = UsedRows(
                ids_N[part],
                counts_N[part],
                parts[t],
                slots_N[part],
                _copied_of(copied, parts[t], part),
            )
            made[t] = missing, states[t].make_missing(missing, batch, used)
            t, begin = t + 1, (t + 1, 0, copied)
    if rows.journal.is_on:
        if copied is None:
            rows.journal.looked_up(slots_N, ids_N)
        for t, state in enumerate(states):
            part = slice(int(starts_T[t]), int(starts_T[t + 1]))
            tick, of_table = first_tick + t, made.get(t, _NONE_MADE)
            state.note_lookup(tick, ids_N[part], slots_N[part], of_table)
    rows.end()
    return slots_N


def _copied_of(copied: loops.Copied, rows_NW: Floats, part: slice) -> loops.Copied:
    """Return what is copied of one table."""
    if copied is None:
        return None
    _, how, frequencies_N, first_tick = copied
    return rows_NW.ctypes.data, how, frequencies_N[part], first_tick


def _checks(
    spec: TableSpec, fill: Floats, state_S: Floats
) -> tuple[np.float32, float, int]:
    """Return the bound of weights, what gradients are moderate, floats of the state.

    The second is a sum of squares; -1: rows are looked at after each step.
    """
    num_state = len(spec.optimizer.initial_state(spec.row_dim))
    is_sure = spec.optimizer.stays_finite
    is_sure &= bool(np.abs(fill).max(initial=0) <= finite.MODERATE_WEIGHT)
    is_sure &= bool(state_S[:num_state].max(initial=0) <= finite.MODERATE_STATE)
    moderate = float(finite.MODERATE_SQUARES) if is_sure else -1.0
    bound = np.float32(spec.weight_bound or np.inf)
    bound = largest_within(bound, memory.DTYPES.index(spec.weight_dtype))
    return bound, moderate, num_state
