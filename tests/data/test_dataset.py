import pytest

from persia_torchrec.data import IterableDataset, StreamingDataset
from persia_torchrec.data.stream import BatchSender
from persia_torchrec.errors import ConfigError, DataflowError, RemoteError
from persia_torchrec.wire.address_book import AddressBook
from persia_torchrec.wire.greeting import Greeting
from tests.local_job import batch_of
from tests.servers import DEADLINE_S


class Numbered(IterableDataset):
    """Batches of 1, 2, ... samples."""

    def __init__(self, num: int, buffer_size: int = 10) -> None:
        super().__init__(buffer_size)
        self.num = num
        self.num_passes = 0

    def __iter__(self):
        self.num_passes += 1
        for number in range(self.num):
            yield batch_of(*[[1]] * (number + 1))


@pytest.fixture
def book(monkeypatch):
    book = AddressBook.host(0, loopback=True)
    monkeypatch.setenv("PERSIA_STORE_PORT", str(book.port))
    yield book
    book.close()


def sizes(batches):
    return [batch.batch_size for batch in batches]


def test_a_dataset_can_be_iterated_over_as_often_as_one_likes():
    dataset = Numbered(5, buffer_size=1)
    for _ in range(2):
        assert sizes(dataset.batches(DEADLINE_S, in_order=False)) == [1, 2, 3, 4, 5]
    assert dataset.num_passes == 2


def test_a_new_pass_starts_after_one_that_was_broken_off():
    dataset = Numbered(5)
    for batch in dataset.batches(DEADLINE_S, in_order=True):
        assert batch.batch_size == 1
        break
    assert sizes(dataset.batches(DEADLINE_S, in_order=True)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("dataset", [StreamingDataset, lambda size: Numbered(1, size)])
def test_a_buffer_without_room_is_refused(dataset):
    with pytest.raises(ConfigError, match=r"buffer_size must be >= 1\. Received: 0"):
        dataset(0)


def test_a_dataset_needs_an_iterator():
    with pytest.raises(TypeError, match="__iter__"):
        IterableDataset()


def test_a_trainer_is_known_once_it_begins_to_iterate(book, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    book.register("trainer", 0, 2, "tcp://127.0.0.1:1")
    dataset = StreamingDataset(4)
    assert book.peek("address/trainer/1") is None
    batches = dataset.batches(DEADLINE_S, in_order=True)
    addresses = book.addresses("trainer", timeout_s=0)
    theirs = BatchSender(
        addresses, loader=0, num_loaders=1, greeting=Greeting("theirs")
    )
    with pytest.raises(RemoteError, match="JobMismatchError"):
        theirs.send(1, batch_of([1]), 0, 0)
    theirs.close()
    sender = BatchSender(addresses, loader=0, num_loaders=1, greeting=book.greeting)
    for number, batch in enumerate((batch_of([1]), batch_of([1], [2]))):
        batch.batch_id = 2 * number + 1
        assert sender.send(1, batch, 0, number)
    assert sizes([next(batches), next(batches)]) == [1, 2]
    sender.close()


def test_silence_of_the_loaders_ends_the_pass(book):
    batches = StreamingDataset().batches(0.05, in_order=False)
    with pytest.raises(DataflowError, match=r"must send a batch within 0\.05 s"):
        next(batches)


def test_a_second_pass_is_refused(book):
    dataset = StreamingDataset()
    dataset.batches(DEADLINE_S, in_order=False)
    with pytest.raises(ConfigError, match="can be iterated over once"):
        dataset.batches(DEADLINE_S, in_order=False)


def test_outside_a_job_nothing_can_be_received(monkeypatch):
    monkeypatch.delenv("PERSIA_STORE_PORT", raising=False)
    with pytest.raises(ConfigError, match=r"PERSIA_STORE_PORT is not set.*torchx"):
        StreamingDataset().batches(DEADLINE_S, in_order=False)
