"""Apply updates with fbgemm's fused optimizers instead of the loop of ``loops.py``.

fbgemm takes tables without gaps, in float32, and indices. So the rows of a request are
copied into such tables, block by block; fbgemm steps them as bags of one id each:

    index in the request   slot     weights (D)   state (S)   gradient (D)
    indices[0]             ...      row 0         row 0       row 0
    indices[1]             ...      row 1         row 1       row 1

A block stays in a core's cache, and ends before an id that is in it already, so that
the second gradient meets the row that the first one has left. What is called is the
backward operator that fbgemm registers with torch for CPU tables; its arguments were
checked with fbgemm 1.8, and a version with others rejects the call.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Floats, Ids, Slots, Words
from persia_torchrec.embedding.optim import Optimizer
from persia_torchrec.embedding.optimizer_engine import (
    EARLIER_ENGINE,
    require_engine,
)
from persia_torchrec.errors import ConfigError
from persia_torchrec.jit import intrinsics as cpu
from persia_torchrec.jit.compiled import compiled, inlined
from persia_torchrec.jit.float16 import FP32
from persia_torchrec.store import finite, memory, undo_log
from persia_torchrec.store.finite import finish_row
from persia_torchrec.store.index import NOT_FOUND, index_at
from persia_torchrec.store.loops import find_hinted, prefetch_row
from persia_torchrec.store.memory import Layout, TableAt
from persia_torchrec.table import TableSpec

logger = logging.getLogger(__name__)

_DIM_STEP = 4
_BLOCK_FLOATS = 2**16
_LEAST_ROWS, _MOST_ROWS = 64, 8192
_MOST_BLOCKS = 2**32 - 1
_SUM = 0  # fbgemm's pooling mode; of one id per bag, all modes are the same
_AHEAD = 10
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_S32, _ONE = np.uint64(32), np.uint64(1)

NEXT, BLOCK, MISSED, REJECTED, UNSURE = range(5)
"""Columns of ``DenseRows.progress``: the first id of the next block, the number of the
last block, ids without a row, gradients rejected, gradients of the block that are not
moderate."""


class FbgemmEngine:
    """fbgemm's CPU kernels, and the blocks to hand rows over in, by dim and state.

    One store's thread owns it. The kernels run on as many threads as torch may use.
    """

    def __init__(self) -> None:
        # torch and fbgemm are for servers that use them; others start without.
        try:
            import fbgemm_gpu  # noqa: F401  # registers its operators with torch
            import torch
        except (ImportError, OSError) as exc:
            raise ConfigError(
                "The optimizer engine fbgemm needs torch and fbgemm_gpu. Received: "
                f"{exc}. Install fbgemm-gpu-cpu in the version that fits torch, or "
                'choose optimizer_engine="compiled".'
            ) from exc
        self._torch = torch
        self._indices = torch.arange(_MOST_ROWS + 1)
        self.dense: dict[tuple[int, int], DenseRows] = {}

    def require_kernel(self, spec: TableSpec) -> None:
        """Raise ConfigError unless fbgemm can update a table."""
        reason = spec.optimizer.fbgemm_cpu_arguments()
        if spec.dynamic.is_on:
            lacks = "fbgemm has no dynamic dim"
        elif isinstance(reason, str):
            lacks = reason
        elif spec.dim % _DIM_STEP:
            lacks = f"dims must be multiples of {_DIM_STEP}"
        else:
            return
        raise ConfigError(
            "With optimizer_engine=fbgemm every table needs an optimizer and a dim "
            f"that fbgemm has on CPU. Received: table {spec.name!r}, dim "
            f"{spec.dim}, {spec.optimizer!r}: {lacks}. Choose compiled."
        )

    def build_update(
        self, optimizer: Optimizer, dim: int
    ) -> Callable[..., tuple[int, int]]:
        """Return what updates rows as the loop of :func:`build_update` does.

        Of the numbers it reads the first two: the largest magnitude of a weight, and
        the largest sum of squares of a gradient whose row is not looked at.
        """
        shape = dim, len(optimizer.initial_state(dim))
        dense = self.dense.setdefault(shape, DenseRows.allocate(*shape))
        step = self._build_step(optimizer, dense)

        def update(
            table: TableAt,
            ids_N: Ids,
            slots_N: Slots,
            grads_ND: Floats,
            numbers: Floats,
        ) -> tuple[int, int]:
            layout, _ = table
            progress = dense.progress
            if progress[BLOCK] > _MOST_BLOCKS // 2:  # more than any request needs
                progress[BLOCK] = dense.seen[:] = 0
            progress[[NEXT, MISSED, REJECTED]] = 0
            while progress[NEXT] < len(ids_N):
                num = gather_rows(layout, ids_N, slots_N, grads_ND, dense, numbers[1])
                if num:
                    step(num)
                    scatter_rows(table, num, dense, numbers[0])
            return int(progress[MISSED]), int(progress[REJECTED])

        return update

    def _build_step(
        self, optimizer: Optimizer, dense: "DenseRows"
    ) -> Callable[[int], None]:
        """Return what steps the first rows of a block, given how many."""
        torch, own = self._torch, optimizer.fbgemm_cpu_arguments()
        assert not isinstance(own, str)  # the optimizer has a kernel
        num_rows, dim = dense.weights.shape
        weights = torch.from_numpy(dense.weights).view(-1)
        state = torch.from_numpy(dense.state).view(-1)
        grads, indices = torch.from_numpy(dense.grads), self._indices
        placements = torch.zeros(1, dtype=torch.int32)
        offsets = torch.zeros(1, dtype=torch.int64)
        dim_offsets = torch.tensor([0, dim], dtype=torch.int32)
        hash_sizes = torch.tensor([0, num_rows], dtype=torch.int64)
        of_state = (state, placements, offsets) if dense.state.shape[1] else ()
        lr = torch.tensor(optimizer.lr, dtype=torch.float32)
        name = f"split_embedding_backward_codegen_{optimizer.fbgemm_name}_cpu"
        operator = getattr(torch.ops.fbgemm, name).default

        def step(num: int) -> None:
            operator(
                grads[:num],
                weights,
                placements,
                offsets,
                dim_offsets,
                dim,
                hash_sizes,
                num_rows.bit_length(),
                indices[:num],
                indices[: num + 1],
                _SUM,
                torch.empty(0),  # no weights of the ids
                False,  # no stochastic rounding: these weights are float32
                *of_state,
                lr,
                *own,
            )

        return step


def start_engine(engine: str) -> FbgemmEngine | None:
    """Return fbgemm's engine if it is the one named, None for the compiled loops."""
    if require_engine(engine) == EARLIER_ENGINE:
        logger.warning(
            "optimizer_engine must be compiled or fbgemm. Received: %r, which means "
            "compiled: every measurement has found that faster.",
            engine,
        )
    return FbgemmEngine() if engine == "fbgemm" else None


class DenseRows(NamedTuple):
    """Room for the rows of one block: ``(U, D)``, ``(U, S)``, ``(U, D)``; their slots.

    ``seen`` ``(Z,)`` says which slots are in the block whose number is in the upper
    half of a word; ``progress`` ``(5,)``: see ``NEXT`` and the others.
    """

    weights: Floats
    state: Floats
    grads: Floats
    slots: Words
    seen: Words
    progress: npt.NDArray[np.int64]

    @classmethod
    def allocate(cls, dim: int, num_state: int) -> "DenseRows":
        """Return room for rows, in memory that is touched already."""
        num_rows = min(max(_BLOCK_FLOATS // dim, _LEAST_ROWS), _MOST_ROWS)
        return cls(
            np.zeros((num_rows, dim), dtype=np.float32),
            np.zeros((num_rows, num_state), dtype=np.float32),
            np.zeros((num_rows, dim), dtype=np.float32),
            np.zeros(num_rows, dtype=np.uint64),
            np.zeros(4 << (num_rows - 1).bit_length(), dtype=np.uint64),
            np.zeros(5, dtype=np.int64),
        )


@compiled
def gather_rows(
    layout: Layout,
    ids_N: Ids,
    hints_N: Slots,
    grads_ND: Floats,
    dense: DenseRows,
    moderate: np.float32,
) -> int:
    """Copy the rows and gradients of the next ids into ``dense``; return how many."""
    store, progress = memory.store_at(layout), cpu.unowned(dense.progress)
    rows, index = memory.rows_at(store, layout), index_at(store)
    row_bytes = np.uint64(4 * rows.dim)
    to_weights = np.uint64(dense.weights.ctypes.data)
    to_state = np.uint64(dense.state.ctypes.data)
    to_grads = np.uint64(dense.grads.ctypes.data)
    progress[BLOCK] += 1
    progress[UNSURE] = store.tally[memory.HAS_LARGE]
    block, num, i = np.uint64(progress[BLOCK]), 0, progress[NEXT]
    grad = np.uint64(grads_ND.ctypes.data) + np.uint64(i) * row_bytes
    while i < len(ids_N) and num < len(dense.slots):
        if i + _AHEAD < len(ids_N):
            ahead = np.uint64(hints_N[i + _AHEAD])
            prefetch_row(rows.base + ahead * rows.stride, rows.stride)
        hint = np.uint64(hints_N[i])
        slot = find_hinted(index, rows, ids_N[i], hint)
        if slot == NOT_FOUND:
            progress[MISSED] += 1
        elif not memory.is_finite(cpu.floats_at(grad), rows.dim):
            progress[REJECTED] += 1
        elif _is_seen(dense.seen, slot, block):
            break
        else:
            address = rows.base + slot * rows.stride
            is_sure = finite.squares(cpu.floats_at(grad), rows.dim) <= moderate
            progress[UNSURE] += not is_sure
            cpu.copy_bytes(to_grads, grad, row_bytes)
            cpu.copy_bytes(to_state, address + rows.state, rows.state_bytes)
            memory.read_weights(rows, address, to_weights)
            dense.slots[num] = slot
            num += 1
            to_grads += row_bytes
            to_weights += row_bytes
            to_state += rows.state_bytes
        i += 1
        grad += row_bytes
    progress[NEXT] = i
    return num


@compiled
def scatter_rows(table: TableAt, num: int, dense: DenseRows, bound: np.float32) -> None:
    """Clamp the first ``num`` rows, and copy them back to where they came from.

    Those that a step has left not finite are not copied.
    """
    layout, log = table
    store, is_sure = memory.store_at(layout), dense.progress[UNSURE] == 0
    num_state = np.int64(dense.state.shape[1])
    rows = memory.rows_at(store, layout)
    weights = np.uint64(dense.weights.ctypes.data)
    from_state = np.uint64(dense.state.ctypes.data)
    for row in range(num):
        address = rows.base + dense.slots[row] * rows.stride
        if is_sure or finite.are_floats_finite(
            rows, weights, from_state, num_state, bound, store.tally
        ):
            undo_log.keep_updated(memory.log_address(log), address, rows.stride)
            new = weights
            if rows.dtype == FP32:
                new = address + rows.weights
                cpu.copy_bytes(new, weights, rows.weight_bytes)
            finish_row(layout, rows, address, new, bound)
            cpu.copy_bytes(address + rows.state, from_state, rows.state_bytes)
        else:
            dense.progress[REJECTED] += 1
        weights += np.uint64(4 * rows.dim)
        from_state += rows.state_bytes


@inlined
def _is_seen(seen_Z: Words, slot: np.uint64, block: np.uint64) -> bool:
    """Return whether a slot is in this block; afterwards it is."""
    last = np.uint64(len(seen_Z) - 1)
    word = (block << _S32) | slot
    at = ((slot * _GOLDEN) >> _S32) & last
    while seen_Z[at] >> _S32 == block:
        if seen_Z[at] == word:
            return True
        at = (at + _ONE) & last
    seen_Z[at] = word
    return False
