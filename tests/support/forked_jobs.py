"""Whole jobs of forked processes: what ``torchx run`` starts, without the imports.

A job is made from a component's own roles, and each process does what ``python -m``
does. The processes come from the tests' forkserver, which has imported TorchRec: a job
of six is up within a second, and not within ten. What supervisors and torchrun start
does not: without ``--restarts`` there are none.
"""

import os
import re
import runpy
import sys
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from persia_torchrec.components import jobs
from torchx.specs import macros
from torchx.specs.builders import materialize_appdef

from tests.support.hosts import Host, run_on
from tests.support.ports import draw_port
from tests.support.processes import Processes, is_running, wait_until


@dataclass(frozen=True)
class Ended:
    """A job that has ended.

    Attributes:
        status: 0 if it has ended well.
        output: of all processes.
        logs: what each process wrote, as ``"trainer 0"``.
    """

    status: int
    output: str
    logs: dict[str, str]

    def line(self, pattern: str) -> str:
        """Return the first group of a pattern that must be in the output."""
        found = re.search(pattern, self.output)
        assert found is not None, f"no {pattern!r} in\n{self.output}"
        return found[1]


class ForkedJob:
    """One job on this machine; leaves no process behind.

    Args:
        folder: for the logs, and the home of all processes.
        component: a function of ``components/jobs.py``, as ``"train"``.
        arguments: of the component, as ``torchx run`` takes them.
        variables: set for all processes.
        cwd: where all processes run; in the folder by default.
        hosts: on which a role runs, or a member, as ``"server 1"``; here by default.

    Attributes:
        port: of the job's address book.
        job_id: the job's id.
    """

    def __init__(
        self,
        folder: Path,
        component: str,
        *arguments: str,
        variables: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        hosts: Mapping[str, Host] | None = None,
    ) -> None:
        hosts = hosts or {}
        rank0 = hosts["coordinator"].address if hosts else "localhost"
        function = getattr(jobs, component)
        self.port = draw_port()
        port = ["--port", str(self.port)]
        once = [] if "--restarts" in arguments else ["--restarts", "0"]
        app = materialize_appdef(function, [*arguments, *port, *once])
        self.job_id = f"{app.name}-{uuid.uuid4().hex[:8]}"
        self._processes = Processes(folder)
        self._processes.__enter__()
        self._running = {}
        for role in app.roles:
            for index in range(role.num_replicas):
                values = macros.Values(
                    img_root="",
                    app_id=self.job_id,
                    replica_id=str(index),
                    rank0_env="TORCHX_RANK0_HOST",
                )
                replica = values.apply(role)
                more = ["--linger-s", "0"] if role.name == "coordinator" else []
                member = f"{role.name} {index}"
                host = hosts.get(member, hosts.get(role.name))
                target = [run_module] if host is None else [run_on, host, run_module]
                self._running[member] = self._processes.start(
                    member,
                    *target,
                    *replica.args,
                    *more,
                    env={
                        "PATH": os.defpath,
                        "HOME": str(folder),
                        "TORCHX_RANK0_HOST": rank0,
                        **replica.env,
                        **(variables or {}),
                    },
                    inherits=False,
                    cwd=cwd,
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._processes.__exit__(*error)

    def pid(self, member: str) -> int:
        """Return the process of a member, as ``"server 1"``."""
        return self._running[member].pid

    def output(self) -> str:
        """Return what all processes have written so far."""
        return "".join(running.output() for running in self._running.values())

    def has_printed(self, text: str) -> None:
        """Wait until a process has written a text.

        A job that ends before fails the test, with its output.
        """
        wait_until(
            lambda: text in self.output() or not self._is_running(),
            f"the job prints {text!r}",
            details=self.output,
        )
        assert text in self.output(), self.output()

    def wait(self) -> Ended:
        """Wait until all processes have ended."""
        wait_until(lambda: not self._is_running(), "the job ends", details=self.output)
        logs = {name: running.output() for name, running in self._running.items()}
        statuses = [running.status() for running in self._running.values()]
        return Ended(int(any(statuses)), self.output(), logs)

    def _is_running(self) -> bool:
        return any(is_running(running.pid) for running in self._running.values())


def run_module(option: str, module: str, *arguments: str) -> None:
    """Do what ``python -m module arguments`` does, in this process."""
    assert option == "-m"
    sys.argv = [module, *arguments]
    sys.path.insert(0, str(Path.cwd()))
    warnings.filterwarnings("ignore", "(?s).*found in sys.modules after import")
    runpy.run_module(module, run_name="__main__", alter_sys=True)
