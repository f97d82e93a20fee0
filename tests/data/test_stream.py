from contextlib import ExitStack

import numpy as np
import pytest
import torch

from persia_torchrec.data.stream import BatchSender, Inbox
from persia_torchrec.embedding.data import (
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
    encode_rest,
)
from persia_torchrec.errors import RemoteError, ServerError
from persia_torchrec.wire.messages import Header, Kind, encode_json
from persia_torchrec.wire.transport import Connections
from tests.servers import DEADLINE_S

ORIGIN = (2, 99)


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
        return sender

    def ask(self, header, *frames):
        """Send a message of one's own making to trainer 0; return the reply."""
        connections = Connections("trainer", self.addresses)
        self._stack.callback(connections.close)
        reply = connections.submit(
            0, header, list(frames), timeout_s=DEADLINE_S, what="a test"
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
    assert trainers.sender().send(0, sent, *ORIGIN)
    received = trainers.inboxes[0].take(DEADLINE_S, in_order=False)
    assert (received.worker, received.loader, received.reference) == (2, 0, 99)
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


def test_what_arrives_can_become_tensors_that_are_written_to(trainers):
    trainers.sender().send(0, batch_of(), *ORIGIN)
    received = trainers.inboxes[0].take(DEADLINE_S, in_order=False)
    for part in (*received.non_id_type_features, *received.labels):
        torch.from_numpy(part.data).zero_()


def test_a_full_trainer_says_so_and_takes_the_batch_later():
    with Trainers(capacity=1) as trainers:
        sender = trainers.sender()
        first, second = batch_of(batch_id=0), batch_of(batch_id=1)
        assert sender.send(0, first, *ORIGIN)
        assert not sender.send(0, second, *ORIGIN)
        (inbox,) = trainers.inboxes
        assert inbox.take(DEADLINE_S, in_order=True).batch_id == 0
        assert sender.send(0, second, *ORIGIN)
        assert inbox.take(DEADLINE_S, in_order=True).batch_id == 1


def test_every_trainer_learns_of_the_end_of_every_loader():
    with Trainers(2) as trainers:
        senders = [trainers.sender(loader, 2) for loader in range(2)]
        assert senders[1].num_trainers == 2
        senders[1].send(1, batch_of(batch_id=1), *ORIGIN)
        for sender in senders:
            sender.end()
        last = trainers.inboxes[1].take(DEADLINE_S, in_order=True)
        assert last.batch_id == 1
        for inbox in trainers.inboxes:
            assert inbox.take(DEADLINE_S, in_order=True) is None


def test_loaders_that_disagree_on_their_number_are_refused(trainers):
    trainers.sender(0, 2).end()
    with pytest.raises(RemoteError, match=r"trainer 0 at .*Received: 3, and 2 before"):
        trainers.sender(1, 3).end()


def test_a_trainer_that_is_gone_is_named(trainers):
    sender = trainers.sender(timeout_s=0.3)
    trainers.receivers[0].close()
    with pytest.raises(ServerError, match=r"trainer 0 at tcp://127\.0\.0\.1:\d+: a ba"):
        sender.send(0, batch_of(), *ORIGIN)


@pytest.mark.parametrize(
    ("kind", "frames", "message"),
    [
        (Kind.LOOKUP, [b"null"], "answers no such message"),
        (Kind.BATCH, [b"[0, 0, 0]"], "answers no such message"),
        (Kind.BATCH, [b"not JSON", b""], "Frame 1 must be JSON"),
        (Kind.BATCH, [b"[0, 0]", b""], "Frame 1"),
        (Kind.BATCH, [b"null", b""], "Frame 1"),
        (Kind.BATCH, [b'[0, "a", 0]', b""], "Frame 1"),
        (Kind.BATCH, [b"[0, 0, 0]", b""], "FrameError"),
        (Kind.BATCH, [b"[0, 0, 0]", encode_rest(batch_of())[:-1]], "FrameError"),
    ],
)
def test_a_malformed_batch_is_refused_and_leaves_the_inbox_empty(
    trainers, kind, frames, message
):
    header = Header(kind, stream=0, batch=0, flags=1)
    with pytest.raises(RemoteError, match=message) as raised:
        trainers.ask(header, *frames)
    assert raised.value.kind == "FrameError"
    trainers.ask(Header(Kind.END_OF_DATA, flags=1), encode_json(None))
    assert trainers.inboxes[0].take(DEADLINE_S, in_order=False) is None
