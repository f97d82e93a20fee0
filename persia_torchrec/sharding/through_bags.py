"""Sharders of modules that are, or hold, bags: they hand them to the bag sharder.

So all bags of a model have the same settings, and are flushed and scheduled together.
"""

from abc import abstractmethod
from typing import ClassVar, TypeVar

import torch
from torch import nn
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ShardingEnv,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from persia_torchrec.sharding.bag_sharder import BagSharder
from persia_torchrec.sharding.remote_lookup import ShardedRemoteEmbeddingBagCollection

Module = TypeVar("Module", bound=nn.Module)


class ThroughBags(ModuleSharder[Module]):
    """What these sharders share.

    Args:
        bags: puts the bags on the servers.
    """

    fused_params: ClassVar[None] = None
    """As of ``CollectionSharder``: planners of torchrec up to 1.6 read it."""

    def __init__(self, bags: BagSharder) -> None:
        super().__init__()
        self._bags = bags

    @abstractmethod
    def bags_of(self, module: Module) -> EmbeddingBagCollectionInterface:
        """Return the bags of a module."""

    def shardable_parameters(self, module: Module) -> dict[str, nn.Parameter]:
        """Return a stand-in of one row for each table."""
        return self._bags.shardable_parameters(self.bags_of(module))

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the one type: rows are spread over servers."""
        return self._bags.sharding_types(compute_device_type)

    def compute_kernels(
        self, sharding_type: str, compute_device_type: str
    ) -> list[str]:
        """Return the one kernel: lookup and update are the servers' own."""
        return self._bags.compute_kernels(sharding_type, compute_device_type)

    def storage_usage(
        self, tensor: torch.Tensor, compute_device_type: str, compute_kernel: str
    ) -> dict[str, int]:
        """Return zero bytes: the rows are not on this device."""
        return self._bags.storage_usage(tensor, compute_device_type, compute_kernel)


class RemoteFusedEmbeddingBagCollectionSharder(
    ThroughBags[FusedEmbeddingBagCollection]
):
    """Put every ``FusedEmbeddingBagCollection`` of a model on the embedding servers.

    Its optimizer goes there too; see ``sharding/model_optimizers.py``.

    Args:
        bags: puts them there; its settings, ``optimizer``, ``flush`` and the like are
            for these tables too. Give it to ``DistributedModelParallel`` as well if the
            model has other bag collections.
    """

    @property
    def module_type(self) -> type[FusedEmbeddingBagCollection]:
        """Which modules this sharder takes."""
        return FusedEmbeddingBagCollection

    def bags_of(
        self, module: FusedEmbeddingBagCollection
    ) -> FusedEmbeddingBagCollection:
        """Return the module itself."""
        return module

    def shard(
        self,
        module: FusedEmbeddingBagCollection,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedRemoteEmbeddingBagCollection:
        """Make the tables known to the servers, and return the module that uses them.

        Raises:
            ConfigError: a setting of the collection that the servers cannot honour.
            ServerError: a server refuses a table, or does not answer.
        """
        return self._bags.shard(module, params, env, device, module_fqn)
