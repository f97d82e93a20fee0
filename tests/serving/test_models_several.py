"""Several models of one inference server: each has its rows, versions and readiness."""

import json

import numpy as np
import pytest

from persia_torchrec.errors import ConfigError
from persia_torchrec.parsing.command_line import parse_flags
from persia_torchrec.persia.predict_requests import DECODERS
from persia_torchrec.serving.__main__ import ServingFlags
from persia_torchrec.serving.grpc_server import GrpcServer
from persia_torchrec.serving.http_server import HttpConfig, PredictionServer
from persia_torchrec.serving.models import Models
from tests.support.inference_client import ask, call
from tests.support.item_model import INPUTS, version_of
from tests.support.local_job import batch_of
from tests.support.processes import wait_until
from tests.support.servers import Servers

BYTES = {"Content-Type": "application/octet-stream"}
BODY = batch_of([7], requires_grad=False).to_bytes()


@pytest.fixture(scope="module")
def served():
    """Return HTTP and gRPC of models ``a`` and ``b``, and the embeddings of ``b``."""
    with Servers() as servers:
        models, running = Models(), {}

        def open_of(name, value):
            def open_version(number):
                server = servers.start(1)
                running[name] = server[0]
                client = servers.client(server)
                path = f"/runs/{name}/checkpoint-{number or 1}/m.pt"
                return version_of(client, value * int(number or 1), path)

            return open_version

        for name, value in (("a", 1.0), ("b", 10.0)):
            models.add(name, open_of(name, value)).load()
        config = HttpConfig(grpc_port=0)
        http = PredictionServer(models, config, DECODERS)
        rpc = GrpcServer(models, config)
        yield http, rpc, running
        rpc.close()
        http.close()
        models.close()


def predicted(served, name):
    """Return what is predicted for item 7, or the status of the error."""
    answer = ask(served, f"/v2/models/{name}/infer", {"inputs": INPUTS})
    if answer[0] != 200:
        return answer[0]
    return json.loads(answer[2])["outputs"][0]["data"][0]


def change(served, name, what, **parameters):
    path = f"/v2/repository/models/{name}/{what}"
    return ask(served, path, {"parameters": parameters})[0]


def index(served, **asked):
    answer = json.loads(ask(served, "/v2/repository/index", asked)[2])
    return [(one["name"], one["version"], one["state"]) for one in answer]


def test_each_is_found_by_its_name(served):
    assert (predicted(served, "a"), predicted(served, "b")) == (2.0, 20.0)
    assert predicted(served, "c") == 404
    assert "'a' or 'b'" in json.loads(ask(served, "/v2/models/c")[2])["error"]
    status, _, body = ask(served, "/predict", BODY, **BYTES)
    assert status == 400
    assert b"as /predict/MODEL does" in body
    assert json.loads(ask(served, "/predict/b", BODY, **BYTES)[2]) == {
        "predictions": [20.0]
    }
    tensor = {"name": "item", "datatype": "INT64", "shape": [1]}
    inputs = [{**tensor, "contents": {"int64_contents": [7]}}]
    answer = call(served, "ModelInfer", model_name="b", inputs=inputs)
    assert np.frombuffer(answer.raw_output_contents[0], "<f4").tolist() == [20.0]


def test_each_has_versions_of_its_own(served):
    assert change(served, "a", "load", version="3") == 200
    assert index(served) == [
        ("a", "1", "READY"),
        ("a", "3", "READY"),
        ("b", "1", "READY"),
    ]
    assert (predicted(served, "a"), predicted(served, "b")) == (6.0, 20.0)
    for version in ("1", "3"):
        assert change(served, "a", "unload", version=version) == 200
    assert (predicted(served, "a"), predicted(served, "b")) == (404, 20.0)
    assert index(served) == [("a", "", "UNAVAILABLE"), ("b", "1", "READY")]
    assert index(served, ready=True) == [("b", "1", "READY")]
    found = call(served, "RepositoryIndex").models
    assert [(one.name, one.reason) for one in found] == [("a", "unloaded"), ("b", "")]
    assert len(call(served, "RepositoryIndex", ready=True).models) == 1
    assert ask(served, "/readyz")[0] == 200  # an unloaded one is not waited for
    assert ask(served, "/v2/models/a/ready")[0] == 404
    assert change(served, "a", "load") == 200
    assert predicted(served, "a") == 2.0


def test_each_has_metrics_of_its_own(served):
    for name in ("a", "a", "b"):
        predicted(served, name)
    stats = json.loads(ask(served, "/v2/models/stats")[2])["model_stats"]
    assert [one["name"] for one in stats] == ["a", "b"]
    metrics = ask(served, "/metrics")[2].decode()
    for name in ("a", "b"):
        assert f'serving_samples_total{{model="{name}",version="1"}}' in metrics
        assert f'serving_ids_without_row{{model="{name}"}} ' in metrics


def test_one_whose_embeddings_are_away_is_not_ready_alone(served):
    running = served[2]["b"]
    running.stop()
    wait_until(
        lambda: ask(served, "/v2/models/b/ready")[0] == 503, "model b is not ready"
    )
    assert ask(served, "/v2/models/a/ready")[0] == 200
    assert call(served, "ModelReady", name="a").ready
    assert not call(served, "ModelReady", name="b").ready
    assert (predicted(served, "a"), predicted(served, "b")) == (2.0, 503)
    status, _, body = ask(served, "/readyz")
    assert status == 503
    assert json.loads(body)["error"].startswith("model b: ")
    health = json.loads(ask(served, "/health")[2])
    assert {name: one["ready"] for name, one in health["models"].items()} == {
        "a": True,
        "b": False,
    }
    assert change(served, "b", "unload") == 200
    wait_until(lambda: ask(served, "/readyz")[0] == 200, "the server is ready")


def test_the_flags_of_each_are_those_of_the_only_one(tmp_path):
    (tmp_path / "a").mkdir()
    config = tmp_path / "a/embedding_config.yml"
    config.touch()
    words = "--models", f"ranking={tmp_path}/a", "ads=s3://b/run=7"
    flags = parse_flags(
        ServingFlags, [*words, "--embedding-config", "other.yml"], prog="serving"
    )
    found = [(one.model_name, one.run, one.embedding_config) for one in flags.each()]
    assert found == [
        ("ranking", f"{tmp_path}/a", str(config)),
        ("ads", "s3://b/run=7", "other.yml"),
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "One of --checkpoint FOLDER and --models .* Received: neither"),
        ({"checkpoint": "c", "models": ("a=b",)}, "Received: both"),
        ({"models": ("a",)}, r"NAME=FOLDER each, .*Received: a\."),
        ({"models": ("a=b", "a=c")}, "different names"),
        ({"models": ("a/b=c",)}, "without '/'"),
        ({"models": ("a=b",), "workers": ("w:1",)}, "--workers cannot be combined"),
        (
            {"models": ("a=b",), "follow": "increments"},
            "--increments-dir cannot be combined",
        ),
    ],
)
def test_invalid_flags_are_rejected(settings, message):
    with pytest.raises(ConfigError, match=message):
        ServingFlags(**settings)
