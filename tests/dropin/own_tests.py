"""TorchRec's own tests that take a sharder, with the sharders of this project.

    TORCHREC=FOLDER python -m tests.dropin.own_tests

Most stand in the installed ``torchrec.distributed.test_utils``; those of train
pipelines, and a model that the others import, in a checkout of TorchRec: FOLDER. What
they make sharders with makes ours here, each with a namespace, so that two models of a
test have tables of their own. Tests of pipelines skip themselves without a GPU; here
they run on the CPU. Writes a table, and fails where a test ends otherwise than
``DIFFERENT`` says.
"""

import argparse
import contextlib
import importlib
import itertools
import os
import random
import sys
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torchrec.distributed.train_pipeline
from torchrec import PoolingType
from torchrec.distributed import DistributedModelParallel
from torchrec.modules.embedding_configs import DataType

from persia_torchrec import EmbeddingClient, EmbeddingCluster, remote_sharders


def _imported(name: str) -> Any:
    """Import a module of the tests; packages of them are in the checkout alone."""
    return importlib.import_module(f"torchrec.distributed.{name}")


for _package in (torchrec.distributed, torchrec.distributed.train_pipeline):
    _path = _package.__name__.replace(".", "/")
    _package.__path__.append(str(Path(os.environ["TORCHREC"], _path)))

models = _imported("test_utils.test_model")
moved = _imported("test_utils.emb_sharder")  # to there, since the checkout
vars(models).update({n: vars(moved)[n] for n in dir(moved) if n.startswith("Test")})
base = _imported("test_utils.test_model_parallel_base")
shared = _imported("test_utils.test_model_parallel")
pipelines = _imported("train_pipeline.tests.test_train_pipelines")
pipelines_base = _imported("train_pipeline.tests.test_train_pipelines_base")
sharding = _imported("test_utils.test_sharding")
_numbers = itertools.count()

_KERNELS = "compares kernels of fbgemm on a GPU; skipped without one"
_CLASS = "wants TorchRec's class; ours is another ShardedModule"
DIFFERENT = {
    "StateDict.test_load_state_dict_cw_multiple_shards": (
        "counts column-wise shards; a table has one shard per trainer, of rows"
    ),
    "StateDict.test_meta_device_dmp_state_dict": (
        "shards onto the meta device, which is an error here"
    ),
    "StateDict.test_numerical_equivalence_between_kernel_types": _KERNELS,
    "StateDict.test_rowwise_adagrad_numerical_equivalence": _KERNELS,
    "SparseOnly.test_initialize_torch_state_error_includes_table_name": (
        "replaces private methods of TorchRec's class"
    ),
    "SparseOnly.test_sharding_ebc_as_top_level": _CLASS,
    "SparseOnly.test_sharding_ebc_validate_input_only_once": (
        "wants a line of TorchRec's log: here each batch is checked, without one"
    ),
    "SparseOnly.test_sharding_fused_ebc_as_top_level": _CLASS,
    "Pipelines.test_feature_processed_ebc": f"{_CLASS}; predictions are equal before",
    "Pipelines.test_pipelining_fsdp_pre_trace": "FSDP needs an accelerator",
}
"""Tests that end otherwise than with TorchRec's sharders, and why."""


def sharders_of(fused_params: dict[str, Any] | None = None) -> list[Any]:
    """Return our sharders for one model: its tables are its own."""
    client = EmbeddingClient.connect(os.environ["SERVERS"].split(","))
    given = {"learning_rate": 0.1, **(fused_params or {})}
    return remote_sharders(client, fused_params=given, namespace=f"n{next(_numbers)}")


class OnServers(DistributedModelParallel):
    """A sharded model, with our sharders where a test gives others, or none."""

    def __init__(self, module: Any, *args: Any, sharders: Any = None, **given: Any):
        if not any(hasattr(sharder, "remote_tables") for sharder in sharders or ()):
            sharders = sharders_of()
        super().__init__(module, *args, sharders=sharders, **given)


class Asked:
    """Stands for a sharder that a test has made: its arguments."""

    def __init__(self, *_: Any, fused_params: Any = None, **__: Any) -> None:
        self.fused_params = fused_params


def on_servers(rank: int, sharders: Any, **settings: Any) -> None:
    """Run one trainer of a test of sharding; ``sharders`` are the namespace."""
    random.seed(0)
    client = EmbeddingClient.connect(os.environ["SERVERS"].split(","))
    given = {"fused_params": {"learning_rate": 0.1}, "namespace": sharders}
    ours = remote_sharders(client, **given)
    sharding.sharding_single_rank_test(rank=rank, sharders=ours, **settings)


class Sharding(shared.ModelParallelTestShared):  # type: ignore[misc]
    """Predictions after a step of a sharded model, and of one that is not."""

    def setUp(self, backend: str = "gloo") -> None:
        """Set no test up for GPUs."""
        super().setUp(backend)

    def check(self, world_size: int = 1, **settings: Any) -> None:
        """Run TorchRec's test with our sharders."""
        namespace: Any = f"n{next(_numbers)}"
        self._test_sharding(
            sharders=namespace,
            world_size=world_size,
            test_callable=on_servers,
            **settings,
        )


MEAN, VBE = {"pooling": PoolingType.MEAN}, {"variable_batch_per_feature": True}
UNWEIGHTED = {"has_weighted_tables": False}
IN_BACKWARD = {"lr": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "sparse_nn": {},
    "mean": MEAN,
    "variable_batch_size": {"variable_batch_size": True},
    "vbe": {**VBE, **UNWEIGHTED},
    "vbe_mean": {**VBE, **UNWEIGHTED, **MEAN},
    "vbe_global_constant_batch": {**VBE, **UNWEIGHTED, "global_constant_batch": True},
    "offsets_int32": {
        "use_offsets": True,
        "indices_dtype": torch.int32,
        "offsets_dtype": torch.int32,
    },
    "lengths_int32": {"lengths_dtype": torch.int32, "indices_dtype": torch.int32},
    "zero_batch_size": {"allow_zero_batch_size": True},
    "sgd_in_backward": {
        "apply_optimizer_in_backward_config": {
            "embedding_bags": (torch.optim.SGD, IN_BACKWARD)
        }
    },
    "sgd_in_backward_per_table": {
        "apply_optimizer_in_backward_config": {
            f"table_{i}": (torch.optim.SGD, IN_BACKWARD) for i in range(6)
        }
    },
    "tower": {"model_class": models.TestTowerSparseNN},
    "tower_collection": {"model_class": models.TestTowerCollectionSparseNN},
    "mixed_embeddings": {"model_class": models.TestMixedEmbeddingSparseArch},
    "fp16": {"data_type": DataType.FP16},
}
TWO_TRAINERS = ("sparse_nn", "mean", "variable_batch_size", "vbe", "zero_batch_size")


def _case(settings: dict[str, Any]) -> Callable[[Any], None]:
    return lambda test: test.check(**settings)


for _name, _settings in CASES.items():
    setattr(Sharding, f"test_{_name}", _case(_settings))
for _name in TWO_TRAINERS:
    _two = {**CASES[_name], "world_size": 2}
    setattr(Sharding, f"test_{_name}_two_trainers", _case(_two))


class StateDict(base.ModelParallelStateDictBase):  # type: ignore[misc]
    """State dicts of models and optimizers, loaded from one model into another."""

    backend = "gloo"

    def _generate_dmps_and_batch(
        self, sharders: Any = None, constraints: Any = None
    ) -> Any:
        given = sharders[0].fused_params if sharders else None
        models, batches = [], []
        for _ in range(2):  # each of the two models with sharders of its own
            made = super()._generate_dmps_and_batch(sharders_of(given), {})
            models.append(made[0][0])
            batches.append(made[1])
        return models, batches[0]


class SparseOnly(base.ModelParallelSparseOnlyBase):  # type: ignore[misc]
    """Collections that are a model by themselves."""

    backend = "gloo"


class Pipelines(pipelines.TrainPipelineSparseDistTest):  # type: ignore[misc]
    """A train pipeline, beside a plain loop and a model that is not sharded."""

    def setUp(self) -> None:
        """Let it run on the CPU."""
        super().setUp()
        self.device = torch.device("cpu")

    def _setup_model(
        self, model_type: Any = models.TestSparseNN, zch: bool = False, **given: Any
    ) -> Any:
        # ``zch`` has another name since the checkout.
        def made(zch: bool, **settings: Any) -> Any:
            return model_type(**settings)

        return super()._setup_model(model_type=made, **given)


for _name in dir(pipelines.TrainPipelineSparseDistTest):
    if _name.startswith("test_"):  # without what skips it
        _skipped = getattr(pipelines.TrainPipelineSparseDistTest, _name)
        setattr(Pipelines, _name, getattr(_skipped, "__wrapped__", _skipped))


class Results(unittest.TextTestResult):
    """Keeps how each test ended."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.ends: dict[str, str] = {}

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        """Note how it ended."""
        super().stopTest(test)
        bad = {id(t) for t, _ in (*self.failures, *self.errors)}
        skipped = {id(t) for t, _ in self.skipped}
        end = "differs" if id(test) in bad else "passes"
        kind, name = type(test).__name__, test.id().rpartition(".")[2]
        self.ends[f"{kind}.{name}"] = "skipped" if id(test) in skipped else end


def main() -> None:
    """Run the tests and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the names of tests")
    args = parser.parse_args()
    kinds: list[type[unittest.TestCase]] = [Sharding, StateDict, SparseOnly, Pipelines]
    load = unittest.defaultTestLoader
    suite = unittest.TestSuite(
        test
        for kind in kinds
        for test in load.loadTestsFromTestCase(kind)
        if args.only in test.id()
    )
    with EmbeddingCluster.local(2) as cluster:
        os.environ["SERVERS"] = ",".join(cluster.addresses)
        with contextlib.ExitStack() as stack:
            for module in (base, pipelines, pipelines_base):
                name = "DistributedModelParallel"
                stack.enter_context(patch.object(module, name, OnServers))
            others = {"create_test_sharder": Asked, "get_default_sharders": sharders_of}
            for name, ours in others.items():
                stack.enter_context(patch.object(base, name, ours))
            name = "FeatureProcessedEmbeddingBagCollectionSharder"
            stack.enter_context(patch.object(pipelines, name, lambda: sharders_of()[2]))
            runner = unittest.TextTestRunner(resultclass=Results, verbosity=2)
            result: Any = runner.run(suite)
    for name, end in result.ends.items():
        print(f"| {name} | {end} | {DIFFERENT.get(name, '')} |")
    ends = {n: e for n, e in result.ends.items() if args.only in n}
    if wrong := [n for n, e in ends.items() if (e == "passes") == (n in DIFFERENT)]:
        sys.exit(f"Ended otherwise than is known: {wrong}.")


if __name__ == "__main__":
    main()
