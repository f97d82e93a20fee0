"""Jobs of ``torchx run -s slurm``, on a private Slurm."""

import re

import pytest

from tests.support.adult_income import LEAST_STALE_AUC
from tests.support.faults import kill
from tests.support.slurm import adult_income, private_slurm

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with private_slurm(tmp_path_factory.mktemp("slurm"), num_nodes=6) as slurm:
        yield slurm


@pytest.mark.long
def test_the_adult_income_job_recovers_a_killed_server(slurm, tmp_path):
    with adult_income(slurm, tmp_path, "--max_retries", 0) as job:
        job.has_printed("step 50: loss")
        kill(job.pid("server", 1))
        job.has_printed("server 1 is back, failover took ")
        (tmp_path / "go").touch()
        assert job.wait() == {"COMPLETED"}
        assert "SUCCEEDED" in job.torchx("status", job.handle)
        token = (tmp_path / ".persia_torchrec/job_token").read_text().strip()
        assert token not in job.output()  # which has Slurm's command line
        log = job.torchx("log", "--streams", "stdout", f"{job.handle}/trainer/0")
    assert float(re.search(r"test AUC (0\.\d+)", log)[1]) >= LEAST_STALE_AUC
