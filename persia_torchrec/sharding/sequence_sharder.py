"""The sharder of ``EmbeddingCollection``; see ``sharding/sharder.py``."""

from typing import ClassVar

from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from persia_torchrec.sharding.collection import CollectionSpec, describe_sequences
from persia_torchrec.sharding.remote_sequences import ShardedRemoteEmbeddingCollection
from persia_torchrec.sharding.sharder import RemoteSharder
from persia_torchrec.worker.embedding_worker import EmbeddingWorker
from persia_torchrec.worker.sequences import SequenceLookup


class RemoteEmbeddingCollectionSharder(
    RemoteSharder[EmbeddingCollection, ShardedRemoteEmbeddingCollection]
):
    """Put every ``EmbeddingCollection`` of a model on the embedding servers.

    The arguments, and which optimizer a table gets, are those of
    :class:`RemoteEmbeddingBagCollectionSharder`; a model that has collections of both
    kinds needs both sharders. Features are not pooled: the model gets a
    ``JaggedTensor`` for each, with a row for every id.

    Example:
        ``DistributedModelParallel(model, sharders=[
        RemoteEmbeddingCollectionSharder(client, Adam(1e-3), staleness=1)])``
    """

    host_lookup: ClassVar[type[EmbeddingWorker]] = SequenceLookup

    @property
    def module_type(self) -> type[EmbeddingCollection]:
        """Which modules this sharder takes."""
        return EmbeddingCollection

    @property
    def sharded_type(self) -> type[ShardedRemoteEmbeddingCollection]:
        """What it makes of them."""
        return ShardedRemoteEmbeddingCollection

    def configs_of(self, module: EmbeddingCollection) -> list[EmbeddingConfig]:
        """Return TorchRec's description of the tables."""
        return module.embedding_configs()

    def spec_of(self, module: EmbeddingCollection) -> CollectionSpec:
        """Return the collection's tables and features in the servers' terms."""
        return describe_sequences(module, self._optimizer, self._settings)
