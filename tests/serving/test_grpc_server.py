"""Clients of gRPC that send nothing, too much, or what is no message."""

import contextlib
import re
import socket
import threading
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from torch import nn

from persia_torchrec.serving import open_inference_pb2
from persia_torchrec.serving.grpc_server import MESSAGES, GrpcServer
from persia_torchrec.serving.http_server import HttpConfig
from persia_torchrec.serving.models import Models
from persia_torchrec.serving.predictor import DenseModel
from tests.support.http2 import PREFACE, frame, headers_of
from tests.support.item_model import Sum, version_of
from tests.support.processes import DEADLINE_S, wait_until

CHECK = "/grpc.health.v1.Health/Check"
SERVICE = "/inference.GRPCInferenceService/"
TOKEN = "a-token-of-clients"
ABOUT = {"name": "item", "datatype": "INT64"}
VALID = {**ABOUT, "shape": [1], "contents": {"int64_contents": [7]}}


@pytest.fixture
def serve(servers, monkeypatch):
    """Return what starts a server of a model."""
    monkeypatch.delenv("PERSIA_HTTP_TOKEN", raising=False)
    started = []

    def start(**settings):
        models = Models()
        models.add("model").add(version_of(servers.client(servers.start(1)), 1.5))
        server = GrpcServer(models, HttpConfig(grpc_port=0, **settings))
        started.append((server, models))
        return server, models

    yield start
    for server, models in started:
        server.close()
        server.close()
        models.close()


def test_the_generated_module_is_of_the_proto():
    """Each field of a message by name and number, in the order of the file."""
    text = Path(open_inference_pb2.__file__).with_name("open_inference.proto")
    parts = re.split(r"^message (\w+) ", text.read_text(), flags=re.MULTILINE)[1:]
    found = {
        name: re.findall(r"(\w+) = (\d+);", body)
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }
    described = open_inference_pb2.DESCRIPTOR.message_types_by_name
    assert found == {
        name: [(field.name, str(field.number)) for field in message.fields]
        for name, message in described.items()
    }


@contextlib.contextmanager
def connected(server):
    """Return a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", options) as channel:
        yield channel


def call(channel, method, data=b"", **settings):
    """Return the bytes that are answered to the bytes of a message."""
    path = method if method.startswith("/") else SERVICE + method
    return channel.unary_unary(path)(data, timeout=DEADLINE_S, **settings)


def code_of(channel, method, data, **settings):
    """Return the status of an error, and its text."""
    with pytest.raises(grpc.RpcError) as caught:
        call(channel, method, data, **settings)
    return caught.value.code().name, caught.value.details()


def infer_of(*inputs, **more):
    fields = {"model_name": "model", "inputs": list(inputs), **more}
    return MESSAGES["ModelInferRequest"](**fields).SerializeToString()


def predict(channel, **settings):
    """Return a prediction."""
    answer = call(channel, "ModelInfer", infer_of(VALID), **settings)
    (content,) = MESSAGES["ModelInferResponse"].FromString(answer).raw_output_contents
    return np.frombuffer(content, "<f4").item()


@contextlib.contextmanager
def silent(channel, method, num):
    """Return calls of a method whose message does not come, during a block."""
    ending = threading.Event()

    def nothing():
        ending.wait(DEADLINE_S)
        yield from ()

    path = method if method.startswith("/") else SERVICE + method
    ask = channel.stream_unary(path)
    try:
        yield [ask.future(nothing(), timeout=DEADLINE_S) for _ in range(num)]
    finally:
        ending.set()


def test_requests_whose_message_does_not_come_take_no_place_and_end(serve):
    server, _ = serve(max_requests=2, receive_timeout_s=1.0)
    with connected(server) as channel, connected(server) as other:
        for method, due in (("ServerLive", "OK"), ("ModelInfer", "CANCELLED")):
            with silent(channel, method, 90) as held:
                call(other, "ServerLive")
                call(other, "ServerReady")
                assert predict(other) == 3.0
                for one in held:
                    assert one.code().name == due
        assert predict(channel) == 3.0


def test_a_client_without_the_token_is_rejected_before_its_message(serve, monkeypatch):
    monkeypatch.setenv("PERSIA_HTTP_TOKEN", TOKEN)
    server, models = serve()
    allowed = {"metadata": [("authorization", f"Bearer {TOKEN}")]}
    with connected(server) as channel:
        for method in ("ModelInfer", "ModelMetadata", "RepositoryModelUnload"):
            with silent(channel, method, 3) as held:  # and none is waited for
                for one in held:
                    assert one.code() is grpc.StatusCode.UNAUTHENTICATED
        assert call(channel, "ServerLive")
        assert predict(channel, **allowed) == 3.0
    text = models.statistics.exposition().decode()
    assert 'requests_total{protocol="grpc",status="UNAUTHENTICATED"} 9.0' in text


@pytest.mark.parametrize(
    "path", [b"/inference.GRPCInferenceService/\xff", b"/\xff\xfe"]
)
def test_a_method_whose_name_is_no_text_ends_nothing(serve, path):
    server, _ = serve()
    seed = PREFACE + headers_of("ServerLive") + frame(0, 1, 1, bytes(5))
    name = b"/inference.GRPCInferenceService/ServerLive"
    assert name in seed
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as one:
        one.sendall(seed.replace(name, path.ljust(len(name), b"\xff")))
        assert one.recv(1)
    with connected(server) as channel:
        assert predict(channel) == 3.0


class Waiting(nn.Module):
    """Predicts once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()

    def forward(self, non_id_tensors, embeddings):
        self.begun.release()
        assert self.may_end.wait(DEADLINE_S)
        return Sum()(non_id_tensors, embeddings)


def wait_in(models):
    """Have the model of a server wait, and return what ends that."""
    waiting = Waiting()
    with models["model"].using() as version:
        signature = version.predictor.model.signature
        version.predictor.use(DenseModel(waiting, "m.pt", signature))
    return waiting


def health_of(channel, service):
    """Return the status of gRPC's health check; None if the service is unknown."""
    request = MESSAGES["CheckRequest"](service=service).SerializeToString()
    with contextlib.suppress(grpc.RpcError):
        answer = call(channel, CHECK, request)
        return MESSAGES["CheckResponse"].FromString(answer).status
    return None


def test_probes_are_answered_while_all_places_are_taken(serve):
    server, models = serve(max_requests=2)
    waiting = wait_in(models)
    with connected(server) as channel:
        ask = channel.unary_unary(SERVICE + "ModelInfer")
        asked = [ask.future(infer_of(VALID), timeout=DEADLINE_S) for _ in range(2)]
        for _ in asked:
            assert waiting.begun.acquire(timeout=DEADLINE_S)
        code, text = code_of(channel, "ModelInfer", infer_of(VALID))
        assert (code, "2 requests are in progress" in text) == (
            "RESOURCE_EXHAUSTED",
            True,
        )
        call(channel, "ServerLive")
        call(channel, "ServerReady")
        name = MESSAGES["ModelReadyRequest"](name="model").SerializeToString()
        call(channel, "ModelReady", name)
        call(channel, "ServerMetadata")
        for service, due in (("", 1), ("liveness", 1), ("inference", None)):
            assert health_of(channel, service) == due
        waiting.may_end.set()
        for one in asked:
            assert one.result()


def test_what_a_client_gives_up_holds_no_place_while_few_run_on(serve):
    server, models = serve(max_requests=2)
    waiting = wait_in(models)
    value_of = models.statistics.registry.get_sample_value

    def num_in_progress():
        return value_of("persia_serving_in_progress")

    with connected(server) as channel:
        ask = channel.unary_unary(SERVICE + "ModelInfer")
        for num in (1, 2, 3, 4):  # the last two after the first two were given up
            one = ask.future(infer_of(VALID), timeout=DEADLINE_S)
            assert waiting.begun.acquire(timeout=DEADLINE_S)
            assert num_in_progress() == 1
            one.cancel()
            wait_until(lambda: num_in_progress() == 0, f"place {num} is free")
        code, _ = code_of(channel, "ModelInfer", infer_of(VALID))
        assert code == "RESOURCE_EXHAUSTED"  # four run
        waiting.may_end.set()

        def is_free():
            with contextlib.suppress(grpc.RpcError):
                return predict(channel) == 3.0
            return False

        wait_until(is_free, "none runs")


def test_the_health_check_of_grpc_is_open_and_says_what_is_ready(serve, monkeypatch):
    monkeypatch.setenv("PERSIA_HTTP_TOKEN", TOKEN)
    server, models = serve()
    with connected(server) as channel, connected(server) as other:
        services = "", "readiness", "inference.GRPCInferenceService", "liveness"
        assert [health_of(channel, name) for name in services] == [1, 1, 1, 1]
        unknown = MESSAGES["CheckRequest"](service="no such").SerializeToString()
        assert code_of(channel, CHECK, unknown)[0] == "NOT_FOUND"
        with silent(other, CHECK, 8):
            wait_until(lambda: health_of(channel, "") == 1, "it is answered")
        models["model"].unload()
        assert [health_of(channel, name) for name in services] == [2, 2, 2, 1]


INPUT, CONTENTS = b"\x2a", b"\x2a"  # fields 5 of a request and of an input


def sized(tag, data):
    size = len(data)
    digits = []
    while size > 127:
        digits.append(size & 127 | 128)
        size >>= 7
    return tag + bytes([*digits, size]) + data


NUMBERS = sized(b"\x1a", bytes(2_000_000))  # field 3 of contents
FLOATS = sized(b"\x32", bytes(4 * 1_100_000))  # field 6
LARGE = {
    "numbers": sized(INPUT, sized(CONTENTS, NUMBERS)),
    "numbers of one byte a field": sized(INPUT, sized(CONTENTS, b"\x18\x01" * 200_000)),
    "floats": sized(INPUT, sized(CONTENTS, FLOATS)),
    "sizes of a shape": sized(INPUT, sized(b"\x1a", bytes(2_000_000))),
    "empty inputs": (INPUT + b"\0") * 300_000,
    "empty outputs": b"\x32\0" * 300_000,
    "empty parameters": b"\x22\0" * 300_000,
    "empty raw bytes": b"\x3a\0" * 300_000,
    "contents again and again": sized(INPUT, (CONTENTS + b"\0") * 300_000),
    "unknown fields": b"\xf8\x07\x01" * 300_000,
}


@pytest.mark.parametrize("name", LARGE)
def test_a_message_of_many_values_is_rejected_unread(serve, name, caplog):
    server, _ = serve()
    with connected(server) as channel:
        code, text = code_of(
            channel, "ModelInfer", LARGE[name], compression=grpc.Compression.Gzip
        )
        assert (code, "values beside raw_input_contents" in text) == (
            "RESOURCE_EXHAUSTED",
            True,
        )
        assert predict(channel) == 3.0
    assert not [record for record in caplog.records if record.exc_info]


def test_a_large_message_within_the_limits_is_predicted(serve):
    server, _ = serve()
    ids = np.full((60_000, 10), 7)
    fields = {**ABOUT, "shape": ids.shape}
    contents = {"int64_contents": ids.ravel().tolist()}
    with connected(server) as channel:
        for data in (
            infer_of({**fields, "contents": contents}),
            infer_of(fields, raw_input_contents=[ids.astype("<i8").tobytes()]),
        ):
            assert len(data) > 2**19
            answer = MESSAGES["ModelInferResponse"].FromString(
                call(channel, "ModelInfer", data)
            )
            output = np.frombuffer(answer.raw_output_contents[0], "<f4")
            assert (len(output), set(output)) == (60_000, {30.0})


@pytest.mark.parametrize(
    ("data", "due"),
    [
        (b"\xff" * 20, "INVALID_ARGUMENT"),
        (b"\xff" * 300_000, "INVALID_ARGUMENT"),
        (b"\x0a\xff", "INVALID_ARGUMENT"),
        (infer_of(VALID)[:-3], "INVALID_ARGUMENT"),
        (sized(b"\x0a", b"\xff" * 300_000), "INVALID_ARGUMENT"),  # not UTF-8
        (bytes(2**26 + 1), "RESOURCE_EXHAUSTED"),
    ],
    ids=range(6),
)
def test_what_is_no_message_is_the_clients_fault(serve, data, due, caplog):
    server, _ = serve()
    with connected(server) as channel:
        assert code_of(channel, "ModelInfer", data)[0] == due
        assert code_of(channel, "RepositoryModelLoad", bytes(2**18 + 1))[0] == (
            "RESOURCE_EXHAUSTED"
        )
        ask = channel.stream_unary(SERVICE + "ModelInfer")
        with pytest.raises(grpc.RpcError, match="must have a message"):
            ask(iter(()), timeout=DEADLINE_S)
        assert predict(channel) == 3.0
    assert not [record for record in caplog.records if record.exc_info]


def test_a_model_may_have_a_client_of_the_protocol_in_the_same_process():
    """Messages of one name are an error of protobuf, which has one pool a process."""
    other = descriptor_pb2.FileDescriptorProto(
        name="grpc_service.proto", package="inference", syntax="proto3"
    )
    for name in MESSAGES:
        other.message_type.add(name=name)
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(other.SerializeToString())
    assert pool.FindMessageTypeByName("inference.ModelInferRequest")
