"""An embedding server that takes requests and does not answer, as one that hangs."""

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from persia_torchrec import timeouts
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.serving.batching import Batching
from persia_torchrec.serving.grpc_server import GrpcServer
from persia_torchrec.serving.http_server import HttpConfig, PredictionServer
from persia_torchrec.serving.models import Models
from tests.support.faults import Relay
from tests.support.inference_client import ask, call
from tests.support.item_model import INPUTS, version_of
from tests.support.processes import wait_until
from tests.support.servers import DEADLINE_S

PROBES = ("/readyz", "/v2/health/ready", "/v2/models/model/ready", "/health")


@pytest.fixture
def serve(servers, monkeypatch):
    """Return what starts HTTP and gRPC of a model, and the way to its embeddings."""
    monkeypatch.setattr(timeouts, "MODEL_READY_S", 0.05)
    with contextlib.ExitStack() as stack:

        def start(lookup_timeout_s, default_answer=None, batching=None, **settings):
            relay = Relay(servers.start(1)[0].address)
            stack.callback(relay.close)
            client = EmbeddingClient.connect(
                [relay.address], timeout_s=DEADLINE_S, transport="tcp"
            )
            stack.callback(client.close)
            models = Models()
            stack.callback(models.close)
            version = version_of(client, 1.5, batching=batching)
            version.predictor.reader.set_lookup_timeout(lookup_timeout_s)
            models.add("model", default_answer=default_answer).add(version)
            config = HttpConfig(grpc_port=0, **settings)
            http, rpc = PredictionServer(models, config), GrpcServer(models, config)
            stack.callback(http.close)
            stack.callback(rpc.close)
            stack.callback(relay.is_open.set)
            return (http, rpc), relay

        yield start


def predicted(server):
    """Return the status of a prediction, and its number or its error."""
    status, _, body = ask(server, "/v2/models/model/infer", {"inputs": INPUTS})
    answer = json.loads(body)
    return status, answer["outputs"][0]["data"][0] if status == 200 else answer["error"]


def metric(server, name):
    """Return the value of a metric, 0 if there is none."""
    lines = ask(server, "/metrics")[2].decode().splitlines()
    return sum(float(one.rpartition(" ")[2]) for one in lines if one.startswith(name))


def test_no_probe_waits_for_embeddings_that_do_not_answer(serve):
    server, relay = serve(lookup_timeout_s=DEADLINE_S)
    assert predicted(server) == (200, 3.0)
    relay.is_open.clear()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(predicted, server)
        for path in PROBES:
            wait_until(lambda path=path: ask(server, path)[0] == 503, f"{path} is 503")
        assert not call(server, "ServerReady").ready
        assert not call(server, "ModelReady", name="model").ready
        assert call(server, "ServerLive").live
        assert ask(server, "/healthz")[0] == 200
        assert metric(server, "persia_serving_in_progress") == 1
        assert not waiting.done()  # none of them has taken as long as a lookup
        relay.is_open.set()
        assert waiting.result() == (200, 3.0)
    wait_until(lambda: ask(server, "/readyz")[0] == 200, "it is ready")


@pytest.mark.parametrize("batching", [None, Batching(0.0, 100, 0.2)])
def test_embeddings_that_hang_turn_into_the_default_answer_at_once(serve, batching):
    server, relay = serve(0.2, 0.25, batching)
    assert predicted(server) == (200, 3.0)
    relay.is_open.clear()
    answers = [predicted(server) for _ in range(20)]
    assert answers == [(200, 0.25)] * 20
    assert metric(server, "persia_serving_degraded_samples_total") == 20
    num_not_asked = metric(server, "persia_serving_short_circuited_requests_total")
    assert 0 < num_not_asked <= 17  # all but three and the trials
    relay.is_open.set()
    wait_until(lambda: predicted(server) == (200, 3.0), "a trial is answered")
    assert predicted(server) == (200, 3.0)
