"""What tables are called on the servers.

In plain TorchRec a table is its path in the model, and two collections may each have a
table of one name. On the servers

    a name of one collection of the model      is the table's own, NAME
    a name of several collections              is PATH.NAME, a table for each
    a name in shared={NAME}                    is NAME, one table for all of them

PATH is the collection's in the model, without ``model.`` or ``module.`` of wrappers
around it, so that ``DLRMTrain(DLRM)`` and ``DLRM`` have the same tables. A planner asks
for the tables of all collections before the first one is sharded: from that it is known
which names are of several. Only the first trainer plans, and tells the others.
"""

from collections.abc import Collection, Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ShardingEnv

from persia_torchrec.errors import ConfigError
from persia_torchrec.job.trainer_group import device_in

_WRAPPERS = ("model", "module", "_dmp_wrapped_module")


class PlannedNames:
    """The names of tables in the model that is planned, or sharded, for a client.

    Owned by the thread that shards.
    """

    def __init__(self) -> None:
        # By name: the modules of the tables' weights, each of one collection.
        self._tables: dict[str, WeakSet[nn.Module]] = {}
        self._is_sharding = False
        # By name on the servers: the sharded collections, with their paths.
        self._users: dict[str, WeakKeyDictionary[Any, str]] = {}

    def plan(self, module: nn.Module, namespace: str) -> None:
        """Note the tables of a collection that a planner asks for."""
        if self._is_sharding:  # the next model
            self._tables.clear()
            self._is_sharding = False
        for name, table in tables_of(module).items():
            self._tables.setdefault(namespace + name, WeakSet()).add(table)

    def of_several(self, names: Iterable[str], namespace: str) -> set[str]:
        """Return those of a collection's names that others of the model have too."""
        self._is_sharding = True
        return {n for n in names if len(self._tables.get(namespace + n, ())) > 1}

    def require_free(self, names: Iterable[str], path: str, tables: object) -> None:
        """Refuse a name of another collection of the same sharders.

        A second model may have it: its collection is at the same path.
        """
        for name in names:
            for user, other in self._users.get(name, {}).items():
                if user.remote_tables is tables and not (path and path == other):
                    raise ConfigError(
                        f"Table {name!r} is in several collections, in {other!r} and "
                        f"{path!r}: in plain TorchRec these are several tables. "
                        "Received: no word on what is meant. Give the sharders shared="
                        f"{{{name!r}}}, by which they are one table; or let a planner "
                        "see the whole model, planner.collective_plan(model, sharders, "
                        "pg), by which each is PATH.NAME; or a namespace=."
                    )

    def take(self, names: Iterable[str], path: str, sharded: Any) -> None:
        """Note what a sharded collection's tables are called on the servers."""
        for name in names:
            self._users.setdefault(name, WeakKeyDictionary())[sharded] = path


_OF_CLIENTS: WeakKeyDictionary[object, PlannedNames] = WeakKeyDictionary()


def planned_names(client: object) -> PlannedNames:
    """Return the names of the models whose tables are on a client's servers."""
    return _OF_CLIENTS.setdefault(client, PlannedNames())


def tables_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return what holds the weights of each table of a collection, by name."""
    keys = [key for key, _ in module.named_parameters() if key.count(".") > 1]
    paths = [key.rpartition(".")[0] for key in keys]  # "embedding_bags.TABLE"
    return {p.rpartition(".")[2]: module.get_submodule(p) for p in paths}


def relative(path: str | None) -> str:
    """Return a collection's path in the model, without wrappers around that."""
    parts = (path or "").split(".")
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        del parts[0]
    return ".".join(parts)


def agree_on(several: Collection[str], names: list[str], env: ShardingEnv) -> set[str]:
    """Return which names are of several collections, as the first trainer knows it.

    All trainers call it together, with the same names.
    """
    if env.world_size == 1 or env.process_group is None:
        return set(several)
    device = device_in(env.process_group, torch.device("cpu"))
    known = torch.tensor([name in several for name in names], device=device).int()
    dist.broadcast(known, group_src=0, group=env.process_group)
    return {name for name, of in zip(names, known.tolist(), strict=True) if of}


def names_on_servers(
    names: Iterable[str], several: Collection[str], path: str, namespace: str
) -> dict[str, str]:
    """Return what a collection's tables are called on the servers, by their names."""
    prefix = f"{path}." if path else ""
    return {n: f"{namespace}{prefix if n in several else ''}{n}" for n in names}
