"""The Open Inference Protocol over gRPC: ``inference.GRPCInferenceService``.

The messages are described here by name, number and type, as the protocol has them, and
built at the start: no generated code. Statuses are those of HTTP: INVALID_ARGUMENT 400,
UNAUTHENTICATED 401, PERMISSION_DENIED 403, NOT_FOUND 404, RESOURCE_EXHAUSTED 413 and
429, UNAVAILABLE 503.
"""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from persia_torchrec import timeouts
from persia_torchrec.errors import BatchError, ConfigError
from persia_torchrec.serving import inference_protocol as protocol
from persia_torchrec.serving.descriptions import (
    describe_answer,
    describe_config,
    describe_index,
    describe_model,
    describe_server,
    describe_stats,
)
from persia_torchrec.serving.http_requests import TooLargeError, status_of
from persia_torchrec.serving.http_server import HttpConfig
from persia_torchrec.serving.models import Models, ServedModel, require_signature

logger = logging.getLogger(__name__)

_PACKAGE, _SERVICE = "inference", "inference.GRPCInferenceService"

# A field is NAME TYPE NUMBER: a scalar, a message, [] a list, {} a map from strings.
_MESSAGES = """
ServerLiveRequest
ServerLiveResponse        live bool 1
ServerReadyRequest
ServerReadyResponse       ready bool 1
ModelReadyRequest         name string 1, version string 2
ModelReadyResponse        ready bool 1
ServerMetadataRequest
ServerMetadataResponse    name string 1, version string 2, extensions []string 3
ModelMetadataRequest      name string 1, version string 2
TensorMetadata            name string 1, datatype string 2, shape []int64 3
ModelMetadataResponse     name string 1, versions []string 2, platform string 3, \
inputs []TensorMetadata 4, outputs []TensorMetadata 5
InferParameter            bool_param bool 1, int64_param int64 2, \
string_param string 3, double_param double 4, uint64_param uint64 5
InferTensorContents       bool_contents []bool 1, int_contents []int32 2, \
int64_contents []int64 3, uint_contents []uint32 4, uint64_contents []uint64 5, \
fp32_contents []float 6, fp64_contents []double 7, bytes_contents []bytes 8
InferInputTensor          name string 1, datatype string 2, shape []int64 3, \
parameters {}InferParameter 4, contents InferTensorContents 5
InferRequestedOutputTensor  name string 1, parameters {}InferParameter 2
InferOutputTensor         name string 1, datatype string 2, shape []int64 3, \
parameters {}InferParameter 4, contents InferTensorContents 5
ModelInferRequest         model_name string 1, model_version string 2, id string 3, \
parameters {}InferParameter 4, inputs []InferInputTensor 5, \
outputs []InferRequestedOutputTensor 6, raw_input_contents []bytes 7
ModelInferResponse        model_name string 1, model_version string 2, id string 3, \
parameters {}InferParameter 4, outputs []InferOutputTensor 5, \
raw_output_contents []bytes 6
ModelConfigRequest        name string 1, version string 2
ModelInput                name string 1, data_type int32 2, dims []int64 4, \
optional bool 8
ModelOutput               name string 1, data_type int32 2, dims []int64 3
ModelConfig               name string 1, platform string 2, max_batch_size int32 4, \
input []ModelInput 5, output []ModelOutput 6
ModelConfigResponse       config ModelConfig 1
StatisticDuration         count uint64 1, ns uint64 2
InferStatistics           success StatisticDuration 1, fail StatisticDuration 2, \
queue StatisticDuration 3, compute_input StatisticDuration 4, \
compute_infer StatisticDuration 5, compute_output StatisticDuration 6, \
cache_hit StatisticDuration 7, cache_miss StatisticDuration 8
ModelStatisticsRequest    name string 1, version string 2
ModelStatistics           name string 1, version string 2, last_inference uint64 3, \
inference_count uint64 4, execution_count uint64 5, inference_stats InferStatistics 6
ModelStatisticsResponse   model_stats []ModelStatistics 1
RepositoryIndexRequest    repository_name string 1, ready bool 2
ModelIndex                name string 1, version string 2, state string 3, \
reason string 4
RepositoryIndexResponse   models []ModelIndex 1
ModelRepositoryParameter  bool_param bool 1, int64_param int64 2, \
string_param string 3, bytes_param bytes 4
RepositoryModelLoadRequest  repository_name string 1, model_name string 2, \
parameters {}ModelRepositoryParameter 3
RepositoryModelLoadResponse
RepositoryModelUnloadRequest  repository_name string 1, model_name string 2, \
parameters {}ModelRepositoryParameter 3
RepositoryModelUnloadResponse
"""

_PARAMETERS = {bool: "bool", str: "string", float: "double"}
_ONE_OF = {"InferParameter", "ModelRepositoryParameter"}
_FIELD = descriptor_pb2.FieldDescriptorProto
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


def _build_messages() -> dict[str, Any]:
    """Return a class for each message, by name."""
    file = descriptor_pb2.FileDescriptorProto(
        name="persia_torchrec/open_inference.proto", package=_PACKAGE, syntax="proto3"
    )
    for line in _MESSAGES.strip().splitlines():
        name, _, text = line.partition(" ")
        message = file.message_type.add(name=name)
        if name in _ONE_OF:
            message.oneof_decl.add(name="parameter_choice")
        for part in filter(None, map(str.strip, text.split(","))):
            _add_field(message, *part.split())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [message.name for message in file.message_type]
    found = {n: pool.FindMessageTypeByName(f"{_PACKAGE}.{n}") for n in names}
    return {n: message_factory.GetMessageClass(one) for n, one in found.items()}


def _add_field(message: Any, name: str, kind: str, number: str) -> None:
    field = message.field.add(name=name, number=int(number))
    field.label = _FIELD.LABEL_REPEATED if kind[0] in "[{" else _FIELD.LABEL_OPTIONAL
    if kind.startswith("{}"):
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add_field(entry, "key", "string", "1")
        _add_field(entry, "value", kind[2:], "2")
        kind = f"{message.name}.{entry.name}"
    kind = kind.removeprefix("[]")
    scalar = getattr(_FIELD, f"TYPE_{kind.upper()}", None)
    if scalar is None:
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        field.type = scalar
    if message.name in _ONE_OF:
        field.oneof_index = 0


MESSAGES = _build_messages()


class GrpcServer:
    """Answers requests from the constructor to :meth:`close`.

    Attributes:
        port: on which it listens.
    """

    def __init__(self, models: Models, config: HttpConfig) -> None:
        config.require_tls()
        self._models, self._limits = models, config.limits
        self._roles = config.roles()
        limit = config.max_body_bytes
        self._server = grpc.server(
            ThreadPoolExecutor(config.max_requests, "grpc"),
            maximum_concurrent_rpcs=config.max_requests,
            options=[
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ],
        )
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._answering(name, method),
                request_deserializer=MESSAGES[f"{name}Request"].FromString,
                response_serializer=MESSAGES[f"{name}Response"].SerializeToString,
            )
            for name, method in self._methods().items()
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, handlers),)
        )
        self.port = self._listen(config)
        self._server.start()

    def close(self) -> None:
        """Finish the requests in progress, and accept no more. May be called twice."""
        self._server.stop(timeouts.GRPC_CLOSE_S).wait()

    def _listen(self, config: HttpConfig) -> int:
        host = f"[{config.address}]" if ":" in config.address else config.address
        address = f"{host or '[::]'}:{config.grpc_port or 0}"
        try:
            if config.tls_cert is None or config.tls_key is None:
                return int(self._server.add_insecure_port(address))
            pair = Path(config.tls_key).read_bytes(), Path(config.tls_cert).read_bytes()
            credentials = grpc.ssl_server_credentials([pair])
            return int(self._server.add_secure_port(address, credentials))
        except (RuntimeError, OSError) as exc:
            raise ConfigError(
                f"The server must be able to listen on {address}. "
                f"Received: {exc}. Give another --grpc-port."
            ) from exc

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
    ) -> Callable[[Any, Any], Any]:
        """Return what answers a request: by a method, or with its error."""
        is_open = name in ("ServerLive", "ServerReady")
        changes = name in ("RepositoryModelLoad", "RepositoryModelUnload")

        def answer(request: Any, context: Any) -> Any:
            asked = type(request).DESCRIPTOR.name.removesuffix("Request")
            kind = MESSAGES[f"{asked}Response"]
            given = dict(context.invocation_metadata()).get("authorization", "")
            if not is_open and (
                rejected := self._roles.why_rejected(given, changes=changes)
            ):
                code = _CODES[rejected.status]
                self._models.statistics.count("grpc", code.name)
                context.abort(code, rejected.text)
            try:
                response = kind(**method(request))
            except Exception as exc:
                status = status_of(exc)
                if status == 500:
                    logger.error("a request failed", exc_info=exc)
                code = _CODES.get(status, grpc.StatusCode.INTERNAL)
                self._models.statistics.count("grpc", code.name)
                context.abort(code, f"{type(exc).__name__}: {exc}")
            else:
                self._models.statistics.count("grpc", "OK")
                return response

        return answer

    def _infer(self, request: Any) -> Mapping[str, Any]:
        model, number = self._models[request.model_name], request.model_version or None
        protocol.reject_extensions(_parameters(request.parameters))
        protocol.require_outputs([output.name for output in request.outputs])
        for part in (*request.inputs, *request.outputs):
            protocol.reject_extensions(_parameters(part.parameters))
        with model.using(number) as version:
            signature = require_signature(version)
            batch = protocol.build_inputs(_read_tensors(request), signature)
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


def _changed(request: Any) -> str | None:
    """Return the version that a request to load or unload names."""
    if "version" not in request.parameters:
        return None
    return str(request.parameters["version"].string_param)


def _parameters(parameters: Any) -> dict[str, Any]:
    return {
        name: getattr(value, value.WhichOneof("parameter_choice") or "string_param")
        for name, value in parameters.items()
    }


def _read_tensors(request: Any) -> list[protocol.InputTensor]:
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
