import copy

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from persia_torchrec import SGD, RemoteEmbeddingBagCollectionSharder
from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.planned import dense_parameters
from tests.sharding.two_towers import IDS, TABLES, Tower, TwoTowers, train
from tests.support.remote_job import CPU, Bags, kjt_of, remote_modules, tensors_of


def test_the_stock_planner_plans_every_table(job):
    model = job.put_on_servers(Tower(TABLES))
    plan = model.plan.get_plan_for_module("bags")
    assert set(plan) == {"term", "user"}


def test_a_model_needs_no_more_than_one_more_sharder(job):
    sharder = RemoteEmbeddingBagCollectionSharder(job.client, SGD(0.1))
    model = DistributedModelParallel(Tower(TABLES), sharders=[sharder])
    losses = train(model)
    assert losses[-1] < losses[0]
    (module,) = remote_modules(model)
    module.pipeline.close()


def test_the_model_has_the_parameters_of_its_dense_half_alone(job):
    model = job.put_on_servers(Tower(TABLES))
    dense = {"over.weight", "over.bias"}
    held = dense_parameters(model)
    assert {
        n for n, p in model.named_parameters() if any(p is h for h in held)
    } == dense
    assert set(tensors_of(model)) == dense
    assert dict(model.named_buffers()) == {}
    assert {param.numel() for param in model.fused_optimizer.params.values()} == {1}


def test_a_dense_checkpoint_loads_strictly(job):
    model = job.put_on_servers(Tower(TABLES))
    state = copy.deepcopy(model.state_dict())
    train(model, 1)
    assert not torch.equal(model.state_dict()["over.weight"], state["over.weight"])
    model.load_state_dict(dict(state), strict=True)  # TorchRec changes the keys
    assert torch.equal(model.state_dict()["over.weight"], state["over.weight"])


def test_data_parallel_wraps_the_dense_half(job):
    model = job.put_on_servers(Tower(TABLES))
    wrapped = model._dmp_wrapped_module
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
    losses = train(model)
    assert losses[-1] < losses[0]


def test_a_model_may_have_no_dense_half(job):
    model = job.put_on_servers(Bags(TABLES))
    before = job.read("term", [1])
    model(kjt_of(IDS)).values().sum().backward()
    assert dense_parameters(model) == []
    assert (job.read("term", [1]) != before).all()


def test_two_collections_of_one_model_train_together(job):
    model = job.put_on_servers(TwoTowers(), SGD(0.1))
    losses = train(model, 5)
    assert losses == sorted(losses, reverse=True)
    assert job.total("requests_update") == 2 * 5 * 2  # collections, steps, servers
    assert job.total("rows") == 5
    assert job.total("open_batches") == 0


def test_a_collection_that_a_model_has_twice_stays_one(job):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = Bags(TABLES)
            self.right = nn.Module()
            self.right.bags = self.left.bags

        def forward(self, ids):
            left, right = self.left(ids).values(), self.right.bags(ids).values()
            return left, right

    model = job.put_on_servers(Tied(), SGD(1.0), staleness=2)
    left, right = model(kjt_of(IDS))
    assert torch.equal(left, right)
    before = job.read("term", [1])
    (left.sum() + 2 * right.sum()).backward()
    for module in remote_modules(model):
        module.pipeline.flush()
    assert np.allclose(before - job.read("term", [1]), 3)
    left, right = model(kjt_of(IDS))
    assert torch.equal(left, right)


def test_the_servers_draw_other_weights_than_the_collection_had(job):
    tables = [EmbeddingBagConfig(4, 8, name="term", feature_names=["ad"])]
    module = Bags(tables, device=CPU)
    model = job.put_on_servers(module)
    pooled = model(kjt_of({"ad": [[0], [1], [2**62]]})).values()
    assert (pooled.abs() <= 0.5).all()  # TorchRec's sqrt(1 / num_embeddings)
    assert pooled.unique().numel() == pooled.numel()


def test_a_plan_without_one_of_the_tables_is_rejected(job):
    sharder = RemoteEmbeddingBagCollectionSharder(job.client)
    env = ShardingEnv.from_local(1, 0)
    with pytest.raises(ConfigError, match=r"name the tables \['term', 'user'\]"):
        sharder.shard(Bags(TABLES).bags, {}, env)


def test_a_collection_on_the_servers_cannot_be_copied_to_another_device(job):
    model = job.put_on_servers(Bags(TABLES))
    (module,) = remote_modules(model)
    # DistributedModelParallel.copy begins with a deepcopy.
    for copied in (lambda: module.copy(CPU), lambda: copy.deepcopy(model)):
        with pytest.raises(ConfigError, match="cannot be copied, nor "):
            copied()


def test_trainers_that_update_jointly_must_have_a_process_group(job):
    sharder = RemoteEmbeddingBagCollectionSharder(job.client)
    two = ShardingEnv.from_local(2, 0)
    with pytest.raises(
        ConfigError, match=r"must have a process group\. Received: none"
    ):
        sharder.put_on_servers(Bags(TABLES).bags, two, CPU)
