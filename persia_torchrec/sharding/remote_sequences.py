"""An ``EmbeddingCollection`` whose rows live on the embedding servers.

Its embeddings are not pooled: the model gets a row for each id of the batch, and the
gradients of all places of an id add up.

Dimension key:
    B: samples
    L: ids of one feature in a batch
    D: embedding dim
"""

from typing import Any, ClassVar

import torch
from torch.nn import functional
from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor

from persia_torchrec.sharding.on_device import DeviceBatch, Tensors
from persia_torchrec.sharding.remote_lookup import (
    RemoteContext,
    ShardedRemoteCollection,
    StartedPull,
)
from persia_torchrec.sharding.when_used import Here

Sequences = dict[str, JaggedTensor]


class ShardedRemoteEmbeddingCollection(ShardedRemoteCollection[Sequences, Sequences]):
    """An ``EmbeddingCollection`` on the embedding servers.

    Its output is a ``JaggedTensor`` a feature: values float32 ``(L, D)`` in the order
    of the batch's ids, lengths int32 ``(B,)`` and, where the collection needs indices,
    the ids as weights, ``(L,)``, as the batch has them. A feature that a table names
    twice has its rows twice side by side, ``(L, 2 * D)``, as TorchRec's sharded module
    gives them. For the settings see :class:`ShardedRemoteCollection`.
    """

    weights_in: ClassVar[str] = "embeddings"

    def compute(self, ctx: RemoteContext, dist_input: StartedPull[Any]) -> Sequences:
        """Wait for the embeddings of each feature."""
        pulled = dist_input.wait()
        embeddings = self.embeddings(pulled)
        if isinstance(pulled.handle, DeviceBatch):
            lengths = [offsets.diff() for offsets in pulled.handle.offsets]
            embeddings = _gathered(embeddings, pulled.handle)
        else:
            lengths = [torch.from_numpy(n) for n in pulled.handle.lengths]
        features = self._spec.features
        places: dict[str, list[int]] = {}
        for f, feature in enumerate(features):
            places.setdefault(feature.name, []).append(f)
        return {
            name: JaggedTensor(
                values=_side_by_side([embeddings[f] for f in of_name]),
                lengths=lengths[of_name[0]].to(self._device, non_blocking=True),
                weights=dist_input.source.ids(features[of_name[0]].key).to(
                    self._device, non_blocking=True
                )
                if self._spec.needs_ids
                else None,
            )
            for name, of_name in places.items()
        }

    def output_dist(
        self, ctx: RemoteContext, output: Sequences
    ) -> LazyAwaitable[Sequences]:
        """Return the output: it is there."""
        return Here(output)

    @property
    def unsharded_module_type(self) -> type[EmbeddingCollection]:
        """What this module was before it was sharded."""
        return EmbeddingCollection


def _side_by_side(blocks: list[torch.Tensor]) -> torch.Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)


def _gathered(rows: Tensors, batch: DeviceBatch) -> Tensors:
    return tuple(
        functional.embedding(inverse_L, rows[table])
        for table, inverse_L in zip(batch.table_of, batch.inverses, strict=True)
    )
