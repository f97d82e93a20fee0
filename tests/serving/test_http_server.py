"""Limits of the HTTP server."""

import json
import logging
import re
import socket
import struct
import threading
import urllib.error
import urllib.request

import pytest
import torch
from torch import nn

from persia_torchrec import env
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.errors import ConfigError
from persia_torchrec.persia.slots import SlotsLookup
from persia_torchrec.serving.embeddings import SlotsReader
from persia_torchrec.serving.http_server import HttpConfig, PredictionServer
from persia_torchrec.serving.predictor import Predictor
from persia_torchrec.table import TableSpec
from tests.support.local_job import batch_of
from tests.support.one_feature import FEATURE
from tests.support.servers import DEADLINE_S
from tests.support.serving_process import ask

HEAD = b"POST /predict HTTP/1.0\r\nContent-Type: application/json\r\n"
BODY = batch_of([1], [2, 3], requires_grad=False).to_bytes()


class Model(nn.Module):
    """Returns the prediction that a test sets, at the time it sets."""

    def __init__(self, output=None) -> None:
        super().__init__()
        self.output = torch.zeros(2, 1) if output is None else output
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()
        self.may_end.set()

    def forward(self, non_id_tensors, embeddings):
        self.begun.release()
        assert self.may_end.wait(DEADLINE_S)
        return self.output


class Failing(nn.Module):
    """Raises what no batch explains."""

    def forward(self, non_id_tensors, embeddings):
        raise ZeroDivisionError("of the model")


@pytest.fixture
def serve(servers):
    """Return what starts an HTTP server for a model."""
    started = []

    def start(model, **settings):
        running = servers.start(1)
        client = servers.client(running)
        client.add_tables([TableSpec(name="item", dim=2, optimizer=SGD(1.0))])
        reader = SlotsReader(SlotsLookup(client, [FEATURE]), torch.device("cpu"))
        predictor = Predictor(reader, model, "model")
        started.append((PredictionServer(predictor, HttpConfig(**settings)), running))
        return started[-1]

    yield start
    for server, _ in started:
        server.close()


def predict(server):
    """Return status and JSON of an answer to a batch."""
    return ask(server.address, "/predict", BODY)


def connect(server):
    host, _, port = server.address.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


def received(connection):
    """Return all that comes until the other side closes."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize(
    ("output", "predictions"),
    [
        (torch.tensor([[1.5], [2.5]]), [1.5, 2.5]),
        (torch.tensor([1.5, 2.5]), [1.5, 2.5]),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
    ],
)
def test_there_is_a_prediction_for_each_sample(serve, output, predictions):
    server, _ = serve(Model(output))
    assert predict(server) == (200, {"predictions": predictions})


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (torch.zeros(3, 1), "first dimension is that of the batch, 2"),
        ((torch.zeros(2), torch.zeros(2)), "must return a tensor"),
        (torch.tensor([[1.0], [torch.nan]]), "must return finite numbers"),
    ],
)
def test_an_invalid_prediction_is_an_error(serve, output, message):
    server, _ = serve(Model(output))
    status, answer = predict(server)
    assert status == 500
    assert message in answer["error"]


def test_requests_above_the_limit_are_rejected(serve):
    model = Model()
    model.may_end.clear()
    server, _ = serve(model, max_requests=2)
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(predict(server)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert model.begun.acquire(timeout=DEADLINE_S)
    with connect(server) as connection:
        answer = received(connection)
    assert b"503 Service Unavailable" in answer
    assert b"2 requests are in progress" in answer
    model.may_end.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [status for status, _ in answers] == [200, 200]
    assert predict(server)[0] == 200


def test_a_pending_request_is_answered_before_the_end(serve):
    model = Model()
    model.may_end.clear()
    server, _ = serve(model)
    answers = []
    asking = threading.Thread(target=lambda: answers.append(predict(server)))
    asking.start()
    assert model.begun.acquire(timeout=DEADLINE_S)
    closing = threading.Thread(target=server.close)
    closing.start()
    model.may_end.set()
    asking.join(DEADLINE_S)
    closing.join(DEADLINE_S)
    assert answers[0][0] == 200
    assert not closing.is_alive()
    with pytest.raises(OSError, match="refused"):
        connect(server)


def test_a_body_that_stalls_times_out(serve):
    server, _ = serve(Model(), receive_timeout_s=0.2)
    with connect(server) as connection:
        connection.sendall(HEAD + b"Content-Length: 10\r\n\r\n{")
        assert b"408 Request Timeout" in received(connection)
    with connect(server) as connection:  # not even a whole request
        connection.sendall(HEAD)
        assert received(connection) == b""
    assert predict(server)[0] == 200


def test_a_request_that_comes_too_slowly_times_out(serve):
    server, _ = serve(Model(), receive_timeout_s=1e-6)
    client, connection = socket.socketpair()
    with client, connection:  # all is there to be read, and the deadline passes
        client.sendall(HEAD + b"Content-Length: 2\r\n\r\n{}")
        server.finish_request(connection, ("a client", 0))
        connection.close()
        with pytest.raises(ConnectionResetError):  # it has read nothing
            received(client)


def test_a_body_must_be_whole(serve):
    server, _ = serve(Model())
    with connect(server) as connection:
        connection.sendall(HEAD + b"Content-Length: 10\r\n\r\n{")
        connection.shutdown(socket.SHUT_WR)
        answer = received(connection)
    assert b"400 Bad Request" in answer
    assert b"must have its 10 bytes. Received: 1." in answer


def test_a_client_that_is_gone_fails_alone(serve, caplog):
    caplog.set_level(logging.DEBUG, "persia_torchrec")
    model = Model()
    model.may_end.clear()
    server, _ = serve(model)
    with connect(server) as connection:
        head = HEAD.replace(b"json", b"octet-stream")
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        assert model.begun.acquire(timeout=DEADLINE_S)
        at_once = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
    model.may_end.set()
    assert predict(server)[0] == 200
    server.close()  # the answers are all given
    assert re.search("the connection of .* failed: .*(Broken|Reset)", caplog.text)


def test_a_client_that_is_rejected_may_be_gone(serve):
    server, _ = serve(Model(), max_requests=1)
    client, connection = socket.socketpair()
    client.close()
    with connection:
        assert server.verify_request(connection, ("a client", 0))
        assert not server.verify_request(connection, ("a client", 0))


def test_a_bug_of_the_model_is_answered_and_logged(serve, caplog):
    server, _ = serve(Model())
    server.predictor.use(Failing(), "failing")
    status, answer = predict(server)
    assert (status, answer) == (500, {"error": "ZeroDivisionError: of the model"})
    assert "a request failed" in caplog.text


@pytest.mark.parametrize("length", [b"", b"Content-Length: -1\r\n"])
def test_a_body_must_have_a_length(serve, length):
    server, _ = serve(Model())
    with connect(server) as connection:
        connection.sendall(HEAD + length + b"\r\n")
        answer = received(connection)
    assert b"400 Bad Request" in answer
    assert b"must have a Content-Length" in answer


def test_a_length_with_many_digits_is_too_large(serve):
    server, _ = serve(Model())
    with connect(server) as connection:
        length = b"Content-Length: " + b"0" * 20 + b"9" * 9
        connection.sendall(HEAD + length + b"\r\n\r\n")
        assert b"HTTP/1.0 413 " in received(connection)


def test_it_is_not_ready_without_its_embedding_servers(serve):
    server, running = serve(Model())
    running[0].stop()
    status, answer = predict(server)
    assert status == 503
    assert "embedding server 0" in answer["error"]
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{server.address}/health", timeout=DEADLINE_S)
    with caught.value as error:
        assert error.code == 503
        health = json.load(error)
    assert health["ready"] is False
    assert "embedding server 0" in health["error"]


def test_invalid_settings_are_rejected(serve):
    for name in ("max_requests", "max_body_bytes", "receive_timeout_s"):
        with pytest.raises(ConfigError, match=f"{name} must be > 0"):
            HttpConfig(**{name: 0})
    with pytest.raises(ConfigError, match="port must be in"):
        HttpConfig(port=65536)
    server, _ = serve(Model())
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=r"able to listen on 127\.0\.0\.1"):
        serve(Model(), port=port)


def test_only_a_client_with_the_token_is_answered(serve, monkeypatch):
    monkeypatch.setenv("PERSIA_HTTP_TOKEN", "a-token-of-clients")
    server, _ = serve(Model(), host="0.0.0.0")

    def ask(path, token=None):
        url = server.address.replace("0.0.0.0", "127.0.0.1") + path
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(url, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    assert ask("/healthz") == (200, b"ok")
    assert ask("/health", "a-token-of-clients")[0] == 200
    for token in (None, "another-token", "a-token-of-client"):
        status, answer = ask("/health", token)
        assert status == 401
        assert b"PERSIA_HTTP_TOKEN" in answer
        assert b"rows" not in answer


def test_a_server_for_others_has_a_token_that_is_not_the_jobs(serve, monkeypatch):
    monkeypatch.delenv("PERSIA_HTTP_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="PERSIA_HTTP_TOKEN_FILE, or PERSIA_HTTP_TOK"):
        serve(Model(), host="0.0.0.0")
    monkeypatch.setenv("PERSIA_HTTP_TOKEN", env.job_token())
    with pytest.raises(ConfigError, match="must be another token than"):
        serve(Model())
