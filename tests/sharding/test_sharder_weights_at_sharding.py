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
from tests.support.remote_job import CPU, META, Servers, kjt_of, shard

NUM_IDS, DIM = 8, 4
ALL = kjt_of({"f": [[id_] for id_ in range(NUM_IDS)]})


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
def test_they_reach_the_servers(shared_job, make, sharders):
    name = f"{make.__name__} {sharders.__name__}"
    module = make(name)
    with torch.no_grad():
        [weight] = [p for key, p in module.named_parameters() if name in key]
        weight.copy_(torch.arange(NUM_IDS * DIM).view(NUM_IDS, DIM))
    given = weight.detach().clone()
    model = shared_job.shard(Wrap(module), sharders(shared_job.client))
    [key] = [key for key in model.state_dict() if name in key]
    assert torch.equal(model.state_dict()[key].whole(), given)
    assert torch.equal(
        torch.tensor(shared_job.read(name, range(NUM_IDS)))[:, :DIM], given
    )


def test_collections_on_meta_have_no_rows(shared_job):
    shared_job.shard(Wrap(sequences("meta", META)), all_sharders(shared_job.client))
    assert not len(shared_job.client.count_ids("meta")[1])


def test_rows_that_are_there_stay(shared_job):
    """As at a restart of the trainers."""
    first = sequences("again")
    with torch.no_grad():
        first.embeddings["again"].weight.fill_(3.0)
    model = shared_job.shard(Wrap(first), all_sharders(shared_job.client))
    model(ALL)["f"].values().sum().backward()
    second = shared_job.shard(Wrap(sequences("again")), all_sharders(shared_job.client))
    [key] = second.state_dict()
    assert (second.state_dict()[key].whole() == 2.0).all()


def test_more_than_the_servers_hold_is_a_warning(shared_job, caplog):
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
