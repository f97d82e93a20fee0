"""What TorchRec's users do with a sharded module beside training it."""

import copy
import functools

import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.shard import shard as shard_module
from torchrec.distributed.shard import shard_modules
from torchrec.distributed.sharding_plan import row_wise, table_wise
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.fused_embedding_modules import FusedEmbeddingCollection
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from persia_torchrec import (
    SGD,
    Adagrad,
    MixedSharder,
    Placement,
    RemoteEmbeddingBagCollectionSharder,
    RemoteEmbeddingBagSharder,
    RemoteEmbeddingCollectionSharder,
    RemoteFusedEmbeddingCollectionSharder,
    TableSettings,
)
from persia_torchrec.errors import ConfigError
from tests.support import models
from tests.support.remote_job import CPU, META, Bags, kjt_of, shard

pytestmark = pytest.mark.slow

NUM_ROWS = 12
TABLES = [
    EmbeddingBagConfig(NUM_ROWS, 4, name="term", feature_names=["ad", "query"]),
    EmbeddingBagConfig(NUM_ROWS, 4, name="user", feature_names=["user"]),
]
IDS = {"ad": [[1, 2], []], "query": [[2], [3]], "user": [[5], [7, 7]]}


Tower = functools.partial(models.Tower, TABLES)


class Sums(Bags):
    def forward(self, ids):
        return super().forward(ids).values()


@pytest.fixture
def sharder(job):
    sharder = RemoteEmbeddingBagCollectionSharder(job.client, SGD(0.5))
    yield sharder
    sharder.close()


def rows_of(job, table):
    return torch.from_numpy(job.read(table, range(NUM_ROWS)).copy())


def step(model, ids=IDS):
    model(kjt_of(ids)).square().sum().backward()


class TestComposable:
    def test_modules_of_a_model_are_sharded_in_place(self, sharder):
        tower, other = Tower(), Tower(CPU)
        sharded = shard_modules(tower, device=CPU, sharders=[sharder])
        assert sharded is tower
        other.load_state_dict(sharded.state_dict())
        optimizer = torch.optim.SGD(other.bags.parameters(), lr=0.5)
        for _ in range(3):
            losses = [model(kjt_of(IDS)).square().sum() for model in (sharded, other)]
            torch.testing.assert_close(*losses)
            optimizer.zero_grad()
            for loss in losses:
                loss.backward()
            optimizer.step()
        sharder.flush()
        torch.testing.assert_close(
            sharded.state_dict()["bags.embedding_bags.term.weight"].whole(),
            other.state_dict()["bags.embedding_bags.term.weight"],
        )

    def test_one_module_is_sharded_by_a_plan(self, job, sharder):
        bags = EmbeddingBagCollection(tables=TABLES, device=META)
        sharded = shard_module(bags, plan=row_wise(), device=CPU, sharder=sharder)
        step_of_bags = sharded(kjt_of(IDS)).values()
        step_of_bags.sum().backward()
        assert set(sharded.module_sharding_plan) == {"term", "user"}
        assert job.client.num_rows() != [0, 0]

    def test_a_mixed_collection_is_sharded_as_any_other(self, job, sharder):
        mixed = MixedSharder(sharder, Placement(local={"term"}))
        tower, other = Tower(), Tower(CPU)
        names = [name for name, _ in tower.named_modules()]
        sharded = shard_modules(tower, device=CPU, sharders=[mixed])
        assert [name for name, _ in sharded.named_modules()] == names
        sharded.load_state_dict(other.state_dict())
        torch.testing.assert_close(sharded(kjt_of(IDS)), other(kjt_of(IDS)))
        step(sharded)
        assert not torch.equal(
            rows_of(job, "user")[7], other.bags.embedding_bags["user"].weight[7]
        )
        plan = {"term": table_wise(rank=0), "user": row_wise()}
        bags = EmbeddingBagCollection(tables=TABLES, device=META)
        same = RemoteEmbeddingBagCollectionSharder(job.client, SGD(0.5))
        mixed = MixedSharder(same, Placement(local={"term"}))
        alone = shard_module(bags, plan=plan, device=CPU, sharder=mixed)
        torch.testing.assert_close(
            alone.eval()(kjt_of(IDS))["user"], tower.bags.eval()(kjt_of(IDS))["user"]
        )


class TestAttributes:
    def test_collections_are_sharded_embedding_modules_of_torchrec(self, job):
        sharder = RemoteEmbeddingBagCollectionSharder(job.client, SGD(1.0))
        mixed = MixedSharder(sharder, Placement(local={"term"}))
        for each in (sharder, mixed):
            module = job.shard(Tower(), [each]).module.bags
            assert isinstance(module, ShardedEmbeddingModule)

    def test_they_are_where_torchrec_has_them(self, sharder):
        module = shard(Tower(), sharder).module.bags
        assert list(module.embedding_bags) == ["term", "user"]
        weight = module.embedding_bags["term"].weight
        assert isinstance(weight, nn.Parameter)
        assert weight.shape == (NUM_ROWS, 4)
        plan = module.module_sharding_plan["term"]
        assert (plan.sharding_type, plan.compute_kernel) == ("row_wise", "fused")

    def test_an_optimizer_of_the_collection_has_its_parameters(self, sharder):
        model = shard(Tower(), sharder)
        of_bags = {n: p for n, p in model.named_parameters() if "bags" in n}
        optimizer = KeyedOptimizerWrapper(
            of_bags, lambda params: torch.optim.SGD(params, lr=0.1)
        )
        step(model)
        optimizer.step()
        dense = dict(in_backward_optimizer_filter(model.named_parameters()))
        assert list(dense) == ["over.weight", "over.bias"]

    def test_a_new_plan_is_rejected_with_the_reason(self, job, sharder):
        model = shard(Tower(), sharder)
        plan = model.module.bags.module_sharding_plan
        with pytest.raises(ConfigError, match="every server holds the ids that hash"):
            model.reshard({"bags": (0.0, plan)}, "bags")
        with pytest.raises(ConfigError, match="cannot be resharded"):
            model.module.bags.update_shards(plan, None, CPU)
        mixed = MixedSharder(
            RemoteEmbeddingBagCollectionSharder(job.client, SGD(0.5)),
            Placement(local={"user"}),
        )
        model = job.shard(Tower(), [mixed])
        with pytest.raises(ConfigError, match="a collection of their own"):
            model.reshard({"bags": (0.0, plan)}, "bags")


class TestFreeze:
    def test_a_frozen_table_keeps_its_rows_and_the_others_train(self, job):
        model = job.put_on_servers(
            Sums(TABLES), Adagrad(0.5), tables={"user": TableSettings(is_frozen=True)}
        )
        step(model)
        before = [rows_of(job, table) for table in ("term", "user")]
        assert before[1][[5, 7], :4].abs().min() > 0  # ids get their rows
        for _ in range(2):
            step(model)
        after = [rows_of(job, table) for table in ("term", "user")]
        assert not torch.equal(after[0], before[0])
        assert torch.equal(after[1], before[1])

    @pytest.mark.parametrize("staleness", [0, 3])
    def test_tables_are_frozen_and_train_again_between_steps(self, job, staleness):
        sharder = RemoteEmbeddingBagCollectionSharder(job.client, SGD(1.0), staleness)
        model = shard(Bags(TABLES), sharder)
        moves = []
        for is_frozen in (False, True, False):
            sharder.freeze(["user"], is_frozen=is_frozen)
            sharder.flush()
            start = {table: rows_of(job, table) for table in ("term", "user")}
            model(kjt_of(IDS)).values().sum().backward()
            sharder.flush()
            moved = {t: rows_of(job, t) - rows for t, rows in start.items()}
            moves.append((moved["term"][2, 0].item(), moved["user"][7, 0].item()))
        assert moves[1][0] == pytest.approx(-2.0)
        assert moves[1][1] == 0.0
        assert moves[2] == pytest.approx((-2.0, -2.0))
        with pytest.raises(ConfigError, match=r"among those sharded.*\['unknown'\]"):
            sharder.freeze(["unknown"])
        sharder.close()


@pytest.mark.parametrize("staleness", [0, 2])
def test_each_backward_pass_through_a_forward_pass_takes_a_step(job, staleness):
    sharder = RemoteEmbeddingBagCollectionSharder(job.client, SGD(0.5), staleness)
    model, plain = job.shard(Tower(), [sharder]), Tower(CPU)
    plain.load_state_dict(model.state_dict())
    output = model(kjt_of(IDS)).sum()
    for factor in (1.0, 2.0, -0.5):
        (factor * output).backward(retain_graph=True)
    sharder.flush()
    plain(kjt_of(IDS)).sum().backward()
    for table in ("term", "user"):
        weight = plain.bags.embedding_bags[table].weight
        rows = model.state_dict()[f"bags.embedding_bags.{table}.weight"]
        expected = weight.detach() - 0.5 * (1.0 + 2.0 - 0.5) * weight.grad
        torch.testing.assert_close(rows.whole(), expected)


class Single(nn.Module):
    """One embedding bag of torch."""

    def __init__(self, mode="sum", device=META):
        super().__init__()
        self.bag = nn.EmbeddingBag(
            NUM_ROWS, 4, mode=mode, include_last_offset=True, device=device
        )

    def forward(self, *args, **kwargs):
        return self.bag(*args, **kwargs)


class TestEmbeddingBag:
    @pytest.mark.parametrize(
        ("mode", "is_weighted"), [("sum", False), ("sum", True), ("mean", False)]
    )
    def test_it_trains_as_torchs(self, job, sharder, mode, is_weighted):
        model = shard(Single(mode), RemoteEmbeddingBagSharder(sharder))
        plain = Single(mode, CPU)
        assert list(model.state_dict()) == ["bag.weight"]
        model.load_state_dict(dict(plain.state_dict()))
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
        ids, offsets = torch.tensor([3, 1, 1, 7]), torch.tensor([0, 2, 2, 4])
        weights = {}
        if is_weighted:
            weights["per_sample_weights"] = torch.tensor([1.0, 2.0, 0.5, 3.0])
        for _ in range(3):
            outputs = [of(ids, offsets, **weights) for of in (model, plain)]
            torch.testing.assert_close(*[output + 0 for output in outputs])
            optimizer.zero_grad()
            for output in outputs:
                output.square().sum().backward()
            optimizer.step()
        rows = torch.from_numpy(job.read("bag", range(NUM_ROWS)).copy())
        torch.testing.assert_close(rows, plain.bag.weight.detach())

    def test_a_bag_per_line_and_torchs_offsets_are_taken_too(self, sharder):
        model = shard(Single(), RemoteEmbeddingBagSharder(sharder))
        plain = nn.EmbeddingBag(NUM_ROWS, 4, mode="sum")
        model.load_state_dict({"bag.weight": plain.weight.detach()})
        lines = torch.tensor([[1, 2], [3, 3]])
        with torch.no_grad():
            torch.testing.assert_close(model(lines) + 0, plain(lines))
            flat = torch.tensor([1, 2, 3]), torch.tensor([0, 2])
            torch.testing.assert_close(model(*flat) + 0, plain(*flat))

    def test_unsupported_settings_are_rejected(self, sharder):
        with pytest.raises(ConfigError, match=r"'bag'.*Received: {'mode': 'max'}"):
            shard(Single("max"), RemoteEmbeddingBagSharder(sharder))


def test_a_fused_collection_of_sequences_brings_its_optimizer(job):
    sequences = RemoteEmbeddingCollectionSharder(job.client, SGD(9.0))
    config = EmbeddingConfig(
        num_embeddings=NUM_ROWS, embedding_dim=4, name="page", feature_names=["page"]
    )
    fused = FusedEmbeddingCollection(
        [config], torch.optim.SGD, {"lr": 0.5}, device=META
    )
    sharders = [RemoteFusedEmbeddingCollectionSharder(sequences)]
    model = job.shard(nn.ModuleDict({"words": fused}), sharders)
    plain = EmbeddingCollection(tables=[config], device=CPU)
    state = {f"words.{key}": value for key, value in plain.state_dict().items()}
    model.load_state_dict(state)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    ids = kjt_of({"page": [[1, 2, 1], [], [5]]})
    for _ in range(3):
        outputs = [of(ids)["page"] for of in (model.module["words"], plain)]
        torch.testing.assert_close(*[output.values() for output in outputs])
        optimizer.zero_grad()
        for output in outputs:
            output.values().square().sum().backward()
        optimizer.step()
    sequences.flush()
    weight = plain.embeddings["page"].weight.detach()
    torch.testing.assert_close(rows_of(job, "page"), weight)
    sequences.close()


def test_an_exported_model_is_quantised_as_any_other(job, sharder):
    model = shard(Tower(), sharder)
    for _ in range(3):
        step(model)
    sharder.flush()
    exported = Tower(CPU)
    exported.load_state_dict(model.state_dict())
    quantised = quantize_embeddings(copy.deepcopy(exported), torch.qint8, inplace=True)
    with torch.no_grad():
        expected, output = exported(kjt_of(IDS)), quantised(kjt_of(IDS))
    torch.testing.assert_close(output, expected, rtol=0.05, atol=0.01)
    assert not isinstance(quantised.bags, EmbeddingBagCollection)
