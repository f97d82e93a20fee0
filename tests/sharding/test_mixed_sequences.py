"""Collections whose embeddings are not pooled, some of their tables on the servers."""

import pytest
import torch
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig

from persia_torchrec import (
    SGD,
    MixedSharder,
    Placement,
    RemoteEmbeddingCollectionSharder,
    describe_placement,
)
from tests.sharding.mixed_model import constraints, needs_mixed_sequences
from tests.support.remote_job import META, kjt_of, remote_modules, shard, tensors_of

pytestmark = needs_mixed_sequences

DIM = 4
IDS = {"ad": [[1, 2], [], [-1]], "query": [[2], [2, 2], []], "user": [[3], [], [5]]}


class Sequences(nn.Module):
    """Nothing but a collection; "query" is a feature of a table of each half."""

    def __init__(self):
        super().__init__()
        tables = [
            EmbeddingConfig(10, DIM, name="user", feature_names=["user"]),
            EmbeddingConfig(10, DIM, name="near", feature_names=["query"]),
            EmbeddingConfig(10, DIM, name="term", feature_names=["ad", "query"]),
        ]
        self.sequences = EmbeddingCollection(
            tables=tables, device=META, need_indices=True
        )

    def forward(self, ids):
        return self.sequences(ids)


@pytest.fixture
def put(job):
    def put(**settings):
        remote = RemoteEmbeddingCollectionSharder(job.client, SGD(1.0), **settings)
        sharder = MixedSharder(remote, Placement(remote=["term"], min_rows=100))
        told = constraints("table_wise", ["near"]) | constraints("row_wise", ["user"])
        model = shard(Sequences(), sharder, constraints=told)
        job.adopt(model)
        return model

    return put


def local_rows(model, table):
    weight = model.state_dict()[f"sequences.embeddings.{table}.weight"]
    return weight.local_shards()[0].tensor


def test_each_feature_has_the_rows_of_its_table_in_the_order_of_the_whole(job, put):
    model = put()
    output = model(kjt_of(IDS))
    assert list(output.keys()) == ["user", "query@near", "ad", "query@term"]
    expected = {
        "query@near": local_rows(model, "near")[[2, 2, 2]],
        "ad": torch.from_numpy(job.read("term", [1, 2, -1]).copy()),
        "query@term": torch.from_numpy(job.read("term", [2, 2, 2]).copy()),
        "user": local_rows(model, "user")[[3, 5]],
    }
    for name, rows in expected.items():
        sequences = output[name]
        feature = name.partition("@")[0]
        assert torch.equal(sequences.values().detach(), rows.detach()), name
        assert sequences.values().detach().unique().numel() > 1
        assert sequences.lengths().tolist() == [len(bag) for bag in IDS[feature]]
        ids = [id_ for bag in IDS[feature] for id_ in bag]
        assert sequences.weights().tolist() == ids  # need_indices


def test_gradients_reach_local_and_remote_rows(job, put):
    model = put()
    output = model(kjt_of(IDS))
    loss = sum(sequences.values().sum() for sequences in output.values())
    term = job.read("term", [2, -1]).copy()
    user = local_rows(model, "user").clone()
    loss.backward()
    moved = job.read("term", [2, -1]) - term
    assert moved[:, 0].tolist() == pytest.approx([-4.0, -1.0], abs=1e-5)
    moved = local_rows(model, "user") - user  # fbgemm's learning rate is 0.01
    assert moved[[3, 4, 5], 0].tolist() == pytest.approx([-0.01, 0.0, -0.01], abs=1e-6)


def test_the_state_dict_holds_the_local_tables_and_reports_where_the_others_are(
    job, put
):
    model = put()
    local = {f"sequences.embeddings.{table}.weight" for table in ("near", "user")}
    assert set(tensors_of(model)) == local
    term = "sequences.embeddings.term.weight"
    assert (
        set(model.fused_optimizer.params) == set(model.state_dict()) == local | {term}
    )
    lines = describe_placement(model).splitlines()
    assert lines[2].split() == [
        *("sequences", "near", "table_wise", "fused"),
        *("0", "10", "4", "EXACT_SGD"),
    ]
    assert lines[3].split() == ["sequences", "term", "servers", "-", "any", "4", "SGD"]


def test_the_remote_half_follows_the_model_into_evaluation(job, put):
    model = put()
    model.eval()
    with torch.no_grad():
        output = model(kjt_of(IDS))
    assert output["ad"].values().any(dim=1).all()  # what rows would begin with
    assert not remote_modules(model)[0].training
    assert job.total("rows") == 0
