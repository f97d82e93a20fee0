"""Collections with some tables on the servers and others under TorchRec's own sharding.

``MixedSharder`` holds two sharders, the remote one and TorchRec's. Its sharded module
is TorchRec's own of the local tables, with all that belongs to it; the remote module of
the other tables goes with it through the same three calls:

                   local                                   remote
    input_dist     ids go to the trainers with their rows  pull begins
    compute        look up                                 wait for the pull, name
    output_dist    embeddings go where the ids came from   the columns
                   `------ joined in the order of the unsharded collection ------'

The remote module's state of a batch travels in TorchRec's own context of that batch.
"""

import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    KeyedJaggedTensor,
    KeyedTensor,
)
from torchrec.distributed import embedding, embeddingbag, types
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS, BaseEmbeddingConfig
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer

from persia_torchrec.device.batches import move, require_batch
from persia_torchrec.errors import ConfigError
from persia_torchrec.pipeline.pipeline import PrefetchedBatch
from persia_torchrec.sharding import (
    collection,
    planned,
    sharder,
    state_dict,
    torchrec_api,
)
from persia_torchrec.sharding.collection import TableCollection
from persia_torchrec.sharding.sharded_module import (
    LazyOutput,
    ShardedRemoteCollection,
)
from persia_torchrec.table import require_known_tables


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where each table lies; on the servers, unless something here says otherwise.

    Huge tables belong on the servers: their ids are raw, their rows appear and leave.
    Small ones train faster on the trainers, where none of their bytes is sent.

    Attributes:
        min_rows: tables of fewer rows (``num_embeddings``) stay under TorchRec.
        min_bytes: tables whose weights take fewer bytes stay under TorchRec.
        remote: tables on the servers, whatever their size.
        local: tables under TorchRec's own sharding, whatever their size.
        constraints: the planner's: a table whose constraints have sharding types or
            compute kernels is local. Tables that no collection has are ignored.

    Raises:
        ConfigError: a size is negative, or a table is named on both sides.

    Example:
        >>> placement = Placement(min_rows=1_000_000, local={"item"})
        >>> placement.is_remote(BaseEmbeddingConfig(5_000_000, 64, name="user"))
        True
        >>> placement.is_remote(BaseEmbeddingConfig(200, 64, name="country"))
        False
        >>> placement.is_remote(BaseEmbeddingConfig(5_000_000, 64, name="item"))
        False
    """

    min_rows: int = 0
    min_bytes: int = 0
    remote: Collection[str] = frozenset()
    local: Collection[str] = frozenset()
    constraints: Mapping[str, ParameterConstraints] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for size in ("min_rows", "min_bytes"):
            if (value := getattr(self, size)) < 0:
                raise ConfigError(f"{size} must be >= 0. Received: {value}.")
        for side in ("remote", "local"):
            if isinstance(names := getattr(self, side), str):
                raise ConfigError(
                    f"{side} must be a collection of table names. Received: {names!r}; "
                    f"is {{{names!r}}} meant?"
                )
        both = set(self.remote) & (set(self.local) | self._constrained())
        if both:
            raise ConfigError(
                "A table must be in remote, or in local or constrained to sharding "
                f"types of TorchRec, not both. Received: {sorted(both)}."
            )

    def is_remote(self, config: BaseEmbeddingConfig) -> bool:
        """Return whether the table lies on the servers."""
        if config.name in self.remote:
            return True
        if config.name in self.local or config.name in self._constrained():
            return False
        weights = config.num_embeddings * config.embedding_dim
        size_bytes = weights * DATA_TYPE_NUM_BITS[config.data_type] // 8
        return config.num_embeddings >= self.min_rows and size_bytes >= self.min_bytes

    def _constrained(self) -> set[str]:
        return {
            name
            for name, constraints in self.constraints.items()
            if constraints.sharding_types or constraints.compute_kernels
        }


def _add_entries(module: Any, *given: Any) -> None:
    """Put the remote tables into the state of a model; a hook for torch."""
    state_dict.add_entries(module.remote, *given)


def _take_entries(module: Any, *given: Any) -> None:
    """Write the rows of a state to the servers; a hook for torch."""
    state_dict.take_entries(module.remote, *given)


class MixedCollection(types.ShardedModule[Any, Any, Any, Any], FusedOptimizerModule):
    """TorchRec's sharded module of the local tables, with the remote ones added."""

    qconfig = torchrec_api.QConfig()

    def add_remote(
        self,
        sharded: ShardedRemoteCollection,
        whole: TableCollection,
        local: TableCollection,
        remote: TableCollection,
        device: torch.device,
    ) -> None:
        """Add the sharded remote tables of a whole collection on a device.

        Modules and parameters have the names, and the order, of the unsharded one. For
        that the remote module is no child, but what stands for its tables is.
        """
        self._remote = (sharded,)
        self._local_device = device
        tables: nn.ModuleDict = getattr(self, sharded.weights_in)
        both = {**tables, **getattr(sharded, sharded.weights_in)}
        tables.clear()
        tables.update({c.name: both[c.name] for c in collection.table_configs(whole)})
        of_local, of_remote = map(collection.name_columns, (local, remote))
        # Of each output of the whole: its name there, whether its table is remote, and
        # its name in the output of the local, or of the remote tables alone: there a
        # feature may be shared by fewer tables.
        self._columns = [
            (name, feature in of_remote, (of_remote | of_local)[feature])
            for feature, name in collection.name_columns(whole).items()
        ]
        self.register_state_dict_post_hook(_add_entries)
        self.register_load_state_dict_pre_hook(_take_entries)

    @property
    def remote(self) -> ShardedRemoteCollection:
        """The module of the tables on the servers."""
        return self._remote[0]

    def reset_parameters(self) -> None:
        """Give the rows of both halves their initial weights; all trainers call it."""
        super().reset_parameters()
        if hasattr(self, "_remote"):  # TorchRec's module calls it as it is made
            self.remote.reset_parameters()

    def train(self, mode: bool = True) -> Self:
        """Train or evaluate, both halves."""
        self.remote.train(mode)
        return super().train(mode)

    def forward(self, *input: Any, **kwargs: Any) -> Any:
        """Look up in both halves; torch.fx traces it as a leaf."""
        for given in (*input, *kwargs.values()):
            if isinstance(given, torch.fx.Proxy):
                return torchrec_api.traced_call(self, given, input, kwargs)
        return super().forward(*input, **kwargs)

    def input_dist(self, ctx: Any, *input: Any, **kwargs: Any) -> Any:
        """Begin to distribute the ids, and to pull; returns TorchRec's awaitable."""
        batch = require_batch([*input, *kwargs.values()], PrefetchedBatch)
        # TorchRec's comes first: it rejects a batch before it has begun anything.
        local = batch
        if isinstance(batch, KeyedJaggedTensor):
            local = move(batch, self._local_device)
        awaitable = super().input_dist(ctx, local)
        ctx.remote_input = self.remote.input_dist(None, batch)
        return awaitable

    def output_dist(self, ctx: Any, output: Any) -> types.LazyAwaitable[Any]:
        """Join the output of local and remote tables."""
        return self._joined(super().output_dist(ctx, output), ctx)

    def compute_and_output_dist(self, ctx: Any, input: Any) -> types.LazyAwaitable[Any]:
        """Look up in local and remote tables, and join."""
        return self._joined(super().compute_and_output_dist(ctx, input), ctx)

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizers of all tables; TorchRec and schedules ask for it."""
        both = (super().fused_optimizer, self.remote.fused_optimizer)
        return CombinedOptimizer([("", optimizer) for optimizer in both])

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yield the names of what is not replicated, of local and remote tables."""
        yield from super().sharded_parameter_names(prefix)
        yield from self.remote.sharded_parameter_names(prefix)

    def copy(self, device: torch.device) -> NoReturn:
        """Reject, as the remote module does."""
        self.remote.copy(device)

    def _joined(self, local: Any, ctx: Any) -> types.LazyAwaitable[Any]:
        started = ctx.remote_input.wait().wait()
        remote = self.remote.compute_and_output_dist(None, started)
        join = partial(self._join, local, remote)
        is_traced = torch.compiler.is_dynamo_compiling()  # see LazyOutput
        return types.LazyNoWait(join()) if is_traced else LazyOutput(join)

    def _join(self, *awaitables: types.Awaitable[Any]) -> Any:
        """Put KeyedTensors, or dicts of JaggedTensors, into the order of the whole."""
        outputs = [awaitable.wait() for awaitable in awaitables]
        is_pooled = isinstance(outputs[0], KeyedTensor)
        if is_pooled:
            outputs = [output.to_dict() for output in outputs]
        blocks = [(name, outputs[side][own]) for name, side, own in self._columns]
        if not is_pooled:
            return dict(blocks)
        return KeyedTensor(
            keys=[name for name, _ in blocks],  # a name may come twice
            length_per_key=[block.shape[1] for _, block in blocks],
            values=torch.cat([block for _, block in blocks], dim=1),
        )


class ShardedMixedEmbeddingBagCollection(
    MixedCollection, embeddingbag.ShardedEmbeddingBagCollection
):
    """An ``EmbeddingBagCollection``, some of its tables on the embedding servers."""


class ShardedMixedEmbeddingCollection(
    MixedCollection, embedding.ShardedEmbeddingCollection
):
    """An ``EmbeddingCollection``, some of its tables on the embedding servers."""


# TorchRec's sharder and our sharded module of each kind of collection.
_MIXED = {
    EmbeddingBagCollection: (
        embeddingbag.EmbeddingBagCollectionSharder,
        ShardedMixedEmbeddingBagCollection,
    ),
    EmbeddingCollection: (
        embedding.EmbeddingCollectionSharder,
        ShardedMixedEmbeddingCollection,
    ),
}


class MixedSharder(BaseEmbeddingSharder[TableCollection]):
    """Put some tables on the embedding servers, and leave the others to TorchRec.

    Ids of local tables are row numbers, below ``num_embeddings``, as always in
    TorchRec; their optimizer is TorchRec's (``fused_params``,
    ``apply_optimizer_in_backward``, or for data parallel tables the model's own), and
    their weights are in the model's state dict.

    Args:
        remote: shards the tables on the servers; its kind of collection is this one's.
        placement: which tables are on the servers.
        local: shards the other tables; TorchRec's sharder, as it is, by default.

    Raises:
        ConfigError: ``remote`` is for another kind of module than the two collections,
            or ``local`` is not TorchRec's sharder for the same kind. When the model is
            planned: ``placement`` names an unknown table. When it is sharded: the plan
            was not made with this placement.

    Example:
        ``MixedSharder(RemoteEmbeddingBagCollectionSharder(client, Adagrad(lr=0.02)),
        Placement(min_rows=1_000_000))``
    """

    def __init__(
        self,
        remote: sharder.CollectionSharder,
        placement: Placement,
        local: BaseEmbeddingSharder[Any] | None = None,
    ) -> None:
        if remote.module_type not in _MIXED:
            raise ConfigError(
                "remote must be the sharder of EmbeddingBagCollection or of "
                f"EmbeddingCollection. Received: {type(remote).__name__}."
            )
        is_new = torchrec_api.MIXES_SEQUENCES
        if remote.module_type is EmbeddingCollection and not is_new:
            raise ConfigError(
                "A MixedSharder of an EmbeddingCollection needs torchrec 1.8 or newer, "
                f"with torch 2.13. Received: torchrec {metadata.version('torchrec')}. "
                "Put all its tables on the servers, or none."
            )
        expected, self._sharded_type = _MIXED[remote.module_type]
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
        # The sharder of the table that the planner asks about; otherwise both.
        self._turn: tuple[types.ModuleSharder[Any], ...] = (local, remote)

    @property
    def module_type(self) -> type[Any]:
        """Which modules this sharder takes."""
        return self._remote.module_type

    def shardable_parameters(self, module: TableCollection) -> dict[str, nn.Parameter]:
        """Return the local tables' weights, and placeholders of one row per remote."""
        local, remote = self._split(module)
        of_remote = self._remote.shardable_parameters(remote) if remote else {}
        parameters = self._local.shardable_parameters(local) if local else {}
        parameters |= of_remote
        self._planned.update(parameters)
        in_order = {
            c.name: parameters[c.name] for c in collection.table_configs(module)
        }
        both = self._local, self._remote

        def begin_turn(table: str | None) -> None:
            self._turn = both if table is None else (both[table in of_remote],)

        return torchrec_api.ParametersInTurn(in_order, begin_turn)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the types of the table whose turn it is, or of both kinds."""
        turn = self._turn
        return list({t: 0 for s in turn for t in s.sharding_types(compute_device_type)})

    def compute_kernels(
        self, sharding_type: str, compute_device_type: str
    ) -> list[str]:
        """Return the kernels of the table whose turn it is, or of both kinds."""
        return list(
            {
                k: 0
                for s in self._turn
                for k in s.compute_kernels(sharding_type, compute_device_type)
            }
        )

    def shard(
        self,
        module: TableCollection,
        params: types.EmbeddingModuleShardingPlan,
        env: types.ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> types.ShardedModule[Any, Any, Any, Any]:
        """Return TorchRec's module of the local tables, with the remote ones in it."""
        self._require_plan(module, params)
        local, remote = self._split(module)
        if local is None:
            return self._remote.shard(module, params, env, device, module_fqn)
        self._remote.remote_tables.has_local = True
        if remote is None:
            return self._local.shard(module, params, env, device, module_fqn)
        plans = [
            types.EmbeddingModuleShardingPlan(
                {
                    config.name: params[config.name]
                    for config in collection.table_configs(part)
                }
            )
            for part in (local, remote)
        ]
        sharded_remote = self._remote.shard(remote, plans[1], env, device, module_fqn)
        sharded = self._sharded_type(
            local,
            plans[0],
            env,
            device=device,
            module_fqn=module_fqn,
            **torchrec_api.sharded_settings(self._local),
        )
        where = device or torch.device("cpu")
        sharded.add_remote(sharded_remote, module, local, remote, where)
        sharded_remote.replaced = weakref.ref(module)
        return sharded

    def reshard(self, *_: object) -> NoReturn:
        """Reject: TorchRec would move the tables on the servers too."""
        raise ConfigError(
            "A collection with some tables on the servers keeps its plan. Received: a "
            "new plan for some of its tables. Give those that are to be resharded a "
            "collection of their own, and TorchRec's own sharder."
        )

    def _split(
        self, module: TableCollection
    ) -> tuple[TableCollection | None, TableCollection | None]:
        """Return the local and the remote tables; None where there are none."""
        sides: tuple[set[str], set[str]] = set(), set()
        for config in collection.table_configs(module):
            sides[self._placement.is_remote(config)].add(config.name)
        local, remote = (collection.select_tables(module, names) for names in sides)
        return local, remote

    def _require_plan(
        self, module: TableCollection, params: types.EmbeddingModuleShardingPlan
    ) -> None:
        """Reject a plan of other tables, or of another placement."""
        configs, placement = collection.table_configs(module), self._placement
        planned.require_tables(module, params)
        if params.keys() <= self._planned:  # and so the planner has seen all
            require_known_tables({*placement.remote, *placement.local}, self._planned)
        for config in configs:
            of_table = params[config.name]
            if placement.is_remote(config):
                where, on_servers = "on the servers", self._remote.sharding_type
                fits = planned.is_planned_on_servers(of_table, on_servers)
            else:
                where, num_rows = "under TorchRec", planned.num_rows(of_table)
                is_whole = num_rows in (None, config.num_embeddings)
                fits = is_whole or config.use_virtual_table
            if not fits:
                raise ConfigError(
                    f"The plan must have been made with this sharder's placement, by "
                    f"which table {config.name!r} lies {where}. Received: {of_table}. "
                    "Let the planner plan with this sharder."
                )
