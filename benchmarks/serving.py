"""How long does a user wait for predictions over HTTP?

An open loop: requests come at moments of their own, whether or not those before them
are answered, and a latency counts from the moment that the request was due. The server
predicts on one core; the embedding server and what sends requests share another. Next
to each case is a server that receives the same bodies and answers a constant: what the
machine and HTTP take by themselves. A closed loop tells what a server can do, beside
the endpoint that a user would write (``bare_endpoint.py``) and one without a search for
rows.

Each answer must be that of the same model on the same rows here.
"""

import asyncio
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import nn

from benchmarks import serving_freshness
from benchmarks.harness import (
    Benchmark,
    Settings,
    Table,
    cpu_seconds,
    move_to_core,
    pinned,
)
from benchmarks.increments import IncrementSettings
from benchmarks.reference import require
from persia_torchrec import env
from persia_torchrec.arrays import Floats
from persia_torchrec.checkpoint.signature import EXTRA_FILE, DenseInput, ModelSignature
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.embedding.embedding_config import load_embedding_config
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.errors import ServerError
from persia_torchrec.lookup.bags import FeatureSpec
from persia_torchrec.persia.batch import (
    IDTypeFeatureWithSingleID,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia_torchrec.persia.slots import SlotsLookup, build_features, build_tables
from persia_torchrec.persia.slots_reader import SlotsReader
from persia_torchrec.server.cluster import EmbeddingCluster

_LENGTH = "Inference-Header-Content-Length"
_PATH = "/v2/models/model/infer"
_START_S, _ANSWER_S = 600.0, 60.0
_BODIES = 32
_WARM_UP = 64
_NUM_DENSE = 13

# With the protocol's number, asyncio sends without delay.
_IDLE = """
import socket
import uvicorn

async def app(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})

listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
listening.bind(("127.0.0.1", 0))
listening.listen()
print(listening.getsockname()[1], flush=True)
settings = uvicorn.Config(app, lifespan="off", log_level="critical")
uvicorn.Server(settings).run(sockets=[listening])
"""

Address = tuple[str, int]
Body = tuple[bytes, Floats]
"""A request over HTTP, head included, and the predictions to be had."""


@dataclass(frozen=True, kw_only=True)
class ServingSettings(Settings):
    """What to measure."""

    rows: Annotated[int, "rows of each table"] = 50_000
    features: Annotated[int, "ID features, of one id a sample each"] = 26
    dim: Annotated[int, "embedding dim"] = 16
    hidden: Annotated[int, "width of the two hidden layers"] = 256
    candidates: Annotated[tuple[int, ...], "samples of a request"] = (100, 2048)
    rates: Annotated[tuple[float, ...], "requests a second, of each size"] = (200, 10)
    bursts: Annotated[int, "requests that come at once"] = 64
    burst_samples: Annotated[int, "samples of each of these"] = 10
    seconds: Annotated[float, "of each case"] = 20.0
    connections: Annotated[int, "that ask again at once (saturation)"] = 16
    turns: Annotated[int, "of each server (saturation); the median counts"] = 5
    batch_window_s: Annotated[float, "the server's, for bursts"] = 0.002
    intervals_s: Annotated[tuple[float, ...], "of increments"] = (0.1, 0.25, 0.5)
    fresh_rows: Annotated[int, "rows of the training that is followed"] = 500_000
    fresh_batches: Annotated[int, "batches of it in a turn"] = 250
    fresh_repeats: Annotated[int, "turns with and without increments"] = 3
    fresh_updates: Annotated[int, "updates until an answer has them"] = 60

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = len(self.rates) == len(self.candidates)
        self.require("rates", fits, "one for each of the candidates")


class Case(NamedTuple):
    """Requests of a size, and when they come: a rate, or bursts of so many."""

    name: str
    num_samples: int
    rate: float
    at_once: int = 1


class Served(NamedTuple):
    """A server, by its address and its process."""

    address: Address
    pid: int

    def cpu_seconds(self) -> float:
        """Return the processor time of all its processes so far."""
        children = psutil.Process(self.pid).children(recursive=True)
        return sum(map(cpu_seconds, [self.pid, *(child.pid for child in children)]))


class Latencies(NamedTuple):
    """Milliseconds of all requests of a case; how many had an error."""

    ms: npt.NDArray[np.float64]
    num_errors: int
    cpu_ms: float = 0.0  # of all processes of the server, a request

    def at(self, share: float) -> float:
        """Return the quantile of a share."""
        return float(np.quantile(self.ms, share))


class Tower(nn.Module):
    """A perceptron over all that it is given."""

    def __init__(self, num_inputs: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(num_inputs, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(
        self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return a probability for each sample, ``(B, 1)``."""
        return torch.sigmoid(self.layers(torch.cat(dense + embeddings, dim=1)))


def measure(settings: ServingSettings) -> list[Table]:
    """Serve a model that was made up, and send it requests."""
    sizes = zip(settings.candidates, settings.rates, strict=True)
    cases = [Case(f"{n} candidates", n, rate) for n, rate in sizes]
    num, size = settings.bursts, settings.burst_samples
    burst = Case(f"{num} at once, batched", size, 2.0, num)
    rows, lookups = [], []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = Model(settings, folder)
        bodies = {case: model.bodies(case.num_samples) for case in (*cases, burst)}
        lookups = [model.lookup_ms(case.num_samples) for case in (*cases, burst)]
        window = "--batch-window-s", str(settings.batch_window_s)
        idle = stack.enter_context(_idle_server())
        for flags, of_server in (((), cases), (window, [burst])):
            with _serving(folder, flags) as served:
                for case in of_server:
                    found = drive(served, case, bodies[case], settings.seconds)
                    of_idle = drive(idle, case, bodies[case], settings.seconds / 4)
                    rows.append(_row(case, found, of_idle))
    header = (
        "requests | a second | sent | p50 ms | p99 ms | slowest | errors | the lookup "
        "alone, p50 | processor ms | a constant, p50 | its p99"
    )
    question = (
        f"Latency over HTTP, binary tensors: {settings.features} ID features, "
        f"{_NUM_DENSE} numbers, D = {settings.dim}, two hidden layers of "
        f"{settings.hidden}; {settings.rows} rows a table, uniform ids."
    )
    rows = [[*r[:7], ms, *r[7:]] for r, ms in zip(rows, lookups, strict=True)]
    return [Table("latency", question, header, rows)]


def measure_saturation(settings: ServingSettings) -> list[Table]:
    """Ask again as soon as an answer is there, of each server in turn."""
    num = settings.candidates[0]
    found: dict[str, list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = Model(settings, folder)
        servers = {
            "this": stack.enter_context(_serving(folder, ())),
            "rows in a dict": stack.enter_context(_bare(folder)),
            "ids are row numbers": stack.enter_context(_bare(folder, "--numbers")),
        }
        for turn in range(settings.turns + 1):
            for name, served in servers.items():
                with pinned(0):
                    rates = asyncio.run(_saturate(served, model.bodies(num), settings))
                if turn:  # the first one warms up
                    found.setdefault(name, []).append(rates)
    bare = found["rows in a dict"]
    rows = []
    for name, turns in found.items():
        ratios = [one[0] / other[0] for one, other in zip(turns, bare, strict=True)]
        rate, cpu_ms = (median(column) for column in zip(*turns, strict=True))
        rows.append([name, rate, cpu_ms, median(ratios)])
    question = (
        f"Requests of {num} candidates a second by {settings.connections} connections, "
        "each answer checked; the median of turns."
    )
    header = "server | a second | processor ms a request | of rows in a dict"
    return [Table("saturation", question, header, rows)]


async def _saturate(
    served: Served, bodies: Sequence[Body], settings: ServingSettings
) -> tuple[float, float]:
    """Return requests a second, and the server's processor ms of each."""
    connections, num = Connections(served.address), 0
    before_s, start_s = served.cpu_seconds(), time.monotonic()
    end_s = start_s + settings.seconds / 4

    async def ask(number: int) -> None:
        nonlocal num
        while time.monotonic() < end_s:
            number += settings.connections
            fits = await connections.ask(*bodies[number % len(bodies)])
            require("an answer", received=fits, expected=True)
            num += 1

    async with asyncio.timeout(settings.seconds + _ANSWER_S), asyncio.TaskGroup() as of:
        for number in range(settings.connections):
            of.create_task(ask(number))
    connections.close()
    seconds, cpu_s = time.monotonic() - start_s, served.cpu_seconds() - before_s
    return num / seconds, 1e3 * cpu_s / num


def measure_freshness(settings: ServingSettings) -> list[Table]:
    """Measure what an interval of increments costs, and how fresh answers are."""
    training = IncrementSettings(
        rows=settings.fresh_rows,
        batches=settings.fresh_batches,
        repeats=settings.fresh_repeats,
        zipf_draws=min(106_496, 8 * settings.fresh_rows),
    )
    cost = serving_freshness.measure_cost(training, settings.intervals_s)
    rows = []
    for interval_s in settings.intervals_s:
        found = serving_freshness.measure_delays(
            training, interval_s, settings.fresh_updates, _serving
        )
        of_all = found.seconds
        at = [float(np.quantile(of_all, share)) for share in (0.5, 0.99)]
        rows.append([interval_s, found.num_rows, len(of_all), *at, max(of_all)])
    question = "Seconds from an acknowledged update to an answer over HTTP."
    header = "interval, s | rows of a batch | updates | p50 s | p99 s | longest, s"
    return [cost, Table("freshness", question, header, rows)]


def _row(case: Case, found: Latencies, of_idle: Latencies) -> list[object]:
    ms = found.at(0.5), found.at(0.99), float(found.ms.max())
    rate = case.rate * case.at_once
    idle = found.cpu_ms, of_idle.at(0.5), of_idle.at(0.99)
    return [case.name, rate, len(found.ms), *ms, found.num_errors, *idle]


class Model:
    """A checkpoint with rows and a dense model, as a training leaves one."""

    def __init__(self, settings: ServingSettings, folder: Path) -> None:
        self._names = [f"feature_{i:02d}" for i in range(settings.features)]
        self._settings, self._rng = settings, np.random.default_rng(7)
        config = folder / "embedding_config.yml"
        slots = "".join(f"  {n}: {{dim: {settings.dim}}}\n" for n in self._names)
        config.write_text(f"feature_index_prefix_bit: 8\nslots_config:\n{slots}")
        schema = load_embedding_config(str(config))
        num_inputs = _NUM_DENSE + settings.dim * settings.features
        torch.manual_seed(7)
        self._tower = Tower(num_inputs, settings.hidden).eval()
        self._signature = ModelSignature(
            tuple(self._names), (DenseInput("dense", "float32", (_NUM_DENSE,)),), (1,)
        )
        run = folder / "run"
        with EmbeddingCluster.local(
            1, 2 * settings.rows * settings.features
        ) as cluster:
            client = EmbeddingClient.connect(cluster.addresses)
            client.add_tables(build_tables(schema, EmbeddingConfig(), SGD(0.0)))
            features = build_features(schema)
            lookup = SlotsLookup(client, features)
            self._fill(client, features)
            client.checkpoints.dump(run)
            self._reader = SlotsReader(lookup)
            self._requests = {
                num: [self._draw(num) for _ in range(_BODIES)]
                for num in {*settings.candidates, settings.burst_samples}
            }
            self._expected = {
                num: [self._predict(batch) for batch in batches]
                for num, batches in self._requests.items()
            }
            self._lookup_ms = {
                num: self._time_lookups(batches)
                for num, batches in self._requests.items()
            }
            client.close()
        (checkpoint,) = run.glob("checkpoint-*")
        extra = {EXTRA_FILE: self._signature.encode()}
        save: Any = torch.jit.save  # torch leaves it untyped
        script = torch.jit.script(self._tower)
        save(script, str(folder / "model.pt"))  # of the endpoints beside it
        np.save(folder / "rows.npy", np.stack(self._rows))
        save(script, str(checkpoint / "jit_dense.pt"), _extra_files=extra)

    def bodies(self, num_samples: int) -> list[Body]:
        """Return requests, and what they must be answered."""
        batches, expected = self._requests[num_samples], self._expected[num_samples]
        return list(zip(map(self._encode, batches), expected, strict=True))

    def lookup_ms(self, num_samples: int) -> float:
        """Return the median milliseconds of the lookup of a request, and of no more."""
        return self._lookup_ms[num_samples]

    def _fill(self, client: EmbeddingClient, features: Sequence[FeatureSpec]) -> None:
        """Make all rows."""
        shape = self._settings.rows, self._settings.dim
        self._rows = []
        for feature in features:
            ids = np.arange(1, shape[0] + 1, dtype=np.uint64) + np.uint64(
                feature.prefix
            )
            rows = self._rng.standard_normal(shape, np.float32)
            client.write(feature.table, ids, rows)
            self._rows.append(rows)

    def _draw(self, num: int) -> PersiaBatch:
        """Return samples of a user: uniform ids, one of each feature."""
        draw = self._rng.integers
        features = [
            IDTypeFeatureWithSingleID(
                name, draw(1, self._settings.rows + 1, num, dtype=np.uint64)
            )
            for name in self._names
        ]
        dense = self._rng.standard_normal((num, _NUM_DENSE), np.float32)
        return PersiaBatch(
            features, [NonIDTypeFeature(dense, "dense")], requires_grad=False
        )

    def _predict(self, batch: PersiaBatch) -> Floats:
        dense = [torch.from_numpy(f.data) for f in batch.non_id_type_features]
        with torch.inference_mode():
            slots = self._reader.to_tensors(self._reader.look_up(batch))
            predicted: Floats = self._tower(dense, list(slots.values())).numpy()
        return predicted

    def _time_lookups(self, batches: Sequence[PersiaBatch]) -> float:
        seconds = []
        for batch in (*batches, *batches):
            start = time.perf_counter()
            self._reader.look_up(batch)
            seconds.append(time.perf_counter() - start)
        return 1e3 * median(seconds)

    def _encode(self, batch: PersiaBatch) -> bytes:
        """Return a request with binary tensors, its head included."""
        ids, dense = batch.id_type_features, batch.non_id_type_features
        arrays: list[tuple[str, str, npt.NDArray[Any]]] = [
            *((feature.name, "UINT64", feature.ids) for feature in ids),
            *((feature.name, "FP32", feature.data) for feature in dense),
        ]
        inputs = [
            {
                "name": name,
                "datatype": datatype,
                "shape": list(array.shape),
                "parameters": {"binary_data_size": array.nbytes},
            }
            for name, datatype, array in arrays
        ]
        about = {"binary_data_output": True}
        head = msgspec.json.encode({"inputs": inputs, "parameters": about})
        body = b"".join([head, *(array.tobytes() for _, _, array in arrays)])
        lines = (
            f"POST {_PATH} HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/octet-stream",
            f"{_LENGTH}: {len(head)}",
            f"Content-Length: {len(body)}",
        )
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@contextmanager
def _serving(folder: Path, flags: Sequence[str]) -> Iterator[Served]:
    """Run an inference server on the last core, embedding servers on the first."""
    words = (
        *("-m", "persia_torchrec.serving", "--checkpoint", str(folder / "run")),
        *("--embedding-config", str(folder / "embedding_config.yml"), *flags),
        *("--max-requests", "256"),
    )
    variables = env.of_child({"OMP_NUM_THREADS": "1"})  # and the transport's
    with pinned(-1):
        process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, text=True, env=variables
        )
    try:
        yield Served(_ready(process), process.pid)
    finally:
        process.terminate()
        process.communicate(timeout=_START_S)


@contextmanager
def _bare(folder: Path, *flags: str) -> Iterator[Served]:
    """Run the endpoint that a user would write, on the last core."""
    words = [sys.executable, "-m", "benchmarks.bare_endpoint", str(folder), *flags]
    variables = env.of_child({"OMP_NUM_THREADS": "1"})
    with (
        pinned(-1),
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=variables) as it,
    ):
        try:
            assert it.stdout is not None
            yield Served(("127.0.0.1", int(it.stdout.readline())), it.pid)
        finally:
            it.terminate()


def _ready(process: "subprocess.Popen[str]") -> Address:
    """Wait until a server is ready, and give its embedding servers the first core."""
    for line in process.stdout or ():
        if line.startswith("ready http://"):
            for child in psutil.Process(process.pid).children(recursive=True):
                with suppress(FileNotFoundError):
                    move_to_core(child.pid, 0)
            host, _, port = line.split("//")[1].strip().rpartition(":")
            return host, int(port)
    raise ServerError("it ended before it was ready.", server="the inference server")


@contextmanager
def _idle_server() -> Iterator[Served]:
    """Run a server on the last core that receives bodies and answers a constant."""
    words = [sys.executable, "-c", _IDLE]
    with pinned(-1), subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as it:
        try:
            assert it.stdout is not None
            yield Served(("127.0.0.1", int(it.stdout.readline())), it.pid)
        finally:
            it.terminate()


def drive(
    served: Served, case: Case, bodies: Sequence[Body], seconds: float
) -> Latencies:
    """Send the requests of a case, after a warm-up; return the latencies.

    Raises:
        StoreError: an answer is not the one to be had.
    """
    with pinned(0):
        return asyncio.run(_drive(served, case, bodies, seconds))


async def _drive(
    served: Served, case: Case, bodies: Sequence[Body], seconds: float
) -> Latencies:
    connections = Connections(served.address)
    for number in range(_WARM_UP):
        await connections.ask(*bodies[number % len(bodies)])
    before_s = served.cpu_seconds()
    loop = asyncio.get_running_loop()
    num = math.ceil(case.rate * seconds)
    gaps = np.random.default_rng(7).exponential(1 / case.rate, num)
    due_s = loop.time() + 0.1 + np.cumsum(gaps)
    found: list[float] = []
    num_errors = 0

    async def ask(body: Body, due_s: float) -> None:
        nonlocal num_errors
        num_errors += not await connections.ask(*body)
        found.append(1e3 * (loop.time() - due_s))

    async with asyncio.timeout(seconds * 10 + _ANSWER_S), asyncio.TaskGroup() as group:
        for number, at_s in enumerate(due_s):
            await asyncio.sleep(at_s - loop.time())
            for i in range(case.at_once):
                body = bodies[(number + i) % len(bodies)]
                group.create_task(ask(body, at_s))
    connections.close()
    cpu_s = served.cpu_seconds() - before_s
    return Latencies(np.array(found), num_errors, 1e3 * cpu_s / len(found))


class Connections:
    """Connections that are kept alive, as many as there are requests at once."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, request: bytes, expected: Floats) -> bool:
        """Send a request and check the answer; return whether it is one."""
        if self._free:
            reader, writer = self._free.pop()
        else:
            reader, writer = await asyncio.open_connection(*self._address)
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        (length,) = re.findall(rb"\ncontent-length: *(\d+)", head)
        body = await reader.readexactly(int(length))
        self._free.append((reader, writer))
        if b" 200 " not in head.partition(b"\r\n")[0]:
            return False
        if body != b"ok":  # of the server that answers a constant
            predicted = np.frombuffer(body[-expected.nbytes :], np.float32)
            fits = np.allclose(predicted, expected.ravel(), atol=1e-5)
            require("an answer's agreement", received=fits, expected=True)
        return True

    def close(self) -> None:
        """Close all."""
        for _, writer in self._free:
            writer.close()


BENCHMARK = Benchmark(
    name="serving",
    normal=ServingSettings(),
    tiny=ServingSettings(
        rows=100,
        features=3,
        candidates=(4,),
        rates=(50.0,),
        bursts=4,
        seconds=1.0,
        connections=2,
        turns=1,
        intervals_s=(0.05,),
        fresh_rows=4096,
        fresh_batches=4,
        fresh_repeats=1,
        fresh_updates=2,
    ),
    figures={
        "latency": measure,
        "saturation": measure_saturation,
        "freshness": measure_freshness,
    },
)
