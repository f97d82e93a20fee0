"""Trainers of a job that torchrun starts again, all of them when one fails."""

import pytest
from torch.distributed import run

from tests.launch.jobs import Job
from tests.ports import draw_port
from tests.processes import Processes

pytestmark = pytest.mark.multiprocess

KILLED = """
import os, signal
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # until torchrun ends this one, too
print("trained by", os.environ["RANK"])
"""

RAISES = """
raise ValueError("a bug of its own")
"""


def run_torchrun(script, *options):
    """Be torchrun on one machine."""
    run.main([*options, "-m", "persia_torchrec.launch.script", "trainer", script])


def start_trainers(processes, job, text, num, *, max_restarts):
    """Start torchrun with so many trainers of a job."""
    script = processes.folder / "train.py"
    script.write_text(text)
    return processes.start(
        *("torchrun", run_torchrun, str(script)),
        *("--nproc-per-node", str(num), "--max-restarts", str(max_restarts)),
        *("--master-addr", "127.0.0.1", "--master-port", str(draw_port())),
        env={"PERSIA_STORE_PORT": str(job.port)},
    )


def test_a_job_waits_for_trainers_that_torchrun_starts_again(tmp_path):
    with Processes(tmp_path) as processes:
        job = Job(processes, trainer=2)
        torchrun = start_trainers(processes, job, KILLED, 2, max_restarts=1)
        assert torchrun.status() == 0, torchrun.output()
        assert job.coordinator.status() == 0, job.coordinator.output()
        assert torchrun.output().count("trained by") == 2
        told = job.coordinator.output()
    assert "trainer 1 (process" in told
    assert "the job waits for its return" in told


def test_a_script_that_always_raises_fails_the_job_and_says_why_once(tmp_path):
    with Processes(tmp_path) as processes:
        job = Job(processes, trainer=1)
        torchrun = start_trainers(processes, job, RAISES, 1, max_restarts=2)
        assert torchrun.status() != 0
        assert job.coordinator.status() == 1
        assert torchrun.output().count('    raise ValueError("a bug') == 1
        told = job.coordinator.output()
    assert "job failed: trainer 0: ValueError: a bug of its own" in told
