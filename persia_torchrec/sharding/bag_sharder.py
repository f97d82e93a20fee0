"""What all sharders share: how TorchRec's planner sees them, and the tables' settings.

The planner plans these collections like any other module. It is told of one stand-in
parameter a table, of one row and without storage, since the rows take no memory here;
the sharding type and the kernel are names that the planner knows ("row_wise" and
"fused"), as it refuses unknown ones.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

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
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
)

from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.collection import CollectionSpec
from persia_torchrec.sharding.joining import Joint, meet
from persia_torchrec.sharding.remote_lookup import (
    Hooks,
    ShardedRemoteCollection,
    ShardedRemoteEmbeddingBagCollection,
)
from persia_torchrec.sharding.remote_optimizer import RemoteOptimizer
from persia_torchrec.sharding.remote_tables import RemoteTables
from persia_torchrec.table import TableChange
from persia_torchrec.worker.pipeline import BatchPipeline

_ADD_TABLES_TIMEOUT_S = 120.0

Module = TypeVar("Module", bound=nn.Module)
Sharded = TypeVar("Sharded", bound=ShardedRemoteCollection[Any, Any])


class CollectionSharder(ModuleSharder[Module], Generic[Module, Sharded]):
    """Replace a collection of TorchRec's by its remote counterpart.

    Args:
        timeout_s: seconds that a pull or a push may take.
        gradient_division: divide gradients by the number of trainers.
        joint: how trainers update jointly; None where each updates by itself.
    """

    weights_in: ClassVar[str] = "embedding_bags"
    """What TorchRec calls weights in it, as in ``embedding_bags.NAME.weight``."""

    def __init__(
        self, *, timeout_s: float, gradient_division: bool, joint: Joint | None = None
    ) -> None:
        super().__init__()
        self._timeout_s = timeout_s + (joint.timeout_s if joint else 0)
        self._gradient_division = gradient_division
        self._joint = joint
        self._tables = RemoteTables()

    def flush(self) -> None:
        """Wait until every update of the collections sharded so far is applied.

        Call it before rows are read elsewhere or the script ends, unless the staleness
        is 0.

        Raises:
            PersiaError: one of the updates failed, or was not acknowledged in time.
        """
        self._tables.flush()

    def close(self) -> None:
        """Stop the threads of the collections sharded so far. May be called twice."""
        self._tables.close()

    def set_learning_rate(self, lr: float, tables: Iterable[str] | None = None) -> None:
        """Change the learning rate of tables on the servers; returns at once.

        The gradients of backward passes so far are applied with the rate of before,
        those of later ones with the new rate. (So it is for this trainer. Another
        trainer's get the new rate when it arrives: let all set the same.)

        Args:
            lr: the new rate.
            tables: names of tables; all that are sharded so far by default.

        Raises:
            ConfigError: an unknown table, or its optimizer refuses the rate.
            PersiaError: an earlier update failed.
        """
        self._tables.set_learning_rate(lr, tables)

    def change_tables(self, change: TableChange) -> None:
        """Change settings of tables, and wait until every server has them.

        Updates so far are applied with the settings of before.

        Args:
            change: returns a table with other settings, or as it is.

        Raises:
            ConfigError: a setting is out of its range.
            ServerError: a server refuses, failed, or did not answer in time.
        """
        for done in self._tables.change(change):
            done.result(self._timeout_s * 2 + _ADD_TABLES_TIMEOUT_S)

    def use_grad_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Undo the loss scale of automatic mixed precision before gradients leave.

        The gradients that a backward pass pushes are divided by ``scaler.get_scale()``
        of that moment. A collection whose gradients are not finite pushes nothing for
        that batch, as ``scaler.step`` skips an optimizer. To let the scaler know, call
        ``scaler.step(sharder.optimizer)`` too, between ``backward`` and ``update``, and
        ``zero_grad`` of it as of the dense optimizer.

        Args:
            scaler: what scales the loss; for all collections, sharded or to be.
        """
        self._tables.grad_scaler = scaler

    @property
    def optimizer(self) -> RemoteOptimizer:
        """The tables' learning rates, for ``torch.optim.lr_scheduler``.

        Ask for it when ``DistributedModelParallel`` has sharded all collections.

        Raises:
            ConfigError: no collection is sharded, or one more since the first time.
        """
        return self._tables.optimizer()

    @property
    @abstractmethod
    def sharded_type(self) -> type[Sharded]:
        """What it makes of the modules that it takes."""

    @abstractmethod
    def configs_of(self, module: Module) -> Sequence[BaseEmbeddingConfig]:
        """Return TorchRec's description of the tables."""

    @abstractmethod
    def describe(self, module: Module) -> CollectionSpec:
        """Return the collection's tables and features in the servers' terms."""

    def require_known_settings(self) -> None:
        """Refuse settings that belong to no collection; called when a batch comes."""

    @abstractmethod
    def make_pipeline(
        self, spec: CollectionSpec, device: torch.device
    ) -> BatchPipeline[Any, Any]:
        """Return the pipeline of a collection, its tables known to the servers.

        Args:
            spec: the collection's tables and features.
            device: where the embeddings are wanted.
        """

    def shard(
        self,
        module: Module,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Sharded:
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
        _require_whole_plan(self.configs_of(module), params)
        spec = self.describe(module)
        world_size = env.world_size if self._gradient_division else 1
        device = device or torch.device("cpu")
        pipeline = self.make_pipeline(spec, device)
        tables = self._tables.add(pipeline, spec.tables)
        if self._joint is not None and (trainers := meet(env, device, self._joint)):
            pipeline.set_trainers(trainers)
        return self.sharded_type(
            pipeline,
            spec,
            device=device,
            gradient_scale=1 / world_size,
            hooks=Hooks(
                *(self.require_known_settings, self._tables.before_push),
                *(self._tables.loss_scale, self._tables.after_check),
            ),
            # A table of two collections stands in the optimizer of the first.
            optimizer=self._tables.optimizer_of(
                {f"{self.weights_in}.{name}.weight": name for name in tables}
            ),
        )

    def shardable_parameters(self, module: Module) -> dict[str, nn.Parameter]:
        """Return a stand-in of one row for each table."""
        return {
            config.name: nn.Parameter(
                torch.empty(1, config.embedding_dim, device="meta")
            )
            for config in self.configs_of(module)
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
        on_gpu = compute_device_type == "cuda"
        storage = ParameterStorage.HBM if on_gpu else ParameterStorage.DDR
        return {storage.value: 0}


class BagSharder(
    CollectionSharder[
        EmbeddingBagCollectionInterface, ShardedRemoteEmbeddingBagCollection
    ]
):
    """Replace ``EmbeddingBagCollection`` by its remote counterpart."""

    @property
    def module_type(self) -> type[EmbeddingBagCollection]:
        """Which modules this sharder takes."""
        return EmbeddingBagCollection

    @property
    def sharded_type(self) -> type[ShardedRemoteEmbeddingBagCollection]:
        """What it makes of them."""
        return ShardedRemoteEmbeddingBagCollection

    def configs_of(
        self, module: EmbeddingBagCollectionInterface
    ) -> Sequence[BaseEmbeddingConfig]:
        """Return TorchRec's description of the tables."""
        return module.embedding_bag_configs()


def _require_whole_plan(
    configs: Sequence[BaseEmbeddingConfig], params: EmbeddingModuleShardingPlan
) -> None:
    tables = {config.name for config in configs}
    if set(params) != tables:
        raise ConfigError(
            f"The plan must name the tables {sorted(tables)}. "
            f"Received: {sorted(params)}."
        )
