"""Two trainers: one may dump alone, both load."""

import numpy as np
import pytest

from tests.persia.ctx import checkpoint_trainers
from tests.support.local_job import LocalJob, run_two_trainers
from tests.support.ports import draw_port
from tests.support.processes import Processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_one_may_dump_alone_and_both_load_and_hear_of_errors(tmp_path, monkeypatch):
    with LocalJob(tmp_path, monkeypatch) as job, Processes(tmp_path) as processes:
        run_two_trainers(
            processes, job, checkpoint_trainers.run_trainer, tmp_path, draw_port()
        )
    first, second = [np.load(tmp_path / f"weights {rank}.npy") for rank in range(2)]
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first[2], first[0])
    np.testing.assert_array_equal(first[3], first[0])
    assert (first[1] != first[0]).any()
    for rank in range(2):
        assert "run must be a checkpoint" in (tmp_path / f"error {rank}").read_text()
    dumps = sorted(folder.name for folder in (tmp_path / "run").glob("checkpoint-*"))
    assert dumps == ["checkpoint-00000001", "checkpoint-00000002"]
    assert len(list((tmp_path / "rows").iterdir())) == 1  # the first trainer's
