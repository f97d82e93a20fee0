"""Connections that are idle, slow or broken off cost the other clients nothing."""

import contextlib
import http.client
import json
import select
import socket
import threading

import numpy as np
import pytest

from persia_torchrec import timeouts
from persia_torchrec.rpc.addresses import raise_descriptor_limit
from persia_torchrec.serving.batching import Batching
from persia_torchrec.serving.http_server import HttpConfig, PredictionServer
from persia_torchrec.serving.models import Models
from tests.support.item_model import INPUTS, version_of
from tests.support.servers import DEADLINE_S

pytestmark = pytest.mark.slow

NUM_CONNECTIONS, NUM_REQUESTS = 1000, 100
MANY, COLUMNS = 60_000, 40  # of an answer that no buffer of a socket holds
BODY = json.dumps({"inputs": INPUTS}).encode()
HEAD = b"POST /v2/models/model/infer HTTP/1.1\r\nHost: localhost\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture(params=[None, Batching(0.001, 64, DEADLINE_S)])
def server(request, servers):
    """Return a server that predicts for few at once, alone or together."""
    models = Models()
    client = servers.client(servers.start(1))
    models.add("model").add(version_of(client, 1.5, batching=request.param))
    wide = version_of(client, 1.5, num_columns=COLUMNS, batching=request.param)
    models.add("wide").add(wide)
    server = PredictionServer(models, HttpConfig(max_requests=4))
    yield server
    server.close()
    models.close()


@contextlib.contextmanager
def connections(server, num=NUM_CONNECTIONS):
    """Return connections, during a block."""
    raise_descriptor_limit()
    host, _, port = server.address.removeprefix("http://").partition(":")
    with contextlib.ExitStack() as stack:
        address = host, int(port)
        yield [
            stack.enter_context(socket.create_connection(address, DEADLINE_S))
            for _ in range(num)
        ]


def require_answer(connection):
    """Receive an answer, which must be the prediction."""
    received = b""
    while not received.endswith(b"[3.0]}]}"):
        received += connection.recv(65536)
        assert received.startswith(b"HTTP/1.1 200")


def require_all_answered(server):
    """Send requests one after the other; each must be answered with a prediction."""
    host, _, port = server.address.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=DEADLINE_S)
    for _ in range(NUM_REQUESTS):
        connection.request("POST", "/v2/models/model/infer", BODY)
        answer = connection.getresponse()
        value = json.loads(answer.read())
        assert answer.status == 200, value
        assert value["outputs"][0]["data"] == [3.0]
    connection.close()


@pytest.mark.slow
def test_a_thousand_open_connections_keep_no_request_waiting(server):
    with connections(server) as opened:
        for connection in opened[::2]:  # they have had an answer, and are kept
            connection.sendall(WHOLE)
            require_answer(connection)
        require_all_answered(server)
        for connection in opened[:10]:  # and are answered still
            connection.sendall(WHOLE)
            require_answer(connection)


@pytest.mark.slow
def test_half_sent_requests_take_no_place_of_others(server):
    with connections(server) as opened:
        for number, connection in enumerate(opened):
            connection.sendall(WHOLE[: len(WHOLE) * (number % 10) // 10])
        require_all_answered(server)
        for connection in opened[5::10][:4]:  # of these as many as may be in progress
            connection.sendall(WHOLE[len(WHOLE) // 2 :])
            require_answer(connection)


def test_slow_writers_take_no_place_of_others(server):
    ending = threading.Event()
    with connections(server, 50) as opened:
        for connection in opened:
            connection.sendall(WHOLE[: -len(BODY)])

        def write():
            for byte in BODY[:-1]:
                for connection in opened:
                    connection.sendall(bytes([byte]))
                if ending.is_set():
                    return

        writer = threading.Thread(target=write)
        writer.start()
        require_all_answered(server)
        ending.set()
        writer.join()


def ask_for_much(connection):
    """Send a request whose answer is long, and read the first bytes of that."""
    about = {"datatype": "INT64", "shape": [MANY]}
    size = {"parameters": {"binary_data_size": 8 * MANY}}
    inputs = [{"name": "item", **about, **size}]
    asked = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    head = json.dumps(asked).encode()
    body = head + np.full(MANY, 7, "<i8").tobytes()
    lengths = len(head), len(body)
    words = HEAD + b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n"
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sendall(words.replace(b"/model/", b"/wide/") % lengths + body)
    assert connection.recv(15) == b"HTTP/1.1 200 OK"


def test_slow_readers_take_no_place_of_others(server):
    with connections(server, 8) as opened:
        for connection in opened:
            ask_for_much(connection)
        require_all_answered(server)


@pytest.fixture
def short_keep_alive(monkeypatch):
    monkeypatch.setattr(timeouts, "HTTP_KEEP_ALIVE_S", 0.1)


@pytest.mark.usefixtures("short_keep_alive")
def test_an_answer_that_is_not_read_is_given_up(server):
    with connections(server, 1) as (connection,):
        ask_for_much(connection)
        poll = select.poll()
        poll.register(connection, 0)  # whether it is reset
        assert poll.poll(1000 * DEADLINE_S)
