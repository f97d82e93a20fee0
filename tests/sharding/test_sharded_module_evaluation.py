"""An evaluation right after a training step reads rows that have its update."""

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from persia_torchrec import (
    SGD,
    MixedSharder,
    Placement,
    RemoteEmbeddingBagCollectionSharder,
    remote_sharders,
)
from persia_torchrec.errors import ConfigError
from tests.support.models import WithLoss, bags_of, sequences_of, tables_of
from tests.support.remote_job import CPU, META, HeldPushes, kjt_of

TABLE = {"feature": "f", "init_fn": nn.init.zeros_}


def bags():
    return bags_of(["t"], **TABLE)


def sequences():
    return sequences_of(["t"], **TABLE)


def sum_of(output):
    values = output.values()
    if isinstance(values, torch.Tensor):
        return values.sum()
    return sum(sequence.values().sum() for sequence in values)


class Looks(nn.Module):
    """Trains one collection, and evaluates another, or the same."""

    def __init__(self, trained, evaluated=None):
        super().__init__()
        self.trained = trained
        self.evaluated = evaluated

    def forward(self, ids):
        is_other = self.evaluated is not None and not self.training
        return (self.evaluated if is_other else self.trained)(ids)


def weighted(shared_job):
    tables = tables_of(["t"], **TABLE)
    collection = EmbeddingBagCollection(tables, is_weighted=True, device=META)
    return Looks(collection), remote_sharders(shared_job.client, SGD(1.0), 1)


def mixed(shared_job):
    tables = tables_of(["t"], **TABLE) + tables_of(["near"], feature="g")
    both = EmbeddingBagCollection(tables=tables, device=META)
    remote = RemoteEmbeddingBagCollectionSharder(shared_job.client, SGD(1.0), 1)
    return Looks(both), [MixedSharder(remote, Placement(remote=["t"], min_rows=99))]


MODELS = {
    "bags": lambda shared_job: (
        Looks(bags()),
        remote_sharders(shared_job.client, SGD(1.0), 1),
    ),
    "bags, far ahead": lambda shared_job: (
        Looks(bags()),
        remote_sharders(shared_job.client, SGD(1.0), 8),
    ),
    "each": lambda shared_job: (
        Looks(bags()),
        remote_sharders(shared_job.client, SGD(1.0), 1, update="each"),
    ),
    "weighted": weighted,
    "sequences": lambda shared_job: (
        Looks(sequences()),
        remote_sharders(shared_job.client, SGD(1.0), 1),
    ),
    "rows that bags trained": lambda shared_job: (
        Looks(bags(), sequences()),
        remote_sharders(shared_job.client, SGD(1.0), 1, shared={"t"}),
    ),
    "mixed": mixed,
}


def a_batch():
    kjt = kjt_of({"f": [[3]], "g": [[]]})
    return KeyedJaggedTensor(
        kjt.keys(), kjt.values(), torch.ones(1), lengths=kjt.lengths()
    )


@pytest.mark.parametrize("name", MODELS)
def test_an_evaluation_waits_for_the_updates_before_it(shared_job, name):
    shared_job.client.clear()
    model = shared_job.shard(*MODELS[name](shared_job))
    held = HeldPushes(model)
    sum_of(model(a_batch())).backward()
    model.eval()
    looked = model(a_batch())
    held.may_push.set()
    assert sum_of(looked).item() == -4


def test_an_evaluation_may_read_at_once(shared_job):
    shared_job.client.clear()
    sharders = remote_sharders(shared_job.client, SGD(1.0), 2, evaluation_waits=False)
    model = shared_job.shard(Looks(bags()), sharders)
    held = HeldPushes(model)
    sum_of(model(a_batch())).backward()
    model.eval()
    assert sum_of(model(a_batch())).item() == 0
    held.may_push.set()


def test_at_staleness_0_and_1_every_evaluation_waits(shared_job):
    for staleness in (0, 1):
        with pytest.raises(ConfigError, match="evaluation_waits must be True at stale"):
            remote_sharders(shared_job.client, None, staleness, evaluation_waits=False)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_an_epoch_of_evaluation_by_a_pipeline_reads_what_was_trained(
    shared_job, staleness
):
    shared_job.client.clear()
    sharders = remote_sharders(shared_job.client, SGD(1.0), staleness)
    model = shared_job.shard(WithLoss(bags()), sharders)
    dense = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    pipeline = TrainPipelineSparseDist(model, dense, CPU)
    for epoch in range(1, 4):
        for is_training in (True, False):
            model.train(is_training)
            given = iter([a_batch()] * 4)
            seen = []
            while True:
                try:
                    seen.append(pipeline.progress(given).sum().item())
                except StopIteration:
                    break
        assert seen == [-16.0 * epoch] * 4
