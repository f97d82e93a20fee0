"""Whole jobs through torchx, as a user starts them; see also ``forked_jobs.py``."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

from tests.support.forked_jobs import Ended
from tests.support.processes import is_running, wait_until
from tests.support.repository import ROOT

TORCHX = [sys.executable, "-m", "torchx.cli.main", "run"]
MARK = "PERSIA_TEST_JOB"
COVERAGE = {"COVERAGE_FILE", "COVERAGE_PROCESS_CONFIG"}  # of ``make coverage``
INHERITED = COVERAGE | {"PERSIA_JOB_TOKEN_FILE"}  # so that a test may join the job


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
            self._torchx = subprocess.Popen(
                [*TORCHX, "-s", "local_cwd", "-cfg", log_cfg, *arguments],
                cwd=cwd,
                env={
                    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}",
                    "PYTHONPATH": str(ROOT),
                    "HOME": str(folder),
                    "OMP_NUM_THREADS": "1",
                    name: value,
                    **{key: os.environ[key] for key in os.environ if key in INHERITED},
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
        self._torchx.wait()

    def pids(self, command: str = "") -> list[int]:
        """Return the job's processes, or those of a command, by the environment."""
        return marked(self._mark, command)

    def output(self) -> str:
        """Return what torchx and the processes have written so far."""
        return self._output.read_text()

    def has_printed(self, text: str) -> None:
        """Wait until torchx or a process has written a text.

        A job that ends before fails the test, with its output.
        """
        wait_until(
            lambda: text in self.output() or self._torchx.poll() is not None,
            f"the job prints {text!r}",
            details=self.output,
        )
        assert text in self.output(), self.output()

    def wait(self) -> Ended:
        """Wait until torchx and all processes of the job have ended."""
        wait_until(
            lambda: self._torchx.poll() is not None and not self.pids(),
            "torchx and all processes of the job end",
            details=self.output,
        )
        logs = {
            f"{path.parents[1].name} {path.parent.name}": path.read_text()
            for path in self.log_dir.glob("torchx/*/*/*/combined.log")
        }
        return Ended(self._torchx.wait(), self.output(), logs)


def marked(mark: str, command: str = "") -> list[int]:
    """Return the processes with a variable, "NAME=VALUE", or those of a command."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = environ.read_bytes().split(b"\0")
            line = (environ.parent / "cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:
            continue  # another user's, or gone
        pid = int(environ.parent.name)
        if mark.encode() in variables and command.encode() in line:
            found.append(pid)
    return [pid for pid in found if is_running(pid)]
