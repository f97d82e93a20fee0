"""Calls the examples of TorchRec's repository, each in a small size."""

import importlib
import random
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torchrec import KeyedJaggedTensor
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import get_default_sharders

from tests.dropin.driver import WHOLE, Run

LOSSES = nn.BCELoss, nn.BCEWithLogitsLoss, nn.CrossEntropyLoss
NUM_IDS, DIM, LR = 200, 16, 0.005


def main(run: Run) -> None:
    """Run the example that an argument names."""
    name = run.option("program")
    sys.path[:0] = [str(run.folder), str((run.folder / name).parent)]

    def note(module: nn.Module, _: Any, loss: Any) -> None:
        if isinstance(module, LOSSES) and torch.is_grad_enabled():
            run.losses.append(float(loss.detach()))

    register_module_forward_hook(note)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - of the program
    torch.manual_seed(1)
    program = importlib.import_module(name.replace("/", "."))
    {
        "examples/golden_training/train_dlrm": _golden,
        "examples/golden_training/train_dlrm_data_parallel": _golden,
        "examples/ray/train_torchrec": _ray,
        "examples/cloud_deployment/quickstart/train_torchrec_quickstart": _quickstart,
        "examples/bert4rec/bert4rec_main": _bert4rec,
        "examples/nvt_dataloader/train_torchrec": _nvt,
        "examples/transfer_learning/train_from_pretrained_embedding": _transfer,
        "test_installation": _installation,
    }[name](run, program)


def sharded(
    run: Run, *args: Any, on_cpu: bool = False, **settings: Any
) -> DistributedModelParallel:
    """Shard a model, with the tables of the plain one whole on this trainer."""
    if run.is_plain and settings.get("plan") is None:
        module = settings.get("module", args[0] if args else None)
        sharders = settings.get("sharders") or get_default_sharders()
        planner = _planner(run, constraints=dict.fromkeys(_tables(module), WHOLE))
        settings["plan"] = planner.collective_plan(module, sharders, dist.group.WORLD)
    if on_cpu:
        settings["device"] = torch.device("cpu")
    model = run.shard()(*args, **settings)
    torch.manual_seed(1)  # of batches: plain TorchRec has drawn its tables before
    return model


def _tables(module: nn.Module) -> list[str]:
    """Return the names of all tables of a model."""
    names = [name.split(".") for name, _ in module.named_parameters()]
    kinds = "embedding_bags", "embeddings"
    return [parts[-2] for parts in names if len(parts) > 2 and parts[-3] in kinds]


def _planner(
    run: Run, *_: Any, whole: Sequence[str] = (), **settings: Any
) -> EmbeddingShardingPlanner:
    """Return a planner for this trainer, with the constraints of the program.

    Those of the tables ``whole`` are not.
    """
    given = settings.get("constraints", {})
    if run.is_plain:
        names = [f"t_cat_{n}" for n in range(26)] + [f"embedding_{n}" for n in range(8)]
        given = {**dict.fromkeys(names, WHOLE), **given, **dict.fromkeys(whole, WHOLE)}
    topology = Topology(world_size=1, local_world_size=1, compute_device="cpu")
    return EmbeddingShardingPlanner(topology=topology, constraints=given)


def _golden(run: Run, program: ModuleType) -> None:
    program.DistributedModelParallel = partial(sharded, run)
    program.EmbeddingShardingPlanner = partial(_planner, run)
    program.train(NUM_IDS, DIM, learning_rate=LR, num_iterations=run.steps)


def _ray(run: Run, program: ModuleType) -> None:
    program.DistributedModelParallel = partial(sharded, run)
    program.tqdm = lambda *_, **__: range(run.steps)
    program.train(NUM_IDS, DIM, [64, DIM], learning_rate=LR)


def _quickstart(run: Run, program: ModuleType) -> None:
    """Take the branch of several trainers, without its enumerator, which is older."""
    program.DistributedModelParallel = partial(sharded, run)
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


def _bert4rec(run: Run, program: ModuleType) -> None:
    """Train, validate and test; fbgemm has no Adam on the CPU."""
    program.DMP = partial(sharded, run)
    program.EmbOptimType = SimpleNamespace(ADAM=EmbOptimType.EXACT_SGD)
    mean = program._dict_mean

    def noted(values: Any) -> Any:
        result = mean(values)
        run.note_metrics(result)
        return result

    program._dict_mean = noted
    given = {"dataset_name": "random", "mode": "dmp", "num_epochs": 10}
    given |= {"random_user_count": 20, "random_item_count": 60, "random_size": 400}
    given |= {"max_len": 10, "emb_dim": DIM, "nhead": 2, "num_layers": 1}
    given |= {"min_user_count": 2, "dupe_factor": 1, "train_batch_size": 32}
    given["export_root"] = f"{run.output}/"
    program.main([f"--{name}={value}" for name, value in given.items()])


def _installation(run: Run, program: ModuleType) -> None:
    program.DistributedModelParallel = partial(sharded, run)
    program.EmbeddingBagConfig = _small(program.EmbeddingBagConfig)
    program.main(["--cpu_only"])


def _small(config: Any) -> Any:
    """Return what makes a configuration of a table of fewer rows, not a million."""

    def small(*, num_embeddings: int, **settings: Any) -> Any:
        return config(num_embeddings=min(num_embeddings, NUM_IDS), **settings)

    return small


def _nvt(run: Run, program: ModuleType) -> None:
    """Train with a change of the rate, and evaluate within the epoch and after it."""
    program.DistributedModelParallel = partial(sharded, run)
    program.trec_dist.planner.EmbeddingShardingPlanner = partial(_planner, run)
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(total_memory=1 << 30)
    for name in ("AUROC", "Accuracy"):
        metric = partial(getattr(program.metrics, name), "binary")
        setattr(program.metrics, name, lambda *, compute_on_step, of=metric: of())
    evaluate = program._eval

    def noted(*args: Any) -> Any:
        auroc, accuracy, loss = evaluate(*args)
        run.note_metrics({"AUROC": auroc, "accuracy": accuracy})
        return auroc, accuracy, loss

    program._eval = noted
    batch_size = 32
    for part, num in {"train": run.steps, "validation": 4, "test": 4}.items():
        _write_criteo(run.output / part, batch_size * num)
    program.TOTAL_TRAINING_SAMPLES = batch_size * run.steps
    given = {"num_embeddings": NUM_IDS, "embedding_dim": DIM, "batch_size": batch_size}
    given |= {"dense_arch_layer_sizes": f"32,{DIM}", "over_arch_layer_sizes": "32,1"}
    given |= {"binary_path": run.output, "validation_freq_within_epoch": 10}
    given |= {"learning_rate": run.option("rate"), "lr_after_change_point": LR}
    flags = ["--change_lr", *(["--adagrad"] if run.option("adagrad") else [])]
    program.main([*(f"--{name}={value}" for name, value in given.items()), *flags])


def _write_criteo(folder: Path, num: int) -> None:
    """Write samples as the columns of Criteo in files of their own."""
    generator = np.random.default_rng(num)
    folder.mkdir()
    for name in DEFAULT_CAT_NAMES:
        ids = generator.integers(NUM_IDS, size=num, dtype=np.int32)
        ids.tofile(folder / f"{name}.bin")
    generator.random((num, 13), dtype=np.float32).tofile(folder / "numerical.bin")
    labels = generator.integers(2, size=num).astype(np.float32)
    labels.tofile(folder / "label.bin")


def _transfer(run: Run, program: ModuleType) -> None:
    """Load the pretrained rows, then train, which the example does not."""
    program.DistributedModelParallel = partial(sharded, run, on_cpu=True)
    program.EmbeddingShardingPlanner = partial(_planner, run, whole=["emb"])
    program.torchrec.EmbeddingBagConfig = _small(program.torchrec.EmbeddingBagConfig)
    program.share_tensor_via_shm = lambda tensor: (
        tensor[:NUM_IDS].clone().share_memory_()
    )
    dist.init_process_group("gloo")
    dist.init_process_group = torch.cuda.set_device = lambda *_, **__: None
    program.main()
    for _ in range(run.steps):
        ids = torch.randint(NUM_IDS, (64,))
        batch = KeyedJaggedTensor(["f"], ids, lengths=torch.full((32,), 2))
        loss = run.models[-1](batch).values().square().mean()
        loss.backward()
        run.losses.append(float(loss.detach()))
