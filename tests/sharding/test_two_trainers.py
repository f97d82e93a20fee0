import contextlib

import numpy as np
import pytest
import torch

from tests.processes import Processes
from tests.sharding import two_trainers
from tests.sharding.remote_job import RemoteJob, Servers
from tests.sharding.two_trainers import ADAM, CASES, EPOCHS, SGD, TRAININGS

TRAINING_S = 120.0
"""What two processes may take to import TorchRec and train, on a busy machine."""

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(TRAINING_S + 30)]


def train(names, folder, backend="gloo"):
    """Let two trainers train; return what each has learnt, by training and rank."""
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(Servers()) for name in names}
        addresses = {name: started.addresses for name, started in servers.items()}
        processes = stack.enter_context(Processes(folder))
        arguments = (2, addresses, folder, backend)
        trainers = [
            processes.start(
                f"trainer {rank}", two_trainers.run_trainer, rank, *arguments
            )
            for rank in range(2)
        ]
        for trainer in trainers:
            trainer.process.join(TRAINING_S)
            assert trainer.status() == 0, trainer.output()
    return {
        (name, rank): np.load(folder / f"{name} {rank}.npz")
        for name in names
        for rank in range(2)
    }


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    return train(TRAININGS, tmp_path_factory.mktemp("trainers"))


def alone(optimizer, epochs):
    """Train on the batches of both as a single trainer."""
    with RemoteJob() as job:
        return two_trainers.both_alone(job.servers.addresses, optimizer, epochs)


@pytest.mark.parametrize("name", CASES)
def test_every_step_of_every_trainer_has_the_loss_of_plain_torchrec(learnt, name):
    for rank in range(2):
        losses = learnt[name, rank]
        np.testing.assert_allclose(losses["remote"], losses["plain"], rtol=1e-5)
        # It would not mean much if nothing were learnt.
        assert losses["plain"][-20:].mean() < 0.9 * losses["plain"][:20].mean()
    first, second = (learnt[name, rank] for rank in range(2))
    np.testing.assert_array_equal(first["rows"], second["rows"])
    assert not np.array_equal(first["remote"], second["remote"])


def test_adam_steps_once_for_all_trainers(learnt):
    expected = alone(ADAM, [(50, 50)])
    for rank in range(2):
        for half in ("dense", "rows"):
            weights = learnt["Adam", rank][half]
            np.testing.assert_allclose(weights, expected[half], atol=1e-4)


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
        rows = learnt["ahead", rank]["rows"]
        assert sorted(set(rows)) == [-50, 0]
        assert np.count_nonzero(rows) == 8 + 8 + 4


def test_a_trainer_that_closes_its_tables_does_not_hold_up_the_others(learnt):
    assert learnt["ended", 0]["num_steps"] == 2
    assert learnt["ended", 1]["num_steps"] == 2 + 3 / 2  # of one trainer of two


def test_a_trainer_that_vanishes_is_named(learnt):
    assert "none of rank 1 within 0.5 s" in str(learnt["vanished", 0]["error"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_trainers_on_gpus_train_as_those_on_cpus_do(tmp_path):
    # NCCL wants a device for each of its ranks.
    cuda = "nccl" if torch.cuda.device_count() > 1 else "gloo"
    learnt = train(["Adagrad", "uneven"], tmp_path, f"cpu:gloo,cuda:{cuda}")
    expected = alone(CASES["Adagrad"].optimizer, EPOCHS)
    for rank in range(2):
        losses = learnt["Adagrad", rank]  # of plain TorchRec: on the CPU
        np.testing.assert_allclose(losses["remote"], losses["plain"], rtol=1e-3)
        weights = learnt["uneven", rank]
        np.testing.assert_allclose(weights["rows"], expected["rows"], atol=1e-3)
