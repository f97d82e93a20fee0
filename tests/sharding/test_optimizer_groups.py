"""Parameter groups of a model's fused optimizer: those of TorchRec's."""

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply
from torchrec import EmbeddingBagCollection, PoolingType
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.keyed import CombinedOptimizer

from persia_torchrec import remote_sharders
from persia_torchrec.sharding.optimizer import restore_groups
from tests.support.models import sequences_of, tables_of
from tests.support.remote_job import META, kjt_of, shard

FUSED = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
LR, IDS = 0.5, {"f": [[0, 1]]}
BAGS = {
    "a": {},
    "b": {},
    "mean": {"pooling": PoolingType.MEAN},
    "short": {"data_type": DataType.FP16},
    "slow": {},
}


class Model(nn.Module):
    """Bags that differ in pooling, dtype and rate, and rows."""

    def __init__(self):
        super().__init__()
        tables = [tables_of([n], feature="f", **BAGS[n])[0] for n in BAGS]
        self.bags = EmbeddingBagCollection(tables=tables, device=META)
        self.rows = sequences_of("xy", feature="f")
        for name, parameter in self.named_parameters():
            rate = LR / 2 if "slow" in name else LR
            apply(torch.optim.SGD, [parameter], {"lr": rate})

    def forward(self, ids):
        return self.bags(ids).values().sum()


@pytest.fixture
def sharders(shared_job):
    made = remote_sharders(shared_job.client)
    yield made
    made.close()


@pytest.fixture
def model(shared_job, sharders):
    shared_job.client.clear()
    return shard(Model(), *sharders)


def keys_of(optimizer):
    """Return the keys of each group, by what a state dict has of them."""
    optimizer.save_param_groups(True)
    groups = optimizer.state_dict()["param_groups"]
    return sorted((sorted(g["params"]), g["lr"]) for g in groups)


def group_of(model, table):
    (index,) = (
        index
        for index, group in enumerate(model.fused_optimizer.param_groups)
        if any(f".{table}." in key for key in keys_at(model, group))
    )
    return model.fused_optimizer.param_groups[index]


def keys_at(model, group):
    names = {param: key for key, param in model.fused_optimizer.params.items()}
    return [names[param] for param in group["params"]]


def rates_of(sharders):
    return sharders.optimizer.learning_rates()


def test_they_are_those_of_plain(model):
    constraints = dict.fromkeys([*BAGS, "x", "y"], FUSED)
    tables = EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()
    plain = shard(Model(), *tables, constraints=constraints)
    assert keys_of(model.fused_optimizer) == keys_of(plain.fused_optimizer)
    assert len(model.fused_optimizer.param_groups) == 5
    state = plain.fused_optimizer.state_dict()["param_groups"]
    of_model = model.fused_optimizer.state_dict()
    model.fused_optimizer.load_state_dict({**of_model, "param_groups": state})


def test_a_schedule_of_a_group_moves_all_its_tables(shared_job, model, sharders):
    group = group_of(model, "a")
    schedule = torch.optim.lr_scheduler.StepLR(model.fused_optimizer, 1, gamma=0.5)
    model(kjt_of(IDS)).backward()
    model.fused_optimizer.step()
    schedule.step()
    assert group["lr"] == LR / 2
    model(kjt_of(IDS)).backward()
    sharders.flush()
    found = {name: shared_job.client.table(name).optimizer.lr for name in BAGS}
    assert found == {**dict.fromkeys(BAGS, LR / 2), "slow": LR / 4}
    assert {rates_of(sharders)[name] for name in BAGS} == {LR / 2, LR / 4}


def test_rates_of_tables_are_in_their_group(model, sharders):
    sharders.set_learning_rate(0.125)
    assert {group["lr"] for group in model.fused_optimizer.param_groups} == {0.125}
    for group in sharders.optimizer.param_groups:
        group["lr"] = 0.25
    sharders.optimizer.step()
    assert {group["lr"] for group in model.fused_optimizer.param_groups} == {0.25}


def test_a_table_whose_rate_is_set_alone_keeps_it_until_the_groups_changes(
    model, sharders
):
    sharders.set_learning_rate(0.125, ["a"])
    group = group_of(model, "a")
    model.fused_optimizer.step()
    assert group["lr"] == LR
    assert rates_of(sharders)["a"] == 0.125
    assert rates_of(sharders)["b"] == LR
    group["lr"] = 0.75
    assert {rates_of(sharders)[name] for name in "ab"} == {0.75}


def test_a_rate_set_by_hand_wins_over_an_earlier_one_of_the_group(model, sharders):
    group_of(model, "a")["lr"] = 0.75
    sharders.set_learning_rate(0.125, ["a"])
    assert rates_of(sharders)["a"] == 0.125
    assert rates_of(sharders)["b"] == 0.75


def test_a_rate_that_is_a_tensor_stays_one(model, sharders):
    group, rate = group_of(model, "a"), torch.tensor(0.75)
    group["lr"] = rate
    assert rates_of(sharders)["a"] == 0.75
    sharders.set_learning_rate(0.25)
    assert group["lr"] is rate
    assert float(rate) == 0.25


def test_groups_of_an_earlier_version_restore_those_of_the_dense_half(model):
    dense = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)
    groups = [*model.fused_optimizer.param_groups, *dense.param_groups]
    per_table = [{"lr": 9.0, "table": name} for name in [*BAGS, "x", "y"]]
    restore_groups(groups, [*per_table, {"lr": 0.5}])
    assert dense.param_groups[0]["lr"] == 0.5
    assert 9.0 not in [group["lr"] for group in groups]


def test_a_combined_optimizer_shows_a_rate_per_group(model):
    both = CombinedOptimizer([("tables", model.fused_optimizer)])
    assert [g["lr"] for g in both.param_groups].count(LR) == 4
