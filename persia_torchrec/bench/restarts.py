"""How long is a server away that was killed, and how long does a new one take to start?

Each is the only server of a job. A killed one is started again by its supervisor, while
a client waits for a lookup. A table has the seconds from the start, or the kill, to:

    supervisor   the end of the process is noticed
    joined       Python has started, what the server needs is imported
    opened       the memory is mapped
    ready        the loops are loaded, the address is registered
    answered     the client has its rows
"""

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from statistics import median
from typing import Any

import psutil

from persia_torchrec import env
from persia_torchrec.bench.filled import FilledServer
from persia_torchrec.bench.harness import Table
from persia_torchrec.bench.reference import Numbers
from persia_torchrec.bench.workload import Workload
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.errors import ServerError
from persia_torchrec.wire.address_book import AddressBook
from persia_torchrec.wire.membership import JobTimings

_DIM, _MOST_TURNS = 16, 5
_LONG_S = 600.0  # a start may compile
_SUPERVISOR = ("-m", "persia_torchrec.launch.supervisor", "--port", "0")
_MEMORY = ("--memory-dir", "auto", "--", sys.executable)
_MOMENTS = {
    "supervisor": "is started again",
    "joined": "joined the job",
    "opened": "memory /proc/",
    "ready": "ready tcp://",
}
"""What is in the line of a moment."""


class _Server:
    """A server that prints what it does, since it was started, or killed."""

    def __init__(self, command: list[str], variables: dict[str, str]) -> None:
        self._began = time.perf_counter()
        self.address = ""
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env.of_child(variables),
        )
        self._lines: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="lines", daemon=True).start()

    def moments(self) -> dict[str, float]:
        """Wait until it is ready; return the seconds until each moment."""
        moments: dict[str, float] = {}
        while "ready" not in moments:
            instant, line = self._lines.get(timeout=_LONG_S)
            if not line:
                raise ServerError("it ended before it was ready.", server="the server")
            for name, words in _MOMENTS.items():
                if words in line:
                    moments[name] = instant - self._began
            self.address = line.partition("ready ")[2].strip()
        return moments

    def kill(self, filled: FilledServer, numbers_N: Numbers) -> dict[str, float]:
        """Kill it, look rows up, and check them; return what ``moments`` does."""
        *_, server = psutil.Process(self.process.pid).children(recursive=True)
        self._began = time.perf_counter()
        server.kill()
        [(answered, _)] = filled.run(numbers_N, timer=_instant)
        return {**self.moments(), "answered": answered - self._began}

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put((time.perf_counter(), line))
        self._lines.put((time.perf_counter(), ""))


@contextmanager
def _running(capacity: int, *, survives: bool) -> Iterator[_Server]:
    """Run a server of a job whose address book is in this process."""
    command = ["-m", "persia_torchrec.server", "--capacity", str(capacity)]
    with closing(AddressBook.host(0, loopback=True, recovery_s=_LONG_S)) as book:
        JobTimings(heartbeat_s=0.2).publish(book)
        place = {"PERSIA_STORE_PORT": str(book.port), "PERSIA_STORE_HOST": "localhost"}
        before = (*_SUPERVISOR, *_MEMORY) if survives else ()
        server = _Server([sys.executable, *before, *command], place)
        yield server
        book.finish()
        server.process.wait(_LONG_S)


def measure_restarts(workload: Workload) -> list[Table]:
    """Start servers with and without what survives, in turn; kill one that is full."""
    found: dict[str, list[dict[str, float]]]
    found = {"new, private": [], "new, surviving": [], "killed": []}
    num = min(_MOST_TURNS, workload.num_turns())
    for turn in range(num):
        with _running(workload.rows, survives=False) as server:
            found["new, private"].append(server.moments())
        with _running(workload.rows, survives=True) as server:
            found["new, surviving"].append(server.moments())
            if turn + 1 == num:
                client = EmbeddingClient.connect([server.address], recovery_s=_LONG_S)
                with closing(client):
                    spec = workload.table(_DIM)
                    filled = FilledServer(spec, workload.rows, client, 0)
                    for _ in range(num):
                        numbers = filled.draw(workload.ids)
                        found["killed"].append(server.kill(filled, numbers))
    names, rows = [*_MOMENTS, "answered"], []
    for kind, samples in found.items():
        columns = [[s[name] for s in samples if name in s] for name in names]
        longest = max(max(moments.values()) for moments in samples)
        rows.append([kind, *(median(c) if c else None for c in columns), longest])
    question = (
        f"Seconds, medians of {num}, of a new server, and of one that was killed with "
        f"{workload.rows} rows, D = {_DIM}, of which {workload.ids} are looked up."
    )
    header = " | ".join(["server", *names, "longest"])
    return [Table("restarts", question, header, rows)]


def _instant(call: Callable[[], Any]) -> tuple[float, Any]:
    """Call; return when it returned, and the result."""
    result = call()
    return time.perf_counter(), result
