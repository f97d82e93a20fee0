"""What is sent to an inference server: requests of HTTP, frames of gRPC."""

import gzip
import json
import random

from persia_torchrec import env
from persia_torchrec.persia.batch import PersiaBatch
from persia_torchrec.serving.grpc_server import MESSAGES
from tests.fuzz.mutations import change_json, flip, oversize
from tests.fuzz.serving_formats import any_shape
from tests.support.http2 import PREFACE, frame, headers_of
from tests.support.local_job import batch_of

_INPUT = {"name": "item", "datatype": "INT64", "shape": [2], "data": [1, 2]}
_PLACES = (
    "localhost:80",
    *("evil.example", "127.0.0.1.evil.example", "[", "", "a" * 9000, "[::1]", "\x80"),
)
_HEADERS = [
    *(f"Host: {host}" for host in _PLACES),
    *(f"Origin: http://{host}" for host in (*_PLACES, "null")),
    *(f"Sec-Fetch-Site: {site}" for site in ("cross-site", "same-origin", "")),
    *(f"Content-Encoding: {how}" for how in ("gzip", "deflate", "x-gzip", "identity")),
    *(f"Inference-Header-Content-Length: {n}" for n in (0, 7, -1, 2**64, "9" * 5000)),
    *(f"Content-Length: {n}" for n in (0, 1, 2**31, 2**63, -1, "x")),
    *("Transfer-Encoding: chunked", "Expect: 100-continue", "Connection: upgrade"),
    *("Authorization: Bearer", "Authorization: \xff", "Content-Type: application/json"),
]


def http_requests() -> list[bytes]:
    """Return what clients and browsers send."""
    batch = PersiaBatch(batch_of([1], [2]).id_type_features, requires_grad=False)
    text = json.dumps({"id_type_features": {"item": [[1], [2, 3]]}}).encode()
    asked = json.dumps({"inputs": [_INPUT]}).encode()
    load = json.dumps({"parameters": {"version": "7", "a": [[[[[]]]]]}}).encode()
    page = "Host: localhost", "Origin: http://localhost", "Sec-Fetch-Site: same-origin"
    infer = "/v2/models/zeros/infer"
    members = gzip.compress(asked[:9]) + gzip.compress(asked[9:])
    return [
        b"GET /health HTTP/1.0\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v2/models/a%1b%5b31m%0a HTTP/1.1\r\nHost: localhost\r\n\r\n",
        post("/predict", batch.to_bytes(), "Content-Type: application/octet-stream"),
        post("/predict", text, "Content-Type: application/json"),
        post(infer, asked, *page),
        post(infer, gzip.compress(asked), "Content-Encoding: gzip"),
        post(infer, members, "Content-Encoding: gzip", *page),
        post("/v2/repository/models/zeros/load", load, *page),
        post("/v2/repository/index", b'{"ready": true}', *page),
    ]


def post(path: str, body: bytes, *headers: str) -> bytes:
    """Return a request with a body."""
    token = f"Authorization: Bearer {env.http_token() or ''}"
    size = f"Content-Length: {len(body)}"
    head = [f"POST {path} HTTP/1.0", token, *headers, size, "", ""]
    return "\r\n".join(head).encode("latin-1") + body


def change_http(rng: random.Random, data: bytes) -> bytes:
    """Change a header of a request, or its body and the size that it has."""
    head, _, body = data.partition(b"\r\n\r\n")
    first, *headers = head.decode("latin-1").split("\r\n")
    if rng.random() < 0.5 or not first.startswith("POST"):
        headers.insert(rng.randrange(len(headers) + 1), rng.choice(_HEADERS))
        if rng.random() < 0.3:
            del headers[rng.randrange(len(headers))]
        return "\r\n".join([first, *headers, "", ""]).encode("latin-1") + body
    kept = [one for one in headers if not one.startswith("Content-Length")]
    return post(first.split()[1], _any_body(rng, body), *kept[1:])


def _any_body(rng: random.Random, body: bytes) -> bytes:
    what = rng.random()
    if body[:1] == b"{" and what < 0.3:
        return change_json(rng, body)
    if what < 0.5:
        return json.dumps({"inputs": [{**_INPUT, "shape": any_shape(rng)}]}).encode()
    if what < 0.6:
        deep = rng.choice((10, 900, 5000))
        return b'{"inputs":' + b"[" * deep + b"]" * rng.choice((deep, 0)) + b"}"
    if what < 0.7:  # members, whole and cut off
        data = gzip.compress(body)
        return data + data[: rng.randrange(len(data))] * rng.choice((1, 2, 50))
    if what < 0.75:  # 30 KiB that are 20 MiB
        return gzip.compress(b'{"inputs":[%s[]]}' % (b"[]," * (7 * 2**20)), 1)
    return rng.choice((flip, oversize))(rng, body)


# gRPC, over HTTP/2 (RFC 9113)


def grpc_frames() -> list[bytes]:
    """Return what clients of gRPC send: a message, gzip, none."""
    fields = {**_INPUT, "contents": {"int64_contents": _INPUT["data"]}}
    del fields["data"]
    infer = MESSAGES["ModelInferRequest"](model_name="zeros", inputs=[fields])
    data = infer.SerializeToString()
    live = headers_of("ServerLive")
    return [
        PREFACE + live + frame(0, 1, 1, bytes(5)),
        PREFACE + live,  # the message does not come
        PREFACE + headers_of("ModelInfer") + frame(0, 1, 1, _message(data)),
        PREFACE
        + headers_of("ModelInfer", "gzip")
        + frame(0, 1, 1, _message(gzip.compress(data), is_compressed=True)),
        PREFACE + headers_of("RepositoryModelLoad") + frame(0, 1, 1, _message(b"")),
        PREFACE + frame(6, 0, 0, bytes(8)) + frame(8, 0, 0, b"\0\0\1\0"),
    ]


def _message(data: bytes, *, is_compressed: bool = False) -> bytes:
    return bytes([is_compressed]) + len(data).to_bytes(4, "big") + data


def change_grpc(rng: random.Random, data: bytes) -> bytes:
    """Change what comes behind the preface: bytes, a frame, a message."""
    rest = data[len(PREFACE) :]
    what = rng.random()
    if what < 0.3:
        return PREFACE + rng.choice((flip, oversize))(rng, rest)
    if what < 0.6:
        flags, stream = rng.choice((0, 1, 4, 5, 255)), rng.choice((0, 1, 2, 3, 2**31))
        odd = frame(rng.randrange(12), flags, stream, rng.randbytes(rng.randrange(40)))
        return PREFACE + (odd + rest if what < 0.4 else rest + odd)
    return PREFACE + _any_call(rng)


def _any_call(rng: random.Random) -> bytes:
    methods = ("ModelInfer", "ModelReady", "RepositoryIndex", "None", "")
    data = rng.choice(
        (
            rng.randbytes(20),
            b"\x2a\0" * 200_000,  # empty inputs
            b"\x2a\x80\x80\x80\x80\x10",
            bytes(2**20),
        )
    )
    packed = gzip.compress(data) * rng.choice((1, 1, 2))
    size = rng.choice((len(packed), 0, 1, 2**31, 2**32 - 1))
    message = b"\1" + size.to_bytes(4, "big") + packed
    encoding = rng.choice(("gzip", "deflate", "identity", "x"))
    return headers_of(rng.choice(methods), encoding) + frame(0, 1, 1, message)
