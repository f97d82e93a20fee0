"""Small requests that would take much memory or time, and faults that are a client's.

None is answered by a status of the server's, none leaves a traceback in the log, and
the server predicts afterwards.
"""

import contextlib
import gzip
import json
import tracemalloc

import grpc
import pytest

from persia_torchrec.checkpoint.signature import DenseInput, ModelSignature
from persia_torchrec.errors import BatchError, TooLargeError
from persia_torchrec.persia.predict_requests import DECODERS
from persia_torchrec.serving.grpc_server import GrpcServer
from persia_torchrec.serving.http_requests import require_few_values, require_shallow
from persia_torchrec.serving.http_server import HttpConfig, PredictionServer
from persia_torchrec.serving.inference_protocol import parse_request
from persia_torchrec.serving.models import Models
from tests.support.inference_client import ask, call
from tests.support.item_model import INPUTS, version_of
from tests.support.servers import Servers

SIGNATURE = ModelSignature(("item", "user"), (DenseInput("x", "float32", (0,)),), (1,))
MOST_BYTES = 2**20
GZIP = {"Content-Encoding": "gzip"}
INFER, LOAD = "/v2/models/model/infer", "/v2/repository/models/model/load"


@pytest.fixture(scope="module")
def server():
    """Return an HTTP and a gRPC server of one model."""
    with Servers() as servers:
        models = Models()
        models.add("model").add(version_of(servers.client(servers.start(1)), 1.5))
        config = HttpConfig(grpc_port=0)
        http = PredictionServer(models, config, DECODERS)
        rpc = GrpcServer(models, config)
        yield http, rpc
        rpc.close()
        http.close()
        models.close()


def inputs_of(shape):
    empty = {"datatype": "INT64", "shape": shape, "data": []}
    x = {"name": "x", "datatype": "FP32", "shape": [1, 0], "data": []}
    return {"inputs": [{"name": "item", **empty}, {"name": "user", **empty}, x]}


SHAPES = [
    *([2**26, 0], [2**31, 0], [2**40, 0], [2**62, 0], [2**62, 2**62, 0]),
    *([0, 2**62], [2**31, 2**31, 0, 1], [2**200, 0], [1] * 33, [1] * 65, [0] * 100),
    *([1] * 5000, [-1, 0], [0], [0, 0]),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape)[:20])
def test_a_shape_takes_no_memory_before_it_is_checked(shape):
    body = memoryview(json.dumps(inputs_of(shape)).encode())
    with contextlib.suppress(BatchError):  # of what is imported and made once
        parse_request(body, None, SIGNATURE)
    tracemalloc.start()
    try:
        with pytest.raises(BatchError, match="must have"):
            parse_request(body, None, SIGNATURE)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape)[:20])
def test_a_shape_that_does_not_fit_is_the_clients_fault(server, shape, caplog):
    one = {"name": "item", "datatype": "INT64", "shape": shape}
    is_batch = shape in ([2**26, 0], [2**31, 0])  # a valid shape of too many samples
    due = 413 if is_batch else 400
    assert ask(server, INFER, {"inputs": [{**one, "data": []}]})[0] == due
    if all(-(2**63) <= size < 2**63 for size in shape):
        for more in ({}, {"raw_input_contents": [b""]}):
            with pytest.raises(grpc.RpcError) as caught:
                call(server, "ModelInfer", model_name="model", inputs=[one], **more)
            code = "RESOURCE_EXHAUSTED" if is_batch else "INVALID_ARGUMENT"
            assert caught.value.code().name == code
    require_untroubled(server, caplog)


def require_untroubled(server, caplog):
    """Check that the server predicts, and that no traceback was logged."""
    assert ask(server, INFER, {"inputs": INPUTS})[0] == 200
    assert not [record for record in caplog.records if record.exc_info]


def of_lists(num):
    return (
        b'{"inputs":[{"name":"item","datatype":"INT64","shape":[1],"data":[%s[]]}]}'
        % (b"[]," * num)
    )


IDS = b'{"id_type_features": {"item": [%s[]]}}'
MANY = {
    "lists": (INFER, of_lists(300_000)),
    "numbers": (INFER, of_lists(0).replace(b"[]]", b"1," * 1_100_000 + b"1]")),
    "objects": (INFER, of_lists(0).replace(b"[[]]", b"[%s{}]" % (b"{}," * 300_000))),
    "parameters": (
        INFER,
        b'{"inputs": [], "parameters": {%s"":1}}' % (b'"":1,' * 2**21),
    ),
    "unknown": (INFER, b'{"inputs": [], "more": [%s1]}' % (b"1," * 2**21)),
    "lists of a batch": ("/predict", IDS % (b"[]," * 300_000)),
    "lists of a load": (LOAD, b'{"parameters": {"a": [%s[]]}}' % (b"[]," * 100_000)),
}


@pytest.mark.parametrize("name", MANY)
def test_json_of_many_values_is_rejected_unread(server, name, caplog):
    path, body = MANY[name]
    body = gzip.compress(body)
    assert len(body) < 2**16
    kind = {"Content-Type": "application/json"}
    status, _, answer = ask(server, path, body, **GZIP, **kind)
    assert (status, b"may have" in answer) == (413, True)
    require_untroubled(server, caplog)


def test_a_list_counts_as_four_numbers_and_a_key_as_eight():
    require_few_values(b"1," * (2**20 - 12) + b"[:")
    require_few_values(b'"%s"' % (b",[:" * 2**20))  # in a text it is none
    texts = b"1," * (2**20 - 11) + b"[:", b"[" * (2**18 + 1), b":" * (2**17 + 1)
    for text in (*texts, b" " * (2**25 + 1)):
        with pytest.raises(TooLargeError, match=r"1048576 values, where a list"):
            require_few_values(text)


@pytest.mark.parametrize(
    "text", ["[", '{"a":', '"' + "]" * 99 + '",[', r'"\"]",[', r'"\\",[']
)
@pytest.mark.parametrize("before", ["", "[]," * 500_000])
def test_lists_and_objects_are_nested_64_deep_at_most(text, before):
    few, many = (f"{before}{text * num}".encode() for num in (64, 65))
    require_shallow(few)
    with pytest.raises(BatchError, match=r"64 deep\. Received: more\."):
        require_shallow(memoryview(many))


@pytest.mark.parametrize("text", ["[],", '"[",', r'"\"[",', r'"\\\"[",', "[1],"])
def test_what_stands_side_by_side_or_in_a_string_is_not_nested(text):
    require_shallow(b"[" * 63 + text.encode() * 500_000)
    require_shallow(b'["' + b"[" * 999)  # without an end


DEEP = "[" * 1000 + "]" * 1000


@pytest.mark.parametrize(
    ("path", "body", "due"),
    [
        (LOAD, '{"parameters": {"a": DEEP}}', 400),
        (LOAD, '{"parameters": {"version": [[[]]]}}', 400),
        (LOAD, '{"parameters": {"version": "9"}}', 400),  # it has no checkpoint
        ("/v2/repository/models/model/unload", '{"parameters": {"a": DEEP}}', 400),
        ("/v2/repository/models/model/unload", '{"parameters": {"version": "9"}}', 404),
        ("/v2/repository/index", '{"ready": DEEP}', 400),
        ("/v2/repository/index", '{"more": DEEP}', 400),
        (INFER, '{"inputs": DEEP}', 400),
        (INFER, '{"inputs": [], "more": DEEP}', 400),
        ("/predict", '{"id_type_features": {"item": DEEP}}', 400),
    ],
)
def test_json_that_is_deep_or_names_nothing_is_the_clients_fault(
    server, path, body, due, caplog
):
    kind = {"Content-Type": "application/json"}
    assert ask(server, path, body.replace("DEEP", DEEP).encode(), **kind)[0] == due
    require_untroubled(server, caplog)
