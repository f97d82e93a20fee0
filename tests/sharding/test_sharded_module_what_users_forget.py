"""A TorchRec loop that forgets something is told so while it runs."""

import logging
import time

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.inference.modules import quantize_inference_model

from persia_torchrec import SGD, RemoteEmbeddingBagCollectionSharder, TableSettings
from persia_torchrec.errors import ConfigError
from tests.support.remote_job import META, Bags, RemoteJob, kjt_of, shard
from tests.support.servers import DEADLINE_S, ids_of

pytestmark = pytest.mark.slow

TABLES = [EmbeddingBagConfig(10, 4, name="term", feature_names=["ad"])]


class Loop:
    """A model on the servers, and its sharder."""

    def __init__(self, job, configs=TABLES, **settings):
        self.sharder = RemoteEmbeddingBagCollectionSharder(
            job.client, SGD(1.0), **settings
        )
        self.model = job.shard(Bags(configs), [self.sharder])

    def forward(self, *ids):
        return self.model(kjt_of({"ad": [list(ids)]})).values().sum()

    def wait_for_dropped(self, num):
        deadline = time.monotonic() + DEADLINE_S
        while self.sharder.summary().num_dropped < num:
            assert time.monotonic() < deadline
            time.sleep(0.005)


@pytest.fixture
def logged(caplog):
    """Return logger and arguments of our records of a level so far."""
    caplog.set_level(logging.INFO, "persia_torchrec")

    def logged(level, name):
        return [
            record.args
            for record in caplog.records
            if record.levelno == level and record.name == f"persia_torchrec.{name}"
        ]

    return logged


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_loop_without_backward_is_one_warning(job, logged, staleness):
    loop = Loop(job, staleness=staleness)
    for n in range(20):
        loop.forward(n)
    loop.wait_for_dropped(20)
    assert logged(logging.WARNING, "pipeline.staleness") == [(8,)]


def use_no_grad(loop):
    with torch.no_grad():
        loop.forward(1)


def use_eval(loop):
    loop.model.eval()
    loop.forward(1)
    loop.model.train()


def overflow(loop):
    loop.sharder.use_grad_scaler(torch.amp.GradScaler("cpu"))
    (loop.forward(1) * torch.inf).backward()


def train_once(loop):
    loop.forward(1).backward()


@pytest.mark.parametrize("use", [use_no_grad, use_eval, overflow, train_once])
def test_a_correct_loop_logs_no_warning(job, logged, use):
    loop = Loop(job)
    for _ in range(20):
        use(loop)
    loop.sharder.close()
    assert loop.sharder.summary().num_dropped == 0
    assert logged(logging.WARNING, "pipeline.staleness") == []


def test_flush_logs_the_staleness(job, logged):
    loop = Loop(job, staleness=3)
    for num_steps in (5, 12):
        held = [loop.forward(1)]
        while loop.sharder.summary().num_lookups < num_steps:
            held.append(loop.forward(1))
            held.pop(0).backward()
        held.pop().backward()
        loop.sharder.flush()
        loop.sharder.flush()  # has nothing more to tell
    told = logged(logging.INFO, "sharding.table_control")
    summary = loop.sharder.summary()
    assert [args[1] for args in told] == [5, 12]
    assert told[1][2:4] == (summary.mean_staleness, 2)
    assert 10 / 12 <= summary.mean_staleness <= 2  # all but the first of each
    loop.sharder.close()
    assert logged(logging.WARNING, "sharding.table_control") == []


def test_evicted_rows_are_logged_while_training_and_at_the_end(logged):
    with RemoteJob(num_servers=1, capacity_rows=4) as job:
        loop = Loop(job)
        for n in range(40):
            loop.forward(*range(n, n + 16)).backward()
        share = (100 * 0.75, 32, 32 * 12, 32 * 16)
        told = logged(logging.WARNING, "pipeline.staleness")
        assert told == [share]
        for _ in range(2):
            loop.sharder.close()
        evicted = (40 * 12, 100 * 0.75, 40 * 16)
        told = logged(logging.WARNING, "sharding.table_control")
        assert told == [evicted]
        assert loop.sharder.summary().share_evicted == 0.75


class WithDense(nn.Module):
    """Bags, and a dense half that trains in evaluation mode, too."""

    def __init__(self):
        super().__init__()
        self.bags = Bags(TABLES)
        self.over = nn.Linear(4, 1)

    def forward(self, ids):
        return self.over(self.bags(ids).values()).sum()


@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_backward_pass_in_evaluation_mode_is_one_warning(job, logged, is_weighted):
    bags = EmbeddingBagCollection(tables=TABLES, is_weighted=is_weighted, device=META)
    sharder = RemoteEmbeddingBagCollectionSharder(job.client, SGD(1.0))
    model = job.shard(bags, [sharder])
    weights = torch.ones(2, requires_grad=True) if is_weighted else None
    ids = KeyedJaggedTensor(
        ["ad"], torch.tensor([1, 2]), weights, lengths=torch.tensor([1, 1])
    )
    model(ids).values().sum().backward()
    sharder.flush()
    before = job.client.read("term", ids_of(1, 2))
    model.eval()
    with torch.no_grad():
        assert not model(ids).values().requires_grad
    assert logged(logging.WARNING, "sharding.table_control") == []
    for _ in range(2):
        model(ids).values().sum().backward()
    assert len(logged(logging.WARNING, "sharding.table_control")) == 1
    np.testing.assert_array_equal(job.client.read("term", ids_of(1, 2)), before)


def test_the_dense_half_trains_in_evaluation_mode(job, logged):
    sharder = RemoteEmbeddingBagCollectionSharder(job.client, SGD(1.0))
    model = job.shard(WithDense(), [sharder])
    kjt = kjt_of({"ad": [[1]]})
    model(kjt).backward()
    model.eval()
    model.zero_grad()
    model(kjt).backward()
    (over,) = (p for n, p in model.named_parameters() if n.endswith("over.weight"))
    assert over.grad.abs().sum() > 0
    assert len(logged(logging.WARNING, "sharding.table_control")) == 1


def set_attribute(model):
    for parameter in model.parameters():
        parameter.requires_grad = False


@pytest.mark.parametrize("use", [set_attribute, lambda m: m.requires_grad_(False)])
def test_requires_grad_false_is_one_warning_and_trains(job, logged, use):
    loop = Loop(job)
    loop.model.requires_grad_(True)
    assert logged(logging.WARNING, "sharding.table_control") == []
    for _ in range(2):
        use(loop.model)
    assert logged(logging.WARNING, "sharding.table_control") == [("term", "term")]
    before = loop.forward(1)
    before.backward()
    assert loop.forward(1).item() == pytest.approx(before.item() - 4)
    loop.sharder.freeze(["term"])
    loop.sharder.flush()


def test_requires_grad_false_before_sharding_is_one_warning(job, logged):
    sharder = RemoteEmbeddingBagCollectionSharder(job.client, SGD(1.0))
    job.shard(Bags(TABLES).requires_grad_(False), [sharder])
    assert logged(logging.WARNING, "sharding.table_control") == [("term", "term")]


def test_requires_grad_false_of_a_frozen_table_is_no_warning(job, logged):
    settings = {"term": TableSettings(is_frozen=True)}
    loop = Loop(job, tables=settings)
    loop.model.requires_grad_(False)
    assert logged(logging.WARNING, "sharding.table_control") == []


@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
def test_a_sharded_model_to_quantize_names_the_plain_copy(job):
    loop = Loop(job)
    torch.ao.quantization.quantize_dynamic(loop.model, {nn.Linear}, inplace=True)
    for _ in range(2):
        with pytest.raises(ConfigError, match="plain_state_dict"):
            quantize_inference_model(loop.model)


def load_state_dict(loop, state):
    loop.model.load_state_dict(state)


def load_weights(loop, state):
    loop.sharder.load_weights(state)


@pytest.mark.parametrize("load", [load_state_dict, load_weights])
@pytest.mark.parametrize(
    ("poolings", "num_warnings"),
    [(["MEAN", "SUM", "MEAN"], 1), (["MEAN", "MEAN", "SUM"], 0), (["SUM"] * 3, 0)],
)
def test_columns_that_sharded_torchrec_orders_otherwise_are_a_warning(
    job, logged, load, poolings, num_warnings
):
    tables = [
        EmbeddingBagConfig(
            8, 4, name=f"t{i}", feature_names=[f"f{i}"], pooling=PoolingType[pooling]
        )
        for i, pooling in enumerate(poolings)
    ]
    whole = ParameterConstraints(sharding_types=["table_wise"])
    given = {"constraints": {table.name: whole for table in tables}}
    plain = shard(Bags(tables), EmbeddingBagCollectionSharder(), **given)
    loop = Loop(job, tables)
    for _ in range(2):
        load(loop, plain.state_dict())
    names = ["f0", "f1", "f2"]
    told = logged(logging.WARNING, "sharding.table_control")
    assert told == [(names,)] * num_warnings
    ids = KeyedJaggedTensor(names, torch.arange(3), lengths=torch.ones(3).int())
    ours, theirs = loop.model(ids), plain(ids)
    assert (list(ours.keys()) != list(theirs.keys())) == bool(num_warnings)
    for name in names:
        assert torch.equal(ours[name], theirs[name])
