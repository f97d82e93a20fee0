"""TorchRec's batches, and TorchRec's models, in a ``TrainCtx``."""

import dataclasses

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.utils import Batch

from persia_torchrec import Adagrad, from_torchrec, to_torchrec
from persia_torchrec.ctx import eval_ctx
from persia_torchrec.data import (
    CsvDataset,
    DataLoader,
    DenseColumn,
    IdColumn,
    LabelColumn,
    StreamingDataset,
)
from persia_torchrec.errors import BatchError, ConfigError
from persia_torchrec.persia.batch import (
    IDTypeFeature,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from tests.support.local_job import LocalJob, Sending
from tests.support.servers import ids_of

pytestmark = pytest.mark.slow

SLOTS = """
feature_index_prefix_bit: 8
slots_config:
  user: {dim: 4}
  item: {dim: 8}
"""
LOSS = torch.nn.functional.mse_loss


class OfLists(torch.nn.Module):
    """A PERSIA user's model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.dense = torch.nn.Linear(14, 1)

    def forward(self, non_id_tensors, embeddings):
        return self.dense(torch.cat([*non_id_tensors, *embeddings], dim=1))


class OfIds(torch.nn.Module):
    """The same as a TorchRec user's, with two collections."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.dense = torch.nn.Linear(14, 1)
        self.users, self.items = collection("user", 4), collection("item", 8)

    def forward(self, dense_features, ids):
        users, items = self.users(ids).values(), self.items(ids).values()
        return self.dense(torch.cat([dense_features, users, items], dim=1))


def collection(name, dim):
    tables = [EmbeddingBagConfig(1, dim, name, feature_names=[name])]
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


@pytest.fixture(scope="module")
def batches():
    rng = np.random.default_rng(6)
    return [
        PersiaBatch(
            [
                IDTypeFeature(name, [rng.integers(0, 9, 3).astype(np.uint64), ids_of()])
                for name in ("user", "item")
            ],
            [NonIDTypeFeature(rng.random((2, 2)).astype(np.float32))],
            labels=[Label(rng.random((2, 1)).astype(np.float32))],
        )
        for _ in range(8)
    ]


@pytest.fixture
def job(tmp_path, monkeypatch):
    with LocalJob(tmp_path, monkeypatch, SLOTS) as job:
        yield job


@pytest.fixture
def job_without_workers(tmp_path, monkeypatch):
    with LocalJob(tmp_path, monkeypatch, SLOTS, num_workers=0) as job:
        yield job


def train(job, model, batches, **settings):
    """Train on batches; return the losses, and what was learnt."""
    losses = []
    with job.train_ctx(model, Adagrad(0.1), **settings) as ctx:
        for batch in batches() if callable(batches) else batches:
            output, (label,) = ctx.forward(batch)
            loss = LOSS(output, label)
            ctx.backward(loss)
            losses.append(loss.item())
    job.client.learn_tables()
    rows = [job.read(name, *range(9)).tolist() for name in ("user", "item")]
    return losses, model.dense.weight.tolist(), rows


def serial(data):
    return lambda: DataLoader(data, reproducible=True, embedding_staleness=1)


def as_torchrecs(batches):
    """Return batches as a TorchRec user has them."""
    made = map(to_torchrec, batches)
    return [Batch(b.dense_features[0], b.id_features, b.labels[0]) for b in made]


def test_torchrecs_batches_train_as_persias(job, batches):
    expected = train(job, OfLists(), serial(batches))
    ours = [to_torchrec(batch) for batch in batches]
    theirs = as_torchrecs(batches)
    for given in (serial(ours), serial(theirs)):
        job.client.clear()
        assert train(job, OfLists(), given) == expected


def test_a_batch_of_no_loader_is_looked_up_by_forward(job, batches):
    expected = train(job, OfLists(), serial(batches))
    job.client.clear()
    given = DataLoader(batches, as_torchrec=True)
    losses, *_ = train(job, OfLists(), given)
    # Not the schedule without stale rows: the next lookup waits for no update.
    assert losses[0] == expected[0][0]
    assert len(losses) == len(batches)
    assert job.client.step("item") == len(batches)


def test_a_torchrec_model_trains_as_one_of_persias(job, batches):
    expected = train(job, OfLists(), serial(batches))
    job.client.clear()
    assert train(job, OfIds(), serial(batches)) == expected


def test_data_loaders_feed_a_torchrec_model(job_without_workers, batches):
    job, sending = job_without_workers, Sending()

    def streamed():
        loader = DataLoader(
            StreamingDataset(4), reproducible=True, embedding_staleness=1
        )
        taken = iter(loader)
        sending.start(job.data_ctx(), batches)
        return taken

    streaming = train(job, OfIds(), streamed)
    sending.join()
    job.client.clear()
    assert train(job, OfIds(), serial(batches)) == streaming


def test_a_torchrec_model_is_evaluated_and_saved(
    job_without_workers, batches, tmp_path
):
    job, model = job_without_workers, OfIds()
    with job.train_ctx(model, Adagrad(0.1)) as ctx:
        for batch in serial(batches)():
            output, (label,) = ctx.forward(batch)
            ctx.backward(LOSS(output, label))
        ctx.dump_checkpoint(str(tmp_path / "saved"))
        first = evaluate(model, batches)
        num_rows = job.num_rows()
        assert first == evaluate(model, batches)
        assert job.num_rows() == num_rows
        ctx.clear_embeddings()
        assert evaluate(model, batches) != first
        ctx.load_checkpoint(str(tmp_path / "saved"))
        assert evaluate(model, batches) == first
        with pytest.raises(ConfigError, match=r"Call forward\(\)"):
            ctx.prepare_features(ctx.get_embedding_from_data(batches[0]))


def evaluate(model, batches):
    model.eval()
    with eval_ctx(model) as ctx, torch.no_grad():
        outputs = [ctx.forward(b)[0].tolist() for b in DataLoader(batches)]
    model.train()
    return outputs


class Splitting(OfIds):
    def forward(self, dense_features, ids):
        users, items = ids.split([1, 1])
        both = self.users(users).values(), self.items(items).values()
        return self.dense(torch.cat([dense_features, *both], dim=1))


class Twice(OfIds):
    def forward(self, dense_features, ids):
        self.users(ids)
        return super().forward(dense_features, ids)


class Never(OfIds):
    def forward(self, dense_features, ids):
        return self.dense(
            torch.nn.functional.pad(
                torch.cat([dense_features, self.users(ids).values()], dim=1), (0, 8)
            )
        )


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (Splitting, ConfigError, "KeyedJaggedTensor that forward is given"),
        (Twice, BatchError, "must be called once with the ids of a batch"),
        (Never, ConfigError, r"tables \['item'\], whose collection was not called"),
    ],
)
def test_a_model_that_uses_its_ids_otherwise_is_an_error(
    job_without_workers, batches, model, error, message
):
    with pytest.raises(error, match=message):
        train(job_without_workers, model(), serial(batches[:1]))


def test_a_dataset_of_files_feeds_a_train_ctx(job, tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("1,2,0.5,1\n3,4,0.25,0\n" * 6)
    columns = [
        IdColumn("user", num_buckets=9),
        IdColumn("item", num_buckets=9),
        DenseColumn("age"),
        LabelColumn("click"),
    ]
    dataset = CsvDataset(path, 4, columns)
    model = torch.nn.Linear(13, 1)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = model

        def forward(self, non_id_tensors, embeddings):
            dense = [t.reshape(len(t), -1) for t in non_id_tensors]
            return self.dense(torch.cat([*dense, *embeddings], dim=1)).squeeze(1)

    losses = []
    with job.train_ctx(Model(), Adagrad(0.1)) as ctx:
        for batch in DataLoader(dataset):
            output, (label,) = ctx.forward(batch)
            loss = LOSS(output, label.reshape(-1))
            ctx.backward(loss)
            losses.append(loss.item())
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_a_batch_of_torchrecs_may_say_that_it_is_not_for_training(batches):
    (batch,) = as_torchrecs(batches[:1])
    assert from_torchrec(batch).requires_grad
    (loaded,) = DataLoader(batches[:1], as_torchrec=True)
    read = dataclasses.replace(loaded, requires_grad=False)
    assert not from_torchrec(read).requires_grad
