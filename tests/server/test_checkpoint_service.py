"""How much of a CPU a dump takes, by a clock that the test moves; what is given up."""

import threading
from contextlib import closing
from functools import partial

import numpy as np
import pytest

from persia_torchrec import timeouts
from persia_torchrec.checkpoint.background import Activity
from persia_torchrec.checkpoint.load import ShardLoad
from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.errors import BusyError, CheckpointError, FrameError, PersiaError
from persia_torchrec.rpc.messages import Kind, decode_json, encode_json
from persia_torchrec.server.checkpoint_service import (
    CheckpointRequest,
    CheckpointService,
)
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.handlers import KINDS
from persia_torchrec.store import row_copy
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.table import TableSpec
from tests.server.clocks import Clock
from tests.support.processes import wait_until
from tests.support.servers import DEADLINE_S, ids_of


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    # The thread that writes lives in real time.
    monkeypatch.setattr(
        "persia_torchrec.server.checkpoint_service.time.thread_time", lambda: 0
    )
    monkeypatch.setattr(row_copy, "_SLICE_BYTES", 2**8)
    return clock


@pytest.fixture
def activity(clock):
    return Activity(clock.monotonic, clock.thread_time)


@pytest.fixture
def checkpoints(tmp_path, activity):
    store = EmbeddingStore(100_000)
    store.add_table(TableSpec(name="item", dim=2, optimizer=SGD(1.0)))
    ids = np.arange(20_000, dtype=np.uint64)
    store.lookup(0, ids, np.empty((len(ids), 2), np.float32), training=True)
    checkpoints = CheckpointService(ServerConfig(), store, activity)
    assert (
        checkpoints.handle(
            CheckpointRequest(do="dump", task=7, folder=str(tmp_path))
        ).phase
        == "dumping"
    )
    yield checkpoints
    checkpoints.close()


@pytest.fixture
def num_slices(checkpoints, clock, activity):
    return partial(count_slices, checkpoints, clock, activity)


def count_slices(checkpoints, clock, activity, seconds, *, is_busy):
    """Work for some seconds; return how many slices were done."""
    before = clock.num_calls
    for _ in range(int(seconds / 0.0005)):
        if is_busy:
            activity.last_s = clock.now_s
        checkpoints.work(100)
        clock.now_s += 0.0005
    return (clock.num_calls - before) // 2


def test_a_dump_on_a_busy_server_takes_a_twentieth_of_a_cpu(checkpoints, num_slices):
    assert num_slices(1.0, is_busy=True) in range(50, 56)
    assert num_slices(0.0005, is_busy=True) == 1  # what is due is not waited for
    assert checkpoints.work(100) == 100  # the next one waits for a request


def test_a_dump_on_an_idle_server_takes_all_of_the_time(checkpoints, num_slices):
    assert num_slices(0.1, is_busy=False) == 200
    assert checkpoints.work(100) == 0


def test_credit_of_a_pause_is_not_saved_up(clock, activity, num_slices):
    num_slices(0.1, is_busy=True)
    activity.last_s = clock.now_s
    clock.now_s += 0.15
    activity.last_s = clock.now_s
    assert num_slices(0.001, is_busy=True) <= 3


def test_requests_that_need_no_rows_are_no_activity():
    idle = {kind for kind, how in KINDS.items() if not how.needs_rows}
    assert idle == {
        *(Kind.HELLO, Kind.SHUTDOWN, Kind.JOIN, Kind.LEAVE),
        *(Kind.CHECKPOINT, Kind.PROGRESS),
    }


def end_dump(checkpoints):
    """Cancel the dump, which has failed when its thread has ended."""
    checkpoints.cancel("the test ends it")
    task = CheckpointRequest(task=7)
    wait_until(lambda: checkpoints.handle(task).phase == "failed", "the dump ends")


def test_without_a_dump_the_server_waits_for_its_full_poll_interval(checkpoints):
    end_dump(checkpoints)
    assert checkpoints.work(100) == 100
    assert checkpoints.handle(CheckpointRequest(task=8)).phase == "idle"
    state = checkpoints.handle(CheckpointRequest(task=7))
    assert state.phase == "failed"
    assert state.error.message == "The dump ended early: the test ends it."


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (None, "must be a mapping"),
        ([], "must be a mapping"),
        ({}, "must have the key 'task'"),
        ({"do": "dump"}, "must have the key 'task'"),
        ({"do": "dump", "task": 7}, "folder must be a path or URL"),
        ({"do": "check", "task": 7}, "folder must be a path or URL"),
        ({"do": "load", "task": 7}, "folder must be a path or URL"),
        ({"do": "dump", "task": 7, "folder": 3}, r"folder must be .*Received: 3"),
        ({"do": "check", "task": "7", "folder": ""}, r"task must be an integer"),
        ({"do": "x", "task": 7}, "Frame 1: do"),
    ],
)
def test_an_invalid_request_is_rejected(request_, message):
    with pytest.raises(FrameError, match=message):
        decode_json([b"", encode_json(request_)], CheckpointRequest)


def test_a_missing_folder_is_rejected(checkpoints, tmp_path):
    end_dump(checkpoints)
    with pytest.raises(CheckpointError, match=r"must exist\. Received: it does not"):
        checkpoints.handle(
            CheckpointRequest(do="dump", task=1, folder=str(tmp_path / "no"))
        )


def test_a_task_is_begun_once(checkpoints, tmp_path):
    dump = CheckpointRequest(do="dump", task=7, folder=str(tmp_path))
    before = checkpoints.handle(CheckpointRequest(task=7))
    for _ in range(2):
        assert checkpoints.handle(dump) == before
    with pytest.raises(CheckpointError, match="one checkpoint at a time"):
        checkpoints.handle(CheckpointRequest(do="dump", task=8, folder=str(tmp_path)))


def test_how_a_dump_ended_is_known_when_the_next_one_has_begun(checkpoints, tmp_path):
    def ask(task, do="progress"):
        return checkpoints.handle(
            CheckpointRequest(do=do, task=task, folder=str(tmp_path))
        )

    def has_ended():
        for _ in range(100):
            checkpoints.work(0)
        return ask(7).phase == "dumped"

    wait_until(has_ended, "the dump ends")
    ended = ask(7)
    assert ended.result is not None
    assert ask(8, "dump").phase == "dumping"
    assert ask(7) == ask(7, "dump") == ask(7, "cancel") == ended
    assert ask(8).phase == "dumping"


def test_nothing_is_loaded_that_was_not_checked(checkpoints, tmp_path):
    end_dump(checkpoints)
    load = CheckpointRequest(do="load", task=8, folder=str(tmp_path))
    assert checkpoints.handle(load).phase in ("checking", "failed")
    wait_until(lambda: checkpoints.handle(load).phase == "failed", "the check fails")
    assert "manifest.json" in checkpoints.handle(load).error.message


def test_trainers_that_start_again_end_what_earlier_ones_have_begun(checkpoints):
    checkpoints.drop(lambda stream: stream > 0)
    assert checkpoints.handle(CheckpointRequest(task=7)).phase == "dumping"
    checkpoints.drop(lambda stream: stream == 0)
    state = checkpoints.handle(CheckpointRequest(task=7))
    assert state.error.message == (
        "The dump ended early: the group of trainers was started again."
    )


def test_no_other_task_begins_between_the_check_and_the_load(
    checkpoints, clock, servers, tmp_path
):
    end_dump(checkpoints)
    client = servers.client(servers.start())
    folder = client.checkpoints.dump(tmp_path).path

    def ask(do, task):
        return checkpoints.handle(CheckpointRequest(do=do, task=task, folder=folder))

    def is_checked():
        return ask("check", 8).phase == "checked"

    wait_until(is_checked, "the checkpoint is checked")
    clock.now_s += 4
    with pytest.raises(BusyError, match="one checkpoint at a time"):
        ask("dump", 9)
    assert ask("progress", 8).phase == "checked"
    clock.now_s += 6  # the client is gone
    assert ask("check", 9).phase in ("checking", "checked")
    assert ask("progress", 8).phase == "idle"
    wait_until(lambda: ask("check", 9).phase == "checked", "it is checked again")
    ask("cancel", 9)
    assert ask("dump", 10).phase == "dumping"


def begin_a_load(servers, tmp_path, monkeypatch):
    """Begin a load that ends when it is cancelled; return how to ask for its state."""
    client = servers.client(servers.start())
    client.add_tables([TableSpec(name="item", dim=2, optimizer=SGD(1.0))])
    client.write("item", ids_of(1), np.ones((1, 2), np.float32))
    client.checkpoints.dump(tmp_path)
    store, load = EmbeddingStore(100), ShardLoad.load
    checkpoints = CheckpointService(ServerConfig(), store, Activity())

    def state(do="progress"):
        folder = str(tmp_path / "checkpoint-00000001")
        return checkpoints.handle(CheckpointRequest(do=do, task=1, folder=folder))

    def loads_once_cancelled(self):
        assert self.cancelled.wait(DEADLINE_S)
        load(self)

    monkeypatch.setattr(ShardLoad, "load", loads_once_cancelled)
    state("check")
    wait_until(lambda: state().phase == "checked", "the checkpoint is checked")
    assert state("load").phase == "loading"
    return checkpoints, store, state


def test_a_load_is_given_up_when_its_server_ends(servers, tmp_path, monkeypatch):
    checkpoints, store, state = begin_a_load(servers, tmp_path, monkeypatch)
    checkpoints.close()
    assert state().phase == "failed"
    assert "cancelled" in state().error.message
    assert store.num_rows == 0


def test_a_load_of_earlier_trainers_is_given_up(servers, tmp_path, monkeypatch):
    checkpoints, store, state = begin_a_load(servers, tmp_path, monkeypatch)
    assert checkpoints.is_loading
    checkpoints.drop(lambda _: True)

    def is_over():
        checkpoints.work(100)
        return not checkpoints.is_loading

    wait_until(is_over, "the load has ended")
    assert state().phase == "idle"
    assert store.num_rows == 0
    checkpoints.close()


def test_requests_do_not_wait_for_the_end_of_a_load_that_is_given_up(
    servers, tmp_path, monkeypatch
):
    monkeypatch.setattr(timeouts, "BACKGROUND_CLOSE_S", 1e6)
    running, may_go_on = servers.start(), threading.Event()
    old, new = (connect(running, generation) for generation in (1, 2))
    with closing(old), closing(new):
        old.add_tables([TableSpec(name="item", dim=2, optimizer=SGD(1.0))])
        old.write("item", ids_of(1), np.ones((1, 2), np.float32))
        old.checkpoints.dump(tmp_path)
        batch = BatchNumber(BatchNumber.new_stream(1), 1)
        old.pull([("item", old.split(ids_of(1)))], batch=batch)
        for step in ("check", "load"):
            with monkeypatch.context() as patch:
                begun = hold_back(patch, step, may_go_on)
                task = old.checkpoints.start_load(tmp_path)
                assert begun.wait(DEADLINE_S)
                if step == "check":
                    task.cancel()
                else:
                    new.begin_generation(2)
                    may_go_on.set()
                with pytest.raises(PersiaError):
                    task.wait(DEADLINE_S)
        new.checkpoints.load(tmp_path)
        assert new.counters()[0]["open_batches"] == 0


def connect(running, generation):
    addresses = [server.address for server in running]
    given = {"timeout_s": DEADLINE_S, "generation": generation}
    return EmbeddingClient.connect(addresses, **given)


def hold_back(monkeypatch, step, may_go_on):
    """Have the next load wait in a step, even when it is cancelled."""
    begun, do = threading.Event(), getattr(ShardLoad, step)

    def wait_and_do(load):
        begun.set()
        assert may_go_on.wait(DEADLINE_S)
        do(load)

    monkeypatch.setattr(ShardLoad, step, wait_and_do)
    return begun
