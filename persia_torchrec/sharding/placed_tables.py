"""What lies where in a model that is sharded.

TorchRec's plan names every table too, but cannot say "on the servers": there, such a
table is a row_wise one of a single row. Checked with TorchRec 1.8, of whose sharded
modules private attributes are read here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import get_unwrapped_module

from persia_torchrec.sharding.mixed_lookup import MixedCollection
from persia_torchrec.sharding.remote_lookup import ShardedRemoteCollection

_Local: TypeAlias = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection


@dataclass(frozen=True, slots=True)
class PlacedTable:
    """One table of a sharded model.

    Attributes:
        collection: the path of its collection in the model.
        table: its name.
        place: "servers", or how TorchRec shards it, as "row_wise fused".
        ranks: the trainers that hold it, if any.
        rows: how many it has; None on the servers, where it has no length.
        dim: weights a row.
        optimizer: the name of what updates it; "the model's" is the one that the
            training loop steps. Of a fused table that other trainers hold, "fused".
    """

    collection: str
    table: str
    place: str
    ranks: tuple[int, ...]
    rows: int | None
    dim: int
    optimizer: str


def placed_tables(model: nn.Module) -> list[PlacedTable]:
    """List the tables of a sharded model.

    Args:
        model: a ``DistributedModelParallel``, or a part of it.

    Returns:
        Collection by collection; in each, the tables on the servers come last.
    """
    tables: list[PlacedTable] = []
    halves: set[nn.Module] = set()
    for path, module in get_unwrapped_module(model).named_modules():
        if isinstance(module, _Local):
            tables.extend(_local_tables(path, module))
        if isinstance(module, MixedCollection):
            tables.extend(_remote_tables(path, module.remote))
            halves.add(module.remote)
        if isinstance(module, ShardedRemoteCollection):
            tables.extend(_remote_tables(path, module) if module not in halves else ())
    return tables


def describe_placement(model: nn.Module) -> str:
    """Say in a table what lies where in a sharded model.

    Args:
        model: a ``DistributedModelParallel``, or a part of it.

    Returns:
        One line a table of the model: collection, table, place, ranks, rows, dim,
        optimizer. Rows are "any" on the servers, where a table has no length.
    """
    lines = [("collection", "table", "place", "ranks", "rows", "dim", "optimizer")]
    lines += [
        (
            placed.collection,
            placed.table,
            placed.place,
            ",".join(map(str, placed.ranks)) or "-",
            "any" if placed.rows is None else str(placed.rows),
            str(placed.dim),
            placed.optimizer,
        )
        for placed in placed_tables(model)
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) for cell, width in zip(line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def _remote_tables(
    path: str, module: ShardedRemoteCollection[Any, Any]
) -> Iterator[PlacedTable]:
    for spec in module.tables:
        optimizer = type(spec.optimizer).__name__
        yield PlacedTable(path, spec.name, "servers", (), None, spec.dim, optimizer)


def _local_tables(path: str, module: _Local) -> Iterator[PlacedTable]:
    optimizers = _fused_optimizers(module)
    for name, sharding in module.module_sharding_plan.items():
        config = module._table_name_to_config[name]
        is_dense = sharding.compute_kernel == EmbeddingComputeKernel.DENSE.value
        yield PlacedTable(
            collection=path,
            table=name,
            place=f"{sharding.sharding_type} {sharding.compute_kernel}",
            ranks=tuple(sharding.ranks or ()),
            rows=config.num_embeddings,
            dim=config.embedding_dim,
            optimizer="the model's" if is_dense else optimizers.get(name, "fused"),
        )


def _fused_optimizers(module: _Local) -> dict[str, str]:
    """Return what fbgemm calls the optimizer of each table that this trainer holds."""
    kernels = [
        kernel
        for lookup in module._lookups
        for kernel in lookup.modules()
        if isinstance(kernel, BaseEmbedding)
    ]
    return {
        table.name: kernel.emb_module.optimizer.name
        for kernel in kernels
        for table in kernel.config.embedding_tables
        if hasattr(kernel.emb_module, "optimizer")
    }
