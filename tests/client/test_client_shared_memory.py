"""A client that shares memory with its servers: the same rows, and each update once."""

import os
import signal
from contextlib import ExitStack, closing

import numpy as np
import pytest

from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.errors import ConfigError, RequestTimeoutError
from persia_torchrec.rpc.messages import Precision
from tests.support.faults import Killed, Point, kill
from tests.support.memory_files import IDS, SPEC, train
from tests.support.processes import Processes, wait_until
from tests.support.servers import DEADLINE_S
from tests.support.threads import InThread


def memory_of(client, server=0):
    return client._servers.connections[server].memory


@pytest.fixture
def connect(servers):
    """Returns clients of new servers, by transport."""
    with ExitStack() as stack:

        def connect(transport, num_servers=1, **settings):
            addresses = [one.address for one in servers.start(num_servers)]
            client = EmbeddingClient.connect(
                addresses, timeout_s=DEADLINE_S, transport=transport, **settings
            )
            stack.callback(client.close)
            client.add_tables([SPEC])
            return client

        yield connect


@pytest.mark.parametrize("num_servers", [1, 3])
def test_rows_are_the_same_as_over_tcp(connect, num_servers):
    near, far = connect("shm", num_servers), connect("tcp", num_servers)
    for number in range(3):
        assert train(near, number) == train(far, number)
        near_late, far_late = number == 1, number == 2
        rows = train(near, 3 + number, is_late=near_late)
        assert rows == train(far, 3 + number, is_late=far_late)
    assert near.read("item", IDS).tobytes() == far.read("item", IDS).tobytes()
    for precision in Precision:
        rows = [
            client.pull([("item", client.split(IDS))], precision=precision)[0].tobytes()
            for client in (near, far)
        ]
        assert rows[0] == rows[1]
    counters = [near.counters(), far.counters()]
    assert all(one["shared_memory_requests"] >= 9 for one in counters[0])
    assert all(one["shared_memory_requests"] == 0 for one in counters[1])


def test_rows_that_are_kept_do_not_change(connect):
    client = connect("shm")
    tables = [("item", client.split(IDS))]
    kept = [client.pull(tables, batch=BatchNumber(2, n))[0] for n in range(1, 40)]
    first = kept[0].copy()
    train(client, 1)
    for rows in kept:
        np.testing.assert_array_equal(rows, first)
    assert not kept[0].flags.writeable


def test_an_unknown_transport_is_an_error(monkeypatch):
    with pytest.raises(ConfigError, match=r"auto, tcp or shm\. Received: 'udp'"):
        EmbeddingClient.connect(["tcp://127.0.0.1:1"], transport="udp")
    monkeypatch.setenv("PERSIA_TRANSPORT", "udp")
    with pytest.raises(ConfigError, match="PERSIA_TRANSPORT must be auto, tcp or shm"):
        EmbeddingClient.connect(["tcp://127.0.0.1:1"])


POINTS = [
    Point.SLAB_REQUEST_IS_READ,
    Point.SLAB_ROWS_ARE_GATHERED,
    Point.UPDATE_IS_QUEUED,
    Point.UPDATE_IS_APPLIED,
    Point.SLAB_REPLY_IS_WRITTEN,
]


@pytest.fixture
def killed(tmp_path, monkeypatch):
    monkeypatch.setenv("PERSIA_TRANSPORT", "shm")
    with Processes(tmp_path) as processes, closing(Killed(processes)) as server:
        yield server


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("point", "is_late"),
    [*((point, False) for point in POINTS), (Point.UPDATE_IS_QUEUED, True)],
)
def test_each_update_is_applied_once_wherever_the_server_dies(
    connect, killed, point, is_late
):
    plain = connect("tcp")
    killed.start()
    with killed.connect() as client:
        client.add_tables([SPEC])
        assert train(client, 0) == train(plain, 0)
        kill(killed.process.pid)
        killed.dies()
        killed.start(dies_in=point)
        wait_until(lambda: memory_of(client) is not None, "shared memory")
        trained = InThread(lambda: train(client, 1, is_late=is_late))
        killed.dies()
        killed.start()
        assert trained.result() == train(plain, 1)
        assert client.read("item", IDS).tobytes() == plain.read("item", IDS).tobytes()
        wait_until(lambda: memory_of(client) is not None, "shared memory")


@pytest.mark.multiprocess
def test_a_server_that_is_stopped_applies_what_timed_out_once(connect, killed):
    plain = connect("tcp")
    killed.start()
    given = {"timeout_s": DEADLINE_S, "transport": "shm"}
    with closing(EmbeddingClient.connect([killed.address], **given)) as client:
        client.add_tables([SPEC])
        train(client, 0)
        train(plain, 0)
        memory, tables = memory_of(client), [("item", client.split(IDS))]
        grads = np.ones((len(IDS), SPEC.dim), dtype=np.float32)
        os.kill(killed.process.pid, signal.SIGSTOP)
        client.timeout_s = 0.1
        (late,) = client.push(tables, [grads], BatchNumber(1, 1))
        with pytest.raises(RequestTimeoutError):
            late.frames()
        (place,) = [opened[2] for opened in memory._open.values()]
        grads[:] = 7  # the caller's memory is its own again
        pulls = [client.begin_pull(tables, None, Precision.FP32, None) for _ in "abc"]
        assert place.begin not in [o[2].begin for o in list(memory._open.values())[1:]]
        del pulls
        os.kill(killed.process.pid, signal.SIGCONT)
        client.timeout_s = DEADLINE_S
        wait_until(lambda: not memory._open, "the late replies")
        ones = np.ones_like(grads)
        plain.outcome(
            plain.push([("item", plain.split(IDS))], [ones], BatchNumber(1, 1))
        )
        assert client.read("item", IDS).tobytes() == plain.read("item", IDS).tobytes()
