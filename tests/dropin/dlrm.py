"""Calls ``dlrm_main.py`` of facebookresearch/dlrm, and of mlcommons/training."""

import importlib
import importlib.util
import sys
from functools import partial
from typing import Any

import torchmetrics
from torchrec.distributed.planner import EmbeddingShardingPlanner

from tests.dropin.driver import WHOLE, Run, stand_in

LOGGER = "mlperf_logging"


def main(run: Run) -> None:
    """Train, validate and test."""
    sys.path[:0] = [str(run.folder), str(run.folder.parent)]
    if importlib.util.find_spec(LOGGER) is None:
        parts = ("", ".mllog", ".mllog.constants", ".mllog.mllog")
        stand_in(*[LOGGER + part for part in parts])
    torchmetrics.AUROC = partial(_auroc, run, torchmetrics.AUROC)
    program: Any = importlib.import_module("dlrm_main")
    program.DistributedModelParallel = run.shard(lambda result: result[0])
    if run.is_plain:
        names = [f"t_{feature}" for feature in program.DEFAULT_CAT_NAMES]
        constraints = dict.fromkeys(names, WHOLE)
        planner = partial(EmbeddingShardingPlanner, constraints=constraints)
        program.EmbeddingShardingPlanner = planner
    limits = [f"--limit_{kind}_batches=5" for kind in ("val", "test")]
    program.main([*run.arguments, *limits, f"--limit_train_batches={run.steps}"])


def _auroc(
    run: Run, made: Any, *args: Any, compute_on_step: bool = False, **settings: Any
) -> Any:
    """Return a metric that notes what it computes.

    ``compute_on_step`` is an argument that torchmetrics no longer takes.
    """
    metric = made(*args, **settings)
    compute = metric.compute

    def noted() -> Any:
        value = compute()
        run.note_metrics({"auroc": value})
        return value

    metric.compute = noted
    return metric
