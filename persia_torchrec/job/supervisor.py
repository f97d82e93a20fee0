r"""Supervisor: run a command, and restart it when it was killed (failover).

    python -m persia_torchrec.job.supervisor --port 0 --memory-dir auto -- \
        python -m persia_torchrec.server

Such a supervisor stands above each process of a job that may be killed. It opens what
has to survive that one, and hands it down; ``env.py`` names the variables:

    a listening socket    the port stays, and clients that connect meanwhile wait
    memory                a file without a name, which is gone with its last process

    how the command ends               what follows
    by a signal, or with START_AGAIN   it is started again after 0.1 s. If it had not
                                       joined its job, it is after twice the time that
                                       it was before, 10 s at most, and three times in
                                       a row at most
    with any other status              the supervisor ends with the same

It is two processes, the second a fork of the first, so that either may be killed, also
while the command is down, or together with it:

    outer --starts--> inner --starts--> command

    which is killed   what follows
    inner             the kernel kills the command with it; the outer one starts the
                      next inner one, and that the command
    outer             the command runs on; the inner one has a child that waits in the
                      place of its parent, to be the outer one of the next

SIGTERM, SIGINT, SIGUSR1, SIGUSR2 and SIGHUP are passed on. The end of the process that
has started the supervisor counts as a SIGTERM. After one of these the command is not
started again, and is killed if it runs for longer than ``end_timeout_s``. Each process
has a process group of its own, so that a signal to the group of the outer one reaches
the command once. This module imports little, and starts at once.
"""

import contextlib
import ctypes
import itertools
import logging
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from persia_torchrec import env, timeouts
from persia_torchrec.env import MAX_PORT
from persia_torchrec.errors import ConfigError, DiscoveryError, PersiaError
from persia_torchrec.job import failures
from persia_torchrec.job.signals import JOINED, START_AGAIN, WARNINGS
from persia_torchrec.job.survivable_memory import PRIVATE, open_memory
from persia_torchrec.logger import get_default_logger
from persia_torchrec.parsing.command_line import format_flags, parse_flags
from persia_torchrec.parsing.settings import declared
from persia_torchrec.rpc.addresses import (
    LOOPBACK,
    local_address,
    open_listening,
    raise_descriptor_limit,
    require_token,
)

logger = logging.getLogger("persia_torchrec.job.supervisor")  # also as __main__

ALL = "all"  # value of host

_FIRST_DELAY_S, _LAST_DELAY_S = 0.1, 10.0
MAX_FAILED = 3  # times in a row that a command starts again without having joined

_LOOK_S = 0.5
_PASSED_ON = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *WARNINGS
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorConfig:
    """Supervisor: run a command, and restart it when it was killed (failover)."""

    host: str = ""
    """Address to listen on for the command; "all" for all interfaces, which is the
    loopback in a job on one machine [the interface that leads to the coordinator]"""
    port: int | None = None
    """Port to listen on for the command; 0 takes a free one. None: it opens its own."""
    end_timeout_s: float = timeouts.COMMAND_END_S
    """Seconds after a signal until the command is killed."""
    memory_dir: str = declared(
        "memory_dir", default="", also="Empty: memory of small pages"
    )

    def __post_init__(self) -> None:
        if self.port is not None and not 0 <= self.port <= MAX_PORT:
            raise ConfigError(
                f"port must be in [0, {MAX_PORT}]. Received: {self.port}."
            )


@dataclass
class Restarts:
    """How soon, and how often in a row, what has ended is started again."""

    num_failed: int = 0
    """Starts in a row of which none has joined its job, or was ready."""

    def delay_s(self, *, has_joined: bool) -> float | None:
        """Return when the next start is due after an end; None: it is given up."""
        self.num_failed = 0 if has_joined else self.num_failed + 1
        if self.num_failed > MAX_FAILED:
            return None
        delay_s: float = min(_FIRST_DELAY_S * 2**self.num_failed, _LAST_DELAY_S)
        return delay_s


class Supervisor:
    """A command, as often as it has to be started, and the two processes above it.

    The outer one, which the launcher watches, waits for the inner one, and starts the
    next if that is killed. The inner one starts the command, which is killed with it;
    if the outer one is killed, it has a child wait for its own end. The command has
    the environment with what it has to know, and the descriptors that are inherited.
    """

    def __init__(
        self, command: Sequence[str], end_timeout_s: float = timeouts.COMMAND_END_S
    ) -> None:
        self._command = list(command)
        self._end_timeout_s = end_timeout_s
        self._process: int | None = None  # descriptor of the one that is waited for
        self._pid = 0  # and its number
        self._spare: int | None = None  # of a child that waits for the end of this one
        self._end_signal = 0  # that of a signal
        self._kill_at = math.inf
        self._has_joined = False
        # What follows when a process has ended, by its descriptor.
        self._watched: dict[int, Callable[[], None]] = {}
        self._parents: dict[int, Callable[[], None]] = {}  # of these: one, or none

    def run(self, num_restarts: int = 0) -> int:
        """Run the command until it ends for good; return its exit status."""
        for number in _PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: self.end(number))
        signal.signal(JOINED, lambda *_: self._note_join())
        self._watch_parent()
        own = os.pidfd_open(os.getpid())
        for num in itertools.count(num_restarts):
            if self._end_signal:
                break
            status = self._run_once(partial(self._supervise, num, own))
            if status >= 0 or self._end_signal:
                return _as_shell(status)
            how = _BY_SIGNAL[_as_shell(status)]
            logger.warning("a supervisor %s; restarting supervisor and command", how)
        return 128 + self._end_signal

    def end(self, number: int) -> None:
        """Have the command end, and not be started again; the handler of signals."""
        self._end_signal = number
        self._kill_at = min(self._kill_at, time.monotonic() + self._end_timeout_s)
        if self._process is not None:
            number = signal.SIGTERM if number == signal.SIGHUP else number
            name = signal.Signals(number).name
            logger.info("passes %s on to process %d", name, self._pid)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)

    def _note_join(self) -> None:
        self._has_joined = True

    def _supervise(self, num_restarts: int, outer: int) -> int:
        """Run the command until it ends for good; be the inner process."""
        env.set_variable("PERSIA_SUPERVISOR", os.getpid())
        self._watched = {outer: self._replace_outer}
        status = self._start_again_and_again(num_restarts)
        if self._spare is not None:
            logger.info("sends SIGKILL to its replacement, which is not needed")
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._spare, signal.SIGKILL)
        return status

    def _start_again_and_again(self, num_restarts: int) -> int:
        restarts = Restarts()
        for num in itertools.count(num_restarts):
            if self._end_signal:
                break
            env.set_variable("PERSIA_RESTARTS", num)
            self._has_joined = False
            status = _as_shell(self._run_once(self._become_command))
            if self._end_signal or status not in (START_AGAIN, *_BY_SIGNAL):
                return status
            delay_s = restarts.delay_s(has_joined=self._has_joined)
            how = _BY_SIGNAL.get(status, "has failed")
            if delay_s is None:
                logger.error(
                    "process %s, %d times in a row before it joined its job; giving "
                    "up: %s",
                    how,
                    restarts.num_failed,
                    " ".join(self._command),
                )
                return status
            logger.info("process %s; restarting it", how)
            self._pause(delay_s)
        return 128 + self._end_signal

    def _become_command(self) -> NoReturn:
        """Run the command in this process, which is killed with its parent."""
        for number in _PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if self._end_signal or os.getppid() != env.supervisor():
            os._exit(128 + (self._end_signal or signal.SIGKILL))
        try:
            os.execvp(self._command[0], self._command)
        except OSError as exc:
            raise ConfigError(
                f"The command must be executable. Received: {exc}."
            ) from exc

    def _run_once(self, work: Callable[[], int]) -> int:
        """Do work in a child; return its status, or -N if signal N has ended it."""
        pid = _fork(work)
        self._pid, self._process = pid, (process := os.pidfd_open(pid))
        if self._end_signal:  # it came while the child was being started
            self.end(self._end_signal)
        # Any child: where this is the first process of a container, it has orphans.
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != pid:
            if ended[0] == 0:
                self._look(_LOOK_S, process)
            if time.monotonic() > self._kill_at:
                logger.warning("process %d is late; sends SIGKILL to it", pid)
                signal.pidfd_send_signal(process, signal.SIGKILL)
        self._process = None
        os.close(process)
        return os.waitstatus_to_exitcode(ended[1])

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._end_signal and (left_s := deadline - time.monotonic()) > 0:
            self._look(min(left_s, _LOOK_S))

    def _look(self, timeout_s: float, *processes: int) -> None:
        """Wait until a process has ended, of these or of those that are watched."""
        poller = select.poll()
        for descriptor in (*self._watched, *processes):
            poller.register(descriptor, select.POLLIN)
        for descriptor, _ in poller.poll(1000 * timeout_s):
            if descriptor in self._watched:
                self._watched.pop(descriptor)()

    def _watch_parent(self) -> None:
        pid = env.supervisor_parent()
        if pid and not self._parents:
            # 0: of another process namespace, as for the first of a container
            try:
                self._parents = {os.pidfd_open(pid): self._end_with_parent}
            except ProcessLookupError:
                self._end_with_parent()
        self._watched = dict(self._parents)

    def _end_with_parent(self) -> None:
        logger.warning("parent process exited; exiting")
        self.end(signal.SIGTERM)

    def _replace_outer(self) -> None:
        """Have a child wait for the end of this process, in place of its parent."""
        own = os.pidfd_open(os.getpid())
        self._spare = os.pidfd_open(_fork(partial(self._stand_by, own)))
        os.close(own)
        logger.warning("outer supervisor exited; forked a replacement")
        self._watched = {**self._parents, self._spare: self._replace_outer}

    def _stand_by(self, inner: int) -> int:
        """Wait until the inner process is killed; be the outer one of another then."""
        self._process = self._spare = None
        while not select.select([inner], [], [], _LOOK_S)[0]:
            pass
        return self.run(env.num_restarts() + 1)


_BY_SIGNAL = {128 + number: f"was ended by {number.name}" for number in signal.Signals}


def under_supervisor(command: Sequence[str], **flags: object) -> list[str]:
    """Return the words, after an interpreter's, of a command with a supervisor."""
    module = "persia_torchrec.job.supervisor"
    return ["-m", module, *format_flags(**flags), "--", *command]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    get_default_logger()
    raise_descriptor_limit()  # its process has it, too
    return _tell_errors(lambda: _run(words))


def _run(words: list[str]) -> int:
    end = words.index("--") if "--" in words else len(words)
    prog = "python -m persia_torchrec.job.supervisor"
    config = parse_flags(SupervisorConfig, words[:end], prog=prog)
    command = words[end + 1 :]
    if not command:
        raise ConfigError(f"{prog} must be given a command, after --.")
    _open_for_command(config)
    # By which the coordinator knows all processes of this supervisor: 15 characters.
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"persia-%d" % os.getpid())
    return Supervisor(command, config.end_timeout_s).run()


def _fork(work: Callable[[], int]) -> int:
    """Do work in a child, in a process group of its own; return its number."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            status = _tell_errors(work)
        except Exception:
            logger.exception("the supervisor failed")
        finally:
            os._exit(status)
    return pid


def _tell_errors(work: Callable[[], int]) -> int:
    """Do work; return its exit status, or log an error."""
    try:
        return work()
    except PersiaError as exc:
        logger.error("%s", exc)
        failures.tell_launcher(str(exc))
        return 1


def _as_shell(status: int) -> int:
    """Return the exit status as a shell has it, where ``-N`` is an end by a signal."""
    return status if status >= 0 else 128 - status


def _open_for_command(config: SupervisorConfig) -> None:
    """Open the socket and the memory, and name them in the environment."""
    listener: int | str = ""
    if config.port is not None:
        host = _address(config.host)
        require_token(host, env.job_token())
        try:
            listener = open_listening(host, config.port).detach()
        except OSError as exc:  # the command has the port, too, and says whose it is
            logger.warning("cannot listen on port %d: %s", config.port, exc)
    memory: int | str = ""
    if config.memory_dir != PRIVATE:
        memory = open_memory(config.memory_dir)
    for descriptor in (listener, memory):
        if isinstance(descriptor, int):
            os.set_inheritable(descriptor, True)
    for name, value in {
        "PERSIA_SUPERVISOR_PARENT": os.getppid(),
        "PERSIA_LISTEN_FD": listener,
        "PERSIA_MEMORY_FD": memory,
    }.items():
        env.set_variable(name, value)


def _address(host: str) -> str:
    """Return the address to listen on, once the coordinator's host is known."""
    store = env.job_store()
    if host == ALL:
        return LOOPBACK if env.is_local_job() else ""
    if host or store is None:
        return host or LOOPBACK
    deadline = time.monotonic() + env.join_timeout_s()
    while True:
        try:
            return local_address(store.host)
        except DiscoveryError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    sys.exit(main())
