"""From rows to one vector a bag, and from its gradient back to the rows.

    pooled[b] = scale(b) * sum of rows[inverse[j]] for j in bag b
    grad of rows[u] = sum over every occurrence j of u, in bag b, of scale(b) * grad[b]

scale is 1 (sum), 1 / n (mean) or 1 / sqrt(n) (sqrt) for a bag of n ids. All features
of a batch stand side by side in one array, each in its own columns.

Dimension key:
    B: samples
    L: ids of one feature in a batch
    U: unique ids of its table
    D: embedding dim
    T: sum of the dims of all features
"""

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import compiled, read_only
from persia_torchrec.routing.dedup import Positions
from persia_torchrec.worker.bags import POOLINGS, Pooling

Floats = npt.NDArray[np.float32]
Lengths = npt.NDArray[np.int32]

_MEAN = POOLINGS.index("mean")
_SQRT = POOLINGS.index("sqrt")
_ONE = np.float32(1)


def pool(
    rows_UD: Floats,
    inverse_L: Positions,
    lengths_B: Lengths,
    pooling: Pooling,
    out_BT: Floats,
    columns: slice,
) -> None:
    """Pool the bags of one feature.

    Args:
        rows_UD: float32 ``(U, D)``.
        inverse_L: int32 ``(L,)``, which row each id is.
        lengths_B: int32 ``(B,)``, ids a bag.
        pooling: how.
        out_BT: float32 ``(B, T)``, C-contiguous; the columns are overwritten.
        columns: the feature's D columns of it.
    """
    bags = read_only(inverse_L), read_only(lengths_B), POOLINGS.index(pooling)
    _pool(read_only(rows_UD), *bags, out_BT, columns.start)


def add_gradients(
    grads_BT: Floats,
    columns: slice,
    inverse_L: Positions,
    lengths_B: Lengths,
    pooling: Pooling,
    out_UD: Floats,
) -> None:
    """Add the gradient of each bag to those of the rows in it.

    Args:
        grads_BT: float32 ``(B, T)``.
        columns: the feature's D columns of it.
        inverse_L: int32 ``(L,)``, which row each id is.
        lengths_B: int32 ``(B,)``, ids a bag.
        pooling: how the bags were pooled.
        out_UD: float32 ``(U, D)``, added to.
    """
    bags = read_only(inverse_L), read_only(lengths_B), POOLINGS.index(pooling)
    _add_gradients(read_only(grads_BT), columns.start, *bags, out_UD)


@compiled
def scale_of(length: np.int32, pooling: int) -> np.float32:
    """Return what a bag's sum is multiplied by; the number of ids is not 0."""
    if pooling == _MEAN:
        return _ONE / np.float32(length)
    if pooling == _SQRT:
        return _ONE / np.sqrt(np.float32(length))
    return _ONE


@compiled
def _pool(
    rows_UD: Floats,
    inverse_L: Positions,
    lengths_B: Lengths,
    pooling: int,
    out_BT: Floats,
    column: int,
) -> None:
    dim = rows_UD.shape[1]
    j = 0
    for b in range(len(lengths_B)):
        out = out_BT[b, column : column + dim]
        for d in range(dim):
            out[d] = np.float32(0)
        for _ in range(lengths_B[b]):
            row = rows_UD[inverse_L[j]]
            j += 1
            for d in range(dim):
                out[d] += row[d]
        if pooling != 0 and lengths_B[b] > 1:
            scale = scale_of(lengths_B[b], pooling)
            for d in range(dim):
                out[d] *= scale


@compiled
def _add_gradients(
    grads_BT: Floats,
    column: int,
    inverse_L: Positions,
    lengths_B: Lengths,
    pooling: int,
    out_UD: Floats,
) -> None:
    dim = out_UD.shape[1]
    j = 0
    for b in range(len(lengths_B)):
        grad = grads_BT[b, column : column + dim]
        scale = scale_of(lengths_B[b], pooling)
        for _ in range(lengths_B[b]):
            out = out_UD[inverse_L[j]]
            j += 1
            for d in range(dim):
                out[d] += scale * grad[d]
