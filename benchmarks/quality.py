"""What does a model learn on servers, next to plain TorchRec?

Three models train on the same batches from the same weights, with one setting varied at
a time: staleness, the dtype of rows, the number of trainers and how they update. Each
run is one seed, which gives the dense weights, the rows and the order of the batches:
differences are paired by it. Runs are appended to a file, and those in it are not made
again, so that a table may grow over several nights.

At staleness 8 the rows of 7 later batches are pulled before a batch has trained, which
is all that the bound allows; or of 2, as in TorchRec's pipelines.

Dimension key:
    N: samples
    F: features, an id each
    L: labels
"""

import json
import math
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from scipy import stats  # type: ignore[import-untyped]
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torchmetrics.functional.classification import binary_auroc
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.modules.embedding_configs import DataType

from benchmarks.harness import Benchmark, Settings, Table, describe_versions
from benchmarks.quality_tasks import Part, Task, adult_task, census_task, dlrm_task
from persia_torchrec import env, remote_sharders
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.errors import ConfigError
from persia_torchrec.server.cluster import EmbeddingCluster

_CHUNK = 4096  # samples of the test at once
_CPU = torch.device("cpu")
_CAPACITY = 2_000_000
_CONFIDENCE = 0.975  # of one side: intervals are of 95 %


_MODELS = "adult", "dlrm", "census"


class Arm(NamedTuple):
    """A way to train, with the rows of ``ahead`` later batches pulled before a batch.

    The first two are what the others are compared with.
    """

    name: str
    staleness: int = 0
    is_plain: bool = False
    dtype: DataType = DataType.FP32
    trainers: int = 1
    update: Literal["joint", "each"] = "joint"
    ahead: int = 0


PLAIN, SYNCHRONOUS = Arm("plain TorchRec", is_plain=True), Arm("staleness 0")
ARMS = (
    *(PLAIN, SYNCHRONOUS, Arm("staleness 1", 1)),
    Arm("staleness 8, pulls 2 ahead", 8, ahead=2),
    Arm("staleness 8, pulls 7 ahead", 8, ahead=7),
    Arm("fp16 rows", dtype=DataType.FP16),
    Arm("bf16 rows", dtype=DataType.BF16),
    Arm("2 trainers, joint", trainers=2),
    Arm("2 trainers, each", trainers=2, update="each"),
)
_BY_NAME = {arm.name: arm for arm in ARMS}


@dataclass(frozen=True, kw_only=True)
class QualitySettings(Settings):
    """What is trained, and where its runs are kept."""

    models: Annotated[tuple[str, ...], "of adult, dlrm, census"] = ("adult", "dlrm")
    arms: Annotated[tuple[str, ...], "ways to train"] = tuple(_BY_NAME)
    seeds: Annotated[int, "runs of each, from seed 0"] = 5
    adult: Annotated[Path | None, "folder of adult.data; without, made-up rows"] = None
    census: Annotated[Path | None, "folder of census-income.test"] = None
    rows: Annotated[int, "made-up lines of Criteo's format to train DLRM on"] = 200_000
    epochs: Annotated[int, "passes of PLE over Census-Income"] = 5
    runs: Annotated[Path | None, "file that runs are appended to"] = None
    minutes: Annotated[float, "after which no run begins"] = 180.0
    plot: Annotated[Path | None, "SVG file of the differences"] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("models", set(self.models) <= set(_MODELS), f"of {_MODELS}")
        self.require("arms", set(self.arms) <= set(_BY_NAME), f"of {list(_BY_NAME)}")
        has_census = "census" not in self.models or self.census is not None
        self.require("census", has_census, "the folder of the data, or leave it out")


def make_task(model: str, settings: QualitySettings) -> Task:
    """Return the data and the network of a model."""
    if model == "adult":
        return adult_task(settings.adult)
    if model == "dlrm":
        return dlrm_task(settings.rows)
    assert settings.census is not None
    return census_task(settings.census, settings.epochs)


class Tables:
    """The tables of a task, where an arm has them."""

    def __init__(self, task: Task, arm: Arm, seed: int, at: Sequence[str]) -> None:
        self._task, self._arm, self._stack = task, arm, ExitStack()
        self._namespace = f"{task.labels[0]}/{arm.name}/{seed}"
        configs = [
            EmbeddingBagConfig(
                num_embeddings=num,
                embedding_dim=task.dim,
                name=name,
                feature_names=[name],
                data_type=arm.dtype,
            )
            for name, num in zip(task.names, task.num_ids(), strict=True)
        ]
        rng = torch.Generator().manual_seed(seed)
        weights = [
            torch.empty(config.num_embeddings, task.dim).normal_(
                0, task.std, generator=rng
            )
            for config in configs
        ]
        self.optimizer: torch.optim.Optimizer | None = None
        if arm.is_plain:
            self.bags: Any = EmbeddingBagCollection(configs)
            for bag, first in zip(
                self.bags.embedding_bags.values(), weights, strict=True
            ):
                bag.sparse = True
                bag.weight.data.copy_(first)
            self.optimizer = task.plain_rows(self.bags.parameters())
        else:
            self._on_servers(configs, weights, at)

    def _on_servers(
        self, configs: list[Any], weights: list[torch.Tensor], at: Sequence[str]
    ) -> None:
        arm = self._arm
        client = EmbeddingClient.connect(at)
        self._stack.callback(client.close)
        if dist.get_rank() == 0:
            client.clear()
        dist.barrier()
        self.sharders = remote_sharders(
            client,
            self._task.rows,
            arm.staleness,
            update=arm.update,
            namespace=self._namespace,
        )
        meta = EmbeddingBagCollection(configs, device=torch.device("meta"))
        self.bags = DistributedModelParallel(meta, device=_CPU, sharders=self.sharders)
        if dist.get_rank() == 0:
            for name, first in zip(self._task.names, weights, strict=True):
                ids = np.arange(len(first), dtype=np.uint64)
                client.write(f"{self._namespace}/{name}", ids, first.numpy())
        dist.barrier()

    def pooled(self, batches: Iterator[Part]) -> Iterator[tuple[Part, torch.Tensor]]:
        """Yield each batch with its rows, ``(N, F * dim)``; later ones are pulled."""
        module, ahead = self.bags, self._arm.ahead
        if self._arm.is_plain:
            for batch in batches:
                yield batch, module(self._ids(batch)).values()
            return
        module, pulled = module.module, deque[tuple[Part, Any, Any]]()
        while True:
            for batch in islice(batches, ahead + 1 - len(pulled)):
                context = module.create_context()
                given = module.input_dist(context, self._ids(batch))
                pulled.append((batch, context, given))
            if not pulled:
                return
            batch, context, given = pulled.popleft()
            rows = module.compute_and_output_dist(context, given.wait().wait())
            yield batch, rows.wait().values()

    def _ids(self, batch: Part) -> KeyedJaggedTensor:
        ids = batch.ids.T.reshape(-1)
        lengths = torch.ones(len(ids), dtype=torch.int32)
        return KeyedJaggedTensor(self._task.names, ids, lengths=lengths)

    def finish(self) -> float:
        """Wait for all updates; return how many updates lookups lacked on average."""
        if self._arm.is_plain:
            return 0.0
        self.sharders.flush()
        return float(self.sharders.summary().mean_staleness)

    def close(self) -> None:
        """End what was started."""
        if not self._arm.is_plain:
            self.sharders.close()
        self._stack.close()


class Found(NamedTuple):
    """AUC by label, updates that lookups lacked on average, and seconds."""

    auc: dict[str, float]
    staleness: float
    seconds: float


def batches_of(task: Task, seed: int, rank: int, world: int) -> Iterator[Part]:
    """Yield a trainer's part of each whole batch, in the order of the seed."""
    rng, num = np.random.default_rng(seed), len(task.train.labels)
    for _ in range(task.epochs):
        order = torch.from_numpy(rng.permutation(num))
        for start in range(0, num - task.batch_size + 1, task.batch_size):
            yield task.train.take(order[start : start + task.batch_size][rank::world])


def train(task: Task, arm: Arm, seed: int, at: Sequence[str]) -> Found | None:
    """Train and test by an arm, in each of its trainers; the first one has the AUC."""
    began_s, rank, world = time.monotonic(), dist.get_rank(), arm.trainers
    tables = Tables(task, arm, seed, at)
    torch.manual_seed(seed)
    model = task.make_dense()
    torch.manual_seed(seed * world + rank)  # of the dropout
    dense: nn.Module = DistributedDataParallel(model) if world > 1 else model
    steps = [task.dense_optimizer(model.parameters())]
    steps += [tables.optimizer] if tables.optimizer is not None else []
    for batch, pooled in tables.pooled(batches_of(task, seed, rank, world)):
        for step in steps:
            step.zero_grad()
        task.loss(dense(batch.dense, pooled), batch.labels).backward()  # type: ignore[no-untyped-call]  # torch's
        for step in steps:
            step.step()
    staleness, found = tables.finish(), None
    dist.barrier()
    if rank == 0:
        scores = score(task, tables, model)
        aucs = [
            float(binary_auroc(of.double(), truth.int()))
            for of, truth in zip(scores.T, task.test.labels.T, strict=True)
        ]
        auc = dict(zip(task.labels, aucs, strict=True))
        found = Found(auc, staleness, time.monotonic() - began_s)
    dist.barrier()
    tables.close()
    return found


@torch.no_grad()
def score(task: Task, tables: Tables, model: nn.Module) -> torch.Tensor:
    """Return what the model says of the test, ``(N, L)``."""
    model.eval()
    tables.bags.eval()
    num = len(task.test.labels)
    chunks = (task.test.take(slice(at, at + _CHUNK)) for at in range(0, num, _CHUNK))
    outputs = [model(batch.dense, pooled) for batch, pooled in tables.pooled(chunks)]
    return torch.cat(outputs)


class Run(NamedTuple):
    """One run: which, and what it has shown."""

    model: str
    arm: str
    seed: int
    found: Found


class Runs:
    """The runs so far, in memory and in a file of JSON lines."""

    def __init__(self, path: Path | None) -> None:
        self._path, self.all = path, list[Run]()
        if path is not None and path.exists():
            for number, line in enumerate(path.read_text().splitlines(), 1):
                try:
                    one = json.loads(line)
                    which = one["model"], one["arm"], one["seed"]
                    found = one["auc"], one["mean_staleness"], one["seconds"]
                except (ValueError, KeyError, TypeError) as exc:
                    raise ConfigError(
                        f"Lines of {path} must be runs of this benchmark. Received: "
                        f"line {number}, {exc!r}. Give another --runs."
                    ) from exc
                self.all.append(Run(*which, Found(*found)))

    def add(self, run: Run) -> None:
        """Keep a run."""
        self.all.append(run)
        if self._path is None:
            return
        line = {
            "model": run.model,
            "arm": run.arm,
            "seed": run.seed,
            "auc": run.found.auc,
            "mean_staleness": run.found.staleness,
            "seconds": run.found.seconds,
            "versions": describe_versions(),
        }
        with self._path.open("a") as file:
            file.write(f"{json.dumps(line)}\n")

    def missing(self, settings: QualitySettings) -> Iterator[tuple[int, str, Arm]]:
        """Yield seed, model and arm of what is to be run, seed by seed."""
        there = {run[:3] for run in self.all}
        arms = [arm for arm in ARMS if arm.name in settings.arms]
        for seed, model, arm in product(range(settings.seeds), settings.models, arms):
            if (model, arm.name, seed) not in there:
                yield seed, model, arm

    def of(self, model: str, arm: str) -> dict[int, Found]:
        """Return what the runs of an arm have shown, by seed."""
        some = (run for run in self.all if (run.model, run.arm) == (model, arm))
        return {run.seed: run.found for run in some}


def _trainer(
    rank: int,
    settings: QualitySettings,
    wanted: Sequence[tuple[int, str, Arm]],
    at: Sequence[str],
    store: str,
    until_s: float,
) -> None:
    """Be one of the trainers of runs that have as many."""
    world, runs = wanted[0][2].trainers, Runs(settings.runs)
    tasks: dict[str, Task] = {}
    with (
        ExitStack() as stack,
        env.set_within({"RANK": f"{rank}", "WORLD_SIZE": f"{world}"}),
    ):
        file = dist.FileStore(store, world)  # type: ignore[attr-defined]  # public, not in __all__
        dist.init_process_group("gloo", rank=rank, world_size=world, store=file)
        stack.callback(dist.destroy_process_group)
        for seed, model, arm in wanted:
            going = [time.monotonic() < until_s]
            dist.broadcast_object_list(going)
            if not going[0]:
                return
            tasks[model] = tasks.get(model) or make_task(model, settings)
            found = train(tasks[model], arm, seed, at)
            if found is not None:
                runs.add(Run(model, arm.name, seed, found))


def measure(settings: QualitySettings) -> list[Table]:
    """Make the runs that are missing; return a table for each model."""
    until_s = time.monotonic() + 60 * settings.minutes
    with (
        TemporaryDirectory() as folder,
        EmbeddingCluster.local(1, capacity=_CAPACITY) as cluster,
    ):
        if settings.runs is None:
            settings = _kept_in(settings, Path(folder, "runs"))
        for seed in range(settings.seeds):
            for num in sorted({arm.trainers for arm in ARMS}):
                wanted = [
                    each
                    for each in Runs(settings.runs).missing(settings)
                    if each[0] == seed and each[2].trainers == num
                ]
                if wanted and time.monotonic() < until_s:
                    store = str(Path(folder, f"store-{seed}-{num}"))
                    given = settings, wanted, cluster.addresses, store, until_s
                    spawn(_trainer, given, nprocs=num)  # type: ignore[no-untyped-call]  # torch's
        runs = Runs(settings.runs)
    if settings.plot is not None:
        plot(runs, settings.models, settings.plot)
    return [table_of(runs, model) for model in settings.models]


def _kept_in(settings: QualitySettings, path: Path) -> QualitySettings:
    return QualitySettings(**{**vars(settings), "runs": path})


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean, and half of its 95 % interval by Student's t."""
    if len(values) < 2:
        return mean(values), None
    t = stats.t.ppf(_CONFIDENCE, len(values) - 1)
    return mean(values), float(t * stdev(values) / math.sqrt(len(values)))


def differences(runs: Runs, model: str, label: str, arm: str, base: str) -> list[float]:
    """Return an arm's AUC minus that of another one, for each seed that both have."""
    one, other = runs.of(model, arm), runs.of(model, base)
    both = sorted(one.keys() & other.keys())
    return [one[seed].auc[label] - other[seed].auc[label] for seed in both]


def table_of(runs: Runs, model: str) -> Table:
    """Return a line for each label and arm."""
    rows = []
    named = [(arm.name, runs.of(model, arm.name)) for arm in ARMS]
    labels = list(next((f.auc for _, by in named for f in by.values()), {}))
    for label, (arm, found) in product(labels, named):
        if not found:
            continue
        values = [one.auc[label] for one in found.values()]
        cells = [_with_half(*interval(values), "")]
        for base in (PLAIN.name, SYNCHRONOUS.name):
            paired = differences(runs, model, label, arm, base)
            is_other = arm != base and paired
            cells.append(_with_half(*interval(paired), "+") if is_other else "-")
        staleness = mean(one.staleness for one in found.values())
        rows.append([label, arm, len(values), *cells, staleness])
    header = (
        "label | trained | seeds | test AUC | minus plain TorchRec's | minus that of"
    )
    header += " staleness 0 | updates that a lookup lacked"
    question = f"{model}: means with 95 % intervals; differences are paired by seed."
    return Table(model, question, header, rows)


def _with_half(middle: float, half: float | None, sign: str) -> str:
    spread = "" if half is None else f" ± {half:.5f}"
    return f"{middle:{sign}.5f}{spread}"


def plot(runs: Runs, models: Sequence[str], path: Path) -> None:
    """Draw differences from plain TorchRec with their intervals, a panel a label."""
    from matplotlib.figure import Figure  # slow, and rarely wanted

    panels = [
        (model, label)
        for model in models
        for label in next((run.found.auc for run in runs.all if run.model == model), {})
    ]
    figure = Figure(figsize=(8, 1 + 2.1 * len(panels)), layout="constrained")
    arms = [arm.name for arm in ARMS if arm != PLAIN]
    for place, (model, label) in enumerate(panels, 1):
        axes = figure.add_subplot(len(panels), 1, place)
        axes.axvline(0, color="0.6", linewidth=1)
        for at, arm in enumerate(reversed(arms)):
            if paired := differences(runs, model, label, arm, PLAIN.name):
                middle, half = interval(paired)
                axes.errorbar(middle, at, xerr=half, fmt="o", color="C0", capsize=3)
        axes.set_yticks(range(len(arms)), reversed(arms), fontsize=8)
        axes.set_title(f"{model}, {label}: AUC minus plain TorchRec's", fontsize=9)
        axes.tick_params(axis="x", labelsize=8)
    title = "AUC minus plain TorchRec's, by what is varied"
    figure.savefig(path, format="svg", metadata={"Date": None, "Title": title})
    # Screen readers read the element, which is not matplotlib's.
    text, role = path.read_text(), f'role="img"><title>{title}</title>'
    path.write_text(re.sub(r"(<svg [^>]*)>", rf"\1 {role}", text, count=1))


BENCHMARK = Benchmark(
    name="quality",
    normal=QualitySettings(),
    tiny=QualitySettings(
        models=("dlrm",), arms=(PLAIN.name, "2 trainers, joint"), seeds=1, rows=2048
    ),
    figures={"quality": measure},
)
