"""Servers that are killed in the middle of what is more than one change."""

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from persia_torchrec import timeouts
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.errors import RequestTimeoutError
from persia_torchrec.rpc import silences
from tests.support.faults import Killed, Point
from tests.support.memory_files import IDS, SPEC, train
from tests.support.processes import Processes
from tests.support.servers import DEADLINE_S

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def server(tmp_path):
    with Processes(tmp_path) as processes, closing(Killed(processes)) as server:
        yield server


@pytest.fixture
def source(servers):
    """A client of another server, which has trained a batch."""
    source = servers.client(servers.start())
    source.add_tables([SPEC])
    train(source, 0)
    return source


def rows_of(client):
    return client.read("item", IDS).tobytes()


def test_a_dump_is_repeated_when_its_server_was_killed(server, servers, tmp_path):
    server.start(dies_in=Point.DUMP_WRITES_ROWS)
    with server.connect() as client:
        client.add_tables([SPEC])
        train(client, 0)
        task = client.checkpoints.start_dump(tmp_path / "run")
        server.dies()
        server.start()
        assert task.wait(DEADLINE_S).num_rows == len(IDS)
        copy = servers.client(servers.start())
        copy.checkpoints.load(tmp_path / "run")
        copy.add_tables([SPEC])
        assert rows_of(copy) == rows_of(client)
        assert train(client, 1) == train(copy, 1)


def test_a_load_is_repeated_when_its_server_was_killed(server, source, tmp_path):
    source.checkpoints.dump(tmp_path / "run")
    server.start(dies_in=Point.LOAD_CHECKS_FILES)
    with server.connect() as client:
        client.add_tables([SPEC])
        train(client, 7)
        task = client.checkpoints.start_load(tmp_path / "run")
        for point in (Point.LOAD_HAS_DROPPED_ROWS, Point.LOAD_HAS_WRITTEN_ROWS):
            server.dies()
            server.start(dies_in=point)
        server.dies()
        server.start()
        assert task.wait(DEADLINE_S).num_rows == len(IDS)
        assert rows_of(client) == rows_of(source)
        assert train(client, 1) == train(source, 1)


def test_half_a_load_is_never_served(server, source, tmp_path):
    before, after = str(tmp_path / "before"), str(tmp_path / "after")
    source.checkpoints.dump(before)
    expected = rows_of(source)
    train(source, 1)
    source.checkpoints.dump(after)
    server.start(dies_in=Point.LOAD_HAS_DROPPED_ROWS)
    with server.connect() as client:
        task = client.checkpoints.start_load(after)
        server.dies()
        task.cancel()  # so that no client repeats it
    server.start("--run-dir", before)
    with server.connect() as client:
        client.learn_tables()
        assert rows_of(client) == expected
        assert client.step("item") == 1


def test_a_restore_is_repeated_when_the_server_was_killed_in_it(server, tmp_path):
    run, logs = str(tmp_path / "run"), str(tmp_path / "increments")
    flags = "--increments-dir", logs, "--increments-interval-s", "0.02"
    flags = *flags, "--run-dir", run
    server.start(*flags)
    with server.connect() as client:
        client.add_tables([SPEC])
        train(client, 0)
        client.checkpoints.dump(run)
        train(client, 1)
        expected = rows_of(client)
        client.shut_down_servers()  # which writes all increments
    assert server.process.status() == 0
    server.lose_memory()
    point = Point.RESTORE_APPLIES_INCREMENT
    server.start(*flags, dies_in=point, PERSIA_RESTARTS="1")
    server.dies()
    server.start(*flags)
    with server.connect() as client:
        client.learn_tables()
        assert rows_of(client) == expected
        assert client.counters()[0]["restored_increments"] > 0


def test_tables_are_added_once_when_the_server_was_killed_in_between(server):
    server.start(dies_in=Point.REQUEST_IS_NOTED)
    with server.connect() as client, ThreadPoolExecutor(1) as pool:
        added = pool.submit(client.add_tables, [SPEC])  # and not noted as such
        server.dies()
        server.start()
        added.result(DEADLINE_S)
        assert client.learn_tables() == [SPEC]
        train(client, 0)


def test_a_server_that_hangs_is_named_and_no_request_waits_for_ever(
    server, monkeypatch, caplog
):
    monkeypatch.setattr(timeouts, "SAY_S", 0.05)
    monkeypatch.setattr(silences, "LOOK_S", 0.05)
    server.start()
    with server.connect() as client:
        client.add_tables([SPEC])
        train(client, 0)
        split = client.split(IDS)
        [rows] = client.pull([("item", split)], batch=BatchNumber(1, 1))
        server.process.send(signal.SIGSTOP)
        client.timeout_s = client.recovery_s = 0.4
        [update] = client.push([("item", split)], [rows], BatchNumber(1, 1))
        late = (
            r"^embedding server 0 at \S+: update of table 'item': no reply within 0.8"
        )
        with pytest.raises(RequestTimeoutError, match=late):
            update.frames()
        assert "pending request: update of table" in caplog.text
        client.timeout_s = client.recovery_s = DEADLINE_S
        update = client.push([("item", split)], [rows], BatchNumber(1, 1))
        server.process.send(signal.SIGCONT)
        assert client.outcome(update).num_gradients == len(IDS)
        assert client.step("item") == 2
        assert "answers again" in caplog.text
