"""Trainers that differ: one is slow, evaluates alone, or has less data.

Each writes the rows of all ids to a folder, what it has read, and its warnings.
"""

import logging
import time
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from persia_torchrec import (
    SGD,
    Adagrad,
    Constant,
    TableSettings,
    timeouts,
)
from persia_torchrec.rpc import silences
from persia_torchrec.sharding.training_blocks import join
from tests.support.groups import trainer_of_group
from tests.support.models import bags_of
from tests.support.remote_job import ids_of, kjt_of
from tests.support.two_trainers import Trainer

NUM_IDS, DIM, HOT = 12, 4, 7
ADAGRAD = {"lr": 0.1, "initial_accumulator_value": 0.0, "eps": 1e-8}
SLOW_S = 0.1  # of a step; the other trainer's takes a tenth
NUM_BATCHES = 3, 8, 5, 8
"""Batches of each of four trainers."""


def batch(rank, step):
    """Return bags, and what their sums shall be; one id is several times in each."""
    drawn = np.random.default_rng([rank, step])
    bags = [
        [HOT] * int(drawn.integers(1, 4))
        + drawn.integers(0, NUM_IDS, drawn.integers(0, 4)).tolist()
        for _ in range(5 + rank)
    ]
    return bags, torch.from_numpy(drawn.normal(size=(len(bags), DIM))).float()


def loss_of(values, given, *, is_linear):
    """Return a loss; the gradients of a linear one depend on no order of updates."""
    return (values * given).sum() if is_linear else ((values - given) ** 2).sum()


def expected(make_optimizer, num_steps, *, is_linear=False):
    """Return the rows of plain torch, on the sum of all trainers' gradients."""
    bag = nn.EmbeddingBag(NUM_IDS, DIM, mode="sum")
    nn.init.zeros_(bag.weight)
    optimizer = make_optimizer(bag.parameters())
    for step in range(max(num_steps)):
        optimizer.zero_grad()
        for rank in [r for r, num in enumerate(num_steps) if step < num]:
            bags, given = batch(rank, step)
            starts = torch.tensor(np.cumsum([0, *map(len, bags[:-1])]))
            values = bag(torch.tensor(list(chain(*bags))), starts)
            loss_of(values, given, is_linear=is_linear).backward()
        optimizer.step()
    return bag.weight.detach().numpy()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = bags_of("t", NUM_IDS, DIM, feature="x")
        self.dense = nn.Linear(DIM, 1)

    def forward(self, ids):
        values = self.bags(ids).values()
        return values, self.dense(torch.ones_like(values))


class Training(Trainer):
    """The model of one of the trainers."""

    def __init__(self, addresses, optimizer, **settings):
        zeros = {"t": TableSettings(initializer=Constant(0.0))}
        settings = {"tables": zeros, "gradient_division": False, **settings}
        super().__init__(addresses, Net, optimizer, **settings)

    def step(self, number, *, is_linear=False):
        bags, given = batch(dist.get_rank(), number)
        values, dense = self.model(kjt_of({"x": bags}))
        (loss_of(values, given, is_linear=is_linear) + dense.mean()).backward()

    def evaluate(self, number):
        self.model.eval()
        with torch.no_grad():
            self.model(kjt_of({"x": batch(9, number)[0]}))
        self.model.train()

    def rows(self):
        self.sharder.flush()
        dist.barrier()
        found = self.client.read("t", ids_of(range(NUM_IDS)))[:, :DIM]
        self.__exit__()
        return found


def with_a_hot_id(addresses):
    training = Training(addresses, Adagrad(**ADAGRAD))
    for number in range(20):
        training.step(number)
    return training.rows()


def with_a_slow_one(update, staleness):
    def train(addresses):
        training = Training(addresses, SGD(0.01), update=update, staleness=staleness)
        for number in range(20):
            time.sleep(SLOW_S if dist.get_rank() else SLOW_S / 10)
            training.step(number, is_linear=True)
        return training.rows()

    return train


def with_one_that_evaluates(addresses):
    training = Training(addresses, Adagrad(**ADAGRAD))
    for number in range(12):
        if dist.get_rank() == 0 and number % 4 == 0:
            for look in range(5):
                training.evaluate(look)
        training.step(number)
    return training.rows()


def with_two_that_end_early(addresses):
    training = Training(addresses, Adagrad(**ADAGRAD))
    with join(training.model):
        for number in range(NUM_BATCHES[dist.get_rank()]):
            training.step(number)
    return training.rows()


OF_TWO = {
    "hot": with_a_hot_id,
    "evaluates": with_one_that_evaluates,
    **{
        f"slow {update} {staleness}": with_a_slow_one(update, staleness)
        for update in ("joint", "each")
        for staleness in (0, 4)
    },
}
OF_FOUR = {"ends": with_two_that_end_early}


def run(rank, world_size, addresses, folder):
    """Be one of the trainers; ``addresses`` are by the name of a training."""
    timeouts.SAY_S, silences.LOOK_S = 5.0, 0.5
    logging.basicConfig(
        filename=folder / f"warnings {rank}", level=logging.WARNING, force=True
    )
    with trainer_of_group(rank, world_size, folder / f"group of {world_size}"):
        for name, of_training in addresses.items():
            rows = {**OF_TWO, **OF_FOUR}[name](of_training)
            np.savez(folder / f"{name} {rank}.npz", rows=rows)
            dist.barrier()
