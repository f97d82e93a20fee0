"""Tables for which neither script, model nor sharder names an optimizer."""

import logging

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints

from persia_torchrec import (
    SGD,
    Adagrad,
    MixedSharder,
    Placement,
    RemoteEmbeddingBagCollectionSharder,
    TableSettings,
    remote_sharders,
)
from persia_torchrec.errors import PersiaError
from tests.support.models import BothKinds, bags_of, sequences_of
from tests.support.remote_job import kjt_of, shard

IDS = {"f": [[0, 1], [1]], "g": [[2], [0, 2]]}
START = torch.linspace(-1, 1, 12).view(3, 4)


def make_model(bag="bag", row="row"):
    """Return bags and sequences, one table each."""
    rows = sequences_of([row], 3, feature="g")
    return BothKinds(bags_of([bag], 3, feature="f"), rows)


def fill(model):
    tables = {key: START for key in model.state_dict() if "row" in key or "bag" in key}
    model.load_state_dict(tables)
    return tables


def train(model, num_steps=2):
    for _ in range(num_steps):
        (10 * model(kjt_of(IDS))).backward()


def weights(model, sharded):
    """Return the rows of both tables; of TorchRec's, the shard of the one trainer."""
    state = [value for _, value in sorted(model.state_dict().items())]
    if sharded:
        return [table.local_shards()[0].tensor.clone() for table in state]
    return [table.clone() for table in state]


def said(caplog):
    """Return the warnings of the tables without a named optimizer."""
    return [m for m in caplog.messages if "no optimizer is named" in m]


def test_they_train_as_plain_torchrecs_and_one_warning_names_them(job, caplog):
    kept = ParameterConstraints(sharding_types=["table_wise"])
    plain = shard(
        make_model(),
        *(EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()),
        constraints={"bag": kept, "row": kept},
    )
    for table in plain.state_dict().values():
        table.local_shards()[0].tensor.copy_(START)
    train(plain)
    model = job.shard(make_model(), remote_sharders(job.client))
    fill(model)
    train(model)
    for ours, theirs in zip(weights(model, False), weights(plain, True), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert not torch.equal(ours, START)
    [warning] = said(caplog)
    assert "['bag', 'row']" in warning
    assert "remote_sharders(client, SGD(lr=0.01))" in warning


def test_the_remote_tables_of_a_mixed_sharder_are_no_exception(job, caplog):
    remote = RemoteEmbeddingBagCollectionSharder(job.client)
    model = nn.Sequential(bags_of(["here", "there"], 3))
    model = job.shard(model, [MixedSharder(remote, Placement(local={"here"}))])
    model.load_state_dict(
        {"0.embedding_bags.there.weight": torch.full((3, 4), 0.5)}, strict=False
    )
    ids = kjt_of({"here": [[1]], "there": [[1]]})
    for _ in range(2):
        (10 * model(ids).values()).sum().backward()
    assert job.client.table("there").optimizer == SGD(0.01)
    assert torch.allclose(torch.from_numpy(job.read("there", [1])), torch.tensor(0.3))
    assert "'there'" in said(caplog)[0]


@pytest.mark.parametrize(
    "named",
    [
        {"optimizer": SGD(0.01)},
        {"fused_params": {}},
        {"tables": {n: TableSettings(optimizer=SGD(0.01)) for n in ("bag", "row")}},
    ],
    ids=["sharder", "fused_params", "settings"],
)
def test_a_named_one_is_not_warned_of_though_it_is_the_default(job, caplog, named):
    train(job.shard(make_model(), remote_sharders(job.client, **named)))
    assert job.client.table("row").optimizer == SGD(0.01)
    assert not said(caplog)


def test_the_warning_is_of_the_tables_alone_that_were_forgotten(job, caplog):
    module = make_model()
    apply(torch.optim.Adagrad, module.bags.parameters(), {"lr": 0.1})
    train(job.shard(module, remote_sharders(job.client)))
    assert type(job.client.table("bag").optimizer) is Adagrad
    assert "['row']" in said(caplog)[0]


def test_a_table_that_servers_have_keeps_its_own_unless_one_is_named(job, caplog):
    caplog.set_level(logging.INFO)
    of_first = Adagrad(0.5)
    job.shard(make_model(), remote_sharders(job.client, of_first))
    train(job.shard(make_model(row="new"), remote_sharders(job.client)))
    assert job.client.table("bag").optimizer == of_first
    assert "keeps the servers' optimizer, Adagrad(lr=0.5)" in caplog.text
    assert "['new']" in said(caplog)[0]
    with pytest.raises(PersiaError, match="Give it the optimizer and the types"):
        job.shard(make_model(), remote_sharders(job.client, SGD(0.01)))
