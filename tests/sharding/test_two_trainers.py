import contextlib

import numpy as np
import pytest

from tests.processes import Processes
from tests.sharding import two_trainers
from tests.sharding.remote_job import RemoteJob, Servers
from tests.sharding.two_trainers import Run

pytestmark = pytest.mark.multiprocess

LR = 0.5

IMPORT_S = 20.0
"""What a process may take to import TorchRec, on a machine with much else to do."""


def train_alone(lr):
    """Train on the joined batches; return dense weights and rows."""
    with RemoteJob() as job:
        return two_trainers.train(Run("alone", job.servers.addresses, lr, True))


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """What two trainers learn on half of each batch each, with and without division."""
    folder = tmp_path_factory.mktemp("trainers")
    with contextlib.ExitStack() as stack:
        runs = [
            Run(name, stack.enter_context(Servers()).addresses, LR, division)
            for name, division in (("divided", True), ("whole", False))
        ]
        processes = stack.enter_context(Processes(folder))
        trainers = [
            processes.start(
                f"trainer {rank}", two_trainers.run_trainer, rank, 2, runs, folder
            )
            for rank in range(2)
        ]
        for trainer in trainers:
            trainer.process.join(IMPORT_S)
            assert trainer.status() == 0, trainer.output()
    return {
        (run.name, rank): np.load(folder / f"{run.name} {rank}.npz")
        for run in runs
        for rank in range(2)
    }


def test_two_trainers_learn_what_one_learns_on_the_joined_batches(learnt):
    dense, rows = train_alone(LR)
    for rank in range(2):
        weights = learnt["divided", rank]
        np.testing.assert_allclose(weights["dense"], dense, atol=1e-6)
        np.testing.assert_allclose(weights["rows"], rows, atol=1e-6)


def test_without_division_the_rows_get_the_gradients_of_both(learnt):
    dense, rows = train_alone(2 * LR)
    for rank in range(2):
        weights = learnt["whole", rank]
        np.testing.assert_allclose(weights["dense"], dense, atol=1e-6)
        np.testing.assert_allclose(weights["rows"], rows, atol=1e-6)


def test_the_division_matters(learnt):
    divided, whole = learnt["divided", 0]["rows"], learnt["whole", 0]["rows"]
    assert np.abs(divided - whole).max() > 0.01
