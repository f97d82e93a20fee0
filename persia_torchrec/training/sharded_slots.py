"""PERSIA's slots inside the model: what the sharded collection gives a forward pass."""

from typing import Any

from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from persia_torchrec.sharding.remote_lookup import (
    RemoteContext,
    ShardedRemoteCollection,
    StartedPull,
)
from persia_torchrec.sharding.slot_tensors import Slots, slot_tensors
from persia_torchrec.sharding.when_used import Here
from persia_torchrec.worker.hello import Slot


class ShardedSlots(ShardedRemoteCollection[Slots, Slots]):
    """PERSIA's slots on the embedding servers; gives a float32 tensor a slot.

    Of the slots that the batch has, in its order.
    """

    def compute(self, ctx: RemoteContext, dist_input: StartedPull[Any]) -> Slots:
        """Wait for the embeddings of each slot; see ``sharding/slot_tensors.py``."""
        pulled = dist_input.wait()
        handle, outputs = pulled.handle, self.embeddings(pulled)
        slots = [
            Slot(name=feature.name, dim=dim, num_places=feature.num_places)
            for feature, dim in zip(self._spec.features, self._spec.dims(), strict=True)
        ]
        return slot_tensors(slots, handle.slots, outputs, handle.places)

    def output_dist(self, ctx: RemoteContext, output: Slots) -> LazyAwaitable[Slots]:
        """Return the output: it is there."""
        return Here(output)

    @property
    def unsharded_module_type(self) -> type[EmbeddingBagCollection]:
        """What this module was before it was sharded."""
        return EmbeddingBagCollection
