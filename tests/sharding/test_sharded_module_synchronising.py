"""No collection makes the trainer's thread wait for its device, forward or backward.

Each takes the way of a GPU, on the CPU, under a spy of operators.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from persia_torchrec import (
    SGD,
    MixedSharder,
    MultiHashEmbeddingBagCollection,
    Placement,
    RemoteEmbeddingBagCollectionSharder,
    RemoteEmbeddingBagSharder,
    remote_sharders,
)
from persia_torchrec.data import DataLoader
from persia_torchrec.device.transfer import Staging
from persia_torchrec.persia.batch import IDTypeFeature, Label, PersiaBatch
from persia_torchrec.persia.slots import SlotsLookup, build_features
from persia_torchrec.persia.slots_reader import SlotsReader
from tests.support.local_job import Batches, LocalJob
from tests.support.places import CPU
from tests.support.remote_job import META, kjt_of
from tests.support.servers import ids_of
from tests.support.synchronising import Spy

pytestmark = pytest.mark.slow

IDS = kjt_of({"ad": [[1], [2, 2], []], "query": [[3, 1], [], [2]]})


@pytest.fixture(autouse=True)
def _the_way_of_a_gpu(monkeypatch):
    monkeypatch.setattr(Staging, "DEVICES", {"cpu"})


def bag_tables(pooling=PoolingType.SUM):
    return [
        EmbeddingBagConfig(
            *(100, 4), name="term", feature_names=["ad", "query"], pooling=pooling
        ),
        EmbeddingBagConfig(100, 8, name="user", feature_names=["ad"]),
    ]


def bags(**settings):
    return EmbeddingBagCollection(tables=bag_tables(), device=META, **settings)


def mean_bags():
    return EmbeddingBagCollection(tables=bag_tables(PoolingType.MEAN), device=META)


def sequences(**settings):
    tables = [
        EmbeddingConfig(100, 4, name="term", feature_names=["ad", "query"]),
        EmbeddingConfig(100, 4, name="user", feature_names=["ad"]),
    ]
    return EmbeddingCollection(tables=tables, device=META, **settings)


def processed_bags():
    processors = PositionWeightedModuleCollection({"ad": 4, "query": 4}, device=META)
    return FeatureProcessedEmbeddingBagCollection(bags(is_weighted=True), processors)


def multi_hash(combine, pooling):
    def make():
        tables = bag_tables(pooling)
        return MultiHashEmbeddingBagCollection(tables, combine, device=META)

    return make


def weighted():
    weights = torch.arange(1.0, 7.0, requires_grad=True)
    ids = IDS.keys(), IDS.values(), weights
    return KeyedJaggedTensor(*ids, lengths=IDS.lengths())


def variable():
    """Two kept samples of one feature and three of another, for four samples."""
    return KeyedJaggedTensor(
        ["ad", "query"],
        torch.tensor([1, 2, 2, 3, 1, 2]),
        lengths=torch.tensor([1, 2, 2, 0, 1], dtype=torch.int32),
        stride_per_key_per_rank=[[2], [3]],
        inverse_indices=(["ad", "query"], torch.tensor([[0, 1, 1, 0], [0, 1, 2, 2]])),
    )


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    ids: Callable[[], KeyedJaggedTensor] = lambda: IDS
    local: tuple[str, ...] = ()


CASES = {
    "bags": Case(bags),
    "mean bags": Case(mean_bags),
    "weighted bags": Case(lambda: bags(is_weighted=True), weighted),
    "variable bags": Case(bags, variable),
    "processed bags": Case(processed_bags, weighted),
    "sequences": Case(sequences),
    "sequences with indices": Case(lambda: sequences(need_indices=True)),
    "mixed bags": Case(bags, local=("user",)),
    "multi-hash, added": Case(multi_hash("add", PoolingType.SUM)),
    "multi-hash, joined": Case(multi_hash("concat", PoolingType.MEAN)),
    "multi-hash, multiplied": Case(multi_hash("mul", PoolingType.MEAN)),
}


def total(output):
    """Return the sum of all embeddings of an output."""
    found = output.values()
    if isinstance(found, torch.Tensor):
        return found.sum()
    return sum(feature.values().sum() for feature in found)


def sharders_of(job, case):
    if case.local:
        remote = RemoteEmbeddingBagCollectionSharder(job.client, SGD(1.0), staleness=4)
        placement = Placement(remote=["term"], local=case.local)
        return [MixedSharder(remote, placement, EmbeddingBagCollectionSharder())]
    return remote_sharders(job.client, SGD(1.0), staleness=4)


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_collection_waits_for_no_device(job, case, is_scaled):
    sharders = sharders_of(job, case)
    model = job.shard(nn.Sequential(case.make()), sharders)
    if is_scaled:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for sharder in sharders:
            getattr(sharder, "use_grad_scaler", lambda _: None)(scaler)
    total(model(case.ids())).backward()  # learns sizes
    ids = case.ids()
    with Spy() as spy:
        total(model(ids)).backward()
    assert spy.num_operators > 10
    assert spy.found == []


@pytest.mark.parametrize("num_offsets", [3, 4])
def test_an_embedding_bag_waits_for_no_device(job, num_offsets):
    sharder = RemoteEmbeddingBagCollectionSharder(job.client, SGD(1.0), staleness=4)
    bag = nn.Sequential(nn.EmbeddingBag(100, 4, mode="sum", device=META))
    model = job.shard(bag, [RemoteEmbeddingBagSharder(sharder)]).module[0]
    ids, offsets = torch.tensor([3, 1, 1, 7]), torch.tensor([0, 2, 2, 4])[:num_offsets]
    (model(ids, offsets) + 0).sum().backward()
    with Spy() as spy:
        output = model(ids, offsets) + 0
        output.sum().backward()
    assert output.shape == (3, 4)
    assert spy.num_operators > 10
    assert spy.found == []
    sharder.close()


SLOTS = """
feature_index_prefix_bit: 8
slots_config:
  a: {dim: 4, sqrt_scaling: true}
  raw: {dim: 3, embedding_summation: false, sample_fixed_size: 2}
"""


class OverSlots(nn.Module):
    def __init__(self):
        super().__init__()
        self.over = nn.Linear(4 + 2 * 4, 1)

    def forward(self, non_id_tensors, embeddings):
        return self.over(torch.cat([e.flatten(1) for e in embeddings], dim=1))


def test_a_reader_of_slots_waits_for_no_device(tmp_path, monkeypatch):
    monkeypatch.setattr(Staging, "DEVICES", {META.type})
    samples = [ids_of(1, 2), ids_of(3)]
    batch = PersiaBatch(
        [IDTypeFeature(name, samples) for name in ("raw", "a")], requires_grad=False
    )
    with (
        LocalJob(tmp_path, monkeypatch, SLOTS) as job,
        job.train_ctx(OverSlots()),  # it adds the tables
    ):
        job.client.learn_tables()
        lookup = SlotsLookup(job.client, build_features(job.schema))
        reader = SlotsReader(lookup, META)
        pulled = reader.look_up(batch)
        with Spy() as spy:
            tensors = reader.to_tensors(pulled)
        reader.close()
    assert [tuple(tensor.shape) for tensor in tensors.values()] == [(2, 2, 4), (2, 4)]
    assert {tensor.device for tensor in tensors.values()} == {META}
    assert spy.num_operators > 4
    assert spy.found == []


def asked_by_torch(stack):
    """Whether ``GradScaler.step`` asks if it may step, as with any optimizer."""
    return "grad_scaler.py:_maybe_opt_step" in stack


@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_trainer_of_persias_waits_for_no_device(tmp_path, monkeypatch, is_scaled):
    samples = [ids_of(1, 2), ids_of(3)]
    slots = [IDTypeFeature(name, samples) for name in ("raw", "a")]
    labels = [Label(np.zeros((2, 1), dtype=np.float32))]
    batch = PersiaBatch(slots, labels=labels)
    with (
        LocalJob(tmp_path, monkeypatch, SLOTS) as job,
        job.train_ctx(OverSlots()) as ctx,
    ):
        if is_scaled:
            ctx._scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        found = []
        for data in DataLoader(Batches([batch] * 3)):
            with Spy(asked_by_torch) as spy:
                output, _ = ctx.forward(data)
                ctx.backward(output.sum())
            found += spy.found
        assert found == []
        assert np.isfinite(job.read("a", 1)).all()


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 1).any()),
        lambda x: x[x > 1],
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 1),
        lambda x: x.unique(),
        lambda x: x.repeat_interleave(torch.tensor([1, 2])),
    ],
)
def test_the_spy_finds_what_reads_a_device(operation):
    with Spy() as spy:
        operation(torch.tensor([1.0, 2.0], device=CPU))
    assert len(spy.found) == 1


def test_the_spy_finds_what_goes_to_a_device_from_pageable_memory():
    with Spy() as spy:
        torch.tensor([1.0]).to(META, non_blocking=True)
    assert len(spy.found) == 1


def test_the_spy_leaves_alone_what_reads_none():
    x = torch.tensor([1.0, 2.0])
    with Spy() as spy:
        x[torch.tensor([0, 1])]
        x.repeat_interleave(torch.tensor([1, 2]), output_size=3)
        torch.where(x > 1, x, 0.0).to(torch.float64)
    assert spy.num_operators > 4
    assert spy.found == []
