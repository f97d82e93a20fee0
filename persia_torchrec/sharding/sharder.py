"""The sharders of TorchRec's two collections: they put tables on the servers.

Those of other modules go through these, see ``all_sharders.py``. The planner plans a
table like any other: it sees a placeholder parameter of one row without storage, and
names of sharding type and kernel that it knows ("row_wise", "fused").
"""

import logging
import math
import os
import secrets
import weakref
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed import types

from persia_torchrec import timeouts
from persia_torchrec.client.bulk import IdsOfRows
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.embedding.setting import Optimizer
from persia_torchrec.errors import ConfigError
from persia_torchrec.job.trainer_group import (
    device_in,
    require_own_gpu,
    waiting,
)
from persia_torchrec.pipeline.joint import Trainers
from persia_torchrec.pipeline.pipeline import BatchPipeline
from persia_torchrec.rpc.messages import Precision, Share
from persia_torchrec.sharding import collection, sharded_module, table_control
from persia_torchrec.sharding.cache_settings import Cache
from persia_torchrec.sharding.cache_slots import why_not_cached
from persia_torchrec.sharding.cached_rows import CachedRows
from persia_torchrec.sharding.checks import require_same_settings, watch_models
from persia_torchrec.sharding.collection import (
    CollectionSpec,
    PersiaTables,
    TableCollection,
)
from persia_torchrec.sharding.fused_arguments import (
    FusedOptimizer,
    translate_fused_params,
)
from persia_torchrec.sharding.names import (
    OptimizerState,
    agree_on,
    find_entry,
    names_on_servers,
    planned_names,
    relative,
)
from persia_torchrec.sharding.on_device import RowsOnDevice
from persia_torchrec.sharding.optimizer import RemoteOptimizer
from persia_torchrec.sharding.planned import PlannedSharder
from persia_torchrec.sharding.row_cache import RowCache
from persia_torchrec.sharding.state_dict import (
    CollectionState,
    StateDictRows,
    load_tables,
)
from persia_torchrec.table import TableSettings, TableSpec, require_known_tables

logger = logging.getLogger(__name__)

_PRECISIONS = {
    torch.float32: Precision.FP32,
    torch.float16: Precision.FP16,
    torch.bfloat16: Precision.BF16,
}


class CollectionSharder(table_control.SharderApi, PlannedSharder):
    """Replace a collection of TorchRec's by its remote counterpart."""

    sharded_type: ClassVar[type[sharded_module.ShardedRemoteCollection]]

    def __init__(self, *, gradient_division: bool) -> None:
        super().__init__()
        self.remote_tables = table_control.TrainerTables()
        self._gradient_division = gradient_division

    @abstractmethod
    def describe(
        self, module: TableCollection, env: types.ShardingEnv, path: str
    ) -> CollectionSpec:
        """Return the collection's tables and features in the servers' terms."""

    @abstractmethod
    def make_pipeline(
        self, spec: CollectionSpec, env: types.ShardingEnv, device: torch.device
    ) -> BatchPipeline[Any, Any]:
        """Return a collection's pipeline to a device, its tables known to servers."""

    def require_known_settings(self) -> None:
        """Reject settings that belong to no collection; called when a batch comes."""

    def put_on_servers(
        self,
        module: TableCollection,
        env: types.ShardingEnv,
        device: torch.device,
        path: str = "",
        sharded_type: type[sharded_module.ShardedRemoteCollection] | None = None,
    ) -> Any:
        """Put the tables on the servers; return a module of ``sharded_type``."""
        _require_one_dimension(env)
        _require_device(device)
        spec, tables = self.describe(module, env, path), self.remote_tables
        if tables.agreement is None:  # the first collection's
            limit_s = timeouts.exchange_s(tables.recovery_s)
            require_own_gpu(device, env.process_group, limit_s)
        tables.require_one_optimizer(spec.tables)
        pipeline = self.make_pipeline(spec, env, device)
        added = tables.add(pipeline, spec.tables, env, device)
        tables.unnamed.update(spec.unnamed)
        for name in collection.frozen_tables(module, spec):
            tables.tell_of_frozen(name)
        scale = 1 / env.world_size if self._gradient_division else 1.0
        sharded = (sharded_type or self.sharded_type)(
            pipeline, spec, tables, device=device, gradient_scale=scale
        )
        # A table of two collections is in the optimizer of the first.
        names = sharded.tables_by_key.items()
        if groups := {key: tables.groups[name] for key, name in names if name in added}:
            poolings = {feature.table: feature.pooling for feature in spec.features}
            joined = tables.join(groups.values(), poolings)
            sharded.fused_optimizer = RemoteOptimizer(
                groups, tables.send_rates, tables.states, joined
            )
        sharded.before_first_pull = self.require_known_settings
        return sharded


def _require_one_dimension(env: types.ShardingEnv) -> None:
    """Reject 2D parallelism: each group would update the same rows by itself."""
    if isinstance(env, types.ShardingEnv2D):
        raise ConfigError(
            "Tables on the servers have one copy, which all trainers share. Received: "
            "a ShardingEnv2D, as of a DMPCollection, which replicates tables over "
            "groups of trainers. Use DistributedModelParallel."
        )


def _require_device(device: torch.device) -> None:
    """Reject what is neither the CPU nor the current GPU, which NCCL uses."""
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            "A model with tables on the servers must be on the CPU or on a CUDA device."
            f" Received: device {device}. Give DistributedModelParallel device="
            'torch.device("cpu"), or "cuda"; collections alone may be on meta.'
        )
    if device.type == "cuda" and device.index is not None:
        current = torch.cuda.current_device()
        if device.index != current:
            raise ConfigError(
                "A trainer's device must be its current one, or the exchanges of all "
                "trainers would use the same GPU. Received: "
                f"{device}, and cuda:{current} is current. Call "
                f"torch.cuda.set_device({device.index}) first."
            )


_Check: TypeAlias = tuple[str, object, bool, str]
"""An argument: its name, value, whether it is valid, and what it must be."""


def _require_valid(*arguments: _Check) -> None:
    for name, value, is_valid, must in arguments:
        if not is_valid:
            raise ConfigError(f"{name} must be {must}. Received: {value!r}.")


def _one_of(name: str, value: object, values: Sequence[object]) -> _Check:
    return name, value, value in values, f"one of {values}"


def _evaluation(staleness: int, *, waits: bool) -> _Check:
    must = "True at staleness 0 and 1, where each lookup sees all updates"
    return "evaluation_waits", waits, waits or staleness > 1, must


class RemoteSharder(CollectionSharder):
    """Put every collection of one kind on the embedding servers.

    On the servers a table is its name, or PATH.NAME where several collections of the
    model have tables of one name, unless ``shared`` says that these are one. Models
    that name the same table share its rows, which is one warning; ``namespace`` parts
    them.

    Args:
        client: of the servers; it must live as long as the model.
        optimizer: of the tables that have none in ``tables`` nor in the model, by
            ``apply_optimizer_in_backward`` or as a ``FusedEmbeddingBagCollection``;
            applied by the servers. None: what servers have for a table, else TorchRec's
            default, ``SGD(0.01)``, with one warning.
        staleness: training batches of one trainer that may be between the pull of their
            rows and the acknowledgement of their update. 0 waits for it in the backward
            pass, which equals ordinary synchronous training; 1 waits for it before the
            next pull. From 2 on, TorchRec's train pipelines pull later batches while
            this one is trained.
        wire_dtype: how rows and gradients travel: float32, float16 or bfloat16.
        tables: settings of single tables, by name. They win over what the collection
            says (``data_type``, ``init_fn``).
        gradient_division: divide gradients by the number of trainers, as TorchRec
            does; otherwise they add up, as in PERSIA.
        update: "joint": the n-th batches of all trainers are one step, and the
            optimizer gets the sum of their gradients once, as in TorchRec. All must run
            as many training steps (see ``join`` where data end unevenly), and the
            staleness counts joint updates. "each": the gradients of each trainer are
            applied as they come, as in PERSIA; no trainer waits for another.
        joint_timeout_s: seconds that a joint update may wait for the slowest trainer;
            more than the ``recovery_s`` of the client, for which that may wait itself.
        state_dict_rows: how ``model.state_dict()`` has the rows. "auto": as plain
            TorchRec, ``(num_embeddings, D)``, where all ids are below
            ``num_embeddings``; else the rows that there are, beside their ids as
            ``NAME.ids``. "ids" has ids always, as a model must whose checkpoint with
            ids is loaded by ``torch.distributed.checkpoint`` before it has rows.
            "none" leaves rows out: ``save_checkpoint`` alone keeps them.
        evaluation_waits: a lookup for evaluation waits until the updates of this
            trainer's backward passes so far are applied, so that it reads what was
            trained. False reads rows at once, which may lack updates; from staleness 2
            on.
        namespace: of the tables: "teacher" names table "t" "teacher/t" on the servers,
            in their checkpoints, and wherever tables are read or changed by name. State
            dicts, and ``tables`` here, have the collection's names all the same.
        embedding_config: path of PERSIA's ``embedding_config.yml``: rows are then those
            that a ``TrainCtx`` of the same file trains. Each table has the name of a
            feature group, or of a slot in none, and its features are slots of that;
            ids get the group's prefix and the slot's hash stack. Rows begin, are
            admitted and bounded as by PERSIA's default ``EmbeddingConfig``, but for
            ``tables`` and a table's own ``init_fn``; ``num_embeddings`` has no part in
            it. State dicts have rows beside their prefixed ids.
        fused_params: as of TorchRec's sharders: ``optimizer`` and arguments of fbgemm's
            for the tables that have none in ``tables`` nor in the model, SGD by
            default. What fbgemm does not read changes nothing here.
        shared: names of tables that are one table in all collections which have them.
        cache: keeps rows of tables in this process, which fbgemm trains here, and
            writes them back; see :class:`persia_torchrec.Cache`. For one trainer, on
            the CPU.

    Raises:
        ConfigError: an argument is out of its range. When the model is sharded, or at
            its first batch at the latest: ``tables`` names a table that no collection
            has.
    """

    # How many batches are pulled at once, within the staleness; 1 on others.
    PULLS_ON: ClassVar[Mapping[str, int]] = {"cuda": 3}
    gives_each_id: ClassVar[bool] = False  # a row for each id, instead of pooled bags

    def __init__(
        self,
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
    ) -> None:
        is_joint = update == "joint"
        fits_joint = not is_joint or client.recovery_s < joint_timeout_s < math.inf
        finite = f"finite and > {client.recovery_s:g}"
        _require_valid(
            ("update", update, update in ("joint", "each"), '"joint" or "each"'),
            ("joint_timeout_s", joint_timeout_s, fits_joint, finite),
            _one_of("wire_dtype", wire_dtype, list(_PRECISIONS)),
            ("staleness", staleness, staleness >= 0, ">= 0"),
            _one_of("state_dict_rows", state_dict_rows, get_args(StateDictRows)),
            _evaluation(staleness, waits=evaluation_waits),
        )
        self._persia = PersiaTables.read(embedding_config)
        self._has_prefixes = self._persia is not None and bool(self._persia.schema)
        self._joint_timeout_s = joint_timeout_s if is_joint else 0.0
        self._state_dict_rows = state_dict_rows
        super().__init__(gradient_division=gradient_division)
        self._client = client
        tables_of = self.remote_tables
        tables_of.lost, tables_of.recovery_s = client.lost, client.recovery_s
        tables_of.users = client.tables.users
        if cache is not None:
            tables_of.cache = RowCache(client, cache)
            tables_of.counts.cache = tables_of.cache.counts
            # Where a model is dropped without close(); at exit all are closed.
            end = tables_of.cache.ending.put
            weakref.finalize(tables_of, end, None).atexit = False
        self._optimizer: FusedOptimizer | None = None  # none is named
        if optimizer is not None or fused_params is not None:
            self._optimizer = translate_fused_params(fused_params or {}, optimizer)
        self._fused_params = fused_params
        self._staleness, self._evaluation_waits = staleness, evaluation_waits
        self._namespace = f"{namespace}/" if namespace else ""
        self._shared, self._names = {*shared}, planned_names(client)
        self._precision = _PRECISIONS[wire_dtype]
        self._settings = dict(tables or {})
        # Names of tables that a planner, or this sharder, has found in a collection.
        self.planned: set[str] = set()
        self.described: set[str] = set()
        watch_models()

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return a placeholder of one row for each table; planners ask first."""
        parameters = super().shardable_parameters(module)
        self.planned.update(parameters)
        self._names.plan(self.tables_in(module), self._namespace)
        return parameters

    def describe(
        self, module: TableCollection, env: types.ShardingEnv, path: str
    ) -> CollectionSpec:
        """Return the collection's tables and features in the servers' terms."""
        own, where = [c.name for c in collection.table_configs(module)], relative(path)
        counts = agree_on(self._names.count(own, self._namespace), env)
        several = {name for name in own if counts[name] > 1} - self._shared
        if several and where:
            self._tell_of_several(sorted(several), where)
        on_servers = names_on_servers(own, several, where, self._namespace)
        unsure = {name for name in own if not (where and counts[name])} - self._shared
        free = [on_servers[name] for name in sorted(unsure)]
        self._names.require_free(free, where, self.remote_tables)
        settings = {}
        for name, full in on_servers.items():
            full = full.removeprefix(self._namespace)
            settings[name] = self._settings.get(full, self._settings.get(name))
            self.described.update((name, full))
        if {*own} <= self.planned:  # and so the planner has seen all collections
            self._require_known()
        given = {n: of for n, of in settings.items() if of is not None}
        spec = collection.describe_collection(
            module, self._optimizer, given, self._persia, self._fused_params
        )
        spec = spec.renamed(on_servers)
        if self._optimizer is not None:
            return spec
        return collection.as_trained(spec, self._client.learn_tables())

    def _tell_of_several(self, names: list[str], path: str) -> None:
        if not self.remote_tables.tells_of_several:
            return
        self.remote_tables.tells_of_several = False
        logger.info(
            "tables %s are in several collections of the model: on the servers each is "
            "PATH.NAME, as %r; shared={...} of the sharders makes them one table",
            names,
            f"{self._namespace}{path}.{names[0]}",
        )

    def _require_known(self) -> None:
        """Reject settings of unknown tables; the PATH of one may come later."""
        known = self.planned | self.described
        later = {n for n in self._settings if n.rpartition(".")[2] in self.planned}
        require_known_tables(self._settings, known | later)

    def load_weights(
        self,
        state_dict: Mapping[str, torch.Tensor],
        *,
        optimizer_state: OptimizerState | None = None,
        ids: Mapping[str, IdsOfRows] | None = None,
        step: int | None = None,
    ) -> dict[str, int]:
        """Fill all tables that are sharded so far from an ordinary checkpoint.

        Arguments, result and errors are those of :func:`persia_torchrec.load_tables`.

        Raises:
            ConfigError: no model is sharded yet, and so there are no tables; or there
                are no ``ids``, where an ``embedding_config`` gives ids prefixes.
        """
        if self._has_prefixes and ids is None:
            raise ConfigError(
                "Rows of tables with an embedding_config have ids with prefixes. "
                "Received: weights without ids. Give load_weights the ids of the rows, "
                "with the prefix of each table's feature group."
            )
        names = list(self.remote_tables.specs)
        if not names:
            raise ConfigError(
                "Weights can be loaded when the model is sharded, into its tables. "
                "Received: no table yet. Call load_weights after "
                "DistributedModelParallel(model, sharders=...)."
            )
        self.flush()
        own = {name: self.remote_tables.own_names[name] for name in names}
        if any(name != key for name, (key, _) in own.items()):
            if optimizer_state is not None:
                state: Any = optimizer_state.get("state", {})
                where = "optimizer_state"
                found = {n: find_entry(own[n][0], state, where, own[n][1]) for n in own}
                optimizer_state = {"state": found}
            given = ids or {}
            ids = {n: given.get(n, given.get(key)) for n, (key, _) in own.items()}
            state_dict = {
                n: find_entry(key, state_dict, "state_dict", path)
                for n, (key, path) in own.items()
            }
        entries = {n: find_entry(n, state_dict, "state_dict") for n in names}
        self.remote_tables.tell_of_order(entries)
        further: Any = {"optimizer_state": optimizer_state, "ids": ids, "step": step}
        return load_tables(self._client, state_dict, names, **further)

    def put_on_servers(
        self,
        module: TableCollection,
        env: types.ShardingEnv,
        device: torch.device,
        path: str = "",
        sharded_type: type[sharded_module.ShardedRemoteCollection] | None = None,
    ) -> Any:
        """Put the tables on the servers, and their rows into state dicts."""
        sharded = super().put_on_servers(module, env, device, path, sharded_type)
        tables, spec, where = self.remote_tables, sharded.spec, relative(path)
        rows_of = {c.name: c.num_embeddings for c in collection.table_configs(module)}
        self._names.take([table.name for table in spec.tables], where, sharded)
        for table in spec.tables:
            tables.own_names[table.name] = spec.own_name(table.name), where
        sharded.collection_state = CollectionState(
            self._client,
            {table.name: rows_of[spec.own_name(table.name)] for table in spec.tables},
            env,
            self._state_dict_rows,
            flush=tables.flush,
            meet=tables.meet,
        )
        sharded.collection_state.own_name = spec.own_name
        sharded.collection_state.has_prefixes = self._has_prefixes
        sharded.collection_state.is_on_gpu = device.type == "cuda"
        for name in sharded.tables_by_key.values():
            tables.states.setdefault(name, sharded.collection_state)
        sharded.add_placeholders(rows_of)
        weights = collection.weights_of(module)
        full = {t.name: weights.get(spec.own_name(t.name)) for t in spec.tables}
        sharded.collection_state.begin({n: w for n, w in full.items() if w is not None})
        return sharded

    def require_known_settings(self) -> None:
        """Reject settings of unknown tables: all collections are sharded by now."""
        require_known_tables(self._settings, self.planned | self.described)
        self.remote_tables.tell_of_unnamed()
        if self.remote_tables.cache is not None:
            self.remote_tables.cache.begin()

    def make_pipeline(
        self, spec: CollectionSpec, env: types.ShardingEnv, device: torch.device
    ) -> BatchPipeline[Any, Any]:
        """Return the pipeline of a collection, in which trainers update jointly."""
        limit_s = timeouts.exchange_s(self._client.recovery_s)
        update = "joint" if self._joint_timeout_s else "each"
        require_same_settings(update, spec.tables, env, limit_s)
        given: Any = {
            "precision": self._precision,
            "device": device,
            "each_id": self.gives_each_id,
            "has_weights": spec.is_weighted,
        }
        cached = self._cached_tables(spec, env, device)
        lookup = RowsOnDevice(self._client, spec.features, **given)
        if self.remote_tables.cache is not None and cached:
            lookup = CachedRows(self.remote_tables.cache, spec.features, **given)
            lookup.use_slots(cached)
        lookup.add_tables(spec.tables)
        # A server may be silent, and then away.
        timeout_s = self._client.timeout_s + 2 * self._client.recovery_s
        pipeline = BatchPipeline(lookup, staleness=self._staleness, timeout_s=timeout_s)
        num_pulls = min(self._staleness, self.PULLS_ON.get(device.type, 1))
        num_pulls = 1 if cached else num_pulls  # a row comes once
        pipeline.training.set_num_threads(max(num_pulls, 1))
        pipeline.tally.num_ids = lookup.num_ids
        pipeline.set_count(env.rank, self._client.batches)
        pipeline.evaluation_waits = self._evaluation_waits
        if self._joint_timeout_s and env.world_size > 1:
            pipeline.set_trainers(self._meet(env, device))
        return pipeline

    def _cached_tables(
        self, spec: CollectionSpec, env: types.ShardingEnv, device: torch.device
    ) -> list[TableSpec]:
        """Return the tables of a collection whose rows are cached; log the others."""
        if self.remote_tables.cache is None:
            return []
        _require_valid(
            ("cache", f"{env.world_size} trainers", env.world_size == 1, "of one"),
            ("cache", str(device), device.type == "cpu", "of a trainer on the CPU"),
        )
        reasons = {
            table.name: "other collections have it"
            if spec.own_name(table.name) in self._shared
            else why_not_cached(table)
            for table in spec.tables
        }
        if others := {name: why for name, why in reasons.items() if why}:
            told = ", ".join(f"{name!r}: {why}" for name, why in others.items())
            logger.info("tables that are not cached: %s", told)
        return [table for table in spec.tables if table.name not in others]

    def _meet(self, env: types.ShardingEnv, device: torch.device) -> Trainers:
        """Agree on a group that updates jointly; all trainers call this together."""
        if env.process_group is None:
            raise ConfigError(
                f"{env.world_size} trainers that update jointly must have a process "
                'group. Received: none. Give one, or update="each" to the sharder.'
            )
        device = device_in(env.process_group, device)
        group = torch.tensor([secrets.randbits(62)], device=device)
        with waiting(env.process_group, "sharding"):
            dist.broadcast(group, group_src=0, group=env.process_group)
            group = group.cpu()  # on a GPU, the wait for it
        timeout_ms = round(1000 * self._joint_timeout_s)
        first = Share(int(group), 1, env.rank, env.world_size, timeout_ms)
        trainers = Trainers(self._client, first)
        trainers.join()
        # The servers know all of them before one begins, and notice which one is lost.
        are_here = torch.zeros(1, device=device)
        with waiting(env.process_group, "sharding"):
            dist.all_reduce(are_here, group=env.process_group)
            are_here.item()  # on a GPU, the wait for it
        return trainers


class RemoteEmbeddingBagCollectionSharder(RemoteSharder):
    """Put every ``EmbeddingBagCollection`` of a model on the embedding servers.

    Args and errors are those of :class:`persia_torchrec.RemoteSharder`.

    Example:
        ``RemoteEmbeddingBagCollectionSharder(client, Adagrad(), tables={"user":
        TableSettings(optimizer=Adam(1e-3), admission=AdmitFrequency(3))})``
    """

    module_type = EmbeddingBagCollection
    sharded_type = sharded_module.ShardedRemoteEmbeddingBagCollection


class RemoteEmbeddingCollectionSharder(RemoteSharder):
    """Put every ``EmbeddingCollection`` of a model on the embedding servers.

    Args and errors are those of :class:`persia_torchrec.RemoteSharder`. Features are
    not pooled: the model gets a ``JaggedTensor`` for each, with a row for every id.

    Example:
        ``DistributedModelParallel(model, sharders=[
        RemoteEmbeddingCollectionSharder(client, Adam(1e-3), staleness=1)])``
    """

    module_type = EmbeddingCollection
    sharded_type = sharded_module.ShardedRemoteEmbeddingCollection
    gives_each_id = True
