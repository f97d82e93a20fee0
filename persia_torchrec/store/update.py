"""Step rows by their gradients, each exactly once for each time that it is named.

The slots that the lookup of the same ids returned are hints. Each is checked against
the row's header, which the update touches anyway; a row that has moved or left since is
looked up in the index. So no gradient reaches another id. A gradient that holds NaN or
an infinity would ruin its row for good: it is refused and counted.

Dimension key:
    N: ids of one request
    P: numbers of one request
    D: embedding dim
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from persia_torchrec.compiled import inlined, inlined_kernel, specialized
from persia_torchrec.embedding.setting import Kernel
from persia_torchrec.intrinsics import (
    Pointer,
    floats_at,
    halves_at,
    load_u64,
    store_u32,
    unowned,
)
from persia_torchrec.store import memory
from persia_torchrec.store.float16 import FP32, round_stochastically, widen
from persia_torchrec.store.index import NOT_FOUND, IndexAt, find_slot, hash_id, index_at
from persia_torchrec.store.lookup import prefetch_row
from persia_torchrec.store.memory import Floats, Ids, Layout, RowsAt, Slots

_AHEAD = 10
_INFINITE = np.float32(np.inf)


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """How many gradients were not applied.

    ``num_missed`` had no row, of which ``num_unadmitted`` were never admitted, the
    others evicted; ``num_refused`` held NaN or an infinity.
    """

    num_missed: int
    num_refused: int
    num_unadmitted: int = 0


@cache
def build_update(kernel: Kernel) -> Callable[..., tuple[int, int]]:
    """Compile the loop that applies one step of an optimizer to the row of each id.

    A repeated id is updated twice. ``slots_N`` says where each row was when last seen,
    or ``MISSING``. ``numbers`` ``(1 + P,)`` are the largest magnitude of a weight after
    the update (inf for none) and the numbers of the optimizer. The loop returns how
    many ids have no row, and how many gradients were refused.
    """
    step_row = inlined_kernel(kernel)

    def update(
        layout: Layout, ids_N: Ids, slots_N: Slots, grads_ND: Floats, numbers: Floats
    ) -> tuple[int, int]:
        ids_N, slots_N, layout = unowned(ids_N), unowned(slots_N), unowned(layout)
        store = memory.store_at(layout)
        rows, index = memory.rows_at(store, layout), index_at(store)
        bound = numbers[0]
        p = floats_at(np.uint64(numbers.ctypes.data) + np.uint64(4))
        grad, grad_bytes = np.uint64(grads_ND.ctypes.data), np.uint64(4 * rows.dim)
        num_slots = np.uint64(store.tally[memory.CAPACITY])
        num_missed = num_refused = 0
        for i in range(len(ids_N)):
            if i + _AHEAD < len(ids_N):
                ahead = np.uint64(slots_N[i + _AHEAD])
                prefetch_row(rows.base + ahead * rows.stride, rows.stride)
            hint = np.uint64(slots_N[i])
            slot = find_hinted(index, rows, ids_N[i], hint, num_slots)
            address = rows.base + slot * rows.stride
            if slot == NOT_FOUND:
                num_missed += 1
            elif not memory.is_finite(floats_at(grad), rows.dim):
                num_refused += 1
            else:
                weights = address + rows.weights
                if rows.dtype != FP32:
                    weights = layout[memory.SCRATCH]
                    halves = halves_at(address + rows.weights)
                    widen(halves, floats_at(weights), rows.dim, rows.dtype)
                w, s = floats_at(weights), floats_at(address + rows.state)
                step_row(p, w, s, floats_at(grad), rows.dim)
                finish_row(layout, rows, address, weights, bound)
            grad += grad_bytes
        return num_missed, num_refused

    return specialized(update, kernel)


@inlined
def find_hinted(
    index: IndexAt, rows: RowsAt, id_: np.uint64, hint: np.uint64, num_slots: np.uint64
) -> np.uint64:
    """Return the slot of an id, the hint if that is right, or ``NOT_FOUND``."""
    slot = hint
    address = rows.base + slot * rows.stride
    if slot >= num_slots or not memory.is_row_of(address, id_, rows.owner):
        slot = find_slot(index, rows, id_, hash_id(id_, rows.owner))
    return slot


@inlined
def finish_row(
    layout: Layout,
    rows: RowsAt,
    address: np.uint64,
    weights: np.uint64,
    bound: np.float32,
) -> None:
    """Clamp the new weights of a row, round them if it keeps 16 bits, and note when.

    ``weights`` is the address of the new float32 weights: the row's own if it keeps 32
    bits. ``bound`` is inf for none.
    """
    if bound < _INFINITE:
        bound_weights(floats_at(weights), rows.dim, bound)
    if rows.dtype != FP32:
        seed = hash_id(load_u64(address), layout[memory.STEP])
        halves = halves_at(address + rows.weights)
        round_stochastically(floats_at(weights), halves, rows.dim, rows.dtype, seed)
    if rows.has_metadata:
        store_u32(address + memory.LAST_STEP, layout[memory.STEP])
        store_u32(address + memory.LAST_S, layout[memory.NOW_S])


@inlined
def bound_weights(w: Pointer, dim: np.int64, bound: np.float32) -> None:
    """Clamp weights to ``[-bound, bound]``; NaN stays NaN."""
    for d in range(dim):
        weight = bound if w[d] > bound else w[d]
        w[d] = -bound if weight < -bound else weight
