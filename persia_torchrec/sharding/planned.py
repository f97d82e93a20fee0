"""What planners ask of a sharder whose tables are on the servers, and placeholders.

The planner plans a table like any other: it sees a placeholder parameter of one row
without storage, and names of sharding type and kernel that it knows. The sharded module
has a placeholder without rows where TorchRec has the weights of its own tables: for
names, for state dicts, and for what walks over ``model.parameters()``. What would
change rows of a table of TorchRec's, and could change nothing here, is an error or a
warning.
"""

import inspect
import operator
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torchrec.distributed import types
from torchrec.distributed.embedding_types import EmbeddingComputeKernel

from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding import collection, torchrec_api
from persia_torchrec.sharding.collection import TableCollection


class Placeholder(nn.Parameter):
    """The parameter of one table, which holds no rows: to need them is a ConfigError.

    It has the shape that a table of TorchRec's has. What torch does with all parameters
    of a model works and changes nothing, as moves, copies, and steps of optimizers,
    which it never gives a gradient.

    Attributes:
        table: its name on the servers.
        declared: the shape of TorchRec's table, if it is known.
        told: called when someone asks for no gradient of it.
    """

    table = ""
    declared: tuple[int, ...] | None = None
    told: Callable[[], None] | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be pickled as a plain parameter, without whom it tells."""
        return nn.Parameter, (_plain(self), False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Placeholder":
        memo[id(self)] = copied = self.alike(_plain(self))
        copied.requires_grad = self.requires_grad
        return copied

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Placeholder of table {self.table!r}, whose rows are on the servers"

    def alike(self, data: torch.Tensor) -> "Placeholder":
        """Return another one of the same table, which wants no gradient."""
        other = Placeholder(data, requires_grad=False)
        other.table, other.declared, other.told = self.table, self.declared, self.told
        return other

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function as for a plain parameter, unless it needs rows."""
        kwargs, first = kwargs or {}, args[0] if args else None
        name = _name_of(func)
        needs_rows = name in _ON_HOST or _is_init(func, inspect.currentframe())
        if func == _SET_DATA and not isinstance(args[1], Placeholder):
            needs_rows = args[1].numel() > 0
        if needs_rows:
            raise _needs_rows(name, (args, kwargs))
        shape = getattr(first, "declared", None) if func in _OF_SHAPE else None
        if shape is not None and not _is_step(inspect.currentframe()):
            return func(torch.empty(shape, device="meta"), *args[1:], **kwargs)
        if func in (_SET_REQUIRES_GRAD, torch.Tensor.requires_grad_):
            wants = (*args[1:2], *kwargs.values(), True)[0]
            told = getattr(first, "told", None)
            if not wants and told is not None:
                told()
        try:
            return torchrec_api.call_operator(func, *args, **kwargs)
        except (RuntimeError, IndexError, ConfigError) as exc:
            # Of its own shape, which is without rows, or by the operator.
            raise _needs_rows(name, (args, kwargs)) from exc

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own has no signature
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator that torch runs over all parameters; reject all others."""
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        copies = name == "copy_" and isinstance(args[1], Placeholder)
        if not (copies or name in _OF_ALL or _is_step(inspect.currentframe())):
            raise _needs_rows(name, (args, kwargs))
        plain = tree_map_only(Placeholder, _plain, (args, kwargs))
        result = func(*plain[0], **plain[1])
        if name in _SAME:
            return args[0].alike(result)
        return args[0] if copies else result


def dense_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module that hold what they are."""
    return [p for p in module.parameters() if not isinstance(p, Placeholder)]


def _plain(tensor: Placeholder) -> torch.Tensor:
    """Return what a placeholder has in place of rows."""
    shape = torchrec_api.call_operator(torch.Tensor.size, tensor)
    return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)


def _name_of(func: Callable[..., Any]) -> str:
    """Return the name of a function of torch's, or of what it gets or sets."""
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def _needs_rows(name: str, given: Any) -> ConfigError:
    tables = [one.table for one in tree_leaves(given) if isinstance(one, Placeholder)]
    return ConfigError(
        "Rows of tables on the servers are drawn there, by id, when an id is first "
        f"trained. Received: {name} of the parameter of table {tables[0]!r}, which "
        "holds no rows. Give the table's config init_fn=..., or its TableSettings "
        "initializer=...; read and write rows in model.state_dict(), or write them by "
        "model.load_state_dict or load_weights of the sharders."
    )


_GET = operator.attrgetter("__get__")
_OF_SHAPE = frozenset(
    [
        *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.ndimension),
        *(torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.__len__, torch.numel),
        *map(_GET, (torch.Tensor.shape, torch.Tensor.ndim, torch.Tensor.nbytes)),
    ]
)
"""What asks for the shape of a tensor."""

_ON_HOST = frozenset({"numpy", "tolist", "item", "__array__", "__dlpack__"})
"""What reads a tensor's memory without an operator."""

_SAME = frozenset({"detach", "alias", "clone", "_to_copy"})
_OF_ALL = _SAME | {
    *("empty_like", "zeros_like", "ones_like", "full_like"),
    *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
}
"""Operators that torch runs over all parameters of a model, and that read no rows."""

_SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _is_step(called: FrameType | None) -> bool:
    """Return whether an optimizer calls, whose parameters are all of a model."""
    while called is not None:
        if isinstance(called.f_locals.get("self"), torch.optim.Optimizer):
            return True
        called = called.f_back
    return False


def _is_init(func: Callable[..., Any], called: FrameType | None) -> bool:
    """Return whether a function is of ``torch.nn.init``, or called from there."""
    caller = called.f_back if called is not None else None
    modules = [getattr(func, "__module__", None)]
    modules += [caller.f_globals.get("__name__")] if caller is not None else []
    return nn.init.__name__ in modules


class PlannedSharder(types.ModuleSharder[nn.Module]):
    """What a planner and ``DistributedModelParallel`` ask of a sharder."""

    module_type: ClassVar[type[nn.Module]]
    sharding_type: ClassVar[str] = types.ShardingType.ROW_WISE.value
    # TorchRec's settings of its kernels. Planners of torchrec up to 1.6 read it of each
    # sharder; those of 1.7 to 1.9 ask first whether it is there.
    fused_params: ClassVar[None] = None

    @abstractmethod
    def put_on_servers(
        self, module: Any, env: types.ShardingEnv, device: torch.device, path: str = ""
    ) -> Any:
        """Make the tables known to the servers; return the module that uses them.

        ``path`` is the module's in the model, as far as it is known.
        """

    def tables_in(self, module: nn.Module) -> TableCollection:
        """Return the collection of tables that a module is, or holds."""
        return module

    def shard(
        self,
        module: nn.Module,
        params: types.EmbeddingModuleShardingPlan,
        env: types.ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Check the plan, and put the tables on the servers."""
        require_tables(self.tables_in(module), params)
        for name, sharding in params.items():
            # The rows of a plan by hand, or by other sharders, go to servers as well.
            if sharding.sharding_type != self.sharding_type:
                raise ConfigError(
                    f"The plan must have table {name!r} as {self.sharding_type}, by "
                    "which this sharder puts it on the servers. Received: "
                    f"{sharding.sharding_type}. Give a plan by hand "
                    f"{self.sharding_type}(...); or pass the sharders that the model "
                    "gets to the planner: planner.collective_plan(model, sharders, pg)."
                )
        sharded = self.put_on_servers(
            module, env, device or torch.device("cpu"), module_fqn or ""
        )
        sharded.module_sharding_plan = params
        sharded.replaced = weakref.ref(module)
        return sharded

    def reshard(self, module: Any, *_: object) -> Any:
        """Reject, as the module does."""
        return module.update_shards()

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return a placeholder of one row for each table."""
        return {
            config.name: nn.Parameter(
                torch.empty(1, config.embedding_dim, device="meta")
            )
            for config in collection.table_configs(self.tables_in(module))
        }

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the one type: rows are spread over servers."""
        return [self.sharding_type]

    def compute_kernels(
        self, sharding_type: str, compute_device_type: str
    ) -> list[str]:
        """Return the one kernel: lookup and update are the servers' own."""
        return [EmbeddingComputeKernel.FUSED.value]


def require_tables(module: TableCollection, params: Mapping[str, Any]) -> None:
    """Reject a plan of other tables."""
    names = {config.name for config in collection.table_configs(module)}
    if params.keys() != names:
        raise ConfigError(
            f"The plan must name the tables {sorted(names)}. "
            f"Received: {sorted(params)}."
        )


def is_planned_on_servers(
    sharding: types.ParameterSharding, sharding_type: str
) -> bool:
    """Return whether a plan is of a placeholder, as this project's sharders offer."""
    # Kernels tell nothing: TorchRec's helpers for plans by hand do not ask the sharder.
    return sharding.sharding_type == sharding_type and num_rows(sharding) == 1


def num_rows(sharding: types.ParameterSharding) -> int | None:
    """Return the rows of a planned table or placeholder; None if data parallel."""
    spec = sharding.sharding_spec
    if not isinstance(spec, types.EnumerableShardingSpec):
        return None
    return max(shard.shard_offsets[0] + shard.shard_sizes[0] for shard in spec.shards)
