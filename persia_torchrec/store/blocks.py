"""Rows of several blocks: how many an id has follows from how often it is seen.

A table with dynamic dim keeps the first block of each row, and three numbers; each
further block is a row of a table of its own, on the same server, with the same id:

    NAME            id | block 1 | its state | acc, cur, t
    NAME/block 2    id | block 2 | its state      if the id is frequent

``acc`` and ``cur`` are as they were when ``t`` periods had ended: a row is brought up
to date when it is used. A period ends with the update that completes it. Then all rows
are read once: thresholds are set, and blocks are freed that ids have lost, or whose id
has no row any more. So all is kept as rows are, but for the thresholds, which are in
the heads of files, and in a server's memory beside what its admission remembers.

Dimension key:
    N: ids of one request
    D: embedding dim; W: that of a block
    K: rows, each once
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from persia_torchrec.compiled import read_only
from persia_torchrec.embedding.dynamic import KEPT, NUM_STATISTICS, Doubles
from persia_torchrec.errors import StoreError
from persia_torchrec.store import loops, memory
from persia_torchrec.store.memory import Counts, Floats, Ids, Slots
from persia_torchrec.store.recovery import ROW_BYTES

if TYPE_CHECKING:
    from persia_torchrec.store.embedding_store import EmbeddingStore
    from persia_torchrec.store.tables import TableState

_NO_COUNTS: Counts = np.empty(0, dtype=np.uint32)
_NEGLIGIBLE = 1e-7


class Blocks:
    """The blocks of one table; ``states`` are those of all but the first."""

    def __init__(self, of: "TableState", states: Sequence["TableState"]) -> None:
        self.states, self._rule, self._dim = states, of.spec.dynamic, of.spec.row_dim
        self._layout = of.layout
        begin = int(of.layout[memory.STATE]) // 4
        first = begin + of.spec.num_row_floats - NUM_STATISTICS
        self._columns = first + np.arange(NUM_STATISTICS)
        of.step_with(states)

    def look_up(
        self,
        store: "EmbeddingStore",
        table: "TableState",
        ids_N: Ids,
        out_ND: Floats,
        counts_N: Counts | None,
    ) -> Slots:
        """Do a training lookup; return the slots of the first blocks."""
        first_NW = np.empty((len(ids_N), self._dim), dtype=np.float32)
        if counts_N is None:
            counts_N = np.ones(len(ids_N), dtype=np.uint32)
        with store.request():
            slots_N = store.look_up_rows(
                table, ids_N, first_NW, training=True, counts_N=counts_N
            )
            num_N = self._count(store, table, ids_N, counts_N)
            self._spread(first_NW, out_ND)
            for number, state in enumerate(self.states, start=1):
                picked = np.flatnonzero(num_N > number)
                rows_KW = np.empty((len(picked), self._dim), dtype=np.float32)
                counts_K = counts_N[picked]
                store.look_up_rows(
                    state, ids_N[picked], rows_KW, training=True, counts_N=counts_K
                )
                out_ND[picked, self._of(number)] = rows_KW
        out_ND[slots_N == memory.MISSING] = table.spec.admission.unadmitted_value
        return slots_N

    def read_only(
        self, store: "EmbeddingStore", table: "TableState", ids_N: Ids, out_ND: Floats
    ) -> None:
        """Do a lookup that is not for training."""
        rows_NW = np.empty((len(ids_N), self._dim), dtype=np.float32)
        store.look_up_rows(table, ids_N, rows_NW, training=False)
        self._spread(rows_NW, out_ND)
        for number, state in enumerate(self.states, start=1):
            store.look_up_rows(state, ids_N, rows_NW, training=False)
            out_ND[:, self._of(number)] = rows_NW
        slots_N = loops.find_slots(self._layout, ids_N)
        out_ND[slots_N == memory.MISSING] = table.spec.admission.unadmitted_value

    def split_update(
        self, ids_N: Ids, grads_ND: Floats
    ) -> tuple[list[tuple[int, Ids, Floats, Slots]], Floats]:
        """Return what is updated of further blocks, and the gradients of the first.

        Of each block: its table, ids, gradients and slots.
        """
        is_finite_N = np.isfinite(grads_ND).all(axis=1)
        has_row_N = loops.find_slots(self._layout, ids_N) != memory.MISSING
        parts = []
        for number, state in enumerate(self.states, start=1):
            slots_N = loops.find_slots(state.layout, ids_N)
            picked = (slots_N != memory.MISSING) & is_finite_N & has_row_N
            grads_KW = np.ascontiguousarray(grads_ND[picked, self._of(number)])
            parts.append((state.number, ids_N[picked], grads_KW, slots_N[picked]))
        first_NW = np.ascontiguousarray(grads_ND[:, self._of(0)])
        if not is_finite_N.all():
            first_NW = first_NW.copy()
            first_NW[~is_finite_N] = np.nan  # all of a gradient is refused
        return parts, first_NW

    def read(self, store: "EmbeddingStore", table: "TableState", ids_N: Ids) -> Floats:
        """Return weights and state of all blocks; zeros where there is none."""
        slots_N = store.find(table.number, ids_N)
        has_row_N = slots_N != memory.MISSING
        rows = [store.read_slots(table, slots_N)[:, :-NUM_STATISTICS]]
        for state in self.states:
            slots_N = store.find(state.number, ids_N)
            rows.append(store.read_slots(state, slots_N) * has_row_N[:, None])
        weights, states = zip(
            *(np.split(r, [self._dim], axis=1) for r in rows), strict=True
        )
        return np.concatenate([*weights, *states], axis=1)

    def write(
        self, store: "EmbeddingStore", table: "TableState", ids_N: Ids, rows_ND: Floats
    ) -> None:
        """Set the weights of the blocks that ids have; a new row has one."""
        if rows_ND.shape[1] != table.spec.dim:
            raise StoreError(
                f"Table {table.spec.name!r}: optimizer state cannot be written, as its "
                "rows have several blocks. Write the weights alone."
            )
        with store.request():
            store.write_rows(table, ids_N, rows_ND[:, self._of(0)])
            for number, state in enumerate(self.states, start=1):
                has_N = store.find(state.number, ids_N) != memory.MISSING
                store.write_rows(state, ids_N[has_N], rows_ND[has_N, self._of(number)])

    def end_period(self, store: "EmbeddingStore", table: "TableState", t: int) -> None:
        """Set the thresholds, if they still change, and free blocks that are lost."""
        slots_K = self._slots(store, table)
        acc_K, _ = self._statistics(store, table, slots_K, t)
        thresholds = self._rule.thresholds(acc_K, t)
        if thresholds is not None:
            if store.recovery is not None:
                store.recovery.make_room(table.thresholds.nbytes + ROW_BYTES)
                store.recovery.keep(table.thresholds.view(np.uint64))
            table.thresholds[:] = thresholds
        for number, state in enumerate(self.states, start=1):
            ids_K = store.arena(state)[self._slots(store, state), 0]
            slots_K = store.find(table.number, ids_K)
            is_lost_K = slots_K == memory.MISSING
            has_row = np.flatnonzero(~is_lost_K)
            found = self._statistics(store, table, slots_K[has_row], t)
            num_K = self._rule.count_blocks(*found, t, table.thresholds)
            is_lost_K[has_row] = num_K <= number
            store.remove(state.number, ids_K[is_lost_K])

    def _count(
        self, store: "EmbeddingStore", table: "TableState", ids_N: Ids, counts_N: Counts
    ) -> Slots:
        """Count ids; return how many blocks each had before, 0 without a row."""
        t = table.num_updates // self._rule.period
        slots_N = loops.find_slots(self._layout, ids_N)  # some may have left again
        has_row = np.flatnonzero(slots_N != memory.MISSING)
        slots_K, first, which = np.unique(
            slots_N[has_row], return_index=True, return_inverse=True
        )
        acc_K, cur_K = self._statistics(store, table, slots_K, t)
        num_K = self._rule.count_blocks(acc_K, cur_K, t, table.thresholds)
        new = ids_N[has_row[first[(acc_K == 0) & (cur_K == 0)]]]
        for state in self.states if len(new) else ():
            store.remove(state.number, new)  # of a row that has left since
        np.add.at(cur_K, which, counts_N[has_row])
        self._put_statistics(store, table, slots_K, (acc_K, cur_K, t))
        num_N = np.zeros(len(ids_N), dtype=np.uint32)
        num_N[has_row] = num_K[which]
        return num_N

    def _statistics(
        self, store: "EmbeddingStore", table: "TableState", slots_K: Slots, t: int
    ) -> tuple[Doubles, Doubles]:
        """Return ``acc`` and ``cur`` of rows, when ``t`` periods have ended."""
        words = store.arena(table).view(np.float32)
        found = words[slots_K[:, None], self._columns]
        acc_K = np.ascontiguousarray(found[:, :2]).view(np.float64)[:, 0]
        cur_K, since_K = found[:, 2].astype(np.float64), found[:, 3].astype(np.int64)
        while True:
            late = (since_K < t) & ((acc_K > _NEGLIGIBLE) | (cur_K > 0))
            if not late.any():
                return acc_K, cur_K
            acc_K[late] = KEPT * acc_K[late] + (1 - KEPT) * cur_K[late]
            cur_K[late] = 0
            since_K[late] += 1

    def _put_statistics(
        self,
        store: "EmbeddingStore",
        table: "TableState",
        slots_K: Slots,
        values: tuple[Doubles, Doubles, int],
    ) -> None:
        acc_K, cur_K, t = values
        words = store.arena(table).view(np.float32)
        if store.recovery is not None:
            row_bytes = words.strides[0] + ROW_BYTES
            store.recovery.make_room(len(slots_K) * row_bytes)
            store.recovery.keep_rows(self._layout, read_only(slots_K))
        put = np.empty((len(slots_K), NUM_STATISTICS), dtype=np.float32)
        put[:, :2] = acc_K.reshape(-1, 1).view(np.float32)
        put[:, 2], put[:, 3] = cur_K, t
        words[slots_K[:, None], self._columns] = put

    def _slots(self, store: "EmbeddingStore", table: "TableState") -> Slots:
        """Return the slots of all rows of a table."""
        used = store.arenas.directory[int(table.layout[memory.ARENA]), memory.USED]
        owners = store.arena(table)[: int(used), 1] >> memory.OWNER_SHIFT
        return np.flatnonzero(owners == table.layout[memory.OWNER]).astype(np.uint32)

    def _spread(self, first_NW: Floats, out_ND: Floats) -> None:
        out_ND[:] = 0
        out_ND[:, self._of(0)] = first_NW

    def _of(self, number: int) -> slice:
        """Return the columns of a block, from 0 on."""
        return slice(number * self._dim, (number + 1) * self._dim)
