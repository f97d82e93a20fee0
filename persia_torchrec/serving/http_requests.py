"""What an HTTP request may take, how its body is received, and how errors are told."""

import asyncio
import logging
import zlib
from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from persia_torchrec.errors import BatchError, FrameError, PersiaError, ServerError
from persia_torchrec.serving.models import UnknownModelError

logger = logging.getLogger(__name__)

RETRY_AFTER = {"Retry-After": "1"}


class TooLargeError(BatchError):
    """A body, or the number of its samples, is above the limit."""


class TooManyRequestsError(PersiaError):
    """As many requests as are allowed are in progress."""


STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (TooLargeError, 413),
    (UnknownModelError, 404),
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


async def receive(request: Request, limits: Limits) -> bytes:
    """Receive a body within the limits of size and time, and decompress it.

    What comes after it has been rejected is discarded, so that a client which
    reads only when it has sent all gets its answer.
    """
    limit = limits.max_body_bytes
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
    return _decompress(bytes(body), encoding, limit)


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
    """Undo the encoding of a body, as long as what comes is within a limit."""
    if encoding == "identity":
        return body
    if encoding not in ("gzip", "deflate"):
        raise BatchError(
            f"Content-Encoding must be gzip or deflate. Received: {encoding!r:.40}."
        )
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)  # of either
    try:
        data = decoder.decompress(body, limit + 1)
    except zlib.error as exc:
        raise BatchError(f"The body must be {encoding} ({exc}).") from exc
    if len(data) > limit:
        raise TooLargeError(f"A body may have {limit} bytes. Received: more.")
    if not decoder.eof:
        raise BatchError(f"The body must be {encoding} to its end.")
    return data
