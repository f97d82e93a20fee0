import numpy as np
import pytest
import torch

from persia_torchrec.ctx import eval_ctx
from persia_torchrec.data import DataLoader
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.errors import ConfigError, FrameError
from tests.support.local_job import Batches, LocalJob, SumOfEmbeddings, batch_of

EVALUATION = [batch_of([number], [1, 2], requires_grad=False) for number in range(15)]
TRAINING = [batch_of([1, step], [2]) for step in range(30)]


def evaluate(model):
    """Return the model's outputs on the evaluation batches."""
    with eval_ctx(model=model) as ctx, torch.no_grad():
        return [
            ctx.forward(batch)[0].flatten().tolist()
            for batch in DataLoader(Batches(EVALUATION))
        ]


def train(ctx, *, test_every=0, **settings):
    """Return the losses, and what the tests in between gave."""
    losses, tests = [], []
    loader = DataLoader(Batches(TRAINING), **settings)
    for step, batch in enumerate(loader):
        output, _ = ctx.forward(batch)
        losses.append(ctx.backward((output**2).sum()).item())
        if test_every and step % test_every == 0:
            tests.append(evaluate(ctx.model))
    return losses, tests


@pytest.fixture
def ctx(job):
    with job.train_ctx(embedding_config=EmbeddingConfig((1, 2))) as ctx:
        yield ctx


def test_an_evaluation_reads_the_rows_and_changes_none(job, ctx):
    train(ctx)
    num_rows, hits = job.num_rows(), job.total("hits")
    outputs = evaluate(ctx.model)
    assert job.num_rows() == num_rows
    assert job.total("hits") > hits
    bias = ctx.model.bias.item()
    one, two = job.read("item", 1, 2).sum(axis=1)
    np.testing.assert_allclose(outputs[1], [one + bias, one + two + bias], rtol=1e-5)
    rows = job.read("item", *range(40))
    assert evaluate(ctx.model) == outputs
    assert np.array_equal(job.read("item", *range(40)), rows)


def test_an_evaluation_sees_every_update_before_it(tmp_path, monkeypatch):
    # Updates that take a while, and that lookups would overtake.
    large = [batch_of(list(range(100_000))) for _ in range(5)]
    job = LocalJob(tmp_path, monkeypatch, capacity_rows=100_000)
    config = EmbeddingConfig(emb_initialization=(0, 0), weight_bound=0)
    with job, job.train_ctx(embedding_config=config) as ctx:
        for batch in DataLoader(Batches(large), embedding_staleness=5):
            ctx.backward(ctx.forward(batch)[0].sum())
        with eval_ctx() as inner:
            looked_up = inner.get_embedding_from_data(batch_of([7]))
            _, (embedding,), _ = inner.prepare_features(looked_up)
    assert embedding.tolist() == [[-5.0] * 4]


def test_an_unknown_id_reads_zeros_and_gets_no_row(job, ctx):
    with eval_ctx() as inner:
        batch = inner.get_embedding_from_data(batch_of([99], requires_grad=False))
        _, (embedding,), labels = inner.prepare_features(batch)
    assert embedding.tolist() == [[0.0] * 4]
    assert not embedding.requires_grad
    assert labels[0].tolist() == [[0.0]]
    assert job.num_rows() == 0


def test_a_batch_may_come_as_bytes(job, ctx):
    for batch in DataLoader(Batches([batch_of([7])]), embedding_staleness=1):
        ctx.backward(ctx.forward(batch)[0].sum())
    with eval_ctx() as inner:
        data = batch_of([7], requires_grad=False).to_bytes()
        looked_up = inner.get_embedding_from_bytes(data)
        _, (embedding,), _ = inner.prepare_features(looked_up)
        with pytest.raises(FrameError):
            inner.get_embedding_from_bytes(data[:-1])
    np.testing.assert_array_equal(embedding.numpy(), job.read("item", 7))
    assert embedding.any()


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 3])
def test_evaluations_do_not_disturb_a_training_that_is_under_way(job, ctx, staleness):
    settings = {"embedding_staleness": staleness, "reproducible": True}
    losses, tests = train(ctx, test_every=7, **settings)
    assert len(losses) == len(TRAINING)
    assert len(tests) == 5
    assert [len(outputs) for outputs in tests] == [len(EVALUATION)] * 5
    assert tests[0] != tests[-1]


@pytest.mark.slow
def test_training_is_the_same_with_and_without_evaluations(job):
    losses = []
    for test_every in (0, 4):
        with job.train_ctx(embedding_config=EmbeddingConfig((1, 2))) as ctx:
            ctx.clear_embeddings()
            losses.append(train(ctx, test_every=test_every, embedding_staleness=1)[0])
    assert losses[0] == losses[1]


def test_a_batch_for_training_is_only_looked_at_within_an_evaluation(job, ctx):
    with eval_ctx() as inner:
        for batch in DataLoader(Batches([batch_of([5])])):
            assert not batch.is_training
            inner.forward(batch)
    assert job.num_rows() == 0


def test_a_users_model_may_be_evaluated(ctx):
    other = SumOfEmbeddings()
    torch.nn.init.constant_(other.bias, 7.0)
    assert evaluate(other)[3] == [7.0, 7.0]
    assert evaluate(None)[3] == [0.0, 0.0]


def test_leaving_an_evaluation_returns_to_the_training(job, ctx):
    with eval_ctx():
        pass
    with pytest.raises(ZeroDivisionError), eval_ctx():
        raise ZeroDivisionError
    losses, _ = train(ctx)
    assert len(losses) == len(TRAINING)
    assert job.num_rows() > 0


def test_embeddings_come_to_the_device_of_the_context(ctx):
    batch = batch_of([1], requires_grad=False)
    with pytest.raises(ConfigError, match=r"device_id must be that of the context"):
        ctx.get_embedding_from_data(batch, device_id=1)
