"""TCP port numbers for tests that must name a port before a process listens on it.

They lie below the ephemeral ports (32768 to 60999), which the kernel gives to outgoing
connections and to whatever listens on port 0. The range is cut into blocks. A process
owns the block whose first port it listens on, so that neither another worker of
pytest-xdist nor another ``make test`` on this machine draws from it.

A test that can listen on port 0 and read the port afterwards should do that instead.
"""

import atexit
import functools
import itertools
import os
import socket
from collections.abc import Iterator

FIRST_PORT, LAST_PORT = 18_000, 31_999
BLOCK = 250


def draw_port() -> int:
    """Return a port on which no process listens."""
    return draw_ports(1)[0]


def draw_ports(num: int) -> list[int]:
    """Return consecutive ports on which no process listens.

    A port comes again once the block is used up, if it is free then.
    """
    ports = _block_of_process(os.getpid())
    for _ in range(BLOCK):
        drawn = [next(ports) for _ in range(num)]
        if drawn[-1] - drawn[0] == num - 1 and all(map(_is_free, drawn)):
            return drawn
    raise AssertionError(f"{num} consecutive ports must be free. Received: none.")


@functools.cache
def _block_of_process(pid: int) -> Iterator[int]:
    """Take a block of ports for the rest of a process's life."""
    starts = range(FIRST_PORT, LAST_PORT, BLOCK)
    for number in range(len(starts)):
        first = starts[(pid + number) % len(starts)]
        owner = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            owner.bind(("", first))
            owner.listen()
        except OSError:
            owner.close()
            continue
        atexit.register(owner.close)
        return itertools.cycle(range(first + 1, first + BLOCK))
    raise AssertionError(f"A block of ports from {FIRST_PORT} on must be free.")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
