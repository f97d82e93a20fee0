"""Dense optimizers of the PLE example move as the rows of a store, step by step."""

import io

import pytest
import torch

from examples.ple import dense_optimizers as optim
from persia_torchrec import SGD, Adagrad, Adam
from persia_torchrec.embedding.optim import AdagradDecay, AdamAsync
from persia_torchrec.errors import ConfigError
from tests.support.dense_twins import DIM, IDS, gradients, move_both

pytestmark = pytest.mark.slow

PAIRS = {
    "adam": (Adam(0.01), torch.optim.Adam, {"lr": 0.01}),
    "sgd": (SGD(0.1), torch.optim.SGD, {"lr": 0.1}),
    "adagrad": (
        Adagrad(0.1, 0.1, eps=1e-10),
        torch.optim.Adagrad,
        {"lr": 0.1, "initial_accumulator_value": 0.1},
    ),
    "adam async": (AdamAsync(0.01), optim.AdamAsync, {"lr": 0.01}),
    "adam async, nesterov": (
        AdamAsync(0.01, betas=(0.8, 0.9), eps=1e-3, use_nesterov=True),
        optim.AdamAsync,
        {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-3, "use_nesterov": True},
    ),
    "adam async, rmsprop": (
        AdamAsync(0.01, eps=1e-3, apply_sparse_rmsprop=True),
        optim.AdamAsync,
        {"lr": 0.01, "eps": 1e-3, "apply_sparse_rmsprop": True},
    ),
    "adagrad decay": (AdagradDecay(0.1), optim.AdagradDecay, {"lr": 0.1}),
    "adagrad decay, periods": (
        AdagradDecay(0.1, decay_step=7, decay_rate=0.5),
        optim.AdagradDecay,
        {"lr": 0.1, "decay_step": 7, "decay_rate": 0.5},
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_dense_parameter_moves_as_rows_that_are_in_every_batch(name):
    of_rows, dense, arguments = PAIRS[name]
    move_both(of_rows, lambda parameters: dense(parameters, **arguments))


@pytest.mark.parametrize("name", ["adam async, nesterov", "adagrad decay, periods"])
def test_a_state_dict_continues_where_it_was(name):
    _, dense, arguments = PAIRS[name]

    def train(parameter, optimizer, steps):
        for step in steps:
            parameter.grad = torch.from_numpy(gradients(step))
            optimizer.step()

    whole = torch.nn.Parameter(torch.ones(len(IDS), DIM))
    optimizer = dense([whole], **arguments)
    train(whole, optimizer, range(5))
    data = io.BytesIO()
    torch.save(optimizer.state_dict(), data)
    data.seek(0)
    resumed = torch.nn.Parameter(whole.detach().clone())
    again = dense([resumed], lr=1.0)
    again.load_state_dict(torch.load(data, weights_only=True))
    train(whole, optimizer, range(5, 10))
    train(resumed, again, range(5, 10))
    assert torch.equal(whole, resumed)


def test_parameters_without_a_gradient_stay_and_a_closure_gives_the_loss():
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = optim.AdamAsync([used, unused], lr=0.1)

    def closure():
        loss = used.square().sum()
        loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) == 2
    assert torch.equal(unused, torch.ones(2))
    assert (used < 1).all()


@pytest.mark.parametrize(
    ("dense", "arguments", "message"),
    [
        (optim.AdamAsync, {"lr": -1.0}, "AdamAsync: lr must be finite and >= 0"),
        (
            optim.AdamAsync,
            {"use_nesterov": True, "apply_sparse_rmsprop": True},
            "use_nesterov must be False with",
        ),
        (optim.AdagradDecay, {"decay_step": 0}, "decay_step must be an integer in"),
    ],
)
def test_arguments_out_of_range_are_rejected(dense, arguments, message):
    with pytest.raises(ConfigError, match=message):
        dense([torch.nn.Parameter(torch.ones(1))], **arguments)


def test_a_sparse_gradient_is_rejected():
    embedding = torch.nn.Embedding(3, 2, sparse=True)
    optimizer = optim.AdagradDecay(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="AdagradDecay: gradients must be dense"):
        optimizer.step()
