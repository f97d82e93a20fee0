import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.embedding.optim import (
    FTRL,
    LAMB,
    LARS,
    OPTIMIZERS,
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
from persia_torchrec.embedding.usage import DynamicDim
from persia_torchrec.errors import ConfigError
from persia_torchrec.table import TableSpec
from tests.support.optimizers import EVERY_OPTIMIZER, optimizers_by_kind

EVERY_CLASS = [
    *(SGD, Adagrad, AdagradDecay, LARS, FTRL),
    *(Adam, AdamW, RowwiseAdam, LAMB, RowwiseLAMB, AdamAsync),
]
WITH_DECAY = [cls for cls in EVERY_CLASS if "weight_decay" in cls.__dataclass_fields__]

DRAWN = optimizers_by_kind(st.floats(0, 1e6), st.floats(1e-30, 1e6))


@given(st.one_of([*DRAWN.values()]))
def test_an_optimizer_comes_back_from_json_as_it_was(optimizer):
    text = json.dumps(optimizer.to_json())
    assert OPTIMIZERS.from_json(json.loads(text)) == optimizer


def test_every_class_is_among_the_optimizers_that_are_tested():
    assert {type(optimizer) for optimizer in EVERY_OPTIMIZER.values()} == {*EVERY_CLASS}
    assert [*DRAWN] == [cls.kind for cls in EVERY_CLASS]


def test_the_defaults_are_persias():
    assert SGD(0.1) == SGD(lr=0.1, momentum=0.0, weight_decay=0)
    assert Adagrad() == Adagrad(
        lr=1e-2,
        initial_accumulator_value=1e-2,
        weight_decay=0,
        g_square_momentum=1,
        eps=1e-10,
        vectorwise_shared=False,
    )
    assert Adam() == Adam(lr=1e-3, betas=(0.9, 0.999), weight_decay=0, eps=1e-8)


def test_the_defaults_equal_those_of_the_libraries_that_the_others_come_from():
    means = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
    assert AdamW() == AdamW(**means, weight_decay=1e-2)
    assert RowwiseAdam() == RowwiseAdam(**means, weight_decay=0)
    assert LAMB() == LAMB(**means, weight_decay=0)
    assert RowwiseLAMB() == RowwiseLAMB(**means, weight_decay=0)
    assert LARS() == LARS(lr=1e-2, eta=1e-3, momentum=0.9, weight_decay=0)
    assert AdamAsync() == AdamAsync(
        **means, apply_sparse_rmsprop=False, use_nesterov=False
    )
    assert FTRL() == FTRL(
        lr=1e-3, lr_power=-0.5, l1=0, l2=0, initial_accumulator_value=0.1, beta=0
    )
    assert AdagradDecay() == AdagradDecay(
        lr=1e-2, initial_accumulator_value=0.1, decay_step=100_000, decay_rate=0.9
    )


@pytest.mark.parametrize(
    "cls", [cls for cls in EVERY_CLASS if cls not in (SGD, Adagrad, Adam)]
)
def test_all_but_the_rate_is_given_by_name_where_libraries_disagree_on_order(cls):
    with pytest.raises(TypeError, match="positional argument"):
        cls(0.1, 0.2)


@pytest.mark.parametrize(
    ("optimizer", "initial_state"),
    [
        (SGD(0.1), []),
        (SGD(0.1, momentum=0.9), [0, 0, 0]),
        (Adagrad(initial_accumulator_value=0.5), [0.5, 0.5, 0.5]),
        (Adagrad(vectorwise_shared=True), [np.float32(0.01)]),
        (AdagradDecay(initial_accumulator_value=0.5), [0.5, 0.5, 0.5, 0]),
        (LARS(), [0, 0, 0]),
        (LARS(momentum=0), []),
        (FTRL(initial_accumulator_value=0.5), [0.5, 0.5, 0.5, 0, 0, 0]),
        (Adam(), [0] * 6),
        (AdamW(), [0] * 6),
        (AdamAsync(), [0] * 6),
        (LAMB(), [0] * 6),
        (RowwiseAdam(), [0] * 4),
        (RowwiseLAMB(), [0] * 4),
    ],
)
def test_a_row_carries_the_state_its_optimizer_needs(optimizer, initial_state):
    state = optimizer.initial_state(3)
    assert state.dtype == np.float32
    assert state.tolist() == initial_state


@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
def test_a_copy_with_another_rate_differs_in_nothing_else(name):
    optimizer = EVERY_OPTIMIZER[name]
    copy = dataclasses.replace(optimizer, lr=0.75)
    assert type(copy) is type(optimizer)
    expected = {**dataclasses.asdict(optimizer), "lr": 0.75}
    assert dataclasses.asdict(copy) == expected
    assert optimizer.lr == 0.1


@pytest.mark.parametrize("cls", EVERY_CLASS)
def test_a_copy_is_checked_as_the_first_was(cls):
    with pytest.raises(ConfigError, match=f"{cls.__name__}: lr must be finite and >"):
        dataclasses.replace(cls(lr=0.1), lr=-0.1)


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
@pytest.mark.parametrize(
    ("cls", "name"),
    [
        *((cls, "lr") for cls in EVERY_CLASS if cls is not FTRL),
        *((cls, "weight_decay") for cls in WITH_DECAY),
        *((cls, "eps") for cls in EVERY_CLASS if "eps" in cls.__dataclass_fields__),
        (Adagrad, "initial_accumulator_value"),
        *((FTRL, name) for name in ("l1", "l2", "beta", "initial_accumulator_value")),
    ],
)
def test_a_number_that_is_negative_or_not_finite_is_rejected(cls, name, value):
    message = rf"{cls.__name__}: {name} must be finite and >= 0\. Received: "
    with pytest.raises(ConfigError, match=message):
        cls(**{"lr": 0.1, name: value})


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize(
    ("cls", "name"),
    [(FTRL, "lr"), (LARS, "eta"), (AdagradDecay, "initial_accumulator_value")],
)
def test_a_number_that_is_divided_by_must_be_positive(cls, name, value):
    message = rf"{cls.__name__}: {name} must be finite and > 0\. Received: "
    with pytest.raises(ConfigError, match=message):
        cls(**{"lr": 0.1, name: value})


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        *(
            (cls, {"momentum": value}, rf"{cls.__name__}: momentum must be in \[0, 1\)")
            for cls in (SGD, LARS)
            for value in (1.0, -0.1, math.nan)
        ),
        (Adagrad, {"g_square_momentum": 0}, r"g_square_momentum must be in \(0, 1\]"),
        (Adagrad, {"g_square_momentum": 1.1}, r"must be in \(0, 1\]"),
        *(
            (
                AdagradDecay,
                {"decay_step": value},
                r"decay_step must be an integer in \[1, ",
            )
            for value in (0, -1, 10.0, True)
        ),
        *(
            (AdagradDecay, {"decay_rate": value}, r"decay_rate must be in \(0, 1\)")
            for value in (0, 1, math.nan)
        ),
        *(
            (FTRL, {"lr_power": value}, "FTRL: lr_power must be finite and <= 0")
            for value in (0.5, -math.inf, math.nan)
        ),
        *(
            (cls, {"betas": value}, f"{cls.__name__}: betas must be two numbers in")
            for cls in (Adam, AdamW, RowwiseAdam, AdamAsync, LAMB, RowwiseLAMB)
            for value in ((0.9, 1.0), (-0.1, 0.9), (0.9,), (0.9, 0.9, 0.9))
        ),
        (Adagrad, {"vectorwise_shared": 1}, "vectorwise_shared must be True or False"),
        (AdamAsync, {"use_nesterov": 1}, "use_nesterov must be True or False"),
        (AdamAsync, {"apply_sparse_rmsprop": "no"}, "rmsprop must be True or False"),
        (
            AdamAsync,
            {"use_nesterov": True, "apply_sparse_rmsprop": True},
            "use_nesterov must be False with apply_sparse_rmsprop",
        ),
    ],
)
def test_an_argument_out_of_its_range_is_rejected(cls, arguments, message):
    with pytest.raises(ConfigError, match=message):
        cls(**{"lr": 0.1, **arguments})


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({}, r"one of \['adagrad', 'adagrad_decay', 'adam', .*\]\. Received: \{\}"),
        ({"kind": "lion"}, "Received: {'kind': 'lion'}"),
        (
            {"kind": "sgd", "lr": 1, "nesterov": True},
            "SGD .*unexpected keyword argument 'nesterov'",
        ),
        ({"kind": "sgd", "lr": -1}, "SGD: lr must be finite"),
        ({"kind": "sgd"}, "SGD must be complete"),
        ({"kind": "adamw", "lr": "1"}, "AdamW: lr must be finite and >= 0"),
        ({"kind": "lamb", "_": 1}, "LAMB .*unexpected keyword argument '_'"),
    ],
)
def test_a_description_of_no_optimizer_is_rejected(description, message):
    with pytest.raises(ConfigError, match=message):
        OPTIMIZERS.from_json(description)


def test_the_base_class_is_no_optimizer():
    with pytest.raises(TypeError, match="abstract"):
        Optimizer(0.1)


def test_numbers_of_numpy_are_numbers():
    optimizer = SGD(np.float32(0.5), momentum=np.float64(0.25))
    assert optimizer == SGD(0.5, momentum=0.25)
    assert type(optimizer.lr) is float


@pytest.mark.parametrize(
    "optimizer",
    [LAMB(), RowwiseLAMB(), LARS(), Adagrad(vectorwise_shared=True, max_norm=1.0)],
)
def test_an_optimizer_that_reads_the_norm_of_a_row_takes_no_blocks(optimizer):
    given = {"name": "t", "dim": 4, "optimizer": optimizer}
    assert TableSpec(**given, dynamic=DynamicDim())
    with pytest.raises(ConfigError, match="'t': an optimizer that reads the norm of"):
        TableSpec(**given, dynamic=DynamicDim(blocks=2))
