"""Ports: no input ends a process, fills its memory, or keeps others waiting."""

import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.fuzz import ports, serving_ports
from tests.fuzz.conftest import LEAST_OF_A_ROW
from tests.support.processes import wait_until

MOST_GROWN_MIB = 64
PORTS = {
    "embedding server": (ports.serve_embeddings, ports.server_messages, ports.LOOKUP),
    "embedding worker": (ports.serve_worker, ports.worker_messages, ports.FORWARD),
    "address book": (ports.serve_book, ports.book_messages, ports.GET),
    "data path": (ports.serve_inbox, ports.inbox_messages, ports.HELLO),
}

SERVING = {
    "HTTP": (ports.serve_http, serving_ports.http_requests, serving_ports.change_http),
    "gRPC": (ports.serve_grpc, serving_ports.grpc_frames, serving_ports.change_grpc),
}

pytestmark = pytest.mark.multiprocess


OPENED_ONCE = 8
"""Descriptors that a process opens once, at its first need: those of pyzmq's thread
that frees what a large reply was sent from, and of the lock of machine code."""


class Listening:
    """A process that listens, and one that asks it something all the time."""

    def __init__(self, processes, folder, name, serve, ask):
        self._processes, self._folder = processes, folder
        arguments = []
        if serve in (ports.serve_worker, ports.serve_http, ports.serve_grpc):
            arguments = [self._start("server", ports.serve_embeddings)]
        self.address = self._start(name, serve, *arguments)
        if name == "address book":
            self.address += "#book"
        self.asking = processes.start(
            "asking", ports.measure, self.address, ask, folder
        )
        self.asking.has_printed("asking")
        self._before = self.resident_mib()
        self._num_open = self.num_open()

    def _start(self, name, serve, *arguments):
        self.process = self._processes.start(name, serve, *arguments)
        self.process.has_printed("ready ")
        return self.process.output().partition("ready ")[2].split()[0]

    def resident_mib(self):
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition("VmRSS:")[2].split()[0]) / 1024

    def num_open(self):
        return len([*Path(f"/proc/{self.process.pid}/fd").iterdir()])

    def end(self):
        """Return the latencies in ms; the process lives, and holds nothing more."""
        (self._folder / "end").touch()
        assert self.asking.status() == 0, self.asking.output()
        text = self.asking.output().rpartition("latencies ")[2]
        assert self.process.process.is_alive(), self.process.output()[-3000:]
        assert "Traceback" not in self.process.output(), self.process.output()[-6000:]
        wait_until(
            lambda: self.num_open() <= self._num_open + OPENED_ONCE,
            "connections are closed",
            details=lambda: f"{self.num_open()} open, {self._num_open} before",
        )
        self.grown_mib = self.resident_mib() - self._before
        return 1000 * np.array(msgspec.json.decode(text))


def told(listening, began_s, num, seed, name, record_property):
    """Check what the listener has left, and write a row of the table."""
    took_s = time.monotonic() - began_s
    latencies = listening.end()
    assert listening.grown_mib < MOST_GROWN_MIB
    if num >= LEAST_OF_A_ROW:
        p99, most = np.percentile(latencies, 99), latencies.max()
        measured = (
            f"p99 of others {p99:.0f} ms, most {most:.0f} ms, of {len(latencies)}; "
            f"grown {listening.grown_mib:.1f} MiB"
        )
        row = name, num, "-", f"{num / took_s:.0f}", measured, seed
        record_property("row", row)


SHARING = ["embedding server", "embedding worker", "data path"]
CASES = [
    *(("messages", ports.fuzz_messages, name) for name in PORTS),
    *(("shared memory", ports.fuzz_memory, name) for name in SHARING),
    *(("strangers' bytes", ports.fuzz_connections, name) for name in PORTS),
]


@pytest.mark.parametrize(("what", "fuzz", "name"), CASES)
def test_a_port_survives_any_input(
    what, fuzz, name, processes, tmp_path, num_inputs, fuzz_seed, record_property
):
    serve, seeds, ask = PORTS[name]
    given = ports.GREETINGS if fuzz is ports.fuzz_connections else seeds()
    listening = Listening(processes, tmp_path, name, serve, ask)
    began_s = time.monotonic()
    fuzz(listening.address, given, num_inputs, fuzz_seed)
    row = f"port of {name}: {what}"
    told(listening, began_s, num_inputs, fuzz_seed, row, record_property)


@pytest.mark.parametrize("name", SERVING)
def test_an_inference_server_survives_any_request(
    name, processes, tmp_path, num_inputs, fuzz_seed, record_property
):
    serve, seeds, change = SERVING[name]
    listening = Listening(processes, tmp_path, name, serve, [])
    began_s = time.monotonic()
    given = listening.address, seeds(), num_inputs, fuzz_seed, change
    ports.fuzz_connections(*given)
    told(listening, began_s, num_inputs, fuzz_seed, f"port of {name}", record_property)


def test_a_message_without_an_end_keeps_no_one_waiting(
    processes, tmp_path, num_inputs, fuzz_seed, record_property
):
    """Frames of a message that does not end, from a client with the token."""
    serve, _, ask = PORTS["embedding server"]
    listening = Listening(processes, tmp_path, "server", serve, ask)
    began_s = time.monotonic()
    dealer = ports.Dealer(listening.address)
    dealer.ask(ask)
    for _ in range(num_inputs):
        dealer.socket.send(b"x", ports.zmq.SNDMORE)
    dealer.close()
    row = "port of embedding server: a message without an end"
    told(listening, began_s, num_inputs, fuzz_seed, row, record_property)
