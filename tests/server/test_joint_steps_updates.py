"""Updates of several trainers that a server applies as one."""

from concurrent.futures import wait

import numpy as np
import pytest

from persia_torchrec import Constant, timeouts
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.errors import RemoteError
from persia_torchrec.rpc import silences
from persia_torchrec.rpc.messages import SHARE, Header, Kind, Share
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.table import TableSpec
from tests.server.stranger import GRADS, Stranger, one_segment
from tests.support.processes import wait_until
from tests.support.servers import DEADLINE_S, ids_of

ADAGRAD = Adagrad(lr=0.5, initial_accumulator_value=0.0)
ITEM = TableSpec(name="item", dim=2, optimizer=ADAGRAD, initializer=Constant(0.0))
PLACE = TableSpec(name="place", dim=3, optimizer=ADAGRAD, initializer=Constant(1.0))

SHARE_1 = Share(1, 1, 0, 2, 0).encode()
LONG = b'{"who": "%s", "ended": ""}' % (501 * b"a")


class Trainer:
    """One of several trainers of two servers."""

    def __init__(self, servers, running, rank, num_ranks=2):
        self.client = servers.client(running)
        self.client.add_tables([ITEM, PLACE])
        self._stream = BatchNumber.new_stream()
        self._rank, self._num_ranks = rank, num_ranks

    def share(self, step, timeout_s=DEADLINE_S):
        return Share(9, step, self._rank, self._num_ranks, round(1000 * timeout_s))

    def look_up(self, step, ids, table="item", **share):
        self.number = BatchNumber(self._stream, step, self.share(step, **share))
        self.table, self.split = table, self.client.split(ids_of(*ids))
        self.client.pull([(table, self.split)], batch=self.number)

    def push(self, *values):
        """Push a gradient of one value for each id; return the replies."""
        grads = np.empty((len(values), self.client.table(self.table).dim), np.float32)
        grads[self.split.inverse] = np.array(values, dtype=np.float32)[:, None]
        return self.client.push([(self.table, self.split)], [grads], self.number)

    def outcome(self, replies):
        done, _ = wait(replies, DEADLINE_S)
        assert len(done) == len(replies)
        return self.client.outcome(replies)


@pytest.fixture
def running(servers):
    return servers.start(2)


@pytest.fixture
def trainers(servers, running):
    return [Trainer(servers, running, rank) for rank in range(2)]


def total(client, counter):
    return sum(counters.get(counter, 0) for counters in client.counters())


def rows_after(*steps):
    """Return what the rows of some ids are, of a store that applied steps one by one.

    Args:
        steps: {id: value of its gradient} each.
    """
    store = EmbeddingStore(100)
    store.add_tables([ITEM])
    for gradients in steps:
        ids = ids_of(*gradients)
        grads = np.repeat(np.array(list(gradients.values()), np.float32)[:, None], 2, 1)
        store.lookup(0, ids, np.empty_like(grads), training=True)
        store.update(0, ids, grads)
    return store.read(0, ids_of(1, 2, 3))


def test_the_optimizer_sees_the_sum_of_all_trainers_once(trainers):
    first, second = trainers
    for step in (1, 2):
        first.look_up(step, [1, 2])
        second.look_up(step, [2, 3])
        replies = first.push(1.0, 2.0)
        assert not wait(replies, 0.05).done
        second.outcome(second.push(3.0, 5.0))
        assert first.outcome(replies).num_missed == 0
    expected = rows_after({1: 1.0, 2: 5.0, 3: 5.0}, {1: 1.0, 2: 5.0, 3: 5.0})
    rows = first.client.read("item", ids_of(1, 2, 3))
    np.testing.assert_array_equal(rows, expected)


def test_trainers_may_update_different_tables(trainers):
    first, second = trainers
    first.look_up(1, [1])
    second.look_up(1, [1], table="place")
    replies = [first.push(1.0), second.push(1.0)]
    for trainer, reply in zip(trainers, replies, strict=True):
        assert trainer.outcome(reply).num_missed == 0
    assert first.client.read("item", ids_of(1))[0, 0] == pytest.approx(-0.5)
    assert first.client.read("place", ids_of(1))[0, 0] == pytest.approx(0.5)


def test_a_trainer_that_waits_for_others_says_for_whom(monkeypatch, servers, caplog):
    monkeypatch.setattr(timeouts, "SAY_S", 0.05)
    monkeypatch.setattr(silences, "LOOK_S", 0.05)
    running = servers.start(2)
    first, second = (Trainer(servers, running, rank) for rank in range(2))
    second.client.join(second.share(1), "process 7 on a host")
    first.look_up(1, [1, 2, 3])
    replies = first.push(1.0, 1.0, 1.0)
    said = "step 1 waits for the gradients of rank 1 (process 7 on a host)"
    wait_until(lambda: said in caplog.text, "the missing trainer is named")
    second.look_up(1, [1])
    second.outcome(second.push(1.0))
    first.outcome(replies)
    wait_until(lambda: "replies after " in caplog.text, "the end is said")


def test_a_trainer_that_does_not_come_is_named_after_a_deadline(trainers):
    first, second = trainers
    first.look_up(1, [1], timeout_s=0.1)
    with pytest.raises(RemoteError, match=r"none of rank 1 within 0\.1 s"):
        first.outcome(first.push(1.0))
    second.look_up(1, [1])
    with pytest.raises(RemoteError, match=r"none of rank 1 within 0\.1 s"):
        second.outcome(second.push(1.0))
    assert first.client.read("item", ids_of(1)).tolist() == [[0, 0, 0, 0]]
    assert total(first.client, "open_batches") == 0
    assert total(first.client, "joint_steps_broken") == 2


def test_a_trainer_whose_connection_is_lost_is_named_in_time(trainers):
    for rank, trainer in enumerate(trainers):
        assert trainer.client.join(trainer.share(1), f"trainer {rank}") == ""
    first, second = trainers
    first.look_up(1, [1], timeout_s=600)
    replies = first.push(1.0)
    second.client.close()
    with pytest.raises(RemoteError, match=r"rank 1 \(trainer 1: its connection was"):
        first.outcome(replies)
    gone = first.client.join(first.share(1), "trainer 0", "it raised RemoteError")
    assert gone == "rank 1 (trainer 1: its connection was lost)"
    assert first.client.read("item", ids_of(1)).tolist() == [[0, 0, 0, 0]]


def test_the_last_share_of_a_trainer_that_ends_counts(trainers):
    for rank, trainer in enumerate(trainers):
        trainer.client.join(trainer.share(1), f"trainer {rank}")
        trainer.look_up(1, [1], timeout_s=600)
    first, second = trainers
    second.push(1.0)
    total(second.client, "joint_steps")  # answered after the push
    second.client.close()
    assert first.outcome(first.push(1.0)).num_missed == 0
    expected = rows_after({1: 2.0})[:1]
    np.testing.assert_array_equal(first.client.read("item", ids_of(1)), expected)


def test_a_waiting_trainer_gets_an_error_when_a_server_ends(trainers, running):
    first, _ = trainers
    first.look_up(1, [1])
    replies = first.push(1.0)
    assert total(first.client, "joint_steps") == 2  # answered after the push
    for server in running:
        server.stop()
    with pytest.raises(RemoteError, match="The server was shut down"):
        first.outcome(replies)


def test_new_settings_hold_for_steps_that_are_complete_after_them(trainers):
    first, second = trainers
    first.look_up(1, [1])
    second.look_up(1, [1])
    replies = first.push(1.0)
    first.client.set_learning_rate(0.0)
    second.push(1.0)
    first.outcome(replies)
    assert first.client.read("item", ids_of(1))[0].tolist() == [0, 0, 4, 4]


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (Kind.UPDATE, [GRADS], "must have 5 frames"),
        (Kind.UPDATE, [GRADS, b"share"], "its share 32 bytes"),
        (Kind.UPDATE, [GRADS, Share(1, 1, 2, 2, 0).encode()], "below the number of"),
        (Kind.UPDATE, [GRADS, Share(1, 1, 2, 2**17, 0).encode()], "may be 65536"),
        (Kind.LEAVE, [], "must have 2 frames"),
        (Kind.LEAVE, [b"share"], "its share 32 bytes"),
        (Kind.JOIN, [b'{"who": "a", "ended": ""}'], "must have 3 frames"),
        (Kind.JOIN, [b'{"who": 1, "ended": ""}', SHARE_1], "who must be a string"),
        (Kind.JOIN, [b'{"who": "a"}', SHARE_1], "must have the key 'ended'"),
        (Kind.JOIN, [b'["who"]', SHARE_1], "must be a mapping"),
        (Kind.JOIN, [LONG, SHARE_1], "of length <= 500"),
    ],
)
def test_an_invalid_share_is_rejected(trainers, running, kind, body, message):
    frames = [*one_segment(1, 2), *body] if kind is Kind.UPDATE else body
    with Stranger(running[0].address) as stranger:
        reply, error = stranger.ask(Header(kind, 3, flags=SHARE).encode(), *frames)
    assert (reply.kind, error["kind"]) == (Kind.ERROR, "FrameError")
    assert message in error["message"]
