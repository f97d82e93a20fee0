"""Collections and models that share a table, meant or not."""

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from persia_torchrec import (
    SGD,
    MixedSharder,
    Placement,
    RemoteEmbeddingBagCollectionSharder,
    plain_state_dict,
    remote_sharders,
)
from persia_torchrec.errors import ConfigError
from tests.support.models import bags_of
from tests.support.remote_job import CPU, META, kjt_of, remote_modules


def bags(table, feature="x", device=META):
    return bags_of([table], 20, feature=feature, device=device)


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
def test_a_collection_under_several_names_is_one(shared_job, sharders):
    shared_job.client.clear()
    model = shared_job.shard(TwoNames("two names"), sharders(shared_job.client))
    ids = kjt_of({"x": [[2**40]]})  # no row of a dense table
    before = model(ids)
    assert torch.equal(before, before[:1].expand_as(before))
    before.sum().backward()
    assert torch.equal(model(ids), before - 4)
    assert len(set(remote_modules(model))) == 1


class Towers(nn.Module):
    """Two collections, each with a table of the same name."""

    def __init__(self, table, device=META):
        super().__init__()
        self.user, self.item = bags(table, "u", device), bags(table, "i", device)

    def forward(self, ids):
        return self.user(ids).values(), self.item(ids).values()


def warnings_of(caplog):
    return [r.message for r in caplog.records if r.name.endswith("table_control")]


def sharing(shared_job, *names, **settings):
    return remote_sharders(shared_job.client, SGD(1.0), shared=names, **settings)


def test_collections_that_share_a_table_are_one_warning(shared_job, caplog):
    shared_job.shard(Towers("shared"), sharing(shared_job, "shared"))
    (warning,) = warnings_of(caplog)
    assert "tables ['shared'] are in several collections" in warning


def test_two_rates_of_one_table_are_an_error(shared_job):
    model = Towers("two rates")
    for tower, lr in ((model.user, 0.1), (model.item, 0.7)):
        _apply_optimizer_in_backward(torch.optim.SGD, tower.parameters(), {"lr": lr})
    with pytest.raises(ConfigError, match=r"one optimizer.*lr=0\.1.*lr=0\.7"):
        shared_job.shard(
            model, remote_sharders(shared_job.client, shared={"two rates"})
        )


def test_two_tensors_of_one_table_are_an_error(shared_job):
    model = shared_job.shard(Towers("two tensors"), sharing(shared_job, "two tensors"))
    local = Towers("two tensors", CPU)
    with pytest.raises(
        ConfigError, match=r"'two tensors' must be equal.*\['u'\].*\['i'\]"
    ):
        model.load_state_dict(local.state_dict())
    local.item.load_state_dict(local.user.state_dict())
    for _ in range(2):
        model.load_state_dict(local.state_dict())
        with torch.no_grad():
            for weight in local.parameters():
                weight.add_(1)


def test_a_model_with_the_tables_of_another_is_one_warning(shared_job, caplog):
    first = shared_job.shard(
        bags("twice"), remote_sharders(shared_job.client, SGD(1.0))
    )
    assert warnings_of(caplog) == []
    shared_job.shard(bags("twice"), remote_sharders(shared_job.client, SGD(1.0)))
    (warning,) = warnings_of(caplog)
    assert "tables ['twice'] are those of another model too" in warning
    assert first is not None


@pytest.mark.parametrize("make", [remote_sharders, mixed])
def test_a_namespace_parts_teacher_and_student(shared_job, caplog, make, tmp_path):
    ids, name = kjt_of({"x": [[3]]}), make.__name__

    def sharders(namespace):
        if make is mixed:
            bag_sharder = RemoteEmbeddingBagCollectionSharder(
                shared_job.client, SGD(1.0), namespace=namespace
            )
            return [MixedSharder(bag_sharder, Placement())]
        return remote_sharders(shared_job.client, SGD(1.0), namespace=namespace)

    of_teacher = sharders("teacher")
    teacher = shared_job.shard(bags(name), of_teacher)
    student = shared_job.shard(bags(name), sharders("student"))
    assert warnings_of(caplog) == []
    teacher(ids).values().sum().backward()
    teacher.eval()
    before = teacher(ids).values().clone()
    student(ids).values().sum().backward()
    assert torch.equal(teacher(ids).values(), before)
    assert shared_job.read(f"teacher/{name}", [3])[0].tolist() == before[0].tolist()
    state = teacher.state_dict()
    assert list(state) == [f"embedding_bags.{name}.weight"]
    student.load_state_dict(state)
    assert torch.equal(student(ids).values(), before)
    kept = plain_state_dict(shared_job.client, bags(name), namespace="student")
    assert kept[f"embedding_bags.{name}.weight"][3].tolist() == before[0].tolist()
