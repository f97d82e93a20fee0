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
from typing import TYPE_CHECKING

import numpy as np

from persia_torchrec.errors import StoreError
from persia_torchrec.jit.compiled import compile_for, read_only, specialized
from persia_torchrec.routing.route import sum_by_id
from persia_torchrec.store import loops, memory
from persia_torchrec.store.change_log import ChangedSlots
from persia_torchrec.store.index import NOT_FOUND, find_slot, hash_id, index_at
from persia_torchrec.store.memory import Floats, Ids, Layout, Slots, Words
from persia_torchrec.store.stored_table import TableState

if TYPE_CHECKING:
    from persia_torchrec.embedding.setting import Kernel
    from persia_torchrec.store.embedding_store import EmbeddingStore
    from persia_torchrec.store.transaction import Change

_NO_IDS = read_only(np.empty(0, dtype=np.uint64))
_NO_COUNTS = read_only(np.empty(0, dtype=np.uint32))
_NO_INDICES = read_only(np.empty(0, dtype=np.int64))


class TableOfSharedRows(TableState):
    """A row for each id that is admitted, and shared rows for the others.

    ``shared`` is the table that the shared rows are kept in.
    """

    has_shared = True

    def link(self, parts: Sequence[TableState]) -> None:
        """Find the table of the shared rows."""
        [self.shared] = parts
        self._num_shared = np.uint64(self.spec.shared_rows)
        spec, layout = self.shared.spec, self.shared.layout
        layout[memory.PINNED] = 1
        self.step_with(parts)
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

    def read_missing(
        self, ids_N: Ids, missing: loops.Indices | None, out_ND: Floats
    ) -> None:
        """Copy the shared rows of ids without a row, ``missing`` if known, to rows."""
        if missing is None:
            slots_N = loops.find_slots(self.layout, ids_N)
            missing = np.flatnonzero(slots_N == memory.MISSING)
        which = read_only(missing)
        self._read_shared(
            self.shared.layout, ids_N, which, self._num_shared, out_ND, self._row
        )

    def make_for(
        self,
        store: "EmbeddingStore",
        ids_N: Ids,
        missing: loops.Indices,
        admitted: loops.Indices,
    ) -> None:
        """Make the shared rows of ids that get none, if they are not there yet."""
        rejected = np.setdiff1d(missing, admitted)
        keys_K = read_only(np.unique(ids_N[rejected] % self._num_shared))
        slots_K = loops.find_slots(self.shared.layout, keys_K)
        keys_K = read_only(keys_K[slots_K == memory.MISSING])
        if not len(keys_K):
            return
        require_room(store, self.shared, keys_K)
        store.make_room(self.shared.number, len(keys_K))
        self.shared.layout[memory.NOW_S] = self.layout[memory.NOW_S]
        chosen = np.arange(len(keys_K)), _NO_COUNTS
        rows_KD = np.empty((len(keys_K), self.shared.spec.dim), dtype=np.float32)
        slots_K = np.empty(len(keys_K), dtype=np.uint32)
        self.shared.insert(self.shared.at, keys_K, _NO_COUNTS, chosen, rows_KD, slots_K)
        self._note(store, slots_K)

    def begin_rows(
        self,
        ids_N: Ids,
        missing: loops.Indices,
        admitted: loops.Indices,
        out_ND: Floats,
    ) -> None:
        """Let the rows of admitted ids begin with the shared ones they have read."""
        self.read_missing(ids_N, missing, out_ND)
        slots_K = loops.find_slots(self.layout, read_only(ids_N[admitted]))
        weights_KD = read_only(out_ND[admitted])
        memory.write_rows(self.layout, read_only(slots_K), weights_KD)

    def apply(
        self, store: "EmbeddingStore", change: "Change", now_s: int
    ) -> tuple[int, int]:
        """Apply the optimizer to the rows of ids, and to the shared rows of others.

        Returns how many ids have neither, and how many gradients were rejected.
        """
        _, _, step, ids_N, hints_N, grads_ND = change
        slots_N = loops.find_slots(self.layout, ids_N)
        is_own_N = slots_N != memory.MISSING
        if is_own_N.all():
            return self.step_rows(ids_N, hints_N, grads_ND, step=step, now_s=now_s)
        own = (read_only(array[is_own_N]) for array in (ids_N, slots_N, grads_ND))
        missed, rejected = self.step_rows(*own, step=step, now_s=now_s)
        others = np.flatnonzero(~is_own_N)
        keys = read_only(ids_N[others] % self._num_shared)
        slots = loops.find_slots(self.shared.layout, keys)
        has_row = slots != memory.MISSING
        is_finite = np.isfinite(grads_ND[others]).all(axis=1)
        missed += int(np.count_nonzero(~has_row))
        rejected += int(np.count_nonzero(has_row & ~is_finite))
        stepped = others[has_row & is_finite]
        unique, sums_KD = sum_by_id(keys[has_row & is_finite], grads_ND[stepped])
        keys_K = read_only(unique.ids)
        slots_K = loops.find_slots(self.shared.layout, keys_K)
        self._note(store, slots_K)
        _, num_refused = self.shared.step_rows(
            keys_K, read_only(slots_K), read_only(sums_KD), step=step, now_s=now_s
        )
        return missed, rejected + num_refused

    def _note(self, store: "EmbeddingStore", slots_K: Slots) -> None:
        if store.journal.is_on:
            arena = int(self.shared.layout[memory.ARENA])
            store.journal.changed(ChangedSlots(self.shared.number, arena, 0, slots_K))


def require_room(store: "EmbeddingStore", state: TableState, ids_K: Ids) -> None:
    """Reject shared rows beside which no other row would fit."""
    slots_K = loops.find_slots(state.layout, read_only(ids_K))
    num_rows = int(store.tally[memory.PINNED_ROWS])
    num_rows += int(np.count_nonzero(slots_K == memory.MISSING))
    if num_rows >= store.capacity_rows:
        raise StoreError(
            f"A server must have room for all its shared rows and one more. Received: "
            f"{num_rows} shared rows, with those of table {state.spec.name!r}, and a "
            f"capacity of {store.capacity_rows} rows. Raise the capacity, start more "
            "servers, or lower shared_rows."
        )


@cache
def _build_read(kernel: "Kernel") -> Callable[..., None]:
    """Compile what reads shared rows, or what those begin with that are not there.

    ``num_shared`` is how many the table has; ``row_W`` is memory for one row.
    """
    begin_row = loops.build_begin_row(kernel)

    def read(
        layout: Layout,
        ids_N: Ids,
        indices: loops.Indices,
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
