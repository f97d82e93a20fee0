"""Collections and models that share a table, meant or not."""

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from persia_torchrec import (
    SGD,
    MixedSharder,
    Placement,
    RemoteEmbeddingBagCollectionSharder,
    remote_sharders,
)
from persia_torchrec.errors import ConfigError
from tests.support.remote_job import CPU, META, RemoteJob, kjt_of, remote_modules


@pytest.fixture(scope="module")
def job():
    with RemoteJob() as job:
        yield job


def bags(table, feature="x", device=META):
    config = EmbeddingBagConfig(20, 4, table, feature_names=[feature])
    return EmbeddingBagCollection(tables=[config], device=device)


class TwoNames(nn.Module):
    """Towers whose tables are one collection; also deeper down, and in a list."""

    def __init__(self, table):
        super().__init__()
        self.query = self.item = bags(table)
        self.more = nn.ModuleList([nn.Sequential(self.query), self.query])

    def forward(self, ids):
        each = [self.query, self.item, self.more[0], self.more[1]]
        return torch.stack([collection(ids).values() for collection in each])


def mixed(client):
    remote = RemoteEmbeddingBagCollectionSharder(client, SGD(1.0))
    return [MixedSharder(remote, Placement())]


@pytest.mark.parametrize(
    "sharders", [lambda client: remote_sharders(client, SGD(1.0)), mixed]
)
def test_a_collection_under_several_names_is_one(job, sharders):
    job.client.clear()
    model = job.shard(TwoNames("two names"), sharders(job.client))
    ids = kjt_of({"x": [[2**40]]})  # no row of a dense table
    before = model(ids)
    assert torch.equal(before, before[:1].expand_as(before))
    before.sum().backward()
    assert torch.equal(model(ids), before - 4)
    assert len(set(remote_modules(model))) == 1
