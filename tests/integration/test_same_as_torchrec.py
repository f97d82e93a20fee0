"""The golden test: a model on the servers trains as it does on plain TorchRec.

Both start from the same rows and the same dense weights and see the same batches; the
embedding optimizer is the servers' in one and fbgemm's fused one in the other.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

from persia_torchrec import SGD, Adagrad, RemoteEmbeddingBagCollectionSharder
from tests.integration.twins import Twins, WithLoss
from tests.places import GPU_PLACES
from tests.sharding.remote_job import CPU, META, RemoteJob
from tests.sharding.two_trainers import Case

NUM_IDS = 40
NUM_SAMPLES = 32
NUM_STEPS = 200
LR = 0.2
FEATURES = {"ad": 16, "query": 16, "user": 8, "place": 4}


SGD_CASE = Case(SGD(4.0), EmbOptimType.EXACT_SGD, {"learning_rate": 4.0})
ADAGRAD = {"learning_rate": 0.05, "eps": 1e-8}
ADAGRAD_CASE = Case(
    Adagrad(lr=0.05, initial_accumulator_value=0, eps=1e-8),
    EmbOptimType.EXACT_ADAGRAD,
    ADAGRAD,
)
ROWWISE_CASE = Case(
    Adagrad(lr=0.05, initial_accumulator_value=0, eps=1e-8, vectorwise_shared=True),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    ADAGRAD,
)
CASES = [
    pytest.param(SGD_CASE, id="SGD"),
    pytest.param(ADAGRAD_CASE, id="Adagrad"),
    pytest.param(ROWWISE_CASE, id="rowwise Adagrad"),
]


def tables():
    return [
        EmbeddingBagConfig(NUM_IDS, 16, name="term", feature_names=["ad", "query"]),
        EmbeddingBagConfig(NUM_IDS, 8, name="user", feature_names=["user"]),
        EmbeddingBagConfig(
            NUM_IDS,
            *(4,),
            name="place",
            feature_names=["place"],
            pooling=PoolingType.MEAN,
        ),
    ]


class Dlrm(nn.Module):
    """Dense features and projected embeddings, and all their dot products."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection(tables=tables(), device=META)
        self.bottom = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8))
        self.project = nn.ModuleDict(
            {key: nn.Linear(dim, 8, bias=False) for key, dim in FEATURES.items()}
        )
        self.over = nn.Sequential(nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense, ids):
        bottom = self.bottom(dense)
        pooled = self.embeddings(ids)
        projected = [self.project[key](pooled[key]) for key in FEATURES]
        vectors = torch.stack([bottom, *projected], dim=1)
        row, column = torch.triu_indices(5, 5, offset=1)
        dots = (vectors @ vectors.transpose(1, 2))[:, row, column]
        return self.over(torch.cat([bottom, dots], dim=1)).squeeze(1)


@dataclass(frozen=True)
class Batch:
    dense: torch.Tensor
    ids: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device):
        return Batch(self.dense.to(device), self.ids.to(device), self.labels.to(device))


def make_batch(generator):
    """Bags of 0 to 4 ids, the small ones often; ids and dense tell the label."""
    num_bags = len(FEATURES) * NUM_SAMPLES
    lengths = torch.randint(5, (num_bags,), generator=generator)
    ids = (torch.rand(int(lengths.sum()), generator=generator) ** 2 * NUM_IDS).long()
    dense = torch.randn(NUM_SAMPLES, 3, generator=generator)
    bag_of_id = torch.arange(num_bags).repeat_interleave(lengths)
    scores = torch.zeros(num_bags).index_add_(0, bag_of_id, (ids % 3 - 1).float())
    score = scores.view(-1, NUM_SAMPLES).sum(0) + dense[:, 0]
    kjt = KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths.int())
    return Batch(dense, kjt, (score > 0).float())


def make_batches(num):
    generator = torch.Generator().manual_seed(0)
    return [make_batch(generator) for _ in range(num)]


def make_model():
    return WithLoss(Dlrm())


def plain_sharder(case):
    return EmbeddingBagCollectionSharder({"optimizer": case.kind, **case.arguments})


def make_twins(job, case, *, device=CPU, **settings):
    sharder = RemoteEmbeddingBagCollectionSharder(
        job.client, case.optimizer, **settings
    )
    return Twins(
        *(job, make_model, [sharder], plain_sharder(case)),
        dims={table.name: table.embedding_dim for table in tables()},
        num_ids=NUM_IDS,
        device=device,
    )


def train(twins, batches):
    """Return the losses on the servers, and in plain TorchRec."""
    remote = twins.train(twins.remote, batches, lr=LR)
    return remote, twins.train(twins.plain, batches, lr=LR)


@pytest.fixture
def job():
    with RemoteJob(num_servers=2) as job:
        yield job


def test_the_batches_have_repeated_ids_and_empty_bags():
    for batch in make_batches(3):
        for feature in batch.ids.to_dict().values():
            bags = [bag.tolist() for bag in feature.to_dense()]
            assert [] in bags
            assert any(len(set(bag)) < len(bag) for bag in bags)


@pytest.mark.parametrize("case", CASES)
def test_every_step_has_the_loss_of_plain_torchrec(job, case):
    twins = make_twins(job, case)
    losses, expected = train(twins, make_batches(NUM_STEPS))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    twins.require_equal_rows(rtol=0, moved=0.1)
    # Nothing of this would mean much if the model had learnt nothing.
    assert expected[-20:].mean() < 0.75 * expected[:5].mean()
    assert job.total("gradients_missed") == 0


def test_the_number_of_servers_does_not_change_the_training():
    batches = make_batches(20)
    losses = {}
    for num_servers in (1, 3):
        with RemoteJob(num_servers=num_servers) as job:
            twins = make_twins(job, ADAGRAD_CASE)
            losses[num_servers] = twins.train(twins.remote, batches, lr=LR)
    assert np.array_equal(losses[1], losses[3])


@pytest.mark.parametrize(
    ("wire_dtype", "rtol"), [(torch.float16, 2e-4), (torch.bfloat16, 5e-3)]
)
def test_16_bit_floats_on_the_wire_change_the_loss_little(job, wire_dtype, rtol):
    twins = make_twins(job, ROWWISE_CASE, wire_dtype=wire_dtype)
    losses, expected = train(twins, make_batches(50))
    np.testing.assert_allclose(losses, expected, rtol=rtol)
    assert not np.array_equal(losses, expected)


@pytest.mark.parametrize(("device", "place"), GPU_PLACES)
@pytest.mark.parametrize("case", CASES)
def test_a_model_on_a_gpu_trains_as_plain_torchrec_does(job, case, device, place):
    twins = make_twins(job, case, device=device)
    batches = make_batches(NUM_STEPS)
    placed = [replace(batch.to(device), ids=batch.ids.to(place)) for batch in batches]
    losses = twins.train(twins.remote, placed, lr=LR)
    expected = twins.train(twins.plain, batches, lr=LR)
    # The dense half sums in another order there.
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    twins.require_equal_rows(rtol=0, atol=1e-3, moved=0.1)
