"""Shared start and graceful shutdown of servers, workers and inference servers.

A service is a member of a job, or stands alone. A ``Lifetime`` has the methods of
``JobMember``, so that a main need not tell the two apart.
"""

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError

from persia_torchrec import env, timeouts
from persia_torchrec.errors import NotReadyError, PersiaError
from persia_torchrec.job import process_identity
from persia_torchrec.job.process_identity import OwnFigures
from persia_torchrec.job.signals import END_SIGNALS, EndSignals, end_by_signals
from persia_torchrec.logger import get_default_logger
from persia_torchrec.rpc.addresses import LOOPBACK, raise_descriptor_limit
from persia_torchrec.rpc.greeting import NO_JOB
from persia_torchrec.rpc.listener import Listener

_PARENT_CHECK_S = 1.0
_POLL_MS = 100
_NOT_READY = "compiling its loops, or restoring its rows."


def run_service(name: str, serve: Callable[[], int | None], level: str = "INFO") -> int:
    """Serve until the end; return the exit status. ``name`` is that of the logger."""
    end_by_signals()
    raise_descriptor_limit()
    try:
        get_default_logger(level=level)
        return serve() or 0
    except PersiaError as exc:
        logging.getLogger(name).error("%s: %s", type(exc).__name__, exc)
        return 1


class NoBook:
    """What a service that stands alone has in place of a job's ``AddressBook``."""

    recovery_s = 0.0

    def address(self, role: str, index: int) -> str | None:
        """Return None: no process of a role was there before."""

    def note(self, name: str) -> str | None:
        """Return None: there is no other process."""

    def tell(self, name: str, value: str) -> None:
        """Keep nothing, as no other process reads it."""

    def claim_note(self, name: str, value: str) -> str:
        """Return the value: no other process has claimed another."""
        return value


class Lifetime(contextlib.ExitStack, OwnFigures):
    """The life of a service that stands alone: it ends by SIGTERM, SIGINT or SIGHUP.

    The signals are handled from the first :meth:`call_at_end` on; before it, they end
    the process at once. The main thread enters the block and calls the methods.

    Attributes:
        told_again: set by a signal that comes ``timeouts.SAME_SIGNAL_S`` after one.
    """

    greeting = NO_JOB

    def __init__(self, host: str = LOOPBACK) -> None:
        super().__init__()
        self.book, self.notes = NoBook(), {}
        self.host = host
        self.told_again = threading.Event()
        self._end: Future[None] = Future()
        self._ended_s = math.inf
        self._handles_signals = False

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Have something called, from another thread, when the service must end."""
        if not self._handles_signals:
            self._handles_signals = True
            self.enter_context(EndSignals(lambda _: self._reach_end()))
        self._end.add_done_callback(lambda _: callback())

    def wait_for_end(self) -> None:
        """Wait until the service must end."""
        ending = threading.Event()
        self.call_at_end(ending.set)
        ending.wait()

    def register(self, address: str) -> None:
        """Make the address known to the job, if there is one: the service is ready."""
        process_identity.report_joined()
        self.become_ready()

    def report_compiling(self, is_compiling: bool) -> None:
        """Make known that the service compiles its loops, or no longer does."""

    def _reach_end(self) -> None:
        if time.monotonic() > self._ended_s + timeouts.SAME_SIGNAL_S:
            self.told_again.set()
        with contextlib.suppress(InvalidStateError):  # it was reached before
            self._end.set_result(None)
            self._ended_s = time.monotonic()


class ChildLifetime(Lifetime):
    """The life of a service that another process has started: it ends with that.

    It writes the lines ``compiling`` and ``compiled``, so that the other process can
    extend its deadline. SIGINT is ignored: Ctrl-C is for the parent. With
    ``PERSIA_PARENT_FD`` so are SIGTERM and SIGHUP, which systemd and Slurm send to all
    processes: the parent needs the service until its own end.
    """

    def __init__(self) -> None:
        super().__init__()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        parent = (os.getppid(),)
        threading.Thread(target=self._end_with, args=parent, daemon=True).start()
        descriptor = env.parent_fd()
        if descriptor is not None:
            for number in END_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            args = (descriptor,)
            threading.Thread(target=self._end_by, args=args, daemon=True).start()

    def report_compiling(self, is_compiling: bool) -> None:
        """Write a line when compiling begins or ends."""
        _write_line("compiling" if is_compiling else "compiled")

    def _end_with(self, parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_S)
        self._reach_end()

    def _end_by(self, descriptor: int) -> None:
        os.read(descriptor, 1)
        if not self._handles_signals:  # it loads, which may take long
            os._exit(128 + signal.SIGTERM)
        self._reach_end()


def report_ready(address: str) -> None:
    """Write the line that the process which started this one waits for."""
    _write_line(f"ready {address}")


@contextlib.contextmanager
def reject_until_ready(listener: Listener) -> Iterator[None]:
    """Have a thread, owner of the socket meanwhile, answer with ``NotReadyError``."""
    is_over = threading.Event()

    def reject() -> None:
        while not is_over.is_set():
            message = listener.receive(_POLL_MS)
            if message is not None:
                peer, header, _ = message
                error = NotReadyError(_NOT_READY, server="")
                listener.send_error(peer, header.request, error)

    thread = threading.Thread(target=reject, name="not ready", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _write_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
