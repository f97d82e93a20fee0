"""TorchRec's train pipelines over tables on the servers, on the CPU.

At staleness 0 and 1 every one of them trains as a plain loop over local tables does;
with more, the pulls of later batches hide behind the training of this one.
"""

import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.distributed.train_pipeline.gradient_accumulation import (
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
)
from torchrec.distributed.train_pipeline.pipeline_stage import (
    PipelineStage,
    SparseDataDistUtil,
)
from torchrec.distributed.train_pipeline.train_pipelines import (
    StagedTrainPipeline,
    TrainPipelineFusedSparseDist,
    TrainPipelineSparseDistLite,
)
from torchrec.streamable import Pipelineable

from persia_torchrec import SGD
from persia_torchrec.worker.pipeline import BatchPipeline
from tests.sharding.remote_job import CPU, META, RemoteJob, remote_modules

NUM_IDS = 50
NUM_SAMPLES = 16
LR = 0.5
KEYS = ["ad", "user"]
TABLES = [
    EmbeddingBagConfig(NUM_IDS, 8, name="ad", feature_names=["ad"]),
    EmbeddingBagConfig(NUM_IDS, 4, name="user", feature_names=["user"]),
]


@dataclass
class Batch(Pipelineable):
    """Ids of two lookups, dense features, labels."""

    first: KeyedJaggedTensor
    second: KeyedJaggedTensor
    dense: torch.Tensor
    labels: torch.Tensor

    def to(self, device, non_blocking=False):
        parts = (self.first, self.second, self.dense, self.labels)
        return Batch(*(part.to(device, non_blocking=non_blocking) for part in parts))

    def record_stream(self, stream):
        """Nothing here lives on a device."""


class Model(nn.Module):
    """Looks up once or twice; takes a known time beside.

    Attributes:
        waited_s: how long each step waited for its embeddings.
    """

    def __init__(self, device=META, *, num_lookups=1, step_s=0.0):
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=TABLES, device=device)
        self.over = nn.Linear(12 + 3, 1)
        self.num_lookups, self.step_s = num_lookups, step_s
        self.waited_s = []

    def forward(self, batch):
        started = time.perf_counter()
        pooled = self.bags(batch.first)
        values = torch.cat([pooled[key] for key in KEYS], dim=1)
        self.waited_s.append(time.perf_counter() - started)
        if self.num_lookups == 2:
            more = self.bags(batch.second)
            values = values * torch.cat([more[key] for key in KEYS], dim=1)
        time.sleep(self.step_s)
        logits = self.over(torch.cat([values, batch.dense], dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, loss.detach()


def random_ids(generator):
    lengths = torch.randint(4, (2 * NUM_SAMPLES,), generator=generator)
    ids = torch.randint(NUM_IDS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(KEYS, ids, lengths=lengths.int())


def make_batches(num):
    generator = torch.Generator().manual_seed(1)
    return [
        Batch(
            random_ids(generator),
            random_ids(generator),
            torch.randn(NUM_SAMPLES, 3, generator=generator),
            torch.randint(2, (NUM_SAMPLES,), generator=generator).float(),
        )
        for _ in range(num)
    ]


def start_model(**settings):
    """Return a model with local tables; always the same one."""
    torch.manual_seed(0)
    return Model(CPU, **settings)


def train_locally(batches, *, num_accumulated=1, **settings):
    """The reference: local tables, plain SGD, a plain loop. Returns losses and model.

    Tables take their step with every backward pass, as fused optimizers do.
    """
    model = start_model(**settings)
    tables = torch.optim.SGD(model.bags.parameters(), lr=LR)
    dense = torch.optim.SGD(model.over.parameters(), lr=LR)
    losses = []
    for number, batch in enumerate(batches, start=1):
        loss, detached = model(batch)
        tables.zero_grad()
        loss.backward()
        tables.step()
        if number % num_accumulated == 0 or number == len(batches):
            dense.step()
            dense.zero_grad()
        losses.append(detached.item())
    return losses, model


class Remote:
    """The same model with its tables on the servers, at the same weights."""

    def __init__(self, job, staleness=0, **settings):
        self.job = job
        local = start_model(**settings)
        torch.manual_seed(0)
        model = Model(META, **settings)
        model.over.load_state_dict(local.over.state_dict())
        self.model = job.put_on_servers(model, SGD(LR), staleness=staleness)
        for table in TABLES:
            weights = local.bags.embedding_bags[table.name].weight.detach().numpy()
            job.client.write(table.name, np.arange(NUM_IDS, dtype=np.uint64), weights)
        self.dense = torch.optim.SGD(
            [p for name, p in self.model.named_parameters() if "over" in name], lr=LR
        )
        (self.module,) = remote_modules(self.model)
        self.lookup = self.module.pipeline._lookup

    def rows(self, table):
        return self.job.read(table.name, range(NUM_IDS))

    def assert_learnt_what(self, local):
        self.module.pipeline.flush()
        for table in TABLES:
            weights = local.bags.embedding_bags[table.name].weight.detach().numpy()
            np.testing.assert_allclose(self.rows(table), weights, atol=1e-5)
        assert self.job.total("gradients_missed") == 0


class Staged:
    """A staged pipeline with the training step that goes behind it."""

    def __init__(self, model, optimizer, device, *, prefetch=False):
        stream = torch.Stream(device="cpu")
        util = SparseDataDistUtil(
            model, stream, prefetch_stream=stream if prefetch else None
        )
        stages = [
            PipelineStage("copy", lambda batch: batch.to(device), stream),
            util.start_sparse_data_dist_stage(),
        ]
        if prefetch:
            stages.append(PipelineStage("prefetch", util.prefetch, stream))
        self._staged = StagedTrainPipeline(stages, compute_stream=stream)
        self._model, self._optimizer = model, optimizer

    def progress(self, batches):
        batch = self._staged.progress(batches)
        if batch is None:
            raise StopIteration
        self._optimizer.zero_grad()
        loss, detached = self._model(batch)
        loss.backward()
        self._optimizer.step()
        return detached


def with_a_stream(kind):
    """Return a maker of pipelines that need a stream to order things by, on the CPU.

    TorchRec gives them one on other devices only.
    """

    def make(model, optimizer, device):
        pipeline = kind(model, optimizer, device)
        pipeline._data_dist_stream = torch.Stream(device="cpu")
        return pipeline

    make.__name__ = kind.__name__
    return make


def staged_with_prefetch(model, optimizer, device):
    return Staged(model, optimizer, device, prefetch=True)


PIPELINES = [
    TrainPipelineBase,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
    with_a_stream(TrainPipelineFusedSparseDist),
    with_a_stream(PrefetchTrainPipelineSparseDist),
    Staged,
    staged_with_prefetch,
]


def run(pipeline, batches):
    """Train to the end of the data; return the losses."""
    iterator, losses = iter(batches), []
    while True:
        try:
            losses.append(float(pipeline.progress(iterator)))
        except StopIteration:
            return losses


def plain_loop(remote, batches):
    losses = []
    for batch in batches:
        loss, detached = remote.model(batch)
        remote.dense.zero_grad()
        loss.backward()
        remote.dense.step()
        losses.append(detached.item())
    return losses


@pytest.fixture(autouse=True)
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def job():
    with RemoteJob(num_servers=2) as job:
        yield job


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_without_staleness_a_pipeline_trains_as_local_tables_do(
    job, pipeline, staleness
):
    batches = make_batches(12)
    expected, local = train_locally(batches)
    remote = Remote(job, staleness)
    losses = run(pipeline(remote.model, remote.dense, CPU), batches)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    remote.assert_learnt_what(local)
    assert job.total("open_batches") == 0
    assert job.client.staleness().tolist()[1:] == []


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_with_staleness_a_pipeline_trains_each_batch_once_within_the_bound(
    job, pipeline
):
    remote = Remote(job, staleness=3)
    losses = run(pipeline(remote.model, remote.dense, CPU), make_batches(20))
    remote.module.pipeline.flush()
    assert len(losses) == 20
    # To both servers; a staged pipeline pulls its first batch twice, and drops one.
    assert job.total("requests_update") in {2 * 20, 2 * 21}
    assert max(c["open_batches_max"] for c in job.client.counters()) <= 3
    assert job.total("open_batches") == 0
    assert len(job.client.staleness()) <= 3


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_evaluation_pipeline_looks_and_changes_nothing(job, staleness):
    batches = make_batches(10)
    _, local = train_locally(batches[:4])
    remote = Remote(job, staleness)
    plain_loop(remote, batches[:4])
    remote.assert_learnt_what(local)
    remote.model.eval()
    local.eval()
    num_updates = job.total("requests_update")
    losses = run(EvalPipelineSparseDist(remote.model, remote.dense, CPU), batches)
    with torch.no_grad():
        expected = [local(batch)[1].item() for batch in batches]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    remote.assert_learnt_what(local)
    assert job.total("requests_update") == num_updates


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_evaluation_in_the_middle_of_a_pipeline_changes_nothing(job, staleness):
    batches = make_batches(12)
    expected, local = train_locally(batches)
    remote = Remote(job, staleness)
    pipeline = TrainPipelineSparseDist(remote.model, remote.dense, CPU)
    iterator = iter(batches)
    losses = [float(pipeline.progress(iterator)) for _ in range(5)]
    model = pipeline.detach()
    model.eval()
    with torch.no_grad():
        for batch in batches:  # the pull of the sixth is on its way all the while
            model(batch)
    model.train()
    pipeline.attach(model)
    losses += run(pipeline, iterator)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    remote.assert_learnt_what(local)


@pytest.mark.parametrize("pipeline", [TrainPipelineBase, TrainPipelineSparseDist])
def test_gradients_are_accumulated_as_with_fused_local_tables(job, pipeline):
    batches = make_batches(11)
    expected, local = train_locally(batches, num_accumulated=3)
    remote = Remote(job)
    accumulating = GradientAccumulationWrapper(
        pipeline(remote.model, remote.dense, CPU),
        remote.dense,
        remote.model,
        GradientAccumulationConfig(num_steps=3),
    )
    losses = run(accumulating, batches)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    remote.assert_learnt_what(local)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_collection_may_be_called_twice_in_a_forward_pass(job, staleness):
    batches = make_batches(12)
    expected, local = train_locally(batches, num_lookups=2)
    remote = Remote(job, staleness, num_lookups=2)
    np.testing.assert_allclose(plain_loop(remote, batches), expected, rtol=1e-5)
    remote.assert_learnt_what(local)


def test_calls_of_a_step_beyond_the_bound_go_on_and_the_bound_holds_between_steps(job):
    remote = Remote(job, staleness=3, num_lookups=2)
    assert len(plain_loop(remote, make_batches(12))) == 12
    remote.module.pipeline.flush()
    assert max(c["open_batches_max"] for c in job.client.counters()) <= 3
    assert job.total("requests_update") == 2 * 2 * 12


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_losses_of_several_batches_may_share_a_backward_pass(job, staleness):
    batches = make_batches(4)
    local, remote = start_model(), Remote(job, staleness)
    optimizer = torch.optim.SGD(local.parameters(), lr=LR)
    for model, dense in ((local, optimizer), (remote.model, remote.dense)):
        losses = [model(batch)[0] for batch in batches]
        torch.stack(losses).sum().backward()
        dense.step()
    remote.assert_learnt_what(local)
    assert torch.allclose(remote.model.module.over.weight, local.over.weight)


class Slow:
    """The way to the servers, made slower by a known time a pull."""

    def __init__(self, lookup, delay_s):
        self._lookup, self._delay_s = lookup, delay_s

    def pull(self, source, number):
        time.sleep(self._delay_s)
        return self._lookup.pull(source, number)

    def __getattr__(self, name):
        return getattr(self._lookup, name)


STEP_S = 0.06


def waits_of(remote, pipeline, delay_s):
    """Return how long each step waits when each pull takes so much longer."""
    remote.module.pipeline.close()
    remote.module.pipeline = BatchPipeline(
        Slow(remote.lookup, delay_s), staleness=3, timeout_s=10
    )
    run(pipeline(remote.model, remote.dense, CPU), make_batches(9))
    return remote.model.module.waited_s[-7:]


PREFETCH = with_a_stream(PrefetchTrainPipelineSparseDist)


# A busy machine may delay any step. The smallest wait tells all the same: where nothing
# hides, no step can wait for less than the delay.


@pytest.mark.parametrize("pipeline", [TrainPipelineSparseDist, PREFETCH])
def test_the_time_of_a_pull_hides_until_it_exceeds_the_step(job, pipeline):
    remote = Remote(job, step_s=STEP_S)
    assert min(waits_of(remote, pipeline, 0.5 * STEP_S)) < 0.25 * STEP_S
    waits = waits_of(remote, pipeline, 3 * STEP_S)
    assert min(waits) < 2.5 * STEP_S
    assert max(waits) > STEP_S


def test_without_a_pipeline_the_time_of_a_pull_shows(job):
    remote = Remote(job, step_s=STEP_S)
    assert min(waits_of(remote, TrainPipelineBase, 0.5 * STEP_S)) > 0.5 * STEP_S
