"""PERSIA's slots train as plain torch does: the same rows, batches and optimizers.

The two slots of a group are one ``nn.EmbeddingBag`` that is looked up twice, the root
scaling is written out, and both dense halves start from the same weights.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from persia_torchrec.data import DataLoader
from persia_torchrec.embedding.optim import SGD, Adagrad, Optimizer
from persia_torchrec.persia.batch import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from tests.support.local_job import Batches, LocalJob
from tests.support.servers import ids_of

YAML = """
feature_index_prefix_bit: 8
slots_config:
  user: {dim: 4}
  item: {dim: 3, sqrt_scaling: true}
  basket: {dim: 3}
feature_groups:
  things: [item, basket]
"""
NUM_IDS = 12
NUM_SAMPLES = 16
NUM_STEPS = 50
DIM_OF_TABLE = {"user": 4, "things": 3}
SLOT_OF_TABLE = {"user": "user", "things": "item"}
LEARNING_RATE = 0.5


@dataclass(frozen=True)
class Case:
    """An optimizer on the servers, and torch's of the same name."""

    remote: Optimizer
    local: type[torch.optim.Optimizer]
    arguments: dict[str, float]


CASES = [
    pytest.param(Case(SGD(4.0), torch.optim.SGD, {"lr": 4.0}), id="SGD"),
    pytest.param(
        Case(
            Adagrad(lr=0.2),
            torch.optim.Adagrad,
            {"lr": 0.2, "initial_accumulator_value": 0.01, "eps": 1e-10},
        ),
        id="Adagrad",
    ),
]


class Dense(nn.Module):
    """The half that PERSIA's user writes."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Linear(2, 4)
        self.top = nn.Sequential(nn.Linear(14, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, non_id_tensors, embeddings):
        bottom = torch.tanh(self.bottom(non_id_tensors[0]))
        return torch.sigmoid(self.top(torch.cat([bottom, *embeddings], dim=1)))


class Twin(nn.Module):
    """Both halves, in plain torch."""

    def __init__(self, dense: Dense, rows: dict[str, np.ndarray]) -> None:
        super().__init__()
        self.dense = Dense()
        self.dense.load_state_dict(dense.state_dict())
        self.tables = nn.ModuleDict(
            {
                table: nn.EmbeddingBag.from_pretrained(
                    torch.tensor(weights), mode="sum", freeze=False
                )
                for table, weights in rows.items()
            }
        )

    def forward(self, batch: PersiaBatch):
        slots = {feature.name: feature for feature in batch.id_type_features}
        num_ids = torch.from_numpy(slots["item"].lengths).clamp(min=1)
        item = self.pool("things", slots["item"]) / num_ids[:, None].sqrt()
        basket = self.pool("things", slots["basket"])
        dense = [torch.from_numpy(part.data) for part in batch.non_id_type_features]
        # In the order of the batch, which is not that of the YAML.
        return self.dense(dense, [item, basket, self.pool("user", slots["user"])])

    def pool(self, table, feature):
        ids = torch.from_numpy(feature.ids.astype(np.int64))
        offsets = np.cumsum(feature.lengths) - feature.lengths
        return self.tables[table](ids, torch.from_numpy(offsets.astype(np.int64)))


def make_batch(rng):
    """Bags of up to four ids, the small ones often; the ids tell the label."""
    item, basket = (
        [draw(rng, length) for length in (0, *rng.integers(0, 5, NUM_SAMPLES - 1))]
        for _ in range(2)
    )
    user = draw(rng, NUM_SAMPLES)
    dense = rng.standard_normal((NUM_SAMPLES, 2)).astype(np.float32)
    score = dense[:, 0] + 4.0 * (user % np.uint64(2)) - 3
    score += [np.sum(bag % np.uint64(3) == 1) for bag in item]
    return PersiaBatch(
        [
            IDTypeFeature("item", item),
            IDTypeFeature("basket", basket),
            IDTypeFeatureWithSingleID("user", user),
        ],
        non_id_type_features=[NonIDTypeFeature(dense)],
        labels=[Label((score > 0).astype(np.float32)[:, None])],
    )


def draw(rng, num):
    return (rng.random(num) ** 2 * NUM_IDS).astype(np.uint64)


def make_batches():
    rng = np.random.default_rng(0)
    return [make_batch(rng) for _ in range(NUM_STEPS)]


def make_rows(job, rng):
    """Give every id a row of its own; return the rows of each table."""
    tables = {}
    for table, dim in DIM_OF_TABLE.items():
        slot = SLOT_OF_TABLE[table]
        prefix = np.uint64(job.schema.slots[slot].index_prefix)
        weights = rng.standard_normal((NUM_IDS, dim)).astype(np.float32)
        job.client.write(table, ids_of(*range(NUM_IDS)) + prefix, weights)
        tables[table] = job.read(slot, *range(NUM_IDS))
        assert np.array_equal(tables[table], weights)
    return tables


def train_remotely(ctx, batches):
    losses = []
    for batch in DataLoader(Batches(batches), embedding_staleness=1):
        output, labels = ctx.forward(batch)
        loss = nn.functional.binary_cross_entropy(output, labels[0])
        losses.append(ctx.backward(loss).item())
    return losses


def train_locally(twin, case, batches):
    optimizers = [
        case.local(twin.tables.parameters(), **case.arguments),
        torch.optim.SGD(twin.dense.parameters(), lr=LEARNING_RATE),
    ]
    losses = []
    for batch in batches:
        labels = torch.from_numpy(batch.labels[0].data)
        loss = nn.functional.binary_cross_entropy(twin(batch), labels)
        losses.append(loss.item())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_step_has_the_loss_of_plain_torch(tmp_path, monkeypatch, case):
    torch.manual_seed(0)
    dense, batches = Dense(), make_batches()
    with LocalJob(tmp_path, monkeypatch, YAML, num_workers=2) as job:
        with job.train_ctx(dense, case.remote, lr=LEARNING_RATE) as ctx:
            start = make_rows(job, np.random.default_rng(1))
            twin = Twin(dense, start)
            losses = train_remotely(ctx, batches)
        expected = train_locally(twin, case, batches)
        np.testing.assert_allclose(losses, expected, atol=1e-5)
        for name, weights in twin.dense.state_dict().items():
            np.testing.assert_allclose(dense.state_dict()[name], weights, atol=1e-5)
        for table, slot in SLOT_OF_TABLE.items():
            rows = job.read(slot, *range(NUM_IDS))
            local = twin.tables[table].weight.detach().numpy()
            np.testing.assert_allclose(rows, local, atol=1e-5)
            # Nothing of this would mean much if nothing had been learnt.
            assert np.abs(rows - start[table]).max() > 0.1
    assert np.mean(expected[-10:]) < 0.8 * np.mean(expected[:10])


def test_the_batches_hold_what_could_go_wrong():
    num_repeats = 0
    for batch in make_batches():
        slots = {feature.name: feature for feature in batch.id_type_features}
        item, basket = slots["item"], slots["basket"]
        assert item.lengths[0] == basket.lengths[0] == 0
        assert set(item.ids.tolist()) & set(basket.ids.tolist())
        bags = np.split(item.ids, np.cumsum(item.lengths)[:-1])
        num_repeats += sum(len(bag) - len(set(bag.tolist())) for bag in bags)
    assert num_repeats > NUM_STEPS
