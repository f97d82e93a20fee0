"""The optimizer of tables on the servers, as TorchRec has one of fused tables."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsFloat, TypeAlias

import torch
from torch import nn
from torchrec.optim.fused import FusedOptimizer

from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.state_dict import CollectionState

States: TypeAlias = dict[str, CollectionState]
"""The rows of the collections, by table."""


def set_values(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set values of a parameter group; what is a tensor there gets its number.

    The tensor itself stays, on its device: a compiled or captured step reads that one.
    """
    for name, value in values.items():
        group[name] = _set(group.get(name), value)


@contextlib.contextmanager
def keeping_tensors(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep the tensors of parameter groups, as ``lr``, while a state is loaded."""
    held = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    yield
    for before, group in zip(held, optimizer.param_groups, strict=False):
        loaded = {name: group[name] for name in before.keys() & group.keys()}
        group.update(before)
        set_values(group, loaded)


def _set(held: Any, value: Any) -> Any:
    """Return a value of a group, in the tensors that the group held before."""
    if isinstance(held, torch.Tensor):
        with torch.no_grad():
            return held.copy_(torch.as_tensor(value))
    if isinstance(held, tuple) and len(held) == len(value):  # betas
        return tuple(map(_set, held, value))
    return value


class JoinedGroup(dict[str, Any]):
    """A parameter group of several tables, where TorchRec has one: see ``join``.

    A rate that is set in it becomes that of all its tables, and has that of its tables
    where these have one. A table whose rate was set alone keeps it until the group's
    changes.

    Args:
        tables: the groups of the single tables, of one rate.
    """

    def __init__(self, tables: Sequence[dict[str, Any]]) -> None:
        params = [param for table in tables for param in table["params"]]
        super().__init__(params=params, lr=tables[0]["lr"])
        self._tables = tables
        self._seen = rate_of(tables[0])

    def agree(self, *, leads: bool) -> None:
        """Let the tables have the group's rate if it ``leads`` and that has changed.

        The group then has the rate of its tables, if that is one.
        """
        if leads and rate_of(self) != self._seen:
            for table in self._tables:
                set_values(table, {"lr": rate_of(self)})
        rates = {rate_of(table) for table in self._tables}
        if len(rates) == 1 and rate_of(self) not in rates:
            set_values(self, {"lr": rates.pop()})
        self._seen = rate_of(self)


def rate_of(group: Mapping[str, Any]) -> float:
    """Return the learning rate of a group: a number, or a tensor of one."""
    rate = group["lr"]
    is_number = isinstance(rate, SupportsFloat) and not isinstance(rate, bool)
    if not is_number or (isinstance(rate, torch.Tensor) and rate.numel() != 1):
        raise ConfigError(f"lr of a group must be a number. Received: {rate!r:.100}.")
    return float(rate)


def restore_groups(
    groups: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]]
) -> None:
    """Give the groups of an optimizer the values that they were saved with.

    Earlier versions had a group per table in fused optimizers; of such a state only
    other groups are restored.
    """
    if len(groups) != len(saved):
        groups = [group for group in groups if not isinstance(group, JoinedGroup)]
        saved = [group for group in saved if "table" not in group]
    for group, previous in zip(groups, saved, strict=True):
        set_values(group, previous)


class RemoteOptimizer(FusedOptimizer):
    """Learning rates of tables on the servers, one parameter group per table.

    That of a model, ``model.fused_optimizer``, has the groups of TorchRec's: tables of
    one collection with the same optimizer, dtype and pooling are one group.

    It is for schedules, ``torch.optim.lr_scheduler`` or TorchRec's ``WarmupOptimizer``:
    the servers apply gradients by the current ``lr`` of the table's group. A new rate
    takes effect between the pushes before and after the change. Every trainer of a job
    must run the same schedule: the servers use the rate that any trainer sent last.

    Its parameters are placeholders. Its state is that of the rows on the servers, with
    the names and shapes of TorchRec's fused optimizers; with
    ``save_param_groups(True)`` its state dict has the rates too. How many steps Adam
    has made is in neither, see :meth:`set_optimizer_step`; ``save_checkpoint`` keeps
    it. Under a ``GradScaler`` the gradient of a
    placeholder is 0, or infinite where those of the embeddings were not finite, until
    ``zero_grad``: so ``scaler.step`` finds it. ``send`` makes the servers use the rates
    of ``groups``, which are by the names of parameters; ``states`` are the collections'
    rows, by table; ``joined`` are the groups that it shows, if they are others.
    """

    def __init__(
        self,
        groups: Mapping[str, dict[str, Any]],
        send: Callable[[], None],
        states: States,
        joined: Sequence[JoinedGroup] = (),
    ) -> None:
        if not groups:
            raise ConfigError(
                "An optimizer of remote tables needs tables. Received: none; ask for "
                "it after DistributedModelParallel has sharded the model."
            )
        params = {name: group["params"][0] for name, group in groups.items()}
        shown: list[dict[str, Any]] = [*joined] if joined else [*groups.values()]
        super().__init__(params, _States(groups.values(), states), shown)
        self._groups = [*groups.values()]
        self._send = send
        self._states = states

    def learning_rates(self) -> dict[str, float]:
        """Return the current rate of each table."""
        return {group["table"]: rate_of(group) for group in self._groups}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Send the rates that have changed; the gradients are on their way already."""
        self._send()
        return None if closure is None else closure()

    def post_load_state_dict(self) -> None:
        """Wait until all trainers have loaded the state."""
        loaded = {group["table"] for group in self._groups} & self._states.keys()
        for state in {
            id(self._states[table]): self._states[table] for table in loaded
        }.values():
            if not state.is_left_out():
                state.meet()

    def set_optimizer_step(self, step: int) -> None:
        """Continue counting Adam's steps, of all tables, from a number."""
        for group in self._groups:
            if state := self._states.get(group["table"]):
                state.set_step(group["table"], step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget whether gradients were finite; the gradients are not kept."""
        for group in self.param_groups:
            for placeholder in group["params"]:
                placeholder.grad = None


class _State(Mapping[str, torch.Tensor]):
    """The state of one table's optimizer, by name; read when it is looked into.

    Wrappers of optimizers, as TorchRec's for schedules, pass it on and do not look.
    """

    def __init__(self, read: Callable[[], dict[str, torch.Tensor]]) -> None:
        self._tensors = functools.cache(read)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors())

    def __len__(self) -> int:
        return len(self._tensors())


class _States(Mapping[nn.Parameter, Mapping[str, torch.Tensor]]):
    """The state of each table's optimizer, by its placeholder."""

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        states: States,
    ) -> None:
        self._tables = {group["params"][0]: group["table"] for group in groups}
        self._states = states

    def __getitem__(self, parameter: nn.Parameter) -> Mapping[str, torch.Tensor]:
        table = self._tables[parameter]
        if self._states[table].is_left_out():
            raise KeyError(table)
        return _State(functools.partial(self._states[table].optimizer_tensors, table))

    def __iter__(self) -> Iterator[nn.Parameter]:
        for parameter, table in self._tables.items():
            if table in self._states and not self._states[table].is_left_out():
                yield parameter

    def __len__(self) -> int:
        return sum(1 for _ in self)
