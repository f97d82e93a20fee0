"""Calls dlrm_v3 of meta-recsys/generative-recommenders, on a CPU and with small sizes.

Its kernels are those of PyTorch, as Triton's need a GPU; its process group is gloo's;
one function of a TorchRec that is newer than the released one has a stand-in.
Arguments: ``tables=FP16`` as in its own configurations, by default FP32;
``dense=bf16`` as there, by default float32.
"""

import dataclasses
import importlib
import sys
from functools import partial
from typing import Any

import gin
import torch
import torch.distributed as dist
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.modules.embedding_configs import DataType

from tests.dropin.driver import WHOLE, Run, stand_in

SIZES = {
    "max_seq_len": 64,
    "hstu_num_heads": 2,
    "hstu_attn_linear_dim": 16,
    "hstu_attn_qk_dim": 16,
    "hstu_attn_num_layers": 2,
    "hstu_embedding_table_dim": 16,
    "hstu_preprocessor_hidden_dim": 16,
    "hstu_transducer_embedding_dim": 32,
    "contextual_feature_to_min_uih_length": {"viewer_id": 8, "dummy_contexual": 8},
}
NUM_IDS, DIM = 1000, 16
CPU = torch.device("cpu")


def main(run: Run) -> None:
    """Train from a checkpoint, or from the first weights; save one; evaluate."""
    sys.path.insert(0, str(run.folder))
    name = "torchrec.modules.sorted_index_select"
    stand_in(name, maybe_sorted_index_select=lambda x, i, _: x.index_select(0, i))
    train: Any = importlib.import_module("generative_recommenders.dlrm_v3.train.utils")
    top: Any = importlib.import_module("generative_recommenders.dlrm_v3.checkpoint")
    kernels: Any = importlib.import_module("generative_recommenders.common")
    dist.init_process_group("gloo")
    _configure(run)
    _shrink(run, train)
    model, config, tables = train.make_model()
    model.set_hammer_kernel(kernels.HammerKernel.PYTORCH)
    model._bf16_training = run.option("dense") == "bf16"
    model, optimizer = train.make_optimizer_and_shard(
        model=model, device=CPU, world_size=1
    )
    batches = train.make_train_test_dataloaders(
        hstu_config=config, embedding_table_configs=tables
    )
    noted: dict[str, Any] = {"device": CPU, "rank": 0}
    metrics = train.MetricsLogger(
        multitask_configs=config.multitask_configs,
        batch_size=batches[0].batch_size,
        window_size=2500,
        **noted,
    )
    given: Any = {"model": model, "metric_logger": metrics, **noted}
    top.load_dmp_checkpoint(
        model=model, optimizer=optimizer, metric_logger=metrics, device=CPU
    )
    torch.manual_seed(1)
    train.train_loop(dataloader=batches[0], optimizer=optimizer, **given)
    run.note_metrics(metrics.compute("train"))
    train.eval_loop(dataloader=batches[1], **given)
    run.note_metrics(metrics.compute("eval"))
    dist.destroy_process_group()


def _configure(run: Run) -> None:
    """Set what its file for a first try leaves to other machines."""
    folder = run.folder / "generative_recommenders/dlrm_v3/train/gin"
    last = str(run.steps - 1)  # its checkpoints have the numbers of batches
    bindings = [
        f"train_loop.num_batches = {run.steps}",
        "train_loop.num_epochs = 1",
        "train_loop.output_trace = False",
        "train_loop.metric_log_frequency = 1",
        f"train_loop.checkpoint_frequency = {last}",
        f"save_dmp_checkpoint.path = '{run.checkpoint}'",
        f"load_dmp_checkpoint.path = '{run.loaded / last if run.loaded else ''}'",
        "eval_loop.num_batches = 3",
        f"MetricsLogger.tensorboard_log_path = '{run.output}/tensorboard'",
    ]
    gin.parse_config_files_and_bindings([str(folder / "debug.gin")], bindings)


def _shrink(run: Run, train: Any) -> None:
    """Let its functions make a small model, on the CPU."""
    config_of, tables_of = train.get_hstu_configs, train.get_embedding_table_config
    train.get_hstu_configs = lambda name: dataclasses.replace(config_of(name), **SIZES)
    kind = DataType[run.option("tables") or "FP32"]
    small = {"num_embeddings": NUM_IDS, "embedding_dim": DIM, "data_type": kind}

    def tables(name: str) -> dict[str, Any]:
        given = tables_of(name).items()
        return {table: dataclasses.replace(c, **small) for table, c in given}

    train.get_embedding_table_config = tables
    topology = train.Topology
    train.Topology = lambda **given: topology(**{**given, "compute_device": "cpu"})
    if run.is_plain:
        constraints = dict.fromkeys(tables_of("debug"), WHOLE)
        planner = partial(EmbeddingShardingPlanner, constraints=constraints)
        train.EmbeddingShardingPlanner = planner
    train.DistributedModelParallel = run.shard(lambda result: sum(result[2].values()))
