"""Calls ``projects/twhin`` of twitter/the-algorithm-ml: its loop and checkpoints."""

import importlib
import shutil
import sys
from collections.abc import Mapping
from functools import wraps
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import get_default_sharders

from tests.dropin.driver import WHOLE, Run, stand_in

NUM_IDS, BATCH_SIZE, NUM_FURTHER = 300, 50, 10
TABLES = "user", "tweet"


def main(run: Run) -> None:
    """Train, with a checkpoint every few steps; or continue from one."""
    package = ModuleType("tml")
    package.__path__ = [str(run.folder)]
    sys.modules["tml"] = package
    stand_in("gcsfs")
    sharding: Any = importlib.import_module("tml.model")
    program: Any = importlib.import_module("tml.projects.twhin.run")
    edges: Any = importlib.import_module("tml.projects.twhin.data.edges")
    edges.EdgesDataset.__abstractmethods__ = frozenset()  # torch has one more now
    program.TwhinModelAndLoss.load_state_dict = _load
    shard = run.shard()

    def planned(*, module: Any, device: Any, **settings: Any) -> Any:
        if run.is_plain:
            topology = Topology(world_size=1, compute_device="cpu")
            constraints = dict.fromkeys(TABLES, WHOLE)
            planner = EmbeddingShardingPlanner(
                topology=topology, constraints=constraints
            )
            sharders = get_default_sharders()
            settings["plan"] = planner.collective_plan(module, sharders)
        model = shard(module=module, device=device, **settings)
        torch.manual_seed(1)
        return model

    sharding.DistributedModelParallel = planned
    loss = program.F.binary_cross_entropy_with_logits
    program.F.binary_cross_entropy_with_logits = _noted(run, loss)
    program.env.is_reader, program.env.is_chief = (lambda: False), (lambda: True)
    steps = run.steps
    if run.loaded:
        shutil.copytree(run.loaded, run.checkpoint)
        steps += NUM_FURTHER
    program.run(_config(run, program, steps), str(run.checkpoint))


def _load(model: Any, state: Mapping[str, Any]) -> Any:
    """Load the state of a model around one of TorchRec's, which has shorter names."""
    inner = {name.removeprefix("model."): value for name, value in state.items()}
    return model.model.load_state_dict(inner)


def _noted(run: Run, loss_of: Any) -> Any:
    @wraps(loss_of)
    def noted(*args: Any) -> torch.Tensor:
        loss: torch.Tensor = loss_of(*args)
        if isinstance(loss, torch.Tensor):  # else its pipeline traces the model
            run.losses.append(float(loss.detach()))
        return loss

    return noted


def _config(run: Run, program: Any, steps: int) -> Any:
    """Return a configuration in a small size, of generated edges."""
    source = run.folder / "projects" / "twhin" / "config" / "local.yaml"
    config = yaml.safe_load(source.read_text())
    for table in config["model"]["embeddings"]["tables"]:
        table["num_embeddings"] = NUM_IDS
    generator = np.random.default_rng(1)
    num = BATCH_SIZE * (run.steps + NUM_FURTHER + 5)
    columns = {n: generator.integers(NUM_IDS, size=num) for n in ("lhs", "rhs")}
    columns["rel"] = generator.integers(len(config["model"]["relations"]), size=num)
    pq.write_table(pa.table(columns), run.output / "edges.parquet")
    data = {"data_root": f"{run.output}/edges.parquet"}
    data["per_replica_batch_size"] = BATCH_SIZE
    for part in ("train_data", "validation_data"):
        config[part] |= data
    config["training"] |= {"num_train_steps": steps, "checkpoint_every_n": 10}
    path = run.output / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return program.setup_configuration(program.TwhinConfig, yaml_path=str(path))
