"""An ``EmbeddingCollection`` whose rows live on the embedding servers.

Its embeddings are not pooled: the model gets a row for each id of the batch, and the
gradients of all places of an id add up.

Dimension key:
    B: samples
    L: ids of one feature in a batch
    D: embedding dim
"""

from typing import Any

import torch
from torch.nn import functional
from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor

from persia_torchrec.sharding.remote_lookup import (
    Here,
    RemoteContext,
    ShardedRemoteCollection,
    StartedPull,
)
from persia_torchrec.sharding.rows_on_device import DeviceBatch, Tensors

Sequences = dict[str, JaggedTensor]


class ShardedRemoteEmbeddingCollection(ShardedRemoteCollection[Sequences, Sequences]):
    """An ``EmbeddingCollection`` on the embedding servers.

    Its output is a ``JaggedTensor`` a feature: values float32 ``(L, D)`` in the order
    of the batch's ids, lengths int32 ``(B,)`` and, where the collection needs indices,
    the ids as weights, int64 ``(L,)``. For the settings see
    :class:`ShardedRemoteCollection`.
    """

    def compute(self, ctx: RemoteContext, dist_input: StartedPull[Any]) -> Sequences:
        """Wait for the embeddings of each feature."""
        pulled = dist_input.wait()
        embeddings = self.embeddings(pulled)
        if isinstance(pulled.handle, DeviceBatch):
            lengths = [offsets.diff() for offsets in pulled.handle.offsets]
            embeddings = _gathered(embeddings, pulled.handle)
        else:
            lengths = [torch.from_numpy(n) for n in pulled.handle.lengths]
        return {
            feature.name: JaggedTensor(
                values=embeddings[f],
                lengths=lengths[f].to(self._device, non_blocking=True),
                weights=dist_input.source.ids(feature.key)
                if self._spec.needs_ids
                else None,
            )
            for f, feature in enumerate(self._spec.features)
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


def _gathered(rows: Tensors, batch: DeviceBatch) -> Tensors:
    return tuple(
        functional.embedding(inverse_L, rows[table])
        for table, inverse_L in zip(batch.table_of, batch.inverses, strict=True)
    )
