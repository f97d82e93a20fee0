"""A model whose tables are on the servers, its twin with local ones, and pipelines."""

import threading
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.train_pipeline.pipeline_stage import (
    PipelineStage,
    SparseDataDistUtil,
)
from torchrec.distributed.train_pipeline.train_pipelines import StagedTrainPipeline

from persia_torchrec import SGD
from persia_torchrec.pipeline.pipeline import BatchPipeline
from tests.support.models import OnHost
from tests.support.remote_job import CPU, META, remote_modules
from tests.support.servers import DEADLINE_S

NUM_IDS = 50
NUM_SAMPLES = 16
LR = 0.5
KEYS = ["ad", "user"]
TABLES = [
    EmbeddingBagConfig(NUM_IDS, 8, name="ad", feature_names=["ad"]),
    EmbeddingBagConfig(NUM_IDS, 4, name="user", feature_names=["user"]),
]


@dataclass
class Batch(OnHost):
    """Ids of two lookups, dense features, labels."""

    first: KeyedJaggedTensor
    second: KeyedJaggedTensor
    dense: torch.Tensor
    labels: torch.Tensor


class Model(nn.Module):
    """Looks up once or twice.

    Attributes:
        after_lookup: called in each step, when its embeddings are there.
    """

    def __init__(self, device=META, *, num_lookups=1):
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=TABLES, device=device)
        self.over = nn.Linear(12 + 3, 1)
        self.num_lookups = num_lookups
        self.after_lookup = lambda: None

    def forward(self, batch):
        pooled = self.bags(batch.first)
        values = torch.cat([pooled[key] for key in KEYS], dim=1)
        if self.num_lookups == 2:
            more = self.bags(batch.second)
            values = values * torch.cat([more[key] for key in KEYS], dim=1)
        self.after_lookup()
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
        self.lookup = self.module.pipeline.lookup

    def use(self, lookup, staleness=0):
        """Pull and push by another way."""
        self.module.pipeline.close()
        self.module.pipeline = BatchPipeline(
            lookup, staleness=staleness, timeout_s=DEADLINE_S
        )

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


class Counted:
    """The way to the servers, which counts the pulls that are through."""

    def __init__(self, lookup):
        self._lookup, self.num_pulled = lookup, 0
        self._changed = threading.Condition()

    def pull(self, source, number):
        pulled = self._lookup.pull(source, number)
        with self._changed:
            self.num_pulled += 1
            self._changed.notify_all()
        return pulled

    def wait_for(self, num):
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_pulled >= num, DEADLINE_S)

    def __getattr__(self, name):
        return getattr(self._lookup, name)
