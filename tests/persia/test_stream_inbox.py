from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_torchrec import timeouts
from persia_torchrec.errors import DataflowError, FrameError
from persia_torchrec.persia.batch import Origin
from persia_torchrec.persia.stream import Inbox
from persia_torchrec.rpc.messages import Header, Kind
from tests.support.servers import DEADLINE_S
from tests.support.threads import InThread


class Box(Inbox):
    """An inbox of one start of each loader; its batches are their numbers of all."""

    def __init__(self, *, capacity=100, rank=0, world_size=1, trained=None) -> None:
        super().__init__(capacity, rank, world_size, trained or {})

    def add(self, loader, num_loaders, batch_id, timeout_s=0, *, checksum=0, **header):
        number = batch_id // num_loaders + 1
        batch = SimpleNamespace(batch_id=batch_id, origin=Origin(loader, number, 0))
        header = header_of(loader, num_loaders, Kind.BATCH, batch=number, **header)
        return self.put(header, batch, timeout_s, checksum)

    def finish(self, loader, num_loaders):
        self.end(header_of(loader, num_loaders, Kind.END_OF_DATA))


def header_of(loader, num_loaders, kind=Kind.POSITION, **more):
    return Header(kind, stream=loader, flags=num_loaders, **more)


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
        taken.append(batch.batch_id)


def test_a_trainer_that_waits_for_a_batch_names_the_loaders(monkeypatch, caplog):
    monkeypatch.setattr(timeouts, "SAY_S", 0.02)
    box = Box()
    box.finish(0, 3)
    box.add(1, 3, 1)
    assert box.take(0, in_order=False).batch_id == 1
    with pytest.raises(DataflowError, match=r"within 0\.3 s"):
        box.take(0.3, in_order=False)
    said = "the next batch: 2 of 3 loaders: waiting for data loader 1, data loader 2"
    assert f"{said}, for 0 s" in caplog.messages


@pytest.mark.parametrize(("loader", "num"), [(0, 0), (2, 2), (2**63, 1), (0, 2**17)])
def test_a_loader_must_be_one_of_some(loader, num):
    box = Box()
    for kind in (box.begin, box.end, box.position):
        with pytest.raises(FrameError, match="must be one of 1 to 65536"):
            kind(header_of(loader, num))
    assert box._loaders == {}


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


@pytest.mark.slow
@settings(max_examples=300)
@given(arrivals(), st.booleans(), st.booleans())
def test_no_batch_is_lost_and_none_comes_twice(arrivals, in_order, take_at_once):
    num_loaders, world_size, rank, events = arrivals
    box = Box(rank=rank, world_size=world_size)
    taken, is_over = [], False
    for loader, number in events:
        assert not is_over
        if number is None:
            box.finish(loader, num_loaders)
        else:
            assert box.add(loader, num_loaders, number)
        if take_at_once:
            more, is_over = all_that_is_there(box, in_order=in_order)
            taken += more
    taken += all_that_is_there(box, in_order=in_order)[0]
    assert box.take(0, in_order=in_order) is None
    sent = [number for _, number in events if number is not None]
    assert (taken if in_order else sorted(taken)) == sorted(sent)


def test_an_ended_loader_does_not_hide_one_with_batches_for_other_trainers():
    # Of two trainers and two loaders, rank 0 gets the batches of loader 0 alone.
    box = Box(rank=0, world_size=2)
    box.add(0, 2, 0)
    box.finish(0, 2)
    assert all_that_is_there(box, in_order=True) == ([0], False)
    box.finish(1, 2)
    assert box.take(0, in_order=True) is None


def test_the_order_waits_for_a_late_loader():
    box = Box()
    box.add(1, 2, 1)
    assert all_that_is_there(box, in_order=True) == ([], False)
    box.add(0, 2, 0)
    assert all_that_is_there(box, in_order=True) == ([0, 1], False)


def test_without_an_order_the_longest_queue_is_served_first():
    box = Box()
    box.add(0, 2, 0)
    box.add(1, 2, 1)
    box.add(1, 2, 3)
    assert box.take(0, in_order=False).batch_id == 1


def test_a_full_queue_rejects_and_takes_no_room_of_another_loader():
    box = Box(capacity=2)
    assert [box.add(0, 2, number) for number in (0, 2, 4)] == [True, True, False]
    assert box.add(1, 2, 1)
    assert all_that_is_there(box, in_order=True)[0] == [0, 1, 2]
    assert box.add(0, 2, 4)


def test_a_put_waits_for_room():
    box = Box(capacity=1)
    box.add(0, 1, 0)
    adding = InThread(box.add, 0, 1, 1, DEADLINE_S)
    assert box.take(DEADLINE_S, in_order=True).batch_id == 0
    assert box.take(DEADLINE_S, in_order=True).batch_id == 1
    assert adding.result()


@pytest.mark.parametrize("in_order", [True, False])
def test_a_take_waits_for_a_batch_and_for_the_end(in_order):
    box = Box()

    def take_all():
        batches = iter(lambda: box.take(DEADLINE_S, in_order=in_order), None)
        return [batch.batch_id for batch in batches]

    taking = InThread(take_all)
    box.add(0, 1, 0)
    box.add(0, 1, 1)
    box.finish(0, 1)
    assert taking.result() == [0, 1]


def test_a_take_that_times_out_reports_how_many_loaders_have_ended():
    box = Box()
    message = r"within 0 s\. Received: nothing\. Ended: 0 of an unknown number"
    with pytest.raises(DataflowError, match=message):
        box.take(0, in_order=False)
    box.finish(0, 2)
    with pytest.raises(DataflowError, match=r"Ended: 1 of 2 loaders"):
        box.take(0, in_order=False)


def test_loaders_must_agree_on_their_number():
    box = Box()
    box.finish(0, 2)
    message = r"agree on their number\. Received: 3, and 2 before"
    with pytest.raises(DataflowError, match=message):
        box.add(1, 3, 1)
    with pytest.raises(DataflowError, match=message):
        box.finish(1, 3)


def test_a_batch_that_comes_twice_is_one():
    box = Box(capacity=1)
    assert [box.add(0, 1, number) for number in (0, 0, 1)] == [True, True, False]
    assert all_that_is_there(box, in_order=True) == ([0], False)
    assert box.add(0, 1, 0)
    assert all_that_is_there(box, in_order=True) == ([], False)


@pytest.mark.parametrize("num_since", [0, 1, 100])
def test_two_batches_of_one_number_end_the_training(num_since):
    box = Box(capacity=200)
    assert box.add(0, 1, 0, checksum=7)
    for number in range(num_since):
        assert box.add(0, 1, 1 + number)
    message = r"number of its own\. Received: 1 again, with other contents"
    with pytest.raises(DataflowError, match=message):
        box.add(0, 1, 0, checksum=8)
    with pytest.raises(DataflowError, match=message):
        box.take(0, in_order=False)


def test_a_loader_may_have_more_batches_until_the_training_has_seen_the_end():
    box = Box()
    box.add(0, 1, 0)
    box.finish(0, 1)
    box.begin(header_of(0, 1))
    assert all_that_is_there(box, in_order=True) == ([0], False)
    box.finish(0, 1)
    assert all_that_is_there(box, in_order=True) == ([], True)
    with pytest.raises(DataflowError, match="another DataCtx behind the end"):
        box.begin(header_of(0, 1))
    box.begin(header_of(0, 1, incarnation=1))  # one that is started again asks, too


def test_a_loader_learns_what_has_become_of_its_batches():
    box = Box()
    for number in range(4):
        box.add(0, 1, number)
    first, second, third, _ = [box.take(0, in_order=True).origin for _ in range(4)]
    second.settle()
    first.lose(worker=0)
    third.lose(worker=1)  # its ids are at another worker meanwhile
    position = box.position(header_of(0, 1))
    assert (position.arrived, position.open, position.lost) == (4, [1, 3, 4], [1])
    assert not first.wait(0)
    box.move(header_of(0, 1), {1: 2, 2: 2})
    assert first.wait(0)
    assert (first.worker, third.worker) == (2, 0)
    assert box.position(header_of(0, 1)).lost == []


def test_a_loader_that_starts_again_ends_what_its_earlier_process_sends():
    box = Box()
    box.begin(header_of(0, 1, incarnation=7))
    assert box.add(0, 1, 0, incarnation=7)
    box.begin(header_of(0, 1, incarnation=8))
    with pytest.raises(DataflowError, match=r"data loader 0 must ask first"):
        box.add(0, 1, 1, incarnation=7)
    assert box.position(header_of(0, 1, incarnation=8)).arrived == 1
    assert box.add(0, 1, 1, incarnation=8)
    assert all_that_is_there(box, in_order=True) == ([0, 1], False)


@pytest.mark.parametrize("in_order", [True, False])
def test_batches_before_a_restart_count_as_arrived(in_order):
    box = Box(world_size=2, rank=1, trained={0: 3, 1: 1})
    for batch_id in (3, 1, 5, 7, 9):
        assert box.add(batch_id % 3, 3, batch_id)
    assert box.position(header_of(0, 3)).arrived == 4
    assert sorted(all_that_is_there(box, in_order=in_order)[0]) == [5, 7, 9]
