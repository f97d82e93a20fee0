"""A run of one trainer, resumed by two, and by one again."""

import contextlib

import numpy as np
import pytest

from tests.support.groups import run_trainers
from tests.support.processes import Processes
from tests.support.remote_job import RemoteJob, Servers
from tests.training import resuming_trainers
from tests.training.resuming_trainers import Resuming

pytestmark = pytest.mark.multiprocess


def resume_by_two(folder):
    """Let two trainers continue; return what each has learnt."""
    with contextlib.ExitStack() as stack:
        addresses = stack.enter_context(Servers(3)).addresses
        processes = stack.enter_context(Processes(folder))
        run_trainers(processes, resuming_trainers.run_trainer, addresses, folder)
    return [np.load(folder / f"{rank}.npz") for rank in range(2)]


def test_other_numbers_of_trainers_and_servers_resume_the_same_run(tmp_path):
    with RemoteJob(num_servers=2) as job, Resuming(job.servers.addresses) as one:
        one.train(0, [0, 1])
        one.save(tmp_path / "of one")
        one.train(1, [0, 1])
        expected = one.learnt()
        learnt = resume_by_two(tmp_path)
        for half in ("dense", "rows"):
            for of_trainer in learnt:
                np.testing.assert_allclose(of_trainer[half], expected[half], atol=1e-4)
        assert learnt[0]["path"] == learnt[1]["path"]
        one.load(str(learnt[0]["path"]))
        for half, values in one.learnt().items():
            np.testing.assert_array_equal(values, learnt[0][half])
    for of_trainer in learnt:
        assert str(of_trainer["error"]) == "trainer 1: OSError: the wire is cut"
