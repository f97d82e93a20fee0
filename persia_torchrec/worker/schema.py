"""PERSIA's slots, in the terms of servers and embedding workers.

A feature group is one table: its slots share ids, and hence rows. Ids get the group's
prefix, from which PERSIA draws the initial weights; the table's seed is therefore 0.
"""

from collections.abc import Mapping

from persia_torchrec.config import EmbeddingSchema, SlotConfig
from persia_torchrec.embedding import EmbeddingConfig
from persia_torchrec.embedding.data import IDFeature
from persia_torchrec.embedding.optim import Optimizer
from persia_torchrec.table import TableSettings, TableSpec, require_known_tables
from persia_torchrec.worker.bags import Bags, FeatureSpec


def features_of(schema: EmbeddingSchema) -> tuple[FeatureSpec, ...]:
    """Return one feature a slot, in the file's order."""
    return tuple(_feature(slot, schema) for slot in schema.slots.values())


def tables_of(
    schema: EmbeddingSchema,
    config: EmbeddingConfig,
    optimizer: Optimizer,
    settings: Mapping[str, TableSettings] | None = None,
) -> tuple[TableSpec, ...]:
    """Return one table a feature group.

    Args:
        schema: the slots.
        config: which ids get rows, how these start, and how far weights may go.
        optimizer: of the tables that ``settings`` gives no other.
        settings: of single tables, by feature group; they win over ``config``.

    Raises:
        ConfigError: settings of an unknown group, or out of their range.
    """
    settings = settings or {}
    require_known_tables(settings, (group.name for group in schema.groups))
    return tuple(
        settings.get(group.name, TableSettings()).apply_to(
            TableSpec(
                name=group.name,
                dim=schema.slots[group.slots[0]].dim,
                optimizer=optimizer,
                initializer=config.initializer,
                admission=config.admission,
                weight_bound=config.weight_bound,
            )
        )
        for group in schema.groups
    )


def bags_of(features: Mapping[str, IDFeature]) -> dict[str, Bags]:
    """Return a batch's ID features as bags, without copies."""
    return {name: Bags(f.ids, f.lengths) for name, f in features.items()}


def _feature(slot: SlotConfig, schema: EmbeddingSchema) -> FeatureSpec:
    return FeatureSpec(
        name=slot.name,
        key=slot.name,
        table=slot.group,
        pooling="sqrt" if slot.sqrt_scaling else "sum",
        prefix=slot.index_prefix,
        prefix_bits=schema.feature_index_prefix_bit,
        hash_stack_rounds=slot.hash_stack.hash_stack_rounds,
        hash_stack_size=slot.hash_stack.embedding_size,
        num_places=0 if slot.embedding_summation else slot.sample_fixed_size,
    )
