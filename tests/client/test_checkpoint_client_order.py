"""Dumps, loads and changes that are begun side by side, in this or several clients."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from persia_torchrec.checkpoint.load import ShardLoad
from persia_torchrec.client import checkpoint_client
from persia_torchrec.embedding.optim import SGD, Adagrad
from persia_torchrec.errors import RemoteError, RequestTimeoutError
from persia_torchrec.rpc.messages import Header, Kind, encode_json
from persia_torchrec.server.checkpoint_service import ShardDump
from persia_torchrec.table import TableSpec
from tests.support.processes import wait_until
from tests.support.servers import DEADLINE_S

pytestmark = pytest.mark.slow

ITEM = TableSpec(name="item", dim=4, optimizer=SGD(1.0))
IDS = np.arange(60, dtype=np.uint64)


def write(client, value):
    shape = len(IDS), client.table("item").dim
    client.write("item", IDS, np.full(shape, value, np.float32))


@pytest.fixture
def running(servers):
    return servers.start(2)


@pytest.fixture
def client(servers, running, tmp_path):
    """Return a client of servers that have other rows than a checkpoint of them."""
    client = servers.client(running)
    client.add_tables([ITEM])
    write(client, 1.0)
    client.checkpoints.dump(tmp_path / "saved")
    write(client, 2.0)
    return client


def hold_back(monkeypatch, owner, name):
    """Have a method wait, when it has done its work, for the event that is returned."""
    method, is_done, may_end = (
        getattr(owner, name),
        threading.Event(),
        threading.Event(),
    )

    def held(self, *args):
        result = method(self, *args)
        is_done.set()
        assert may_end.wait(DEADLINE_S)
        return result

    monkeypatch.setattr(owner, name, held)
    return is_done, may_end


@pytest.mark.parametrize(
    "other",
    [replace(ITEM, dim=8), replace(ITEM, optimizer=Adagrad(0.1))],
    ids=["dim", "state"],
)
def test_a_table_that_is_added_while_a_load_is_checked_must_fit(
    servers, client, tmp_path, monkeypatch, other
):
    late = servers.client(servers.start(2))
    is_checked, may_end = hold_back(monkeypatch, ShardLoad, "check")
    task = late.checkpoints.start_load(tmp_path / "saved")
    assert is_checked.wait(DEADLINE_S)
    late.add_tables([other])
    may_end.set()
    with pytest.raises(RemoteError, match=r"table 'item' must have dim"):
        task.wait(DEADLINE_S)
    assert late.num_rows() == [0, 0]


@pytest.fixture
def may_begin(monkeypatch):
    """Hold dumps back, before they have asked a server, until this event."""
    may_begin = threading.Event()
    write_files = checkpoint_client.CheckpointClient._write_files

    def write_later(self, *args):
        assert may_begin.wait(DEADLINE_S)
        return write_files(self, *args)

    monkeypatch.setattr(checkpoint_client.CheckpointClient, "_write_files", write_later)
    return may_begin


def test_a_drop_comes_after_a_dump_that_has_not_begun(client, tmp_path, may_begin):
    client.add_tables([replace(ITEM, name="other")])
    task = client.checkpoints.start_dump(tmp_path / "next")
    with pytest.raises(RequestTimeoutError, match="an earlier dump or load"):
        client.drop_table("other", timeout_s=0.1)
    with ThreadPoolExecutor() as pool:
        drop = pool.submit(client.drop_table, "item")
        may_begin.set()
        drop.result(DEADLINE_S)
    assert task.wait(DEADLINE_S).num_rows == len(IDS)
    assert client.num_rows() == [0, 0]


def test_a_clear_comes_after_a_dump_that_has_not_begun(
    client, tmp_path, monkeypatch, may_begin
):
    monkeypatch.setattr(ShardDump, "advance", lambda _: 0.0)
    task = client.checkpoints.start_dump(tmp_path / "next")
    with monkeypatch.context() as patch:
        patch.setattr(client, "timeout_s", 0.1)
        with pytest.raises(RequestTimeoutError, match="an earlier dump or load"):
            client.clear()
    with ThreadPoolExecutor() as pool:
        clear = pool.submit(client.clear)
        may_begin.set()
        clear.result(DEADLINE_S)
    with pytest.raises(RemoteError, match="ended early: the rows were dropped"):
        task.wait(DEADLINE_S)
    assert client.num_rows() == [0, 0]


def test_a_load_waits_for_what_has_begun_on_a_server_that_gave_it_up(
    servers, running, client, tmp_path, monkeypatch
):
    is_checked, may_check = hold_back(monkeypatch, ShardLoad, "check")
    is_written, may_write = hold_back(monkeypatch, ShardDump, "_write")
    _, may_ask = hold_back(monkeypatch, checkpoint_client.Task, "pause")
    task = client.checkpoints.start_load(tmp_path / "saved")
    assert is_checked.wait(DEADLINE_S)
    server, other = running[0].server, servers.client(running)
    wait_until(lambda: server.shard.checkpoints._task >= 0, "both servers are asked")
    ours = server.shard.checkpoints._task

    def ask(**request):  # as a restart of the server, then another client
        frames = [encode_json(request)]
        other._servers.send(0, Header(Kind.CHECKPOINT), frames, "test").frames()

    ask(do="cancel", task=ours)
    ask(do="dump", task=1, folder=str(tmp_path))
    assert is_written.wait(DEADLINE_S)
    may_ask.set()
    counts = server.shard.counts
    wait_until(lambda: counts["requests_refused"], "the load finds the server busy")
    may_write.set()
    may_check.set()
    assert task.wait(DEADLINE_S).num_rows == len(IDS)
    assert (client.read("item", IDS) == 1).all()
