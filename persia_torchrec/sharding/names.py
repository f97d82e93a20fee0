"""Names of tables on the servers and in state dicts.

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

from collections.abc import Collection, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ShardingEnv

from persia_torchrec.errors import ConfigError
from persia_torchrec.job.trainer_group import device_in, waiting

OptimizerState = Mapping[str, object]
"""``{"state": {key of a weight: {name: tensor}}}``, as the ``state_dict()`` of
TorchRec's fused optimizer has it, and of a ``KeyedOptimizerWrapper``."""

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

    def count(self, names: Iterable[str], namespace: str) -> dict[str, int]:
        """Return by name how many collections of the planned model have such a table.

        0: it was not planned, or not here.
        """
        self._is_sharding = True
        return {name: len(self._tables.get(namespace + name, ())) for name in names}

    def require_free(self, names: Iterable[str], path: str, tables: object) -> None:
        """Reject a name of another collection of the same sharders.

        It is for names of which no planner knows whether the model has them once. A
        second model may have one: its collection is at the same path.
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


def agree_on(counts: dict[str, int], env: ShardingEnv) -> dict[str, int]:
    """Return counts by name as the first trainer has them, whose planner has planned.

    All trainers call it together, with the same names.
    """
    if env.world_size == 1 or env.process_group is None:
        return counts
    device = device_in(env.process_group, torch.device("cpu"))
    known = torch.tensor([*counts.values()], device=device)
    with waiting(env.process_group, "sharding"):
        dist.broadcast(known, group_src=0, group=env.process_group)
        agreed = known.tolist()
    return dict(zip(counts, agreed, strict=True))


def names_on_servers(
    names: Iterable[str], several: Collection[str], path: str, namespace: str
) -> dict[str, str]:
    """Return what a collection's tables are called on the servers, by their names."""
    prefix = f"{path}." if path else ""
    return {n: f"{namespace}{prefix if n in several else ''}{n}" for n in names}


def find_entry(
    table: str, entries: Mapping[str, Any], where: str, path: str = ""
) -> Any:
    """Return the only entry of a table, by any of the keys that it may have.

    Of several, that of the collection at ``path``.
    """
    own = f"embedding_bags.{table}.weight", f"embeddings.{table}.weight"
    keys = [key for key in entries if key.endswith(tuple(f".{name}" for name in own))]
    keys += [key for key in (*own, f"{table}.weight", table) if key in entries]
    if path and len(keys) > 1:
        ends = tuple(f"{path}.{name}" for name in own)
        keys = [
            key for key in keys if f".{key}".endswith(tuple(map(".{}".format, ends)))
        ]
    if len(keys) != 1:
        raise ConfigError(
            f"{where} must hold table {table!r} once, as {own[0]!r} or {own[1]!r} "
            f"behind any path, or as {table!r}. Received: "
            f"{keys or sorted(entries)[:20]}."
        )
    return entries[keys[0]]


def find_state(
    table: str, optimizer_state: OptimizerState, step: int | None
) -> tuple[list[torch.Tensor], int | None]:
    """Return the tensors of a table's optimizer state, and its step."""
    entries = optimizer_state.get("state")
    if not isinstance(entries, Mapping):
        raise ConfigError(
            "optimizer_state must be the state_dict() of a keyed optimizer, with "
            f"'state'. Received: {sorted(optimizer_state)}."
        )
    tensors = []
    for name, value in find_entry(table, entries, "optimizer_state").items():
        if name.rpartition(".")[2] == "step":
            step = int(value) if step is None else step
        else:
            tensors.append(value)
    if not tensors:
        raise ConfigError(
            f"optimizer_state must hold the state of table {table!r}. Received: none. "
            "Leave it out to begin with the initial state."
        )
    return tensors, step
