"""What an HTTP request may take, how its body is received, and how errors are told."""

import asyncio
import logging
import threading
import zlib
from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt
from prometheus_client import Gauge
from starlette.requests import Request
from starlette.responses import Response

from persia_torchrec.errors import (
    BatchError,
    FrameError,
    PersiaError,
    ServerError,
    TooLargeError,
)
from persia_torchrec.jit.compiled import compiled, read_only
from persia_torchrec.serving.models import UnknownModelError
from persia_torchrec.serving.predictor import UnknownVersionError

logger = logging.getLogger(__name__)

RETRY_AFTER = {"Retry-After": "1"}
SMALL_BYTES = 2**18  # a request that is read at once, between other requests

MAX_VALUES = 2**20  # of JSON, which one call reads while no other thread runs
_MAX_TEXT_BYTES = 2**25
_MAX_DEPTH = 64
_GZIP = b"\x1f\x8b"
_MAX_MEMBERS = 10_000
_PIECE_BYTES = 2**16
_LIST, _END_OF_LIST, _OBJECT, _END_OF_OBJECT, _QUOTE, _BACKSLASH, _COMMA, _COLON = (
    b'[]{}"\\,:'
)


class TooManyRequestsError(PersiaError):
    """As many requests as are allowed are in progress."""


class RequestPlaces:
    """What limits how many requests are in progress. Any thread may call any method.

    A request whose client is gone gives its place to another while it runs on; as many
    as there are places may run so.
    """

    def __init__(self, num: int, in_progress: Gauge) -> None:
        self._num, self._in_progress = num, in_progress
        self._lock = threading.Lock()
        self._num_awaited = self._num_running = 0  # guarded by _lock

    def take(self) -> "RequestPlace":
        """Take a place, or raise TooManyRequestsError."""
        with self._lock:
            if self._num_awaited >= self._num or self._num_running >= 2 * self._num:
                raise TooManyRequestsError(f"{self._num} requests are in progress.")
            self._num_awaited += 1
            self._num_running += 1
        self._in_progress.inc()
        return RequestPlace(self)

    def free(self) -> None:
        """Let another request be awaited."""
        with self._lock:
            self._num_awaited -= 1
        self._in_progress.dec()

    def end(self) -> None:
        """Let another request run."""
        with self._lock:
            self._num_running -= 1


class RequestPlace:
    """The place of a request in progress."""

    def __init__(self, places: RequestPlaces) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._is_free = False  # guarded by _lock

    def free(self) -> None:
        """Give the place to another: no client waits. May be called twice."""
        with self._lock:
            was_free, self._is_free = self._is_free, True
        if not was_free:
            self._places.free()

    def end(self) -> None:
        """End the request; called once."""
        self.free()
        self._places.end()


STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (TooLargeError, 413),
    (UnknownModelError, 404),
    (UnknownVersionError, 404),
    (TooManyRequestsError, 429),
    (BatchError, 400),
    (FrameError, 400),
    (ServerError, 503),
    (TimeoutError, 408),
    (Exception, 500),
)
"""The status of each error: of the first class that fits."""


class Limits(msgspec.Struct, frozen=True):
    """What a request may take."""

    max_requests: int
    max_body_bytes: int
    max_samples: int
    receive_timeout_s: float


async def receive(
    request: Request, limits: Limits, max_bytes: int | None = None
) -> bytes:
    """Receive a body within the limits of size and time, and decompress it.

    ``max_bytes`` is a lower limit of the size. What comes after it has been rejected is
    discarded, so that a client which reads only when it has sent all gets its answer.
    """
    limit = min(limits.max_body_bytes, max_bytes or limits.max_body_bytes)
    length = request.headers.get("Content-Length", "")
    body = bytearray()
    is_large = length.isdigit() and _exceeds(length, limit)
    async with asyncio.timeout(limits.receive_timeout_s):
        if not is_large:
            async for chunk in request.stream():
                is_large = len(body) + len(chunk) > limit
                if is_large:
                    break
                body += chunk
    if is_large:
        raise TooLargeError(
            f"A body may have {limit} bytes. Received: {length or 'more'}. Send "
            "smaller batches, or raise --max-body-bytes."
        )
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding == "identity":
        return bytes(body)
    run = asyncio.get_running_loop().run_in_executor  # a few bytes may be many MiB
    return await run(None, _decompress, bytes(body), encoding, limit)


def require_shallow(text: bytes | memoryview) -> None:
    """Raise BatchError for JSON of lists and objects that are nested too deeply.

    A reader that is at the end of the stack has none for what else runs meanwhile, as
    finalizers do.
    """
    _require_shallow(_scan(read_only(np.frombuffer(text, np.uint8)))[0])


def require_few_values(text: bytes | memoryview) -> None:
    """Raise TooLargeError for JSON of too many values, before memory is taken for them.

    A list counts as four numbers, and a key as eight, as they take as much time. What
    is nested too deeply is a BatchError, as of :func:`require_shallow`.
    """
    is_large, depth = len(text) > _MAX_TEXT_BYTES, 0
    if not is_large:
        depth, cost = _scan(read_only(np.frombuffer(text, np.uint8)))
        is_large = cost > MAX_VALUES
    if is_large:
        raise TooLargeError(
            f"A request as JSON may have {_MAX_TEXT_BYTES} bytes and {MAX_VALUES} "
            "values, where a list counts as four and a key as eight. Received: "
            f"{len(text)} bytes. Send smaller batches, or tensors as bytes."
        )
    _require_shallow(depth)


def _require_shallow(depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise BatchError(
            f"JSON may nest lists and objects {_MAX_DEPTH} deep. Received: more."
        )


@compiled
def _scan(text_N: npt.NDArray[np.uint8]) -> tuple[int, int]:
    """Return how deep JSON nests lists and objects, and what its values cost."""
    depth = deepest = cost = 0
    is_text = is_escaped = False
    for n in range(len(text_N)):
        one = text_N[n]
        if is_text:
            is_text = is_escaped or one != _QUOTE
            is_escaped = one == _BACKSLASH and not is_escaped
        elif one == _QUOTE:
            is_text = True
        elif one in (_LIST, _OBJECT):
            depth, cost = depth + 1, cost + 4
            deepest = max(deepest, depth)
        elif one in (_END_OF_LIST, _END_OF_OBJECT):
            depth -= 1
        elif one == _COMMA:
            cost += 1
        elif one == _COLON:
            cost += 8
    return deepest, cost


def status_of(exc: Exception) -> int:
    """Return the HTTP status of an error."""
    return next(status for kind, status in STATUSES if isinstance(exc, kind))


def answer_error(exc: Exception) -> Response:
    """Return the answer of an error; log one that is a bug."""
    status = status_of(exc)
    if status == 500:
        logger.error("a request failed", exc_info=exc)
    text = str(exc) or "The body must come within the time limit."
    headers = RETRY_AFTER if status in (429, 503) else {}
    if status == 408:
        headers = {"Connection": "close"}
    return error_response(f"{type(exc).__name__}: {text}", status, headers)


def error_response(
    text: str, status: int, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an answer with a text, ``{"error": text}``."""
    return json_response({"error": text}, status, headers)


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an answer with a value as JSON."""
    data = msgspec.json.encode(value)
    return Response(data, status, dict(headers or {}), "application/json")


def _exceeds(length: str, limit: int) -> bool:
    return len(length) > len(str(limit)) or int(length) > limit


def _decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Undo the encoding of a body, as long as what comes is within a limit.

    gzip may have several members, one after the other; what else follows is ignored.
    """
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise BatchError(
            f"Content-Encoding must be gzip or deflate. Received: {encoding!r:.40}."
        )
    data, at, num_members = bytearray(), 0, 0
    while not num_members or (encoding != "deflate" and body[at : at + 2] == _GZIP):
        num_members += 1
        if num_members > _MAX_MEMBERS:
            raise TooLargeError(
                f"A body may have {_MAX_MEMBERS} members of gzip. Received: more."
            )
        decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)  # of either
        while not decoder.eof and at < len(body):
            piece = body[at : at + _PIECE_BYTES]  # a decoder copies what is left of it
            try:
                data += decoder.decompress(piece, limit + 1 - len(data))
            except zlib.error as exc:
                raise BatchError(f"The body must be {encoding} ({exc}).") from exc
            if len(data) > limit:
                raise TooLargeError(f"A body may have {limit} bytes. Received: more.")
            at += len(piece) - len(decoder.unused_data)
        if not decoder.eof:
            raise BatchError(f"The body must be {encoding} to its end.")
    return bytes(data)
