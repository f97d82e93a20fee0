"""The optimizers of TorchRec's tables, with fbgemm's arguments, in the servers' terms.

TorchRec trains a table by the fbgemm kernel that goes with the optimizer's class, and
hands the arguments on. What a kernel reads is what counts, not what the class of torch
would do: ``torch.optim.Adam`` decays weights as AdamW does, Adagrad's ``eps`` is 1e-8,
SGD has no momentum. So each optimizer's ``torch_twins`` lists what its kernel reads:

    kernel                  reads, beside the learning rate
    EXACT_SGD
    EXACT_ADAGRAD           eps
    EXACT_ROWWISE_ADAGRAD   eps, weight_decay, weight_decay_mode, max_norm
    ADAM, LAMB, PARTIAL_*   eps, beta1, beta2, weight_decay
    LARS_SGD                weight_decay, eta, momentum
    all of them             gradient_clipping, max_gradient, stochastic_rounding

(fbgemm's ``codegen/genscript/optimizers.py``, and ``embedding_backward_split_host_
template.cpp`` for the last line.) Another argument of fbgemm's changes nothing there,
nor here; one warning says so. Where the GPU's kernels read more than the CPU's, the
GPU's meaning holds. fbgemm has no ``initial_accumulator_value``: here Adagrad has.
"""

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)

from persia_torchrec.embedding.optim import OPTIMIZERS
from persia_torchrec.embedding.setting import Optimizer
from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.torchrec_api import optimizers_in_backward

logger = logging.getLogger(__name__)

_NEAREST = {
    "AdamW": "torch.optim.Adam, whose weight_decay is AdamW's on the servers",
    "SparseAdam": "TableSettings(optimizer=AdamAsync(...)), which is the same",
    "RMSprop": "TableSettings(optimizer=AdamAsync(apply_sparse_rmsprop=True))",
    "NAdam": "TableSettings(optimizer=AdamAsync(use_nesterov=True))",
    "Adadelta": "torch.optim.Adagrad",
    "Rprop": "torch.optim.SGD",
    "ASGD": "torch.optim.SGD",
}

_CLASSES = {
    "exact_sgd": "torchrec.optim.SGD",
    "exact_adagrad": "torchrec.optim.Adagrad",
    "exact_row_wise_adagrad": "torchrec.optim.RowWiseAdagrad",
    "adam": "torchrec.optim.Adam",
    "lamb": "torchrec.optim.LAMB",
    "lars_sgd": "torchrec.optim.LarsSGD",
    "partial_row_wise_adam": "torchrec.optim.PartialRowWiseAdam",
    "partial_row_wise_lamb": "torchrec.optim.PartialRowWiseLAMB",
}
"""By the value of fbgemm's ``EmbOptimType``: the class of an optimizer."""

_DEFAULTS: dict[str, object] = {
    "eps": 1e-8,
    "momentum": 0.9,
    "eta": 0.001,
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0.0,
    "weight_decay_mode": 0,
    "max_norm": 0.0,
    "max_gradient": 1.0,
}
"""What fbgemm's kernels may be given, and its defaults."""

_OF_MEMORY = frozenset(
    {
        "cache_algorithm",
        "cache_load_factor",
        "cache_sets",
        "cache_reserved_memory",
        "cache_precision",
        "enforce_hbm",
        "record_cache_metrics",
        "gather_uvm_cache_stats",
        "bounds_check_mode",
        "uvm_non_rowwise_momentum",
        "uvm_host_mapped",
        "use_experimental_tbe",
        "prefetch_pipeline",
        "stats_reporter_config",
        "multipass_prefetch_config",
        "embedding_table_index_type",
        "embedding_table_offset_type",
    }
)
"""``fused_params`` that say where fbgemm keeps rows, and change no number."""

_MODES = {0: "NONE", 1: "L2", 2: "DECOUPLE"}
"""fbgemm's ``WeightDecayMode``, as far as servers have it."""


@dataclass(frozen=True, slots=True)
class FusedOptimizer:
    """What is done with the gradients of a table, by TorchRec's arguments.

    ``max_gradient`` clamps the gradient of each element of a collection's output to
    ``[-max_gradient, max_gradient]`` before it goes to the rows; 0: not at all.
    """

    optimizer: Optimizer
    max_gradient: float = 0.0
    stochastic_rounding: bool = True


@functools.cache
def _say_once(level: int, text: str) -> None:
    """Log a line, once in the process."""
    logger.log(level, "%s", text)


def read_optimizers(
    module: nn.Module, fused_params: Mapping[str, Any] | None = None
) -> dict[str, FusedOptimizer]:
    """Return the optimizers that a collection of TorchRec's gives tables, by table.

    Their arguments win over ``fused_params``.
    """
    common = {k: v for k, v in (fused_params or {}).items() if k != "optimizer"}
    if isinstance(module, FusedEmbeddingBagCollection | FusedEmbeddingCollection):
        cls, own = module.optimizer_type(), _over(common, module.optimizer_kwargs())
        names = [name.split(".")[-2] for name, _ in module.named_parameters()]
        return {name: translate(cls, own, table=name) for name in names}
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
            own = _over(common, arguments)
            optimizers[table] = translate(cls, own, table=table)
    return optimizers


def translate_fused_params(
    fused_params: Mapping[str, Any], optimizer: Optimizer | None
) -> FusedOptimizer:
    """Return what TorchRec's ``fused_params`` of a sharder say, as of fbgemm.

    Without an optimizer there, it is the given one, or fbgemm's default, SGD.
    """
    given = _renamed(fused_params)
    chosen = given.pop("optimizer", None)
    if chosen is not None and optimizer is not None:
        raise ConfigError(
            "A sharder must have one optimizer. Received: optimizer="
            f"{optimizer.describe()} and fused_params with {chosen}. Leave one out."
        )
    value = getattr(chosen, "value", chosen) or "exact_sgd"
    if value not in _CLASSES:
        raise ConfigError(
            f"The optimizer of fused_params must be one of {sorted(_CLASSES)}. "
            f"Received: {chosen}."
        )
    made = translate(resolve_name(_CLASSES[value]), given, table="fused_params")
    if optimizer is None:
        return made
    return FusedOptimizer(optimizer, made.max_gradient, made.stochastic_rounding)


def translate(
    cls: type[torch.optim.Optimizer], arguments: Mapping[str, Any], *, table: str
) -> FusedOptimizer:
    """Return what is done with gradients; arguments may be fbgemm's.

    Raises:
        ConfigError: the servers have no such optimizer, or lack an argument that would
            change what is computed.
    """
    optimizer, defaults = _twin(cls, table)
    given = _renamed(arguments)
    given.pop("optimizer", None)  # TorchRec writes fbgemm's name among the arguments
    clips = bool(given.pop("gradient_clipping", False))
    max_gradient = float(given.pop("max_gradient", 1.0)) if clips else 0.0
    if clips and not max_gradient > 0:
        raise ConfigError(
            f"Table {table!r}: max_gradient must be > 0 with gradient_clipping. "
            f"Received: {max_gradient}. Leave gradient_clipping out to clip nothing."
        )
    if not clips:
        given.pop("max_gradient", None)
    rounds = bool(given.pop("stochastic_rounding", True))
    chosen = {**defaults}
    if "betas" in defaults:
        beta1, beta2 = given.pop("betas", defaults["betas"])
        chosen["betas"] = given.pop("beta1", beta1), given.pop("beta2", beta2)
    if "decoupled_weight_decay" in defaults:
        given |= _decay(given, cls, table)
    for name, value in given.items():
        if name in defaults:
            chosen[name] = value
        else:
            _require_unread(name, value, cls, table)
    made = optimizer(**chosen)
    return FusedOptimizer(made, max_gradient, rounds)


def _renamed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with torch's name of the learning rate."""
    given = {**arguments}
    if "learning_rate" in given:
        given["lr"] = given.pop("learning_rate")
    return given


def _over(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a table, which win over common ones by any name."""
    own = _renamed(own)
    replaced = {"beta1", "beta2"} if "betas" in own else frozenset()
    rest = {k: v for k, v in _renamed(common).items() if k not in replaced}
    return {**rest, **own}


def _twin(
    cls: type[torch.optim.Optimizer], table: str
) -> tuple[type[Optimizer], Mapping[str, Any]]:
    """Return what the servers apply for a class, and its arguments by default."""
    twins = {
        resolve_name(name): (optimizer, defaults)
        for optimizer in OPTIMIZERS.classes.values()
        for name, defaults in optimizer.torch_twins.items()
    }
    if cls not in twins:
        nearest = _NEAREST.get(cls.__name__, "torch.optim.Adam")
        can = sorted({known.__name__ for known in twins})
        raise ConfigError(
            f"Table {table!r}: the optimizer must be one that the servers can apply, "
            f"of {can}. Received: {cls.__module__}.{cls.__name__}. The nearest is "
            f"{nearest}."
        )
    return twins[cls]


def _decay(
    given: dict[str, Any], cls: type[torch.optim.Optimizer], table: str
) -> dict[str, Any]:
    """Take the mode out of arguments; return the weight decay that is meant by it."""
    mode = _mode_of(given.pop("weight_decay_mode", 0), table)
    decay = given.get("weight_decay", 0.0)
    if decay and mode == 0:
        _say_once(
            logging.WARNING,
            f"{cls.__name__} reads no weight_decay={decay} without weight_decay_mode "
            "L2 or DECOUPLE, in fbgemm nor on the servers",
        )
    if (decay and mode) or given.get("max_norm"):
        _say_once(
            logging.INFO,
            f"{cls.__name__}: weight_decay and max_norm are what fbgemm's kernel on a "
            "GPU computes; its CPU kernel may ignore them",
        )
    decay = decay if mode else 0.0
    return {
        "weight_decay": decay,
        "decoupled_weight_decay": bool(decay) and mode == 2,
    }


def _mode_of(given: Any, table: str) -> int:
    mode: int = getattr(given, "value", given) or 0
    if mode not in _MODES:
        raise ConfigError(
            f"Table {table!r}: weight_decay_mode must be one of "
            f"{sorted(_MODES.values())}, which the servers have. Received: {given}."
        )
    return mode


def _require_unread(
    name: str, value: Any, cls: type[torch.optim.Optimizer], table: str
) -> None:
    """Warn of an argument that fbgemm reads nothing from; reject an unknown one."""
    if name == "output_dtype":
        if str(getattr(value, "value", value)).lower() in ("fp32", "none"):
            return
        raise ConfigError(
            f"Table {table!r}: output_dtype must be FP32. Received: {value}. "
            "wire_dtype=torch.float16 of the sharder lets rows travel as halves."
        )
    if name == "weight_decay_mode":
        value = _mode_of(value, table)
    if name in _OF_MEMORY or name.startswith("__register") or not value:
        return
    if name not in _DEFAULTS:
        raise ConfigError(
            f"Table {table!r}: {cls.__name__} on the servers has the arguments "
            f"{sorted(_twin(cls, table)[1])}. Received: {name}={value!r}. Leave it out."
        )
    if value != _DEFAULTS[name]:
        _say_once(
            logging.WARNING,
            f"{cls.__name__} of a table has no {name}={value}: fbgemm's kernel does "
            "not read it, and the servers do not either. TableSettings(optimizer=...) "
            "of the sharder has other optimizers",
        )
