"""Predictions over HTTP.

    GET  /health    {"ready": true, "rows": ..., "model": ..., "uptime_s": ...}
    POST /predict   application/octet-stream: PersiaBatch.to_bytes()
                    application/json: see json_batch.py
                    answer: {"predictions": [...]}, one a sample

Each error is JSON too, {"error": its class and text}: 400 for a batch that cannot be
predicted, 503 when embeddings do not answer, or when as many requests as allowed are
under way. A connection carries one request.
"""

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from persia_torchrec.embedding.data import PersiaBatch
from persia_torchrec.errors import (
    BatchError,
    ConfigError,
    FrameError,
    PersiaError,
    ServerError,
)
from persia_torchrec.serving.json_batch import batch_of_json
from persia_torchrec.serving.predictor import Predictor

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 65536

_READERS: dict[str, Callable[[bytes], PersiaBatch]] = {
    "application/octet-stream": PersiaBatch.from_bytes,
    "application/json": batch_of_json,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpConfig:
    """Settings of the HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = 0
    """Port to listen on; 0 takes a free one."""

    max_requests: int = 64
    """Requests that may be under way; more are refused with status 503."""

    max_body_bytes: int = 64 * 2**20
    """Bytes that a batch may have; a larger one is refused with status 413."""

    receive_timeout_s: float = 30.0
    """Seconds in which a request must have come."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port must be in [0, 65535]. Received: {self.port}.")
        for name in ("max_requests", "max_body_bytes", "receive_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"{name} must be > 0. Received: {getattr(self, name)}."
                )


class PredictionServer:
    """Answers requests in threads, from the constructor to :meth:`close`.

    Args:
        predictor: predicts.
        config: see :class:`HttpConfig`.

    Attributes:
        address: as ``"http://127.0.0.1:8080"``.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, predictor: Predictor, config: HttpConfig) -> None:
        try:
            self._http = _HttpServer(predictor, config)
        except OSError as exc:
            raise ConfigError(
                f"The server must be able to listen on {config.host}:{config.port}. "
                f"Received: {exc}. Give another --host or --port."
            ) from exc
        host, port = self._http.server_address[:2]
        self.address = f"http://{host!s}:{port}"
        self._thread = threading.Thread(
            target=self._http.serve_forever, name="http", kwargs={"poll_interval": 0.1}
        )
        self._thread.start()

    def close(self) -> None:
        """Take no more requests; those under way are answered. May be called twice."""
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class _HttpServer(ThreadingHTTPServer):
    """Knows what its handlers need, and bounds their number."""

    daemon_threads = False
    block_on_close = True

    def __init__(self, predictor: Predictor, config: HttpConfig) -> None:
        self.predictor = predictor
        self.config = config
        self._free = threading.BoundedSemaphore(config.max_requests)
        super().__init__((config.host, config.port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread, if one is free."""
        if not self._free.acquire(blocking=False):
            _refuse(request, self.config.max_requests)
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what went wrong with a connection; others go on."""
        exc = sys.exception()
        logger.warning("the connection of %s failed: %r", client_address, exc)


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: _HttpServer
    server_version = "persia_torchrec"

    def setup(self) -> None:
        """Begin: no read or write of this connection waits for longer than allowed."""
        super().setup()
        timeout_s = self.server.config.receive_timeout_s
        self.connection.settimeout(timeout_s)
        self._deadline = time.monotonic() + timeout_s

    def do_GET(self) -> None:
        """Answer GET /health."""
        if self.path != "/health":
            self._answer_unknown()
            return
        health = self.server.predictor.health()
        is_ready = bool(health["ready"])
        status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        self._answer(status, health)

    def do_POST(self) -> None:
        """Answer POST /predict."""
        if self.path != "/predict":
            self._answer_unknown()
            return
        try:
            status, answer = HTTPStatus.OK, self._predict()
        except Exception as exc:  # the server lives on; the client is told
            if not isinstance(exc, PersiaError | TimeoutError):
                logger.exception("a request failed")
            status = _status_of(exc)
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        self._answer(status, answer)

    def _predict(self) -> dict[str, object]:
        kind = self.headers.get_content_type()
        read = _READERS.get(kind)
        if read is None:
            raise BatchError(
                f"Content-Type must be one of {', '.join(_READERS)}. Received: {kind}."
            )
        batch = read(self._body())
        return {"predictions": self.server.predictor.predict(batch)}

    def _body(self) -> bytes:
        """Receive the body, within the limits of size and time."""
        text = self.headers.get("Content-Length", "")
        limit = self.server.config.max_body_bytes
        if not (text.isascii() and text.isdigit()):
            raise BatchError(
                f"A request must tell its Content-Length. Received: {text!r:.100}."
            )
        if int(text[:20]) > limit:
            raise _BodyTooLargeError(
                f"A batch may have {limit} bytes. Received: {text[:20]}. Send smaller "
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
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"Only {len(body)} of {size} bytes came in time.")
        return bytes(body)

    def _answer_unknown(self) -> None:
        error = (
            "The path must be /health (GET) or /predict (POST). "
            f"Received: {self.command} {self.path!r:.100}."
        )
        self._answer(HTTPStatus.NOT_FOUND, {"error": error})

    def _answer(self, status: HTTPStatus, value: dict[str, object]) -> None:
        body = json.dumps(value, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log a request for debugging only."""
        logger.debug(format, *args)


class _BodyTooLargeError(BatchError):
    """A batch has more bytes than allowed."""


def _status_of(exc: Exception) -> HTTPStatus:
    match exc:
        case _BodyTooLargeError():
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        case BatchError() | FrameError():
            return HTTPStatus.BAD_REQUEST
        case ServerError():
            return HTTPStatus.SERVICE_UNAVAILABLE
        case TimeoutError():
            return HTTPStatus.REQUEST_TIMEOUT
        case _:
            return HTTPStatus.INTERNAL_SERVER_ERROR


def _refuse(request: Any, max_requests: int) -> None:
    """Tell a connection that there is no thread for it."""
    body = json.dumps({"error": f"{max_requests} requests are under way."}).encode()
    head = (
        f"HTTP/1.0 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: 1\r\n\r\n"
    )
    try:
        request.settimeout(0.1)
        request.sendall(head.encode() + body)
    except OSError:
        logger.debug("a refused connection is gone")
