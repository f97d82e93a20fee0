"""A server is killed with its memory, and started again: processes and signals."""

import re
import threading
from contextlib import closing

import numpy as np
import pytest

from persia_torchrec.checkpoint.load import ShardLoad
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.errors import PersiaError, RemoteError
from persia_torchrec.job.lifetime import reject_until_ready
from persia_torchrec.job.member import JobMember
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.requests import JobTimings
from persia_torchrec.logger import get_default_logger
from persia_torchrec.rpc.connections import Connections
from persia_torchrec.rpc.messages import Header, Kind, encode_json
from persia_torchrec.server.__main__ import main
from persia_torchrec.server.server import EmbeddingServer, ServerConfig
from tests.support.increments import (
    ITEM,
    OTHER,
    Training,
    become_equal,
    follow,
    short_intervals,  # noqa: F401  # a fixture
)
from tests.support.ports import draw_port
from tests.support.processes import wait_until
from tests.support.server_processes import COUNT, address_of, known_updates
from tests.support.servers import DEADLINE_S, RunningServer
from tests.support.threads import InThread

pytestmark = pytest.mark.multiprocess

IDS = np.arange(60, dtype=np.uint64)


@pytest.fixture
def other(tmp_path):
    """Server 1 of two, which keeps its rows."""
    logs = str(tmp_path / "increments")
    settings = {"increments_dir": logs, "increments_interval_s": 0.02}
    config = ServerConfig(shard=1, num_shards=2, capacity_rows=1000, **settings)
    server = RunningServer(config)
    yield server
    server.stop()


class OfTwo(Training):
    """A training with server 0, a process, and server 1, a thread."""

    def __init__(self, folder, address, other):
        self.logs, self.run = str(folder / "increments"), str(folder / "run")
        addresses = [address, other.address]
        self.client = EmbeddingClient.connect(addresses, timeout_s=DEADLINE_S)
        self.client.add_tables([ITEM, OTHER])
        self._num_batches, self._rng = 0, np.random.default_rng(7)

    def write(self, *ids):
        """Train, and wait until increments have it."""
        for table in ("item", "other"):
            self.train(*ids, table=table)
        self.has_written()


def start(processes, name, port, *flags, **env):
    """Start server 0 of two, which writes increments."""
    return processes.start(
        *(name, main),
        (
            *("--shard", "0", "--num-shards", "2", "--capacity", "1000"),
            *("--increments-dir", str(processes.folder / "increments")),
            *("--increments-interval-s", "0.02", "--port", str(port)),
            *flags,
        ),
        env=env,
    )


def test_a_server_that_lost_its_memory_continues_and_its_followers_too(
    processes, servers, other, tmp_path
):
    port = draw_port()
    server = start(processes, "first", port, "--standalone")
    first = OfTwo(tmp_path, address_of(server), other)
    with closing(first.client):
        first.write(*range(20))
        first.dump()
        first.write(*range(10, 40))
        follower = follow(servers, first)
        become_equal(follower, first)
        expected = first.client.read("item", IDS).tobytes()
        server.kill()
        flags = "--standalone", "--run-dir", first.run
        server = start(processes, "second", port, *flags, PERSIA_RESTARTS="1")
        address = address_of(server)
        wait_until(lambda: "rows are gone" in told(first.client), "it is told")
    assert "embedding server 0 lost its memory, and restored" in server.output()
    second = OfTwo(tmp_path, address, other)
    with closing(second.client):
        assert second.client.read("item", IDS).tobytes() == expected
        counters = second.client.counters()[0]
        assert counters["restored_rows"] == counters["rows"] > 0
        assert counters["restored_increments"] > 0
        assert counters["lost_ms"] >= 0
        second.write(*range(5, 30))
        become_equal(follower, second)
    assert follower.counters()[0]["following_reloads"] == 0


def test_a_job_that_continues_another_one_has_lost_nothing(
    processes, servers, tmp_path
):
    client = servers.client(servers.start(1))
    client.add_tables([COUNT])
    client.write("count", IDS[:7], np.ones((7, 1), np.float32))
    client.checkpoints.dump(tmp_path / "run")
    flags = "--standalone", "--run-dir", str(tmp_path / "run")
    server = processes.start("next", main, flags)
    with closing(EmbeddingClient.connect([address_of(server)])) as client:
        [counters] = client.counters()
    assert counters["restored_rows"] == counters["rows"] == 7
    assert "lost_ms" not in counters
    assert "lost its memory" not in server.output()


def told(client):
    """Return what the servers tell a client that knows their previous start."""
    try:
        client.counters()
    except PersiaError as exc:
        return str(exc)
    return ""


def test_a_server_of_a_job_that_had_registered_restores_its_rows(
    processes, other, tmp_path
):
    port, book = draw_port(), AddressBook.host(0)
    book.publish(JobTimings(heartbeat_s=0.1, silent_s=30.0))
    env = {"PERSIA_STORE_PORT": str(book.port), "PERSIA_STORE_HOST": "127.0.0.1"}
    with closing(book):
        server = start(processes, "first", port, **env)
        training = OfTwo(tmp_path, address_of(server), other)
        with closing(training.client):
            training.train(*range(20))
            training.dump()
            training.train(*range(30))
        wait_until(
            lambda: book.note("checkpoint_dir") == training.run, "the run is known"
        )
        wait_until(lambda: known_updates(book) == 2, "updates are known")
        server.kill()
        for log in (tmp_path / "increments").iterdir():
            log.rename(tmp_path / log.name)  # only the checkpoint is left
        server = start(processes, "second", port, **env)
        address_of(server)
        lost = re.search("restored_rows=([1-9]).*lost_updates=(.)", server.output())
        assert lost[2] == "1"
        book.finish()
        assert server.status() == 0


def test_a_training_continues_with_a_server_that_is_started_elsewhere(
    processes, tmp_path
):
    book = AddressBook.host(0, recovery_s=DEADLINE_S)
    book.publish(JobTimings(heartbeat_s=0.1, silent_s=30.0))
    env = {"PERSIA_STORE_PORT": str(book.port), "PERSIA_STORE_HOST": "127.0.0.1"}
    with closing(book):
        server = processes.start("first", main, ["--capacity", "1000"], env=env)
        trainer = processes.start("trainer", read_until_told, book.port, tmp_path)
        trainer.has_printed("reads")
        wait_until(lambda: book.note("checkpoint_dir"), "the run is known")
        server.kill()
        again = processes.start("again", main, ["--capacity", "1000"], env=env)
        trainer.has_printed("moved; reconnecting to")
        (tmp_path / "go").touch()
        trainer.has_printed("the rows are there")
        book.finish()
        assert (trainer.status(), again.status()) == (0, 0)


def read_until_told(port, folder):
    """Read rows all the time, as a member of the job."""
    get_default_logger()
    with JobMember("trainer", 0, 1, store=("localhost", port, "")) as member:
        job = {"greeting": member.greeting, "recovery_s": DEADLINE_S}
        client = EmbeddingClient.connect(member.book.addresses("server"), **job)
        client.add_tables([ITEM])
        client.write("item", IDS, np.ones((len(IDS), ITEM.dim), np.float32))
        weights = client.read("item", IDS)
        client.checkpoints.dump(folder / "run")
        print("reads", flush=True)
        while not (folder / "go").exists():
            assert np.array_equal(client.read("item", IDS), weights)
        print("the rows are there", flush=True)
        client.close()
        member.record.report_done()
        member.wait_for_end()


def test_requests_are_rejected_until_the_rows_are_restored(
    servers, tmp_path, monkeypatch
):
    source = servers.client(servers.start())
    source.add_tables([ITEM])
    source.checkpoints.dump(tmp_path)
    may_load, check = threading.Event(), ShardLoad.check

    def wait_and_check(load):
        assert may_load.wait(DEADLINE_S)
        check(load)

    monkeypatch.setattr(ShardLoad, "check", wait_and_check)
    server = EmbeddingServer(ServerConfig())
    request = Header(Kind.HELLO), [encode_json(None)]
    with (
        reject_until_ready(server.listener),
        closing(Connections("embedding server", [server.address])) as connections,
    ):
        restoring = InThread(server.restore, str(tmp_path))
        reply = connections[0].send(*request, timeout_s=DEADLINE_S, what="hello")
        with pytest.raises(RemoteError, match=r"NotReadyError: .*restoring its rows"):
            reply.result(DEADLINE_S)
        may_load.set()
        restoring.result()
    assert server.shard.store.tables == [ITEM]
    server.stop()
    server.serve()
