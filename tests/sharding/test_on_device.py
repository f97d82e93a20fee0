"""Rows come to the model's device and gradients leave it; nothing waits in between."""

import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingEnv2D
from torchrec.streamable import Pipelineable

from persia_torchrec import (
    SGD,
    HostKeyedJaggedTensor,
    MixedSharder,
    Placement,
    RemoteEmbeddingBagCollectionSharder,
    RemoteEmbeddingCollectionSharder,
    accumulate,
)
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.device.batches import JaggedBatch
from persia_torchrec.errors import ConfigError
from persia_torchrec.persia.data_parallel import average_as_bytes
from persia_torchrec.sharding.mixed import MixedCollection
from persia_torchrec.sharding.on_device import DeviceBatch, GradientCopy
from tests.support.places import CPU, CUDA, GPU_PLACES, ON_GPU, PLACES
from tests.support.remote_job import META, Bags, kjt_of, remote_modules
from tests.support.servers import DEADLINE_S

DIM = 4
IDS = {"ad": [[1], [2, 2], []], "query": [[3, 1], [], [2]]}
BAG_TABLES = [
    EmbeddingBagConfig(10, DIM, name="term", feature_names=["ad", "query"]),
    EmbeddingBagConfig(10, DIM, name="user", feature_names=["ad"]),
]


def ids_on(place, bags=IDS):
    return kjt_of(bags).to(place)


def put(job, device, model=None, **settings):
    model = Bags(BAG_TABLES) if model is None else model
    sharder = RemoteEmbeddingBagCollectionSharder(job.client, SGD(1.0), **settings)
    return job.shard(model, [sharder], device=device), sharder


@pytest.mark.parametrize(("device", "place"), PLACES)
def test_all_of_a_sequence_is_where_its_rows_are(job, device, place):
    config = EmbeddingConfig(10, DIM, name="term", feature_names=["ad", "query"])
    model = EmbeddingCollection(tables=[config], device=META, need_indices=True)
    sharder = RemoteEmbeddingCollectionSharder(job.client, SGD(1.0))
    model = job.shard(nn.Sequential(model), [sharder], device=device)
    for key, feature in model(ids_on(place)).items():
        parts = feature.values(), feature.weights(), feature.lengths()
        offsets = feature.offsets_or_none()  # no kernel of fbgemm has to compute them
        assert {part.device for part in (*parts, offsets)} == {feature.values().device}
        assert feature.values().device.type == device.type
        bags = IDS[key]
        assert feature.weights().tolist() == [i for bag in bags for i in bag]
        assert feature.lengths().tolist() == [len(bag) for bag in bags]
        assert offsets.tolist() == [0, *np.cumsum([len(bag) for bag in bags])]


@pytest.mark.parametrize(("device", "place"), PLACES)
def test_a_batch_that_is_changed_before_its_output_is_used_does_no_harm(
    job, device, place
):
    bags = EmbeddingBagCollection(tables=BAG_TABLES, is_weighted=True, device=META)
    model, _ = put(job, device, nn.Sequential(bags))

    def weighted():
        ids = kjt_of(IDS)
        weights = torch.arange(1.0, 7.0)
        return KeyedJaggedTensor(
            ids.keys(), ids.values(), weights, lengths=ids.lengths()
        ).to(place)

    expected = model(weighted()).values()
    expected.sum().backward()  # SGD(1.0) of sums: rows move, as they do below
    expected = model(weighted()).values().detach()
    batch = weighted()
    output = model(batch)
    batch.values().fill_(9)
    batch.weights().fill_(100.0)
    batch.lengths().zero_()
    assert torch.equal(output.values().detach(), expected)


class Gate:
    """The way to the servers: gradients leave when a test opens it."""

    def __init__(self, model):
        (module,) = remote_modules(model)
        self._lookup = module.pipeline.lookup
        self.is_open = threading.Event()
        module.pipeline.lookup = self

    def push(self, batch, grads):
        assert self.is_open.wait(DEADLINE_S)
        return self._lookup.push(batch, grads)

    def __getattr__(self, name):
        return getattr(self._lookup, name)


class OverDense(nn.Module):
    """Embeddings, and a dense layer whose backward pass comes after theirs."""

    def __init__(self):
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=BAG_TABLES, device=META)
        self.below = nn.Linear(3, 3 * DIM)

    def forward(self, dense, ids):
        below = self.below(dense)
        return self.bags(ids).values() * torch.tanh(below)


def step_past_a_gate(job, device, place, scaler=None):
    """Take a step whose gradients may leave when the backward pass is almost over."""
    model, sharder = put(job, device, OverDense())
    if scaler is not None:
        scaler.scale(torch.ones((), device=device))
        sharder.use_grad_scaler(scaler)
    gate = Gate(model)
    weight = model.module.below.weight
    # Its gradient is computed after those of the embeddings have begun to leave.
    weight.register_post_accumulate_grad_hook(lambda _: gate.is_open.set())
    dense = torch.ones(3, 3, device=device)
    model(dense, ids_on(place)).sum().backward()
    assert gate.is_open.is_set()
    assert job.total("requests_update") == 2  # staleness 0: both servers have it


@pytest.mark.parametrize(("device", "place"), PLACES)
def test_gradients_are_checked_at_the_end_of_a_backward_pass(job, device, place):
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0)
    step_past_a_gate(job, device, place, scaler)


@pytest.mark.parametrize(("device", "place"), GPU_PLACES)
def test_on_a_gpu_the_servers_are_waited_for_at_the_end_too(job, device, place):
    step_past_a_gate(job, device, place)


@pytest.mark.parametrize(("device", "place"), PLACES)
def test_rows_leave_the_device_with_the_graph(job, device, place):
    model, _ = put(job, device, staleness=8)
    gate = Gate(model)
    (module,) = remote_modules(model)
    batch = module.start(ids_on(place), is_training=True)
    pooled = module(batch).values()
    rows = [weakref.ref(rows) for rows in batch.outputs.rows]
    pooled.sum().backward()
    del batch, pooled
    gc.collect()
    # Although no server has acknowledged.
    assert [row() for row in rows] == [None] * len(rows) != []
    assert job.total("requests_update") == 0
    gate.is_open.set()
    module.pipeline.flush()
    assert job.total("requests_update") == 2


def test_batches_that_are_pulled_at_once_are_each_updated_once(job, monkeypatch):
    monkeypatch.setattr(RemoteEmbeddingBagCollectionSharder, "PULLS_ON", {"cpu": 3})
    table = EmbeddingBagConfig(10, DIM, name="term", feature_names=["ad"])
    model, sharder = put(job, CPU, Bags([table]), staleness=4)
    (module,) = remote_modules(model)
    lookup, together = module.pipeline.lookup, threading.Barrier(3)
    route = lookup.route

    def route_at_once(*args):
        together.wait(DEADLINE_S)  # raises unless three are pulled at once
        return route(*args)

    monkeypatch.setattr(lookup, "route", route_at_once)
    rows = []
    for step in range(20):
        ids = kjt_of({"ad": [[1, 2], [2]]})
        for batch in [module.start(ids, is_training=True) for _ in range(3)]:
            module(batch).values().sum().backward()
        if step in (0, 19):
            sharder.flush()
            rows.append(job.read("term", [1, 2])[:, :DIM])
    moved = rows[1] - rows[0]  # by SGD(1.0), in 57 batches
    np.testing.assert_allclose(moved, [[-57] * DIM, [-114] * DIM], atol=1e-3)


@pytest.mark.parametrize(("device", "place"), PLACES)
def test_a_backward_pass_that_fails_leaves_no_batch_behind(job, device, place):
    model, sharder = put(job, device, OverDense())
    sharder.use_grad_scaler(torch.amp.GradScaler("cpu", init_scale=2.0))

    def fail(grad):
        raise ArithmeticError("of a hook")

    def step(hook=None):
        output = model(torch.ones(3, 3, device=device), ids_on(place))
        handle = hook and model.module.below.weight.register_hook(hook)
        output.sum().backward()
        return handle and handle.remove()

    with pytest.raises(ArithmeticError) as caught:
        step(fail)
    del caught  # and with it the frames, and the graph in them
    gc.collect()
    model.module.below.weight._backward_hooks.clear()
    step()  # at staleness 0 it would wait for the first one's permit
    assert job.total("open_batches") == 0


@pytest.mark.parametrize("check", [True, False])
def test_gradients_of_the_cpu_are_on_the_host(check):
    grads = [torch.arange(6.0).view(2, 3).t(), torch.zeros(0, 4)]
    leaving = GradientCopy(grads, None, check=check)
    assert leaving.is_finite()
    for array, grad in zip(leaving.wait(), grads, strict=True):
        assert np.array_equal(array, grad.numpy())
    spoilt = GradientCopy([*grads, torch.tensor([0.0, np.nan])], None, check=check)
    assert spoilt.is_finite() is not check


@pytest.mark.parametrize(
    "device", [CPU, pytest.param(CUDA, marks=ON_GPU, id="on a GPU")]
)
def test_gradients_of_rows_are_copied_to_where_they_are_sent_from(device):
    grads = [torch.randn(6, 2), torch.randn(3, 5).t()]
    stream = torch.cuda.Stream(device) if device == CUDA else None
    rows = (torch.empty(0, device=device),)
    pulled = DeviceBatch(None, rows, (), each_id=False, came=None)
    given = [grad.to(device) for grad in grads]
    late = GradientCopy(given, stream, check=True, of=pulled).wait()
    assert late.shapes == [(6, 2), (5, 3)]
    for pieces in ([slice(2, 5), slice(0, 2)], [slice(0, 0), slice(5, 5)]):
        parts = [
            grad[piece].flatten() for grad, piece in zip(grads, pieces, strict=True)
        ]
        expected = torch.cat(parts).numpy()
        frame = late.part(pieces)
        out = np.full(len(frame), 9, dtype=np.uint8)
        frame.write(out)
        np.testing.assert_array_equal(out.view(np.float32), expected)
        assert frame.whole() == out.data
    for array, grad in zip(late.arrays(), grads, strict=True):
        np.testing.assert_array_equal(array, grad.numpy())


@pytest.mark.parametrize(("device", "place"), PLACES)
def test_parts_of_an_update_of_rows_on_a_device_are_added_up(job, device, place):
    table = EmbeddingBagConfig(10, DIM, name="parts", feature_names=["ad"])
    model, sharder = put(job, device, Bags([table]), staleness=2)
    ids = kjt_of({"ad": [[1, 2], [2]]}).to(place)
    model(ids).values().sum().backward()
    sharder.flush()
    before = job.read("parts", [1, 2])[:, :DIM]
    with accumulate(sharder, 2):
        for _ in range(6):
            model(ids).values().sum().backward()
    sharder.flush()
    moved = job.read("parts", [1, 2])[:, :DIM] - before  # by SGD(1.0)
    np.testing.assert_allclose(moved, [[-6] * DIM, [-12] * DIM], atol=1e-4)
    assert job.client.step("parts") == 1 + 3


@pytest.mark.parametrize(("device", "place"), GPU_PLACES)
@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_step_on_a_gpu_waits_for_nothing(job, device, place, is_scaled):
    """But for the ids that are there, as torch itself would tell."""
    model, sharder = put(job, device, OverDense(), staleness=8)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0, enabled=is_scaled)
    scaler.scale(torch.ones((), device=device))
    sharder.use_grad_scaler(scaler)
    dense = torch.ones(3, 3, device=device)
    for _ in range(3):  # makes buffers, and DDP's anew; learns sizes
        model(dense, ids_on(place)).sum().backward()
    loss = model(dense, ids_on(place)).sum()
    torch.cuda.set_sync_debug_mode("error")
    try:
        scaler.scale(loss).backward()
        if place == CPU:
            model(dense, ids_on(place)).sum()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    sharder.flush()


@pytest.mark.parametrize(("device", "place"), GPU_PLACES)
def test_the_thread_that_waits_for_a_gpu_sleeps(job, device, place):
    spent = []

    class Timed(Gate):
        def push(self, batch, grads):
            spent.append(time.thread_time())
            return self._lookup.push(batch, grads)

    model, sharder = put(job, device, staleness=1)
    Timed(model)
    for _ in range(3):
        output = model(ids_on(place)).values().sum()
        torch.cuda._sleep(2 * 10**9)  # cycles: about a second
        output.backward()
        sharder.flush()
    assert spent[-1] - spent[-2] < 0.3  # of the processor, where a spinning wait has 1


@pytest.mark.parametrize(("device", "place"), GPU_PLACES)
def test_the_memory_of_a_gpu_does_not_grow_in_1000_steps(job, device, place):
    table = EmbeddingBagConfig(10**6, 64, name="term", feature_names=["ad"])
    model, sharder = put(job, device, Bags([table]), staleness=8)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((2048,), 4, dtype=torch.int32)
    reserved = []
    for _ in range(1000):
        ids = torch.randint(50_000, (4 * 2048,), generator=generator)
        batch = KeyedJaggedTensor(["ad"], ids, lengths=lengths).to(place)
        model(batch).values().square().mean().backward()
        reserved.append(torch.cuda.memory_reserved())
    sharder.flush()
    # A batch has 2 MiB of rows, of which 900 would be left behind.
    assert reserved[-1] <= max(reserved[:100]) + 64 * 2**20


class Batch(Pipelineable):
    """A batch as users write it: it moves whatever it has."""

    def __init__(self, dense, ids):
        self.dense, self.ids = dense, ids

    def to(self, device, non_blocking=False):
        dense = self.dense.to(device, non_blocking=non_blocking)
        return Batch(dense, self.ids.to(device, non_blocking=non_blocking))

    def record_stream(self, stream):
        self.ids.record_stream(stream)
        if self.dense.is_cuda:
            self.dense.record_stream(stream)

    def pin_memory(self):
        return Batch(self.dense.pin_memory(), self.ids.pin_memory())


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = OverDense()

    def forward(self, batch):
        loss = self.model(batch.dense, batch.ids).square().mean()
        return loss, (loss.detach(), batch.ids)


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize(
    "device", [CPU, pytest.param(CUDA, marks=ON_GPU, id="on a GPU")]
)
def test_a_pipeline_leaves_ids_on_the_host_that_are_to_stay(job, device, stays):
    def batches():
        generator = torch.Generator().manual_seed(0)
        for _ in range(6):
            ids = kjt_of(IDS)
            ids = HostKeyedJaggedTensor.of(ids) if stays else ids
            yield Batch(torch.randn(3, 3, generator=generator), ids)

    torch.manual_seed(0)
    model, sharder = put(job, device, WithLoss(), staleness=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    data, losses = batches(), []
    for _ in range(6):
        loss, ids = pipeline.progress(data)
        losses.append(loss.item())
        place = CPU if stays else device
        assert ids.values().device.type == place.type
        assert isinstance(ids, HostKeyedJaggedTensor) is stays
    sharder.flush()
    assert losses[-1] < losses[0]


def test_the_remote_half_of_a_mixed_collection_reports_which_stream_uses_its_batch(
    job, monkeypatch
):
    """As ids and weights may have been copied on another one."""
    used = []
    monkeypatch.setattr(JaggedBatch, "record_stream", lambda _, s: used.append(s))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "compute")
    remote = RemoteEmbeddingBagCollectionSharder(job.client, SGD(1.0))
    placement = Placement(remote=["term"], local=["user"])
    model = job.shard(Bags(BAG_TABLES), [MixedSharder(remote, placement)])
    (module,) = [m for m in model.modules() if isinstance(m, MixedCollection)]
    module.remote._leaving = object()  # that there is a GPU
    with torch.no_grad():
        model(kjt_of(IDS)).values()
    assert used == ["compute"]


def test_a_pulling_thread_makes_the_gpu_of_the_trainer_its_own(job, monkeypatch):
    model, _ = put(job, CPU)
    (module,) = remote_modules(model)
    lookup, seen = module.pipeline.lookup, []
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: seen.append(d))
    begin_pull = EmbeddingClient.begin_pull

    def noted(self, *given):
        seen.append(threading.current_thread().name)
        lookup._device = CPU
        return begin_pull(self, *given)

    monkeypatch.setattr(EmbeddingClient, "begin_pull", noted)
    lookup._device = torch.device("cuda", 1)
    model(kjt_of(IDS)).values()
    assert seen == [torch.device("cuda", 1), "training pulls 0"]


def test_a_batch_that_stays_is_the_same_batch(job):
    ids, weights = kjt_of(IDS), torch.arange(6, dtype=torch.float64)
    kjt = KeyedJaggedTensor(ids.keys(), ids.values(), weights, lengths=ids.lengths())
    host = HostKeyedJaggedTensor.of(kjt)
    for moved in (host, host.to(META), host.pin_memory(), host.to(META, True)):
        assert moved is host
    host.record_stream(None)
    assert host.to(META, dtype=torch.float32).weights().dtype == torch.float32
    assert host.keys() == kjt.keys()
    assert host.values() is kjt.values()
    assert host["query"].to_dense_weights()[0].tolist() == [3.0, 4.0]


def test_two_dimensional_parallelism_is_rejected(job):
    sharder = RemoteEmbeddingBagCollectionSharder(job.client, SGD(1.0))
    env = ShardingEnv2D.__new__(ShardingEnv2D)
    with pytest.raises(ConfigError, match="one copy, which all trainers share"):
        sharder.put_on_servers(Bags(BAG_TABLES).bags, env, CPU)


def test_a_gpu_must_be_the_current_one(job, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    sharder = RemoteEmbeddingBagCollectionSharder(job.client, SGD(1.0))
    env = ShardingEnv.from_local(1, 0)
    with pytest.raises(ConfigError, match=r"Received: cuda:1, and cuda:0 is current"):
        sharder.put_on_servers(Bags(BAG_TABLES).bags, env, torch.device("cuda", 1))


def test_rows_are_no_part_of_a_cuda_graph(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    batch = DeviceBatch(None, (), (), (), came=object())
    must = r"looked up outside of a CUDA graph.*while the current stream is captured"
    with pytest.raises(ConfigError, match=must):
        batch.wait()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_wait_for_coded_gradients_includes_their_stream():
    torch.cuda.set_device(CUDA)
    store = dist.HashStore()
    dist.init_process_group("nccl", rank=0, world_size=1, store=store)
    try:
        torch.manual_seed(0)
        plain = nn.Linear(512, 512).to(CUDA)
        coded = DistributedDataParallel(nn.Linear(512, 512).to(CUDA), device_ids=[0])
        coded.module.load_state_dict(plain.state_dict())
        coded.register_comm_hook(dist.group.WORLD, average_as_bytes)
        inputs = torch.randn(64, 512, device=CUDA)
        for _ in range(20):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10**6)
                coded.zero_grad()
                coded(inputs).square().sum().backward()
            torch.cuda.current_stream().wait_stream(stream)
            plain.zero_grad()
            plain(inputs).square().sum().backward()
            gradient = plain.weight.grad
            step = (gradient.max() - gradient.min()) / 255
            assert (coded.module.weight.grad - gradient).abs().max() <= 1.1 * step
    finally:
        dist.destroy_process_group()
