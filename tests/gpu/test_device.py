"""What only a GPU can show: that it lags, is captured, and is the trainer's alone.

And that it pools as the loops of the host do; the same comparison runs on the CPU too.
"""

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

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
from persia_torchrec.lookup.bags import POOLINGS, Bags, FeatureSpec, JaggedIds
from persia_torchrec.lookup.sharded_lookup import SequenceLookup, ShardedLookup
from persia_torchrec.rpc.messages import Precision
from persia_torchrec.sharding.on_device import RowsOnDevice
from persia_torchrec.table import TableSpec
from tests.support import remote_job
from tests.support.places import CPU, CUDA, ON_GPU
from tests.support.remote_job import META, RemoteJob, remote_modules
from tests.support.servers import DEADLINE_S


def needs_gpu(test):
    """Run a test on a GPU only."""
    for mark in ON_GPU:
        test = mark(test)
    return test


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


@needs_gpu
def test_memory_is_not_used_again_while_a_gpu_that_lags_reads_it(job):
    assert wrong_batches(job, CUDA) == []


@needs_gpu
@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_a_dense_graph_is_captured_while_rows_are_pulled(job, mode):
    sharder = RemoteEmbeddingBagCollectionSharder(job.client, SGD(0.0), staleness=8)
    model = job.shard(remote_job.Bags(tables(dim=64)), [sharder], device=CUDA)
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


@needs_gpu
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


TABLE_DIMS = {"term": 4, "user": 8, "shop": 4}
COLUMNS = {"ad": ("ad", "term"), "user": ("user", "user")}
COLUMNS |= {"query": ("query", "term"), "shop of ad": ("ad", "shop")}
"""By feature: the key of its ids, and its table."""

NUM_IDS = 40


class Results(NamedTuple):
    """What a batch gave: pooled rows by feature, and gradients of rows and weights."""

    outputs: list[np.ndarray]
    of_rows: list[np.ndarray]
    of_weights: np.ndarray | None = None


def random_batch(rng):
    """Return ids of which one comes in most bags, and of which some bags have none."""
    bags = {}
    for key in ("ad", "user", "query"):
        lengths = rng.integers(0, 4, 200).astype(np.int32)
        ids = rng.integers(NUM_IDS, size=lengths.sum()).astype(np.uint64)
        ids[rng.random(len(ids)) < 0.5] = 7
        bags[key] = Bags(ids, lengths)
    return JaggedIds.of(bags)


def bags_of_ids(batch, feature):
    """Return the bag of each id of a feature, and the ids' range in the batch."""
    key = batch.plan.columns.keys[feature]
    lengths = batch.lengths[batch.bag_starts[key] : batch.bag_starts[key + 1]]
    start = batch.id_starts[key]
    bags_L = np.repeat(np.arange(len(lengths)), lengths)
    return bags_L, lengths, slice(start, start + len(bags_L))


def by_the_host(lookup, ids, grads):
    """Pool by the loops of the host."""
    outputs, batch = lookup.pull(ids, None)
    if not lookup.each_id:
        starts = np.cumsum([batch.dim_of(f) for f in range(len(grads))])[:-1]
        of_rows = lookup.row_gradients((np.concatenate(grads, axis=1),), batch)
        return Results(np.split(outputs[0], starts, axis=1), of_rows)
    return Results([*outputs], lookup.row_gradients(tuple(grads), batch))


def weighted_by_the_host(lookup, ids, grads, weights):
    """Pool means of weighted rows; the host's loops give the row of each id."""
    rows, batch = lookup.pull(ids, None)
    outputs, of_ids, of_weights = [], [], np.zeros(len(weights))
    for f, (rows_LD, grad_BD) in enumerate(zip(rows, grads, strict=True)):
        bags_L, lengths, chosen = bags_of_ids(batch, f)
        factors_L1 = (weights[chosen] / lengths[bags_L])[:, None]
        sums_BD = np.zeros(grad_BD.shape)
        np.add.at(sums_BD, bags_L, rows_LD * factors_L1)
        outputs.append(sums_BD)
        of_ids.append((grad_BD[bags_L] * factors_L1).astype(np.float32))
        of_weights[chosen] += (rows_LD * grad_BD[bags_L]).sum(1) / lengths[bags_L]
    return Results(outputs, lookup.row_gradients(tuple(of_ids), batch), of_weights)


def by_a_device(lookup, device, ids, grads, weights=None):
    """Pool by torch, on a device."""
    pulled, batch = lookup.pull(ids, None)
    if weights is not None:
        weights = torch.from_numpy(weights).to(device)
    pooled = pulled.pool(weights)
    across = 0 if lookup.each_id else 1
    outputs, given = [np.empty(0)] * len(grads), []
    for g, output in enumerate(pooled.outputs):
        chosen = [f for f, group in enumerate(batch.plan.group_of) if group == g]
        parts = output.split([grads[f].shape[across] for f in chosen], dim=across)
        for f, part in zip(chosen, parts, strict=True):
            outputs[f] = part.cpu().numpy()
        of_group = np.concatenate([grads[f] for f in chosen], axis=across)
        given.append(torch.from_numpy(of_group).to(device))
    of_rows = [grad.cpu().numpy() for grad in pulled.gradients(pooled, given)]
    if weights is None:
        return Results(outputs, of_rows)
    of_weights = pulled.weights_gradient(pooled, given, weights)
    return Results(outputs, of_rows, of_weights.cpu().numpy())


def require_same(found, right):
    """Compare by the largest value of each array."""
    pairs = [*zip(found.outputs, right.outputs, strict=True)]
    pairs += zip(found.of_rows, right.of_rows, strict=True)
    if right.of_weights is not None:
        pairs.append((found.of_weights, right.of_weights))
    for array, expected in pairs:
        atol = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(array, expected, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "device", [CPU, pytest.param(CUDA, marks=ON_GPU, id="on a GPU")]
)
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("way", [*POOLINGS, "weighted", "sequence"])
def test_a_device_pools_as_the_host_does(job, device, precision, way):
    rng = np.random.default_rng(7)
    specs = [
        TableSpec(name=name, dim=dim, optimizer=SGD(0.1))
        for name, dim in TABLE_DIMS.items()
    ]
    job.client.add_tables(specs)
    for spec in specs:
        rows = rng.standard_normal((NUM_IDS, spec.dim)).astype(np.float32)
        job.client.write(spec.name, np.arange(NUM_IDS, dtype=np.uint64), rows)
    pooling = way if way in POOLINGS else "mean"
    features = [
        FeatureSpec(name=name, key=key, table=table, pooling=pooling)
        for name, (key, table) in COLUMNS.items()
    ]
    ids, each_id = random_batch(rng), way == "sequence"
    sizes = [len(ids[f.key].ids if each_id else ids[f.key].lengths) for f in features]
    grads = [
        rng.standard_normal((size, TABLE_DIMS[f.table])).astype(np.float32)
        for size, f in zip(sizes, features, strict=True)
    ]
    on_device = RowsOnDevice(
        job.client,
        features,
        precision=precision,
        device=device,
        each_id=each_id,
        has_weights=way == "weighted",
    )
    if way == "weighted":
        weights = rng.standard_normal(len(ids.ids)).astype(np.float32)
        host = SequenceLookup(job.client, features, precision=precision)
        right = weighted_by_the_host(host, ids, grads, weights)
        require_same(by_a_device(on_device, device, ids, grads, weights), right)
        return
    kind = SequenceLookup if each_id else ShardedLookup
    right = by_the_host(kind(job.client, features, precision=precision), ids, grads)
    require_same(by_a_device(on_device, device, ids, grads), right)
