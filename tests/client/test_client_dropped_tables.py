"""Tables that are dropped: on the servers, in checkpoints and in increments."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from persia_torchrec import AdmitFrequency, DynamicDim
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.load import Target
from persia_torchrec.checkpoint.restore import restore
from persia_torchrec.embedding.optim import SGD, Adagrad
from persia_torchrec.errors import ConfigError, RemoteError
from persia_torchrec.server import checkpoint_service
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.table import TableSpec
from tests.support.faults import Killed, Point
from tests.support.increments import (
    ITEM,
    OTHER,
    Training,
    follow,
    short_intervals,  # noqa: F401  # a fixture
    weights_of,
)
from tests.support.processes import Processes, wait_until
from tests.support.servers import DEADLINE_S

pytestmark = pytest.mark.slow

A = TableSpec(name="a", dim=4, optimizer=Adagrad(0.1))
B = TableSpec(name="b", dim=4, optimizer=SGD(1.0))
SHARED = replace(A, name="shared", admission=AdmitFrequency(2), shared_rows=3)
BLOCKS = replace(A, name="blocks", dynamic=DynamicDim(2, period=2))
IDS = np.arange(60, dtype=np.uint64)


def fill(client, name, value=1.0):
    shape = len(IDS), client.table(name).dim
    client.write(name, IDS, np.full(shape, value, dtype=np.float32))


def weights(client, name):
    return client.read(name, IDS, initial=False)[:, : client.table(name).dim]


@pytest.fixture
def client(servers):
    client = servers.client(servers.start(2))
    client.add_tables([A, B, SHARED, BLOCKS])
    for name in ("a", "b", "shared", "blocks"):
        fill(client, name)
    return client


def test_a_dropped_table_leaves_no_row_and_its_name_may_come_back(client, tmp_path):
    client.checkpoints.dump(tmp_path)
    for name in ("a", "shared", "blocks"):
        client.drop_table(name)
    assert sum(client.num_rows()) == len(IDS)
    with pytest.raises(ConfigError, match=r"Table 'a' is unknown.*\['b'\]"):
        client.read("a", IDS)
    client.add_tables([replace(A, dim=6, optimizer=SGD(0.5)), SHARED, BLOCKS])
    assert not weights(client, "a").any()
    fill(client, "a", 2.0)
    fill(client, "shared", 3.0)
    assert (weights(client, "a") == 2).all()
    assert (weights(client, "b") == 1).all()
    client.drop_table("b")
    assert client.checkpoints.dump(tmp_path).num_rows == 2 * len(IDS)
    client.clear()
    client.checkpoints.load(tmp_path)
    assert (weights(client, "a") == 2).all()
    assert (weights(client, "shared") == 3).all()
    assert sorted(spec.name for spec in client.learn_tables()) == [
        "a",
        "blocks",
        "shared",
    ]


def test_a_request_with_the_number_of_a_dropped_table_is_rejected(client):
    numbers = client.tables["a"]
    client.drop_table("a")
    client.add_tables([A])
    assert client.tables["a"].numbers != numbers.numbers
    client.tables["a"] = numbers
    with pytest.raises(RemoteError, match=r"'a' was dropped \(drop_table\)"):
        client.read("a", IDS)


def test_a_table_that_no_server_has_is_named_with_those_that_they_have(client):
    with pytest.raises(ConfigError, match=r"\['a', 'b', 'blocks', 'shared'\].*'c'"):
        client.drop_table("c")


def test_a_table_that_another_client_has_added_stays(servers):
    running = servers.start(2)
    first, second = servers.client(running), servers.client(running)
    for client in (first, second):
        client.add_tables([A])
    fill(first, "a")
    with pytest.raises(RemoteError, match=r"process \d+ on .* End that training"):
        first.drop_table("a")
    assert (weights(second, "a") == 1).all()
    second.close()
    wait_until(lambda: dropped(first, "a"), "the other client is gone")
    assert first.num_rows() == [0, 0]


def dropped(client, name):
    try:
        client.drop_table(name)
    except RemoteError:
        return False
    return True


def test_a_dump_that_has_not_ended_makes_a_drop_wait(client, tmp_path, monkeypatch):
    may_write = threading.Event()
    write = checkpoint_service.ShardDump._write

    def write_later(self):
        assert may_write.wait(DEADLINE_S)
        write(self)

    monkeypatch.setattr(checkpoint_service.ShardDump, "_write", write_later)
    task = client.checkpoints.start_dump(tmp_path)
    with ThreadPoolExecutor() as pool:
        drop = pool.submit(client.drop_table, "a")
        may_write.set()
        assert task.wait(DEADLINE_S).num_rows == 4 * len(IDS)
        drop.result(DEADLINE_S)
    assert sum(client.num_rows()) == 3 * len(IDS)


@pytest.fixture
def training(servers, tmp_path):
    training = Training(servers, tmp_path)
    training.train(*range(40))
    training.train(*range(40), table="other")
    return training


def replace_item(training):
    """Drop a table, and train another one of its name."""
    training.client.drop_table("item")
    training.client.add_tables([replace(ITEM, dim=6)])
    training.train(*range(30, 50))


@pytest.mark.parametrize("num_servers", [1, 3])
def test_followers_drop_the_table_too(servers, training, num_servers):
    training.dump()
    client = follow(servers, training, num_servers)
    for _ in range(2):
        training.client.drop_table("item")
        wait_until(
            lambda: sum(client.num_rows()) == sum(training.client.num_rows()),
            "the followers have dropped it",
        )
        training.client.add_tables([ITEM])
        training.train(*range(30, 50))
    replace_item(training)

    def is_equal():
        try:
            client.learn_tables()
        except ConfigError:  # followers drop it and add it one by one
            return False
        expected = training.client.read("item", IDS)[:, :6]
        has_it = client.table("item").dim == 6
        return has_it and np.array_equal(weights_of(client, "item", 6), expected)

    wait_until(is_equal, "the followers have the new table")
    assert all(c["following_reloads"] == 0 for c in client.counters())
    assert all(c["following_errors"] == 0 for c in client.counters())


def test_increments_lead_over_a_table_that_was_dropped(servers, training):
    training.dump()
    training.train(*range(20, 45))
    replace_item(training)
    training.has_written()
    expected = training.client.read("item", IDS)
    others = training.client.read("other", IDS)
    for tables in ([], [replace(ITEM, dim=6), OTHER]):
        client = servers.client(servers.start(3))
        client.add_tables(tables)
        client.checkpoints.load(training.run, increments=training.logs)
        client.learn_tables()
        assert np.array_equal(client.read("item", IDS), expected)
        assert np.array_equal(client.read("other", IDS), others)


def test_a_lost_memory_is_restored_over_a_table_that_was_dropped(training):
    training.dump()
    training.train(*range(20, 45))
    replace_item(training)
    training.has_written()
    num_rows = training.client.num_rows()
    for shard in range(2):
        store = ServerConfig(capacity_rows=1000).make_store()
        target = Target(shard, 2, 1000, is_lfu=False)
        restore(store, target, Folder(training.run), Folder(training.logs))
        assert store.num_rows == num_rows[shard]
        assert {spec.name: spec.dim for spec in store.tables}["item"] == 6


@pytest.mark.multiprocess
def test_a_server_killed_in_the_middle_drops_all_of_it_when_it_is_asked_again(tmp_path):
    with Processes(tmp_path) as processes, closing(Killed(processes)) as server:
        server.start(dies_in=Point.TABLE_FREES_ROWS)
        with server.connect() as client, ThreadPoolExecutor(1) as pool:
            client.add_tables([A, B])
            for name in "ab":
                fill(client, name)
            done = pool.submit(client.drop_table, "a")
            server.dies()
            server.start()
            done.result(DEADLINE_S)
            assert client.num_rows() == [len(IDS)]
            assert (weights(client, "b") == 1).all()
            client.add_tables([replace(A, dim=6)])
            assert not weights(client, "a").any()
