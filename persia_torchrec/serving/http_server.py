"""Predictions over HTTP.

    GET  /healthz   ok, as text, to anybody
    GET  /health    {"ready": true, "rows": ..., "model": ..., "uptime_s": ...}
    POST /predict   application/octet-stream: PersiaBatch.to_bytes()
                    application/json: see below
                    answer: {"predictions": [...]}, one per sample

Each error is JSON too, {"error": its class and text}: 400 for a batch that cannot be
predicted, 503 when embeddings do not answer or too many requests are in progress. A
connection carries one request. With ``PERSIA_HTTP_TOKEN``, without which the server
listens on the loopback only, a request must have the header ``Authorization: Bearer
TOKEN``; else it is answered with 401. A batch as JSON::

    {"id_type_features": {"item": [[7, 8], []], "user": [[3], [4]]},
     "non_id_type_features": [[[0.5, 1.0], [0.0, 2.0]]]}

An ID feature has a list of ids, integers in ``[0, 2**64)``, for each sample; a dense
one, which may be left out, a number or a list of numbers, float32 to the model. Both
are in the model's order: write the text without sorting its keys.
"""

import hmac
import io
import json
import logging
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import numpy as np

from persia_torchrec import env
from persia_torchrec.env import MAX_PORT
from persia_torchrec.errors import (
    BatchError,
    ConfigError,
    FrameError,
    PersiaError,
    ServerError,
)
from persia_torchrec.parsing.decoding import KeyPath, convert
from persia_torchrec.persia.batch import (
    IDTypeFeature,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia_torchrec.rpc.addresses import require_token
from persia_torchrec.serving.predictor import Predictor

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 65536
_MAX_DIGITS = 20
_UNAVAILABLE = HTTPStatus.SERVICE_UNAVAILABLE


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpConfig:
    """Settings of the HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """Port to listen on; 0 takes a free one."""
    max_requests: int = 64
    """Requests that may be in progress; more are rejected with status 503."""
    max_body_bytes: int = 64 * 2**20
    """Bytes that a batch may have; a larger one is rejected with status 413."""
    receive_timeout_s: float = 30.0
    """Seconds within which a request must arrive."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= MAX_PORT:
            raise ConfigError(
                f"port must be in [0, {MAX_PORT}]. Received: {self.port}."
            )
        for name in ("max_requests", "max_body_bytes", "receive_timeout_s"):
            if (value := getattr(self, name)) <= 0:
                raise ConfigError(f"{name} must be > 0. Received: {value}.")


def parse_json_batch(data: bytes) -> PersiaBatch:
    """Read a batch from JSON as at the head of this file, or raise BatchError."""
    try:
        value = json.loads(data, object_pairs_hook=_build_object)
    except (ValueError, RecursionError) as exc:
        raise BatchError(f"A batch must be JSON in UTF-8 ({exc}).") from exc
    batch = convert(value, _JsonBatch, KeyPath("A batch"), BatchError)
    return PersiaBatch(
        [_read_ids(name, ids) for name, ids in batch.id_type_features.items()],
        [_read_dense(*dense) for dense in enumerate(batch.non_id_type_features)],
        requires_grad=False,
    )


class _JsonBatch(msgspec.Struct, forbid_unknown_fields=True):
    id_type_features: dict[str, object]
    non_id_type_features: list[object] = []


def _build_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build an object of JSON in the order of the text; reject duplicate keys."""
    value = dict(pairs)
    if len(value) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"each key must be given once. Received: {key!r} twice")
    return value


def _read_ids(name: str, value: object) -> IDTypeFeature:
    feature = f"Id type feature {name!r}"
    samples = convert(value, list[list[int]], KeyPath(feature), BatchError)
    try:
        return IDTypeFeature(name, [np.array(ids, dtype=np.uint64) for ids in samples])
    except OverflowError as exc:
        raise BatchError(
            f"{feature} must have ids in [0, 2**64). Received: {value!r:.100}."
        ) from exc


def _read_dense(number: int, value: object) -> NonIDTypeFeature:
    name = f"Non-id type feature {number}"
    samples = convert(value, list[float | list[float]], KeyPath(name), BatchError)
    try:
        with np.errstate(over="raise"):
            array = np.array(samples, dtype=np.float32)
    except (ValueError, FloatingPointError) as exc:
        raise BatchError(
            f"{name} must have a number of float32, or a list of as many numbers, for "
            f"each sample. Received: {value!r:.100}."
        ) from exc
    return NonIDTypeFeature(array, f"number {number}")


_READERS: dict[str, Callable[[bytes], PersiaBatch]] = {
    "application/octet-stream": PersiaBatch.from_bytes,
    "application/json": parse_json_batch,
}


class PredictionServer(ThreadingHTTPServer):
    """Answers requests in threads, from the constructor to :meth:`close`."""

    daemon_threads = False
    block_on_close = True

    def __init__(self, predictor: Predictor, config: HttpConfig) -> None:
        self.predictor = predictor
        self.config = config
        self.token = env.http_token()
        if self.token is not None and self.token == env.job_token():
            raise ConfigError(
                "PERSIA_HTTP_TOKEN must be another token than PERSIA_JOB_TOKEN, which "
                "allows more. Received: the same."
            )
        self._free = threading.BoundedSemaphore(config.max_requests)
        try:
            super().__init__((config.host, config.port), _Handler)
        except OSError as exc:
            raise ConfigError(
                f"The server must be able to listen on {config.host}:{config.port}. "
                f"Received: {exc}. Give another --host or --port."
            ) from exc
        host, port = str(self.server_address[0]), self.server_address[1]
        try:
            require_token(host, self.token, "PERSIA_HTTP_TOKEN")
        except ConfigError:
            self.server_close()
            raise
        self.address = f"http://{host}:{port}"
        self._thread = threading.Thread(
            target=self.serve_forever, name="http", kwargs={"poll_interval": 0.1}
        )
        self._thread.start()

    def close(self) -> None:
        """Finish the requests in progress, and accept no more. May be called twice."""
        self.shutdown()
        self._thread.join()
        self.server_close()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether there is a thread for a connection; answer it if not."""
        is_free = self._free.acquire(blocking=False)
        if not is_free:
            message = f"{self.config.max_requests} requests are in progress."
            body = msgspec.json.encode({"error": message})
            head = (
                "HTTP/1.0 503 Service Unavailable\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nRetry-After: 1\r\n\r\n"
            )
            try:
                request.settimeout(0.1)
                request.sendall(head.encode() + body)
            except OSError:
                logger.debug("a rejected connection is gone")
        return is_free

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the failure of a connection; the others continue."""
        exc = sys.exception()
        level = logging.DEBUG if isinstance(exc, ConnectionError) else logging.WARNING
        logger.log(level, "the connection of %s failed: %r", client_address, exc)


class _Incoming(io.RawIOBase):
    """What a connection sends within a time; then reads raise TimeoutError."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what has come, as soon as something has; 0 at the end."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"A request must come within {self._timeout_s:g} s.")
        self._connection.settimeout(left_s)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(self._timeout_s)  # of each write


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: PredictionServer
    server_version = "persia_torchrec"

    def setup(self) -> None:
        """Set the deadline of the request, and of each read and write."""
        super().setup()
        timeout_s = self.server.config.receive_timeout_s
        self.rfile = io.BufferedReader(_Incoming(self.connection, timeout_s))

    def do_GET(self) -> None:
        """Answer a request of either method; an error is an answer too."""
        value: dict[str, object]
        if self.command == "GET" and self.path == "/healthz":
            self._answer(HTTPStatus.OK, "text/plain", b"ok")
            return
        try:
            status, value = self._respond()
        except ConnectionError:
            raise  # there is no client
        except Exception as exc:  # the server continues; the client gets the error
            if not isinstance(exc, PersiaError | TimeoutError):
                logger.exception("a request failed")
            status = next(code for kind, code in _STATUSES if isinstance(exc, kind))
            value = {"error": f"{type(exc).__name__}: {exc}"}
        self._answer(status, "application/json", msgspec.json.encode(value))

    def do_POST(self) -> None:
        """See :meth:`do_GET`."""
        self.do_GET()

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

    def _respond(self) -> tuple[HTTPStatus, dict[str, object]]:
        predictor, token = self.server.predictor, self.server.token
        given = self.headers.get("Authorization", "").encode()
        if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            must = "The header 'Authorization: Bearer TOKEN' must have the server's"
            return HTTPStatus.UNAUTHORIZED, {"error": f"{must} PERSIA_HTTP_TOKEN."}
        match self.command, self.path:
            case "GET", "/health":
                health = predictor.health()
                is_ready = health["ready"]
                return HTTPStatus.OK if is_ready else _UNAVAILABLE, health
            case "POST", "/predict":
                kind = self.headers.get_content_type()
                if kind not in _READERS:
                    raise BatchError(
                        f"Content-Type must be one of {', '.join(_READERS)}. "
                        f"Received: {kind}."
                    )
                batch = _READERS[kind](self._receive_body())
                return HTTPStatus.OK, {"predictions": predictor.predict(batch)}
        error = (
            "The path must be /health (GET) or /predict (POST). "
            f"Received: {self.command} {self.path!r:.100}."
        )
        return HTTPStatus.NOT_FOUND, {"error": error}

    def _receive_body(self) -> bytes:
        """Receive the body, within the limits of size and time."""
        text = self.headers.get("Content-Length", "")
        limit = self.server.config.max_body_bytes
        if not (text.isascii() and text.isdigit()):
            raise BatchError(
                f"A request must have a Content-Length. Received: {text!r:.100}."
            )
        if len(text) > _MAX_DIGITS or int(text) > limit:
            raise _BodyTooLargeError(
                f"A batch may have {limit} bytes. Received: {text:.20}. Send smaller "
                "batches, or raise --max-body-bytes."
            )
        body = bytearray()
        size = int(text)
        while len(body) < size:
            chunk = self.rfile.read1(min(_CHUNK_BYTES, size - len(body)))
            if not chunk:
                raise BatchError(
                    f"A body must have its {size} bytes. Received: {len(body)}."
                )
            body += chunk
        return bytes(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log a request, at DEBUG."""
        logger.debug(format, *args)


class _BodyTooLargeError(BatchError):
    pass


_STATUSES = (
    (_BodyTooLargeError, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    ((BatchError, FrameError), HTTPStatus.BAD_REQUEST),
    (ServerError, _UNAVAILABLE),
    (TimeoutError, HTTPStatus.REQUEST_TIMEOUT),
    (Exception, HTTPStatus.INTERNAL_SERVER_ERROR),
)
