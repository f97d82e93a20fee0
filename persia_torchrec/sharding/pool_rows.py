"""Pool the bags of a feature in the autograd graph, from the rows of its table.

Weighted or not, by torch's operators, which run on any device; or, for weighted bags on
the CPU, by the loops of ``worker/weighted.py``, which are faster there.

Dimension key:
    B: samples
    L: ids of one feature in a batch
    U: unique ids of its table
    D: embedding dim
"""

from typing import Any

import torch
from torch.nn import functional

from persia_torchrec.sharding.rows_on_device import DeviceBatch
from persia_torchrec.worker.bags import Pooling
from persia_torchrec.worker.weighted import pool_weighted, weighted_gradients


def pool_rows(
    rows_UD: torch.Tensor,
    weights_L: torch.Tensor | None,
    batch: DeviceBatch,
    feature: int,
    pooling: Pooling,
) -> torch.Tensor:
    """Pool the bags of a feature.

    Args:
        rows_UD: float32 ``(U, D)``, of the feature's table.
        weights_L: float32 ``(L,)`` on the same device; None counts every id once.
        batch: which row each id is.
        feature: which feature of the batch.
        pooling: how.

    Returns:
        float32 ``(B, D)``.
    """
    if weights_L is not None and rows_UD.device.type == "cpu":
        return pool_by_loops(rows_UD, weights_L, batch, feature, pooling)
    return pool_by_torch(rows_UD, weights_L, batch, feature, pooling)


def pool_by_torch(
    rows_UD: torch.Tensor,
    weights_L: torch.Tensor | None,
    batch: DeviceBatch,
    feature: int,
    pooling: Pooling,
) -> torch.Tensor:
    """Pool the bags of a feature with torch's operators; see :func:`pool_rows`."""
    offsets = batch.offsets[feature]
    pooled_BD = functional.embedding_bag(
        batch.inverses[feature],
        rows_UD,
        offsets,
        mode="sum",
        include_last_offset=True,
        per_sample_weights=weights_L,
    )
    if pooling == "sum":
        return pooled_BD
    lengths_B1 = offsets.diff().clamp(min=1).to(torch.float32).unsqueeze(1)
    return pooled_BD / (lengths_B1 if pooling == "mean" else lengths_B1.sqrt())


def pool_by_loops(
    rows_UD: torch.Tensor,
    weights_L: torch.Tensor,
    batch: DeviceBatch,
    feature: int,
    pooling: Pooling,
) -> torch.Tensor:
    """Pool the weighted bags of a feature on the CPU; see :func:`pool_rows`."""
    pooled: torch.Tensor = _WeightedBags.apply(
        rows_UD, weights_L, batch, feature, pooling
    )
    return pooled


class _WeightedBags(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_UD: torch.Tensor,
        weights_L: torch.Tensor,
        batch: DeviceBatch,
        feature: int,
        pooling: Pooling,
    ) -> torch.Tensor:
        host = batch.batch
        bags = host.inverses[feature], host.lengths[feature], pooling
        ctx.bags = bags
        ctx.save_for_backward(rows_UD, weights_L)
        return torch.from_numpy(
            pool_weighted(rows_UD.numpy(), weights_L.numpy(), *bags)
        )

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        rows_UD, weights_L = (tensor.numpy() for tensor in ctx.saved_tensors)
        of_rows, of_weights = weighted_gradients(
            grads[0].numpy(), rows_UD, weights_L, *ctx.bags
        )
        both = torch.from_numpy(of_rows), torch.from_numpy(of_weights)
        return *both, None, None, None
