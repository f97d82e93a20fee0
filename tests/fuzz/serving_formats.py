"""Requests for predictions that are fuzzed, as JSON, binary and of gRPC."""

import json
import random
import struct
from collections.abc import Callable

from persia_torchrec.checkpoint.signature import DenseInput, ModelSignature
from persia_torchrec.errors import BatchError
from persia_torchrec.serving.grpc_server import (
    MESSAGES,
    count_values,
    parse_message,
    read_tensors,
)
from persia_torchrec.serving.http_requests import require_few_values
from persia_torchrec.serving.inference_protocol import build_inputs, parse_request
from tests.fuzz.mutations import EXTREMES, change_json, flip, oversize
from tests.fuzz.running import Format

SIGNATURE = ModelSignature(
    ("item", "user"), (DenseInput("x", "float32", (2,)), DenseInput("e", "bool", (0,)))
)
_BINARY = {"binary_data_size": 16}
_SIZE = struct.Struct("<H")  # of the JSON, before it


def tensor(
    name: str, datatype: str, shape: list[int], **more: object
) -> dict[str, object]:
    return {"name": name, "datatype": datatype, "shape": shape, **more}


def infer_requests() -> Format:
    """A request as JSON, with tensors behind it; their sizes stand before it."""
    lengths = tensor("item.lengths", "INT32", [2], data=[2, 0])
    dense = [
        tensor("x", "FP32", [2, 2], data=[[0.5, 1.0], [0.0, 2.0]]),
        tensor("e", "BOOL", [2, 0], data=[[], []]),
    ]
    item = tensor("item", "UINT64", [2], data=[7, 2**64 - 1])
    plain = [item, lengths, tensor("user", "INT64", [2, 1], data=[[3], [4]]), *dense]
    binary = [
        tensor("item", "INT64", [2], parameters=_BINARY),
        tensor("user", "INT64", [2, 1, 1], parameters=_BINARY),
        *dense,
    ]
    seeds = [
        _sized({"inputs": plain, "id": "7", "outputs": [{"name": "predictions"}]}, b""),
        _sized(
            {"inputs": binary, "parameters": {"binary_data_output": True}}, bytes(32)
        ),
    ]

    def change(rng: random.Random, data: bytes) -> bytes:
        (size,) = _SIZE.unpack_from(data)
        text, rest = data[2 : 2 + size], data[2 + size :]
        if rng.random() < 0.5:
            value = json.loads(text)
            rng.choice(value["inputs"])["shape"] = any_shape(rng)
            return _sized(value, rest)
        text = change_json(rng, text)
        return _SIZE.pack(len(text) % 2**16) + text + rest

    def check(data: bytes) -> None:
        (size,) = _SIZE.unpack_from(data.ljust(2, b"\0"))
        require_few_values(data[2:])
        parse_request(memoryview(data)[2:], size, SIGNATURE)

    return Format(seeds, change, check)


def _sized(value: object, rest: bytes) -> bytes:
    text = json.dumps(value).encode()
    return _SIZE.pack(len(text)) + text + rest


def any_shape(rng: random.Random) -> list[int]:
    """Return a shape of sizes that are large, hidden by a 0, or many."""
    some = (0, 0, 1, 1, 2, 2**26, 2**31, *EXTREMES[:-1])
    return [rng.choice(some) for _ in range(rng.choice((0, 1, 2, 2, 3, 4, 40, 100)))]


def infer_messages() -> Format:
    """A message of gRPC: lists, raw bytes, parameters."""
    kind = MESSAGES["ModelInferRequest"]
    about = {"model_name": "m", "model_version": "1", "id": "7"}
    lists = [
        tensor("item", "INT64", [2, 1], contents={"int64_contents": [7, -1]}),
        tensor("user", "UINT64", [2], contents={"uint64_contents": [7, 2**63]}),
        tensor("x", "FP32", [2, 2], contents={"fp32_contents": [0.5] * 4}),
        tensor("e", "BOOL", [2, 0]),
    ]
    bare = [{k: v for k, v in one.items() if k != "contents"} for one in lists]
    raw = [bytes(16), bytes(16), bytes(16), b""]
    parameters = {"sequence_id": MESSAGES["InferParameter"](int64_param=0)}
    seeds = [
        kind(**about, inputs=lists, parameters=parameters).SerializeToString(),
        kind(**about, inputs=bare, raw_input_contents=raw).SerializeToString(),
    ]

    def change(rng: random.Random, data: bytes) -> bytes:
        request = kind.FromString(data)
        one = rng.choice(request.inputs)
        what = rng.random()
        if what < 0.4:
            one.shape[:] = [size % 2**63 for size in any_shape(rng)]
        elif what < 0.6:
            one.contents.int64_contents.extend([1] * rng.choice((1, 7, 1000)))
        elif what < 0.8:
            one.datatype = rng.choice(("INT32", "FP16", "BYTES", "", "BOOL"))
        else:
            part = rng.choice((flip, oversize))(rng, one.SerializeToString())
            size = bytes([len(part) & 127 | 128, len(part) >> 7 & 127])
            return data + b"\x2a" + size + part
        changed: bytes = request.SerializeToString()
        return changed

    def check(data: bytes) -> None:
        num = count_values(data)
        request = parse_message("ModelInfer", data)
        if num < len(request.inputs):
            raise AssertionError(f"{num} values of {len(request.inputs)} inputs")
        build_inputs(read_tensors(request), SIGNATURE)

    return Format(seeds, change, check)


def messages_of_others() -> Format:
    """A message of a method that is no prediction."""
    name = MESSAGES["RepositoryModelLoadRequest"]
    parameters = {"version": MESSAGES["ModelRepositoryParameter"](string_param="7")}
    seeds = [name(model_name="m", parameters=parameters).SerializeToString()]

    def check(data: bytes) -> None:
        request = parse_message("RepositoryModelLoad", data)
        if "version" not in request.parameters:
            raise BatchError("it has no version")

    return Format(seeds, lambda rng, data: oversize(rng, data), check)


SERVING_FORMATS: dict[str, Callable[[], Format]] = {
    "infer request": infer_requests,
    "infer message of gRPC": infer_messages,
    "other message of gRPC": messages_of_others,
}
"""By name, what makes a format."""
