"""Calls TorchEasyRec: training with evaluation; then, of a checkpoint, all the rest.

The rest is ``evaluate``, ``train_and_evaluate`` that continues, ``export`` and
``predict``. The argument ``config=PATH`` is one of its configurations; its tables are
made smaller here, and its tests' functions make the data. Packages of it that no index
has (pyfg, graphlearn, common_io) have stand-ins: what needs them is left out, which is
features that are made while training, and negative samplers.
"""

import importlib
import random
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset
import torch
import torch.distributed as dist
from torchrec.distributed.sharding_plan import get_default_sharders

from tests.dropin.driver import Run, stand_in

MISSING = (
    "pyfg",
    "common_io",
    "graphlearn",
    "graphlearn.python",
    "graphlearn.python.data",
    "graphlearn.python.data.values",
)
BATCH_SIZE, MOST_IDS = 64, 1000
WHOLE = (
    'global_embedding_constraints { sharding_types: "table_wise" '
    'compute_kernels: "fused" }'
)


def main(run: Run) -> None:
    """Train and evaluate; or evaluate, continue, export and predict."""
    sys.path.insert(0, str(run.folder))
    stand_in(*MISSING)
    program: Any = importlib.import_module("tzrec.main")
    sharding: Any = importlib.import_module("tzrec.utils.dist_util")
    sharding._DistributedModelParallel = run.shard(lambda result: result[0].sum())
    if run.is_plain:  # it leaves sequences dense on a CPU
        program.get_default_sharders = get_default_sharders
    evaluate = program._evaluate

    def noted(*args: Any, **settings: Any) -> Any:
        metrics = evaluate(*args, **settings)
        run.note_metrics(metrics)
        return metrics

    program._evaluate = noted
    config = _configure(run)
    if run.loaded is None:
        _call(program.train_and_evaluate, config)
        return
    shutil.copytree(run.loaded, run.checkpoint)
    _call(program.evaluate, config)
    _call(program.train_and_evaluate, config, continue_train=True)
    exported, predicted = run.output / "export", run.output / "predicted"
    _call(program.export, config, export_dir=str(exported))
    data = str(run.output / "eval_data/*.parquet")
    _call(program.predict, data, str(predicted), str(exported))
    table = pyarrow.dataset.dataset(predicted).to_table().to_pydict()
    run.note_metrics({name: np.mean(np.abs(v)) for name, v in table.items()})


def _call(function: Any, *args: Any, **settings: Any) -> None:
    """Call one of its commands, each of which begins a process group."""
    torch.manual_seed(1)
    function(*args, **settings)
    if dist.is_initialized():
        dist.destroy_process_group()


def _configure(run: Run) -> str:
    """Write a configuration of the program with small tables, and data for it."""
    text = (run.folder / run.option("config")).read_text()

    def fewer(found: re.Match[str]) -> str:
        return f"{found[1]}: {min(int(found[2]), MOST_IDS)}"

    for pattern, made in (
        (r"\b(num_buckets|hash_bucket_size): (\d+)", fewer),
        (r"\bbatch_size: \d+", f"batch_size: {BATCH_SIZE}"),
        (r"\b(train|eval)_input_path: \S+", r'\1_input_path: ""'),
        (r"dataset_type: \w+", "dataset_type: ParquetDataset"),
        (r"fg_mode: \w+", "fg_mode: FG_NONE"),
        (r"train_config \{", f"train_config {{ {WHOLE if run.is_plain else ''}"),
    ):
        text = re.sub(pattern, made, text)
    path = Path(run.output, "small.config")
    path.write_text(text)
    tools: Any = importlib.import_module("tzrec.tests.utils")
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - its functions draw from it
    rows = BATCH_SIZE * (run.steps + 20)
    config = tools.load_config_for_test(str(path), str(run.output), num_rows=rows)
    config.model_dir = str(run.checkpoint)
    config.train_config.ClearField("num_epochs")
    config.train_config.num_steps = run.steps + (5 if run.loaded else 0)
    tools.config_util.save_message(config, str(path))
    return str(path)
