import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.embedding.optim import (
    SGD,
    Adagrad,
    Adam,
    Optimizer,
    optimizer_from_json,
    optimizer_to_json,
)
from persia_torchrec.errors import ConfigError

non_negative = st.floats(0, 1e6)
below_one = st.floats(0, 1, exclude_max=True)
optimizers = st.one_of(
    st.builds(SGD, non_negative, below_one, non_negative),
    st.builds(
        Adagrad,
        non_negative,
        non_negative,
        non_negative,
        st.floats(0, 1, exclude_min=True),
        non_negative,
        st.booleans(),
    ),
    st.builds(
        Adam,
        non_negative,
        st.tuples(below_one, below_one),
        non_negative,
        non_negative,
    ),
)


@given(optimizers)
def test_an_optimizer_comes_back_from_json_as_it_was(optimizer):
    text = json.dumps(optimizer_to_json(optimizer))
    assert optimizer_from_json(json.loads(text)) == optimizer


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


@pytest.mark.parametrize(
    ("optimizer", "num_state_floats", "initial_state"),
    [
        (SGD(0.1), 0, 0.0),
        (SGD(0.1, momentum=0.9), 8, 0.0),
        (Adagrad(initial_accumulator_value=0.5), 8, 0.5),
        (Adagrad(vectorwise_shared=True), 1, 0.01),
        (Adam(), 16, 0.0),
    ],
)
def test_a_row_carries_the_state_its_optimizer_needs(
    optimizer, num_state_floats, initial_state
):
    assert optimizer.num_state_floats(8) == num_state_floats
    assert optimizer.initial_state() == initial_state


@pytest.mark.parametrize("optimizer", [SGD, Adagrad, Adam])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_a_rate_that_is_negative_or_not_finite_is_refused(optimizer, name, value):
    arguments = {"lr": 0.1, name: value}
    message = rf"{optimizer.__name__}: {name} must be finite and >= 0\. Received: "
    with pytest.raises(ConfigError, match=message):
        optimizer(**arguments)


@pytest.mark.parametrize(
    ("optimizer", "arguments", "message"),
    [
        (SGD, {"lr": 1, "momentum": 1.0}, r"SGD: momentum must be in \[0, 1\)"),
        (SGD, {"lr": 1, "momentum": -0.1}, r"SGD: momentum must be in \[0, 1\)"),
        (Adagrad, {"eps": -1}, "Adagrad: eps must be finite"),
        (
            Adagrad,
            {"initial_accumulator_value": -1},
            "Adagrad: initial_accumulator_value must be finite",
        ),
        (Adagrad, {"g_square_momentum": 0}, r"g_square_momentum must be in \(0, 1\]"),
        (Adagrad, {"g_square_momentum": 1.1}, r"must be in \(0, 1\]"),
        (Adam, {"eps": math.nan}, "Adam: eps must be finite"),
        (Adam, {"betas": (0.9, 1.0)}, r"Adam: betas must be two numbers in \[0, 1\)"),
        (Adam, {"betas": (0.9,)}, r"Adam: betas must be two numbers"),
    ],
)
def test_an_argument_out_of_its_range_is_refused(optimizer, arguments, message):
    with pytest.raises(ConfigError, match=message):
        optimizer(**arguments)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({}, r"one of \['adagrad', 'adam', 'sgd'\]\. Received: None"),
        ({"kind": "lion"}, "Received: 'lion'"),
        ({"kind": "sgd", "lr": 1, "nesterov": True}, "SGD has no argument 'nesterov'"),
        ({"kind": "sgd", "lr": -1}, "SGD: lr must be finite"),
    ],
)
def test_a_description_of_no_optimizer_is_refused(description, message):
    with pytest.raises(ConfigError, match=message):
        optimizer_from_json(description)


def test_the_base_class_is_no_optimizer():
    with pytest.raises(TypeError, match="abstract"):
        Optimizer()
