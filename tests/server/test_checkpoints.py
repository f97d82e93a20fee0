"""How much of a processor a dump takes, by a clock that the test moves."""

from types import SimpleNamespace

import numpy as np
import pytest

from persia_torchrec.embedding.optim import SGD
from persia_torchrec.errors import CheckpointError, FrameError
from persia_torchrec.server.checkpoints import Checkpoints
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.table import TableSpec
from persia_torchrec.wire.messages import Header, Kind

SLICE_S = 0.001
"""What each slice seems to take."""


class Clock:
    """Time passes when the test says so, the processor's with each slice."""

    def __init__(self):
        self.now_s = 100.0
        self.cpu_s = 0.0
        self.num_calls = 0

    def monotonic(self):
        return self.now_s

    def thread_time(self):
        """Return the processor's time, which passes between two calls of this."""
        self.num_calls += 1
        self.cpu_s += SLICE_S
        return self.cpu_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("persia_torchrec.server.checkpoints.time", clock)
    monkeypatch.setattr("persia_torchrec.server.spare_time.time", clock)
    monkeypatch.setattr(  # whose thread lives in real time
        "persia_torchrec.checkpoint.dump.time", SimpleNamespace(thread_time=lambda: 0)
    )
    monkeypatch.setattr("persia_torchrec.store.row_export._SLICE_BYTES", 2**8)
    return clock


@pytest.fixture
def checkpoints(tmp_path, clock):
    store = EmbeddingStore(100_000)
    store.add_table(TableSpec(name="item", dim=2, optimizer=SGD(1.0)))
    ids = np.arange(20_000, dtype=np.uint64)
    store.lookup(0, ids, np.empty((len(ids), 2), np.float32), training=True)
    checkpoints = Checkpoints(ServerConfig(), store)
    request = {"do": "dump", "task": 7, "folder": str(tmp_path)}
    assert checkpoints.begin(request)["phase"] == "dumping"
    yield checkpoints
    checkpoints.close()


def num_slices(checkpoints, clock, seconds, *, is_in_use):
    """Work for some seconds; return how many slices were done."""
    before = clock.num_calls
    for _ in range(int(seconds / 0.0005)):
        if is_in_use:
            checkpoints.admit(Header(Kind.LOOKUP))
        checkpoints.work()
        clock.now_s += 0.0005
    return (clock.num_calls - before) // 2


def test_while_rows_are_asked_for_a_dump_takes_a_twentieth(checkpoints, clock):
    assert num_slices(checkpoints, clock, 1.0, is_in_use=True) in range(50, 56)
    assert checkpoints.wait_ms(100) <= 2


def test_a_server_that_nobody_asks_for_rows_dumps_without_a_break(checkpoints, clock):
    assert num_slices(checkpoints, clock, 0.1, is_in_use=False) == 200
    assert checkpoints.wait_ms(100) == 0


def test_a_pause_is_not_saved_up(checkpoints, clock):
    num_slices(checkpoints, clock, 0.1, is_in_use=True)
    checkpoints.admit(Header(Kind.LOOKUP))
    clock.now_s += 0.15
    checkpoints.admit(Header(Kind.LOOKUP))
    assert num_slices(checkpoints, clock, 0.001, is_in_use=True) <= 3


def test_requests_that_need_no_rows_do_not_count(checkpoints, clock):
    for _ in range(20):
        checkpoints.admit(Header(Kind.PROGRESS))
        checkpoints.work()
    assert clock.num_calls == 2 * 20


def test_when_there_is_no_dump_the_server_waits_as_long_as_it_likes(checkpoints):
    checkpoints.cancel("the test ends")
    assert checkpoints.wait_ms(100) == 100
    with pytest.raises(CheckpointError, match="not at this dump"):
        checkpoints.progress({"task": 8})
    state = checkpoints.progress({"task": 7})
    assert state["phase"] == "failed"
    assert state["error"]["message"] == "The dump ended early: the test ends."


@pytest.mark.parametrize(
    "request_",
    [None, [], {}, {"do": "dump"}, {"do": "load", "task": 3}, {"do": "x", "task": 7}],
)
def test_a_request_that_makes_no_sense_is_refused(checkpoints, request_):
    with pytest.raises(FrameError, match="Unknown CHECKPOINT request"):
        checkpoints.begin(request_)


def test_a_folder_that_is_not_there_is_refused(checkpoints, tmp_path):
    checkpoints.cancel("the next one begins")
    with pytest.raises(CheckpointError, match=r"must be there, and it is not\. Give"):
        checkpoints.begin({"do": "dump", "task": 1, "folder": str(tmp_path / "no")})


def test_nothing_is_loaded_that_was_not_checked(checkpoints):
    with pytest.raises(CheckpointError, match="must be checked before"):
        checkpoints.begin({"do": "load", "task": 7})
