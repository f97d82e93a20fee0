"""What is measured of a request: all of it, its wait, and the event loop."""

import contextlib
import json

import pytest

from persia_torchrec.serving.batching import Batching
from persia_torchrec.serving.grpc_server import GrpcServer
from persia_torchrec.serving.http_server import HttpConfig, PredictionServer
from persia_torchrec.serving.models import Models
from tests.support.inference_client import ask, call
from tests.support.item_model import INPUTS, version_of
from tests.support.processes import wait_until

GRPC_INPUTS = [
    {
        **{key: INPUTS[0][key] for key in ("name", "datatype", "shape")},
        "contents": {"int64_contents": [7]},
    }
]


@pytest.fixture(params=["alone", "together"])
def server(servers, request):
    """Return HTTP and gRPC of a model, with and without batches of several requests."""
    with contextlib.ExitStack() as stack:
        models = Models()
        stack.callback(models.close)
        batching = Batching(0.0, 100) if request.param == "together" else None
        client = servers.client(servers.start(1))
        models.add("model").add(version_of(client, 1.5, batching=batching))
        config = HttpConfig(grpc_port=0)
        http, rpc = PredictionServer(models, config), GrpcServer(models, config)
        stack.callback(http.close)
        stack.callback(rpc.close)
        yield http, rpc


def test_a_whole_request_and_its_wait_are_measured(server):
    value_of = server[0].models.statistics.registry.get_sample_value

    def seconds(name, kind, **labels):
        return value_of(f"persia_serving_{name}_seconds_{kind}", labels) or 0.0

    for path in ("/healthz", "/readyz", "/metrics", "/v2/models/model"):
        assert ask(server, path)[0] == 200
    assert ask(server, "/v2/models/model/infer", {"inputs": []})[0] == 400
    for _ in range(2):
        assert ask(server, "/v2/models/model/infer", {"inputs": INPUTS})[0] == 200
    wait_until(lambda: seconds("request", "count", protocol="http") == 2, "2 of HTTP")
    of_model = {"model": "model"}
    num_queued = seconds("queue", "count", **of_model)
    assert num_queued >= 2  # the rejected one may have waited for a thread
    predicted = seconds("predict", "sum", **of_model, version="1")
    assert seconds("request", "sum", protocol="http") >= predicted > 0
    stats = json.loads(ask(server, "/v2/models/model/stats")[2])["model_stats"][0]
    queue = stats["inference_stats"]["queue"]
    assert queue["count"] == num_queued
    assert queue["ns"] > 0

    call(server, "ModelMetadata", name="model")
    call(server, "ModelInfer", model_name="model", inputs=GRPC_INPUTS)
    wait_until(lambda: seconds("request", "count", protocol="grpc") == 1, "1 of gRPC")
    wait_until(lambda: seconds("event_loop_delay", "count") > 0, "it is measured")
