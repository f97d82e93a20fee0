"""Limits of the HTTP server."""

import gzip
import http.client
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections import Counter

import pytest
import torch
from torch import nn

from persia_torchrec import env
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.errors import ConfigError
from persia_torchrec.persia.predict_requests import DECODERS
from persia_torchrec.persia.slots import SlotsLookup
from persia_torchrec.persia.slots_reader import SlotsReader
from persia_torchrec.serving.http_server import HttpConfig, PredictionServer
from persia_torchrec.serving.models import Models, Version
from persia_torchrec.serving.predictor import DenseModel, Predictor
from persia_torchrec.table import TableSpec
from tests.support.local_job import batch_of
from tests.support.one_feature import FEATURE
from tests.support.processes import wait_until
from tests.support.servers import DEADLINE_S
from tests.support.serving_process import ask
from tests.support.threads import InThread

HEAD = b"POST /predict HTTP/1.0\r\nContent-Type: application/json\r\n"
KIND = {"Content-Type": "application/octet-stream"}
GZIP = {"Content-Encoding": "gzip"}
BODY = batch_of([1], [2, 3], requires_grad=False).to_bytes()
BOMB = gzip.compress(bytes(50 * len(BODY)))  # smaller than the body


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
        models = Models()
        models.add("model").add(Version(Predictor(reader, DenseModel(model, "model"))))
        started.append(
            (PredictionServer(models, HttpConfig(**settings), DECODERS), running)
        )
        return started[-1]

    yield start
    for server, _ in started:
        server.close()
        server.models.close()


def predict(server):
    """Return status and JSON of an answer to a batch."""
    return ask(server.address, "/predict", BODY)


def connect(server):
    host, _, port = server.address.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


def whole(body, version="1.0"):
    """Return a request with a batch as bytes."""
    head = HEAD.replace(b"json", b"octet-stream").replace(b"1.0", version.encode())
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def use(server, model):
    """Have a server predict with another model."""
    with server.models["model"].using() as version:
        version.predictor.use(DenseModel(model, "other"))


def ask_text(server, path):
    with urllib.request.urlopen(server.address + path, timeout=DEADLINE_S) as answer:
        return answer.read().decode()


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


def blocked(serve, num, **settings):
    """Return a server with requests in progress, and what ends them."""
    model = Model()
    model.may_end.clear()
    server, _ = serve(model, **settings)
    threads = [InThread(predict, server) for _ in range(num)]
    for _ in threads:
        assert model.begun.acquire(timeout=DEADLINE_S)

    def end():
        model.may_end.set()
        return [thread.result() for thread in threads]

    return server, end


def test_requests_above_the_limit_are_rejected(serve):
    server, end = blocked(serve, 2, max_requests=2)
    with connect(server) as connection:
        connection.sendall(whole(BODY))
        answer = received(connection)
    assert b"429 Too Many Requests" in answer
    assert b"retry-after: 1" in answer
    assert b"2 requests are in progress" in answer
    assert ask_text(server, "/healthz") == "ok"  # a probe is answered all the same
    assert [status for status, _ in end()] == [200, 200]
    assert predict(server)[0] == 200


def test_a_client_that_is_gone_holds_no_place_while_few_run_on(serve):
    model = Model()
    model.may_end.clear()
    server, _ = serve(model, max_requests=2)
    value_of = server.models.statistics.registry.get_sample_value

    def is_free():
        return value_of("persia_serving_in_progress") == 0

    for _ in range(4):
        with connect(server) as connection:
            connection.sendall(whole(BODY))
            assert model.begun.acquire(timeout=DEADLINE_S)
        wait_until(is_free, "its place is free")
    assert predict(server)[0] == 429  # four run
    model.may_end.set()
    wait_until(lambda: predict(server)[0] == 200, "none runs")


def test_a_pending_request_is_answered_before_the_end(serve):
    server, end = blocked(serve, 1)
    closing = InThread(server.close)
    assert end()[0][0] == 200
    closing.result()
    with pytest.raises(OSError, match="refused"):
        connect(server)


@pytest.mark.slow
def test_a_burst_is_answered_on_connections_that_are_kept(serve):
    server, _ = serve(Model())
    host, _, port = server.address.removeprefix("http://").partition(":")
    connections = [http.client.HTTPConnection(host, int(port)) for _ in range(200)]
    for _ in range(2):
        for connection in connections:
            connection.request("POST", "/predict", BODY, KIND)
        answers = [connection.getresponse() for connection in connections]
        statuses = Counter(answer.status for answer in answers if answer.read())
        assert set(statuses) <= {200, 429}
        assert statuses[200] >= 64
    for connection in connections:
        connection.close()


def test_a_body_that_stalls_times_out(serve):
    server, _ = serve(Model(), receive_timeout_s=0.2)
    with connect(server) as connection:
        connection.sendall(HEAD + b"Content-Length: 10\r\n\r\n{")
        assert b"408 Request Timeout" in received(connection)
    for part in (b"", HEAD):  # not even a whole head
        with connect(server) as connection:
            connection.sendall(part)
            assert received(connection) == b""
    assert predict(server)[0] == 200


def test_a_client_that_is_gone_fails_alone(serve):
    server, end = blocked(serve, 1)
    with connect(server) as connection:
        connection.sendall(whole(BODY))
        at_once = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
    with connect(server) as connection:  # in the middle of its body
        connection.sendall(HEAD + b"Content-Length: 10\r\n\r\n{")
    assert end()[0][0] == 200
    assert predict(server)[0] == 200


def test_a_bug_of_the_model_is_answered_and_logged(serve, caplog):
    server, _ = serve(Model())
    use(server, Failing())
    status, answer = predict(server)
    assert (status, answer) == (500, {"error": "ZeroDivisionError: of the model"})
    assert "a request failed" in caplog.text


def test_a_body_above_the_limit_is_rejected_and_the_connection_stays(serve):
    server, _ = serve(Model(), max_body_bytes=len(BODY))
    host, _, port = server.address.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port))
    chunks = iter([b"x" * 2**20] * 8)  # of no known length
    bodies = (bytes(2**26), KIND), (chunks, KIND), (BOMB, {**KIND, **GZIP})
    for body, headers in bodies:
        connection.request("POST", "/predict", body, headers)
        answer = connection.getresponse()
        assert answer.status == 413
        assert b"may have" in answer.read()
    connection.request("POST", "/predict", gzip.compress(BODY), {**KIND, **GZIP})
    assert connection.getresponse().status == 200
    connection.close()


def test_it_is_not_ready_without_its_embedding_servers(serve):
    server, running = serve(Model())
    running[0].stop()
    status, answer = predict(server)
    assert status == 503
    assert "embedding server 0" in answer["error"]
    wait_until(lambda: ask(server.address, "/health")[0] == 503, "it is not ready")
    _, health = ask(server.address, "/health")
    assert health["ready"] is False
    assert "embedding server 0" in health["error"]


def test_invalid_settings_are_rejected(serve):
    for name in (
        *("max_requests", "max_body_bytes"),
        *("max_samples", "receive_timeout_s"),
    ):
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


def test_the_access_log_has_no_control_characters(serve, caplog):
    server, _ = serve(Model(), access_log=True)
    with caplog.at_level("INFO", "persia_torchrec.serving.access"):
        ask(server.address, "/v2/models/a%1b%5b31mRED%9b%c2%9b%7f%e2%80%ae")
    (line,) = [r.getMessage() for r in caplog.records if "/v2/models" in r.getMessage()]
    assert r"/v2/models/a\x1b[31mRED" in line
    assert r"\x9b\x7f\u202e" in line
    assert line.isprintable()


def test_a_server_for_others_has_a_token_that_is_not_the_jobs(serve, monkeypatch):
    monkeypatch.delenv("PERSIA_HTTP_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="PERSIA_HTTP_TOKEN_FILE, or PERSIA_HTTP_TOK"):
        serve(Model(), host="0.0.0.0")
    monkeypatch.setenv("PERSIA_HTTP_TOKEN", env.job_token())
    with pytest.raises(ConfigError, match="must be another token than"):
        serve(Model())
