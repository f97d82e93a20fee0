"""Whole jobs through torchx, as a user starts them."""

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.ports import draw_port
from tests.processes import is_running, wait_until

ROOT = Path(__file__).parents[2]
TORCHX = [sys.executable, "-m", "torchx.cli.main", "run"]
MARK = "PERSIA_TEST_JOB"

JOB_DEADLINE_S = 240.0
"""What a whole job may take, on a machine with much else to do."""


@dataclass(frozen=True)
class Ended:
    """A job that has ended."""

    status: int
    output: str
    logs: dict[str, str]
    """What each process wrote, as ``"trainer 0"``."""

    def line(self, pattern: str) -> str:
        """Return the first group of a pattern that must be in the output."""
        found = re.search(pattern, self.output)
        assert found is not None, f"no {pattern!r} in\n{self.output}"
        return found[1]


class TorchxJob:
    """One job on this machine; leaves no process behind.

    Args:
        folder: for the logs, and the home of all processes.
        arguments: of ``torchx run`` after the options, a component first or none.
        variables: set for all processes.
        cwd: where torchx runs.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        variables: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> None:
        self.log_dir = folder / "logs"
        self._mark = f"{MARK}={uuid.uuid4()}"
        name, value = self._mark.split("=")
        log_cfg = f"log_dir={self.log_dir}"
        self._output = folder / "output"
        with self._output.open("w") as output:
            self.torchx = subprocess.Popen(
                [*TORCHX, "-s", "local_cwd", "-cfg", log_cfg, *arguments],
                cwd=cwd,
                env={
                    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}",
                    "PYTHONPATH": str(ROOT),
                    "HOME": str(folder),
                    name: value,
                    **(variables or {}),
                },
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> "TorchxJob":
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        self.torchx.wait()

    def pids(self, command: str = "") -> list[int]:
        """Return the job's processes, or those of a command, by the environment."""
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                variables = environ.read_bytes().split(b"\0")
                line = (environ.parent / "cmdline").read_bytes().replace(b"\0", b" ")
            except OSError:
                continue  # another user's, or gone
            pid = int(environ.parent.name)
            if self._mark.encode() in variables and command.encode() in line:
                found.append(pid)
        return [pid for pid in found if is_running(pid)]

    def output(self) -> str:
        """Return what torchx and the processes have written so far."""
        return self._output.read_text()

    def has_printed(self, text: str) -> None:
        """Wait until torchx or a process has written a text.

        A job that ends before fails the test, with its output.
        """
        wait_until(
            lambda: text in self.output() or self.torchx.poll() is not None,
            f"the job prints {text!r}",
            JOB_DEADLINE_S,
        )
        assert text in self.output(), self.output()

    def wait(self, timeout_s: float = JOB_DEADLINE_S) -> Ended:
        """Wait until torchx and all processes of the job have ended."""
        status = self.torchx.wait(timeout_s)
        wait_until(lambda: not self.pids(), "all processes of the job end")
        logs = {
            f"{path.parents[1].name} {path.parent.name}": path.read_text()
            for path in self.log_dir.glob("torchx/*/*/*/combined.log")
        }
        return Ended(status, self.output(), logs)


def train(folder: Path, *arguments: str, **more: object) -> TorchxJob:
    """Start ``torchx run components/job.py:train`` with its arguments."""
    component = str(ROOT / "components/job.py:train")
    return TorchxJob(folder, component, "--port", str(draw_port()), *arguments, **more)
