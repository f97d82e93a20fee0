"""``FeatureProcessedEmbeddingBagCollection``: bags whose weights are learnt.

    ids -> servers: unique rows       the feature processors stay in the model: ordinary
    ids -> processors -> weights      dense parameters, in the user's dense optimizer
    rows, weights -> pooled

The processors run when the embeddings are wanted, not when the pull begins, so that a
pipeline that pulls ahead uses their parameters of this step.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.distributed.utils import init_parameters
from torchrec.modules.fp_embedding_modules import (
    FeatureProcessedEmbeddingBagCollection,
)
from torchrec.sparse.jagged_tensor import KeyedTensor

from persia_torchrec.sharding.remote_lookup import (
    RemoteContext,
    ShardedRemoteEmbeddingBagCollection,
    StartedPull,
)
from persia_torchrec.sharding.torchrec_api import feature_processors
from persia_torchrec.sharding.when_used import WhenUsedModule


class ShardedRemoteFeatureProcessedEmbeddingBagCollection(
    WhenUsedModule[torch.Tensor, KeyedTensor, RemoteContext]
):
    """Feature processors here, and the bags that they weight on the servers.

    Args:
        module: the collection as it was; its processors are used, and initialised on
            the device if they are on another.
        bags: its bags on the servers.
        device: where the embeddings are wanted.
    """

    def __init__(
        self,
        module: FeatureProcessedEmbeddingBagCollection,
        bags: ShardedRemoteEmbeddingBagCollection,
        device: torch.device,
    ) -> None:
        super().__init__()
        # TorchRec's names, so that the processors have the same keys in a state dict.
        self._feature_processors = feature_processors(module)
        self._embedding_bag_collection = bags
        # Its wrapper for one module per feature works for both kinds.
        self._processors = (module.split()[0],)  # a tuple: not registered a second time
        init_parameters(self._feature_processors, device)

    @property
    def bags(self) -> ShardedRemoteEmbeddingBagCollection:
        """The bags on the servers."""
        return self._embedding_bag_collection

    def input_dist(
        self, ctx: RemoteContext, *input: Any, **kwargs: Any
    ) -> Awaitable[Awaitable[KJTList]]:
        """Begin to pull; a batch whose pull has begun is passed on."""
        return self.bags.input_dist(ctx, *input, **kwargs)

    def compute(self, ctx: RemoteContext, dist_input: StartedPull[Any]) -> torch.Tensor:
        """Wait for the rows, and pool them with the weights of the processors."""
        (processors,) = self._processors
        processed = processors(dist_input.source.kjt)
        return self.bags.pooled(dist_input, processed.weights())

    def output_dist(
        self, ctx: RemoteContext, output: torch.Tensor
    ) -> LazyAwaitable[KeyedTensor]:
        """Name the columns."""
        return self.bags.output_dist(ctx, output)

    def create_context(self) -> RemoteContext:
        """Return an empty context."""
        return self.bags.create_context()

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """There are none: the processors are dense, the rows are on the servers."""
        return iter(())

    @property
    def unsharded_module_type(self) -> type[FeatureProcessedEmbeddingBagCollection]:
        """What this module was before it was sharded."""
        return FeatureProcessedEmbeddingBagCollection

    def copy(
        self, device: torch.device
    ) -> "ShardedRemoteFeatureProcessedEmbeddingBagCollection":
        """Refuse, as the bags do."""
        self.bags.copy(device)
        return self
