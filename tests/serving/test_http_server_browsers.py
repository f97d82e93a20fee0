"""Pages of other sites in a browser of the host, and what else names another host."""

import http.client
import json

import pytest

from persia_torchrec.persia.predict_requests import DECODERS
from persia_torchrec.serving.http_server import HttpConfig, PredictionServer
from persia_torchrec.serving.models import Models
from tests.support.item_model import INPUTS, version_of
from tests.support.servers import DEADLINE_S

TOKEN = "a-token-of-clients"
INFER, UNLOAD = "/v2/models/model/infer", "/v2/repository/models/model/unload"
PAGE = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}


@pytest.fixture
def serve(servers, monkeypatch):
    """Return what starts a server of a model."""
    monkeypatch.delenv("PERSIA_HTTP_TOKEN", raising=False)
    started = []

    def start(**settings):
        models = Models()
        models.add("model").add(version_of(servers.client(servers.start(1)), 1.5))
        started.append(PredictionServer(models, HttpConfig(**settings), DECODERS))
        return started[-1]

    yield start
    for server in started:
        server.close()
        server.models.close()


def ask(server, method, path, value=None, **headers):
    """Return status and text of the answer to a request with these headers alone."""
    port = int(server.address.rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    body = b"" if value is None else json.dumps(value).encode()
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, given in {**headers, "Content-Length": str(len(body))}.items():
        connection.putheader(name.replace("_", "-"), given)
    connection.endheaders(body)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def is_loaded(server):
    return server.models["model"].versions() == ["1"]


def test_a_page_cannot_unload_a_model_or_predict(serve):
    server = serve()
    for host in ("localhost", "127.0.0.1:8080"):
        for path, value in (
            (UNLOAD, {}),
            (INFER, {"inputs": INPUTS}),
            ("/predict", {}),
        ):
            status, text = ask(server, "POST", path, value, Host=host, **PAGE)
            assert status == 403
            assert "The header Origin must be" in text
    assert is_loaded(server)


def test_a_name_that_leads_to_the_loopback_reads_nothing(serve):
    server = serve()
    rebound = {"Host": "evil.example:18183", "Sec-Fetch-Site": "same-origin"}
    for path in ("/health", "/metrics", "/v2", "/v2/models/model", "/other"):
        status, text = ask(server, "GET", path, **rebound)
        assert status == 403
        assert "The header Host must be" in text
    for path in (INFER, UNLOAD):
        assert ask(server, "POST", path, {"inputs": INPUTS}, **rebound)[0] == 403
    assert is_loaded(server)
    for probe in ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"):
        assert ask(server, "GET", probe, **rebound)[0] == 200


def test_other_clients_work_as_before(serve):
    server = serve(allowed_hosts=("proxy.example",))
    for host in ("localhost:8080", "127.0.0.1", "proxy.example"):
        status, text = ask(server, "POST", INFER, {"inputs": INPUTS}, Host=host)
        assert (status, json.loads(text)["outputs"][0]["data"]) == (200, [3.0])
        assert ask(server, "GET", "/v2/models/model", Host=host)[0] == 200


def test_with_a_token_or_opened_the_host_is_not_looked_at(serve, monkeypatch):
    opened = serve(open_to="127.0.0.1")
    monkeypatch.setenv("PERSIA_HTTP_TOKEN", TOKEN)
    allowed = {"Authorization": f"Bearer {TOKEN}"}
    for server, more in ((opened, {}), (serve(), allowed)):
        headers = {"Host": "evil.example", **PAGE, **more}
        assert ask(server, "POST", INFER, {"inputs": INPUTS}, **headers)[0] == 200
