"""A training writes increments, and servers of inference follow them."""

import contextlib
import re
import shutil
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from persia_torchrec import Expiry, timeouts
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increment_log import (
    LOG_FILE,
    find_lines,
    increment_name,
    list_increments,
)
from persia_torchrec.checkpoint.load import ShardLoad
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.errors import CheckpointError, ConfigError, PersiaError
from persia_torchrec.server import increments
from persia_torchrec.server.checkpoint_service import CheckpointService
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.server import EmbeddingServer
from persia_torchrec.store.memory import LARGEST_TICK
from persia_torchrec.table import TableSpec
from tests.support.increments import (
    OTHER,
    WRITING,
    Training,
    are_equal,
    become_equal,
    follow,
    has_counted,
    short_intervals,  # noqa: F401  # a fixture
    weights_of,
)
from tests.support.processes import wait_until
from tests.support.servers import DEADLINE_S, ids_of

pytestmark = pytest.mark.slow

NEVER = Expiry(steps_to_live=1_000_000)


@pytest.fixture
def training(servers, tmp_path):
    return Training(servers, tmp_path)


def logs_in(folder):
    """Return the folder of each log, the oldest first."""
    lines = find_lines(Folder(folder), {})
    return [Folder(folder).child(line.logs[0].name) for line in lines]


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_followers_become_equal_to_the_training(servers, training, num_servers):
    training.train(*range(20))
    training.dump()
    training.train(*range(10, 30))
    client = follow(servers, training, num_servers)
    for step in range(5):
        training.train(*range(step * 5, step * 5 + 20))
        training.train(*range(step, 20), table="other")
    become_equal(client, training)
    counters = client.counters()
    assert all(c["increments_put_in"] > 0 for c in counters)
    assert all(c["following_reloads"] == 0 for c in counters)
    training.client.clear()
    training.train(3)
    become_equal(client, training)


def test_a_follower_becomes_equal_where_requests_pass_what_a_use_can_count(
    servers, training
):
    for running in training.running:
        running.server.shard.store.rows.tick = LARGEST_TICK - 3
    training.train(*range(20))
    training.dump()
    follower = follow(servers, training)
    for first in range(0, 12, 3):
        training.train(*range(first, first + 15), table=OTHER.name)
        training.train(*range(first, first + 15))
        become_equal(follower, training)
    for running in training.running:
        assert running.server.shard.store.rows.tick > LARGEST_TICK


def test_a_follower_is_ready_when_it_has_caught_up(servers, training):
    training.train(*range(20))
    training.dump()
    training.train(*range(10, 30))
    wait_until(lambda: training.total("increments") >= 2, "increments are written")
    training.has_written()
    client = follow(servers, training)
    assert are_equal(client, training)


def test_evicted_rows_leave_the_followers_too(servers, tmp_path):
    training = Training(servers, tmp_path, 1, capacity_rows=25)
    training.train(*range(20))
    training.dump()
    client = follow(servers, training)  # with room for many more
    for step in range(4):
        training.train(*range(10 * step, 10 * step + 15))
    assert training.total("evictions") > 0
    become_equal(client, training)


def test_a_dump_deletes_what_the_complete_one_before_does_not_need(servers, training):
    def numbers():
        return [list_increments(log) for log in logs_in(training.logs)]

    for step in range(3):
        training.write(*range(20))
        training.dump()
        training.write(step)
    assert all(of_log[0] > 1 for of_log in numbers())
    client = follow(servers, training)
    become_equal(client, training)
    before = sorted(p.name for p in (training.folder / "run").iterdir())[-2]
    client = follow(servers, training, run=f"{training.run}/{before}")
    become_equal(client, training)


def test_a_missing_increment_is_noticed_and_repaired_by_the_next_checkpoint(
    servers, training
):
    training.train(*range(20))
    training.dump()
    training.write(*range(20))
    training.write(*range(20))
    for log in logs_in(training.logs):
        first = list_increments(log)[-2]
        log.remove(increment_name(first))
    client = follow(servers, training)
    has_counted(client, "following_lost")
    assert not are_equal(client, training)
    training.dump()
    become_equal(client, training)
    assert client.counters()[0]["following_lost"] == 0
    assert client.counters()[0]["following_reloads"] == 1
    training.train(*range(5))
    become_equal(client, training)


@pytest.mark.parametrize("shard", [0, 1])
def test_a_gap_in_the_log_of_one_server_is_repaired(servers, training, shard):
    training.train(*range(20))
    training.dump()
    for _ in range(2):
        training.write(*range(20))
    log = logs_in(training.logs)[shard]
    log.remove(increment_name(list_increments(log)[-2]))
    client = follow(servers, training)
    has_counted(client, "following_lost")
    training.dump()
    become_equal(client, training)
    training.train(*range(15))
    become_equal(client, training)


def test_a_checkpoint_that_cannot_be_read_is_not_retried_at_once(servers, tmp_path):
    first = Training(servers, tmp_path)
    first.train(*range(20))
    first.dump()
    client = follow(servers, first)
    first.stop()
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    second = Training(servers, tmp_path)
    second.client.checkpoints.load(checkpoint)
    for path in checkpoint.glob("*.rows"):
        path.write_bytes(path.read_bytes()[:-3])
    second.train(5)
    has_counted(client, "following_errors")
    has_counted(client, "following_lost")
    assert client.counters()[0]["following_reloads"] == 0
    second.dump()
    become_equal(client, second)
    assert client.counters()[0]["following_reloads"] == 1


def test_a_damaged_increment_is_not_applied(servers, training):
    training.train(*range(20))
    training.dump()
    training.write(*range(20))
    for path in (training.folder / "increments").glob("*/*.increment"):
        data = bytearray(path.read_bytes())
        data[-40] ^= 1
        path.write_bytes(data)
    client = follow(servers, training)
    has_counted(client, "following_errors")
    assert client.counters()[0]["increments_put_in"] == 0
    training.dump()
    become_equal(client, training)


def test_an_increment_under_the_name_of_another_is_not_applied(
    servers, tmp_path, caplog
):
    training = Training(servers, tmp_path, 1)
    training.train(*range(20))
    training.dump()
    training.write(*range(20))
    *_, last = sorted((tmp_path / "increments").glob("*/*.increment"))
    shutil.copy(last, last.with_name(increment_name(int(last.stem) + 1)))
    client = follow(servers, training)
    has_counted(client, "following_errors")
    assert re.search(r"must be increment \d+ of \S+ Received: \d+ of", caplog.text)
    become_equal(client, training)


def test_followers_continue_when_the_training_restarts(servers, tmp_path):
    first = Training(servers, tmp_path)
    first.train(*range(20))
    first.dump()
    client = follow(servers, first)
    first.train(*range(30))
    become_equal(client, first)
    first.stop()
    second = Training(servers, tmp_path, num_servers=3)
    second.client.checkpoints.load(second.run)
    second.train(*range(40, 45))
    assert second.client.num_rows() != first  # rows of the checkpoint, and those
    become_equal(client, second)
    assert client.counters()[0]["following_reloads"] == 1


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_a_restart_from_checkpoint_and_increments_loses_nothing_that_was_written(
    servers, tmp_path, num_servers
):
    first = Training(servers, tmp_path)
    first.train(*range(20))
    first.dump()
    first.train(*range(10, 40))
    first.train(*range(9), table="other")
    ids = np.arange(60, dtype=np.uint64)
    expected = [first.client.read(name, ids) for name in ("item", "other")]
    num_rows = sum(first.client.num_rows())
    first.stop()
    second = Training(servers, tmp_path, num_servers)  # with logs of its own there
    loaded = second.client.checkpoints.load(second.run, increments=second.logs)
    assert loaded.num_increments > 0
    found = [second.client.read(name, ids) for name in ("item", "other")]
    assert [rows.tobytes() for rows in found] == [r.tobytes() for r in expected]
    assert sum(second.client.num_rows()) == num_rows
    second.train(*range(50))
    assert second.client.step("item") == 3


def test_a_restart_without_all_increments_is_rejected(servers, training):
    training.train(*range(20))
    training.dump()
    for _ in range(3):
        training.write(*range(20))
    with pytest.raises(PersiaError, match="must hold a log of every server"):
        training.client.checkpoints.load(
            training.run, increments=training.folder / "elsewhere"
        )
    for log in logs_in(training.logs):
        number = list_increments(log)[-2]
        log.remove(increment_name(number))
    before = training.client.read("item", ids_of(*range(20)))
    with pytest.raises(PersiaError, match=r"must have all increments from \d+ on"):
        training.client.checkpoints.load(training.run, increments=training.logs)
    after = training.client.read("item", ids_of(*range(20)))
    assert after.tobytes() == before.tobytes()


def test_everything_is_written_at_the_end_of_a_training(servers, tmp_path):
    training = Training(servers, tmp_path, increments_interval_s=1000.0)
    training.train(*range(20))
    training.dump()
    training.train(*range(10, 40))
    training.train(*range(7), table="other")
    ids = np.arange(60, dtype=np.uint64)
    expected = training.client.read("item", ids)[:, :4]
    training.stop()
    client = follow(servers, training)
    assert weights_of(client, "item", 4).tobytes() == expected.tobytes()


def test_a_log_that_cannot_be_ended_is_named_in_the_log_file(servers, tmp_path, caplog):
    training = Training(servers, tmp_path, 1, increments_interval_s=1000.0)
    training.train(1, 2)
    logs = f"increments/*/{LOG_FILE}"
    wait_until(lambda: [*tmp_path.glob(logs)], "the log has begun")
    for path in (tmp_path / "increments").iterdir():
        shutil.rmtree(path)
    training.running[0].stop()
    assert re.search(r"log \S+ is not complete: Could not .*increment", caplog.text)


def test_many_changes_begin_an_increment_before_the_interval_ends(servers, tmp_path):
    training = Training(
        servers, tmp_path, 1, increments_interval_s=1000.0, increments_buffer_rows=30
    )
    for _ in range(4):  # each row counts once
        training.train(*range(25))
    assert training.total("increments") == 0
    training.train(*range(25, 55))
    # Or two: rows are made by a lookup, and an increment may be cut before the push.
    wait_until(lambda: training.total("increments") >= 1, "an increment is written")


def test_training_continues_when_increments_cannot_be_written(
    servers, tmp_path, monkeypatch
):
    monkeypatch.setattr(timeouts, "INCREMENTS_RETRY_S", 0.05)
    training = Training(servers, tmp_path, 1)
    training.train(*range(20))
    training.dump()
    client = follow(servers, training)
    for path in (tmp_path / "increments").iterdir():
        path.rename(tmp_path / path.name)  # at once: files may be written into it
    training.train(*range(10, 30))
    wait_until(
        lambda: training.total("increment_logs_failed") >= 1, "the log has failed"
    )
    training.train(*range(30))
    has_counted(client, "following_lost")
    training.dump()
    become_equal(client, training)


def test_training_does_not_wait_for_a_file_system_that_hangs(
    servers, tmp_path, monkeypatch
):
    monkeypatch.setattr(timeouts, "INCREMENTS_RETRY_S", 0.01)
    training = Training(
        servers, tmp_path, 1, increments_buffer_rows=5, increments_queue=1
    )
    training.dump()
    released, created = threading.Event(), Folder.created
    hanging = []  # threads

    @contextlib.contextmanager
    def hangs(folder, name):
        if name.endswith(".increment"):
            hanging.append(threading.current_thread())
            assert released.wait(3 * DEADLINE_S)
        with created(folder, name) as file:
            yield file

    monkeypatch.setattr(Folder, "created", hangs)

    def has_failed():
        training.train(*range(10))  # would time out if it waited for the log
        return hanging and training.total("increment_logs_failed") > 0

    wait_until(has_failed, "the log fails")
    for _ in range(30):
        training.train(*range(10))
    assert len(hanging) == 1
    released.set()

    def is_written():
        training.train(1)
        return training.total("increments") > 0

    wait_until(is_written, "a log is written again")


def test_errors_of_any_kind_of_a_file_system_do_not_end_the_training(
    servers, tmp_path, monkeypatch
):
    monkeypatch.setattr(timeouts, "INCREMENTS_RETRY_S", 0.05)
    training = Training(servers, tmp_path, 1)

    def fails(folder, name):
        raise LookupError("no such bucket")

    monkeypatch.setattr(Folder, "created", fails)
    training.train(1, 2)
    wait_until(lambda: training.total("increment_logs_failed") >= 3, "logs fail")
    training.train(1, 2)
    monkeypatch.undo()

    def is_written():
        training.train(1)
        return training.total("increments") > 0

    wait_until(is_written, "a log is written again")


def test_rows_that_expire_after_a_load_are_in_the_log(servers, tmp_path, monkeypatch):
    fill, work, rounds = ShardLoad._fill, CheckpointService.work, []

    def fill_slowly(load):
        fill(load)
        begin = len(rounds)
        wait_until(lambda: len(rounds) > begin + 5, "the server polls meanwhile")

    def count_rounds(checkpoints, idle_ms):
        rounds.append(None)
        return work(checkpoints, idle_ms)

    monkeypatch.setattr(ShardLoad, "_fill", fill_slowly)
    monkeypatch.setattr(CheckpointService, "work", count_rounds)
    expiry = Expiry(steps_to_live=3)
    expiring = TableSpec(name="item", dim=4, optimizer=Adagrad(0.1), expiry=expiry)
    first = Training(servers, tmp_path, 1, specs=(replace(expiring, expiry=NEVER),))
    first.train(*range(30))
    for _ in range(5):
        first.train(40)
    first.dump()
    first.stop()
    second = Training(servers, tmp_path, 1, specs=(expiring,))
    second.client.checkpoints.load(second.run)
    wait_until(lambda: second.client.num_rows() == [1], "rows expire")
    client = follow(servers, second)
    wait_until(lambda: client.num_rows() == [1], "they leave the follower")


def test_a_training_that_left_rows_out_is_not_followed_from_its_checkpoint(
    servers, tmp_path
):
    first = Training(servers, tmp_path, 1)
    first.train(*range(40))
    first.dump()
    first.stop()
    second = Training(servers, tmp_path, 1, capacity_rows=25)
    second.client.checkpoints.load(second.run)
    client = follow(servers, second)
    second.train(1, 2)
    has_counted(client, "following_lost")
    second.dump()
    become_equal(client, second)


def test_a_restart_keeps_its_own_settings(servers, tmp_path):
    first = Training(servers, tmp_path, 1)
    first.train(*range(20))
    first.dump()
    first.train(*range(20))
    first.stop()
    slower = TableSpec(name="item", dim=4, optimizer=Adagrad(0.001))
    second = Training(servers, tmp_path, 1, specs=(slower, OTHER))
    second.client.checkpoints.load(second.run, increments=second.logs)
    assert second.client.num_rows() == [20]
    before = second.client.read("item", ids_of(1))[:, :4]
    second.train(1)
    moved = np.abs(second.client.read("item", ids_of(1))[:, :4] - before)
    assert 0 < moved.max() < 0.01


def test_everything_is_written_at_the_end_of_a_backlog(servers, tmp_path, monkeypatch):
    training = Training(
        servers, tmp_path, 1, increments_interval_s=0.001, increments_queue=1
    )
    training.dump()
    created = Folder.created

    @contextlib.contextmanager
    def slowly(folder, name):
        time.sleep(0.1)
        with created(folder, name) as file:
            yield file

    monkeypatch.setattr(Folder, "created", slowly)
    for step in range(20):
        training.train(step)
    ids = np.arange(60, dtype=np.uint64)
    expected = training.client.read("item", ids)[:, :4]
    training.running[0].stop()
    client = follow(servers, training)
    assert weights_of(client, "item", 4).tobytes() == expected.tobytes()


def test_an_abandoned_batch_changes_followers_too(servers, training):
    training.dump()
    client = follow(servers, training)
    split = training.client.split(ids_of(1, 2))
    training.client.pull([("item", split)], batch=BatchNumber(9, 0))
    become_equal(client, training)
    assert sum(client.num_rows()) == 2


def test_a_follower_of_other_tables_keeps_its_rows(servers, tmp_path):
    training = Training(servers, tmp_path, 1)
    training.train(*range(20))
    training.dump()
    client = follow(servers, training)
    training.running[0].stop()
    shutil.rmtree(tmp_path / "increments")
    wider = TableSpec(name="item", dim=8, optimizer=Adagrad(0.1))
    servers_of_other = servers.start(1, increments_dir=training.logs, **WRITING)
    other = servers.client(servers_of_other)
    other.add_tables([wider])
    split = other.split(ids_of(1))
    other.pull([("item", split)], batch=BatchNumber(1, 0))
    has_counted(client, "following_lost")
    other.checkpoints.dump(training.run)
    has_counted(client, "following_errors")
    assert weights_of(client, "item", 4)[:20].any()


def test_a_folder_that_cannot_be_made_is_an_error_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    config = ServerConfig(increments_dir=str(tmp_path / "file" / "increments"))
    with pytest.raises(CheckpointError, match=r"Could not make .*file/increments"):
        EmbeddingServer(config)
    with pytest.raises(ConfigError, match="increments_interval_s must be > 0"):
        ServerConfig(increments_interval_s=0)


def test_a_log_of_many_times_the_rows_is_warned_of(
    servers, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(increments, "_LEAST_BYTES", 1)
    monkeypatch.setattr(increments, "_MAX_RATIO", -1)
    training = Training(servers, tmp_path, 1)
    training.train(*range(5))
    said = "increments since the last dump have"
    wait_until(lambda: said in caplog.text, "the server warns")


def test_a_server_without_a_folder_writes_nothing(servers, tmp_path):
    client = servers.client(servers.start(1))
    assert "increments" not in client.counters()[0]
    with contextlib.suppress(FileNotFoundError):
        assert list(tmp_path.iterdir()) == []


def test_an_increment_of_many_requests_is_written_whole(servers, tmp_path, monkeypatch):
    monkeypatch.setattr(increments, "_SLICE_BYTES", 64)
    training = Training(servers, tmp_path, 1)
    training.dump()
    client = follow(servers, training)
    training.train(*range(500))
    become_equal(client, training, num_ids=500)
    assert training.total("increment_logs_failed") == 0
