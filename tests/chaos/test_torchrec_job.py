"""A job of a TorchRec script trains through the deaths of a server and its trainer."""

import re
import sys

import pytest

from tests.support.forked_jobs import ForkedJob
from tests.support.processes import Processes
from tests.support.repository import ROOT
from tests.support.torchrec_job import SCRIPT, print_without_a_job, printed_by

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_a_job_trains_through_deaths_as_without_any(tmp_path):
    with Processes(tmp_path) as processes:
        alone = processes.start("alone", print_without_a_job, str(tmp_path))
        assert alone.status() == 0, alone.output()
    folder = tmp_path / "job"
    folder.mkdir()
    recovers = ["--restarts", "3", "--python", sys.executable]
    command = ["train_torchrec", "--servers", "2", *recovers]
    script = ["--script", f"{SCRIPT} --dies"]
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with ForkedJob(folder, *command, *script, variables=variables) as job:
        ended = job.wait()
    assert ended.status == 0, ended.output
    assert "server 0 is back, failover took" in ended.output
    assert re.search(r"resumed from .*/checkpoint-00000001", ended.output)
    assert printed_by(ended.output) == pytest.approx(printed_by(alone.output()), 1e-5)
