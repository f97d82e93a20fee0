"""The Open Inference Protocol over gRPC: ``inference.GRPCInferenceService``.

The messages are those of ``open_inference.proto``. Statuses are those of HTTP:
INVALID_ARGUMENT 400, UNAUTHENTICATED 401, PERMISSION_DENIED 403, NOT_FOUND 404,
RESOURCE_EXHAUSTED 413 and 429, UNAVAILABLE 503.

Probes are answered whatever the other requests do: ServerLive, ServerReady, and Check
of ``grpc.health.v1.Health``, for clients with and without a token.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from persia_torchrec import timeouts
from persia_torchrec.errors import BatchError, ConfigError, TooLargeError
from persia_torchrec.serving import inference_protocol as protocol
from persia_torchrec.serving import open_inference_pb2
from persia_torchrec.serving.descriptions import (
    describe_answer,
    describe_config,
    describe_index,
    describe_model,
    describe_server,
    describe_stats,
)
from persia_torchrec.serving.http_requests import (
    MAX_VALUES,
    SMALL_BYTES,
    RequestPlaces,
    status_of,
)
from persia_torchrec.serving.http_server import HttpConfig
from persia_torchrec.serving.models import (
    Models,
    ServedModel,
    UnknownModelError,
    require_signature,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SERVICE = "inference.GRPCInferenceService"
_HEALTH = "grpc.health.v1.Health"
_SERVING, _NOT_SERVING = 1, 2
_OPEN = ("ServerLive", "ServerReady", "Check")  # to clients without a token
_TAKING_PLACES = ("ModelInfer", "RepositoryModelLoad", "RepositoryModelUnload")

_PARAMETERS = {bool: "bool", str: "string", float: "double"}
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
_TRITON_TYPES = (
    *("INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16"),
    *("INT32", "INT64", "FP16", "FP32", "FP64", "STRING", "BF16"),
)
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}


_AT_ONCE = contextlib.nullcontext()
_MAX_WAITING = 64  # messages; for a further one the oldest is given up
_MAX_CHECKS = 8  # the same of clients that need no token
_LEAST_STREAMS = 100  # at once over one connection, as RFC 9113 advises
_FIELD_COST = 32
_SIZED = 2  # wire type of a field with a size
_VARINTS = -1
_Inner = Mapping[int, Any] | int
_CONTENT = {**dict.fromkeys(range(1, 6), _VARINTS), 6: 4, 7: 8}
_COUNTED: Mapping[int, _Inner] = {5: {3: _VARINTS, 5: _CONTENT}, 7: 0}
"""Of a ModelInferRequest: ``inputs`` with ``shape`` and ``contents``, and raw bytes."""


MESSAGES: dict[str, Any] = {
    name: getattr(open_inference_pb2, name)
    for name in open_inference_pb2.DESCRIPTOR.message_types_by_name
}


class GrpcServer:
    """Answers requests from the constructor to :meth:`close`.

    A request is judged by its metadata, before its message: a client without the token
    sends none that is read. A thread waits for each message, and takes a place when it
    has come. One that does not come is given up after the time limit, or as soon as too
    many others wait. grpcio's server for asyncio, which needs no such thread, ends at a
    method whose name is no UTF-8.

    Attributes:
        port: on which it listens.
    """

    def __init__(self, models: Models, config: HttpConfig) -> None:
        config.require_tls()
        # It logs a traceback for the name of a client's header that is no UTF-8.
        logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
        self._models, self._limits = models, config.limits
        self._tokens = config.tokens()
        self._places = RequestPlaces(config.max_requests, models.statistics.in_progress)
        self._large = threading.Lock()  # one large message is read at a time
        self._waiting = _Waiting(config.receive_timeout_s, _MAX_WAITING)
        checks_s = min(config.receive_timeout_s, timeouts.GRPC_CHECK_S)
        self._checks = _Waiting(checks_s, _MAX_CHECKS)
        # What neither reads a message nor predicts is answered whatever the others do.
        self._own_pools = {
            name: ThreadPoolExecutor(1, name)
            for name in ("ServerLive", "ServerReady", "rejected")
        }
        self._own_pools["Check"] = ThreadPoolExecutor(2 * _MAX_CHECKS, "Check")
        num_threads = 2 * (config.max_requests + _MAX_WAITING)
        self._server = grpc.server(
            ThreadPoolExecutor(num_threads, "grpc"),
            interceptors=[_Judge(self._reject)],
            options=_options(config),
        )
        for service, methods in (
            (_SERVICE, self._methods()),
            (_HEALTH, {"Check": self._check}),
        ):
            handlers = {
                name: grpc.stream_unary_rpc_method_handler(self._answering(name, one))
                for name, one in methods.items()
            }
            self._server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service, handlers),)
            )
        self.port = _listen(self._server, config)
        self._server.start()

    def close(self) -> None:
        """Finish the requests in progress, and accept no more. May be called twice."""
        self._server.stop(timeouts.GRPC_CLOSE_S).wait()
        self._waiting.close()
        self._checks.close()
        for pool in self._own_pools.values():
            pool.shutdown(wait=True)

    def _methods(self) -> Mapping[str, Callable[[Any], Mapping[str, Any]]]:
        models = self._models
        return {
            "ServerLive": lambda _: {"live": True},
            "ServerReady": lambda _: {"ready": bool(models.health()["ready"])},
            "ModelReady": self._model_ready,
            "ServerMetadata": lambda _: describe_server(),
            "ModelMetadata": lambda request: describe_model(*self._found(request)),
            "ModelConfig": self._config,
            "ModelStatistics": self._statistics,
            "ModelInfer": self._infer,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
        }

    def _answering(
        self, name: str, method: Callable[[Any], Mapping[str, Any]]
    ) -> Callable[[Any, Any], bytes]:
        """Return what answers a request: by a method, or with its error."""
        work = _Work(name, method)

        def answer(messages: Iterator[bytes], context: Any) -> bytes:
            start_s = time.perf_counter()
            try:
                response = self._answer(work, messages, context)
            except Exception as exc:  # noqa: BLE001  # the client gets the error
                self._abort(context, *_describe(exc))
            status = "OK" if context.is_active() else "CANCELLED"
            self._models.statistics.count("grpc", status)
            if name == "ModelInfer":  # it ends when the answer is sent
                context.add_callback(
                    partial(self._models.statistics.answered, "grpc", start_s)
                )
            return response

        return self._in_own_pool(name, answer)

    def _answer(self, work: "_Work", messages: Iterator[bytes], context: Any) -> bytes:
        """Answer a request; those that predict or change models need a place."""
        if work.name == "Check":
            return work.answer(self._checks.receive(messages, context))
        if work.name in self._own_pools:
            return work.answer(b"")
        data = self._waiting.receive(messages, context)
        if work.name not in _TAKING_PLACES:
            return work.answer(data)
        place = self._places.take()
        try:
            if not context.add_callback(place.free):
                raise TimeoutError("The client must wait for its answer.")
            reading = self._large if len(data) > SMALL_BYTES else _AT_ONCE
            return work.answer(data, reading)
        finally:
            place.end()

    def _in_own_pool(self, name: str, answer: T) -> T:
        """Have threads of their own answer, where there are such; grpcio finds them."""
        if name in self._own_pools:
            vars(answer)["experimental_thread_pool"] = self._own_pools[name]
        return answer

    def _abort(self, context: Any, code: grpc.StatusCode, text: str) -> NoReturn:
        self._models.statistics.count("grpc", code.name)
        context.abort(code, text)
        raise AssertionError("unreachable")

    def _reject(self, path: str, given: str) -> Any:
        """Return what answers a client that may not ask, by its metadata, or None."""
        name = path.rpartition("/")[2]
        if name in _OPEN:
            return None
        changes = name in ("RepositoryModelLoad", "RepositoryModelUnload")
        rejected = self._tokens.why_rejected(given, changes=changes)
        if rejected is None:
            return None
        code, text = _CODES[rejected.status], rejected.text

        def answer(_: object, context: Any) -> NoReturn:
            self._abort(context, code, text)

        return self._in_own_pool("rejected", answer)

    def _infer(self, request: Any) -> Mapping[str, Any]:
        model, number = self._models[request.model_name], request.model_version or None
        protocol.reject_extensions(_parameters(request.parameters))
        protocol.require_outputs([output.name for output in request.outputs])
        for part in (*request.inputs, *request.outputs):
            protocol.reject_extensions(_parameters(part.parameters))
        with model.using(number) as version:
            signature = require_signature(version)
            batch = protocol.build_inputs(read_tensors(request), signature)
            if batch.batch_size > self._limits.max_samples:
                raise TooLargeError(
                    f"A batch may have {self._limits.max_samples} samples. Received: "
                    f"{batch.batch_size}."
                )
            answer = model.predict(version, batch)
            about = describe_answer(model, version, answer)
            output, number = answer.output, version.number
        return {
            "model_name": model.name,
            "model_version": number,
            "id": request.id,
            "parameters": {
                key: MESSAGES["InferParameter"](
                    **{f"{_PARAMETERS[type(value)]}_param": value}
                )
                for key, value in about.items()
            },
            "outputs": [
                {
                    "name": protocol.OUTPUT,
                    "datatype": "FP32",
                    "shape": list(output.shape),
                }
            ],
            "raw_output_contents": [np.ascontiguousarray(output, "<f4").tobytes()],
        }

    def _model_ready(self, request: Any) -> Mapping[str, Any]:
        model, number = self._found(request)
        with model.using(number):
            return {"ready": bool(model.health()["ready"])}

    def _check(self, request: Any) -> Mapping[str, Any]:
        """Answer a probe of gRPC's own, of the server or of whether it is alive."""
        if request.service == "liveness":
            return {"status": _SERVING}
        if request.service not in ("", "readiness", _SERVICE):
            raise UnknownModelError(
                f"service must be empty, readiness, liveness or {_SERVICE}. Received: "
                f"{request.service!r:.100}."
            )
        is_ready = self._models.health()["ready"]
        return {"status": _SERVING if is_ready else _NOT_SERVING}

    def _config(self, request: Any) -> Mapping[str, Any]:
        config = describe_config(*self._found(request))
        for tensor in (*config["input"], *config["output"]):
            kind = tensor["data_type"].removeprefix("TYPE_")
            tensor["data_type"] = _TRITON_TYPES.index(kind)
        for tensor in config["output"]:
            del tensor["optional"]
        return {"config": config}

    def _statistics(self, request: Any) -> Mapping[str, Any]:
        stats = describe_stats(self._models, request.name, request.version or None)
        return {
            "model_stats": [
                {key: value for key, value in one.items() if key != "batch_stats"}
                for one in stats
            ]
        }

    def _index(self, request: Any) -> Mapping[str, Any]:
        return {"models": describe_index(self._models, only_ready=request.ready)}

    def _load(self, request: Any) -> Mapping[str, Any]:
        self._models[request.model_name].load(_changed(request))
        return {}

    def _unload(self, request: Any) -> Mapping[str, Any]:
        self._models[request.model_name].unload(_changed(request))
        return {}

    def _found(self, request: Any) -> tuple[ServedModel, str | None]:
        """Return the model and the version that a request names."""
        return self._models[request.name], request.version or None


@dataclass(frozen=True)
class _Work:
    """How a method answers: from the bytes of a message to those of its answer."""

    name: str
    method: Callable[[Any], Mapping[str, Any]]

    def answer(
        self, data: bytes, reading: contextlib.AbstractContextManager[Any] = _AT_ONCE
    ) -> bytes:
        """Answer a message; ``reading`` is held while it is read."""
        with reading:
            request = parse_message(self.name, data)
        response: bytes = MESSAGES[f"{self.name}Response"](
            **self.method(request)
        ).SerializeToString()
        return response


def parse_message(name: str, data: bytes) -> Any:
    """Return the request of a method, or raise BatchError."""
    if len(data) > SMALL_BYTES:
        if name != "ModelInfer":
            raise TooLargeError(
                f"A message of {name} may have {SMALL_BYTES} bytes. Received: "
                f"{len(data)}."
            )
        count_values(data)
    try:
        return MESSAGES[f"{name}Request"].FromString(data)
    except DecodeError as exc:
        raise BatchError(f"A request must be a message of {name}.") from exc


class _Judge(grpc.ServerInterceptor):  # type: ignore[misc]  # grpcio has no types
    """Looks at the metadata of a request, before anything waits for its message."""

    def __init__(self, reject: Callable[[str, str], Any]) -> None:
        self._reject = reject

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        given = dict(details.invocation_metadata).get("authorization", "")
        answer = self._reject(details.method, given)
        if answer is None:
            return continuation(details)
        return grpc.stream_unary_rpc_method_handler(answer)


class _Waiting:
    """Requests whose message has not come yet. Any thread may call any method.

    A thread of its own ends those whose time is over, until :meth:`close`.
    """

    def __init__(self, timeout_s: float, most: int) -> None:
        self._timeout_s, self._most = timeout_s, most
        self._lock = threading.Lock()
        self._until_s: dict[Any, float] = {}  # oldest first. guarded by _lock
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=self._end_late_ones, name="grpc receive", daemon=True
        )
        self._thread.start()

    def receive(self, messages: Iterator[bytes], context: Any) -> bytes:
        """Return the message of a request.

        Raises:
            TimeoutError: it has not come in time.
        """
        with self._lock:
            oldest = None
            if len(self._until_s) >= self._most:
                oldest = next(iter(self._until_s))
                del self._until_s[oldest]
            self._until_s[context] = time.monotonic() + self._timeout_s
        if oldest is not None:
            oldest.cancel()
        try:
            data = next(messages, None)
        except grpc.RpcError as exc:
            raise TimeoutError("The message must come within the time limit.") from exc
        finally:
            with self._lock:
                self._until_s.pop(context, None)
        if data is None:
            raise BatchError("A request must have a message. Received: none.")
        return data

    def close(self) -> None:
        """End the thread. May be called twice."""
        self._is_over.set()
        self._thread.join()

    def _end_late_ones(self) -> None:
        while not self._is_over.wait(min(1.0, self._timeout_s / 2)):
            now_s = time.monotonic()
            with self._lock:
                late = [one for one, end_s in self._until_s.items() if now_s > end_s]
            for one in late:
                one.cancel()


def _describe(exc: Exception) -> tuple[grpc.StatusCode, str]:
    """Return status and text of an error; log one that is a bug."""
    status = status_of(exc)
    if status == 500:
        logger.error("a request failed", exc_info=exc)
    code = _CODES.get(status, grpc.StatusCode.INTERNAL)
    return code, f"{type(exc).__name__}: {exc}"


def _options(config: HttpConfig) -> list[tuple[str, int]]:
    """Return the limits of connections and of what comes over one."""
    grace_s = config.receive_timeout_s + timeouts.GRPC_CLOSE_S
    return [
        ("grpc.max_receive_message_length", config.max_body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", max(_LEAST_STREAMS, 2 * config.max_requests)),
        ("grpc.server_handshake_timeout_ms", int(1000 * config.receive_timeout_s)),
        ("grpc.max_connection_idle_ms", int(1000 * timeouts.HTTP_KEEP_ALIVE_S)),
        ("grpc.max_connection_age_ms", int(1000 * timeouts.GRPC_AGE_S)),
        ("grpc.max_connection_age_grace_ms", int(1000 * grace_s)),
    ]


def _listen(server: grpc.Server, config: HttpConfig) -> int:
    """Listen; return the port, or raise ConfigError."""
    host = f"[{config.address}]" if ":" in config.address else config.address
    address = f"{host or '[::]'}:{config.grpc_port or 0}"
    try:
        if config.tls_cert is None or config.tls_key is None:
            return int(server.add_insecure_port(address))
        pair = Path(config.tls_key).read_bytes(), Path(config.tls_cert).read_bytes()
        credentials = grpc.ssl_server_credentials([pair])
        return int(server.add_secure_port(address, credentials))
    except (RuntimeError, OSError) as exc:
        raise ConfigError(
            f"The server must be able to listen on {address}. "
            f"Received: {exc}. Give another --grpc-port."
        ) from exc


def count_values(data: bytes) -> int:
    """Count what memory is taken for as a ModelInferRequest is parsed.

    A field counts as 32 numbers, as it takes as much time.

    Raises:
        BatchError: they are too many, or it is no message.
    """
    return _count_values(memoryview(data), _COUNTED, 0)


def _count_values(part: memoryview, inner: Mapping[int, "_Inner"], so_far: int) -> int:
    """Count the values of a part of a message, and what came before.

    ``inner`` says of fields with a size what is in one: fields, numbers of as many
    bytes, or with 0 nothing that is parsed. Elsewhere each byte may be a value.
    """
    at = 0
    while at < len(part):
        tag, at = _read_varint(part, at)
        so_far += _FIELD_COST
        if tag & 7 == _SIZED:
            size, at = _read_varint(part, at)
            content = part[at : at + size]
            within = inner.get(tag >> 3, 1)
            if isinstance(within, Mapping):
                so_far = _count_values(content, within, so_far)
            elif within == _VARINTS:  # the last byte of each is below 128
                ends = np.frombuffer(content, np.uint8) < 128
                so_far += int(np.count_nonzero(ends))
            elif within:
                so_far += len(content) // within
            at += size
        elif tag & 7 == 0:
            _, at = _read_varint(part, at)
        else:
            at += 8 if tag & 7 == 1 else 4
        if so_far > MAX_VALUES:
            raise TooLargeError(
                f"A request may have {MAX_VALUES} values beside raw_input_contents, "
                f"where a field counts as {_FIELD_COST}. Received: more. Send smaller "
                "batches, or tensors as raw_input_contents."
            )
    return so_far


def _read_varint(part: memoryview, at: int) -> tuple[int, int]:
    """Return a number of a message, and the offset behind it."""
    number = 0
    for shift, byte in zip(range(0, 70, 7), part[at : at + 10], strict=False):
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at + shift // 7 + 1
    raise BatchError("A request must be a message of ModelInfer.")


def _changed(request: Any) -> str | None:
    """Return the version that a request to load or unload names."""
    return protocol.version_of_change(_parameters(request.parameters))


def _parameters(parameters: Any) -> dict[str, Any]:
    return {
        name: getattr(value, value.WhichOneof("parameter_choice") or "string_param")
        for name, value in parameters.items()
    }


def read_tensors(request: Any) -> list[protocol.InputTensor]:
    """Return the inputs of a request, from raw bytes or from its lists."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise BatchError(
            f"raw_input_contents must have the {len(request.inputs)} inputs. "
            f"Received: {len(raw)}."
        )
    tensors = []
    for n, tensor in enumerate(request.inputs):
        about = tensor.name, tensor.datatype, list(tensor.shape)
        if raw:
            array = protocol.read_bytes(*about, raw[n])
        else:
            field = _CONTENTS.get(tensor.datatype)
            if field is None:
                protocol.read_dtype(tensor.name, tensor.datatype)
                raise BatchError(
                    f"Input {tensor.name!r} of {tensor.datatype} must be in "
                    "raw_input_contents."
                )
            array = protocol.read_list(*about, list(getattr(tensor.contents, field)))
        tensors.append(protocol.InputTensor(tensor.name, tensor.datatype, array))
    return tensors
