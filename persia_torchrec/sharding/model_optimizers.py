"""The optimizers that a model brings along, as the servers apply them.

A TorchRec user gives tables their optimizer in one of two ways, and either moves to the
servers with the table:

    apply_optimizer_in_backward(RowWiseAdagrad, model.bags.parameters(), {"lr": 0.01})
    FusedEmbeddingBagCollection(tables, optimizer_type=Adam, optimizer_kwargs={...})

TorchRec itself trains such tables by fbgemm's optimizer of the same name, and fbgemm
says what it computes and what an argument is by default, whatever the class would: so
``torch.optim.Adam`` decays weights as AdamW does, and Adagrad's ``eps`` is 1e-8. Two
things are taken from the class, since fbgemm leaves them out: momentum and weight decay
of SGD, and weight decay and the start of the accumulator of Adagrad.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from persia_torchrec.embedding.optim import OPTIMIZERS, Optimizer
from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.torchrec_api import optimizers_in_backward

Arguments = dict[str, Any]
Twin = tuple[type[Optimizer], Mapping[str, object]]
"""Class of the servers, and the arguments of its twin with fbgemm's defaults."""

_NEAREST = {
    "AdamW": "torch.optim.Adam, whose weight_decay is AdamW's on the servers",
    "SparseAdam": "torch.optim.Adam, which changes the rows of a batch alone there",
    "RMSprop": "TableSettings(optimizer=AdamAsync(apply_sparse_rmsprop=True))",
    "NAdam": "TableSettings(optimizer=AdamAsync(use_nesterov=True))",
    "Adadelta": "torch.optim.Adagrad",
    "Rprop": "torch.optim.SGD",
    "ASGD": "torch.optim.SGD",
}
_NEAREST_OF_ALL = "torch.optim.Adam"

_SPELLINGS = {"learning_rate": "lr"}
_OF_TORCHREC = "optimizer"  # TorchRec writes fbgemm's name among the arguments


def read_optimizers(module: nn.Module) -> dict[str, Optimizer]:
    """Return the optimizers of the tables that the model gives one, by table.

    Args:
        module: a collection of TorchRec's, on any device.

    Raises:
        ConfigError: a table has two, or one that the servers cannot apply; the message
            names it and the nearest that they can.
    """
    if isinstance(module, FusedEmbeddingBagCollection):
        own = module.optimizer_type(), module.optimizer_kwargs()
        names = [config.name for config in module.embedding_bag_configs()]
        return {name: translate_optimizer(*own, table=name) for name in names}
    optimizers = {}
    for name, parameter in module.named_parameters():
        given = optimizers_in_backward(parameter)
        table = name.split(".")[-2]  # "embedding_bags.TABLE.weight"
        if len(given) > 1:
            raise ConfigError(
                f"Table {table!r} must have one optimizer. Received: "
                f"{[cls.__name__ for cls, _ in given]}, by apply_optimizer_in_backward."
            )
        for cls, arguments in given:
            optimizers[table] = translate_optimizer(cls, arguments, table=table)
    return optimizers


def translate_optimizer(
    cls: type[torch.optim.Optimizer], arguments: Mapping[str, Any], *, table: str
) -> Optimizer:
    """Return what the servers apply for an optimizer of torch's or TorchRec's.

    Args:
        cls: its class.
        arguments: as they were given with it; fbgemm's names do as well.
        table: whose optimizer it is, for messages.

    Raises:
        ConfigError: the servers have none like it, or not with these arguments.

    Example:
        >>> translate_optimizer(torch.optim.SGD, {"lr": 0.5}, table="user")
        SGD(lr=0.5, momentum=0.0, weight_decay=0.0)
    """
    twins = _twins()
    if cls not in twins:
        nearest = _NEAREST.get(cls.__name__, _NEAREST_OF_ALL)
        can = sorted({getattr(known, "__name__", "") for known in twins})
        raise ConfigError(
            f"Table {table!r}: the optimizer must be one that the servers can apply, "
            f"of {can}. Received: {cls.__module__}.{cls.__name__}. The nearest is "
            f"{nearest}."
        )
    optimizer, defaults = twins[cls]
    chosen = {**defaults}
    for name, value in _with_betas(arguments, defaults).items():
        name = _SPELLINGS.get(name, name)
        if name in defaults:
            chosen[name] = value
        elif value and name != _OF_TORCHREC:
            raise ConfigError(
                f"Table {table!r}: {cls.__name__} on the servers has the arguments "
                f"{sorted(defaults)}. Received: {name}={value!r}. Leave it out."
            )
    return optimizer(**chosen)  # type: ignore[arg-type]  # checked in __post_init__


def _twins() -> dict[object, Twin]:
    """Return the optimizers of the servers, by their twins in torch and TorchRec."""
    return {
        _find_class(name): (optimizer, defaults)
        for optimizer in OPTIMIZERS.classes
        for name, defaults in optimizer.torch_twins.items()
    }


@cache
def _find_class(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def _with_betas(
    arguments: Mapping[str, Any], defaults: Mapping[str, object]
) -> Arguments:
    """Return the arguments with ``betas`` for fbgemm's ``beta1`` and ``beta2``."""
    given = dict(arguments)
    if "betas" in defaults and given.keys() & {"beta1", "beta2"}:
        beta1, beta2 = given.get("betas", defaults["betas"])
        given["betas"] = given.pop("beta1", beta1), given.pop("beta2", beta2)
    if "betas" in given:
        given["betas"] = tuple(given["betas"])
    return given
