import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from persia_torchrec import timeouts
from persia_torchrec.ctx import DataCtx, eval_ctx
from persia_torchrec.data import DataLoader, StreamingDataset
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.errors import ConfigError, DataflowError, RemoteError
from persia_torchrec.persia import feed
from tests.support.local_job import LocalJob, Sending, batch_of
from tests.support.script_jobs import INFER
from tests.support.servers import DEADLINE_S

pytestmark = pytest.mark.slow

NUM_BATCHES = 60


@pytest.fixture
def sending():
    sending = Sending()
    yield sending
    sending.join()


def share(loader, num_loaders, num=NUM_BATCHES, **more):
    """Make the batches of one loader; batch ``n`` has the id ``n`` and says so."""
    for number in range(loader, num, num_loaders):
        yield batch_of([number], meta=b"%d" % number, **more)


def train(ctx, batches):
    """Take a step on each batch; return their numbers in the order they came."""
    numbers = []
    for batch in batches:
        assert int(batch.meta) == batch.batch_id
        output, _ = ctx.forward(batch)
        ctx.backward(output.sum())
        numbers.append(batch.batch_id)
    return numbers


def test_a_context_that_sends_is_rejected_in_an_inference_job(tmp_path, monkeypatch):
    (tmp_path / "global_config.yml").write_text(INFER)
    monkeypatch.setenv("PERSIA_GLOBAL_CONFIG", str(tmp_path / "global_config.yml"))
    with pytest.raises(ConfigError, match="data loader must belong to a job that tr"):
        DataCtx()


@pytest.mark.parametrize("num_loaders", [1, 2, 3])
def test_batches_of_all_loaders_come_in_the_order_of_their_numbers(
    tmp_path, monkeypatch, sending, num_loaders
):
    with LocalJob(tmp_path, monkeypatch, num_workers=2) as job, job.train_ctx() as ctx:
        loader = DataLoader(
            StreamingDataset(4), reproducible=True, embedding_staleness=1
        )
        batches = iter(loader)
        for index in range(num_loaders):
            data_ctx = job.data_ctx(index, num_loaders)
            sending.start(data_ctx, share(index, num_loaders))
        assert train(ctx, batches) == list(range(NUM_BATCHES))
        assert job.num_rows() == NUM_BATCHES


def test_small_buffers_make_the_loaders_wait_and_lose_nothing(
    tmp_path, monkeypatch, sending
):
    most = []

    def note(_):
        most.append(len(job.buffers[0]))

    job = LocalJob(tmp_path, monkeypatch, forward_buffer_size=2)
    with job, job.train_ctx() as ctx:
        loader = DataLoader(
            StreamingDataset(1), forward_buffer_size=1, embedding_staleness=1
        )
        batches = iter(loader)
        for index in range(2):
            sending.start(job.data_ctx(index, 2), share(index, 2), note)
        assert sorted(train(ctx, batches)) == list(range(NUM_BATCHES))
        # Two of each loader, as the buffer says.
        assert max(most) <= 4
        assert len(job.buffers[0]) == 0


def test_a_loader_sends_and_keeps_no_more_than_the_trainer_takes(
    recovering_job, sending
):
    job, sent = recovering_job, threading.Semaphore(0)
    with job.train_ctx() as ctx:
        loader = DataLoader(StreamingDataset(2), forward_buffer_size=1)
        batches, data_ctx = iter(loader), job.data_ctx()
        thread = sending.start(
            data_ctx, share(0, 1), after_each=lambda _: sent.release()
        )
        first = next(batches)
        # Two wait to be looked up, one waits for the loop, one for its place.
        for _ in range(5):
            assert sent.acquire(timeout=DEADLINE_S)
        assert not sent.acquire(timeout=0.3)
        assert thread.is_alive()
        assert 5 <= len(data_ctx._feed.kept) <= 6
        ctx.backward(ctx.forward(first)[0].sum())
        train(ctx, batches)
    sending.join()
    assert data_ctx._feed.kept == {}


def test_batches_without_gradients_come_through_as_well(job, sending):
    with job.train_ctx() as ctx:
        batches = iter(DataLoader(StreamingDataset(), embedding_staleness=1))
        sending.start(job.data_ctx(), share(0, 1, num=10, requires_grad=False))
        assert sum(not ctx.forward(batch)[0].isnan().any() for batch in batches) == 10
    assert job.num_rows() == 0


def test_a_rejected_batch_names_the_features_and_leaves_no_gap(job):
    with job.train_ctx() as ctx:
        batches = iter(DataLoader(StreamingDataset(), reproducible=True))
        with job.data_ctx() as data_ctx:
            good = list(share(0, 1, num=3))
            data_ctx.send_data(good[0])
            message = r"embedding worker 0 at .*one of \['item'\].*unknown \['itme'\]"
            with pytest.raises(RemoteError, match=message) as raised:
                data_ctx.send_data(batch_of([1], name="itme"))
            assert raised.value.kind == "BatchError"
            data_ctx.send_data(good[1])
            data_ctx.send_data(good[2])
        assert train(ctx, batches) == [0, 1, 2]


def test_a_crashed_loader_does_not_count_as_ended(job):
    with job.train_ctx() as ctx:
        batches = iter(DataLoader(StreamingDataset(), timeout_ms=300))
        data_ctx = job.data_ctx()
        data_ctx.send_data(batch_of([1], meta=b"0"))
        with pytest.raises(ZeroDivisionError), data_ctx:
            raise ZeroDivisionError
        message = r"must send a batch within 0\.3 s.*Ended: 0 of 1 loaders"
        with pytest.raises(DataflowError, match=message):
            train(ctx, batches)


def test_a_trainer_that_stops_early_leaves_no_loader_behind(job):
    with job.train_ctx() as ctx:
        batches = iter(DataLoader(StreamingDataset(4)))
        data_ctx = job.data_ctx()
        for batch in share(0, 1, num=4):
            data_ctx.send_data(batch)
        ctx.backward(ctx.forward(next(batches))[0].sum())
        batches.close()
    assert (job.read("item", 0) < 0).all()
    with data_ctx:
        pass


def test_a_buffer_that_stays_full_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(timeouts, "SEND_BATCH_S", 0)
    job = LocalJob(tmp_path, monkeypatch, forward_buffer_size=1)
    message = "The (embedding worker|trainer) must take the batch within 0 s.*stayed"
    with job, job.train_ctx():
        batches = iter(DataLoader(StreamingDataset(1), forward_buffer_size=1))
        data_ctx = job.data_ctx()
        with pytest.raises(DataflowError, match=message), data_ctx:
            list(map(data_ctx.send_data, share(0, 1)))
        batches.close()


def test_outside_a_job_there_is_no_trainer_to_send_to(monkeypatch):
    monkeypatch.delenv("PERSIA_STORE_PORT", raising=False)
    with pytest.raises(ConfigError, match=r"PERSIA_STORE_PORT is not set.*torchx"):
        DataCtx()


def test_a_loader_that_is_not_one_of_them_is_rejected(job):
    message = r"REPLICA_INDEX must be in \[0, 2\).*Received: 2"
    with pytest.raises(ConfigError, match=message):
        job.data_ctx(index=2, size=2)


def test_threads_may_share_a_context(job):
    num, ready = 40, threading.Barrier(4)

    def send(first):
        ready.wait(DEADLINE_S)
        for number in range(first, num, 4):
            data_ctx.send_data(batch_of([number], label=number))

    with job.train_ctx(embedding_config=FROM_ZERO) as ctx:
        batches = iter(DataLoader(StreamingDataset(num), embedding_staleness=3))
        with job.data_ctx() as data_ctx, ThreadPoolExecutor(4) as pool:
            list(pool.map(send, range(4)))
        labels, ids = [], []
        for batch in batches:
            output, (label,) = ctx.forward(batch)
            ctx.backward(label.sum() * output.sum())
            labels.append(label.item())
            ids.append(batch.batch_id)
    assert sorted(labels) == sorted(ids) == list(range(num))
    # The gradient of each id is the label of its own batch.
    assert (-job.read("item", *range(num)))[:, 0].tolist() == list(range(num))


def test_a_second_context_of_a_process_continues_the_numbers(job):
    with job.train_ctx() as ctx:
        batches = iter(DataLoader(StreamingDataset()))
        with job.data_ctx() as first:
            first.send_data(batch_of([0], meta=b"0"))
            for number in (1, 3):
                with job.data_ctx() as inner:
                    assert inner.position == number
                    inner.send_data(batch_of([number], meta=b"%d" % number))
                number += 1
                first.send_data(batch_of([number], meta=b"%d" % number))
        assert train(ctx, batches) == [0, 1, 2, 3, 4]


def test_a_batch_behind_the_block_is_an_error_that_says_so(job):
    with job.train_ctx():
        batches = iter(DataLoader(StreamingDataset()))
        with job.data_ctx() as data_ctx:
            data_ctx.send_data(batch_of([0]))
        with pytest.raises(
            ConfigError, match="before the block of its DataCtx is left"
        ):
            data_ctx.send_data(batch_of([1]))
        with pytest.raises(ConfigError, match="must be entered once"), data_ctx:
            pass
        batches.close()


class TestEpochsOfAStream:
    """A stream that is cut into passes, by ``islice`` or ``break``."""

    def test_each_pass_continues_with_the_next_batch(self, job, sending):
        seen = []
        with job.train_ctx(embedding_config=FROM_ZERO) as ctx:
            dataset = StreamingDataset(4)
            loader = DataLoader(dataset, reproducible=True)
            passes = [iter(loader)]
            sending.start(job.data_ctx(), share(0, 1, num=35))
            for epoch in range(3):
                batches = passes.pop() if passes else loader
                seen += train(ctx, itertools.islice(batches, 10))
                loader = DataLoader(dataset, reproducible=True)  # or a new one
                assert seen == list(range(10 * (epoch + 1)))
            for batch in loader:
                seen += train(ctx, [batch])
                break
            seen += train(ctx, loader)
            assert seen == list(range(35))
            assert train(ctx, loader) == []  # behind the end
            ctx.embeddings.flush()
            assert (-job.read("item", *range(35))).tolist() == [[1.0] * 4] * 35

    def test_an_evaluation_may_take_some_batches_between(self, job, sending):
        with job.train_ctx() as ctx:
            loader = DataLoader(StreamingDataset(4), reproducible=True)
            batches = iter(loader)
            sending.start(job.data_ctx(), share(0, 1, num=30))
            seen = train(ctx, itertools.islice(batches, 10))
            with eval_ctx(model=ctx.model) as inner:
                for batch in itertools.islice(loader, 10):
                    inner.forward(batch)
                    seen.append(batch.batch_id)
            seen += train(ctx, loader)
        assert seen == list(range(30))

    def test_loaders_of_other_arguments_are_rejected(self, job):
        with job.train_ctx():
            dataset = StreamingDataset()
            iter(DataLoader(dataset))
            message = "DataLoaders of the same arguments"
            with pytest.raises(ConfigError, match=message):
                iter(DataLoader(dataset, embedding_staleness=1))

    def test_torchrecs_batches_continue_too(self, tmp_path, monkeypatch, sending):
        with LocalJob(tmp_path, monkeypatch, num_workers=0) as job:
            dataset = StreamingDataset(4, as_torchrec=True)
            first = iter(dataset)
            sending.start(job.data_ctx(), share(0, 1, num=25))
            seen = [b.batch_id for b in itertools.islice(first, 10)]
            seen += [b.batch_id for b in itertools.islice(dataset, 10)]
            seen += [b.batch_id for b in dataset]
            assert seen == list(range(25))
            assert list(dataset) == []


FROM_ZERO = EmbeddingConfig((0, 0), weight_bound=0)


@pytest.fixture
def recovering_job(tmp_path, monkeypatch):
    with LocalJob(tmp_path, monkeypatch, num_workers=2, recovery_s=DEADLINE_S) as job:
        yield job


def crash(data_ctx):
    """End a loader by an exception, and its process with it."""
    with pytest.raises(ZeroDivisionError), data_ctx:
        raise ZeroDivisionError
    feed._feeds.clear()


def times_trained(job):
    return (-job.read("item", *range(NUM_BATCHES))).tolist()


def test_ids_that_workers_lose_are_sent_again_and_trained_once(recovering_job, sending):
    job = recovering_job
    with job.train_ctx(embedding_config=FROM_ZERO) as ctx:
        batches = iter(DataLoader(StreamingDataset(4), embedding_staleness=3))
        sending.start(job.data_ctx(), share(0, 1))
        for number, batch in enumerate(batches):
            if number % 20 == 10:
                job.restart_worker()
            ctx.backward(ctx.forward(batch)[0].sum())
    assert times_trained(job) == [[1.0] * 4] * NUM_BATCHES
    assert [len(buffer) for buffer in job.buffers] == [0, 0]


@pytest.mark.parametrize("asks", [True, False])
def test_a_loader_that_starts_again_sends_what_has_not_arrived(
    recovering_job, sending, asks
):
    job = recovering_job
    with job.train_ctx(embedding_config=FROM_ZERO) as ctx:
        batches = iter(DataLoader(StreamingDataset(4), embedding_staleness=3))
        first, all_batches = job.data_ctx(), list(share(0, 1))
        assert first.position == 0
        for batch in all_batches[:3]:
            first.send_data(batch)
        crash(first)
        if not asks:
            job.restart_worker()  # some ids of what has arrived are lost, too
        again = job.data_ctx()
        position = again.position if asks else 0
        assert position == 3 * asks
        sending.start(again, all_batches[position:])
        for batch in batches:
            ctx.backward(ctx.forward(batch)[0].sum())
    assert times_trained(job) == [[1.0] * 4] * NUM_BATCHES


def test_other_ids_of_a_batch_that_has_arrived_are_reported(
    recovering_job, sending, caplog
):
    job = recovering_job
    with job.train_ctx(embedding_config=FROM_ZERO) as ctx, caplog.at_level("INFO"):
        batches = iter(DataLoader(StreamingDataset(4), embedding_staleness=3))
        first = job.data_ctx()
        for batch in share(0, 1, num=2):
            first.send_data(batch)
        crash(first)
        again = job.data_ctx()
        others = [batch_of([n]) for n in (0, 7, 2)]
        sending.start(again, others)
        ids = [batch.batch_id for batch in batches if train_on(ctx, batch)]
        sending.join()
    assert sorted(ids) == [0, 1, 2]
    assert times_trained(job)[:3] == [[1.0] * 4] * 3
    assert "batch 2 of data loader 0 has arrived with other contents" in caplog.text
    assert (
        "batches=3, of which had arrived before=2, with other contents=1" in caplog.text
    )


def train_on(ctx, batch):
    ctx.backward(ctx.forward(batch)[0].sum())
    return True
