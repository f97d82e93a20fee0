"""Requests and answers of the Open Inference Protocol, version 2.

    <slot>            INT64 or UINT64   ids of all samples, one sample after the other
    <slot>.lengths    INT32  [B]        how many each sample has; may be left out where
                                        each has as many: (B,) or (B, k)
    <dense feature>   its own dtype     [B, ...]
    predictions       FP32   [B, ...]   the answer

Over HTTP a tensor is a JSON list, or bytes behind the JSON: little-endian, row by row,
in the order of the inputs (the extension of binary tensors). Over gRPC it is in
``contents`` or in ``raw_input_contents``.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Array
from persia_torchrec.checkpoint.signature import ModelSignature
from persia_torchrec.errors import BatchError, TooLargeError
from persia_torchrec.lookup.bags import MAX_BATCH_SIZE, Bags, JaggedIds, check_bags
from persia_torchrec.parsing.decoding import decoder_of, shown
from persia_torchrec.serving.batching import Inputs, require_dense

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
OUTPUT = "predictions"
LENGTHS = ".lengths"

_UINT64 = np.dtype(np.uint64)
_NAMES = {str(dtype): name for name, dtype in DTYPES.items()}
_KINDS: dict[str, type] = {"b": bool, "u": int, "i": int, "f": float}
_NOT_SUPPORTED = {
    "shared_memory_region": "shared memory",
    "sequence_id": "sequences",
    "sequence_start": "sequences",
    "sequence_end": "sequences",
    "classification": "classification",
    "priority": "priority",
    "timeout": "a time limit in the queue",
}
_MAX_ELEMENTS = 2**31
_MAX_WHOLE = 2.0**53  # below it a float has each integer
_MAX_DIMS = 32  # of which NumPy allows 64, and 32 before version 2
_BINARY = {"binary_data_size"}


class InputTensor(NamedTuple):
    """A tensor of a request."""

    name: str
    datatype: str
    array: Array


class InferRequest(NamedTuple):
    """A request.

    Attributes:
        batch: in the order of the model, checked.
        id: to be repeated in the answer; empty if the caller gave none.
        is_binary: whether the answer has its tensor as bytes behind the JSON.
    """

    batch: Inputs
    id: str = ""
    is_binary: bool = False


# What is optional may be null: clients write all fields of a class.


class _Input(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: Any = msgspec.UNSET


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] | None = None


class _Request(msgspec.Struct):
    inputs: list[_Input]
    id: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[_Output] | None = None


def parse_request(
    body: memoryview, json_bytes: int | None, signature: ModelSignature
) -> InferRequest:
    """Read a request over HTTP.

    Args:
        body: JSON, and tensors behind it.
        json_bytes: size of the JSON, by the header ``Inference-Header-Content-Length``;
            None is the whole body.
        signature: the inputs of the model.

    Raises:
        BatchError: it is no valid request, or not of this model.
    """
    size = len(body) if json_bytes is None else json_bytes
    if not 0 <= size <= len(body):
        raise BatchError(
            "Inference-Header-Content-Length must be at most the size of the body, "
            f"{len(body)}. Received: {size}."
        )
    try:
        request = decoder_of(_Request).decode(body[:size])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise BatchError(f"A request must follow the protocol ({exc}).") from exc
    asked, outputs = request.parameters or {}, request.outputs or []
    reject_extensions(asked)
    tensors, rest = [], body[size:]
    for tensor in request.inputs:
        parameters = tensor.parameters or {}
        if parameters.keys() != _BINARY:
            reject_extensions(parameters)
        num_bytes = parameters.get("binary_data_size")
        if num_bytes is None:
            array = read_list(tensor.name, tensor.datatype, tensor.shape, tensor.data)
        else:
            if not isinstance(num_bytes, int) or not 0 <= num_bytes <= len(rest):
                raise BatchError(
                    f"Input {tensor.name!r} must have binary_data_size within the "
                    f"{len(rest)} bytes that are left. "
                    f"Received: {shown(num_bytes, 40)}."
                )
            part, rest = rest[:num_bytes], rest[num_bytes:]
            array = read_bytes(tensor.name, tensor.datatype, tensor.shape, part)
        tensors.append(InputTensor(tensor.name, tensor.datatype, array))
    if len(rest):
        raise BatchError(
            f"The tensors of a request must fill its body. Received: {len(rest)} more "
            "bytes."
        )
    require_outputs([output.name for output in outputs])
    is_binary = bool(asked.get("binary_data_output", False))
    for output in outputs:
        parameters = output.parameters or {}
        reject_extensions(parameters)
        is_binary = bool(parameters.get("binary_data", is_binary))
    inputs = build_inputs(tensors, signature)
    return InferRequest(inputs, request.id or "", is_binary)


def encode_answer(
    request: InferRequest,
    model: Mapping[str, str],
    parameters: Mapping[str, Any],
    output: npt.NDArray[np.float32],
) -> tuple[list[bytes], int | None]:
    """Return the body of an answer over HTTP, and the size of its JSON if more follows.

    ``model`` has ``model_name`` and ``model_version``.
    """
    tensor: dict[str, Any] = {
        "name": OUTPUT,
        "datatype": "FP32",
        "shape": list(output.shape),
    }
    if request.is_binary:
        tensor["parameters"] = {"binary_data_size": output.nbytes}
    else:
        tensor["data"] = output.reshape(-1).tolist()
    value: dict[str, Any] = {**model, "parameters": parameters, "outputs": [tensor]}
    if request.id:
        value["id"] = request.id
    head = msgspec.json.encode(value)
    if not request.is_binary:
        return [head], None
    return [head, np.ascontiguousarray(output, "<f4").tobytes()], len(head)


def describe_inputs(signature: ModelSignature) -> list[dict[str, Any]]:
    """Return name, datatype and shape of each input; -1 is a size that varies."""
    inputs = []
    for slot in signature.slots:
        inputs.append({"name": slot, "datatype": "INT64", "shape": [-1]})
        lengths = slot + LENGTHS
        inputs.append({"name": lengths, "datatype": "INT32", "shape": [-1]})
    for dense in signature.dense:
        datatype = _NAMES[dense.dtype]
        inputs.append(
            {"name": dense.name, "datatype": datatype, "shape": [-1, *dense.shape]}
        )
    return inputs


def describe_output(signature: ModelSignature) -> dict[str, Any]:
    """Return name, datatype and shape of the output."""
    shape = [-1, *(signature.output or ())]
    return {"name": OUTPUT, "datatype": "FP32", "shape": shape}


def reject_extensions(parameters: Mapping[str, Any]) -> None:
    """Raise BatchError for parameters of an extension that is not supported."""
    for name, extension in _NOT_SUPPORTED.items():
        if parameters.get(name):
            raise BatchError(
                f"The parameter {name!r} must not be given: {extension} is not "
                "supported. Send tensors in the request, as JSON or binary."
            )


def version_of_change(parameters: Mapping[str, Any]) -> str | None:
    """Return the version that a request to load or unload a model names.

    Raises:
        BatchError: it names what cannot be changed by a request.
    """
    for name, value in parameters.items():
        if value is not None and name not in ("version", "unload_dependents"):
            raise BatchError(
                f"The parameter {name!r:.100} must not be given: a model is loaded as "
                "its checkpoint has it. Received: another configuration, or a file."
            )
    number = parameters.get("version")
    if not isinstance(number, str | None):
        raise BatchError(f"version must be text. Received: {shown(number, 40)}.")
    return number


def require_outputs(names: Sequence[str]) -> None:
    """Check the outputs that a request names."""
    for name in names:
        if name != OUTPUT:
            raise BatchError(
                f"An output must be {OUTPUT!r}, the only one. Received: {name!r:.100}."
            )


def read_dtype(name: str, datatype: str) -> np.dtype[Any]:
    """Return the dtype of an input, or raise BatchError."""
    dtype = DTYPES.get(datatype)
    if dtype is None:
        raise BatchError(
            f"Input {name!r} must have one of the datatypes {', '.join(DTYPES)}. "
            f"Received: {datatype!r:.40}."
        )
    return dtype


def read_list(name: str, datatype: str, shape: Sequence[int], data: Any) -> Array:
    """Return a tensor that is a list, flat or nested, or raise BatchError."""
    dtype, size = read_dtype(name, datatype), _num_elements(name, shape)
    while isinstance(data, list) and data and isinstance(data[0], list):
        if not all(isinstance(part, list) for part in data):
            raise BatchError(f"Input {name!r} must have lists of one depth.")
        data = list(chain.from_iterable(data))
    kind = _KINDS[dtype.kind]
    try:
        try:
            values = msgspec.convert(data, list[kind])  # type: ignore[valid-type]
        except msgspec.ValidationError:
            if kind is not int:
                raise
            values = msgspec.convert(_whole_numbers(name, data), list[int])
        with np.errstate(over="raise"):
            array = np.array(values, dtype=dtype)
    except (msgspec.ValidationError, OverflowError, FloatingPointError) as exc:
        raise BatchError(
            f"Input {name!r} must have numbers of {datatype} ({exc})."
        ) from exc
    if len(array) != size:
        raise BatchError(
            f"Input {name!r} of shape {list(shape)} must have {size} numbers. "
            f"Received: {len(array)}."
        )
    return array.reshape(shape)


def _whole_numbers(name: str, data: Any) -> Any:
    """Return integers for floats without a fraction, as clients write that know no int.

    Raises:
        BatchError: one is so large that the client has rounded it.
    """
    if not isinstance(data, list):
        return data
    largest = max((abs(one) for one in data if isinstance(one, float)), default=0.0)
    if largest >= _MAX_WHOLE:
        raise BatchError(
            f"Input {name!r} must have integers, or floats below 2**53. Received: "
            f"{largest!r}, which the client has rounded. Send the tensor as bytes, or "
            "by gRPC."
        )
    return [
        int(one) if isinstance(one, float) and one.is_integer() else one for one in data
    ]


def read_bytes(
    name: str, datatype: str, shape: Sequence[int], data: memoryview | bytes
) -> Array:
    """Return a tensor that is bytes, or raise BatchError; it shares their memory."""
    dtype, size = read_dtype(name, datatype), _num_elements(name, shape)
    if len(data) != size * dtype.itemsize:
        raise BatchError(
            f"Input {name!r} of {datatype} and shape {list(shape)} must have "
            f"{size * dtype.itemsize} bytes. Received: {len(data)}."
        )
    if datatype == "BOOL" and max(bytes(data), default=0) > 1:
        raise BatchError(f"Input {name!r} must have bytes 0 or 1, as it is BOOL.")
    array = np.frombuffer(data, dtype)
    return array if len(shape) == 1 else array.reshape(shape)


def _num_elements(name: str, shape: Sequence[int]) -> int:
    if len(shape) == 1 and 0 <= shape[0] <= _MAX_ELEMENTS:  # most are
        return shape[0]
    # Of an empty array, too, NumPy multiplies the sizes that are not 0.
    if (
        not 1 <= len(shape) <= _MAX_DIMS
        or min(shape) < 0
        or math.prod(filter(None, shape)) > _MAX_ELEMENTS
    ):
        raise BatchError(
            f"Input {name!r} must have a shape of 1 to {_MAX_DIMS} sizes >= 0, the "
            f"batch first, of {_MAX_ELEMENTS} numbers at most. Received: "
            f"{shown(list(shape))}."
        )
    return math.prod(shape)


def build_inputs(tensors: Sequence[InputTensor], signature: ModelSignature) -> Inputs:
    """Return the inputs of a model; those of a request are found by name.

    Raises:
        BatchError: an input is missing, unknown or there twice, or ids and lengths do
            not fit.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    _require_inputs(tensors, by_name, signature)
    has_lengths = len(by_name) > len(signature.slots) + len(signature.dense)
    batch_size = _num_samples(by_name, signature, has_lengths=has_lengths)
    dense = [_native(by_name[due.name].array) for due in signature.dense]
    for due, data in zip(signature.dense, dense, strict=True):
        require_dense(due, data)
    ids, lengths, ones = [], [], None
    for slot in signature.slots:
        given = by_name[slot]
        own = by_name.get(slot + LENGTHS) if has_lengths else None
        ids.append(flat := _flat_ids(given))
        if own is None and len(flat) == len(given.array):
            if ones is None or len(ones) != len(flat):
                ones = np.ones(len(flat), dtype=np.int32)
            lengths.append(ones)
        else:
            lengths.append(_read_lengths(given, own, flat))
    starts = np.zeros(len(ids) + 1, dtype=np.int64)
    np.cumsum(list(map(len, ids)), out=starts[1:])
    jagged = JaggedIds(
        signature.slots,
        {slot: k for k, slot in enumerate(signature.slots)},
        np.concatenate(ids),
        np.concatenate(lengths),
        starts,
        np.arange(len(ids) + 1) * batch_size,
    )
    return Inputs(jagged, tuple(dense), batch_size, signature)


def _require_inputs(
    tensors: Sequence[InputTensor],
    by_name: Mapping[str, InputTensor],
    signature: ModelSignature,
) -> None:
    """Check the names of the inputs."""
    if len(by_name) < len(tensors):
        raise BatchError("Each input of a request must occur once.")
    required = [*signature.slots, *(dense.name for dense in signature.dense)]
    missing = [name for name in required if name not in by_name]
    unknown = by_name.keys() - set(required)
    if unknown:
        unknown -= {slot + LENGTHS for slot in signature.slots}
    if missing or unknown:
        raise BatchError(
            f"A request must have the inputs {required}. Received: "
            f"{f'none for {missing}' if missing else ''}"
            f"{'; ' if missing and unknown else ''}"
            f"{f'unknown {sorted(unknown)}' if unknown else ''}."
        )


def _num_samples(
    by_name: Mapping[str, InputTensor], signature: ModelSignature, *, has_lengths: bool
) -> int:
    """Return the size of the batch, before anything of that size is made.

    Raises:
        BatchError: it is too large, or inputs differ.
    """
    names = [*signature.slots, *(one.name for one in signature.dense)]
    of_samples = names
    if has_lengths:
        given = [slot + LENGTHS for slot in signature.slots]
        of_samples = [own if own in by_name else own[: -len(LENGTHS)] for own in given]
        of_samples += names[len(given) :]
    sizes = [len(by_name[name].array) for name in of_samples]
    batch_size = sizes[0]
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        error = TooLargeError if batch_size else BatchError
        raise error(
            f"A batch must have 1 to {MAX_BATCH_SIZE} samples. Received: {batch_size}."
        )
    if sizes.count(batch_size) < len(sizes):
        at = next(n for n, size in enumerate(sizes) if size != batch_size)
        raise BatchError(
            f"All inputs of a request must have its {batch_size} samples. "
            f"Received: {sizes[at]} in {names[at]!r}."
        )
    return batch_size


def _flat_ids(given: InputTensor) -> npt.NDArray[np.uint64]:
    if given.datatype not in ("INT64", "UINT64"):
        raise BatchError(
            f"Input {given.name!r} must be INT64 or UINT64, as it has ids. Received: "
            f"{given.datatype}."
        )
    flat = _native(given.array)
    flat = flat if flat.ndim == 1 else flat.reshape(-1)
    return flat if flat.dtype is _UINT64 else flat.view(_UINT64)


def _read_lengths(
    ids: InputTensor, lengths: InputTensor | None, flat: npt.NDArray[np.uint64]
) -> npt.NDArray[np.int32]:
    """Return how many ids each sample has."""
    if lengths is None:
        num, each = ids.array.shape[0], ids.array.shape[1:]
        return np.full(num, math.prod(each), dtype=np.int32)
    if lengths.datatype != "INT32" or lengths.array.ndim != 1:
        raise BatchError(
            f"Input {lengths.name!r} must be INT32 of shape [batch]. Received: "
            f"{lengths.datatype} of {list(lengths.array.shape)}."
        )
    found: npt.NDArray[np.int32] = _native(lengths.array)
    check_bags({ids.name: Bags(flat, found)})
    return found


def _native(array: Array) -> Array:
    """Return an array in the byte order of this machine, contiguous."""
    if array.dtype.isnative and array.flags.c_contiguous:
        return array
    return np.ascontiguousarray(array, array.dtype.newbyteorder("="))
