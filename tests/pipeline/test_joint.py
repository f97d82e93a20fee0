"""Pipelines of several trainers that update jointly, in one process."""

import re

import numpy as np
import pytest

from persia_torchrec.errors import BatchError, RemoteError
from persia_torchrec.lookup.sharded_lookup import ShardedLookup
from persia_torchrec.pipeline.joint import Trainers
from persia_torchrec.pipeline.pipeline import BatchPipeline
from persia_torchrec.rpc.messages import Share
from tests.support.count_table import COUNT, FEATURE, ONE_UPDATE, bags_of, wait_until
from tests.support.logs import warnings_of
from tests.support.servers import DEADLINE_S, ids_of
from tests.support.threads import all_at_once


class Trainer:
    """One of two trainers; the weight of an id is how many gradients it has seen."""

    def __init__(self, client, rank, staleness, joint_timeout_s):
        self.client = client
        worker = ShardedLookup(client, [FEATURE])
        worker.add_tables([COUNT])
        self.pipeline = BatchPipeline(worker, staleness=staleness, timeout_s=DEADLINE_S)
        self.trainers = Trainers(
            client, Share(1, 1, rank, 2, round(1000 * joint_timeout_s))
        )
        self.pipeline.set_trainers(self.trainers)

    def pull(self, *ids):
        return self.pipeline.start(bags_of(*ids), training=True).wait(DEADLINE_S)

    def num_updates(self, id_):
        return self.client.read("count", ids_of(id_))[0, 0]


def push_all(trainer, batches):
    for batch in batches:
        batch.push(ONE_UPDATE)
    trainer.pipeline.flush()


@pytest.fixture
def two(servers):
    started = []

    def two(staleness, joint_timeout_s=DEADLINE_S):
        running = servers.start(2)
        for rank in range(2):
            client = servers.client(running)
            started.append(Trainer(client, rank, staleness, joint_timeout_s))
        return started

    yield two
    for trainer in started:
        trainer.pipeline.close()


def test_no_trainer_runs_ahead_of_the_slowest_by_more_than_the_bound(two):
    fast, slow = two(staleness=3)
    for _ in range(3):
        fast.pull(5).push(ONE_UPDATE)
    ahead = fast.pipeline.start(bags_of(5), training=True)
    assert fast.num_updates(5) == 0
    assert not ahead.arrived.is_set()
    slow.pull(6).push(ONE_UPDATE)
    ahead.wait(DEADLINE_S).push(ONE_UPDATE)
    wait_until(lambda: fast.num_updates(5) == 1)
    for _ in range(3):
        slow.pull(6).push(ONE_UPDATE)
    for trainer in (fast, slow):
        trainer.pipeline.flush()
    assert (fast.num_updates(5), fast.num_updates(6)) == (4, 4)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_lookup_without_a_backward_pass_is_no_step(two, staleness, caplog):
    first, second = two(staleness)
    for _ in range(3):
        second.pull(6)  # dropped at once
    for step in range(1, 5):
        batches = [first.pull(5), second.pull(6)]
        second.pull(6)  # while another is open
        all_at_once(lambda batch: batch.push(ONE_UPDATE), batches)
        for trainer in (first, second):
            trainer.pipeline.flush()
        assert (first.num_updates(5), first.num_updates(6)) == (step, step)
    (warning,) = warnings_of(caplog)
    assert "is no step of the trainers" in warning.message


def test_a_batch_that_cannot_be_looked_up_is_no_step(two):
    first, second = two(staleness=1)
    bags = {**bags_of(6), "unknown": bags_of(6)["count"]}
    with pytest.raises(BatchError, match="unknown"):
        second.pipeline.start(bags, training=True).wait(DEADLINE_S)
    for trainer, id_ in ((first, 5), (second, 6)):
        trainer.pull(id_).push(ONE_UPDATE)
    for trainer in (first, second):
        trainer.pipeline.flush()
    assert (first.num_updates(5), first.num_updates(6)) == (1, 1)


def test_evaluation_is_no_part_of_a_step(two):
    first, second = two(staleness=0)
    for _ in range(3):
        second.pipeline.start(bags_of(5), training=False).wait(DEADLINE_S)
    batches = [first.pull(5), second.pull(5)]
    batches[1].give_up()
    batches[0].push(ONE_UPDATE)
    assert first.num_updates(5) == 1


@pytest.mark.parametrize("staleness", [1, 3])
def test_trainers_that_evaluate_between_the_same_steps_read_the_same_rows(
    two, staleness
):
    first, second = two(staleness)
    batches = [first.pull(5), second.pull(5)]
    batches[0].push(ONE_UPDATE)
    looked = [first.pipeline.start(bags_of(5), training=False)]
    assert not looked[0].arrived.wait(0.05)
    batches[1].push(ONE_UPDATE)
    looked.append(second.pipeline.start(bags_of(5), training=False))
    assert [b.wait(DEADLINE_S).outputs[0][0, 0] for b in looked] == [2, 2]


@pytest.mark.parametrize("staleness", [0, 2])
def test_trainers_that_have_left_come_together_again(two, staleness):
    first, second = two(staleness)
    for _ in range(3):
        second.pipeline.leave()
        for _ in range(2):
            first.pull(5).push(ONE_UPDATE)
        first.pipeline.leave()
        batches = [first.pull(5), second.pull(5)]
        batches[1].give_up()
        batches[0].push(ONE_UPDATE)
    first.pipeline.flush()
    assert first.num_updates(5) == 9


def test_pushes_on_their_way_count_when_their_trainer_has_left(two):
    first, second = two(staleness=2)
    batches = [first.pull(5), second.pull(6)]
    batches[1].push(ONE_UPDATE)
    second.pipeline.leave()
    assert first.num_updates(6) == 0
    batches[0].push(ONE_UPDATE)
    first.pipeline.flush()
    assert (first.num_updates(5), first.num_updates(6)) == (1, 1)


def test_a_trainer_that_closes_has_left(two):
    first, second = two(staleness=0)
    batch = first.pull(5)
    second.pipeline.close()
    batch.push(ONE_UPDATE)
    assert first.num_updates(5) == 1


def test_a_trainer_that_vanishes_is_named_in_every_later_error(two):
    first, _ = two(staleness=1, joint_timeout_s=0.2)
    first.pull(5).push(ONE_UPDATE)
    for _ in range(2):
        with pytest.raises(RemoteError, match=r"none of rank 1 within 0\.2 s"):
            first.pipeline.flush()


@pytest.mark.parametrize("staleness", [0, 1, 8])
def test_a_trainer_that_is_lost_ends_every_wait_of_the_others(two, staleness):
    first, second = two(staleness, joint_timeout_s=600.0)
    for trainer in (first, second):
        trainer.trainers.join()
    batches = [first.pull(5) for _ in range(max(staleness, 1))]
    waiting = first.pipeline.start(bags_of(5), training=True)  # for a permit
    second.client.close()
    with pytest.raises(RemoteError, match=r"rank 1 \(process \d+ on .*: its connec"):
        push_all(first, batches)
    waiting.wait(DEADLINE_S).give_up()
    with pytest.raises(RemoteError, match="its connection was lost"):
        first.pipeline.start(bags_of(5), training=True)


def at_exit_of(trainer, monkeypatch):
    """Return what a trainer that joins does at the end of its process."""
    registered = []
    monkeypatch.setattr("atexit.register", registered.append)
    trainer.trainers.join()
    return registered[0]


def test_a_forked_child_that_ends_does_not_speak_for_its_trainer(two, monkeypatch):
    first, second = two(staleness=0)
    first.trainers.join()
    at_exit = at_exit_of(second, monkeypatch)
    with monkeypatch.context() as child:
        child.setattr("os.getpid", lambda: 1)
        at_exit()
    share = first.trainers.next_share()
    assert first.client.join(share, "the first") == ""  # all are here
    at_exit()
    gone = first.client.join(share, "the first")
    assert re.search(r"rank 1 \(process \d+ on .*: its script has ended\)", gone)


def test_a_trainer_without_connections_ends_quietly(two, monkeypatch, caplog):
    first, _ = two(staleness=0)
    at_exit = at_exit_of(first, monkeypatch)
    monkeypatch.setattr("sys.last_value", ValueError("a bug"), raising=False)
    first.client.close()
    at_exit()
    assert not warnings_of(caplog)


def test_a_trainer_that_has_closed_is_named_when_the_others_begin_again(two):
    first, second = two(staleness=0, joint_timeout_s=600.0)
    for trainer in (first, second):
        trainer.trainers.join()
    second.pipeline.close()
    first.pull(5).push(ONE_UPDATE)
    first.pipeline.leave()
    with pytest.raises(RemoteError, match=r"rank 1 \(.*: it has closed its tables\)"):
        first.pull(5).push(ONE_UPDATE)


def test_a_row_with_a_gradient_that_is_not_finite_is_rejected_for_all(two):
    first, second = two(staleness=1)
    batches = [first.pull(5), second.pull(5)]
    batches[0].push((np.full((1, 1), np.nan, dtype=np.float32),))
    batches[1].push(ONE_UPDATE)
    for trainer in (first, second):
        trainer.pipeline.flush()
        assert trainer.pipeline.tally.total.num_refused == 1
    assert first.num_updates(5) == 0
