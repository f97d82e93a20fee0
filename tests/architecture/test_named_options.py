"""Each option that an error names is one of the program in which the error appears.

So is each argument, as ``capacity=``, one of the call that it is about.
"""

import argparse
import ast
import functools
import inspect
import re

import pytest
import torch
from persia_torchrec.components import jobs
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel

import persia_torchrec as package
from persia_torchrec import data
from persia_torchrec.ctx import TrainCtx
from persia_torchrec.embedding.data import PersiaBatch
from persia_torchrec.embedding.embedding_config import SlotConfig
from persia_torchrec.job.coordinator import CoordinatorConfig
from persia_torchrec.job.supervisor import SupervisorConfig
from persia_torchrec.job.torchrun import AgentConfig
from persia_torchrec.parsing.command_line import add_flags
from persia_torchrec.persia import k8s_utils, launcher
from persia_torchrec.persia.convert import Conversion
from persia_torchrec.persia.worker.__main__ import WorkerFlags
from persia_torchrec.server.__main__ import ServerFlags
from persia_torchrec.serving.__main__ import ServingFlags
from tests.support.repository import ROOT

PACKAGE = ROOT / "persia_torchrec"
PROGRAMS = {
    "server": [ServerFlags],
    "store": [ServerFlags],
    "checkpoint": [ServerFlags],
    "embedding": [ServerFlags, WorkerFlags, ServingFlags],
    "serving": [ServingFlags],
    "sharding/dense_half.py": [ServingFlags],
    "sharding/exported_program.py": [ServingFlags],
    "persia/worker": [WorkerFlags],
    "persia/convert.py": [Conversion],
    "job/torchrun.py": [AgentConfig],
    "job/coordinator.py": [CoordinatorConfig],
    "job": [CoordinatorConfig, SupervisorConfig],
    "rpc": [CoordinatorConfig, SupervisorConfig, ServerFlags],
}
"""By room or file: the programs in which its errors appear; all others may name those
of components and launchers."""
ELSEWHERE = {"--shm-size", "--no-deps"}  # of docker, and pip


_SHARDER = package.RemoteEmbeddingBagCollectionSharder
PLACES = {
    "as_torchrec": [data.DataLoader, data.StreamingDataset],
    "block_rows": [package.EmbeddingClient.export],
    "capture_error_mode": [torch.cuda.graph],
    "column": [data.IdColumn, data.DenseColumn],
    "convert": [data.ParquetDataset],
    "data_parallel_wrapper": [DistributedModelParallel],
    "data_type": [EmbeddingBagConfig],
    "device": [data.DataLoader, DistributedModelParallel],
    "drop_remainder": [data.ParquetDataset],
    "factory": [package.export_for_serving],
    "fill": [data.IdColumn, data.DenseColumn],
    "hash_stack_rounds": [SlotConfig],
    "header": [data.CsvDataset],
    "ids": [_SHARDER.load_weights],
    "ids_on_host": [data.DataLoader],
    "increments_dir": [package.EmbeddingCluster.local],
    "is_text": [data.IdColumn],
    "is_weighted": [data.IdColumn],
    "keeps_metadata": [package.TableSettings],
    "memory_dir": [
        jobs.train,
        jobs.train_torchrec,
        launcher.EmbeddingParameterServer,
    ],
    "mixed_precision": [TrainCtx],
    "model": [TrainCtx],
    "namespace": [_SHARDER, package.remote_sharders],
    "num_parallel_reads": [data.ParquetDataset],
    "num_parts": [package.accumulate],
    "num_workers": [data.DataLoader],
    "on_change": [package.load_checkpoint, package.recoverable, TrainCtx],
    "on_other_batches": [package.recoverable, TrainCtx],
    "optimizer": [_SHARDER],
    "optimizer_engine": [package.EmbeddingCluster.local],
    "partition_count": [data.ParquetDataset],
    "rename": [package.load_checkpoint, package.recoverable, TrainCtx],
    "requires_grad": [PersiaBatch],
    "restarts": [package.EmbeddingCluster.local],
    "sharders": [DistributedModelParallel, package.save_checkpoint],
    "shared": [_SHARDER, package.remote_sharders],
    "shared_rows": [package.TableSettings],
    "sparse": [torch.nn.Embedding],
    "staleness": [_SHARDER],
    "static_graph": [DistributedDataParallel],
    "update": [_SHARDER],
    "vectorwise_shared": [package.Adagrad],
    "weights": [package.EmbeddingClient.write],
    "wire_dtype": [_SHARDER],
    "with_jit_model": [TrainCtx.dump_checkpoint],
}
"""Where an argument that errors name, before ``=``, is given: in each of these."""


def flags_of(kinds):
    known = set()
    for kind in kinds:
        parser = argparse.ArgumentParser()
        add_flags(parser, kind)
        known.update(parser._option_string_actions)
    return known


def flags_of_launchers():
    text = "".join(
        (ROOT / module.__file__).read_text() for module in (launcher, k8s_utils, jobs)
    )
    for path in (PACKAGE / "launch/roles.py", *(PACKAGE / "command").glob("*.py")):
        text += path.read_text()
    arguments = set(re.findall(r"^\s+(\w+): ", text, re.MULTILINE))
    names = arguments | {word.replace("_", "-") for word in arguments}
    return {f"--{name}" for name in names} | set(re.findall(r'"(--[a-z-]+)"', text))


@functools.cache
def texts_of_errors():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file, text = path.relative_to(PACKAGE).as_posix(), path.read_text()
        for node in ast.walk(ast.parse(text if "--" in text else "")):
            if isinstance(node, ast.Raise):
                texts = [
                    one.value
                    for one in ast.walk(node)
                    if isinstance(one, ast.Constant) and isinstance(one.value, str)
                ]
                found.append((file, "".join(texts)))
    return found


def named_flags():
    for file, text in texts_of_errors():
        for flag in re.findall(r"--[a-z][a-z_-]+", text):
            yield file, flag


def named_arguments():
    for _, text in texts_of_errors():
        without_values = re.sub(r"Received: .*?(?=\. [A-Z]|$)", "", text)
        yield from re.findall(r"(?<![\w.%-])([a-z_]+)=(?![=%])", without_values)


NAMED = sorted(set(named_flags()))


@pytest.mark.parametrize(("file", "flag"), NAMED)
def test_an_error_names_options_of_its_own_program(file, flag):
    rooms = [name for name in PROGRAMS if file == name or file.startswith(f"{name}/")]
    known = flags_of_launchers()
    for room in rooms:
        known |= flags_of(PROGRAMS[room])
    assert flag in known | ELSEWHERE


@pytest.mark.parametrize("name", sorted(set(named_arguments())))
def test_an_error_names_arguments_that_there_are(name):
    assert name in PLACES, "in which call is it given?"
    for place in PLACES[name]:
        assert name in inspect.signature(place).parameters, place


def test_there_are_such_errors():
    assert len(NAMED) > 10
    assert "--no-such-flag" not in flags_of_launchers()
