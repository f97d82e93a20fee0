"""PERSIA's slots inside the model: what the sharded collection gives a forward pass.

    pooled slot   (B, D)          its columns of the pooled array
    raw slot      (B, F, D + 1)   a vector for each place; the last channel is 1.0 where
                                  an id stands, and 0.0, as all others, where none does

Dimension key:
    B: samples
    N: different ids of a raw slot
    F: places a sample
    D: embedding dim
"""

from typing import Any

import torch
from torch.nn import functional
from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from persia_torchrec.sharding.remote_lookup import (
    Here,
    RemoteContext,
    ShardedRemoteCollection,
    StartedPull,
)

Slots = dict[str, torch.Tensor]


class ShardedSlots(ShardedRemoteCollection[Slots, Slots]):
    """PERSIA's slots on the embedding servers; gives a float32 tensor a slot."""

    def compute(self, ctx: RemoteContext, dist_input: StartedPull[Any]) -> Slots:
        """Wait for the embeddings of each slot."""
        pulled = dist_input.wait()
        pooled_BT, *raw = self.embeddings(pulled)
        features = list(zip(self._spec.features, self._spec.dims(), strict=True))
        pooled = [(f.name, dim) for f, dim in features if not f.num_places]
        columns = pooled_BT.split([dim for _, dim in pooled], dim=1)
        slots = dict(zip((name for name, _ in pooled), columns, strict=True))
        names = [f.name for f, _ in features if f.num_places]
        for name, rows_ND, places in zip(names, raw, pulled.handle.places, strict=True):
            places_BF = torch.from_numpy(places).to(self._device, non_blocking=True)
            slots[name] = laid_out(rows_ND, places_BF)
        return slots

    def output_dist(self, ctx: RemoteContext, output: Slots) -> LazyAwaitable[Slots]:
        """Return the output: it is there."""
        return Here(output)

    @property
    def unsharded_module_type(self) -> type[EmbeddingBagCollection]:
        """What this module was before it was sharded."""
        return EmbeddingBagCollection


def laid_out(rows_ND: torch.Tensor, places_BF: torch.Tensor) -> torch.Tensor:
    """Give each place of a raw slot its vector, and the mask channel.

    Args:
        rows_ND: float32 ``(N, D)``.
        places_BF: int32 ``(B, F)``: which row, from 1; 0 is an empty place.

    Returns:
        float32 ``(B, F, D + 1)``.
    """
    padded = functional.pad(rows_ND, (0, 0, 1, 0))
    vectors_BFD = functional.embedding(places_BF, padded)
    mask_BF1 = (places_BF > 0).to(rows_ND.dtype).unsqueeze(-1)
    return torch.cat([vectors_BFD, mask_BF1], dim=-1)
