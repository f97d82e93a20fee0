"""The sharder of collections of which some tables lie on the servers.

DistributedModelParallel knows one sharder for a kind of module, so this one stands for
two: the remote one for the tables on the servers, TorchRec's for the others.

    EmbeddingBagCollection --- part_of ---> on the servers: remote.shard(part)
                           `-- part_of ---> local: TorchRec's sharded module, into which
                                            the remote one is joined

TorchRec's planner sees the parameters of the local tables, and plans them as ever, and
a stand-in of one row for each table on the servers.
"""

import functools
import itertools
from collections.abc import Callable, Container, ItemsView, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ModuleSharder,
    ParameterSharding,
    ShardedModule,
    ShardingEnv,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
)

from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.bag_sharder import (
    CollectionSharder,
    is_planned_on_servers,
    num_rows,
)
from persia_torchrec.sharding.mixed_lookup import (
    Halves,
    ShardedMixedEmbeddingBagCollection,
    ShardedMixedEmbeddingCollection,
    columns_of_halves,
)
from persia_torchrec.sharding.part import Collection, configs_of, part_of
from persia_torchrec.sharding.placement import Placement

_LOCAL_SHARDERS = {
    EmbeddingBagCollection: EmbeddingBagCollectionSharder,
    EmbeddingCollection: EmbeddingCollectionSharder,
}

_MIXED_MODULES = {
    EmbeddingBagCollection: ShardedMixedEmbeddingBagCollection,
    EmbeddingCollection: ShardedMixedEmbeddingCollection,
}


class MixedSharder(BaseEmbeddingSharder[Collection]):
    """Put some tables on the embedding servers, and leave the others to TorchRec.

    Ids of local tables are row numbers, below ``num_embeddings``, as ever in TorchRec;
    their optimizer is TorchRec's (``fused_params``, ``apply_optimizer_in_backward``, or
    for data parallel tables the model's own), and their weights are in the model's
    state dict. What is said of the servers' tables is ``remote``'s.

    Args:
        remote: shards the tables on the servers; its kind of collection is this one's.
        placement: which tables are on the servers.
        local: shards the other tables; TorchRec's sharder, as it is, by default.

    Raises:
        ConfigError: ``remote`` is for another kind of module than the two collections,
            or ``local`` is not TorchRec's sharder for the same kind.
            When the model is planned: ``placement`` names a table that no collection
            has. When it is sharded: the plan was not made with this placement.

    Example:
        ``MixedSharder(RemoteEmbeddingBagCollectionSharder(client, Adagrad(lr=0.02)),
        Placement(min_rows=1_000_000))``
    """

    def __init__(
        self,
        remote: CollectionSharder[Any, Any],
        placement: Placement,
        local: BaseEmbeddingSharder[Any] | None = None,
    ) -> None:
        if remote.module_type not in _LOCAL_SHARDERS:
            raise ConfigError(
                "remote must be the sharder of EmbeddingBagCollection or of "
                f"EmbeddingCollection. Received: {type(remote).__name__}."
            )
        expected = _LOCAL_SHARDERS[remote.module_type]
        local = local if local is not None else expected()
        if type(local).shard is not expected.shard:
            raise ConfigError(
                f"local must be a {expected.__name__} of TorchRec, or a subclass that "
                f"shards as it does. Received: {type(local).__name__}."
            )
        super().__init__(local.fused_params, local.qcomm_codecs_registry)
        self._remote = remote
        self._placement = placement
        self._local = local
        self._planned: set[str] = set()
        # Whose table the planner asks about; otherwise both.
        self._turn: tuple[ModuleSharder[Any], ...] = (local, remote)

    @property
    def module_type(self) -> type[Any]:
        """Which modules this sharder takes."""
        return self._remote.module_type

    def shardable_parameters(self, module: Collection) -> dict[str, nn.Parameter]:
        """Return the local tables' weights, and stand-ins of one row for the others."""
        local, remote = self._split(module)
        of_local = self._local.shardable_parameters(local) if local is not None else {}
        of_remote = (
            self._remote.shardable_parameters(remote) if remote is not None else {}
        )
        parameters = {**of_local, **of_remote}
        self._planned.update(parameters)
        in_order = {
            config.name: parameters[config.name] for config in configs_of(module)
        }
        return _InTurn(in_order, functools.partial(self._begin_turn, of_remote.keys()))

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the types of the table whose turn it is, or of both kinds."""
        answers = (
            sharder.sharding_types(compute_device_type) for sharder in self._turn
        )
        return list(dict.fromkeys(itertools.chain.from_iterable(answers)))

    def compute_kernels(
        self, sharding_type: str, compute_device_type: str
    ) -> list[str]:
        """Return the kernels of the table whose turn it is, or of both kinds."""
        answers = (
            sharder.compute_kernels(sharding_type, compute_device_type)
            for sharder in self._turn
        )
        return list(dict.fromkeys(itertools.chain.from_iterable(answers)))

    def storage_usage(
        self, tensor: torch.Tensor, compute_device_type: str, compute_kernel: str
    ) -> dict[str, int]:
        """Return the bytes of a local table; a stand-in's are next to none."""
        return self._local.storage_usage(tensor, compute_device_type, compute_kernel)

    def shard(
        self,
        module: Collection,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedModule[Any, Any, Any, Any]:
        """Return TorchRec's module of the local tables, with the remote ones in it.

        Args:
            module: the collection.
            params: the plan; it must name all tables of the collection, and must have
                been made with this placement.
            env: gives the trainers.
            device: where the embeddings are wanted; the CPU by default.
            module_fqn: the module's path in the model.

        Raises:
            ConfigError: the plan is another one's, ``placement`` names a table that no
                collection has, or the remote sharder refuses a table.
            ServerError: a server refuses a table, or does not answer.
        """
        self._require_plan(module, params)
        local, remote = self._split(module)
        if local is None:
            return self._remote.shard(module, params, env, device, module_fqn)
        if remote is None:
            return self._local.shard(module, params, env, device, module_fqn)
        halves = Halves(
            local,
            self._remote.shard(remote, _of(remote, params), env, device, module_fqn),
            columns_of_halves(module, local, remote),
        )
        return _MIXED_MODULES[self.module_type](
            halves, _of(local, params), env, self._local, device, module_fqn
        )

    def _split(self, module: Collection) -> tuple[Collection | None, Collection | None]:
        """Return the local and the remote part; None for one without tables."""
        remote = {c.name for c in configs_of(module) if self._placement.is_remote(c)}
        local = {c.name for c in configs_of(module)} - remote
        return (
            part_of(module, local) if local else None,
            part_of(module, remote) if remote else None,
        )

    def _begin_turn(self, on_servers: Container[str], table: str | None) -> None:
        """Answer for one table, or for none in particular."""
        if table is None:
            self._turn = (self._local, self._remote)
        else:
            self._turn = (self._remote if table in on_servers else self._local,)

    def _require_plan(
        self, module: Collection, params: EmbeddingModuleShardingPlan
    ) -> None:
        """Refuse a plan of other tables, or of another placement."""
        configs = configs_of(module)
        names = {config.name for config in configs}
        if set(params) != names:
            raise ConfigError(
                f"The plan must name the tables {sorted(names)}. "
                f"Received: {sorted(params)}."
            )
        if names <= self._planned:  # and so has the planner seen all collections
            self._placement.require_known(self._planned)
        for config in configs:
            is_remote = self._placement.is_remote(config)
            if not _fits(params[config.name], config, is_remote=is_remote):
                where = "on the servers" if is_remote else "under TorchRec"
                raise ConfigError(
                    f"The plan must have been made with this sharder's placement, by "
                    f"which table {config.name!r} lies {where}. Received: "
                    f"{params[config.name]}. Let the planner plan with this sharder."
                )


class _InTurn(dict[str, nn.Parameter]):
    """Parameters that say, while a planner walks them, whose turn it is.

    The planner asks a sharder for its sharding types and kernels once a table, but does
    not say which table it is at. Checked with TorchRec 1.8, which asks while it walks
    ``items()``. Who asks otherwise gets the answer for both kinds of tables, and a plan
    that does not fit is refused when the model is sharded.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        begin_turn: Callable[[str | None], None],
    ) -> None:
        super().__init__(parameters)
        self.begin_turn = begin_turn

    def items(self) -> ItemsView[str, nn.Parameter]:  # type: ignore[override]
        return _ItemsInTurn(self)


class _ItemsInTurn(ItemsView[str, nn.Parameter]):
    _mapping: _InTurn

    def __iter__(self) -> Iterator[tuple[str, nn.Parameter]]:
        try:
            for name in self._mapping:
                self._mapping.begin_turn(name)
                yield name, self._mapping[name]
        finally:
            self._mapping.begin_turn(None)


def _fits(
    sharding: ParameterSharding, config: BaseEmbeddingConfig, *, is_remote: bool
) -> bool:
    """Return whether a table was planned for where it lies."""
    if is_remote:
        return is_planned_on_servers(sharding)
    spec = sharding.sharding_spec
    if not isinstance(spec, EnumerableShardingSpec):  # data parallel
        return True
    return num_rows(spec) == config.num_embeddings or config.use_virtual_table


def _of(
    part: Collection, params: EmbeddingModuleShardingPlan
) -> EmbeddingModuleShardingPlan:
    """Return the plan of a part of the collection."""
    return EmbeddingModuleShardingPlan(
        {config.name: params[config.name] for config in configs_of(part)}
    )
