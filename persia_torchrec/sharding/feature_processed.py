"""``FeatureProcessedEmbeddingBagCollection``: bags whose weights are learnt.

    ids -> servers: unique rows       the feature processors stay in the model: ordinary
    ids -> processors -> weights      dense parameters, in the user's dense optimizer
    rows, weights -> pooled

The processors run when the embeddings are wanted, not when the pull begins, so that a
pipeline that pulls ahead uses their parameters of this step.
"""

from typing import Any, ClassVar

import torch
from torchrec.distributed.utils import init_parameters
from torchrec.modules.fp_embedding_modules import (
    FeatureProcessedEmbeddingBagCollection,
)

from persia_torchrec.pipeline.pipeline import PrefetchedBatch
from persia_torchrec.sharding.remote_lookup import (
    RemoteContext,
    ShardedRemoteEmbeddingBagCollection,
)
from persia_torchrec.sharding.torchrec_api import feature_processors


class ShardedRemoteFeatureProcessedEmbeddingBagCollection(
    ShardedRemoteEmbeddingBagCollection
):
    """Feature processors here, and the bags that they weight on the servers.

    It has no processors until :meth:`use_processors` gives it some. For the settings
    see ``ShardedRemoteCollection``.
    """

    # TorchRec's names, here and below, so that a state dict has the same keys.
    weights_in: ClassVar[str] = "_embedding_bag_collection.embedding_bags"

    def use_processors(self, module: FeatureProcessedEmbeddingBagCollection) -> None:
        """Take the processors of a collection, initialised on the device of this one.

        Args:
            module: the collection as it was.
        """
        self._feature_processors = feature_processors(module)
        # Its wrapper for one module per feature works for both kinds.
        self._processors = (module.split()[0],)  # a tuple: not registered a second time
        init_parameters(self._feature_processors, self._device)

    def compute(
        self, ctx: RemoteContext, dist_input: PrefetchedBatch[Any]
    ) -> torch.Tensor:
        """Wait for the rows, and pool them with the weights of the processors."""
        (processors,) = self._processors
        processed = processors(dist_input.source.kjt)
        return self.pooled(dist_input, processed.weights())

    @property
    def unsharded_module_type(self) -> type[FeatureProcessedEmbeddingBagCollection]:
        """What this module was before it was sharded."""
        return FeatureProcessedEmbeddingBagCollection
