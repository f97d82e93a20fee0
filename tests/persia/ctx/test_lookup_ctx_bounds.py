"""How much a context has under way at once, as its arguments say."""

from contextlib import closing, contextmanager

import pytest
import torch

from persia_torchrec.ctx import InferCtx, TrainCtx, eval_ctx
from persia_torchrec.data import DataLoader, StreamingDataset
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.errors import ConfigError, PersiaError, RequestTimeoutError
from persia_torchrec.persia.loader import LookupSettings
from persia_torchrec.persia.slots_reader import SlotsReader
from persia_torchrec.persia.worker_client import RemoteWorkers
from persia_torchrec.rpc.messages import Kind
from tests.support.local_job import (
    Batches,
    Gate,
    LocalJob,
    Sending,
    SumOfEmbeddings,
    batch_of,
)
from tests.support.processes import wait_until
from tests.support.servers import DEADLINE_S
from tests.support.threads import InThread

pytestmark = pytest.mark.slow

FROM_ZERO = EmbeddingConfig((0, 0), weight_bound=0)
TWELVE = [batch_of([1])] * 12


@contextmanager
def gated_job(folder, monkeypatch, kind):
    """Make a job and the gate before its embedding worker; ends with an open gate."""
    gate = Gate(kind)
    with LocalJob(folder, monkeypatch, gate=gate) as job:
        try:
            yield job, gate
        finally:
            gate.open()


@contextmanager
def evaluation_within_a_training(job, size):
    with (
        job.train_ctx(threadpool_worker_size=1),
        eval_ctx(threadpool_worker_size=size) as ctx,
    ):
        yield ctx


def inference(job, size):
    addresses = [worker.address for worker in job.workers]
    return InferCtx(addresses, SumOfEmbeddings(), None, size)


@pytest.mark.parametrize(("size", "num_workers", "at_once"), [(3, 10, 3), (10, 2, 2)])
@pytest.mark.parametrize(
    "context",
    [
        pytest.param(
            lambda job, size: job.train_ctx(threadpool_worker_size=size), id="training"
        ),
        evaluation_within_a_training,
        pytest.param(
            lambda _, size: eval_ctx(SumOfEmbeddings(), None, size), id="evaluation"
        ),
        inference,
    ],
)
def test_lookups(tmp_path, monkeypatch, context, size, num_workers, at_once):
    with gated_job(tmp_path, monkeypatch, Kind.FORWARD) as (job, gate):
        with job.train_ctx(embedding_config=FROM_ZERO) as ctx:
            ctx.backward(ctx.forward(next(iter(loader(2))))[0].sum())
        with context(job, size) as ctx:
            gate.close()
            is_training = isinstance(ctx, TrainCtx)
            staleness = {"embedding_staleness": 8} if is_training else {}
            waiting = Looping(ctx, loader(num_workers, **staleness))
            # More than two are under way only if two do not hide the lookups.
            assert gate.holds_just(min(at_once, 2) if is_training else at_once)
            gate.open()
            assert waiting.num_batches() == len(TWELVE)


def test_a_pending_lookup_has_a_deadline_and_ends_with_its_reader(
    tmp_path, monkeypatch
):
    with (
        gated_job(tmp_path, monkeypatch, Kind.FORWARD) as (job, gate),
        job.train_ctx(),
        closing(RemoteWorkers([job.workers[0].address])) as workers,
    ):
        reader = SlotsReader(workers, timeout_s=0.001)
        gate.close()
        one_at_once = LookupSettings(1, 1, None)
        first, second = [
            reader.start_pull(TWELVE[0], is_training=False, settings=one_at_once)
            for _ in range(2)
        ]
        wait_until(first.running, "the first lookup has begun")
        with pytest.raises(RequestTimeoutError, match=r"looked up within 0\.001 s"):
            reader.embed(first)
        reader.close()
        with pytest.raises(PersiaError, match="The context is closed"):
            reader.embed(second)
        gate.open()
        assert first.result(DEADLINE_S)


class Looping:
    """A loop over a loader's batches, in a thread."""

    def __init__(self, ctx, batches):
        iterator = iter(batches)

        def loop():
            num_batches = 0
            for batch in iterator:
                output, _ = ctx.forward(batch)
                if batch.is_training:
                    ctx.backward(output.sum())
                num_batches += 1
            return num_batches

        self._loop = InThread(loop)

    def num_batches(self):
        """Wait for the end of the loop; return how many batches there were."""
        return self._loop.result()


def loader(num_workers, **settings):
    return DataLoader(Batches(TWELVE), 8, num_workers=num_workers, **settings)


class TestUpdates:
    @pytest.fixture
    def job_and_gate(self, tmp_path, monkeypatch):
        with gated_job(tmp_path, monkeypatch, Kind.BACKWARD) as job_and_gate:
            yield job_and_gate

    @pytest.mark.parametrize("backward_workers_size", [1, 3])
    def test_so_many_are_on_their_way_and_the_others_wait(
        self, job_and_gate, backward_workers_size
    ):
        job, gate = job_and_gate
        settings = {"backward_workers_size": backward_workers_size}
        with job.train_ctx(embedding_config=FROM_ZERO, **settings) as ctx:
            gate.close()
            batches = iter(loader(1, embedding_staleness=8))
            for _ in range(8):
                ctx.backward(ctx.forward(next(batches))[0].sum())
            assert gate.holds_just(backward_workers_size)
            gate.open()
            for batch in batches:
                ctx.backward(ctx.forward(batch)[0].sum())
        assert job.read("item", 1)[0, 0] == -len(TWELVE)

    def test_backward_waits_while_as_many_gradients_are_held_as_may_be(
        self, job_and_gate
    ):
        job, gate = job_and_gate
        with job.train_ctx(
            embedding_config=FROM_ZERO, grad_update_buffer_size=3
        ) as ctx:
            gate.close()
            batches = iter(loader(1, embedding_staleness=8))
            for _ in range(3):
                ctx.backward(ctx.forward(next(batches))[0].sum())
            fourth = ctx.forward(next(batches))[0].sum()
            waiting = InThread(ctx.backward, fourth)
            assert gate.holds_just(3)
            assert waiting.is_alive()
            gate.open()
            waiting.result()
            for batch in batches:
                ctx.backward(ctx.forward(batch)[0].sum())
        assert job.read("item", 1)[0, 0] == -len(TWELVE)


class TestLookingUpDirectly:
    MESSAGE = r"lookup_emb_directly must be True to look up a batch of this process"

    def test_batches_of_data_loaders_alone_are_taken(self, job):
        sending = Sending()
        batch = batch_of([1], requires_grad=False)
        settings = {"embedding_config": FROM_ZERO, "lookup_emb_directly": False}
        with job.train_ctx(**settings) as ctx:
            with pytest.raises(ConfigError, match=self.MESSAGE):
                next(iter(DataLoader(Batches(TWELVE))))
            for context in (ctx, eval_ctx()):
                with pytest.raises(ConfigError, match=self.MESSAGE):
                    context.get_embedding_from_data(batch)
                with pytest.raises(ConfigError, match=self.MESSAGE):
                    context.get_embedding_from_bytes(batch.to_bytes())
            with pytest.raises(ConfigError, match=self.MESSAGE), eval_ctx():
                next(iter(DataLoader(Batches([batch]))))
            batches = iter(DataLoader(StreamingDataset()))
            sending.start(job.data_ctx(), TWELVE)
            for trained in batches:
                ctx.backward(ctx.forward(trained)[0].sum())
        sending.join()
        assert job.read("item", 1)[0, 0] == -len(TWELVE)


class TestArguments:
    def test_they_have_persias_order(self, job):
        model = SumOfEmbeddings()
        dense = torch.optim.SGD(model.parameters(), lr=0.5)
        config = EmbeddingConfig((5, 5))
        arguments = (4, 10, 8, 60, True, False, None, model, config, 10, None)
        with TrainCtx(SGD(1.0), dense, *arguments) as ctx:
            for batch in DataLoader(Batches([batch_of([1])])):
                output, _ = ctx.forward(batch)
                ctx.backward(output.sum(), 20)
        assert job.read("item", 1).tolist() == [[4.0] * 4]
        assert model.bias.item() == -0.5
        assert (ctx.threadpool_worker_size, ctx.device_id) == (10, None)

    def test_a_model_must_be_given(self, job):
        dense = torch.optim.SGD(SumOfEmbeddings().parameters(), lr=0.5)
        with pytest.raises(ConfigError, match=r"must have a model\. Received: model=N"):
            TrainCtx(SGD(1.0), dense, mixed_precision=False)

    @pytest.mark.parametrize("frequency", [1, 20, 1000])
    def test_gradients_are_checked_in_every_batch(self, job, frequency):
        bad = float("nan")
        with job.train_ctx(embedding_config=FROM_ZERO) as ctx:
            for step, batch in enumerate(loader(1, embedding_staleness=1)):
                factor = bad if step in (3, 7) else 1.0
                output = ctx.prepare_features(batch)[1][0].sum()
                ctx.backward(
                    output * factor, embedding_gradient_check_frequency=frequency
                )
        assert job.read("item", 1)[0, 0] == -(len(TWELVE) - 2)

    def test_a_check_of_no_batch_is_rejected(self, job):
        with job.train_ctx() as ctx:
            output, _ = ctx.forward(next(iter(loader(1))))
            message = r"embedding_gradient_check_frequency must be >= 1.*: 0"
            with pytest.raises(ConfigError, match=message):
                ctx.backward(output.sum(), 0)

    def test_an_inference_has_no_embedding_config(self):
        message = r"embedding_config must be None: an InferCtx changes nothing"
        with pytest.raises(ConfigError, match=message):
            InferCtx(["127.0.0.1:1"], None, EmbeddingConfig())
