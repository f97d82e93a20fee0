"""The adult-income example, started by hand as PERSIA's users start their jobs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_jobs import ROOT
from tests.ports import draw_port, draw_ports
from tests.processes import DEADLINE_S

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

EXAMPLE = ROOT / "examples/adult_income"

# One line a process, as in PERSIA's Procfile: loader and trainer are given no files.
CONFIG = (
    "--embedding-config {example}/embedding_config.yml "
    "--global-config {example}/global_config.yml"
)
PROCESSES = f"""
coordinator: coordinator --embedding-parameter-servers 2
server0: embedding-parameter-server {CONFIG} --replica-size 2 --port {{ports[0]}}
server1: embedding-parameter-server {CONFIG} --replica-index 1 --replica-size 2 \
--port {{ports[1]}}
worker: embedding-worker {CONFIG} --port {{ports[2]}}
loader: data-loader {{example}}/data_loader.py --replica-index 0 --replica-size 1
trainer: nn-worker {{example}}/train.py --nproc-per-node 1 --nnodes 1 --node-rank 0
"""


def environment(folder: Path, **variables: str) -> dict[str, str]:
    nowhere = "http://127.0.0.1:9"  # so that the rows of the example are made up
    return {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "HTTP_PROXY": nowhere,
        "HTTPS_PROXY": nowhere,
        "OMP_NUM_THREADS": "1",
        **variables,
    }


def read_auc(log: str) -> float:
    found = re.search(r"test AUC (0\.\d+)", log)
    assert found is not None, log
    return float(found[1])


class Job:
    """The processes of a job; leaves none behind."""

    def __init__(self, folder: Path, lines: str) -> None:
        self._folder = folder
        self._environment = environment(folder, PERSIA_STORE_PORT=str(draw_port()))
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        for line in lines.strip().splitlines():
            name, _, command = line.partition(": ")
            self._started[name] = self._start(name, command.split())

    def _start(self, name: str, arguments: list[str]) -> "subprocess.Popen[bytes]":
        launcher = [sys.executable, "-m", "persia_torchrec.launch.persia_launcher"]
        with (self._folder / name).open("wb") as log:
            return subprocess.Popen(
                [*launcher, *arguments],
                cwd=self._folder,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started.values():
            process.kill()
            process.wait()

    def ends(self, name: str) -> int:
        return self._started[name].wait(DEADLINE_S)

    def log(self, name: str) -> str:
        return (self._folder / name).read_text()


def test_six_processes_started_by_hand_train_the_example(tmp_path):
    ports = draw_ports(3)
    lines = PROCESSES.format(ports=ports, example=EXAMPLE)
    with Job(tmp_path, lines) as job:
        names = [line.partition(":")[0] for line in lines.strip().splitlines()]
        status = {name: job.ends(name) for name in reversed(names)}
        assert status == dict.fromkeys(names, 0), job.log("coordinator")
    assert read_auc(job.log("trainer")) > 0.85
    for name, port in zip(("server0", "server1", "worker"), ports, strict=True):
        assert f"ready tcp://127.0.0.1:{port}" in job.log(name)


def test_honcho_runs_the_procfile_without_a_traceback(tmp_path):
    (tmp_path / "env").write_text(f"PERSIA_STORE_PORT={draw_port()}\n")
    with subprocess.Popen(
        [sys.executable, "-m", "honcho", "-e", f".env,{tmp_path / 'env'}", "start"],
        cwd=EXAMPLE,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as honcho:
        try:
            output, _ = honcho.communicate(timeout=DEADLINE_S)
        finally:
            honcho.terminate()  # it ends the processes then, if it has not ended
    assert honcho.returncode == 0, output
    assert "Traceback" not in output
    assert output.count("ready tcp://127.0.0.1:") == 5  # servers and embedding workers
    assert read_auc(output) > 0.85
