"""Move rows by their gradients, each exactly once for each time that it is named.

A trainer that pushes gradients has looked the same ids up before, and the slots where
they were then are at hand. Such a hint is checked against the row's header, which the
update touches anyway; a row that has moved or left since is sought in the index. So a
hint saves time and can never make a gradient reach another id.

A gradient that holds NaN or an infinity would ruin its row for good: it is refused and
counted, and the row stays as it is.

Dimension key:
    N: ids of one request
    D: embedding dim
"""

from dataclasses import dataclass

import numpy as np

from persia_torchrec.compiled import compiled, inlined
from persia_torchrec.store.halves import (
    Halves,
    round_at_random,
    round_to_nearest,
    widen,
)
from persia_torchrec.store.index import (
    NOT_FOUND,
    IndexAt,
    find_slot,
    hash_of,
    index_at,
    is_row_of,
)
from persia_torchrec.store.lookup import MISSING, Ids, Slots, prefetch_row
from persia_torchrec.store.memory import store_half_word, unowned
from persia_torchrec.store.pointers import Pointer, pointer_at
from persia_torchrec.store.rows import (
    DIM,
    DTYPE,
    FP32,
    HAS_METADATA,
    LAST_S,
    LAST_STEP,
    NUM_STATE,
    STATE,
    WEIGHTS,
    Floats,
    Layout,
    RowsAt,
    Words,
    rows_at,
)
from persia_torchrec.store.steps import bound_row_at, step_row_at

_AHEAD = 10
_ZERO = np.float32(0)
_INFINITE = np.float32(np.inf)


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What became of the gradients of one request, beside those that were applied.

    Attributes:
        num_missed: ids without a row, which was evicted or never admitted.
        num_refused: gradients with NaN or an infinity.
        num_unadmitted: of the missed, those that were never admitted.
    """

    num_missed: int
    num_refused: int
    num_unadmitted: int = 0


@compiled
def update_rows(
    ids_N: Ids,
    slots_N: Slots,
    grads_ND: Floats,
    floats: Floats,
    lines: Words,
    cursor: Words,
    arenas: Words,
    layout: Layout,
    kind: int,
    numbers: Floats,
    bound: np.float32,
    step: np.uint64,
    now_s: np.uint64,
    scratch_D: Floats,
) -> tuple[int, int]:
    """Apply one step of an optimizer to the row of each id.

    Args:
        ids_N: uint64 ``(N,)``; an id that comes twice is updated twice.
        slots_N: uint32 ``(N,)``, where each row was when last seen, or ``MISSING``.
        grads_ND: float32 ``(N, D)``.
        floats: the arena of this table's rows; changed.
        lines: of the index.
        cursor: of the index.
        arenas: the directory of arenas.
        layout: of the table's rows.
        kind: of the optimizer's step.
        numbers: of the optimizer's step.
        bound: largest magnitude of a weight after the update; inf for none.
        step: of the table.
        now_s: second of this request.
        scratch_D: float32 ``(D,)``, overwritten.

    Returns:
        How many ids have no row, and how many gradients were refused.
    """
    floats, layout, numbers = unowned(floats), unowned(layout), unowned(numbers)
    rows, index = rows_at(arenas, layout), index_at(lines, cursor)
    dim, dtype, has_metadata = layout[DIM], layout[DTYPE], layout[HAS_METADATA] != 0
    state = np.uint64(4 * layout[STATE])
    grad_bytes = np.uint64(4 * dim)
    grad = np.uint64(grads_ND.ctypes.data)
    num_slots = np.uint64(floats.shape[0])
    num_missed = num_refused = 0
    for i in range(len(ids_N)):
        if i + _AHEAD < len(ids_N):
            ahead = np.uint64(slots_N[i + _AHEAD])
            prefetch_row(rows.base + ahead * rows.stride, rows.stride)
        slot = find_hinted(index, rows, ids_N[i], np.uint64(slots_N[i]), num_slots)
        address = rows.base + slot * rows.stride
        if slot == NOT_FOUND:
            num_missed += 1
        elif not is_finite(pointer_at(grad), dim):
            num_refused += 1
        else:
            weights = address + rows.weights
            if dtype != FP32:
                weights = np.uint64(scratch_D.ctypes.data)
                widen(halves_of(floats, slot, layout), scratch_D, dtype)
            step_row_at(kind, numbers, weights, address + state, grad, dim)
            if bound < _INFINITE:
                bound_row_at(weights, dim, bound)
            if dtype != FP32:
                seed = hash_of(ids_N[i], step)
                halves = halves_of(floats, slot, layout)
                round_at_random(scratch_D, halves, dtype, seed)
            if has_metadata:
                note_update(address, step, now_s)
        grad += grad_bytes
    return num_missed, num_refused


@compiled
def write_floats(
    slots_N: Slots, rows_NK: Floats, floats: Floats, layout: Layout
) -> None:
    """Overwrite the weights of rows, and their optimizer state if it is given.

    Args:
        slots_N: uint32 ``(N,)``, where each row is; ``MISSING`` is skipped.
        rows_NK: float32 ``(N, D)``, weights; or ``(N, D + S)``, weights and state.
        floats: the arena of these rows; changed.
        layout: of the table's rows.
    """
    dim, begin, state = layout[DIM], layout[WEIGHTS], layout[STATE]
    num_state = rows_NK.shape[1] - dim
    for i in range(len(slots_N)):
        slot = slots_N[i]
        if slot == MISSING:
            continue
        if layout[DTYPE] == FP32:
            floats[slot, begin : begin + dim] = rows_NK[i, :dim]
        else:
            halves = halves_of(floats, np.uint64(slot), layout)
            round_to_nearest(rows_NK[i, :dim], halves, layout[DTYPE])
        floats[slot, state : state + num_state] = rows_NK[i, dim:]


@compiled
def read_floats(slots_N: Slots, out_NW: Floats, floats: Floats, layout: Layout) -> None:
    """Copy weights and optimizer state of rows; ``MISSING`` reads zeros.

    Args:
        slots_N: uint32 ``(N,)``.
        out_NW: float32 ``(N, D + S)``, overwritten.
        floats: the arena of these rows.
        layout: of the table's rows.
    """
    dim, begin, state = layout[DIM], layout[WEIGHTS], layout[STATE]
    for i in range(len(slots_N)):
        slot = slots_N[i]
        if slot == MISSING:
            out_NW[i, :] = _ZERO
            continue
        if layout[DTYPE] == FP32:
            out_NW[i, :dim] = floats[slot, begin : begin + dim]
        else:
            halves = halves_of(floats, np.uint64(slot), layout)
            widen(halves, out_NW[i, :dim], layout[DTYPE])
        out_NW[i, dim:] = floats[slot, state : state + layout[NUM_STATE]]


@inlined
def find_hinted(
    index: IndexAt, rows: RowsAt, id_: np.uint64, hint: np.uint64, num_slots: np.uint64
) -> np.uint64:
    """Return the slot of an id, the hint if that is right, or ``NOT_FOUND``."""
    slot = hint
    address = rows.base + slot * rows.stride
    if slot >= num_slots or not is_row_of(address, id_, rows.owner):
        slot = find_slot(index, rows, id_, hash_of(id_, rows.owner))
    return slot


@inlined
def note_update(address: np.uint64, step: np.uint64, now_s: np.uint64) -> None:
    """Write into a row's metadata when it was last updated."""
    store_half_word(address + LAST_STEP, step)
    store_half_word(address + LAST_S, now_s)


@inlined
def is_finite(grad: Pointer, dim: int) -> bool:
    """Return whether a gradient holds neither NaN nor an infinity."""
    # Zero times a finite number is zero, times any other NaN: one vector pass.
    total = _ZERO
    for d in range(dim):
        total += grad[d] * _ZERO
    return total == _ZERO


@inlined
def halves_of(floats: Floats, slot: np.uint64, layout: Layout) -> Halves:
    """Return the weights of a row that are stored in 16 bits."""
    begin = 2 * layout[WEIGHTS]
    return floats.view(np.uint16)[slot, begin : begin + layout[DIM]]
