"""A batch as bytes, and back.

The bytes are a frame of fixed width, a JSON header that says what follows, and the
arrays themselves, little-endian, each at a multiple of 8 and padded with zeros::

    offset
    0         magic "PTRB"
    4         version, uint32
    8         size of the header, uint64
    16        header, JSON
    then      for each id type feature: ids, uint64 (L,)
                                        lengths, int32 (B,), unless all are 1 by class
              for each non-id type feature, then for each label: the array
              meta, if there is any

Writing copies every array once; reading copies none: arrays are views of the bytes,
and can be written to only where the bytes can. Equal batches give equal bytes. Bytes
from outside are trusted in nothing: every size is compared with what is there before
it is used, and what is there must be used up to the last byte.

Dimension key:
    B: samples
    L: ids of a feature in the batch, over all samples
"""

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from persia_torchrec.embedding.data import (
    DTYPES,
    BatchRest,
    IDFeature,
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NdarrayDataBase,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia_torchrec.errors import BatchError, FrameError

MAGIC = b"PTRB"
VERSION = 1

_FRAME = struct.Struct("<4sIQ")
_ALIGNMENT = 8
_UINT64, _INT32 = np.dtype(np.uint64), np.dtype(np.int32)
_INT64_MAX = 2**63 - 1
_JSON_NAMES = {str: "a string", bool: "a boolean", list: "an array"}
_DTYPE_OF = {dtype.name: dtype for dtype in DTYPES}

Array = npt.NDArray[np.generic]
Fields = Mapping[str, object]
"""One JSON object of the header."""

T = TypeVar("T", str, bool, list[Any])
B = TypeVar("B")
S = TypeVar("S", bound=np.generic)


def encode_batch(batch: PersiaBatch) -> bytes:
    """Return the batch as bytes; equal batches give equal bytes.

    Example:
        >>> feature = IDTypeFeatureWithSingleID("item", np.arange(3, dtype=np.uint64))
        >>> batch = PersiaBatch([feature], requires_grad=False)
        >>> decode_batch(encode_batch(batch)).id_type_features[0].ids.tolist()
        [0, 1, 2]
    """
    return _encode(batch, batch.id_type_features)


def encode_rest(batch: PersiaBatch | BatchRest) -> bytes:
    """Return the batch without its ids as bytes."""
    return _encode(batch, ())


def _encode(batch: PersiaBatch | BatchRest, features: Sequence[IDFeature]) -> bytes:
    header = {
        "batch_id": batch.batch_id,
        "batch_size": batch.batch_size,
        "ids": [_describe_ids(f) for f in features],
        "labels": [_describe_dense(label) for label in batch.labels],
        "meta_bytes": None if batch.meta is None else len(batch.meta),
        "dense": [_describe_dense(f) for f in batch.non_id_type_features],
        "requires_grad": batch.requires_grad,
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    arrays: list[Array] = []
    for feature in features:
        arrays.append(feature.ids)
        if isinstance(feature, IDTypeFeature):
            arrays.append(feature.lengths)
    arrays += [dense.data for dense in (*batch.non_id_type_features, *batch.labels)]

    sections: list[bytes | memoryview] = [_FRAME.pack(MAGIC, VERSION, len(text)), text]
    sections += [_little_endian(array).data for array in arrays]
    sections.append(batch.meta or b"")
    return b"".join(part for section in sections for part in _padded(section))


def decode_batch(data: bytes | bytearray | memoryview) -> PersiaBatch:
    """Read what :func:`encode_batch` wrote.

    Args:
        data: kept, not copied: the batch's arrays are views of it.

    Raises:
        FrameError: the bytes are no batch of this version, are cut off or too many,
            or describe a batch that cannot be.
    """
    return _decode(data, _read_batch)


def decode_rest(data: bytes | bytearray | memoryview) -> BatchRest:
    """Read what :func:`encode_rest` wrote.

    Args:
        data: kept, not copied: the arrays are views of it.

    Raises:
        FrameError: as :func:`decode_batch` does.
    """
    return _decode(data, _read_rest)


def _decode(
    data: bytes | bytearray | memoryview, read: Callable[["_Reader", Fields], B]
) -> B:
    reader = _Reader(memoryview(data).cast("B"))
    header = _read_header(reader)
    try:
        batch = read(reader, header)
    except BatchError as exc:
        raise FrameError(f"The bytes of a batch must hold a valid one: {exc}") from exc
    reader.expect_end()
    return batch


class _Reader:
    """Takes one section after the other, never beyond the end."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._offset = 0

    def take(self, num_bytes: int, what: str) -> memoryview:
        """Return the next section, and step over it and its padding."""
        start, end = self._offset, self._offset + num_bytes
        padded = end + _padding(num_bytes)
        if padded > len(self._data):
            raise FrameError(
                f"The bytes of a batch must not end within {what}. "
                f"Received: {len(self._data)} bytes."
            )
        if any(self._data[end:padded]):
            raise FrameError(f"The padding of {what} must be zeros.")
        self._offset = padded
        return self._data[start:end]

    def take_array(
        self, dtype: np.dtype[S], shape: tuple[int, ...], what: str
    ) -> npt.NDArray[S]:
        """Return the next section as an array."""
        section = self.take(math.prod(shape) * dtype.itemsize, what)
        if dtype == np.bool_ and (np.frombuffer(section, dtype=np.uint8) > 1).any():
            raise FrameError(f"The booleans of {what} must be 0 or 1.")
        try:
            array = np.frombuffer(section, dtype=dtype.newbyteorder("<"))
            return array.astype(dtype, copy=False).reshape(shape)
        except ValueError as exc:
            raise FrameError(f"{what} must have a shape for NumPy ({exc}).") from exc

    def expect_end(self) -> None:
        """Refuse bytes beyond the last section."""
        if self._offset != len(self._data):
            raise FrameError(
                f"The bytes of a batch must end with it, after {self._offset}. "
                f"Received: {len(self._data)} bytes."
            )


def _read_header(reader: _Reader) -> Fields:
    magic, version, header_bytes = _FRAME.unpack(reader.take(_FRAME.size, "the frame"))
    if magic != MAGIC:
        raise FrameError(
            f"The bytes of a batch must start with {MAGIC!r}. Received: {magic!r}."
        )
    if version != VERSION:
        raise FrameError(
            f"The bytes of a batch must be of version {VERSION}. Received: {version}. "
            "Run the same release in all processes of a job."
        )
    text = bytes(reader.take(header_bytes, "the header"))
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise FrameError(f"The header of a batch must be JSON ({exc}).") from exc
    return _as_object(header, "all")


def _read_batch(reader: _Reader, header: Fields) -> PersiaBatch:
    batch_size = _count(header, "batch_size")
    features = [_read_ids(reader, part, batch_size) for part in _parts(header, "ids")]
    rest = _read_dense_parts(reader, header)
    batch = PersiaBatch(
        features,
        rest.non_id_type_features,
        rest.labels,
        batch_size=batch_size,
        requires_grad=rest.requires_grad,
        meta=rest.meta,
    )
    batch.batch_id = rest.batch_id
    return batch


def _read_rest(reader: _Reader, header: Fields) -> BatchRest:
    if _parts(header, "ids"):
        raise FrameError("The rest of a batch must be without ids.")
    return _read_dense_parts(reader, header)


def _read_dense_parts(reader: _Reader, header: Fields) -> BatchRest:
    """Read all but the ids; the arguments are read in the order of the sections."""
    has_id = header.get("batch_id") is not None
    return BatchRest(
        batch_size=_count(header, "batch_size"),
        batch_id=_count(header, "batch_id") if has_id else None,
        requires_grad=_value(header, "requires_grad", bool),
        non_id_type_features=tuple(
            NonIDTypeFeature(*_read_dense(reader, part))
            for part in _parts(header, "dense")
        ),
        labels=tuple(
            Label(*_read_dense(reader, part)) for part in _parts(header, "labels")
        ),
        meta=_read_meta(reader, header),
    )


def _read_ids(reader: _Reader, fields: Fields, batch_size: int) -> IDFeature:
    name = _value(fields, "name", str)
    what = f"id type feature {name!r}"
    ids = reader.take_array(_UINT64, (_count(fields, "num_ids"),), what)
    if _value(fields, "single_id", bool):
        return IDTypeFeatureWithSingleID(name, ids)
    lengths = reader.take_array(_INT32, (batch_size,), f"the lengths of {what}")
    return IDTypeFeature.from_flat(name, ids, lengths)


def _read_dense(reader: _Reader, fields: Fields) -> tuple[Array, str]:
    name = _value(fields, "name", str)
    dtype = _value(fields, "dtype", str)
    shape = [_as_count(n, "a length") for n in _value(fields, "shape", list)]
    if dtype not in _DTYPE_OF:
        raise FrameError(
            f"The dtype of {name!r} must be one of {', '.join(_DTYPE_OF)}. "
            f"Received: {dtype!r}."
        )
    return reader.take_array(_DTYPE_OF[dtype], tuple(shape), repr(name)), name


def _read_meta(reader: _Reader, header: Fields) -> bytes | None:
    if header.get("meta_bytes") is None:
        return None
    return bytes(reader.take(_count(header, "meta_bytes"), "meta"))


def _parts(header: Fields, key: str) -> list[Fields]:
    return [_as_object(part, key) for part in _value(header, key, list)]


def _value(fields: Fields, key: str, kind: type[T]) -> T:
    value = fields.get(key)
    if not isinstance(value, kind):
        raise _misfit(key, _JSON_NAMES[kind], value)
    return value


def _count(fields: Fields, key: str) -> int:
    return _as_count(fields.get(key), key)


def _as_count(value: object, what: str) -> int:
    if type(value) is not int or not 0 <= value <= _INT64_MAX:  # true is no count
        raise _misfit(what, "a count", value)
    return value


def _as_object(value: object, what: str) -> Fields:
    if not isinstance(value, dict):
        raise _misfit(what, "an object", value)
    return value


def _misfit(what: str, must: str, value: object) -> FrameError:
    # Only the type is shown: a value from outside may be nested too deep to print.
    return FrameError(
        f"In the header of a batch, {what} must be {must}. "
        f"Received: {type(value).__name__}."
    )


def _describe_ids(feature: IDFeature) -> dict[str, object]:
    return {
        "name": feature.name,
        "num_ids": len(feature.ids),
        "single_id": isinstance(feature, IDTypeFeatureWithSingleID),
    }


def _describe_dense(dense: NdarrayDataBase) -> dict[str, object]:
    return {
        "name": dense.name,
        "dtype": dense.data.dtype.name,
        "shape": dense.data.shape,
    }


def _little_endian(array: Array) -> Array:
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _padded(section: bytes | memoryview) -> tuple[bytes | memoryview, bytes]:
    return section, bytes(_padding(memoryview(section).nbytes))


def _padding(num_bytes: int) -> int:
    return -num_bytes % _ALIGNMENT
