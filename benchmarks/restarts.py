"""How long is a server away that was killed, and what does it cost to survive?

Each is the only server of a job. A killed one is started again by its supervisor, while
a client waits for a lookup. A table has the seconds from the start, or the kill, to:

    supervisor   the end of the process is noticed
    joined       Python has started, what the server needs is imported
    opened       the memory is mapped
    ready        the loops are loaded, the address is registered
    answered     the client has its rows

The cost is that of a server that is never idle, next to one in private memory: both get
the same requests, several in flight, in turn.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from statistics import median
from typing import Any

import numpy as np
import psutil

from benchmarks.filled import FilledServer
from benchmarks.harness import (
    Table,
    Timings,
    cpu_seconds,
    interleave,
    per_dim,
    pinned,
)
from benchmarks.workload import Workload
from persia_torchrec import env
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.errors import ServerError
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.requests import JobTimings

_DIM, _MOST_TURNS = 16, 5
_REQUESTS = 24
_LONG_S = 600.0  # a start may compile
_SUPERVISOR = ("-m", "persia_torchrec.job.supervisor", "--port", "0")
_MEMORY = ("--memory-dir", "auto", "--", sys.executable)
_MOMENTS = {
    "supervisor": "is started again",
    "joined": "joined the job",
    "opened": "memory /proc/",
    "ready": "ready tcp://",
}
"""What is in the line of a moment."""


def measure_restarts(workload: Workload) -> list[Table]:
    """Start servers with and without what survives, in turn; kill one that is full."""
    found: dict[str, list[dict[str, float]]]
    found = {"new, private": [], "new, surviving": [], "killed": []}
    num = min(_MOST_TURNS, workload.num_turns())
    for turn in range(num):
        found["new, private"] += _measure(workload, survives=False)
        num_kills = num if turn + 1 == num else 0
        first, *others = _measure(workload, survives=True, num_kills=num_kills)
        found["new, surviving"].append(first)
        found["killed"] += others
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


@per_dim
def measure_survival(workload: Workload, dim: int) -> Table:
    """Let a server in private memory and one that survives have the same requests."""
    spec, cpu_s = workload.table(dim), {"private": 0.0, "surviving": 0.0}
    num = min(_REQUESTS, workload.rows // workload.ids)
    with ExitStack() as stack:
        servers: dict[str, FilledServer] = {}
        for name in cpu_s:
            with pinned(0):
                running = _running(workload.rows, survives=name == "surviving")
                process, book = stack.enter_context(running)
                _moments(process, 0.0)
            stack.enter_context(pinned(-1))
            client = _connect(book)
            stack.callback(client.close)
            pid = _server_of(process).pid
            servers[name] = FilledServer(spec, workload.rows, client, pid)

        def turn(timings: Timings) -> None:
            numbers = servers["private"].draw(num * workload.ids)
            for name, filled in servers.items():
                before_s = cpu_seconds(filled.pid)
                seconds = filled.stream(np.split(numbers, num))
                cpu_s[name] += (cpu_seconds(filled.pid) - before_s) / len(numbers)
                timings.add(name, len(numbers), seconds)

        timings = interleave(turn, workload.repeats)
    rows = []
    for name, seconds in cpu_s.items():
        rate, ratio = timings.rate(name), timings.paired_ratio(name, "private")
        cpu_ns = seconds / (workload.repeats + 1) * 1e9
        rows.append([name, rate.median, rate.slowest, ratio, cpu_ns])
    header = "memory | M rows/s, median | slowest | of private | processor, ns per row"
    question = "What survival costs a server that is never idle, lookup and update."
    return Table("survival", question, header, rows)


def _measure(
    workload: Workload, *, survives: bool, num_kills: int = 0
) -> list[dict[str, float]]:
    """Start a server and kill it; return the moments of each start."""
    began = time.perf_counter()
    with _running(workload.rows, survives=survives) as (process, book):
        moments = [_moments(process, began)]
        if num_kills:
            with closing(_connect(book)) as client:
                spec = workload.table(_DIM)
                filled = FilledServer(spec, workload.rows, client, process.pid)
                moments += _kill(process, filled, workload.ids, num_kills)
    return moments


@contextmanager
def _running(
    capacity: int, *, survives: bool
) -> Iterator[tuple["subprocess.Popen[str]", AddressBook]]:
    """Run the only server of a job; yield what prints, and the job's book."""
    before = (*_SUPERVISOR, *_MEMORY) if survives else ()
    server = ("-m", "persia_torchrec.server", "--capacity", str(capacity))
    with closing(AddressBook.host(0, recovery_s=_LONG_S)) as book:
        book.publish(JobTimings(heartbeat_s=0.2))
        place = {"PERSIA_STORE_PORT": str(book.port), "PERSIA_STORE_HOST": "localhost"}
        process = subprocess.Popen(
            [sys.executable, *before, *server],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env.of_child(place),
        )
        assert process.stdout is not None
        with process.stdout:
            yield process, book
            book.finish()
            process.wait(_LONG_S)


def _connect(book: AddressBook) -> EmbeddingClient:
    return EmbeddingClient.connect(book.addresses("server"), recovery_s=_LONG_S)


def _server_of(process: "subprocess.Popen[str]") -> psutil.Process:
    """Return the server itself, whether it has a supervisor or not."""
    top = psutil.Process(process.pid)
    return [top, *top.children(recursive=True)][-1]


def _kill(
    process: "subprocess.Popen[str]", filled: FilledServer, num_ids: int, times: int
) -> Iterator[dict[str, float]]:
    """Kill the server below its supervisor; look rows up, update and check them."""
    with ThreadPoolExecutor(1) as client:
        for _ in range(times):
            numbers_N = filled.draw(num_ids)
            server, began = _server_of(process), time.perf_counter()
            server.kill()
            run = client.submit(filled.run, numbers_N, timer=_instant)
            moments = _moments(process, began)
            yield {**moments, "answered": run.result(_LONG_S)[0][0] - began}


def _moments(process: "subprocess.Popen[str]", began: float) -> dict[str, float]:
    """Wait until a server is ready; return the seconds until each moment."""
    moments: dict[str, float] = {}
    for line in process.stdout or ():
        found = [name for name, words in _MOMENTS.items() if words in line]
        moments |= dict.fromkeys(found, time.perf_counter() - began)
        if "ready" in found:
            return moments
    raise ServerError("it ended before it was ready.", server="the server")


def _instant(call: Callable[[], Any]) -> tuple[float, Any]:
    """Call; return when it returned, and the result."""
    result = call()
    return time.perf_counter(), result
