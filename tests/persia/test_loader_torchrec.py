"""``as_torchrec=True``: data loader processes feed TorchRec loops, without workers."""

import threading
from contextlib import closing

import numpy as np
import pytest
import torch
from torchrec.datasets.utils import Batch

from persia_torchrec import HostKeyedJaggedTensor
from persia_torchrec.ctx import DataCtx
from persia_torchrec.data import DataLoader, IterableDataset, StreamingDataset
from persia_torchrec.errors import BatchError, ConfigError, DataflowError, RemoteError
from persia_torchrec.persia import feed
from persia_torchrec.persia.batch import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia_torchrec.persia.stream import BatchSender, Position
from tests.support.local_job import LocalJob, Sending, batch_of
from tests.support.servers import DEADLINE_S, ids_of

NUM_BATCHES = 40


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job without embedding workers."""
    with LocalJob(tmp_path, monkeypatch, num_workers=0) as job:
        yield job


@pytest.fixture
def sending():
    sending = Sending()
    yield sending
    sending.join()


def two_features(number, **more):
    """Return a batch of two samples, whose features are not in an order of names."""
    user = IDTypeFeature("user", [ids_of(number, 2**64 - 1), ids_of()])
    item = IDTypeFeatureWithSingleID("item", ids_of(7, number))
    dense = [
        NonIDTypeFeature(np.full((2, 3), number, np.float32)),
        NonIDTypeFeature(np.array([8, 9], np.float32)),
    ]
    label = Label(np.array([[1], [0]], np.float32))
    return PersiaBatch([user, item], dense, [label], meta=b"%d" % number, **more)


def share(loader, num_loaders):
    for number in range(loader, NUM_BATCHES, num_loaders):
        yield two_features(number)


@pytest.mark.parametrize("num_loaders", [1, 2])
def test_batches_of_data_loaders_come_as_torchrecs_without_an_embedding_worker(
    job, sending, num_loaders
):
    batches = iter(DataLoader(StreamingDataset(4), reproducible=True, as_torchrec=True))
    for index in range(num_loaders):
        sending.start(job.data_ctx(index, num_loaders), share(index, num_loaders))
    for number, batch in enumerate(batches):
        assert isinstance(batch, Batch)
        ids = batch.sparse_features
        assert ids.keys() == ["user", "item"]
        assert ids.values().tolist() == [number, -1, 7, number]
        assert ids.lengths().tolist() == [2, 0, 1, 1]
        assert batch.dense_features.tolist() == [[number] * 3 + [8], [number] * 3 + [9]]
        assert batch.labels.tolist() == [[1], [0]]
        assert (batch.batch_id, batch.loader) == (number, number % num_loaders)
        assert batch.meta == b"%d" % number
        assert batch.requires_grad
    assert number == NUM_BATCHES - 1


def test_a_streaming_dataset_may_be_iterated_over_by_itself(job, sending):
    batches = iter(StreamingDataset(4, as_torchrec=True))
    sending.start(job.data_ctx(), share(0, 1))
    assert [int(batch.meta) for batch in batches] == [*range(NUM_BATCHES)]


def test_a_loader_sends_no_more_than_the_trainer_takes(job, sending):
    sent = threading.Semaphore(0)
    loader = DataLoader(StreamingDataset(2), forward_buffer_size=1, as_torchrec=True)
    batches = iter(loader)
    ctx = job.data_ctx()
    sending.start(ctx, share(0, 1), after_each=lambda _: sent.release())
    next(batches)
    # Two wait in the queue, one as tensors, one for its place there.
    for _ in range(5):
        assert sent.acquire(timeout=DEADLINE_S)
    assert not sent.acquire(timeout=0.2)
    assert sum(1 for _ in batches) == NUM_BATCHES - 1


class Own(IterableDataset):
    """Batches of this process, of PERSIA's kind and of TorchRec's."""

    def __iter__(self):
        yield two_features(1)
        yield from DataLoader([two_features(2)], as_torchrec=True)


def test_batches_of_this_process_become_torchrecs_outside_of_any_job():
    batches = list(DataLoader(Own(), as_torchrec=True))
    assert [batch.dense_features[0, 0].item() for batch in batches] == [1, 2]
    assert [batch.loader for batch in batches] == [None, None]


def test_ids_on_the_host_stay_there_when_their_batch_is_moved():
    (batch,) = DataLoader([two_features(1)], as_torchrec=True, ids_on_host=True)
    moved = batch.to(torch.device("meta"))
    assert isinstance(moved.sparse_features, HostKeyedJaggedTensor)
    assert moved.sparse_features.values().tolist() == [1, -1, 7, 1]
    assert moved.dense_features.is_meta
    assert moved.labels.is_meta
    assert moved.meta == b"1"


def test_a_batch_may_come_on_a_device():
    meta = torch.device("meta")
    (batch,) = DataLoader([two_features(1)], as_torchrec=True, device=meta)
    assert batch.sparse_features.values().is_meta
    assert batch.dense_features.is_meta


def test_a_batch_without_dense_features_and_labels_has_empty_ones():
    given = batch_of([1], [2, 3], requires_grad=False)
    given.labels = ()
    (batch,) = DataLoader([given], as_torchrec=True)
    assert batch.dense_features.shape == batch.labels.shape == (2, 0)
    assert not batch.requires_grad


def test_dense_features_that_are_no_one_tensor_are_an_error():
    image = NonIDTypeFeature(np.zeros((1, 2, 2), np.uint8))
    number = NonIDTypeFeature(np.zeros((1, 1), np.float32))
    item = IDTypeFeature("item", [ids_of(1)])
    alone = PersiaBatch([item], [image], requires_grad=False)
    (batch,) = DataLoader([alone], as_torchrec=True)
    assert batch.dense_features.shape == (1, 2, 2)
    both = PersiaBatch([item], [image, number], requires_grad=False)
    with pytest.raises(BatchError, match=r"one tensor of dense features.*uint8"):
        list(DataLoader([both], as_torchrec=True))


def test_an_invalid_batch_is_an_error():
    with pytest.raises(BatchError, match="must be a PersiaBatch, or TorchRec's"):
        list(DataLoader([3], as_torchrec=True))


def test_settings_without_effect_are_errors():
    with pytest.raises(ConfigError, match=r"staleness must be left out.*staleness=3\)"):
        DataLoader(Own(), as_torchrec=True, embedding_staleness=3)
    for setting in ({"ids_on_host": True}, {"device": torch.device("cpu")}):
        with pytest.raises(ConfigError, match="are for as_torchrec=True"):
            DataLoader(Own(), **setting)


def test_a_loader_that_was_told_otherwise_is_rejected_by_name(job):
    batches = iter(DataLoader(StreamingDataset(4), as_torchrec=True))
    job.data_ctx()
    with pytest.raises(ConfigError, match=r"Data loader 0: as_torchrec must .* True"):
        DataCtx(as_torchrec=False)
    with DataCtx(as_torchrec=True):  # ends the data
        pass
    assert list(batches) == []


def test_a_trainer_with_workers_rejects_a_loader_for_trainers_without(
    tmp_path, monkeypatch
):
    with LocalJob(tmp_path, monkeypatch) as job, job.train_ctx():
        iter(DataLoader(StreamingDataset(4)))
        job.data_ctx()
        with pytest.raises(ConfigError, match=r"Data loader 0: .* False, which says"):
            DataCtx(as_torchrec=True)


@pytest.mark.parametrize(
    ("takes_ids", "worker", "message"),
    [
        (True, 3, "Data loader 1 must send its ids to the NN worker itself.*worker 3"),
        (False, -2, "Data loader 1 must send its ids to embedding workers.*with it"),
    ],
)
def test_a_batch_whose_ids_are_elsewhere_is_rejected_by_its_loaders_name(
    job, takes_ids, worker, message
):
    dataset = StreamingDataset(4)
    dataset.takes_ids = takes_ids
    dataset.batches(DEADLINE_S, in_order=False)
    (address,) = job.book.addresses("trainer")
    with closing(BatchSender([address], 1, 2, job.book.greeting)) as sender:
        sender.begin()
        assert sender.takes_ids() == takes_ids
        with pytest.raises(RemoteError, match=message):
            sender.send(1, two_features(1), worker)


def test_trainers_that_ask_for_different_things_are_an_error():
    with closing(BatchSender(["tcp://127.0.0.1:9"], 0, 1)) as sender:
        sender.known = [
            Position(arrived=0, open=[], lost=[], takes_ids=takes)
            for takes in (False, True)
        ]
        with pytest.raises(
            DataflowError, match="worker 1 has, and NN worker 0 has not"
        ):
            sender.takes_ids()


def test_a_loader_that_starts_again_continues_behind_what_has_arrived(job, sending):
    batches = iter(DataLoader(StreamingDataset(50), as_torchrec=True))
    first = job.data_ctx()
    for batch in [*share(0, 1)][:5]:
        first.send_data(batch)
    feed._feeds.clear()  # as another process
    again = job.data_ctx()
    assert again.position == 5
    sending.start(again, [*share(0, 1)][5:])
    assert [int(batch.meta) for batch in batches] == [*range(NUM_BATCHES)]
