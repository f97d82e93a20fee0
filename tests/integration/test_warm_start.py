"""Training that moves between plain TorchRec and the servers continues unchanged."""

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagConfig

from persia_torchrec import RemoteEmbeddingBagCollectionSharder
from persia_torchrec.embedding.optim import AdamAsync
from persia_torchrec.sharding.state_dict import (
    load_tables,
    plain_state_dict,
    read_table,
)
from tests.integration import twins
from tests.integration.dlrm import (
    ADAGRAD_CASE,
    CASES,
    LR,
    NUM_IDS,
    make_batches,
    make_model,
    plain_sharder,
    tables,
)
from tests.integration.twins import shard_plain
from tests.support.remote_job import Bags, kjt_of, shard

NAMES = [table.name for table in tables()]


def on_torchrec(case):
    """Return the model on plain TorchRec, its tables with fbgemm's fused optimizer."""
    torch.manual_seed(0)
    return shard_plain(make_model(), plain_sharder(case), NAMES)


def train(model, batches):
    return twins.train(model, batches, twins.dense_optimizer(model, NAMES, LR))


def dense_of(model):
    weights = model.state_dict().items()
    return {k: v.clone() for k, v in weights if "embedding_bags" not in k}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training_continues_on_the_servers_with_weights_and_state(job, case):
    batches = make_batches(100)
    plain = on_torchrec(case)
    train(plain, batches[:50])
    model = make_model()
    model.load_state_dict(dense_of(plain), strict=False)
    sharder = RemoteEmbeddingBagCollectionSharder(job.client, case.optimizer)
    remote = shard(model, sharder)
    num_rows = sharder.load_weights(
        plain.state_dict(), optimizer_state=plain.fused_optimizer.state_dict()
    )
    assert num_rows == dict.fromkeys(NAMES, NUM_IDS)
    loaded = [job.read(name, range(NUM_IDS)) for name in NAMES]
    losses = train(remote, batches[50:])
    expected = train(plain, batches[50:])
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for name, rows in zip(NAMES, loaded, strict=True):  # they still learn
        assert np.abs(job.read(name, range(NUM_IDS)) - rows).max() > 0.02
    sharder.close()


def test_without_optimizer_state_the_losses_differ(job):
    batches = make_batches(60)
    plain = on_torchrec(ADAGRAD_CASE)
    train(plain, batches[:50])
    model = make_model()
    model.load_state_dict(dense_of(plain), strict=False)
    remote = job.put_on_servers(model, ADAGRAD_CASE.optimizer)
    load_tables(job.client, plain.state_dict(), NAMES)
    losses = train(remote, batches[50:])
    expected = train(plain, batches[50:])
    np.testing.assert_allclose(losses[0], expected[0], rtol=1e-5)
    assert np.abs(losses / expected - 1).max() > 1e-2


@pytest.mark.slow
def test_training_continues_in_plain_torchrec_with_weights_and_state(job):
    batches = make_batches(40)
    torch.manual_seed(0)
    remote = job.put_on_servers(make_model(), ADAGRAD_CASE.optimizer)
    train(remote, batches[:20])
    plain = on_torchrec(ADAGRAD_CASE)
    weights = {**dense_of(remote), **plain_state_dict(job.client, make_model())}
    states = plain.fused_optimizer.state_dict()["state"]
    for key, tensor in plain.state_dict().items():
        if "embedding_bags" not in key:
            tensor.copy_(weights[key])
            continue
        read = read_table(job.client, key.split(".")[-2], NUM_IDS)
        assert torch.equal(weights[key], read.weights)
        tensor.local_shards()[0].tensor.copy_(read.weights)
        (momentum,) = states[key].values()
        momentum.local_shards()[0].tensor.copy_(read.state)
    losses = train(plain, batches[20:])
    expected = train(remote, batches[20:])
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_sparse_adam_continues_at_its_step(job):
    """``torch.optim.SparseAdam`` puts its eps where ``AdamAsync`` does."""
    num_ids, dim = 30, 8
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, num_ids, (16, 3)) for _ in range(40)]
    goals = torch.from_numpy(rng.standard_normal((40, 16, dim)).astype(np.float32))
    bag = nn.EmbeddingBag(num_ids, dim, mode="sum", sparse=True)
    optimizer = torch.optim.SparseAdam(bag.parameters(), lr=0.05)
    table = EmbeddingBagConfig(num_ids, dim, name="term", feature_names=["term"])
    remote = job.put_on_servers(Bags([table]), AdamAsync(0.05, eps=1e-8))
    losses = {"here": [], "there": []}
    for step, (ids, goal) in enumerate(zip(batches, goals, strict=True)):
        if step == 20:
            state = {"term.weight": optimizer.state_dict()["state"][0]}
            load_tables(
                *(job.client, {"term": bag.weight}, ["term"]),
                optimizer_state={"state": state},
            )
            assert job.client.step("term") == 20
        loss = ((bag(torch.from_numpy(ids)) - goal) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 20:
            pooled = remote(kjt_of({"term": ids.tolist()})).values()
            remote_loss = ((pooled - goal) ** 2).mean()
            remote_loss.backward()
            losses["here"].append(loss.item())
            losses["there"].append(remote_loss.item())
    np.testing.assert_allclose(losses["there"], losses["here"], rtol=1e-5)
