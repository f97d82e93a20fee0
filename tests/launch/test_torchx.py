import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

COMPONENT = """
import torchx.specs as specs

from persia_torchrec.launch import roles


def train() -> specs.AppDef:
    port = roles.job_port(0)
    job = roles.JobSettings(embedding_config="e", global_config="g", port=port)
    counts = {"num_servers": 0, "num_workers": 0, "num_loaders": 1, "num_trainers": 1}
    return specs.AppDef(
        name=roles.APP_NAME,
        roles=[
            roles.coordinator(job, **counts),
            roles.data_loaders(job, "loader.py", 1),
            roles.nn_workers(job, "train.py", 1),
        ],
    )
"""
LOADER = "import time; time.sleep(60)"
TRAINER = "import os; print('trainer', os.environ['RANK']); os.kill(os.getpid(), 9)"


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_killed_process_ends_a_job_of_torchx_and_every_log_says_why(tmp_path):
    (tmp_path / "job.py").write_text(COMPONENT)
    (tmp_path / "loader.py").write_text(LOADER)
    (tmp_path / "train.py").write_text(TRAINER)
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torchx.cli.main", "run"),
            *("-s", "local_cwd", "-cfg", "log_dir=runs", "job.py:train"),
        ],
        cwd=tmp_path,
        env={
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=40,
    )
    assert run.returncode == 1, run.stderr
    assert "trainer 0" in run.stderr
    logs = {
        path.parents[1].name: path.read_text()
        for path in tmp_path.glob("runs/torchx/*/*/0/combined.log")
    }
    assert "trainer 0" in logs["trainer"]
    for role in ("coordinator", "loader"):
        assert "trainer 0 (process " in logs[role]
        assert "was killed" in logs[role]
