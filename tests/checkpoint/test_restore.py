"""A server that lost its memory gets back what was written of its rows."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from persia_torchrec.checkpoint.catalog import Manifest
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increment_log import find_lines
from persia_torchrec.checkpoint.load import Target
from persia_torchrec.checkpoint.restore import Restored, restore
from persia_torchrec.routing.route import is_of_shard
from persia_torchrec.server.config import ServerConfig
from tests.support.consistency import check_store
from tests.support.increments import (
    ITEM,
    OTHER,
    Training,
    short_intervals,  # noqa: F401  # a fixture
)

IDS = np.arange(60, dtype=np.uint64)


@pytest.fixture
def training(servers, tmp_path):
    """Return a training of two servers with a checkpoint, and increments behind it."""
    training = Training(servers, tmp_path)
    training.train(*range(20))
    training.dump()
    train_on(training)
    return training


def train_on(training):
    """Write two increments at least."""
    for _ in range(2):
        training.train(*range(10, 40))
        training.train(*range(9), table="other")
        training.has_written()


def restored(training, shard=0, num_shards=2, run=None):
    """Return a store with what is restored of a server, and what was."""
    config = ServerConfig(shard=shard, num_shards=num_shards, capacity_rows=1000)
    store = config.make_store()
    run = Folder(run or training.run)
    found = restore(
        store, Target(shard, num_shards, 1000, False), run, Folder(training.logs)
    )
    check_store(store)
    return store, found


def has_rows_of(store, training, shard=0, num_shards=2):
    """Return whether a store has all rows of a server, with their state."""
    own = IDS[is_of_shard(IDS, shard, num_shards)]
    assert training.client.num_rows()[shard] > 0
    return store.num_rows == training.client.num_rows()[shard] and all(
        store.read(number, own).tobytes() == training.client.read(name, own).tobytes()
        for number, name in enumerate(("item", "other"))
    )


def last_log(training, shard=0):
    *_, line = [x for x in find_lines(Folder(training.logs), {}) if x.is_of(shard, 2)]
    return line.logs[0]


@pytest.mark.slow
@pytest.mark.parametrize("shard", [0, 1])
def test_a_checkpoint_and_the_increments_behind_it_are_restored(training, shard):
    store, found = restored(training, shard)
    assert has_rows_of(store, training, shard)
    steps = [state.num_updates for state in store.states]
    assert steps == [training.client.step(name) for name in ("item", "other")]
    assert found.num_increments >= 2
    assert found.checkpoint.endswith("run/checkpoint-00000001")
    log = last_log(training, shard)
    assert (found.base.kind, found.base.parent.log) == ("log", log.name)
    assert found.history == log.history  # a follower of the log has the same rows


def test_increments_from_the_start_on_need_no_checkpoint(servers, tmp_path):
    training = Training(servers, tmp_path)
    train_on(training)
    store, found = restored(training)
    assert has_rows_of(store, training)
    assert found.checkpoint == ""
    assert found.history == last_log(training).history


def test_a_torn_increment_and_those_behind_it_are_left_out(training, caplog):
    # An increment has rows as they are when it is written, which may be after the push:
    # that of the lookup is there before the push, so that no other one has the update.
    training.train(*range(10, 40), before_push=training.has_written)
    training.has_written()
    log = Path(training.logs, last_log(training).name)
    *_, last = sorted(log.glob("*.increment"))
    last.write_bytes(last.read_bytes()[:-5])
    store, found = restored(training)
    assert f"{last} is cut off" in caplog.text
    assert found.base.parent.number == int(last.stem)
    assert found.history == ""  # a follower may have read it before
    assert not has_rows_of(store, training)


def test_a_damaged_checkpoint_is_replaced_by_the_one_before(training, caplog):
    training.dump()
    train_on(training)
    *_, last = sorted(Path(training.run).iterdir())
    for path in last.glob("*.rows"):
        path.write_bytes(path.read_bytes()[:-3])
    store, found = restored(training)
    assert "falling back to an older one" in caplog.text
    assert found.checkpoint.endswith("checkpoint-00000001")
    assert has_rows_of(store, training)


def test_checkpoints_of_a_history_that_was_rolled_back_are_not_restored(training):
    first, second = sorted(Path(training.run).iterdir())[0], training.dump().path
    training.client.checkpoints.load(first)
    train_on(training)
    store, found = restored(training)
    assert found.checkpoint == str(first) != second
    assert has_rows_of(store, training)


def test_a_checkpoint_of_another_number_of_servers_is_restored(servers, tmp_path):
    first = Training(servers, tmp_path, num_servers=3)
    first.train(*range(30))
    first.dump()
    first.stop()
    second = Training(servers, tmp_path)
    second.client.checkpoints.load(second.run)
    train_on(second)
    for shard in range(2):
        assert has_rows_of(restored(second, shard)[0], second, shard)


def test_a_load_with_increments_is_continued_by_the_next_log(training, servers):
    training.stop()
    second = Training(servers, training.folder)
    second.client.checkpoints.load(second.run, increments=second.logs)
    train_on(second)
    store, found = restored(second)
    assert has_rows_of(store, second)
    assert found.checkpoint.endswith("checkpoint-00000001")


def test_without_increments_the_newest_checkpoint_is_restored(training):
    shutil.rmtree(training.logs)
    store, found = restored(training)
    manifest = Manifest.read(Folder(found.checkpoint))
    assert store.num_rows == manifest.shards[0].num_rows
    assert found.base.created == manifest.created
    assert found.num_increments == 0


def test_a_checkpoint_without_tables_is_restored_with_what_came_later(
    servers, tmp_path
):
    training = Training(servers, tmp_path, specs=())
    training.dump()
    store, found = restored(training)
    assert found.checkpoint.endswith("checkpoint-00000001")
    assert store.num_rows == 0
    training.client.add_tables([ITEM, OTHER])
    train_on(training)
    store, found = restored(training)
    assert found.checkpoint.endswith("checkpoint-00000001")
    assert has_rows_of(store, training)


def test_without_anything_a_server_begins_again(servers, tmp_path):
    training = Training(servers, tmp_path)
    store, found = restored(training, run=tmp_path / "absent")
    assert store.num_rows == 0
    assert found == Restored()
