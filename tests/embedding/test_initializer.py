import json
import math
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.embedding.initializer import (
    INITIALIZERS,
    Constant,
    InverseSqrtDim,
    Normal,
    TruncatedNormal,
    Uniform,
)
from persia_torchrec.errors import ConfigError

numbers = st.floats(-1e6, 1e6) | st.integers(-5, 5)
non_negative = st.floats(0, 1e6)
positive = st.floats(1e-6, 1e6)
initializers = st.one_of(
    st.tuples(numbers, numbers).map(sorted).map(lambda bounds: Uniform(*bounds)),
    st.just(InverseSqrtDim()),
    st.builds(Normal, numbers, non_negative),
    st.builds(TruncatedNormal, numbers, non_negative, positive),
    st.builds(Constant, numbers),
)


@given(initializers)
def test_an_initializer_comes_back_from_json_as_it_was(initializer):
    text = json.dumps(initializer.to_json())
    assert INITIALIZERS.from_json(json.loads(text)) == initializer


def test_the_defaults_stay_near_zero():
    assert Uniform() == Uniform(lower=-0.01, upper=0.01)
    assert Normal() == Normal(mean=0.0, std=0.01)
    assert TruncatedNormal() == TruncatedNormal(mean=0.0, std=0.01, bound=2.0)


def test_an_initializer_does_not_change():
    with pytest.raises(FrozenInstanceError):
        Uniform().lower = 0.0


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        (Uniform, {"lower": 0.02}, r"Uniform: lower must be <= upper \(0.01\)\. Rec"),
        (Uniform, {"lower": -math.inf}, "Uniform: lower must be a finite number"),
        (Uniform, {"upper": math.nan}, "Uniform: upper must be a finite number"),
        (Uniform, {"upper": 10**400}, "Uniform: upper must be a finite number"),
        (Uniform, {"upper": 1e39}, "Uniform: upper must be a finite number"),
        (Uniform, {"upper": "1"}, "Uniform: upper must be a finite .*Received: '1'"),
        (Uniform, {"upper": True}, "Uniform: upper must be a finite number"),
        (Normal, {"mean": math.nan}, "Normal: mean must be a finite number"),
        (
            Normal,
            {"std": -0.1},
            r"Normal: std must be finite and >= 0\. Received: -0.1",
        ),
        (TruncatedNormal, {"mean": None}, "TruncatedNormal: mean must be a finite"),
        (TruncatedNormal, {"std": -1}, "TruncatedNormal: std must be finite and >= 0"),
        (
            TruncatedNormal,
            {"bound": 0},
            "TruncatedNormal: bound must be finite and > 0",
        ),
        (Constant, {"value": math.inf}, "Constant: value must be a finite number"),
    ],
)
def test_an_argument_out_of_its_range_is_rejected(cls, arguments, message):
    with pytest.raises(ConfigError, match=message):
        cls(**arguments)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (None, r"one of \['constant', 'inverse.*'uniform'\]\. Received: None"),
        ([], "An initializer must be an object whose kind is"),
        ({}, r"An initializer must be an object .*Received: \{\}"),
        ({"kind": ["uniform"]}, "An initializer must be an object whose kind is"),
        ({"kind": "zipf"}, "Received: {'kind': 'zipf'}"),
        (
            {"kind": "uniform", "mean": 1},
            "Uniform .*unexpected keyword argument 'mean'",
        ),
        ({"kind": "constant"}, "arguments of Constant must be complete"),
        ({"kind": "normal", "std": -1}, "Normal: std must be finite and >= 0"),
    ],
)
def test_a_description_of_no_initializer_is_rejected(description, message):
    with pytest.raises(ConfigError, match=message):
        INITIALIZERS.from_json(description)


def test_a_kind_that_another_class_has_is_rejected():
    class OtherConstant(Constant):
        pass

    with pytest.raises(
        ConfigError, match=r"one class\. .*OtherConstant with 'constant'"
    ):
        INITIALIZERS.register(OtherConstant)
    assert INITIALIZERS.classes["constant"] is Constant
