"""One table name in several collections of a model: several tables, as in TorchRec."""

import logging
import weakref
from contextlib import closing, contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply
from torch.nn.parallel import DistributedDataParallel
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.shard import shard as shard_module
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan

from persia_torchrec import (
    SGD,
    MixedSharder,
    Placement,
    RemoteEmbeddingBagCollectionSharder,
    TableSettings,
    load_checkpoint,
    plain_state_dict,
    remote_sharders,
    save_checkpoint,
)
from persia_torchrec.embedding.initializer import Constant
from persia_torchrec.errors import CheckpointError, ConfigError
from persia_torchrec.sharding.sharder import RemoteEmbeddingCollectionSharder
from tests.support.remote_job import (
    CPU,
    META,
    PatientClient,
    Servers,
    kjt_of,
    remote_modules,
)
from tests.support.remote_job import shard as shard_model

NUM_IDS, DIM = 8, 4
BOTH_WAYS = r"rename=\{'later': 'bags\.later'\}.*shared=\{'later'\}"
IDS = {"f": [[0, 1], [1]]}


@pytest.fixture
def job(shared_job):
    shared_job.client.clear()
    return shared_job


class Two(nn.Module):
    """Bags and sequences of one feature, whose tables have one name, and another."""

    def __init__(self, name, device=META):
        super().__init__()
        settings = {"feature_names": ["f"]}
        bags = [EmbeddingBagConfig(NUM_IDS, DIM, name, **settings)]
        bags += [EmbeddingBagConfig(NUM_IDS, DIM, f"{name}_b", **settings)]
        rows = [EmbeddingConfig(80_000, DIM, name, **settings)]
        self.bags = EmbeddingBagCollection(tables=bags, device=device)
        self.rows = EmbeddingCollection(tables=rows, device=device)

    def forward(self, ids):
        pooled, sequence = self.bags(ids), self.rows(ids)["f"]
        return pooled.values().sum() + 2 * sequence.values().sum()


class Wrapped(nn.Module):
    """As DLRMTrain wraps a DLRM."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids)


def sharders_of(job, **settings):
    return remote_sharders(job.client, SGD(0.5), **settings)


def keys_of(name):
    return [
        f"bags.embedding_bags.{name}.weight",
        f"bags.embedding_bags.{name}_b.weight",
        f"rows.embeddings.{name}.weight",
    ]


def names_of(model):
    return [table.name for m in remote_modules(model) for table in m.spec.tables]


def filled(name):
    keys = keys_of(name)
    values = {keys[0]: torch.ones(NUM_IDS, DIM), keys[1]: torch.full((8, DIM), 2.0)}
    return {**values, keys[2]: torch.full((80_000, DIM), 3.0)}


def test_tables_of_one_name_are_several_and_said_in_one_line(job, caplog):
    caplog.set_level(logging.INFO)
    model = job.shard(Two("two"), sharders_of(job))
    assert names_of(model) == ["bags.two", "two_b", "rows.two"]
    lines = [r.getMessage() for r in caplog.records if "PATH.NAME" in r.getMessage()]
    assert len(lines) == 1
    assert "'bags.two'" in lines[0]


def test_states_agree_with_plain_key_by_key(job):
    model = job.shard(Two("plain"), sharders_of(job))
    given = filled("plain")
    assert list(model.state_dict()) == list(given)
    model.load_state_dict({key: value.clone() for key, value in given.items()})
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value.whole(), given[key])
    model(kjt_of(IDS)).backward()
    moved = model.state_dict()
    first = [float(moved[key][1, 0]) for key in keys_of("plain")]
    assert first == [1.0 - 0.5 * 2, 2.0 - 0.5 * 2, 3.0 - 0.5 * 4]
    plain = plain_state_dict(job.client, Two("plain"))
    assert {key: float(of[1, 0]) for key, of in plain.items()} == dict(
        zip(keys_of("plain"), first, strict=True)
    )
    optimizer = model.fused_optimizer.state_dict()["state"]
    assert list(optimizer) == keys_of("plain")


def test_each_has_its_own_optimizer_and_range_of_initial_weights(job):
    module = Two("own")
    for part, lr in ((module.bags, 0.5), (module.rows, 0.125)):
        apply(torch.optim.SGD, part.parameters(), {"lr": lr})
    model = job.shard(module, remote_sharders(job.client))
    assert job.client.table("bags.own").optimizer == SGD(0.5)
    assert job.client.table("rows.own").optimizer == SGD(0.125)
    rows = model.state_dict()["rows.embeddings.own.weight"][:NUM_IDS]
    assert rows.abs().max() <= 80_000**-0.5
    bags = model.state_dict()["bags.embedding_bags.own.weight"]
    assert bags.abs().max() > 80_000**-0.5


def test_load_weights_finds_each_by_its_path(job):
    sharders = sharders_of(job)
    model = job.shard(Wrapped(Two("paths")), sharders)
    sharders.load_weights({f"model.{k}": v for k, v in filled("paths").items()})
    found = [float(value[0, 0]) for value in model.state_dict().values()]
    assert found == [1.0, 2.0, 3.0]


def test_settings_name_one_table_or_all_of_a_name(job):
    settings = {
        "set": TableSettings(initializer=Constant(1.0)),
        "rows.set": TableSettings(initializer=Constant(3.0)),
    }
    model = job.shard(Two("set"), sharders_of(job, tables=settings))
    first = [float(value[0, 0]) for value in model.state_dict().values()]
    assert (first[0], first[2]) == (1.0, 3.0)


def test_settings_of_an_unknown_path_are_an_error_at_the_first_batch(job):
    settings = {"other.set": TableSettings(initializer=Constant(1.0))}
    model = job.shard(Two("set"), sharders_of(job, tables=settings))
    with pytest.raises(ConfigError, match=r"'other\.set'.*'rows\.set' meant|Is"):
        model(kjt_of(IDS))


def test_shared_names_are_one_table(job):
    module = Two("shared")
    module.rows.embedding_configs()[0].num_embeddings = NUM_IDS
    model = job.shard(module, sharders_of(job, shared={"shared"}))
    assert names_of(model) == ["shared", "shared_b", "shared"]


def test_a_wrapped_model_has_the_tables_of_the_model(job, caplog):
    train = job.shard(Wrapped(Two("wrapped")), sharders_of(job))
    evaluated = job.shard(Two("wrapped"), sharders_of(job))
    assert names_of(train) == names_of(evaluated)
    assert "are those of another model too" in caplog.text
    before = evaluated.eval()(kjt_of(IDS)).item()
    train(kjt_of(IDS)).backward()
    assert evaluated(kjt_of(IDS)).item() != before


def test_a_model_within_ddp_has_the_same_names(job):
    model = job.shard(Two("ddp"), sharders_of(job))
    wrapped = DistributedDataParallel(Wrapped(nn.Linear(1, 1)))
    wrapped.module.add_module("sparse", model)
    assert names_of(wrapped) == ["bags.ddp", "ddp_b", "rows.ddp"]


def test_a_namespace_stands_before_the_path(job):
    model = job.shard(Two("spaced"), sharders_of(job, namespace="teacher"))
    assert names_of(model) == [
        "teacher/bags.spaced",
        "teacher/spaced_b",
        "teacher/rows.spaced",
    ]
    assert list(model.state_dict()) == keys_of("spaced")


def test_sharders_that_are_given_one_by_one_know_each_other(job):
    sharders = [
        RemoteEmbeddingBagCollectionSharder(job.client, SGD(0.5)),
        RemoteEmbeddingCollectionSharder(job.client, SGD(0.5)),
    ]
    model = job.shard(Two("single"), sharders)
    assert names_of(model) == ["bags.single", "single_b", "rows.single"]


def test_a_mixed_collection_has_the_names_of_a_whole_one(job):
    bags = RemoteEmbeddingBagCollectionSharder(job.client, SGD(0.5))
    sharders = [
        MixedSharder(bags, Placement(local={"mixed_b"})),
        RemoteEmbeddingCollectionSharder(job.client, SGD(0.5)),
    ]
    model = job.shard(Two("mixed"), sharders)
    assert names_of(model) == ["bags.mixed", "rows.mixed"]


def test_the_same_collection_planned_twice_is_one(job):
    module, sharders = Two("again"), sharders_of(job)
    module.rows = nn.Identity()
    for part in (module.bags, module.bags):
        sharders[0].shardable_parameters(part)
    model = shard_model(module, *sharders)
    job.adopt(model)
    assert names_of(model) == ["again", "again_b"]


def test_a_second_collection_by_hand_is_an_error(job):
    module, sharders = Two("by hand"), sharders_of(job)
    first = shard_module(module.bags, row_wise(), device=CPU, sharder=sharders[0])
    with pytest.raises(ConfigError, match=r"'by hand' is in several .*shared=\{'by h"):
        shard_module(module.rows, row_wise(), device=CPU, sharder=sharders[1])
    assert first.spec.tables[0].name == "by hand"
    sharders.close()


def test_plans_by_hand_of_all_collections_name_them_by_path(job):
    module, sharders = Two("plans"), sharders_of(job)
    plan = {}
    for path, sharder in (("bags", sharders[0]), ("rows", sharders[1])):
        part = module.get_submodule(path)
        each = {name: row_wise() for name in sharder.shardable_parameters(part)}
        given = {"local_size": 1, "world_size": 1, "device_type": "cpu"}
        plan[path] = construct_module_sharding_plan(part, each, sharder, **given)
    model = DistributedModelParallel(
        module, sharders=sharders, plan=ShardingPlan(plan), device=CPU
    )
    job.adopt(model)
    assert names_of(model) == ["bags.plans", "plans_b", "rows.plans"]


@contextmanager
def client_of(servers):
    client = PatientClient.connect(servers.addresses)
    client.pulled = weakref.WeakSet()
    with closing(client):
        yield client


def test_a_checkpoint_of_one_collection_is_not_renamed(job, tmp_path):
    def put(module, client):
        sharders = remote_sharders(client, SGD(0.5))
        return sharders, shard_model(module, *sharders)

    with Servers() as servers, client_of(servers) as client:
        module = Two("later")
        module.rows = nn.Identity()
        sharders, model = put(module, client)
        model.load_state_dict(dict(list(filled("later").items())[:2]))
        save_checkpoint(tmp_path / "c", {}, client, sharders)
        sharders.close()
    with Servers() as servers, client_of(servers) as client:
        sharders, two = put(Two("later"), client)
        given = tmp_path / "c", {}, client
        with pytest.raises(CheckpointError, match=BOTH_WAYS):
            load_checkpoint(*given)
        load_checkpoint(*given, rename={"later": "bags.later"})
        assert float(two.state_dict()[keys_of("later")[0]][0, 0]) == 1.0
        sharders.close()
