"""Implicit job membership of scripts under torchrun or plain python.

``python load.py``, ``RANK=0 WORLD_SIZE=1 python train.py``, ``torchrun train.py`` and a
process of one's own orchestration count as those that ``job/script.py`` runs, and
end as they do:

    the script ends             its work is done; the process stays until the job is
                                finished, and ends with status 1 if the job fails
    an uncaught exception, or   the job fails, with that reason
    ``sys.exit`` with a status
    SIGTERM, SIGINT, SIGHUP     the same, unless the script handles them by itself

The process stays because supervisors, as honcho or Slurm, end a job soon after its
first process has ended. There is no ``with`` block around such a script: how it ends is
seen when the interpreter does. So ``raise SystemExit(1)`` outside of a function of
``multiprocessing`` is not seen, ``sys.exit(1)`` is.

A process is one member, whichever context comes first. A child that takes the place of
its parent, such as a worker that it forks, is none: ``PERSIA_MEMBER`` tells it so.
"""

import logging
import os
import sys
import threading
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Literal, NoReturn

from persia_torchrec import env
from persia_torchrec.errors import JobError, PersiaError
from persia_torchrec.job.member import JobMember
from persia_torchrec.logger import get_default_logger

logger = logging.getLogger(__name__)

_FIRST = 1000  # of what multiprocessing calls at the end of a process
_FORKING = ("multiprocessing.popen_fork", "multiprocessing.forkserver")
_joining = threading.Lock()


def join_job(
    role: Literal["loader", "trainer"], index: int, size: int, store: env.JobStore
) -> None:
    """Make this process a member of its job, unless it is one or works for one.

    Any thread may call it. Errors are those of ``JobMember``.
    """
    with _joining:
        if _is_member(role, index, store.port):
            return
        if not logger.isEnabledFor(logging.INFO):  # it is not set up
            get_default_logger()
        member = JobMember(role, index, size, store=store, expendable=role == "loader")
        member.watches_parent = False  # a shell may start a script and end
        _Script(member.__enter__())


def _is_member(role: str, index: int, port: int) -> bool:
    """Return whether this process is a member, or works for that one of the job."""
    place, _, pid = (env.text("PERSIA_MEMBER") or "").rpartition(" ")
    if pid == str(os.getpid()):
        return True
    return place == f"{port} {role} {index}" or (not place and pid == str(port))


def _code_of_function() -> int | None:
    """Return the exit status of the function that multiprocessing has run here, if any.

    From Python 3.13 on its exception is gone when the process ends; only a variable of
    the function that has forked the process has what is left of it.
    """
    frame = sys._getframe() if sys.version_info >= (3, 13) else None
    while frame and frame.f_globals.get("__name__") not in _FORKING:
        frame = frame.f_back
    return frame.f_locals.get("code") if frame else None


class _Script:
    """The script of this process, as a member that leaves when the interpreter ends."""

    def __init__(self, member: JobMember) -> None:
        self._member = member
        self._status: object = None  # what the main thread has given to sys.exit
        self._sys_exit, self._hook = sys.exit, sys.excepthook
        sys.exit, sys.excepthook = self._exit, self._report
        # Also at the end of a function that multiprocessing runs, which is no exit.
        Finalize(None, self._end, exitpriority=_FIRST)

    def _exit(self, status: object = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            self._status = status
        self._sys_exit(status)  # type: ignore[arg-type]

    def _report(
        self,
        kind: type[BaseException],
        exc: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        if not self._member.is_consequence(exc):
            self._hook(kind, exc, traceback)

    def _end(self) -> None:
        """Leave the job; what the script raised was told to it before."""
        member = self._member
        exc = sys.exception() or getattr(sys, "last_value", None)
        if exc is None:
            exc = SystemExit(_code_of_function() or self._status)
        status: int | None = None  # that of the script itself
        try:
            if isinstance(exc, SystemExit) and exc.code in (None, 0):
                if not member.ended.is_set():
                    logger.info("%s has ended, waiting for the job", member.who)
                member.report_done()
                member.wait_for_end()
        except (PersiaError, KeyboardInterrupt, SystemExit) as raised:
            if not isinstance(raised, JobError):
                self._report(type(raised), raised, raised.__traceback__)
            exc, status = raised, 1
        try:
            if member.__exit__(type(exc), exc, None):
                status = 0
        except SystemExit as ending:  # another has failed, or this one starts again
            status = ending.code if isinstance(ending.code, int) else 1
        if status is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
