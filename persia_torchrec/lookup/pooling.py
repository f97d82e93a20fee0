"""From rows to one vector per bag, and from its gradient back to the rows.

    pooled[b]            = scale(b) * sum of rows[inverse[j]] for j in bag b
    gradient of rows[u]  = sum over every occurrence j of u of scale(b) * grad[b]

scale is 1 (sum), 1 / n (mean) or 1 / sqrt(n) (sqrt) for a bag of n ids, as fbgemm's.
All features of a batch stand side by side in one array, each in its own columns:

    sample 0  | feature 0 | feature 1 | ...         a block of samples
    sample 1  |           |           |             is walked feature by feature

The array is larger than the caches. So the loops walk it in its own order, a few
samples at a time, with a cursor into the ids of each feature, and prefetch rows.

Dimensions: B samples, F features, L ids of one feature, U unique ids of its table, D
embedding dim, T sum of the dims of all features.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from persia_torchrec.jit.compiled import compiled, inlined
from persia_torchrec.jit.intrinsics import floats_at, load_u32, prefetch
from persia_torchrec.lookup.bags import POOLINGS, Lengths, Pooling
from persia_torchrec.routing.shard import Positions, unique_ids
from persia_torchrec.rpc import float_codec
from persia_torchrec.rpc.float_codec import Floats

Plan = npt.NDArray[np.uint64]

_MEAN = POOLINGS.index("mean")
_SQRT = POOLINGS.index("sqrt")
_FLOAT_ONE = np.float32(1)

# Samples that are walked together: few enough that the array is walked in its order,
# and several, so that the plan of a feature is not read for every bag.
_BLOCK = 4
_BYTES_AHEAD = 512  # of rows that are on their way at once
# Columns of a plan, a row per feature; the first, second and fourth are addresses.
_ROWS, _INVERSE, _NUM_IDS, _LENGTHS, _ROW_BYTES, _POOLING, _COLUMN_BYTES = range(7)
_ONE = np.uint64(1)
_4 = np.uint64(4)
_LINE = np.uint64(64)


class FeatureBags(NamedTuple):
    """The bags of one feature, and the rows in them, or the sums of their gradients."""

    rows: Floats  # float32 (U, D), C-contiguous, of the feature's table
    inverse: Positions  # int32 (L,): which row each id is
    lengths: Lengths  # int32 (B,): ids per bag, of the sum L
    pooling: Pooling


def pool(features: Sequence[FeatureBags], num_samples: int) -> Floats:
    """Pool the bags of all features, in their order; float32 ``(B, T)``."""
    width = sum([feature.rows.shape[1] for feature in features])
    out_BT = np.empty((num_samples, width), dtype=np.float32)
    plan_F7, _kept = _plan(features)
    _pool(plan_F7, out_BT)
    return out_BT


def add_gradients(grads_BT: Floats, features: Sequence[FeatureBags]) -> None:
    """Add the gradient of each bag, float32 ``(B, T)``, to the ``rows`` in it."""
    plan_F7, _kept = _plan(features)
    _add_gradients(np.ascontiguousarray(grads_BT), plan_F7)


def warm_up() -> None:
    """Compile, or load, the loops of a lookup; the first time on a machine is slow."""
    float_codec.warm_up()
    unique = unique_ids(np.array([1, 2, 1], dtype=np.uint64), num_shards=2)
    rows = np.zeros((2, 4), dtype=np.float32)
    lengths = np.array([3], dtype=np.int32)
    bags = [FeatureBags(rows, unique.inverse, lengths, "sum")]
    add_gradients(pool(bags, 1), bags)


def _plan(features: Sequence[FeatureBags]) -> tuple[Plan, list[object]]:
    """Return what the loops need to know of each feature, and what must outlive it."""
    plan = np.empty((len(features), 7), dtype=np.uint64)
    kept: list[object] = []
    column_bytes = 0
    for f, (rows_UD, inverse_L, lengths_B, pooling) in enumerate(features):
        assert rows_UD.flags.c_contiguous, "rows follow one another"
        inverse_L = np.ascontiguousarray(inverse_L)
        lengths_B = np.ascontiguousarray(lengths_B)
        kept += inverse_L, lengths_B
        row_bytes = 4 * rows_UD.shape[1]
        plan[f] = (
            rows_UD.ctypes.data,
            inverse_L.ctypes.data,
            len(inverse_L),
            lengths_B.ctypes.data,
            row_bytes,
            POOLINGS.index(pooling),
            column_bytes,
        )
        column_bytes += row_bytes
    return plan, kept


@compiled
def scale_of(length: np.int32, pooling: int) -> np.float32:
    """Return what a bag's sum is multiplied by; the number of ids is not 0."""
    if pooling == _MEAN:
        return _FLOAT_ONE / np.float32(length)
    if pooling == _SQRT:
        return _FLOAT_ONE / np.sqrt(np.float32(length))
    return _FLOAT_ONE


@inlined
def _row_at(plan_F7: Plan, f: int, j: np.uint64) -> np.uint64:
    """Return the address of the row of a feature's ``j``-th id."""
    row = load_u32(plan_F7[f, _INVERSE] + _4 * j)
    return plan_F7[f, _ROWS] + row * plan_F7[f, _ROW_BYTES]


@inlined
def _prefetch_row(plan_F7: Plan, f: int, j: np.uint64) -> None:
    """Prefetch the row of a feature's ``j``-th id, if there are so many."""
    if j < plan_F7[f, _NUM_IDS]:
        address = _row_at(plan_F7, f, j)
        end = address + plan_F7[f, _ROW_BYTES]
        while address < end:
            prefetch(address)
            address += _LINE


@compiled
def _pool(plan_F7: Plan, out_BT: Floats) -> None:
    num_samples, num_features = len(out_BT), len(plan_F7)
    out, out_bytes = np.uint64(out_BT.ctypes.data), np.uint64(4 * out_BT.shape[1])
    cursors_F = np.zeros(num_features, dtype=np.uint64)
    for start in range(0, num_samples, _BLOCK):
        stop = min(start + _BLOCK, num_samples)
        for f in range(num_features):
            row_bytes, pooling = plan_F7[f, _ROW_BYTES], int(plan_F7[f, _POOLING])
            dim = np.int64(row_bytes // _4)
            ahead = max(np.uint64(_BYTES_AHEAD) // row_bytes, _ONE)
            j = cursors_F[f]
            for b in range(start, stop):
                length = load_u32(plan_F7[f, _LENGTHS] + _4 * np.uint64(b))
                target = out + np.uint64(b) * out_bytes + plan_F7[f, _COLUMN_BYTES]
                pooled = numba.carray(floats_at(target), (dim,))
                for i in range(length):
                    _prefetch_row(plan_F7, f, j + ahead)
                    row = numba.carray(floats_at(_row_at(plan_F7, f, j)), (dim,))
                    j += _ONE
                    for d in range(dim):
                        pooled[d] = row[d] if i == 0 else pooled[d] + row[d]
                if length == 0:
                    for d in range(dim):
                        pooled[d] = np.float32(0)
                elif pooling != 0 and length > 1:
                    scale = scale_of(np.int32(length), pooling)
                    for d in range(dim):
                        pooled[d] *= scale
            cursors_F[f] = j


@compiled
def _add_gradients(grads_BT: Floats, plan_F7: Plan) -> None:
    num_samples, num_features = len(grads_BT), len(plan_F7)
    grads = np.uint64(grads_BT.ctypes.data)
    grads_bytes = np.uint64(4 * grads_BT.shape[1])
    cursors_F = np.zeros(num_features, dtype=np.uint64)
    for start in range(0, num_samples, _BLOCK):
        stop = min(start + _BLOCK, num_samples)
        for f in range(num_features):
            row_bytes, pooling = plan_F7[f, _ROW_BYTES], int(plan_F7[f, _POOLING])
            dim = np.int64(row_bytes // _4)
            ahead = max(np.uint64(_BYTES_AHEAD) // row_bytes, _ONE)
            j = cursors_F[f]
            for b in range(start, stop):
                length = load_u32(plan_F7[f, _LENGTHS] + _4 * np.uint64(b))
                source = grads + np.uint64(b) * grads_bytes + plan_F7[f, _COLUMN_BYTES]
                grad = numba.carray(floats_at(source), (dim,))
                scale = scale_of(np.int32(length), pooling)
                for _ in range(length):
                    _prefetch_row(plan_F7, f, j + ahead)
                    row = numba.carray(floats_at(_row_at(plan_F7, f, j)), (dim,))
                    j += _ONE
                    for d in range(dim):
                        row[d] += scale * grad[d]
            cursors_F[f] = j
