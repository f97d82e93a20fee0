"""How much do several server processes look up and update; which side is the limit?

Client processes pull and push batches of different ids, one batch after the other, as
fast as they can. There are more and more clients, until more bring nothing. All share
the cores of this machine. Gradients are zeros, so that each row must stay what it is.
"""

import math
import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Annotated, Any, NamedTuple

import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Settings, Table
from benchmarks.reference import (
    chunks,
    ids_of,
    require,
    require_equal,
    table_of,
    weights_of,
)
from persia_torchrec.client.client import BatchNumber, EmbeddingClient, Reply
from persia_torchrec.server.cluster import EmbeddingCluster

_BUSY, _ALL_CORES = 0.85, 0.9
_MOST_UNACKNOWLEDGED = 4
_GROWTH = 1.05


@dataclass(frozen=True, kw_only=True)
class ServersSettings(Settings):
    """What to measure."""

    servers: Annotated[tuple[int, ...], "server processes"] = (1, 2, 4, 8, 14)
    dim: Annotated[int, "embedding dim"] = 64
    rows: Annotated[int, "rows of all servers"] = 2_000_000
    ids: Annotated[int, "unique ids of a batch"] = 20_480
    seconds: Annotated[float, "of each measurement"] = 3.0


class Driven(NamedTuple):
    """What one client did a second: rows looked up and updated, processor seconds."""

    rows_per_s: float
    busy: float


class Load(NamedTuple):
    """What some clients did to some servers; busy is a share of a core of each."""

    num_clients: int
    rows_per_s: float
    of_servers: float
    of_clients: float
    of_cores: float

    def limit(self) -> str:
        """Return which side is at its end."""
        if self.of_servers >= _BUSY:
            return "servers"
        if self.of_cores >= _ALL_CORES:
            return "cores"
        return "clients" if self.of_clients >= _BUSY else "waiting"


def drive(
    addresses: Sequence[str], settings: ServersSettings, seed: int, start_s: float
) -> Driven:
    """Be a client: look up and update from a moment of the monotonic clock on."""
    spec, rng = table_of(settings.dim, "sgd"), np.random.default_rng(seed)
    grads_ND = np.zeros((settings.ids, settings.dim), dtype=np.float32)
    stream, num, counted = BatchNumber.new_stream(), 0, 0
    began_s = cpu_s = math.inf
    routed: list[Any] = []
    rows_ND = grads_ND
    with closing(EmbeddingClient.connect(addresses)) as client:
        client.add_tables([spec])
        replies: deque[list[Reply]] = deque()
        num_missed = 0
        while num == counted or time.monotonic() - began_s < settings.seconds:
            if began_s == math.inf and time.monotonic() >= start_s:
                began_s, cpu_s, counted = time.monotonic(), time.process_time(), num
            first = rng.integers(settings.rows)
            numbers_N = (first + np.arange(settings.ids)) % settings.rows
            routed = [(spec.name, client.split(ids_of(numbers_N)))]
            num += 1
            batch = BatchNumber(stream, num)
            (rows_ND,) = client.pull(routed, batch=batch)
            replies.append(client.push(routed, [grads_ND], batch))
            if len(replies) > _MOST_UNACKNOWLEDGED:
                num_missed += client.outcome(replies.popleft()).num_missed
        took_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
        num_missed += sum(client.outcome(reply).num_missed for reply in replies)
        require("gradients without a row", received=num_missed, expected=0)
        ids_N = routed[0][1].ids
        require_equal("lookup", ids_N, rows_ND, weights_of(ids_N, settings.dim))
        return Driven((num - counted) * settings.ids / took_s, cpu_s / took_s)


def _load(
    cluster: EmbeddingCluster,
    settings: ServersSettings,
    clients: ProcessPoolExecutor,
    num_clients: int,
) -> Load:
    """Let some clients work at the same time."""
    start_s = time.monotonic() + settings.seconds / 2  # they connect meanwhile
    drive_one = partial(drive, cluster.addresses, settings, start_s=start_s)
    running = [clients.submit(drive_one, seed=seed) for seed in range(num_clients)]
    time.sleep(max(start_s - time.monotonic(), 0))
    pids = [process.pid for process in cluster.processes]
    before = [harness.cpu_seconds(pid) for pid in pids]
    time.sleep(settings.seconds)
    after = [harness.cpu_seconds(pid) for pid in pids]
    did = [one.result() for one in running]
    server_s = sum(after) - sum(before)
    busy_servers = server_s / settings.seconds
    busy_clients = sum(one.busy for one in did)
    return Load(
        num_clients,
        sum(one.rows_per_s for one in did),
        busy_servers / len(pids),
        busy_clients / num_clients,
        (busy_servers + busy_clients) / len(os.sched_getaffinity(0)),
    )


def _fill(client: EmbeddingClient, settings: ServersSettings) -> None:
    spec = table_of(settings.dim, "sgd")
    client.add_tables([spec])
    for numbers_N in chunks(settings.rows):
        ids_N = ids_of(numbers_N)
        client.write(spec.name, ids_N, weights_of(ids_N, settings.dim))


def _measure(settings: ServersSettings) -> list[Table]:
    """Measure each number of servers, with 1, 2, 4 ... clients."""
    rows = []
    cores = len(os.sched_getaffinity(0))
    # Before any connection of this process; the children of it are started once.
    with ProcessPoolExecutor(cores, get_context("spawn")) as clients:
        for num_servers in settings.servers:
            with EmbeddingCluster.local(num_servers, settings.rows) as cluster:
                with closing(EmbeddingClient.connect(cluster.addresses)) as client:
                    _fill(client, settings)
                best, num_clients = None, 1
                while num_clients <= cores:
                    load = _load(cluster, settings, clients, num_clients)
                    if best and load.rows_per_s < _GROWTH * best.rows_per_s:
                        break
                    best, num_clients = load, 2 * num_clients
            assert best is not None
            busy = best.of_servers, best.of_clients, best.of_cores
            rate = best.rows_per_s / 1e6
            rows.append([num_servers, best.num_clients, rate, *busy, best.limit()])
    question = (
        f"Lookup and update of batches of {settings.ids} ids, D = {settings.dim}, on "
        f"{cores} cores. Busy is processor time of a second, of all threads."
    )
    header = "servers | clients | million rows/s | a server busy | a client busy"
    header += " | cores busy | limit"
    return [Table("servers", question, header, rows)]


BENCHMARK = Benchmark(
    name="servers",
    normal=ServersSettings(),
    tiny=ServersSettings(servers=(2,), dim=4, rows=2048, ids=64, seconds=0.1),
    figures={"servers": _measure},
)
