"""Model-level checks around the collections that a sharder shards.

TorchRec hands a sharder its own modules only, and copies what no sharder takes to every
trainer. For a collection that is usually a mistake: it was sharded by default, until
``sharders=[...]`` replaced the defaults. So a model with tables on the servers is
checked when a ``DistributedModelParallel`` gets it.
"""

import functools
import logging
from collections.abc import Iterable, Iterator
from typing import NoReturn, TypeAlias

import msgspec
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed import model_parallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingEnv
from torchrec.modules import mc_embedding_modules
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from persia_torchrec.errors import ConfigError
from persia_torchrec.job.trainer_group import exchange_group, gather
from persia_torchrec.parsing.decoding import decoder_of
from persia_torchrec.sharding import torchrec_api
from persia_torchrec.sharding.sharded_module import ShardedRemoteCollection
from persia_torchrec.table import TableSpec, align

logger = logging.getLogger(__name__)

# Collections for which TorchRec has a sharder by default, by their exact types.
_SHARDED_BY_DEFAULT = (
    EmbeddingBagCollection,
    EmbeddingCollection,
    FusedEmbeddingBagCollection,
)

_Local: TypeAlias = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection


@functools.cache
def watch_models() -> None:
    """Check from now on every model that a ``DistributedModelParallel`` gets."""

    def check(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if (
            isinstance(parent, model_parallel.DistributedModelParallel)
            and child is not None
        ):
            _replace_other_names(child)
            _require_sharders(child, {s.module_type for s in parent.sharders})
            if remote_collections(child):
                torchrec_api.replace_trackers(parent, _reject_tracker)

    register_module_module_registration_hook(check)


def _reject_tracker(*_: object) -> NoReturn:
    """Reject TorchRec's trackers of rows, which would find nothing on the servers."""
    raise ConfigError(
        "TorchRec's trackers of deltas and of raw ids see tables on trainers only. "
        "Received: one for a model with tables on the servers. Servers write "
        "increments of the rows that change: EmbeddingCluster.local(increments_dir="
        "...), or save_delta."
    )


def _replace_other_names(model: nn.Module) -> None:
    """Put a sharded collection under all names that the collection itself had.

    TorchRec replaces the first one only, and would leave a dense collection with rows
    of its own under the others, as of a tower whose tables are another tower's.
    """
    places: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        remote = _remote_of(module)
        if remote is not None and remote.replaced and (given := remote.replaced()):
            places.setdefault(given, module)  # a MixedCollection comes before its part
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module in places:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, places[module])


def _require_sharders(model: nn.Module, taken: set[type[nn.Module]]) -> None:
    """Reject a sharded model with tables on the servers and collections left behind.

    Collections of the types ``taken`` may stay as they are if the plan says so. Managed
    collision modules, of which each trainer has its own, are rejected too.
    """
    if not remote_collections(model):
        return
    num_trainers = dist.get_world_size() if dist.is_initialized() else 1
    for path, module in model.named_modules():
        received = f"the {type(module).__name__} {path!r}"
        if type(module) in _SHARDED_BY_DEFAULT and type(module) not in taken:
            raise ConfigError(
                "Every embedding collection of a model must have a sharder. Received: "
                f"none for {received}, which would be dense, with a copy on each "
                "trainer. Give sharders=remote_sharders(client, ...), which takes them "
                "all; or add TorchRec's own sharder of it to the list, to leave it to "
                "TorchRec."
            )
        collides = isinstance(
            module, mc_embedding_modules.BaseManagedCollisionEmbeddingCollection
        )
        if collides and num_trainers > 1 and remote_collections(module):
            raise ConfigError(
                "Ids of tables on the servers must mean the same on all trainers. "
                f"Received: {received}, which maps ids on each trainer by itself, and "
                f"{num_trainers} trainers. Leave the managed collision module out: the "
                "servers take raw 64-bit ids."
            )


def require_same_settings(
    update: str, specs: Iterable[TableSpec], env: ShardingEnv, limit_s: float
) -> None:
    """Compare what all trainers say of updates; they call this together.

    Raises:
        ConfigError: one updates jointly, and another by itself.
    """
    if env.process_group is None:
        return
    told = {spec.name: spec.optimizer.describe("lr") for spec in specs}
    group = exchange_group(limit_s, env.process_group)
    texts = gather(msgspec.json.encode((update, told)), group)
    kind = tuple[str, dict[str, str]]
    by_rank = [decoder_of(kind).decode(text) for text in texts]
    updates = [of_rank for of_rank, _ in by_rank]
    if len(set(updates)) > 1:
        raise ConfigError(
            f"All trainers must have the same update. Received: {updates}, by rank."
        )
    for name in told:
        given = [of_rank.get(name, "none") for _, of_rank in by_rank]
        if len(set(given)) > 1:
            logger.warning(
                "table %r has another setting of its optimizer on each trainer: %s, by "
                "rank. The servers apply the one that they were sent last. Give all "
                "trainers the same.",
                name,
                given,
            )


def remote_collections(model: nn.Module) -> list[ShardedRemoteCollection]:
    """Return the collections of a model whose tables are on the servers, each once."""
    found = map(_remote_of, model.modules())
    return list(dict.fromkeys(remote for remote in found if remote is not None))


def _remote_of(module: nn.Module) -> ShardedRemoteCollection | None:
    """Return the tables on the servers that a module is, or has as MixedCollection."""
    remote = getattr(module, "remote", None) if isinstance(module, _Local) else module
    return remote if isinstance(remote, ShardedRemoteCollection) else None


def describe_placement(model: nn.Module) -> str:
    """Return a table of what lies where in a sharded model.

    Args:
        model: a ``DistributedModelParallel``, or a part of it.

    Returns:
        One line per table of the model: its collection's path; its name; where it is,
        "servers" or how TorchRec shards it; the ranks that hold it; its rows, "any" on
        the servers, where a table has no length; its dim; the name of its optimizer:
        "the model's" is the one that the training loop steps, "fused" that of a fused
        table which other trainers hold. In each collection, those on the servers come
        last.
    """
    lines = [["collection", "table", "place", "ranks", "rows", "dim", "optimizer"]]
    described: set[nn.Module] = set()
    for path, module in model_parallel.get_unwrapped_module(model).named_modules():
        if isinstance(module, _Local):
            lines += [[path, *line] for line in _describe_local(module)]
        remote = _remote_of(module)
        if remote is not None and remote not in described:
            described.add(remote)
            for spec in remote.spec.tables:
                optimizer = type(spec.optimizer).__name__
                where = "servers", "-", "any"
                lines.append([path, spec.name, *where, str(spec.dim), optimizer])
    return align(lines)


def _describe_local(module: _Local) -> Iterator[tuple[str, ...]]:
    # What fbgemm calls the optimizer of each table that this trainer holds.
    optimizers = {
        table.name: kernel.emb_module.optimizer.name
        for kernel in torchrec_api.embedding_kernels(module)
        for table in kernel.config.embedding_tables
        if hasattr(kernel.emb_module, "optimizer")
    }
    for name, sharding in module.module_sharding_plan.items():
        config = torchrec_api.table_configs(module)[name]
        is_dense = sharding.compute_kernel == EmbeddingComputeKernel.DENSE.value
        yield (
            name,
            f"{sharding.sharding_type} {sharding.compute_kernel}",
            ",".join(map(str, sharding.ranks or ())) or "-",
            str(config.num_embeddings),
            str(config.embedding_dim),
            "the model's" if is_dense else optimizers.get(name, "fused"),
        )
