"""Small jobs of real processes: a coordinator and the scripts of a test."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from persia_torchrec import processes, timeouts
from persia_torchrec.job import (
    coordinator,
    script,
    supervisor,
    torchrun,
)
from tests.support.ports import draw_port, draw_ports
from tests.support.processes import Processes, Running
from tests.support.repository import ROOT

WAIT_FOR_EVER = "import time; print('at work', flush=True); time.sleep(600)"
WAIT_FOR_GO = """
import pathlib, time
print('at work', flush=True)
while not pathlib.Path('go').exists():
    time.sleep(0.02)
"""


INFER = """
common_config:
  job_type: Infer
  infer_config: {servers: ["127.0.0.1:8888"], embedding_checkpoint: run}
"""


def draw_service_ports() -> dict[str, int]:
    """Return the ports from which the processes of a ``PersiaServiceCtx`` take theirs.

    One each for the coordinator, for two embedding workers and for two servers, and one
    more for the coordinator of a second job.
    """
    first = draw_ports(6)[0]
    return {
        "nats_server_port": first,
        "embedding_worker_port": first + 2,
        "embedding_parameter_server_port": first + 4,
    }


_COUNTS = {
    "server": "servers",
    "worker": "embedding-workers",
    "loader": "data-loaders",
    "trainer": "trainers",
    "predictor": "predictors",
}


class Job:
    """A job whose coordinator is up; scripts are written and started by name."""

    def __init__(
        self,
        processes: Processes,
        *options: str,
        env: Mapping[str, str] | None = None,
        recovers: bool = False,
        stalled_s: float = timeouts.STALLED_S,
        **counts: int,
    ) -> None:
        self.processes = processes
        self.counts = counts
        self.port = draw_port()
        arguments = ["--port", str(self.port), "--heartbeat-s", "0.1"]
        arguments += ["--silent-s", "20", "--linger-s", "0", *options]
        for role, count in counts.items():
            arguments += [f"--{_COUNTS[role]}", str(count)]
        name = f"coordinator-{self.port}"
        main = partial(run_coordinator, stalled_s=stalled_s)
        if recovers:
            main = supervisor.main
            command = [sys.executable, "-m", "persia_torchrec.job.coordinator"]
            flags = ["--host", "all", "--port", str(self.port)]
            arguments = [*flags, "--", *command, *arguments]
        self.coordinator = processes.start(name, main, arguments, env=env)

    def start(
        self,
        role: str,
        text: str | None,
        *arguments: str,
        index: int = 0,
        env: Mapping[str, str] | None = None,
        main: Callable[[Sequence[str]], int] = script.main,
    ) -> Running:
        """Start a script with this text; with None, one that is not there."""
        name = f"{role}-{index}"
        path = self.processes.folder / f"{name}.py"
        if text is not None:
            path.write_text(text)
        variables = {
            "PERSIA_STORE_PORT": str(self.port),
            "REPLICA_INDEX": str(index),
            "REPLICA_SIZE": str(self.counts[role]),
            **(env or {}),
        }
        command = [role, str(path), *arguments]
        return self.processes.start(name, main, command, env=variables)

    def start_member(
        self, main: str, *, name: str = "server-0", port: int | None = None
    ) -> Running:
        """Start server 0 with a supervisor: a function of ``support/members.py``.

        ``port`` is what it takes for that of the job.
        """
        code = f"from tests.support import members; members.{main}({port or self.port})"
        command = ["--", sys.executable, "-c", code]
        env = {"PYTHONPATH": str(ROOT)}
        return self.processes.start(name, supervisor.main, command, env=env)

    @property
    def folder(self) -> Path:
        return self.processes.folder


def run_coordinator(arguments: Sequence[str], stalled_s: float) -> int:
    """Run a coordinator that says soon what it waits for, and what is stalled."""
    timeouts.SAY_S, timeouts.STALLED_S = 0.2, stalled_s
    return coordinator.main(arguments)


def run_on_another_host(arguments: Sequence[str]) -> int:
    """Run a script whose process no other process finds in its table."""
    processes.process_table = lambda: "the table of another host"
    return script.main(arguments)


def start_trainers(processes, job, text, num, *, max_restarts, main=torchrun.main):
    """Start torchrun with so many trainers of a job."""
    script = processes.folder / "train.py"
    script.write_text(text)
    options = ["--nproc-per-node", str(num), "--max-restarts", str(max_restarts)]
    return processes.start(
        *("torchrun", main, [*options, "--", str(script)]),
        env={"PERSIA_STORE_PORT": str(job.port)},
    )
