"""Checkpoints of a table that two collections shared, loaded where they do not."""

import weakref
from contextlib import closing, contextmanager

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)

from persia_torchrec import (
    Adagrad,
    Adam,
    TableSettings,
    load_checkpoint,
    remote_sharders,
    save_checkpoint,
)
from persia_torchrec.errors import CheckpointError
from tests.support.remote_job import META, PatientClient, Servers, kjt_of, shard

pytestmark = pytest.mark.usefixtures("group")

NUM_IDS, DIM = 8, 4
IDS = {"f": [[0, 1], [1]]}
SOME = np.arange(2, dtype=np.uint64)
KEYS = "bags.embedding_bags.item.weight", "rows.embeddings.item.weight"


class Two(nn.Module):
    def __init__(self, dim=DIM):
        super().__init__()
        given = {"name": "item", "feature_names": ["f"], "embedding_dim": DIM}
        bags = [EmbeddingBagConfig(num_embeddings=NUM_IDS, **given)]
        given["embedding_dim"] = dim
        rows = [EmbeddingConfig(num_embeddings=NUM_IDS, **given)]
        self.bags = EmbeddingBagCollection(tables=bags, device=META)
        self.rows = EmbeddingCollection(tables=rows, device=META)

    def forward(self, ids):
        return self.bags(ids).values().sum() + self.rows(ids)["f"].values().sum()


@contextmanager
def trained(*, steps=0, dim=DIM, **settings):
    """Yield a client of fresh servers, sharders, and a model that has made steps."""
    with Servers() as servers:
        client = PatientClient.connect(servers.addresses)
        client.pulled = weakref.WeakSet()
        with closing(client):
            sharders = remote_sharders(client, Adam(0.1), **settings)
            model = shard(Two(dim), *sharders)
            for _ in range(steps):
                model(kjt_of(IDS)).backward()
            yield client, sharders, model
            sharders.close()


@pytest.fixture
def saved(tmp_path):
    """Return the path of a checkpoint, and the rows that it has."""
    with trained(steps=3, shared={"item"}) as (client, sharders, _):
        save_checkpoint(tmp_path / "c", {}, client, sharders)
        rows = client.read("item", SOME)
        return tmp_path / "c", rows


def test_each_collection_begins_with_its_rows_and_a_line_says_so(saved, caplog):
    path, rows = saved
    with trained() as (client, _, model):
        load_checkpoint(path, {}, client)
        for name in ("bags.item", "rows.item"):
            found = client.read(name, SOME)
            assert (found == rows).all()
            assert client.step(name) == client.step("bags.item") > 1
        assert torch.equal(*(model.state_dict()[key][:2].whole() for key in KEYS))
        model(kjt_of(IDS)).backward()
        assert client.step("rows.item") == client.step("bags.item")
    (line,) = [text for text in caplog.messages if "one of several" in text]
    assert "['bags.item', 'rows.item']" in line
    assert "shared={'item'}" in line


def test_with_shared_it_stays_one(saved):
    path, rows = saved
    with trained(shared={"item"}) as (client, _, _):
        load_checkpoint(path, {}, client)
        assert list(client.tables) == ["item"]
        found = client.read("item", SOME)
        assert (found == rows).all()


def test_another_optimizer_begins_with_a_state_of_its_own(saved):
    path, rows = saved
    settings = {"rows.item": TableSettings(optimizer=Adagrad(0.1))}
    with trained(tables=settings) as (client, _, _):
        load_checkpoint(path, {}, client)
        found = client.read("rows.item", SOME)
        assert (found[:, :DIM] == rows[:, :DIM]).all()
        assert (found[:, DIM:] == found[0, DIM]).all()


def test_a_table_of_another_dim_is_an_error_and_nothing_is_loaded(saved):
    path, _ = saved
    with (
        trained(dim=2 * DIM) as (client, _, _),
        pytest.raises(CheckpointError, match=r"'rows\.item'.*dim 4.*Received: 8"),
    ):
        load_checkpoint(path, {}, client)


def test_a_namespace_stays(tmp_path):
    settings = {"namespace": "teacher"}
    with trained(steps=1, shared={"item"}, **settings) as (client, sharders, _):
        save_checkpoint(tmp_path / "c", {}, client, sharders)
    with trained(**settings) as (client, _, _):
        load_checkpoint(tmp_path / "c", {}, client)
        assert client.step("teacher/rows.item") == client.step("teacher/bags.item")
