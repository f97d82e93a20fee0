"""A job of a TorchRec script, without YAML and embedding workers."""

import re

import pytest
import torch.distributed as dist

from persia_torchrec import EmbeddingClient, EmbeddingCluster
from persia_torchrec.errors import ConfigError
from tests.forked_jobs import ROOT, ForkedJob
from tests.integration import torchrec_script
from tests.processes import Processes

pytestmark = pytest.mark.multiprocess

SCRIPT = ROOT / "tests/integration/torchrec_script.py"


def print_without_a_job(folder):
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    with EmbeddingCluster.local(2) as cluster:
        client = EmbeddingClient.connect(cluster.addresses)
        total, rows = torchrec_script.train(client, folder)
    print(f"of 2 servers: losses {total:.6f}, rows {rows:.4f}")


def printed_by(output):
    found = re.search(r"of 2 servers: losses (\d+\.\d+), rows (-?\d+\.\d+)", output)
    assert found is not None, output
    return [float(number) for number in found.groups()]


@pytest.mark.slow
def test_a_script_finds_the_servers_of_its_job_and_trains_as_without_one(tmp_path):
    for name in ("alone", "job"):
        (tmp_path / name).mkdir()
    with Processes(tmp_path / "alone") as processes:
        alone = processes.start("alone", print_without_a_job, str(tmp_path / "alone"))
        command = ["torchrec_job.py:train", "--embedding_servers", "2"]
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
