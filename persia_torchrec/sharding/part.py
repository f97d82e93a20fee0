"""A part of a collection: some of its tables, as a collection of its own.

Bag collections and collections of sequences differ in the names of their methods alone,
which are told apart here. Checked with TorchRec 1.8, whose ``device`` of a collection
is a private attribute.
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias, cast

import torch
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)

Collection: TypeAlias = EmbeddingBagCollection | EmbeddingCollection

_META = torch.device("meta")


def configs_of(collection: Collection) -> Sequence[BaseEmbeddingConfig]:
    """Return the configs of the collection's tables, in their order."""
    if isinstance(collection, EmbeddingBagCollection):
        return cast("Sequence[BaseEmbeddingConfig]", collection.embedding_bag_configs())
    return cast("Sequence[BaseEmbeddingConfig]", collection.embedding_configs())


def tables_of(collection: Collection) -> nn.ModuleDict:
    """Return the modules that hold the weights, by table."""
    if isinstance(collection, EmbeddingBagCollection):
        return collection.embedding_bags
    return collection.embeddings


def part_of(collection: Collection, names: Iterable[str]) -> Collection:
    """Return a collection of some of the tables; it has the same weights, not copies.

    Args:
        collection: kept as it is.
        names: of the tables; at least one.
    """
    chosen = set(names)
    configs = [config for config in configs_of(collection) if config.name in chosen]
    part = _empty_part(collection, configs)
    for name, table in tables_of(collection).items():
        if name in chosen:
            tables_of(part)[name] = table
    part._device = collection.device  # TorchRec loads weights that are on a device
    return part


def columns_of(collection: Collection) -> dict[tuple[str, int], str]:
    """Return the name of each (table, number of its feature), in the output's order.

    A feature that the tables of the collection have more than once is called
    "feature@table".
    """
    configs = configs_of(collection)
    return {
        (config.name, f): name
        for config, names in zip(
            configs, get_embedding_names_by_table(configs), strict=True
        )
        for f, name in enumerate(names)
    }


def _empty_part(
    collection: Collection, configs: Sequence[BaseEmbeddingConfig]
) -> Collection:
    """Return a collection on the meta device, where tables take no memory."""
    if isinstance(collection, EmbeddingBagCollection):
        return EmbeddingBagCollection(
            tables=configs, is_weighted=collection.is_weighted(), device=_META
        )
    return EmbeddingCollection(
        tables=configs,
        device=_META,
        need_indices=collection.need_indices(),
        use_gather_select=collection.use_gather_select(),
        use_gather_select_per_sharding=collection.use_gather_select_per_sharding(),
    )
