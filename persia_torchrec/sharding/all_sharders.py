"""The sharders of modules that hold a collection, and of all modules together.

``DistributedModelParallel(model, sharders=remote_sharders(client))`` replaces
TorchRec's list of default sharders. What this list has instead:

    EmbeddingBagCollection                    on the servers
    EmbeddingCollection                       on the servers
    FeatureProcessedEmbeddingBagCollection    its bags on the servers
    FusedEmbeddingBagCollection               on the servers, with its own optimizer
    FusedEmbeddingCollection                  on the servers, with its own optimizer
    quantised and managed-collision modules   as TorchRec shards them by default

Modules that are, or hold, bags go through the sharder of bags, with its settings; so do
those of sequences.
"""

import os
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from torchrec.distributed import types
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)

from persia_torchrec import timeouts
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.embedding.optim import Optimizer
from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding import sharded_module, table_control
from persia_torchrec.sharding.cache_settings import Cache
from persia_torchrec.sharding.collection import PersiaTables, TableCollection
from persia_torchrec.sharding.planned import PlannedSharder
from persia_torchrec.sharding.sharder import (
    RemoteEmbeddingBagCollectionSharder,
    RemoteEmbeddingCollectionSharder,
    RemoteSharder,
)
from persia_torchrec.sharding.state_dict import StateDictRows
from persia_torchrec.table import TableSettings


class _HolderSharder(PlannedSharder):
    def __init__(self, collections: RemoteSharder) -> None:
        super().__init__()
        self._collections = collections

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        return self._collections.shardable_parameters(self.tables_in(module))

    def put_on_servers(
        self, module: Any, env: types.ShardingEnv, device: torch.device, path: str = ""
    ) -> Any:
        return self._collections.put_on_servers(module, env, device, path)


class RemoteFusedEmbeddingBagCollectionSharder(_HolderSharder):
    """Put every ``FusedEmbeddingBagCollection`` of a model on the embedding servers.

    Its optimizer goes there too.

    Args:
        bags: puts them there; its settings, ``optimizer``, ``flush`` and the like are
            for these tables too. Give it to ``DistributedModelParallel`` as well if the
            model has other bag collections.
    """

    module_type = FusedEmbeddingBagCollection

    def __init__(self, bags: RemoteEmbeddingBagCollectionSharder) -> None:
        super().__init__(bags)


class RemoteFusedEmbeddingCollectionSharder(_HolderSharder):
    """Put every ``FusedEmbeddingCollection`` of a model on the embedding servers.

    Its optimizer goes there too.

    Args:
        sequences: puts them there, as of
            :class:`persia_torchrec.RemoteFusedEmbeddingBagCollectionSharder`.
    """

    module_type = FusedEmbeddingCollection

    def __init__(self, sequences: RemoteEmbeddingCollectionSharder) -> None:
        super().__init__(sequences)


class RemoteEmbeddingBagSharder(_HolderSharder):
    """Put every ``torch.nn.EmbeddingBag`` of a model on the embedding servers.

    A table's name there is the module's path in the model. As TorchRec's sharder of
    these modules does, it takes offsets that end with the number of ids; without that
    last one too, and ids of two dimensions, as ``torch.nn.EmbeddingBag`` does.

    Args:
        bags: as of :class:`persia_torchrec.RemoteFusedEmbeddingBagCollectionSharder`.

    Raises:
        ConfigError: when the model is sharded: the mode is neither sum nor mean, or the
            module has a ``padding_idx`` or ``max_norm``.
    """

    module_type = nn.EmbeddingBag

    def __init__(self, bags: RemoteEmbeddingBagCollectionSharder) -> None:
        super().__init__(bags)

    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        """Return a placeholder of one row for the one table."""
        shape = 1, module.embedding_dim
        return {"weight": nn.Parameter(torch.empty(shape, device="meta"))}

    def shard(
        self,
        module: Any,
        params: types.EmbeddingModuleShardingPlan,
        env: types.ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Check the module, and put its table on the servers."""
        name = module_fqn or "embedding_bag"
        bad = [("mode", module.mode)] if module.mode not in ("sum", "mean") else []
        bad += [("padding_idx", module.padding_idx)] * (module.padding_idx is not None)
        bad += [("max_norm", module.max_norm)] * (module.max_norm is not None)
        if bad:
            raise ConfigError(
                f"{name!r}: an EmbeddingBag on the servers must have the mode sum or "
                f"mean, and no padding_idx or max_norm. Received: {dict(bad)}."
            )
        config = EmbeddingBagConfig(
            name=name,
            num_embeddings=module.num_embeddings,
            embedding_dim=module.embedding_dim,
            feature_names=[sharded_module.EMBEDDING_BAG_KEY],
            pooling=PoolingType(module.mode.upper()),
        )
        bags = EmbeddingBagCollection(
            tables=[config],
            is_weighted=module.mode == "sum",
            device=torch.device("meta"),
        )
        wants_grad = module.weight.requires_grad
        bags.embedding_bags[name].weight.requires_grad_(wants_grad)
        self._collections.planned.add(name)
        sharded = self._collections.put_on_servers(
            bags,
            env,
            device or torch.device("cpu"),
            name,
            sharded_type=sharded_module.ShardedRemoteEmbeddingBag,
        )
        sharded.module_sharding_plan = params
        sharded.replaced = weakref.ref(module)
        return sharded


class RemoteFeatureProcessedEmbeddingBagCollectionSharder(_HolderSharder):
    """Put the bags of every ``FeatureProcessedEmbeddingBagCollection`` on the servers.

    The feature processors stay in the model.

    Args:
        bags: as of :class:`persia_torchrec.RemoteFusedEmbeddingBagCollectionSharder`.

    Example:
        ``bags = RemoteEmbeddingBagCollectionSharder(client, Adagrad())`` and
        ``sharders=[bags, RemoteFeatureProcessedEmbeddingBagCollectionSharder(bags)]``
    """

    module_type = FeatureProcessedEmbeddingBagCollection

    def __init__(self, bags: RemoteEmbeddingBagCollectionSharder) -> None:
        super().__init__(bags)

    # Planners reject others for these modules, because row-wise shards would lose the
    # positions of ids. Here the processors get the whole batch.
    sharding_type = types.ShardingType.TABLE_WISE.value

    def tables_in(self, module: Any) -> TableCollection:
        """Return the bags of a module."""
        return module.split()[1]

    def put_on_servers(
        self, module: Any, env: types.ShardingEnv, device: torch.device, path: str = ""
    ) -> Any:
        """Put the bags on the servers, with the processors before them."""
        made = sharded_module.ShardedRemoteFeatureProcessedEmbeddingBagCollection
        sharded = self._collections.put_on_servers(
            self.tables_in(module), env, device, path, sharded_type=made
        )
        sharded.use_processors(module)
        return sharded


def remote_sharders(
    client: EmbeddingClient,
    optimizer: Optimizer | None = None,
    staleness: int = 0,
    wire_dtype: torch.dtype = torch.float32,
    *,
    tables: Mapping[str, TableSettings] | None = None,
    gradient_division: bool = True,
    update: Literal["joint", "each"] = "joint",
    joint_timeout_s: float = timeouts.JOINT_UPDATE_S,
    state_dict_rows: StateDictRows = "auto",
    evaluation_waits: bool = True,
    namespace: str = "",
    embedding_config: str | os.PathLike[str] | PersiaTables | None = None,
    fused_params: Mapping[str, Any] | None = None,
    shared: Collection[str] = frozenset(),
    cache: Cache | None = None,
) -> "RemoteSharders":
    """Return the sharders that put every collection of a model on the servers.

    Arguments and errors are those of :class:`persia_torchrec.RemoteSharder`; ``tables``
    may name tables of collections of any kind.

    Returns:
        A list, for ``DistributedModelParallel`` and for planners. Its ``flush``,
        ``optimizer``, ``load_weights`` and the like are for all tables of the model.

    Example:
        ``sharders = remote_sharders(client, Adagrad(lr=0.02), staleness=1)`` and
        ``DistributedModelParallel(model, sharders=sharders)``
    """
    settings: dict[str, Any] = {
        "tables": tables,
        "gradient_division": gradient_division,
        "update": update,
        "joint_timeout_s": joint_timeout_s,
        "state_dict_rows": state_dict_rows,
        "evaluation_waits": evaluation_waits,
        "namespace": namespace,
        "embedding_config": PersiaTables.read(embedding_config),
        "fused_params": fused_params,
        "shared": shared,
        "cache": cache,
    }
    common = client, optimizer, staleness, wire_dtype
    bags = RemoteEmbeddingBagCollectionSharder(*common, **settings)
    sequences = RemoteEmbeddingCollectionSharder(*common, **settings)
    # Flushes, rates, the loss scale and settings of either are then those of both.
    sequences.remote_tables = bags.remote_tables
    sequences.planned, sequences.described = bags.planned, bags.described
    ours: list[types.ModuleSharder[Any]] = [
        bags,
        sequences,
        RemoteFeatureProcessedEmbeddingBagCollectionSharder(bags),
        RemoteFusedEmbeddingBagCollectionSharder(bags),
        RemoteFusedEmbeddingCollectionSharder(sequences),
    ]
    taken = {sharder.module_type for sharder in ours}
    others = [s for s in get_default_sharders() if s.module_type not in taken]
    return RemoteSharders(bags, [*ours, *others])


class RemoteSharders(table_control.SharderApi, list[types.ModuleSharder[nn.Module]]):
    """A list of sharders, and what they do together; the first has all their tables."""

    def __init__(
        self, first: RemoteSharder, sharders: Iterable[types.ModuleSharder[Any]]
    ) -> None:
        super().__init__(sharders)
        self.remote_tables = first.remote_tables
        self.load_weights = first.load_weights
