"""Learning rates that change while the model trains."""

import threading

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from persia_torchrec import (
    FTRL,
    SGD,
    Constant,
    RemoteEmbeddingBagCollectionSharder,
    TableSettings,
)
from persia_torchrec.errors import ConfigError
from tests.sharding.two_towers import TABLES
from tests.support.remote_job import Bags, kjt_of, remote_modules

pytestmark = pytest.mark.slow

IDS = {"ad": [[1, 2], []], "query": [[2], [3]], "user": [[5], [7, 7]]}
START = {name: TableSettings(initializer=Constant(0.0)) for name in ("term", "user")}


@pytest.fixture(params=[0, 1, 3])
def trained(job, request):
    """Return a sharder, its model, and what makes one backward pass."""
    sharder = RemoteEmbeddingBagCollectionSharder(
        job.client, SGD(1.0), staleness=request.param, tables=START
    )
    model = DistributedModelParallel(Bags(TABLES), sharders=[sharder])

    def step():
        model(kjt_of(IDS)).values().sum().backward()

    yield sharder, step
    sharder.close()


def moved(job, sharder):
    """Return how far id 1 of "term" and id 5 of "user" went: the sum of the rates."""
    sharder.flush()
    return [-float(job.read("term", [1])[0, 0]), -float(job.read("user", [5])[0, 0])]


def test_gradients_get_the_rate_of_their_backward_pass(job, trained):
    sharder, step = trained
    for lr in (1.0, 10.0, 100.0):
        sharder.set_learning_rate(lr)
        step()
    assert moved(job, sharder) == [111.0, 111.0]


def test_one_table_may_get_another_rate(job, trained):
    sharder, step = trained
    step()
    sharder.set_learning_rate(10.0, ["user"])
    step()
    assert moved(job, sharder) == [2.0, 11.0]


def test_a_rate_of_an_unknown_table_is_rejected(trained):
    sharder, _ = trained
    with pytest.raises(ConfigError, match=r"\['term', 'user'\]\. Received: \['usr'\]"):
        sharder.set_learning_rate(1.0, ["usr"])


def test_a_rate_that_the_optimizer_rejects_changes_nothing(job, trained):
    sharder, step = trained
    with pytest.raises(ConfigError, match="SGD: lr must be finite and >= 0"):
        sharder.set_learning_rate(-1.0)
    step()
    assert moved(job, sharder) == [1.0, 1.0]


class TestTheOptimizer:
    @pytest.mark.parametrize("step_first", [True, False])
    def test_a_schedule_is_followed_whenever_step_is_called(
        self, job, trained, step_first
    ):
        sharder, step = trained
        optimizer = sharder.optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=10.0)
        for _ in range(3):
            if step_first:
                optimizer.step()
            step()
            if not step_first:
                optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        assert moved(job, sharder) == [111.0, 111.0]

    def test_it_has_a_group_a_table(self, trained):
        sharder, _ = trained
        groups = sharder.optimizer.param_groups
        assert [(group["table"], group["lr"]) for group in groups] == [
            *(("term", 1.0), ("user", 1.0))
        ]

    def test_a_group_moves_its_own_table_alone(self, job, trained):
        sharder, step = trained
        sharder.optimizer.param_groups[1]["lr"] = 10.0
        step()
        assert moved(job, sharder) == [1.0, 10.0]

    def test_a_rate_set_by_hand_is_in_the_groups_and_stays(self, job, trained):
        sharder, step = trained
        optimizer = sharder.optimizer
        sharder.set_learning_rate(4.0, ["term"])
        assert optimizer.learning_rates() == {"term": 4.0, "user": 1.0}
        step()
        assert moved(job, sharder) == [4.0, 1.0]

    def test_its_state_brings_the_rates_back(self, job, trained):
        sharder, step = trained
        optimizer = sharder.optimizer
        state = optimizer.state_dict()
        sharder.set_learning_rate(9.0)
        optimizer.load_state_dict(state)
        step()
        assert moved(job, sharder) == [1.0, 1.0]

    def test_a_rate_that_does_not_change_asks_no_server(self, job, trained):
        sharder, step = trained
        before = job.total("requests_add_tables")
        for _ in range(3):
            sharder.optimizer.step()
            step()
        sharder.flush()
        assert job.total("requests_add_tables") == before

    def test_a_closure_is_called(self, trained):
        sharder, _ = trained
        assert sharder.optimizer.step(lambda: 7) == 7

    def test_a_rate_that_a_table_rejects_is_rejected_by_step(self, job):
        sharder = RemoteEmbeddingBagCollectionSharder(job.client, FTRL(0.1))
        DistributedModelParallel(Bags(TABLES), sharders=[sharder])
        sharder.optimizer.param_groups[0]["lr"] = 0.0
        with pytest.raises(ConfigError, match="FTRL: lr must be finite and > 0"):
            sharder.optimizer.step()
        sharder.close()

    def test_it_needs_tables(self, job):
        sharder = RemoteEmbeddingBagCollectionSharder(job.client)
        with pytest.raises(ConfigError, match=r"needs tables\. Received: none"):
            _ = sharder.optimizer

    def test_it_is_asked_for_when_all_collections_are_sharded(self, job):
        sharder = RemoteEmbeddingBagCollectionSharder(job.client)
        env = ShardingEnv.from_local(1, 0)
        for table in TABLES:
            sharder.put_on_servers(Bags([table]).bags, env, torch.device("cpu"))
            if table is TABLES[0]:
                assert sharder.optimizer is sharder.optimizer
        with pytest.raises(ConfigError, match="when all collections are sharded"):
            _ = sharder.optimizer
        sharder.close()


class Twice(nn.Module):
    """Two collections that use the same table."""

    def __init__(self):
        super().__init__()
        self.left, self.right = Bags(TABLES), Bags(TABLES)

    def forward(self, ids):
        return self.left(ids).values().sum() + self.right(ids).values().sum()


def test_collections_that_share_a_table_share_its_rate(job):
    sharder = RemoteEmbeddingBagCollectionSharder(
        job.client, SGD(1.0), staleness=4, tables=START, shared={"term", "user"}
    )
    model = DistributedModelParallel(Twice(), sharders=[sharder])
    assert len(remote_modules(model)) == 2
    for lr in (1.0, 10.0, 100.0):
        for group in sharder.optimizer.param_groups:
            group["lr"] = lr
        model(kjt_of(IDS)).backward()
    assert np.array_equal(moved(job, sharder), [222.0, 222.0])
    sharder.close()


def test_a_shared_table_keeps_its_rate_until_every_collection_has_pushed(job):
    sharder = RemoteEmbeddingBagCollectionSharder(
        job.client, SGD(1.0), staleness=4, tables=START, shared={"term", "user"}
    )
    model = DistributedModelParallel(Twice(), sharders=[sharder])
    right = remote_modules(model)[1].pipeline.lookup
    may_push, push = threading.Event(), right.push

    def late(*batch):
        assert may_push.wait(10)
        return push(*batch)

    right.push = late
    model(kjt_of(IDS)).backward()
    threading.Timer(0.3, may_push.set).start()
    sharder.set_learning_rate(10.0)
    assert moved(job, sharder) == [2.0, 2.0]
    model(kjt_of(IDS)).backward()
    assert moved(job, sharder) == [22.0, 22.0]
    sharder.close()


@pytest.mark.parametrize("rate", ["0.1", True, None])
def test_a_rate_that_is_no_number_is_an_error(job, rate):
    sharder = RemoteEmbeddingBagCollectionSharder(job.client, SGD(1.0))
    DistributedModelParallel(Bags(TABLES), sharders=[sharder])
    optimizer = sharder.optimizer
    optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(ConfigError, match=rf"must be a number\. Received: {rate!r}"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1.0
    sharder.close()
