"""What does the cache of the package move, and what do its requests cost a server?

``rows`` trains a collection of bags with and without ``cache=``, on fresh batches by
Zipf's law: bytes of rows, the step, and the servers; also beside servers that write
increments, which a server of inference follows, with flushes every 2 s. ``pair`` asks
servers for rows with their state and writes all of them back, beside a lookup and an
update of the same ids, over each transport, with rows in private memory and in a file.

Rows that were trained are equal in the end, to 1e-4, however often they are flushed.
"""

import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from benchmarks.cache_hits import HitSettings
from benchmarks.harness import Table, cpu_seconds
from benchmarks.reference import require, scattered
from benchmarks.slot_map import Router
from benchmarks.training import TABLES
from benchmarks.workload import zipf_ranks
from persia_torchrec import Adagrad, Cache, EmbeddingClient, remote_sharders
from persia_torchrec.arrays import Floats
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.embedding.optim import Optimizer
from persia_torchrec.env import Transport
from persia_torchrec.rpc.reply import Reply
from persia_torchrec.server.cluster import EmbeddingCluster
from persia_torchrec.table import TableSpec

_OPTIMIZERS: dict[str, Optimizer] = {
    "rowwise Adagrad": Adagrad(lr=0.02, vectorwise_shared=True),
    "Adagrad": Adagrad(lr=0.02),
}
_PAIR_REQUESTS = 8  # whose rows there are: the first half of the turns makes them
_META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class RowSettings(HitSettings):
    """What the figures of the package's cache measure."""

    row_batch_size: Annotated[int, "samples per batch of `rows`"] = 4096
    row_slots: Annotated[int, "rows of the cache in `rows`"] = 300_000
    row_steps: Annotated[int, "steps of `rows`; the second half counts"] = 60
    row_dim: Annotated[int, "embedding dim of `rows` and `pair`"] = 64
    row_table_rows: Annotated[int, "rows per table in `rows`"] = 400_000
    pair_ids: Annotated[int, "unique ids of a request in `pair`"] = 33_000
    pair_turns: Annotated[int, "requests of each kind in `pair`"] = 60


@dataclass(frozen=True)
class _Way:
    name: str
    optimizer: str
    cache: Cache | None
    is_followed: bool = False


def _ways(settings: RowSettings) -> Iterator[_Way]:
    for optimizer in _OPTIMIZERS:
        yield _Way("no cache", optimizer, None)
        yield _Way("cache", optimizer, Cache(rows=settings.row_slots))
    first = next(iter(_OPTIMIZERS))
    for name, cache in (
        ("no cache, followed", None),
        (
            "cache, flushed every 2 s, followed",
            Cache(rows=settings.row_slots, flush_s=2),
        ),
    ):
        yield _Way(name, first, cache, is_followed=True)


def _batches(settings: RowSettings) -> Iterator[KeyedJaggedTensor]:
    rng, rows = np.random.default_rng(1), settings.row_table_rows
    num = settings.row_batch_size * len(TABLES)
    while True:
        ids_L = scattered(zipf_ranks(rng, rows, num), rows).astype(np.int64)
        yield KeyedJaggedTensor(
            [f"feature {table}" for table in TABLES],
            torch.from_numpy(ids_L),
            lengths=torch.ones(num, dtype=torch.int32),
        )


def measure_rows(settings: RowSettings) -> list[Table]:
    """Measure each way: bytes, the step, and the processes beside."""
    rows, learnt = [], dict[str, Floats]()
    for way in _ways(settings):
        found, weights = _train(settings, way)
        rows.append([way.name, way.optimizer, *found])
        if way.cache:  # without one, lookups may lack the last update
            same = learnt.setdefault(way.optimizer, weights)
            is_equal = bool((np.abs(weights - same) < 1e-4).all())
            require(f"same rows learnt: {way.name}", received=is_equal, expected=True)
    question = (
        f"Of a step with {settings.row_batch_size} samples, {len(TABLES)} tables, "
        f"D = {settings.row_dim}, {settings.servers} servers on this host, Zipf 1.2, "
        f"{settings.row_slots} rows cached. Processor time in ms."
    )
    header = "way | optimizer | unique rows hit | bytes beside no cache"
    header += " | with all rows flushed | step | trainer | servers | follower"
    return [Table("rows", question, header, rows)]


def _train(settings: RowSettings, way: _Way) -> tuple[list[object], Floats]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs = str(folder / "logs") if way.is_followed else None
        capacity = 2 * settings.row_slots + settings.row_table_rows * len(TABLES)
        local = EmbeddingCluster.local(settings.servers, capacity, increments_dir=logs)
        cluster = stack.enter_context(local)
        client = stack.enter_context(
            closing(EmbeddingClient.connect(cluster.addresses))
        )
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, not in __all__
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
        stack.callback(dist.destroy_process_group)
        sharders = remote_sharders(
            client, _OPTIMIZERS[way.optimizer], staleness=2, cache=way.cache
        )
        model = DistributedModelParallel(_collection(settings), sharders=sharders)
        stack.callback(sharders.close)
        beside: list[int] = []
        batches = _batches(settings)
        first = next(batches)
        _step(model, first)
        if way.is_followed:
            client.checkpoints.dump(folder / "run")
            follower = EmbeddingCluster.of_checkpoint(
                str(folder / "run"), increments_dir=logs
            )
            stack.enter_context(follower)
            beside = [process.pid for process in follower.processes]
        servers = [process.pid for process in cluster.processes]
        half, steps = settings.row_steps // 2, list[float]()
        for batch in islice(batches, half):
            _step(model, batch)
        cache = sharders.remote_tables.cache
        counts = cache.counts.read() if cache else {}
        starts = [time.process_time(), _busy(servers), _busy(beside)]
        for batch in islice(batches, half):
            began_s = time.perf_counter()
            _step(model, batch)
            steps.append(time.perf_counter() - began_s)
        ends = [time.process_time(), _busy(servers), _busy(beside)]
        each = [1e3 * (e - s) / half for s, e in zip(starts, ends, strict=True)]
        now = cache.counts.read() if cache else {}
        sharders.flush()
        shares = _shares(counts, now, cache.counts.read()) if cache else [None] * 3
        ids = np.unique(first.values().numpy()[: settings.row_batch_size])
        weights = client.read(TABLES[0], ids.astype(np.uint64))[:, : settings.row_dim]
    return [
        *shares,
        1e3 * median(steps),
        *each[:2],
        each[2] if beside else None,
    ], weights


def _shares(
    before: dict[str, int], now: dict[str, int], flushed: dict[str, int]
) -> list[float | None]:
    """Return the share that hit, and the bytes beside no cache, twice."""
    own = {name: now[name] - before[name] for name in now}
    whole = {name: flushed[name] - before[name] for name in now}
    return [
        own["cache_hits"] / (own["cache_hits"] + own["cache_misses"]),
        own["cache_moved_bytes"] / own["cache_plain_bytes"],
        whole["cache_moved_bytes"] / whole["cache_plain_bytes"],
    ]


def _collection(settings: RowSettings) -> EmbeddingBagCollection:
    num, dim = settings.row_table_rows, settings.row_dim
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(num, dim, table, feature_names=[f"feature {table}"])
            for table in TABLES
        ],
        device=_META,
    )


def _step(model: Any, batch: KeyedJaggedTensor) -> None:
    values = model(batch).values()
    values.square().sum().backward()


def _busy(pids: list[int]) -> float:
    return sum(map(cpu_seconds, pids))


# The pair of requests


def measure_pair(settings: RowSettings) -> list[Table]:
    """Measure lookup with state and write, beside lookup and update."""
    rows = list[list[object]]()
    transports: tuple[Transport, ...] = "tcp", "shm"
    for memory, has_file in {"private": False, "file": True}.items():
        for transport in transports:
            with EmbeddingCluster.local(
                1, 4 * _PAIR_REQUESTS * settings.pair_ids, restarts=has_file
            ) as cluster:
                for name in _OPTIMIZERS:
                    took = _measure_pair(settings, cluster, transport, name)
                    pair = (took["with state"] + took["write"]) / (
                        took["lookup"] + took["update"]
                    )
                    rows.append([name, memory, transport, *took.values(), pair])
    question = (
        f"Processor time of a server, ms: {settings.pair_ids // len(TABLES)} rows of "
        f"each of {len(TABLES)} tables, D = {settings.row_dim}."
    )
    header = "optimizer | memory | transport | lookup | update | lookup with state"
    return [Table("pair", question, f"{header} | write | pair", rows)]


def _measure_pair(
    settings: RowSettings,
    cluster: EmbeddingCluster,
    transport: Transport,
    optimizer: str,
) -> dict[str, float]:
    """Return the milliseconds of each kind of request, the median."""
    num, dim = settings.pair_ids // len(TABLES), settings.row_dim
    rng, took = np.random.default_rng(1), dict[str, list[float]]()
    (pid,) = (process.pid for process in cluster.processes)
    tables = tuple(f"{optimizer} {table}" for table in TABLES)
    rule, router = _OPTIMIZERS[optimizer], Router(tables, 1)
    grads_UD = rng.standard_normal((len(TABLES) * num, dim)).astype(np.float32)
    streams = [BatchNumber.new_stream() for _ in range(2)]
    connected = EmbeddingClient.connect(cluster.addresses, transport=transport)
    with closing(connected) as client:
        client.add_tables([TableSpec(name=n, dim=dim, optimizer=rule) for n in tables])
        for turn in range(settings.pair_turns):
            ids_L = rng.integers(0, _PAIR_REQUESTS * num, len(TABLES) * num)
            _, group, _ = router.route(ids_L.astype(np.uint64))
            grads = grads_UD[: len(group.ids)]
            batch, later = (BatchNumber(stream, turn) for stream in streams)
            with _timed(took, "lookup", pid):
                client.pull([group], batch=batch)
            with _timed(took, "update", pid):
                _finish(client.push([group], [grads], batch=batch))
            with _timed(took, "with state", pid):
                (held,) = client.pull([group], batch=later, with_state=True)
            with _timed(took, "write", pid):
                _finish(client.write_rows([group], [held]))
    return {kind: 1e3 * median(each[len(each) // 2 :]) for kind, each in took.items()}


@contextmanager
def _timed(took: dict[str, list[float]], kind: str, pid: int) -> Iterator[None]:
    start_s = cpu_seconds(pid)
    yield
    took.setdefault(kind, []).append(cpu_seconds(pid) - start_s)


def _finish(replies: Iterable[Reply]) -> None:
    for reply in replies:
        reply.frames()
