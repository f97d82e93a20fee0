"""How fast does DLRM train on this machine's GPU, its tables on server processes?

The same batches train

    on the servers                 rows go to the device; one pull ahead
    plain TorchRec, on the device  needs fbgemm's CUDA build
    torch.nn.EmbeddingBag          on the device, and in the host's memory

from the same weights, by SGD. The first losses of all must agree. Servers and trainer
share the cores of this machine. Without a GPU everything is on the CPU.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import cycle
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.models.dlrm import DenseArch, InteractionArch, OverArch

from benchmarks.harness import Benchmark, Settings, Table
from benchmarks.reference import Numbers
from benchmarks.training import (
    TABLES,
    TrainingSettings,
    draw_batches,
    ids_by_table,
)
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.errors import StoreError
from persia_torchrec.server.cluster import EmbeddingCluster
from persia_torchrec.sharding.sharded_module import ShardedRemoteCollection
from persia_torchrec.sharding.sharder import RemoteEmbeddingBagCollectionSharder

_RATE, _NUM_DENSE = 0.05, 13
_NUM_CHECKED, _NUM_WARM = 3, 3
_CPU, _META = torch.device("cpu"), torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class DlrmSettings(Settings):
    """What to measure."""

    dims: Annotated[tuple[int, ...], "embedding dims"] = (64, 128)
    batch_sizes: Annotated[tuple[int, ...], "samples per batch"] = (8192, 65_536)
    servers: Annotated[int, "server processes"] = 8
    staleness: Annotated[int, "bound of the model on the servers"] = 4
    table_rows: Annotated[int, "rows per table of the other models"] = 400_000
    batches: Annotated[int, "different batches, used again and again"] = 6
    seconds: Annotated[float, "of steps of each model"] = 6.0


def _device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else _CPU


class Dense(nn.Module):
    """DLRM but for its embeddings."""

    def __init__(self, dim: int, device: torch.device) -> None:
        super().__init__()
        num = len(TABLES)
        self.below = DenseArch(_NUM_DENSE, [512, 256, dim], device=device)
        self.interaction = InteractionArch(num)
        width = dim + num + num * (num - 1) // 2
        self.over = OverArch(width, [512, 512, 256, 1], device=device)

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """Return logits ``(B,)`` of dense features and pooled rows ``(B, 26, D)``."""
        logits: torch.Tensor = self.over(self.interaction(self.below(dense), pooled))
        return logits.squeeze(1)


class OfTorch(nn.Module):
    """26 tables of torch's; ids are one a feature."""

    def __init__(self, num_rows: int, dim: int, device: torch.device) -> None:
        super().__init__()
        # Not initialised, which takes longer than all else.
        settings: dict[str, Any] = {"freeze": False, "mode": "sum", "sparse": True}
        empty = partial(torch.empty, num_rows, dim, device=device)
        bags = [nn.EmbeddingBag.from_pretrained(empty(), **settings) for _ in TABLES]
        self.bags = nn.ModuleList(bags)
        self.device = device

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows ``(B, 26, D)`` of ids ``(26, B)``."""
        pairs = zip(self.bags, ids.unsqueeze(2), strict=True)
        return torch.stack([bag(of_table) for bag, of_table in pairs], dim=1)


class Step(NamedTuple):
    """What a step took: seconds that it waited for rows, and bytes over PCIe."""

    loss: torch.Tensor
    waited_s: float
    num_bytes: int


class Arm:
    """One of the models that are compared.

    ``embed`` gives, for batches of ids, pooled rows ``(B, 26, D)`` on the device,
    seconds that it waited for them, and bytes that go over PCIe for them.
    """

    def __init__(self, name: str, dim: int) -> None:
        torch.manual_seed(20_240)
        self.name, self.device = name, _device()
        self.dense = Dense(dim, self.device).to(self.device)
        self.optimizers = [torch.optim.SGD(self.dense.parameters(), _RATE)]

    def flush(self) -> None:
        """Wait for every update."""

    def embed(
        self, ids: KeyedJaggedTensor, later: KeyedJaggedTensor | None
    ) -> tuple[torch.Tensor, float, int]:
        """Return the rows of a batch; ``later`` is the one after it."""
        raise NotImplementedError

    def fill(self, weights: torch.Tensor, ids: Sequence[Numbers]) -> None:
        """Begin with the same weights in every table."""
        for table in self.tables():
            table.copy_(weights)

    def tables(self) -> list[torch.Tensor]:
        """Return the weights of the tables that are here."""
        return []

    def close(self) -> None:
        """End what it has started."""

    def step(self, batch: Batch, later: Batch | None = None) -> Step:
        """Train on a batch."""
        pooled, waited_s, num_bytes = self.embed(
            batch.sparse_features, later and later.sparse_features
        )
        dense, labels = (
            tensor.to(self.device, non_blocking=True)
            for tensor in (batch.dense_features, batch.labels)
        )
        logits = self.dense(dense, pooled)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            optimizer.step()
        num_bytes += batch.dense_features.nbytes + batch.labels.nbytes
        return Step(loss.detach(), waited_s, num_bytes)

    def checked(self, batches: Sequence[Batch]) -> list[float]:
        """Return the losses of steps, each of which sees all updates before it."""
        losses = []
        for batch in batches[:_NUM_CHECKED]:
            losses.append(float(self.step(batch).loss))
            self.flush()
        return losses

    def measure(self, batches: Sequence[Batch], seconds: float) -> list[object]:
        """Return samples/s, ms of a step, share of waiting, and MB over PCIe a step."""
        endless = cycle(batches)
        following = next(endless)
        steps: list[Step] = []
        start_s = stop_s = time.perf_counter()
        while len(steps) < _NUM_WARM + 2 or stop_s - start_s < seconds:
            batch, following = following, next(endless)
            steps.append(self.step(batch, following))
            if len(steps) == _NUM_WARM:
                self._synchronize()
                start_s = time.perf_counter()
            stop_s = time.perf_counter()
        self.flush()
        self._synchronize()
        took_s = time.perf_counter() - start_s
        counted = steps[_NUM_WARM:]
        samples = len(counted) * len(batches[0].labels)
        waited_s = sum(step.waited_s for step in counted)
        num_bytes = sum(step.num_bytes for step in counted) / len(counted)
        on_gpu = self.device.type == "cuda"
        return [
            samples / took_s,
            1e3 * took_s / len(counted),
            waited_s / took_s,
            num_bytes / 1e6 if on_gpu else None,
        ]

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class OnServers(Arm):
    """Tables on the servers."""

    def __init__(
        self, settings: DlrmSettings, dim: int, client: EmbeddingClient
    ) -> None:
        super().__init__(f"servers, staleness {settings.staleness}", dim)
        sharder = RemoteEmbeddingBagCollectionSharder(
            client, SGD(_RATE), settings.staleness
        )
        model = _shard(settings, dim, sharder, self.device)
        (self._module,) = (
            m for m in model.modules() if isinstance(m, ShardedRemoteCollection)
        )
        self._model, self._sharder, self._client = model, sharder, client
        self._started: dict[int, Any] = {}

    def fill(self, weights: torch.Tensor, ids: Sequence[Numbers]) -> None:
        """Give the servers the rows of the ids that batches have."""
        for name, ids_N in zip(TABLES, ids, strict=True):
            rows = weights[torch.from_numpy(ids_N)].numpy()
            self._client.write(name, ids_N.view(np.uint64), rows)

    def flush(self) -> None:
        """Wait for every update, and give up what was begun ahead."""
        self._started.clear()
        self._sharder.flush()

    def close(self) -> None:
        """Stop the threads."""
        self._sharder.close()

    def embed(
        self, ids: KeyedJaggedTensor, later: KeyedJaggedTensor | None
    ) -> tuple[torch.Tensor, float, int]:
        """Wait for rows; begin with those of the batch after it."""
        batch = self._started.pop(id(ids), None) or self._start(ids)
        if later is not None:
            self._started[id(later)] = self._start(later)
        start_s = time.perf_counter()
        batch.wait()
        waited_s = time.perf_counter() - start_s
        pooled_BT = self._model(batch).values()
        num_bytes = 0
        if self.device.type == "cuda":
            came, rows = batch.outputs, batch.outputs.rows
            num_bytes = 2 * sum(tensor.nbytes for tensor in rows)  # and their gradients
            num_bytes += sum(t.nbytes for t in (*came.inverses, *came.offsets))
        return pooled_BT.unflatten(1, (len(TABLES), -1)), waited_s, num_bytes

    def _start(self, ids: KeyedJaggedTensor) -> Any:
        return self._module.start(ids, is_training=True)


class InTorchRec(Arm):
    """Plain TorchRec, its tables fused on the device."""

    def __init__(self, settings: DlrmSettings, dim: int) -> None:
        super().__init__(f"plain TorchRec, {_device().type}", dim)
        params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": _RATE}
        sharder = EmbeddingBagCollectionSharder(fused_params=params)
        self.model = _shard(settings, dim, sharder, self.device)

    def embed(
        self, ids: KeyedJaggedTensor, later: KeyedJaggedTensor | None
    ) -> tuple[torch.Tensor, float, int]:
        """Look rows up on the device."""
        moved = ids.to(self.device, non_blocking=True)
        pooled_BT = self.model(moved).values()
        num_bytes = ids.values().nbytes + ids.lengths().nbytes
        return pooled_BT.unflatten(1, (len(TABLES), -1)), 0.0, num_bytes

    def tables(self) -> list[torch.Tensor]:
        """Return the weights."""
        state = self.model.state_dict()
        weights = [state[f"0.embedding_bags.{name}.weight"] for name in TABLES]
        return [weight.local_shards()[0].tensor for weight in weights]


class InTorch(Arm):
    """``torch.nn.EmbeddingBag`` in the memory of a device."""

    def __init__(self, settings: DlrmSettings, dim: int, where: torch.device) -> None:
        super().__init__(f"torch.nn.EmbeddingBag, {where.type}", dim)
        self._bags: Any = OfTorch(settings.table_rows, dim, where)
        self.optimizers.append(torch.optim.SGD(self._bags.parameters(), _RATE))

    def embed(
        self, ids: KeyedJaggedTensor, later: KeyedJaggedTensor | None
    ) -> tuple[torch.Tensor, float, int]:
        """Look rows up where they are, and pass them on to the device."""
        of_features = ids.values().view(len(TABLES), -1)
        there = of_features.to(self._bags.device, non_blocking=True)
        pooled = self._bags(there)
        crossed = of_features.nbytes
        if self._bags.device != self.device:
            crossed = 2 * pooled.nbytes  # and their gradients
        return pooled.to(self.device, non_blocking=True), 0.0, crossed

    def tables(self) -> list[torch.Tensor]:
        """Return the weights."""
        return [bag.weight.detach() for bag in self._bags.bags]


def _shard(
    settings: DlrmSettings, dim: int, sharder: Any, device: torch.device
) -> DistributedModelParallel:
    """Return the tables, sharded, alone."""
    num = settings.table_rows
    configs = [
        EmbeddingBagConfig(num, dim, name, feature_names=[name]) for name in TABLES
    ]
    fused = dict.fromkeys(TABLES, ParameterConstraints(["table_wise"], ["fused"]))
    is_plain = isinstance(sharder, EmbeddingBagCollectionSharder)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device=device.type),
        constraints=fused if is_plain else None,
    )
    model = nn.Sequential(EmbeddingBagCollection(tables=configs, device=_META))
    plan = planner.plan(model, [sharder])
    return DistributedModelParallel(model, sharders=[sharder], plan=plan, device=device)


def _has_cuda_fbgemm() -> bool:
    with suppress(metadata.PackageNotFoundError):
        return bool(metadata.version("fbgemm-gpu"))
    return False


def _arms(
    settings: DlrmSettings, dim: int, client: EmbeddingClient
) -> Iterator[Callable[[], Arm]]:
    device = _device()
    yield partial(InTorch, settings, dim, _CPU)
    if device != _CPU:
        yield partial(InTorch, settings, dim, device)
    if device == _CPU or _has_cuda_fbgemm():
        yield partial(InTorchRec, settings, dim)
    yield partial(OnServers, settings, dim, client)


def _missing() -> list[str]:
    """Say what is not measured, and why."""
    if _device() == _CPU:
        return ["No CUDA device: all is on the CPU, and no bytes go over PCIe."]
    if not _has_cuda_fbgemm():
        return ["No plain TorchRec on the GPU: this build of fbgemm is the CPU's."]
    return []


def _measure_one(
    settings: DlrmSettings, dim: int, batch_size: int
) -> Iterator[list[object]]:
    """Train each model on the same batches, one model after the other."""
    drawn = TrainingSettings(
        batch_size=batch_size, batches=settings.batches, table_rows=settings.table_rows
    )
    batches, expected = draw_batches(drawn), None
    ids = ids_by_table(batches)
    if _device() != _CPU:
        batches = [batch.pin_memory() for batch in batches]
    weights = torch.empty(settings.table_rows, dim)
    weights.uniform_(-0.05, 0.05, generator=torch.Generator().manual_seed(1))
    local = EmbeddingCluster.local(settings.servers, sum(map(len, ids)))
    with (
        local as cluster,
        closing(EmbeddingClient.connect(cluster.addresses)) as client,
    ):
        for make in _arms(settings, dim, client):
            arm = make()
            arm.fill(weights, ids)
            losses = arm.checked(batches)
            expected = expected or losses
            if not np.allclose(losses, expected, rtol=1e-3, atol=0):
                raise StoreError(
                    f"{arm.name}: the losses must be {expected}. Received: {losses}."
                )
            yield [dim, batch_size, arm.name, *arm.measure(batches, settings.seconds)]
            arm.close()


def _measure(settings: DlrmSettings) -> list[Table]:
    device, store = _device(), dist.HashStore()  # type: ignore[attr-defined]  # public, not in __all__
    backend = "gloo" if device == _CPU else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, rank=0, world_size=1, store=store)
    try:
        rows = [
            row
            for dim in settings.dims
            for batch_size in settings.batch_sizes
            for row in _measure_one(settings, dim, batch_size)
        ]
    finally:
        dist.destroy_process_group()
    where = torch.cuda.get_device_name() if device != _CPU else "the CPU"
    question = (
        f"DLRM on {where}, {len(TABLES)} tables, SGD; {settings.servers} server "
        f"processes and {torch.get_num_threads()} torch threads on the host."
    )
    header = "D | batch | tables | samples/s | ms per step | share that waits for rows"
    header += " | MB over PCIe per step"
    return [Table("dlrm", question, header, rows, _missing())]


BENCHMARK = Benchmark(
    name="dlrm",
    normal=DlrmSettings(),
    tiny=DlrmSettings(
        dims=(4,), batch_sizes=(32,), servers=1, table_rows=99, batches=2, seconds=0.1
    ),
    figures={"dlrm": _measure},
)
