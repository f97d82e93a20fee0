"""How fast is one server of this machine, with a core for it and one for the client?

rates   rows per second that are looked up and updated: one request after the other,
        and several in flight, as a trainer with staleness has them
stages  where the time of a request goes: client, server by stage, send
redis   the same next to Redis (--redis PROGRAM): a row with its state is a value; a
        trainer fetches values (MGET), applies the optimizer, and stores them
        (MSET). Ids in flight all differ: Redis would lose updates of shared ones.
restarts  time without a server that was killed, and of new ones (restarts.py)
survival  what memory that outlives a server costs it (restarts.py)
encryption  what ``PERSIA_ENCRYPT=1`` costs, against connections that prove the token
transports  TCP, shared memory, and a store in the same process, turn by turn: a request
        of one id, lookup and update one request after the other, the client's
        processor time
precisions  rows and gradients in 16 bits beside float32, turn by turn
tables  26 tables of some ids beside one table of as many, turn by turn: the server's
        processor time of a lookup and an update, by transport and kind of memory
"""

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any, TypeVar

import numpy as np
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from benchmarks import harness, restarts
from benchmarks.filled import (
    IN_FLIGHT,
    Filled,
    FilledServer,
    FilledStore,
    filled_server,
)
from benchmarks.harness import RATES, Benchmark, Table, Timings, interleave
from benchmarks.reference import Numbers, ids_of, require
from benchmarks.store import RATES_HEADER
from benchmarks.workload import MEMORY_COPY, MemoryCopy, Workload
from persia_torchrec import env
from persia_torchrec.arrays import Floats, Ids
from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.errors import ConfigError, ServerError
from persia_torchrec.rpc.addresses import free_port
from persia_torchrec.rpc.messages import Precision
from persia_torchrec.server.cluster import EmbeddingCluster
from persia_torchrec.table import TableSpec

T = TypeVar("T")
Sample = dict[str, float]


_STAGES = ("receive", "decode", "lookup", "update", "encode", "send", "sweep", "other")
"""The server's counters ``receive_us`` and so on hold microseconds."""

_PERSIA = {8: {"lookup": 1.27, "update": 1.32}, 64: {"lookup": 1.04, "update": 0.61}}
"""Million rows per second of the original PERSIA's server, by dim: training lookup and
Adagrad update, one server and one connection on two shared cores."""

_STREAM = f"lookup + update, {IN_FLIGHT} in flight"
_PULLS = f"lookup alone, {IN_FLIGHT} in flight"
_OURS, _THEIRS = "ours: lookup + update", "Redis: MGET, NumPy, MSET"
_TIMEOUT_S = 30.0
_TCP = {"PERSIA_TRANSPORT": "tcp"}
NUM_TABLES = 26


@dataclass(frozen=True, kw_only=True)
class WireSettings(Workload):
    """What to measure."""

    in_flight_batches: Annotated[int, "batches of a stream"] = 12
    one_id_requests: Annotated[int, "requests of one id a turn (transports)"] = 50
    table_ids: Annotated[tuple[int, ...], "ids of each of 26 tables (tables)"] = (
        40,
        400,
    )
    table_requests: Annotated[int, "requests a turn (tables)"] = 50
    redis: Annotated[Path | None, "program of a Redis server"] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        least = (1 + self.in_flight_batches) * self.ids
        self.require("rows", self.rows >= least, f">= {least}, all ids in flight")


@harness.per_dim
def _rates(settings: WireSettings, dim: int) -> Table:
    num, ids, copy = settings.in_flight_batches, settings.ids, MemoryCopy(settings, dim)
    zipf = settings.draw_zipf(settings.repeats + 1 + num)

    def turn(timings: Timings) -> None:
        # The same batches in flight again and again: they need not be new ones.
        draws: dict[str, Callable[[], list[Numbers]]] = {
            "zipf": lambda: [zipf.requests.pop(), *zipf.requests[:num]],
            "uniform": lambda: np.split(server.draw((1 + num) * ids), 1 + num),
        }
        for kind, draw in draws.items():
            one, *many = draw()
            timings.add(MEMORY_COPY, ids, copy.seconds())
            timings.add_both(kind, len(one), server.run(one)[0])
            num_rows = sum(map(len, many))
            timings.add(f"{kind} | {_STREAM}", num_rows, server.stream(many))
            timings.add(f"{kind} | {_PULLS}", num_rows, server.pull_at_once(many))

    with filled_server(settings.table(dim), zipf.num_numbers) as server:
        timings = interleave(turn, settings.repeats)
    notes = []
    for name, rate in _PERSIA.get(dim, {}).items() if settings.ids >= 20_000 else ():
        times = timings.rate(f"uniform | {name}").median / rate
        text = f"The original PERSIA (D = {dim}, Adagrad, 2 cores): {name} {rate} "
        notes.append(f"{text}million rows/s; ours, uniform: {times:.1f} times that.")
    question = "One server and one client of one machine, million unique rows/s."
    rows = timings.rows(lambda _: MEMORY_COPY)
    return Table("rates", question, RATES_HEADER, rows, notes)


@harness.per_dim
def _stages(settings: WireSettings, dim: int) -> Table:
    copy, samples = MemoryCopy(settings, dim), list[tuple[Sample, Sample]]()
    with filled_server(settings.table(dim), settings.rows) as server:
        for _ in range(settings.repeats + 1):
            staged = partial(_staged, server, copy)
            samples += server.run(server.draw(settings.ids), timer=staged)
    rows = []
    # The first request touches new memory.
    kinds = dict(zip(("lookup", "update"), zip(*samples[1:], strict=True), strict=True))
    for kind, taken in kinds.items():
        total_ms = 1e3 * sum(sample["all"] for sample in taken)
        for stage in taken[0]:
            ms = [1e3 * sample[stage] for sample in taken]
            if any(ms):
                times = mean(ms), sum(ms) / total_ms, median(ms), max(ms)
                rows.append([kind, stage, *times])
    question = "Where the time of a request goes, ms; uniform ids."
    header = "request | stage | mean | fraction | median | longest"
    return Table("stages", question, header, rows)


def _staged(
    server: FilledServer, copy: MemoryCopy, request: Callable[[], T]
) -> tuple[Sample, T]:
    """Make a request; return its seconds by stage, and its result."""
    copy_s, idle = copy.seconds(), server.client.counters()[0]
    before = server.client.counters()[0]
    server_s, client_s = harness.cpu_seconds(server.pid), time.process_time()
    all_s, result = harness.timed(request)
    client_s = time.process_time() - client_s
    server_s = harness.cpu_seconds(server.pid) - server_s
    seconds = {"all": all_s, "client": client_s, "server": server_s}
    after = server.client.counters()[0]
    for stage in _STAGES:
        first, second, third = (c.get(f"{stage}_us", 0) for c in (idle, before, after))
        seconds[f"server: {stage}"] = (third - 2 * second + first) / 1e6
    neither = all_s - client_s - server_s
    return seconds | {"neither": neither, "copy": copy_s}, result


@harness.per_dim
def _encryption(settings: WireSettings, dim: int) -> Table:
    num, ids = settings.in_flight_batches, settings.ids
    with ExitStack() as stack:
        servers: dict[str, FilledServer] = {}
        for name, value in (("token", "0"), ("encrypted", "1")):
            with env.set_within({"PERSIA_ENCRYPT": value} | _TCP):
                server = filled_server(settings.table(dim), settings.rows)
                servers[name] = stack.enter_context(server)

        def turn(timings: Timings) -> None:
            one, *many = np.split(servers["token"].draw((1 + num) * ids), 1 + num)
            for name, server in servers.items():
                timings.add(f"one request | {name}", ids, sum(server.run(one)[0]))
                timings.add(f"in flight | {name}", num * ids, server.stream(many))

        timings = interleave(turn, settings.repeats)
    rows = timings.rows(lambda key: f"{key.split(' | ')[0]} | token")
    question = "What encryption costs: lookup + update, million unique rows/s."
    return Table("encryption", question, f"{RATES} | of token", rows)


@harness.per_dim
def _precisions(settings: WireSettings, dim: int) -> Table:
    with filled_server(settings.table(dim), settings.rows) as server:

        def turn(timings: Timings) -> None:
            for precision in Precision:
                seconds = server.run_in(precision, server.draw(settings.ids))
                timings.add_both(precision.name.lower(), settings.ids, seconds)

        timings = interleave(turn, settings.repeats)
    rows = timings.rows(lambda key: f"fp32 | {key.split(' | ')[1]}")
    question = "Rows and gradients in 16 bits, million unique rows/s, uniform ids."
    header = RATES.replace("ids |", "precision |")
    return Table("precisions", question, f"{header} | of fp32", rows)


@harness.per_dim
def _transports(settings: WireSettings, dim: int) -> Table:
    spec, ids = settings.table(dim), settings.ids
    num, own = settings.in_flight_batches, FilledStore(spec, settings.rows)
    with ExitStack() as stack:
        filled: dict[str, Filled] = {"in process": own}  # one after the other, always
        for name in ("tcp", "shm"):
            with env.set_within({"PERSIA_TRANSPORT": name}):
                server = filled_server(spec, settings.rows)
                filled[name] = stack.enter_context(server)

        def turn(timings: Timings) -> None:
            several = own.draw(settings.one_id_requests)[:, None]
            one, *many = np.split(own.draw((1 + num) * ids), 1 + num)
            for name, each in filled.items():
                for (lookup_s, _), _ in each.run(*several, timer=_costs):
                    timings.add(f"{name} | lookup of one id", 1, lookup_s)
                ((lookup_s, cpu_s), (update_s, more_s)), *_ = each.run(
                    one, timer=_costs
                )
                timings.add_both(name, ids, (lookup_s, update_s))
                timings.add(f"{name} | client's processor time", ids, cpu_s + more_s)
                if isinstance(each, FilledServer):
                    timings.add(f"{name} | {_STREAM}", num * ids, each.stream(many))
                else:
                    taken_s = sum(sum(pair) for pair in each.run(*many))
                    timings.add(f"{name} | {_STREAM}", num * ids, taken_s)

        timings = interleave(turn, settings.repeats)
    rows = timings.rows(lambda key: f"in process | {key.split(' | ')[1]}")
    question = (
        "One server and one client of one machine: million unique rows/s, uniform ids."
    )
    header = RATES.replace("ids |", "transport |")
    return Table("transports", question, f"{header} | of in process", rows)


def _costs(request: Callable[[], T]) -> tuple[tuple[float, float], T]:
    """Make a request; return its seconds, those of this process's CPUs, its result."""
    cpu_s = time.process_time()
    seconds, result = harness.timed(request)
    return (seconds, time.process_time() - cpu_s), result


class TableRequests:
    """Lookups and updates of 26 tables, and of one table that has all their rows.

    Both train the same rows by the same gradients, so that they must stay equal.
    """

    def __init__(
        self, spec: TableSpec, num_ids: int, cluster: EmbeddingCluster
    ) -> None:
        self.pid = cluster.processes[0].pid
        self.client = EmbeddingClient.connect(cluster.addresses)
        names = [f"{spec.name} {number}" for number in range(NUM_TABLES)]
        specs = [replace(spec, name=name) for name in (spec.name, *names)]
        self.client.add_tables(specs)
        ids = ids_of(np.arange(NUM_TABLES * num_ids))
        split = self.client.split(ids)
        # Of one server: its ids are in the order in which they are given.
        parts = [self.client.split(part) for part in np.split(ids, NUM_TABLES)]
        self.requests = {
            "one table": [(spec.name, split)],
            "tables": list(zip(names, parts, strict=True)),
        }
        self._rng = np.random.default_rng(20_231)
        self._shape = len(ids), spec.dim
        self._number = BatchNumber(BatchNumber.new_stream(), 0)
        rows_ND = self._rng.standard_normal(self._shape, dtype=np.float32)
        self.client.write(spec.name, ids, rows_ND)
        for name, part, rows in zip(
            names, np.split(ids, NUM_TABLES), np.split(rows_ND, NUM_TABLES), strict=True
        ):
            self.client.write(name, part, rows)

    def run(self, num: int) -> dict[str, float]:
        """Return the server's seconds of a lookup with its update, by what is asked."""
        grads_ND = self._rng.standard_normal(self._shape, dtype=np.float32)
        seconds, rows = dict[str, float](), list[Floats]()
        for what, tables in self.requests.items():
            grads = np.split(grads_ND, len(tables))
            found, begun_s = list[Floats](), harness.cpu_seconds(self.pid)
            for _ in range(num):
                self._number = self._number._replace(batch=self._number.batch + 1)
                found = self.client.pull(tables, batch=self._number)
                replies = self.client.push(tables, grads, self._number)
                missed = self.client.outcome(replies).num_missed
                require("gradients without a row", received=missed, expected=0)
            seconds[what] = (harness.cpu_seconds(self.pid) - begun_s) / num
            rows.append(np.concatenate(found))
        different = int((rows[0] != rows[1]).sum())
        require("weights of tables that differ", received=different, expected=0)
        return seconds


@harness.per_dim
def _tables(settings: WireSettings, dim: int) -> Table:
    rows = []
    for transport in ("tcp", "shm"):
        for memory in ("private", "kept"):
            for num_ids in settings.table_ids:
                with (
                    env.set_within({"PERSIA_TRANSPORT": transport}),
                    _server_of_tables(settings.table(dim), num_ids, memory) as server,
                ):
                    samples = [
                        server.run(settings.table_requests)
                        for _ in range(settings.repeats + 1)
                    ]
                one, several = (
                    [1e6 * sample[what] for sample in samples[1:]]
                    for what in server.requests
                )
                times = [b / a for a, b in zip(one, several, strict=True)]
                row = transport, memory, num_ids, median(one), median(several)
                rows.append([*row, median(times)])
    question = (
        f"Processor time of a server for {NUM_TABLES} tables of some ids, and for one "
        "table of as many in all, us: lookup + update."
    )
    header = (
        f"transport | memory | ids a table | one table | {NUM_TABLES} tables | ratio"
    )
    return Table("tables", question, header, rows)


@contextmanager
def _server_of_tables(
    spec: TableSpec, num_ids: int, memory: str
) -> Iterator[TableRequests]:
    with harness.pinned(0):
        capacity = 4 * NUM_TABLES * num_ids
        cluster = EmbeddingCluster.local(1, capacity, restarts=memory == "kept")
    with cluster, harness.pinned(-1):
        server = TableRequests(spec, num_ids, cluster)
        with closing(server.client):
            yield server


class FilledRedis(Filled):
    """Rows in Redis, each with its state one value, which the client steps."""

    def __init__(self, spec: TableSpec, num_rows: int, port: int) -> None:
        retry = Retry(ConstantBackoff(0.05), int(_TIMEOUT_S / 0.05))
        self.client = redis.Redis(port=port, socket_timeout=_TIMEOUT_S, retry=retry)
        self.step_s = 0.0
        super().__init__(spec, num_rows)

    def _write(self, ids_N: Ids, rows_NW: Floats) -> None:
        values = rows_NW.view(f"V{rows_NW.shape[1] * 4}").ravel().tolist()
        self.client.mset(dict(zip(ids_N.view("V8").tolist(), values, strict=True)))

    def _read(self, ids_N: Ids) -> Floats:
        values: Any = self.client.mget(ids_N.view("V8").tolist())
        require("missing keys", received=values.count(None), expected=0)
        rows: Floats = np.frombuffer(b"".join(values), np.float32)
        return rows.reshape(len(ids_N), -1)

    def _look_up(self, ids_N: Ids) -> Floats:
        self._rows_NW = self._read(ids_N)
        return self._rows_NW

    def _update(self, ids_N: Ids, grads_ND: Floats) -> None:
        self.step_s, rows_NW = harness.timed(
            lambda: self._stepped(self._rows_NW, grads_ND)
        )
        self._write(ids_N, rows_NW)

    def stream(self, requests: Sequence[Numbers]) -> float:
        """Do both, several at once, no id in two requests; return the seconds."""
        ids, grads = map(ids_of, requests), [self.grads(len(n)) for n in requests]

        def take(ids_N: Ids, grads_ND: Floats) -> None:
            self._write(ids_N, self._stepped(self._read(ids_N), grads_ND))

        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            seconds, _ = harness.timed(lambda: list(threads.map(take, ids, grads)))
        for numbers_N, grads_ND in zip(requests, grads, strict=True):
            self.expected.update(numbers_N, grads_ND)
            self.check_update(numbers_N)
        return seconds

    def _stepped(self, rows_NW: Floats, grads_ND: Floats) -> Floats:
        """Adagrad in single precision, as a trainer would do it."""
        optimizer, dim = self.spec.optimizer, self.spec.dim
        assert isinstance(optimizer, Adagrad)
        state_ND = rows_NW[:, dim:] + grads_ND * grads_ND
        step_ND = grads_ND / (np.sqrt(state_ND) + np.float32(optimizer.eps))
        weights_ND = rows_NW[:, :dim] - np.float32(optimizer.lr) * step_ND
        return np.concatenate([weights_ND, state_ND], axis=1)


@contextmanager
def redis_server(settings: WireSettings) -> Iterator[int]:
    """Start a Redis server on the loopback interface; yield its port."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        options = ["--bind", "127.0.0.1", "--save", "", "--dir", folder, "--port"]
        command = [str(settings.redis), *options, str(port)]
        with harness.pinned(0):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield port
        except redis.RedisError as exc:
            raise ServerError(str(exc), server=f"Redis on port {port}") from exc
        finally:
            process.terminate()
            process.wait(_TIMEOUT_S)


@harness.per_dim
def _redis(settings: WireSettings, dim: int) -> Table:
    if settings.redis is None or settings.optimizer != "adagrad":
        raise ConfigError(
            "The figure 'redis' needs --redis PROGRAM and the optimizer adagrad. "
            f"Received: {settings.redis} and {settings.optimizer}."
        )
    spec, zipf = settings.table(dim), settings.draw_zipf(settings.repeats + 1)
    num, ids = settings.in_flight_batches, settings.ids

    def turn(timings: Timings) -> None:
        for kind, one in (("zipf", zipf.requests.pop()), ("uniform", ours.draw(ids))):
            ours_s, theirs_s = (sum(filled.run(one)[0]) for filled in (ours, theirs))
            timings.add(f"{kind} | {_OURS}", len(one), ours_s)
            moved_s = theirs_s - theirs.step_s
            timings.add(f"{kind} | Redis: MGET + MSET alone", len(one), moved_s)
            timings.add(f"{kind} | {_THEIRS}", len(one), theirs_s)
        many = np.split(ours.draw(num * ids), num)
        timings.add(f"in flight | {_OURS}", num * ids, ours.stream(many))
        timings.add(f"in flight | {_THEIRS}", num * ids, theirs.stream(many))

    with filled_server(spec, zipf.num_numbers) as ours, redis_server(settings) as port:
        theirs = FilledRedis(spec, zipf.num_numbers, port)
        with closing(theirs.client) as client:
            timings = interleave(turn, settings.repeats)
            version = client.info("server")["redis_version"]
    rows = timings.rows(lambda key: f"{key.split(' | ')[0]} | {_OURS}")
    question = "Against Redis, the same rows in the same run, million unique rows/s."
    notes = [f"Redis {version}, no persistence; redis-py with hiredis."]
    header = f"{RATES} | of ours"
    return Table("redis", question, header, rows, notes)


BENCHMARK = Benchmark(
    name="wire",
    normal=WireSettings(repeats=11),
    tiny=WireSettings.tiny(in_flight_batches=6, table_ids=(4,), table_requests=5),
    figures={
        "rates": _rates,
        "stages": _stages,
        "redis": _redis,
        "restarts": restarts.measure_restarts,
        "survival": restarts.measure_survival,
        "encryption": _encryption,
        "transports": _transports,
        "precisions": _precisions,
        "tables": _tables,
    },
    only_for={"redis": "redis"},
)
