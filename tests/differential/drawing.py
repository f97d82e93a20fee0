"""Models drawn at random: a seed is a model, its optimizers and its training."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torchrec.optim
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

from persia_torchrec.embedding.optim import (
    FTRL,
    LAMB,
    LARS,
    SGD,
    Adagrad,
    AdagradDecay,
    Adam,
    AdamAsync,
    AdamW,
    Optimizer,
    RowwiseAdam,
    RowwiseLAMB,
)

PLANTS = "gradient", "id"
IN_BACKWARD, SOME_IN_BACKWARD = "in backward", "some in backward, else fused_params"
FUSED_PARAMS, FUSED_MODULE = "fused_params", "fused module"
SHARDER, TABLES = "optimizer of the sharder", "settings of tables"
SOME_NAMED, NONE_NAMED = "some in backward, else none", "none named"
WAYS = (
    *(IN_BACKWARD, SOME_IN_BACKWARD, FUSED_PARAMS, FUSED_MODULE),
    *(SHARDER, TABLES, SOME_NAMED, NONE_NAMED),
)
"""How tables get their optimizers."""
HIDING = "none", "none named"
OF_TORCHREC = IN_BACKWARD, SOME_IN_BACKWARD, FUSED_PARAMS, FUSED_MODULE, SOME_NAMED
HALVES = {"FP16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Choice:
    """An optimizer of a table: as TorchRec has it, and by its formula.

    ``cls`` and ``arguments`` are those of TorchRec, None where it has no such one.
    ``max_gradient``, if not 0, clips the gradients of outputs.
    """

    formula: Optimizer
    cls: type[torch.optim.Optimizer] | None = None
    arguments: Mapping[str, Any] | None = None
    max_gradient: float = 0.0

    @property
    def runs_in_plain(self) -> bool:
        """Whether fbgemm has its kernel on a CPU."""
        kernels = "SGD", "Adagrad", "RowWiseAdagrad"
        given = self.arguments or {}
        has_kernel = self.cls is not None and self.cls.__name__ in kernels
        return has_kernel and "weight_decay" not in given

    def scaled(self, factor: float) -> Optimizer:
        """Return the formula with another rate."""
        return replace(self.formula, lr=self.formula.lr * factor)


OF_FBGEMM = Choice(SGD(0.01), torchrec.optim.SGD, {"lr": 0.01})
"""What trains a table without a named optimizer."""


@dataclass(frozen=True)
class Table:
    """A table of a collection; ``frozen_at`` is the step from which it rests.

    ``is_applied``: it has its optimizer by ``apply_optimizer_in_backward``.
    """

    name: str
    dim: int
    num_rows: int
    features: tuple[str, ...]
    pooling: str
    dtype: str
    choice: Choice
    is_applied: bool = False
    frozen_at: int | None = None
    requires_grad: bool = True


@dataclass(frozen=True)
class Collection:
    """An ``EmbeddingBagCollection``, or an ``EmbeddingCollection``."""

    path: str
    has_bags: bool
    tables: tuple[Table, ...]
    is_weighted: bool = False

    @property
    def features(self) -> list[tuple[Table, str]]:
        """Return the features in the order of the output's columns."""
        return [(table, key) for table in self.tables for key in table.features]

    @property
    def keys(self) -> list[str]:
        """Return the keys of its batches, each once."""
        return list(dict.fromkeys(key for _, key in self.features))

    def column(self, table: Table, key: str) -> str:
        """Return how TorchRec names an output."""
        several = sum(key in other.features for other in self.tables) > 1
        return f"{key}@{table.name}" if several else key


@dataclass(frozen=True)
class Drawn:
    """A model and its training.

    ``common`` is the optimizer of ``fused_params`` or of the sharder, where these have
    one, and ``num_steps`` that of each trainer. ``has_groups`` says whether the dense
    half and the tables are in one ``CombinedOptimizer``, whose rates fall at
    ``falls_at``.
    """

    seed: int
    collections: tuple[Collection, ...]
    way: str
    common: Choice
    num_steps: tuple[int, ...]
    num_servers: int
    has_groups: bool
    falls_at: int | None
    momentum: float
    is_pipelined: bool
    is_loaded: bool
    is_vbe: bool
    has_int32: bool
    plant: str | None = None

    @property
    def is_uneven(self) -> bool:
        return len({*self.num_steps}) > 1

    @property
    def tables(self) -> list[tuple[Collection, Table]]:
        return [(c, table) for c in self.collections for table in c.tables]

    @property
    def dtypes(self) -> set[str]:
        return {table.dtype for _, table in self.tables}

    @property
    def runs_in_plain(self) -> bool:
        """Whether plain TorchRec trains it on a CPU, by kernels without a defect."""
        has_kernels = all(
            table.choice.runs_in_plain
            and table.frozen_at is None
            and table.dim % 4 == 0
            and table.dtype != "BF16"
            and not (collection.is_weighted and table.pooling == "MEAN")
            and (collection.has_bags or self.way != FUSED_MODULE)
            for collection, table in self.tables
        )
        return has_kernels and not self.is_vbe and not self.is_uneven

    @property
    def kinds(self) -> list[str]:
        """Return what the model has, by what the table of a run counts."""
        tables = [table for _, table in self.tables]
        has = {f"optimizer: {type(t.choice.formula).__name__}" for t in tables}
        has |= {f"dtype: {table.dtype}" for table in tables}
        names = [table.name for table in tables]
        marks = {
            "bags": any(c.has_bags for c in self.collections),
            "sequences": any(not c.has_bags for c in self.collections),
            "two collections": len(self.collections) > 1,
            "two collections with tables of one name": len({*names}) < len(names),
            "pooling: MEAN": any(t.pooling == "MEAN" for t in tables),
            "weighted bags": any(c.is_weighted for c in self.collections),
            "VBE": self.is_vbe,
            "frozen tables": any(t.frozen_at is not None for t in tables),
            "requires_grad_(False)": not all(t.requires_grad for t in tables),
            "clipped gradients": any(t.choice.max_gradient for t in tables),
            "CombinedOptimizer, rates that fall": self.has_groups,
            "TrainPipelineSparseDist": self.is_pipelined,
            "trainers that end earlier": self.is_uneven,
            "int32 ids": self.has_int32,
        }
        has |= {mark for mark, holds in marks.items() if holds}
        return [f"way: {self.way}", *sorted(has), f"trainers: {len(self.num_steps)}"]

    def __str__(self) -> str:
        return "; ".join(self.kinds)


def draw(seed: int, *, most_trainers: int = 3, plant: str | None = None) -> Drawn:
    """Draw the model of a seed.

    With a planted fault no table rests, clips or is in 16 bits, which may hide it.
    """
    rng = random.Random(seed)
    is_simple = rng.random() < 0.6  # for plain TorchRec
    # A step at a rate of 0.01 may hide a gradient, and so may one of LARS.
    way = rng.choice([w for w in WAYS if not (plant and w.endswith(HIDING))])
    common, choose = _chooser(rng, way, is_simple=is_simple, plant=plant)
    num_trainers = min(rng.choice([1, 1, 2, 3]), most_trainers)
    num_steps = rng.randint(3, 7)
    uneven = not is_simple and num_trainers > 1 and rng.random() < 0.6
    steps = [rng.randint(0, num_steps) if uneven else num_steps for _ in range(3)]
    has_groups = rng.random() < 0.5
    for_fbgemm = is_simple or way == FUSED_MODULE
    kinds = {"is_simple": is_simple, "for_fbgemm": for_fbgemm}
    collections = _collections(rng, choose, num_steps, **kinds)
    clips = any(t.choice.max_gradient for c in collections for t in c.tables)
    drawn = Drawn(
        seed=seed,
        collections=collections,
        way=way,
        common=common,
        num_steps=(num_steps, *steps[: num_trainers - 1]),
        num_servers=rng.randint(1, 3),
        has_groups=has_groups,
        falls_at=rng.randrange(num_steps) if has_groups else None,
        momentum=rng.choice([0.0, 0.9]),
        is_pipelined=rng.random() < 0.3 and not uneven and plant is None,
        is_loaded=rng.random() < 0.5,
        is_vbe=not is_simple and not clips and rng.random() < 0.3,
        has_int32=rng.random() < 0.2,
        plant=plant,
    )
    return _revealing(drawn) if plant else drawn


def _revealing(drawn: Drawn) -> Drawn:
    """Return a model that shows each fault, in one of whose batches are ids."""

    def unclipped(choice: Choice) -> Choice:
        arguments = dict(choice.arguments or {})
        arguments.pop("gradient_clipping", None)
        return replace(choice, arguments=arguments, max_gradient=0.0)

    def table(given: Table) -> Table:
        choice = unclipped(given.choice)
        return replace(given, choice=choice, frozen_at=None, dtype="FP32")

    collections = tuple(
        replace(c, tables=tuple(map(table, c.tables))) for c in drawn.collections
    )
    num_steps = tuple(num + 5 for num in drawn.num_steps)
    more = {"num_steps": num_steps, "common": unclipped(drawn.common)}
    return replace(drawn, collections=collections, **more)


def _chooser(
    rng: random.Random, way: str, *, is_simple: bool, plant: str | None
) -> tuple[Choice, Callable[[bool], tuple[Choice, bool]]]:
    """Return a common optimizer, and what draws that of a table and whether it is own.

    The drawing is told if the table begins a collection. Tables with optimizers of
    their own in the backward pass clip as ``fused_params`` say.
    """

    def draw_one() -> Choice:
        return _choice(rng, way, is_simple=is_simple, plant=plant)

    common, varies = draw_one(), rng.random() < 0.7
    if way in (SOME_NAMED, NONE_NAMED):
        common, varies = OF_FBGEMM, True

    def choose(is_first: bool) -> tuple[Choice, bool]:
        nonlocal common
        is_some = way in (SOME_IN_BACKWARD, SOME_NAMED)
        is_applied = way == IN_BACKWARD or (is_some and rng.random() < 0.5)
        if way == FUSED_MODULE and is_first:
            common = draw_one()
        if not ((is_applied or way == TABLES) and varies):
            return common, is_applied
        own = draw_one()
        if way == SOME_IN_BACKWARD and not own.max_gradient:
            own = replace(own, max_gradient=common.max_gradient)
        return own, is_applied

    return common, choose


def _choice(
    rng: random.Random, way: str, *, is_simple: bool, plant: str | None
) -> Choice:
    lr, eps = 10 ** rng.uniform(-2, -0.5), 10 ** rng.uniform(-3, -1)
    decay = rng.choice([0.0, 10 ** rng.uniform(-3, -1)])
    betas = rng.choice([(0.9, 0.999), (rng.uniform(0.5, 0.95), rng.uniform(0.9, 0.99))])
    kinds = [_sgd, _adagrad, _row_wise_adagrad]
    # A fused module makes a kernel of its own, for the CPU.
    if not is_simple and way != FUSED_MODULE:
        kinds = [_adam, _lamb, _row_wise_adam, _row_wise_lamb, _decayed]
        kinds += [] if plant else [_lars]
        if way in (SHARDER, TABLES):
            kinds += [_sgd_of_ours, _adagrad_of_ours, _decaying, _ftrl]
            kinds += [_adam_of_ours, _async]
    made = rng.choice(kinds)(rng, lr, {"eps": eps, "betas": betas, "decay": decay})
    if way == FUSED_MODULE:
        of_torch = {"SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad}
        made = replace(made, cls=of_torch.get(made.cls.__name__, made.cls))
    takes_more = way in (FUSED_PARAMS, FUSED_MODULE) or (
        way in OF_TORCHREC and made.cls.__module__.startswith("torchrec")
    )
    return (
        _clipped(made, 10 ** rng.uniform(-2, 0))
        if takes_more and rng.random() < 0.2
        else made
    )


def _clipped(choice: Choice, bound: float) -> Choice:
    more = {"gradient_clipping": True, "max_gradient": bound}
    return replace(choice, arguments={**choice.arguments, **more}, max_gradient=bound)


def _sgd(rng, lr, _) -> Choice:
    return Choice(
        SGD(lr), rng.choice([torch.optim.SGD, torchrec.optim.SGD]), {"lr": lr}
    )


def _adagrad(rng, lr, given) -> Choice:
    formula = Adagrad(lr, 0.0, eps=given["eps"])
    cls = rng.choice([torch.optim.Adagrad, torchrec.optim.Adagrad])
    return Choice(formula, cls, {"lr": lr, "eps": given["eps"]})


def _row_wise_adagrad(_, lr, given) -> Choice:
    formula = Adagrad(lr, 0.0, eps=given["eps"], vectorwise_shared=True)
    arguments = {"lr": lr, "eps": given["eps"]}
    return Choice(formula, torchrec.optim.RowWiseAdagrad, arguments)


def _decayed(_, lr, given) -> Choice:
    """Return fbgemm's RowWiseAdagrad with its L2 penalty, which its CPU ignores."""
    decay = given["decay"] or 0.01
    more = {"eps": given["eps"], "weight_decay": decay}
    formula = Adagrad(lr, 0.0, vectorwise_shared=True, **more)
    arguments = {"lr": lr, "weight_decay_mode": WeightDecayMode.L2, **more}
    return Choice(formula, torchrec.optim.RowWiseAdagrad, arguments)


def _adam(rng, lr, given) -> Choice:
    cls = rng.choice([torch.optim.Adam, torchrec.optim.Adam])
    return _of_moments(AdamW, cls, lr, given)


def _lamb(_, lr, given) -> Choice:
    return _of_moments(LAMB, torchrec.optim.LAMB, lr, given)


def _row_wise_adam(_, lr, given) -> Choice:
    return _of_moments(RowwiseAdam, torchrec.optim.PartialRowWiseAdam, lr, given)


def _row_wise_lamb(_, lr, given) -> Choice:
    return _of_moments(RowwiseLAMB, torchrec.optim.PartialRowWiseLAMB, lr, given)


def _of_moments(formula, cls, lr, given) -> Choice:
    more = {"eps": given["eps"], "weight_decay": given["decay"]}
    beta1, beta2 = given["betas"]
    made = formula(lr, betas=(beta1, beta2), **more)
    of_torch = {"betas": (beta1, beta2)}
    if not cls.__module__.startswith("torch.optim"):
        of_torch = {"beta1": beta1, "beta2": beta2}
    return Choice(made, cls, {"lr": lr, **more, **of_torch})


def _lars(rng, lr, _) -> Choice:
    # With no decay its step has the same length for any gradient.
    more = {"weight_decay": 10 ** rng.uniform(-2, -1), "eta": rng.uniform(0.05, 0.5)}
    more["momentum"] = rng.choice([0.0, 0.5, 0.9])
    return Choice(LARS(lr, **more), torchrec.optim.LarsSGD, {"lr": lr, **more})


def _sgd_of_ours(rng, lr, given) -> Choice:
    momentum = rng.choice([0.0, 0.5, 0.9])
    return Choice(SGD(lr, momentum=momentum, weight_decay=given["decay"]))


def _adagrad_of_ours(rng, lr, given) -> Choice:
    start, kept = rng.choice([0.0, 0.01, 0.5]), rng.choice([1.0, 0.9])
    more = {"weight_decay": given["decay"], "eps": given["eps"]}
    more["vectorwise_shared"] = rng.random() < 0.5
    return Choice(Adagrad(lr, start, g_square_momentum=kept, **more))


def _decaying(rng, lr, _) -> Choice:
    more = {"decay_step": rng.randint(1, 4), "decay_rate": rng.uniform(0.2, 0.9)}
    return Choice(AdagradDecay(lr, **more))


def _ftrl(rng, lr, given) -> Choice:
    more = {"l1": rng.choice([0.0, 0.01]), "l2": given["decay"], "beta": given["eps"]}
    return Choice(FTRL(lr, initial_accumulator_value=rng.choice([0.0, 0.1]), **more))


def _adam_of_ours(_, lr, given) -> Choice:
    more = {"betas": given["betas"], "eps": given["eps"]}
    return Choice(Adam(lr, weight_decay=given["decay"], **more))


def _async(rng, lr, given) -> Choice:
    option = rng.choice(["use_nesterov", "apply_sparse_rmsprop", None])
    more = {option: True} if option else {}
    return Choice(AdamAsync(lr, betas=given["betas"], eps=given["eps"], **more))


def _collections(
    rng: random.Random,
    choose: Callable[[bool], tuple[Choice, bool]],
    num_steps: int,
    *,
    is_simple: bool,
    for_fbgemm: bool,
) -> tuple[Collection, ...]:
    """Draw one collection of a kind, or two, which may name the same tables."""
    kinds = rng.choice([(True,), (False,), (True, False), (False, True)])
    freezes = not is_simple and rng.random() < 0.4
    shares_names = rng.random() < 0.5
    halves = rng.random() < 0.15
    dtypes = (["FP16", "FP32"] if is_simple else [*HALVES]) if halves else ["FP32"]
    collections = []
    for number, has_bags in enumerate(kinds):
        prefix = "t" if shares_names else f"t{number}"
        keys = [f"f{key}" for key in range(rng.randint(1, 4))]
        dims = [4, 8, 12, 32] if for_fbgemm else [1, 3, 4, 8, 16]
        dim = rng.choice(dims)  # all of an EC have the same
        weighted, tables = has_bags and rng.random() < 0.3, []
        poolings = ["SUM"] if weighted and is_simple else ["SUM", "MEAN"]
        for index in range(rng.randint(1, min(3, len(keys)))):
            features = rng.sample(keys, rng.randint(1, min(2, len(keys))))
            frozen = rng.choice([0, rng.randrange(num_steps)]) if freezes else None
            choice, is_applied = choose(index == 0)
            table = Table(
                name=f"{prefix}{index}",
                dim=rng.choice(dims) if has_bags else dim,
                num_rows=rng.randint(4, 40),
                features=tuple(features),
                pooling=rng.choice(poolings) if has_bags else "",
                dtype=rng.choice(dtypes),
                choice=choice,
                is_applied=is_applied,
                frozen_at=frozen if rng.random() < 0.5 else None,
                requires_grad=rng.random() < 0.9,
            )
            tables.append(table)
        path = "first" if number == 0 else "second"
        collections.append(Collection(path, has_bags, tuple(tables), weighted))
    return tuple(collections)
