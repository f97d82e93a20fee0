"""What a sharder cannot see: the model around the collections that it shards.

TorchRec hands a sharder its own modules only. Whatever no sharder takes stays as it is
and is copied to every trainer, as dense parameters are. For a collection that is a
mistake as a rule: it was sharded by default, until ``sharders=[...]`` replaced the list
of defaults. So a whole model is looked at when a ``DistributedModelParallel`` gets it,
by torch's hook for modules that get children; where nothing is on the servers, nothing
is said.
"""

import functools

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
)
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
)

from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.remote_lookup import ShardedRemoteEmbeddingBagCollection
from persia_torchrec.sharding.remote_sequences import ShardedRemoteEmbeddingCollection

_ON_SERVERS = (ShardedRemoteEmbeddingBagCollection, ShardedRemoteEmbeddingCollection)

_SHARDED_BY_DEFAULT = (
    EmbeddingBagCollection,
    EmbeddingCollection,
    FusedEmbeddingBagCollection,
)
"""Collections for which TorchRec has a sharder by default, by their exact types."""


@functools.cache
def watch_models() -> None:
    """Look from now on at every model that a ``DistributedModelParallel`` gets.

    It stays for the life of the process, and costs a call and a type check for each
    module that gets a child.
    """
    register_module_module_registration_hook(_when_registered)


def _when_registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if isinstance(parent, DistributedModelParallel) and child is not None:
        require_sharders(child, {sharder.module_type for sharder in parent.sharders})


def require_sharders(model: nn.Module, taken: set[type[nn.Module]]) -> None:
    """Refuse a model of which a collection stayed behind when others were sharded.

    Args:
        model: sharded.
        taken: the types of modules that its sharders take; collections of these may
            stay as they are, if the plan says so.

    Raises:
        ConfigError: some tables are on the servers, and a collection has no sharder;
            or a managed collision module, of which each trainer has its own, maps the
            ids of tables on the servers.
    """
    modules = dict(model.named_modules())
    if not any(isinstance(module, _ON_SERVERS) for module in modules.values()):
        return
    for path, module in modules.items():
        if type(module) in _SHARDED_BY_DEFAULT and type(module) not in taken:
            raise ConfigError(
                "Every embedding collection of a model must have a sharder. Received: "
                f"none for the {type(module).__name__} {path!r}, which would be dense, "
                "with a copy on each trainer. Give sharders=remote_sharders(client, "
                "...), which takes them all; or add TorchRec's own sharder of it to "
                "the list, to leave it to TorchRec."
            )
        if isinstance(module, BaseManagedCollisionEmbeddingCollection):
            _require_one_trainer(path, module)


def _require_one_trainer(path: str, module: nn.Module) -> None:
    are_several = dist.is_initialized() and dist.get_world_size() > 1
    if are_several and any(isinstance(part, _ON_SERVERS) for part in module.modules()):
        raise ConfigError(
            "Ids of tables on the servers must mean the same on all trainers. "
            f"Received: the {type(module).__name__} {path!r}, which maps ids on each "
            f"trainer by itself, and {dist.get_world_size()} trainers. Leave the "
            "managed collision module out: the servers take raw 64-bit ids."
        )
