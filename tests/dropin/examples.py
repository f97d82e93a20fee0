"""Calls the examples of TorchRec's repository, each in a small size."""

import importlib
import sys
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import get_default_sharders

from tests.dropin.driver import WHOLE, Run

LOSSES = nn.BCELoss, nn.BCEWithLogitsLoss
NUM_IDS, DIM, LR = 200, 16, 0.005


def main(run: Run) -> None:
    """Run the example that an argument names."""
    name = run.option("program")
    sys.path[:0] = [str(run.folder), str((run.folder / name).parent)]

    def note(module: nn.Module, _: Any, loss: Any) -> None:
        if isinstance(module, LOSSES) and torch.is_grad_enabled():
            run.losses.append(float(loss.detach()))

    register_module_forward_hook(note)
    program = importlib.import_module(name.replace("/", "."))
    {
        "examples/golden_training/train_dlrm": _golden,
        "examples/golden_training/train_dlrm_data_parallel": _golden,
        "examples/ray/train_torchrec": _ray,
        "examples/cloud_deployment/quickstart/train_torchrec_quickstart": _quickstart,
        "test_installation": _installation,
    }[name](run, program)


def _sharded(run: Run, *args: Any, **settings: Any) -> DistributedModelParallel:
    """Shard a model, with the tables of the plain one whole on this trainer."""
    if run.is_plain and settings.get("plan") is None:
        module = settings.get("module", args[0] if args else None)
        sharders = settings.get("sharders") or get_default_sharders()
        planner = _planner(run, constraints=dict.fromkeys(_tables(module), WHOLE))
        settings["plan"] = planner.collective_plan(module, sharders, dist.group.WORLD)
    model = run.shard()(*args, **settings)
    torch.manual_seed(1)  # of batches: plain TorchRec has drawn its tables before
    return model


def _tables(module: nn.Module) -> list[str]:
    """Return the names of all tables of a model."""
    names = [name.split(".") for name, _ in module.named_parameters()]
    kinds = "embedding_bags", "embeddings"
    return [parts[-2] for parts in names if len(parts) > 2 and parts[-3] in kinds]


def _planner(run: Run, *_: Any, **settings: Any) -> EmbeddingShardingPlanner:
    """Return a planner for this trainer, with the constraints of the program."""
    given = settings.get("constraints", {})
    if run.is_plain:
        names = [f"t_cat_{n}" for n in range(26)] + [f"embedding_{n}" for n in range(8)]
        given = {**dict.fromkeys(names, WHOLE), **given}
    topology = Topology(world_size=1, local_world_size=1, compute_device="cpu")
    return EmbeddingShardingPlanner(topology=topology, constraints=given)


def _golden(run: Run, program: ModuleType) -> None:
    program.DistributedModelParallel = partial(_sharded, run)
    program.EmbeddingShardingPlanner = partial(_planner, run)
    program.train(NUM_IDS, DIM, learning_rate=LR, num_iterations=run.steps)


def _ray(run: Run, program: ModuleType) -> None:
    program.DistributedModelParallel = partial(_sharded, run)
    program.tqdm = lambda *_, **__: range(run.steps)
    program.train(NUM_IDS, DIM, [64, DIM], learning_rate=LR)


def _quickstart(run: Run, program: ModuleType) -> None:
    """Take the branch of several trainers, without its enumerator, which is older."""
    program.DistributedModelParallel = partial(_sharded, run)
    program.EmbeddingShardingPlanner = partial(_planner, run)
    for name in ("Enumerator", "PerfEstimator", "StorageEstimator"):
        setattr(program, f"Embedding{name}", lambda *_, **__: None)
    dist.init_process_group("gloo")
    program.setup_distributed = lambda: (0, 2, torch.device("cpu"))
    given = {"num_embeddings": NUM_IDS, "embedding_dim": DIM, "num_epochs": 1}
    given |= {"num_sparse_features": 8, "num_batches_per_epoch": run.steps}
    given |= {"batch_size": 64, "dense_arch_layer_sizes": f"32,{DIM}"}
    sys.argv[1:] = [f"--{name}={value}" for name, value in given.items()]
    program.main()


def _installation(run: Run, program: ModuleType) -> None:
    """Train tables of fewer rows than its million each."""
    program.DistributedModelParallel = partial(_sharded, run)
    config = program.EmbeddingBagConfig

    def small(*, num_embeddings: int, **settings: Any) -> Any:
        return config(num_embeddings=min(num_embeddings, NUM_IDS), **settings)

    program.EmbeddingBagConfig = small
    program.main(["--cpu_only"])
