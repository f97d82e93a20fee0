"""Dynamic embedding dimension: frequent ids get more blocks of weights.

A table with dynamic dim keeps the first block of each row, and three numbers; each
further block is a row of a table of its own, on the same server, with the same id:

    NAME            id | block 1 | its state | acc, cur, t
    NAME/block 2    id | block 2 | its state      if the id is frequent

``acc`` and ``cur`` are as they were when ``t`` periods had ended: a row is brought up
to date when it is used. A period ends with the update that completes it: thresholds are
set, of all rows as they are then (``block_statistics.py``). So all is kept as rows are,
but for the thresholds, which are in the heads of files, and in a server's memory beside
what its admission remembers.

All rows are ranked, and blocks that ids have lost, or whose id has no row any more, are
freed, behind the request that ends the period, a slice at a time, each a change of its
own. It is as if all was done at once, though other requests come in between:

    an id that is used      has the ranking completed, and loses its blocks first; it
                            was seen in this period then, and what blocks it gets are
                            its own
    a row that needs room   has blocks freed until there is room; none is evicted before
    another period's end,
    a sweep, a dump         has the rest freed first

Which blocks an id has lost depends on its statistics, the thresholds, and t: all three
as when the period had ended. So the table counts an update after the updates of its
further blocks: the rest of a period is freed before the next t. Rows, their order of
eviction and all answers depend on the requests only. The slots of rows, and how many
there are meanwhile, depend on when the slices are done; so does, as a sweep frees
blocks first, when a row that has expired leaves.

An update needs no thresholds. In a memory file a word says what is not over, and the
process that opens the file of a killed one ranks all again, or frees the rest: which
blocks an id has lost depends on nothing that either changes.

Dimension key:
    N: ids of one request
    D: embedding dim; W: that of a block
    K: rows, each once
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Counts, Doubles, Floats, Ids, Slots, Words
from persia_torchrec.embedding.usage import NUM_PERIODS, NUM_STATISTICS
from persia_torchrec.jit.compiled import read_only
from persia_torchrec.store import loops, memory
from persia_torchrec.store.block_statistics import (
    Ranking,
    read_statistics,
)
from persia_torchrec.store.store_rows import Transaction
from persia_torchrec.store.stored_table import TableState
from persia_torchrec.store.undo_log import ROW_BYTES
from persia_torchrec.table import TableSpec

SLICE_ROWS = 2048
"""Rows that are looked at to free blocks at a time: about a millisecond."""
MAX_SLOTS = 2**15
"""Slots that are looked at, to rank their rows or free blocks, at a time."""
_FIRST = 0, 0  # where freeing begins: the number of a block, 0 to rank all, and a slot
_FREE, _RANK = 1, 2  # what is left, in the word that says it


class TableOfBlocks(TableState):
    """A table whose ids have one block, or more; ``parts`` are of all but the first."""

    counts_ids = True

    def link(self, parts: Sequence[TableState]) -> None:
        """Find the tables of further blocks."""
        super().link(parts)
        self.parts, self._rule, self._dim = parts, self.spec.dynamic, self.spec.row_dim
        begin = int(self.layout[memory.STATE]) // 4
        first = begin + self.spec.num_row_floats - NUM_STATISTICS
        self._columns = first + np.arange(NUM_STATISTICS)
        self._columns_of = _find_columns(self.spec)
        self._ranking: Ranking | None = None  # of a period that has ended
        number = parts[0].number
        self._left: Words = self.rows.steps[number : number + 1]  # of its end
        self._next = _FIRST
        if self.must_free:
            self.rows.unfreed[self.number] = self._free

    def look_up(
        self, ids_N: Ids, out_ND: Floats, counts_N: Counts | None, batch: int
    ) -> Slots:
        """Do a training lookup; return the slots of all blocks, ``(N, blocks)``."""
        self.settle(ids_N)
        first_NW = np.empty((len(ids_N), self._dim), dtype=np.float32)
        if counts_N is None:
            counts_N = np.ones(len(ids_N), dtype=np.uint32)
        with self.rows.transaction():
            slots_N = self.look_up_rows(ids_N, first_NW, counts_N, batch)
            num_N = self._count(ids_N, counts_N)
            self._spread(first_NW, out_ND)
            found = np.full((len(ids_N), self._rule.blocks), memory.MISSING)
            found[:, 0] = slots_N
            for number, state in enumerate(self.parts, start=1):
                picked = np.flatnonzero(num_N > number)
                rows_KW = np.empty((len(picked), self._dim), dtype=np.float32)
                counts_K = counts_N[picked]
                found[picked, number] = state.look_up_rows(
                    ids_N[picked], rows_KW, counts_K
                )
                out_ND[picked, self._of(number)] = rows_KW
        out_ND[slots_N == memory.MISSING] = self.spec.admission.unadmitted_value
        return found

    def read_only(self, ids_N: Ids, out_ND: Floats) -> None:
        """Copy the weights of all blocks, and what ids without a row read."""
        self.settle(ids_N)
        rows_NW = np.empty((len(ids_N), self._dim), dtype=np.float32)
        super().read_only(ids_N, rows_NW)
        self._spread(rows_NW, out_ND)
        for number, state in enumerate(self.parts, start=1):
            state.read_only(ids_N, rows_NW)
            out_ND[:, self._of(number)] = rows_NW
        if self.spec.ids_without_row == "zeros":
            slots_N = self.find(ids_N)
            out_ND[slots_N == memory.MISSING] = self.spec.admission.unadmitted_value

    def add_update(self, ids_N: Ids, grads_ND: Floats, hints_N: Slots | None) -> None:
        """Update rows of further blocks, then of the first one, at the end.

        A block that the lookup has not found gets no gradient, if hints say so.
        """
        ids_N = read_only(ids_N)
        if hints_N is not None and hints_N.shape != (len(ids_N), self._rule.blocks):
            hints_N = None  # not of a lookup of these ids
        is_seen = None if hints_N is None else hints_N != memory.MISSING
        is_finite_N = np.isfinite(grads_ND).all(axis=1)
        has_row_N = self.find(ids_N) != memory.MISSING
        for number, state in enumerate(self.parts, start=1):
            slots_N = state.find(ids_N)
            picked = (slots_N != memory.MISSING) & is_finite_N & has_row_N
            if is_seen is not None:
                picked &= is_seen[:, number]
            grads_KW = np.ascontiguousarray(grads_ND[picked, self._of(number)])
            state.add_update(ids_N[picked], grads_KW, slots_N[picked])
        first_NW = np.ascontiguousarray(grads_ND[:, self._of(0)])
        if not is_finite_N.all():
            first_NW = first_NW.copy()
            first_NW[~is_finite_N] = np.nan  # all of a gradient is rejected
        first_N = None if hints_N is None else hints_N[:, 0].copy()
        super().add_update(ids_N, first_NW, first_N)

    def read(self, ids_N: Ids) -> Floats:
        """Return weights and state of all blocks; zeros where there is none.

        The state is that of all weights, as of an optimizer without blocks, but that a
        number of a row is one of each block.
        """
        self.settle(ids_N)
        slots_N = self.find(ids_N)
        has_row_N = slots_N != memory.MISSING
        width = self.spec.dim + self.spec.num_state_floats
        out = np.zeros((len(ids_N), width), dtype=np.float32)
        out[:, self._columns_of[0]] = self.read_slots(slots_N)[:, :-NUM_STATISTICS]
        for columns, state in zip(self._columns_of[1:], self.parts, strict=True):
            out[:, columns] = state.read(ids_N) * has_row_N[:, None]
        return out

    def write(self, ids_N: Ids, rows_ND: Floats) -> None:
        """Set weights, or weights and state, of the blocks that ids have.

        A new row has one.
        """
        self.settle(ids_N)
        columns = self._columns_of
        if rows_ND.shape[1] == self.spec.dim:
            columns = [of_block[: self._dim] for of_block in columns]
        with self.rows.transaction():
            is_new_N = self.find(ids_N) == memory.MISSING
            for state in self.parts if is_new_N.any() else ():
                self.rows.take_out(state.at, ids_N[is_new_N])  # of a row that has left
            super().write(ids_N, rows_ND[:, columns[0]])
            for number, state in enumerate(self.parts, start=1):
                has_N = state.find(ids_N) != memory.MISSING
                state.write(ids_N[has_N], rows_ND[has_N][:, columns[number]])

    def update(
        self,
        step: int,
        ids_N: Ids,
        hints_N: Slots,
        grads_ND: Floats,
        transaction: Transaction,
    ) -> None:
        """Update rows, and end the period that the step completes, if it does.

        Thresholds must be set then, if they still change, and blocks be freed.
        """
        ends_period = step % self._rule.period == 0
        if ends_period:
            self._free_all(transaction)
        super().update(step, ids_N, hints_N, grads_ND, transaction)
        if ends_period:
            if self.rows.undo_log is not None:
                self.rows.undo_log.keep(self._left)
            is_first = step // self._rule.period <= NUM_PERIODS
            self._left[0] = _RANK if is_first else _FREE
            self._ranking, self._next = None, _FIRST
            self.rows.unfreed[self.number] = self._free
            transaction.ended.append(self.number)

    def set_step(self, step: int, transaction: Transaction) -> None:
        """Continue counting update requests from a step, when all blocks are freed."""
        self._free_all(transaction)
        super().set_step(step, transaction)

    def _free_all(self, transaction: Transaction) -> None:
        """Free the blocks of the previous period, in the midst of a request's end."""
        if self.number in self.rows.unfreed:
            while self.number in self.rows.unfreed:
                self.rows.free_blocks_of(self.number)
            transaction.make_room()  # again: some of it was used

    @property
    def _num_periods(self) -> int:
        """How many periods have ended, as rows have it: a float32.

        From 2**24 on that is every second one, later every fourth.
        """
        return int(np.float32(self.num_updates // self._rule.period))

    @property
    def must_free(self) -> bool:
        """Whether blocks are to be freed: a period has ended."""
        return bool(self._left[0])

    def _free(self) -> bool:
        """Free lost blocks among the next rows; return whether others follow."""
        if self.is_dropped:
            return False
        number, slot = self._next
        max_rows, num_slots = SLICE_ROWS, MAX_SLOTS
        if number == 0:
            num_slots -= self._rank(num_slots)
            if self._left[0] == _RANK:
                return True
            number, slot = 1, 0
        while number <= len(self.parts) and max_rows > 0 and num_slots > 0:
            state = self.parts[number - 1]
            num_used = self.rows.num_used(state.layout)
            stop = min(slot + num_slots, num_used)
            slots_K = np.empty(max_rows, dtype=np.uint32)
            num, end = loops.find_rows(state.layout, slot, stop, slots_K)
            ids_K = self.rows.arena(state.layout)[slots_K[:num], 0]
            is_lost_K = self._count_unless_seen(ids_K) <= number
            if is_lost_K.any():
                self.rows.take_out(state.at, ids_K[is_lost_K])
            max_rows, num_slots = max_rows - num, num_slots - (end - slot)
            number, slot = (number, end) if end < num_used else (number + 1, 0)
        self._next = number, slot
        if number <= len(self.parts):
            return True
        self._leave_to_do(0)
        return False

    def _rank(self, num_slots: int) -> int:
        """Rank the rows of the next slots; set the thresholds after the last ones.

        Returns how many slots these are.
        """
        if self._left[0] != _RANK:
            return 0
        t = self._num_periods
        if self._ranking is None:
            num_used = self.rows.num_used(self.layout)
            self._ranking = Ranking(self.layout, num_used, t)
        num_read = self._ranking.read(num_slots)
        if self._ranking.is_read:
            acc_R = self._ranking.find(self._rule.ranks)
            thresholds = None if acc_R is None else self._rule.thresholds(acc_R, t)
            self._leave_to_do(_FREE, thresholds)
            self._ranking = None
        return num_read

    def _leave_to_do(self, left: int, thresholds: Doubles | None = None) -> None:
        """Note what is left of the end of a period, and set the thresholds."""
        with self.rows.changing():  # perhaps a part of a request that will be undone
            if self.rows.undo_log is not None:
                undo_log, words = self.rows.undo_log, self.thresholds.view(np.uint64)
                undo_log.make_room(words.nbytes + 2 * ROW_BYTES)
                undo_log.keep(self._left)
                undo_log.keep(words)
            if thresholds is not None:
                self.thresholds[:] = thresholds
            self._left[0] = left

    def settle(self, ids_N: Ids) -> None:
        """Complete the ranking, and free blocks that ids have lost before their use."""
        if not self.must_free:
            return
        while self._left[0] == _RANK:
            self._rank(MAX_SLOTS)
        num_N = self._count_unless_seen(ids_N)
        for number, state in enumerate(self.parts, start=1):
            lost = ids_N[num_N <= number]
            if len(lost):
                self.rows.take_out(state.at, lost)

    def _count_unless_seen(self, ids_N: Ids) -> npt.NDArray[np.int64]:
        """Return how many blocks ids have kept after the last period.

        That is 0 without a row; and all, of an id that has been seen since.
        """
        t, slots_N = self._num_periods, self.find(ids_N)
        has_row = np.flatnonzero(slots_N != memory.MISSING)
        acc_K, cur_K, is_seen_K = read_statistics(self.layout, slots_N[has_row], t)
        num_K = self._rule.count_blocks(acc_K, cur_K, t, self.thresholds)
        num_K[is_seen_K] = self._rule.blocks
        num_N = np.zeros(len(ids_N), dtype=np.int64)
        num_N[has_row] = num_K
        return num_N

    def _count(self, ids_N: Ids, counts_N: Counts) -> Slots:
        """Count ids; return how many blocks each had before, 0 without a row."""
        t = self._num_periods
        slots_N = self.find(ids_N)  # some may have left again
        has_row = np.flatnonzero(slots_N != memory.MISSING)
        slots_K, first, which = np.unique(
            slots_N[has_row], return_index=True, return_inverse=True
        )
        acc_K, cur_K, _ = read_statistics(self.layout, slots_K, t)
        num_K = self._rule.count_blocks(acc_K, cur_K, t, self.thresholds)
        new = ids_N[has_row[first[(acc_K == 0) & (cur_K == 0)]]]
        for state in self.parts if len(new) else ():
            self.rows.take_out(state.at, new)  # of a row that has left since
        np.add.at(cur_K, which, counts_N[has_row])
        self._put_statistics(slots_K, acc_K, cur_K, t)
        num_N = np.zeros(len(ids_N), dtype=np.uint32)
        num_N[has_row] = num_K[which]
        return num_N

    def _put_statistics(
        self, slots_K: Slots, acc_K: Doubles, cur_K: Doubles, t: int
    ) -> None:
        words = self.rows.arena(self.layout).view(np.float32)
        if self.rows.undo_log is not None:
            self.rows.undo_log.make_room(len(slots_K) * self.kept_row_bytes)
            self.rows.undo_log.keep_rows(self.layout, read_only(slots_K))
        put = np.empty((len(slots_K), NUM_STATISTICS), dtype=np.float32)
        put[:, :2] = acc_K.reshape(-1, 1).view(np.float32)
        put[:, 2], put[:, 3] = cur_K, t
        words[slots_K[:, None], self._columns] = put

    def _spread(self, first_NW: Floats, out_ND: Floats) -> None:
        out_ND[:] = 0
        out_ND[:, self._of(0)] = first_NW

    def _of(self, number: int) -> slice:
        """Return the columns of a block, from 0 on."""
        return slice(number * self._dim, (number + 1) * self._dim)


def _find_columns(spec: TableSpec) -> list[npt.NDArray[np.int64]]:
    """Return where weights and state of each block are in a row of all of them."""
    num, dim = spec.dynamic.blocks, spec.row_dim
    widths = [dim] * (1 + spec.num_state_floats // spec.dim)
    widths += [1] * (spec.num_state_floats // num % dim)
    columns: list[list[int]] = [[] for _ in range(num)]
    begin = 0
    for width in widths:
        for of_block in columns:
            of_block += range(begin, begin + width)
            begin += width
    return [np.array(of_block) for of_block in columns]
