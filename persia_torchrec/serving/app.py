"""The HTTP API of an inference server, an ASGI application.

    GET  /healthz, /v2/health/live      the process answers; to anybody: ok, or as JSON
    GET  /readyz, /v2/health/ready      it can predict; to anybody; likewise
    GET  /health                        {"ready": true, "rows": ..., "model": ...}
    GET  /metrics                       Prometheus
    POST /predict, /predict/M           by Content-Type, what the server is given
                                        decoders of, as of a PersiaBatch
                                        answer: {"predictions": [...]}
    GET  /v2, /v2/models, /v2/models/M, .../ready, .../config, .../stats
    POST /v2/models/M/infer             inference_protocol.py
    POST /v2/repository/index, /v2/repository/models/M/load and /unload

Each path of a model may have ``/versions/V``. An error is ``{"error": text}``: 400 for
what cannot be predicted, 401 without a token, 403 with one of too few rights
(``rpc/http_tokens.py``) and for a page of another site, as
``rpc/browsers.py`` says, 404, 408 for a body that comes too
slowly, 413 for one that is too large, 429 while too many requests are in progress, and
503 while embeddings are away; both with ``Retry-After``.
"""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from persia_torchrec.errors import BatchError, TooLargeError
from persia_torchrec.jit.compiled import report_compilation
from persia_torchrec.logger import printable
from persia_torchrec.parsing.decoding import decoder_of
from persia_torchrec.rpc.browsers import AllowedHosts
from persia_torchrec.rpc.http_tokens import HttpTokens
from persia_torchrec.serving import inference_protocol as protocol
from persia_torchrec.serving.batching import Features, Inputs
from persia_torchrec.serving.descriptions import (
    describe_answer,
    describe_config,
    describe_index,
    describe_model,
    describe_server,
    describe_stats,
)
from persia_torchrec.serving.http_requests import (
    RETRY_AFTER,
    SMALL_BYTES,
    Limits,
    RequestPlaces,
    answer_error,
    error_response,
    json_response,
    receive,
    require_few_values,
    require_shallow,
)
from persia_torchrec.serving.models import (
    Models,
    Prediction,
    ServedModel,
    Version,
    require_signature,
)

logger = logging.getLogger(__name__)
access = logging.getLogger("persia_torchrec.serving.access")

Decode = Callable[[bytes], Features]
"""Reads the body of a request to ``/predict``, or raises BatchError or FrameError."""
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

_NOT_SUPPORTED = {
    "systemsharedmemory": "shared memory",
    "cudasharedmemory": "shared memory",
    "trace": "tracing",
    "logging": "log settings",
}
WHEN_LOST = "persia_torchrec.when_lost"
"""In the scope of a request: a set of what to call when its connection is lost."""
BEGAN_S = "persia_torchrec.began_s"
"""In the scope of a request: when its first byte came, of ``perf_counter()``."""
_IS_PREDICTED = "persia_torchrec.is_predicted"
_HEADER_LENGTH = "Inference-Header-Content-Length"
_INFER = re.compile("/v2/models/(?P<model>[^/]+)(/versions/(?P<version>[^/]+))?/infer")


class Application:
    """The application, for an ASGI server.

    Handlers run in one event loop; predictions in threads, one a request, or, of
    several requests together, in the thread of ``Batcher``.
    """

    def __init__(
        self,
        models: Models,
        limits: Limits,
        tokens: HttpTokens,
        hosts: AllowedHosts,
        decoders: Mapping[str, Decode],
    ) -> None:
        self.models = models
        self._hosts, self._decoders = hosts, decoders
        self.limits = limits
        self._tokens = tokens
        self._places = RequestPlaces(limits.max_requests, models.statistics.in_progress)
        self._pool = ThreadPoolExecutor(2 * limits.max_requests, "predict")
        self._loads = ThreadPoolExecutor(1, "load")
        self._large = threading.Lock()  # one large request is read at a time
        self._starlette = Starlette(routes=self._routes())
        self._answer_infer = self._answering(self._infer, is_open=False)
        with report_compilation():
            require_shallow(b"")  # its loop is ready before a request is

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; those for predictions do not go through all routes."""
        found = None
        if scope["type"] == "http" and scope["method"] == "POST":
            found = _INFER.fullmatch(scope["path"])
        if found is None:
            await self._starlette(scope, receive, send)
        else:
            scope["path_params"] = found.groupdict()
            response = await self._answer_infer(Request(scope, receive))
            await response(scope, receive, send)
        if _IS_PREDICTED in scope and BEGAN_S in scope:
            self.models.statistics.answered("http", scope[BEGAN_S])

    def close(self) -> None:
        """Wait for the predictions in progress. May be called twice."""
        for pool in (self._pool, self._loads):
            pool.shutdown(wait=True)

    def _routes(self) -> list[Route]:
        model = "/v2/models/{model}"
        of_version = model + "/versions/{version}"
        routes: list[Route] = []

        def add(paths: str | tuple[str, ...], method: str, handler: Handler) -> None:
            is_open = handler in (self._live, self._ready)
            for path in (paths,) if isinstance(paths, str) else paths:
                answer = self._answering(handler, is_open=is_open)
                routes.append(Route(path, answer, methods=[method]))

        def both(end: str) -> tuple[str, str]:
            return model + end, of_version + end

        add(("/healthz", "/v2/health/live"), "GET", self._live)
        add(("/readyz", "/v2/health/ready"), "GET", self._ready)
        add("/health", "GET", self._health)
        add("/metrics", "GET", self._metrics)
        if self._decoders:
            add(("/predict", "/predict/{model}"), "POST", self._predict)
        add(("/v2", "/v2/"), "GET", self._server)
        add("/v2/models", "GET", self._models)
        add("/v2/models/stats", "GET", self._stats)
        add(both("/ready"), "GET", self._model_ready)
        add(both("/config"), "GET", self._config)
        add(both("/stats"), "GET", self._stats)
        add(both("/infer"), "POST", self._infer)
        add(both(""), "GET", self._model)
        add("/v2/repository/index", "POST", self._index)
        add("/v2/repository/models/{model}/load", "POST", self._load)
        add("/v2/repository/models/{model}/unload", "POST", self._unload)
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
        answer = self._answering(self._unknown, is_open=False)
        routes.append(Route("/{path:path}", answer, methods=methods))
        return routes

    def _answering(self, handler: Handler, *, is_open: bool) -> Handler:
        """Return what answers a request: by a handler, or with its error."""
        changes = handler in (self._load, self._unload)

        async def answer(request: Request) -> Response:
            start = time.perf_counter()
            try:
                rejected = None if is_open else self._reject(request, changes=changes)
                response = rejected or await handler(request)
            except ClientDisconnect:
                logger.debug("the client of %s disconnected", request.url.path)
                response = Response(status_code=499)
            except Exception as exc:  # noqa: BLE001  # the client gets the error
                response = answer_error(exc)
            self.models.statistics.count("http", str(response.status_code))
            if access.isEnabledFor(logging.INFO):
                access.info(
                    "%s %s %s %d %.1f ms",
                    request.client and request.client.host,
                    request.method,
                    printable(request.url.path, keep=""),
                    response.status_code,
                    (time.perf_counter() - start) * 1e3,
                )
            return response

        return answer

    def _reject(self, request: Request, *, changes: bool) -> Response | None:
        """Return the answer to a client that may not ask, or None."""
        given = request.headers.get("Authorization", "")
        if rejected := self._tokens.why_rejected(given, changes=changes):
            headers = {"WWW-Authenticate": "Bearer"} if rejected.status == 401 else {}
            return error_response(rejected.text, rejected.status, headers)
        why = self._hosts.why_rejected(request.method, request.headers.get)
        return error_response(why, 403) if why else None

    async def _live(self, request: Request) -> Response:
        if _is_of_protocol(request):
            return json_response({"live": True})
        return Response("ok", media_type="text/plain")

    async def _ready(self, request: Request) -> Response:
        health = self.models.health()
        if not health["ready"]:
            told: dict[str, object] = (
                {"ready": False} if _is_of_protocol(request) else {}
            )
            told["error"] = health["error"]
            return json_response(told, 503, RETRY_AFTER)
        if _is_of_protocol(request):
            return json_response({"ready": True})
        return Response("ok", media_type="text/plain")

    async def _health(self, request: Request) -> Response:
        health = self.models.health()
        return json_response(health, 200 if health["ready"] else 503)

    async def _metrics(self, request: Request) -> Response:
        text = self.models.statistics.exposition()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _predict(self, request: Request) -> Response:
        kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind not in self._decoders:
            raise BatchError(
                f"Content-Type must be one of {', '.join(self._decoders)}. "
                f"Received: {kind!r:.100}."
            )
        name, _ = _named(request)
        model = self.models[name] if name else self.models.only()
        body = await receive(request, self.limits)
        is_text = kind == "application/json"

        def parse(_: Version) -> Features:
            if is_text:
                require_few_values(body)
            return self._decoders[kind](bytes(body))

        def encode(_: Version, __: Features, answer: Prediction) -> Response:
            flat = answer.output.reshape(len(answer.output), -1)
            values: list[Any] = (flat[:, 0] if flat.shape[1] == 1 else flat).tolist()
            more = {"degraded": True} if answer.is_degraded else {}
            return json_response({"predictions": values, **more})

        work = _Work(parse, lambda batch: batch, encode, len(body), is_text=is_text)
        return await self._predicted(request, model, None, work)

    async def _infer(self, request: Request) -> Response:
        name, number = _named(request)
        model = self.models[name]
        length = request.headers.get(_HEADER_LENGTH)
        if length is not None and not (length.isascii() and length.isdigit()):
            raise BatchError(
                f"{_HEADER_LENGTH} must be a number. Received: {length!r:.40}."
            )
        body = await receive(request, self.limits)

        def parse(version: Version) -> protocol.InferRequest:
            size = None if length is None else int(length[:20])
            signature = require_signature(version)
            require_few_values(memoryview(body)[:size])
            return protocol.parse_request(memoryview(body), size, signature)

        def encode(
            version: Version, asked: protocol.InferRequest, answer: Prediction
        ) -> Response:
            named = {"model_name": name, "model_version": version.number}
            about = describe_answer(model, version, answer)
            parts, size = protocol.encode_answer(asked, named, about, answer.output)
            if size is None:
                return Response(parts[0], media_type="application/json")
            headers = {_HEADER_LENGTH: str(size)}
            return Response(b"".join(parts), 200, headers, "application/octet-stream")

        work = _Work(parse, lambda asked: asked.batch, encode, len(body))
        return await self._predicted(request, model, number, work)

    async def _server(self, request: Request) -> Response:
        return json_response(describe_server())

    async def _models(self, request: Request) -> Response:
        return json_response({"models": [model.name for model in self.models]})

    async def _model(self, request: Request) -> Response:
        name, number = _named(request)
        return json_response(describe_model(self.models[name], number))

    async def _model_ready(self, request: Request) -> Response:
        name, number = _named(request)
        model = self.models[name]
        with model.using(number):
            pass
        model.require_ready()
        return json_response({"name": name, "ready": True})

    async def _config(self, request: Request) -> Response:
        name, number = _named(request)
        return json_response(describe_config(self.models[name], number))

    async def _stats(self, request: Request) -> Response:
        name, number = _named(request)
        found = describe_stats(self.models, name, number)
        return json_response({"model_stats": found})

    async def _index(self, request: Request) -> Response:
        asked = _decode(await receive(request, self.limits, SMALL_BYTES))
        return json_response(describe_index(self.models, only_ready=bool(asked.ready)))

    async def _load(self, request: Request) -> Response:
        return await self._change(request, self.models[_named(request)[0]].load)

    async def _unload(self, request: Request) -> Response:
        return await self._change(request, self.models[_named(request)[0]].unload)

    async def _change(
        self, request: Request, change: Callable[[str | None], object]
    ) -> Response:
        """Load or unload; the request may name a version, ``parameters.version``."""
        asked = _decode(await receive(request, self.limits, SMALL_BYTES))
        number = protocol.version_of_change(asked.parameters or {})
        found = await self._run(self._loads, lambda: change(number))
        return json_response({} if found is None else {"version": found})

    async def _unknown(self, request: Request) -> Response:
        parts = request.url.path.strip("/").split("/")
        for part in parts:
            if part in _NOT_SUPPORTED:
                return error_response(f"{_NOT_SUPPORTED[part]} is not supported.", 404)
        return error_response(
            "The path must be /predict (POST), /health, /healthz, /readyz, /metrics "
            "(GET), or one below /v2 of the Open Inference Protocol. Received: "
            f"{request.method} {request.url.path!r:.100}.",
            404,
        )

    def _require_samples(self, batch: Features | Inputs) -> None:
        if batch.batch_size > self.limits.max_samples:
            raise TooLargeError(
                f"A batch may have {self.limits.max_samples} samples. Received: "
                f"{batch.batch_size}. Send smaller batches, or raise --max-samples."
            )

    async def _predicted(
        self,
        request: Request,
        model: ServedModel,
        number: str | None,
        work: "_Work[T]",
    ) -> Response:
        """Answer a prediction, unless too many are in progress.

        All of it is done in one thread, or between other requests where that is quick
        and waits for no server: to pass it on takes longer, and threads that wait for
        one another make the slowest answers. One that is predicted with others needs
        no thread, unless it takes long to be read.
        """
        received_s = time.perf_counter()
        place = self._places.take()
        when_lost: set[Callable[[], None]] = request.scope.get(WHEN_LOST, set())
        when_lost.add(place.free)
        try:
            with model.using(number) as version:
                if not version.predictor.is_batching:
                    if version.is_quick and work.num_bytes <= SMALL_BYTES:
                        response = self._do(model, version, work, received_s)
                    else:
                        response = await self._run(
                            self._pool,
                            lambda: self._do(model, version, work, received_s),
                        )
                    request.scope[_IS_PREDICTED] = True
                    return response
                if work.num_bytes <= SMALL_BYTES:
                    asked = self._read(version, work)
                else:
                    asked = await self._run(
                        self._pool, lambda: self._read(version, work)
                    )
                answer = await model.predict_together(
                    version, work.batch_of(asked), is_text=work.is_text
                )
                request.scope[_IS_PREDICTED] = True
                return work.encode(version, asked, answer)
        finally:
            when_lost.discard(place.free)
            place.end()

    def _do(
        self,
        model: ServedModel,
        version: Version,
        work: "_Work[T]",
        received_s: float,
    ) -> Response:
        waited_s = time.perf_counter() - received_s
        self.models.statistics.queued(model.name, version.number, waited_s)
        begin_s = time.thread_time()
        asked = self._read(version, work)
        batch = work.batch_of(asked)
        answer = model.predict(version, batch, is_text=work.is_text)
        response = work.encode(version, asked, answer)
        if work.num_bytes <= SMALL_BYTES:
            version.small_s = time.thread_time() - begin_s
        return response

    def _read(self, version: Version, work: "_Work[T]") -> T:
        if work.num_bytes <= SMALL_BYTES:
            asked = work.parse(version)
        else:
            with self._large:
                asked = work.parse(version)
        self._require_samples(work.batch_of(asked))
        return asked

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, work)


@dataclass(frozen=True)
class _Work(Generic[T]):
    """What a request for predictions takes: it is read, predicted and encoded."""

    parse: Callable[[Version], T]
    batch_of: Callable[[T], Features | Inputs]
    encode: Callable[[Version, T, Prediction], Response]
    num_bytes: int
    is_text: bool = False


class _Asked(msgspec.Struct):
    """What a request to the repository says."""

    parameters: dict[str, Any] | None = None
    ready: bool | None = None


def _decode(body: bytes) -> _Asked:
    require_shallow(body)
    try:
        asked: _Asked = decoder_of(_Asked).decode(body or b"{}")
        return asked
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise BatchError(f"The body must be a JSON object ({exc}).") from exc


def _is_of_protocol(request: Request) -> bool:
    return request.url.path.startswith("/v2/")


def _named(request: Request) -> tuple[str, str | None]:
    """Return the model and the version that a path names."""
    parameters = request.path_params
    return parameters.get("model", ""), parameters.get("version")
