"""How many threads ZeroMQ starts in a process of its own."""

import os
import subprocess
import sys

import pytest

from persia_torchrec.errors import ConfigError
from persia_torchrec.rpc.channel import Listener
from persia_torchrec.rpc.client import Connections

THREADS_OF_CONTEXTS = """
import os
import zmq
from persia_torchrec.rpc.channel import Listener, open_socket

def threads_of(open):
    before = len(os.listdir("/proc/self/task"))
    opened = open()
    print(len(os.listdir("/proc/self/task")) - before)
    return opened

sockets = [threads_of(lambda: open_socket(zmq.DEALER, {})) for _ in range(2)]
threads_of(lambda: Listener("127.0.0.1", 0))
"""
REAPER = 1  # ZeroMQ's own thread of a context, which closes its sockets


@pytest.mark.parametrize("num", [1, 2])
def test_each_context_has_as_many_io_threads_as_the_setting_says(num):
    variables = {n: v for n, v in os.environ.items() if "TOKEN" not in n}
    printed = subprocess.check_output(
        [sys.executable, "-c", THREADS_OF_CONTEXTS],
        env={**variables, "PERSIA_IO_THREADS": str(num)},
    )
    first, second, listener = map(int, printed.split())
    assert first == num + REAPER
    assert second == 0  # of the same context
    assert listener == num + REAPER


@pytest.mark.parametrize("value", ["0", "17", "many"])
def test_no_socket_is_opened_with_a_number_of_threads_that_cannot_be(
    monkeypatch, value
):
    monkeypatch.setenv("PERSIA_IO_THREADS", value)
    must = f"^PERSIA_IO_THREADS must be an integer from 1 to 16. Received: '{value}'"
    with pytest.raises(ConfigError, match=must):
        Listener("127.0.0.1", 0)
    with pytest.raises(ConfigError, match=must):
        Connections("server", ["tcp://127.0.0.1:1"])
