"""What does it cost to write increments, and how soon do followers have them?

Servers with and without increments, in private memory and in memory that outlives
them, get the same Zipf batches in turn: several in flight, and one by one with pauses.
A server of inference follows one, is asked for a row of the last batch until it has it,
and must end with the weights of every row to the last bit.
"""

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from time import monotonic
from typing import Annotated

import numpy as np

from benchmarks.filled import FilledServer, filled_server
from benchmarks.harness import Benchmark, Table, Timings, cpu_seconds, pinned
from benchmarks.reference import Numbers, chunks, ids_of, require, table_of
from benchmarks.workload import ZipfLoad
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.errors import StoreError
from persia_torchrec.server.cluster import EmbeddingCluster

_DEADLINE_S, _WRITTEN = 120.0, ("increment_rows", "increment_bytes")


@dataclass(frozen=True, kw_only=True)
class IncrementSettings(ZipfLoad):
    """What to measure."""

    dim: Annotated[int, "embedding dim"] = 16
    batches: Annotated[int, "batches per turn"] = 400
    paced_batches: Annotated[int, "batches of a turn with pauses"] = 20
    repeats: Annotated[int, "turns of each server"] = 5
    interval_s: Annotated[float, "how often an increment is begun"] = 2.0


def measure_cost(settings: IncrementSettings) -> list[Table]:
    """Measure what writing costs, by servers that write and others that do not."""
    turns, num_rows = draw_turns(settings)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {
            name: stack.enter_context(filled(settings, num_rows, name, log))
            for name, log in {
                "nothing": None,
                "increments": folder / "logs",
                "nothing, and survives": None,
                "increments, and survives": folder / "others",
            }.items()
        }
        return [_measure_cost(settings, servers, turns)]


def measure_freshness(settings: IncrementSettings) -> list[Table]:
    """Measure the delay of a follower."""
    turns, num_rows = draw_turns(settings)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs, run = folder / "logs", folder / "run"
        writing = stack.enter_context(filled(settings, num_rows, "increments", logs))
        writing.client.checkpoints.dump(run)
        with pinned(-1):
            cluster = EmbeddingCluster.of_checkpoint(str(run), increments_dir=str(logs))
        stack.enter_context(cluster)
        follower = EmbeddingClient.connect(cluster.addresses)
        stack.callback(follower.close)
        follower.learn_tables()
        delays = []
        for batches in turns:
            _take_paced_turn(writing, batches[: settings.paced_batches])
            delays.append(_delay(writing, follower, batches[0]))
        _require_same_rows(writing, follower)
    question = f"Seconds until a follower has it, at {settings.interval_s} s."
    row = [median(delays), mean(delays), max(delays)]
    return [Table("freshness", question, "median | mean | longest", [row])]


def draw_turns(settings: IncrementSettings) -> tuple[list[Sequence[Numbers]], int]:
    """Return the batches of each turn, and of how many rows they are."""
    num = settings.batches
    requests, num_rows = settings.draw_zipf(num * settings.repeats)
    starts = range(0, num * settings.repeats, num)
    return [requests[start : start + num] for start in starts], num_rows


@contextmanager
def filled(
    settings: IncrementSettings, num_rows: int, name: str, log: Path | None
) -> Iterator[FilledServer]:
    """Run a filled server during a block, which has written all its rows."""
    server = filled_server(
        table_of(settings.dim),
        num_rows,
        logs=str(log) if log else None,
        interval_s=settings.interval_s,
        restarts="," in name,
    )
    with server as filled:
        wait_until_written(filled)
        yield filled


def _measure_cost(
    settings: IncrementSettings,
    servers: dict[str, FilledServer],
    turns: Sequence[Sequence[Numbers]],
) -> Table:
    timings, cpu_s = Timings(), dict.fromkeys(servers, 0.0)
    paced_s: dict[str, list[float]] = {name: [] for name in servers}
    writing = servers["increments"]
    before = writing.client.counters()[0]
    for turn, requests in enumerate(turns):
        num_rows = sum(map(len, requests))
        for name, server in list(servers.items())[:: 1 if turn % 2 else -1]:
            start_s = cpu_seconds(server.pid)
            timings.add(name, num_rows, server.stream(requests))
            wait_until_written(server)
            cpu_s[name] += (cpu_seconds(server.pid) - start_s) / num_rows
            paced = requests[: settings.paced_batches]
            paced_s[name] += _take_paced_turn(server, paced)
            wait_until_written(server)
    rows = []
    for name, batch_s in paced_s.items():
        base = name.replace("increments", "nothing")
        rate, ratio = timings.rate(name), timings.paired_ratio(name, base)
        cpu_ns = cpu_s[name] / len(turns) * 1e9
        ms = [1e3 * median(batch_s), 1e3 * float(np.quantile(batch_s, 0.95))]
        rows.append([name, rate.median, rate.slowest, ratio, cpu_ns, *ms])
    after = writing.client.counters()[0]
    written, size = (after[name] - before[name] for name in _WRITTEN)
    header = (
        "server writes | M rows/s, median | slowest turn | of nothing | processor of "
        "the server until all is written, ns per row | ms per batch with pauses | 95th "
        "percentile"
    )
    notes = [f"Written: {written} rows, {size / 1e6:.0f} MB."]
    return Table("cost", "For a server that is never idle.", header, rows, notes)


def _take_paced_turn(server: FilledServer, requests: Sequence[Numbers]) -> list[float]:
    """Pull and push batches, each checked while the server has a pause."""
    return [sum(server.run(numbers)[0]) for numbers in requests]


def _delay(server: FilledServer, follower: EmbeddingClient, numbers: Numbers) -> float:
    """Update some rows; return the seconds until a follower has the update."""
    server.run(numbers[-100:])
    start, name, ids = monotonic(), server.spec.name, ids_of(numbers[-1:])
    expected = server.client.read(name, ids)[:, : server.spec.dim]
    _wait_for(lambda: np.array_equal(follower.read(name, ids), expected), 0.005)
    return monotonic() - start


def _wait_for(is_done: Callable[[], bool], pause_s: float = 0.5) -> None:
    deadline, never = monotonic() + _DEADLINE_S, threading.Event()
    while not is_done():
        if monotonic() > deadline:
            raise StoreError(f"An increment must come within {_DEADLINE_S} s.")
        never.wait(pause_s)


def wait_until_written(server: FilledServer) -> None:
    """Wait until increments have all that has changed."""
    _wait_for(lambda: not server.client.counters()[0].get("increments_waiting"))


def _require_same_rows(server: FilledServer, follower: EmbeddingClient) -> None:
    """End the benchmark if a follower differs when nothing comes any more."""
    wait_until_written(server)
    counts = [-1]

    def is_settled() -> bool:
        counts.append(follower.counters()[0]["increments_put_in"])
        return counts[-1] == counts[-2]

    _wait_for(is_settled, pause_s=1.5)
    name, expected = server.spec.name, server.client.num_rows()
    require("rows of a follower", received=follower.num_rows(), expected=expected)
    for numbers in chunks(server.num_rows):
        ids = ids_of(numbers)
        expected_ND = server.client.read(name, ids)[:, : server.spec.dim]
        if not np.array_equal(follower.read(name, ids), expected_ND):
            raise StoreError("A follower must have the rows of the training.")


BENCHMARK = Benchmark(
    name="increments",
    normal=IncrementSettings(),
    tiny=IncrementSettings(
        rows=4096,
        batches=6,
        paced_batches=6,
        repeats=2,
        interval_s=0.05,
        zipf_draws=999,
    ),
    figures={"cost": measure_cost, "freshness": measure_freshness},
)
