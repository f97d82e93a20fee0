import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.rpc.messages import Header, Kind, Share
from persia_torchrec.server.joint_steps import JointSteps, JointTrainer
from persia_torchrec.server.update_queue import QueuedUpdate
from tests.support.servers import segments_of


class Collected:
    """Joint steps, what became of them, and the time of day."""

    def __init__(self, num_joined: int = 0, max_bytes: int = 10**6) -> None:
        self.applied: list[list[bytes]] = []
        self.rejected: dict[bytes, str] = {}
        self.now = 0.0
        self.lost: set[bytes] = set()
        self.steps = JointSteps(
            lambda updates: self.applied.append([update.peer for update in updates]),
            lambda update, exc: self.rejected.update({update.peer: str(exc)}),
            is_connected=lambda peer: peer not in self.lost,
            max_bytes=max_bytes,
            clock=lambda: self.now,
        )
        for rank in range(num_joined):
            assert self.join(rank) == []

    def give(self, peer: str, share: Share, num_ids: int = 1) -> None:
        asked = segments_of([(0, range(num_ids))])
        grads = np.ones(4 * num_ids, dtype=np.float32)
        header = Header(Kind.UPDATE)
        update = QueuedUpdate(peer.encode(), header, asked, np.array([4]), grads)
        self.steps.add(share, update)

    def join(self, rank: int, group: int = 7, ended: str = "") -> list[str]:
        first = share(1, rank, group=group)
        return self.steps.join(
            first, JointTrainer(b"%d" % rank, f"process {rank}", ended)
        )

    def look(self, *, until: float, has_read_all: bool = True) -> None:
        """Look as often as a server does."""
        while self.now < until:
            self.now += 0.1
            if has_read_all:
                self.steps.has_read_all()
            self.steps.reject_overdue()


def share(step, rank, num_ranks=2, group=7, timeout_s=10):
    return Share(group, step, rank, num_ranks, 1000 * timeout_s)


def test_a_step_is_applied_when_the_last_share_is_there_in_the_order_of_ranks():
    collected = Collected()
    for rank in (2, 0):
        collected.give(f"trainer {rank}", share(1, rank, 3))
    assert collected.applied == []
    collected.give("trainer 1", share(1, 1, 3))
    assert collected.applied == [[b"trainer 0", b"trainer 1", b"trainer 2"]]
    assert collected.steps.num_steps == 0


def test_groups_do_not_wait_for_one_another():
    collected = Collected()
    collected.give("a", share(1, 0, group=1))
    collected.give("b", share(1, 0, group=2))
    collected.give("c", share(1, 1, group=2))
    assert collected.applied == [[b"b", b"c"]]
    assert collected.steps.num_steps == 1


def test_a_step_that_waits_too_long_is_rejected_and_the_missing_ranks_are_named():
    collected = Collected()
    collected.give("a", share(5, 0, 3))
    collected.now = 9.9
    collected.steps.reject_overdue()
    assert collected.rejected == {}
    collected.now = 10.0
    collected.steps.reject_overdue()
    collected.give("b5", share(5, 1, 3))
    collected.give("b6", share(6, 1, 3))
    assert collected.rejected.keys() == {b"a", b"b5", b"b6"}
    for why in collected.rejected.values():
        assert re.search(r"Step 5 .* all 3 .*: none of rank 1, 2 within 10 s", why)
    assert collected.steps.counters()["joint_steps_broken"] == 1
    assert collected.steps.num_steps == 0


def test_what_a_trainer_waits_for_names_those_that_are_missing():
    collected = Collected()
    collected.join(2)
    collected.give("0", share(1, 0, 4))
    collected.give("0", share(2, 0, 4))
    collected.give("1", share(2, 1, 4))
    missing = "step 1 waits for the gradients of rank 1, rank 2 (process 2), rank 3"
    assert collected.steps.waits_for(b"0") == missing
    others = "step 2 waits for the gradients of rank 2 (process 2), rank 3"
    assert collected.steps.waits_for(b"1") == others
    assert collected.steps.waits_for(b"2") == ""
    for step in (1, 2):
        for rank in range(4):
            if (step == 1 and rank) or rank > 1:
                collected.give(str(rank), share(step, rank, 4))
    assert collected.steps.waits_for(b"0") == ""


def test_the_next_deadline_is_that_of_the_next_step():
    collected = Collected()
    collected.give("a", share(1, 0, group=1, timeout_s=5))
    collected.give("b", share(1, 0, group=2, timeout_s=9))
    for now, rejected in ((5.0, {b"a"}), (8.9, {b"a"}), (9.0, {b"a", b"b"})):
        collected.now = now
        collected.steps.reject_overdue()
        assert collected.rejected.keys() == rejected


def test_a_step_that_waits_for_a_lost_trainer_is_rejected_and_names_it():
    collected = Collected(num_joined=2)
    collected.lost.add(b"1")
    collected.give("0", share(57, 0, timeout_s=600))
    collected.look(until=1.0)
    assert collected.rejected == {}
    collected.look(until=3.0)
    named = (
        r"Step 57 .* all 2 .*: none of rank 1 \(process 1: its connection was lost\)"
    )
    assert re.search(named, collected.rejected[b"0"])
    collected.give("next", share(58, 0))
    assert re.search(named, collected.rejected[b"next"])


def test_a_trainer_that_gave_a_share_is_known_without_an_introduction():
    collected = Collected()
    for rank in range(2):
        collected.give(f"{rank}", share(1, rank))
    collected.lost.add(b"1")
    collected.give("0", share(2, 0))
    collected.look(until=3.0)
    assert "rank 1 (its connection was lost)" in collected.rejected[b"0"]


def test_the_last_shares_of_a_lost_trainer_are_read_first():
    collected = Collected(num_joined=2)
    collected.give("0", share(1, 0))
    collected.lost.add(b"1")
    collected.look(until=3.0, has_read_all=False)
    assert collected.rejected == {}
    collected.give("1", share(1, 1))
    assert collected.applied == [[b"0", b"1"]]
    collected.give("0", share(2, 0))
    collected.look(until=20.0, has_read_all=False)
    assert collected.rejected.keys() == {b"0"}  # a server may never have read all


def test_a_connection_that_comes_back_is_not_lost():
    collected = Collected(num_joined=2)
    collected.give("0", share(1, 0, timeout_s=100))
    for _ in range(5):
        collected.lost.add(b"1")
        collected.look(until=collected.now + 0.9)
        collected.lost.clear()
        collected.look(until=collected.now + 0.9)
    collected.lost.add(b"1")
    collected.give("1 again", share(1, 1))  # by another connection
    collected.give("0", share(2, 0, timeout_s=100))
    collected.look(until=50.0)
    assert collected.rejected == {}


def test_a_trainer_that_ended_is_no_fault_while_no_step_waits_for_it():
    collected = Collected(num_joined=2)
    collected.give("1", share(1, 1, timeout_s=600))
    collected.lost.add(b"1")
    collected.look(until=60.0)
    collected.give("0", share(1, 0))
    collected.look(until=120.0)
    assert collected.applied == [[b"0", b"1"]]
    assert collected.rejected == {}


def test_a_trainer_that_has_left_is_no_fault():
    collected = Collected(num_joined=3)
    collected.give("0", share(5, 0, 3, timeout_s=100))
    collected.steps.leave(share(5, 1, 3))
    collected.lost.add(b"1")
    collected.look(until=60.0)
    assert collected.rejected == {}
    collected.give("2", share(5, 2, 3))
    assert collected.applied == [[b"0", b"2"]]


def test_a_trainer_that_has_left_is_expected_in_the_next_group():
    collected = Collected()
    for rank in range(2):
        collected.join(rank)
        collected.steps.leave(share(5, rank))
    collected.lost.add(b"1")
    collected.give("0", share(1, 0, group=8))
    collected.look(until=3.0)
    assert "rank 1 (process 1: its connection was lost)" in collected.rejected[b"0"]


def test_why_a_trainer_ended_is_in_the_error():
    collected = Collected(num_joined=2)
    collected.give("0", share(1, 0))
    collected.join(1, ended="it raised ValueError: a bug")
    collected.look(until=3.0)
    named = "rank 1 (process 1: it raised ValueError: a bug)"
    assert named in collected.rejected[b"0"]
    assert collected.join(0, ended="it raised RemoteError") == [named]


def test_a_step_waits_for_an_unknown_trainer_until_the_deadline():
    collected = Collected()
    collected.join(0)
    collected.give("0", share(1, 0, timeout_s=10))
    collected.look(until=9.5)
    assert collected.rejected == {}
    collected.look(until=11.0)
    assert "none of rank 1 within 10 s" in collected.rejected[b"0"]


def test_waiting_shares_are_bounded():
    collected = Collected(max_bytes=40_000)
    collected.give("a", share(1, 0), num_ids=1000)
    collected.give("other", share(1, 0, group=8), num_ids=1)
    collected.give("b", share(2, 0), num_ids=1000)
    assert collected.rejected.keys() == {b"a", b"b"}  # the group, not the other one
    assert "may keep 40000 bytes" in collected.rejected[b"b"]
    collected.give("other 1", share(1, 1, group=8), num_ids=1)
    assert collected.applied == [[b"other", b"other 1"]]


def test_a_group_that_gave_up_every_batch_is_bounded_as_well():
    collected = Collected(max_bytes=100_000)
    for step in range(1000):
        collected.give(f"{step}", share(step, 0), num_ids=0)
    assert len(collected.rejected) == 1000


def test_a_share_is_given_once():
    collected = Collected()
    collected.give("a", share(1, 0))
    collected.give("again", share(1, 0))
    assert "Rank 0 must give its share of step 1 once" in collected.rejected[b"again"]
    collected.steps.leave(share(3, 0))
    collected.give("after", share(3, 0))
    assert "before it leaves" in collected.rejected[b"after"]
    assert collected.rejected.keys() == {b"again", b"after"}


def test_all_shares_of_a_step_have_the_same_number_of_ranks():
    collected = Collected()
    collected.give("a", share(1, 0, 2))
    collected.give("b", share(1, 1, 3))
    assert "3 from rank 1 of step 1, 2 from the others" in collected.rejected[b"b"]


def test_everything_that_waits_is_rejected_at_the_end():
    collected = Collected()
    collected.give("a", share(1, 0, group=1))
    collected.give("b", share(1, 0, group=2))
    collected.steps.reject_all("The end.")
    assert collected.rejected == {b"a": "The end.", b"b": "The end."}


@pytest.mark.slow
def test_groups_of_dead_trainers_are_forgotten():
    collected = Collected()
    for group in range(1100):
        collected.steps.leave(share(1, 0, group=group))
    assert len(collected.steps._groups) <= 1024


@given(st.data())
def test_every_share_is_applied_once_or_rejected(data):
    num_ranks = data.draw(st.integers(1, 4))
    leaves = [data.draw(st.integers(1, 6)) for _ in range(num_ranks)]
    events = [(rank, step) for rank in range(num_ranks) for step in range(1, 6)]
    collected = Collected()
    given_, left = set(), set()
    for rank, step in data.draw(st.permutations(events)):
        if step >= leaves[rank]:
            if rank not in left:
                collected.steps.leave(share(leaves[rank], rank, num_ranks))
            left.add(rank)
        else:
            collected.give(f"{rank} {step}", share(step, rank, num_ranks))
            given_.add((rank, step))
    for rank in set(range(num_ranks)) - left:
        collected.steps.leave(share(6, rank, num_ranks))
    expected = sorted(
        [
            f"{rank} {step}".encode()
            for rank in range(num_ranks)
            if (rank, step) in given_
        ]
        for step in range(1, 6)
    )
    assert sorted(collected.applied) == [step for step in expected if step]
    assert collected.steps.counters()["joint_bytes"] == 0
    assert collected.steps.num_steps == 0
