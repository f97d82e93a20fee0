"""The Open Inference Protocol over HTTP and gRPC."""

import contextlib
import gzip
import json
import re
import struct
import subprocess

import grpc
import numpy as np
import pytest
import torch
from torch import nn

from persia_torchrec.checkpoint.signature import DenseInput, ModelSignature
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.persia.batch import (
    IDTypeFeature,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia_torchrec.persia.predict_requests import DECODERS
from persia_torchrec.persia.slots import SlotsLookup
from persia_torchrec.persia.slots_reader import SlotsReader
from persia_torchrec.serving.grpc_server import GrpcServer
from persia_torchrec.serving.http_server import HttpConfig, PredictionServer
from persia_torchrec.serving.models import Models, Version
from persia_torchrec.serving.predictor import DenseModel, Predictor
from persia_torchrec.table import TableSpec
from tests.support.inference_client import ask, call
from tests.support.one_feature import FEATURE
from tests.support.repository import ROOT
from tests.support.servers import DEADLINE_S, Servers

pytestmark = pytest.mark.slow

SIGNATURE = ModelSignature(
    ("item",),
    (DenseInput("age", "float64", ()), DenseInput("x", "float32", (2,))),
    (1,),
)
IDS = [7, 2**64 - 1, 8]
LENGTHS = [2, 0, 1]
AGES, XS = [0.5, 1.5, 2.5], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


class Model(nn.Module):
    """Adds up all that it is given."""

    def forward(self, dense, embeddings):
        age, x = dense
        return (age + x.sum(1) + embeddings[0].sum(1)).unsqueeze(1)


@contextlib.contextmanager
def serving(name, model, signature):
    """Return an HTTP and a gRPC server, and the model, during a block."""
    with Servers() as servers:
        client = servers.client(servers.start(1))
        client.add_tables([TableSpec(name="item", dim=2, optimizer=SGD(1.0))])
        rows = np.float32([[1, 2], [10, 20], [100, 200]])
        client.write("item", np.array(IDS, dtype=np.uint64), rows)
        models = Models()
        reader = SlotsReader(SlotsLookup(client, [FEATURE]), torch.device("cpu"))
        dense = DenseModel(model, "/runs/checkpoint-00000003/m.pt", signature)
        models.add(name).add(Version(Predictor(reader, dense)))
        config = HttpConfig(grpc_port=0, max_samples=5)
        http = PredictionServer(models, config, DECODERS)
        rpc = GrpcServer(models, config)
        yield http, rpc, models
        rpc.close()
        http.close()
        models.close()


@pytest.fixture(scope="module")
def server():
    with serving("adult", Model(), SIGNATURE) as running:
        yield running


EXPECTED = [[0.5 + 3 + 33], [1.5 + 7], [2.5 + 11 + 300]]


def tensor(name, datatype, array, **parameters):
    value = {"name": name, "datatype": datatype, "shape": list(np.shape(array))}
    if parameters:
        return {**value, "parameters": parameters}
    return {**value, "data": array}


def request_of(*changed, **more):
    """Return a request; an input that is given takes the place of its name's."""
    inputs = [
        tensor("x", "FP32", XS),
        tensor("item", "UINT64", IDS),
        tensor("age", "FP64", AGES),
        tensor("item.lengths", "INT32", LENGTHS),
    ]
    by_name = {one["name"]: one for one in (*inputs, *changed)}
    return {"inputs": list(by_name.values()), **more}


def infer(server, value, **headers):
    status, _, body = ask(server, "/v2/models/adult/infer", value, **headers)
    return status, json.loads(body)


@pytest.mark.parametrize("version", ["", "/versions/3"])
def test_inputs_are_found_by_name(server, version):
    path = f"/v2/models/adult{version}/infer"
    _, _, body = ask(server, path, request_of(id="a request"))
    answer = json.loads(body)
    assert answer["id"] == "a request"
    assert (answer["model_name"], answer["model_version"]) == ("adult", "3")
    assert answer["parameters"] == {"checkpoint": "/runs/checkpoint-00000003"}
    (output,) = answer["outputs"]
    assert (output["name"], output["datatype"]) == ("predictions", "FP32")
    assert output["shape"] == [3, 1]
    assert output["data"] == [value for (value,) in EXPECTED]


def test_lengths_may_be_left_out_where_each_sample_has_as_many_ids(server):
    for ids in ([7, 7, 7], [[7], [7], [7]], [[7, 7]] * 3):
        request = request_of(tensor("item", "INT64", ids))
        request["inputs"] = [
            one for one in request["inputs"] if one["name"] != "item.lengths"
        ]
        _, answer = infer(server, request)
        num = np.size(ids) // 3
        due = [a + sum(x) + 3 * num for a, x in zip(AGES, XS, strict=True)]
        assert answer["outputs"][0]["data"] == due


def test_binary_tensors_are_equal_to_lists(server):
    arrays = {
        "x": np.array(XS, "<f4"),
        "item": np.array(IDS, "<u8"),
        "age": np.array(AGES, "<f8"),
        "item.lengths": np.array(LENGTHS, "<i4"),
    }
    plain = {one["name"]: one for one in request_of()["inputs"]}
    inputs = [
        tensor(name, plain[name]["datatype"], array, binary_data_size=array.nbytes)
        for name, array in arrays.items()
    ]
    value = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    head = json.dumps(value).encode()
    body = head + b"".join(array.tobytes() for array in arrays.values())
    length = {"Inference-Header-Content-Length": str(len(head))}
    status, headers, answer = ask(server, "/v2/models/adult/infer", body, **length)
    assert status == 200
    size = int(headers["Inference-Header-Content-Length"])
    (output,) = json.loads(answer[:size])["outputs"]
    assert output["parameters"] == {"binary_data_size": 12}
    np.testing.assert_array_equal(
        np.frombuffer(answer[size:], "<f4").reshape(output["shape"]), EXPECTED
    )
    status, answer = infer(server, body[:-1], **length)
    assert status == 400
    assert "binary_data_size within the 11 bytes" in answer["error"]
    status, answer = infer(server, body + b"x", **length)
    assert "must fill its body. Received: 1 more" in answer["error"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (tensor("item", "FP32", IDS), "must be INT64 or UINT64"),
        (tensor("item", "INT64", [2**64]), "must have numbers of INT64"),
        (tensor("item", "INT64", [1.5]), "must have numbers of INT64"),
        (tensor("item", "INT65", [1]), "one of the datatypes"),
        (tensor("item.lengths", "INT32", [1, 1, 0]), "sum up to the number of ids"),
        (tensor("item.lengths", "INT64", LENGTHS), "INT32 of shape"),
        (tensor("item.lengths", "INT32", [4, -1, 0]), "lengths must not be negative"),
        (tensor("age", "FP32", AGES), "'age' must be float64 of shape"),
        (tensor("x", "FP32", [[1.0]] * 3), r"of shape \('batch', 2\)"),
        (tensor("x", "FP32", XS[:2]), "must have its 3 samples"),
        (tensor("y", "FP32", AGES), "unknown.*'y'"),
        ({**tensor("age", "FP64", AGES), "shape": [4]}, "must have 4 numbers"),
        ({**tensor("age", "FP64", AGES), "shape": [-3]}, "1 to 32 sizes >= 0"),
        ({**tensor("age", "FP64", AGES), "shape": []}, "1 to 32 sizes >= 0"),
        ({**tensor("age", "FP64", AGES), "data": [[1], 2, 3]}, "lists of one depth"),
        ({**tensor("age", "FP64", AGES), "data": None}, "numbers of FP64"),
        (
            tensor("age", "FP64", AGES, shared_memory_region="region"),
            "shared memory is not supported",
        ),
    ],
)
def test_an_invalid_input_is_named(server, changed, message):
    status, answer = infer(server, request_of(changed))
    assert status == 400
    with pytest.raises(ValueError, match=message):
        raise ValueError(answer["error"])


def test_other_requests_that_cannot_be_answered_say_why(server):
    request = request_of()
    request["inputs"] = request["inputs"][1:]
    assert "none for ['x']" in infer(server, request)[1]["error"]
    twice = {"inputs": request_of()["inputs"] * 2}
    assert "occur once" in infer(server, twice)[1]["error"]
    named = request_of(outputs=[{"name": "score"}])
    assert "must be 'predictions'" in infer(server, named)[1]["error"]
    asked = [{"name": "predictions", "parameters": {"classification": 3}}]
    error = infer(server, request_of(outputs=asked))[1]["error"]
    assert "classification is not supported" in error
    error = infer(server, request_of(parameters={"sequence_id": 3}))[1]["error"]
    assert "sequences is not supported" in error
    status, _, body = ask(server, "/v2/models/adult/versions/4/infer", request_of())
    assert status == 404
    assert "it has ['3']. Received: 4" in json.loads(body)["error"]
    assert ask(server, "/v2/models/other")[0] == 404
    status, _, body = ask(server, "/v2/systemsharedmemory/status")
    assert (status, json.loads(body)["error"]) == (
        404,
        "shared memory is not supported.",
    )
    large = request_of(tensor("item.lengths", "INT32", [3, 0, 0, 0, 0, 0]))
    assert ask(server, "/v2/models/adult/infer", large)[0] == 400  # it is invalid first
    status, answer = infer(server, b"{}", **{"Inference-Header-Content-Length": "x"})
    assert "must be a number" in answer["error"]


def test_a_batch_above_the_limit_of_samples_is_rejected(server):
    request = request_of(
        tensor("x", "FP32", [[0, 0]] * 6),
        tensor("age", "FP64", [0.0] * 6),
        tensor("item.lengths", "INT32", [3, 0, 0, 0, 0, 0]),
    )
    status, answer = infer(server, request)
    assert status == 413
    assert "may have 5 samples. Received: 6" in answer["error"]


def test_server_and_model_describe_themselves(server):
    assert ask(server, "/v2/health/live")[0] == 200
    assert ask(server, "/v2/health/ready")[0] == 200
    assert ask(server, "/v2/models/adult/ready")[0] == 200
    about = json.loads(ask(server, "/v2")[2])
    assert "binary_tensor_data" in about["extensions"]
    model = json.loads(ask(server, "/v2/models/adult")[2])
    assert model["versions"] == ["3"]
    assert model["inputs"] == [
        {"name": "item", "datatype": "INT64", "shape": [-1]},
        {"name": "item.lengths", "datatype": "INT32", "shape": [-1]},
        {"name": "age", "datatype": "FP64", "shape": [-1]},
        {"name": "x", "datatype": "FP32", "shape": [-1, 2]},
    ]
    due = [{"name": "predictions", "datatype": "FP32", "shape": [-1, 1]}]
    assert model["outputs"] == due
    config = json.loads(ask(server, "/v2/models/adult/config")[2])
    assert config["max_batch_size"] == 0
    index = json.loads(ask(server, "/v2/repository/index", b"{}")[2])
    assert index == [{"name": "adult", "version": "3", "state": "READY", "reason": ""}]


def test_predictions_are_counted(server):
    def count():
        (stats,) = json.loads(ask(server, "/v2/models/adult/stats")[2])["model_stats"]
        return stats["execution_count"], stats["inference_count"]

    executed, predicted = count()
    infer(server, request_of())
    assert count() == (executed + 1, predicted + 3)
    metrics = ask(server, "/metrics")[2].decode()
    assert 'persia_serving_samples_total{model="adult",version="3"}' in metrics
    assert "persia_serving_predict_seconds_bucket" in metrics


def test_the_order_of_a_batch_of_persia_means_nothing(server):
    batch = PersiaBatch(
        [IDTypeFeature("item", [np.array([7], dtype=np.uint64)])],
        [
            NonIDTypeFeature(np.float32([[1, 2]]), "x"),
            NonIDTypeFeature(np.float64([0.5]), "age"),
        ],
        requires_grad=False,
    )
    kind = {"Content-Type": "application/octet-stream"}
    _, _, body = ask(server, "/predict", batch.to_bytes(), **kind)
    assert json.loads(body) == {"predictions": [6.5]}
    value = {
        "id_type_features": {"item": [[7]]},
        "non_id_type_features": {"x": [[1, 2]], "age": [0.5]},
    }
    kind = {"Content-Type": "application/json"}
    assert json.loads(ask(server, "/predict", value, **kind)[2])["predictions"] == [6.5]


def inputs_of_grpc(*, raw):
    values = [("item", "INT64", np.array(IDS, "u8").view("i8")), ("age", "FP64", AGES)]
    values += [("x", "FP32", np.float32(XS)), ("item.lengths", "INT32", LENGTHS)]
    types = {"INT64": "<i8", "FP64": "<f8", "FP32": "<f4", "INT32": "<i4"}
    fields = {"INT64": "int64", "FP64": "fp64", "FP32": "fp32", "INT32": "int"}
    inputs, contents = [], []
    for name, datatype, value in values:
        array = np.asarray(value, types[datatype])
        about = {"name": name, "datatype": datatype, "shape": array.shape}
        if raw:
            contents.append(array.tobytes())
        else:
            flat = array.reshape(-1).tolist()
            about["contents"] = {f"{fields[datatype]}_contents": flat}
        inputs.append(about)
    return {"inputs": inputs, "raw_input_contents": contents}


@pytest.mark.parametrize("raw", [True, False])
def test_grpc_gives_the_same_predictions(server, raw):
    answer = call(
        server, "ModelInfer", model_name="adult", id="7", **inputs_of_grpc(raw=raw)
    )
    assert (answer.model_version, answer.id) == ("3", "7")
    assert answer.outputs[0].shape == [3, 1]
    (content,) = answer.raw_output_contents
    assert struct.unpack("<3f", content) == tuple(value for (value,) in EXPECTED)
    checkpoint = answer.parameters["checkpoint"].string_param
    assert checkpoint == "/runs/checkpoint-00000003"


def test_grpc_describes_server_and_model(server):
    assert call(server, "ServerLive").live
    assert call(server, "ServerReady").ready
    assert call(server, "ModelReady", name="adult").ready
    assert "statistics" in call(server, "ServerMetadata").extensions
    model = call(server, "ModelMetadata", name="adult")
    assert [one.name for one in model.inputs] == ["item", "item.lengths", "age", "x"]
    config = call(server, "ModelConfig", name="adult").config
    assert config.input[0].data_type == 9  # TYPE_INT64
    assert call(server, "RepositoryIndex").models[0].state == "READY"
    stats = call(server, "ModelStatistics", name="adult").model_stats[0]
    assert stats.execution_count == stats.inference_stats.success.count > 0


def test_errors_of_grpc_have_the_statuses_of_the_protocol(server):
    inputs = inputs_of_grpc(raw=True)
    short = {**inputs, "inputs": inputs["inputs"][:3]}
    for method, fields, status in (
        ("ModelInfer", {"model_name": "other", **inputs}, "NOT_FOUND"),
        ("ModelInfer", {"model_name": "adult", **short}, "INVALID_ARGUMENT"),
        ("ModelMetadata", {"name": "adult", "version": "9"}, "NOT_FOUND"),
        ("RepositoryModelLoad", {"model_name": "adult"}, "INVALID_ARGUMENT"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call(server, method, **fields)
        assert caught.value.code().name == status


def test_the_health_of_the_protocol_is_json(server):
    for path, answer in (
        ("/v2/health/live", b'{"live":true}'),
        ("/v2/health/ready", b'{"ready":true}'),
        ("/healthz", b"ok"),
        ("/readyz", b"ok"),
        ("/v2/models", b'{"models":["adult"]}'),
    ):
        assert ask(server, path)[::2] == (200, answer)
    assert ask(server, "/v2/")[2] == ask(server, "/v2")[2]


def test_what_is_optional_may_be_null(server):
    nothing = {"id": None, "parameters": None, "outputs": None}
    request = request_of(**nothing)
    for one in request["inputs"]:
        one["parameters"] = None
    assert infer(server, request)[0] == 200
    request["outputs"] = [{"name": "predictions", "parameters": None}]
    assert infer(server, request)[0] == 200
    body = {"parameters": None, "ready": None}
    assert ask(server, "/v2/repository/index", body)[0] == 200


def test_ids_may_be_floats_that_no_client_has_rounded(server):
    floats = [7.0, 8.0, 2.0**53 - 1]
    for datatype in ("INT64", "UINT64"):
        assert infer(server, request_of(tensor("item", datatype, floats)))[0] == 200
    lengths = tensor("item.lengths", "INT32", [2.0, 0.0, 1.0])
    _, answer = infer(server, request_of(lengths))
    assert answer["outputs"][0]["data"] == [value for (value,) in EXPECTED]
    for number, why in (
        (2.0**53, "by gRPC"),
        (-1e300, "which the client has rounded"),
        (7.5, "Expected `int`, got `float`"),
    ):
        status, answer = infer(server, request_of(tensor("item", "INT64", [7, number])))
        assert (status, why in answer["error"]) == (400, True)


def test_gzip_may_have_several_members(server):
    body = json.dumps(request_of()).encode()
    parts = [gzip.compress(body[at : at + 100]) for at in range(0, len(body), 100)]
    for encoding in ("gzip", "x-gzip"):
        headers = {"Content-Encoding": encoding}
        assert infer(server, b"".join(parts), **headers)[0] == 200
        assert infer(server, b"".join(parts) + b"trailing", **headers)[0] == 200
        assert infer(server, b"".join(parts)[:-1], **headers)[0] == 400
    many = gzip.compress(b"") * 10_001
    status, answer = infer(server, many, **{"Content-Encoding": "gzip"})
    assert (status, "10000 members" in answer["error"]) == (413, True)


@pytest.mark.parametrize("name", ["priority", "timeout", "sequence_start"])
def test_what_a_request_asks_and_is_not_done_is_rejected_by_name(server, name):
    status, answer = infer(server, request_of(parameters={name: 1}))
    assert (status, f"'{name}' must not be given" in answer["error"]) == (400, True)
    assert infer(server, request_of(parameters={name: 0}))[0] == 200
    path = "/v2/repository/models/adult/load"
    for parameters in ({"config": "{}"}, {"file:1/model.pt": "YQ=="}):
        (changed,) = parameters
        status, _, body = ask(server, path, {"parameters": parameters})
        assert (status, f"'{changed}' must not be given".encode() in body) == (
            400,
            True,
        )
        fields = {key: {"string_param": text} for key, text in parameters.items()}
        with pytest.raises(grpc.RpcError, match=f"'{changed}' must not be given"):
            call(server, "RepositoryModelLoad", model_name="adult", parameters=fields)


def test_more_samples_than_a_batch_may_have_are_too_large(server):
    num = 65_536
    request = request_of(
        tensor("item", "INT64", [7] * num),
        tensor("item.lengths", "INT32", [1] * num),
    )
    assert infer(server, request)[0] == 413
    body = {"id_type_features": {"item": [[7]] * num}}
    kind = {"Content-Type": "application/json"}
    assert ask(server, "/predict", body, **kind)[0] == 413


CLIENTS = ROOT / "build/clients"


needs_clients = pytest.mark.skipif(
    not (CLIENTS / "installed").exists(), reason="`make unit` installs them"
)
needs_kserve = pytest.mark.skipif(
    not (CLIENTS / "kserve").exists(), reason="`make long` installs it"
)


class Ages(nn.Module):
    """Adds up an age and the embeddings of items."""

    def forward(self, dense, embeddings):
        return dense[0] + embeddings[0].sum(1, keepdim=True)


@needs_clients
def test_the_example_of_the_page_runs_as_it_stands():
    signature = ModelSignature(("item",), (DenseInput("age", "float32", (1,)),), (1,))
    page = (ROOT / "docs/serving.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.S)
    with serving("model", Ages(), signature) as (http, *_):
        address = http.address.removeprefix("http://")
        ran = subprocess.run(
            [CLIENTS / "bin/python", "-c", block.replace("localhost:8080", address)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "[[303.5]]\n"  # 0.5, ids 7 and 8


@needs_clients
def test_stock_clients_work_unchanged(server):
    http, rpc, _ = server
    inputs = [
        ("x", "FP32", "float32", [3, 2], XS),
        ("item", "UINT64", "uint64", [3], IDS),
        ("age", "FP64", "float64", [3], AGES),
        ("item.lengths", "INT32", "int32", [3], LENGTHS),
    ]
    addresses = http.address.removeprefix("http://"), f"127.0.0.1:{rpc.port}"
    script = ROOT / "tests/support/stock_client.py"
    python = CLIENTS / "bin/python"
    ran = subprocess.run(
        [python, script, *addresses, "adult", json.dumps(inputs)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    predicted = [[value for row in EXPECTED for value in row], "7"]
    assert found.pop("http as JSON") == found.pop("http as gzip") == predicted
    for answers in found.values():
        assert answers["live"]
        assert answers["ready"]
        assert answers["model ready"]
        assert answers["server"] == "persia_torchrec"
        names = [one["name"] for one in answers["inputs"]]
        assert names == ["item", "item.lengths", "age", "x"]
        assert answers["config"] == answers["stats"] == "adult"
        assert answers["index"] == [["adult", "3", "READY"]]
        assert answers["infer"] == predicted
        assert "The model must be 'adult'" in answers["unknown model"]
        assert "none for ['x']" in answers["no input"]
        assert "Only a model with its own servers" in answers["load"]
        assert answers["shared memory"]


@needs_clients
@pytest.mark.parametrize(
    "client",
    ["rest", "rpc", pytest.param("kserve", marks=[pytest.mark.long, needs_kserve])],
)
def test_clients_of_kserve_and_of_the_protocol_work_unchanged(server, client):
    http, rpc, _ = server
    ids = [7, 8, 7]  # below 2**53, as one client writes them as floats
    inputs = [
        ("x", "FP32", "float32", [3, 2], XS),
        ("item", "INT64", "int64", [3], ids),
        ("age", "FP64", "float64", [3], AGES),
        ("item.lengths", "INT32", "int32", [3], LENGTHS),
    ]
    where = http.address, f"127.0.0.1:{rpc.port}", "adult", json.dumps(inputs)
    script = ROOT / "tests/support/protocol_clients.py"
    ran = subprocess.run(
        [CLIENTS / "bin/python", script, client, *where],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    probes, predicted = json.loads(ran.stdout.splitlines()[-1])
    assert all(probes)
    due = [0.5 + 3 + 303, 1.5 + 7, 2.5 + 11 + 3]
    assert predicted == [due] * len(predicted)
