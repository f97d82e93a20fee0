"""A job's processes as children of this one, and the watch over them.

The job ends as one, by its coordinator; so the watch asks the job's address book how it
goes, and looks at the processes only for those that end before they have joined.
"""

import contextlib
import logging
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

from persia_torchrec import env
from persia_torchrec.errors import JobError
from persia_torchrec.launch import script
from persia_torchrec.wire.discovery import AddressBook

logger = logging.getLogger(__name__)

Work = Callable[[], object] | str | Path
"""A function at the top of a module, or the path of a script."""

_LOOK_S = 0.1
_END_TIMEOUT_S = 10.0
_EXIT_TIMEOUT_S = 60.0  # of a coordinator that has closed the book; torch is slow


class Children:
    """The processes of a job. One thread starts and ends them."""

    def __init__(self) -> None:
        self._modules: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._works: list[multiprocessing.process.BaseProcess] = []
        self._stand_in: subprocess.Popen[bytes] | None = None

    def start_module(
        self, name: str, module: str, *arguments: str, stdin: int | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a module of this package; the coordinator first.

        Args:
            name: of the process, for messages.
            module: below ``persia_torchrec``.
            arguments: of its command line.
            stdin: as for ``Popen``.
        """
        command = [sys.executable, "-m", f"persia_torchrec.{module}", *arguments]
        process = subprocess.Popen(command, stdin=stdin)
        self._modules.append((name, process))
        return process

    def start_stand_in(self) -> None:
        """Start what is a trainer until :meth:`finish`: see ``stand_in.py``."""
        self._stand_in = self.start_module(
            "stand-in", "launch.stand_in", stdin=subprocess.PIPE
        )

    def start_work(self, role: str, index: int, size: int, work: Work) -> None:
        """Start a trainer or a data loader, the ``index``-th of ``size``."""
        process = multiprocessing.get_context("spawn").Process(
            target=_work, args=(role, index, size, work), name=f"{role} {index}"
        )
        process.start()
        self._works.append(process)

    def finish(self) -> None:
        """End the stand-in, if there is one, as a trainer that is through."""
        if self._stand_in is not None and self._stand_in.stdin is not None:
            self._stand_in.stdin.close()

    def wait_for_coordinator(self, timeout_s: float) -> int:
        """Wait until the job has ended; return the coordinator's status.

        Raises:
            JobError: the job has not ended in time.
        """
        _, coordinator = self._modules[0]
        try:
            return coordinator.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise JobError(
                f"The job must end within {timeout_s:g} s. It has not. Give a longer "
                "timeout_s."
            ) from None

    def failed(self) -> str | None:
        """Return what to say of a process that has ended badly; None: none has."""
        statuses = [(name, process.poll()) for name, process in self._modules]
        statuses += [(process.name, process.exitcode) for process in self._works]
        for name, status in statuses:
            if status:
                return f"{name} ended with status {status}; its error stands above."
        return None

    def require_all_well(self) -> None:
        """Raise if a process has ended badly.

        Raises:
            JobError: which one.
        """
        failure = self.failed()
        if failure is not None:
            raise JobError(f"The job failed: {failure}")

    def end(self) -> None:
        """End what still runs."""
        deadline = time.monotonic() + _END_TIMEOUT_S
        for _, process in self._modules:
            process.terminate()
        for work in self._works:
            work.terminate()
        for name, process in self._modules:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                logger.warning("%s does not end; killing it", name)
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
        for work in self._works:
            work.join(max(deadline - time.monotonic(), 0.1))
            if work.exitcode is None:
                logger.warning("%s does not end; killing it", work.name)
                work.kill()
                work.join()
            work.close()


class Watch:
    """Looks whether a job has failed, and interrupts the main thread then.

    Made by the thread that owns the children; only the main thread is interrupted, as
    by Ctrl-C.

    Args:
        book: the job's address book; only the watch uses it from here on.
        children: its processes.
    """

    def __init__(self, book: AddressBook, children: Children) -> None:
        self._book = book
        self._children = children
        self._lock = threading.Lock()
        self._failure: str | None = None  # guarded by _lock
        is_main = threading.current_thread() is threading.main_thread()
        self._interrupts = is_main  # guarded by _lock
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="job watch", daemon=True)
        self._thread.start()

    def disarm(self) -> str | None:
        """Interrupt nobody from now on; return why the job has failed, if it has."""
        # The only interruption may come right here; the result tells of it too.
        with contextlib.suppress(KeyboardInterrupt), self._lock:
            self._interrupts = False
        return self._failure

    def stop(self) -> str | None:
        """End the watch, and return what :meth:`disarm` does. May be called twice."""
        failure = self.disarm()
        self._stopping.set()
        self._thread.join(_END_TIMEOUT_S)
        return failure

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_S):
            failure = self._look()
            if failure is not None:
                self._tell(failure)
                return

    def _look(self) -> str | None:
        try:
            state, reason = self._book.state()
        except JobError as exc:
            with contextlib.suppress(JobError):
                if self._children.wait_for_coordinator(_EXIT_TIMEOUT_S) == 0:
                    return None  # the job is finished
            return f"the coordinator is gone: {exc}"
        if state == "running":
            return self._children.failed()
        return reason if state == "failed" else None

    def _tell(self, failure: str) -> None:
        with self._lock:
            self._failure = failure
            main = threading.main_thread().ident
            if self._interrupts and main is not None:
                signal.pthread_kill(main, signal.SIGINT)


def _work(role: str, index: int, size: int, work: Work) -> None:
    """Do the work of one process of a role, which begins here."""
    env.set_env("REPLICA_INDEX", index)
    env.set_env("REPLICA_SIZE", size)
    if isinstance(work, Path):
        sys.exit(script.main([role, str(work)]))
    assert isinstance(work, FunctionType)
    sys.exit(script.take_part(role, work.__qualname__, work))
