import contextlib

import numpy as np
import pytest

from tests.processes import Processes
from tests.sharding import two_trainers
from tests.sharding.remote_job import RemoteJob, Servers
from tests.sharding.two_trainers import CASES, EPOCHS, SGD, TRAININGS

pytestmark = pytest.mark.multiprocess

TRAINING_S = 50.0
"""What two processes may take to import TorchRec and train, on a busy machine."""


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """What each of two trainers has learnt in each training."""
    folder = tmp_path_factory.mktemp("trainers")
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(Servers()) for name in TRAININGS}
        addresses = {name: started.addresses for name, started in servers.items()}
        processes = stack.enter_context(Processes(folder))
        trainers = [
            processes.start(
                f"trainer {rank}", two_trainers.run_trainer, rank, 2, addresses, folder
            )
            for rank in range(2)
        ]
        for trainer in trainers:
            trainer.process.join(TRAINING_S)
            assert trainer.status() == 0, trainer.output()
    return {
        (name, rank): np.load(folder / f"{name} {rank}.npz")
        for name in TRAININGS
        for rank in range(2)
    }


def alone(optimizer, epochs, **settings):
    """Train on the batches of both as a single trainer."""
    with RemoteJob() as job:
        addresses = job.servers.addresses
        return two_trainers.both_alone(addresses, optimizer, epochs, **settings)


@pytest.mark.parametrize("name", CASES)
def test_every_step_of_every_trainer_has_the_loss_of_plain_torchrec(learnt, name):
    for rank in range(2):
        losses = learnt[name, rank]
        np.testing.assert_allclose(losses["remote"], losses["plain"], rtol=1e-5)
    first, second = (learnt[name, rank] for rank in range(2))
    np.testing.assert_array_equal(first["rows"], second["rows"])
    assert not np.array_equal(first["remote"], second["remote"])


def test_trainers_whose_data_end_unevenly_learn_from_all_of_it(learnt):
    expected = alone(CASES["Adagrad"].optimizer, EPOCHS)
    for rank in range(2):
        for half in ("dense", "rows"):
            weights = learnt["uneven", rank][half]
            np.testing.assert_allclose(weights, expected[half], atol=1e-5)


def test_each_by_itself_adds_the_gradients_up_as_persia_does(learnt):
    # The dense gradients are averaged all the same: the learning rate makes up for it.
    expected = alone(SGD(2 * 0.5), [(20, 20)])
    for rank in range(2):
        for half in ("dense", "rows"):
            weights = learnt["each", rank][half]
            np.testing.assert_allclose(weights, expected[half], atol=1e-5)


def test_no_gradient_is_lost_or_counted_twice_under_staleness(learnt):
    for rank in range(2):
        moved = learnt["ahead", rank]["moved"]
        num_steps = learnt["ahead", rank]["num_steps"]
        # The mean over trainers of 1 for each feature: two of "term", one of "user".
        np.testing.assert_allclose(sorted(set(moved.round(3))), [0, 50, 100])
        assert num_steps == 50


def test_a_trainer_that_closes_its_tables_does_not_hold_up_the_others(learnt):
    assert ("ended", 1) in learnt


def test_a_trainer_that_vanishes_is_named(learnt):
    assert "none of rank 1 within 0.5 s" in str(learnt["vanished", 0]["error"])
