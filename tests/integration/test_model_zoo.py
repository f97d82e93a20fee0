"""TorchRec's own models train on the servers, with nothing but the sharder added.

Each is built twice from the same dense weights and the same rows: with its tables on
the servers, and in plain TorchRec with fbgemm's fused rowwise Adagrad.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
from torchrec.modules.mlp import MLP

from persia_torchrec import Adagrad, RemoteEmbeddingBagCollectionSharder
from tests.integration.twins import Twins, WithLoss
from tests.support.remote_job import META, RemoteJob, remote_modules

pytestmark = pytest.mark.slow

FEATURES = ("user", "query", "ad", "place")
NUM_IDS = 40
DIM = 8
NUM_DENSE = 3
NUM_SAMPLES = 32
NUM_STEPS = 160
LR = 0.1
EPS = 1e-8


class Batch(NamedTuple):
    dense: torch.Tensor
    ids: KeyedJaggedTensor
    labels: torch.Tensor


class TwoTower(nn.Module):
    """Retrieval: how well an ad fits a user is the dot product of their towers."""

    def __init__(self, bags: EmbeddingBagCollection) -> None:
        super().__init__()
        self.bags = bags
        self.asking = MLP(2 * DIM, [16, 8])
        self.answering = MLP(2 * DIM, [16, 8])

    def forward(self, dense, ids):
        user, query, ad, place = torch.split(self.bags(ids).values(), DIM, dim=1)
        asking = self.asking(torch.cat([user, query], dim=1))
        answering = self.answering(torch.cat([ad, place], dim=1))
        return (asking * answering).sum(dim=1) - 1


BOTTOM, TOP = [16, DIM], [16, 1]
MODELS = {
    "DLRM": lambda bags: DLRM(bags, NUM_DENSE, BOTTOM, TOP),
    "DLRM_DCN": lambda bags: DLRM_DCN(bags, NUM_DENSE, BOTTOM, TOP, 2, 4),
    "DLRM_Projection": lambda bags: DLRM_Projection(
        bags, NUM_DENSE, BOTTOM, TOP, [16, 2 * DIM], [16, 2 * DIM]
    ),
    "SimpleDeepFMNN": lambda bags: SimpleDeepFMNN(NUM_DENSE, bags, 16, 8),
    "TwoTower": TwoTower,
}
GIVES_PROBABILITIES = {"SimpleDeepFMNN"}


def make_model(name):
    """Return a model, its tables on meta."""
    tables = [
        EmbeddingBagConfig(NUM_IDS, DIM, name=f"table_{key}", feature_names=[key])
        for key in FEATURES
    ]
    return MODELS[name](EmbeddingBagCollection(tables=tables, device=META))


def make_batches(num):
    """Bags of 0 to 3 ids; each id has a weight, and their sum tells the label."""
    rng = torch.Generator().manual_seed(0)
    weights = torch.randn(len(FEATURES), NUM_IDS, generator=rng)
    return [make_batch(weights, rng) for _ in range(num)]


def make_batch(weights, rng):
    num_bags = len(FEATURES) * NUM_SAMPLES
    lengths = torch.randint(4, (num_bags,), generator=rng)
    ids = (torch.rand(int(lengths.sum()), generator=rng) ** 2 * NUM_IDS).long()
    bag_of_id = torch.arange(num_bags).repeat_interleave(lengths)
    of_id = weights[bag_of_id // NUM_SAMPLES, ids]
    scores = torch.zeros(num_bags).index_add_(0, bag_of_id, of_id)
    dense = torch.randn(NUM_SAMPLES, NUM_DENSE, generator=rng)
    score = scores.view(-1, NUM_SAMPLES).sum(0) + dense[:, 0]
    kjt = KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths.int())
    return Batch(dense=dense, ids=kjt, labels=(score > 0).float())


@pytest.mark.parametrize(
    "name",
    [
        "DLRM",
        *(pytest.param(name, marks=pytest.mark.long) for name in [*MODELS][1:]),
    ],
)
def test_a_model_of_torchrec_trains_on_the_servers_as_it_does_in_torchrec(name):
    optimizer = Adagrad(
        LR, initial_accumulator_value=0, eps=EPS, vectorwise_shared=True
    )
    kind = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    fused = {"optimizer": kind, "learning_rate": LR, "eps": EPS}
    loss_fn = nn.BCELoss() if name in GIVES_PROBABILITIES else nn.BCEWithLogitsLoss()
    batches = make_batches(NUM_STEPS)
    with RemoteJob() as job:
        twins = Twins(
            *(job, lambda: WithLoss(make_model(name), loss_fn)),
            [RemoteEmbeddingBagCollectionSharder(job.client, optimizer)],
            EmbeddingBagCollectionSharder(fused),
            dims={f"table_{key}": DIM for key in FEATURES},
            num_ids=NUM_IDS,
        )
        assert len(remote_modules(twins.remote)) == 1
        losses = twins.train(twins.remote, batches)
        expected = twins.train(twins.plain, batches)
        twins.require_equal_rows()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    # Nothing of this would mean much if the model had learnt nothing.
    assert losses[-20:].mean() < 0.9 * losses[:20].mean()
