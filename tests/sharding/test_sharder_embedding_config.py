"""One set of rows for a ``TrainCtx`` and for TorchRec's sharders."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from torchrec.distributed import DistributedModelParallel

from persia_torchrec import (
    Adagrad,
    Constant,
    TableSettings,
    Uniform,
    remote_sharders,
    to_torchrec,
)
from persia_torchrec.data import DataLoader
from persia_torchrec.errors import ConfigError
from persia_torchrec.persia.batch import IDTypeFeature, Label, PersiaBatch
from tests.support.local_job import LocalJob
from tests.support.models import sequences_of
from tests.support.servers import ids_of

pytestmark = pytest.mark.slow

SLOTS = """
feature_index_prefix_bit: 8
slots_config:
  user: {dim: 4}
  item: {dim: 8, sqrt_scaling: true}
  basket: {dim: 8}
  ad: {dim: 4, hash_stack_config: {hash_stack_rounds: 2, embedding_size: 5}}
feature_groups:
  things: [item, basket]
"""
NAMES, WIDTH, NUM_BATCHES = ("item", "basket", "user", "ad"), 24, 6


@pytest.fixture
def job(tmp_path, monkeypatch):
    with LocalJob(tmp_path, monkeypatch, SLOTS) as job:
        yield job


@pytest.fixture(scope="module")
def batches():
    rng = np.random.default_rng(5)
    return [
        PersiaBatch(
            [
                IDTypeFeature(name, [rng.integers(0, 9, 3).astype(np.uint64), ids_of()])
                for name in NAMES
            ],
            labels=[Label(rng.random((2, 1)).astype(np.float32))],
        )
        for _ in range(NUM_BATCHES)
    ]


def table(name, dim, *features, **more):
    return EmbeddingBagConfig(1, dim, name, feature_names=[*features], **more)


def bags(*tables, **more):
    return EmbeddingBagCollection(tables=[*tables], device=torch.device("meta"), **more)


class OfLists(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(WIDTH, 1)

    def forward(self, non_id_tensors, embeddings):
        return self.dense(torch.cat(embeddings, dim=1))


class OfIds(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = bags(
            table("things", 8, "item", "basket"),
            table("user", 4, "user"),
            table("ad", 4, "ad"),
        )
        self.dense = torch.nn.Linear(WIDTH, 1)

    def forward(self, ids):
        return self.dense(self.bags(ids).values())


class Training:
    """A dense layer, and steps by either side over the same servers."""

    def __init__(self, job):
        self.job = job
        torch.manual_seed(1)
        self.dense = torch.nn.Linear(WIDTH, 1).state_dict()

    def by_train_ctx(self, batches):
        model = OfLists()
        model.dense.load_state_dict(self.dense)
        with self.job.train_ctx(model, Adagrad(0.1)) as ctx:
            for batch in DataLoader(batches, reproducible=True, embedding_staleness=1):
                output, (label,) = ctx.forward(batch)
                ctx.backward(torch.nn.functional.mse_loss(output, label))
            self.dense = model.dense.state_dict()

    def by_torchrec(self, batches):
        sharders = remote_sharders(
            self.job.client, Adagrad(0.1), embedding_config=self.job.config_path
        )
        model = shard(OfIds(), sharders)
        model.module.dense.load_state_dict(self.dense)
        optimizer = torch.optim.SGD(model.module.dense.parameters(), 0.1)
        for batch in map(to_torchrec, batches):
            optimizer.zero_grad()
            output = model(batch.id_features)
            torch.nn.functional.mse_loss(output, batch.labels[0]).backward()
            optimizer.step()
        self.dense = model.module.dense.state_dict()
        sharders.close()

    def state(self):
        """Return the dense layer, and all rows by their ids: weights and state."""
        rows = {}
        for name in ("things", "user", "ad"):
            for block in self.job.client.export(name):
                weights = zip(block.weights, block.state, strict=True)
                found = zip(block.ids.tolist(), weights, strict=True)
                rows |= {(name, i): (w.tolist(), s.tolist()) for i, (w, s) in found}
        return {name: value.tolist() for name, value in self.dense.items()}, rows


def shard(model, sharders):
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    return DistributedModelParallel(model, sharders=sharders)


@pytest.mark.parametrize("first", ["by_train_ctx", "by_torchrec"])
def test_either_continues_what_the_other_trained_to_the_last_bit(job, batches, first):
    second = {"by_train_ctx": "by_torchrec", "by_torchrec": "by_train_ctx"}[first]
    mixed = Training(job)
    getattr(mixed, first)(batches[:3])
    getattr(mixed, second)(batches[3:])
    expected = mixed.state()
    assert len(expected[1]) > 20
    for way in (first, second):
        job.client.clear()
        alone = Training(job)
        getattr(alone, way)(batches)
        assert alone.state() == expected


@pytest.mark.parametrize(
    ("collection", "message"),
    [
        (bags(table("thing", 8, "item")), "Received: table 'thing'. Is 'things' meant"),
        (bags(table("things", 8, "user")), r"\['item', 'basket'\]. Received: 'user'"),
        (bags(table("user", 8, "user")), r"dim of its slots, \[4\]. Received: 8"),
        (
            bags(table("things", 8, "item", pooling=PoolingType.MEAN)),
            "pooling must be SUM where the slot has sqrt_scaling",
        ),
        (sequences_of(["ad"], 1), "hash_stack_config must be in .* without weights"),
        (bags(table("ad", 4, "ad"), is_weighted=True), "must be in .* without weights"),
    ],
)
def test_tables_that_are_no_groups_of_the_file_are_rejected(job, collection, message):
    sharders = remote_sharders(job.client, embedding_config=job.config_path)
    with pytest.raises(ConfigError, match=message):
        shard(torch.nn.Sequential(collection), sharders)


def test_rows_begin_as_in_a_train_ctx_unless_the_table_says_otherwise(job):
    own = partial(torch.nn.init.uniform_, a=-0.5, b=0.5)
    sharders = remote_sharders(
        job.client,
        embedding_config=job.config_path,
        tables={"ad": TableSettings(initializer=Constant(2.0))},
    )
    tables = table("user", 4, "user"), table("things", 8, "item", init_fn=own)
    model = shard(bags(*tables, table("ad", 4, "ad")), sharders)
    specs = sharders.remote_tables.specs
    assert specs["user"].initializer == Uniform(-0.01, 0.01)
    assert (specs["user"].seed, specs["user"].weight_bound) == (0, 10)
    assert specs["things"].initializer == Uniform(-0.5, 0.5)
    assert specs["ad"].initializer == Constant(2.0)
    del model


def test_weights_without_ids_are_rejected_as_ids_have_prefixes(job):
    sharders = remote_sharders(job.client, embedding_config=job.config_path)
    model = shard(torch.nn.Sequential(bags(table("user", 4, "user"))), sharders)
    (key,) = model.state_dict().keys() - {"0.embedding_bags.user.ids"}
    with pytest.raises(ConfigError, match=r"ids with prefixes\. Received: wei"):
        sharders.load_weights({key: torch.zeros(1, 4)})
    with pytest.raises(ConfigError, match=r"the prefix of their feature group"):
        model.load_state_dict({key: torch.zeros(1, 4)}, strict=False)
