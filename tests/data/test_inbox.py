import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_torchrec.data.stream import Inbox
from persia_torchrec.errors import DataflowError
from tests.servers import DEADLINE_S


def inbox(*, capacity=100, rank=0, world_size=1):
    return Inbox(capacity, rank, world_size)


def all_that_is_there(box, *, in_order):
    """Take until nothing is there; return the batches, and whether it is the end."""
    taken = []
    while True:
        try:
            batch = box.take(0, in_order=in_order)
        except DataflowError:
            return taken, False
        if batch is None:
            return taken, True
        taken.append(batch)


@st.composite
def arrivals(draw):
    """What one trainer gets from several loaders: batch numbers, None for an end."""
    num_loaders = draw(st.integers(1, 4))
    world_size = draw(st.integers(1, 4))
    rank = draw(st.integers(0, world_size - 1))
    queues = []
    for loader in range(num_loaders):
        numbers = range(loader, draw(st.integers(0, 20)), num_loaders)
        queues.append([n for n in numbers if n % world_size == rank] + [None])
    events = []
    while any(queues):
        loader = draw(st.sampled_from([n for n, left in enumerate(queues) if left]))
        events.append((loader, queues[loader].pop(0)))
    return num_loaders, world_size, rank, events


@settings(max_examples=300)
@given(arrivals(), st.booleans(), st.booleans())
def test_no_batch_is_lost_and_none_comes_twice(arrivals, in_order, take_at_once):
    num_loaders, world_size, rank, events = arrivals
    box = inbox(rank=rank, world_size=world_size)
    taken, is_over = [], False
    for loader, number in events:
        assert not is_over
        if number is None:
            box.end(loader, num_loaders)
        else:
            assert box.put(loader, num_loaders, number, 0)
        if take_at_once:
            more, is_over = all_that_is_there(box, in_order=in_order)
            taken += more
    taken += all_that_is_there(box, in_order=in_order)[0]
    assert box.take(0, in_order=in_order) is None
    sent = [number for _, number in events if number is not None]
    assert (taken if in_order else sorted(taken)) == sorted(sent)


def test_an_ended_loader_does_not_hide_one_with_batches_for_other_trainers():
    # Of two trainers and two loaders, rank 0 gets the batches of loader 0 alone.
    box = inbox(rank=0, world_size=2)
    box.put(0, 2, "batch 0", 0)
    box.end(0, 2)
    assert all_that_is_there(box, in_order=True) == (["batch 0"], False)
    box.end(1, 2)
    assert box.take(0, in_order=True) is None


def test_the_order_waits_for_a_late_loader():
    box = inbox()
    box.put(1, 2, "batch 1", 0)
    assert all_that_is_there(box, in_order=True) == ([], False)
    box.put(0, 2, "batch 0", 0)
    assert all_that_is_there(box, in_order=True) == (["batch 0", "batch 1"], False)


def test_without_an_order_the_longest_queue_is_served_first():
    box = inbox()
    box.put(0, 2, "batch 0", 0)
    box.put(1, 2, "batch 1", 0)
    box.put(1, 2, "batch 3", 0)
    assert box.take(0, in_order=False) == "batch 1"


def test_a_full_queue_refuses_and_takes_no_room_of_another_loader():
    box = inbox(capacity=2)
    assert [box.put(0, 2, number, 0) for number in (0, 2, 4)] == [True, True, False]
    assert box.put(1, 2, 1, 0)
    assert all_that_is_there(box, in_order=True)[0] == [0, 1, 2]
    assert box.put(0, 2, 4, 0)


def test_a_put_waits_for_room():
    box = inbox(capacity=1)
    box.put(0, 1, 0, 0)
    came = []
    thread = threading.Thread(target=lambda: came.append(box.put(0, 1, 1, DEADLINE_S)))
    thread.start()
    assert box.take(DEADLINE_S, in_order=True) == 0
    assert box.take(DEADLINE_S, in_order=True) == 1
    thread.join(DEADLINE_S)
    assert came == [True]


@pytest.mark.parametrize("in_order", [True, False])
def test_a_take_waits_for_a_batch_and_for_the_end(in_order):
    box = inbox()
    taken = []

    def take_all():
        while (batch := box.take(DEADLINE_S, in_order=in_order)) is not None:
            taken.append(batch)

    thread = threading.Thread(target=take_all)
    thread.start()
    box.put(0, 1, 0, 0)
    box.put(0, 1, 1, 0)
    box.end(0, 1)
    thread.join(DEADLINE_S)
    assert taken == [0, 1]


def test_a_take_that_times_out_says_how_many_loaders_have_ended():
    box = inbox()
    message = r"within 0 s\. Received: nothing\. Ended: 0 of an unknown number"
    with pytest.raises(DataflowError, match=message):
        box.take(0, in_order=False)
    box.end(0, 2)
    with pytest.raises(DataflowError, match=r"Ended: 1 of 2 loaders"):
        box.take(0, in_order=False)


def test_loaders_must_agree_on_their_number():
    box = inbox()
    box.end(0, 2)
    message = r"agree on their number\. Received: 3, and 2 before"
    with pytest.raises(DataflowError, match=message):
        box.put(1, 3, "batch", 0)
    with pytest.raises(DataflowError, match=message):
        box.end(1, 3)
