"""A job's processes as children of this one, and the thread that watches them."""

import contextlib
import logging
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

from persia_torchrec import env, timeouts
from persia_torchrec.errors import JobError
from persia_torchrec.job import script
from persia_torchrec.job.process_identity import ProcessIdentity
from persia_torchrec.job.registry import AddressBook

logger = logging.getLogger(__name__)

Work = Callable[[], object] | str | Path
"""A function at the top of a module, or the path of a script."""

Process = subprocess.Popen[bytes] | BaseProcess


class _Started(NamedTuple):
    """A process, and who it is: signals go to that one alone."""

    name: str
    process: Process
    identity: ProcessIdentity


_POLL_S = 0.1


class Children:
    """The processes of a job. One thread starts and ends them."""

    def __init__(self) -> None:
        self._processes: list[_Started] = []

    def start_module(self, name: str, module: str, *arguments: str) -> None:
        """Start a module below ``persia_torchrec``; the coordinator first."""
        command = [sys.executable, "-m", f"persia_torchrec.{module}", *arguments]
        self._keep(name, subprocess.Popen(command, stdin=subprocess.PIPE))

    def start_work(self, role: str, index: int, size: int, work: Work) -> None:
        """Start a trainer or a data loader, the ``index``-th of ``size``."""
        process = multiprocessing.get_context("spawn").Process(
            target=_run_work, args=(role, index, size, work)
        )
        process.start()
        self._keep(f"{role} {index}", process)

    def _keep(self, name: str, process: Process) -> None:
        assert process.pid is not None
        identity = ProcessIdentity.of(process.pid)
        self._processes.append(_Started(name, process, identity))

    def finish(self) -> None:
        """Close the input of all modules, by which a proxy trainer's work is done."""
        for _, process, _ in self._processes:
            if isinstance(process, subprocess.Popen) and process.stdin is not None:
                process.stdin.close()

    def coordinator_status(self) -> int | None:
        """Return the coordinator's exit status; None: it runs."""
        return _wait(self._processes[0].process, 0)

    def wait_for_coordinator(self, timeout_s: float) -> int:
        """Return the coordinator's exit status, or raise JobError: not in time."""
        status = _wait(self._processes[0].process, timeout_s)
        if status is None:
            raise JobError(
                f"The job must end within {timeout_s:g} s. It has not. Give a longer "
                "timeout_s."
            )
        return status

    def find_failed(self) -> str | None:
        """Return a message about a process that has failed, if one has."""
        for name, process, _ in self._processes:
            if status := _wait(process, 0):
                return f"{name} ended with status {status}; its error stands above."
        return None

    def require_none_failed(self) -> None:
        """Raise JobError if a process has failed."""
        if failure := self.find_failed():
            raise JobError(f"The job failed: {failure}")

    def end(self) -> None:
        """End the processes that still run."""
        deadline = time.monotonic() + timeouts.CHILD_END_S
        for _, _, identity in self._processes:
            identity.send(signal.SIGTERM)
        for name, process, identity in self._processes:
            if _wait(process, max(deadline - time.monotonic(), 0.1)) is None:
                logger.warning("%s does not end; killing it", name)
                identity.kill()
                _wait(process, None)
            if isinstance(process, BaseProcess):
                process.close()
        self.finish()


class Watch:
    """A thread that interrupts the main thread when the job has failed, as by Ctrl-C.

    Only if the main thread creates it. It owns the address book from then on, and asks
    it for the state; the processes, only whether one ended before it had joined. The
    status of the coordinator is the job's verdict, for who has not read that in time.
    """

    def __init__(self, book: AddressBook, children: Children) -> None:
        self._book = book
        self._children = children
        self._lock = threading.Lock()
        self._failure: str | None = None  # guarded by _lock
        self.is_finished = False  # whether the job has, as far as is known
        # Guarded by _lock.
        self._interrupts = threading.current_thread() is threading.main_thread()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="job watch", daemon=True)
        self._thread.start()

    def disarm(self) -> str | None:
        """Stop interrupting; return why the job has failed, if it has."""
        # The only interruption may come right here; the result tells of it too.
        with contextlib.suppress(KeyboardInterrupt), self._lock:
            self._interrupts = False
        return self._failure

    def stop(self) -> str | None:
        """End the watch, and return what :meth:`disarm` does. May be called twice."""
        failure = self.disarm()
        self._stopping.set()
        self._thread.join(timeouts.CHILD_END_S)
        return failure

    def _run(self) -> None:
        while self._failure is None and not self._stopping.wait(_POLL_S):
            if failure := self._find_failure():
                with self._lock:
                    self._failure = failure
                    main = threading.main_thread().ident
                    if self._interrupts and main is not None:
                        signal.pthread_kill(main, signal.SIGINT)

    def _find_failure(self) -> str | None:
        try:
            state, reason = self._book.state()
            if state == "running" and (failure := self._children.find_failed()):
                state, reason = self._book.state()  # it may have finished meanwhile
                reason = reason if state != "running" else failure
            self.is_finished = state == "finished"
            return reason or None
        except JobError as exc:
            # One that is slow, or about to end, is not gone.
            if self._children.coordinator_status() and not self.is_finished:
                return f"the coordinator is gone: {exc}"
            return None


def _wait(process: Process, timeout_s: float | None) -> int | None:
    """Wait for the end of a process; return its status, None if it still runs."""
    if isinstance(process, BaseProcess):
        process.join(timeout_s)
        return process.exitcode
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(timeout_s)
    return None


def _run_work(role: str, index: int, size: int, work: Work) -> None:
    """Do the work of one process of a role, which begins here."""
    env.set_variable("REPLICA_INDEX", index)
    env.set_variable("REPLICA_SIZE", size)
    if isinstance(work, Path):
        sys.exit(script.main([role, str(work)]))
    assert isinstance(work, FunctionType)
    sys.exit(script.run_member(role, work.__qualname__, work))
