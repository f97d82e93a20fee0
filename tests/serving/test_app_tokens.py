"""What a client may ask by the token that it sends, over HTTP and gRPC."""

import grpc
import pytest

from persia_torchrec.serving.grpc_server import GrpcServer
from persia_torchrec.serving.http_server import HttpConfig, PredictionServer
from persia_torchrec.serving.models import Models
from tests.support.inference_client import ask, call
from tests.support.item_model import INPUTS, version_of

CLIENT, ADMIN = "a-token-of-clients", "a-token-of-admins"
LOAD, UNLOAD = (f"/v2/repository/models/model/{what}" for what in ("load", "unload"))
GRPC_OF_STATUS = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED"}


@pytest.fixture
def serve(servers, monkeypatch):
    """Return what starts an HTTP and a gRPC server of a model, with these tokens."""
    started = []

    def start(client=CLIENT, admin=None):
        for name, token in (("", client), ("ADMIN_", admin)):
            monkeypatch.setenv(f"PERSIA_HTTP_{name}TOKEN", token or "")
        models, running = Models(), servers.client(servers.start(1))
        model = models.add("model", lambda number: version_of(running, 1.5))
        model.add(version_of(running, 1.5))
        config = HttpConfig(grpc_port=0)
        started.append((PredictionServer(models, config), GrpcServer(models, config)))
        return started[-1]

    yield start
    for http, rpc in started:
        rpc.close()
        http.close()
        http.models.close()


def sent(token):
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def require_rejected(server, token, due, text):
    """Check that a load and an unload are rejected, over HTTP and gRPC."""
    for path in (LOAD, UNLOAD):
        status, _, body = ask(server, path, {}, **sent(token))
        assert (status, text in body.decode()) == (due, True)
    metadata = [(name.lower(), value) for name, value in sent(token).items()]
    for method in ("RepositoryModelLoad", "RepositoryModelUnload"):
        with pytest.raises(grpc.RpcError, match=text) as caught:
            call(server, method, model_name="model", metadata=metadata)
        assert caught.value.code().name == GRPC_OF_STATUS[due]
    assert server[0].models["model"].versions() == ["1"]


def require_allowed(server, token):
    """Check that a client loads and unloads, over HTTP and gRPC."""
    metadata = [(name.lower(), value) for name, value in sent(token).items()]
    for _ in range(2):
        assert ask(server, UNLOAD, {}, **sent(token))[0] == 200
        assert server[0].models["model"].versions() == []
        call(server, "RepositoryModelLoad", model_name="model", metadata=metadata)
        assert server[0].models["model"].versions() == ["1"]
        call(server, "RepositoryModelUnload", model_name="model", metadata=metadata)
        assert ask(server, LOAD, {}, **sent(token))[0] == 200


def require_reads(server, token):
    """Check that a client predicts and reads, over HTTP and gRPC."""
    paths = ("/metrics", "/v2/models/stats", "/v2/models/model", "/health", "/v2")
    for path in paths:
        assert ask(server, path, **sent(token))[0] == 200
    assert ask(server, "/v2/repository/index", {}, **sent(token))[0] == 200
    infer = "/v2/models/model/infer"
    assert ask(server, infer, {"inputs": INPUTS}, **sent(token))[0] == 200
    metadata = [(name.lower(), value) for name, value in sent(token).items()]
    assert call(server, "RepositoryIndex", metadata=metadata).models
    assert call(server, "ModelStatistics", metadata=metadata).model_stats


def test_the_token_of_predictions_changes_no_model(serve):
    server = serve()
    require_reads(server, CLIENT)
    require_rejected(server, CLIENT, 403, "Set PERSIA_HTTP_ADMIN_TOKEN_FILE")
    require_rejected(server, None, 401, "PERSIA_HTTP_ADMIN_TOKEN")


def test_the_second_token_does_all(serve):
    server = serve(admin=ADMIN)
    require_reads(server, CLIENT)
    require_rejected(server, CLIENT, 403, "which predicts and reads")
    require_rejected(server, "another-token-of-clients", 401, "PERSIA_HTTP_ADMIN_TOKEN")
    require_reads(server, ADMIN)
    require_allowed(server, ADMIN)


def test_without_tokens_all_may_do_all(serve):
    server = serve(None)
    require_reads(server, None)
    require_allowed(server, None)


def test_the_second_token_alone_leaves_reading_open(serve):
    server = serve(None, ADMIN)
    require_reads(server, None)
    require_rejected(server, None, 401, "PERSIA_HTTP_ADMIN_TOKEN")
    require_allowed(server, ADMIN)
