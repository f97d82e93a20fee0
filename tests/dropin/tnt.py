"""Calls ``examples/torchrec/main.py`` of pytorch/tnt: ``fit``, with an evaluation."""

import importlib
import sys
from functools import partial
from typing import Any

import torch
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES
from torchrec.distributed.planner import EmbeddingShardingPlanner

from tests.dropin.driver import WHOLE, Run, stand_in


class _Logger:
    """Notes what the program logs for TensorBoard."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def log(self, name: str, value: Any, step: int) -> None:
        self._run.note_metrics({f"{name} {step}": value})


def main(run: Run) -> None:
    """Train, and evaluate."""
    sys.path[:0] = [str(run.folder), str(run.folder / "examples" / "torchrec")]
    stand_in("pkg_resources")
    program: Any = importlib.import_module("main")
    shard = run.shard(lambda result: result[0])

    def seeded(*args: Any, **settings: Any) -> Any:
        model = shard(*args, **settings)
        torch.manual_seed(1)
        return model

    program.DistributedModelParallel = seeded
    program.init_from_env = partial(program.init_from_env, device_type="cpu")
    program.init_logger = partial(_Logger, run)
    if run.is_plain:
        constraints = {f"t_{name}": WHOLE for name in DEFAULT_CAT_NAMES}
        planner = partial(EmbeddingShardingPlanner, constraints=constraints)
        program.EmbeddingShardingPlanner = planner
    sizes = ["--num_embeddings=200", "--embedding_dim=16", "--seed=1"]
    sizes += ["--dense_arch_layer_sizes=32,16", "--over_arch_layer_sizes=32,1"]
    program.main([*sizes, f"--num_batches={run.steps}"])
