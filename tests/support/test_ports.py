"""Ports of tests: none is drawn twice at a time, nor by two processes."""

import os
import socket
import subprocess
import sys
from contextlib import closing

from tests.support.ports import BLOCK, FIRST_PORT, LAST_PORT, draw_port, draw_ports


def test_ports_are_consecutive_below_the_ephemeral_ones_and_free():
    drawn = draw_ports(3)
    assert drawn == list(range(drawn[0], drawn[0] + 3))
    assert drawn[0] > FIRST_PORT
    assert drawn[-1] <= LAST_PORT < 32_768
    for port in drawn:
        with closing(socket.create_server(("127.0.0.1", port))):
            pass


def test_a_port_in_use_is_not_drawn():
    with closing(socket.create_server(("127.0.0.1", draw_port()))) as server:
        taken = server.getsockname()[1]
        assert taken not in [draw_port() for _ in range(2 * BLOCK)]


def test_two_processes_draw_from_different_blocks():
    own = draw_port()
    command = "import tests.support.ports; print(tests.support.ports.draw_port())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    drawn = subprocess.check_output([sys.executable, "-c", command], env=environment)
    assert int(drawn) // BLOCK != own // BLOCK
