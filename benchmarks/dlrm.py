"""How fast does DLRM train on this machine's GPU, its tables on server processes?

The same batches train TorchRec's DLRM by TorchRec's own pipeline, from the same
weights, by rowwise Adagrad and Adam, its tables

    plain       in the memory of the GPU, or of the host, with a cache on the GPU or not
    on servers  some number of them, a bound on staleness, ids on the host or the GPU

The first losses of all must agree. Each further value of a setting is measured with the
first one of the others. Servers and trainer share the cores of this machine, by TCP. A
CPU trains what it can: plain in its memory, and on servers.

What an H100 or H200 with 16 cores must reach is a table of its own.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import cycle
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.optimizers import in_backward_optimizer_filter

from benchmarks.harness import Benchmark, Settings, Table
from benchmarks.trace import GpuStep, gpu_step
from benchmarks.training import (
    TABLES,
    TrainingSettings,
    draw_batches,
    ids_by_table,
)
from persia_torchrec import HostKeyedJaggedTensor
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.errors import StoreError
from persia_torchrec.server.cluster import EmbeddingCluster
from persia_torchrec.sharding.sharder import RemoteEmbeddingBagCollectionSharder

Kernel = Literal["fused", "fused_uvm_caching", "fused_uvm"]
Place = Literal["host", "device"]

_RATE, _EPS, _DENSE_RATE, _NUM_DENSE = 0.05, 1e-8, 1e-3, 13
_CACHED = 0.1
_NUM_CHECKED, _NUM_WARM_PASSES, _NUM_PROFILED, _SYNC_EVERY = 3, 3, 20, 8
_RESERVED, _HBM, _DDR = 10 << 30, 70 << 30, 100 << 30
_CPU, _META = torch.device("cpu"), torch.device("meta")
_NAMES: dict[str, str] = {
    "fused": "plain",
    "fused_uvm_caching": "plain, on the host, cached",
    "fused_uvm": "plain, on the host",
}


@dataclass(frozen=True, kw_only=True)
class DlrmSettings(Settings):
    """What to measure: each further value with the first one of the others."""

    dims: Annotated[tuple[int, ...], "embedding dims"] = (64, 16, 128)
    batch_sizes: Annotated[tuple[int, ...], "samples per batch"] = (8192, 65_536)
    servers: Annotated[tuple[int, ...], "server processes"] = (8, 2)
    staleness: Annotated[tuple[int, ...], "bounds of models on servers"] = (4, 0, 8)
    ids: Annotated[tuple[Place, ...], "where ids of batches are"] = ("host", "device")
    kernels: Annotated[tuple[Kernel, ...], "of plain TorchRec's tables"] = (
        "fused",
        "fused_uvm_caching",
        "fused_uvm",
    )
    table_rows: Annotated[int, "rows per table of plain TorchRec"] = 400_000
    batches: Annotated[int, "different batches, used again and again"] = 16
    seconds: Annotated[float, "of steps of each model, at least"] = 3.0
    memory_steps: Annotated[int, "steps of the first on servers, at least"] = 1000


class Point(NamedTuple):
    """A model: its sizes, and where its tables and the ids of its batches are."""

    dim: int
    batch: int
    kernel: str | None = None  # of plain TorchRec; None is on servers
    servers: int = 0
    staleness: int = 0
    ids: str = "device"

    @property
    def name(self) -> str:
        """What the table calls it."""
        if self.kernel is not None:
            return _NAMES[self.kernel]
        return f"{self.servers} servers, staleness {self.staleness}"


def points(settings: DlrmSettings, *, has_gpu: bool) -> list[Point]:
    """Return what is measured, those of equal batches and of equal servers together."""
    kernels = settings.kernels if has_gpu else settings.kernels[:1]
    places: Sequence[str] = settings.ids if has_gpu else ("host",)
    dim, batch, first = settings.dims[0], settings.batch_sizes[0], settings.servers[0]
    base = Point(dim, batch, None, first, settings.staleness[0], places[0])
    sizes = [(dim, batch), *((d, batch) for d in settings.dims[1:])]
    sizes += [(dim, b) for b in settings.batch_sizes[1:]]
    plain = [Point(d, b, kernels[0]) for d, b in sizes]
    plain += [Point(dim, batch, kernel) for kernel in kernels[1:]]
    remote = [base._replace(dim=d, batch=b) for d, b in sizes]
    remote += [base._replace(staleness=s) for s in settings.staleness[1:]]
    remote += [base._replace(ids=place) for place in places[1:]]
    remote += [base._replace(servers=num) for num in settings.servers[1:]]
    return [p for size in sizes for p in (*plain, *remote) if p[:2] == size]


class Speed(NamedTuple):
    """What a model's steps took; memory in MB, at first and in the end."""

    num_steps: int
    samples_per_s: float
    ms: float
    trainer_ms: float
    gpu: GpuStep | None
    gpu_mb: tuple[float, float] | None
    pinned_mb: tuple[float, float] | None


class Arm:
    """One of the models that are compared, with its pipeline."""

    def __init__(self, settings: DlrmSettings, at: Point, sharder: Any) -> None:
        torch.manual_seed(20_240)
        self.model = _dlrm(settings, at, sharder)
        self._sharder, self._at, self._device = sharder, at, _device()
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        optimizer = torch.optim.Adam(dense.values(), _DENSE_RATE)
        self._pipeline: Any = TrainPipelineSparseDist(
            self.model, optimizer, self._device
        )

    def tables(self) -> Iterator[torch.Tensor]:
        """Yield the weights of plain TorchRec's tables."""
        state, path = self.model.state_dict(), "sparse_arch.embedding_bag_collection"
        for name in TABLES:
            weight = state[f"model.{path}.embedding_bags.{name}.weight"]
            yield weight.local_shards()[0].tensor

    def flush(self) -> None:
        """Wait for every update, and for the GPU."""
        if self._at.kernel is None:
            self._sharder.flush()
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def checked(self, batches: Sequence[Batch]) -> list[float]:
        """Return the losses of steps, each of which sees all updates before it."""
        losses = []
        for batch in batches[:_NUM_CHECKED]:
            losses.append(self._loss(self._pipeline.progress(iter([batch]))))
            self.flush()
        return losses

    def measure(
        self, batches: Sequence[Batch], seconds: float, num_steps: int
    ) -> Speed:
        """Train for so long, and so many steps, at least."""
        endless = cycle(batches)
        for _ in range(_NUM_WARM_PASSES * len(batches)):
            self._pipeline.progress(endless)
        self.flush()
        memory_mb, num = [_memory_mb()], 0
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        while num < num_steps or time.perf_counter() - start_s < seconds:
            self._pipeline.progress(endless)
            num += 1
            if num % _SYNC_EVERY == 0 and self._device.type == "cuda":
                torch.cuda.synchronize()  # as a script that looks at its loss
        self.flush()
        took_s = time.perf_counter() - start_s
        cpu_s = time.process_time() - start_cpu_s
        memory_mb.append(_memory_mb())

        def some() -> int:
            for _ in range(_NUM_PROFILED):
                self._pipeline.progress(endless)
            self.flush()
            return _NUM_PROFILED

        gpu_mb, pinned_mb = zip(*memory_mb, strict=True)
        return Speed(
            num,
            num * len(batches[0].labels) / took_s,
            1e3 * took_s / num,
            1e3 * cpu_s / num,
            gpu_step(some),
            gpu_mb if self._device.type == "cuda" else None,
            pinned_mb if self._device.type == "cuda" else None,
        )

    def close(self) -> None:
        """Stop threads, and give up the memory of the GPU."""
        self._pipeline.detach()
        if self._at.kernel is None:
            self._sharder.close()
        del self._pipeline, self.model
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @staticmethod
    def _loss(output: Any) -> float:
        return float(output[0])


def _device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else _CPU


def _memory_mb() -> tuple[float, float]:
    """Return megabytes of the GPU that torch has reserved, and pinned ones it holds."""
    if not torch.cuda.is_available():
        return 0.0, 0.0
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    return torch.cuda.memory_reserved() / 1e6, pinned / 1e6


def _dlrm(settings: DlrmSettings, at: Point, sharder: Any) -> DistributedModelParallel:
    """Return DLRM, sharded, its first dense weights always the same."""
    device = _device()
    tables = [
        EmbeddingBagConfig(settings.table_rows, at.dim, name, feature_names=[name])
        for name in TABLES
    ]
    dlrm = DLRM(
        EmbeddingBagCollection(tables=tables, device=_META),
        dense_in_features=_NUM_DENSE,
        dense_arch_layer_sizes=[512, 256, at.dim],
        over_arch_layer_sizes=[512, 512, 256, 1],
        dense_device=device,
    )
    model, has_gpu = DLRMTrain(dlrm), device.type == "cuda"
    constraints = None
    if at.kernel is not None:
        constraints = dict.fromkeys(
            TABLES, ParameterConstraints(["table_wise"], [at.kernel])
        )
    topology = Topology(
        world_size=1,
        compute_device=device.type,
        hbm_cap=_hbm() if has_gpu else None,
        ddr_cap=_DDR,
    )
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.plan(model, [sharder])
    return DistributedModelParallel(model, sharders=[sharder], plan=plan, device=device)


def _hbm() -> int:
    """Return the bytes of the GPU that tables may have."""
    whole = torch.cuda.get_device_properties(_device()).total_memory
    return max(int(whole) - _RESERVED, int(whole) // 2)


def _placed(batches: Sequence[Batch], place: str) -> list[Batch]:
    """Return batches whose ids stay on the host, or go to the device with the rest."""
    if place == "device":
        return list(batches)
    return [
        Batch(
            batch.dense_features,
            HostKeyedJaggedTensor.of(batch.sparse_features),
            batch.labels,
        )
        for batch in batches
    ]


class Group:
    """The points of one size: batches, weights, and what the first losses must be."""

    def __init__(self, settings: DlrmSettings, dim: int, batch: int) -> None:
        drawn = TrainingSettings(
            batch_size=batch, batches=settings.batches, table_rows=settings.table_rows
        )
        self._settings, self._batches = settings, draw_batches(drawn)
        self._ids = ids_by_table(self._batches)
        if torch.cuda.is_available():
            self._batches = [batch.pin_memory() for batch in self._batches]
        self._weights = torch.empty(settings.table_rows, dim)
        generator = torch.Generator().manual_seed(1)
        self._weights.uniform_(-0.05, 0.05, generator=generator)
        self._expected: list[float] | None = None

    def plain(self, at: Point) -> Speed:
        """Measure plain TorchRec."""
        params = {
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": _RATE,
            "eps": _EPS,
        }
        if at.kernel == "fused_uvm_caching":
            params["cache_load_factor"] = _CACHED
        arm = Arm(self._settings, at, EmbeddingBagCollectionSharder(params))
        weights = self._weights.to(_device())
        with torch.no_grad():
            for table in arm.tables():
                table.copy_(weights)
        del weights
        return self._measure(arm, at)

    def on_servers(self, at: Point, client: EmbeddingClient) -> Speed:
        """Measure tables on the servers of a client, which lose what they hold."""
        adagrad = Adagrad(_RATE, 0, eps=_EPS, vectorwise_shared=True)
        sharder = RemoteEmbeddingBagCollectionSharder(client, adagrad, at.staleness)
        arm = Arm(self._settings, at, sharder)
        client.clear()
        for name, ids_N in zip(TABLES, self._ids, strict=True):
            rows = self._weights[torch.from_numpy(ids_N)].numpy()
            client.write(name, ids_N.view(np.uint64), rows)
        return self._measure(arm, at)

    def capacity(self) -> int:
        """Return how many rows all servers together must hold."""
        return sum(map(len, self._ids))

    def _measure(self, arm: Arm, at: Point) -> Speed:
        settings, batches = self._settings, _placed(self._batches, at.ids)
        losses = arm.checked(batches)
        self._expected = self._expected or losses
        if not np.allclose(losses, self._expected, rtol=1e-3, atol=0):
            raise StoreError(
                f"{at.name}: the losses must be {self._expected}. Received: {losses}."
            )
        is_first = at.kernel is None and at == _base(settings)
        num_steps = settings.memory_steps if is_first else 1
        speed = arm.measure(batches, settings.seconds, num_steps)
        arm.close()
        return speed


def _base(settings: DlrmSettings) -> Point:
    """Return the first point on servers."""
    every = points(settings, has_gpu=torch.cuda.is_available())
    return next(point for point in every if point.kernel is None)


def _measure_all(settings: DlrmSettings) -> dict[Point, Speed]:
    """Train each model, one after the other."""
    speeds: dict[Point, Speed] = {}
    every = points(settings, has_gpu=torch.cuda.is_available())
    for dim, batch in dict.fromkeys(point[:2] for point in every):
        group = Group(settings, dim, batch)
        own = [point for point in every if point[:2] == (dim, batch)]
        for at in own:
            if at.kernel is not None:
                speeds[at] = group.plain(at)
        for num in dict.fromkeys(p.servers for p in own if p.kernel is None):
            local = EmbeddingCluster.local(num, group.capacity())
            with ExitStack() as stack:
                addresses = stack.enter_context(local).addresses
                for at in (p for p in own if p.kernel is None and p.servers == num):
                    with closing(EmbeddingClient.connect(addresses)) as client:
                        speeds[at] = group.on_servers(at, client)
    return speeds


def _rows(speeds: dict[Point, Speed]) -> list[list[object]]:
    rows = []
    for at, speed in speeds.items():
        gpu = list(speed.gpu) if speed.gpu else [None] * len(GpuStep._fields)
        memory = [*(speed.gpu_mb or (None, None)), *(speed.pinned_mb or (None, None))]
        row = [at.dim, at.batch, at.name, at.ids, speed.samples_per_s]
        row += [_of_plain(speeds, at), speed.ms, speed.trainer_ms, *gpu, *memory]
        rows.append([*row, speed.num_steps])
    return rows


def _of_plain(speeds: dict[Point, Speed], at: Point) -> float:
    """Return samples/s as a part of those of plain TorchRec in the GPU's memory."""
    plain = next(p for p in speeds if p.kernel is not None and p[:2] == at[:2])
    return speeds[at].samples_per_s / speeds[plain].samples_per_s


_HEADER = (
    "D | batch | tables | ids | samples/s | of plain | ms per step | trainer's "
    "processor ms | GPU busy | launches | copies to the GPU | to the host | MB of "
    "both | waits | GPU MB, start | end | pinned MB, start | end of it | steps"
)


class Bar(NamedTuple):
    """A bound that a quotient of two measured values must reach."""

    text: str
    at: Callable[[Point], Point]
    value: Callable[[dict[Point, Speed], Point], float]
    least: float | None = None
    most: float | None = None


def _least(text: str, least: float, **changes: Any) -> Bar:
    return Bar(text, lambda base: base._replace(**changes), _of_plain, least=least)


def _of_two_servers(speeds: dict[Point, Speed], base: Point) -> float:
    two = speeds[base._replace(servers=2)]
    return speeds[base].samples_per_s / two.samples_per_s


def _growth(speeds: dict[Point, Speed], base: Point) -> float:
    both = [m for m in (speeds[base].gpu_mb, speeds[base].pinned_mb) if m]
    return max(end / max(start, 1.0) for start, end in both)


def _itself(base: Point) -> Point:
    return base


BARS = (
    _least("of plain", 0.45),
    _least("of plain, D = 16", 0.60, dim=16),
    _least("of plain, D = 128", 0.30, dim=128),
    _least("of plain, batch 65,536", 0.35, batch=65_536),
    _least("of plain, staleness 0", 0.25, staleness=0),
    Bar("8 servers of 2", _itself, _of_two_servers, least=1.0),
    Bar("trainer's ms a step", _itself, lambda s, p: s[p].trainer_ms, most=18.0),
    Bar("memory, end of start", _itself, _growth, most=1.05),
)
"""With 8 servers, staleness 4, D = 64, batch 8192, but for what is said."""

_BAR_BASE = Point(64, 8192, None, 8, 4, "host")


def _bars(speeds: dict[Point, Speed]) -> list[list[object]]:
    """Return the bars that what was measured can tell, and whether they hold."""
    rows: list[list[object]] = []
    for bar in BARS:
        try:
            value = bar.value(speeds, bar.at(_BAR_BASE))
        except (KeyError, StopIteration):
            continue
        holds = value >= bar.least if bar.least else value <= (bar.most or 0)
        bound = f">= {bar.least}" if bar.least else f"<= {bar.most}"
        rows.append([bar.text, value, bound, "yes" if holds else "NO"])
    return rows


def _measure(settings: DlrmSettings) -> list[Table]:
    device, store = _device(), dist.HashStore()  # type: ignore[attr-defined]  # public, not in __all__
    has_gpu = device != _CPU
    if has_gpu:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1, store=store)
    try:
        speeds = _measure_all(settings)
    finally:
        dist.destroy_process_group()
    where = torch.cuda.get_device_name() if has_gpu else "the CPU"
    question = (
        f"DLRM on {where}, {len(TABLES)} tables, rowwise Adagrad and Adam, by "
        f"TorchRec's TrainPipelineSparseDist; {torch.get_num_threads()} torch threads. "
        "All but samples/s and memory are of a step."
    )
    notes = [] if has_gpu else ["No CUDA device: all is on the CPU."]
    tables = [Table("dlrm", question, _HEADER, _rows(speeds), notes)]
    if has_gpu and (rows := _bars(speeds)):
        asked = "What an H100 or H200 with 16 cores must reach."
        tables.append(Table("bars", asked, "what | reached | bound | holds", rows))
    return tables


BENCHMARK = Benchmark(
    name="dlrm",
    normal=DlrmSettings(),
    tiny=DlrmSettings(
        dims=(4,),
        batch_sizes=(32,),
        servers=(1,),
        staleness=(4, 0),
        table_rows=99,
        batches=2,
        seconds=0.1,
        memory_steps=2,
    ),
    figures={"dlrm": _measure},
)
