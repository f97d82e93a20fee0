"""Pooling of weighted bags: each id counts as much as its weight says.

    pooled[b]            = scale(b) * sum of w[j] * rows[inverse[j]] for j in bag b
    gradient of rows[u]  = sum over every occurrence j of u of scale(b) * w[j] * grad[b]
    gradient of w[j]     = scale(b) * (rows[inverse[j]] . grad[b])

scale is as for bags without weights (``pooling.py``): a mean divides by the number of
ids, not by the sum of the weights, as fbgemm's does. (fbgemm 1.8's CPU kernel leaves
the division out of the gradients.)

Dimension key:
    B: samples
    L: ids of one feature in a batch
    U: unique ids of its table
    D: embedding dim
"""

import numpy as np

from persia_torchrec.compiled import compiled, read_only
from persia_torchrec.routing.dedup import Positions
from persia_torchrec.worker.bags import POOLINGS, Pooling
from persia_torchrec.worker.pooling import Floats, Lengths, scale_of


def pool_weighted(
    rows_UD: Floats,
    weights_L: Floats,
    inverse_L: Positions,
    lengths_B: Lengths,
    pooling: Pooling,
) -> Floats:
    """Pool the weighted bags of one feature.

    Args:
        rows_UD: float32 ``(U, D)``.
        weights_L: float32 ``(L,)``.
        inverse_L: int32 ``(L,)``, which row each id is.
        lengths_B: int32 ``(B,)``, ids a bag.
        pooling: how.

    Returns:
        float32 ``(B, D)``.
    """
    bags = read_only(inverse_L), read_only(lengths_B), POOLINGS.index(pooling)
    return _pool_weighted(read_only(rows_UD), read_only(weights_L), *bags)


def weighted_gradients(
    grads_BD: Floats,
    rows_UD: Floats,
    weights_L: Floats,
    inverse_L: Positions,
    lengths_B: Lengths,
    pooling: Pooling,
) -> tuple[Floats, Floats]:
    """Return the gradients of the rows and of the weights.

    Args:
        grads_BD: float32 ``(B, D)``, of the pooled bags.
        rows_UD: float32 ``(U, D)``, as they were pooled.
        weights_L: float32 ``(L,)``.
        inverse_L: int32 ``(L,)``, which row each id is.
        lengths_B: int32 ``(B,)``, ids a bag.
        pooling: how the bags were pooled.

    Returns:
        float32 ``(U, D)`` and ``(L,)``.
    """
    bags = read_only(inverse_L), read_only(lengths_B), POOLINGS.index(pooling)
    return _weighted_gradients(
        read_only(grads_BD), read_only(rows_UD), read_only(weights_L), *bags
    )


@compiled
def _pool_weighted(
    rows_UD: Floats,
    weights_L: Floats,
    inverse_L: Positions,
    lengths_B: Lengths,
    pooling: int,
) -> Floats:
    dim = rows_UD.shape[1]
    out_BD = np.zeros((len(lengths_B), dim), dtype=np.float32)
    j = 0
    for b in range(len(lengths_B)):
        out = out_BD[b]
        scale = scale_of(lengths_B[b], pooling)
        for _ in range(lengths_B[b]):
            row, factor = rows_UD[inverse_L[j]], scale * weights_L[j]
            j += 1
            for d in range(dim):
                out[d] += factor * row[d]
    return out_BD


@compiled
def _weighted_gradients(
    grads_BD: Floats,
    rows_UD: Floats,
    weights_L: Floats,
    inverse_L: Positions,
    lengths_B: Lengths,
    pooling: int,
) -> tuple[Floats, Floats]:
    dim = rows_UD.shape[1]
    of_rows_UD = np.zeros(rows_UD.shape, dtype=np.float32)
    of_weights_L = np.empty(len(inverse_L), dtype=np.float32)
    j = 0
    for b in range(len(lengths_B)):
        grad = grads_BD[b]
        scale = scale_of(lengths_B[b], pooling)
        for _ in range(lengths_B[b]):
            u, factor = inverse_L[j], scale * weights_L[j]
            row, out = rows_UD[u], of_rows_UD[u]
            dot = np.float32(0)
            for d in range(dim):
                dot += row[d] * grad[d]
                out[d] += factor * grad[d]
            of_weights_L[j] = scale * dot
            j += 1
    return of_rows_UD, of_weights_L
