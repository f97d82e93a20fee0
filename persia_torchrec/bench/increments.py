"""What does it cost to write increments, and how soon do followers have them?

    python -m persia_torchrec.bench increments --json increments.json

Two servers get the same requests, in turn, and one of them writes increments: pulls
and pushes of Zipf batches, several in flight, as of a trainer that waits for nothing
else; and one by one with a pause after each, as of one that computes. Every row is
checked. Then a server of inference follows the one that writes; it is asked again and
again for a row of the last batch, until it has it, and in the end it must have every
row of the training, equal to the last bit.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from persia_torchrec.bench.filled_server import FilledServer, server_and_client_cores
from persia_torchrec.bench.machine import cpu_seconds, pinned
from persia_torchrec.bench.report import Cell, Table
from persia_torchrec.bench.run_report import RunReport, exit_status_of
from persia_torchrec.bench.settings import IN_FLIGHT, Settings
from persia_torchrec.bench.workload import Numbers, ids_of, zipf_requests
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.errors import ConfigError, StoreError
from persia_torchrec.server.cluster import EmbeddingCluster
from persia_torchrec.wire.memory import keep_freed_memory

_QUIET_S = 0.5
_DEADLINE_S = 120.0
_LOOK_S = 0.005

_COSTS = {
    "server": "server",
    "rate": "M rows/s, looked up and updated, median",
    "slowest": "slowest turn",
    "relative": "of the one that writes nothing",
    "server_ns": "processor of the server, ns a row",
    "paced_ms": "ms a batch with pauses, median",
    "paced_p95_ms": "19 of 20 below",
}
_FRESHNESS = {
    "delay_median": "s until a follower has an update, median",
    "delay_largest": "largest",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class IncrementSettings:
    """What to measure.

    Raises:
        ConfigError: a setting is out of its range.
    """

    dim: int = 16
    """Embedding dim."""

    rows: int = 1_000_000
    """Rows that are there before."""

    batches: int = 100
    """Batches a turn."""

    repeats: int = 5
    """Turns of each server."""

    paced_batches: int = 20
    """Batches of a turn with pauses, at most those of a turn."""

    interval_s: float = 2.0
    """How often an increment is begun."""

    draws: int = 106_496
    """Ids of a batch, repeats included."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ConfigError(f"{name} must be > 0. Received: {value}.")


_TINY = IncrementSettings(rows=4096, batches=6, repeats=2, interval_s=0.05, draws=2048)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; return the process's exit status.

    Args:
        argv: the command line, behind the benchmark's name.
    """
    arguments = _parser().parse_args(argv)
    return exit_status_of(lambda: _run(arguments, argv))


def _run(arguments: argparse.Namespace, argv: Sequence[str]) -> None:
    names = ("dim", "rows", "batches", "repeats", "interval_s")
    given = {name: getattr(arguments, name) for name in names}
    base = _TINY if arguments.tiny else IncrementSettings()
    keep_freed_memory()  # as servers and workers do
    settings = replace(base, **{k: v for k, v in given.items() if v is not None})
    report = RunReport(["increments", *argv])
    tables = measure(settings)
    server_core, client_core = server_and_client_cores()
    used = f"servers that train on {server_core}, the rest on {client_core}"
    report.add("increments", tables, used, asdict(settings))
    report.finish(arguments.json)


def _parser() -> argparse.ArgumentParser:
    normal = IncrementSettings()
    parser = argparse.ArgumentParser(
        prog="python -m persia_torchrec.bench increments",
        description="Measure what increments cost, and how fresh a follower is.",
    )
    add = parser.add_argument
    add("--dim", type=int, help=f"embedding dim [{normal.dim}]")
    add("--rows", type=int, help=f"rows that are there before [{normal.rows}]")
    add("--batches", type=int, help=f"batches a turn [{normal.batches}]")
    add("--repeats", type=int, help=f"turns of each server [{normal.repeats}]")
    add("--interval-s", type=float, help=f"[{normal.interval_s:g}]")
    add("--json", type=Path, help="file for all figures")
    add("--tiny", action="store_true", help="small numbers, to see that it works")
    return parser


def measure(settings: IncrementSettings) -> list[Table]:
    """Measure, and check every row.

    Raises:
        StoreError: a row is not what it should be, at the servers or the follower.
        ServerError: a server does not start, fails, or does not answer.
    """
    workload = Settings(
        dims=(settings.dim,),
        rows=settings.rows,
        ids=2,
        in_flight_batches=1,
        zipf_draws=settings.draws,
    )
    rng = np.random.default_rng(5)
    num = settings.batches * settings.repeats
    zipf = zipf_requests(rng, workload, num)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plain = stack.enter_context(_server(workload, zipf.num_numbers, None, 0.0))
        writing = stack.enter_context(
            _server(workload, zipf.num_numbers, folder / "logs", settings.interval_s)
        )
        _wait_for_quiet(writing)
        before = _written(writing)
        turns = [
            zipf.requests[start : start + settings.batches]
            for start in range(0, num, settings.batches)
        ]
        for requests in turns:
            for server in (plain, writing):
                server.take_turn(requests)
                server.take_paced_turn(requests[: settings.paced_batches])
            _wait_for_quiet(writing)
        costs = _costs(plain, writing, before)
        writing.filled.client.checkpoints.dump(folder / "run")
        follower = stack.enter_context(_follower(folder))
        delays = []
        for requests in turns:
            writing.take_paced_turn(requests[: settings.paced_batches])
            delays.append(_delay(writing, follower, requests[0]))
        _wait_for_quiet(writing)
        _wait_until_put_in(writing, follower)
        _require_equal(writing, follower, zipf.num_numbers)
        return [costs, _freshness(settings, delays)]


class _Server:
    """A server, and how long its turns took."""

    def __init__(self, name: str, filled: FilledServer) -> None:
        self.name = name
        self.filled = filled
        self.num_rows: list[int] = []
        self.seconds: list[float] = []
        self.paced_s: list[float] = []
        self.cpu_s: list[float] = []

    def take_turn(self, requests: Sequence[Numbers]) -> None:
        """Pull and push some batches."""
        pid = self.filled.pid
        assert pid is not None
        before = cpu_seconds(pid) or 0.0
        batches = [self.filled.batch(numbers) for numbers in requests]
        self.seconds.append(self.filled.stream(batches))
        self.cpu_s.append((cpu_seconds(pid) or 0.0) - before)
        self.num_rows.append(sum(map(len, requests)))

    def take_paced_turn(self, requests: Sequence[Numbers]) -> None:
        """Pull and push some batches, each checked while the server has a pause."""
        for numbers in requests:
            batch = self.filled.batch(numbers)
            self.paced_s.append(self.filled.pull(batch) + self.filled.push(batch))

    def rates(self) -> list[float]:
        """Return the million rows a second of each turn."""
        pairs = zip(self.num_rows, self.seconds, strict=True)
        return [rows / seconds / 1e6 for rows, seconds in pairs]


@contextmanager
def _server(
    workload: Settings, num_rows: int, logs: Path | None, interval_s: float
) -> Iterator[_Server]:
    server_core, client_core = server_and_client_cores()
    with pinned(server_core):
        cluster = EmbeddingCluster.local(
            1,
            num_rows,
            incremental_dir=None if logs is None else str(logs),
            incremental_interval_s=interval_s or 2.0,
        )
    with cluster, pinned(client_core), ThreadPoolExecutor(IN_FLIGHT) as threads:
        client = EmbeddingClient.connect(cluster.addresses)
        try:
            pid = cluster.processes[0].pid
            spec = workload.table(workload.dims[0])
            filled = FilledServer(spec, num_rows, client, threads, pid)
            name = "writes nothing" if logs is None else "writes increments"
            yield _Server(name, filled)
        finally:
            client.close()


@contextmanager
def _follower(folder: Path) -> Iterator[EmbeddingClient]:
    _, client_core = server_and_client_cores()
    with pinned(client_core):
        cluster = EmbeddingCluster.of_checkpoint(
            str(folder / "run"), incremental_dir=str(folder / "logs")
        )
    with cluster:
        client = EmbeddingClient.connect(cluster.addresses)
        try:
            client.learn_tables()
            yield client
        finally:
            client.close()


def _delay(server: _Server, follower: EmbeddingClient, numbers: Numbers) -> float:
    """Update some rows; return the seconds until a follower has the update."""
    server.filled.push(server.filled.batch(numbers[-100:]))
    start = time.perf_counter()
    name, ids = server.filled.spec.name, ids_of(numbers[-1:])
    expected = server.filled.client.read(name, ids)
    never = threading.Event()
    while not np.array_equal(follower.read(name, ids), expected):
        if time.perf_counter() - start > _DEADLINE_S:
            raise StoreError(f"A follower must get each update within {_DEADLINE_S} s.")
        never.wait(_LOOK_S)
    return time.perf_counter() - start


def _wait_for_quiet(server: _Server) -> None:
    """Wait until all that has changed is written."""
    deadline = time.monotonic() + _DEADLINE_S
    never = threading.Event()
    while _written(server)["increments_waiting"]:
        if time.monotonic() > deadline:
            raise StoreError(f"{_written(server)}: not written in {_DEADLINE_S} s.")
        never.wait(_QUIET_S)


def _wait_until_put_in(server: _Server, follower: EmbeddingClient) -> None:
    """Wait until a follower has put in all that is written since the checkpoint."""
    deadline = time.monotonic() + _DEADLINE_S
    never = threading.Event()
    before = -1
    while (put_in := follower.counters()[0]["increments_put_in"]) != before:
        if time.monotonic() > deadline:
            raise StoreError(f"{_written(server)}: not put in within {_DEADLINE_S} s.")
        before = put_in
        never.wait(_QUIET_S + 1.0)


def _written(server: _Server) -> dict[str, int]:
    return server.filled.client.counters()[0]


def _require_equal(
    server: _Server, follower: EmbeddingClient, num_numbers: int
) -> None:
    name = server.filled.spec.name
    for start in range(0, num_numbers, 2**16):
        ids = ids_of(np.arange(start, min(start + 2**16, num_numbers)))
        rows = server.filled.client.read(name, ids)
        if not np.array_equal(follower.read(name, ids), rows):
            raise StoreError("A follower must have the rows of the training.")
    numbers = follower.num_rows(), server.filled.client.num_rows()
    if numbers[0] != numbers[1]:
        raise StoreError(f"A follower must have as many rows. Received: {numbers}.")


def _costs(plain: _Server, writing: _Server, before: dict[str, int]) -> Table:
    after = _written(writing)
    rows: list[dict[str, Cell]] = []
    base = plain.rates()
    for server in (plain, writing):
        rates = server.rates()
        ratios = [rate / other for rate, other in zip(rates, base, strict=True)]
        num_rows = sum(server.num_rows)
        rows.append(
            {
                "server": server.name,
                "rate": median(rates),
                "slowest": min(rates),
                "relative": median(ratios),
                "server_ns": sum(server.cpu_s) / num_rows * 1e9,
                "paced_ms": median(server.paced_s) * 1e3,
                "paced_p95_ms": float(np.quantile(server.paced_s, 0.95)) * 1e3,
            }
        )
    return Table(
        "cost",
        "What do increments cost a server that is never idle?",
        _COSTS,
        rows,
        [
            "A turn of one server follows that of the other; the ratio is the median "
            "of those of each pair.",
            "The processor's time is that of all threads of the server; checks of the "
            "rows after each turn are in it, which both have.",
            f"Written: {after['increment_rows'] - before['increment_rows']} rows, "
            f"{(after['increment_bytes'] - before['increment_bytes']) / 1e6:.0f} MB.",
        ],
    )


def _freshness(settings: IncrementSettings, delays: Sequence[float]) -> Table:
    row: dict[str, Cell] = {
        "delay_median": median(delays),
        "delay_largest": max(delays),
    }
    return Table(
        "freshness",
        f"How soon does a follower have an update, at {settings.interval_s:g} s?",
        _FRESHNESS,
        [row],
        ["From the acknowledgement of an update after a turn with pauses."],
    )
