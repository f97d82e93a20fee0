"""A job of a TorchRec script, without YAML and embedding workers."""

import pytest

from persia_torchrec import EmbeddingClient
from persia_torchrec.errors import ConfigError
from tests.support.forked_jobs import ForkedJob
from tests.support.processes import Processes
from tests.support.torchrec_job import SCRIPT, print_without_a_job, printed_by

pytestmark = pytest.mark.multiprocess


@pytest.mark.long
def test_a_script_finds_the_servers_of_its_job_and_trains_as_without_one(tmp_path):
    for name in ("alone", "job"):
        (tmp_path / name).mkdir()
    with Processes(tmp_path / "alone") as processes:
        alone = processes.start("alone", print_without_a_job, str(tmp_path / "alone"))
        command = ["train_torchrec", "--servers", "2"]
        script = ["--script", str(SCRIPT)]
        folder = tmp_path / "checkpoints"
        variables = {"PERSIA_CHECKPOINT_DIR": str(folder)}
        job = ForkedJob(tmp_path / "job", *command, *script, variables=variables)
        with job:
            ended = job.wait()
        assert ended.status == 0, ended.output
        assert alone.status() == 0, alone.output()
        assert printed_by(ended.output) == pytest.approx(
            printed_by(alone.output()), 1e-5
        )


def test_without_a_job_there_are_no_servers_to_find(monkeypatch):
    monkeypatch.delenv("PERSIA_STORE_PORT", raising=False)
    with pytest.raises(ConfigError, match=r"of_job\(\) must belong to a job"):
        EmbeddingClient.of_job()
