"""Run one program, plain or patched, from known weights; write losses and tables.

    python -m tests.dropin.driver FOLDER MAIN OUTPUT plain|servers [arguments]

The program is imported as it stands in FOLDER. Around it, and in it nowhere: each
weight begins with numbers of its key, tables of the plain program are whole on this
trainer, and hooks note the loss of each training batch and each AUROC.
"""

import hashlib
import importlib.util
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torchmetrics
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardedTensor

WHOLE = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])


METRICS: list[float] = []
"""Each AUROC that the program has computed, to 6 digits."""


def first_weights(key: str, shape: torch.Size) -> torch.Tensor:
    """Return what a weight begins with, float32, by its key alone."""
    digest = hashlib.blake2b(key.encode(), digest_size=6).digest()
    random = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.rand(shape, generator=random) * 0.2 - 0.1


def begin(model: DistributedModelParallel) -> None:
    """Give a model its first weights; tables by what TorchRec's tensors offer."""
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if isinstance(value, ShardedTensor):
                weights = first_weights(key, value.metadata().size)
                for shard in value.local_shards():
                    start, num = shard.metadata.shard_offsets[0], len(shard.tensor)
                    shard.tensor.copy_(weights[start : start + num])
            elif isinstance(value, torch.Tensor) and value.is_floating_point():
                value.copy_(first_weights(key, value.shape))


def tables(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """Return the tables of a model as ordinary tensors."""
    return {
        key: torch.cat([shard.tensor.clone() for shard in value.local_shards()])
        for key, value in model.state_dict().items()
        if isinstance(value, ShardedTensor)
    }


def stand_in_for_missing() -> None:
    """Let a program log to nothing where MLPerf's logger is not installed.

    Its AUROC has an argument that torchmetrics no longer takes.
    """
    if importlib.util.find_spec("mlperf_logging") is None:
        for name in ("", ".mllog", ".mllog.constants", ".mllog.mllog"):
            sys.modules[f"mlperf_logging{name}"] = MagicMock()
    made = torchmetrics.AUROC

    def auroc(*args: Any, compute_on_step: bool = False, **settings: Any) -> Any:
        metric = made(*args, **settings)
        compute = metric.compute

        def noted() -> Any:
            METRICS.append(round(float(value := compute()), 6))
            return value

        metric.compute = noted
        return metric

    torchmetrics.AUROC = auroc


def main(folder: str, name: str, output: str, kind: str, *arguments: str) -> None:
    """Run the program."""
    sys.path[:0] = [folder, str(Path(folder).parent)]
    stand_in_for_missing()
    program: Any = importlib.import_module(Path(name).stem)
    models, losses = [], list[float]()

    def made(*args: Any, **settings: Any) -> DistributedModelParallel:
        model = DistributedModelParallel(*args, **settings)
        begin(model)
        models.append(model)

        def note(module: Any, _: Any, result: Any) -> None:
            if module.training:
                losses.append(float(result[0].detach()))

        model.register_forward_hook(note)
        return model

    program.DistributedModelParallel = made
    if kind == "plain":
        names = [f"t_{feature}" for feature in program.DEFAULT_CAT_NAMES]
        constraints = dict.fromkeys(names, WHOLE)
        planner = partial(EmbeddingShardingPlanner, constraints=constraints)
        program.EmbeddingShardingPlanner = planner
    program.main(list(arguments))
    torch.save(tables(models[0]), Path(output, "tables.pt"))
    Path(output, "losses.json").write_text(json.dumps([losses, METRICS]))


if __name__ == "__main__":
    main(*sys.argv[1:])
