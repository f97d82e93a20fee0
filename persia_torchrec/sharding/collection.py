"""What TorchRec's collections say of their tables, in the servers' terms.

A table of a collection on the servers has no length: ids are raw 64-bit values, and
``num_embeddings`` only sets the range of the initial weights, as it does in TorchRec.
What the servers cannot do is refused here, before anything is trained.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    get_embedding_names_by_table,
)

from persia_torchrec.embedding.initializer import (
    Constant,
    Initializer,
    Normal,
    Uniform,
)
from persia_torchrec.embedding.optim import Optimizer
from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.model_optimizers import model_optimizers
from persia_torchrec.table import TableSettings, TableSpec, WeightDtype
from persia_torchrec.worker.bags import FeatureSpec, Pooling

_POOLINGS: dict[PoolingType, Pooling] = {
    PoolingType.SUM: "sum",
    PoolingType.MEAN: "mean",
}

_WEIGHT_DTYPES: dict[DataType, WeightDtype] = {
    DataType.FP32: "fp32",
    DataType.FP16: "fp16",
    DataType.BF16: "bf16",
}


@dataclass(frozen=True, slots=True)
class CollectionSpec:
    """A collection: its tables, and its features in the order of their columns.

    Attributes:
        tables: one a table of the collection.
        features: one a column block of the pooled output, or one a sequence.
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
        """Return the names of the columns, one a feature."""
        return [feature.name for feature in self.features]

    def dims(self) -> list[int]:
        """Return the dim of each feature, in the order of the columns."""
        dim_of = {table.name: table.dim for table in self.tables}
        return [dim_of[feature.table] for feature in self.features]


def describe_bags(
    module: EmbeddingBagCollectionInterface,
    optimizer: Optimizer,
    settings: Mapping[str, TableSettings] | None = None,
) -> CollectionSpec:
    """Describe an ``EmbeddingBagCollection``.

    Args:
        module: on any device; only its configuration is read.
        optimizer: of the tables that neither ``settings`` nor the model give one.
        settings: of single tables, by name; names that it has not are left alone.

    Raises:
        ConfigError: a setting that the servers cannot honour; the message names the
            table and what works instead.
    """
    configs = module.embedding_bag_configs()
    names_by_table = get_embedding_names_by_table(configs)
    features = [
        FeatureSpec(name=name, key=key, table=config.name, pooling=_pooling(config))
        for config, names in zip(configs, names_by_table, strict=True)
        for name, key in zip(names, config.feature_names, strict=True)
    ]
    optimizers = _optimizers(module, configs, optimizer)
    tables = _tables(configs, optimizers, settings or {})
    return CollectionSpec(tables, tuple(features), is_weighted=module.is_weighted())


def describe_sequences(
    module: EmbeddingCollection,
    optimizer: Optimizer,
    settings: Mapping[str, TableSettings] | None = None,
) -> CollectionSpec:
    """Describe an ``EmbeddingCollection``; as :func:`describe_bags`.

    Raises:
        ConfigError: a setting that the servers cannot honour; the message names the
            table and what works instead.
    """
    configs = module.embedding_configs()
    features = [
        FeatureSpec(name=name, key=key, table=config.name)
        for config, names in zip(
            configs, module.embedding_names_by_table(), strict=True
        )
        for name, key in zip(names, config.feature_names, strict=True)
    ]
    optimizers = _optimizers(module, configs, optimizer)
    tables = _tables(configs, optimizers, settings or {})
    return CollectionSpec(tables, tuple(features), needs_ids=module.need_indices())


def _optimizers(
    module: nn.Module, configs: Iterable[BaseEmbeddingConfig], optimizer: Optimizer
) -> dict[str, Optimizer]:
    """Return each table's optimizer, unless its settings say otherwise."""
    own = model_optimizers(module)
    return {config.name: own.get(config.name, optimizer) for config in configs}


def _tables(
    configs: Iterable[BaseEmbeddingConfig],
    optimizers: Mapping[str, Optimizer],
    settings: Mapping[str, TableSettings],
) -> tuple[TableSpec, ...]:
    return tuple(
        settings.get(config.name, TableSettings()).apply_to(
            TableSpec(
                name=config.name,
                dim=config.embedding_dim,
                optimizer=optimizers[config.name],
                initializer=_initializer(config, settings),
                seed=_seed(config.name),
                weight_dtype=_weight_dtype(config),
            )
        )
        for config in configs
    )


def _weight_dtype(config: BaseEmbeddingConfig) -> WeightDtype:
    if config.data_type not in _WEIGHT_DTYPES:
        raise ConfigError(
            f"Table {config.name!r}: data_type must be FP32, FP16 or BF16, in which "
            f"the servers hold weights. Received: data_type={config.data_type}."
        )
    return _WEIGHT_DTYPES[config.data_type]


def _pooling(config: EmbeddingBagConfig) -> Pooling:
    if config.pooling not in _POOLINGS:
        raise ConfigError(
            f"Table {config.name!r}: pooling must be SUM or MEAN. "
            f"Received: {config.pooling}."
        )
    return _POOLINGS[config.pooling]


def _initializer(
    config: BaseEmbeddingConfig, settings: Mapping[str, TableSettings]
) -> Initializer:
    """Return how rows start: by default TorchRec's +-sqrt(1 / num_embeddings)."""
    asked = settings.get(config.name, TableSettings()).initializer
    if asked is not None:
        return asked
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


def _uniform(a: float = 0.0, b: float = 1.0) -> Initializer:
    return Uniform(float(a), float(b))


def _normal(mean: float = 0.0, std: float = 1.0) -> Initializer:
    return Normal(float(mean), float(std))


def _constant(val: float) -> Initializer:
    return Constant(float(val))


_INITIALIZERS: dict[object, Callable[..., Initializer]] = {
    torch.nn.init.uniform_: _uniform,
    torch.nn.init.normal_: _normal,
    torch.nn.init.constant_: _constant,
    torch.nn.init.zeros_: lambda: Constant(0.0),
    torch.nn.init.ones_: lambda: Constant(1.0),
}


def _seed(table: str) -> int:
    """Return the same seed for the same table name, everywhere."""
    digest = hashlib.blake2b(table.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
