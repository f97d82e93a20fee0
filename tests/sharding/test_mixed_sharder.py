import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from persia_torchrec import (
    SGD,
    MixedSharder,
    Placement,
    RemoteEmbeddingBagCollectionSharder,
    RemoteEmbeddingCollectionSharder,
    RemoteFusedEmbeddingBagCollectionSharder,
    TableSettings,
    describe_placement,
)
from persia_torchrec.errors import BatchError, ConfigError
from persia_torchrec.sharding import torchrec_api
from persia_torchrec.sharding.mixed import ShardedMixedEmbeddingBagCollection
from persia_torchrec.sharding.sharded_module import ShardedRemoteEmbeddingBagCollection
from tests.sharding.mixed_model import (
    ADAGRAD,
    COLUMNS,
    FUSED,
    KEYS,
    LOCAL,
    NUM_IDS,
    REMOTE,
    WIDTHS,
    CpuSharder,
    Model,
    batches,
    constraints,
    put_some_on_servers,
    train,
)
from tests.support.remote_job import (
    CPU,
    META,
    Bags,
    kjt_of,
    remote_modules,
    shard,
    tensors_of,
)

pytestmark = pytest.mark.slow


def mixed_sharder(job, placement=None, local=None, **settings):
    remote = RemoteEmbeddingBagCollectionSharder(job.client, ADAGRAD, **settings)
    return MixedSharder(remote, placement or Placement(local=LOCAL), local)


def plan_of(model):
    plan = model.plan.get_plan_for_module("bags")
    return {name: (p.sharding_type, p.compute_kernel) for name, p in plan.items()}


def two_tables(user_rows=100, item_rows=10):
    return [
        EmbeddingBagConfig(user_rows, 8, name="user", feature_names=["user"]),
        EmbeddingBagConfig(item_rows, 4, name="item", feature_names=["item"]),
    ]


# What the planner plans.


def test_the_stock_planner_plans_every_table_without_constraints(job):
    model = put_some_on_servers(job)
    plan = plan_of(model)
    assert set(plan) == {*LOCAL, *REMOTE}
    assert {plan[table] for table in REMOTE} == {("row_wise", "fused")}
    (local,) = {type(m) for m in model.modules() if "Mixed" in type(m).__name__}
    assert local is ShardedMixedEmbeddingBagCollection


def test_a_model_needs_no_planner_of_its_own(job):
    sharder = mixed_sharder(job, Placement(min_rows=50))
    model = DistributedModelParallel(Bags(two_tables()), sharders=[sharder])
    job.adopt(model)
    assert set(tensors_of(model)) == {"bags.embedding_bags.item.weight"}
    model(kjt_of({"user": [[2**50], []], "item": [[7], [7]]})).values().sum().backward()
    assert job.total("rows") == 1


def test_tables_on_the_servers_are_never_data_parallel_nor_by_columns(job):
    sharder = mixed_sharder(job)
    on_servers = {table: {"row_wise"} for table in REMOTE}
    offered = {}
    for name, _ in sharder.shardable_parameters(Model().bags).items():  # noqa: PERF102
        offered[name] = set(sharder.sharding_types("cuda"))
    assert {table: offered[table] for table in REMOTE} == on_servers
    everything = set(EmbeddingBagCollectionSharder().sharding_types("cuda"))
    assert all(offered[table] == everything for table in LOCAL)


def test_local_tables_are_offered_the_kernels_of_torchrec(job):
    sharder, stock = mixed_sharder(job), EmbeddingBagCollectionSharder()
    for name, _ in sharder.shardable_parameters(Model().bags).items():  # noqa: PERF102
        kernels = {
            kind: sharder.compute_kernels(kind, "cuda")
            for kind in sharder.sharding_types("cuda")
        }
        if name in REMOTE:
            assert kernels == {"row_wise": ["fused"]}
        else:
            assert kernels["row_wise"] == stock.compute_kernels("row_wise", "cuda")
            assert kernels["data_parallel"] == ["dense"]


def test_a_planner_that_does_not_iterate_is_offered_both_kinds(job):
    sharder = mixed_sharder(job)
    parameters = sharder.shardable_parameters(Model().bags)
    for _ in parameters.items():
        break  # a planner that fails in the middle
    assert set(sharder.sharding_types("cpu")) == {
        *EmbeddingBagCollectionSharder().sharding_types("cpu"),
        "row_wise",
    }


def test_a_constraint_that_a_table_on_the_servers_cannot_meet_is_rejected(job):
    with pytest.raises(RuntimeError, match=r"constraints for user\. .*MixedSharder"):
        put_some_on_servers(job, constraints=constraints("table_wise", ["user"]))


def test_the_constraints_for_the_planner_tell_where_a_table_lies(job):
    told = constraints("data_parallel", ["term"]) | constraints("table_wise", ["home"])
    model = put_some_on_servers(
        job, constraints=told, placement=Placement(constraints=told)
    )
    assert plan_of(model) == {
        "user": ("row_wise", "fused"),
        "term": ("data_parallel", "dense"),
        "item": ("row_wise", "fused"),
        "home": ("table_wise", "fused"),
        "place": ("row_wise", "fused"),
    }
    assert job.client.table("place").dim == 4


def plan_within(job, num_bytes, placement):
    """Plan two tables for a trainer of little memory."""
    topology = Topology(world_size=1, compute_device="cpu", ddr_cap=num_bytes)
    planner = EmbeddingShardingPlanner(topology=topology)
    model = Bags(two_tables(user_rows=10**7))
    return planner.collective_plan(
        model, [mixed_sharder(job, placement)], dist.GroupMember.WORLD
    )


def test_a_local_table_that_no_trainer_can_hold_is_rejected_by_the_planner(job):
    with pytest.raises(PlannerError, match="Unable to find a plan"):
        plan_within(job, 10**8, Placement(local=["user", "item"]))


def test_a_table_on_the_servers_takes_no_memory_of_the_trainers(job):
    plan = plan_within(job, 10**8, Placement(min_rows=10**6))
    assert plan.get_plan_for_module("bags").keys() == {"user", "item"}


# What the sharded model is.


def test_the_state_dict_holds_local_and_remote_tables(job):
    model = put_some_on_servers(job, constraints=constraints("table_wise"))
    dense = {f"over.{layer}.{name}" for layer in (0, 2) for name in ("weight", "bias")}
    local = {f"bags.embedding_bags.{table}.weight" for table in LOCAL}
    remote = {f"bags.embedding_bags.{table}.weight" for table in REMOTE}
    assert set(tensors_of(model)) == dense | local
    assert model.state_dict().keys() == Model().state_dict().keys()
    assert {name for name, _ in model.named_parameters()} == dense | local | remote
    assert set(model.fused_optimizer.state_dict()["state"]) == local | remote


def test_the_fused_optimizer_schedules_local_and_remote_tables(job):
    model = put_some_on_servers(job, constraints=constraints("table_wise"))
    optimizer = model.fused_optimizer
    names = {f"bags.embedding_bags.{table}.weight" for table in (*LOCAL, *REMOTE)}
    assert set(optimizer.params) == names
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    ids, labels = next(batches(1))
    train(model, [(ids, labels)])
    before = model.module.bags(ids).values().detach().clone()
    train(model, [(ids, labels)])
    assert torch.equal(model.module.bags(ids).values(), before)


def test_a_reset_reaches_local_and_remote_tables(job):
    model = put_some_on_servers(job, constraints=constraints("table_wise"))
    ids, labels = next(batches(1))
    train(model, [(ids, torch.zeros_like(labels))])
    trained = model.module.bags(ids).to_dict()
    model.module.bags.reset_parameters()
    new = model.module.bags(ids).to_dict()
    assert all(not torch.equal(new[name], trained[name]) for name in COLUMNS)
    model.module.bags.reset_parameters()
    again = model.module.bags(ids).to_dict()
    for name in ("user@user", "item"):  # drawn by id
        assert torch.equal(again[name], new[name])


def test_a_checkpoint_of_the_local_half_loads_strictly(job):
    model = put_some_on_servers(job, constraints=constraints("data_parallel"))
    state = copy.deepcopy(model.state_dict())
    train(model, batches(2))
    assert not all(torch.equal(v, state[key]) for key, v in tensors_of(model).items())
    model.load_state_dict(dict(state), strict=True)  # TorchRec changes the keys
    assert all(torch.equal(v, state[key]) for key, v in tensors_of(model).items())


def test_rows_of_the_servers_are_missing_or_loaded_as_elsewhere(job):
    model = put_some_on_servers(job, constraints=constraints("data_parallel"))
    key = "bags.embedding_bags.user.weight"
    state = dict(model.state_dict())
    del state[key]
    with pytest.raises(RuntimeError, match=r"Missing key.*user\.weight"):
        model.load_state_dict(dict(state), strict=True)
    model.load_state_dict(dict(state), strict=False)
    ones = torch.ones(NUM_IDS, 8)
    model.load_state_dict({**state, key: ones}, strict=False)
    assert torch.equal(model.state_dict()[key].whole(), ones)


def test_data_parallel_tables_are_wrapped_as_in_torchrec(job):
    model = put_some_on_servers(job, constraints=constraints("data_parallel"))
    lookups = model.module.bags._lookups
    assert [type(lookup) for lookup in lookups] == [nn.parallel.DistributedDataParallel]
    assert not any(table in str(model.fused_optimizer.params) for table in LOCAL)


def test_optimizers_that_apply_in_the_backward_pass_are_the_local_tables_own(job):
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": 0.5})
    told = constraints("table_wise")
    sharded = shard(model, mixed_sharder(job), constraints=told)
    job.adopt(sharded)
    rows = sharded.state_dict()["bags.embedding_bags.home.weight"].local_shards()[0]
    before = rows.tensor.clone()
    ids = kjt_of({key: [[3]] for key in KEYS})
    sharded.module.bags(ids)["user@home"].sum().backward()
    moved = (rows.tensor - before)[3]
    assert torch.allclose(moved, torch.full((8,), -0.5))
    assert "EXACT_SGD" in describe_placement(sharded)


def test_the_columns_are_in_the_order_of_the_unsharded_collection(job):
    told = constraints("table_wise", ["term"]) | constraints("data_parallel", ["home"])
    model = put_some_on_servers(job, constraints=told)
    ids, _ = next(batches(1))
    pooled = model.module.bags(ids)
    assert pooled.keys() == COLUMNS
    assert pooled.length_per_key() == WIDTHS
    unsharded = EmbeddingBagCollection(tables=Model().bags.embedding_bag_configs())
    assert unsharded(ids).keys() == pooled.keys()
    user, home = pooled["user@user"], pooled["user@home"]
    assert not torch.equal(user, home)


def test_the_steps_of_torchrec_may_be_taken_one_by_one(job):
    bags = put_some_on_servers(job, constraints=constraints("table_wise")).module.bags
    bags.eval()
    ids, _ = next(batches(1))
    ctx = bags.create_context()
    given = bags.input_dist(ctx, ids).wait().wait()
    pooled = bags.output_dist(ctx, bags.compute(ctx, given)).wait()
    assert pooled.keys() == COLUMNS
    assert torch.equal(pooled.values(), bags(ids).values())


def test_a_collection_that_is_wholly_on_one_side_is_that_sides_own(job):
    on_servers = shard(Model(), mixed_sharder(job, Placement()))
    job.adopt(on_servers)
    assert type(on_servers.module.bags) is ShardedRemoteEmbeddingBagCollection
    on_trainers = shard(Model(), mixed_sharder(job, Placement(min_rows=10**9)))
    assert type(on_trainers.module.bags) is ShardedEmbeddingBagCollection
    assert train(on_trainers, batches(2)).shape == (2,)
    assert remote_modules(on_trainers) == []


def test_weights_of_a_collection_that_has_some_are_left_where_they_are(job):
    """TorchRec draws them again on CPUs; the collection is not written to."""
    model = Model()
    model.bags = EmbeddingBagCollection(tables=model.bags.embedding_bag_configs())
    before = {key: value.clone() for key, value in model.bags.state_dict().items()}
    bags = model.bags
    job.adopt(shard(model, mixed_sharder(job)))
    assert all(torch.equal(bags.state_dict()[key], before[key]) for key in before)


def test_in_evaluation_neither_half_learns(job):
    model = put_some_on_servers(job, constraints=constraints("table_wise"))
    ids, _ = next(batches(1))
    model.eval()
    with torch.no_grad():
        pooled = model.module.bags(ids)
        assert float(pooled["user@user"].abs().sum()) > 0  # what rows would begin with
        assert float(pooled["user@home"].abs().sum()) > 0
    assert job.total("rows") == 0


def test_a_batch_without_a_feature_of_the_servers_is_rejected_and_the_next_trains(job):
    model = put_some_on_servers(job)
    train(model, batches(1))
    with pytest.raises(BatchError, match="item"):
        model(kjt_of({key: [[1]] for key in KEYS if key != "item"}))
    assert train(model, batches(2)).shape == (2,)
    assert job.total("open_batches") == 0


def test_a_batch_without_a_local_feature_is_rejected_before_anything_is_pulled(job):
    model = put_some_on_servers(job)
    with pytest.raises(ValueError, match="place"):
        model(kjt_of({key: [[1]] for key in KEYS if key != "place"}))
    assert job.total("requests_lookup") == 0


def test_a_mixed_collection_cannot_be_copied_to_another_device(job):
    model = put_some_on_servers(job)
    with pytest.raises(ConfigError, match="cannot be copied, nor "):
        model.module.bags.copy(CPU)


# What is rejected when a model is planned or sharded.


def test_a_placement_of_an_unknown_table_is_rejected(job):
    with pytest.raises(ConfigError, match=r"'plaec'. Is 'place' meant"):
        put_some_on_servers(job, placement=Placement(local=["plaec"]))


def test_settings_of_a_local_table_are_rejected_by_the_remote_sharder(job):
    settings = {"home": TableSettings(optimizer=SGD(1.0))}
    with pytest.raises(ConfigError, match="Received: 'home'"):
        put_some_on_servers(job, tables=settings)


def test_a_plan_of_another_placement_is_rejected(job):
    pg = dist.GroupMember.WORLD
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu")
    )
    everything = mixed_sharder(job, Placement())
    plan = planner.collective_plan(Model(), [everything], pg)
    with pytest.raises(ConfigError, match=r"table 'term' lies under TorchRec"):
        DistributedModelParallel(Model(), sharders=[mixed_sharder(job)], plan=plan)
    stock = EmbeddingBagCollectionSharder()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu")
    )
    plan = planner.collective_plan(Model(), [stock], pg)
    with pytest.raises(ConfigError, match=r"table 'user' lies on the servers"):
        DistributedModelParallel(Model(), sharders=[mixed_sharder(job)], plan=plan)


def test_a_plan_made_by_hand_is_followed(job):
    sharder, model = mixed_sharder(job, local=CpuSharder(FUSED)), Model()
    by_hand = {
        "user": row_wise(),
        "term": data_parallel(),
        "item": row_wise(),
        "home": row_wise(compute_kernel="fused"),
        "place": table_wise(rank=0, compute_kernel="fused"),
    }
    plan = construct_module_sharding_plan(
        model.bags, by_hand, sharder, local_size=1, world_size=1, device_type="cpu"
    )
    plan = ShardingPlan({"bags": plan})
    model = DistributedModelParallel(model, sharders=[sharder], plan=plan)
    job.adopt(model)
    losses = train(model, batches(3))
    assert losses[-1] != losses[0]
    assert job.total("rows") > 0


def test_a_plan_without_one_of_the_tables_is_rejected(job):
    sharder = mixed_sharder(job)
    with pytest.raises(ConfigError, match="The plan must name the tables"):
        sharder.shard(Model().bags, {}, None)


def test_a_local_sharder_of_another_kind_is_rejected(job):
    with pytest.raises(ConfigError, match="must be a EmbeddingBagCollectionSharder"):
        mixed_sharder(job, local=EmbeddingCollectionSharder())


# What lies where.


def test_the_placement_of_a_model_can_be_read(job):
    told = (
        constraints("data_parallel", ["term"])
        | constraints("table_wise", ["home"])
        | constraints("row_wise", ["place"])
    )
    model = put_some_on_servers(job, constraints=told)
    assert describe_placement(model).splitlines() == [
        "collection  table  place                ranks  rows  dim  optimizer",
        "bags        term   data_parallel dense  0      40    16   the model's",
        "bags        home   table_wise fused     0      40    8    EXACT_ADAGRAD",
        "bags        place  row_wise fused       0      40    4    EXACT_ADAGRAD",
        "bags        user   servers              -      any   8    Adagrad",
        "bags        item   servers              -      any   4    Adagrad",
    ]
    assert NUM_IDS == 40


class TwoCollections(nn.Module):
    """Bags, some on the servers, and sequences that TorchRec shards."""

    def __init__(self):
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=two_tables(), device=META)
        config = EmbeddingConfig(20, 4, name="clicks", feature_names=["click"])
        self.sequences = EmbeddingCollection(tables=[config], device=META)

    def forward(self, ids):
        pooled = self.bags(ids).values().sum(1)
        clicks = self.sequences(ids)["click"].values()
        return pooled.mean() + clicks.sum()


def test_it_works_with_sharders_of_other_modules(job):
    sharders = [
        mixed_sharder(job, Placement(min_rows=50)),
        EmbeddingCollectionSharder(),
    ]
    model = DistributedModelParallel(TwoCollections(), sharders=sharders)
    job.adopt(model)
    ids = kjt_of({"user": [[1], [2]], "item": [[3], []], "click": [[4, 4], [5]]})
    model(ids).backward()
    places = [line.split()[:3] for line in describe_placement(model).splitlines()[1:]]
    assert sorted((c, t, p == "servers") for c, t, p in places) == [
        ("bags", "item", False),
        ("bags", "user", True),
        ("sequences", "clicks", False),
    ]
    assert job.total("rows") == 2


def test_only_sharders_of_the_two_collections_are_mixed(job):
    bags = RemoteEmbeddingBagCollectionSharder(job.client)
    fused = RemoteFusedEmbeddingBagCollectionSharder(bags)
    with pytest.raises(ConfigError, match="Received: RemoteFused"):
        MixedSharder(fused, Placement())


def test_a_weighted_collection_may_be_mixed(job):
    model = Bags(two_tables())
    model.bags = EmbeddingBagCollection(two_tables(), is_weighted=True, device=META)
    sharder = mixed_sharder(job, Placement(min_rows=50))
    model = shard(model, sharder, constraints=constraints("table_wise", ["item"]))
    job.adopt(model)
    ids = kjt_of({"user": [[2**50, 8], []], "item": [[7], [7]]})
    weights = torch.tensor([2.0, 1.0, 3.0, 0.5])
    weighted = KeyedJaggedTensor(
        ids.keys(), ids.values(), weights, lengths=ids.lengths()
    )
    pooled = model(weighted)
    of_user = pooled["user"][0]  # the rows are there from now on
    rows = torch.from_numpy(job.read("user", [2**50, 8])[:, :8].copy())
    assert torch.allclose(of_user, 2 * rows[0] + rows[1])
    item = model.state_dict()["bags.embedding_bags.item.weight"].local_shards()[0]
    expected = item.tensor[7] * torch.tensor([[3.0], [0.5]])
    assert torch.allclose(pooled["item"], expected)


def test_a_feature_twice_in_a_table_has_two_columns_local_and_remote(job):
    configs = [
        EmbeddingBagConfig(10, 4, name=name, feature_names=["ad", "page", "ad"])
        for name in ("near", "far")
    ]
    remote = RemoteEmbeddingBagCollectionSharder(job.client, SGD(1.0))
    sharder = MixedSharder(remote, Placement(remote=["far"], min_rows=100))
    told = constraints("table_wise", ["near"])
    model = shard(Bags(configs), sharder, constraints=told)
    job.adopt(model)
    ids = kjt_of({"page": [[1]], "ad": [[2]]})
    output = model(ids).wait()
    assert output.keys() == Bags(configs, device=CPU)(ids).keys()
    before = torch.from_numpy(job.read("far", [2, 1, 2]).copy())
    columns = output.values().detach().reshape(6, 4)
    assert torch.equal(columns[3:], before)
    assert torch.equal(columns[0], columns[2])
    output.values().sum().backward()
    moved = before - torch.from_numpy(job.read("far", [2, 1, 2]))
    torch.testing.assert_close(moved[:, 0], torch.tensor([2.0, 1.0, 2.0]))
    near = model.state_dict()["bags.embedding_bags.near.weight"].local_shards()[0]
    moved = columns[:3] - near.tensor[[2, 1, 2]]  # fbgemm's learning rate is 0.01
    torch.testing.assert_close(moved[:, 0], torch.tensor([0.02, 0.01, 0.02]))


def test_sequences_are_rejected_where_torchrec_cannot_split_them(job, monkeypatch):
    monkeypatch.setattr(torchrec_api, "MIXES_SEQUENCES", False)
    remote = RemoteEmbeddingCollectionSharder(job.client, SGD(1.0))
    with pytest.raises(ConfigError, match=r"needs torchrec 1.8 or newer, with torch"):
        MixedSharder(remote, Placement())
