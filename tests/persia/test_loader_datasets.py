import queue
import threading

import pytest

from persia_torchrec import timeouts
from persia_torchrec.data import (
    IterableDataset,
    IterableDatasetBase,
    StreamingDataset,
)
from persia_torchrec.errors import ConfigError, DataflowError, TokenError
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.persia.stream import BatchSender
from persia_torchrec.rpc.greeting import Greeting
from tests.support.local_job import batch_of
from tests.support.servers import DEADLINE_S


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
    book = AddressBook.host(0)
    monkeypatch.setenv("PERSIA_STORE_PORT", str(book.port))
    monkeypatch.setenv("PERSIA_MEMBER", str(book.port))  # it has no coordinator
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
def test_a_buffer_without_room_is_rejected(dataset):
    with pytest.raises(ConfigError, match=r"buffer_size must be >= 1\. Received: 0"):
        dataset(0)


class Sending(IterableDatasetBase):
    """Sends batches of 1, 2, ... samples, as PERSIA's page shows it."""

    def __iter__(self):
        yield from Numbered(5)

    def consume_dataset(self):
        for number, batch in enumerate(self):
            self.sender.send(batch)
            yield number


class SendingAhead(Sending):
    """The same by a thread, which sends what is there and has no room to wait for."""

    def consume_dataset(self):
        numbers = queue.Queue()

        def send():
            for number, batch in enumerate(self):
                numbers.put(number)
                self.sender.send(batch.data)
            numbers.put(None)

        threading.Thread(target=send, daemon=True).start()
        yield from iter(numbers.get, None)


class Counting(IterableDataset):
    """Has what it inherits, and counts."""

    num_sent = 0

    def __iter__(self):
        yield from Numbered(5)

    def consume_dataset(self):
        for number in super().consume_dataset():
            self.num_sent += 1
            yield number


class OnlySending(IterableDatasetBase):
    def consume_dataset(self):
        for number, batch in enumerate(Numbered(5)):
            self.sender.send(batch)
            yield number


@pytest.mark.parametrize("cls", [Sending, SendingAhead, Counting, OnlySending])
def test_a_dataset_may_send_its_batches_itself(cls):
    dataset = cls(buffer_size=2)
    for _ in range(2):
        assert sizes(dataset.batches(DEADLINE_S, in_order=False)) == [1, 2, 3, 4, 5]


def test_an_inherited_dataset_sends_what_its_iterator_yields():
    dataset = Counting()
    assert list(dataset.consume_dataset()) == [0, 1, 2, 3, 4]
    assert [dataset.sender.take(0).batch_size for _ in range(5)] == [1, 2, 3, 4, 5]
    assert dataset.num_sent == 5


class Silent(IterableDatasetBase):
    def consume_dataset(self):
        yield 0


class Flooding(IterableDatasetBase):
    def consume_dataset(self):
        for batch in Numbered(5):
            self.sender.send(batch)
        yield 0


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Silent, r"must send a batch by self\.sender .*Received: none within 0\.01 s"),
        (Flooding, r"2 batches that wait\. Does consume_dataset yield once for each"),
    ],
)
def test_a_dataset_that_sends_too_little_or_too_much_is_an_error(
    monkeypatch, cls, message
):
    monkeypatch.setattr(timeouts, "SEND_BATCH_S", 0.01)
    with pytest.raises(DataflowError, match=message):
        list(cls(buffer_size=2).batches(0.01, in_order=False))


@pytest.mark.parametrize("cls", [IterableDataset, StreamingDataset])
def test_a_dataset_without_iterator_is_an_error(cls):
    with pytest.raises(
        ConfigError, match=rf"must have __iter__.*Received: {cls.__name__}"
    ):
        list(cls())


def test_a_trainer_is_known_once_it_begins_to_iterate(book, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    book.register("trainer", 0, 2, "tcp://127.0.0.1:1")
    dataset = StreamingDataset(4)
    assert book.address("trainer", 1) is None
    batches = dataset.batches(DEADLINE_S, in_order=True)
    addresses = 2 * book.addresses("trainer", timeout_s=0)[1:]
    theirs = BatchSender(addresses, 0, 1, Greeting("theirs"))
    with pytest.raises(TokenError, match=r"of job 'theirs'\. Received: another"):
        theirs.begin()
    theirs.close()
    sender = BatchSender(addresses, 0, 1, book.greeting.of("trainer"))
    sender.begin()
    for number, batch in ((2, batch_of([1])), (4, batch_of([1], [2]))):
        assert sender.send(number, batch, worker=0).has_room
    assert sizes([next(batches), next(batches)]) == [1, 2]
    sender.close()


def test_silence_of_the_loaders_ends_the_pass(book):
    batches = StreamingDataset().batches(0.05, in_order=False)
    with pytest.raises(DataflowError, match=r"must send a batch within 0\.05 s"):
        next(batches)


def test_a_second_dataset_of_a_process_is_rejected_at_once(book):
    StreamingDataset().batches(DEADLINE_S, in_order=False)
    with pytest.raises(ConfigError, match=r"one StreamingDataset.*Make it once"):
        StreamingDataset().batches(DEADLINE_S, in_order=False)


def test_outside_a_job_nothing_can_be_received(monkeypatch):
    monkeypatch.delenv("PERSIA_STORE_PORT", raising=False)
    with pytest.raises(ConfigError, match=r"PERSIA_STORE_PORT is not set.*torchx"):
        StreamingDataset().batches(DEADLINE_S, in_order=False)
