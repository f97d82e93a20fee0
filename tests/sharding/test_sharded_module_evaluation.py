"""An evaluation right after a training step reads rows that have its update."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.streamable import Pipelineable

from persia_torchrec import (
    SGD,
    MixedSharder,
    Placement,
    RemoteEmbeddingBagCollectionSharder,
    remote_sharders,
)
from persia_torchrec.errors import ConfigError
from tests.support.remote_job import CPU, META, HeldPushes, RemoteJob, kjt_of

ZEROS = nn.init.zeros_


def bags(**settings):
    config = EmbeddingBagConfig(10, 4, "t", feature_names=["f"], init_fn=ZEROS)
    return EmbeddingBagCollection(tables=[config], device=META, **settings)


def sequences():
    config = EmbeddingConfig(10, 4, "t", feature_names=["f"], init_fn=ZEROS)
    return EmbeddingCollection(tables=[config], device=META)


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


def weighted(job):
    return Looks(bags(is_weighted=True)), remote_sharders(job.client, SGD(1.0), 1)


def mixed(job):
    far = EmbeddingBagConfig(10, 4, "t", feature_names=["f"], init_fn=ZEROS)
    near = EmbeddingBagConfig(10, 4, "near", feature_names=["g"], init_fn=ZEROS)
    tables = EmbeddingBagCollection(tables=[far, near], device=META)
    remote = RemoteEmbeddingBagCollectionSharder(job.client, SGD(1.0), 1)
    return Looks(tables), [MixedSharder(remote, Placement(remote=["t"], min_rows=99))]


MODELS = {
    "bags": lambda job: (Looks(bags()), remote_sharders(job.client, SGD(1.0), 1)),
    "bags, far ahead": lambda job: (
        Looks(bags()),
        remote_sharders(job.client, SGD(1.0), 8),
    ),
    "each": lambda job: (
        Looks(bags()),
        remote_sharders(job.client, SGD(1.0), 1, update="each"),
    ),
    "weighted": weighted,
    "sequences": lambda job: (
        Looks(sequences()),
        remote_sharders(job.client, SGD(1.0), 1),
    ),
    "rows that bags trained": lambda job: (
        Looks(bags(), sequences()),
        remote_sharders(job.client, SGD(1.0), 1, shared={"t"}),
    ),
    "mixed": mixed,
}


@pytest.fixture(scope="module")
def job():
    with RemoteJob() as job:
        yield job


def a_batch():
    kjt = kjt_of({"f": [[3]], "g": [[]]})
    return KeyedJaggedTensor(
        kjt.keys(), kjt.values(), torch.ones(1), lengths=kjt.lengths()
    )


@pytest.mark.parametrize("name", MODELS)
def test_an_evaluation_waits_for_the_updates_before_it(job, name):
    job.client.clear()
    model = job.shard(*MODELS[name](job))
    held = HeldPushes(model)
    sum_of(model(a_batch())).backward()
    model.eval()
    looked = model(a_batch())
    held.may_push.set()
    assert sum_of(looked).item() == -4


def test_an_evaluation_may_read_at_once(job):
    job.client.clear()
    sharders = remote_sharders(job.client, SGD(1.0), 2, evaluation_waits=False)
    model = job.shard(Looks(bags()), sharders)
    held = HeldPushes(model)
    sum_of(model(a_batch())).backward()
    model.eval()
    assert sum_of(model(a_batch())).item() == 0
    held.may_push.set()


def test_at_staleness_0_and_1_every_evaluation_waits(job):
    for staleness in (0, 1):
        with pytest.raises(ConfigError, match="evaluation_waits must be True at stale"):
            remote_sharders(job.client, None, staleness, evaluation_waits=False)


@dataclass
class Batch(Pipelineable):
    ids: KeyedJaggedTensor

    def to(self, device, non_blocking=False):
        return self

    def pin_memory(self):
        return self

    def record_stream(self, stream):
        """Nothing here lives on a device."""


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = bags()

    def forward(self, batch):
        values = self.bags(batch.ids).values()
        return values.sum(), values.detach()


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_an_epoch_of_evaluation_by_a_pipeline_reads_what_was_trained(job, staleness):
    job.client.clear()
    model = job.shard(WithLoss(), remote_sharders(job.client, SGD(1.0), staleness))
    dense = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    pipeline = TrainPipelineSparseDist(model, dense, CPU)
    for epoch in range(1, 4):
        for is_training in (True, False):
            model.train(is_training)
            given = iter([Batch(a_batch())] * 4)
            seen = []
            while True:
                try:
                    seen.append(pipeline.progress(given).sum().item())
                except StopIteration:
                    break
        assert seen == [-16.0 * epoch] * 4
