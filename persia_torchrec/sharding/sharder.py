"""The one thing a TorchRec user adds: a sharder that puts tables on the servers.

    DistributedModelParallel(model, sharders=[RemoteEmbeddingBagCollectionSharder(...)])

TorchRec's own planner plans it like any other module. It is told of one stand-in
parameter a table, of one row and without storage, since the rows take no memory here;
the sharding type and the kernel are names that the planner knows ("row_wise" and
"fused"), as it refuses unknown ones.
"""

from collections.abc import Mapping

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterStorage,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.embedding.optim import Adagrad, Optimizer
from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.collection import CollectionSpec, describe_bags
from persia_torchrec.sharding.remote_lookup import ShardedRemoteEmbeddingBagCollection
from persia_torchrec.wire.messages import Precision
from persia_torchrec.worker.bags import Bags
from persia_torchrec.worker.embedding_worker import EmbeddingWorker, RoutedBatch
from persia_torchrec.worker.pipeline import BatchPipeline

_PRECISIONS = {
    torch.float32: Precision.FP32,
    torch.float16: Precision.FP16,
    torch.bfloat16: Precision.BF16,
}


class RemoteEmbeddingBagCollectionSharder(ModuleSharder[EmbeddingBagCollection]):
    """Put every ``EmbeddingBagCollection`` of a model on the embedding servers.

    Args:
        client: of the servers; it must live as long as the model.
        optimizer: of all tables; applied by the servers.
        staleness: training batches that may be between the pull of their rows and the
            acknowledgement of their update. 0 waits for the acknowledgement in the
            backward pass, which equals ordinary synchronous training; 1 waits for it
            before the next pull.
        wire_dtype: how rows and gradients travel: float32, float16 or bfloat16.
        gradient_division: divide gradients by the number of trainers, as TorchRec
            does, so that the servers apply the mean over trainers; otherwise each
            trainer's own gradient is applied, as in PERSIA.

    Raises:
        ConfigError: ``wire_dtype`` is none of the three, or ``staleness`` is negative.
    """

    def __init__(
        self,
        client: EmbeddingClient,
        optimizer: Optimizer | None = None,
        staleness: int = 0,
        wire_dtype: torch.dtype = torch.float32,
        *,
        gradient_division: bool = True,
    ) -> None:
        super().__init__()
        if wire_dtype not in _PRECISIONS:
            raise ConfigError(
                f"wire_dtype must be one of {list(_PRECISIONS)}. "
                f"Received: {wire_dtype}."
            )
        if staleness < 0:
            raise ConfigError(f"staleness must be >= 0. Received: {staleness}.")
        self._client = client
        self._optimizer = optimizer if optimizer is not None else Adagrad()
        self._staleness = staleness
        self._precision = _PRECISIONS[wire_dtype]
        self._gradient_division = gradient_division

    @property
    def module_type(self) -> type[EmbeddingBagCollection]:
        """Which modules this sharder takes."""
        return EmbeddingBagCollection

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedRemoteEmbeddingBagCollection:
        """Make the tables known to the servers, and return the module that uses them.

        Args:
            module: the collection; its weights, if it has any, are not used.
            params: the plan; it must name all tables of the collection.
            env: gives the number of trainers.
            device: where the embeddings are wanted; the CPU by default.
            module_fqn: the module's path in the model; not needed.

        Raises:
            ConfigError: a setting of the collection that the servers cannot honour.
            ServerError: a server refuses a table, or does not answer.
        """
        self._require_whole_plan(module, params)
        spec = self.describe(module)
        world_size = env.world_size if self._gradient_division else 1
        dims = {table.name: table.dim for table in spec.tables}
        return ShardedRemoteEmbeddingBagCollection(
            self.make_pipeline(spec),
            keys=tuple(dict.fromkeys(feature.key for feature in spec.features)),
            names=tuple(feature.name for feature in spec.features),
            dims=tuple(dims[feature.table] for feature in spec.features),
            device=device or torch.device("cpu"),
            timeout_s=self._client.timeout_s,
            gradient_scale=1 / world_size,
        )

    def describe(self, module: EmbeddingBagCollection) -> CollectionSpec:
        """Return the collection's tables and features in the servers' terms."""
        return describe_bags(module, self._optimizer)

    def make_pipeline(
        self, spec: CollectionSpec
    ) -> BatchPipeline[Mapping[str, Bags], RoutedBatch]:
        """Return the pipeline of a collection, its tables known to the servers."""
        worker = EmbeddingWorker(
            self._client, spec.features, precision=self._precision
        )
        worker.add_tables(spec.tables)
        return BatchPipeline(
            worker, staleness=self._staleness, timeout_s=self._client.timeout_s
        )

    def shardable_parameters(
        self, module: EmbeddingBagCollection
    ) -> dict[str, nn.Parameter]:
        """Return a stand-in of one row for each table."""
        return {
            config.name: nn.Parameter(
                torch.empty(1, config.embedding_dim, device="meta")
            )
            for config in module.embedding_bag_configs()
        }

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the one type: rows are spread over servers."""
        return [ShardingType.ROW_WISE.value]

    def compute_kernels(
        self, sharding_type: str, compute_device_type: str
    ) -> list[str]:
        """Return the one kernel: lookup and update are the servers' own."""
        return [EmbeddingComputeKernel.FUSED.value]

    def storage_usage(
        self, tensor: torch.Tensor, compute_device_type: str, compute_kernel: str
    ) -> dict[str, int]:
        """Return zero bytes: the rows are not on this device."""
        storage = (
            ParameterStorage.HBM
            if compute_device_type == "cuda"
            else ParameterStorage.DDR
        )
        return {storage.value: 0}

    def _require_whole_plan(
        self, module: EmbeddingBagCollection, params: EmbeddingModuleShardingPlan
    ) -> None:
        tables = {config.name for config in module.embedding_bag_configs()}
        if set(params) != tables:
            raise ConfigError(
                f"The plan must name the tables {sorted(tables)}. "
                f"Received: {sorted(params)}."
            )
