import json
import struct
import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec import Constant
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.embedding.optim import OPTIMIZERS, SGD
from persia_torchrec.errors import ConfigError, RemoteError, WireError
from persia_torchrec.rpc.messages import TRAINING, Header, Kind, Precision, encode_json
from persia_torchrec.server.server import (
    UPDATE_QUEUE_BATCHES,
    EmbeddingServer,
    ServerConfig,
)
from persia_torchrec.table import TableSpec
from tests.server.stranger import GRADS, Stranger, one_segment
from tests.support.servers import DEADLINE_S, ids_of
from tests.support.sockets import raw_member

ITEM = TableSpec(name="item", dim=2, optimizer=SGD(1.0), initializer=Constant(0.0))
ROWS = np.array([[1, 2], [3, 4]], dtype=np.float32)

# With momentum, the order of the gradients shows in the weights.
MOMENTUM = TableSpec(
    name="item", dim=1, optimizer=SGD(1.0, momentum=0.5), initializer=Constant(0.0)
)


@pytest.fixture
def server(servers):
    """A server with a table of two rows, and a client of it."""
    running = servers.start()[0]
    running.client = servers.client([running])
    running.client.add_tables([ITEM])
    running.client.write("item", ids_of(5, 6), ROWS)
    return running


def is_untouched(server):
    counters = server.client.counters()[0]
    rows = server.client.read("item", ids_of(5, 6, 7))
    return counters["rows"] == 2 and rows.tolist() == [*ROWS.tolist(), [0, 0]]


@pytest.mark.parametrize(
    ("kind", "body", "error", "message"),
    [
        (Kind.LOOKUP, [], "FrameError", "must have 3 frames"),
        (Kind.LOOKUP, [b"", b"", b""], "FrameError", "must have 3 frames"),
        (Kind.LOOKUP, [b"x", b""], "FrameError", "multiple of 8 bytes"),
        (Kind.LOOKUP, one_segment(7, table=1), "ConfigError", "has 1 tables"),
        (Kind.LOOKUP, one_segment(7, table=-1), "ConfigError", "table number -1"),
        (Kind.LOOKUP, [one_segment(7)[0], b""], "FrameError", "as many ids as follow"),
        (Kind.UPDATE, [*one_segment(5, 6)], "FrameError", "must have 4 frames"),
        (
            Kind.UPDATE,
            [*one_segment(5, 6), GRADS[:-1]],
            "FrameError",
            r"4 numbers as FP32 take 16 bytes\. Received: 15",
        ),
        (Kind.UPDATE, [*one_segment(5, 6), GRADS + GRADS], "FrameError", "32 bytes"),
        (Kind.UPDATE, [*one_segment(5, table=9), GRADS], "ConfigError", "number 9"),
        (Kind.WRITE, [*one_segment(5, 6), GRADS[:8]], "FrameError", "Received: 8"),
        (Kind.READ, [*one_segment(5, table=2)], "ConfigError", "number 2"),
        (Kind.ADD_TABLES, [b"{"], "FrameError", "must be JSON"),
        (Kind.ADD_TABLES, [b"{}"], "FrameError", "must have the key 'tables'"),
        (Kind.ADD_TABLES, [b'{"tables": {}}'], "FrameError", "must be a list"),
        (Kind.ADD_TABLES, [b"[5]"], "FrameError", r"\[0\] must be a mapping"),
        (
            Kind.ADD_TABLES,
            [b'[{"name": "x"}]'],
            "ConfigError",
            "Not a table: .* 'optimizer'",
        ),
        (Kind.FORWARD, [b""], "FrameError", "no FORWARD message.*another role"),
        (Kind.REPLY, [b""], "FrameError", "no REPLY message"),
    ],
)
def test_an_invalid_request_is_rejected_and_changes_nothing(
    server, kind, body, error, message
):
    with Stranger(server.address) as stranger:
        header, answer = stranger.ask(Header(kind, 77, flags=TRAINING).encode(), *body)
    assert (header.kind, header.request) == (Kind.ERROR, 77)
    assert answer["kind"] == error
    with pytest.raises(RemoteError, match=message):
        raise RemoteError(answer["message"], server="", kind=error)
    assert is_untouched(server)
    assert server.client.counters()[0]["requests_refused"] == 1


def test_a_server_survives_a_setting_that_raises(server, monkeypatch, caplog):
    @dataclass(frozen=True)
    class Failing(SGD):
        kind = "failing"

        def initial_state(self, dim):
            raise ZeroDivisionError("a setting's own error")

    monkeypatch.setitem(OPTIMIZERS.classes, "failing", Failing)
    with pytest.raises(RemoteError, match="ZeroDivisionError: a setting's own error"):
        server.client.add_tables([replace(ITEM, name="user", optimizer=Failing(1.0))])
    assert "a request failed" in caplog.text
    assert is_untouched(server)


@pytest.mark.parametrize(
    ("offset", "value"), [(0, b"X"), (4, b"\1"), (6, b"\x63"), (40, b"\7")]
)
def test_a_header_that_is_not_ours_is_rejected(server, offset, value):
    frame = bytearray(Header(Kind.CLEAR, 77).encode())
    frame[offset : offset + 1] = value
    with Stranger(server.address) as stranger:
        header, answer = stranger.ask(frame, encode_json(None))
    assert header.kind is Kind.ERROR
    assert answer["kind"] == "FrameError"
    assert is_untouched(server)


def test_random_frames_are_rejected_and_the_server_survives(server):
    nonsense = st.binary(max_size=60).filter(lambda data: data[:4] != b"PTRC")
    headers = nonsense | st.builds(
        lambda kind, precision: Header(kind, precision=precision).encode(),
        st.sampled_from([Kind.UPDATE, Kind.WRITE]),
        st.sampled_from(Precision),
    )
    body = st.binary(max_size=40) | st.sampled_from(one_segment(5, 6))
    odd = st.binary(max_size=40).filter(lambda data: len(data) % 2)
    bodies = st.lists(body, max_size=2) | st.tuples(body, body, odd)

    with Stranger(server.address) as stranger:

        @given(headers, bodies)
        def is_rejected(header, frames):
            answer, _ = stranger.ask(header, *frames)
            assert answer.kind is Kind.ERROR

        is_rejected()
    assert is_untouched(server)


def test_a_peer_that_announces_more_than_2_gib_is_disconnected(server):
    long_frame = b"\2" + struct.pack(">Q", 2**31 + 1)
    with raw_member(("127.0.0.1", server.port), DEADLINE_S) as peer:
        peer.sendall(long_frame)
        while peer.recv(4096):
            pass  # until the server hangs up
    assert is_untouched(server)


class Backlog:
    """Requests that wait at a server's socket before it begins to serve."""

    def __init__(self):
        self.server = EmbeddingServer(ServerConfig(capacity_rows=10))
        self.thread = threading.Thread(target=self.server.serve)

    def __enter__(self):
        self.stranger = Stranger(self.server.address)
        tables = encode_json([MOMENTUM.to_json()])
        self.send(Header(Kind.ADD_TABLES), tables)
        self.send(Header(Kind.LOOKUP, flags=TRAINING), *one_segment(5))
        return self

    def __exit__(self, *_):
        self.server.stop()
        if not self.thread.is_alive():
            self.thread.start()
        self.thread.join(DEADLINE_S)
        self.stranger.socket.close(linger=0)

    def send(self, header, *frames):
        self.stranger.socket.send_multipart([header.encode(), *frames])

    def update(self, request, grad=0.0):
        ids = one_segment(5)
        self.send(Header(Kind.UPDATE, request), *ids, struct.pack("<f", grad))

    def answered(self, *requests):
        """Serve until all of some requests are answered; return all in their order."""
        self.thread.start()
        answered = []
        while not set(requests) <= set(answered):
            assert self.stranger.socket.poll(DEADLINE_S * 1000)
            header, *_ = self.stranger.socket.recv_multipart()
            header = Header.decode(header)
            assert header.kind is Kind.REPLY
            answered.append(header.request)
        return answered


def test_updates_are_applied_in_their_order_and_none_is_lost():
    with Backlog() as backlog:
        weight, buffer = 0.0, 0.0
        for request in range(1, 101):
            grad = float(request % 7)
            backlog.update(request, grad)
            buffer = 0.5 * buffer + grad
            weight -= buffer
        answered = backlog.answered(*range(1, 101))
        assert answered == [0, 0, *range(1, 101)]
        header = Header(Kind.READ).encode()
        _, [row] = backlog.stranger.ask(header, *one_segment(5))
        assert struct.unpack("<ff", row) == pytest.approx((weight, buffer), rel=1e-5)


def test_an_update_is_applied_before_more_is_read_when_the_queue_is_full():
    with Backlog() as backlog:
        for request in range(1, UPDATE_QUEUE_BATCHES + 1):
            backlog.update(request)
        for _ in range(5):
            backlog.send(Header(Kind.LOOKUP, 99), *one_segment(5))
        answered = backlog.answered(1, 99)
        assert answered.index(1) < answered.index(99)


def test_an_update_is_applied_while_lookups_keep_coming():
    with Backlog() as backlog:
        backlog.update(1)
        for _ in range(500):
            backlog.send(Header(Kind.LOOKUP, 99), *one_segment(5))
        assert len(backlog.answered(1)) < 30


def push_batches(client, num):
    split = client.split(ids_of(5, 6))
    numbers = [BatchNumber(1, batch) for batch in range(num)]
    return [client.push([("item", split)], [ROWS], number) for number in numbers]


def test_clearing_applies_and_acknowledges_earlier_updates(server):
    client = server.client
    pushes = push_batches(client, 20)
    client.clear()
    assert [client.outcome(push).num_missed for push in pushes] == [0] * 20
    assert client.counters()[0]["rows"] == 0


def test_a_stopping_server_applies_and_acknowledges_what_it_has_read(server):
    client = server.client
    pushes = push_batches(client, 3)
    client.shut_down_servers()
    server.join()
    assert [client.outcome(push).num_missed for push in pushes] == [0] * 3


def test_a_lookup_may_overtake_an_update_but_its_acknowledgement_does_not(server):
    client = server.client
    split = client.split(ids_of(5, 6))
    push = client.push([("item", split)], [ROWS[split.inverse]], BatchNumber(1, 1))
    assert client.outcome(push).num_missed == 0
    [rows] = client.pull([("item", split)])
    assert not rows.any()


def test_only_the_incarnation_that_is_meant_answers(server):
    with Stranger(server.address) as stranger:
        _, hello = stranger.ask(Header(Kind.HELLO).encode(), encode_json(None))
        right = json.loads(hello[0])["incarnation"]
        meant = Header(Kind.CLEAR, incarnation=right + 1).encode()
        header, answer = stranger.ask(meant, encode_json(None))
        assert answer["kind"] == "RestartedError"
        assert "restarted since the client connected" in answer["message"]
        assert is_untouched(server)
        meant = Header(Kind.CLEAR, incarnation=right).encode()
        header, _ = stranger.ask(meant, encode_json(None))
        assert header.kind is Kind.REPLY
    assert not is_untouched(server)


def test_a_server_counts_what_it_was_asked(server):
    client = server.client
    split = client.split(ids_of(5, 8))
    client.pull([("item", split)])
    client.pull([("item", split)], batch=BatchNumber(1, 1))
    client.outcome(client.push([("item", split)], [ROWS], BatchNumber(1, 1)))
    counters = client.counters()[0]
    assert {
        name: counters[name]
        for name in ("rows", "hits", "misses", "evictions", "gradients_missed")
    } == {"rows": 3, "hits": 2, "misses": 4, "evictions": 0, "gradients_missed": 0}
    assert counters["requests_lookup"] == 2
    assert counters["requests_update"] == counters["requests_write"] == 1
    assert counters["open_batches"] == 0
    assert counters["open_batches_max"] == 1


def test_a_batch_that_is_given_up_is_no_longer_open(server):
    client = server.client
    split = client.split(ids_of(5))
    for batch in range(3):
        client.pull([("item", split)], batch=BatchNumber(1, batch))
    assert client.counters()[0]["open_batches"] == 3
    client.outcome(client.push([], [], BatchNumber(1, 1)))
    assert client.counters()[0]["open_batches"] == 2
    assert is_untouched(server)


def test_streams_are_counted_apart(server):
    client = server.client
    split = client.split(ids_of(5))
    for stream in range(4):
        client.pull([("item", split)], batch=BatchNumber(stream, 1))
    assert client.counters()[0]["open_batches_max"] == 1


def test_a_port_that_is_taken_is_rejected(server):
    with pytest.raises(WireError, match=f"Cannot listen on 127.0.0.1:{server.port}"):
        EmbeddingServer(ServerConfig(port=server.port))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shard": 2, "num_shards": 2}, r"shard must be in \[0, 2\)\. Received: 2"),
        ({"shard": -1}, r"shard must be in \[0, 1\)\. Received: -1"),
        ({"port": 65536}, r"port must be in \[0, 65535\]\. Received: 65536"),
        ({"max_request_ids": 0}, r"max_request_ids must be >= 1\. .* 0"),
    ],
)
def test_settings_out_of_their_range_are_rejected(settings, message):
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**settings)


def test_a_capacity_out_of_its_range_is_rejected_before_anything_listens():
    with pytest.raises(ConfigError, match=r"capacity must be in \[1, "):
        EmbeddingServer(ServerConfig(capacity_rows=0))
