from contextlib import ExitStack, closing
from functools import partial

import numpy as np
import pytest
import torch

from persia_torchrec import timeouts
from persia_torchrec.errors import DataflowError, RemoteError, ServerError
from persia_torchrec.persia.batch import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
    encode_rest,
)
from persia_torchrec.persia.stream import BatchSender, Inbox, contents_sum
from persia_torchrec.rpc import slab as layout
from persia_torchrec.rpc.connections import Connections
from persia_torchrec.rpc.listener_thread import Service
from persia_torchrec.rpc.messages import Header, Kind, encode_json
from tests.support.processes import wait_until
from tests.support.servers import DEADLINE_S, once_the_port_is_free

WORKER = 2


class Trainers:
    """Receivers of as many trainers, and senders to them."""

    def __init__(self, num: int = 1, *, capacity: int = 10) -> None:
        self._stack = ExitStack()
        self.inboxes = [Inbox(capacity, rank, num) for rank in range(num)]
        self.receivers = [box.listen("127.0.0.1") for box in self.inboxes]
        self.addresses = [receiver.address for receiver in self.receivers]
        for receiver in self.receivers:
            self._stack.callback(receiver.close)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()

    def sender(self, loader=0, num_loaders=1, timeout_s=DEADLINE_S):
        sender = BatchSender(
            self.addresses, loader=loader, num_loaders=num_loaders, timeout_s=timeout_s
        )
        self._stack.callback(sender.close)
        sender.begin()
        return sender

    def ask(self, header, *frames):
        """Send a message of one's own making to trainer 0; return the reply."""
        connections = Connections("trainer", self.addresses)
        self._stack.callback(connections.close)
        reply = connections[0].send(
            header, list(frames), timeout_s=DEADLINE_S, what="a test"
        )
        return reply.result(DEADLINE_S)


@pytest.fixture
def trainers():
    with Trainers() as trainers:
        yield trainers


def batch_of(num_samples=3, batch_id=0, **more):
    batch = PersiaBatch(
        [IDTypeFeatureWithSingleID("item", np.arange(num_samples, dtype=np.uint64))],
        non_id_type_features=[
            NonIDTypeFeature(np.ones((num_samples, 2), dtype=np.float32), name="age"),
            NonIDTypeFeature(np.zeros((num_samples, 2, 2), dtype=np.uint8)),
        ],
        labels=[
            Label(np.arange(num_samples, dtype=np.int64), name="clicks"),
            Label(np.array([True] * num_samples), name="bought"),
        ],
        **more,
    )
    batch.batch_id = batch_id
    return batch


def test_all_but_the_ids_arrives(trainers):
    sent = batch_of(batch_id=5, meta=b"\x00from a file")
    assert trainers.sender().send(6, sent, WORKER).has_room
    received = trainers.inboxes[0].take(DEADLINE_S, in_order=False)
    origin = received.origin
    assert (origin.worker, origin.loader, origin.number) == (WORKER, 0, 6)
    rest = received
    assert (rest.batch_size, rest.batch_id, rest.meta) == (3, 5, b"\x00from a file")
    assert rest.requires_grad
    for parts, expected in (
        (rest.non_id_type_features, sent.non_id_type_features),
        (rest.labels, sent.labels),
    ):
        assert [part.name for part in parts] == [part.name for part in expected]
        for part, one in zip(parts, expected, strict=True):
            assert part.data.dtype == one.data.dtype
            assert np.array_equal(part.data, one.data)


def test_batches_go_through_memory_that_is_shared(trainers, monkeypatch):
    monkeypatch.setenv("PERSIA_TRANSPORT", "shm")
    sender, (inbox,) = trainers.sender(), trainers.inboxes
    connections = sender._trainers.connections
    wait_until(lambda: connections[0].memory is not None, "shared memory")
    memory, num_samples = connections[0].memory, 60_000
    assert sender.send(1, batch_of(num_samples), WORKER).has_room
    assert sender.send(2, batch_of(5), WORKER).has_room
    assert (memory.num_requests, memory._num_taken) == (2, 2)
    first, second = (inbox.take(DEADLINE_S, in_order=False) for _ in range(2))
    memory.slab.bytes[layout.FIRST :] = 255  # what arrived is a copy
    labels = [part.data for part in (first.labels[0], second.labels[0])]
    np.testing.assert_array_equal(labels[0], np.arange(num_samples))
    np.testing.assert_array_equal(labels[1], np.arange(5))


def test_received_arrays_become_writable_tensors(trainers):
    trainers.sender().send(1, batch_of(), WORKER)
    received = trainers.inboxes[0].take(DEADLINE_S, in_order=False)
    for part in (*received.non_id_type_features, *received.labels):
        torch.from_numpy(part.data).zero_()


def test_a_full_trainer_reports_it_and_takes_the_batch_later():
    with Trainers(capacity=1) as trainers:
        sender = trainers.sender()
        first, second = batch_of(batch_id=0), batch_of(batch_id=1)
        assert sender.send(1, first, WORKER).has_room
        assert not sender.send(2, second, WORKER).has_room
        (inbox,) = trainers.inboxes
        assert inbox.take(DEADLINE_S, in_order=True).batch_id == 0
        assert sender.send(2, second, WORKER).has_room
        assert inbox.take(DEADLINE_S, in_order=True).batch_id == 1


def test_every_trainer_learns_of_the_end_of_every_loader():
    with Trainers(2) as trainers:
        senders = [trainers.sender(loader, 2) for loader in range(2)]
        assert senders[1].num_trainers == 2
        senders[1].send(1, batch_of(batch_id=1), WORKER)
        for sender in senders:
            sender.end()
        last = trainers.inboxes[1].take(DEADLINE_S, in_order=True)
        assert last.batch_id == 1
        for inbox in trainers.inboxes:
            assert inbox.take(DEADLINE_S, in_order=True) is None


def test_loaders_that_disagree_on_their_number_are_rejected(trainers):
    trainers.sender(0, 2).end()
    with pytest.raises(RemoteError, match=r"trainer 0 at .*Received: 3, and 2 before"):
        trainers.sender(1, 3)


def test_a_trainer_that_is_gone_is_named(trainers):
    sender = trainers.sender(timeout_s=0.3)
    trainers.receivers[0].close()
    with pytest.raises(ServerError, match=r"trainer 0 at tcp://127\.0\.0\.1:\d+: a ba"):
        sender.send(1, batch_of(), WORKER)


@pytest.mark.parametrize(
    ("kind", "frames", "message"),
    [
        (Kind.LOOKUP, [b"null"], "answers no such message"),
        (Kind.BATCH, [b"[0, 0]"], "answers no such message"),
        (Kind.POSITION, [b"[]"], "Frame 1"),
        (Kind.BATCH, [b"not JSON", b""], "Frame 1 must be JSON"),
        (Kind.BATCH, [b"[0]", b""], "Frame 1"),
        (Kind.BATCH, [b"null", b""], "Frame 1"),
        (Kind.BATCH, [b'[0, "a"]', b""], "Frame 1"),
        (Kind.BATCH, [b"[0, 0]", b""], "FrameError"),
        (Kind.BATCH, [b"[0, 0]", encode_rest(batch_of())[:-1]], "FrameError"),
    ],
)
def test_a_malformed_batch_is_rejected_and_leaves_the_inbox_empty(
    trainers, kind, frames, message
):
    header = Header(kind, stream=0, batch=0, flags=1)
    with pytest.raises(RemoteError, match=message) as raised:
        trainers.ask(header, *frames)
    assert raised.value.kind == "FrameError"
    trainers.ask(Header(Kind.END_OF_DATA, flags=1), encode_json(None))
    assert trainers.inboxes[0].take(DEADLINE_S, in_order=False) is None


@pytest.mark.parametrize("num_trainers", [1, 2, 3])
def test_a_loader_that_starts_again_knows_what_has_arrived(num_trainers):
    with Trainers(num_trainers) as trainers:
        sender = trainers.sender(1, 2)
        assert sender.position() == 0
        assert not sender.had_arrived(1)
        for number in (1, 2, 3, 4):
            batch = batch_of(batch_id=sender.batch_id(number))
            sender.send(number, batch, WORKER, checksum=100 + number)
        again = trainers.sender(1, 2)
        assert again.position() == 4
        assert [again.had_arrived(number) for number in (1, 4, 5)] == [
            True,
            True,
            False,
        ]
        known = again.known[again.trainer_of(3)]
        assert 3 in known.open
        assert known.checksums[3] == 103
        with pytest.raises(RemoteError, match="data loader 1 must ask first"):
            sender.send(5, batch_of(batch_id=9), WORKER)


def test_a_trainer_reports_which_ids_are_lost_and_learns_where_they_are(trainers):
    sender = trainers.sender()
    for number in (1, 2):
        sender.send(number, batch_of(batch_id=number - 1), WORKER)
    first, second = [
        trainers.inboxes[0].take(DEADLINE_S, in_order=True).origin for _ in range(2)
    ]
    first.settle()
    second.lose(WORKER)
    position = sender.move(0, {})
    assert (position.arrived, position.open, position.lost) == (2, [2], [2])
    assert sender.move(0, {2: 5}).lost == []
    assert second.wait(0)
    assert second.worker == 5


def test_a_message_to_a_trainer_that_is_away_is_sent_again(trainers):
    sender = trainers.sender()
    port = int(trainers.addresses[0].rpartition(":")[2])
    looked = []

    def look(trainer):
        if not looked:
            looked.append(trainer)
            answer = trainers.inboxes[0]._receive
            listen = partial(Service, "trainer", answer, port=port)
            trainers.receivers.append(once_the_port_is_free(listen))

    sender.recovery_s, sender.look = DEADLINE_S, look
    trainers.receivers[0].close()
    assert sender.send(1, batch_of(), WORKER).has_room
    assert looked == [0]
    assert sender.send(1, batch_of(), WORKER).has_room
    assert trainers.inboxes[0].take(0, in_order=True).batch_id == 0
    with pytest.raises(DataflowError, match="Received: nothing"):
        trainers.inboxes[0].take(0, in_order=True)
    trainers.receivers[1].close()


def reject(trainer):
    raise DataflowError(f"NN worker {trainer} was started again")


def test_a_message_is_not_sent_again_without_hope_of_success(trainers):
    sender = trainers.sender()
    sender.recovery_s, sender.look = DEADLINE_S, reject
    trainers.receivers[0].close()
    with pytest.raises(DataflowError, match="NN worker 0 was started again"):
        sender.send(1, batch_of(), WORKER)


def test_a_trainer_that_never_answers_is_looked_for(trainers, monkeypatch):
    monkeypatch.setattr(timeouts, "STREAM_TRY_S", 0.1)
    trainers.receivers[0].close()
    with closing(BatchSender(trainers.addresses, 0, 1, timeout_s=3600)) as sender:
        sender.recovery_s, sender.look = DEADLINE_S, reject
        with pytest.raises(DataflowError, match="NN worker 0 was started again"):
            sender.begin()


class TestTheChecksumOfABatch:
    @staticmethod
    def batch(dtype=np.float32, *, single=False):
        ids = np.arange(6, dtype=np.uint64)
        if single:
            feature = IDTypeFeatureWithSingleID("item", ids)
        else:
            feature = IDTypeFeature("item", [ids[:2], ids[2:2], *ids[2:].reshape(4, 1)])
        dense = np.arange(18).reshape(6, 3).astype(dtype)
        return PersiaBatch(
            [feature], [NonIDTypeFeature(dense)], [Label(np.ones(6, np.float32))]
        )

    @pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.float32, np.float64])
    @pytest.mark.parametrize("single", [False, True])
    def test_it_is_that_of_a_copy_and_of_its_bytes(self, dtype, single):
        batch = self.batch(dtype, single=single)
        again = PersiaBatch.from_bytes(batch.to_bytes())
        assert contents_sum(batch) == contents_sum(again) == contents_sum(batch.copy())

    @pytest.mark.parametrize("single", [False, True])
    def test_each_number_of_ids_dense_features_and_labels_counts(self, single):
        batch = self.batch(single=single)
        arrays = [batch.id_type_features[0].ids]
        arrays += [batch.non_id_type_features[0].data, batch.labels[0].data]
        if not single:
            arrays += [batch.id_type_features[0].lengths]
        seen = {contents_sum(batch)}
        for array in arrays:
            for index in range(array.size):
                array.reshape(-1)[index] += 1
                seen.add(contents_sum(batch))
                array.reshape(-1)[index] -= 1
        assert len(seen) == 1 + sum(array.size for array in arrays)

    def test_the_order_counts(self):
        batch = self.batch()
        before = contents_sum(batch)
        dense = batch.non_id_type_features[0].data
        dense[[0, 1]] = dense[[1, 0]]
        assert contents_sum(batch) != before
