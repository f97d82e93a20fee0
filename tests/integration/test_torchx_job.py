import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import DEADLINE_S
from tests.support.repository import ROOT

COMPONENT = """
import torchx.specs as specs

from persia_torchrec.launch import roles


def train(port: int = 0) -> specs.AppDef:
    job = roles.JobSettings(
        embedding_config="e", global_config="g", port=port, restarts=0
    )
    counts = {"num_servers": 0, "num_workers": 0, "num_loaders": 1, "num_trainers": 1}
    return roles.app(
        roles.coordinator(job, **counts),
        roles.scripts(job, "loader", "loader.py", 1),
        roles.scripts(job, "trainer", "train.py", 1),
    )
"""
LOADER = "import time; time.sleep(600)"
TRAINER = "import os; print('trainer', os.environ['RANK']); os.kill(os.getpid(), 9)"


def logs_of_failed(folder, *arguments):
    """Run the job; return the log of each role, and what torchx says at last."""
    (folder / "job.py").write_text(COMPONENT)
    (folder / "loader.py").write_text(LOADER)
    (folder / "train.py").write_text(TRAINER)
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torchx.cli.main", "run"),
            *("-s", "local_cwd", "-cfg", "log_dir=runs", "job.py:train", *arguments),
        ],
        cwd=folder,
        env={
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert run.returncode == 1, run.stderr
    paths = folder.glob("runs/torchx/*/*/0/combined.log")
    status = run.stderr[run.stderr.index("AppStatus") :].replace("\n", " ")
    return {path.parents[1].name: path for path in paths}, " ".join(status.split())


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_port_in_use_ends_a_torchx_job(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        logs, status = logs_of_failed(tmp_path, "--port", str(port))
    why = f"must be able to listen on port {port}"
    assert why in logs["coordinator"].read_text()
    assert why in status
    for role in ("loader", "trainer"):
        assert "The job's coordinator must run" in logs[role].read_text()


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_killed_process_ends_a_torchx_job_and_the_last_line_reports_why(tmp_path):
    logs, status = logs_of_failed(tmp_path)
    assert "trainer 0" in logs["trainer"].read_text()
    assert "loader 0 ends: trainer 0 has failed" in logs["loader"].read_text()
    last = logs["coordinator"].read_text().splitlines()[-1]
    assert "job failed: trainer 0 (process " in last
    why = f"was killed; its log: {logs['trainer']}"
    assert last.endswith(why)
    assert why in status
