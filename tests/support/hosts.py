"""Several hosts, each with an address, a process table and a name of its own.

``switch.py`` makes them, of namespaces; a test is skipped where the kernel grants none.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

import pytest

from tests.support import switch


class Host(NamedTuple):
    """One host: its index, its address, and its first process."""

    index: int
    address: str
    pid: int


class Hosts:
    """Hosts of one network; they and their processes end with the ``with`` block."""

    def __init__(self, num: int) -> None:
        self._switch = subprocess.Popen(
            [sys.executable, "-S", str(Path(switch.__file__)), str(num)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._switch.stdout is not None
        first = self._switch.stdout.readline().split()
        if not first:
            _, why = self._switch.communicate()
            pytest.skip(f"several hosts need namespaces and /dev/net/tun: {why}")
        self.all = [
            Host(index, switch.address_of(index), int(pid))
            for index, pid in enumerate(first)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._switch.communicate()

    def cut(self, host: Host) -> None:
        """Cut the link of a host: packets from it and to it are lost."""
        self._ask(f"cut {host.index}")

    def mend(self, host: Host) -> None:
        """Mend the link of a host."""
        self._ask(f"mend {host.index}")

    def set_round_trip(self, seconds: float) -> None:
        """Let a packet take half of so long from one host to another."""
        self._ask(f"delay {seconds / 2}")

    def _ask(self, line: str) -> None:
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        self._switch.stdin.write(f"{line}\n")
        self._switch.stdin.flush()
        assert self._switch.stdout.readline() == "done\n"


def run_on(host: Host, target: Callable[..., object], *args: object) -> object:
    """Do ``target(*args)`` on a host, in a child of this process.

    The child gets the signals of this process, and ends with it; its exit status is
    that of this one. This process must have one thread, as those of ``processes.py``
    begin with.
    """
    cwd = Path.cwd()
    descriptor = os.pidfd_open(host.pid)
    switch.call("setns", descriptor, switch.USER | switch.OF_HOST)
    os.close(descriptor)
    os.chdir(cwd)
    child = os.fork()
    if child == 0:
        switch.end_with_parent()
        return target(*args)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(child, number))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if status >= 0 else 128 - status
