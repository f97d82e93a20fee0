"""Shared rows for ids without a row of their own.

A table with B shared rows has a second one on the same server, whose ids are 0 .. B-1:

    id with a row      -----------------> its row
    id without one     --id mod B-------> shared row: read, trained
    id that is admitted --id mod B------> shared row, copied to the id's new row

A shared row is made when training first looks it up; before that it reads what it will
begin with. It counts in the capacity and never leaves (``memory.PINNED``), for which
one row of another kind must fit beside all of them. Gradients of ids of one shared row
are added up: it is stepped once in an update, with the step of the table.

Dimension key:
    N: ids of one request
    K: shared rows of one request
    D: embedding dim
"""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from persia_torchrec.arrays import Counts, Floats, Ids, Indices, Slots, Words
from persia_torchrec.embedding.setting import Kernel
from persia_torchrec.errors import StoreError
from persia_torchrec.jit.compiled import compile_for, read_only, specialized
from persia_torchrec.routing.route import sum_by_id
from persia_torchrec.store import loops, memory
from persia_torchrec.store.index import NOT_FOUND, find_slot, hash_id, index_at
from persia_torchrec.store.memory import Layout
from persia_torchrec.store.stored_table import TableState, UsedRows

_NO_IDS = read_only(np.empty(0, dtype=np.uint64))
_NO_COUNTS = read_only(np.empty(0, dtype=np.uint32))
_NO_INDICES = read_only(np.empty(0, dtype=np.int64))


class TableOfSharedRows(TableState):
    """A row for each id that is admitted, and shared rows for the others.

    ``shared`` is the table that the shared rows are kept in.
    """

    def link(self, parts: Sequence[TableState]) -> None:
        """Find the table of the shared rows."""
        super().link(parts)
        [self.shared] = parts
        self._num_shared = np.uint64(self.spec.shared_rows)
        spec, layout = self.shared.spec, self.shared.layout
        layout[memory.PINNED] = 1
        num_words = int(layout[memory.STATE]) // 8 + spec.num_state_floats + 1
        self._row: Words = np.zeros(num_words, dtype=np.uint64)
        self._read_shared = _build_read(spec.initializer.kernel)
        no_rows = np.empty((0, spec.dim), np.float32)
        compile_for(
            self._read_shared,
            layout,
            _NO_IDS,
            _NO_INDICES,
            self._num_shared,
            no_rows,
            self._row,
        )

    def read_only(self, ids_N: Ids, out_ND: Floats) -> None:
        """Copy the weights of ids, read-only, or of the shared rows of ids without."""
        super().read_only(ids_N, out_ND)
        missing = np.flatnonzero(self.find(ids_N) == memory.MISSING)
        self._read_missing(ids_N, missing, out_ND)

    def _read_missing(self, ids_N: Ids, missing: Indices, out_ND: Floats) -> None:
        """Copy the shared rows of ids without a row."""
        which = read_only(missing)
        self._read_shared(
            self.shared.layout, ids_N, which, self._num_shared, out_ND, self._row
        )

    def make_rows(
        self, missing: Indices, chosen: tuple[Indices, Counts], used: UsedRows
    ) -> None:
        """Make the rows of chosen ids, which begin with what these have read.

        And the shared rows of the others, if they are not there yet.
        """
        if self.admission is None:
            super().make_rows(missing, chosen, used)
            return
        admitted, _ = chosen
        ids_N, out_ND = used.ids, used.rows
        self._make_shared(ids_N[np.setdiff1d(missing, admitted)])
        super().make_rows(missing, chosen, used)
        self._read_missing(ids_N, missing, out_ND)
        slots_K, weights_KD = self.find(ids_N[admitted]), read_only(out_ND[admitted])
        memory.write_rows(self.layout, read_only(slots_K), weights_KD)

    def _make_shared(self, ids_K: Ids) -> None:
        """Make the shared rows of ids, if they are not there yet."""
        shared = self.shared
        keys_K = np.unique(ids_K % self._num_shared)
        keys_K = read_only(keys_K[shared.find(keys_K) == memory.MISSING])
        if not len(keys_K):
            return
        require_room(shared, keys_K)
        shared.layout[memory.NOW_S] = self.layout[memory.NOW_S]
        chosen = np.arange(len(keys_K)), _NO_COUNTS
        rows_KD = np.empty((len(keys_K), shared.spec.dim), dtype=np.float32)
        slots_K = np.empty(len(keys_K), dtype=np.uint32)
        used = UsedRows(keys_K, _NO_COUNTS, rows_KD, slots_K)
        shared.make_rows(chosen[0], chosen, used)
        self._note(slots_K)

    def apply(
        self, step: int, ids_N: Ids, hints_N: Slots, grads_ND: Floats
    ) -> tuple[int, int]:
        """Apply the optimizer to the rows of ids, and to the shared rows of others.

        Returns how many ids have neither, and how many gradients were rejected.
        """
        slots_N, now_s = self.find(ids_N), self.now_s()
        is_own_N = slots_N != memory.MISSING
        if is_own_N.all():
            return self.step_rows(ids_N, hints_N, grads_ND, step=step, now_s=now_s)
        own = (read_only(array[is_own_N]) for array in (ids_N, slots_N, grads_ND))
        missed, rejected = self.step_rows(*own, step=step, now_s=now_s)
        others = np.flatnonzero(~is_own_N)
        keys = ids_N[others] % self._num_shared
        has_row = self.shared.find(keys) != memory.MISSING
        is_finite = np.isfinite(grads_ND[others]).all(axis=1)
        missed += int(np.count_nonzero(~has_row))
        rejected += int(np.count_nonzero(has_row & ~is_finite))
        stepped = others[has_row & is_finite]
        unique, sums_KD = sum_by_id(keys[has_row & is_finite], grads_ND[stepped])
        keys_K, slots_K = read_only(unique.ids), self.shared.find(unique.ids)
        self._note(slots_K)
        _, num_refused = self.shared.step_rows(
            keys_K, read_only(slots_K), read_only(sums_KD), step=step, now_s=now_s
        )
        return missed, rejected + num_refused

    def _note(self, slots_K: Slots) -> None:
        if self.rows.journal.is_on:
            self.rows.journal.changed(self.shared.changed_slots(slots_K))


def require_room(state: TableState, ids_K: Ids) -> None:
    """Reject shared rows beside which no other row would fit."""
    num_rows = int(state.rows.tally[memory.PINNED_ROWS])
    num_rows += int(np.count_nonzero(state.find(ids_K) == memory.MISSING))
    if num_rows >= state.rows.capacity_rows:
        raise StoreError(
            f"A server must have room for all its shared rows and one more. Received: "
            f"{num_rows} shared rows, with those of table {state.spec.name!r}, and a "
            f"capacity of {state.rows.capacity_rows} rows. Raise the capacity, start "
            "more servers, or lower shared_rows."
        )


@cache
def _build_read(kernel: Kernel) -> Callable[..., None]:
    """Compile what reads shared rows, or what those begin with that are not there.

    ``num_shared`` is how many the table has; ``row_W`` is memory for one row.
    """
    begin_row = loops.build_begin_row(kernel)

    def read(
        layout: Layout,
        ids_N: Ids,
        indices: Indices,
        num_shared: np.uint64,
        out_ND: Floats,
        row_W: Words,
    ) -> None:
        store = memory.store_at(layout)
        rows, index = memory.rows_at(store, layout), index_at(store)
        target, row_bytes = np.uint64(out_ND.ctypes.data), np.uint64(4 * rows.dim)
        for i in indices:
            key = ids_N[i] % num_shared
            slot = find_slot(index, rows, key, hash_id(key, rows.owner))
            address = rows.base + slot * rows.stride
            if slot == NOT_FOUND:
                address = np.uint64(row_W.ctypes.data)
                begin_row(rows, layout, address, key)
            memory.read_weights(rows, address, target + np.uint64(i) * row_bytes)

    return specialized(read, kernel)
