"""Which worker is asked, and which errors another one may mend."""

import threading

import pytest

from persia_torchrec.errors import (
    DataflowError,
    RemoteError,
    RequestTimeoutError,
    ServerError,
)
from persia_torchrec.persia.batch import NO_WORKER, Origin
from persia_torchrec.persia.workers import Workers, is_away, worker_of
from tests.support.ports import draw_ports
from tests.support.threads import InThread

LOST = RemoteError("it is gone", server="worker 0", kind="LostBatchError")
AWAY = ServerError("its connection was lost", server="worker 0")


@pytest.fixture
def workers():
    """Return clients of three workers, none of which is there."""
    made = []

    def make(recovery_s=60.0):
        addresses = [f"tcp://127.0.0.1:{port}" for port in draw_ports(3)]
        made.append(Workers(addresses, recovery_s=recovery_s))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_worker_is_away_where_it_does_not_answer_or_lacks_the_batch():
    assert is_away(AWAY)
    assert is_away(RequestTimeoutError("late", server="worker 0"))
    assert is_away(LOST)
    assert not is_away(RemoteError("wrong", server="worker 0", kind="BatchError"))
    assert not is_away(DataflowError("none"))


def test_ids_that_no_process_has_are_an_error_of_their_loader():
    assert worker_of(Origin(2, 7, 1)) == 1
    with pytest.raises(DataflowError, match="ids of batch 7 of data loader 2 must be"):
        worker_of(Origin(2, 7, NO_WORKER))


def test_another_worker_is_asked_for_one_that_has_hung(workers):
    asked = []

    def ask(worker):
        asked.append(worker)
        if len(asked) == 1:
            raise RequestTimeoutError("late", server="worker 1")
        return "answer"

    clients = workers()
    assert clients.insist(1, ask) == "answer"
    assert asked[0] == 1
    assert asked[1] != 1
    assert clients.insist(1, lambda worker: worker) != 1  # not for some time


def test_without_recovery_the_first_error_is_raised(workers):
    def ask(_):
        raise AWAY

    with pytest.raises(ServerError, match="its connection was lost"):
        workers(recovery_s=0.0).insist(0, ask)


def test_an_error_of_the_request_is_raised_though_there_are_others(workers):
    def ask(_):
        raise RemoteError("wrong", server="worker 0", kind="BatchError")

    with pytest.raises(RemoteError, match="wrong"):
        workers().insist(0, ask)


def test_ids_that_a_worker_has_lost_are_waited_for_where_they_move(workers):
    origin, asked = Origin(0, 7, 0), []
    has_asked = threading.Event()

    def ask(worker):
        asked.append(worker)
        has_asked.set()
        if worker == 0:
            raise LOST
        return "answer"

    clients = workers()
    waiting = InThread(lambda: clients.insist(0, ask, origin))
    assert has_asked.wait(60)
    assert waiting.still_waits()
    assert origin.is_lost
    origin.move(2)
    assert waiting.result() == "answer"
    assert asked == [0, 2]
