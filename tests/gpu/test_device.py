"""What only a GPU can show: that it lags, is captured, and is the trainer's alone."""

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.streamable import Pipelineable

from persia_torchrec import (
    SGD,
    EmbeddingClient,
    EmbeddingCluster,
    MixedSharder,
    Placement,
    RemoteEmbeddingBagCollectionSharder,
)
from tests.support.places import CUDA, ON_GPU
from tests.support.remote_job import META, Bags, RemoteJob, remote_modules
from tests.support.servers import DEADLINE_S

pytestmark = ON_GPU

DIM, NUM_SAMPLES, NUM_BATCHES = 4, 64, 200
LAG = 40_000_000  # cycles: some 20 ms
NUM_LAYERS = 1000


@pytest.fixture
def job():
    with RemoteJob(num_servers=1) as job:
        yield job


def tables(dim=DIM):
    return [
        EmbeddingBagConfig(10**4, dim, name=name, feature_names=[name])
        for name in ("remote", "local")
    ]


class Batch(Pipelineable):
    """A batch as users write it; the weights of its ids are all one number."""

    def __init__(self, ids, weight):
        self.ids, self.weight = ids, weight

    @classmethod
    def of(cls, weight):
        ids = torch.arange(1, NUM_SAMPLES + 1).repeat(2)
        lengths = torch.ones(len(ids), dtype=torch.int32)
        weights = torch.full((len(ids),), float(weight))
        keys = ["remote", "local"]
        return cls(KeyedJaggedTensor(keys, ids, weights, lengths=lengths), weight)

    def to(self, device, non_blocking=False):
        return Batch(self.ids.to(device, non_blocking=non_blocking), self.weight)

    def record_stream(self, stream):
        self.ids.record_stream(stream)

    def pin_memory(self):
        return Batch(self.ids.pin_memory(), self.weight)


class Lagging(nn.Module):
    """Pools weighted rows of ones on a GPU that is behind the host."""

    def __init__(self):
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=tables(), is_weighted=True, device=META
        )
        self.over = nn.Linear(1, 1)

    def forward(self, batch):
        if torch.cuda.is_available():
            torch.cuda._sleep(LAG)
        pooled = self.bags(batch.ids)
        ours = pooled.to_dict()["remote"]
        loss = 0 * (self.over(ours[:, :1]).sum() + pooled.values().sum())
        return loss, (ours.detach().clone(), batch.weight)


def wrong_batches(job, device):
    """Train ahead of the device; return batches that had another one's weights."""
    remote = RemoteEmbeddingBagCollectionSharder(job.client, SGD(0.0), staleness=8)
    placement = Placement(remote=["remote"], local=["local"])
    model = job.shard(Lagging(), [MixedSharder(remote, placement)], device=device)
    ids = np.arange(1, NUM_SAMPLES + 1, dtype=np.uint64)
    job.client.write("remote", ids, np.ones((NUM_SAMPLES, DIM), np.float32))
    dense = [
        parameter for name, parameter in model.named_parameters() if "over" in name
    ]
    optimizer = torch.optim.SGD(dense, 0.0)
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    batches = iter([Batch.of(weight) for weight in range(NUM_BATCHES)])
    if device.type == "cuda":
        batches = (batch.pin_memory() for batch in batches)
    outputs = [pipeline.progress(batches) for _ in range(NUM_BATCHES)]
    remote.flush()
    return [
        weight
        for pooled, weight in outputs
        if not (pooled.cpu() == float(weight)).all()
    ]


def test_memory_is_not_used_again_while_a_gpu_that_lags_reads_it(job):
    assert wrong_batches(job, CUDA) == []


@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_a_dense_graph_is_captured_while_rows_are_pulled(job, mode):
    sharder = RemoteEmbeddingBagCollectionSharder(job.client, SGD(0.0), staleness=8)
    model = job.shard(Bags(tables(dim=64)), [sharder], device=CUDA)
    (module,) = remote_modules(model)
    dense = nn.Linear(64, 64).to(CUDA)
    inputs = torch.randn(8, 64, device=CUDA)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # before it is captured
        dense(inputs)
    torch.cuda.synchronize()
    lengths = torch.ones(2 * 4000, dtype=torch.int32)

    def ids(first):
        values = torch.arange(first, first + 4000).repeat(2)
        return KeyedJaggedTensor(["remote", "local"], values, lengths=lengths)

    pulled = [module.start(ids(4000 * n), is_training=False) for n in range(6)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        for _ in range(NUM_LAYERS):
            output = dense(inputs)
    graph.replay()
    for batch in pulled:
        batch.wait(DEADLINE_S)
    torch.testing.assert_close(output, dense(inputs))


@pytest.mark.multiprocess
def test_no_server_opens_the_gpu():
    torch.zeros(1, device=CUDA)
    with EmbeddingCluster.local(2, 1000) as cluster:
        EmbeddingClient.connect(cluster.addresses).close()
        assert opened(os.getpid()) != []
        for process in cluster.processes:
            assert opened(process.pid) == []


def opened(pid):
    """Return the devices of NVIDIA's driver that a process has open."""
    files = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # of this loop itself
            files.append(str(path.readlink()))
    return [file for file in files if file.startswith("/dev/nvidia")]
