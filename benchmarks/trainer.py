"""What does a step cost the trainer's process, beside the dense half of the model?

26 tables, one Zipf id each, pooled into one output, whose gradient is given: no dense
half, so that all processor time is that of ids, rows, gradients and messages. Each turn
is a process of its own with servers of its own; ``--other`` lets a second checkout take
turns with this one.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingEnv

from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.server.cluster import EmbeddingCluster
from persia_torchrec.sharding.sharder import RemoteEmbeddingBagCollectionSharder

_HERE = Path(__file__).parents[1]
_NUM_BATCHES, _NUM_WARM, _EXPONENT = 4, 6, 1.2


def _batches(num_tables: int, batch_size: int, rows: int) -> list[KeyedJaggedTensor]:
    rng, names = np.random.default_rng(20_241), [f"t{t}" for t in range(num_tables)]
    lengths = torch.ones(num_tables * batch_size, dtype=torch.int32)
    batches = []
    for _ in range(_NUM_BATCHES):
        ranks = (rng.zipf(_EXPONENT, len(lengths)).astype(np.int64) - 1) % rows
        values = torch.from_numpy(ranks * 2_654_435_761 % rows)
        batches.append(KeyedJaggedTensor(names, values, lengths=lengths))
    return batches


def _step_seconds(given: dict[str, Any]) -> dict[str, float]:
    """Train some steps in this process; return processor seconds of each."""
    torch.set_num_threads(1)
    num, dim = given["tables"], given["dim"]
    tables = [
        EmbeddingBagConfig(
            num_embeddings=1, embedding_dim=dim, name=name, feature_names=[name]
        )
        for name in (f"t{t}" for t in range(num))
    ]
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    batches = _batches(num, given["batch_size"], given["rows"])
    grad = torch.full((given["batch_size"], num * dim), 1e-3)
    with ExitStack() as stack:
        capacity = num * given["rows"]
        cluster = stack.enter_context(
            EmbeddingCluster.local(given["servers"], capacity)
        )
        client = stack.enter_context(
            closing(EmbeddingClient.connect(cluster.addresses))
        )
        sharder = RemoteEmbeddingBagCollectionSharder(client, SGD(0.1), staleness=2)
        stack.callback(sharder.close)
        sharded = _shard(nn.Sequential(bags), sharder)

        def train(num_steps: int) -> None:
            for step in range(num_steps):
                out = sharded(batches[step % _NUM_BATCHES])
                out.values().backward(grad)
            sharder.flush()

        train(_NUM_WARM)
        start_s, cpu_s = time.perf_counter(), time.process_time()
        train(given["steps"])
        cpu_s = time.process_time() - cpu_s
        took_s = time.perf_counter() - start_s
    return {"step": took_s / given["steps"], "all": cpu_s / given["steps"]}


def _shard(model: nn.Module, sharder: Any) -> nn.Module:
    topology = Topology(world_size=1, compute_device="cpu")
    plan = EmbeddingShardingPlanner(topology=topology).plan(model, [sharder])
    env = ShardingEnv.from_local(world_size=1, rank=0)
    settings: Any = {"env": env, "plan": plan, "sharders": [sharder]}
    settings["device"] = torch.device("cpu")
    sharded: nn.Module
    sharded = DistributedModelParallel(model, init_data_parallel=False, **settings)
    return sharded


def _child(checkout: Path, given: dict[str, Any]) -> dict[str, float]:
    """Run a turn in a process that imports the package of a checkout."""
    path = os.pathsep.join(map(str, (checkout, _HERE)))
    command = [sys.executable, __file__, json.dumps(given)]
    set_path = ["env", f"PYTHONPATH={path}", "OMP_NUM_THREADS=1"]
    done = subprocess.run(
        [*set_path, *command], check=True, stdout=subprocess.PIPE, cwd=checkout
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _benchmark() -> Any:
    harness = import_module("benchmarks.harness")

    @dataclass(frozen=True, kw_only=True)
    class TrainerSettings(harness.Settings):  # type: ignore[misc,name-defined]
        """What to measure."""

        servers: Annotated[tuple[int, ...], "server processes"] = (2, 8)
        tables: Annotated[int, "tables, of one feature each"] = 26
        dim: Annotated[int, "embedding dim"] = 64
        batch_size: Annotated[int, "samples per batch"] = 8192
        rows: Annotated[int, "different ids of a table"] = 400_000
        steps: Annotated[int, "steps timed together"] = 24
        repeats: Annotated[int, "turns; the median counts"] = 3
        other: Annotated[Path | None, "a checkout to take turns with"] = None

    def measure(settings: Any) -> list[Any]:
        checkouts = [_HERE, *([settings.other.resolve()] if settings.other else [])]
        names = ("tables", "dim", "batch_size", "rows", "steps")
        common = {name: getattr(settings, name) for name in names}
        found: dict[tuple[int, Path], list[dict[str, float]]] = {}
        for _ in range(settings.repeats):
            for num in settings.servers:
                for checkout in checkouts:
                    turn = _child(checkout, common | {"servers": num})
                    found.setdefault((num, checkout), []).append(turn)
        rows = []
        for (num, checkout), turns in found.items():
            cells = [
                1e3 * median(turn[part] for turn in turns) for part in ("all", "step")
            ]
            base = [turn["all"] for turn in found[num, checkouts[-1]]]
            of_base = median(t["all"] / b for t, b in zip(turns, base, strict=True))
            name = "this" if checkout == _HERE else checkout.name
            rows.append([num, name, *cells, of_base])
        question = (
            f"A step of {settings.tables} tables, batch {settings.batch_size}, "
            f"D = {settings.dim}: processor ms of the trainer's process, all threads."
        )
        header = "servers | checkout | all | ms a step | all, of the last checkout's"
        return [harness.Table("trainer", question, header, rows)]

    tiny: dict[str, Any] = {
        "servers": (2,),
        "tables": 3,
        "dim": 4,
        "batch_size": 32,
        "rows": 64,
    }
    return harness.Benchmark(
        name="trainer",
        normal=TrainerSettings(),
        tiny=TrainerSettings(**tiny, steps=2, repeats=1),
        figures={"trainer": measure},
    )


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(_step_seconds(json.loads(sys.argv[1])))}\n")
else:
    BENCHMARK = _benchmark()
