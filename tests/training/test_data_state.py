"""What a checkpoint has of generators, buffers and values of a script."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from persia_torchrec.errors import CheckpointError, ConfigError
from persia_torchrec.training.checkpoint import state_bytes
from persia_torchrec.training.data_state import (
    Buffers,
    random_state,
    require_savable,
    set_generator,
    set_random_state,
    state_of_generator,
    unpack,
)

DRAWS = {
    "torch": (
        lambda: torch.Generator().manual_seed(3),
        lambda g: torch.rand(2, generator=g).tolist(),
    ),
    "numpy": (lambda: np.random.default_rng(3), lambda g: g.random(2).tolist()),
    "mersenne": (
        lambda: np.random.Generator(np.random.MT19937(3)),
        lambda g: g.random(2).tolist(),
    ),
    "legacy": (lambda: np.random.RandomState(3), lambda g: g.normal(size=3).tolist()),
    "python": (lambda: random.Random(3), lambda g: g.random()),
}


def through_a_file(state):
    return unpack(state_bytes({"one": state}))["one"]


@pytest.mark.parametrize(("make", "draw"), DRAWS.values(), ids=list(DRAWS))
def test_a_generator_continues_where_it_was(make, draw):
    generator = make()
    draw(generator)
    state = through_a_file(state_of_generator(generator))
    due = [draw(generator), draw(generator)]
    other = make()
    set_generator(other, state)
    assert [draw(other), draw(other)] == due


def test_all_random_numbers_of_a_script_continue():
    own = np.random.default_rng(5)
    state = through_a_file(random_state({"own": own}))

    def draw():
        of_numpy = np.random.rand()  # noqa: NPY002  # as scripts draw
        return [random.random(), of_numpy, torch.rand(1).item(), own.random()]

    due = draw()
    set_random_state(state, {"own": own})
    assert draw() == due


@pytest.mark.parametrize(
    ("value", "lacks"), [(object(), "state_dict"), (iter([1]), "state_dict")]
)
def test_a_value_that_cannot_be_saved_is_named(value, lacks):
    require_savable({"number": 3, "model": nn.Linear(1, 1), "rng": random.Random()})
    with pytest.raises(ConfigError, match=rf"Received: 'mine', a \w+ without {lacks}"):
        require_savable({"mine": value})


def test_buffers_are_those_of_the_model_without_its_parameters():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    buffers = Buffers(model).state_dict()
    assert {*buffers} == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    changed = {**buffers, "1.running_mean": torch.full((3,), 7.0)}
    Buffers(model).load_state_dict(changed)
    assert model[1].running_mean.tolist() == [7.0] * 3


def test_buffers_of_another_shape_are_an_error_or_begin_again(caplog):
    model = nn.BatchNorm1d(3)
    wider = {"running_mean": torch.ones(4), "running_var": torch.full((3,), 2.0)}
    with pytest.raises(CheckpointError, match=r"running_mean has shape \[3\], and had"):
        Buffers(model).load_state_dict(wider)
    Buffers(model, resets=True).load_state_dict(wider)
    assert model.running_mean.tolist() == [0.0] * 3
    assert model.running_var.tolist() == [2.0] * 3
    assert "reset to their initial values: running_mean" in caplog.text


def test_bytes_that_are_no_state_are_an_error():
    with pytest.raises(ConfigError, match="must consist of tensors, numbers"):
        unpack(b"no file of torch")
