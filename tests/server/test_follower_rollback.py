"""A training goes back to older rows, and followers go with it."""

from pathlib import Path

import numpy as np
import pytest

from persia_torchrec.server.config import ServerConfig
from tests.support.increments import (
    ITEM,
    OTHER,
    WRITING,
    Training,
    become_equal,
    follow,
    short_intervals,  # noqa: F401  # a fixture
)
from tests.support.servers import RunningServer

IDS = np.arange(60, dtype=np.uint64)


def test_followers_of_a_training_that_resumes_from_an_older_checkpoint_load_again(
    servers, tmp_path
):
    training = Training(servers, tmp_path)
    training.train(*range(20))
    older = training.dump().path
    training.train(*range(10, 30))
    training.dump()
    training.train(*range(40, 50))
    client = follow(servers, training)
    become_equal(client, training)
    for reloads in (1, 2):  # the second time from the same checkpoint
        training.client.checkpoints.load(older)
        training.train(*range(reloads, reloads + 5))
        become_equal(client, training)
        assert client.counters()[0]["following_reloads"] == reloads
    training.dump()
    training.train(*range(30, 60))
    become_equal(client, training)
    assert client.counters()[0]["following_reloads"] == 2


def test_followers_that_read_an_increment_which_is_torn_later_load_again(
    servers, tmp_path
):
    training = Training(servers, tmp_path, 1)
    training.train(*range(20))
    training.dump()
    for _ in range(2):
        training.write(*range(10, 30))
    client = follow(servers, training)
    become_equal(client, training)
    training.running[0].stop()
    *_, last = sorted(Path(training.logs).glob("*/*.increment"))
    last.write_bytes(last.read_bytes()[:-1])
    config = ServerConfig(capacity_rows=1000, increments_dir=training.logs, **WRITING)
    again = RunningServer(config, before=lambda server: server.restore(training.run))
    try:
        training.client = servers.client([again])
        training.client.add_tables([ITEM, OTHER])
        training.train(*range(5))
        become_equal(client, training)
        assert client.counters()[0]["following_reloads"] == 1
    finally:
        again.stop()


@pytest.mark.parametrize("is_loaded_first", [False, True])
def test_a_load_with_increments_of_one_server_is_followed(
    servers, tmp_path, is_loaded_first
):
    training = Training(servers, tmp_path)
    training.write(*range(20))
    training.dump()
    checkpoints = training.client.checkpoints
    if is_loaded_first:
        checkpoints.load(training.run)
    training.write(1)  # of one server
    checkpoints.load(training.run, increments=training.logs)
    training.write(*range(30))
    expected = training.client.read("item", IDS)
    client = servers.client(servers.start())
    client.checkpoints.load(training.run, increments=training.logs)
    client.learn_tables()
    assert np.array_equal(client.read("item", IDS), expected)
    become_equal(follow(servers, training), training)
