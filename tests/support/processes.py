"""Real processes for tests, quickly: forked from one that has imported TorchRec.

Each worker of pytest-xdist has a forkserver, which imports ``preloaded.py``.
"""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess, SpawnProcess
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["__main__", "tests.support.preloaded"])
SPAWN = multiprocessing.get_context("spawn")

DEADLINE_S = 240.0
"""When a test gives up waiting; so long that a busy machine does not fail it."""


def wait_until(
    condition: Callable[[], object],
    what: str,
    timeout_s: float = DEADLINE_S,
    details: Callable[[], str] = str,
) -> None:
    """Wait until a condition holds; fail the test when it does not in time.

    Args:
        condition: asked again and again.
        what: the test waits for.
        timeout_s: when to fail.
        details: what to say of a failure.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s} s\n{details()}")
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    return _stat(pid)[0] not in "ZX"


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started and that run."""
    everyone = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [one for one in everyone if _stat(one)[1] == str(pid) and is_running(one)]


def kill_all(pid: int) -> None:
    """Kill a process, and then those that it has started."""
    children = children_of(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for child in children:
        kill_all(child)


def parent_of(pid: int) -> int:
    """Return the process that has started another."""
    return int(_stat(pid)[1])


def _stat(pid: int) -> list[str]:
    """Return what the kernel says of a process: its state first, then its parent."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "0"]
    return stat.rpartition(")")[2].split()


class Running:
    """One process of a test, with all that it printed."""

    def __init__(self, process: ForkServerProcess | SpawnProcess, log: Path) -> None:
        self.process = process
        self.log = log
        self._descriptor = -1  # its number may be used again
        with contextlib.suppress(ProcessLookupError):  # it has ended
            self._descriptor = os.pidfd_open(self.pid)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def has_printed(self, text: str) -> None:
        """Wait until the process has printed a text."""
        wait_until(
            lambda: text in self.output() or not is_running(self.pid),
            f"{self.log.stem} prints {text!r}",
        )
        assert text in self.output(), self.output()

    def status(self) -> int:
        """Wait until the process has ended; return its exit status."""
        self.process.join(DEADLINE_S)
        assert self.process.exitcode is not None, (
            f"{self.log.stem} still runs: {self.output()}"
        )
        return self.process.exitcode

    def send(self, number: int) -> None:
        if self._descriptor < 0:
            raise ProcessLookupError
        signal.pidfd_send_signal(self._descriptor, number)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def kill(self) -> None:
        """Kill the process, and wait until it has ended."""
        self.send(signal.SIGKILL)
        assert self.status() == -signal.SIGKILL, self.output()


class Processes:
    """Starts processes, and leaves none behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Running] = []

    def __enter__(self) -> "Processes":
        # Before a job of the test, whose variables later tests would inherit from it.
        multiprocessing.forkserver.ensure_running()
        return self

    def __exit__(self, *_: object) -> None:
        for running in self.started:
            if running.process.is_alive():
                kill_all(running.pid)
            running.process.join(DEADLINE_S)
            running.close()

    def start(
        self,
        name: str,
        target: Callable[..., object],
        *args: object,
        env: Mapping[str, str] | None = None,
        inherits: bool = True,
        cwd: Path | None = None,
        is_spawned: bool = False,
    ) -> Running:
        """Start ``sys.exit(target(*args))``.

        Args:
            name: of the log, in the tests' folder.
            target: of a module that can be imported.
            args: of the target.
            env: further variables.
            inherits: whether the process has the variables of this one, too.
            cwd: its working directory, the tests' folder by default.
            is_spawned: whether it is not forked, which a trainer on a GPU must not be.
        """
        log = self.folder / f"{name}.log"
        variables = {**os.environ, **(env or {})} if inherits else dict(env or {})
        process = (SPAWN if is_spawned else CONTEXT).Process(
            target=_run, args=(log, cwd or self.folder, variables, target, args)
        )
        process.start()
        self.started.append(Running(process, log))
        return self.started[-1]


def run_script(path: Path, *arguments: str) -> None:
    """Do what ``python path arguments`` does, in this process."""
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def _run(
    log: Path,
    cwd: Path,
    variables: dict[str, str],
    target: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    sys.exit(target(*args))


def children_of_this_process():
    """Return the numbers of the processes of jobs that this one has started."""
    tasks = Path("/proc/self/task").iterdir()
    texts = [(task / "children").read_text() for task in tasks]
    pids = [int(pid) for text in texts for pid in text.split()]
    return {pid for pid in pids if is_running(pid) and not is_tracker(pid)}


def is_tracker(pid):
    """Return whether a process is multiprocessing's own, which stays."""
    return "resource_tracker" in Path(f"/proc/{pid}/cmdline").read_text()
