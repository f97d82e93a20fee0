import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from persia_torchrec import timeouts
from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.embedding.optim import Adam
from persia_torchrec.errors import ConfigError, RemoteError, ServerError, TokenError
from persia_torchrec.job.lifetime import reject_until_ready
from persia_torchrec.rpc.addresses import free_port
from persia_torchrec.rpc.connections import Connections
from persia_torchrec.rpc.messages import Header, Kind, encode_json
from persia_torchrec.server import cluster as cluster_module
from persia_torchrec.server.cluster import EmbeddingCluster, _wait_until_ready
from persia_torchrec.server.server import EmbeddingServer, ServerConfig
from persia_torchrec.table import TableSpec
from tests.support.processes import is_running, wait_until
from tests.support.servers import DEADLINE_S, Servers, ids_of
from tests.support.threads import InThread

pytestmark = pytest.mark.multiprocess

ITEM = TableSpec(name="item", dim=5, optimizer=Adam(0.1))

START_A_CLUSTER = """
import time
from persia_torchrec.server.cluster import EmbeddingCluster
with EmbeddingCluster.local(servers=2, capacity=10) as cluster:
    print(*[process.pid for process in cluster.processes], flush=True)
    time.sleep(60)
"""
DIE_WHILE_A_SERVER_STARTS = """
import os
from persia_torchrec.server.cluster import _start
from persia_torchrec.server.server import ServerConfig
print(_start(ServerConfig()).pid, flush=True)
os._exit(0)
"""


def train(client):
    client.add_tables([ITEM])
    ids = np.arange(50, dtype=np.uint64)
    split = client.split(ids)
    for batch in range(3):
        number = BatchNumber(1, batch)
        [rows] = client.pull([("item", split)], batch=number)
        assert (
            client.outcome(client.push([("item", split)], [rows], number)).num_missed
            == 0
        )
    return client.read("item", ids)


def test_a_cluster_trains_as_a_server_in_this_process_and_ends_with_its_block():
    with Servers() as servers:
        expected = train(servers.client(servers.start()))
    with EmbeddingCluster.local(servers=2, capacity=100) as cluster:
        assert len(cluster.addresses) == len(cluster.processes) == 2
        client = EmbeddingClient.connect(cluster.addresses)
        assert train(client).tobytes() == expected.tobytes()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # as to a group
            for process in cluster.processes:
                process.send_signal(number)
        for _ in range(2):
            assert all(count["capacity_rows"] == 100 for count in client.counters())
        client.close()
    assert [process.returncode for process in cluster.processes] == [0, 0]
    cluster.close()


def test_servers_are_ended_when_their_block_raises():
    with (
        pytest.raises(KeyError),
        EmbeddingCluster.local(servers=1, capacity=10) as cluster,
    ):
        raise KeyError
    assert cluster.processes[0].returncode == 0


def test_servers_end_when_the_process_that_started_them_is_gone():
    command = [sys.executable, "-c", START_A_CLUSTER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        parent.kill()
        parent.wait(DEADLINE_S)
    wait_until(lambda: not any(map(is_running, pids)), "the servers end")


def test_a_server_whose_parent_dies_while_it_starts_ends_too():
    command = [sys.executable, "-c", DIE_WHILE_A_SERVER_STARTS]
    pid = int(subprocess.check_output(command, stderr=subprocess.DEVNULL))
    wait_until(lambda: not is_running(pid), "the server ends")


def test_a_server_that_is_killed_fails_its_pending_requests_at_once_and_by_name():
    with EmbeddingCluster.local(servers=2, capacity=100) as cluster:
        client = EmbeddingClient.connect(cluster.addresses)
        client.add_tables([ITEM])
        split = client.split(ids_of(1, 2, 3))
        client.pull([("item", split)], batch=BatchNumber(1, 1))
        victim = cluster.processes[1]
        victim.send_signal(signal.SIGSTOP)
        grads = np.ones((3, 5), dtype=np.float32)
        push = client.push([("item", split)], [grads], BatchNumber(1, 1))
        victim.kill()
        message = f"server 1 at {cluster.addresses[1]}: update .*connection was lost"
        with pytest.raises(ServerError, match=message):
            client.outcome(push)  # the message is not that of a timeout
        client.close()


def test_a_server_that_cannot_start_is_an_error_that_names_it(capfd):
    with pytest.raises(ServerError, match="server 0: ended with exit status 1"):
        EmbeddingCluster.local(servers=1, imports=["nowhere"])
    assert "nowhere" in capfd.readouterr().err
    with pytest.raises(ConfigError, match=r"capacity must be in \[1, 4294967294"):
        EmbeddingCluster.local(servers=1, capacity=2**33)


def test_a_server_that_is_killed_while_it_starts_is_named_with_the_signal():
    command = ["/bin/sh", "-c", "kill -9 $$"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        pytest.raises(ServerError, match="server 0: was killed by SIGKILL before"),
    ):
        _wait_until_ready(0, server, DEADLINE_S)


def test_servers_that_are_not_ready_in_time_are_an_error():
    with pytest.raises(ServerError, match=r"server 0: not ready in time"):
        EmbeddingCluster.local(servers=2, capacity=10, start_timeout_s=0.01)


def test_the_time_in_which_a_server_compiles_does_not_count(monkeypatch):
    says = "echo compiling; echo compiled; echo ready tcp://a:1"
    times_s = iter([0.0, 0.0, 500.0, 500.0])  # compiling takes 500 s
    clock = SimpleNamespace(monotonic=lambda: next(times_s))
    monkeypatch.setattr(cluster_module, "time", clock)
    with subprocess.Popen(
        ["/bin/sh", "-c", says], stdout=subprocess.PIPE, text=True
    ) as server:
        address, put_off_s = _wait_until_ready(0, server, DEADLINE_S)
    assert address == "tcp://a:1"
    assert put_off_s == DEADLINE_S + 500


def test_a_client_waits_for_a_server_that_compiles():
    server = EmbeddingServer(ServerConfig())
    with reject_until_ready(server.listener):
        connections = Connections("embedding server", [server.address])
        reply = connections[0].send(
            Header(Kind.COUNTERS),
            [encode_json(None)],
            timeout_s=DEADLINE_S,
            what="counters",
        )
        with pytest.raises(RemoteError, match=r"NotReadyError: .*compiling its loops"):
            reply.result(DEADLINE_S)
        connecting = InThread(
            lambda: EmbeddingClient.connect([server.address], timeout_s=DEADLINE_S)
        )
        assert connecting.still_waits()
    serving = InThread(server.serve)
    connecting.result().close()
    server.stop()
    serving.result()
    connections.close()


@pytest.mark.parametrize(("num_servers", "capacity"), [(0, 10), (1, 0)])
def test_a_cluster_of_nothing_is_rejected(num_servers, capacity):
    message = rf"must be >= 1\. Received: {num_servers} and {capacity}\."
    with pytest.raises(ConfigError, match=message):
        EmbeddingCluster.local(servers=num_servers, capacity=capacity)


@pytest.mark.parametrize(("num_servers", "capacity"), [(0, 10), (1, -1)])
def test_a_cluster_that_cannot_serve_is_rejected(
    servers, tmp_path, num_servers, capacity
):
    servers.client(servers.start()).checkpoints.dump(tmp_path)
    message = rf"capacity >= 0\. Received: {num_servers} and {capacity}\."
    with pytest.raises(ConfigError, match=message):
        EmbeddingCluster.of_checkpoint(tmp_path, num_servers, capacity)


def test_a_server_that_does_not_terminate_is_killed(monkeypatch):
    monkeypatch.setattr(timeouts, "CLUSTER_STOP_S", 0.1)
    command = ["/bin/sh", "-c", "trap '' TERM; echo ignoring; exec sleep 1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ignoring\n"
        EmbeddingCluster([process]).close()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shard", "2", "--num-shards", "2"], "shard must be in [0, 2)"),
        (["--host", "256.0.0.1"], "Cannot listen on 256.0.0.1"),
    ],
)
def test_a_server_reports_why_it_does_not_start(arguments, message):
    command = [sys.executable, "-m", "persia_torchrec.server", "--standalone"]
    ended = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_server_by_itself_finds_its_shard_and_serves_metrics(monkeypatch):
    port = str(free_port("127.0.0.1"))
    command = [sys.executable, "-m", "persia_torchrec.server", "--standalone"]
    command += ["--metrics-port", port]
    monkeypatch.setenv("REPLICA_INDEX", "1")
    monkeypatch.setenv("REPLICA_SIZE", "2")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        line = next(line for line in server.stdout if line.startswith("ready "))
        address = line.split()[1]
        with pytest.raises(TokenError, match=r"must be that of embedding server 0\."):
            EmbeddingClient.connect([address])
        url = f"http://127.0.0.1:{port}/readyz"
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            assert answer.status == 200
        server.terminate()
        assert server.wait(DEADLINE_S) == 0


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_second_cluster_does_not_write_increments_in_the_same_folder(tmp_path, capfd):
    with EmbeddingCluster.local(1, increments_dir=str(tmp_path)):
        with (
            pytest.raises(ServerError),
            EmbeddingCluster.local(1, increments_dir=str(tmp_path)),
        ):
            pass
        assert "must have one writer. Received: job 'process" in capfd.readouterr().err
    with EmbeddingCluster.local(1, increments_dir=str(tmp_path)):
        pass


@pytest.mark.parametrize("restarts", [False, True])
def test_a_cluster_that_is_dropped_leaves_no_process_thread_or_file(restarts, caplog):
    def num_files():
        return len(list(Path("/proc/self/fd").iterdir()))

    threads, files = threading.active_count(), num_files()
    cluster = EmbeddingCluster.local(servers=1, capacity=10, restarts=restarts)
    pids = [process.pid for process in cluster.processes]
    del cluster
    wait_until(lambda: not any(map(is_running, pids)), "the servers end")
    wait_until(
        lambda: threading.active_count() <= threads and num_files() <= files,
        "threads and files are gone",
    )
    assert "use it as a context manager" in caplog.text


def test_a_cluster_that_is_closed_says_nothing_when_it_is_dropped(caplog):
    cluster = EmbeddingCluster([])
    cluster.close()
    cluster.close()
    del cluster
    assert not caplog.messages
