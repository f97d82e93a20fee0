"""Does a model train as fast on a server as with its tables in this process?

TorchRec's DLRM trains on the same batches in plain TorchRec and on server processes,
all on the cores of this machine, some steps each in turn. The servers begin with plain
TorchRec's rows; at staleness 0 the first losses must agree, and in the end no gradient
may have missed its row.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.optimizers import in_backward_optimizer_filter

from benchmarks import harness
from benchmarks.harness import Benchmark, Settings, Table
from benchmarks.reference import Numbers, chunks, require, scattered
from benchmarks.workload import zipf_ranks
from persia_torchrec import timeouts
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.errors import StoreError
from persia_torchrec.server.cluster import EmbeddingCluster
from persia_torchrec.sharding.sharder import RemoteEmbeddingBagCollectionSharder
from persia_torchrec.training.recoverable import RecoverableRun, recoverable

Carrier = Literal["given", "tcp", "shm"]

TABLES = tuple(f"table{f}" for f in range(26))
"""Names of the tables, and of their features, one id each."""

_NUM_DENSE, _RATE, _EPS = 13, 0.05, 1e-8
_CPU = torch.device("cpu")
_NUM_WARM_STEPS, _CHECKED_STEPS = 2, 5
_SHORT_S = 1e-3  # between checkpoints: the least that is possible
_LOST = dict.fromkeys(("gradients_missed", "gradients_refused", "evictions"), 0)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(Settings):
    """What to measure: all of ``rows`` with the first dim, the first with others."""

    dims: Annotated[tuple[int, ...], "embedding dims, multiples of 4"] = (16, 64)
    rows: Annotated[tuple[int, ...], "rows on the servers"] = (10**6, 10**7, 5 * 10**7)
    staleness: Annotated[tuple[int, ...], "bounds; the last with more rows"] = (0, 8)
    transports: Annotated[
        tuple[Carrier, ...], "of clients, each with its servers; given: --transport"
    ] = ("given",)
    table_rows: Annotated[int, "rows per table of plain TorchRec"] = 1_000_000
    batch_size: Annotated[int, "samples per batch"] = 4096
    batches: Annotated[int, "different batches, used again and again"] = 32
    steps: Annotated[int, "steps timed together"] = 16
    repeats: Annotated[int, "turns of each model; the median counts"] = 7
    saved_to: Annotated[Path | None, "folder for checkpoints"] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("dims", all(d % 4 == 0 for d in self.dims), "multiples of 4")


def draw_batches(settings: TrainingSettings) -> list[Batch]:
    """Draw the batches, always the same: Zipf ids, and labels that follow from them."""
    rng, batches = np.random.default_rng(20_235), []
    num, num_rows = settings.batch_size, settings.table_rows
    for _ in range(settings.batches):
        ranks = zipf_ranks(rng, num_rows, len(TABLES) * num)
        dense = rng.standard_normal((num, _NUM_DENSE), dtype=np.float32)
        is_even = (ranks.reshape(-1, num) % 2 == 0).sum(axis=0)
        logits = dense[:, 0] + 0.5 * (is_even - is_even.mean())
        labels = (logits + rng.logistic(size=num) > 0).astype(np.float32)
        # Popular ids stand anywhere in a table, as they do after hashing.
        values = torch.from_numpy(scattered(ranks, num_rows))
        lengths = torch.ones(len(values), dtype=torch.int32)
        features = KeyedJaggedTensor(list(TABLES), values, lengths=lengths)
        tensors = torch.from_numpy(dense), features, torch.from_numpy(labels)
        batches.append(Batch(*tensors))
    return batches


def ids_by_table(batches: Sequence[Batch]) -> list[Numbers]:
    """Return the ids that occur in the batches, int64, ascending, for each table."""
    ids = [b.sparse_features.values().numpy().reshape(len(TABLES), -1) for b in batches]
    return [np.unique(of_table) for of_table in np.concatenate(ids, axis=1)]


class Server(NamedTuple):
    """A server process, a client of it, its capacity, and the bound of a model."""

    client: EmbeddingClient
    pid: int
    num_rows: int
    staleness: int
    carrier: Carrier = "given"


class Arm:
    """DLRM in plain TorchRec, or on a server: from staleness 2 on, a step ahead.

    ``after_step`` is called after each.
    """

    def __init__(self, settings: TrainingSettings, dim: int, at: Server | None) -> None:
        self.server, self._turns = at, list[Sequence[float]]()
        self._pipeline: Any = None
        self.flush: Callable[[], None] = lambda: None
        self.after_step: Callable[[], None] = lambda: None
        if at is None:
            rowwise = EmbOptimType.EXACT_ROWWISE_ADAGRAD
            params = {"optimizer": rowwise, "learning_rate": _RATE, "eps": _EPS}
            plain = EmbeddingBagCollectionSharder(fused_params=params)
            self.model = _dlrm(settings, dim, plain)
        else:
            adagrad = Adagrad(_RATE, 0, eps=_EPS, vectorwise_shared=True)
            sharder = RemoteEmbeddingBagCollectionSharder
            self.sharder = remote = sharder(at.client, adagrad, at.staleness)
            self.model, self.flush = _dlrm(settings, dim, remote), remote.flush
            self.close = remote.close
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.optimizer = torch.optim.SGD(dense.values(), _RATE)
        if at is not None and at.staleness >= 2:
            self._pipeline = TrainPipelineSparseDist(self.model, self.optimizer, _CPU)

    def train(self, batches: Sequence[Batch]) -> list[float]:
        """Take a step per batch; return the losses when every update is applied."""
        rest = iter(batches)
        losses = [self._step(rest) for _ in batches]
        self.flush()
        return losses

    def _step(self, rest: Iterator[Batch]) -> float:
        if self._pipeline is None:
            self.optimizer.zero_grad()
            loss, _ = self.model(next(rest))
            loss.backward()
            self.optimizer.step()
        else:
            loss, *_ = self._pipeline.progress(rest)
        self.after_step()
        return float(loss.detach())

    def take_turn(self, batches: Sequence[Batch]) -> None:
        """Time some steps, after two that are not timed."""
        self.train(batches[:_NUM_WARM_STEPS])
        start = self._seconds()
        self.train(batches[_NUM_WARM_STEPS:])
        self._turns.append(np.subtract(self._seconds(), start).tolist())

    def _seconds(self) -> tuple[float, float, float]:
        server_s = harness.cpu_seconds(self.server.pid) if self.server else 0.0
        return time.perf_counter(), time.process_time(), server_s

    def rates(self, settings: TrainingSettings) -> list[float]:
        """Return the samples per second of each turn."""
        return [settings.steps * settings.batch_size / turn[0] for turn in self._turns]

    def row(self, settings: TrainingSettings, base: float) -> list[object]:
        """Return the row of the table, relative to the median rate of another model."""
        rates, middle = self.rates(settings), median(self.rates(settings))
        ms = [1e3 * median(t) / settings.steps for t in zip(*self._turns, strict=True)]
        cells = [middle, min(rates), max(rates), middle / base, *ms]
        if self.server is None:
            return ["plain TorchRec", None, *cells[:-1], None]
        name = f"on the server, staleness {self.server.staleness}"
        if self.server.carrier != "given":
            name += f", {self.server.carrier}"
        return [name, self.server.num_rows, *cells]


def _dlrm(
    settings: TrainingSettings, dim: int, sharder: ModuleSharder[EmbeddingBagCollection]
) -> DistributedModelParallel:
    """Return DLRM, sharded, its first dense weights always the same."""
    torch.manual_seed(20_236)
    num, meta = settings.table_rows, torch.device("meta")
    tables = [
        EmbeddingBagConfig(num, dim, name, feature_names=[name]) for name in TABLES
    ]
    dlrm = DLRM(
        EmbeddingBagCollection(tables=tables, device=meta),
        dense_in_features=_NUM_DENSE,
        dense_arch_layer_sizes=[512, 256, dim],
        over_arch_layer_sizes=[512, 512, 256, 1],
        dense_device=_CPU,
    )
    topology, model = Topology(world_size=1, compute_device="cpu"), DLRMTrain(dlrm)
    is_plain = isinstance(sharder, EmbeddingBagCollectionSharder)
    fused = dict.fromkeys(TABLES, ParameterConstraints(["table_wise"], ["fused"]))
    constraints = fused if is_plain else None
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.plan(model, [sharder])
    return DistributedModelParallel(model, sharders=[sharder], plan=plan, device=_CPU)


def _start_servers(
    settings: TrainingSettings, dim: int, num_ids: int, stack: ExitStack
) -> Iterator[Arm]:
    """Start a server for each number of rows and transport; yield the models on it."""
    all_rows = settings.rows if dim == settings.dims[0] else settings.rows[:1]
    for rows, carrier in product(all_rows, settings.transports):
        num_rows, is_first = max(rows, num_ids), rows == settings.rows[0]
        cluster = stack.enter_context(EmbeddingCluster.local(1, num_rows))
        pid = cluster.processes[0].pid
        transport = None if carrier == "given" else carrier
        client = EmbeddingClient.connect(cluster.addresses, transport=transport)
        stack.callback(client.close)
        for staleness in settings.staleness if is_first else settings.staleness[-1:]:
            at = Server(client, pid, num_rows, staleness, carrier)
            arm = Arm(settings, dim, at)
            stack.callback(arm.close)
            yield arm


def fill(server: Server, plain: Arm, ids: list[Numbers]) -> None:
    """Write plain TorchRec's rows of ids, and other rows until the server is full."""
    rng = np.random.default_rng(20_237)
    ends = np.linspace(0, server.num_rows - sum(map(len, ids)), len(TABLES) + 1)
    for name, ids_N, num in zip(TABLES, ids, np.diff(ends.astype(int)), strict=True):
        path = f"model.sparse_arch.embedding_bag_collection.embedding_bags.{name}"
        [shard] = plain.model.state_dict()[f"{path}.weight"].local_shards()
        weights = shard.tensor.numpy()
        others_N = np.arange(len(weights), len(weights) + num)
        # Mixed, so that the rows of the batches lie among all others.
        all_N = rng.permutation(np.concatenate([ids_N, others_N]))
        for some_N in (all_N[some] for some in chunks(len(all_N))):
            rows_ND = weights[np.minimum(some_N, len(weights) - 1)]
            server.client.write(name, some_N.view(np.uint64), rows_ND)


@contextmanager
def _arms(
    settings: TrainingSettings, dim: int, batches: Sequence[Batch]
) -> Iterator[tuple[Arm, list[Arm]]]:
    """Give plain TorchRec, and models on servers, which begin with its rows."""
    ids = ids_by_table(batches)
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, not in __all__
    with ExitStack() as stack:
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
        stack.callback(dist.destroy_process_group)
        plain = Arm(settings, dim, None)
        remote = list(_start_servers(settings, dim, sum(map(len, ids)), stack))
        for server in {
            arm.server.pid: arm.server for arm in remote if arm.server
        }.values():
            fill(server, plain, ids)
        yield plain, remote


def _require_none_lost(arm: Arm) -> None:
    counters = arm.server.client.counters()[0] if arm.server else {}
    lost = {name: counters.get(name, 0) for name in _LOST}
    require("gradients that missed a row", received=lost, expected=_LOST)


@harness.per_dim
def measure(settings: TrainingSettings, dim: int) -> Table:
    """Train on plain TorchRec and on servers, in turn."""
    batches, rows = draw_batches(settings), []
    first = batches[:_CHECKED_STEPS]
    with _arms(settings, dim, batches) as (plain, remote):
        expected = plain.train(first)
        for arm in remote:
            if arm.server and arm.server.staleness == 0:
                losses = arm.train(first)
                text = f"Plain TorchRec's losses are {expected}. Received: {losses}."
                if not np.allclose(losses, expected, rtol=1e-5, atol=0):
                    raise StoreError(text)
        endless = cycle(batches)
        for _ in range(settings.repeats):
            turn = list(islice(endless, settings.steps + _NUM_WARM_STEPS))
            for arm in (plain, *remote):
                arm.take_turn(turn)
        for arm in (plain, *remote):
            _require_none_lost(arm)
            rows.append(arm.row(settings, median(plain.rates(settings))))
    question = f"DLRM, {len(TABLES)} tables, {torch.get_num_threads()} torch threads."
    header = (
        "model | rows on the server | samples/s, median | slowest | fastest | of plain"
    )
    header += " TorchRec's | ms per step, median | trainer's processor ms | server's"
    return Table("training", question, header, rows)


class _Saves:
    """Lets a model be saved after a step, as often as automatic checkpoints may be."""

    def __init__(self, run: RecoverableRun, folder: str) -> None:
        self._run, self._folder = run, folder
        self._names = set(os.listdir(folder))  # noqa: PTH208  # after each step: quick
        self.num_steps = 0
        self.begun: list[tuple[int, float]] = []  # after how many steps, and when
        self.seconds: list[float] = []

    def step(self) -> None:
        """Call it after each step."""
        self.num_steps += 1
        began_s = time.perf_counter()
        self._run.step()
        if (names := set(os.listdir(self._folder))) != self._names:  # noqa: PTH208
            self._names = names
            self.begun.append((self.num_steps, began_s))
            self.seconds.append(time.perf_counter() - began_s)


def _train_and_save(
    arm: Arm, settings: TrainingSettings, batches: Sequence[Batch]
) -> list[object]:
    """Train in turns: from one checkpoint to the next, and for as long without."""
    assert arm.server is not None
    endless, rates, seconds = cycle(batches), list[tuple[float, float]](), list[float]()
    if settings.saved_to is not None:
        settings.saved_to.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=settings.saved_to) as folder:
        state = {"model": arm.model, "optimizer": arm.optimizer}
        given = folder, state, arm.server.client, arm.sharder
        with recoverable(*given, interval_s=_SHORT_S) as run:
            for _ in range(settings.repeats):
                saves, num_turns = _Saves(run, folder), 0
                arm.after_step = saves.step
                while len(saves.begun) < 2:
                    arm.train(list(islice(endless, settings.steps)))
                    num_turns += 1
                (first, began_s), *_, (last, ended_s) = saves.begun
                arm.after_step = lambda: None
                os.sync()  # what was written is not for the other turn
                without_s = 0.0
                for _ in range(num_turns):
                    turn = partial(arm.train, list(islice(endless, settings.steps)))
                    without_s += harness.timed(turn)[0]
                num = num_turns * settings.steps
                rates.append(((last - first) / (ended_s - began_s), num / without_s))
                seconds += saves.seconds
    took_s, ratios = median(seconds), [with_ / without for with_, without in rates]
    middle = [settings.batch_size * median(of) for of in zip(*rates, strict=True)]
    at_default = 1 / (1 + took_s / max(timeouts.CHECKPOINT_INTERVAL_S, 20 * took_s))
    of_without = [median(ratios), min(ratios), max(ratios)]
    return [arm.server.num_rows, *middle, *of_without, took_s, at_default]


@harness.per_dim
def measure_checkpoints(settings: TrainingSettings, dim: int) -> Table:
    """Train with automatic checkpoints, as many as there may be, and without."""
    batches, rows = draw_batches(settings), []
    last = replace(settings, staleness=settings.staleness[-1:], rows=settings.rows[:1])
    with _arms(last, dim, batches) as (_, remote):
        for arm in remote:
            rows.append(_train_and_save(arm, settings, batches))
            _require_none_lost(arm)
    question = "The next checkpoint comes after 20 times what the last one took."
    header = "rows on the server | samples/s with checkpoints, median | without | with,"
    header += (
        " of without | lowest | highest | seconds of a checkpoint | of without, at"
    )
    header += f" {timeouts.CHECKPOINT_INTERVAL_S:g} s"
    return Table("checkpoints", question, header, rows)


BENCHMARK = Benchmark(
    name="training",
    normal=TrainingSettings(),
    tiny=TrainingSettings(
        dims=(4,), rows=(2048, 4096), table_rows=99, batch_size=32, steps=4, repeats=2
    ),
    figures={"training": measure, "checkpoints": measure_checkpoints},
    only_for={"saved_to": "checkpoints"},
)
