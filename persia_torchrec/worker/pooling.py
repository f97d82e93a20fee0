"""From rows to one vector a bag, and from its gradient back to the rows.

    pooled[b] = scale(b) * sum of rows[inverse[j]] for j in bag b
    grad of rows[u] = sum over every occurrence j of u, in bag b, of scale(b) * grad[b]

scale is 1 (sum), 1 / n (mean) or 1 / sqrt(n) (sqrt) for a bag of n ids. All features
of a batch stand side by side in one array, each in its own columns:

    sample 0  | feature 0 | feature 1 | ...         a block of samples
    sample 1  |           |           |             is walked feature by feature
    ...

The array is larger than the caches, and its columns touch another page with every few
samples. So the loops walk it in its own order, a few samples at a time, with a cursor
into the ids of each feature; the rows of the next ids are asked for ahead. That takes
half as long as one feature after the other.

Dimension key:
    B: samples
    F: features
    L: ids of one feature in a batch
    U: unique ids of its table
    D: embedding dim
    T: sum of the dims of all features
"""

from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import compiled, inlined
from persia_torchrec.routing.dedup import Positions
from persia_torchrec.store.memory import floats_at, load_half_word, prefetch
from persia_torchrec.worker.bags import POOLINGS, Pooling

Floats = npt.NDArray[np.float32]
Lengths = npt.NDArray[np.int32]
Plan = npt.NDArray[np.uint64]

_MEAN = POOLINGS.index("mean")
_SQRT = POOLINGS.index("sqrt")
_FLOAT_ONE = np.float32(1)

_BLOCK = 4
"""Samples that are walked together: few enough that the array is walked in its order,
and several, so that what is to be known of a feature is not looked up for every bag."""

_BYTES_AHEAD = 512
"""Of rows that are on their way at once."""

_ROWS, _INVERSE, _NUM_IDS, _LENGTHS, _ROW_BYTES, _POOLING, _COLUMN_BYTES = range(7)
"""Columns of a plan, a row a feature; the first, second and fourth are addresses."""

_ONE = np.uint64(1)
_4 = np.uint64(4)
_LINE = np.uint64(64)


class FeatureBags(NamedTuple):
    """The bags of one feature, and the rows in them.

    Attributes:
        rows: float32 ``(U, D)``, C-contiguous, of the feature's table; or what stands
            for them, as sums of their gradients.
        inverse: int32 ``(L,)``, which row each id is.
        lengths: int32 ``(B,)``, ids a bag, of the sum L.
        pooling: how a bag becomes one vector.
    """

    rows: Floats
    inverse: Positions
    lengths: Lengths
    pooling: Pooling


def pool(features: Sequence[FeatureBags], num_samples: int) -> Floats:
    """Pool the bags of all features of a batch.

    Args:
        features: in the order of their columns; their rows are not changed.
        num_samples: B, the same for all.

    Returns:
        float32 ``(B, T)``, C-contiguous.
    """
    features = _contiguous(features)
    width = sum(feature.rows.shape[1] for feature in features)
    out_BT = np.empty((num_samples, width), dtype=np.float32)
    _pool(_plan_of(features), out_BT)
    return out_BT


def add_gradients(grads_BT: Floats, features: Sequence[FeatureBags]) -> None:
    """Add the gradient of each bag to those of the rows in it.

    Args:
        grads_BT: float32 ``(B, T)``.
        features: in the order of their columns; their ``rows`` are added to, and may
            be the same array where features share a table.
    """
    grads_BT = np.ascontiguousarray(grads_BT)
    features = _contiguous(features)
    _add_gradients(grads_BT, _plan_of(features))


def _contiguous(features: Sequence[FeatureBags]) -> list[FeatureBags]:
    """Return the same bags, with arrays whose items follow one another."""
    return [
        feature._replace(
            inverse=np.ascontiguousarray(feature.inverse),
            lengths=np.ascontiguousarray(feature.lengths),
        )
        for feature in features
    ]


def _plan_of(features: Sequence[FeatureBags]) -> Plan:
    """Return what the loops need to know of each feature; see ``_ROWS``.

    It holds addresses: the features must outlive it.
    """
    plan: list[tuple[int, ...]] = []
    column_bytes = 0
    for rows_UD, inverse_L, lengths_B, pooling in features:
        assert rows_UD.flags.c_contiguous, "rows follow one another"
        row_bytes = 4 * rows_UD.shape[1]
        addresses = [a.ctypes.data for a in (rows_UD, inverse_L, lengths_B)]
        plan.append(
            (
                *(addresses[0], addresses[1], len(inverse_L), addresses[2]),
                *(row_bytes, POOLINGS.index(pooling), column_bytes),
            )
        )
        column_bytes += row_bytes
    return np.array(plan, dtype=np.uint64).reshape(len(plan), 7)


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
    row = load_half_word(plan_F7[f, _INVERSE] + _4 * j)
    return plan_F7[f, _ROWS] + row * plan_F7[f, _ROW_BYTES]


@inlined
def _ask_for_row(plan_F7: Plan, f: int, j: np.uint64) -> None:
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
                length = load_half_word(plan_F7[f, _LENGTHS] + _4 * np.uint64(b))
                target = out + np.uint64(b) * out_bytes + plan_F7[f, _COLUMN_BYTES]
                pooled = numba.carray(floats_at(target), (dim,))
                for i in range(length):
                    _ask_for_row(plan_F7, f, j + ahead)
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
                length = load_half_word(plan_F7[f, _LENGTHS] + _4 * np.uint64(b))
                source = grads + np.uint64(b) * grads_bytes + plan_F7[f, _COLUMN_BYTES]
                grad = numba.carray(floats_at(source), (dim,))
                scale = scale_of(np.int32(length), pooling)
                for _ in range(length):
                    _ask_for_row(plan_F7, f, j + ahead)
                    row = numba.carray(floats_at(_row_at(plan_F7, f, j)), (dim,))
                    j += _ONE
                    for d in range(dim):
                        row[d] += scale * grad[d]
            cursors_F[f] = j
