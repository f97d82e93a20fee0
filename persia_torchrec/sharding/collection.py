"""TorchRec's collections of tables, and what they say in the servers' terms.

A table of a collection on the servers has no length: ids are raw 64-bit values, and
``num_embeddings`` only sets the range of the initial weights, as it does in TorchRec.
What the servers cannot do is refused here, before anything is trained.

Collections of bags and of sequences differ in the names of their methods, which are
told apart here alone.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    PoolingType,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    get_embedding_names_by_table,
)

from persia_torchrec.embedding.initializer import (
    Constant,
    Normal,
    Uniform,
)
from persia_torchrec.embedding.setting import Initializer, Optimizer
from persia_torchrec.errors import ConfigError
from persia_torchrec.lookup.bags import FeatureSpec, Pooling
from persia_torchrec.sharding.model_optimizers import read_optimizers
from persia_torchrec.sharding.torchrec_api import set_device
from persia_torchrec.table import TableSettings, TableSpec, WeightDtype

Collection: TypeAlias = EmbeddingBagCollectionInterface | EmbeddingCollection

_POOLINGS: dict[PoolingType, Pooling] = {
    PoolingType.SUM: "sum",
    PoolingType.MEAN: "mean",
}

_WEIGHT_DTYPES: dict[DataType, WeightDtype] = {
    DataType.FP32: "fp32",
    DataType.FP16: "fp16",
    DataType.BF16: "bf16",
}

_INITIALIZERS: dict[object, Callable[..., Initializer]] = {
    torch.nn.init.uniform_: lambda a=0.0, b=1.0: Uniform(float(a), float(b)),
    torch.nn.init.normal_: lambda mean=0.0, std=1.0: Normal(float(mean), float(std)),
    torch.nn.init.constant_: lambda val: Constant(float(val)),
    torch.nn.init.zeros_: lambda: Constant(0.0),
    torch.nn.init.ones_: lambda: Constant(1.0),
}


@dataclass(frozen=True, slots=True)
class CollectionSpec:
    """A collection: its tables, and its features in the order of their columns.

    Attributes:
        tables: one per table of the collection.
        features: one per column block of the pooled output, or one per sequence.
        is_weighted: a batch has a weight for each id, which pooling uses.
        needs_ids: sequences come with their ids.
    """

    tables: tuple[TableSpec, ...]
    features: tuple[FeatureSpec, ...]
    is_weighted: bool = False
    needs_ids: bool = False

    def keys(self) -> list[str]:
        """Return the features that a batch must have, each once."""
        return list(dict.fromkeys(feature.key for feature in self.features))

    def names(self) -> list[str]:
        """Return the names of the columns, one per feature."""
        return [feature.name for feature in self.features]

    def dims(self) -> list[int]:
        """Return the dim of each feature, in the order of the columns."""
        dim_of = {table.name: table.dim for table in self.tables}
        return [dim_of[feature.table] for feature in self.features]


def table_configs(collection: Collection) -> list[BaseEmbeddingConfig]:
    """Return the configs of the collection's tables, in their order."""
    if isinstance(collection, EmbeddingCollection):
        return list(collection.embedding_configs())
    return list(collection.embedding_bag_configs())


def describe_collection(
    module: Collection,
    optimizer: Optimizer,
    settings: Mapping[str, TableSettings] | None = None,
) -> CollectionSpec:
    """Describe a collection of bags or of sequences.

    Args:
        module: on any device; only its configuration is read.
        optimizer: of the tables that neither ``settings`` nor the model give one.
        settings: of single tables, by name; names that it has not are left alone.

    Raises:
        ConfigError: a setting that the servers cannot honour; the message names the
            table and what works instead.
    """
    configs = table_configs(module)
    are_sequences = isinstance(module, EmbeddingCollection)
    features = tuple(
        FeatureSpec(
            name=name,
            key=key,
            table=config.name,
            pooling="sum" if are_sequences else _pooling(config),
        )
        for config, names in zip(
            configs, get_embedding_names_by_table(configs), strict=True
        )
        for name, key in zip(names, config.feature_names, strict=True)
    )
    own = read_optimizers(module)
    tables = tuple(
        _describe_table(
            config,
            own.get(config.name, optimizer),
            (settings or {}).get(config.name, TableSettings()),
        )
        for config in configs
    )
    if are_sequences:
        return CollectionSpec(tables, features, needs_ids=module.need_indices())
    return CollectionSpec(tables, features, is_weighted=module.is_weighted())


def select_tables(collection: Collection, names: Iterable[str]) -> Collection:
    """Return a collection of some of the tables, with the same weights."""
    chosen = set(names)
    configs = [config for config in table_configs(collection) if config.name in chosen]
    selected = _on_meta(collection, configs)
    for name, table in _modules_by_table(collection).items():
        if name in chosen:
            _modules_by_table(selected)[name] = table
    set_device(selected, collection.device)  # TorchRec loads weights on a device
    return selected


def name_columns(collection: Collection) -> dict[tuple[str, int], str]:
    """Return the name of each (table, number of its feature), in the output's order.

    A feature that the tables of the collection have more than once is called
    "feature@table".
    """
    configs = table_configs(collection)
    return {
        (config.name, f): name
        for config, names in zip(
            configs, get_embedding_names_by_table(configs), strict=True
        )
        for f, name in enumerate(names)
    }


def _modules_by_table(collection: Collection) -> nn.ModuleDict:
    """Return the modules that hold the weights."""
    if isinstance(collection, EmbeddingCollection):
        return collection.embeddings
    return collection.embedding_bags


def _on_meta(collection: Collection, configs: list[BaseEmbeddingConfig]) -> Collection:
    """Return a collection on the meta device, where tables take no memory."""
    meta = torch.device("meta")
    if not isinstance(collection, EmbeddingCollection):
        return EmbeddingBagCollection(
            tables=configs, is_weighted=collection.is_weighted(), device=meta
        )
    return EmbeddingCollection(
        tables=configs,
        device=meta,
        need_indices=collection.need_indices(),
        use_gather_select=collection.use_gather_select(),
        use_gather_select_per_sharding=collection.use_gather_select_per_sharding(),
    )


def _describe_table(
    config: BaseEmbeddingConfig, optimizer: Optimizer, settings: TableSettings
) -> TableSpec:
    if config.data_type not in _WEIGHT_DTYPES:
        raise ConfigError(
            f"Table {config.name!r}: data_type must be FP32, FP16 or BF16, in which "
            f"the servers hold weights. Received: data_type={config.data_type}."
        )
    digest = hashlib.blake2b(config.name.encode(), digest_size=8).digest()
    return settings.apply_to(
        TableSpec(
            name=config.name,
            dim=config.embedding_dim,
            optimizer=optimizer,
            initializer=settings.initializer or _initializer(config),
            seed=int.from_bytes(digest, "little"),  # by name, and so the same anywhere
            weight_dtype=_WEIGHT_DTYPES[config.data_type],
        )
    )


def _pooling(config: BaseEmbeddingConfig) -> Pooling:
    if config.pooling not in _POOLINGS:
        raise ConfigError(
            f"Table {config.name!r}: pooling must be SUM or MEAN. "
            f"Received: {config.pooling}."
        )
    return _POOLINGS[config.pooling]


def _initializer(config: BaseEmbeddingConfig) -> Initializer:
    """Return how rows start: by default TorchRec's +-sqrt(1 / num_embeddings)."""
    init = config.init_fn
    if init is None:
        return Uniform(config.get_weight_init_min(), config.get_weight_init_max())
    # TorchRec itself fills init_fn with a uniform_ between the bounds.
    is_partial = isinstance(init, functools.partial) and not init.args
    function, arguments = (init.func, init.keywords) if is_partial else (init, {})
    for known, initializer in _INITIALIZERS.items():
        if function is known:
            with contextlib.suppress(TypeError):  # of an argument it does not have
                return initializer(**arguments)
    raise ConfigError(
        f"Table {config.name!r}: init_fn must be uniform_, normal_, constant_, zeros_ "
        "or ones_ of torch.nn.init, or a functools.partial of one with its numbers: "
        "the servers draw initial weights by id. Or give TableSettings(initializer=...)"
        f" to the sharder. Received: init_fn={init}."
    )
