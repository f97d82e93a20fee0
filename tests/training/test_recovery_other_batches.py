"""A resume gets the batches of its pass again, or says that they are others."""

import logging
import random
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from persia_torchrec.data import CsvDataset, IdColumn, WorkQueue
from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.trainer_metrics import TrainerMetrics
from persia_torchrec.training.recoverable import recoverable
from tests.support.resumed_loops import (
    BATCH_SIZE,
    NUM_BATCHES,
    NUM_PASSES,
    NUM_SAMPLES,
    Numbers,
    once_each,
    train,
    train_in_parts,
)
from tests.support.servers import Servers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client():
    with Servers() as servers:
        yield servers.client(servers.start(1))


class Shuffled:
    """A loader that draws the order of a pass from a generator."""

    def __init__(self, order):
        self._order = order

    def __iter__(self):
        for first in range(0, NUM_SAMPLES, BATCH_SIZE):
            if not first:
                order = self._order()
            yield torch.tensor(order[first : first + BATCH_SIZE])


ORDERS = {
    "torch": (
        lambda: torch.Generator().manual_seed(5),
        lambda one: torch.randperm(NUM_SAMPLES, generator=one).tolist(),
    ),
    "NumPy": (
        lambda: np.random.default_rng(5),
        lambda one: one.permutation(NUM_SAMPLES).tolist(),
    ),
    "old NumPy": (
        lambda: np.random.RandomState(5),
        lambda one: one.permutation(NUM_SAMPLES).tolist(),
    ),
    "Philox": (
        lambda: np.random.Generator(np.random.Philox(5)),
        lambda one: one.permutation(NUM_SAMPLES).tolist(),
    ),
    "Python": (
        lambda: random.Random(5),
        lambda one: one.sample(range(NUM_SAMPLES), NUM_SAMPLES),
    ),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_a_random_generator_in_state_gives_the_order_of_its_pass_again(
    client, tmp_path, kind
):
    seed, order = ORDERS[kind]

    def make():
        generator = seed()
        loader = Shuffled(lambda: order(generator))
        return {"generator": generator}, lambda _: loader

    trained = train_in_parts(client, tmp_path / "run", make, [2, NUM_BATCHES + 2])
    assert [sorted(of_pass) for of_pass in trained] == once_each()
    assert trained == train(client, tmp_path / "whole", make, stop=0)


def unrepeatable():
    """Return a loader whose generator is in no state, and begins again."""
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(range(NUM_SAMPLES), BATCH_SIZE, True, generator=generator)
    return {}, lambda _: loader


def test_a_loader_that_gives_other_batches_after_a_resume_is_an_error(client, tmp_path):
    given = client, tmp_path / "run", unrepeatable
    train(*given, stop=NUM_BATCHES + 2)
    with pytest.raises(ConfigError, match="of DataLoader, in pass 2, another first"):
        train(*given, stop=0)


def test_other_batches_may_be_trained_with_a_warning(client, tmp_path, caplog):
    given = client, tmp_path / "run", unrepeatable
    before, num = train(*given, stop=NUM_BATCHES + 2), TrainerMetrics.num_other_passes
    settings = {"on_other_batches": "continue", "trained": before}
    trained = train(*given, stop=0, **settings)
    assert [len(of_pass) for of_pass in trained] == [NUM_SAMPLES] * NUM_PASSES
    assert len(set(trained[1])) < NUM_SAMPLES
    told = [r for r in caplog.records if "in pass 2, another first batch" in r.message]
    assert [record.levelno for record in told] == [logging.WARNING]
    assert TrainerMetrics.num_other_passes == num + 1


def warned_of(client, folder, caplog, make):
    caplog.clear()
    train(client, folder / make.__name__, make, stop=0, save_steps=1000)
    return "shuffles by a random generator that is not in state" in caplog.text


def test_a_generator_that_is_not_in_state_is_a_warning_at_first(
    client, tmp_path, caplog
):
    def make(**state):
        given = {"shuffle": True, "generator": state.get("own")}
        loader = DataLoader(range(NUM_SAMPLES), BATCH_SIZE, **given)
        return state, lambda _: loader

    def make_saved():
        return make(own=torch.Generator())

    given = client, tmp_path, caplog
    assert not warned_of(*given, make)
    assert not warned_of(*given, make_saved)
    assert warned_of(*given, unrepeatable)


def test_a_work_queue_must_be_handed_out_itself(client, tmp_path):
    (tmp_path / "rows.csv").write_text("1\n2\n")
    queue = WorkQueue([tmp_path / "rows.csv"], 2)
    data = CsvDataset(queue, 1, [IdColumn("one")])
    state, batches = {"data": data}, (batch for batch in data)
    with (
        recoverable(tmp_path / "run", state, client, (), interval_s=0) as run,
        pytest.raises(ConfigError, match="Received: a generator that reads 'data'"),
    ):
        next(run.skip(batches))


@pytest.mark.parametrize(
    ("resumed", "message"),
    [
        ([0, 1, 2], "3 batches, of which 4 are trained"),
        ([0, 1, 2, 13, 4, 5], "of list, in pass 1, another batch 3"),
    ],
    ids=["fewer than were trained", "another last one of those left out"],
)
def test_other_batches_than_were_trained_are_an_error(
    client, tmp_path, resumed, message
):
    of_each = [resumed, range(6)]

    def make():
        batches = [torch.tensor([n]) for n in of_each.pop()]
        return {}, lambda _: batches

    train(client, tmp_path / "run", make, stop=4)
    with pytest.raises(ConfigError, match=message):
        train(client, tmp_path / "run", make, stop=0)


def test_batches_without_a_tensor_are_not_compared_and_the_log_says_so(
    client, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    make = lambda: ({}, lambda _: [*range(NUM_BATCHES)])  # noqa: E731
    train_in_parts(client, tmp_path / "run", make, [2])
    told = "after 2 batches, of which 2 were read again and not compared: they have no"
    assert told in caplog.text


@pytest.mark.parametrize(
    "num_passes_before", [pytest.param(0, marks=pytest.mark.long), 1]
)
def test_a_resume_gets_the_order_of_a_pass_of_persistent_workers(
    client, tmp_path, num_passes_before
):
    def make():
        given = {"num_workers": 1, "persistent_workers": True}
        loader = DataLoader(range(NUM_SAMPLES), BATCH_SIZE, shuffle=True, **given)
        return {}, lambda _: loader

    stops = [num_passes_before * NUM_BATCHES + 2]
    trained = train_in_parts(client, tmp_path / "run", make, stops)
    assert [sorted(of_pass) for of_pass in trained] == once_each()


@pytest.mark.parametrize(
    ("value", "lacks"),
    [
        (lambda: 1, "function without state_dict"),
        (DataLoader([1]), "DataLoader without state_dict"),
        (SimpleNamespace(state_dict=dict), "SimpleNamespace without load_state_dict"),
    ],
)
def test_what_cannot_be_saved_is_named_when_the_block_is_entered(
    client, tmp_path, value, lacks
):
    state = {"own": value}
    with (
        pytest.raises(ConfigError, match=f"Received: 'own', a {lacks}"),
        recoverable(tmp_path, state, client, (), interval_s=0),
    ):
        pass


def test_data_in_state_that_the_loop_reads_by_itself_keep_their_own_position(
    client, tmp_path
):
    read = []

    def run(num_steps):
        data, other = [torch.tensor([n]) for n in range(8)], Numbers()
        given = tmp_path, {"other": other}, client, ()
        with recoverable(*given, interval_s=0) as run:
            others = iter(other)
            for _ in islice(run.skip(data), num_steps):
                read.extend(islice(others, 2))
                run.step()
            run.save()

    run(3)
    run(5)
    assert read == [*range(16)]
