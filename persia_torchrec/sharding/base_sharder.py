"""The base of all sharders: what TorchRec's planner asks of them.

The planner plans these collections like any other module. It sees one placeholder
parameter per table, of one row and without storage, since the rows take no memory here.
Sharding type and kernel are names that the planner knows ("row_wise", "fused"), because
it refuses unknown ones.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torchrec.distributed import types
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from persia_torchrec.errors import ConfigError
from persia_torchrec.pipeline.pipeline import BatchPipeline
from persia_torchrec.sharding.collection import (
    CollectionSpec,
    TableCollection,
    table_configs,
)
from persia_torchrec.sharding.remote_lookup import ShardedRemoteCollection
from persia_torchrec.sharding.remote_tables import (
    RemoteOptimizer,
    RemoteTables,
    TableControl,
)

_ROW_WISE = types.ShardingType.ROW_WISE.value


class PlannedSharder(types.ModuleSharder[nn.Module]):
    """What a planner and ``DistributedModelParallel`` ask of a sharder."""

    module_type: ClassVar[type[nn.Module]]
    """Which modules it takes."""

    fused_params: ClassVar[None] = None
    """TorchRec's settings of its kernels: none. Planners of torchrec up to 1.6 read it
    of every sharder; those of 1.7 to 1.9 ask first whether it is there."""

    sharding_type: ClassVar[str] = _ROW_WISE
    """Of the plans for these modules."""

    @abstractmethod
    def put_on_servers(
        self, module: nn.Module, env: types.ShardingEnv, device: torch.device
    ) -> Any:
        """Make the tables known to the servers; return the module that uses them."""

    def tables_in(self, module: nn.Module) -> TableCollection:
        """Return the collection of tables that a module is, or holds."""
        return module

    def shard(
        self,
        module: nn.Module,
        params: types.EmbeddingModuleShardingPlan,
        env: types.ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Check the plan, and put the tables on the servers; TorchRec calls this.

        Raises:
            ConfigError: the plan was made without this sharder, or the servers cannot
                honour a setting of the collection.
            ServerError: a server refuses a table, or does not answer.
        """
        require_tables(table_configs(self.tables_in(module)), params)
        for name, sharding in params.items():
            if not is_planned_on_servers(sharding, self.sharding_type):
                raise ConfigError(
                    f"The plan must have table {name!r} on the servers, where this "
                    f"sharder puts it: {self.sharding_type}, with a placeholder of one "
                    f"row. Received: {sharding}. Pass the sharders that the model gets "
                    "to the planner: planner.collective_plan(model, sharders, pg)."
                )
        return self.put_on_servers(module, env, device or torch.device("cpu"))

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return a placeholder of one row for each table."""
        return {
            config.name: nn.Parameter(
                torch.empty(1, config.embedding_dim, device="meta")
            )
            for config in table_configs(self.tables_in(module))
        }

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the one type: rows are spread over servers."""
        return [self.sharding_type]

    def compute_kernels(
        self, sharding_type: str, compute_device_type: str
    ) -> list[str]:
        """Return the one kernel: lookup and update are the servers' own."""
        return [EmbeddingComputeKernel.FUSED.value]

    def storage_usage(
        self, tensor: torch.Tensor, compute_device_type: str, compute_kernel: str
    ) -> dict[str, int]:
        """Return zero bytes: the rows are not on this device."""
        storage = types.ParameterStorage
        return {
            (storage.HBM if compute_device_type == "cuda" else storage.DDR).value: 0
        }


class CollectionSharder(TableControl, PlannedSharder):
    """Replace a collection of TorchRec's by its remote counterpart."""

    sharded_type: ClassVar[type[ShardedRemoteCollection]]
    """What it makes of a collection."""

    def __init__(self, *, gradient_division: bool) -> None:
        super().__init__()
        self.remote_tables = RemoteTables()
        self._gradient_division = gradient_division

    @abstractmethod
    def describe(self, module: TableCollection) -> CollectionSpec:
        """Return the collection's tables and features in the servers' terms."""

    @abstractmethod
    def make_pipeline(
        self, spec: CollectionSpec, env: types.ShardingEnv, device: torch.device
    ) -> BatchPipeline[Any, Any]:
        """Return a collection's pipeline to a device, its tables known to servers."""

    def require_known_settings(self) -> None:
        """Refuse settings that belong to no collection; called when a batch comes."""

    def put_on_servers(
        self,
        module: TableCollection,
        env: types.ShardingEnv,
        device: torch.device,
        sharded_type: type[ShardedRemoteCollection] | None = None,
    ) -> Any:
        """Put the tables on the servers; return a module of ``sharded_type``."""
        spec, tables = self.describe(module), self.remote_tables
        pipeline = self.make_pipeline(spec, env, device)
        added = tables.add(pipeline, spec.tables, device)
        if env.world_size > 1:
            tables.meet(env.process_group, device)
        sharded = (sharded_type or self.sharded_type)(
            pipeline,
            spec,
            tables,
            device=device,
            gradient_scale=1 / env.world_size if self._gradient_division else 1.0,
        )
        # A table of two collections is in the optimizer of the first.
        names = {k: n for k, n in sharded.tables_by_key().items() if n in added}
        if groups := {key: tables.groups[name] for key, name in names.items()}:
            sharded.fused_optimizer = RemoteOptimizer(groups, tables.send_rates)
        sharded.before_first_pull = self.require_known_settings
        return sharded


def require_tables(
    configs: Sequence[BaseEmbeddingConfig], params: Mapping[str, Any]
) -> None:
    """Refuse a plan of other tables."""
    names = {config.name for config in configs}
    if params.keys() != names:
        raise ConfigError(
            f"The plan must name the tables {sorted(names)}. "
            f"Received: {sorted(params)}."
        )


def is_planned_on_servers(
    sharding: types.ParameterSharding, sharding_type: str = _ROW_WISE
) -> bool:
    """Return whether a plan is of a placeholder, as this project's sharders offer.

    Kernels tell nothing: TorchRec's helpers for plans by hand do not ask the sharder.
    """
    return sharding.sharding_type == sharding_type and num_rows(sharding) == 1


def num_rows(sharding: types.ParameterSharding) -> int | None:
    """Return the rows of a planned table or placeholder; None if data parallel."""
    spec = sharding.sharding_spec
    if not isinstance(spec, types.EnumerableShardingSpec):
        return None
    return max(shard.shard_offsets[0] + shard.shard_sizes[0] for shard in spec.shards)
