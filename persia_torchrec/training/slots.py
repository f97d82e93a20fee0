"""PERSIA's slots as a TorchRec collection, and the sharder that puts it on the servers.

What the configuration of a collection cannot say (prefixes, the root scaling, how
PERSIA draws initial weights) the sharder takes from the YAML file itself.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from persia_torchrec.config.embedding_config import EmbeddingSchema
from persia_torchrec.embedding import EmbeddingConfig
from persia_torchrec.embedding.data import ReferencedBatch
from persia_torchrec.embedding.optim import Optimizer
from persia_torchrec.lookup.bags import Bags
from persia_torchrec.lookup.slots import Slot, build_features, build_tables
from persia_torchrec.pipeline.pipeline import BatchPipeline, PrefetchedBatch
from persia_torchrec.pipeline.worker_client import RemoteBatch, RemoteWorkers
from persia_torchrec.sharding.base_sharder import CollectionSharder
from persia_torchrec.sharding.collection import CollectionSpec
from persia_torchrec.sharding.remote_lookup import (
    RemoteContext,
    ShardedRemoteCollection,
)
from persia_torchrec.sharding.slot_tensors import Slots, slot_tensors
from persia_torchrec.table import TableSettings

SlotsPipeline = BatchPipeline[ReferencedBatch | Mapping[str, Bags], RemoteBatch]


def make_collection(schema: EmbeddingSchema) -> EmbeddingBagCollection:
    """Return the slots as a collection on the meta device, one table per group."""
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=group,
                embedding_dim=schema.slots[slots[0]].dim,
                num_embeddings=1,  # the servers' tables have no length
                feature_names=list(slots),
            )
            for group, slots in schema.groups.items()
        ],
        device=torch.device("meta"),
    )


class ShardedSlots(ShardedRemoteCollection):
    """PERSIA's slots on the servers; gives float32 tensors in the batch's order."""

    unsharded_module_type = EmbeddingBagCollection

    def compute(self, ctx: RemoteContext, dist_input: PrefetchedBatch[Any]) -> Slots:
        """Wait for the embeddings of each slot; see ``sharding/slot_tensors.py``."""
        pulled = dist_input.wait()
        handle, outputs = pulled.handle, self.embeddings(pulled)
        slots = [
            Slot(name=feature.name, dim=dim, num_places=feature.num_places)
            for feature, dim in zip(self.spec.features, self.spec.dims(), strict=True)
        ]
        return slot_tensors(slots, handle.slots, outputs, handle.places)


class SlotsSharder(CollectionSharder):
    """Put PERSIA's slots on the servers, through the embedding workers of the job.

    The gradient of each trainer is applied by itself, as in PERSIA: embedding
    gradients add up over trainers, while the dense ones are averaged. ``settings`` of
    single tables, by feature group, win over ``config`` and ``optimizer``.
    """

    module_type = EmbeddingBagCollection
    sharded_type = ShardedSlots

    def __init__(
        self,
        workers: RemoteWorkers,
        schema: EmbeddingSchema,
        config: EmbeddingConfig,
        optimizer: Optimizer,
        settings: Mapping[str, TableSettings] | None = None,
        *,
        timeout_s: float,
    ) -> None:
        super().__init__(timeout_s=timeout_s, gradient_division=False)
        self._workers = workers
        self._spec = CollectionSpec(
            build_tables(schema, config, optimizer, settings), build_features(schema)
        )

    def describe(self, module: EmbeddingBagCollection) -> CollectionSpec:
        """Return the slots; a batch has any of them, in an order of its own."""
        return self._spec

    def make_pipeline(
        self, spec: CollectionSpec, device: torch.device
    ) -> SlotsPipeline:
        """Return the pipeline, its tables known to workers and servers."""
        self._workers.add_tables(spec.tables)
        return BatchPipeline(self._workers, staleness=1, timeout_s=self.timeout_s)
