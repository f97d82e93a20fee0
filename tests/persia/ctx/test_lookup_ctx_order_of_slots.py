"""A model gets embeddings in the order of the batch, which may have any slots."""

import json
from collections import Counter, defaultdict
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from persia_torchrec.ctx import EmbeddingCtx, InferCtx, PreprocessMode, eval_ctx
from persia_torchrec.data import DataLoader, StreamingDataset
from persia_torchrec.embedding.optim import SGD, Adam
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.errors import BatchError, RemoteError
from persia_torchrec.persia.batch import IDTypeFeature, Label, PersiaBatch
from persia_torchrec.persia.predict_requests import DECODERS
from persia_torchrec.persia.slots import SlotsLookup, build_features
from persia_torchrec.persia.slots_reader import SlotsReader
from persia_torchrec.persia.worker_client import RemoteWorkers
from persia_torchrec.serving.http_server import HttpConfig, PredictionServer
from persia_torchrec.serving.models import Models, Version
from persia_torchrec.serving.predictor import DenseModel, Predictor
from tests.support import reference
from tests.support.local_job import Batches, LocalJob, Sending
from tests.support.servers import ids_of
from tests.support.serving_process import predict

pytestmark = pytest.mark.slow

SLOTS = """
feature_index_prefix_bit: 8
slots_config:
  a: {dim: 4}
  b: {dim: 8}
  c: {dim: 4}
  raw: {dim: 4, embedding_summation: false, sample_fixed_size: 2}
  d: {dim: 4}
feature_groups:
  shared: [a, c]
"""
NUM_PLACES = {"raw": 2}
SAMPLES = {
    "a": [[1], [2, 1]],
    "b": [[3], []],
    "c": [[4, 5], [6]],
    "raw": [[7, 8, 9], [8]],
    "d": [[1], [7]],
}
# YAML's order, another, and a part of it; more follow one another in the same job.
BATCHES = [
    *("ab", "ba", "b"),
    *("ca", "ac", "c", "d"),
    *(("raw",), ("raw", "b", "a"), ("d", "raw"), ("c", "raw", "b", "d", "a")),
]
CPU = torch.device("cpu")


def batch_of(names, samples=SAMPLES, *, requires_grad=True):
    features = [
        IDTypeFeature(name, [ids_of(*sample) for sample in samples[name]])
        for name in names
    ]
    labels = [Label(np.zeros((len(samples[names[0]]), 1), dtype=np.float32))]
    return PersiaBatch(
        features,
        labels=labels,
        requires_grad=requires_grad,
        meta=json.dumps([*names]).encode(),
    )


def batches(*, requires_grad):
    return [batch_of(names, requires_grad=requires_grad) for names in BATCHES]


class Seen(nn.Module):
    """Keeps what it was given last."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, non_id_tensors, embeddings):
        self.seen = [embedding.detach().clone() for embedding in embeddings]
        return self.bias + sum(embedding.sum() for embedding in embeddings)


def trained(ctx, batch):
    """Take a step; return what the model saw."""
    ctx.backward(ctx.forward(batch)[0])
    return ctx.model.seen


def prepared(ctx, batch):
    return [embedding.detach() for embedding in ctx.prepare_features(batch)[1]]


def shown(ctx, batch):
    ctx.forward(batch)
    return ctx.model.seen


@contextmanager
def from_loaders(job, to_send):
    """Yield the batches as they come from two data loaders, in turn."""
    sending = Sending()
    dataset = StreamingDataset(4)
    loader = DataLoader(dataset, reproducible=True, embedding_staleness=1)
    looked_up = iter(loader)
    for index in range(2):
        sending.start(job.data_ctx(index, 2), to_send[index::2])
    yield looked_up
    sending.join()


def train(job):
    with job.train_ctx(Seen(), SGD(0.0)) as ctx:
        loader = DataLoader(Batches(batches(requires_grad=True)))
        return [trained(ctx, batch) for batch in loader]


def train_a_model_of_ones_own(job):
    with job.train_ctx(Seen(), SGD(0.0)) as ctx:
        all_embeddings = []
        for batch in DataLoader(Batches(batches(requires_grad=True))):
            _, embeddings, _ = ctx.prepare_features(batch)
            sum(embedding.sum() for embedding in embeddings).backward()
            all_embeddings.append([embedding.detach() for embedding in embeddings])
        return all_embeddings


def train_from_data_loaders(job):
    with (
        job.train_ctx(Seen(), SGD(0.0)) as ctx,
        from_loaders(job, batches(requires_grad=True)) as looked_up,
    ):
        return [trained(ctx, batch) for batch in looked_up]


def evaluate_within_the_training(job):
    with job.train_ctx(Seen(), SGD(0.0)), eval_ctx() as ctx:
        loader = DataLoader(Batches(batches(requires_grad=False)))
        return [shown(ctx, batch) for batch in loader]


def evaluate_data_within_the_training(job):
    with job.train_ctx(Seen(), SGD(0.0)), eval_ctx() as ctx:
        return [
            prepared(ctx, ctx.get_embedding_from_data(batch))
            for batch in batches(requires_grad=False)
        ]


def evaluate_from_data_loaders_within_the_training(job):
    with (
        job.train_ctx(Seen(), SGD(0.0)) as ctx,
        from_loaders(job, batches(requires_grad=False)) as looked_up,
    ):
        return [shown(ctx, batch) for batch in looked_up]


def evaluate(job):
    with eval_ctx(Seen()) as ctx:
        loader = DataLoader(Batches(batches(requires_grad=False)))
        return [shown(ctx, batch) for batch in loader]


def evaluate_data(job):
    with eval_ctx() as ctx:
        return [
            prepared(ctx, ctx.get_embedding_from_data(batch))
            for batch in batches(requires_grad=False)
        ]


def evaluate_bytes(job):
    with eval_ctx() as ctx:
        return [
            prepared(ctx, ctx.get_embedding_from_bytes(batch.to_bytes()))
            for batch in batches(requires_grad=False)
        ]


def evaluate_from_data_loaders(job):
    with (
        eval_ctx() as ctx,
        from_loaders(job, batches(requires_grad=False)) as looked_up,
    ):
        return [prepared(ctx, batch) for batch in looked_up]


def keep_gradients_outside_of_a_training(job):
    with EmbeddingCtx(PreprocessMode.TRAIN) as ctx:
        loader = DataLoader(Batches(batches(requires_grad=True)))
        return [prepared(ctx, batch) for batch in loader]


def infer(job):
    with InferCtx([worker.address for worker in job.workers], Seen()) as ctx:
        loader = DataLoader(Batches(batches(requires_grad=False)))
        return [shown(ctx, batch) for batch in loader]


def infer_data(job):
    with InferCtx([worker.address for worker in job.workers]) as ctx:
        return [
            prepared(ctx, ctx.get_embedding_from_data(batch))
            for batch in batches(requires_grad=False)
        ]


def infer_bytes(job):
    with InferCtx([worker.address for worker in job.workers]) as ctx:
        return [
            prepared(ctx, ctx.get_embedding_from_bytes(batch.to_bytes()))
            for batch in batches(requires_grad=False)
        ]


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return a job that has a row for every id."""
    with LocalJob(tmp_path, monkeypatch, SLOTS, num_workers=2) as job:
        config = EmbeddingConfig((-1, 1))
        with job.train_ctx(Seen(), SGD(0.0), embedding_config=config) as ctx:
            for batch in DataLoader(Batches([batch_of([*SAMPLES])])):
                trained(ctx, batch)
        yield job


def expected(job, names, samples=SAMPLES):
    """Return the embeddings of a batch, read row by row."""
    return [embedding_of(job, name, samples[name]) for name in names]


def embedding_of(job, name, samples):
    dim, num_places = job.schema.slots[name].dim, NUM_PLACES.get(name)
    if num_places is None:
        return np.stack([job.read(name, *s).sum(axis=0) for s in samples])
    places = np.zeros((len(samples), num_places, dim + 1), dtype=np.float32)
    for place, sample in zip(places, samples, strict=True):
        kept = sample[:num_places]
        place[: len(kept), :dim] = job.read(name, *kept)
        place[: len(kept), dim] = 1
    return places


@pytest.mark.parametrize(
    "way",
    [
        train,
        train_a_model_of_ones_own,
        train_from_data_loaders,
        evaluate_within_the_training,
        evaluate_data_within_the_training,
        evaluate_from_data_loaders_within_the_training,
        evaluate,
        evaluate_data,
        evaluate_bytes,
        evaluate_from_data_loaders,
        keep_gradients_outside_of_a_training,
        infer,
        infer_data,
        infer_bytes,
    ],
)
def test_embeddings_come_in_the_order_of_the_batch(job, way):
    received = way(job)
    assert [[*e.shape] for e in received[0]] == [[2, 4], [2, 8]]
    assert [[*e.shape] for e in received[1]] == [[2, 8], [2, 4]]
    assert [[*e.shape] for e in received[2]] == [[2, 8]]
    for names, embeddings in zip(BATCHES, received, strict=True):
        by_rows = expected(job, names)
        assert [[*e.shape] for e in embeddings] == [[*e.shape] for e in by_rows]
        for name, one, other in zip(names, embeddings, by_rows, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, err_msg=name)
            assert other.any()


def test_the_order_of_the_embedding_config_does_not_matter(job, monkeypatch, tmp_path):
    """The trainer has another than the embedding workers."""
    config = yaml.safe_load(SLOTS)
    slots = config["slots_config"].items()
    path = tmp_path / "turned.yml"
    turned = {**config, "slots_config": dict(reversed(slots))}
    path.write_text(yaml.safe_dump(turned, sort_keys=False))
    monkeypatch.setenv("PERSIA_EMBEDDING_CONFIG", str(path))
    for names, embeddings in zip(BATCHES, train(job), strict=True):
        for one, other in zip(embeddings, expected(job, names), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


class InARow(nn.Module):
    """Gives all that it was given, one after the other."""

    def forward(
        self, non_id_tensors: list[torch.Tensor], embeddings: list[torch.Tensor]
    ) -> torch.Tensor:
        return torch.cat([e.flatten(start_dim=1) for e in embeddings], dim=1)


@pytest.fixture(params=["local", "remote"])
def served(request, job):
    """Serve a TorchScript model over embeddings of this process, or of workers."""
    workers = RemoteWorkers([worker.address for worker in job.workers])
    local = SlotsLookup(job.client, build_features(job.schema))
    reader = SlotsReader(local if request.param == "local" else workers, CPU)
    model = torch.jit.script(InARow())
    models = Models()
    models.add("model").add(Version(Predictor(reader, DenseModel(model, "model"))))
    server = PredictionServer(models, HttpConfig(), DECODERS)
    yield server
    server.close()
    models.close()
    workers.close()


def test_a_served_model_gets_them_in_the_order_of_the_batch(job, served):
    for names, batch in zip(BATCHES, batches(requires_grad=False), strict=True):
        predictions = predict(served.address, batch.to_bytes())
        in_a_row = [e.reshape(2, -1) for e in expected(job, names)]
        np.testing.assert_allclose(
            predictions, np.concatenate(in_a_row, axis=1), rtol=1e-6, err_msg=str(names)
        )


@pytest.mark.parametrize("names", ["ac", "ca", "acd", "dca", "cad", "c"])
def test_gradients_do_not_shift_between_slots_of_one_dim(job, names):
    """The n-th embedding of the batch gets a gradient of 10 to the n."""
    before = {name: job.read(name, 1, 4, 7) for name in "acd"}
    samples = {"a": [[1]], "c": [[4]], "d": [[7]]}
    unbounded = EmbeddingConfig((-1, 1), weight_bound=0)
    with job.train_ctx(Seen(), SGD(1.0), embedding_config=unbounded) as ctx:
        for batch in DataLoader(Batches([batch_of(names, samples)])):
            _, embeddings, _ = ctx.prepare_features(batch)
            sum(10.0**n * e.sum() for n, e in enumerate(embeddings)).backward()
    ids = {"a": 0, "c": 1, "d": 2}
    for table in ("ac", "d"):
        moved = np.zeros((3, 4))
        for n, name in enumerate(names):
            if name in table:
                moved[ids[name]] += 10.0**n
        after = job.read(table[0], 1, 4, 7)
        np.testing.assert_allclose(before[table[0]] - after, moved, rtol=1e-5)


SCALES = {"a": 1.0, "b": 2.0, "c": 3.0, "raw": 4.0, "d": 5.0}


class Squares(nn.Module):
    """Sums up the squares of all that it is given, each slot with a factor of its own.

    The gradient of an embedding is hence its own: twice the factor, times itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.names = []

    def forward(self, non_id_tensors, embeddings):
        slots = zip(self.names, embeddings, strict=True)
        return self.bias + sum(SCALES[name] * (e**2).sum() for name, e in slots)


class EachTableByItself:
    """The rows of each table, in double precision, trained on its own slots alone."""

    def __init__(self, schema, optimizer, num_state):
        self._schema = schema
        self._optimizer = optimizer
        self._num_state = num_state
        self.rows = {}
        self._steps = Counter()

    def _row(self, name, id_):
        slot = self._schema.slots[name]
        key = slot.group, id_ + slot.index_prefix
        if key not in self.rows:
            weights = reference.uniform_weights(key[1], slot.dim, -1, 1)
            state = np.zeros(self._num_state * slot.dim)
            self.rows[key] = reference.Row(weights.astype(np.float64), state)
        return key, self.rows[key].weights

    def train(self, names, samples):
        grads = defaultdict(float)
        for name in names:
            for sample in samples[name]:
                kept = sample[: NUM_PLACES.get(name)]
                rows = [self._row(name, id_) for id_ in kept]
                pooled = sum(weights for _, weights in rows)
                for key, weights in rows:
                    vector = weights if name in NUM_PLACES else pooled
                    grads[key] = grads[key] + 2 * SCALES[name] * vector
        groups = {self._schema.slots[name].group for name in names}
        self._steps.update(groups)  # of a batch without the table there is no step
        for (group, id_), grad in grads.items():
            row = self.rows[group, id_]
            reference.step(self._optimizer, row, grad, self._steps[group])


def random_batches(seed, num):
    """Return batches of random slots in a random order; some have no ids at all."""
    rng = np.random.default_rng(seed)
    for _ in range(num):
        names = rng.permutation([*SAMPLES])[: rng.integers(1, 1 + len(SAMPLES))]
        num_samples = rng.integers(1, 4)
        yield (
            names.tolist(),
            {
                name: [
                    rng.integers(0, 12, rng.integers(0, 4)).tolist()
                    for _ in range(num_samples)
                ]
                for name in SAMPLES
            },
        )


@pytest.mark.parametrize(("optimizer", "num_state"), [(SGD(0.01), 0), (Adam(0.01), 2)])
def test_mixed_batches_of_two_loaders_train_each_table_as_if_it_were_alone(
    tmp_path, monkeypatch, optimizer, num_state
):
    drawn = list(random_batches(7, 60))
    to_send = [batch_of(names, samples) for names, samples in drawn]
    config = EmbeddingConfig((-1, 1), weight_bound=0)
    model = Squares()
    with LocalJob(tmp_path, monkeypatch, SLOTS, num_workers=2) as job:
        with (
            job.train_ctx(model, optimizer, embedding_config=config) as ctx,
            from_loaders(job, to_send) as looked_up,
        ):
            for batch in looked_up:
                model.names = json.loads(batch.meta)
                ctx.backward(ctx.forward(batch)[0])
        alone = EachTableByItself(job.schema, optimizer, num_state)
        for names, samples in drawn:
            alone.train(names, samples)
        assert job.num_rows() == len(alone.rows) > 40
        for (group, id_), row in alone.rows.items():
            (floats,) = job.client.read(group, ids_of(id_))
            np.testing.assert_allclose(floats, row.floats(), rtol=2e-4, atol=1e-6)


def test_tables_of_missing_slots_are_unchanged(tmp_path, monkeypatch):
    """Their rows, and the state of their optimizer."""

    def tables():
        return {
            name: [
                block
                for of_table in job.client.export(name)
                for block in (of_table.ids, of_table.weights, of_table.state)
            ]
            for name in job.schema.groups
        }

    def train_on(names):
        for batch in DataLoader(Batches([batch_of(names)]), embedding_staleness=1):
            trained(ctx, batch)
        with eval_ctx():  # waits for the update
            return tables()

    def changed(before, after):
        return {
            name
            for name in before
            if not all(map(np.array_equal, before[name], after[name]))
        }

    with (
        LocalJob(tmp_path, monkeypatch, SLOTS) as job,
        job.train_ctx(Seen(), Adam(0.1)) as ctx,
    ):
        whole = train_on([*SAMPLES])
        of_b = train_on("b")
        of_c = train_on(["c", "raw"])
    assert changed(whole, of_b) == {"b"}
    assert changed(of_b, of_c) == {"shared", "raw"}


@pytest.mark.parametrize("names", [("a", "e"), ("e",)])
def test_an_unknown_slot_is_rejected(job, names):
    batch = batch_of(names, {"a": [[1]], "e": [[1]]}, requires_grad=False)
    message = r"\['a', 'b', 'c', 'd', 'raw'\].*unknown \['e'\]"
    with job.train_ctx(Seen(), SGD(0.0)) as ctx:
        with pytest.raises(BatchError, match=message):
            ctx.get_embedding_from_data(batch)
        with pytest.raises(BatchError, match=message):
            next(iter(DataLoader(Batches([batch]))))
        looked_up = iter(DataLoader(StreamingDataset(4)))
        with job.data_ctx() as data_ctx, pytest.raises(RemoteError, match=message):
            data_ctx.send_data(batch)
        assert list(looked_up) == []
    infer = InferCtx([job.workers[0].address])
    with infer, pytest.raises(BatchError, match=message):
        infer.get_embedding_from_bytes(batch.to_bytes())
