"""Step one row, and keep it finite.

Of moderate numbers a step of most optimizers leaves a row finite
(``Optimizer.stays_finite``), so that it is not looked at. Else the row is copied to the
scratch of its table, stepped, looked at, and copied back if it is not finite.
"""

from collections.abc import Callable

import numpy as np

from persia_torchrec.arrays import Floats
from persia_torchrec.embedding.setting import Kernel
from persia_torchrec.jit import intrinsics as cpu
from persia_torchrec.jit.compiled import inlined, inlined_kernel
from persia_torchrec.jit.float16 import (
    BF16,
    FP32,
    round_stochastically,
    round_to_nearest,
)
from persia_torchrec.store import memory
from persia_torchrec.store.index import hash_id
from persia_torchrec.store.memory import Layout, RowsAt, Tally

MODERATE_SQUARES = np.float32(1e20)
MODERATE_WEIGHT, MODERATE_STATE = np.float32(1e15), np.float32(1e30)
"""What is moderate: a gradient, by its sum of squares, weights, and optimizer state. As
long as all are, a step of most optimizers leaves a row finite
(``Optimizer.stays_finite``), and is not checked."""

_INFINITE, _LARGEST = np.float32(np.inf), np.finfo(np.float32).max
_NONE = np.float32(-1)
_LARGEST_BRAIN = np.float32(3.3895314e38)


@inlined
def moderate_squares(squares: np.float32, tally: Tally) -> np.float32:
    """Return up to which sum of squares of a gradient a row is not looked at."""
    return squares if tally[memory.HAS_LARGE] == 0 else _NONE


@inlined
def squares(values: cpu.Pointer, dim: np.int64) -> np.float32:
    """Return the sum of squares of ``dim`` float32; NaN or inf if it is not finite."""
    total = np.float32(0)
    for d in range(dim):
        total += values[d] * values[d]
    return total


@inlined
def are_within(values: cpu.Pointer, num: np.int64, limit: np.float32) -> bool:
    """Return whether ``num`` float32 are within ``[-limit, limit]``; NaN is not."""
    num_within = np.int64(0)
    for d in range(num):
        num_within += np.int64(abs(values[d]) <= limit)
    return num_within == num


@inlined
def keep_row_floats(layout: Layout, rows: RowsAt, address: np.uint64) -> None:
    """Copy weights and state of a row to the scratch, before a step that may fail."""
    kept = layout[memory.SCRATCH] + np.uint64(4 * rows.dim)
    cpu.copy_bytes(kept, address + rows.weights, rows.stride - rows.weights)


@inlined
def undo_step(layout: Layout, rows: RowsAt, address: np.uint64) -> None:
    """Copy weights and state of a row back from the scratch."""
    kept = layout[memory.SCRATCH] + np.uint64(4 * rows.dim)
    cpu.copy_bytes(address + rows.weights, kept, rows.stride - rows.weights)


@inlined
def are_floats_finite(
    rows: RowsAt,
    weights: np.uint64,
    state: np.uint64,
    num_state: np.int64,
    bound: np.float32,
    tally: Tally,
) -> bool:
    """Return whether new weights and the optimizer's state are finite, by address.

    Weights are float32, and are clamped to ``bound`` later. Numbers that are not
    moderate are noted in the tally.
    """
    w, s = cpu.floats_at(weights), cpu.floats_at(state)
    largest = _LARGEST_BRAIN if rows.dtype == BF16 else _LARGEST
    largest = _INFINITE if bound < _INFINITE else largest  # NaN is not within it
    if not (are_within(w, rows.dim, largest) and are_within(s, num_state, _LARGEST)):
        return False
    is_moderate = are_within(w, rows.dim, MODERATE_WEIGHT)
    if not (is_moderate and are_within(s, num_state, MODERATE_STATE)):
        tally[memory.HAS_LARGE] = 1
    return True


@inlined
def read_numbers(numbers: Floats) -> tuple[np.float32, np.int64, cpu.Pointer]:
    """Return the bound of weights, floats of state, and the optimizer's numbers."""
    p = cpu.floats_at(np.uint64(numbers.ctypes.data) + np.uint64(12))
    return numbers[0], np.int64(numbers[2]), p


def build_step(kernel: Kernel) -> Callable[..., bool]:
    """Compile what steps a row, and returns whether it is finite then.

    If not, the row is as before. One that ``is_sure`` is not looked at.
    """
    step_row = inlined_kernel(kernel)

    @inlined
    def step(
        table_at: tuple[Layout, memory.Tally],
        rows: RowsAt,
        address: np.uint64,
        numbers_at: tuple[np.float32, np.int64, cpu.Pointer],
        g: cpu.Pointer,
        is_sure: bool,
    ) -> bool:
        layout, tally = table_at
        bound, num_state, p = numbers_at
        weights, state = address + rows.weights, address + rows.state
        if rows.dtype != FP32:
            weights = layout[memory.SCRATCH]
            memory.read_weights(rows, address, weights)
        if not is_sure:
            keep_row_floats(layout, rows, address)
        step_row(p, cpu.floats_at(weights), cpu.floats_at(state), g, rows.dim)
        if is_sure or are_floats_finite(rows, weights, state, num_state, bound, tally):
            finish_row(layout, rows, address, weights, bound)
            return True
        undo_step(layout, rows, address)
        return False

    return step


@inlined
def finish_row(
    layout: Layout,
    rows: RowsAt,
    address: np.uint64,
    weights: np.uint64,
    bound: np.float32,
) -> None:
    """Clamp the new weights of a row, round them if it keeps 16 bits, and note when.

    ``weights`` is the address of float32: the row's own if it keeps 32 bits.
    """
    if bound < _INFINITE:
        bound_weights(cpu.floats_at(weights), rows.dim, bound)
    if rows.dtype != FP32:
        seed = hash_id(cpu.load_u64(address), layout[memory.STEP])
        w, halves = cpu.floats_at(weights), cpu.halves_at(address + rows.weights)
        if layout[memory.TO_NEAREST] != np.uint64(0):
            round_to_nearest(w, halves, rows.dim, rows.dtype)
        else:
            round_stochastically(w, halves, rows.dim, rows.dtype, seed)
    if rows.has_metadata:
        cpu.store_u32(address + memory.LAST_STEP, layout[memory.STEP])
        cpu.store_u32(address + memory.LAST_S, layout[memory.NOW_S])


@inlined
def bound_weights(w: cpu.Pointer, dim: np.int64, bound: np.float32) -> None:
    """Clamp weights to ``[-bound, bound]``; NaN stays NaN."""
    for d in range(dim):
        weight = bound if w[d] > bound else w[d]
        w[d] = -bound if weight < -bound else weight
