"""Signals: graceful shutdown of a process, whatever its main thread does.

SIGTERM and SIGINT; SIGHUP, as a terminal sends it that is closed; and SIGUSR1 and
SIGUSR2, which Slurm sends to each process of a job that it is about to end
(``--signal``).

Python runs a signal's handler in the main thread. So it is delayed while that thread
waits for a lock or is inside native code, and an exception that it raises is lost where
Python swallows exceptions: in a callback from native code, as LLVM makes one for each
loop that numba compiles or loads, in ``__del__``, and in some imports.

Here a thread of its own reads them from ``signal.set_wakeup_fd``. They are not blocked:
processes that a user's script starts would inherit the mask.

Who sends signals. A signal goes to a process that is known by its descriptor and start
time, or to a child that was not waited for, and is logged before:

    process_identity   ``send``: verbs kill and stop; a coordinator to members that are
                       late, members to a coordinator that hangs; servers of a cluster
                       and processes of a service context, to their parent's children
    supervisor         passes signals on to its command, and kills it when it is late;
                       the kernel kills a command with its supervisor (PR_SET_PDEATHSIG,
                       which means the thread that has forked: the main one)
    signals            daemons of a process that ends; the main thread of this process
    torchrun.py        this process, when its job has failed
    torchx             SIGTERM to the process group of each role, a session of its own;
                       SIGKILL to its first process after 10 s
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.util import Finalize
from types import FrameType
from typing import Self

from persia_torchrec import timeouts

logger = logging.getLogger(__name__)

# Tells a supervisor that its command has joined the job. No scheduler sends it.
JOINED = signal.SIGRTMIN + 7
START_AGAIN = 75  # exit status of a process that its supervisor shall start again

WARNINGS = signal.SIGUSR1, signal.SIGUSR2  # of a scheduler
END_SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *WARNINGS


_COMPILERS = "numba.core.compiler", "torch._dynamo.convert_frame"  # modules
_POLL_S = 0.01
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class EndSignals:
    """Receives signals in a ``with`` block, which the main thread enters and leaves.

    A thread of its own calls ``react`` with the signal's name, as ``"SIGTERM"``, and
    the main thread calls ``handler``, as soon as possible. Outside of the block, and in
    a child that is forked within it, the previous handlers hold. A signal that was
    ignored stays so, as SIGINT by a shell for a command in the background and SIGHUP by
    ``nohup``, and one for which a script has a handler of its own is that one's; in a
    block that another thread enters, all signals stay as they are. Children that are
    forked within the block ignore ``WARNINGS``, which a scheduler sends to them, too.

    Attributes:
        heard: the signals that have come, also to a handler of the script's own.
    """

    def __init__(
        self,
        react: Callable[[str], None],
        *,
        handler: Callable[[int, FrameType | None], None] = lambda *_: None,
    ) -> None:
        self._react = react
        self._handler = handler
        self._is_set = False
        self.heard: set[signal.Signals] = set()
        self._held = threading.local()  # signal mask of a thread that forks
        is_main = threading.current_thread() is threading.main_thread()
        self._numbers = [
            number
            for number in END_SIGNALS
            if is_main and signal.getsignal(number) in _DEFAULTS
        ]

    def __enter__(self) -> Self:
        if not self._numbers:
            return self
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup_before = signal.set_wakeup_fd(
            self._writer, warn_on_full_buffer=False
        )
        self._before = {n: signal.signal(n, self._handler) for n in self._numbers}
        self._is_set = True
        os.register_at_fork(
            before=self._hold,
            after_in_parent=self._release,
            after_in_child=self._be_forked,
        )
        self._thread = threading.Thread(target=self._hear, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_set:
            self._restore()
            os.close(self._writer)  # which ends the thread
            self._thread.join(timeouts.SIGNALS_CLOSE_S)

    def interrupt(self, number: signal.Signals) -> None:
        """Have the main thread call the handler, if it is there.

        By SIGTERM in the place of a signal that is ignored here, and came elsewhere.
        """
        if signal.getsignal(number) == signal.SIG_IGN:
            number = signal.SIGTERM
        if number in self._numbers:
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    @staticmethod
    def poll(is_true: Callable[[], bool], timeout_s: float) -> None:
        """Wait in a handler until something is true; it may take no lock."""
        until_s = time.monotonic() + timeout_s
        while not is_true() and time.monotonic() < until_s:
            time.sleep(_POLL_S)

    def is_foreign(self, number: signal.Signals) -> bool:
        """Return whether a script has a handler of its own for a signal."""
        known = (self._handler, signal.SIG_IGN, *_DEFAULTS)
        return signal.getsignal(number) not in known

    def has_passed(self, number: signal.Signals) -> bool:
        """Return whether a script's own handler has got a signal."""
        return self.is_foreign(number) and number in self.heard

    def ignore(self) -> None:
        """Ignore the signals from now on, and after the block; the main thread does."""
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)

    def _restore(self) -> None:
        """Restore the previous handlers, once."""
        if self._is_set:
            self._is_set = False
            for number, handler in self._before.items():
                if signal.getsignal(number) == self._handler:
                    signal.signal(number, handler or signal.SIG_DFL)
            descriptor = signal.set_wakeup_fd(-1)
            is_ours = descriptor == self._writer
            signal.set_wakeup_fd(self._wakeup_before if is_ours else descriptor)

    # A signal to a child that is being forked waits until it has its own handlers.

    def _hold(self) -> None:
        if self._is_set:
            block = signal.SIG_BLOCK
            self._held.mask = signal.pthread_sigmask(block, self._numbers)

    def _release(self) -> None:
        if (mask := self._held.__dict__.pop("mask", None)) is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _be_forked(self) -> None:
        is_set = self._is_set
        self._restore()
        for descriptor in (self._reader, self._writer) if is_set else ():
            os.close(descriptor)  # else the parent's thread does not end
        for number in WARNINGS if is_set else ():
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, signal.SIG_IGN)
        self._release()

    def _hear(self) -> None:
        while numbers := os.read(self._reader, 64):
            for number in self._numbers:
                if number not in numbers:
                    continue
                self.heard.add(number)
                if signal.getsignal(number) == self._handler:
                    try:
                        self._react(number.name)
                    except Exception:
                        logger.exception("the handler of %s failed", number)
        os.close(self._reader)


def end_by_signals() -> None:
    """Let SIGINT end a process at once, as SIGTERM does, until ``EndSignals``."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def outlive_end_signals() -> None:
    """Let a child of a member train on when the signals of the job reach it, too.

    Its main thread calls this; in another it does nothing. The child ends with its
    work, or with its parent, by ``end_daemons_at_exit``. No signal is ignored or
    blocked: programs that the child starts would inherit that.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in END_SIGNALS:
        if signal.getsignal(number) in (*_DEFAULTS, None):
            signal.signal(number, lambda *_: None)


class OutlivesSignals:
    """The ``worker_init_fn`` of a loader, around that of the user.

    It stands here, as a worker that is spawned imports the module of what it is given.
    """

    def __init__(self, then: Callable[[int], object] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        """Begin the work of a worker, by its number."""
        outlive_end_signals()
        if self._then is not None:
            self._then(worker)


def end_daemons_at_exit() -> None:
    """Have the daemons of this process end with it, those that outlive signals, too.

    ``multiprocessing`` ends them by SIGTERM, and waits without a deadline.
    """
    Finalize(None, end_daemons, exitpriority=0)


def end_daemons() -> None:
    """End the daemons of this process within ``timeouts.DAEMON_END_S``."""
    daemons = [one for one in multiprocessing.active_children() if one.daemon]
    if daemons and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises for a worker
    for daemon in daemons:  # not waited for, so that its number is its own
        logger.info("sends SIGTERM to process %s, %s", daemon.pid, daemon.name)
        daemon.terminate()
    until_s = time.monotonic() + timeouts.DAEMON_END_S
    for daemon in daemons:
        daemon.join(max(until_s - time.monotonic(), 0.0))
        if daemon.is_alive():
            logger.warning("sends SIGKILL to process %s, %s", daemon.pid, daemon.name)
            daemon.kill()


def compiles_here() -> bool:
    """Return whether the main thread compiles: loops by numba, or a model by torch."""
    frames = sys._current_frames()  # noqa: SLF001  # documented, and without another
    frame = frames.get(threading.main_thread().ident or 0)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_COMPILERS):
            return True
        frame = frame.f_back
    return False


def is_in_compiler(frame: FrameType | None) -> bool:
    """Return whether a frame is inside numba: an exception there damages LLVM."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in ("numba", "llvmlite"):
            return True
        frame = frame.f_back
    return False
