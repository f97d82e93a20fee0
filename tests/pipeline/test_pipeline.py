import threading
import time
from collections import deque
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from persia_torchrec import AdmitFrequency, timeouts
from persia_torchrec.client.client import Reply
from persia_torchrec.client.codec import NOTHING, BatchCount
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.errors import (
    BatchError,
    ConfigError,
    PersiaError,
    RemoteError,
    ServerError,
    StalenessError,
)
from persia_torchrec.lookup.sharded_lookup import ShardedLookup
from persia_torchrec.pipeline import pipeline
from persia_torchrec.pipeline.pipeline import BatchPipeline
from persia_torchrec.rpc.messages import Header, Kind
from tests.support.count_table import COUNT, FEATURE, ONE_UPDATE, bags_of, wait_until
from tests.support.logs import warnings_of
from tests.support.servers import DEADLINE_S, ids_of
from tests.support.threads import InThread

AT_ONCE_S = DEADLINE_S / 2


class Gated(ShardedLookup):
    """An embedding worker whose pulls and pushes wait until a test lets them go."""

    def __init__(self, client):
        super().__init__(client, [FEATURE])
        self.may_pull, self.may_push = threading.Event(), threading.Event()
        self.may_pull.set()
        self.may_push.set()
        self.num_pulling, self._lock = 0, threading.Lock()

    def pull(self, bags, number):
        with self._lock:
            self.num_pulling += 1
        assert self.may_pull.wait(DEADLINE_S)
        return super().pull(bags, number)

    def push(self, batch, grads):
        assert self.may_push.wait(DEADLINE_S)
        return super().push(batch, grads)


class HeldBack(Gated):
    """An embedding worker whose acknowledgements wait until a test lets them go."""

    def __init__(self, client):
        super().__init__(client)
        self.held_back = deque()

    def push(self, batch, grads):
        replies = super().push(batch, grads)
        acks = [Reply(DEADLINE_S) for _ in replies]
        self.held_back.append((replies, acks))
        return acks

    def acknowledge(self):
        """Let the oldest acknowledgement go."""
        for reply, ack in zip(*self.held_back.popleft(), strict=True):
            ack.set_result(reply.result(DEADLINE_S))


class Trainer:
    """A pipeline to servers, with all that a test asks of it."""

    def __init__(self, client, staleness, timeout_s=DEADLINE_S, worker=Gated):
        self.client = client
        self.worker = worker(client)
        self.worker.add_tables([COUNT])
        self.pipeline = BatchPipeline(
            self.worker, staleness=staleness, timeout_s=timeout_s
        )

    def start(self, *ids, training=True):
        return self.pipeline.start(bags_of(*(ids or (5,))), training=training)

    def pull(self, *ids):
        return self.start(*ids).wait(DEADLINE_S)

    def num_updates(self, id_=5):
        return self.client.read("count", ids_of(id_))[0, 0]

    def counters(self, name):
        return [counters.get(name, 0) for counters in self.client.counters()]


@pytest.fixture
def train(servers):
    trainers = []

    def train(
        staleness, *, num_shards=1, timeout_s=DEADLINE_S, worker=Gated, **settings
    ):
        running = servers.start(num_shards, **settings)
        client = servers.client(running, timeout_s=timeout_s)
        trainers.append(Trainer(client, staleness, timeout_s, worker))
        trainers[-1].servers = running
        return trainers[-1]

    yield train
    for trainer in trainers:
        trainer.worker.may_pull.set()
        trainer.worker.may_push.set()
        trainer.pipeline.close()


def push_and_go_on(trainer, batch):
    for _ in range(5):
        batch.push(ONE_UPDATE)
        batch = trainer.pull()


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_more_batches_are_open_than_the_bound_allows(train, staleness, num_shards):
    trainer = train(staleness, num_shards=num_shards)
    bound = max(staleness, 1)
    started = [trainer.start() for _ in range(15)]
    ahead = [future.wait(DEADLINE_S) for future in started[:bound]]
    assert trainer.counters("open_batches") == [bound] * num_shards
    assert not started[bound].arrived.is_set()
    for n in range(len(started)):
        ahead[n].push(ONE_UPDATE)
        if n + bound < len(started):
            ahead.append(started[n + bound].wait(DEADLINE_S))
    trainer.pipeline.flush()
    assert trainer.counters("open_batches") == [0] * num_shards
    assert trainer.counters("open_batches_max") == [bound] * num_shards
    assert trainer.num_updates() == len(started)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_batch_lacks_fewer_updates_than_there_are_permits(train, staleness):
    trainer = train(staleness)
    started = [trainer.start() for _ in range(25)]
    for n, future in enumerate(started):
        batch = future.wait(DEADLINE_S)
        seen = batch.outputs[0][0, 0]
        assert n - (max(staleness, 1) - 1) <= seen <= n
        batch.push(ONE_UPDATE)


def test_at_staleness_0_a_push_returns_when_it_is_applied(train):
    trainer = train(0)
    for n in range(5):
        assert trainer.num_updates() == n
        trainer.pull().push(ONE_UPDATE)


def test_at_staleness_1_a_push_returns_before_it_is_applied(train):
    trainer = train(1)
    trainer.worker.may_push.clear()
    trainer.pull().push(ONE_UPDATE)
    following = trainer.start()
    assert trainer.num_updates() == 0
    assert not following.arrived.is_set()
    trainer.worker.may_push.set()
    assert following.wait(DEADLINE_S).outputs[0][0, 0] == 1


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_batch_that_is_dropped_without_a_push_gives_its_permit_back(train, staleness):
    trainer = train(staleness, num_shards=2)
    for _ in range(6):
        assert trainer.pull().is_training
    wait_until(lambda: trainer.counters("open_batches") == [0, 0])
    assert max(trainer.counters("open_batches_max")) <= max(staleness, 1)
    assert trainer.num_updates() == 0


def test_a_batch_that_is_given_up_makes_room_once(train):
    trainer = train(1)
    given_up = trainer.pull()
    given_up.give_up()
    given_up.give_up()
    following = trainer.pull()
    del given_up
    waiting = trainer.start()
    following.push(ONE_UPDATE)
    waiting.wait(DEADLINE_S).push(ONE_UPDATE)
    trainer.pipeline.flush()
    assert trainer.num_updates() == 2
    assert trainer.counters("open_batches_max") == [1]


@pytest.mark.parametrize("staleness", [0, 3])
def test_each_push_of_a_batch_is_an_update(train, staleness):
    trainer = train(staleness)
    batch, other = trainer.pull(), trainer.start(7)
    for _ in range(3):
        batch.push(ONE_UPDATE)
    other.wait(DEADLINE_S).push(ONE_UPDATE)
    batch.push(ONE_UPDATE)
    trainer.pipeline.flush()
    assert trainer.num_updates() == 4
    assert trainer.num_updates(7) == 1


def test_a_batch_that_was_pulled_for_evaluation_is_not_pushed(train):
    trainer = train(0)
    batch = trainer.start(training=False).wait(DEADLINE_S)
    assert not batch.is_training
    with pytest.raises(BatchError, match="looked up for evaluation"):
        batch.push(ONE_UPDATE)
    batch.give_up()
    assert trainer.counters("rows") == [0]
    assert trainer.counters("open_batches_max") == [0]


def test_an_evaluation_does_not_wait_behind_a_training_pull_without_permit(train):
    trainer = train(0)
    held = trainer.pull()
    waiting = trainer.start()
    for _ in range(3):
        started = time.monotonic()
        looked = trainer.start(training=False).wait(DEADLINE_S)
        assert time.monotonic() - started < AT_ONCE_S
        assert looked.outputs[0][0, 0] == 0
    assert not waiting.arrived.is_set()
    held.push(ONE_UPDATE)
    assert waiting.wait(DEADLINE_S).outputs[0][0, 0] == 1


@pytest.mark.parametrize("staleness", [1, 3])
def test_an_evaluation_reads_what_was_pushed_before_it(train, staleness):
    trainer = train(staleness)
    trainer.worker.may_push.clear()
    trainer.pull().push(ONE_UPDATE)
    looked = [trainer.start(training=False) for _ in range(2)]
    assert not looked[0].arrived.wait(0.05)
    trainer.worker.may_push.set()
    assert [b.wait(DEADLINE_S).outputs[0][0, 0] for b in looked] == [1, 1]


def test_an_evaluation_does_not_wait_for_later_pushes_or_open_batches(train):
    trainer = train(3, worker=HeldBack)
    first, second, _ = [trainer.pull() for _ in range(3)]
    first.push(ONE_UPDATE)
    looked = trainer.start(training=False)
    second.push(ONE_UPDATE)
    wait_until(lambda: len(trainer.worker.held_back) == 2)
    assert not looked.arrived.is_set()
    trainer.worker.acknowledge()
    assert looked.wait(DEADLINE_S).outputs[0][0, 0] >= 1
    trainer.worker.acknowledge()


def test_an_evaluation_that_shall_not_wait_reads_at_once(train):
    trainer = train(3)
    trainer.pipeline.evaluation_waits = False
    trainer.worker.may_push.clear()
    trainer.pull().push(ONE_UPDATE)
    assert trainer.start(training=False).wait(DEADLINE_S).outputs[0][0, 0] == 0
    trainer.worker.may_push.set()


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_thread_may_hold_several_batches_for_one_backward_pass(train, staleness):
    trainer = train(staleness)
    held = [trainer.pull() for _ in range(4)]
    for batch in held:
        batch.push(ONE_UPDATE)
    following = trainer.pull()
    trainer.pipeline.flush()
    assert trainer.num_updates() == 4
    assert following.is_training
    assert trainer.counters("open_batches_max") == [4]


def test_a_batch_that_is_only_pulled_ahead_waits_for_those_that_are_held(train):
    trainer = train(1)
    held = trainer.pull()
    ahead = trainer.start()
    assert not ahead.arrived.wait(0.1)
    held.push(ONE_UPDATE)
    ahead.wait(DEADLINE_S).push(ONE_UPDATE)
    trainer.pipeline.flush()
    assert trainer.counters("open_batches_max") == [1]


def test_batches_have_the_rank_in_their_numbers_and_continue_after_a_checkpoint(train):
    trainer = train(4)
    count = trainer.client.batches
    trainer.pipeline.set_count(3, count)
    batch, ahead = trainer.pull(), trainer.pull()
    number = BatchCount.number
    numbers = [each.handle.number.batch for each in (batch, ahead)]
    assert numbers == [number(3, 1), number(3, 2)]
    assert number(2**16 - 1, 2**47 - 1) == 2**63 - 1  # the largest that servers take
    batch.push(ONE_UPDATE)
    assert count.trained == 1  # the other is not, yet
    batch.push(ONE_UPDATE)  # one more step, the third
    assert count.trained == 3
    count.continue_after(10)
    assert trainer.pull().handle.number.batch == number(3, 11)
    assert trainer.pull().handle.number.batch == number(3, 12)


def test_a_batch_of_another_thread_waits_for_those_that_are_held(train):
    trainer = train(1)
    held = trainer.pull()
    other = InThread(lambda: trainer.pull().push(ONE_UPDATE))
    assert other.still_waits()
    held.push(ONE_UPDATE)
    other.result()
    trainer.pipeline.flush()
    assert trainer.counters("open_batches_max") == [1]


def test_several_pullers_pull_at_once_and_within_the_bound(train):
    trainer = train(4)
    trainer.pipeline.training.set_num_threads(3)
    trainer.worker.may_pull.clear()
    started = [trainer.start() for _ in range(6)]
    wait_until(lambda: trainer.worker.num_pulling == 3)
    trainer.worker.may_pull.set()
    for future in started:
        future.wait(DEADLINE_S).push(ONE_UPDATE)
    trainer.pipeline.flush()
    assert trainer.num_updates() == 6
    assert trainer.counters("open_batches_max")[0] <= 4


@pytest.mark.parametrize("num", [1, 3])
def test_several_evaluations_are_looked_up_at_once(train, num):
    trainer = train(1)
    trainer.pipeline.evaluation.set_num_threads(num)
    trainer.worker.may_pull.clear()
    started = [trainer.start(training=False) for _ in range(6)]
    wait_until(lambda: trainer.worker.num_pulling == num)
    assert not any(future.arrived.is_set() for future in started)
    trainer.worker.may_pull.set()
    trainer.pipeline.evaluation.set_num_threads(2)  # in the middle of them
    assert [f.wait(DEADLINE_S).outputs[0][0, 0] for f in started] == [0] * 6


def test_no_more_updates_are_sent_at_once_than_their_bound(train):
    trainer = train(6, worker=HeldBack)
    trainer.pipeline.bound(held=6, sent=2)
    batches = [trainer.pull() for _ in range(6)]
    for batch in batches:
        batch.push(ONE_UPDATE)
    for num_acknowledged in range(4):
        wait_until(lambda: len(trainer.worker.held_back) == 2)
        wait_until(lambda: trainer.num_updates() == num_acknowledged + 2)  # noqa: B023
        trainer.worker.acknowledge()
    wait_until(lambda: len(trainer.worker.held_back) == 2)
    trainer.worker.acknowledge()
    trainer.worker.acknowledge()
    trainer.pipeline.flush()
    assert trainer.num_updates() == 6


def test_a_push_waits_while_as_many_gradients_are_held_as_may_be(train):
    trainer = train(4, worker=HeldBack)
    trainer.pipeline.bound(held=2, sent=8)
    batches = [trainer.pull() for _ in range(4)]
    batches[0].push(ONE_UPDATE)
    batches[1].push(ONE_UPDATE)
    waiting = InThread(batches[2].push, ONE_UPDATE)
    wait_until(lambda: len(trainer.worker.held_back) == 2)
    assert waiting.still_waits()
    batches[3].give_up()  # holds no gradient, and needs no room
    trainer.worker.acknowledge()
    waiting.result(AT_ONCE_S)
    wait_until(lambda: len(trainer.worker.held_back) == 2)
    trainer.worker.acknowledge()
    trainer.worker.acknowledge()
    trainer.pipeline.flush()
    assert trainer.num_updates() == 3


def test_a_wait_for_room_ends_with_the_pipeline(train):
    trainer = train(2, worker=HeldBack, timeout_s=1.0)
    trainer.pipeline.bound(held=1, sent=1)
    batches = [trainer.pull() for _ in range(2)]
    batches[0].push(ONE_UPDATE)
    waiting = InThread(batches[1].push, ONE_UPDATE)
    assert waiting.still_waits()
    trainer.pipeline.close()
    with pytest.raises(PersiaError, match="closed"):
        waiting.result(AT_ONCE_S)


ENDLESS_WAITS = {
    "flush": (8, lambda trainer, _: trainer.pipeline.flush(), "not acknowledged"),
    "evaluation": (
        *(8, lambda trainer, _: trainer.start(training=False).wait(DEADLINE_S)),
        "not acknowledged",
    ),
    "room for one more gradient": (
        *(1, lambda _, batch: batch.push(ONE_UPDATE)),
        "One of 1 updates must be acknowledged",
    ),
    "an update that is never sent for others": (
        *(2, lambda trainer, batch: push_and_look(trainer, batch)),
        "One of 2 updates must be acknowledged",
    ),
}


def push_and_look(trainer, batch):
    batch.push(ONE_UPDATE)
    wait_until(trainer.pipeline.raise_error)


@pytest.mark.parametrize(
    ("held", "wait", "message"), ENDLESS_WAITS.values(), ids=ENDLESS_WAITS
)
def test_a_wait_for_an_acknowledgement_ends_in_time(
    train, monkeypatch, held, wait, message
):
    monkeypatch.setattr(timeouts, "PUSH_QUEUE_MARGIN_S", 0.1)
    trainer = train(2, worker=HeldBack, timeout_s=0.5)
    trainer.pipeline.bound(held=held, sent=1)
    first, second = trainer.pull(), trainer.pull()
    first.push(ONE_UPDATE)
    with pytest.raises(StalenessError, match=rf"{message} within 0\.6 s"):
        wait(trainer, second)


def test_only_so_many_batches_wait_for_their_pull(train, monkeypatch):
    monkeypatch.setattr(pipeline, "_MAX_WAITING", 3)
    trainer = train(1)
    held = trainer.pull()
    with pytest.raises(StalenessError, match="At most 3 batches can be started"):
        [trainer.start() for _ in range(5)]  # one of which is taken, for its permit
    assert held.is_training


BUFFERS = "backward_buffer_size and grad_update_buffer_size must be >= 1"


@pytest.mark.parametrize(
    ("set_bound", "message"),
    [
        (lambda pipeline: pipeline.bound(held=0, sent=1), BUFFERS),
        (lambda pipeline: pipeline.bound(held=1, sent=0), BUFFERS),
        (
            lambda pipeline: pipeline.set_staleness(-1),
            r"staleness must be >= 0\. .* -1",
        ),
        (lambda pipeline: pipeline.training.set_num_threads(0), "one puller .* 0"),
        (lambda pipeline: pipeline.evaluation.set_num_threads(0), "one puller .* 0"),
    ],
)
def test_a_bound_that_allows_nothing_is_rejected(train, set_bound, message):
    with pytest.raises(ConfigError, match=message):
        set_bound(train(1).pipeline)


def test_a_push_that_fails_is_raised_at_once_at_staleness_0(train):
    trainer = train(0)
    with pytest.raises(BatchError, match=r"must have the shapes \[\(1, 1\)\]"):
        trainer.pull().push((np.zeros((1, 2), dtype=np.float32),))


def test_a_push_that_failed_is_raised_by_every_later_call(train):
    trainer = train(2)
    bad, good = trainer.pull(), trainer.pull()
    bad.push((np.zeros((1, 2), dtype=np.float32),))
    for call in (
        trainer.pipeline.flush,
        trainer.start,
        lambda: trainer.start(training=False),
        lambda: good.push(ONE_UPDATE),
        trainer.pipeline.flush,
    ):
        with pytest.raises(BatchError, match=r"must have the shapes \[\(1, 1\)\]"):
            call()


def test_a_pull_that_fails_gives_its_permit_back(train):
    trainer = train(0)
    for _ in range(3):
        future = trainer.pipeline.start({}, training=True)
        with pytest.raises(BatchError, match=r"missing \['count'\]"):
            future.wait(DEADLINE_S)
    trainer.pull().push(ONE_UPDATE)
    assert trainer.num_updates() == 1


def test_flushing_waits_for_what_was_pushed_and_not_for_what_is_held(train):
    trainer = train(4)
    batches = [trainer.pull() for _ in range(4)]
    trainer.worker.may_push.clear()
    for batch in batches[:3]:
        batch.push(ONE_UPDATE)
    flushing = InThread(trainer.pipeline.flush)
    assert flushing.still_waits()
    trainer.worker.may_push.set()
    flushing.result(AT_ONCE_S)
    assert trainer.num_updates() == 3


def test_gradients_of_evicted_ids_are_counted(train):
    trainer = train(3, capacity_rows=2)
    batches = [trainer.pull(id_, id_ + 1) for id_ in (10, 20, 30)]
    for batch in batches:
        batch.push(ONE_UPDATE)
    trainer.pipeline.flush()
    assert trainer.pipeline.tally.total.num_missed == 4
    assert trainer.num_updates(30) == trainer.num_updates(31) == 1


def test_the_bound_changes_only_while_no_batch_is_under_way(train):
    trainer = train(0)
    batch = trainer.pull()
    message = r"no batch is in flight\. Received: 1 batches"
    with pytest.raises(ConfigError, match=message):
        trainer.pipeline.set_staleness(3)
    batch.push(ONE_UPDATE)
    trainer.pipeline.set_staleness(3)
    assert len([trainer.pull() for _ in range(3)]) == 3


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_server_that_ends_in_the_middle_is_an_exception_in_time(train, staleness):
    trainer = train(staleness, num_shards=2, timeout_s=0.5)
    trainer.pull().push(ONE_UPDATE)
    batch = trainer.pull()
    trainer.servers[1].stop()
    started = time.monotonic()
    with pytest.raises(ServerError, match=f"server 1 at {trainer.servers[1].address}"):
        push_and_go_on(trainer, batch)
    assert time.monotonic() - started < AT_ONCE_S


def test_a_closed_pipeline_reports_it_at_once(train):
    trainer = train(0)
    held, waiting = trainer.pull(), trainer.start()
    trainer.start(training=False).wait(DEADLINE_S)  # meanwhile, the other waits
    trainer.pipeline.close()
    trainer.pipeline.close()
    started = time.monotonic()
    for call in (
        trainer.start,
        lambda: trainer.start(training=False),
        lambda: held.push(ONE_UPDATE),
        trainer.pipeline.flush,
    ):
        with pytest.raises(PersiaError, match="embedding pipeline is closed"):
            call()
    with pytest.raises(PersiaError, match="embedding pipeline is closed"):
        waiting.wait(AT_ONCE_S)
    assert time.monotonic() - started < AT_ONCE_S
    assert trainer.num_updates() == 0


def test_closing_sends_the_pushes_that_were_begun(train):
    trainer = train(3)
    for batch in [trainer.pull() for _ in range(3)]:
        batch.push(ONE_UPDATE)
    trainer.pipeline.close()
    wait_until(lambda: trainer.num_updates() == 3)


def test_gradients_that_are_not_finite_are_counted_and_warned_of_at_times(
    train, caplog
):
    trainer = train(1)
    for _ in range(12):
        trainer.pull(1, 2, 3).push((np.full((1, 1), np.nan, dtype=np.float32),))
    trainer.pull(1).push(ONE_UPDATE)
    trainer.pipeline.flush()
    assert trainer.pipeline.tally.total.num_refused == 36
    assert trainer.pipeline.tally.total.num_missed == 0
    assert trainer.num_updates(1) == 1
    # At the first rejected row, and whenever there are ten times as many.
    assert len(warnings_of(caplog)) == 2


def with_rate(lr):
    return lambda spec: replace(spec, optimizer=SGD(lr))


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_change_of_tables_is_in_order_with_the_pushes(train, num_shards):
    trainer = train(3, num_shards=num_shards)
    batches = [trainer.pull(5) for _ in range(3)]
    trainer.worker.may_push.clear()
    batches[0].push(ONE_UPDATE)
    batches[1].push(ONE_UPDATE)
    done = trainer.pipeline.change_tables(with_rate(10.0))
    batches[2].push(ONE_UPDATE)
    assert not done.done()
    trainer.worker.may_push.set()
    trainer.pipeline.flush()
    assert trainer.num_updates() == 1 + 1 + 10
    assert done.result(0) is None
    assert trainer.client.table("count").optimizer == SGD(10.0)


def test_a_change_waits_until_the_pushes_before_it_are_acknowledged(train):
    trainer = train(2)
    acknowledgement = Reply(DEADLINE_S)
    push = trainer.worker.push
    trainer.worker.push = lambda *batch: [*push(*batch), acknowledgement]
    trainer.pull().push(ONE_UPDATE)
    done = trainer.pipeline.change_tables(with_rate(10.0))
    with pytest.raises(TimeoutError):
        done.result(0.3)
    assert trainer.client.table("count").optimizer == SGD(1.0)
    nothing = msgspec.json.encode(NOTHING)
    acknowledgement.set_result((Header(Kind.REPLY), [b"", nothing]))
    done.result(DEADLINE_S)
    assert trainer.client.table("count").optimizer == SGD(10.0)


def test_flush_waits_for_changes(train):
    trainer = train(1)
    batch = trainer.pull()
    trainer.worker.may_push.clear()
    batch.push(ONE_UPDATE)
    done = trainer.pipeline.change_tables(with_rate(10.0))
    threading.Timer(0.1, trainer.worker.may_push.set).start()
    trainer.pipeline.flush()
    assert done.done()


def test_a_change_that_alters_nothing_asks_no_server(train):
    trainer = train(1)
    before = trainer.counters("requests_add_tables")
    trainer.pipeline.change_tables(with_rate(1.0)).result(DEADLINE_S)
    assert trainer.counters("requests_add_tables") == before


def test_a_rejected_change_reaches_its_caller_and_the_next(train):
    trainer = train(1)
    done = trainer.pipeline.change_tables(
        lambda spec: replace(spec, optimizer=SGD(1.0, momentum=0.5))
    )
    with pytest.raises(RemoteError, match="has dim 1"):
        done.result(DEADLINE_S)
    with pytest.raises(RemoteError, match="has dim 1"):
        trainer.start()


def test_only_so_many_changes_wait(train):
    trainer = train(2)
    batch = trainer.pull()
    trainer.worker.may_push.clear()
    batch.push(ONE_UPDATE)
    changes = [trainer.pipeline.change_tables(with_rate(n)) for n in range(16)]
    assert not any(done.done() for done in changes)
    threading.Timer(0.1, trainer.worker.may_push.set).start()
    trainer.pipeline.change_tables(with_rate(99.0))
    assert changes[0].done()
    trainer.pipeline.flush()
    assert trainer.client.table("count").optimizer == SGD(99.0)


def test_a_closed_pipeline_changes_nothing(train):
    trainer = train(1)
    trainer.pipeline.close()
    with pytest.raises(PersiaError, match="closed"):
        trainer.pipeline.change_tables(with_rate(2.0))


def test_a_change_that_waits_for_room_ends_with_the_pipeline(train):
    trainer = train(2, timeout_s=1.0)
    batch = trainer.pull()
    trainer.worker.may_push.clear()
    batch.push(ONE_UPDATE)
    for rate in range(16):
        trainer.pipeline.change_tables(with_rate(rate))
    waiting = InThread(trainer.pipeline.change_tables, with_rate(99.0))
    assert waiting.still_waits()
    trainer.pipeline.close()
    trainer.worker.may_push.set()
    with pytest.raises(PersiaError, match="closed"):
        waiting.result(AT_ONCE_S)
    assert trainer.client.table("count").optimizer != SGD(99.0)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_batches_that_are_used_and_dropped_are_one_warning(train, caplog, staleness):
    trainer = train(staleness)
    for num_dropped, expected in ((7, 0), (20, 1)):
        while trainer.pipeline.summary().num_lookups < num_dropped:
            trainer.pull()
        wait_until(lambda n=num_dropped: trainer.pipeline.summary().num_dropped == n)
        assert len(warnings_of(caplog)) == expected


def test_a_loop_that_pushes_some_of_its_batches_is_not_warned(train, caplog):
    trainer = train(1)
    for _ in range(10):
        trainer.pull()
        trainer.pull().push(ONE_UPDATE)
    wait_until(lambda: trainer.pipeline.summary().num_dropped == 10)
    assert len(warnings_of(caplog)) == 0


def evaluate(trainer):
    for _ in range(20):
        trainer.start(training=False).wait(DEADLINE_S)


def give_up(trainer):
    for _ in range(20):
        trainer.pull().give_up()  # as under a loss scale that was too large


def pull_ahead(trainer):
    started = [trainer.start() for _ in range(20)]
    wait_until(lambda: all(future.arrived.is_set() for future in started))


def fail(trainer):
    for _ in range(20):
        future = trainer.pipeline.start({}, training=True)
        with pytest.raises(BatchError):
            future.wait(DEADLINE_S)


@pytest.mark.parametrize("use", [evaluate, give_up, pull_ahead, fail])
def test_evaluation_without_backward_pass_gives_no_warning(train, caplog, use):
    trainer = train(20)
    use(trainer)
    wait_until(lambda: trainer.counters("open_batches") == [0])
    assert trainer.pipeline.summary().num_dropped == 0
    assert len(warnings_of(caplog)) == 0


def test_gradients_of_evicted_ids_are_warned_of_while_they_come(train, caplog):
    trainer = train(3, capacity_rows=4)
    for n in range(30):
        batches = [
            trainer.pull(*range(k, k + 2)) for k in (6 * n, 6 * n + 2, 6 * n + 4)
        ]
        for batch in batches:
            batch.push(ONE_UPDATE)
        trainer.pipeline.flush()
        summary = trainer.pipeline.summary()
        num_told = caplog.text.count("came after the eviction of their rows")
        assert num_told == (summary.num_gradients >= 2 * 32)
    assert summary.num_gradients == 180
    assert summary.num_evicted == trainer.pipeline.tally.total.num_missed == 60
    assert summary.share_evicted == 1 / 3


@pytest.mark.parametrize("num_shards", [1, 2])
def test_gradients_of_ids_that_were_not_admitted_are_not_called_evicted(
    train, caplog, num_shards
):
    trainer = train(2, num_shards=num_shards)
    trainer.worker.add_tables([replace(COUNT, admission=AdmitFrequency(1000))])
    for n in range(40):
        trainer.pull(n, n + 100).push(ONE_UPDATE)
    trainer.pipeline.flush()
    assert trainer.pipeline.tally.total.num_missed == 80
    summary = trainer.pipeline.summary()
    assert (summary.num_gradients, summary.num_evicted) == (80, 0)
    assert len(warnings_of(caplog)) == 0


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_serial_schedule_has_no_staleness(train, staleness):
    trainer = train(staleness)
    for _ in range(10):
        trainer.pull().push(ONE_UPDATE)
    summary = trainer.pipeline.summary()
    assert (summary.num_lookups, summary.mean_staleness) == (10, 0)
    assert summary.max_lacking == 0


def test_lookups_that_wait_for_their_bound_are_counted(train):
    trainer = train(3, worker=HeldBack)
    started = [trainer.start() for _ in range(10)]
    for num_done, future in enumerate(started):
        num = min(num_done + 3, 10)
        wait_until(lambda num=num: trainer.pipeline.summary().num_lookups == num)
        future.wait(DEADLINE_S).push(ONE_UPDATE)
        wait_until(lambda: trainer.worker.held_back)
        trainer.worker.acknowledge()
    trainer.pipeline.flush()
    summary = trainer.pipeline.summary()
    assert summary.max_lacking == 2
    assert summary.num_lacking == 0 + 1 + 8 * 2
    assert 1 <= summary.num_waited <= 7
    trainer.pipeline.set_staleness(5)
    assert trainer.pipeline.summary().num_lookups == 10
    assert trainer.pipeline.summary().max_lacking == 4
