"""Weights that a collection has when it is sharded are those of the servers."""

import logging

import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from persia_torchrec import (
    SGD,
    EmbeddingClient,
    MixedSharder,
    Placement,
    RemoteEmbeddingBagCollectionSharder,
    remote_sharders,
)
from tests.support.remote_job import CPU, META, RemoteJob, Servers, kjt_of, shard

NUM_IDS, DIM = 8, 4
ALL = kjt_of({"f": [[id_] for id_ in range(NUM_IDS)]})


@pytest.fixture(scope="module")
def job():
    with RemoteJob() as job:
        yield job


class Wrap(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids):
        return self.inner(ids)


def sequences(name, device=CPU):
    config = EmbeddingConfig(NUM_IDS, DIM, name, feature_names=["f"])
    return EmbeddingCollection(tables=[config], device=device)


def bags(name, device=CPU, **settings):
    config = EmbeddingBagConfig(NUM_IDS, DIM, name, feature_names=["f"])
    return EmbeddingBagCollection(tables=[config], device=device, **settings)


def processed(name):
    positions = PositionWeightedModuleCollection({"f": 1}, device=CPU)
    return FeatureProcessedEmbeddingBagCollection(
        bags(name, is_weighted=True), positions
    )


def mixed(client):
    sharder = RemoteEmbeddingBagCollectionSharder(client, SGD(1.0))
    return [MixedSharder(sharder, Placement())]


def all_sharders(client):
    return remote_sharders(client, SGD(1.0))


@pytest.mark.parametrize(
    ("make", "sharders"),
    [
        (sequences, all_sharders),
        (bags, all_sharders),
        (processed, all_sharders),
        (bags, mixed),
    ],
)
def test_they_reach_the_servers(job, make, sharders):
    name = f"{make.__name__} {sharders.__name__}"
    module = make(name)
    with torch.no_grad():
        [weight] = [p for key, p in module.named_parameters() if name in key]
        weight.copy_(torch.arange(NUM_IDS * DIM).view(NUM_IDS, DIM))
    given = weight.detach().clone()
    model = job.shard(Wrap(module), sharders(job.client))
    [key] = [key for key in model.state_dict() if name in key]
    assert torch.equal(model.state_dict()[key].whole(), given)
    assert torch.equal(torch.tensor(job.read(name, range(NUM_IDS)))[:, :DIM], given)


def test_collections_on_meta_have_no_rows(job):
    job.shard(Wrap(sequences("meta", META)), all_sharders(job.client))
    assert not len(job.client.count_ids("meta")[1])


def test_rows_that_are_there_stay(job):
    """As at a restart of the trainers."""
    first = sequences("again")
    with torch.no_grad():
        first.embeddings["again"].weight.fill_(3.0)
    model = job.shard(Wrap(first), all_sharders(job.client))
    model(ALL)["f"].values().sum().backward()
    second = job.shard(Wrap(sequences("again")), all_sharders(job.client))
    [key] = second.state_dict()
    assert (second.state_dict()[key].whole() == 2.0).all()


def test_more_than_the_servers_hold_is_a_warning(job, caplog):
    caplog.set_level(logging.INFO)
    with Servers(1, capacity_rows=5) as servers:
        client = EmbeddingClient.connect(servers.addresses)
        sharders = all_sharders(client)
        shard(Wrap(sequences("many")), *sharders)
        assert client.num_rows() == [5]
        sharders.close()
        client.close()
    assert "5 of the 8 rows of the model fit" in caplog.text
    assert "Raise --capacity" in caplog.text
