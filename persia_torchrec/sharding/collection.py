"""Convert the settings of TorchRec's collections to those of the servers.

A table on the servers has no length: ``num_embeddings`` only sets the range of the
initial weights, as it does in TorchRec. What the servers cannot do is rejected here,
before training. An optimizer that a table has in the model moves to the servers:

    apply_optimizer_in_backward(RowWiseAdagrad, model.bags.parameters(), {"lr": 0.01})
    FusedEmbeddingBagCollection(tables, optimizer_type=Adam, optimizer_kwargs={...})

TorchRec itself trains such tables by fbgemm's optimizer of the same name, whose
computation and defaults win over the class: see ``fused_arguments.py``.

With an ``embedding_config.yml`` a table is a feature group, and a feature a slot: ids
get the group's prefix, so that rows are those that a ``TrainCtx`` trains.
"""

import difflib
import functools
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, get_args

import torch
import torchrec
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.modules.fused_embedding_modules import FusedEmbeddingCollection

from persia_torchrec.embedding.embedding_config import (
    EmbeddingSchema,
    SlotConfig,
    load_embedding_config,
)
from persia_torchrec.embedding.setting import Optimizer
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.errors import ConfigError
from persia_torchrec.lookup.bags import POOLINGS, FeatureSpec
from persia_torchrec.sharding.fused_arguments import (
    FusedOptimizer,
    read_optimizers,
    translate_fused_params,
)
from persia_torchrec.sharding.init_functions import initializer_of
from persia_torchrec.sharding.torchrec_api import set_device
from persia_torchrec.table import TableSettings, TableSpec, WeightDtype

logger = logging.getLogger(__name__)

TableCollection: TypeAlias = (
    torchrec.EmbeddingBagCollectionInterface
    | torchrec.EmbeddingCollection
    | FusedEmbeddingCollection
)

_SEQUENCES = torchrec.EmbeddingCollection, FusedEmbeddingCollection


@dataclass(frozen=True, slots=True)
class CollectionSpec:
    """A collection: its tables, and its features in the order of their columns."""

    tables: tuple[TableSpec, ...]
    features: tuple[FeatureSpec, ...]
    is_weighted: bool = False  # a batch has a weight for each id, which pooling uses
    needs_ids: bool = False  # sequences come with their ids
    # By names on the servers: what the collection calls tables, where that differs.
    own_names: Mapping[str, str] = field(default_factory=dict)
    # By table: what clamps the gradient of each element of the output.
    max_gradients: Mapping[str, float] = field(default_factory=dict)
    # Tables for which no optimizer is named.
    unnamed: frozenset[str] = frozenset()

    def renamed(self, names: Mapping[str, str]) -> "CollectionSpec":
        """Return the collection with other names of its tables on the servers."""
        if all(name == new for name, new in names.items()):
            return self
        return replace(
            self,
            tables=tuple(
                [
                    replace(table, name=new, seed=_renamed_seed(table, new))
                    for table in self.tables
                    for new in [names[table.name]]
                ]
            ),
            features=tuple([f._replace(table=names[f.table]) for f in self.features]),
            own_names={new: name for name, new in names.items()},
            max_gradients={names[n]: most for n, most in self.max_gradients.items()},
            unnamed=frozenset(names[name] for name in self.unnamed),
        )

    def own_name(self, table: str) -> str:
        """Return what the collection calls a table of the servers."""
        return self.own_names.get(table, table)


@dataclass(frozen=True, slots=True)
class PersiaTables:
    """What PERSIA says of tables, which a collection's own configs do not."""

    schema: EmbeddingSchema | None  # of the slots; None: ids stay as they are
    config: EmbeddingConfig  # how rows start, unless a table has an init_fn of its own

    @classmethod
    def read(
        cls, given: "str | os.PathLike[str] | PersiaTables | None"
    ) -> "PersiaTables | None":
        """Return what a sharder was given: the path of an ``embedding_config.yml``."""
        if given is None or isinstance(given, cls):
            return given
        schema = load_embedding_config(os.fspath(given), warns=False)  # type: ignore[arg-type]
        return cls(schema, EmbeddingConfig())

    def slots_of(self, config: BaseEmbeddingConfig) -> dict[str, SlotConfig]:
        """Return the slots of a table, which must be a feature group, by feature."""
        if self.schema is None:
            return {}
        if config.name not in self.schema.groups:
            near = difflib.get_close_matches(config.name, self.schema.groups, 1, 0.0)
            raise ConfigError(
                "With an embedding_config a table must have the name of a feature "
                f"group, or of a slot that is in none. Received: table {config.name!r}."
                f" Is {near[0]!r} meant?"
            )
        members = self.schema.groups[config.name]
        for feature in config.feature_names:
            if feature not in members:
                raise ConfigError(
                    f"Table {config.name!r}: its features must be slots of its feature "
                    f"group, {list(members)}. Received: {feature!r}."
                )
        slots = {name: self.schema.slots[name] for name in config.feature_names}
        dims = {slot.dim for slot in slots.values()}
        if dims != {config.embedding_dim}:
            raise ConfigError(
                f"Table {config.name!r}: embedding_dim must be the dim of its slots, "
                f"{sorted(dims)}. Received: {config.embedding_dim}."
            )
        return slots


def weights_of(module: TableCollection) -> dict[str, torch.Tensor]:
    """Return the weights that a collection has already, by table; not those on meta."""
    return {
        key.split(".")[-2]: weight.detach()  # "embedding_bags.TABLE.weight"
        for key, weight in module.named_parameters()
        if not weight.is_meta
    }


def frozen_tables(module: TableCollection, spec: CollectionSpec) -> list[str]:
    """Return which tables of a collection want no gradient, as servers call them."""
    parameters = module.named_parameters()  # "embedding_bags.TABLE.weight"
    frozen = {name.split(".")[-2] for name, p in parameters if not p.requires_grad}
    return [t.name for t in spec.tables if spec.own_name(t.name) in frozen]


def table_configs(collection: TableCollection) -> list[BaseEmbeddingConfig]:
    """Return the configs of the collection's tables, in their order."""
    if isinstance(collection, _SEQUENCES):
        return list(collection.embedding_configs())
    return list(collection.embedding_bag_configs())


def describe_collection(
    module: TableCollection,
    optimizer: Optimizer | FusedOptimizer | None,
    settings: Mapping[str, TableSettings] | None = None,
    persia: PersiaTables | None = None,
    fused_params: Mapping[str, Any] | None = None,
) -> CollectionSpec:
    """Describe a collection of bags or of sequences; only its configuration is read.

    ``optimizer`` is of the tables that neither ``settings`` nor the model give one; by
    None they have TorchRec's default. ``fused_params`` complete the arguments of the
    model's.
    """
    are_sequences = isinstance(module, _SEQUENCES)
    columns, own = name_columns(module), read_optimizers(module, fused_params)
    is_named = optimizer is not None
    if not isinstance(optimizer, FusedOptimizer):
        optimizer = translate_fused_params({}, optimizer)
    tables, features, max_gradients, unnamed = [], [], {}, set()
    for config in table_configs(module):
        pooling = "sum" if are_sequences else config.pooling.value.lower()
        if pooling not in POOLINGS:
            raise ConfigError(
                f"Table {config.name!r}: pooling must be SUM or MEAN. "
                f"Received: {config.pooling}."
            )
        slots = {} if persia is None else persia.slots_of(config)
        for f, key in enumerate(config.feature_names):
            spec = FeatureSpec(columns[config.name, f], key, config.name, pooling)
            if persia is not None and persia.schema is not None:
                bits = persia.schema.feature_index_prefix_bit
                spec = _of_slot(spec, slots[key], bits)
            features.append(spec)
        given = (settings or {}).get(config.name, TableSettings())
        chosen = own.get(config.name, optimizer)
        if not is_named and config.name not in own and given.optimizer is None:
            unnamed.add(config.name)
        if chosen.max_gradient and given.optimizer is None:
            max_gradients[config.name] = chosen.max_gradient
        tables.append(_describe_table(config, chosen, given, persia))
    is_weighted = not are_sequences and module.is_weighted()
    if is_weighted or are_sequences:
        _require_no_hash_stack(features)
    return CollectionSpec(
        tuple(tables),
        tuple(features),
        is_weighted=is_weighted,
        needs_ids=are_sequences and module.need_indices(),
        max_gradients=max_gradients,
        unnamed=frozenset(unnamed),
    )


def as_trained(spec: CollectionSpec, known: Sequence[TableSpec]) -> CollectionSpec:
    """Return a collection whose sharder was given no optimizer.

    Of the tables that have none, those on the servers, as from a checkpoint, keep the
    optimizer there; it is then that of the table, which is no longer ``unnamed``.
    """
    on_servers = {(table.name, table.dim): table.optimizer for table in known}
    tables, unnamed = [], set(spec.unnamed)
    for table in spec.tables:
        optimizer = on_servers.get((table.name, table.dim))
        if table.name in spec.unnamed and optimizer is not None:
            unnamed.remove(table.name)
            logger.info(
                "table %r keeps the servers' optimizer, %s",
                table.name,
                optimizer.describe("lr"),
            )
            table = replace(table, optimizer=optimizer)
        tables.append(table)
    return replace(spec, tables=tuple(tables), unnamed=frozenset(unnamed))


def _of_slot(spec: FeatureSpec, slot: SlotConfig, prefix_bits: int) -> FeatureSpec:
    """Return a feature whose ids become rows as those of a slot do."""
    pooling = spec.pooling
    if slot.sqrt_scaling and slot.embedding_summation:
        if pooling != "sum":
            raise ConfigError(
                f"Feature {spec.key!r}: pooling must be SUM where the slot has "
                "sqrt_scaling, which divides the sum by the root of the number of "
                "ids. Received: MEAN."
            )
        pooling = "sqrt"
    return spec._replace(
        pooling=pooling,
        prefix=slot.index_prefix,
        prefix_bits=prefix_bits,
        hash_stack_rounds=slot.hash_stack.hash_stack_rounds,
        hash_stack_size=slot.hash_stack.embedding_size,
    )


def _require_no_hash_stack(features: list[FeatureSpec]) -> None:
    """Reject slots with several rows an id where each id has one, or a weight."""
    for feature in features:
        if feature.hash_stack_rounds:
            raise ConfigError(
                f"Feature {feature.key!r}: a slot with a hash_stack_config must be in "
                "an EmbeddingBagCollection without weights, as its ids have several "
                f"rows each. Received: {feature.hash_stack_rounds} rounds."
            )


def select_tables(
    collection: TableCollection, names: set[str]
) -> TableCollection | None:
    """Return a collection of some of the tables, with the same weights, if any."""
    if not names:
        return None
    tables: dict[str, Any] = {
        "tables": [c for c in table_configs(collection) if c.name in names],
        "device": torch.device("meta"),  # where tables take no memory
    }
    if isinstance(collection, torchrec.EmbeddingCollection):
        selected = torchrec.EmbeddingCollection(
            **tables,
            need_indices=collection.need_indices(),
            use_gather_select=collection.use_gather_select(),
            use_gather_select_per_sharding=collection.use_gather_select_per_sharding(),
        )
        weights, of_selected = collection.embeddings, selected.embeddings
    else:
        weighted = collection.is_weighted()
        selected = torchrec.EmbeddingBagCollection(**tables, is_weighted=weighted)
        weights, of_selected = collection.embedding_bags, selected.embedding_bags
    of_selected.update({name: weights[name] for name in names})
    set_device(selected, collection.device)  # TorchRec loads weights on a device
    return selected


def name_columns(collection: TableCollection) -> dict[tuple[str, int], str]:
    """Return the name of each (table, index of its feature), in the output's order."""
    configs = table_configs(collection)
    names = get_embedding_names_by_table(configs)
    return {
        (config.name, f): name
        for config, of_table in zip(configs, names, strict=True)
        for f, name in enumerate(of_table)
    }


def _describe_table(
    config: BaseEmbeddingConfig,
    optimizer: FusedOptimizer,
    settings: TableSettings,
    persia: PersiaTables | None,
) -> TableSpec:
    weight_dtype = config.data_type.value.lower()
    if weight_dtype not in get_args(WeightDtype):
        raise ConfigError(
            f"Table {config.name!r}: data_type must be FP32, FP16 or BF16, in which "
            f"the servers hold weights. Received: data_type={config.data_type}."
        )
    further: dict[str, Any] = {
        "seed": seed_of(config.name),
        "weight_dtype": weight_dtype,
        "stochastic_rounding": optimizer.stochastic_rounding,
    }
    if persia is not None:
        further["admission"] = persia.config.admission
        further["weight_bound"] = persia.config.weight_bound
        if persia.schema is not None:
            further["seed"] = 0  # PERSIA's numbers
    initializer = settings.initializer
    if initializer is None and persia is not None and not _has_own_init(config):
        initializer = persia.config.initializer
    spec = settings.apply_to(
        TableSpec(
            name=config.name,
            dim=config.embedding_dim,
            optimizer=optimizer.optimizer,
            initializer=initializer or initializer_of(config),
            **further,
        )
    )
    # As plain TorchRec's, unless an admission or PERSIA says what unknown ids read.
    if (
        settings.ids_without_row is None
        and persia is None
        and not spec.admission.kernel
    ):
        spec = replace(spec, ids_without_row="initial")
    return spec


def seed_of(name: str) -> int:
    """Return a table's seed: by its name, and so the same anywhere."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _renamed_seed(table: TableSpec, name: str) -> int:
    """Return the seed of a table of another name; a given seed stays."""
    return seed_of(name) if table.seed == seed_of(table.name) else table.seed


def _has_own_init(config: BaseEmbeddingConfig) -> bool:
    """Return whether a user has said how rows start, and not ``num_embeddings``."""
    init: Any = config.init_fn
    bounds = {"a": config.get_weight_init_min(), "b": config.get_weight_init_max()}
    is_filled_in = (
        isinstance(init, functools.partial)
        and init.func is torch.nn.init.uniform_
        and init.keywords == bounds
    )
    is_bounded = (
        config.weight_init_min is not None or config.weight_init_max is not None
    )
    return is_bounded or not is_filled_in
